"""Renders a memory plan as one HTML page: time on the x axis, memory offsets on the y axis (pure).

The page loads no scripts, fonts or other resources, and follows the reader's light or dark
preference. For every plan and device it has two charts over the plan's schedule. The upper chart
shows the bytes held and alive, the peak step and the lower bound. The lower chart shows arenas as
frames with their members at their offsets, and storages outside of arenas stacked on top where they
fit (their real addresses in the allocator are not known). Colours stand for modules, at the deepest
level that the palette can distinguish. Everything in a chart has a tooltip, and a table lists what
is live at the peak. The page is well-formed XML.

To keep plans with thousands of storages readable and small, only the largest storages are drawn
individually. The rest of an arena is one shape per colour, and the rest outside of arenas is one
area that shows their sum.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.planner.interval import live_bytes
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.memory.records import MemoryPlanRecord, PlannedArena, PlannedStorage
from inductor_ext.report.memory_measure import Measured

_PALETTE = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""A palette that is distinguishable with colour blindness (Okabe and Ito, 2008)."""
_OTHER = "other"
_NO_MODULE = "none"

_WIDTH, _LEFT, _RIGHT = 1000, 84, 10
CURVE_TOP, CURVE_HEIGHT = 18, 130
_PLAN_TOP, _PLAN_HEIGHT = 176, 360
_HEIGHT = 560

MOST_LOOSE = 500
MOST_MEMBERS = 1500
"""Maximum number of storages drawn individually in one chart, outside of arenas and inside."""

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1c1c; --dim: #6a6a6a; --line: #c4c4c4;
  --frame: #f3f3f3; --bound: #b00020; }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --text: #e6e6e6; --dim: #9a9a9a;
  --line: #4a4d52; --frame: #22252a; --bound: #ff8a80; } }
body { background: var(--back); color: var(--text); font: 14px/1.45 system-ui, sans-serif;
  max-width: 1040px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; margin: 2em 0 0.4em; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font-size: 11px; }
