"""Plans for symbolic sizes: one stacking order, with offsets that hold for every size.

With symbolic sizes a plan cannot be a list of offsets found by a search. It is an order: of any two
buffers that are live at the same time, one is always below the other. A buffer starts at the
aligned maximum end of the buffers below it, which is valid for all non-negative sizes, and the
height of the stack is a longest path. Only the *reduced* lower neighbours must be considered, those
not already below another one, which keeps the expressions small (transitive reduction: Aho, Garey
and Ullman, 1972).

`choose` finds the order. Its candidates are the solver's placements for the hinted sizes and for
scaled ones, and the placements of a first fit that considers all of these sizes at once. It takes
the order with the lowest worst-case ratio of peak to lower bound. `Algebra` builds the expressions
and keeps them short. `Replanner` is for arenas where no order is good for all sizes: it plans at
run time, once per tuple of sizes. `Program` evaluates many expressions at many values of their
symbols.

Pure: it knows symbols only through sympy. The functions that round up and take a maximum can be
replaced by ones that a code printer supports.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

import sympy  # type: ignore[import-untyped]

from inductor_ext.memory.planner import solver
from inductor_ext.memory.planner.interval import Interval, lower_bound, round_up, verify

__all__ = [
    "Algebra",
    "Align",
    "Choice",
    "MakeAlign",
    "MakeMax",
    "Program",
    "Replanner",
    "Stacking",
    "choose",
    "make_align",
    "make_max",
    "samples",
    "stacking",
]

MakeMax = Callable[[Sequence[sympy.Expr]], sympy.Expr]
"""Builds the maximum of two or more expressions."""

MakeAlign = Callable[[sympy.Expr, int], sympy.Expr]
"""Builds an expression in bytes, rounded up to a multiple of a power of two."""


class Align(sympy.Function):  # type: ignore[misc]
    """`Align(value, alignment)`: value rounded up to a multiple of alignment, a power of two."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, value: sympy.Expr, alignment: sympy.Expr) -> sympy.Expr | None:
        if value.is_Integer:
            return sympy.Integer(round_up(int(value), int(alignment)))
        return None


def make_max(arguments: Sequence[sympy.Expr]) -> sympy.Expr:
    """Return an unevaluated sympy.Max. sympy's own simplification compares all pairs by their
    assumptions, which costs milliseconds, and `Algebra` has already dropped redundant arguments."""
    return sympy.Max(*arguments, evaluate=False)


def make_align(value: sympy.Expr, alignment: int) -> sympy.Expr:
    """Return `Align` of the arguments."""
    return Align(value, alignment)


