"""Derive a compiled model's signature from its exported program.

Collects what torch.export knows about a call and the generated code does not check: the inputs'
names, dtypes, shapes, strides and devices; the ranges of symbols; and the conditions under which
the program was traced: guards, which torch.export keeps as text, asserts in the graph, and the
ranges of dimensions that are expressions. The shape environment's own guards are used only if that
text cannot be parsed: saving a program loses them, and compiling it adds to them.

Reads the exported program and torch's symbolic expressions, and modifies neither.
"""

from __future__ import annotations

import ast
import re
from collections import namedtuple
from collections.abc import Iterable, Iterator, Sequence
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

from inductor_ext import exc
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.conditions import add_conditions, intersect
from inductor_ext.cpp_wrapper.signature.guard_filter import find_shape_environment, list_guards
from inductor_ext.cpp_wrapper.signature.result_classes import find_result_classes
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
from inductor_ext.cpp_wrapper.signature.symbolic import to_node, to_sympy

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

_SCALARS: dict[type, Literal["int", "float", "bool"]] = {
    SymIntArgument: "int",
    SymFloatArgument: "float",
    SymBoolArgument: "bool",
}

_NO_MAXIMUM = (1 << 63) - 2
"""torch.export writes the limits of int64, off by at most one, for an unbounded range."""


def derive_signature(program: ExportedProgram) -> Signature:
    """Return the call signature of the model compiled from an exported program.

    Raises:
        exc.UncheckableInputError: an input is of an unsupported kind, or one of its sizes or
            strides is not an integer expression.
        exc.UnserializableClassError: arguments or results contain a class that is registered with
            pytree without a name for serialization.
    """
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    users = [
        (node, spec.arg)
        for node, spec in zip(placeholders, specs, strict=True)
        if spec.kind == InputKind.USER_INPUT
    ]
    names = _name_arguments(program, [node.name for node, _ in users])
    inputs = tuple(
        _describe_input(name, path, node.meta.get("val"), argument)
        for (name, path), (node, argument) in zip(names, users, strict=True)
    )
    signature = Signature(
        inputs=inputs,
        outputs=_describe_outputs(program),
        symbols=_list_symbols(program, inputs),
        in_spec=_dump_spec(program.call_spec.in_spec, "arguments"),
        out_spec=_dump_spec(program.call_spec.out_spec, "results"),
        result_classes=find_result_classes(program.call_spec.out_spec),
    )
    environment = find_shape_environment(node.meta.get("val") for node in placeholders)
    unclear: list[str] = []
    conditions = [
        *_list_range_conditions(program),
        *_parse_guards(program, signature, unclear),
        *_list_asserts(program, environment),
    ]
    if environment is not None and environment.guards and unclear:
        conditions += list_guards(environment)
        unclear = []
    signature = add_conditions(signature, conditions)
    return replace(signature, unchecked=(*signature.unchecked, *unclear))


