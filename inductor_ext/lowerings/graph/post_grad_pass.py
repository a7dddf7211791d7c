"""Entry of the planner: the pass that runs after Inductor's post-grad passes.

`plan_matmuls` plans a graph and its subgraphs, each under the Inductor options with which it is
lowered, and replaces attention of few queries (`decode_attention`). `cache_key` says which stored
results and flags the plans depend on. Settings: `decode_attention`, `gemm_templates`, `gemm_rows`,
`gemm_fuse_*`, `cutlass_*`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import fx

from inductor_ext import _compat, events, numerics
from inductor_ext.autotune import cutlass_kernels, decide, results_db
from inductor_ext.lowerings.graph import explain_records, undo_woq_int8
from inductor_ext.lowerings.graph.decisions import Decider
from inductor_ext.lowerings.graph.decode_attention import replace_decode_attention
from inductor_ext.lowerings.graph.fusion import named_graph
from inductor_ext.lowerings.graph.planner import Planner
from inductor_ext.lowerings.graph.site import find_matmuls
from inductor_ext.settings import Settings
from inductor_ext.templates.device import Device


@events.timed("plan_matmuls")
def plan_matmuls(gm: fx.GraphModule, settings: Settings) -> None:
    """Plan the matmuls of a graph and of its subgraphs, after all other passes.

    Graphs for which `use_post_grad_passes` is off are not planned.
    """
    from torch._inductor import config

    def plan(graph: fx.GraphModule) -> None:
        if config.use_post_grad_passes:
            _plan_graph(graph, settings)

    _visit_graphs(gm, plan)


def _visit_graphs(
    gm: fx.GraphModule,
    visit: Callable[[fx.GraphModule], None],
    call: fx.Node | None = None,
    visited: set[fx.GraphModule] | None = None,
) -> None:
    """Visit a graph and the subgraphs of its operators, each once, subgraphs first.

    Each graph is visited under the Inductor options with which it is lowered: those of its
    `nested_compile_region`, on top of those of the enclosing regions.

    Args:
        gm: the graph.
        visit: called with each graph.
        call: the node that calls the graph; None for the top-level graph.
        visited: graphs to skip; the graphs that are visited are added.
    """
    from torch._inductor import config

    visited = set() if visited is None else visited
    visited.add(gm)
    patches = _compat.region_patches(gm, call)
    with config.patch(dict(patches)) if patches else contextlib.nullcontext():
        for node in gm.graph.find_nodes(op="get_attr"):
            subgraph = named_graph(gm, node)
            # Passes over loops keep the `get_attr` of the original graph without users.
            if node.users and subgraph is not None and subgraph not in visited:
                _visit_graphs(subgraph, visit, next(iter(node.users)), visited)
        visit(gm)


def _plan_graph(gm: fx.GraphModule, settings: Settings) -> None:
    is_free = numerics.gemm_obstacle() is None
    if settings.gemm_templates and is_free:
        undo_woq_int8.restore_matmuls(gm.graph)
    if settings.decode_attention and is_free and replace_decode_attention(gm.graph, settings):
        gm.recompile()
    allowed = settings.gemm_templates and is_free
    first = next(iter(find_matmuls(gm.graph)), None) if allowed else None
    if first is not None:
        index = first.meta["val"].device.index
        device = Device.from_torch(torch.cuda.get_device_properties(index))
        Planner(gm, settings, Decider(settings, device, index)).plan()
        gm.recompile()
    explain_records.emit_records(gm.graph, settings)


def cache_key(settings: Settings, gm: fx.GraphModule | None = None) -> str:
    """Return a text that changes if the same graph may get other kernels than before.

    Without tuning, the stored tuning results determine the generated code. With tuning, results
    that were measured in the meantime make no difference: a compile measures what it does not know.

    Args:
        settings: of the compile.
        gm: the graph. Its regions may have options of their own, see `_compat.region_patches`.
    """
    if not settings.gemm_templates or not torch.cuda.is_available():
        return ""
    keys = [_cache_key(settings)]
    if gm is not None:
        _visit_graphs(gm, lambda _: keys.append(_cache_key(settings)))
    return "-".join(dict.fromkeys(keys))


def _tunes_now(settings: Settings) -> bool:
    """Whether kernels may be benchmarked during this compile."""
    return any(decide.tunes_now(settings, backend) for backend in ("TRITON", "CUTLASS"))


def _cache_key(settings: Settings) -> str:
    """Return the `cache_key` for the current Inductor options."""
    key = results_db.open_database(settings).generation(tuning=_tunes_now(settings))
    # Inductor's own cache keys do not include all of these flags.
    flags = numerics.matmul_flags()
    if flags is not None:
        key = f"{key}-{flags}"
    if not decide.backend_enabled("CUTLASS"):
        return key
    # Whether CUTLASS kernels can be built affects which kernels a graph gets.
    return f"{key}-{cutlass_kernels.generation(settings)}"