class Program:
    """Evaluates expressions at integer values of their symbols; common subexpressions only once.

    Args:
        expressions: the expressions or integers to evaluate.
        definitions: symbols that stand for expressions, each in terms of earlier ones.
    """

    def __init__(
        self,
        expressions: Iterable[sympy.Expr | int],
        definitions: Iterable[tuple[sympy.Symbol, sympy.Expr]] = (),
    ) -> None:
        self.symbols: dict[sympy.Symbol, int] = {}
        """The symbols that need a value, and the index at which it is stored."""
        self._places: dict[sympy.Basic, int] = {}
        self._constants: list[Any] = []
        self._steps: list[tuple[int, Callable[..., Any], tuple[int, ...]]] = []
        for symbol, expression in definitions:
            self._places[symbol] = self._compile(expression)
        self._results = [self._compile(sympy.sympify(e)) for e in expressions]

    def __call__(self, values: Mapping[sympy.Symbol, int]) -> list[int]:
        """Return the values of the expressions.

        Raises:
            ValueError: an expression has no integer value: a division by zero or with a remainder,
                or a symbol without a value.
        """
        store = list(self._constants)
        try:
            for symbol, place in self.symbols.items():
                store[place] = values[symbol]
            for place, function, arguments in self._steps:
                store[place] = function(*[store[argument] for argument in arguments])
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"no integer value: {error!r}") from error
        results = [store[place] for place in self._results]
        for result in results:
            if type(result) is not int:
                raise ValueError(f"no integer value: {result}")
        return results

    def _compile(self, expression: sympy.Basic) -> int:
        place = self._places.get(expression)
        if place is not None:
            return place
        function: Callable[..., Any] | None = None
        arguments: tuple[int, ...] = ()
        constant: Any = None
        if expression.is_Integer:
            constant = int(expression)
        elif expression.is_Rational:
            constant = Fraction(int(expression.p), int(expression.q))
        elif not expression.is_Symbol:
            function = self._function(expression)
            if function is not None:
                arguments = tuple(self._compile(argument) for argument in expression.args)
            else:
                # Conditions and the like are not numeric: substitute into the whole expression.
                symbols = sorted(expression.free_symbols, key=str)
                function = functools.partial(_replace, expression, symbols)
                arguments = tuple(self._compile(symbol) for symbol in symbols)
        place = self._places[expression] = len(self._constants)
        self._constants.append(constant)
        if expression.is_Symbol:
            self.symbols[expression] = place
        elif function is not None:
            self._steps.append((place, function, arguments))
        return place

    @staticmethod
    def _function(expression: sympy.Basic) -> Callable[..., Any] | None:
        if expression.is_Add:
            return _add
        if expression.is_Mul:
            return _multiply
        if expression.is_Pow and expression.exp.is_Integer and expression.exp >= 0:
            return _power
        if isinstance(expression, sympy.Max):
            return max
        if isinstance(expression, Align):
            return round_up
        if all(isinstance(argument, sympy.Expr) for argument in expression.args):
            return functools.partial(_call, expression.func)
        return None


def _add(*values: Any) -> Any:
    return _whole(sum(values))


def _multiply(*values: Any) -> Any:
    result = values[0]
    for value in values[1:]:
        result *= value
    return _whole(result)


def _power(base: Any, exponent: int) -> Any:
    return _whole(base**exponent)


def _whole(value: Any) -> Any:
    return int(value) if type(value) is Fraction and value.denominator == 1 else value


def _number(value: sympy.Basic) -> Any:
    if value.is_Integer:
        return int(value)
    if value.is_Rational:
        return Fraction(int(value.p), int(value.q))
    raise TypeError(f"{value} is no number")


def _call(function: Callable[..., sympy.Expr], *values: Any) -> Any:
    return _number(function(*map(sympy.sympify, values)))


def _replace(expression: sympy.Basic, symbols: Sequence[sympy.Symbol], *values: Any) -> Any:
    return _number(expression.xreplace(dict(zip(symbols, map(sympy.sympify, values), strict=True))))


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


_NOTHING = (0,) * _TRIALS


class _Sum:
    """A sum of atoms, each with a positive integer coefficient."""

    __slots__ = ("_key", "terms", "values")

    def __init__(self, terms: dict[_Atom, int], values: tuple[int, ...] | None = None) -> None:
        self.terms = terms
        self._key: _Key | None = None
        if values is None:
            values = _NOTHING
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


def _never_below(a: _Sum, b: _Sum, budget: list[int]) -> bool:
    """Whether a >= b, for all values of the atoms, can be proven within the budget.

    A claim that fails in a trial is rejected without a proof.

    Atoms are non-negative, so it suffices that no coefficient of b is greater than its coefficient
    in a. Otherwise, a maximum or a rounded value in a can be replaced by something that is not
    greater, a maximum in b must be covered option by option, and a rounded value in b is covered by
    a rounded value in a whose unrounded value is never less.
    """
    if not all(map(operator.ge, a.values, b.values)):
        return False
    lacking = [atom for atom, factor in b.terms.items() if factor > a.terms.get(atom, 0)]
    if not lacking:
        return True
    if _leaves(lacking) & ~_leaves(a.terms):
        return False
    for atom in lacking:
        if len(atom.options) > 1 and b.terms[atom] == 1:
            rest = _minus(b, {atom: 1})
            for option in atom.options:
                budget[0] -= 1
                if budget[0] < 0 or not _never_below(a, _plus(rest, option), budget):
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
                if _never_below(other.options[0], atom.options[0], budget):
                    return _never_below(_minus(a, {other: 1}), _minus(b, {atom: 1}), budget)
    for atom, factor in a.terms.items():
        if atom.options and factor > b.terms.get(atom, 0):
            rest = _minus(a, {atom: 1})
            for option in atom.options:
                budget[0] -= 1
                if budget[0] < 0:
                    return False
                if _never_below(_plus(rest, option), b, budget):
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
        make_max: MakeMax = make_max,
        make_align: MakeAlign = make_align,
        prefix: str = "arena",
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
        found = self._expressions.get(value.key)
        if found is None:
            terms = sorted(value.terms.items(), key=lambda term: term[0].number)
            found = sympy.Add(*[factor * atom.expression for atom, factor in terms])
            self._expressions[value.key] = found
        return found

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

    def used(self, expressions: Iterable[sympy.Expr]) -> list[sympy.Symbol]:
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
        values = self._flat(_undominated(values))
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

    def _flat(self, values: list[_Sum]) -> list[_Sum]:
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
        found = _undominated(list(flat.values()))
        return found if _length(found) <= _length(values) else values


