"""`inductor_ext.memory_report`: what a model's memory is used for.

A report consists of memory plans (`MemoryPlanRecord`), one per generated function. It can be
made for a callable returned by torch.compile, including graphs loaded from a cache; for an exported
program, whose code is generated but not compiled; or from a file. As text, JSON or one HTML page
with charts, it shows the memory in use at the peak of every plan and the modules that use it.
`MemoryReport.measure` compares the plans with the memory that a run allocates.

All sizes are bytes at the size hints: for dynamic shapes, the sizes of the example inputs.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import events, exc
from inductor_ext.memory import compiled_callables, plan_store
from inductor_ext.memory.planner.peak_report import (
    PeakRow,
    devices,
    human_bytes,
    peak_rows,
    peak_table,
)
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.report import memory_html, memory_measure
from inductor_ext.report.memory_measure import Measured
from inductor_ext.report.text import format_count, qualified_name
from inductor_ext.storage.atomic import atomic_write

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """The memory plans of one model. `str()` is the table."""

    title: str
    records: tuple[MemoryPlanRecord, ...]
    """One per generated function, in the order in which their graphs were compiled."""
    measured: tuple[Measured, ...] = ()
    """Measured memory use of a run; empty unless set by `measure`."""

    @property
    def peak(self) -> int:
        """Bytes: the maximum of the plans' peaks, since functions run one at a time."""
        return self._highest.peak if self.records else 0

    @property
    def lower_bound(self) -> int:
        """Bytes: the lower bound of the plan with the highest peak."""
        return self._highest.lower_bound if self.records else 0

    @property
    def ratio(self) -> float:
        """Peak divided by lower bound; 1.0 if nothing is allocated."""
        return self._highest.ratio if self.records else 1.0

    @property
    def _highest(self) -> MemoryPlanRecord:
        return max(self.records, key=lambda record: record.peak)

    def largest(self, n: int = 10) -> list[PeakRow]:
        """Return the `n` largest rows of the highest peak, on the device where it is highest."""
        if not self.records:
            return []
        record = self._highest
        rows = [peak_rows(record, device) for device in devices(record)]
        return max(rows, key=lambda peak: sum(row.bytes for row in peak), default=[])[:n]

    def measure(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryReport:
        """Call `fn` once and return this report with measured memory use next to the plans.

        Args:
            fn: runs the graphs of the report: the compiled callable, or a function that also calls
                backward. It should have run before; otherwise compiling is measured as well.
            args, kwargs: arguments for `fn`, with the sizes that the plans were made for.

        Raises:
            exc.NothingMeasuredError: the call ran none of the report's graphs.
        """
        runs = memory_measure.measure(self.records, lambda: fn(*args, **kwargs))
        if not runs:
            raise exc.NothingMeasuredError(title=self.title)
        return dataclasses.replace(self, measured=runs)

    def table(self, top: int = 10) -> str:
        """Format the report as text, with the `top` largest rows of the peak of every plan."""
        lines = [f"Memory of {self.title}"]
        for number, record in enumerate(self.records, 1):
            lines += ["", f"{number}. {headline(record)}", "", peak_table(record, top)]
        if not self.records:
            lines += ["", "No memory is allocated."]
        if self.measured:
            lines += ["", "Measured, relative to the memory in use before the call:"]
            lines += [f"  {run.describe()}" for run in self.measured]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> str:
        """Return the report as one JSON object, which `inductor-ext memory` can read."""
        report = {
            "schema": _SCHEMA,
            "title": self.title,
            "peak": self.peak,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "records": [record.as_json() for record in self.records],
            "measured": [dataclasses.asdict(run) for run in self.measured],
        }
        return json.dumps(report, indent=1)

    def to_html(self, top: int = 10) -> str:
        """Return the report as one self-contained HTML page: charts, then tables."""
        captions = [headline(record) for record in self.records]
        return memory_html.page(self.title, self.records, captions, self.measured, top)

    def write_html(self, path: str | os.PathLike[str], top: int = 10) -> None:
        """Write `to_html` to a file atomically.

        Raises:
            exc.BadReportFileError: the file cannot be written.
        """
        text = self.to_html(top)
        try:
            with (
                atomic_write(path) as temporary,
                open(temporary, "w", encoding="utf-8") as file,
            ):
                file.write(text)
        except OSError as error:
            raise exc.BadReportFileError.not_writable(os.fspath(path), str(error)) from None


def headline(record: MemoryPlanRecord) -> str:
    """Return a one-line summary of the plan of a generated function."""
    if record.reason:
        return f"{record.graph} ({record.kind}): planned by Inductor (default): {record.reason}"
    comparison = ""
    if record.peak_reordered_from is not None:
        comparison = f" ({human_bytes(record.peak_reordered_from)} in Inductor's kernel order)"
    return (
        f"{record.graph} ({record.kind}): peak {human_bytes(record.peak_before)} -> "
        f"{human_bytes(record.peak)}, lower bound {human_bytes(record.lower_bound)}"
        f"{comparison}, ratio {record.ratio:.3f}, {format_count(len(record.arenas), 'arena')}, "
        f"allocator calls {record.calls_before} -> {record.calls}"
    )


def memory_report(
    target: Callable[..., Any] | ExportedProgram, *, options: Mapping[str, Any] | None = None
) -> MemoryReport:
    """Report how a compiled or exported model uses memory.

    Args:
        target: the result of `torch.compile`, or the module or function that was passed to it,
            after it has been called. The report covers every graph compiled for it so far: forward,
            backward, recompiles and the graphs after graph breaks. Instances of a class share the
            code that dynamo compiled for one of them, and therefore the report. Alternatively an
            exported program, which is planned as in `aoti_compile_and_package`.
        options: for an exported program, options of Inductor and of the extension by name.

    Raises:
        exc.NotReportableError: `target` is none of these, or options were given for a callable.
        exc.NothingCompiledError: it has not been called, or not with this backend.
        exc.PlanNotFoundError: a graph was loaded from a cache, and its plan is missing.
        exc.InductorExtError: for an exported program, raised by `aoti_compile_and_package`.
    """
    from torch.export import ExportedProgram

    if isinstance(target, ExportedProgram):
        inputs = format_count(len(target.graph_signature.user_inputs), "input")
        title = f"an exported program of {inputs}"
        return MemoryReport(title, _plan_exported(target, options))
    if options is not None:
        raise exc.NotReportableError(
            actual=f"{type(target).__name__} with options", why="it has been compiled already"
        )
    if isinstance(target, type) or not callable(target):
        raise exc.NotReportableError(actual=type(target).__name__, why="it cannot be called")
    compiles = compiled_callables.find_compiles(target)
    if not compiles:
        raise exc.NothingCompiledError(name=qualified_name(target))
    records: dict[MemoryPlanRecord, None] = {}
    for compile_ in compiles:
        for graph in compile_.graphs:
            plans = graph.plans()
            if plans is None:
                raise exc.PlanNotFoundError(name=qualified_name(target), key=graph.key)
            records.update(dict.fromkeys(plans))
    return MemoryReport(qualified_name(target), tuple(records))


def _plan_exported(
    program: ExportedProgram, options: Mapping[str, Any] | None
) -> tuple[MemoryPlanRecord, ...]:
    from inductor_ext import aot

    # Only the wrapper's code is needed for the plan; compiling it would take most of the time.
    configs = {
        **(options or {}),
        "aot_inductor.package_cpp_only": True,
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.package_constants_on_disk_format": None,
        # A package loaded from the artifact cache would not be planned.
        "artifact_cache": False,
    }
    with events.capture(this_thread=True) as records:
        aot.aoti_compile_and_package(program, package_path=io.BytesIO(), inductor_configs=configs)
    return tuple(record for record in records if isinstance(record, MemoryPlanRecord))


# --- files --------------------------------------------------------------------------------------


def read(path: str) -> MemoryReport:
    """Read a report from an event log, from the output of `to_json`, or from an exported program.

    Raises:
        exc.BadReportFileError: the file cannot be read as any of these; the message names the line.
        exc.InductorExtError: for an exported program, raised by `aoti_compile_and_package`.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise exc.BadReportFileError(
            file=path, where="", why=error.strerror, fix="Pass the path of an existing file."
        ) from None
    if data.startswith(b"PK"):
        return memory_report(_load_exported(path))
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise _unreadable_error(path, None, "it is not text in UTF-8") from None
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict) and "event" not in whole:
        return _read_json(path, whole)
    return _read_log(path, text)


def _load_exported(path: str) -> ExportedProgram:
    import torch

    try:
        return torch.export.load(path)
    except Exception as error:
        # torch raises a dozen exception types here, for files of another origin or version.
        why = f"torch.export.load fails with {type(error).__name__}: {error}"
        raise exc.BadReportFileError(
            file=path,
            where="",
            why=why.partition("\n")[0].rstrip("."),
            fix="Pass a file written by torch.export.save of a compatible torch version.",
        ) from None


def _read_json(path: str, report: dict[str, Any]) -> MemoryReport:
    if report.get("schema") != _SCHEMA or not isinstance(report.get("records"), list):
        raise _unreadable_error(path, None, f"it is not a report of schema {_SCHEMA}")
    records = []
    for index, entry in enumerate(report["records"]):
        try:
            records.append(plan_store.parse(entry))
        except ValueError as error:
            raise _unreadable_error(path, None, f"records[{index}]: {error}") from None
    try:
        runs = tuple(Measured(**entry) for entry in report.get("measured", ()))
    except TypeError as error:
        raise _unreadable_error(path, None, f"measured: {error}") from None
    return MemoryReport(str(report.get("title", path)), tuple(records), runs)


def _read_log(path: str, text: str) -> MemoryReport:
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise _unreadable_error(path, number, "it is not a JSON object") from None
        if not isinstance(entry, dict) or "event" not in entry:
            raise _unreadable_error(path, number, "it is not an event")
        if entry["event"] != MemoryPlanRecord.name:
            continue
        try:
            records.append(plan_store.parse(entry))
        except ValueError as error:
            raise _unreadable_error(path, number, str(error)) from None
    if not records:
        raise exc.BadReportFileError(
            file=path,
            where="",
            why="it contains no memory plan",
            fix="Compile with the setting event_log and with "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, because graphs from a cache are not planned.",
        )
    return MemoryReport(path, tuple(records))


def _unreadable_error(path: str, line: int | None, why: str) -> exc.BadReportFileError:
    return exc.BadReportFileError(
        file=path,
        where="" if line is None else f", line {line}",
        why=why,
        fix="Pass an event log, a report written with --json, or a file from torch.export.save.",
    )
