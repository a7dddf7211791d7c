"""Computes parts of a graph in chunks of rows, so that large values are never whole.

The logits of a language model are the case in mind: [tokens, vocabulary], from a matmul, read by a
softmax or a loss. In two chunks, half of the logits is live at a time. `chunk_graph` finds the
values that make the graph's peak (`live_values`), the operators around them whose rows are
independent (`chunk_region`), and replaces these operators by as many copies as there are chunks.

Each chunk reads slices of the inputs. Results are concatenated; Inductor writes the chunks into
the concatenation (`lowerings.chunked_cat`). Sums over the rows, such as a loss or the gradient of
a weight, are added up chunk by chunk, those of half precision in float32, so that their
rounding differs from that of one sum. `allows_fusion` keeps Inductor from fusing
the chunks again. Graphs with symbolic sizes of rows are left alone. Settings: `memory_budget`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph import chunk_operators
from inductor_ext.lowerings.graph.chunk_region import CHUNK, Region, grow, list_interior
from inductor_ext.lowerings.graph.chunk_rows import TOTAL, Refused, Rows, shape_of
from inductor_ext.lowerings.graph.fx_nodes import add_call
from inductor_ext.lowerings.graph.live_values import REALIZED, LiveValues, count_bytes, estimate

if TYPE_CHECKING:
    from torch import fx

COUNTS = (2, 4, 8, 16)
"""Numbers of chunks."""

_MAX_REGIONS = 32
"""Maximum number of regions of a graph."""

_MAX_SEEDS = 4
"""Number of values that are live at the peak around which a region is looked for."""

LARGE = 1 / 16
"""Share of the peak from which on a value should not be whole."""

_ALIGNMENT = 16
"""Chunks of many rows are a multiple of this number of rows, for the alignment of addresses."""

_STALE = ("tensor_meta", "eager_input_vals", "recompute", "ac_graph_id")
"""Keys of `node.meta` that do not hold for a chunk."""


@dataclasses.dataclass(frozen=True)
class ChunkedGraph:
    """How a graph was divided."""

    count: int
    """Number of chunks of each region; some may have fewer."""
    regions: int
    operators: int
    """Number of operators that were added."""
    peak_before: int
    """Estimate of the peak before, in bytes; see `live_values`."""
    peak: int
    """Estimate of the peak."""


def chunk_graph(gm: fx.GraphModule, saved: int) -> ChunkedGraph | None:
    """Compute parts of a graph in chunks, such that its peak falls by some bytes.

    The number of chunks is the smallest for which the estimate of the peak falls enough. If none
    is enough, it is the one with the lowest estimate.

    Args:
        gm: a graph of ATen operators with fake tensors in `meta["val"]`; changed in place.
        saved: bytes by which the peak should fall.

    Returns:
        What was done; None if the graph is unchanged.
    """
    before = estimate(gm.graph).peak
    size = len(gm.graph.nodes)
    best: tuple[fx.Graph, ChunkedGraph] | None = None
    for count in COUNTS:
        graph, names = divide(gm.graph, before - saved, count)
        peak = estimate(graph).peak
        added = len(graph.nodes) - size
        if names and peak < (before if best is None else best[1].peak):
            best = graph, ChunkedGraph(count, len(names), added, before, peak)
        if peak <= before - saved:
            break
    if best is None:
        return None
    gm.graph = best[0]
    gm.recompile()
    return best[1]


def allows_fusion(first: Iterable[fx.Node], second: Iterable[fx.Node]) -> bool:
    """Whether two kernels may be fused: not if they compute different chunks of one region.

    Args:
        first: the FX nodes of a kernel.
        second: those of the other.
    """
    a, b = _last_chunks(first), _last_chunks(second)
    return all(a[region] == b[region] for region in a.keys() & b.keys())


def _last_chunks(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Return the last chunk of each region that nodes belong to."""
    found: dict[int, int] = {}
    for node in nodes:
        region, chunk = node.meta.get(CHUNK, (0, None))
        if chunk is not None:
            found[region] = max(chunk, found.get(region, 0))
    return found


