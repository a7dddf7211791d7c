"""Operators that can be computed in chunks of rows, and what each needs of its inputs for that.

An operator can be computed in chunks if a chunk of its result needs only the same rows of some
inputs, and the other inputs as a whole. It can also sum over the rows (`TOTAL`): the result is then
the sum of what the chunks contribute. `list_needs` says what an operator needs, and `emit_chunk`
adds the operators that compute a chunk.

An operator that is not listed here, or whose rows depend on each other (a softmax over the rows, a
random operator), is never computed in chunks. Settings: `memory_budget`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from inductor_ext.lowerings.graph import operator_kinds as kinds
from inductor_ext.lowerings.graph.chunk_rows import (
    TOTAL,
    Builder,
    Needs,
    Refused,
    Rows,
    broadcast_rows,
    list_rows,
    shape_of,
    tensor_value,
)
from inductor_ext.lowerings.graph.cleanup import is_pure
from inductor_ext.lowerings.graph.matmul_nodes import call_arguments

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class _Family:
    """Operators with the same rule."""

    needs: Callable[[fx.Node, Rows, int], Iterator[Needs]]
    """Yields what a chunk needs: the arguments are those of `list_needs`."""
    emit: Callable[[fx.Node, Rows, Needs, Builder], fx.Node]
    """Adds what computes a chunk: the arguments are those of `emit_chunk`."""


def list_needs(node: fx.Node, out: Rows, rows: int) -> list[Needs]:
    """Return what a chunk of an operator's result needs.

    Args:
        node: the operator.
        out: the rows of its result; `TOTAL` for a sum over the rows.
        rows: number of rows.

    Returns:
        Alternatives, with each input; empty if the operator cannot be computed in chunks.
    """
    family = _find_family(node)
    if family is None:
        return []
    try:
        found = list(family.needs(node, out, rows))
    except Refused:
        return []
    return [{**dict.fromkeys(node.all_input_nodes), **needs} for needs in found]


def list_results(node: fx.Node, rows: int) -> list[Rows]:
    """Return which dimensions of an operator's result can be the rows, and `TOTAL`."""
    try:
        return [*list_rows(shape_of(node), rows), TOTAL]
    except Refused:
        return []


