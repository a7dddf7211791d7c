"""Renders the report on a compile as one HTML page (pure).

The page has the structure and the style of all pages (`html_parts`). A section with nothing to show
says so in one sentence. The sections about matmuls are in `matmul_sections`, the drawings of memory
are those of the memory report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from inductor_ext.hooks.records import CompileRecord
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.reports import (
    html_parts,
    matmul_sections,
    memory_html,
    memory_report,
    page_terms,
)
from inductor_ext.reports.compile_facts import CompileFacts, KernelProfile
from inductor_ext.reports.html_parts import draw_bar, render_paragraph, render_table
from inductor_ext.reports.page_style import ModuleGroups
from inductor_ext.reports.text import format_count

_MOST_KERNELS = 20

Section = tuple[str, str, Iterable[str]]
"""Id, title and HTML."""


def render_page(facts: CompileFacts, *, top: int = 10, before: Sequence[Section] = ()) -> str:
    """Return the HTML of the whole page.

    Args:
        facts: what is on it.
        top: maximum number of rows in the table of each memory peak.
        before: sections above those about the compile.
    """
    headlines = [memory_report.headline(plan) for plan in facts.plans]
    groups = ModuleGroups(facts.plans)
    sections: list[Section] = [
        *before,
        ("matmuls", "Matmuls", matmul_sections.render_matmuls(facts.gemms)),
        ("fusions", "Fusions", matmul_sections.render_fusions(facts.gemms, facts.other_kernels)),
        ("memory", "Memory", _render_memory(facts.plans, headlines, groups, top)),
        ("kernels", "Kernels by time", _render_kernels(facts.kernels)),
        ("compile-time", "Compile time", _render_compile_time(facts)),
        ("caches", "Caches", _render_caches(facts)),
        ("default", "Inductor (default)", _render_default(facts)),
    ]
    title = f"Report on {facts.title}"
    introduction = render_paragraph(summarize(facts)) + html_parts.render_facts(facts.environment)
    body = html_parts.render_landmarks(title, introduction, sections)
    return html_parts.render_document(title, body, groups.style())


def summarize(facts: CompileFacts) -> str:
    """Return the results in a few sentences."""
    report = facts.gemms
    extension = sum(len(gemm.modules) for gemm in report.gemms if gemm.ours)
    if not facts.graphs:
        return "Nothing was compiled."
    sentences = [
        f"{format_count(len(facts.graphs), 'graph')} compiled in {facts.compile_seconds:.1f} s.",
        f"{format_count(report.count, 'matmul')}, {extension} of them with an extension kernel.",
    ]
    if facts.plans:
        plan = max(facts.plans, key=lambda plan: plan.peak)
        sentences.append(
            f"Peak memory {human_bytes(plan.peak)}, with Inductor (default) "
            f"{human_bytes(plan.peak_before)}, lower bound {human_bytes(plan.lower_bound)}."
        )
    if facts.call_microseconds is not None:
        sentences.append(f"A call takes {_format_time(facts.call_microseconds)}.")
    return " ".join(sentences)


def _format_time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1000:.2f} ms"


def _render_memory(
    plans: Sequence[MemoryPlanRecord], headlines: Sequence[str], groups: ModuleGroups, top: int
) -> Iterator[str]:
    if not plans:
        yield render_paragraph("There is no memory plan: no generated function allocates memory.")
        return
    yield from memory_html.render_legends(groups)
    yield page_terms.render_terms(page_terms.PLAN_TERMS, is_open=False)
    yield from memory_html.render_plans(plans, headlines, groups, top, "h3")


# --- time ---------------------------------------------------------------------------------------


def _render_kernels(profile: KernelProfile | None) -> Iterator[str]:
    if profile is None:
        yield render_paragraph("Not measured: no call was profiled.")
        return
    if not profile.kernels:
        yield render_paragraph("The profiler recorded no kernels in the call.")
        return
    shown = profile.kernels[:_MOST_KERNELS]
    longest = shown[0].microseconds
    rows: list[Sequence[str]] = []
    for number, kernel in enumerate(shown):
        share = kernel.microseconds / profile.total
        words = f"{kernel.microseconds:.1f} us, {share:.0%} of all kernels"
        bar = draw_bar(
            f"k{number}", [("bar-time", kernel.microseconds)], longest, kernel.name, words
        )
        rows.append(
            (kernel.name, f"{kernel.microseconds:.1f}", f"{share:.1%}", str(kernel.calls), bar)
        )
    hidden = profile.kernels[_MOST_KERNELS:]
    if hidden:
        rest = sum(kernel.microseconds for kernel in hidden)
        name = format_count(len(hidden), "other kernel")
        rows.append((name, f"{rest:.1f}", f"{rest / profile.total:.1%}", "", ""))
    yield render_table(
        f"Kernels on {profile.device} in {profile.scope} under torch's profiler.",
        ("kernel", "us", "share", "calls", "time"),
        rows,
        (1, 2, 3),
        row_head=0,
    )
    yield render_paragraph(
        f"The kernels take {_format_time(profile.total)}. The wrapper code and the runtime take "
        f"{_format_time(profile.outside)} on the CPU, with the profiler."
    )


def _render_compile_time(facts: CompileFacts) -> Iterator[str]:
    if not facts.graphs:
        yield render_paragraph("Nothing was compiled.")
        return
    if facts.phases:
        longest = facts.phases[0].seconds
        rows = []
        for number, phase in enumerate(facts.phases):
            share = phase.seconds / facts.compile_seconds
            words = f"{phase.seconds:.2f} s, {share:.0%} of the compile"
            bar = draw_bar(f"c{number}", [("bar-time", phase.seconds)], longest, phase.name, words)
            rows.append((phase.name, f"{phase.seconds:.2f}", f"{share:.1%}", bar))
        yield render_table(
            f"The {facts.compile_seconds:.2f} s of the compile, with caches of compiled code off. "
            "The phases do not overlap.",
            ("phase", "s", "share", "time"),
            rows,
            (1, 2),
            row_head=0,
        )
    planning = sum(plan.seconds for plan in facts.plans)
    yield render_paragraph(f"Memory planning took {planning:.2f} s of the code generation.")
    yield _render_graphs("The graphs that were compiled.", facts.graphs)


def _render_graphs(caption: str, graphs: Sequence[CompileRecord]) -> str:
    rows = [
        (f"{number}. {graph.kind}", str(graph.operators), f"{graph.seconds:.2f}", graph.cache)
        for number, graph in enumerate(graphs, 1)
    ]
    return render_table(
        caption, ("graph", "operators", "s in Inductor", "cache"), rows, (1, 2), row_head=0
    )


def _render_caches(facts: CompileFacts) -> Iterator[str]:
    if facts.recompiled is None:
        yield render_paragraph(
            "Not measured: the caches of compiled code were off, so that the report has all "
            "decisions."
        )
    elif not facts.recompiled:
        yield render_paragraph("The second compile, with the caches on, compiled no graph.")
    else:
        seconds = sum(graph.seconds for graph in facts.recompiled)
        yield render_paragraph(
            f"Compiled again with the caches as configured: {facts.cache_hits} of "
            f"{format_count(len(facts.recompiled), 'graph')} came from a cache, and Inductor "
            f"took {seconds:.2f} s. A miss fills the cache."
        )
        yield _render_graphs("The graphs of the second compile.", facts.recompiled)
    stored = sum(
        len(gemm.modules) for gemm in facts.gemms.gemms if gemm.record.origin == "measured"
    )
    yield render_paragraph(
        f"Kinds of matmuls that were benchmarked in this compile: {facts.tuned}. Matmuls of the "
        f"model with a tuning result: {stored}."
    )


# --- comparison ---------------------------------------------------------------------------------


def _render_default(facts: CompileFacts) -> Iterator[str]:
    """Yield what Inductor (default) would have done: memory plans and kernels of matmuls."""
    if not facts.plans and not facts.gemms.gemms:
        yield render_paragraph("There is nothing to compare: no memory plan and no matmul.")
        return
    if facts.plans:
        yield render_table(
            "Memory: Inductor's buffer reuse and the plan that is used.",
            ("graph", "Inductor (default)", "extension", "saved", "allocator calls"),
            [_compare_plan(plan) for plan in facts.plans],
            (1, 2, 3, 4),
            row_head=0,
        )
    yield render_paragraph(matmul_sections.compare_times(facts.gemms))


def _compare_plan(plan: MemoryPlanRecord) -> Sequence[str]:
    name = f"{plan.graph} ({plan.kind})"
    if plan.reason:
        return (name, "not known", "the same plan", "", "")
    saved = 1 - plan.peak / plan.peak_before if plan.peak_before else 0.0
    return (
        name,
        human_bytes(plan.peak_before),
        human_bytes(plan.peak),
        f"{saved:.1%}",
        f"{plan.calls_before} -> {plan.calls}",
    )