def restore_scalar_inputs(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the example inputs of a compile with exported SymInts in place of dynamic scalars.

    torch's code generation handles such inputs as 0-dim tensors that it unpacks, but the path from
    an exported program to it passes None for them.
    """
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return [
        value if isinstance(value, torch.SymInt) else example
        for value, example in zip(values, inputs, strict=True)
    ]


def _name_arguments(program: ExportedProgram, fallback: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name in the model and the path in `(args, kwargs)` of each leaf of a call."""
    spec = program.call_spec.in_spec
    paths = _list_leaf_paths(spec)
    if paths is None or len(paths) != len(fallback):
        return [(name, name) for name in fallback]
    entry = program.module_call_graph[0].signature if program.module_call_graph else None
    arguments = getattr(entry, "forward_arg_names", None) or []
    pairs: list[tuple[str, str]] = []
    for (side, first, *rest), name in zip(paths, fallback, strict=True):
        inner = pytree.keystr(tuple(rest))
        if side.idx == 1:
            pairs.append((f"{first.key}{inner}", f"kwargs[{first.key!r}]{inner}"))
        else:
            outer = arguments[first.idx] if first.idx < len(arguments) else name
            pairs.append((f"{outer}{inner}", f"args[{first.idx}]{inner}"))
    return pairs


def _list_leaf_paths(spec: Any) -> list[tuple[Any, ...]] | None:
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


def _describe_input(name: str, path: str, value: Any, argument: Any) -> Input:
    if isinstance(argument, TensorArgument) and isinstance(value, torch.Tensor):
        return TensorInput(
            name=name,
            path=path,
            dtype=_dtype_name(value),
            shape=tuple(_to_extent(name, size) for size in value.shape),
            stride=tuple(_to_extent(name, stride) for stride in value.stride()),
            device=str(value.device),
        )
    if isinstance(argument, ConstantArgument):
        return ConstantInput(name, path, argument.value)
    if type(argument) in _SCALARS:
        return SymbolInput(name, path, _SCALARS[type(argument)], str(_to_extent(name, value)))
    class_name = getattr(argument, "class_fqn", type(value).__name__)
    raise exc.UncheckableInputError(
        name=name,
        why=f"it is an object of class {class_name}",
        fix="Export the model with tensors and numbers as inputs in place of the object.",
    )


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _to_extent(name: str, value: Any) -> Extent:
    if isinstance(value, int):
        return int(value)
    try:
        node = to_node(value.node.expr)
    except ValueError as error:
        raise exc.UncheckableInputError(
            name=name,
            why=f"{value} cannot be computed: {error}",
            fix="Export the model so that each size is computed from sizes of the inputs.",
        ) from None
    return node if isinstance(node, int) else expression.show(node)


def find_symbols(inputs: Iterable[Input]) -> Iterator[tuple[str, str]]:
    """Yield every symbol in the inputs' sizes, strides and scalars, and the expression it is in."""
    for inp in inputs:
        extents: tuple[Extent, ...] = ()
        if isinstance(inp, TensorInput):
            extents = (*inp.shape, *inp.stride)
        elif isinstance(inp, SymbolInput):
            extents = (inp.symbol,)
        for extent in extents:
            if isinstance(extent, str):
                for name in expression.symbols(expression.parse(extent)):
                    yield name, extent


def _list_symbols(program: ExportedProgram, inputs: Iterable[Input]) -> dict[str, Range]:
    limits = {
        key.name: value
        for key, value in program.range_constraints.items()
        if isinstance(key, sympy.Symbol)
    }
    names: dict[str, Range] = {}
    plain: set[str] = set()
    for name, extent in find_symbols(inputs):
        names[name] = to_range(limits.get(name))
        if name == extent:
            plain.add(name)
    for name in names.keys() - plain:
        names[name] = _derive_range(program, name) or names[name]
    return names


def _derive_range(program: ExportedProgram, name: str) -> Range | None:
    """Derive the range of a symbol that is no dimension by itself from dimensions linear in it.

    torch.export narrows the symbol's own range to 2 or more regardless of the user's bounds, and
    does not check it.
    """
    range_ = Range()
    for key, value in program.range_constraints.items():
        if isinstance(key, sympy.Symbol) or {symbol.name for symbol in key.free_symbols} != {name}:
            continue
        (symbol,) = key.free_symbols
        terms = sympy.Poly(key, symbol).all_coeffs() if key.is_polynomial(symbol) else []
        if len(terms) == 2 and terms[0].is_Integer and terms[0] > 0 and terms[1].is_Integer:
            scale, shift = map(int, terms)
            limits = to_range(value)
            low = None if limits.min is None else -((shift - limits.min) // scale)
            high = None if limits.max is None else (limits.max - shift) // scale
            range_ = intersect(range_, Range(low, high))
    return None if range_ == Range() else range_


def to_range(limits: Any) -> Range:
    """Convert torch's `ValueRanges`, dropping bounds at int64's limits; None means unbounded."""
    if limits is None:
        return Range()
    low = int(limits.lower) if limits.lower > -_NO_MAXIMUM else None
    high = int(limits.upper) if limits.upper < _NO_MAXIMUM else None
    return Range(low, high)


def _list_range_conditions(program: ExportedProgram) -> list[sympy.Basic]:
    """Return the ranges of dimensions that are expressions; most follow from symbols' ranges."""
    conditions: list[sympy.Basic] = []
    for key, limits in program.range_constraints.items():
        if not isinstance(key, sympy.Symbol) and isinstance(key, sympy.Expr):
            range_ = to_range(limits)
            if range_.min is not None:
                conditions.append(sympy.Ge(key, range_.min))
            if range_.max is not None:
                conditions.append(sympy.Le(key, range_.max))
    return conditions


def _list_asserts(program: ExportedProgram, environment: ShapeEnv | None) -> list[sympy.Basic]:
    """Return the graph's asserts on sizes; generated code has them too, with its own messages."""
    conditions: list[sympy.Basic] = []
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_scalar.default
    ):
        value = getattr(node.args[0], "meta", {}).get("val")
        if isinstance(value, torch.SymBool):
            conditions.append(value.node.expr)
    if environment is not None:
        for asserts in environment.deferred_runtime_asserts.values():
            conditions += [environment.replace(condition.expr) for condition in asserts]
    return conditions


_SOURCE = re.compile(r"\.(size|stride)\(\)$")


def _parse_guards(
    program: ExportedProgram, signature: Signature, unclear: list[str]
) -> list[sympy.Basic]:
    """Parse the guards that torch.export keeps as Python text over `L['x'].size()[0]`.

    Args:
        unclear: receives the guards that cannot be parsed.
    """
    conditions: list[sympy.Basic] = []
    sources = _Sources(signature)
    for text in getattr(program, "_guards_code", None) or []:
        try:
            tree = sources.visit(ast.parse(text, mode="eval"))
            conditions.append(to_sympy(expression.parse(ast.unparse(tree))))
        except (ValueError, SyntaxError, exc.BadExpressionError):
            unclear.append(text)
    return conditions


class _Sources(ast.NodeTransformer):
    """A transformer that replaces the sources in torch.export's guards by symbols' expressions.

    Raises:
        ValueError: a source is not the size, stride or value of an input.
    """

    def __init__(self, signature: Signature) -> None:
        self.tensors: dict[str, TensorInput] = {}
        self.numbers: dict[str, SymbolInput] = {}
        for position, inp in enumerate(signature.inputs):
            names = {*_list_spellings(inp.name), f"L['flat_args'][{position}]"}
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


def _list_spellings(name: str) -> list[str]:
    """Return the ways a guard may write an input: `x`, and `rest_0` also as `rest[0]`."""
    first, bracket, rest = name.partition("[")
    spellings = [f"L['{first}']{bracket}{rest}"]
    varied = re.fullmatch(r"(.+)_(\d+)", first)
    if varied:
        spellings.append(f"L['{varied[1]}'][{varied[2]}]{bracket}{rest}")
    return [ast.unparse(ast.parse(spelling, mode="eval")) for spelling in spellings]


def _describe_outputs(program: ExportedProgram) -> tuple[Output, ...]:
    returned = program.graph.output_node().args[0]
    users = [
        (value, spec.arg)
        for value, spec in zip(returned, program.graph_signature.output_specs, strict=True)
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    ]
    paths = _list_leaf_paths(program.call_spec.out_spec)
    if paths is None or len(paths) != len(users):
        paths = [(pytree.SequenceKey(index),) for index in range(len(users))]
    return tuple(
        _describe_output(pytree.keystr(path), value, argument)
        for path, (value, argument) in zip(paths, users, strict=True)
    )


def _describe_output(path: str, returned: Any, argument: Any) -> Output:
    value = getattr(returned, "meta", {}).get("val", returned)
    if isinstance(value, torch.Tensor):
        shape = tuple(_show_size(size) for size in value.shape)
        return TensorOutput(path, _dtype_name(value), shape, str(value.device))
    if isinstance(argument, ConstantArgument):
        return ConstantOutput(path, argument.value)
    if type(argument) in _SCALARS:
        return SymbolOutput(path, _SCALARS[type(argument)], str(_show_size(value)))
    return ConstantOutput(path, value if isinstance(value, (int, float, str)) else None)


def _show_size(value: Any) -> Extent:
    """Return an output size in signature syntax, else as torch prints it; nothing evaluates it."""
    if isinstance(value, int):
        return int(value)
    inner = getattr(getattr(value, "node", None), "expr", value)
    try:
        node = to_node(inner)
    except ValueError:
        return str(inner)
    return node if isinstance(node, int) else expression.show(node)


def _dump_spec(spec: Any, what: str) -> str:
    if spec is None:
        return ""
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        name = _find_unserializable(spec)
        why = str(error).rstrip(".") if name is None else f"{name} has no name for serialization"
        raise exc.UnserializableClassError(what=what, why=why) from None


def _find_unserializable(spec: Any) -> str | None:
    """Return the name of a class that is registered without a name for serialization, if any."""
    if spec.is_leaf():
        return None
    # All named tuples have one type; their class is the context.
    cls = spec.context if spec.type is namedtuple else spec.type
    registered = pytree.SUPPORTED_SERIALIZED_TYPES.get(cls)
    if (
        registered is None
        or registered.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND
    ):
        return f"{cls.__module__}.{cls.__qualname__}"
    names = map(_find_unserializable, spec.children())
    return next((name for name in names if name is not None), None)
