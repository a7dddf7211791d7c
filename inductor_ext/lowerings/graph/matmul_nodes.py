"""Description of an FX matmul node as a `GemmProblem`.

The graph is the one that Inductor lowers: ATen operators with fake tensors in `node.meta["val"]`.
`problem_of` describes the matmul itself, without fused prologue or epilogue; `why_unsupported` says
why a matmul has no problem. Symbolic sizes and strides are replaced by their size hints or by the
values that the caller passes. The alignment of an operand holds for all sizes that the graph may
meet.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import sympy  # type: ignore[import-untyped]

from inductor_ext import _compat, numerics
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import (
    DTYPE_BITS,
    FP8,
    HALF,
    VECTOR_BYTES,
    EpilogueInput,
    Operand,
)

if TYPE_CHECKING:
    import torch
    from torch import fx

Hints = Mapping[Any, int]
"""Values of size symbols (sympy)."""

FLOATS = HALF | {"float32"}


class NotCovered(Exception):
    """A matmul that no problem describes; the message is the reason."""


def problem_of(node: fx.Node, hints: Hints | None = None) -> GemmProblem | None:
    """Return the problem of a matmul node.

    Covers aten.mm, addmm, bmm, baddbmm, _int_mm, _scaled_mm with tensorwise or rowwise scales,
    _grouped_mm and _scaled_grouped_mm. A bias is an input of the epilogue, and so are fp8 scales:
    A's, then B's, then the bias.

    Args:
        node: of a graph that Inductor is about to lower.
        hints: sizes to use, by symbol; other symbols get their size hints.

    Returns:
        None if the node is not a matmul, or is one that is not covered: see `why_unsupported`.
    """
    reader = _readers().get(node.target)
    if reader is None:
        return None
    try:
        return reader(node, hints or {})
    except NotCovered:
        return None


def is_matmul(node: fx.Node) -> bool:
    """Whether a node is a matmul, covered or not."""
    return node.op == "call_function" and node.target in _readers()


def why_unsupported(node: fx.Node) -> str | None:
    """Return why a node has no problem; None if it has one."""
    reader = _readers().get(node.target)
    if reader is None:
        return f"{node.target} is not a supported matmul"
    try:
        reader(node, {})
    except NotCovered as reason:
        return str(reason)
    return None


def operand_of(value: torch.Tensor, hints: Hints | None = None) -> Operand:
    """Return a tensor as an operand of a problem.

    Args:
        value: [rows, columns] or [batch, rows, columns]; may be a fake tensor.
        hints: as in `problem_of`.

    Raises:
        NotCovered: the dtype is not in `DTYPE_BITS`, or a size is known only at run time.
    """
    *batch, rows, columns = concrete_sizes(value.shape, hints)
    *batch_stride, row, column = concrete_sizes(value.stride(), hints)
    operand = Operand.of(
        dtype_of(value),
        (rows, columns),
        (row, column),
        batch=batch[0] if batch else 1,
        batch_stride=batch_stride[0] if batch else 0,
    )
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    # Inductor guarantees a 16-byte aligned input, by copying it if needed, only if the input was
    # aligned at compile time. Otherwise any address may be passed, so nothing in between can be
    # assumed.
    vector = VECTOR_BYTES // value.element_size()
    if not statically_known_true(value.storage_offset() % vector == 0):
        return dataclasses.replace(operand, alignment=1)
    symbols = {
        axis: stride
        for axis, stride in enumerate(value.stride(), -value.dim())
        if not isinstance(stride, int)
    }
    return with_static_alignment(
        operand, symbols, lambda stride, size: statically_known_true(stride % size == 0)
    )


def with_static_alignment(
    operand: Operand, symbols: Mapping[int, Any], divides: Callable[[Any, int], bool]
) -> Operand:
    """Return an operand with the alignment that holds for all sizes.

    Args:
        operand: the operand at one size.
        symbols: the symbolic strides by axis, counted from the last, -1.
        divides: whether a stride is known to be a multiple of a number.
    """
    # The inner axis has stride 1, or one element and a stride that is never used.
    inner = {"row": -1, "column": -2, "strided": None}[operand.layout]
    alignment = operand.alignment
    for axis, stride in symbols.items():
        while axis != inner and alignment > 1 and not divides(stride, alignment):
            alignment //= 2
    return dataclasses.replace(operand, alignment=alignment)


def concrete_sizes(values: Sequence[Any], hints: Hints | None = None) -> tuple[int, ...]:
    """Return sizes or strides as ints.

    Args:
        values: int or SymInt.
        hints: as in `problem_of`.

    Raises:
        NotCovered: a value is known only at run time.
    """
    return tuple(_concrete_size(value, hints or {}) for value in values)


def _concrete_size(value: Any, hints: Hints) -> int:
    if isinstance(value, int):
        return value
    node = value.node
    values = {**_compat.symbol_hints(node.shape_env), **hints}
    number = sympy.sympify(node.expr.xreplace(values))
    if not number.is_number:
        raise NotCovered(f"the size {node.expr} is data-dependent")
    return int(number)


def dtype_of(value: torch.Tensor) -> str:
    """Return the name of a tensor's dtype.

    Raises:
        NotCovered: it is not in `DTYPE_BITS`.
    """
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPE_BITS:
        raise NotCovered(f"a tensor of {name} is not supported")
    return name


def broadcast_kind(
    value: torch.Tensor, shape: Sequence[int], hints: Hints | None = None
) -> Literal["matrix", "row", "column", "scalar"]:
    """Return how a tensor is broadcast to an output.

    Whatever is not one row, one column or one scalar counts as a matrix.

    Args:
        value: a tensor whose shape is broadcast to `shape`.
        shape: of the output, [..., M, N], ints.
        hints: as in `problem_of`.
    """
    sizes = concrete_sizes(value.shape, hints)
    strides = concrete_sizes(value.stride(), hints)
    # An expanded dimension holds one element.
    sizes = tuple(1 if stride == 0 else size for size, stride in zip(sizes, strides, strict=True))
    sizes = (1,) * (len(shape) - len(sizes)) + sizes
    # A vector is a row even if the output has only one row.
    if sizes == tuple(shape) and value.dim() > 1:
        return "matrix"
    if math.prod(sizes) == 1:
        return "scalar"
    if sizes[-1] == shape[-1] and math.prod(sizes[:-1]) == 1:
        return "row"
    if sizes[-1] == 1 and sizes[:-1] == tuple(shape[:-1]):
        return "column"
    return "matrix"


def value_of(argument: Any) -> torch.Tensor:
    """Return the tensor of an argument: its fake tensor, or the constant itself.

    Raises:
        NotCovered: it is not known.
    """
    import torch

    value = argument.meta.get("val") if hasattr(argument, "meta") else None
    if value is None and getattr(argument, "op", None) == "get_attr":
        value = getattr(argument.graph.owning_module, argument.target, None)
    if not isinstance(value, torch.Tensor):
        raise NotCovered(f"the graph has no metadata for {argument}")
    return value


def call_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a node's operator by name, including defaults."""
    arguments: Any = node.target._schema.arguments  # type: ignore[union-attr]
    args = dict(zip((argument.name for argument in arguments), node.args, strict=False))
    return (
        {argument.name: argument.default_value for argument in arguments} | args | dict(node.kwargs)
    )


