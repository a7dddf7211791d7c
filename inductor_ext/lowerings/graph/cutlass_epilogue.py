"""Translation of the FX nodes after a matmul into the epilogue of a CUTLASS kernel.

`read_epilogue` takes a matmul and the pointwise nodes after it
(`epilogue_region.reachable_pointwise`) and returns the expression tree from which the kernel is
rendered, the nodes of the tensors that it reads, and the scalars that are passed at launch. Scalars
that may come from a size are launch arguments, so that one binary serves all sizes. It raises
`NotExpressible` if a kernel cannot compute the nodes.

Values are computed in float32 from the accumulators on. Casts between floats are skipped, as in
Inductor's own kernels, which do not round there either.
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from inductor_ext.lowerings.graph.fusion import Fusion, View, ViewedNode
from inductor_ext.lowerings.graph.fx_nodes import is_cast, is_view, size_expr
from inductor_ext.lowerings.graph.matmul_nodes import (
    NotCovered,
    call_arguments,
    concrete_sizes,
    dtype_of,
    value_of,
)
from inductor_ext.templates.cutlass import epilogue as cutlass
from inductor_ext.templates.cutlass.alignment import of_layout
from inductor_ext.templates.cutlass.epilogue import (
    ACCUMULATOR,
    Epilogue,
    Node,
    NotExpressible,
    Packed,
    Tensor,
    apply,
    constant,
)
from inductor_ext.templates.tensors import INT4

if TYPE_CHECKING:
    import torch
    from torch import fx

_SIZES = 16
"""Integers from this magnitude on, and their reciprocals and inverse square roots, may come from a
size."""


@dataclass(frozen=True)
class GraphEpilogue:
    """The epilogue of a matmul in a graph."""

    epilogue: Epilogue
    inputs: tuple[fx.Node, ...]
    """The nodes of the epilogue's input tensors."""
    scalars: tuple[float | fx.Node, ...]
    """The parameters of the epilogue: constants, and nodes of scalars that are known only at run
    time."""
    views: Mapping[fx.Node, View] = field(default_factory=dict)
    """The views of inputs that are not read as they are."""
    outputs: tuple[fx.Node, ...] = field(default=(), compare=False)
    """The nodes whose values are stored, in the order of the epilogue."""


def read_epilogue(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], fusion: Fusion | None = None
) -> GraphEpilogue:
    """Return the epilogue of a matmul and the pointwise nodes after it.

    Args:
        nodes: a matmul and the pointwise nodes after it, in graph order.
        outputs: the nodes whose tensors are stored, in any order. The output with the longest
            computation becomes the first, so that equal epilogues are equal however nodes are
            ordered.
        fusion: the fusion whose output the first node is, if B is dequantized.

    Raises:
        NotExpressible: a kernel cannot compute it.
    """
    try:
        epilogue = _EpilogueReader(nodes, outputs, fusion).read()
        if len(epilogue.outputs) == 1:
            return epilogue
        stored = zip(epilogue.outputs, epilogue.epilogue.outputs, strict=True)
        order = {node: _rank(dtype, value, epilogue.epilogue) for node, (dtype, value) in stored}
        return _EpilogueReader(nodes, sorted(order, key=order.__getitem__), fusion).read()
    except NotCovered as reason:
        raise NotExpressible(str(reason)) from None


def _rank(dtype: str, value: Node, epilogue: Epilogue) -> tuple[object, ...]:
    """Sort key of outputs, independent of the order in which they were read."""
    steps = [*Epilogue(((dtype, value),)).nodes()]
    keys = [
        (step.operation, step.value, str(epilogue.inputs[step.index : step.index + 1]))
        if step.operation == "read"
        else (step.operation, step.value, step.dtype)
        for step in steps
    ]
    return -len(steps), dtype, keys


