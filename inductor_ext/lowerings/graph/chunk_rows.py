"""Rows of values: the dimensions along which a part of a graph can be computed in chunks.

The rows of a value are one or several adjacent dimensions, [R] or [B, S] with B * S = R. A chunk of
the value has some of the R rows, and one dimension in place of these dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import fx


@dataclasses.dataclass(frozen=True)
class Rows:
    """The dimensions of a value that are its rows."""

    start: int
    """The first of them."""
    count: int
    """Number of dimensions."""

    @property
    def end(self) -> int:
        """The dimension behind the last one."""
        return self.start + self.count

    def __contains__(self, dim: int) -> bool:
        return self.start <= dim < self.end

    def map_dim(self, dim: int) -> int:
        """Return which dimension of a chunk a dimension of the value is."""
        return min(dim, self.start) if dim < self.end else dim - self.count + 1

    def replace(self, shape: Sequence[int], length: int) -> list[int]:
        """Return the shape of a chunk of `length` rows of a value."""
        return [*shape[: self.start], length, *shape[self.end :]]

    def shift(self, dims: int) -> Rows:
        """Return the same number of dimensions, `dims` further inside."""
        return Rows(self.start + dims, self.count)


TOTAL = Rows(-1, 0)
"""In place of the rows of a result: it has none, because it is a sum over the rows."""

Needs = dict["fx.Node", "Rows | None"]
"""The rows of each input that a chunk needs; None for an input that it needs as a whole."""


class Refused(Exception):
    """An operator cannot be computed in chunks of these rows."""


class Builder(Protocol):
    """Adds the operators of one chunk to a graph."""

    length: int
    """Number of rows of the chunk."""

    def value(self, node: fx.Node) -> fx.Node:
        """Return an input: the chunk of it, or the whole if the operator needs the whole."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of an operator."""


def tensor_value(node: fx.Node) -> torch.Tensor:
    """Return the fake tensor of a node; of a node that returns a tuple, the first one.

    Raises:
        Refused: it is not a tensor, or its sizes are symbolic.
    """
    import torch

    value: Any = node.meta.get("val")
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or not all(type(size) is int for size in value.shape):
        raise Refused
    return value


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the sizes of a node's tensor.

    Raises:
        Refused: as `tensor_value`.
    """
    return tuple(tensor_value(node).shape)


def list_rows(shape: Sequence[int], rows: int) -> Iterator[Rows]:
    """Yield which dimensions of a shape can be `rows` rows, the outermost first.

    The first and the last of the dimensions are not of size 1.
    """
    for start, size in enumerate(shape):
        if size == 1:
            continue
        total = 1
        for end in range(start, len(shape)):
            total *= shape[end]
            if total == rows:
                yield Rows(start, end + 1 - start)
            if total >= rows or total == 0:
                break


def broadcast_rows(shape: Sequence[int], out_shape: Sequence[int], out: Rows) -> Rows | None:
    """Return the rows of an operand that is broadcast to a shape; None if it has none.

    Args:
        shape: of the operand.
        out_shape: the shape to which it is broadcast.
        out: the rows of the result.

    Raises:
        Refused: the operand has only some of the dimensions of the rows.
    """
    offset = len(out_shape) - len(shape)
    dims = range(out.start - offset, out.end - offset)
    sizes = [shape[dim] if dim >= 0 else 1 for dim in dims]
    if all(size == 1 for size in sizes):
        return None
    if dims[0] < 0 or sizes != list(out_shape[out.start : out.end]):
        raise Refused
    return Rows(dims[0], out.count)