def matmul_operands(matmul: fx.Node) -> list[fx.Node]:
    """Return the operands A and B of aten.mm, addmm or _scaled_mm, their scales, and the bias if
    any.
    """
    import torch

    args: Any = matmul.args
    if matmul.target is not torch.ops.aten._scaled_mm.default:
        *bias, a, b = args[:3]
        return [a, b, *bias]
    bias = matmul.kwargs.get("bias", (*args, None)[4])
    return [*args[:4], *([] if bias is None else [bias])]


def _tensors(node: fx.Node, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A, B and the output, which must be dense, non-empty CUDA tensors."""
    import torch

    tensors = tuple(value_of(operand) for operand in (a, b, node))
    for value in tensors:
        if value.device.type != "cuda":
            raise NotCovered(f"it runs on {value.device.type}")
        if torch.version.hip is not None:
            raise NotCovered("it runs on ROCm")
        if value.layout is not torch.strided:
            raise NotCovered(f"an operand has layout {value.layout}")
        if value.is_conj() or value.is_neg():
            raise NotCovered("an operand is lazily conjugated or negated")
        if 0 in concrete_sizes(value.shape):
            raise NotCovered("a dimension has size 0")
    # Inductor drops the mask of a store whose index is constant, which would store the whole tile.
    if all(isinstance(size, int) and size == 1 for size in tensors[2].shape):
        raise NotCovered("the output has one element")
    return tensors  # type: ignore[return-value]


def _require_dtypes(a: Operand, b: Operand, allowed: frozenset[str]) -> None:
    # The two fp8 dtypes may be mixed.
    if not {a.dtype, b.dtype} <= allowed or (a.dtype != b.dtype and allowed is not FP8):
        raise NotCovered(f"operands of {a.dtype} and {b.dtype} are not supported")


def _numerics_flags(dtype: str) -> dict[str, Any]:
    """Return the problem fields that hold the user's numerics flags for a dtype."""
    import torch

    precision = torch.backends.cuda.matmul.fp32_precision
    return {
        "deterministic": numerics.is_deterministic(),
        "tf32": dtype == "float32" and precision == "tf32",
        "math_flags": numerics.matmul_flags(dtype),
    }


def _matmul_problem(
    operation: Any,
    node: fx.Node,
    operands: tuple[Any, Any],
    hints: Hints,
    allowed: frozenset[str] = FLOATS,
    **rest: Any,
) -> GemmProblem:
    """Return the problem of a matmul or a batched matmul."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    left, right, result = _tensors(node, *operands)
    a, b = operand_of(left, hints), operand_of(right, hints)
    _require_dtypes(a, b, allowed)
    *batch, m, k = concrete_sizes(left.shape, hints)
    n = concrete_sizes(right.shape, hints)[-1]
    if not statically_known_true(left.shape[-1] >= 1):
        raise NotCovered("K may be 0")
    fields: dict[str, Any] = {"batch": batch[0] if batch else 1, **_numerics_flags(a.dtype), **rest}
    return GemmProblem(operation, m, n, k, a, b, dtype_of(result), **fields)


def _plain_reader(
    operation: str, allowed: frozenset[str] = FLOATS, **rest: Any
) -> Callable[[fx.Node, Hints], GemmProblem]:
    """Return the reader of a @ b."""

    def read(node: fx.Node, hints: Hints) -> GemmProblem:
        args = call_arguments(node)
        return _matmul_problem(
            operation, node, (args["self"], args["mat2"]), hints, allowed, **rest
        )

    return read


def _biased_reader(
    operation: str, first: str, second: str
) -> Callable[[fx.Node, Hints], GemmProblem]:
    """Return the reader of beta * bias + alpha * (a @ b)."""

    def read(node: fx.Node, hints: Hints) -> GemmProblem:
        args = call_arguments(node)
        problem = _matmul_problem(operation, node, (args[first], args[second]), hints)
        alpha, beta = args["alpha"], args["beta"]
        if not all(isinstance(scale, (int, float)) for scale in (alpha, beta)):
            raise NotCovered("alpha or beta is not constant")
        operations = alpha != 1
        inputs: tuple[EpilogueInput, ...] = ()
        if beta != 0:
            inputs = (_epilogue_input(args["self"], node, hints),)
            operations += 1 + (beta != 1)
        return dataclasses.replace(problem, epilogue=Epilogue(inputs, operations))

    return read


def _epilogue_input(argument: Any, node: fx.Node, hints: Hints) -> EpilogueInput:
    value = value_of(argument)
    shape = concrete_sizes(value_of(node).shape, hints)
    return EpilogueInput(dtype_of(value), broadcast_kind(value, shape, hints))


def _scales_epilogue(args: dict[str, Any], columns: Sequence[int], rows: Sequence[int]) -> Epilogue:
    """Return the epilogue of an fp8 matmul: tensorwise scales, or rowwise scales of A and
    columnwise ones of B.

    Args:
        args: the arguments of the call.
        columns: the required shape of A's rowwise scales.
        rows: the required shape of B's columnwise scales.
    """
    if args["scale_result"] is not None:
        raise NotCovered("the result is scaled to fp8 (scale_result)")
    a, b = value_of(args["scale_a"]), value_of(args["scale_b"])
    if {dtype_of(a), dtype_of(b)} != {"float32"}:
        raise NotCovered(f"scales of {dtype_of(a)} and {dtype_of(b)} instead of float32")
    shapes = concrete_sizes(a.shape), concrete_sizes(b.shape)
    if math.prod(shapes[0]) == math.prod(shapes[1]) == 1:
        kinds = ("scalar", "scalar")
    elif shapes == (tuple(columns), tuple(rows)):
        kinds = ("column", "row")
    else:
        raise NotCovered(
            f"scales of {list(shapes[0])} and {list(shapes[1])}, neither tensorwise nor rowwise"
        )
    return Epilogue(tuple(EpilogueInput("float32", kind) for kind in kinds), 2)  # type: ignore[arg-type]


def _add_bias(epilogue: Epilogue, args: dict[str, Any], node: fx.Node, hints: Hints) -> Epilogue:
    if args["bias"] is None:
        return epilogue
    inputs = (*epilogue.inputs, _epilogue_input(args["bias"], node, hints))
    return dataclasses.replace(epilogue, inputs=inputs, pointwise=epilogue.pointwise + 1)


def _read_scaled_mm(node: fx.Node, hints: Hints) -> GemmProblem:
    args = call_arguments(node)
    operands = args["self"], args["mat2"]
    problem = _matmul_problem("scaled", node, operands, hints, FP8)
    m, n = concrete_sizes(value_of(node).shape)
    epilogue = _add_bias(_scales_epilogue(args, (m, 1), (1, n)), args, node, hints)
    return dataclasses.replace(
        problem, epilogue=epilogue, fast_accumulation=bool(args["use_fast_accum"])
    )


_DIVIDED: Mapping[tuple[int, int], Literal["m", "n", "k"]] = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}
"""The dimension that groups divide, by the number of dimensions of A and B."""


def _read_grouped(node: fx.Node, hints: Hints, allowed: frozenset[str] = FLOATS) -> GemmProblem:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    arguments = call_arguments(node)
    a, b, result = _tensors(node, arguments["self"], arguments["mat2"])
    divided = _DIVIDED.get((a.dim(), b.dim()))
    if divided is None:
        raise NotCovered("both operands have three dimensions, so no dimension is grouped")
    if arguments["bias"] is not None:
        raise NotCovered("it has a bias")
    dims = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
    lengths = [dims.pop(divided), *dims.values(), *value_of(arguments["offs"]).shape]
    if not all(isinstance(size, int) for size in lengths[1:]):
        raise NotCovered("a dimension other than the grouped one is dynamic")
    if not statically_known_true(lengths[0] >= 1):
        raise NotCovered("the grouped dimension may be 0")
    left, right = operand_of(a, hints), operand_of(b, hints)
    _require_dtypes(left, right, allowed)
    (m, k), n = concrete_sizes(a.shape, hints)[-2:], concrete_sizes(b.shape, hints)[-1]
    fields: dict[str, Any] = {
        "batch": lengths[-1],
        "divided": divided,
        **_numerics_flags(left.dtype),
    }
    return GemmProblem("grouped", m, n, k, left, right, dtype_of(result), **fields)


def _read_scaled_grouped(node: fx.Node, hints: Hints) -> GemmProblem:
    args = call_arguments(node)
    problem = _read_grouped(node, hints, FP8)
    m, n = (
        concrete_sizes(value_of(args[name]).shape)[i] for name, i in (("self", -2), ("mat2", -1))
    )
    rows, columns = {
        "m": ((m,), (problem.batch, n)),
        "n": ((problem.batch, m), (n,)),
        "k": ((problem.batch * m,), (problem.batch * n,)),
    }[problem.divided]
    return dataclasses.replace(
        problem,
        epilogue=_scales_epilogue(args, rows, columns),
        fast_accumulation=bool(args["use_fast_accum"]),
    )


@functools.cache
def _readers() -> Mapping[Any, Callable[[fx.Node, Hints], GemmProblem]]:
    import torch

    aten = torch.ops.aten
    return {
        aten.mm.default: _plain_reader("mm"),
        aten.addmm.default: _biased_reader("addmm", "mat1", "mat2"),
        aten.bmm.default: _plain_reader("bmm"),
        aten.baddbmm.default: _biased_reader("baddbmm", "batch1", "batch2"),
        aten._int_mm.default: _plain_reader("int_mm", frozenset({"int8"}), accumulator="int32"),
        aten._scaled_mm.default: _read_scaled_mm,
        aten._grouped_mm.default: _read_grouped,
        aten._scaled_grouped_mm.default: _read_scaled_grouped,
    }