class _EpilogueReader:
    """Reader of the values of a region, each once."""

    def __init__(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], fusion: Fusion | None
    ) -> None:
        self.matmul = nodes[0]
        self.region = frozenset(nodes)
        self.outputs = outputs
        self.fusion = fusion
        self.values: dict[fx.Node, Node] = {}
        self.inputs: dict[fx.Node, Tensor] = {}
        self.scalars: dict[float | fx.Node, int] = {}
        self.views: dict[fx.Node, View] = {}

    def read(self) -> GraphEpilogue:
        values = [(dtype_of(value_of(output)), self.value(output)) for output in self.outputs]
        if len(set(values)) < len(values):
            raise NotExpressible("two outputs have the same value")
        epilogue = Epilogue(tuple(values), tuple(self.inputs.values()), packed=self._packed())
        if len(values) > 1:
            columns = concrete_sizes(value_of(self.matmul).shape)[-1]
            epilogue = replace(epilogue, alignment=math.gcd(columns, 16))
        inputs, scalars = tuple(self.inputs), tuple(self.scalars)
        return GraphEpilogue(epilogue, inputs, scalars, self.views, tuple(self.outputs))

    def _packed(self) -> Packed | None:
        if self.fusion is None or self.fusion.problem.b.dtype not in INT4:
            return None
        constants = self.fusion.constants
        return Packed(bool(constants.high_first), constants.zero or 0)

    def value(self, node: fx.Node) -> Node:
        """Return the value of a node of the region."""
        if node not in self.values:
            self.values[node] = self._compute(node)
        return self.values[node]

    def _compute(self, node: fx.Node) -> Node:
        import torch

        if node is self.matmul:
            return self._matmul_value()
        if is_view(node):
            return self.operand(node)
        dtype = value_of(node).dtype
        if not (dtype.is_floating_point or dtype == torch.bool) or dtype == torch.float64:
            raise NotExpressible(f"{node.target} computes {dtype}")
        if node.target is torch.ops.prims.convert_element_type.default:
            return self.operand(node)
        function = _operators().get(node.target)
        if function is None:
            raise NotExpressible(f"CUTLASS epilogues do not support {node.target}")
        arguments = [self.argument(arg, node) for arg in node.args]
        options = dict(node.kwargs)
        if "alpha" in options:
            options["alpha"] = self.argument(options["alpha"], node)
        try:
            return function(*arguments, **options)
        except TypeError:
            raise NotExpressible(f"{node.target} with {node.args} and {node.kwargs}") from None

    def operand(self, node: fx.Node) -> Node:
        """Return the value of the only tensor that a node reads, besides sizes."""
        source = node.all_input_nodes[0]
        return self.value(source) if source in self.region else self.input(source, node)

    def argument(self, argument: Any, reader: fx.Node) -> Any:
        """Return the value of an argument; strings and None are returned as they are."""
        import torch

        if isinstance(argument, (int, float)):
            return self.number(argument)
        if not hasattr(argument, "meta"):
            return argument
        if argument in self.region:
            return self.value(argument)
        if not isinstance(argument.meta.get("val", torch.Tensor), torch.Tensor):
            return self.number(argument)
        return self.input(argument, reader)

    def number(self, number: Any) -> Node:
        """Return a constant, or a parameter if the number is, or may come from, a size."""
        if isinstance(number, (int, float)) and not _may_come_from_size(float(number)):
            return constant(number)
        return self._parameter(number)

    def _parameter(self, number: Any) -> Node:
        """Return the launch parameter with a value; `number` is a number or a node."""
        key = float(number) if isinstance(number, (int, float)) else number
        return cutlass.parameter(self.scalars.setdefault(key, len(self.scalars)))

    def input(self, source: fx.Node, reader: fx.Node) -> Node:
        """Return an element of a tensor from outside the region."""
        import torch

        while source.target is torch.ops.aten.expand.default:
            source = source.all_input_nodes[0]
        kind = self._broadcast(value_of(source), value_of(reader))
        while is_cast(source) and set(source.users) <= self.region:
            source = source.all_input_nodes[0]
        return self._read(source, value_of(source), kind)

    def _read(
        self,
        source: fx.Node,
        value: torch.Tensor,
        kind: Literal["matrix", "row", "column", "scalar"],
    ) -> Node:
        """Return an element of an outside tensor that is viewed as `value`."""
        if value.device != value_of(self.matmul).device:
            raise NotExpressible(f"{source} is on {value.device}")
        tensor = Tensor(dtype_of(value), kind, self._alignment(value, kind))
        if self.inputs.setdefault(source, tensor) != tensor:
            raise NotExpressible(
                f"{source} is read as {self.inputs[source].broadcast} and as {kind}"
            )
        return cutlass.read(list(self.inputs).index(source))

    def _dequantized(self, fusion: Fusion) -> Node:
        """Apply to the accumulators the scales and the bias of a matmul with a dequantized B."""
        problem, operands = fusion.problem, fusion.operands
        dequant = problem.dequant
        if dequant is None or problem.norm is not None or dequant.zero_points:
            raise NotExpressible("zero points, or a norm of A")
        value = ACCUMULATOR
        for scale in operands.scales:
            if dequant.scales == "group":
                self._read_groups(scale)
                continue
            assert scale.view is not None
            self.views[scale.node] = scale.view
            kind: Literal["row", "scalar"] = "row" if scale.view.sizes else "scalar"
            value = apply("mul", value, self._read(scale.node, scale.value, kind))
        for bias in operands.biases:
            value = apply("add", value, self.input(bias.node, self.matmul))
        return value

    def _read_groups(self, scales: ViewedNode) -> None:
        """Add group scales, which the main loop reads: [N, groups], as models store them."""
        assert scales.view is not None
        if not scales.view.transposed:
            raise NotExpressible("group scales that are contiguous along N")
        self.views[scales.node] = View(scales.view.sizes)
        dtype = dtype_of(value_of(scales.node))
        self.inputs[scales.node] = Tensor(dtype, "group")

    def _broadcast(
        self, value: torch.Tensor, output: torch.Tensor
    ) -> Literal["matrix", "row", "column", "scalar"]:
        """Return how a tensor is broadcast to the matmul output."""
        sizes, shape = (concrete_sizes(tensor.shape) for tensor in (value, output))
        strides = concrete_sizes(value.stride())
        sizes = tuple(
            1 if stride == 0 else size for size, stride in zip(sizes, strides, strict=True)
        )
        sizes = (1,) * (len(shape) - len(sizes)) + sizes
        batched = value_of(self.matmul).dim() == 3
        # Without a batch, all dimensions but the last are rows.
        rows, whole = (sizes[-2:-1], shape[-2:-1]) if batched else (sizes[:-1], shape[:-1])
        if math.prod(sizes) == 1:
            return "scalar"
        if batched and len(sizes) == 3 and sizes[0] not in (1, shape[0]):
            raise NotExpressible(
                f"a tensor of shape {list(sizes)} with a batch of shape {list(shape)}"
            )
        if sizes[-1] == shape[-1] and rows == whole:
            self._require_rows(value, batched)
            return "matrix"
        if sizes[-1] == shape[-1] and math.prod(rows) == 1 and (sizes[-1] == 1 or strides[-1] == 1):
            return "row"
        if sizes[-1] == 1 and rows == whole and self._is_contiguous_column(value, batched):
            return "column"
        raise NotExpressible(
            f"a tensor of shape {list(sizes)} with an output of shape {list(shape)}"
        )

    def _require_rows(self, value: torch.Tensor, batched: bool) -> None:
        """Require a matrix with contiguous rows and one stride between rows."""
        strides = concrete_sizes(value.stride())
        plain = value.dim() <= (3 if batched else 2)
        if strides[-1] != 1 or not (plain or value.is_contiguous()):
            raise NotExpressible(f"a matrix with the strides {list(strides)}")

    def _is_contiguous_column(self, value: torch.Tensor, batched: bool) -> bool:
        """Whether the elements of a column are contiguous."""
        if batched:
            return concrete_sizes(value.stride())[-2] == 1
        return bool(value.is_contiguous())

    def _alignment(self, value: torch.Tensor, kind: str) -> int:
        if kind in ("column", "scalar"):
            return 1
        layout = types.SimpleNamespace(
            dtype=value.dtype,
            size=[size_expr(size) for size in value.shape],
            stride=[size_expr(stride) for stride in value.stride()],
            offset=size_expr(value.storage_offset()),
        )
        return of_layout(layout)

    def _matmul_value(self) -> Node:
        """Return what the matmul operator itself does to the accumulators."""
        import torch

        aten = torch.ops.aten
        node = self.matmul
        if self.fusion is not None:
            return self._dequantized(self.fusion)
        args = call_arguments(node)
        if node.target in (aten.mm.default, aten.bmm.default, aten._int_mm.default):
            return ACCUMULATOR
        if node.target is aten._grouped_mm.default and args["bias"] is None:
            return ACCUMULATOR
        if node.target in (aten.addmm.default, aten.baddbmm.default):
            result = self._scale(ACCUMULATOR, args["alpha"])
            if args["beta"] == 0:
                return result
            bias = self.argument(args["self"], node)
            return apply("add", result, self._scale(bias, args["beta"]))
        if node.target is aten._scaled_mm.default and args["scale_result"] is None:
            result = ACCUMULATOR
            for name in ("scale_a", "scale_b"):
                result = apply("mul", result, self.argument(args[name], node))
            if args["bias"] is None:
                return result
            return apply("add", result, self.argument(args["bias"], node))
        raise NotExpressible(f"{node.target} is not a matmul that CUTLASS kernels support")

    def _scale(self, value: Node, factor: Any) -> Node:
        """Multiply a value by alpha or beta, which is a launch parameter unless it is 1."""
        return value if factor == 1 else apply("mul", value, self._parameter(factor))


