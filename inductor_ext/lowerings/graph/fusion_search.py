"""Search for all kernels that compute several nodes around matmuls: gates, shared inputs, norms.

`find_fusions` matches three patterns in a graph after Inductor's own passes:

- `match_gated`: act(x @ w1 + b1) * (x @ w2 + b2);
- `match_shared_input`: matmuls with the same operand A (Q, K and V);
- `match_normed_input`: an RMSNorm or LayerNorm of the rows of A.

It matches the same patterns among matmuls with a dequantized B (`match_dequantized`) and their
scales. There is no match if an inner value is used elsewhere, as are values that a forward graph
saves for its backward, nor across an operator that mutates its arguments. If Inductor is set to
round as eager mode does (`emulate_precision_casts`), gates and norms are not fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from inductor_ext import numerics
from inductor_ext.lowerings.graph.cleanup import clean_graph
from inductor_ext.lowerings.graph.fusible_matmuls import FusibleMatmuls
from inductor_ext.lowerings.graph.fusion import SMALL_M, Fusion
from inductor_ext.lowerings.graph.match_gated import find_gated_fusions
from inductor_ext.lowerings.graph.match_normed_input import add_norm
from inductor_ext.lowerings.graph.match_shared_input import find_shared_input_fusions
from inductor_ext.settings import Settings

if TYPE_CHECKING:
    from torch import fx


def find_fusions(
    graph: fx.Graph, settings: Settings, dequantized: Sequence[Fusion] = ()
) -> list[Fusion]:
    """Return the fusions that a graph offers. Cleans the graph first.

    Fusions with a norm precede the same ones without it. Of fusions that share a node at most one
    can be applied; any selection that respects this can be applied together.

    Args:
        graph: after Inductor's own passes.
        settings: which patterns to match.
        dequantized: matmuls with a B that is dequantized in the graph, with their scales, from
            `match_dequantized`. Those with large M are also matched as matmuls of the dequantized
            tensor; with small M it is far slower to write that tensor and read it again.
    """
    clean_graph(graph)
    small = {node for case in dequantized if case.problem.m <= SMALL_M for node in case.nodes}
    fusions = _find(FusibleMatmuls(graph, without=small), settings, ())
    if dequantized:
        fusions = [*_find(FusibleMatmuls(graph, dequantized), settings, fusions), *fusions]
    return fusions


def _find(matmuls: FusibleMatmuls, settings: Settings, others: Sequence[Fusion]) -> list[Fusion]:
    """Return gates, shared inputs, and these and the remaining matmuls with norms.

    Args:
        matmuls: of the graph.
        settings: which patterns to match.
        others: fusions that were found before.
    """
    rounds = numerics.has_exact_pointwise()
    gated = list(find_gated_fusions(matmuls)) if settings.gemm_fuse_gated and not rounds else []
    fused_nodes = {node for fusion in gated for node in fusion.nodes}
    shared = []
    if settings.gemm_fuse_shared_input:
        shared = find_shared_input_fusions(matmuls, [*others, *gated], fused_nodes)
        fused_nodes |= {node for fusion in shared for node in fusion.nodes}
    fusions = [*gated, *shared]
    if not settings.gemm_fuse_norm or rounds:
        return fusions
    single = [matmul for node, matmul in matmuls.by_output.items() if node not in fused_nodes]
    normed = [add_norm(matmuls, fusion) for fusion in (*fusions, *single)]
    return [*(fusion for fusion in normed if fusion is not None), *fusions]
