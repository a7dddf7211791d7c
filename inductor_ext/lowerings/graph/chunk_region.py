"""Finds the part of a graph that can be computed in chunks such that a large value is never whole.

`grow` starts at a value that is live at the peak, and adds

- operators that read a large value, so that none needs it as a whole;
- the operator that computes a large input, so that it is not whole either;
- operators between two of the region, without which a chunk could not be computed at once;
- small operators that only the region reads, and small ones that read only the region.

What is left outside is read whole or in slices, or gets the concatenated chunks or their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from inductor_ext.lowerings.graph import operator_kinds
from inductor_ext.lowerings.graph.chunk_operators import list_needs, list_results
from inductor_ext.lowerings.graph.chunk_rows import TOTAL, Needs, Refused, Rows, tensor_value
from inductor_ext.lowerings.graph.fx_nodes import is_read_by_strides
from inductor_ext.lowerings.graph.live_values import LiveValues, count_bytes

if TYPE_CHECKING:
    from torch import fx

MAX_OPERATORS = 300
"""Maximum number of operators of a region."""

CHUNK = "inductor_ext_chunk"
"""Key in `node.meta`: the number of the region, and of the chunk in it."""


@dataclasses.dataclass
class Region:
    """Operators that are computed in chunks."""

    rows: int
    """Number of rows."""
    results: dict[fx.Node, Rows] = dataclasses.field(default_factory=dict)
    """The operators, and which dimensions of their results are the rows; `TOTAL` for sums."""
    needs: dict[fx.Node, Needs] = dataclasses.field(default_factory=dict)
    """What a chunk of each operator needs of its inputs."""

    def list_outputs(self) -> list[fx.Node]:
        """Return the operators whose whole results are needed outside, in the graph's order.

        A view that is needed outside is made there, of the whole value.
        """
        kept = self.list_views_outside()
        return [
            node
            for node in self.results
            if node not in kept
            and any(user not in self.results or user in kept for user in node.users)
        ]

    def list_views_outside(self) -> set[fx.Node]:
        """Return the views of the region's values that are needed outside."""
        kept: set[fx.Node] = set()
        for node in reversed(self.results):
            outside = any(user not in self.results or user in kept for user in node.users)
            if outside and operator_kinds.is_view(node):
                source = node.all_input_nodes[0]
                if source in self.results:
                    kept.add(node)
        return kept


def grow(
    seed: fx.Node, out: Rows, rows: int, live: LiveValues, large: int, *, wide: bool = False
) -> Region | None:
    """Find the region around a value.

    Args:
        seed: the value.
        out: its rows.
        rows: number of rows.
        live: the live values of the graph.
        large: bytes from which on a value that is live at the peak should not be whole.
        wide: whether no value that is as large should be whole, also if it is not live at the peak.

    Returns:
        The region, with its operators in the graph's order; None if there is none.
    """
    return _Growth(seed, out, rows, live, large, wide).run()