def _commutative(name: str) -> Callable[[Node, Node], Node]:
    """Return a commutative operation that puts a scalar, if there is one, second."""

    def function(a: Node, b: Node) -> Node:
        first = "constant", "parameter"
        return apply(name, b, a) if a.operation in first else apply(name, a, b)

    return function


def _may_come_from_size(number: float) -> bool:
    """Whether a number is a large integer, its reciprocal or its inverse square root."""
    if not math.isfinite(number) or not number:
        return False
    for candidate in (number, 1 / number, 1 / number**2):
        if abs(candidate) >= _SIZES and abs(candidate - round(candidate)) < 1e-9 * abs(candidate):
            return True
    return False


_UNARY = "abs", "erf", "exp", "log", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "sqrt", "tanh"
"""Unary operators of ATen with the same name in the epilogue."""


@functools.cache
def _operators() -> Mapping[Any, Callable[..., Node]]:
    """Return ATen's pointwise operators as functions of values."""
    import torch

    aten = torch.ops.aten

    def with_alpha(name: str) -> Callable[..., Node]:
        combined = _commutative(name) if name == "add" else functools.partial(apply, name)

        def function(a: Node, b: Node, *, alpha: Node | None = None) -> Node:
            return combined(a, b if alpha in (None, constant(1)) else apply("mul", b, alpha))

        return function

    def clamp(a: Node, least: Node | None = None, most: Node | None = None) -> Node:
        if least is not None:
            a = apply("maximum", a, least)
        return a if most is None else apply("minimum", a, most)

    def hardtanh(a: Node, least: Node | None = None, most: Node | None = None) -> Node:
        return clamp(a, least or constant(-1), most or constant(1))

    def gelu(a: Node, *, approximate: Literal["none", "tanh"] = "none") -> Node:
        return cutlass.gelu(a, approximate)

    def power(a: Node, exponent: Node) -> Node:
        name = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(exponent.value)
        if exponent.operation != "constant" or name is None:
            raise NotExpressible("a power other than square, square root or reciprocal")
        return apply(name, a)

    operators: dict[Any, Callable[..., Node]] = {
        aten.silu.default: cutlass.silu,
        aten.gelu.default: gelu,
        aten.hardtanh.default: hardtanh,
        aten.clamp.default: clamp,
        aten.clamp_min.default: clamp,
        aten.clamp_max.default: lambda a, most: clamp(a, None, most),
        aten.maximum.default: functools.partial(apply, "maximum"),
        aten.minimum.default: functools.partial(apply, "minimum"),
        aten.where.self: functools.partial(apply, "where"),
        aten.pow.Tensor_Scalar: power,
    }
    for name in _UNARY:
        operators[getattr(aten, name).default] = functools.partial(apply, name)
    for name in ("lt", "le", "gt", "ge"):
        for overload in ("Scalar", "Tensor"):
            operators[operator.attrgetter(f"{name}.{overload}")(aten)] = functools.partial(
                apply, name
            )
    for name, function in (
        ("add", with_alpha("add")),
        ("sub", with_alpha("sub")),
        ("mul", _commutative("mul")),
        ("div", functools.partial(apply, "truediv")),
    ):
        for overload in ("Tensor", "Scalar"):
            operators[operator.attrgetter(f"{name}.{overload}")(aten)] = function
    return operators
