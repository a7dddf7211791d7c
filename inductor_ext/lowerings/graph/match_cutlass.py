"""Matching of a matmul and the pointwise nodes after it for one CUTLASS kernel.

`find_cutlass_matches` yields what a CUTLASS kernel could compute, from the longest epilogue down to
the matmul alone; `apply` replaces the nodes of one match by one call. All sizes except M must be
static, because the alignment that a kernel assumes must hold for all sizes.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph import cutlass_epilogue, epilogue_region
from inductor_ext.lowerings.graph.cutlass_epilogue import GraphEpilogue
from inductor_ext.lowerings.graph.fusion import Fusion, is_written_between
from inductor_ext.lowerings.graph.fx_nodes import is_view, shape
from inductor_ext.lowerings.graph.matmul_nodes import call_arguments, value_of
from inductor_ext.lowerings.graph.rewrite import as_matrix, call_operands, hoist, replace_call
from inductor_ext.lowerings.node_info import CutlassArguments
from inductor_ext.templates.cutlass.epilogue import NotExpressible
from inductor_ext.templates.cutlass.evt import why_unsupported
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem

if TYPE_CHECKING:
    import torch
    from torch import fx


@dataclass(frozen=True)
class CutlassMatch:
    """The nodes that one CUTLASS kernel can compute, with their epilogue."""

    nodes: tuple[fx.Node, ...]
    """The matmul, or the output of a fusion, and the pointwise nodes after it, in order."""
    outputs: tuple[fx.Node, ...]
    """The nodes that are used outside; the kernel's own output first."""
    epilogue: GraphEpilogue
    fusion: Fusion | None
    """The fusion of a matmul with a dequantized B."""
    is_matmul_only: bool
    """Whether nothing is fused, and the epilogue is left to other kernels."""

    @property
    def replaced(self) -> tuple[fx.Node, ...]:
        """All nodes that the kernel replaces."""
        inside = self.fusion.nodes if self.fusion is not None else ()
        return tuple(dict.fromkeys((*inside, *self.nodes)))

    @property
    def epilogue_nodes(self) -> int:
        """The number of stored tensors that are computed from the matmul result."""
        return sum(_is_computed(output, self.nodes[0]) for output in self.outputs)

    def kernel_problem(self, problem: GemmProblem) -> GemmProblem:
        """Return a problem of this place as the problem of a kernel with this epilogue tree.

        Args:
            problem: with the whole epilogue.
        """
        tree = self.epilogue.epilogue
        if self.is_matmul_only:
            epilogue = dataclasses.replace(problem.epilogue, tree=tree)
            return dataclasses.replace(problem, epilogue=epilogue)
        inputs = {
            node: epilogue_input
            for node, inp in zip(self.epilogue.inputs, tree.inputs, strict=True)
            if (epilogue_input := inp.epilogue_input) is not None
        }
        operations = tree.operations
        if problem.dequant is not None and problem.dequant.scales_accumulators:
            # These scales belong to the prologue.
            assert self.fusion is not None
            del inputs[self.fusion.operands.scales[0].node]
            operations -= 1
        out = tree.outputs[0][0]
        epilogue = Epilogue(
            tuple(inputs.values()), operations, out if out != problem.out else None, tree=tree
        )
        return dataclasses.replace(problem, epilogue=epilogue)


def _is_computed(node: fx.Node, matmul: fx.Node) -> bool:
    while is_view(node) and node is not matmul:
        node = node.all_input_nodes[0]
    return node is not matmul


def find_cutlass_matches(
    node: fx.Node, problem: GemmProblem, fusion: Fusion | None = None, *, fuses: bool = True
) -> Iterator[CutlassMatch]:
    """Yield what CUTLASS kernels could compute at a place, the longest epilogue first.

    Args:
        node: a matmul, or the only output of a fusion.
        problem: of the node, with or without the whole epilogue.
        fusion: given if B is dequantized.
        fuses: whether to fuse anything besides the matmul.
    """
    if problem.parts or (fusion is not None and problem.operation != "mixed"):
        return
    whole = epilogue_region.reachable_pointwise(node) if fuses else [node]
    needed = set(_nodes_used_outside(whole))
    for end in range(len(whole), 0, -1):
        nodes = whole[:end]
        if fusion is not None and is_written_between((*fusion.nodes, *nodes)):
            continue
        outputs = _nodes_used_outside(nodes)
        if len(outputs) > 1 and not needed.issuperset(outputs):
            # Do not store an intermediate value that the whole epilogue does not store.
            continue
        try:
            fused = cutlass_epilogue.read_epilogue(nodes, outputs, fusion)
        except NotExpressible:
            continue
        grouped = problem.operation == "grouped"
        if why_unsupported(fused.epilogue, problem.accumulator, grouped) is None:
            yield CutlassMatch(tuple(nodes), fused.outputs, fused, fusion, len(nodes) == 1)