def divide(graph: fx.Graph, limit: int, count: int) -> tuple[fx.Graph, list[list[str]]]:
    """Divide regions of a graph until the estimate of its peak is below a limit.

    Args:
        graph: the graph, which is not changed.
        limit: of the peak, in bytes.
        count: number of chunks.

    Returns:
        The divided graph, and the names of the operators of each region.
    """
    regions: list[list[str]] = []
    refused: set[str] = set()
    live = estimate(graph)
    while live.peak > limit and len(regions) < _MAX_REGIONS:
        best: tuple[int, fx.Graph, list[str]] | None = None
        interior: set[str] = set()
        for wide in (False, True):
            changed = _copy_graph(graph)
            now = estimate(changed)
            region = _find_region(now, count, refused, wide)
            if region is None:
                continue
            names = [node.name for node in region.results]
            interior |= {node.name for node in list_interior(region, now)}
            rewrite(changed, region, count, len(regions))
            peak = estimate(changed).peak
            if peak < (live.peak + 1 if best is None else best[0]):
                best = peak, changed, names
            if peak < live.peak:
                break
        if not interior:
            break
        if best is None:
            refused |= interior
            continue
        _, graph, names = best
        live = estimate(graph)
        regions.append(names)
    return graph, regions


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph, with copies of the nodes' metadata."""
    from torch import fx

    copied = fx.Graph(graph.owning_module)
    values = copied.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(values, tuple)
    result, output = values
    copied.output(result).meta = dict(output.meta)
    copied.set_codegen(graph._codegen)
    return copied


def _find_region(live: LiveValues, count: int, refused: set[str], wide: bool) -> Region | None:
    """Return the region with the most bytes that are live at the peak, and then fewest operators.

    Args:
        live: the live values of the graph.
        count: number of chunks.
        refused: names of values without whose region the peak is lower.
        wide: see `chunk_region.grow`.
    """
    large = max(1, int(LARGE * live.peak))
    by_size = sorted(live.at_peak.items(), key=lambda item: -item[1])
    seeds = [node for node, size in by_size if size >= large and node.name not in refused]
    best: Region | None = None
    best_score = 0, 0
    for seed in seeds[:_MAX_SEEDS]:
        for rows, out in _list_divisions(seed, count):
            region = grow(seed, out, rows, live, large, wide=wide)
            if region is None:
                continue
            interior = list_interior(region, live)
            size = sum(live.at_peak[node] for node in interior if node.name not in refused)
            # Values that loops compute get memory of their own if they are needed outside.
            new = (node for node in region.list_outputs() if node not in live.roots)
            score = size - sum(map(count_bytes, new)), -len(region.results)
            if score > best_score:
                best, best_score = region, score
    return best


def _list_divisions(node: fx.Node, count: int) -> Iterator[tuple[int, Rows]]:
    """Yield the numbers of rows by which a value can be divided, and its rows: any dimension, or
    several from the first on."""
    try:
        shape = shape_of(node)
    except Refused:
        return
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    outer = [(dims[0], end) for end in dims[:-1]] + [(dim, dim) for dim in dims[1:]]
    for start, end in outer if len(dims) > 1 else [(dim, dim) for dim in dims]:
        rows = math.prod(shape[start : end + 1])
        if rows >= 2 * count:
            yield rows, Rows(start, end + 1 - start)


