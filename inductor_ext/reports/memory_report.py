"""`inductor_ext.memory_report`: what a model's memory is used for.

A report consists of memory plans (`MemoryPlanRecord`), one per generated function. It can be
made for a callable returned by torch.compile, including graphs loaded from a cache; for an exported
program, whose code is generated but not compiled; or from a file. As text, JSON or one HTML page
with charts, it shows the memory in use at the peak of every plan and the modules that use it.
Beside the plans it shows what the model's parameters, gradients and optimizer state occupy.
`MemoryReport.measure` compares the plans with the memory that a run allocates, `measure_step` shows
a whole training step, and `at` is the report at other sizes.

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
from inductor_ext.reports import (
    memory_html,
    memory_measure,
    model_state,
    other_sizes,
    step_timeline,
)
from inductor_ext.reports.memory_measure import Measured
from inductor_ext.reports.model_state import ModelState
from inductor_ext.reports.other_sizes import BatchPeak
from inductor_ext.reports.step_timeline import StepTimeline
from inductor_ext.reports.text import align_columns, format_count, qualified_name, write_file
from inductor_ext.storage import json_codec

if TYPE_CHECKING:
    import torch
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
    state: tuple[ModelState, ...] = ()
    """Parameters, buffers, gradients and optimizer state by device; empty if the target is a
    function and no module is given."""
    steps: tuple[StepTimeline, ...] = ()
    """Timelines of a step; empty unless set by `measure_step`."""
    batches: tuple[BatchPeak, ...] = ()
    """Peaks at other batch sizes; empty unless set by `compare_batches`."""

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
            *args: arguments for `fn`, with the sizes that the plans were made for.
            **kwargs: keyword arguments for `fn`.

        Raises:
            exc.NothingMeasuredError: the call ran none of the report's graphs.
        """
        runs = memory_measure.measure(self.records, lambda: fn(*args, **kwargs))
        if not runs:
            raise exc.NothingMeasuredError(title=self.title)
        return dataclasses.replace(self, measured=runs)

    def measure_step(
        self, step: Callable[[], object], *, eager: Callable[[], object] | None = None
    ) -> MemoryReport:
        """Run a whole step and return this report with its memory over time.

        A step consists of any number of graphs and what is between them, usually forward, backward
        and optimizer. It runs twice, and the second run counts.

        Args:
            step: runs the step with compiled graphs. It has to have run before, at the same sizes.
            eager: runs the same step in eager mode, to compare with, also twice. If a step changes
                the model, pass one that works on a copy (`copy.deepcopy`) of the model, with an
                optimizer of its own.

        Raises:
            exc.NotMeasurableError: the step compiles or allocates nothing, or the eager step runs
                compiled graphs.
            exc.NothingMeasuredError: the step runs none of the report's graphs.
        """
        steps = step_timeline.measure_step(self.title, self.records, step, eager)
        return dataclasses.replace(self, steps=steps)

    def at(
        self, batch: int | None = None, *, sizes: Mapping[str, int] | None = None
    ) -> MemoryReport:
        """Return the report at other sizes of the graphs with dynamic sizes.

        The plans are those of the compiled code, at the sizes of a later call. Graphs of fixed
        sizes are left out, and so is what was measured.

        Args:
            batch: size of the first dimension of the inputs. Default: the size hint.
            sizes: other dynamic sizes, by the name of their symbol (`DynamicSize`).

        Raises:
            exc.BadArgumentError: a size is not an integer of at least 0.
            exc.SizesNotKnownError: the memory at these sizes is not known.
        """
        named = dict(sizes or {})
        for name, value in {"batch": 0 if batch is None else batch, **named}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise exc.BadArgumentError(
                    name=name, actual=repr(value), allowed="an integer of at least 0"
                )
        records = other_sizes.resize_records(self.title, self.records, batch, named)
        parts = [] if batch is None else [f"batch {batch}"]
        parts += [f"{name} = {value}" for name, value in named.items()]
        title = f"{self.title} at {', '.join(parts)}" if parts else self.title
        fixed = len(self.records) - len(records)
        if fixed:
            title += f" ({format_count(fixed, 'graph')} of fixed sizes left out)"
        return MemoryReport(title, records, state=self.state)

    def compare_batches(
        self, *batches: int, sizes: Mapping[str, int] | None = None
    ) -> MemoryReport:
        """Return this report with the peaks at other batch sizes. Arguments and errors as `at`."""
        rows = tuple(BatchPeak.of(n, self.at(n, sizes=sizes).records) for n in batches)
        return dataclasses.replace(self, batches=rows)

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
        if self.state:
            rows = [model_state.HEADS, *(state.cells() for state in self.state)]
            lines += ["", "Outside of the plans:", *align_columns(rows, right=range(5))]
        if self.steps:
            lines += ["", "The step, relative to the memory in use before it:"]
            lines += [f"  {line}" for step in self.steps for line in step.describe()]
        if self.batches:
            rows = [other_sizes.HEADS, *(row.cells() for row in self.batches)]
            lines += ["", "At other batch sizes:", *align_columns(rows, right=range(4))]
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
            "state": [dataclasses.asdict(state) for state in self.state],
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "batches": [dataclasses.asdict(row) for row in self.batches],
        }
        return json.dumps(report, indent=1)

    def to_html(self, top: int = 10) -> str:
        """Return the report as one self-contained HTML page: charts, then tables."""
        captions = [headline(record) for record in self.records]
        content = memory_html.Content(
            self.title, self.records, captions, self.measured, self.state, self.steps, self.batches
        )
        return memory_html.page(content, top)

    def write_html(self, path: str | os.PathLike[str], top: int = 10) -> None:
        """Write `to_html` to a file atomically.

        Raises:
            exc.BadReportFileError: the file cannot be written.
        """
        write_file(path, self.to_html(top))


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
    target: Callable[..., Any] | ExportedProgram,
    *,
    options: Mapping[str, Any] | None = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> MemoryReport:
    """Report how a compiled or exported model uses memory.

    Args:
        target: the result of `torch.compile`, or the module or function that was passed to it,
            after it has been called. The report covers every graph compiled for it so far: forward,
            backward, recompiles and the graphs after graph breaks. Instances of a class share the
            code that dynamo compiled for one of them, and therefore the report. Alternatively an
            exported program, which is planned as in `aoti_compile_and_package`.
        options: for an exported program, options of Inductor and of the extension by name.
        model: if the target is a function, the module that it runs, whose parameters, buffers and
            gradients are reported. Default: the target, if it is a module.
        optimizer: reports its state as well. The state exists from its first step on.

    Raises:
        exc.BadArgumentError: an optimizer was given, and the module that it trains is not known.
        exc.NotReportableError: `target` is none of these, or options were given for a callable.
        exc.NothingCompiledError: it has not been called, or not with this backend.
        exc.PlanNotFoundError: a graph was loaded from a cache, and its plan is missing.
        exc.InductorExtError: for an exported program, raised by `aoti_compile_and_package`.
    """
    from torch.export import ExportedProgram

    if isinstance(target, ExportedProgram):
        inputs = format_count(len(target.graph_signature.user_inputs), "input")
        title = f"an exported program of {inputs}"
        if model is not None or optimizer is not None:
            raise exc.NotReportableError(
                actual="an ExportedProgram with model or optimizer",
                why="its weights are its own, and it is not trained",
            )
        state = model_state.read_program_state(target)
        return MemoryReport(title, _plan_exported(target, options), state=state)
    if options is not None:
        raise exc.NotReportableError(
            actual=f"{type(target).__name__} with options", why="it has been compiled already"
        )
    if isinstance(target, type) or not callable(target):
        raise exc.NotReportableError(actual=type(target).__name__, why="it cannot be called")
    records = _collect_plans(target)
    module = model if model is not None else _find_module(target)
    if optimizer is not None and module is None:
        raise exc.BadArgumentError(
            name="model", actual=None, allowed="the module that the optimizer trains"
        )
    state = () if module is None else model_state.read_state([module], optimizer)
    return MemoryReport(qualified_name(target), records, state=state)


