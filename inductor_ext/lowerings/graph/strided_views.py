"""Arithmetic of chains of views on B [K, N]: which elements of K and N a tensor's dimensions cover.

Views are tracked by strides instead of matched: for each dimension of a tensor, `Dims` holds the
strides of K and N that it covers, so that any chain of reshapes, permutes and expands can be read,
from the matmul back to the stored tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from inductor_ext.lowerings.graph.fusion import View
from inductor_ext.lowerings.graph.matmul_nodes import NotCovered, value_of

if TYPE_CHECKING:
    from torch import fx


@dataclass(frozen=True)
class Atom:
    """A factor of a tensor dimension, which covers a strided range of an axis of B, [K, N]."""

    size: int
    axis: Literal["k", "n"]
    stride: int
    """Distance along the axis between adjacent elements."""


Dims = tuple[tuple[Atom, ...], ...]
"""The atoms of each dimension of a tensor, outermost first; empty for a dimension of size 1."""


def regroup(dims: Dims, shape: Sequence[int]) -> Dims:
    """Return the dimensions after a reshape to `shape`, which keeps the order of elements."""
    atoms = [atom for dim in dims for atom in dim]
    regrouped = []
    for size in shape:
        dim, remaining = [], size
        while remaining > 1:
            require(bool(atoms), "a view of more elements")
            atom = atoms.pop(0)
            count = min(remaining, atom.size)
            require(remaining % count == atom.size % count == 0, "a view across borders")
            inner = atom.size // count
            dim.append(Atom(count, atom.axis, atom.stride * inner))
            if inner > 1:
                atoms.insert(0, Atom(inner, atom.axis, atom.stride))
            remaining //= count
        regrouped.append(tuple(dim))
    return tuple(regrouped)


def broadcast(dims: Dims, shape: Sequence[int]) -> Dims:
    """Return the dimensions of an operand of `shape` that is broadcast to a tensor of `dims`."""
    last = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for dim, size in zip(last, shape, strict=True))


def merge_atoms(dims: Dims) -> list[Atom]:
    """Return the atoms of a tensor in memory order, with adjacent atoms merged if they continue
    each other.
    """
    merged: list[Atom] = []
    for atom in (atom for dim in dims for atom in dim):
        last = merged[-1] if merged else None
        if last and last.axis == atom.axis and last.stride == atom.size * atom.stride:
            merged[-1] = Atom(last.size * atom.size, atom.axis, atom.stride)
        else:
            merged.append(atom)
    return merged


def static_shape(node: fx.Node) -> tuple[int, ...]:
    shape = tuple(value_of(node).shape)
    require(all(isinstance(item, int) for item in shape), "sizes of a weight are symbols")
    return shape


def follow_view(node: fx.Node, dims: Dims) -> tuple[fx.Node, Dims] | None:
    """Return the source of a view and its dimensions; None if the node is not a view."""
    import torch

    source = view_source(node)
    if source is None:
        return None
    if node.target is torch.ops.aten.expand.default:
        return source, broadcast(dims, static_shape(source))
    if node.target is torch.ops.aten.permute.default:
        axes: Any = node.args[1]
        permuted = {axis % len(dims): dim for axis, dim in zip(axes, dims, strict=True)}
        return source, tuple(permuted[axis] for axis in range(len(dims)))
    return source, regroup(dims, static_shape(source))


def view_source(node: Any) -> Any:
    """Return the source of a view; None for any other node. Inductor's decompositions reduce all
    views to these operators.
    """
    import torch

    aten = torch.ops.aten
    views = (
        aten.reshape.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
        aten.expand.default,
        aten.permute.default,
    )
    return node.args[0] if node.target in views else None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that the kernel reads."""

    node: fx.Node
    dims: Dims

    def atoms(self) -> dict[str, Atom]:
        """Return the atom that covers K and the one that covers N.

        Raises:
            NotCovered: one of them needs several atoms.
        """
        merged = merge_atoms(self.dims)
        atoms: dict[str, Atom] = {atom.axis: atom for atom in merged}
        require(len(atoms) == len(merged), "the stored tensor is not ordered by K and N")
        return atoms

    def view(self) -> View:
        """Return the view as [K, N], or with fewer elements where values are shared."""
        atoms = merge_atoms(self.dims)
        sizes = {atom.axis: atom.size for atom in atoms}
        along_k, along_n = sizes.get("k", 1), sizes.get("n", 1)
        if [atom.axis for atom in atoms] == ["n", "k"]:
            return View((along_n, along_k), transposed=True)
        return View((along_k, along_n))

    def words(self) -> int:
        """Return how many elements adjacent along K the kernel reads as one aligned 32-bit word; 1
        if it cannot.
        """
        value = self.view().of(value_of(self.node))
        words = max(1, 4 // value.element_size())
        groups, columns = value.shape
        aligned = value.storage_offset() % words == 0 and value.stride(1) % words == 0
        return words if groups > 1 and value.stride(0) == 1 and aligned and columns > 1 else 1


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise NotCovered(reason)
