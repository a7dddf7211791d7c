"""Draws the memory of a whole step over time on one device, as SVG (pure).

There is one drawing for the compiled step and one for eager mode below it, with the same scale of
bytes. Each has its own scale of time. Brackets mark the calls of compiled graphs and the steps of
optimizers. A dashed line in a call is the peak that its plan predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.reports import plot
from inductor_ext.reports.plot import Plot
from inductor_ext.reports.step_timeline import StepTimeline

_TOP, _PLOT_HEIGHT, _PANEL_HEIGHT = 34, 220, 300

X_LABEL = "time since the step began (ms, under the profiler)"
Y_LABEL = "above the level before (bytes)"

MOST_POINTS = 4000
"""Maximum number of changes that are drawn one by one. Of more, the extremes are drawn."""

_COLUMNS = 900


def draw_timelines(prefix: str, timelines: Sequence[StepTimeline]) -> str:
    """Return the SVG element for the timelines of one device.

    Args:
        prefix: makes its ids unique in the page.
        timelines: of the compiled step and, if it was measured, of eager mode.
    """
    lowest = min(min(timeline.lowest, *_list_bases(timeline)) for timeline in timelines)
    highest = max(1, *(max(timeline.peak, *_list_plans(timeline)) for timeline in timelines))
    parts: list[str] = []
    for number, timeline in enumerate(timelines):
        panel = Plot(
            _TOP + number * _PANEL_HEIGHT, _PLOT_HEIGHT, max(timeline.duration, 1), lowest, highest
        )
        parts += _draw_timeline(panel, timeline)
    device = timelines[0].device
    peaks = ", ".join(
        f"{timeline.mode}: peak {human_bytes(timeline.peak)}, in {timeline.find_peak_owner()}"
        for timeline in timelines
    )
    words = f"Memory of the step on {device} over time; {peaks}. The table below has the graphs."
    height = _PANEL_HEIGHT * len(timelines) + 20
    return plot.wrap_svg(prefix, height, f"Memory of a step on {device}", words, parts)


def _list_bases(timeline: StepTimeline) -> tuple[int, ...]:
    return (0, *(call.base for call in timeline.calls))


def _list_plans(timeline: StepTimeline) -> tuple[int, ...]:
    return (0, *(call.base + (call.planned or 0) for call in timeline.calls))


def _draw_timeline(panel: Plot, timeline: StepTimeline) -> Iterator[str]:
    title = f"{timeline.mode.capitalize()}: peak {human_bytes(timeline.peak)}"
    ticks = _find_time_ticks(timeline.duration)
    yield from panel.draw_axes(title, X_LABEL, Y_LABEL, ticks)
    for label, start, end in (
        *((call.label, call.start, call.end) for call in timeline.calls),
        *((span.name, span.start, span.end) for span in timeline.optimizer_steps),
    ):
        yield from _draw_bracket(panel, label, start, end)
    at = panel.x(timeline.peak_time)
    line = f"M{at} {panel.top}V{panel.bottom}"
    yield f'<path class="peak" d="{line}"/>'
    yield f'<path class="held" d="{_draw_level(panel, timeline)}"><title>level</title></path>'
    for call in timeline.calls:
        if call.planned is None:
            continue
        at = panel.y(call.base + call.planned)
        words = f"{call.label}: planned peak {human_bytes(call.planned)} above its beginning"
        yield (
            f'<path class="bound" d="M{panel.x(call.start)} {at}H{panel.x(call.end)}">'
            f"<title>{escape(words)}</title></path>"
        )


def _draw_bracket(panel: Plot, label: str, start: int, end: int) -> Iterator[str]:
    left, right = panel.x(start), panel.x(end)
    top = panel.top - 4
    yield (
        f'<path class="call" d="M{left} {panel.bottom}V{top}H{right}V{panel.bottom}">'
        f"<title>{escape(label)}</title></path>"
    )
    if right - left >= 6.5 * len(label):
        middle = round((left + right) / 2, 2)
        yield (
            f'<text class="call-label" x="{middle}" y="{panel.top + 10}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )


def _draw_level(panel: Plot, timeline: StepTimeline) -> str:
    """Return the SVG path of the level, with the peak and the lowest level in any case."""
    points = list(zip(timeline.times, timeline.levels, strict=True))
    if len(points) > MOST_POINTS:
        points = list(_reduce(points, timeline.duration))
    path = [f"M{panel.x(0)} {panel.y(0)}"]
    path += [f"H{panel.x(time)}V{panel.y(level)}" for time, level in points]
    path.append(f"H{panel.x(timeline.duration)}")
    return "".join(path)


def _reduce(points: Sequence[tuple[int, int]], duration: int) -> Iterator[tuple[int, int]]:
    """Yield the first, highest, lowest and last point of each column of the drawing."""
    columns: dict[int, list[int]] = {}
    for index, (time, _) in enumerate(points):
        columns.setdefault(time * _COLUMNS // max(duration, 1), []).append(index)
    for indices in columns.values():
        levels = [points[index][1] for index in indices]
        extremes = (indices[levels.index(max(levels))], indices[levels.index(min(levels))])
        for index in sorted({indices[0], *extremes, indices[-1]}):
            yield points[index]


def _find_time_ticks(duration: int) -> list[tuple[float, str]]:
    """Return at most eleven round times, as nanoseconds and milliseconds."""
    ticks = plot.find_step_ticks(max(duration, 1))
    return [(position, f"{position / 1e6:g}") for position, _ in ticks]