def _collect_plans(target: Callable[..., Any]) -> tuple[MemoryPlanRecord, ...]:
    """Return the plans of the graphs that were compiled for a callable."""
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
    return tuple(records)


def _find_module(target: Any) -> torch.nn.Module | None:
    """Return the module that a target is, or whose method it is; None for a function."""
    import torch

    inner = getattr(target, "_orig_mod", target)
    inner = getattr(inner, "_torchdynamo_orig_callable", inner)
    owner = getattr(inner, "__self__", None)
    candidates = (
        candidate for candidate in (inner, owner) if isinstance(candidate, torch.nn.Module)
    )
    return next(candidates, None)


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
    parts: dict[str, Any] = {}
    for name, form in _PARTS.items():
        try:
            parts[name] = json_codec.decode(form, report.get(name, []))
        except ValueError as error:
            raise _unreadable_error(path, None, f"{name}: {error}") from None
    for index, step in enumerate(parts["steps"]):
        if not step.times or len(step.times) != len(step.levels):
            why = f"steps[{index}]: its times and levels do not have the same length"
            raise _unreadable_error(path, None, why)
    return MemoryReport(str(report.get("title", path)), tuple(records), **parts)


_PARTS: dict[str, Any] = {
    "measured": tuple[Measured, ...],
    "state": tuple[ModelState, ...],
    "steps": tuple[StepTimeline, ...],
    "batches": tuple[BatchPeak, ...],
}
"""The optional parts of a report: name in JSON, and type."""


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
