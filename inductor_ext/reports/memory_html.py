"""Renders a memory report as one HTML page (pure).

The page loads no scripts, fonts or other resources, and follows the reader's light or dark
preference. It has a drawing for every plan and device (`plan_drawing`) and for a measured step
(`timeline_drawing`). Colours stand for modules, at the deepest level that the palette can
distinguish. Everything in a drawing has a tooltip. For readers without sight, every drawing has a
title, a description and tables of its numbers, and the page explains each number. The page is
well-formed XML.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.reports import html_parts, model_state, other_sizes, page_terms
from inductor_ext.reports.memory_measure import Measured
from inductor_ext.reports.model_state import ModelState
from inductor_ext.reports.other_sizes import BatchPeak
from inductor_ext.reports.page_style import ModuleGroups
from inductor_ext.reports.plan_drawing import PlanChart
from inductor_ext.reports.step_timeline import StepTimeline
from inductor_ext.reports.timeline_drawing import draw_timelines


@dataclasses.dataclass(frozen=True)
class Content:
    """What is on the page, see `MemoryReport`; all but title, records and captions may be empty."""

    title: str
    records: Sequence[MemoryPlanRecord]
    captions: Sequence[str]
    """One line per plan."""
    measured: Sequence[Measured] = ()
    state: Sequence[ModelState] = ()
    steps: Sequence[StepTimeline] = ()
    batches: Sequence[BatchPeak] = ()


_KEYS = {
    "key": "held (and the level of a step)",
    "key key-alive": "live",
    "key key-bound": "lower bound (and the planned peak of a call)",
    "key key-peak": "time of the peak",
    "key key-frame": "arena",
    "key key-call": "call of a graph, or step of an optimizer",
}
"""The legend: CSS classes and what they stand for."""

_PLAN_KEYS = {
    classes: text.partition(" (")[0] for classes, text in _KEYS.items() if classes != "key key-call"
}
"""The same without a step."""

_MOST_PROFILE_ROWS = 40


def page(content: Content, top: int) -> str:
    """Return the HTML of the whole page.

    Args:
        content: what is on it.
        top: maximum number of rows in the table of each peak.
    """
    groups = ModuleGroups(content.records)
    body = [f"<h1>Memory of {escape(content.title)}</h1>", _render_keys(_KEYS), groups.legend()]
    body += [page_terms.render_terms(_select_terms(content))]
    if content.state:
        body.append(_render_state(content.state))
    body += _render_steps(content.steps)
    body += render_plans(content.records, content.captions, groups, top)
    if content.batches:
        body.append(_render_batches(content.batches))
    if content.measured:
        body.append(_render_measured_table(content.measured))
    return html_parts.render_document(f"Memory of {content.title}", body, groups.style())


def render_legends(groups: ModuleGroups) -> list[str]:
    """Return the legends of the drawings of plans: what lines and areas mean, and the modules."""
    return [_render_keys(_PLAN_KEYS), groups.legend()]


def render_plans(
    records: Sequence[MemoryPlanRecord],
    captions: Sequence[str],
    groups: ModuleGroups,
    top: int,
    heading: str = "h2",
) -> Iterator[str]:
    """Yield a heading, drawings and tables for each plan.

    Args:
        records: the plans.
        captions: one line for each of them.
        groups: the colours of the modules.
        top: maximum number of rows in the table of each peak.
        heading: tag of the headings.
    """
    for index, (record, caption) in enumerate(zip(records, captions, strict=True)):
        yield f"<{heading}>{index + 1}. {escape(caption)}</{heading}>"
        for number, device in enumerate(peak_report.devices(record)):
            drawing = PlanChart(record, device, groups).svg(f"p{index}d{number}")
            label = f"Drawing of plan {index + 1} on {device}"
            yield html_parts.make_scrollable(drawing, label)
            yield _render_peak_table(record, device, top)
            yield _render_profile(record, device)
        if not peak_report.devices(record):
            yield "<p>No memory is allocated.</p>"
    if not records:
        yield "<p>No memory is allocated.</p>"


def _render_keys(keys: Mapping[str, str]) -> str:
    entries = "".join(
        f'<span><i class="{classes}"></i>{escape(text)}</span> ' for classes, text in keys.items()
    )
    return f'<p class="legend">{entries}</p>'


def _select_terms(content: Content) -> dict[str, str]:
    """Return the terms of the numbers that are on the page."""
    terms = dict(page_terms.PLAN_TERMS)
    if content.state:
        terms |= page_terms.STATE_TERMS
    if content.steps:
        terms |= page_terms.STEP_TERMS
    if content.batches:
        terms |= page_terms.BATCH_TERMS
    if content.measured:
        terms |= page_terms.MEASURED_TERMS
    return terms


# --- tables -------------------------------------------------------------------------------------


def _render_table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]], n: int) -> str:
    """Return a table whose first `n` columns are numbers."""
    return html_parts.render_table(caption, heads, rows, range(n))


def _render_peak_table(record: MemoryPlanRecord, device: str, top: int) -> str:
    title, (heads, *rows) = peak_report.peak_cells(record, device, top)
    return _render_table(title, heads, rows, 2)


def _render_profile(record: MemoryPlanRecord, device: str) -> str:
    """Return the curves of the upper drawing as a table, with the highest values of ranges."""
    held = peak_report.allocated_bytes(record, device)
    live = peak_report.storage_bytes(record, device)
    width = -(-len(held) // _MOST_PROFILE_ROWS)
    rows = []
    for start in range(0, len(held), width):
        end = min(start + width, len(held))
        steps = str(start) if end == start + 1 else f"{start} to {end - 1}"
        values = (max(profile[start:end]) for profile in (held, live))
        rows.append((steps, *map(human_bytes, values)))
    caption = f"Memory held and live on {device}; of several steps, the highest values."
    table = _render_table(caption, ("step", "held", "live"), rows, 3)
    return f"<details><summary>The curves as a table</summary>\n{table}</details>"


def _render_state(state: Sequence[ModelState]) -> str:
    caption = "What the model occupies outside of the plans."
    rows = [part.cells() for part in state]
    return "<h2>Weights, gradients and optimizer state</h2>" + _render_table(
        caption, model_state.HEADS, rows, 5
    )


def _render_steps(steps: Sequence[StepTimeline]) -> Iterator[str]:
    """Yield the section of a measured step: a drawing and two tables for each device."""
    if not steps:
        return
    yield "<h2>The step over time</h2>"
    for number, device in enumerate(dict.fromkeys(step.device for step in steps)):
        on_device = [step for step in steps if step.device == device]
        drawing = draw_timelines(f"s{number}", on_device)
        yield html_parts.make_scrollable(drawing, f"Drawing of the step on {device}")
        yield _render_table(
            f"Peaks of the step on {device}, above the level when it begins.",
            ("measured peak", "mode", "at the peak"),
            [(human_bytes(s.peak), s.mode, s.find_peak_owner()) for s in on_device],
            1,
        )
        yield _render_table(
            f"Calls of graphs in the step on {device}.",
            ("begins at", "planned peak", "measured peak", "call", "mode"),
            [
                (
                    human_bytes(call.base),
                    "not known" if call.planned is None else human_bytes(call.planned),
                    human_bytes(call.measured),
                    call.label,
                    step.mode,
                )
                for step in on_device
                for call in step.calls
            ],
            3,
        )


def _render_batches(batches: Sequence[BatchPeak]) -> str:
    rows = [row.cells() for row in batches]
    caption = "Peaks of the compiled graphs at other sizes of the batch."
    return "<h2>Other batch sizes</h2>" + _render_table(caption, other_sizes.HEADS, rows, 4)


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
