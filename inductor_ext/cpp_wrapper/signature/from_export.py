"""Derive a compiled model's signature from its exported program.

Collects what torch.export knows about a call and the generated code does not check: the inputs'
names, dtypes, shapes, strides and devices; the ranges of symbols; and the conditions under which
the program was traced: guards, which torch.export keeps as text, asserts in the graph, and the
ranges of dimensions that are expressions. The shape environment's own guards are used only if that
text cannot be parsed: saving a program loses them, and compiling it adds to them.

A condition that the ranges imply is dropped. A condition that cannot be expressed, or whose symbols
no input determines, goes to `Signature.unchecked`. `with_guards` adds the guards that compilation
has added to those of torch.export.

Reads the exported program and torch's symbolic expressions, and modifies neither.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import sympy  # type: ignore[import-untyped]
import torch
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    OutputKind,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.utils import _pytree as pytree
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from inductor_ext import exc
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.expression import Apply, Node
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantInput,
    ConstantOutput,
    Extent,
    Input,
    Output,
    Range,
    Signature,
    SymbolInput,
    SymbolOutput,
    TensorInput,
    TensorOutput,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["node_of", "range_of", "signature", "with_guards", "with_numbers", "without_preferences"]

_NUMBERS: dict[type, Literal["int", "float", "bool"]] = {
    SymIntArgument: "int",
    SymFloatArgument: "float",
    SymBoolArgument: "bool",
}

_NO_MAXIMUM = (1 << 63) - 2
"""torch.export writes the limits of int64, off by at most one, for an unbounded range."""


def signature(program: ExportedProgram) -> Signature:
    """Return the call signature of the model compiled from an exported program.

    Raises:
        exc.UncheckableInputError: an input is of an unsupported kind, or one of its sizes or
            strides is not an integer expression.
    """
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    users = [
        (node, spec.arg)
        for node, spec in zip(placeholders, specs, strict=True)
        if spec.kind == InputKind.USER_INPUT
    ]
    names = _argument_names(program, [node.name for node, _ in users])
    inputs = tuple(
        _input(name, path, node.meta.get("val"), argument)
        for (name, path), (node, argument) in zip(names, users, strict=True)
    )
    symbols = _symbols(program, inputs)
    found = Signature(
        inputs=inputs,
        outputs=_outputs(program),
        symbols=symbols,
        in_spec=_dumped(program.call_spec.in_spec),
        out_spec=_dumped(program.call_spec.out_spec),
    )
    environment = _shape_environment(node.meta.get("val") for node in placeholders)
    unclear: list[str] = []
    conditions = [
        *_range_conditions(program, symbols),
        *_written_guards(program, found, unclear),
        *_asserts(program, environment),
    ]
    if environment is not None and environment.guards and unclear:
        conditions += _guards(environment)
        unclear = []
    known = _with_conditions(found, conditions)
    return replace(known, unchecked=(*known.unchecked, *unclear))


def with_guards(known: Signature, environment: ShapeEnv) -> Signature:
    """Return a signature with the guards of a shape environment added.

    Compilation may specialize the code further than torch.export did, and records that as guards: a
    size is fixed to a constant, or an index to 32 bits. Guards with which the compiler only chose
    the faster of two correct variants are left out, as are guards on symbols of other programs.
    """
    specialised = [
        sympy.Eq(symbol, environment.replace(symbol), evaluate=False)
        for symbol in environment.replacements
        if symbol.name in known.symbols
    ]
    return _with_conditions(known, [*specialised, *_guards(environment)])


def with_numbers(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the example inputs of a compile with exported SymInts in place of dynamic scalars.

    torch's code generation handles such inputs as 0-dim tensors that it unpacks, but the path from
    an exported program to it passes None for them.
    """
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return [
        value if isinstance(value, torch.SymInt) else given
        for value, given in zip(values, inputs, strict=True)
    ]


