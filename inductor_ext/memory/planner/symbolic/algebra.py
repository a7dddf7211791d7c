"""Builds short expressions for offsets: sums, maxima and rounded values of non-negative sizes."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import sympy  # type: ignore[import-untyped]

from inductor_ext.memory.planner.interval import round_up
from inductor_ext.memory.planner.symbolic.stacking import Stacking

MakeMax = Callable[[Sequence[sympy.Expr]], sympy.Expr]
"""Builds the maximum of two or more expressions."""

MakeAlign = Callable[[sympy.Expr, int], sympy.Expr]
"""Builds an expression in bytes, rounded up to a multiple of a power of two."""


_TRIALS = 6
"""Number of random values of the atoms at which a claim is tested before a proof is attempted."""


class _Atom:
    """An element of a `_Sum`: a non-negative expression, compared by identity."""

    __slots__ = ("expression", "leaves", "multiple", "nodes", "number", "options", "values")

    def __init__(
        self,
        expression: sympy.Expr,
        number: int,
        values: tuple[int, ...],
        multiple: int = 1,
        nodes: int = 1,
        options: tuple[_Sum, ...] = (),
    ) -> None:
        self.expression = expression
        self.number = number
        self.values = values
        """Its value in each trial."""
        self.multiple = multiple
        """A power of two that divides it, for all values of the symbols."""
        self.nodes = nodes
        """Its length when printed."""
        self.options = options
        """The arguments of a maximum; the unrounded value of a rounded value. The atom is never
        less than any of them."""
        self.leaves = 0 if options else 1 << number
        """The numbers of the atoms without options that it consists of, as bits."""
        for option in options:
            self.leaves |= _leaves(option.terms)


_ZEROS = (0,) * _TRIALS


class _Sum:
    """A sum of atoms, each with a positive integer coefficient."""

    __slots__ = ("_key", "terms", "values")

    def __init__(self, terms: dict[_Atom, int], values: tuple[int, ...] | None = None) -> None:
        self.terms = terms
        self._key: _Key | None = None
        if values is None:
            values = _ZEROS
            for atom, factor in terms.items():
                values = tuple([v + factor * w for v, w in zip(values, atom.values, strict=True)])
        self.values = values
        """Its value in each trial."""

    @property
    def key(self) -> _Key:
        """Equal for equal sums."""
        if self._key is None:
            self._key = frozenset(self.terms.items())
        return self._key

    @property
    def multiple(self) -> int:
        """A power of two that divides it; 0, which every power of two divides, for an empty sum."""
        return min((_power_of_two(a.multiple * c) for a, c in self.terms.items()), default=0)

    @property
    def nodes(self) -> int:
        """Its length when printed."""
        return sum(atom.nodes + 1 for atom in self.terms)

    def divisible(self, alignment: int) -> bool:
        return not self.multiple % alignment


_Key = frozenset[tuple[_Atom, int]]


def _leaves(atoms: Iterable[_Atom]) -> int:
    leaves = 0
    for atom in atoms:
        leaves |= atom.leaves
    return leaves


def _power_of_two(value: int) -> int:
    return value & -value


def _plus(a: _Sum, b: _Sum) -> _Sum:
    terms = dict(a.terms)
    for atom, factor in b.terms.items():
        terms[atom] = terms.get(atom, 0) + factor
    return _Sum(terms, tuple(map(operator.add, a.values, b.values)))


def _minus(a: _Sum, part: Mapping[_Atom, int]) -> _Sum:
    """Return the sum without a part of it."""
    terms = {atom: factor - part.get(atom, 0) for atom, factor in a.terms.items()}
    return _Sum({atom: factor for atom, factor in terms.items() if factor})


_PROOF_STEPS = 32
"""Maximum number of replacements in a proof that one sum is never less than another."""


def _is_never_below(a: _Sum, b: _Sum, budget: list[int]) -> bool:
    """Whether a >= b, for all values of the atoms, can be proven within the budget.

    A claim that fails in a trial is rejected without a proof.

    Atoms are non-negative, so it suffices that no coefficient of b is greater than its coefficient
    in a. Otherwise, a maximum or a rounded value in a can be replaced by something that is not
    greater, a maximum in b must be covered option by option, and a rounded value in b is covered by
    a rounded value in a whose unrounded value is never less.
    """
    if not all(map(operator.ge, a.values, b.values)):
        return False
    excess = [atom for atom, factor in b.terms.items() if factor > a.terms.get(atom, 0)]
    if not excess:
        return True
    if _leaves(excess) & ~_leaves(a.terms):
        return False
    for atom in excess:
        if len(atom.options) > 1 and b.terms[atom] == 1:
            rest = _minus(b, {atom: 1})
            for option in atom.options:
                budget[0] -= 1
                if budget[0] < 0 or not _is_never_below(a, _plus(rest, option), budget):
                    return False
            return True
        for other, factor in a.terms.items():
            if (
                len(other.options) == len(atom.options) == 1
                and factor > b.terms.get(other, 0)
                and other.multiple >= atom.multiple
            ):
                budget[0] -= 1
                if budget[0] < 0:
                    return False
                if _is_never_below(other.options[0], atom.options[0], budget):
                    return _is_never_below(_minus(a, {other: 1}), _minus(b, {atom: 1}), budget)
    for atom, factor in a.terms.items():
        if atom.options and factor > b.terms.get(atom, 0):
            rest = _minus(a, {atom: 1})
            for option in atom.options:
                budget[0] -= 1
                if budget[0] < 0:
                    return False
                if _is_never_below(_plus(rest, option), b, budget):
                    return True
    return False


class Algebra:
    """Builds the expressions of one arena's offsets, short and with shared subexpressions.

    Sums are flattened, and equal sums are one object. A maximum loses arguments that are provably
    never the largest, and terms common to all its arguments are moved out of it. A value that is
    visibly a multiple of the alignment is not rounded. A maximum that would print longer than
    `NODES` gets a name, a symbol in `definitions`, so that no expression grows with the depth of
    the stack.

    Args:
        sizes: all sizes, in bytes. Proofs rely on them being non-negative.
        make_max: builds the maximum of expressions.
        make_align: builds a rounded-up expression.
        prefix: prefix of the names in `definitions`.
    """

    NODES = 40
    """Length, in operands, above which a maximum gets a name."""

    TERMS = 16
    """A size that has more terms than this when expanded is not expanded."""

    def __init__(
        self,
        sizes: Iterable[sympy.Expr | int],
        make_max: MakeMax,
        make_align: MakeAlign,
        prefix: str,
    ) -> None:
        self.definitions: list[tuple[sympy.Symbol, sympy.Expr]] = []
        """Symbols and their values, in terms of the sizes' symbols and earlier definitions."""
        self._make_max = make_max
        self._make_align = make_align
        self._prefix = prefix
        self._atoms: dict[object, _Atom] = {}
        self._expressions: dict[_Key, sympy.Expr] = {}
        self._ends: dict[frozenset[_Key], _Sum] = {}
        # Values of very different magnitude, so that a trial refutes most false claims.
        self._trials = random.Random(0)
        self._one = self._atoms[sympy.S.One] = _Atom(sympy.S.One, 0, (1,) * _TRIALS)
        self._sizes: dict[sympy.Expr, _Sum] = {}
        expressions = [e for e in dict.fromkeys(map(sympy.sympify, sizes)) if not e.is_Integer]
        # A size with one term, such as 4*u0, implies that u0 is non-negative, even if sympy does
        # not know.
        self._nonnegative = {
            monomial
            for factor, monomial in (e.as_coeff_Mul() for e in expressions)
            if factor.is_Integer and factor > 0
        }
        self.zero = _Sum({})

    def size(self, expression: sympy.Expr | int, alignment: int) -> _Sum:
        """Return a size, rounded up to its alignment."""
        if isinstance(expression, int) or expression.is_Integer:
            value = round_up(int(expression), alignment)
            return _Sum({self._one: value}) if value else self.zero
        if expression not in self._sizes:
            self._sizes[expression] = self._polynomial(expression)
        return self.align(self._sizes[expression], alignment)

    def align(self, value: _Sum, alignment: int) -> _Sum:
        """Return the value rounded up; terms that are visible multiples are not rounded."""
        if value.divisible(alignment):
            return value
        terms: dict[_Atom, int] = {}
        rest: dict[_Atom, int] = {}
        for atom, factor in value.terms.items():
            (rest if atom.multiple * factor % alignment else terms)[atom] = factor
        if list(rest) == [self._one]:
            terms[self._one] = round_up(rest[self._one], alignment)
            return _Sum(terms)
        inner = _Sum(rest)
        key = (inner.key, alignment)
        atom = self._atoms.get(key) or self._atom(
            self._make_align(self.expression(inner), alignment),
            key,
            alignment,
            inner.nodes + 1,
            (inner,),
            tuple(round_up(trial, alignment) for trial in inner.values),
        )
        terms[atom] = terms.get(atom, 0) + 1
        return _Sum(terms)

    def maximum(self, values: Sequence[_Sum]) -> _Sum:
        """Return the maximum of values; 0 for none."""
        distinct = {value.key: value for value in values}
        key = frozenset(distinct)
        if key not in self._ends:
            self._ends[key] = self._maximum(list(distinct.values()))
        return self._ends[key]

    def expression(self, value: _Sum) -> sympy.Expr:
        """Return the sum as a sympy expression; the same object for an equal sum."""
        expression = self._expressions.get(value.key)
        if expression is None:
            terms = sorted(value.terms.items(), key=lambda term: term[0].number)
            expression = sympy.Add(*[factor * atom.expression for atom, factor in terms])
            self._expressions[value.key] = expression
        return expression

    def stack(
        self,
        stacking: Stacking,
        sizes: Sequence[sympy.Expr | int],
        alignments: Sequence[int],
    ) -> tuple[list[sympy.Expr], sympy.Expr]:
        """Return each buffer's offset and the arena's size, in bytes, for sizes in bytes."""
        offsets = [self.zero] * len(sizes)
        ends = [self.zero] * len(sizes)
        for index in stacking.order:
            lower = self.maximum([ends[other] for other in stacking.below[index]])
            offsets[index] = self.align(lower, alignments[index])
            ends[index] = _plus(offsets[index], self.size(sizes[index], alignments[index]))
        carrying = {other for lower in stacking.below for other in lower}
        top = self.maximum([end for index, end in enumerate(ends) if index not in carrying])
        return [self.expression(offset) for offset in offsets], self.expression(top)

    def used_definitions(self, expressions: Iterable[sympy.Expr]) -> list[sympy.Symbol]:
        """Return the names that expressions depend on, in the order of `definitions`."""
        needed = {symbol for expression in expressions for symbol in expression.free_symbols}
        names = []
        for symbol, expression in reversed(self.definitions):
            if symbol in needed:
                needed |= expression.free_symbols
                names.append(symbol)
        return names[::-1]

    def _atom(
        self,
        expression: sympy.Expr,
        key: object = None,
        multiple: int = 1,
        nodes: int = 1,
        options: tuple[_Sum, ...] = (),
        values: tuple[int, ...] = (),
    ) -> _Atom:
        key = expression if key is None else key
        if key not in self._atoms:
            values = values or tuple(
                self._trials.getrandbits(self._trials.randrange(2, 40)) for _ in range(_TRIALS)
            )
            self._atoms[key] = _Atom(expression, len(self._atoms), values, multiple, nodes, options)
        return self._atoms[key]

    def _polynomial(self, expression: sympy.Expr) -> _Sum:
        """Return a size as a sum of atoms, or as one atom if its terms might be negative."""
        expanded = sympy.expand(expression) if expression.has(sympy.Add) else expression
        parts = [term.as_coeff_Mul() for term in sympy.Add.make_args(expanded)]
        if len(parts) <= self.TERMS and all(
            factor.is_Integer
            and factor > 0
            and (monomial.is_nonnegative or monomial in self._nonnegative)
            for factor, monomial in parts
        ):
            return _Sum({self._atom(monomial): int(factor) for factor, monomial in parts})
        multiple = 1
        if all(factor.is_Integer for factor, _ in parts):
            multiple = _power_of_two(math.gcd(*(int(factor) for factor, _ in parts)))
        return _Sum({self._atom(expression, multiple=multiple): 1})

    def _maximum(self, values: list[_Sum]) -> _Sum:
        values = self._expand(_drop_dominated(values))
        if len(values) < 2:
            return values[0] if values else self.zero
        common = dict(values[0].terms)
        for value in values[1:]:
            common = {
                atom: min(factor, value.terms[atom])
                for atom, factor in common.items()
                if atom in value.terms
            }
        if common:
            rest = self.maximum([_minus(value, common) for value in values])
            return _plus(_Sum(common), rest)
        key = frozenset(value.key for value in values)
        atom = self._atoms.get(key)
        if atom is None:
            expression = self._make_max([self.expression(value) for value in values])
            nodes = 1 + sum(value.nodes for value in values)
            if nodes > self.NODES:
                name = f"{self._prefix}_part{len(self.definitions)}"
                symbol = sympy.Symbol(name, integer=True, nonnegative=True)
                self.definitions.append((symbol, expression))
                expression, nodes = symbol, 1
            multiple = min(value.multiple for value in values if value.multiple)
            trials = tuple(map(max, *(value.values for value in values)))
            atom = self._atom(expression, key, multiple, nodes, tuple(values), trials)
        return _Sum({atom: 1})

    def _expand(self, values: list[_Sum]) -> list[_Sum]:
        """Return the arguments of a maximum, with sums that contain a maximum expanded if the
        result is not longer. Some of the expanded arguments are often never the largest."""
        flat: dict[object, _Sum] = {}
        for value in values:
            inner = [atom for atom in value.terms if len(atom.options) > 1 and atom.nodes > 1]
            if len(inner) == 1 and value.terms[inner[0]] == 1:
                rest = _minus(value, {inner[0]: 1})
                options = [_plus(rest, option) for option in inner[0].options]
                flat.update((option.key, option) for option in options)
            else:
                flat[value.key] = value
        if flat.keys() == {value.key for value in values}:
            return values
        expanded = _drop_dominated(list(flat.values()))
        return expanded if _length(expanded) <= _length(values) else values


def _length(values: Sequence[_Sum]) -> int:
    return sum(value.nodes for value in values)


def _drop_dominated(values: list[_Sum]) -> list[_Sum]:
    """Return the values without those that another one is never less than; keep the first of
    equals."""
    maximal: list[_Sum] = []
    for value in values:
        if any(_is_never_below(other, value, [_PROOF_STEPS]) for other in maximal):
            continue
        maximal = [other for other in maximal if not _is_never_below(value, other, [_PROOF_STEPS])]
        maximal.append(value)
    return maximal