def emit_chunk(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    """Add what computes a chunk of an operator's result, and return it.

    Args:
        node: the operator.
        out: the rows of its result. For `TOTAL`, what the chunk contributes to the sum is added:
            in `total_dtype`, and in any shape with the elements of the result.
        needs: one of the alternatives of `list_needs`.
        build: adds operators.
    """
    family = _find_family(node)
    assert family is not None
    return family.emit(node, out, needs, build)


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which contributions to a sum of some dtype are added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def total_divisor(node: fx.Node) -> int:
    """Return by what the sum over all chunks is divided: for a mean, the number of elements."""
    if node.target not in kinds.MEANS:
        return 1
    return math.prod(shape_of(node.all_input_nodes[0])) // math.prod(shape_of(node))


def _find_family(node: fx.Node) -> _Family | None:
    if node.op != "call_function" or not is_pure(node):
        return None
    family = _FAMILIES.get(node.target)
    return _POINTWISE if family is None and kinds.is_pointwise(node) else family


def _require_rows(out: Rows) -> None:
    if out == TOTAL:
        raise Refused


def _call_with(node: fx.Node, build: Builder, changes: dict[str, Any]) -> fx.Node:
    """Add a call of a node's operator on chunks, with some arguments changed."""
    from torch import fx

    arguments = call_arguments(node) | changes
    arguments = fx.node.map_arg(arguments, build.value)
    schema: Any = node.target._schema  # type: ignore[union-attr]
    args = [arguments[item.name] for item in schema.arguments if not item.kwarg_only]
    kwargs = {item.name: arguments[item.name] for item in schema.arguments if item.kwarg_only}
    return build.call(node.target, *args, **kwargs)


# Pointwise operators


def _pointwise_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    shape = shape_of(node)
    yield {
        operand: broadcast_rows(shape_of(operand), shape, out) for operand in node.all_input_nodes
    }


def _broadcast_operand(
    operand: fx.Node, node: fx.Node, out: Rows, needs: Needs, build: Builder
) -> fx.Node:
    """Return an operand of a chunk, with one dimension in place of those of the rows."""
    value = build.value(operand)
    if needs[operand] is not None or out.count == 1:
        return value
    shape = shape_of(operand)
    offset = len(shape_of(node)) - len(shape)
    start, end = out.start - offset, out.end - offset
    if end <= 0:
        return value
    return build.call(aten.reshape.default, value, [*shape[: max(0, start)], 1, *shape[end:]])


def _emit_pointwise(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    from torch import fx

    def convert(operand: fx.Node) -> fx.Node:
        return _broadcast_operand(operand, node, out, needs, build)

    # A memory format only chooses a layout.
    kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
    args, kwargs = fx.node.map_arg((node.args, kwargs), convert)
    return build.call(node.target, *args, **kwargs)


def _emit_expand(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    value = _broadcast_operand(node.all_input_nodes[0], node, out, needs, build)
    return build.call(aten.expand.default, value, out.replace(shape_of(node), build.length))


def _full_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    yield {}


def _emit_full(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    size = out.replace(shape_of(node), build.length)
    return build.call(aten.full.default, size, node.args[1], **node.kwargs)


# Views


def _reshape_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    source = node.all_input_nodes[0]
    before = math.prod(shape_of(node)[: out.start])
    shape = shape_of(source)
    for found in list_rows(shape, rows):
        if math.prod(shape[: found.start]) == before:
            yield {source: found}


def _emit_reshape(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    source = build.value(node.all_input_nodes[0])
    return build.call(aten.reshape.default, source, out.replace(shape_of(node), build.length))


def _permutation(node: fx.Node) -> list[int]:
    dims = len(shape_of(node))
    if node.target is aten.permute.default:
        return [dim % dims for dim in call_arguments(node)["dims"]]
    order = list(range(dims))
    arguments = call_arguments(node)
    first, second = arguments.get("dim0", 0) % max(dims, 1), arguments.get("dim1", 1) % max(dims, 1)
    order[first], order[second] = order[second], order[first]
    return order


def _permute_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    order = _permutation(node)[out.start : out.end]
    if order != list(range(order[0], order[0] + out.count)):
        raise Refused
    yield {node.all_input_nodes[0]: Rows(order[0], out.count)}


def _emit_permute(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    source = node.all_input_nodes[0]
    found = needs[source]
    assert found is not None
    order = _permutation(node)
    dims = [found.map_dim(dim) for dim in (*order[: out.start + 1], *order[out.end :])]
    return build.call(aten.permute.default, build.value(source), dims)


# Operators along one dimension, which is none of the rows


def _dim_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    """Yield what an operator needs whose inputs have the rows of its result."""
    _require_rows(out)
    shape = shape_of(node)
    if _dim_of(node) in out:
        raise Refused
    for operand in node.all_input_nodes:
        operand_shape = shape_of(operand)
        if (
            len(operand_shape) != len(shape)
            or operand_shape[out.start : out.end] != shape[out.start : out.end]
        ):
            raise Refused
    yield dict.fromkeys(node.all_input_nodes, out)


def _dim_of(node: fx.Node) -> int:
    """Return the dimension along which an operator works.

    Raises:
        Refused: there is none.
    """
    dims = len(shape_of(node))
    if dims == 0:
        raise Refused
    dim: int = call_arguments(node)["dim"] % dims
    return dim


def _emit_along_dim(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    return _call_with(node, build, {"dim": out.map_dim(_dim_of(node))})


def _getitem_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    yield {node.all_input_nodes[0]: out}


def _emit_getitem(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    return build.call(operator.getitem, build.value(node.all_input_nodes[0]), node.args[1])


def _select_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    source = node.all_input_nodes[0]
    dim = _selected_dim(node)
    if out.start < dim < out.end:
        raise Refused
    yield {source: out.shift(dim <= out.start)}


def _selected_dim(node: fx.Node) -> int:
    dim: int = call_arguments(node)["dim"] % len(shape_of(node.all_input_nodes[0]))
    return dim


def _emit_select(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    found = needs[node.all_input_nodes[0]]
    assert found is not None
    return _call_with(node, build, {"dim": found.map_dim(_selected_dim(node))})


def _embedding_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    weight, indices = node.args[:2]
    assert not isinstance(indices, (int, float))
    if out.end > len(shape_of(indices)) or weight is indices:  # type: ignore[arg-type]
        raise Refused
    yield {indices: out}  # type: ignore[dict-item]


def _emit_call(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    return _call_with(node, build, {})


# Reductions: the dimensions `dim` are removed, or have size 1


def _reduced_dims(node: fx.Node) -> list[int]:
    dims = len(shape_of(node.all_input_nodes[0]))
    reduced = call_arguments(node).get("dim")
    if reduced is None or reduced == []:
        return list(range(dims))
    return [dim % dims for dim in ([reduced] if isinstance(reduced, int) else reduced)]


def _reduction_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    source = node.all_input_nodes[0]
    shape, reduced = shape_of(source), _reduced_dims(node)
    keeps_dims = bool(call_arguments(node).get("keepdim"))
    for found in list_rows(shape, rows):
        inside = [dim in reduced for dim in range(found.start, found.end)]
        if out == TOTAL:
            if node.target in kinds.SUMS and all(inside):
                yield {source: found}
        elif not any(inside):
            removed = 0 if keeps_dims else sum(dim < found.start for dim in reduced)
            if found.shift(-removed) == out:
                yield {source: found}


def _emit_reduction(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    source = node.all_input_nodes[0]
    found = needs[source]
    assert found is not None
    dims = sorted({found.map_dim(dim) for dim in _reduced_dims(node)})
    if out == TOTAL:
        dtype = total_dtype(tensor_value(node).dtype)
        return build.call(aten.sum.dim_IntList, build.value(source), dims, False, dtype=dtype)
    is_single = isinstance(call_arguments(node)["dim"], int)
    return _call_with(node, build, {"dim": dims[0] if is_single else dims})


# Matmuls


def _mm_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    a, b = node.args[:2]
    return _matmul_needs(a, b, out, rows, None, node)


def _matmul_needs(
    a: Any, b: Any, out: Rows, rows: int, bias: Any, node: fx.Node
) -> Iterator[Needs]:
    """Yield what a chunk of A @ B + bias needs: rows of A, of B, or of K, or batches."""
    dims = len(shape_of(a))
    if a is b or bias is a or bias is b:
        raise Refused
    if out == TOTAL:
        if bias is None and shape_of(a)[-1] == rows:
            yield {a: Rows(dims - 1, 1), b: Rows(dims - 2, 1)}
        return
    if out.count > 1:
        raise Refused
    needs: Needs = {}
    if bias is not None:
        needs[bias] = broadcast_rows(shape_of(bias), shape_of(node), out)
    if out.start == dims - 1:
        yield {**needs, a: None, b: out}
    elif out.start == dims - 2:
        yield {**needs, a: out, b: None}
    else:
        yield {**needs, a: out, b: out}


def _addmm_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    bias, a, b = node.args[:3]
    return _matmul_needs(a, b, out, rows, bias, node)


def _emit_matmul(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    value = _call_with(node, build, {})
    if out != TOTAL:
        return value
    dtype = value.meta["val"].dtype
    wide = total_dtype(dtype)
    if wide == dtype:
        return value
    return build.call(torch.ops.prims.convert_element_type.default, value, wide)


# Values read and written at indices


def _gather_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    if len({*node.all_input_nodes}) < len([*_tensor_arguments(node)]):
        raise Refused
    return _dim_needs(node, out, rows)


def _tensor_arguments(node: fx.Node) -> Iterator[Any]:
    from torch import fx

    return (value for value in call_arguments(node).values() if isinstance(value, fx.Node))


def _padding_needs(node: fx.Node, out: Rows, rows: int) -> Iterator[Needs]:
    _require_rows(out)
    shape = shape_of(node)
    if any(_padding(node)[dim] != (0, 0) for dim in range(out.start, out.end)):
        raise Refused
    if len(shape) == 0:
        raise Refused
    yield {node.all_input_nodes[0]: out}


def _padding(node: fx.Node) -> list[tuple[int, int]]:
    """Return the elements that are added before and after each dimension."""
    pad = call_arguments(node)["pad"]
    dims = len(shape_of(node))
    pairs = [(pad[index], pad[index + 1]) for index in range(0, len(pad), 2)]
    return [*[(0, 0)] * (dims - len(pairs)), *reversed(pairs)]


def _emit_padding(node: fx.Node, out: Rows, needs: Needs, build: Builder) -> fx.Node:
    pairs = _padding(node)
    kept = [*pairs[: out.start + 1], *pairs[out.end :]]
    return _call_with(node, build, {"pad": [size for pair in reversed(kept) for size in pair]})


def _family_of(family: _Family, *targets: Any) -> dict[Any, _Family]:
    return dict.fromkeys(targets, family)


_POINTWISE = _Family(_pointwise_needs, _emit_pointwise)
_FAMILIES: dict[Any, _Family] = {
    **_family_of(_Family(_pointwise_needs, _emit_expand), aten.expand.default),
    **_family_of(_Family(_full_needs, _emit_full), aten.full.default),
    **_family_of(_Family(_reshape_needs, _emit_reshape), *kinds.RESHAPE),
    **_family_of(_Family(_permute_needs, _emit_permute), *kinds.PERMUTE),
    **_family_of(_Family(_dim_needs, _emit_along_dim), *kinds.ALONG_DIM),
    **_family_of(_Family(_gather_needs, _emit_along_dim), *kinds.INDEXED),
    **_family_of(_Family(_getitem_needs, _emit_getitem), operator.getitem),
    **_family_of(_Family(_select_needs, _emit_select), aten.select.int),
    **_family_of(_Family(_embedding_needs, _emit_call), aten.embedding.default),
    **_family_of(_Family(_reduction_needs, _emit_reduction), *kinds.REDUCTIONS),
    **_family_of(_Family(_mm_needs, _emit_matmul), aten.mm.default, aten.bmm.default),
    **_family_of(_Family(_addmm_needs, _emit_matmul), aten.addmm.default, aten.baddbmm.default),
    **_family_of(_Family(_padding_needs, _emit_padding), aten.constant_pad_nd.default),
}