def _with_conditions(known: Signature, conditions: Iterable[sympy.Basic]) -> Signature:
    symbols = dict(known.symbols)
    wider: list[sympy.Basic] = []
    for plain in _flattened(conditions):
        names = {symbol.name for symbol in plain.free_symbols}
        if names and names <= symbols.keys():
            limits = _limits(plain)
            if limits is None:
                wider.append(plain)
            else:
                (name,) = names
                symbols[name] = _both(symbols[name], limits)
    ranges = {
        sympy.Symbol(name, integer=True): ValueRanges(
            -int_oo if limits.min is None else limits.min,
            int_oo if limits.max is None else limits.max,
        )
        for name, limits in symbols.items()
        if not _is_empty(limits)
    }
    constraints = list(known.constraints)
    unchecked = list(known.unchecked)
    for plain in wider:
        if _implied(plain, ranges):
            continue
        try:
            text = expression.show(node_of(plain))
            target = constraints
        except ValueError:
            text = str(plain)
            target = unchecked
        if text not in target:
            target.append(text)
    return replace(
        known, symbols=symbols, constraints=tuple(constraints), unchecked=tuple(unchecked)
    )


def _limits(condition: sympy.Basic) -> Range | None:
    """Return the range that a condition expresses, if it compares a symbol with an integer."""
    match condition:
        case (
            sympy.Eq(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Eq(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(int(number), int(number))
        case (
            sympy.Ge(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Le(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(int(number), None)
        case (
            sympy.Gt(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Lt(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(int(number) + 1, None)
        case (
            sympy.Le(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Ge(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(None, int(number))
        case (
            sympy.Lt(lhs=sympy.Symbol(), rhs=sympy.Integer() as number)
            | sympy.Gt(lhs=sympy.Integer() as number, rhs=sympy.Symbol())
        ):
            return Range(None, int(number) - 1)
    return None


def _both(left: Range, right: Range) -> Range:
    lows = [item for item in (left.min, right.min) if item is not None]
    highs = [item for item in (left.max, right.max) if item is not None]
    return Range(max(lows, default=None), min(highs, default=None))


def _is_empty(limits: Range) -> bool:
    return limits.min is not None and limits.max is not None and limits.min > limits.max


def _flattened(conditions: Iterable[sympy.Basic]) -> Iterator[sympy.Basic]:
    """Split conditions into conjuncts over integer symbols that are identified by name alone."""
    for condition in conditions:
        plain = condition.xreplace(
            {symbol: sympy.Symbol(symbol.name, integer=True) for symbol in condition.free_symbols}
        )
        yield from sympy.And.make_args(plain)


def _implied(condition: sympy.Basic, ranges: dict[Any, ValueRanges[Any]]) -> bool:
    """Whether a condition holds for all values within the ranges."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return False
    try:
        bounds = bound_sympy(condition.lhs - condition.rhs, ranges)
    except Exception:
        # Functions without bounds raise arbitrary exceptions; the condition is then checked.
        return False
    lower, upper = bounds.lower, bounds.upper
    match condition:
        case sympy.Ge():
            return bool(lower >= 0)
        case sympy.Gt():
            return bool(lower > 0)
        case sympy.Le():
            return bool(upper <= 0)
        case sympy.Lt():
            return bool(upper < 0)
        case sympy.Ne():
            return bool(lower > 0) or bool(upper < 0)
    return False


# --- inputs -----------------------------------------------------------------------------------


def _argument_names(program: ExportedProgram, fallback: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name in the model and the path in `(args, kwargs)` of each leaf of a call."""
    spec = program.call_spec.in_spec
    paths = _leaf_paths(spec)
    if paths is None or len(paths) != len(fallback):
        return [(name, name) for name in fallback]
    entry = program.module_call_graph[0].signature if program.module_call_graph else None
    arguments = getattr(entry, "forward_arg_names", None) or []
    found: list[tuple[str, str]] = []
    for (side, first, *rest), name in zip(paths, fallback, strict=True):
        inner = pytree.keystr(tuple(rest))
        if side.idx == 1:
            found.append((f"{first.key}{inner}", f"kwargs[{first.key!r}]{inner}"))
        else:
            outer = arguments[first.idx] if first.idx < len(arguments) else name
            found.append((f"{outer}{inner}", f"args[{first.idx}]{inner}"))
    return found


def _leaf_paths(spec: Any) -> list[tuple[Any, ...]] | None:
    """Return the key path of each leaf; None if a container class cannot be reconstructed."""
    if spec is None:
        return None
    try:
        tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
        pairs, _ = pytree.tree_flatten_with_path(tree)
    except Exception:
        # User classes may validate their contents; a missing name is not worth an error.
        return None
    return [tuple(path) for path, _ in pairs]


def _input(name: str, path: str, value: Any, argument: Any) -> Input:
    if isinstance(argument, TensorArgument) and isinstance(value, torch.Tensor):
        return TensorInput(
            name=name,
            path=path,
            dtype=_dtype(value),
            shape=tuple(_extent(name, size) for size in value.shape),
            stride=tuple(_extent(name, stride) for stride in value.stride()),
            device=str(value.device),
        )
    if isinstance(argument, ConstantArgument):
        return ConstantInput(name, path, argument.value)
    if type(argument) in _NUMBERS:
        return SymbolInput(name, path, _NUMBERS[type(argument)], str(_extent(name, value)))
    what = getattr(argument, "class_fqn", type(value).__name__)
    raise exc.UncheckableInputError(name=name, why=f"it is an object of class {what}")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _extent(name: str, value: Any) -> Extent:
    if isinstance(value, int):
        return int(value)
    try:
        node = node_of(value.node.expr)
    except ValueError as error:
        raise exc.UncheckableInputError(name=name, why=f"{value} is {error}") from None
    return node if isinstance(node, int) else expression.show(node)


def _symbols(program: ExportedProgram, inputs: Iterable[Input]) -> dict[str, Range]:
    limits = {
        key.name: value
        for key, value in program.range_constraints.items()
        if isinstance(key, sympy.Symbol)
    }
    names: dict[str, Range] = {}
    plain: set[str] = set()
    for inp in inputs:
        extents: tuple[Extent, ...] = ()
        if isinstance(inp, TensorInput):
            extents = (*inp.shape, *inp.stride)
        elif isinstance(inp, SymbolInput):
            extents = (inp.symbol,)
        for extent in extents:
            if isinstance(extent, str):
                for name in expression.symbols(expression.parse(extent)):
                    names[name] = range_of(limits.get(name))
                    if name == extent:
                        plain.add(name)
    for name in names.keys() - plain:
        names[name] = _range_behind(program, name) or names[name]
    return names


def _range_behind(program: ExportedProgram, name: str) -> Range | None:
    """Derive the range of a symbol that is no dimension by itself from dimensions linear in it.

    torch.export narrows the symbol's own range to 2 or more regardless of the user's bounds, and
    does not check it.
    """
    found = Range()
    for key, value in program.range_constraints.items():
        if isinstance(key, sympy.Symbol) or {symbol.name for symbol in key.free_symbols} != {name}:
            continue
        (symbol,) = key.free_symbols
        terms = sympy.Poly(key, symbol).all_coeffs() if key.is_polynomial(symbol) else []
        if len(terms) == 2 and terms[0].is_Integer and terms[0] > 0 and terms[1].is_Integer:
            scale, shift = map(int, terms)
            limits = range_of(value)
            low = None if limits.min is None else -((shift - limits.min) // scale)
            high = None if limits.max is None else (limits.max - shift) // scale
            found = _both(found, Range(low, high))
    return None if found == Range() else found


def range_of(limits: Any) -> Range:
    """Convert torch's `ValueRanges`, dropping bounds at int64's limits; None means unbounded."""
    if limits is None:
        return Range()
    low = int(limits.lower) if limits.lower > -_NO_MAXIMUM else None
    high = int(limits.upper) if limits.upper < _NO_MAXIMUM else None
    return Range(low, high)


# --- conditions -------------------------------------------------------------------------------


def _shape_environment(values: Iterable[Any]) -> ShapeEnv | None:
    for value in values:
        owner = value.node if isinstance(value, torch.SymInt) else getattr(value, "fake_mode", None)
        environment: ShapeEnv | None = getattr(owner, "shape_env", None)
        if environment is not None:
            return environment
    return None


def _range_conditions(program: ExportedProgram, symbols: Mapping[str, Range]) -> list[sympy.Basic]:
    """Return the ranges of dimensions that are expressions; most follow from symbols' ranges."""
    found: list[sympy.Basic] = []
    for key, limits in program.range_constraints.items():
        if not isinstance(key, sympy.Symbol) and isinstance(key, sympy.Expr):
            known = range_of(limits)
            if known.min is not None:
                found.append(sympy.Ge(key, known.min))
            if known.max is not None:
                found.append(sympy.Le(key, known.max))
    return found


_PREFERENCES = re.compile(
    r"torch/(_subclasses/|_prims_common/|_inductor/("
    r"choices|codegen/cpp|decomposition|fx_passes/|kernel/(conv|mm)|pattern_matcher|scheduler"
    r"|select_algorithm|template_heuristics|utils\.py:(cmp|evaluate)))"
)
"""Where torch asks about sizes only to choose the faster variant or the strides of eager mode.

For instance, whether a reduction is long enough to split, or whether a batch is large enough for
another convolution. The generated code is correct for the other answer too, and enforcing the
guard would reject sizes that the program was exported for. This holds for inequalities only: code
may rely on an equality.
"""

_PASSED_ON = re.compile(r"torch/(__init__\.py|fx/|_inductor/sizevars\.py|utils/)|<string>")
"""Intermediate frames between a query about sizes and the code that makes it."""


def _guards(environment: ShapeEnv) -> list[sympy.Basic]:
    found: list[sympy.Basic] = []
    for guard in environment.guards:
        frame: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        place = frame if isinstance(frame, str) else ""
        if hasattr(frame, "filename"):
            place = f"{frame.filename}:{frame.name}"
        if isinstance(guard.expr, sympy.Eq) or not _PREFERENCES.search(place):
            # The guard may use a symbol that has since been replaced by another's expression.
            found.append(environment.replace(guard.expr))
    return found


@contextlib.contextmanager
def without_preferences(program: ExportedProgram | torch.fx.GraphModule) -> Iterator[None]:
    """Keep a compile from narrowing size ranges by performance-only queries.

    If the answer is that a size is below 16, its range ends there, and later decisions may rely on
    that without a guard of their own, so the guard could no longer be dropped. Such queries are
    still answered from the example's sizes, but no guard is recorded.

    Args:
        program: the exported program that is compiled, or its module.
    """
    environment: Any = _shape_environment(
        node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")
    )
    if environment is None or "evaluate_expr" in vars(environment):
        # No shape environment, or already patched.
        yield
        return
    stock = environment.evaluate_expr

    @functools.wraps(stock)
    def evaluate_expr(asked: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        if isinstance(asked, (sympy.Eq, sympy.Ne)) or not _PREFERENCES.search(_asker()):
            return stock(asked, *args, **kwargs)
        with environment.suppress_guards():
            return stock(asked, *args, **kwargs)

    # Patch only this instance, so that compiles of other programs are unaffected.
    environment.evaluate_expr = evaluate_expr
    try:
        yield
    finally:
        del environment.evaluate_expr


def _asker() -> str:
    """Return the file and function of the code that queries a size."""
    frame: Any = sys._getframe(2)
    while frame is not None and _PASSED_ON.search(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_code.co_name}" if frame is not None else ""


def _asserts(program: ExportedProgram, environment: ShapeEnv | None) -> list[sympy.Basic]:
    """Return the graph's asserts on sizes; generated code has them too, with its own messages."""
    found: list[sympy.Basic] = []
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_scalar.default
    ):
        value = getattr(node.args[0], "meta", {}).get("val")
        if isinstance(value, torch.SymBool):
            found.append(value.node.expr)
    if environment is not None:
        for asserts in environment.deferred_runtime_asserts.values():
            found += [environment.replace(item.expr) for item in asserts]
    return found


_SOURCE = re.compile(r"\.(size|stride)\(\)$")


def _written_guards(
    program: ExportedProgram, known: Signature, unclear: list[str]
) -> list[sympy.Basic]:
    """Parse the guards that torch.export keeps as Python text over `L['x'].size()[0]`.

    Args:
        unclear: receives the guards that cannot be parsed.
    """
    found: list[sympy.Basic] = []
    sources = _Sources(known)
    for text in getattr(program, "_guards_code", None) or []:
        try:
            tree = sources.visit(ast.parse(text, mode="eval"))
            found.append(_condition(expression.parse(ast.unparse(tree))))
        except (ValueError, SyntaxError, exc.BadExpressionError):
            unclear.append(text)
    return found


class _Sources(ast.NodeTransformer):
    """A transformer that replaces the sources in torch.export's guards by symbols' expressions.

    Raises:
        ValueError: a source is not the size, stride or value of an input.
    """

    def __init__(self, known: Signature) -> None:
        self.tensors: dict[str, TensorInput] = {}
        self.numbers: dict[str, SymbolInput] = {}
        for position, inp in enumerate(known.inputs):
            names = {*_spellings(inp.name), f"L['flat_args'][{position}]"}
            if isinstance(inp, TensorInput):
                self.tensors.update(dict.fromkeys(names, inp))
            elif isinstance(inp, SymbolInput):
                self.numbers.update(dict.fromkeys(names, inp))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        text = ast.unparse(node)
        if text in self.numbers:
            return ast.parse(self.numbers[text].symbol, mode="eval").body
        call = ast.unparse(node.value)
        kind = _SOURCE.search(call)
        owner = self.tensors.get(_SOURCE.sub("", call))
        if kind is None or owner is None or not isinstance(node.slice, ast.Constant):
            raise ValueError(text)
        extents = owner.shape if kind[1] == "size" else owner.stride
        return ast.parse(str(extents[int(str(node.slice.value))]), mode="eval").body


def _spellings(name: str) -> list[str]:
    """Return the ways a guard may write an input: `x`, and `rest_0` also as `rest[0]`."""
    first, bracket, rest = name.partition("[")
    spellings = [f"L['{first}']{bracket}{rest}"]
    varied = re.fullmatch(r"(.+)_(\d+)", first)
    if varied:
        spellings.append(f"L['{varied[1]}'][{varied[2]}]{bracket}{rest}")
    return [ast.unparse(ast.parse(spelling, mode="eval")) for spelling in spellings]


# --- outputs ----------------------------------------------------------------------------------


def _outputs(program: ExportedProgram) -> tuple[Output, ...]:
    returned = program.graph.output_node().args[0]
    users = [
        (value, spec.arg)
        for value, spec in zip(returned, program.graph_signature.output_specs, strict=True)
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    ]
    paths = _leaf_paths(program.call_spec.out_spec)
    if paths is None or len(paths) != len(users):
        paths = [(pytree.SequenceKey(index),) for index in range(len(users))]
    return tuple(
        _output(pytree.keystr(path), value, argument)
        for path, (value, argument) in zip(paths, users, strict=True)
    )


def _output(path: str, returned: Any, argument: Any) -> Output:
    value = getattr(returned, "meta", {}).get("val", returned)
    if isinstance(value, torch.Tensor):
        shape = tuple(_shown(size) for size in value.shape)
        return TensorOutput(path, _dtype(value), shape, str(value.device))
    if isinstance(argument, ConstantArgument):
        return ConstantOutput(path, argument.value)
    if type(argument) in _NUMBERS:
        return SymbolOutput(path, _NUMBERS[type(argument)], str(_shown(value)))
    return ConstantOutput(path, value if isinstance(value, (int, float, str)) else None)


def _shown(value: Any) -> Extent:
    """Return an output size in signature syntax, else as torch prints it; nothing evaluates it."""
    if isinstance(value, int):
        return int(value)
    inner = getattr(getattr(value, "node", None), "expr", value)
    try:
        node = node_of(inner)
    except ValueError:
        return str(inner)
    return node if isinstance(node, int) else expression.show(node)


def _dumped(spec: Any) -> str:
    return "" if spec is None else pytree.treespec_dumps(spec)


# --- expressions ------------------------------------------------------------------------------


_RELATIONS: dict[type, str] = {
    sympy.Eq: "==",
    sympy.Ne: "!=",
    sympy.Lt: "<",
    sympy.Le: "<=",
    sympy.Gt: ">",
    sympy.Ge: ">=",
}

_FUNCTIONS: dict[str, str] = {
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "PowByNatural": "**",
    "LShift": "<<",
    "RShift": ">>",
    "BitwiseFn_bitwise_and": "&",
    "BitwiseFn_bitwise_or": "|",
    "BitwiseFn_bitwise_xor": "^",
    "Max": "max",
    "Min": "min",
    "And": "and",
    "Or": "or",
}
"""The sympy and torch functions that map to operators of `expression`, by class name."""


def node_of(expr: sympy.Basic) -> Node:
    """Convert a symbolic expression of torch to an expression of a signature.

    Raises:
        ValueError: it contains a function that is no integer operation; the message names it.
    """
    if expr in (sympy.true, sympy.false):
        return int(expr == sympy.true)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return str(expr.name)
    if isinstance(expr, sympy.Add):
        return _sum(expr)
    if isinstance(expr, sympy.Mul):
        if expr.args[0] == -1:
            return Apply("neg", (node_of(-expr),))
        return _folded("*", expr.as_ordered_factors())
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return Apply("**", (node_of(expr.base), int(expr.exp)))
    if type(expr) in _RELATIONS:
        return Apply(_RELATIONS[type(expr)], (node_of(expr.lhs), node_of(expr.rhs)))
    if isinstance(expr, sympy.Not):
        return Apply("not", (node_of(expr.args[0]),))
    if isinstance(expr, sympy.Abs):
        return Apply("abs", (node_of(expr.args[0]),))
    name = type(expr).__name__
    if name in _FUNCTIONS:
        return _folded(_FUNCTIONS[name], expr.args)
    if name == "Identity":
        return node_of(expr.args[0])
    if name == "Where":
        return Apply("if", tuple(node_of(part) for part in expr.args))
    if name == "ModularIndexing":
        base, divisor, modulus = map(node_of, expr.args)
        return Apply("%", (Apply("//", (base, divisor)), modulus))
    if name in ("FloorToInt", "CeilToInt") and type(expr.args[0]).__name__ == "IntTrueDiv":
        above, below = map(node_of, expr.args[0].args)
        if name == "FloorToInt":
            return Apply("//", (above, below))
        return Apply("neg", (Apply("//", (Apply("neg", (above,)), below)),))
    raise ValueError(f"no operation on integers: {name}")


def _sum(expr: sympy.Add) -> Node:
    positive: list[Node] = []
    negative: list[Node] = []
    for term in expr.as_ordered_terms():
        if term.could_extract_minus_sign() and term.as_coeff_Mul()[0].is_negative:
            negative.append(node_of(-term))
        else:
            positive.append(node_of(term))
    result: Node = positive[0] if positive else Apply("neg", (negative.pop(0),))
    for part in positive[1:]:
        result = Apply("+", (result, part))
    for part in negative:
        result = Apply("-", (result, part))
    return result


def _folded(sign: str, arguments: Iterable[sympy.Basic]) -> Node:
    first, *rest = map(node_of, arguments)
    for part in rest:
        first = Apply(sign, (first, part))
    return first


_BUILT: dict[str, Callable[..., sympy.Basic]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "**": lambda a, b: a**b,
    "//": functions.FloorDiv,
    "%": functions.Mod,
    "max": functions.Max,
    "min": functions.Min,
    "neg": lambda a: -a,
    "abs": sympy.Abs,
    "not": sympy.Not,
    "and": sympy.And,
    "or": sympy.Or,
    **{sign: relation for relation, sign in _RELATIONS.items()},
}


def _condition(node: Node) -> sympy.Basic:
    """Convert back from `node_of`, so that the same guard from two sources compares equal.

    Raises:
        ValueError: an operator that torch.export's guard text does not use.
    """
    if isinstance(node, int):
        return sympy.Integer(node)
    if isinstance(node, str):
        return sympy.Symbol(node, integer=True)
    if node.operator not in _BUILT:
        raise ValueError(node.operator)
    return _BUILT[node.operator](*map(_condition, node.arguments))