class _Growth:
    """The search for one region."""

    def __init__(
        self, seed: fx.Node, out: Rows, rows: int, live: LiveValues, large: int, wide: bool
    ) -> None:
        self.region = Region(rows)
        self.place = live.place
        self.nodes = live.nodes
        self.live, self.large, self.wide = live, large, wide
        self.pending: list[fx.Node] = []
        self.seed = seed
        self.out = out

    def run(self) -> Region | None:
        if not self._add(self.seed, [self.out]):
            return None
        while self.pending:
            node = self.pending.pop()
            self._add_large_inputs(node)
            if self._is_large(node) or self._is_tuple(node):
                for user in node.users:
                    self._add(user)
        if not self._close():
            return None
        while self._absorb_inputs() or self._absorb_users():
            pass
        region = self.region
        order = sorted(region.results, key=self.place.__getitem__)
        region.results = {node: region.results[node] for node in order}
        return region if self._is_valid() else None

    def _add(self, node: fx.Node, outs: Iterable[Rows] | None = None) -> bool:
        """Add an operator that reads the region, or whose result has the rows `outs`.

        Returns:
            Whether it is in the region now.
        """
        region = self.region
        if node in region.results:
            return outs is None or region.results[node] in outs
        if CHUNK in node.meta or len(region.results) >= MAX_OPERATORS:
            return False
        for out in list_results(node, region.rows) if outs is None else outs:
            for needs in list_needs(node, out, region.rows):
                if self._agrees(node, out, needs):
                    region.results[node] = out
                    region.needs[node] = needs
                    self.pending.append(node)
                    return True
        return False

    def _agrees(self, node: fx.Node, out: Rows, needs: Needs) -> bool:
        """Whether the inputs and users of an operator are computed with the rows that it needs."""
        results = self.region.results
        for source, rows in needs.items():
            # The region needs the chunk of a value, or the whole value, never both.
            if source in results and results[source] != rows:
                return False
            if source not in results and rows is not None and not _can_slice(source, rows):
                return False
        users = (user for user in node.users if user in results)
        if any(self.region.needs[user][node] != out for user in users):
            return False
        return any(rows is not None for rows in needs.values()) or operator_kinds.is_creation(node)

    def _add_large_inputs(self, node: fx.Node) -> None:
        for source, rows in self.region.needs[node].items():
            if rows is None or source in self.region.results:
                continue
            if self._is_large(source) or self._is_tuple(source):
                self._add(source, [rows])

    def _is_large(self, node: fx.Node) -> bool:
        size = count_bytes(node) if self.wide else self.live.find_at_peak(node)
        return size >= self.large

    def _has_one_value_per_row(self, node: fx.Node) -> bool:
        try:
            return tensor_value(node).numel() <= self.region.rows
        except Refused:
            return False

    def _is_tuple(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), (tuple, list))

    def _close(self) -> bool:
        """Add what is between operators of the region; return whether all of it can be added."""
        while between := self._find_between():
            node = min(between, key=self.place.__getitem__)
            needed = self._find_needed_rows(node)
            if needed is not None and None in needed:
                return False
            if not self._add(node, needed):
                return False
        return True

    def _find_needed_rows(self, node: fx.Node) -> list[Rows] | None:
        """Return as which rows the region reads a value; None if it does not read it."""
        found = [
            self.region.needs[user][node] for user in node.users if user in self.region.results
        ]
        return found or None  # type: ignore[return-value]

    def _find_between(self) -> set[fx.Node]:
        """Return the operators on paths that leave the region and come back to it."""
        results = self.region.results
        first = min(map(self.place.__getitem__, results))
        final = max(map(self.place.__getitem__, results))
        nodes = self.nodes[first : final + 1]
        behind = self._find_behind(final + 1)
        before: set[fx.Node] = set()
        for node in reversed(nodes):
            if any(user in results or user in before for user in node.users):
                before.add(node)
        return (behind & before) - results.keys()

    def _find_behind(self, end: int | None = None) -> set[fx.Node]:
        """Return the operators up to a place that need a result of the region."""
        results = self.region.results
        behind: set[fx.Node] = set()
        for node in self.nodes[min(map(self.place.__getitem__, results)) : end]:
            if any(source in results or source in behind for source in node.all_input_nodes):
                behind.add(node)
        return behind

    def _absorb_inputs(self) -> bool:
        """Add cheap inputs that only the region reads; return whether there are any."""
        changed = False
        for needs in list(self.region.needs.values()):
            for source, rows in needs.items():
                if rows is None or source in self.region.results or not _is_cheap(source):
                    continue
                if all(user in self.region.results for user in source.users):
                    changed |= self._add(source, [rows])
        return changed

    def _absorb_users(self) -> bool:
        """Add small operators that read the region, if they need nothing that is behind it.

        Returns:
            Whether there are any.
        """
        results = self.region.results
        behind = self._find_behind() - results.keys()
        size = len(results)
        for node, out in list(results.items()):
            for user in node.users if out != TOTAL else ():
                if (
                    user not in results
                    and operator_kinds.is_fusible(user)
                    and self._has_one_value_per_row(user)
                    and behind.isdisjoint(user.all_input_nodes)
                    and self._add(user)
                ):
                    behind.discard(user)
        return len(results) > size

    def _is_valid(self) -> bool:
        outputs = self.region.list_outputs()
        if any(isinstance(node.meta["val"], (tuple, list)) for node in outputs):
            return False
        # The concatenated chunks are contiguous.
        if not all(tensor_value(node).is_contiguous() for node in outputs):
            return False
        if any(map(is_read_by_strides, self.region.results)) or self._may_be_overwritten():
            return False
        return any(True for _ in list_interior(self.region, self.live))

    def _may_be_overwritten(self) -> bool:
        """Whether an operator between those of the region may write to memory."""
        places = [self.place[node] for node in self.region.results]
        nodes = self.nodes[min(places) : max(places)]
        return any(node.op == "call_function" and _may_write(node) for node in nodes)


def list_interior(region: Region, live: LiveValues) -> Iterator[fx.Node]:
    """Yield the values that are live at the peak, and are whole no more."""
    outputs = set(region.list_outputs())
    return (node for node in region.results if node in live.at_peak and node not in outputs)


def _may_write(node: fx.Node) -> bool:
    import torch

    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return getattr(node.target, "__module__", "") not in ("_operator", "math", "torch", "torch.sym")


def _is_cheap(node: fx.Node) -> bool:
    return (
        operator_kinds.is_pointwise(node)
        or operator_kinds.is_view(node)
        or operator_kinds.is_creation(node)
    )


def _can_slice(node: fx.Node, rows: Rows) -> bool:
    """Whether rows of a value can be read without a copy of the whole value."""
    try:
        value = tensor_value(node)
    except Refused:
        return False
    strides, sizes = value.stride(), value.shape
    return all(
        strides[dim] == strides[dim + 1] * sizes[dim + 1] or sizes[dim] == 1
        for dim in range(rows.start, rows.end - 1)
    )
