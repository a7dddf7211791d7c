"""Renders a comparison of eager mode, Inductor (default) and the extension as one HTML page (pure).

Below the comparison, the page has the sections of the report on the extension's compile.
"""

from __future__ import annotations

from collections.abc import Iterator

from inductor_ext.reports import html_parts, report_page
from inductor_ext.reports.comparison import Comparison, Outcome, format_row
from inductor_ext.reports.compile_facts import CompileFacts
from inductor_ext.reports.html_parts import Markup, draw_bar, render_paragraph, render_table

_TITLE = "Comparison"


def render_page(comparison: Comparison, facts: CompileFacts | None) -> str:
    """Return the HTML of the whole page.

    Args:
        comparison: the measured ways.
        facts: the extension's compile; None shows the comparison only.
    """
    section = ("comparison", _TITLE, _render_comparison(comparison))
    if facts is not None:
        return report_page.render_page(facts, before=[section])
    introduction = render_paragraph(f"{comparison.calls} timed calls of each way.")
    heading = f"{_TITLE} on {comparison.title}"
    body = html_parts.render_landmarks(heading, introduction, [section])
    return html_parts.render_document(heading, body)


def _render_comparison(comparison: Comparison) -> Iterator[str]:
    longest = max((o.milliseconds or 0.0 for o in comparison.outcomes), default=0.0)
    largest = max((o.total_bytes or 0 for o in comparison.outcomes), default=0)
    rows = []
    for outcome in comparison.outcomes:
        cells = format_row(outcome, comparison.inductor_milliseconds)
        way, call, of_inductor, compiled, memory, error = cells
        time_bar = _draw(outcome, "t", outcome.milliseconds, longest, f"{call} ms")
        memory_bar = _draw(outcome, "m", outcome.total_bytes, largest, f"{memory} MiB")
        rows.append((way, call, of_inductor, time_bar, memory, memory_bar, compiled, error))
    yield render_table(
        f"Medians of {comparison.calls} calls in turns. Memory is what a call allocates at most. "
        f"The error is the largest one against {comparison.reference}, relative to the result.",
        ("", "ms per call", "of Inductor", "time", "memory MiB", "memory", "compile s", "error"),
        rows,
        (1, 2, 4, 6, 7),
        row_head=0,
    )
    for outcome in comparison.outcomes:
        if outcome.failure is not None:
            yield render_paragraph(f"{outcome.way} failed: {outcome.failure}")


def _draw(
    outcome: Outcome, kind: str, value: float | None, whole: float, words: str
) -> str | Markup:
    if value is None or outcome.failure is not None:
        return ""
    css = "bar-time" if outcome.way == "inductor_ext" else "alive"
    return draw_bar(f"{kind}-{outcome.way}", [(css, value)], whole, outcome.way, words)
