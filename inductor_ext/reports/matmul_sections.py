"""Renders the sections about matmuls of the report on a compile, as HTML (pure).

One section has a table with a bar per matmul: its time, that of Inductor (default), and the
roofline. The other lists the fusions: operators in the kernels, and those that are not, with the
reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from inductor_ext.reports.gemm_report import Gemm, GemmReport, KernelFusion
from inductor_ext.reports.html_parts import draw_bar, render_paragraph, render_table
from inductor_ext.reports.text import format_count
from inductor_ext.templates.format import config_words

_NOT_MEASURED = "not measured"

_LEGEND = (
    '<p class="legend"><span><i class="key key-time"></i>kernel</span> '
    '<span><i class="key key-alive"></i>Inductor (default)</span> '
    '<span><i class="key key-roofline"></i>roofline</span></p>'
)


def render_matmuls(report: GemmReport) -> Iterator[str]:
    """Yield the table of the matmuls, and that of attention."""
    if not report.gemms:
        yield render_paragraph("There are no matmuls.")
    else:
        if any(gemm.record.microseconds for gemm in report.gemms):
            yield _LEGEND
        else:
            yield render_paragraph(
                "No matmul was measured, so there are no bars. With max_autotune, matmuls on a GPU "
                "are benchmarked."
            )
        longest = max(time for gemm in report.gemms for time in (0.0, *_list_times(gemm)))
        yield _render_matmul_table(report, longest)
    if report.attention:
        calls: dict[tuple[str, str], int] = {}
        for record in report.attention:
            for change in record.changes:
                key = (change, record.module or "not known")
                calls[key] = calls.get(key, 0) + 1
        yield render_table(
            "Calls of attention that the extension changes.",
            ("change", "module", "calls"),
            [(change, module, str(count)) for (change, module), count in calls.items()],
            (2,),
            row_head=0,
        )


_NUMBERS = ("times", "us", "Inductor (default) us", "roofline us", "of roofline")


def _render_matmul_table(report: GemmReport, longest: float) -> str:
    """Return the table without the columns that are empty, as on a CPU.

    Args:
        report: the matmuls.
        longest: microseconds that fill the width of a bar.
    """
    heads = ("matmul", *_NUMBERS, "time against the roofline", "kernel", "reason", "modules")
    rows = [_render_row(number, gemm, longest) for number, gemm in enumerate(report.gemms, 1)]
    columns = [index for index in range(len(heads)) if any(row[index] for row in rows)]
    return render_table(
        "Matmuls in the order of their compiles. Equal ones of several modules share a row.",
        [heads[index] for index in columns],
        [[row[index] for index in columns] for row in rows],
        [place for place, index in enumerate(columns) if heads[index] in _NUMBERS],
        row_head=0,
    )


def _list_times(gemm: Gemm) -> list[float]:
    record = gemm.record
    times = (record.microseconds, record.stock_microseconds, record.roofline)
    return [time for time in times if time is not None]


def _format_time(time: float | None) -> str:
    return "" if time is None else f"{time:.1f}"


def _render_row(number: int, gemm: Gemm, longest: float) -> Sequence[str]:
    record = gemm.record
    return (
        f"{number}. {gemm.label}",
        str(len(gemm.modules)),
        _format_time(record.microseconds),
        _format_default(gemm),
        _format_time(record.roofline),
        "" if gemm.share is None else f"{gemm.share:.0%}",
        _draw_times(number, gemm, longest),
        config_words(record.chosen),
        f"{record.origin}: {record.reason}",
        ", ".join(module for module in gemm.modules if module) or "not known",
    )


def _format_default(gemm: Gemm) -> str:
    """Return what Inductor (default) does with a matmul: its time if measured, or its kernel."""
    if gemm.record.stock_microseconds is not None:
        return f"{gemm.record.stock_microseconds:.1f}"
    return f"{gemm.record.operator}, {_NOT_MEASURED}" if gemm.ours else "same kernel"


def _draw_times(number: int, gemm: Gemm, longest: float) -> str:
    record = gemm.record
    if record.microseconds is None:
        return _NOT_MEASURED
    bars = [("bar-time", record.microseconds)]
    words = [f"kernel {record.microseconds:.1f} us"]
    if gemm.ours and record.stock_microseconds is not None:
        bars.append(("alive", record.stock_microseconds))
        words.append(f"Inductor (default) {record.stock_microseconds:.1f} us")
    if record.roofline is not None:
        words.append(f"roofline {record.roofline:.1f} us")
    return draw_bar(
        f"m{number}b", bars, longest, gemm.label, ", ".join(words), marker=record.roofline
    )


def compare_times(report: GemmReport) -> str:
    """Return a sentence that compares the measured times with those of Inductor (default)."""
    extension = [gemm for gemm in report.gemms if gemm.ours]
    if not report.gemms:
        return "There are no matmuls to compare."
    if not extension:
        return "Every matmul uses the kernel of Inductor (default)."
    measured = [
        (len(gemm.modules), gemm.record.microseconds, gemm.record.stock_microseconds)
        for gemm in extension
        if gemm.record.microseconds is not None and gemm.record.stock_microseconds is not None
    ]
    count = sum(len(gemm.modules) for gemm in extension)
    words = f"{format_count(count, 'matmul')} with an extension kernel instead of ATen or Inductor."
    if not measured:
        return f"{words} Their times were not measured."
    time = sum(number * kernel for number, kernel, _ in measured)
    default = sum(number * kernel for number, _, kernel in measured)
    return (
        f"{words} Those that were measured take {time:.1f} us; with Inductor (default) they take "
        f"{default:.1f} us."
    )


# --- fusions ------------------------------------------------------------------------------------


def render_fusions(report: GemmReport, kernels: Sequence[KernelFusion]) -> Iterator[str]:
    """Yield the fusions with matmuls, taken and missed, and those of other kernels.

    Args:
        report: the matmuls.
        kernels: kernels without matmuls.
    """
    rows = [
        (f"{number}. {gemm.label}", *fusion)
        for number, gemm in enumerate(report.gemms, 1)
        for fusion in _list_fusions(gemm)
    ]
    if rows:
        yield render_table(
            "Operators beside matmuls: part of the kernel (fused) or not, with the reason.",
            ("matmul", "result", "operator", "reason"),
            rows,
            row_head=0,
        )
    else:
        yield render_paragraph("No operator was fused with a matmul, or could have been.")
    others = [
        (f"{number}. {', '.join(kernel.operators)}", *fusion)
        for number, kernel in enumerate(kernels, 1)
        for fusion in [
            *([("fused", ", ".join(kernel.operators), "")] if len(kernel.operators) > 1 else []),
            *map(_split_reason, kernel.separate),
        ]
    ]
    if others:
        yield render_table(
            "Kernels without matmuls: the operators that they compute, and those that use the "
            "result in another kernel, with the reason.",
            ("kernel", "result", "operators", "reason"),
            others,
            row_head=0,
        )
    else:
        yield render_paragraph("No other kernel was fused, or could have been.")


def _list_fusions(gemm: Gemm) -> Iterator[tuple[str, str, str]]:
    """Yield whether an operator is fused, its name, and the reason."""
    for operator in gemm.fused:
        yield "fused", operator, ""
    yield from map(_split_reason, gemm.separate)
    for text in gemm.record.declined:
        operator, _, reason = text.partition(": ")
        yield "not fused", operator, reason


def _split_reason(text: str) -> tuple[str, str, str]:
    """Return the cells for an operator that is not fused, such as "softmax (a reduction)"."""
    operator, _, reason = text.removesuffix(")").partition(" (")
    return "not fused", operator, reason
