"""Draws the memory plan of one function on one device, as SVG (pure).

Two drawings share their axes: the steps of the generated code from left to right, and bytes. The
upper one shows the bytes held and live, the peak step and the lower bound. The lower one shows
arenas as frames with their members at their offsets, and storages outside of arenas stacked on top
where they fit (their real addresses in the allocator are not known).

To keep plans with thousands of storages readable and small, only the largest storages are drawn
individually. The rest of an arena is one shape per colour, and the rest outside of arenas is one
area that shows their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape

from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.planner.interval import live_bytes
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.memory.records import MemoryPlanRecord, PlannedArena, PlannedStorage
from inductor_ext.reports import plot
from inductor_ext.reports.page_style import OTHER, ModuleGroups
from inductor_ext.reports.plot import Plot

CURVE_TOP, PLAN_TOP, PLOT_HEIGHT = 30, 380, 290
"""Tops of the two drawings, and the height of each, in pixels."""

_HEIGHT = PLAN_TOP + PLOT_HEIGHT + 44

X_LABEL = "step (line of the generated code)"
CURVE_LABEL = "memory on the device (bytes)"
PLAN_LABEL = "offset (bytes)"

MOST_LOOSE = 500
MOST_MEMBERS = 1500
"""Maximum number of storages drawn individually in one chart, outside of arenas and inside."""


@dataclasses.dataclass
class _Block:
    """An arena, or a storage outside of arenas, and where it is drawn."""

    start: int
    end: int
    bytes: int
    part: PlannedArena | PlannedStorage
    index: int
    """Index of an arena in its plan."""
    base: int = 0


def _stack_blocks(blocks: Sequence[_Block]) -> int:
    """Place every block at the lowest base without overlap with earlier ones; return the height."""
    placed: list[_Block] = []
    for block in blocks:
        base = 0
        for other in sorted(
            (b for b in placed if b.start < block.end and block.start < b.end),
            key=lambda b: b.base,
        ):
            if base + block.bytes <= other.base:
                break
            base = max(base, other.base + other.bytes)
        block.base = base
        placed.append(block)
    return max((block.base + block.bytes for block in blocks), default=0)


def _area(storage: PlannedStorage) -> int:
    return storage.bytes * (storage.end - storage.start)


class PlanChart:
    """The drawing of a plan's memory on one device."""

    def __init__(self, record: MemoryPlanRecord, device: str, groups: ModuleGroups) -> None:
        self.record = record
        self.device = device
        self.groups = groups
        self.length = peak_report.steps(record)
        self.held = peak_report.allocated_bytes(record, device)
        self.peak_step = peak_report.peak_step(record, device)
        arenas = [
            _Block(arena.start, arena.end, arena.bytes, arena, index)
            for index, arena in enumerate(record.arenas)
            if arena.device == device
        ]
        arenas.sort(key=lambda block: (block.start, -block.bytes))
        storages = [s for s in record.storages if s.device == device]
        # Place the largest first: they end up at the bottom, which leaves the fewest gaps.
        storages.sort(key=_area, reverse=True)
        self.members = [s for s in storages if s.arena is not None]
        self.loose = [s for s in storages if s.arena is None]
        drawn, self.rest = self.loose[:MOST_LOOSE], self.loose[MOST_LOOSE:]
        self.arena_count = len(arenas)
        self.blocks = arenas + [_Block(s.start, s.end, s.bytes, s, -1) for s in drawn]
        self.height = _stack_blocks(self.blocks)
        spans = ((s.start, s.end, s.bytes) for s in self.rest)
        self.rest_profile = live_bytes(spans, self.length)
        self.alive = peak_report.storage_bytes(record, device)
        # The lower bound of a plan is the sum over its devices.
        single = len(peak_report.devices(record)) == 1
        self.bound = record.lower_bound if single else None
        total = max(1, self.height + max(self.rest_profile), *self.held, *self.alive)
        total = max(total, self.bound or 0)
        self.curves = Plot(CURVE_TOP, PLOT_HEIGHT, self.length, 0, total)
        self.plan = Plot(PLAN_TOP, PLOT_HEIGHT, self.length, 0, total)
        self.x, self.y = self.plan.x, self.plan.y

    def svg(self, prefix: str) -> str:
        """Return the SVG element; `prefix` makes its ids unique in the page."""
        ticks = plot.find_step_ticks(self.length)
        parts = [
            *self.curves.draw_axes("Memory held and live", X_LABEL, CURVE_LABEL, ticks),
            *self._draw_curves(),
            *self.plan.draw_axes(
                "Arenas (frames), and storages outside of them", X_LABEL, PLAN_LABEL, ticks
            ),
        ]
        single = set(map(id, self.members[:MOST_MEMBERS]))
        by_arena: dict[int | None, list[PlannedStorage]] = {}
        for storage in self.members:
            by_arena.setdefault(storage.arena, []).append(storage)
        for block in self.blocks:
            if isinstance(block.part, PlannedStorage):
                parts.append(self._draw_storage(block.part, block.base, "separate allocation"))
            else:
                parts += self._draw_arena(block, block.part, by_arena.get(block.index, []), single)
        if self.rest:
            parts.append(self._draw_rest())
        parts += self._draw_peak_marker()
        peak_bytes, step = human_bytes(self.held[self.peak_step]), self.peak_step
        words = (
            f"On {self.device}, {peak_bytes} are held at the peak, step {step} of {self.length}. "
            f"{len(self.members)} storages are in {self.arena_count} arenas, and "
            f"{len(self.loose)} are allocated separately. The table below lists what is held at "
            f"the peak."
        )
        title = f"Memory plan of {self.record.graph} on {self.device}"
        return plot.wrap_svg(prefix, _HEIGHT, title, words, parts)

    def _draw_curves(self) -> Iterator[str]:
        x, y, bottom = self.curves.x, self.curves.y, self.curves.bottom
        alive = plot.draw_step_path(self.alive, x, y)
        yield (
            f'<path class="alive" d="{alive}L{x(self.length)} {bottom}L{x(0)} {bottom}Z">'
            f"<title>live: bytes of the storages in use</title></path>"
        )
        yield (
            f'<path class="held" d="{plot.draw_step_path(self.held, x, y)}">'
            f"<title>held: bytes taken from the allocator</title></path>"
        )
        if self.bound is not None:
            words = f"lower bound {human_bytes(self.bound)}"
            yield (
                f'<path class="bound" d="M{x(0)} {y(self.bound)}H{x(self.length)}">'
                f"<title>{words}</title></path>"
            )

    def _draw_arena(
        self, block: _Block, arena: PlannedArena, inside: Sequence[PlannedStorage], single: set[int]
    ) -> Iterator[str]:
        """Draw an arena: storages in `single` individually, the others as one shape per colour."""
        yield f'<g class="arena"><title>{_describe_arena(arena, len(inside))}</title>'
        yield self._draw_rectangle("frame", block.start, block.end, block.base, block.bytes)
        by_colour: dict[str, list[PlannedStorage]] = {}
        for storage in inside:
            if id(storage) in single:
                offset = block.base + (storage.offset or 0)
                yield self._draw_storage(storage, offset, f"{arena.name} + {storage.offset}")
            else:
                by_colour.setdefault(self.groups.css_class(storage.module), []).append(storage)
        for colour, storages in by_colour.items():
            shape = "".join(
                f"M{self.x(s.start)} {self.y(block.base + (s.offset or 0) + s.bytes)}"
                f"H{self.x(s.end)}V{self.y(block.base + (s.offset or 0))}H{self.x(s.start)}Z"
                for s in storages
            )
            words = (
                f"{len(storages)} smaller storages, the largest {human_bytes(storages[0].bytes)}"
            )
            yield f'<path class="rest {colour}" d="{shape}"><title>{words}</title></path>'
        yield "</g>"

    def _draw_rest(self) -> str:
        """Draw the sum of the separate allocations that are not drawn individually."""
        words = f"{len(self.rest)} smaller separate allocations, summed"
        shape = plot.draw_step_path(
            self.rest_profile, self.x, lambda size: self.y(self.height + size)
        )
        bottom = self.y(self.height)
        return (
            f'<path class="rest {OTHER}" d="{shape}L{self.x(self.length)} {bottom}'
            f'L{self.x(0)} {bottom}Z"><title>{words}</title></path>'
        )

    def _draw_peak_marker(self) -> Iterator[str]:
        at = self.x(self.peak_step + 0.5)
        for panel in (self.curves, self.plan):
            line = f"M{at} {panel.top}V{panel.bottom}"
            yield f'<path class="halo" d="{line}"/><path class="peak" d="{line}"/>'
        yield (
            f'<text x="{plot.WIDTH - plot.RIGHT}" y="{CURVE_TOP - 10}" text-anchor="end">peak, '
            f"step {self.peak_step}: {human_bytes(self.held[self.peak_step])}</text>"
        )

    def _draw_rectangle(
        self, classes: str, start: int, end: int, base: int, size: int, inner: str = ""
    ) -> str:
        left, right, top, bottom = self.x(start), self.x(end), self.y(base + size), self.y(base)
        return (
            f'<rect class="{classes}" x="{left}" y="{top}" width="{round(right - left, 2)}" '
            f'height="{round(bottom - top, 2)}"' + (f">{inner}</rect>" if inner else "/>")
        )

    def _draw_storage(self, storage: PlannedStorage, base: int, place: str) -> str:
        lines = (
            f"{storage.name}: {human_bytes(storage.bytes)}, {storage.kind}",
            storage.operator,
            f"module {storage.module}" if storage.module else "",
            f"live [{storage.start}, {storage.end}), {place}",
        )
        words = "&#10;".join(escape(line) for line in lines if line)
        input_class = " input" if storage.kind == "input" else ""
        classes = f"s {self.groups.css_class(storage.module)}{input_class}"
        inner = f"<title>{words}</title>"
        drawn = self._draw_rectangle(
            classes, storage.start, storage.end, base, storage.bytes, inner=inner
        )
        width = self.x(storage.end) - self.x(storage.start)
        high = self.y(base) - self.y(base + storage.bytes)
        if high >= 12 and width >= 6.5 * len(storage.name) + 6:
            middle = round(self.y(base + storage.bytes / 2) + 3.5, 2)
            left = round(self.x(storage.start) + 4, 2)
            colour = self.groups.css_class(storage.module)
            drawn += (
                f'<text class="label on-{colour}" x="{left}" y="{middle}">'
                f"{escape(storage.name)}</text>"
            )
        return drawn


def _describe_arena(arena: PlannedArena, members: int) -> str:
    size = "" if arena.size == str(arena.bytes) else f" = {arena.size} bytes"
    return escape(
        f"{arena.name}: {human_bytes(arena.bytes)}{size}, "
        f"lower bound {human_bytes(arena.lower_bound)}, "
        f"{members} storages, live [{arena.start}, {arena.end})"
    )
