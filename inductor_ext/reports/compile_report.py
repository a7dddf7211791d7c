"""`inductor_ext.report`: one HTML page about a compile, or about the contents of a package.

The page has a section for matmuls, fusions, memory, kernels by time, the time of the compile, the
caches, and the comparison with Inductor (default). `compile_collector` collects the facts,
`report_page` renders them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, overload

from inductor_ext import exc
from inductor_ext.reports import compile_collector, memory_report, report_page
from inductor_ext.reports.compile_facts import CompileFacts
from inductor_ext.reports.compile_trace import write_trace
from inductor_ext.reports.contents_report import ContentsReport, read_contents
from inductor_ext.reports.text import check_writable, format_count, write_file

_SCHEMA = 1

_TEXT_KERNELS = 5
"""Maximum number of kernels in the text."""


@dataclasses.dataclass(frozen=True)
class CompileReport:
    """The report on a compile. `str()` is a text of a few lines for each section."""

    facts: CompileFacts

    def to_html(self, top: int = 10) -> str:
        """Return the self-contained HTML page.

        Args:
            top: maximum number of rows in the table of each memory peak.
        """
        return report_page.render_page(self.facts, top=top)

    def to_json(self) -> str:
        """Return the facts as one JSON object."""
        return json.dumps({"schema": _SCHEMA, **self.facts.as_json()}, indent=1, default=str)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file atomically.

        Raises:
            exc.BadReportFileError: the file cannot be written.
        """
        write_file(path, self.to_html())

    def __str__(self) -> str:
        facts = self.facts
        lines = [str(facts.gemms), ""]
        lines += [memory_report.headline(plan) for plan in facts.plans]
        if facts.kernels is not None:
            lines += ["", f"Kernels of {facts.kernels.scope} on {facts.kernels.device}:"]
            lines += [
                f"{kernel.microseconds:>10.1f} us  {kernel.calls:>4}  {kernel.name}"
                for kernel in facts.kernels.kernels[:_TEXT_KERNELS]
            ]
        graphs = format_count(len(facts.graphs), "graph")
        lines += ["", f"Compile of {graphs}: {facts.compile_seconds:.2f} s"]
        if facts.recompiled is not None:
            seconds = sum(graph.seconds for graph in facts.recompiled)
            lines.append(
                f"Compiled again with the caches: {seconds:.2f} s, "
                f"{facts.cache_hits} of {len(facts.recompiled)} from a cache"
            )
        return "\n".join(lines)


@overload
def report(
    target: str | os.PathLike[str], *, path: str | os.PathLike[str] | None = ...
) -> ContentsReport: ...


@overload
def report(
    target: Callable[..., Any],
    *args: Any,
    path: str | os.PathLike[str] | None = ...,
    mode: str | None = ...,
    options: Mapping[str, Any] | None = ...,
    dynamic: bool | None = ...,
    recompile: bool = ...,
    trace: str | os.PathLike[str] | None = ...,
    **kwargs: Any,
) -> CompileReport: ...


def report(
    target: Callable[..., Any] | str | os.PathLike[str],
    *args: Any,
    path: str | os.PathLike[str] | None = "report.html",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    recompile: bool = True,
    trace: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> CompileReport | ContentsReport:
    """Compile and call a function, or read a package, and write one HTML page about it.

    The function is compiled with all caches of compiled code off, and called three times, the last
    time under torch's profiler. Then it is compiled again with the caches as configured, and called
    five times to measure a call. Nothing that was compiled before is used or changed.

    Args:
        target: a function or module. If it was returned by torch.compile, the original function or
            module is compiled. Alternatively the path of a `.pt2` package; the page shows its
            contents, and nothing is run.
        *args: arguments for a function.
        **kwargs: keyword arguments for a function.
        path: file for the page; None for no file.
        mode: mode of torch.compile, see `inductor_ext.list_mode_options`.
        options: options of Inductor and of the extension by name; `{"max_autotune": True}`
            benchmarks GEMMs that have no tuning results.
        dynamic: as for torch.compile.
        recompile: whether to compile it again to report cache hits and the time of a call.
        trace: file for a trace of the compiles, for ui.perfetto.dev; None for no file.

    Returns:
        The report on the compile; for a package, the report on its contents.

    Raises:
        exc.BadArgumentError: the target is neither callable nor a path, or a package is given with
            arguments.
        exc.BadReportFileError: a file cannot be written. This is checked before the compile.
        exc.UnknownModeError, exc.UnknownOptionError, exc.BadOptionError: raised before compiling.
        exc.BadPackageError, exc.IncompatibleArtifactError: the package cannot be read.
        Exception: raised by compiling or calling the function.
    """
    if path is not None:
        check_writable(os.fspath(path))
    result: CompileReport | ContentsReport
    choices: dict[str, Any] = {"mode": mode, "options": options, "dynamic": dynamic}
    if isinstance(target, (str, os.PathLike)):
        types = ", ".join(type(value).__name__ for value in (*args, *kwargs.values()))
        given = {"args": types or None, "trace": trace, **choices}
        result = _report_package(target, given)
    else:
        _check_callable(target)
        with write_trace(trace):
            facts = compile_collector.collect_facts(
                target, args, kwargs, recompile=recompile, **choices
            )
        result = CompileReport(facts)
    if path is not None:
        result.save(path)
    return result


def _check_callable(target: Any) -> None:
    if isinstance(target, type) or not callable(target):
        raise exc.BadArgumentError(
            name="target", actual=repr(target), allowed="a function, a module, or a path"
        )


def _report_package(target: str | os.PathLike[str], given: Mapping[str, Any]) -> ContentsReport:
    for name, value in given.items():
        if value is not None:
            allowed = "nothing but a path, because a package is not run"
            raise exc.BadArgumentError(name=name, actual=value, allowed=allowed)
    return read_contents(os.fspath(target))