svg text.label { fill: #111; font-size: 10px; pointer-events: none; }
.frame { fill: var(--frame); stroke: var(--text); stroke-width: 1; }
.axis { stroke: var(--line); fill: none; }
.held { stroke: var(--text); fill: none; stroke-width: 1.4; }
.alive { fill: var(--line); stroke: none; opacity: 0.6; }
.bound { stroke: var(--bound); stroke-dasharray: 6 3; fill: none; }
.peak { stroke: var(--text); stroke-dasharray: 2 3; fill: none; }
.s { stroke: var(--back); stroke-width: 0.5; }
.s:hover { stroke: var(--text); stroke-width: 2; }
.input { stroke: var(--text); stroke-dasharray: 3 2; }
.rest { opacity: 0.7; }
.swatch { display: inline-block; width: 0.9em; height: 0.9em; margin: 0 0.35em 0 1em;
  vertical-align: -0.1em; border-radius: 2px; }
table { border-collapse: collapse; margin: 8px 0; }
caption { text-align: left; color: var(--dim); }
th, td { text-align: left; padding: 1px 12px 1px 0; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.dim { color: var(--dim); }
"""


def page(
    title: str,
    records: Sequence[MemoryPlanRecord],
    captions: Sequence[str],
    measured: Sequence[Measured],
    top: int,
) -> str:
    """Return the HTML of the whole page.

    Args:
        title: title of the page.
        records: the plans.
        captions: one line per plan.
        measured: measured memory use of a run; may be empty.
        top: maximum number of rows in the table of each peak.
    """
    groups = ModuleGroups(records)
    body = [f"<h1>Memory of {escape(title)}</h1>", groups.legend()]
    for index, (record, caption) in enumerate(zip(records, captions, strict=True)):
        body.append(f"<h2>{index + 1}. {escape(caption)}</h2>")
        for number, device in enumerate(peak_report.devices(record)):
            body += [
                _Chart(record, device, groups).svg(f"p{index}d{number}"),
                _render_peak_table(record, device, top),
            ]
        if not peak_report.devices(record):
            body.append("<p>No memory is allocated.</p>")
    if not records:
        body.append("<p>No memory is allocated.</p>")
    if measured:
        body.append(_render_measured_table(measured))
    style = f"{_STYLE}{groups.style()}"
    return (
        "<!DOCTYPE html>\n"
        '<html xmlns="http://www.w3.org/1999/xhtml" lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>Memory of {escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


# --- colours ------------------------------------------------------------------------------------


class ModuleGroups:
    """Assigns colours to modules, at the deepest level that the palette can distinguish."""

    def __init__(self, records: Iterable[MemoryPlanRecord]) -> None:
        weight: dict[str, int] = {}
        self._without = False
        for record in records:
            for storage in record.storages:
                area = storage.bytes * (storage.end - storage.start)
                weight[storage.module] = weight.get(storage.module, 0) + area
        self._without = weight.pop("", None) is not None
        self._depth = 1
        deepest = max((module.count(".") + 1 for module in weight), default=1)
        for depth in range(2, deepest + 1):
            if len({self._cut(module, depth) for module in weight}) <= len(_PALETTE):
                self._depth = depth
        areas: dict[str, int] = {}
        for module, area in weight.items():
            name = self._cut(module, self._depth)
            areas[name] = areas.get(name, 0) + area
        largest = sorted(areas, key=lambda name: (-areas[name], name))[: len(_PALETTE)]
        self._others = len(areas) - len(largest)
        # Colours are assigned by name, not by size, so that they change little between plans.
        self._colours = {name: i for i, name in enumerate(sorted(largest, key=_natural_key))}

    @staticmethod
    def _cut(module: str, depth: int) -> str:
        return ".".join(module.split(".")[:depth])

    def css_class(self, module: str) -> str:
        """Return the CSS class of a module."""
        if not module:
            return _NO_MODULE
        colour = self._colours.get(self._cut(module, self._depth))
        return _OTHER if colour is None else f"m{colour}"

    def _entries(self) -> Iterator[tuple[str, str, str]]:
        """Yield the CSS class, colour and name of every group that occurs."""
        for name, index in self._colours.items():
            yield f"m{index}", _PALETTE[index], name
        if self._others:
            yield _OTHER, "#8c8c8c", f"{self._others} other modules"
        if self._without:
            yield _NO_MODULE, "#b9b9b9", "no module"

    def style(self) -> str:
        return "".join(
            f".{name} {{ fill: {colour}; background: {colour}; }}\n"
            for name, colour, _ in self._entries()
        )

    def legend(self) -> str:
        entries = "".join(
            f'<span><i class="swatch {name}"></i>{escape(text)}</span> '
            for name, _, text in self._entries()
        )
        return f'<p class="legend">Modules: {entries or "none"}</p>'


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


# --- drawings -----------------------------------------------------------------------------------


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


class _Chart:
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
        self.total = max(1, self.height + max(self.rest_profile))

    def x(self, time: float) -> float:
        return round(_LEFT + time / self.length * (_WIDTH - _LEFT - _RIGHT), 2)

    def y(self, offset: float) -> float:
        return round(_PLAN_TOP + _PLAN_HEIGHT * (1 - offset / self.total), 2)

    def svg(self, prefix: str) -> str:
        """Return the SVG element; `prefix` makes its ids unique in the page."""
        parts = [
            *_draw_axes(self.length, self.total, self.x, self.y),
            *_draw_curves(self.record, self.device, self.held, self.peak_step, self.x),
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
        title = f"Memory plan of {escape(self.record.graph)} on {escape(self.device)}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-labelledby="{prefix}t {prefix}w">\n<title id="{prefix}t">{title}</title>\n'
            f'<desc id="{prefix}w">{escape(words)}</desc>\n' + "\n".join(parts) + "\n</svg>"
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
        shape = _step_path(self.rest_profile, self.x, lambda size: self.y(self.height + size))
        bottom = self.y(self.height)
        return (
            f'<path class="rest {_OTHER}" d="{shape}L{self.x(self.length)} {bottom}'
            f'L{self.x(0)} {bottom}Z"><title>{words}</title></path>'
        )

    def _draw_peak_marker(self) -> Iterator[str]:
        at = self.x(self.peak_step + 0.5)
        yield f'<path class="peak" d="M{at} {CURVE_TOP}V{_PLAN_TOP + _PLAN_HEIGHT}"/>'
        anchor, shift = ("end", -4) if self.peak_step > self.length / 2 else ("start", 4)
        yield (
            f'<text x="{at + shift}" y="{CURVE_TOP - 5}" text-anchor="{anchor}">peak, step '
            f"{self.peak_step}: {human_bytes(self.held[self.peak_step])}</text>"
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
            drawn += f'<text class="label" x="{left}" y="{middle}">{escape(storage.name)}</text>'
        return drawn


_Scale = Callable[[float], float]


def _describe_arena(arena: PlannedArena, members: int) -> str:
    size = "" if arena.size == str(arena.bytes) else f" = {arena.size} bytes"
    return escape(
        f"{arena.name}: {human_bytes(arena.bytes)}{size}, "
        f"lower bound {human_bytes(arena.lower_bound)}, "
        f"{members} storages, live [{arena.start}, {arena.end})"
    )


def _step_path(profile: Sequence[int], x: _Scale, y: _Scale) -> str:
    """Return an SVG path along a profile, with points only where the value changes."""
    path = [f"M{x(0)} {y(profile[0])}"]
    for step, (before, after) in enumerate(pairwise(profile), 1):
        if before != after:
            path.append(f"H{x(step)}V{y(after)}")
    path.append(f"H{x(len(profile))}")
    return "".join(path)


def _draw_curves(
    record: MemoryPlanRecord, device: str, held: Sequence[int], step: int, x: _Scale
) -> Iterator[str]:
    alive = peak_report.storage_bytes(record, device)
    single = len(peak_report.devices(record)) == 1
    total = max(1, held[step], *alive, record.lower_bound if single else 0)
    bottom = CURVE_TOP + CURVE_HEIGHT

    def y(size: float) -> float:
        return round(bottom - CURVE_HEIGHT * size / total, 2)

    yield f'<path class="axis" d="M{_LEFT} {CURVE_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>'
    yield (
        f'<path class="alive" d="{_step_path(alive, x, y)}L{x(len(alive))} {bottom}'
        f'L{x(0)} {bottom}Z">'
        f"<title>alive: bytes of the storages in use</title></path>"
    )
    yield (
        f'<path class="held" d="{_step_path(held, x, y)}">'
        f"<title>held: bytes taken from the allocator</title></path>"
    )
    if single:
        at = y(record.lower_bound)
        words = f"lower bound {human_bytes(record.lower_bound)}"
        yield (
            f'<path class="bound" d="M{_LEFT} {at}H{_WIDTH - _RIGHT}"><title>{words}</title></path>'
        )
    top = human_bytes(total)
    yield f'<text x="{_LEFT - 6}" y="{CURVE_TOP + 8}" text-anchor="end">{top}</text>'
    yield f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0 B</text>'
    dashed = "; dashed: lower bound" if single else ""
    yield (
        f'<text x="{_LEFT + 2}" y="{bottom + 13}">bytes held (line) and alive (area){dashed}; '
        f"below: offsets in arenas (frames), and memory outside of them</text>"
    )


def _draw_axes(length: int, total: int, x: _Scale, y: _Scale) -> Iterator[str]:
    bottom = _PLAN_TOP + _PLAN_HEIGHT
    yield f'<path class="axis" d="M{_LEFT} {_PLAN_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>'
    for part in range(5):
        offset = total * part // 4
        at = round(y(offset) + 3, 2)
        yield f'<text x="{_LEFT - 6}" y="{at}" text-anchor="end">{human_bytes(offset)}</text>'
    for part in range(5):
        time = length * part // 4
        anchor = "end" if part == 4 else "middle"
        yield f'<text x="{x(time)}" y="{bottom + 15}" text-anchor="{anchor}">{time}</text>'


# --- tables -------------------------------------------------------------------------------------


def _render_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], n: int) -> str:
    """Return a table whose first `n` columns are numbers."""

    def line(cells: Sequence[str], tag: str) -> str:
        numbers = [f'<{tag} class="n">{escape(cell)}</{tag}>' for cell in cells[:n]]
        return "".join(numbers + [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells[n:]])

    body = "".join(f"<tr>{line(row, 'td')}</tr>\n" for row in rows)
    return (
        f"<table><caption>{escape(caption)}</caption>\n<thead><tr>{line(heads, 'th')}</tr></thead>"
        f"\n<tbody>{body}</tbody></table>"
    )


def _render_peak_table(record: MemoryPlanRecord, device: str, top: int) -> str:
    title, (heads, *rows) = peak_report.peak_cells(record, device, top)
    return _render_table(title, heads, rows, 2)


def _render_measured_table(measured: Sequence[Measured]) -> str:
    return "<h2>Measured</h2>" + _render_table(
        "Memory relative to the memory in use before the call.",
        ("predicted", "measured", "deviation", "graph", "kind", "device"),
        (
            (
                human_bytes(run.predicted),
                human_bytes(run.measured),
                f"{run.deviation:+.1f} %",
                run.graph,
                run.kind,
                run.device,
            )
            for run in measured
        ),
        3,
    )
