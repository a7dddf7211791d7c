"""Reading of the nodes that dequantize B: from the matmul back to the stored tensor.

`DequantReader` follows conversions, zero points, scales, views and the unpacking of 4-bit pairs. It
raises `NotCovered` for anything that kernels do not compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph import matmul_nodes
from inductor_ext.lowerings.graph.fusion import View, ViewedNode
from inductor_ext.lowerings.graph.fx_nodes import is_cast, is_computed_in_float32
from inductor_ext.lowerings.graph.matmul_nodes import NotCovered, dtype_of, value_of
from inductor_ext.lowerings.graph.strided_views import (
    Atom,
    Dims,
    StoredTensor,
    broadcast,
    follow_view,
    require,
    static_shape,
    view_source,
)
from inductor_ext.lowerings.operands import FusedOperands, KernelConstants
from inductor_ext.templates.fused_ops import Dequant
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import FP8, Operand

if TYPE_CHECKING:
    from torch import fx

MOST_NODES = 40
"""Limit on the nodes between the stored tensor and the matmul."""

MOST_ZERO = {4: 100, 8: 128}
"""The largest constant zero point that kernels subtract, by the number of bits."""

_BYTES = frozenset({"int8", "uint8"}) | FP8

_INTEGERS = frozenset({"int8", "uint8", "int16", "int32", "int64"})


@dataclass
class DequantReader:
    """Reader of the computation of B, from the matmul back to the stored tensor."""

    problem: GemmProblem
    nodes: list[fx.Node] = field(default_factory=list)
    """All nodes that the kernel replaces."""
    stored: StoredTensor | None = None
    scale: StoredTensor | None = None
    zero: StoredTensor | None = None
    dtype: str = ""
    """The dtype of the stored tensor; `int4` or `uint4` for packed pairs."""
    constant: int = 0
    """The constant that is subtracted from all of B."""
    inverted: bool = False
    """Whether the highest of 4 bits is inverted, which turns the two's complement of n into n + 8.
    """
    high_first: bool = False
    wide: bool = False
    """Whether any step is computed in float32."""
    bits: int = 8
    """Largest width of the stored integers for which the integer arithmetic before the conversion
    to float cannot overflow."""
    wraps: bool = False
    """Whether that arithmetic uses uint8, so that no value may be negative."""

    def read_weight(self, node: Any, dims: Dims) -> None:
        """Read the nodes that B is computed from.

        Raises:
            NotCovered: an operation is unknown or not supported by kernels.
        """
        import torch

        aten = torch.ops.aten
        while len(self.nodes) < MOST_NODES:
            target = node.target
            source = follow_view(node, dims)
            if target is aten.cat.default:
                return self._read_pairs(node, dims)
            if source is None and not self._is_step(node):
                return self._read_bytes(node, dims)
            self.nodes.append(node)
            if source is not None:
                node, dims = source
            elif target is torch.ops.prims.convert_element_type.default:
                node = node.args[0]
            elif target is aten.bitwise_xor.Scalar:
                require(node.args[1] == 8 and not self.inverted, "bits are inverted")
                self.inverted = True
                node = node.args[0]
            else:
                node, dims = self._read_arithmetic(node, dims)
        raise NotCovered("too many steps")

    def _is_step(self, node: fx.Node) -> bool:
        """Whether a node is a step of the dequantization instead of a stored tensor."""
        import torch

        aten = torch.ops.aten
        if node.target is torch.ops.prims.convert_element_type.default:
            kind, source = dtype_name(node), dtype_name(node.args[0])
            floats = ("float32", self.problem.a.dtype)
            integers = kind in _INTEGERS and source in _INTEGERS
            if integers and kind in ("int8", "uint8"):
                self.bits = 4
                self.wraps |= kind == "uint8"
            return kind in floats or integers
        arithmetic = (aten.mul.Tensor, aten.sub.Tensor, aten.sub.Scalar, aten.bitwise_xor.Scalar)
        return node.target in arithmetic

    def _read_arithmetic(self, node: fx.Node, dims: Dims) -> tuple[Any, Dims]:
        """Record a scale or a zero point; return the rest of B and its dimensions."""
        import torch

        aten = torch.ops.aten
        kind = dtype_name(node)
        require(kind in (*_INTEGERS, "float32", self.problem.a.dtype), f"b is computed in {kind}")
        self.wide |= kind == "float32"
        operands: Any = node.args[:2]
        left, right = operands
        if node.target is not aten.mul.Tensor:
            require(not node.kwargs, "a zero point that is scaled")
            require(kind != "uint8", "integers wrap around below 0")
            if kind == "int8":
                self.bits = 4
            if isinstance(right, (int, float)):
                is_supported = not self.constant and right in range(MOST_ZERO[8] + 1)
                require(is_supported, "a zero point that kernels do not subtract")
                self.constant = int(right)
                return left, broadcast(dims, static_shape(left))
            require(self.zero is None and kind != "int8", "a zero point of zero points")
            self.zero = self._read_shared(right, dims)
            return left, broadcast(dims, static_shape(left))
        require(self.scale is None and self.zero is None and not self.constant, "two scales")
        if not _is_quantized(left):
            left, right = right, left
        self.scale = self._read_shared(right, dims)
        return left, broadcast(dims, static_shape(left))

    def _read_shared(self, node: Any, dims: Dims) -> StoredTensor:
        """Return the stored tensor of a scale or zero point, behind views and lossless conversions,
        which kernels do themselves.
        """
        dims = broadcast(dims, static_shape(node))
        visited: list[fx.Node] = []
        while True:
            source = follow_view(node, dims)
            if source is None and _is_lossless_cast(node):
                source = node.args[0], dims
            if source is None or len(visited) == MOST_NODES:
                break
            visited.append(node)
            node, dims = source
        # A node with other users stays in the graph; the kernel does not read it.
        for view in visited:
            if not set(view.users) <= {*self.nodes}:
                break
            self.nodes.append(view)
        return StoredTensor(node, dims)

    def _read_bytes(self, node: Any, dims: Dims) -> None:
        self.dtype = dtype_name(node)
        require(self.dtype in _BYTES, f"b is computed from {self.dtype}")
        require(self.bits == 8, "integers wrap around in 8 bits")
        require(not self.inverted, "bits are inverted")
        self.stored = StoredTensor(node, dims)

    def _read_pairs(self, node: Any, dims: Dims) -> None:
        """Read both halves of the same bytes, joined along K."""
        parts, axis = node.args[0], (*node.args[1:], 0)[0]
        require(len(parts) == 2 and bool(dims[axis]), "no pairs")
        first, *rest = dims[axis]
        require(first.size % 2 == 0, "parts of different sizes")
        inner = first.size // 2
        require(
            (first.axis, first.stride * inner) == ("k", 1), "packed values that are not adjacent"
        )
        inner_atoms = [Atom(inner, first.axis, first.stride)] if inner > 1 else []
        place = axis % len(dims)
        own = (*dims[:place], (*inner_atoms, *rest), *dims[place + 1 :])
        self.nodes.append(node)
        halves = [self._read_half(part, own) for part in parts]
        (stored, high, signed), other = halves
        require(other == (stored, not high, signed), "halves of different bytes")
        self.stored, self.high_first = stored, high
        require(not (signed and (self.inverted or self.wraps)), "bits are inverted")
        if self.inverted:
            require(self.constant >= 8, "bits are inverted")
            self.constant -= 8
        self.dtype = "int4" if signed or self.inverted else "uint4"

    def _read_half(self, node: Any, dims: Dims) -> tuple[StoredTensor, bool, bool]:
        """Return the bytes of which a node is one half, whether it is the upper half, and whether
        it is signed.
        """
        import torch

        aten = torch.ops.aten
        right = (aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)
        left = (aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar)
        operations: list[tuple[str, int]] = []
        signed = False
        while len(self.nodes) < MOST_NODES:
            source = follow_view(node, dims)
            if source is None and node.target is torch.ops.prims.convert_element_type.default:
                require(
                    dtype_name(node) in ("int16", "int32", "int64"),
                    "an integer conversion that may wrap",
                )
                source = node.args[0], dims
            names = {aten.bitwise_and.Scalar: "and", **dict.fromkeys(right, "right")}
            name = {**names, **dict.fromkeys(left, "left")}.get(node.target)
            if source is None and name is None:
                break
            self.nodes.append(node)
            if source is not None:
                node, dims = source
                continue
            if name == "right" and not operations:
                # An arithmetic right shift extends the sign.
                signed = dtype_name(node) != "uint8"
            if name == "left":
                require(dtype_name(node) == "int8", "bits are shifted out of 8 only")
            operations.append((str(name), node.args[1]))
            node = node.args[0]
        kind = dtype_name(node)
        require(kind in ("int8", "uint8"), f"pairs in {kind}")
        signed = signed and kind == "int8"
        halves = {
            (("and", 15),): (False, False),
            (("right", 4),): (True, signed),
            (("and", 15), ("right", 4)): (True, False),
            (("right", 4), ("left", 4)): (False, True),
        }
        require(tuple(operations) in halves, "values that are not 4-bit halves of bytes")
        return (StoredTensor(node, dims), *halves[tuple(operations)])

    def operand(self) -> Operand:
        """Return B as an operand, in elements of its dtype."""
        assert self.stored is not None
        value = self.stored.view().of(value_of(self.stored.node))
        operand = matmul_nodes.operand_of(value)
        if not self._is_packed:
            return operand
        row, column = operand.strides
        strides = (1, 2 * column) if operand.layout == "column" else (row, column)
        return Operand(self.dtype, strides, 2 * operand.alignment)

    def dequant(self) -> Dequant:
        """Return the dequantization.

        Raises:
            NotCovered: a kernel cannot compute it.
        """
        assert self.stored is not None
        problem = self.problem
        atoms = self.stored.atoms()
        k = Atom(problem.k // 2, "k", 2) if self._is_packed else Atom(problem.k, "k", 1)
        whole = {atom.axis: atom for atom in (k, Atom(problem.n, "n", 1)) if atom.size > 1}
        require(atoms == whole, "the weight is a slice of the stored tensor")
        require(self.constant <= MOST_ZERO[4 if self._is_packed else 8], "a large zero point")
        whole_numbers = self.dtype in ("uint8", "int4", "uint4")
        require(self.constant == 0 or whole_numbers, f"a zero point of {self.dtype}")
        if self.scale is None:
            require(self.zero is None, "zero points without scales")
            return Dequant()
        group = self._group(self.scale)
        if self.zero is not None:
            group = group or problem.k
        for stored in filter(None, (self.scale, self.zero)):
            require(
                not group or (self._group(stored) or problem.k) == group,
                "scales and zero points of different groups",
            )
            require(
                not group or "n" in stored.atoms() or problem.n == 1,
                "values that all columns share",
            )
        kind = "group" if group else "column" if self.scale.atoms() else "tensor"
        return Dequant(
            kind,  # type: ignore[arg-type]
            group,
            self.zero is not None,
            scale_dtype=dtype_name(self.scale.node),
        )

    @property
    def _is_packed(self) -> bool:
        return self.dtype in ("int4", "uint4")

    def operands(self, a: fx.Node, dequant: Dequant) -> FusedOperands[ViewedNode]:
        """Return A and what B is computed from.

        Raises:
            NotCovered: a scale is not contiguous.
        """
        assert self.stored is not None

        def viewed(stored: StoredTensor | None) -> tuple[ViewedNode, ...]:
            if stored is None:
                return ()
            view = stored.view()
            if not dequant.group:
                view = View(tuple(size for size in view.sizes if size > 1))
                # The kernel assumes that they are contiguous.
                value = view.of(value_of(stored.node))
                require(value.is_contiguous(), "scales that are not contiguous")
            return (ViewedNode(stored.node, view),)

        weight = ViewedNode(self.stored.node, self.stored.view())
        return FusedOperands(ViewedNode(a), (weight,), viewed(self.scale), viewed(self.zero))

    def constants(self, dequant: Dequant) -> KernelConstants:
        """Return the constants of a kernel with a dequantization."""

        def words(stored: StoredTensor | None) -> int | None:
            if stored is None or not dequant.group or stored.words() == 1:
                return None
            return stored.words()

        return KernelConstants(
            scale_words=words(self.scale),
            zero_words=words(self.zero),
            wide=True if dequant.group and self.wide else None,
            zero=self.constant or None,
            high_first=True if self._is_packed and self.high_first else None,
        )

    def _group(self, stored: StoredTensor) -> int:
        """Return the number of elements along K that share a scale or zero point; 0 if all do."""
        atoms = stored.atoms()
        n = atoms.get("n")
        require(n is None or n == Atom(self.problem.n, "n", 1), "a part of N shares a scale")
        k = atoms.get("k")
        if k is None:
            return 0
        require(k.size * k.stride == self.problem.k, "a part of K shares a scale")
        return k.stride


def dtype_name(node: Any) -> str:
    return dtype_of(value_of(node))


def _is_quantized(node: Any) -> bool:
    """Whether an operand of a multiplication is B and not its scale: computed from integers or
    float8.
    """
    import torch

    aten = torch.ops.aten
    steps = (torch.ops.prims.convert_element_type.default, aten.sub.Tensor, aten.sub.Scalar)
    for _ in range(MOST_NODES):
        if node.target is aten.cat.default:
            return True
        if node.target not in steps and view_source(node) is None:
            break
        node = node.args[0]
        if not isinstance(node, torch.fx.Node):
            return False
    return dtype_name(node) in _BYTES


def _is_lossless_cast(node: fx.Node) -> bool:
    """Whether a node is a conversion that neither truncates nor wraps. Between 16-bit and 32-bit
    floats, and from integers to floats, it may round, as elsewhere.
    """
    import torch

    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    if dtype_name(node.args[0]) not in _INTEGERS:
        return is_cast(node)
    if dtype_name(node) not in _INTEGERS:
        return is_computed_in_float32(node.meta["val"])
    before, after = (torch.iinfo(end.meta["val"].dtype) for end in (*node.all_input_nodes, node))
    return bool(after.min <= before.min and before.max <= after.max)