def rewrite(graph: fx.Graph, region: Region, count: int, number: int) -> None:
    """Replace the operators of a region by chunks.

    Args:
        graph: the graph, changed in place.
        region: the region.
        count: number of chunks.
        number: of the region, to tell its chunks from those of others.
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    outputs, kept = region.list_outputs(), region.list_views_outside()
    pieces: dict[fx.Node, list[fx.Node]] = {node: [] for node in outputs}
    *_, final = region.results
    with graph.inserting_before(final.next):
        wholes: dict[tuple[fx.Node, Rows], fx.Node] = {}
        for index, bounds in enumerate(_list_bounds(region.rows, count)):
            chunk = _Chunk(graph, region, (number, index), *bounds, wholes)
            for node in region.results:
                value = chunk.add(node)
                if node in pieces and region.results[node] != TOTAL:
                    pieces[node].append(value)
                elif node in pieces:
                    total = pieces[node]
                    total[:] = [chunk.add_to_total(node, value, *total)]
        joined = {
            node: _join(graph, node, region, values, number) for node, values in pieces.items()
        }
    for node, whole in joined.items():
        for user in list(node.users):
            if user not in region.results or user in kept:
                user.replace_input_with(node, whole)
    for node in reversed(region.results):
        if node not in kept:
            graph.erase_node(node)
    stable_topological_sort(graph)
    graph.lint()


def _list_bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Return the first row and the end of each chunk."""
    step = -(-rows // count)
    if step >= 4 * _ALIGNMENT:
        step = -(-step // _ALIGNMENT) * _ALIGNMENT
    bounds = [*range(0, rows, step), rows]
    return list(itertools.pairwise(bounds))


class _Chunk:
    """Adds the operators of one chunk; implements `chunk_rows.Builder`."""

    def __init__(
        self,
        graph: fx.Graph,
        region: Region,
        key: tuple[int, int],
        start: int,
        end: int,
        wholes: dict[tuple[fx.Node, Rows], fx.Node],
    ) -> None:
        self.graph, self.region, self.key = graph, region, key
        self.start, self.end = start, end
        self.length = end - start
        self.values: dict[fx.Node, fx.Node] = {}
        self.slices: dict[tuple[fx.Node, Rows], fx.Node] = {}
        self.wholes = wholes
        """Inputs whose rows are made one dimension, for all chunks."""
        self.node: Any = None
        """The operator whose chunk is added."""

    def add(self, node: fx.Node) -> fx.Node:
        """Add the chunk of an operator and return it."""
        self.node = node
        out = self.region.results[node]
        value = chunk_operators.emit_chunk(node, out, self.region.needs[node], self)
        self.values[node] = value
        return value

    def add_to_total(self, node: fx.Node, value: fx.Node, total: fx.Node | None = None) -> fx.Node:
        """Add what the chunk contributes to a sum to what the chunks before it have."""
        import torch

        self.node = node
        if total is None:
            return value
        added = self.call(torch.ops.aten.add.Tensor, total, value)
        # Otherwise the contributions of several chunks are live until one kernel adds them.
        added.meta[REALIZED] = True
        return added

    def value(self, node: fx.Node) -> fx.Node:
        if node in self.values:
            return self.values[node]
        rows = self.region.needs[self.node][node]
        if rows is None:
            return node
        if (node, rows) not in self.slices:
            self.slices[node, rows] = self._slice(node, rows)
        return self.slices[node, rows]

    def _slice(self, node: fx.Node, rows: Rows) -> fx.Node:
        import torch

        aten = torch.ops.aten
        whole = node if rows.count == 1 else self.wholes.get((node, rows))
        if whole is None:
            shape = rows.replace(shape_of(node), self.region.rows)
            key = self.key[0], None
            whole = _add_call(self.graph, self.node, key, aten.reshape.default, node, shape)
            self.wholes[node, rows] = whole
        return self.call(aten.slice.Tensor, whole, rows.start, self.start, self.end)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        import torch

        if target is torch.ops.aten.reshape.default and [*args[0].meta["val"].shape] == args[1]:
            reshaped: fx.Node = args[0]
            return reshaped
        return _add_call(self.graph, self.node, self.key, target, *args, **kwargs)


def _add_call(
    graph: fx.Graph,
    like: fx.Node,
    key: tuple[int, int | None],
    target: Any,
    *args: Any,
    **kwargs: Any,
) -> fx.Node:
    """Add a call with its value, and the metadata of the operator that it stands for."""
    with _find_fake_mode(like):
        node = add_call(graph, like, target, *args, **kwargs)
    meta = {name: value for name, value in node.meta.items() if name not in _STALE}
    node.meta = {**meta, CHUNK: key}
    return node


def _find_fake_mode(node: fx.Node) -> Any:
    """Return the mode in which operators return fake tensors, of a node's value."""
    from torch._guards import detect_fake_mode

    value = node.meta["val"]
    return detect_fake_mode(value if isinstance(value, (tuple, list)) else [value])


def _join(
    graph: fx.Graph, node: fx.Node, region: Region, values: list[fx.Node], number: int
) -> fx.Node:
    """Add what makes the whole value of an operator from its chunks, or from their sum."""
    import torch

    aten, prims = torch.ops.aten, torch.ops.prims

    def call(target: Any, *args: Any) -> fx.Node:
        return _add_call(graph, node, (number, None), target, *args)

    out, expected = region.results[node], node.meta["val"]
    if out == TOTAL:
        (whole,) = values
        divisor = chunk_operators.total_divisor(node)
        if divisor != 1:
            whole = call(aten.div.Tensor, whole, divisor)
        if whole.meta["val"].dtype != expected.dtype:
            whole = call(prims.convert_element_type.default, whole, expected.dtype)
    else:
        whole = call(aten.cat.default, values, out.start) if len(values) > 1 else values[0]
        # Padded rows would have to be copied where the layout is that of the graph.
        whole.meta["dislike_padding"] = True
    if whole.meta["val"].shape != expected.shape:
        whole = call(aten.reshape.default, whole, list(expected.shape))
    assert whole.meta["val"].dtype == expected.dtype
    return whole
