"""The `Fusion` of several FX nodes into one kernel, and its replacement by one call.

The `match_*` modules create fusions; the planner applies the ones that are worth it. `is_closed`
checks that one call can replace the nodes: no value in between is used elsewhere, and no tensor
that they read is written in between.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph.matmul_nodes import NotCovered, value_of
from inductor_ext.lowerings.operands import FusedOperands, KernelConstants
from inductor_ext.templates.problem import GemmProblem

if TYPE_CHECKING:
    import torch
    from torch import fx


SMALL_M = 64
"""Up to this M a matmul is bound by reading B."""


@dataclass(frozen=True)
class View:
    """How a kernel views a tensor of the graph."""

    sizes: tuple[int, ...]
    """Two sizes, or one for a vector and none for a scalar."""
    transposed: bool = False
    """Whether the kernel sees the transpose of the matrix with these sizes."""

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor.

        Raises:
            NotCovered: the view would need a copy.
        """
        try:
            view = value.view(self.sizes)
        except (RuntimeError, ValueError):
            raise NotCovered(f"no view of {tuple(value.shape)} as {self.sizes}") from None
        return view.t() if self.transposed else view


@dataclass(frozen=True)
class ViewedNode:
    """An operand of a fusion."""

    node: fx.Node
    view: View | None = None
    """How the kernel views it; None if it is used as it is."""

    @property
    def value(self) -> torch.Tensor:
        """The fake tensor that the kernel sees.

        Raises:
            NotCovered: the view would need a copy, or the tensor is not known.
        """
        value = value_of(self.node)
        return value if self.view is None else self.view.of(value)


@dataclass(frozen=True)
class Fusion:
    """A matmul with the nodes that are fused into it."""

    problem: GemmProblem
    """With the size hints as sizes."""
    nodes: tuple[fx.Node, ...]
    """All nodes that the kernel replaces, in graph order. Only `outputs` have users outside."""
    outputs: tuple[fx.Node, ...]
    """The nodes whose values are used outside, in the order of the kernel's results."""
    operands: FusedOperands[ViewedNode]
    """With `halves` there is one packed weight, with at most one packed scale, zero point and bias.
    """
    constants: KernelConstants = KernelConstants()  # noqa: RUF009 - it is frozen
    halves: tuple[int, int] | None = None
    """For a packed gate-up weight and bias: the first column of the gate and of the up projection.
    """

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """The nodes of the operands."""
        return tuple(operand.node for operand in self.operands.flatten())


def is_closed(
    nodes: Collection[fx.Node], outputs: Collection[fx.Node], inputs: Iterable[fx.Node]
) -> bool:
    """Whether one call can replace nodes: no value in between is used elsewhere or is an argument
    of the call, and no tensor that they read is written in between.

    Args:
        nodes: pure nodes of one graph.
        outputs: the nodes whose values the call returns.
        inputs: the arguments of the call.
    """
    node_set = set(nodes)
    return (
        node_set.isdisjoint(inputs)
        and all(set(node.users) <= node_set for node in node_set.difference(outputs))
        and not is_written_between(node_set)
    )


def is_written_between(nodes: Collection[fx.Node]) -> bool:
    """Whether a tensor that one of the nodes reads is written between the first and the last of
    them. If so, they cannot all be computed in one place.

    Writes to other tensors do not count, such as updates of a KV cache.
    """
    from torch._inductor.fx_utils import get_node_storage

    storages = {get_node_storage(source) for node in nodes for source in node.all_input_nodes}
    node, last = min(nodes), max(nodes)
    while node is not last:
        node = node.next
        written = _written_storages(node)
        if written is None or not written.isdisjoint(storages):
            return True
    return False


def _written_storages(node: fx.Node) -> frozenset[int] | None:
    """Return the storages that a node writes to; None if unknown."""
    import torch
    from torch._inductor.fx_utils import get_node_storage
    from torch._inductor.pattern_matcher import is_mutation_op

    if node.op != "call_function":
        return frozenset()
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        graphs = list(_subgraphs(node))
        pure = graphs and all(
            _written_storages(node) == frozenset() for one in graphs for node in one.nodes
        )
        return frozenset() if pure else None
    if not is_mutation_op(node):
        return frozenset()
    if not isinstance(target, torch._ops.OpOverload):
        return None
    arguments = target._schema.arguments
    args = {
        **dict(zip((argument.name for argument in arguments), node.args, strict=False)),
        **node.kwargs,
    }
    storages: set[int] = set()
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args.get(argument.name)
            storage = get_node_storage(value) if isinstance(value, torch.fx.Node) else None
            if storage is None:
                return None
            storages.add(storage)
    return frozenset(storages) if storages else None


def _subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """Yield the graphs that a higher-order operator is called with."""
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            module = named_graph(node.graph.owning_module, source)
            if module is not None:
                yield module.graph


def named_graph(owner: Any, node: fx.Node) -> fx.GraphModule | None:
    """Return the graph that a `get_attr` names in the module that owns its graph; None if it names
    anything else.
    """
    import torch

    module = owner
    for name in str(node.target).split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, torch.fx.GraphModule) else None