def _nodes_used_outside(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return [node for node in nodes if not set(node.users) <= inside]


def apply(
    graph: fx.Graph, match: CutlassMatch, target: Callable[..., Any]
) -> tuple[fx.Node, CutlassArguments]:
    """Replace the nodes of a match by one call.

    The call gets A, B, the end offsets of a grouped matmul, the tensors that the epilogue reads,
    and its scalars that are known only at run time. Its value is the stored tensor, or a tuple of
    several; for a 2-D matmul each is [M, N]. The output nodes keep their identity and metadata.

    Args:
        graph: the graph that was read.
        match: one from `find_cutlass_matches`, of the graph as it is now.
        target: a function for Inductor, with the attribute `_inductor_lowering_function`.

    Returns:
        The call, and what reads its arguments.
    """
    matmul, fused = match.nodes[0], match.epilogue
    anchor = min(match.outputs)
    dynamic_scalars = [scalar for scalar in fused.scalars if hasattr(scalar, "meta")]
    matmul_inputs = _matmul_inputs(matmul)
    if match.fusion is not None:
        hoist(anchor, (*match.fusion.inputs, *fused.inputs, *dynamic_scalars))  # type: ignore[arg-type]
    else:
        hoist(anchor, (*matmul_inputs, *fused.inputs, *dynamic_scalars))  # type: ignore[arg-type]
    flat = [_flat_value(output, matmul) for output in match.outputs]
    views = {output: _view_sizes(output, match) for output in match.outputs}
    with graph.inserting_before(anchor):
        if match.fusion is not None:
            operands = call_operands(graph, match.fusion, matmul)
            matmul_inputs = [operands.a, *operands.weights]
        inputs = [_add_input_view(graph, inp, match) for inp in fused.inputs]
        arguments = (*matmul_inputs, *inputs, *dynamic_scalars)
        if len(flat) == 1 and views[anchor] is None:
            call = anchor
            replace_call(call, target, arguments)
        else:
            call = graph.call_function(target, arguments)
            call.meta = dict(matmul.meta)
    call.meta["val"] = flat[0] if len(flat) == 1 else tuple(flat)
    call.meta.pop("eager_input_vals", None)
    _replace_outputs(graph, call, match, flat, views)
    for node in reversed(match.replaced):
        if node not in match.outputs:
            graph.erase_node(node)
    scalars = tuple(None if scalar in dynamic_scalars else scalar for scalar in fused.scalars)
    info = CutlassArguments(fused.epilogue, len(inputs), len(matmul_inputs) == 3, scalars)  # type: ignore[arg-type]
    return call, info


def _replace_outputs(
    graph: fx.Graph,
    call: fx.Node,
    match: CutlassMatch,
    flat: Sequence[torch.Tensor],
    views: Mapping[fx.Node, list[Any] | None],
) -> None:
    """Make the outputs of a match results of its call, with their sizes in `views` if any."""
    import torch

    for index, (output, value) in enumerate(zip(match.outputs, flat, strict=True)):
        part = call
        if len(flat) > 1:
            with graph.inserting_before(output):
                part = graph.call_function(operator.getitem, (call, index))
            part.meta = {**output.meta, "val": value}
        sizes = views[output]
        if sizes is not None:
            output.meta["val"] = value.new_empty(output.meta["val"].shape)
            replace_call(output, torch.ops.aten.reshape.default, (part, sizes))
        elif len(flat) > 1:
            output.meta["val"] = value
            replace_call(output, operator.getitem, part.args)
            graph.erase_node(part)


def _matmul_inputs(matmul: fx.Node) -> list[Any]:
    """Return A and B of a matmul, and the end offsets of its groups if any."""
    args = call_arguments(matmul)
    for names in (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2")):
        if all(name in args for name in names):
            break
    ends = [args["offs"]] if args.get("offs") is not None else []
    return [*(args[name] for name in names), *ends]


def _flat_value(output: fx.Node, matmul: fx.Node) -> torch.Tensor:
    """Return an output's value with the sizes and strides of its matmul."""
    like: torch.Tensor = matmul.meta["val"]
    value: torch.Tensor = output.meta["val"]
    return like.new_empty_strided(like.shape, like.stride(), dtype=value.dtype)


def _view_sizes(output: fx.Node, match: CutlassMatch) -> list[Any] | None:
    """Return the sizes of an output as a view of its matrix; None if it is the matrix."""
    matmul = match.nodes[0]
    if shape(output) == shape(matmul):
        return None
    view: Any = next(
        node for node in match.nodes if is_view(node) and shape(node)[:-1] == shape(output)[:-1]
    )
    return [*view.args[1][:-1], shape(output)[-1]]


def _add_input_view(graph: fx.Graph, source: fx.Node, match: CutlassMatch) -> fx.Node:
    """Return an input of the epilogue with the sizes that match the matmul output."""
    import torch

    view = match.epilogue.views.get(source)
    value: torch.Tensor = value_of(source)
    if view is not None:
        sizes: Sequence[Any] = view.sizes
        value = view.of(value)
    elif match.nodes[0].meta["val"].dim() == 2 and value.dim() > 2:
        sizes = (-1, value.shape[-1])
        value = as_matrix(value, value.numel() // value.shape[-1])
    else:
        return source
    node = graph.call_function(torch.ops.aten.reshape.default, (source, list(sizes)))
    node.meta = {"val": value}
    return node