def _length(values: Sequence[_Sum]) -> int:
    return sum(value.nodes for value in values)


def _undominated(values: list[_Sum]) -> list[_Sum]:
    """Return the values without those that another one is never less than; keep the first of
    equals."""
    kept: list[_Sum] = []
    for value in values:
        if any(_never_below(other, value, [_PROOF_STEPS]) for other in kept):
            continue
        kept = [other for other in kept if not _never_below(value, other, [_PROOF_STEPS])]
        kept.append(value)
    return kept


@dataclass(frozen=True)
class Stacking:
    """The order in which all buffers of one arena are stacked.

    Of two buffers that are live at the same time, the one that comes first in `order` is below the
    other, directly or through a chain of `below`.
    """

    order: tuple[int, ...]
    """The buffers from bottom to top."""
    below: tuple[tuple[int, ...], ...]
    """The reduced lower neighbours of each buffer."""

    def offsets(self, sizes: Sequence[int], alignments: Sequence[int]) -> tuple[list[int], int]:
        """Return the offsets and the arena's size, in bytes.

        Args:
            sizes: bytes, rounded up to `alignments`.
            alignments: bytes, powers of two.
        """
        offsets = [0] * len(self.order)
        ends = [0] * len(self.order)
        for index in self.order:
            offset = 0
            for lower in self.below[index]:
                if ends[lower] > offset:
                    offset = ends[lower]
            alignment = alignments[index]
            offsets[index] = offset = (offset + alignment - 1) & -alignment
            ends[index] = offset + sizes[index]
        return offsets, max(ends, default=0)

    def unordered(self, lifetimes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """Return two buffers that are live at the same time and not ordered by a chain of `below`.

        None, if there are none, proves that no two buffers overlap for any sizes.
        """
        live = _live_at_once(lifetimes)
        reach = [0] * len(lifetimes)
        seen = 0
        for index in self.order:
            for lower in self.below[index]:
                reach[index] |= reach[lower] | 1 << lower
            loose = live[index] & seen & ~reach[index]
            if loose:
                return loose.bit_length() - 1, index
            seen |= 1 << index
        return None


def _live_at_once(lifetimes: Sequence[tuple[int, int]]) -> list[int]:
    """Return, for each live range, the set (as bits) of the others that overlap it."""
    started: dict[int, int] = {}
    ended: dict[int, int] = {}
    for index, (start, end) in enumerate(lifetimes):
        if start < end:
            started[start] = started.get(start, 0) | 1 << index
            ended[end] = ended.get(end, 0) | 1 << index
    started_before: dict[int, int] = {}
    ended_by: dict[int, int] = {}
    before = by = 0
    for time in sorted(started.keys() | ended.keys()):
        started_before[time] = before
        before |= started.get(time, 0)
        by |= ended.get(time, 0)
        ended_by[time] = by
    return [
        started_before[end] & ~ended_by[start] & ~(1 << index) if start < end else 0
        for index, (start, end) in enumerate(lifetimes)
    ]


def stacking(lifetimes: Sequence[tuple[int, int]], order: Sequence[int]) -> Stacking:
    """Compute the reduced lower neighbours for an order from bottom to top.

    Args:
        lifetimes: `[start, end)` of each buffer.
        order: all buffers.
    """
    # Bits by rank, so that the highest bit of a set is the topmost buffer in it.
    live = _live_at_once([lifetimes[index] for index in order])
    reach: list[int] = []
    below: list[tuple[int, ...]] = [()] * len(order)
    for rank, index in enumerate(order):
        left = live[rank] & ((1 << rank) - 1)
        reached = 0
        lower = []
        while left:
            top = left.bit_length() - 1
            lower.append(order[top])
            reached |= reach[top] | 1 << top
            left &= ~reached
        reach.append(reached)
        below[index] = tuple(lower)
    return Stacking(tuple(order), tuple(below))


_SCALES = (Fraction(1), Fraction(1, 4), Fraction(4))
"""Scalings of the hints at which an order is evaluated: of all hints together and of each alone."""

_FAR = (Fraction(1, 10), Fraction(16))
"""Further scalings, of all hints together only."""

_ALONE = 6
"""Number of symbols that are scaled alone, those first that most buffers depend on. With the joint
scalings, an order is evaluated at no more than 5 + 2 * 6 samples."""


def samples(hints: Mapping[sympy.Symbol, int]) -> list[dict[sympy.Symbol, int]]:
    """Return the values of the symbols at which an order is evaluated: the hints, then all hints
    scaled, then one hint scaled at a time.

    Args:
        hints: values, most important symbols first.
    """

    def scaled(value: int, scale: Fraction) -> int:
        return max(1, int(value * scale)) if scale != 1 else value

    together = [*_SCALES, *_FAR]
    found = [{symbol: scaled(hint, scale) for symbol, hint in hints.items()} for scale in together]
    for symbol in list(hints)[:_ALONE]:
        found += [{**hints, symbol: scaled(hints[symbol], scale)} for scale in _SCALES[1:]]
    return [sample for position, sample in enumerate(found) if sample not in found[:position]]


@dataclass(frozen=True)
class Choice:
    """An order, with its peak and lower bound at each sample used to choose it."""

    stacking: Stacking
    peaks: tuple[int, ...]
    """Bytes."""
    lower_bounds: tuple[int, ...]
    """Bytes."""

    @property
    def worst_ratio(self) -> float:
        """The highest ratio of peak to lower bound."""
        return max(
            (p / b for p, b in zip(self.peaks, self.lower_bounds, strict=True) if b), default=1.0
        )


class _Chooser:
    """Evaluates orders and keeps the best one; see `choose`."""

    def __init__(
        self,
        lifetimes: Sequence[tuple[int, int]],
        columns: Sequence[Sequence[int]],
        alignments: Sequence[int],
    ) -> None:
        self.lifetimes = lifetimes
        self.columns = columns
        self.alignments = alignments
        self.lower_bounds = tuple(
            lower_bound(
                [Interval(*life, size) for life, size in zip(lifetimes, column, strict=True)]
            )
            for column in columns
        )
        self.live = _live_at_once(lifetimes)
        # A buffer that is empty at a sample still needs a position in the order.
        self.needs = [
            [max(column[index], alignment) for column in columns]
            for index, alignment in enumerate(alignments)
        ]
        self.best: tuple[tuple[float, int, int], Choice] | None = None

    def judge(self, order: Sequence[int]) -> tuple[tuple[float, int, int], Choice]:
        """Evaluate an order (lower is better); keep it if it is the best so far."""
        found = stacking(self.lifetimes, order)
        peaks = tuple(found.offsets(column, self.alignments)[1] for column in self.columns)
        choice = Choice(found, peaks, self.lower_bounds)
        # Ignore negligible differences of the ratio; then compare the peak at the hint, then the
        # length.
        value = (round(choice.worst_ratio, 4), peaks[0], sum(map(len, found.below)))
        if self.best is None or value < self.best[0]:
            self.best = value, choice
        return value, choice

    @property
    def done(self) -> bool:
        return self.best is not None and self.best[1].peaks == self.lower_bounds

    @property
    def good(self) -> bool:
        """Whether the possible gain does not justify the time of a further search."""
        if self.best is None:
            return False
        (ratio, peak, _), _ = self.best
        return ratio <= _GOOD and peak == self.lower_bounds[0]

    def order_of(self, offsets: Sequence[int]) -> list[int]:
        """Return the order of a placement of nonzero sizes. Of several equivalent orders, it is the
        one sorted by start."""
        return sorted(range(len(offsets)), key=lambda i: (offsets[i], self.lifetimes[i], i))

    def fit(self, sequence: Sequence[int]) -> list[int]:
        """Run first fit at all samples at once.

        In the given sequence, each buffer is placed in the lowest gap between buffers live at the
        same time that is wide enough at every sample.
        """
        nothing = [0] * len(self.columns)
        offsets = [nothing] * len(self.lifetimes)
        ends = [nothing] * len(self.lifetimes)
        placed: list[tuple[int, int]] = []
        for index in sequence:
            live = self.live[index]
            mask = -self.alignments[index]
            needs = self.needs[index]
            near = [other for _, other in placed if live >> other & 1]
            ceilings: list[list[int]] = []
            for other in reversed(near):
                above = offsets[other]
                ceilings.append(list(map(min, above, ceilings[-1])) if ceilings else above)
            floor = nothing
            for other in near:
                tops = map(operator.add, floor, needs)
                if all(map(operator.le, tops, ceilings.pop())):
                    break
                floor = [(end - mask - 1) & mask for end in map(max, floor, ends[other])]
            offsets[index] = floor
            ends[index] = list(map(operator.add, floor, needs))
            bisect.insort(placed, (floor[0], index))
        return self.order_of([offset[0] for offset in offsets])

    def critical(self, choice: Choice) -> list[int]:
        """Return the buffers of a chain that determines an order's peak at its worst sample."""
        ratios = [p / b if b else 1.0 for p, b in zip(choice.peaks, self.lower_bounds, strict=True)]
        column = self.columns[ratios.index(max(ratios))]
        offsets, _ = choice.stacking.offsets(column, self.alignments)
        ends = [offset + size for offset, size in zip(offsets, column, strict=True)]
        chain = [ends.index(max(ends))]
        while choice.stacking.below[chain[-1]]:
            chain.append(max(choice.stacking.below[chain[-1]], key=ends.__getitem__))
        return chain


_SOLVED = 9
"""Maximum number of samples at which the solver is called."""

_SOLVED_BUFFERS = 2000
"""Maximum number of buffers the solver gets at all samples together, not counting the first three
samples: large problems are solved at these only."""

_GOOD = 1.005
"""Worst ratio at which the search ends, if the ratio at the hint is 1."""

_FITS = 200
"""Maximum number of first fits at all samples at once."""

_FIT_WORK = 1_000_000
"""Maximum cost of them together, in buffers squared: about half a second."""


def choose(
    lifetimes: Sequence[tuple[int, int]],
    columns: Sequence[Sequence[int]],
    alignments: Sequence[int],
    *,
    iterations: int = solver.DEFAULT_ITERATIONS,
    seed: int = 0,
) -> Choice:
    """Choose the order of buffers with the lowest worst-case ratio over several samples of their
    sizes.

    Candidates are the solver's placements at single samples and a first fit at all samples at once,
    in several sequences; then a search moves critical buffers in the sequence. Everything ends as
    soon as an order reaches the lower bound at every sample; the search already ends close to it.
    Its budget is counted, never timed.

    Args:
        lifetimes: `[start, end)` of each buffer.
        columns: for each sample, the size of each buffer in bytes, rounded up to its alignment; the
            first sample is the hint.
        alignments: bytes, powers of two.
        iterations: iterations of the solver, per sample.
        seed: seed of the searches.
    """
    chooser = _Chooser(lifetimes, columns, alignments)
    count = len(lifetimes)
    solved = min(_SOLVED, max(len(_SCALES), _SOLVED_BUFFERS // max(count, 1)))
    for number in range(min(solved, len(columns))):
        intervals = [
            Interval(*life, needs[number], alignment)
            for life, needs, alignment in zip(lifetimes, chooser.needs, alignments, strict=True)
        ]
        placement = solver.solve(intervals, iterations=iterations, seed=seed)
        best = chooser.judge(chooser.order_of(placement.offsets))
        if chooser.done:
            return best[1]
    return _refine(chooser, random.Random(seed))


def _refine(chooser: _Chooser, generator: random.Random) -> Choice:
    """Search among first fits at all samples at once, with sequences derived from the best one."""
    assert chooser.best is not None
    count = len(chooser.lifetimes)
    fits = min(_FITS, _FIT_WORK // count**2)
    shares = [
        max(
            size / bound if bound else 0.0
            for size, bound in zip(needs, chooser.lower_bounds, strict=True)
        )
        for needs in chooser.needs
    ]
    lengths = [end - start for start, end in chooser.lifetimes]
    starts = [start for start, _ in chooser.lifetimes]
    sequences = [
        list(chooser.best[1].stacking.order),
        sorted(range(count), key=lambda i: (-shares[i], -lengths[i])),
        sorted(range(count), key=lambda i: -shares[i] * lengths[i]),
        sorted(range(count), key=lambda i: (-lengths[i], -shares[i])),
        sorted(range(count), key=lambda i: (starts[i], -shares[i])),
    ][:fits]
    judged = [(*chooser.judge(chooser.fit(sequence)), sequence) for sequence in sequences]
    for _ in range(fits - len(sequences)):
        if chooser.good:
            break
        value, choice, sequence = min(judged, key=operator.itemgetter(0))
        candidate = list(sequence)
        place = candidate.index(generator.choice(chooser.critical(choice)))
        if generator.random() < 0.5:
            candidate.insert(generator.randrange(place + 1), candidate.pop(place))
        else:
            other = generator.randrange(count)
            candidate[place], candidate[other] = candidate[other], candidate[place]
        found, choice = chooser.judge(chooser.fit(candidate))
        if found <= value:
            judged = [(found, choice, candidate)]
    return chooser.best[1]


_REMEMBERED = 256
"""Number of tuples of sizes whose plans a `Replanner` caches."""


@dataclass(frozen=True)
class Replanner:
    """Plans an arena at run time, once per tuple of sizes.

    Its `repr` is an expression that recreates it, so that generated code can contain it. It is
    thread-safe. A cached plan costs one look-up; the least recently used plans are evicted.

    Args:
        starts: the first step of each buffer's live range.
        ends: the first step after it.
        alignments: bytes, a power of two for each buffer.
        which: for each buffer, the index of its size in the tuple that the replanner is called
            with, so that the caller evaluates each distinct size only once.
        order: the buffers from bottom to top of a stack that suits most sizes, if one is known: no
            plan needs more memory than this order.
        iterations: iterations of the solver.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    alignments: tuple[int, ...]
    which: tuple[int, ...]
    order: tuple[int, ...] = ()
    iterations: int = solver.DEFAULT_ITERATIONS
    plan: Callable[[tuple[int, ...]], tuple[int, tuple[int, ...]]] = field(
        init=False, repr=False, compare=False
    )
    """The same as calling the object, without the cost of a method call."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", functools.lru_cache(_REMEMBERED)(self._solve))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __call__(self, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Return the arena's size and each buffer's offset, in bytes; verified.

        Raises:
            exc.BadIntervalError: a size is negative.
        """
        return self.plan(sizes)

    def _solve(self, sizes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        intervals = [
            Interval(start, end, sizes[place], alignment)
            for start, end, alignment, place in zip(
                self.starts, self.ends, self.alignments, self.which, strict=True
            )
        ]
        placement = solver.solve(intervals, iterations=self.iterations)
        if self.order and placement.peak > placement.lower_bound:
            lifetimes = list(zip(self.starts, self.ends, strict=True))
            rounded = [interval.rounded_size for interval in intervals]
            offsets, peak = stacking(lifetimes, self.order).offsets(rounded, self.alignments)
            if peak < placement.peak:
                verify(intervals, offsets, peak)
                return peak, tuple(offsets)
        return placement.peak, placement.offsets
