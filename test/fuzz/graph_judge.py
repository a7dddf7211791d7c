"""Judges programs of the graph fuzzer: eager mode, Inductor (default) and inductor_ext.

Programs of a batch are compiled together, as children of one module, because a C++ compile costs
about the same for several small graphs as for one. What fails in a batch is judged alone.

`graph_compare` has what is compared with eager mode.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor
from torch._inductor import config as inductor_config

import inductor_ext
from inductor_ext import exc
from test.fuzz.graph_compare import find_difference
from test.fuzz.graph_generator import generate, mode_of
from test.fuzz.graph_programs import Observer, Program, Run
from test.fuzz.op_sweep_compare import reason
from test.fuzz.workers import Announce
from test.support import quick_compiler

WAYS = ("stock", "compile", "cpp_wrapper", "package")
"""How programs are compiled: "stock" is Inductor (default) by torch.compile, the others ours."""

COMPILE_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "max-autotune": {"max_autotune": True},
    "freezing": {"freezing": True},
    "arenas": {"memory_arenas": "always"},
    "scalar": {"cpp.simdlen": 0},
}
"""Options by mode; Inductor (default) gets those that are its own. CUDA graphs stay off: they reuse
a result's memory in the next call."""

Build = tuple[str, str]
"""A way and a mode."""

DEVICE_IS_LOST = 70
"""Exit code of a worker after a CUDA error, such as a misaligned address."""


class Verdict(str, enum.Enum):
    """The verdict of a program on one way."""

    RIGHT = "right"
    WRONG = "wrong"
    CRASH = "crash"
    ERROR = "error"
    REFUSED = "refused"
    """An error that names the construct: a class of `inductor_ext.exc`."""
    STOCK_WRONG_TOO = "stock_wrong_too"
    STOCK_CRASH_TOO = "stock_crash_too"
    STOCK_ERROR_TOO = "stock_error_too"
    SKIPPED = "skipped"
    """Not a case: eager mode ends the process, torch.export fails, the front end traces another
    program, or a package would train."""


FAILURES = (Verdict.WRONG, Verdict.CRASH, Verdict.ERROR)
"""What eager mode and Inductor (default) do not have."""

DISAGREEMENTS = (
    *FAILURES,
    Verdict.STOCK_WRONG_TOO,
    Verdict.STOCK_CRASH_TOO,
    Verdict.STOCK_ERROR_TOO,
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a compiled program did."""

    verdict: Verdict
    """RIGHT, WRONG, CRASH, ERROR, REFUSED or SKIPPED."""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Result:
    """The verdict of a program on one way."""

    seed: int
    way: str
    mode: str
    verdict: Verdict
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object; `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        """Raises KeyError or ValueError where `fields` is not what `to_json` writes."""
        return cls(**{**fields, "verdict": Verdict(fields["verdict"])})


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker judges at once."""

    seeds: tuple[int, ...]
    builds: tuple[Build, ...]
    device: str = "cpu"
    ours: Outcome | None = None
    """The outcome of the only seed and build, if it crashed the process: run Inductor (default)."""


class NotExportedError(Exception):
    """torch.export fails."""


# --- compiling ----------------------------------------------------------------------------------


class _Batch(torch.nn.Module):
    """Programs that are compiled together; each has its own arguments and results."""

    def __init__(self, programs: Sequence[Program]) -> None:
        super().__init__()
        self.programs = torch.nn.ModuleList(p.module(compiled=True) for p in programs)

    def forward(self, arguments: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
        return [p(*values) for p, values in zip(self.programs, arguments, strict=True)]


Function = Callable[[list[list[Tensor]]], Sequence[Sequence[Tensor]]]


@contextlib.contextmanager
def _settings(way: str) -> Iterator[None]:
    torch._dynamo.reset()
    # Packages are compiled from few units, with the extension's precompiled headers.
    quick = contextlib.nullcontext() if way == "package" else quick_compiler.quick_compiles()
    with (
        warnings.catch_warnings(),
        torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
        ),
        inductor_config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
        inductor_ext.config.patch(
            enabled=True, fallback_to_eager=False, fallback_to_inductor=False
        ),
        quick,
    ):
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def _compile(
    batch: _Batch, programs: Sequence[Program], build: Build, backend: str, folder: Path
) -> tuple[Function, torch.nn.Module | None, Sequence[Program]]:
    """Compile a batch; return a function, the module with its buffers, and the programs to run.

    Args:
        batch: of the programs.
        programs: of one mode.
        build: the way and mode.
        backend: "inductor" or "inductor_ext".
        folder: for packages.
    """
    way, mode = build
    settings = inductor_ext.config.get_config_copy() if backend == "inductor" else {}
    options = {k: v for k, v in COMPILE_MODES[mode].items() if k not in settings}
    if way == "package":
        function, programs = _package(batch, programs, options, backend, folder)
        return function, None, programs
    if way == "cpp_wrapper":
        options["cpp_wrapper"] = True
    dynamic = len(programs[0].sizes) > 1
    compiled: Any = torch.compile(
        batch, backend=backend, fullgraph=True, dynamic=dynamic, options=options
    )
    return compiled, batch, programs


def _package(
    batch: _Batch,
    programs: Sequence[Program],
    options: dict[str, Any],
    backend: str,
    folder: Path,
) -> tuple[Function, Sequence[Program]]:
    dynamic = len(programs[0].sizes) > 1
    exported = _export(batch, programs)
    if dynamic and not _accepts_all_sizes(exported, programs):
        # torch.export has specialized a size.
        programs = [_without_other_sizes(p) for p in programs]
    path = str(folder / f"{backend}.pt2")
    if backend == "inductor_ext":
        inductor_ext.aoti_compile_and_package(exported, package_path=path, inductor_configs=options)
        return inductor_ext.load(path), programs
    torch._inductor.aoti_compile_and_package(exported, package_path=path, inductor_configs=options)
    return torch._inductor.aoti_load_package(path), programs


def _export(batch: _Batch, programs: Sequence[Program]) -> torch.export.ExportedProgram:
    arguments = ([p.arguments(0) for p in programs],)
    dims = ([[_dynamic_dims(i.shape) for i in p.inputs] for p in programs],)
    dynamic = dims if len(programs[0].sizes) > 1 else None
    try:
        return torch.export.export(batch, arguments, dynamic_shapes=dynamic, strict=False)
    except Exception as error:
        raise NotExportedError(reason(error)) from error


def _dynamic_dims(shape: Sequence[str]) -> Any:
    return {d: torch.export.Dim.AUTO for d, size in enumerate(shape) if not size.isdigit()}


def _accepts_all_sizes(exported: torch.export.ExportedProgram, programs: Sequence[Program]) -> bool:
    # A copy, because calls change the buffers of the exported program.
    module = copy.deepcopy(exported.module())
    try:
        for call in range(1, len(programs[0].sizes)):
            module([p.arguments(call) for p in programs])
    except Exception:
        return False
    return True


def _without_other_sizes(program: Program) -> Program:
    return dataclasses.replace(program, sizes=program.sizes[:1] * len(program.sizes))


def _run(
    function: Function, module: torch.nn.Module | None, programs: Sequence[Program]
) -> list[Run]:
    """Call a compiled batch as `run_eager` calls each of its programs."""
    children = [None] * len(programs) if module is None else [*module.programs]  # type: ignore[arg-type]
    observers = [Observer(*pair) for pair in zip(programs, children, strict=True)]
    for call in range(programs[0].calls):
        arguments = [p.arguments(call) for p in programs]
        with torch.set_grad_enabled(programs[0].training):
            results = function(arguments)
            losses = [o.loss(r) for o, r in zip(observers, results, strict=True)]
            total = [loss for loss in losses if loss is not None]
        if total:
            sum(total).backward()  # type: ignore[union-attr]
        for observer, values, outputs in zip(observers, arguments, results, strict=True):
            observer.add(call, values, outputs)
    return [observer.finish() for observer in observers]


# --- judging ------------------------------------------------------------------------------------


def run_build(programs: Sequence[Program], build: Build, backend: str) -> list[Outcome]:
    """Compile programs in one batch and compare their runs with eager mode.

    Raises:
        NotExportedError: torch.export fails for the batch.
        Exception: the compile or a call fails.
    """
    with _settings(build[0]), tempfile.TemporaryDirectory() as folder:
        with torch.set_grad_enabled(programs[0].training):
            function, module, programs = _compile(
                _Batch(programs), programs, build, backend, Path(folder)
            )
        runs = _run(function, module, programs)
        whys = [find_difference(p, run) for p, run in zip(programs, runs, strict=True)]
    return [Outcome(Verdict.WRONG if why else Verdict.RIGHT, why) for why in whys]


def run_alone(program: Program, build: Build, backend: str) -> Outcome:
    """The outcome of one program, whether it is compiled or not."""
    try:
        outcome = run_build([program], build, backend)[0]
        if outcome.verdict is not Verdict.WRONG:
            return outcome
        if build[0] == "package":
            front_end, why = "torch.export", find_export_difference(program)
        else:
            front_end, why = "Dynamo", find_dynamo_difference(program)
        return Outcome(Verdict.SKIPPED, f"{front_end}: {why}") if why else outcome
    except NotExportedError as error:
        return Outcome(Verdict.SKIPPED, str(error))
    except Exception as error:
        return Outcome(_classify(error), reason(error))


def find_export_difference(program: Program) -> str:
    """How the exported program differs from eager mode before it is compiled."""
    with _settings("package"), torch.set_grad_enabled(program.training):
        exported = _export(_Batch([program]), [program])
        if not _accepts_all_sizes(exported, [program]):
            program = _without_other_sizes(program)
        return find_difference(program, _run(exported.module(), None, [program])[0])


def find_dynamo_difference(program: Program) -> str:
    """How the graph that Dynamo traces differs from eager mode before it is compiled."""
    batch = _Batch([program])
    dynamic = len(program.sizes) > 1
    with _settings("stock"):
        traced: Any = torch.compile(batch, backend="eager", fullgraph=True, dynamic=dynamic)
        return find_difference(program, _run(traced, batch, [program])[0])


def _classify(error: BaseException) -> Verdict:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, exc.InductorExtError) and not isinstance(
            cause, (exc.ArtifactRunError, exc.ArtifactLoadError)
        ):
            return Verdict.REFUSED
        # Dynamo keeps the backend's error in an attribute of its own.
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return Verdict.ERROR


_TOO = {
    Verdict.WRONG: Verdict.STOCK_WRONG_TOO,
    Verdict.CRASH: Verdict.STOCK_CRASH_TOO,
    Verdict.ERROR: Verdict.STOCK_ERROR_TOO,
}


def _place_of(why: str) -> str:
    """What a difference that `find_difference` describes is about, such as "call 0: result 2"."""
    return re.match(r"(?:call \d+: )?[^:]*", why)[0]  # type: ignore[index]


def verdict_of(ours: Outcome, stock: Outcome) -> tuple[Verdict, str]:
    """The verdict that follows from the outcomes of both, and its reason.

    Wrong numbers where Inductor (default) has right ones are a bug of the extension alone.
    """
    if ours.verdict not in _TOO:
        return ours.verdict, ours.why
    is_same = ours.verdict is not Verdict.WRONG or _place_of(ours.why) == _place_of(stock.why)
    if stock.verdict is ours.verdict and is_same:
        return _TOO[ours.verdict], f"{ours.why}; Inductor (default): {stock.why}"
    return ours.verdict, f"{ours.why}; Inductor (default) is {stock.verdict.value}: {stock.why}"


class Judge:
    """Judges the programs of one task, build by build."""

    def __init__(self, programs: Sequence[Program], announce: Announce) -> None:
        self.programs = programs
        self._announce = announce

    def announce(self, build: Build, backend: str, ours: Outcome | None = None) -> None:
        """Announce a stage; `parse_stage` reads it."""
        fields = None if ours is None else (ours.verdict.value, ours.why)
        self._announce(json.dumps([build, backend, fields]))

    def judge(self, build: Build) -> list[Result]:
        """The results of all programs on one build."""
        way, mode = build
        if way == "package" and self.programs[0].training:
            why = "the program trains"
            return [Result(p.seed, way, mode, Verdict.SKIPPED, why) for p in self.programs]
        return self._judge(list(self.programs), build)

    def _judge(self, programs: list[Program], build: Build) -> list[Result]:
        if len(programs) == 1:
            return [self.judge_alone(programs[0], build)]
        way, mode = build
        self.announce(build, _backend(way))
        try:
            outcomes = run_build(programs, _route(build), _backend(way))
        except Exception as error:
            _leave_if_device_is_lost(reason(error))
            middle = len(programs) // 2
            return self._judge(programs[:middle], build) + self._judge(programs[middle:], build)
        results = []
        for program, outcome in zip(programs, outcomes, strict=True):
            if outcome.verdict is Verdict.RIGHT:
                results.append(Result(program.seed, way, mode, Verdict.RIGHT))
                continue
            result = self.judge_alone(program, build)
            if result.verdict is Verdict.RIGHT:
                seeds = [p.seed for p in programs]
                why = f"compiled together with seeds {seeds}: {outcome.why}"
                result = dataclasses.replace(result, verdict=Verdict.WRONG, why=why)
            results.append(result)
        return results

    def judge_alone(self, program: Program, build: Build, ours: Outcome | None = None) -> Result:
        """The result of one program.

        Args:
            program: the program.
            build: the way and mode.
            ours: the extension's outcome, if it is known.
        """
        way, mode = build
        if ours is None:
            self.announce(build, _backend(way))
            ours = run_alone(program, _route(build), _backend(way))
            _leave_if_device_is_lost(ours.why)
        if ours.verdict not in _TOO or way == "stock":
            return Result(program.seed, way, mode, ours.verdict, ours.why)
        self.announce(build, "inductor", ours)
        stock = run_alone(program, build, "inductor")
        _leave_if_device_is_lost(stock.why)
        return Result(program.seed, way, mode, *verdict_of(ours, stock))


def _leave_if_device_is_lost(why: str) -> None:
    """End the process after an error that each later call would return, too.

    The worker's owner then takes it for a crash: it is attributed to one program and backend.
    """
    if "CUDA error: " in why:
        print(why, flush=True)
        os._exit(DEVICE_IS_LOST)


def _backend(way: str) -> str:
    return "inductor" if way == "stock" else "inductor_ext"


def _route(build: Build) -> Build:
    return ("compile", build[1]) if build[0] == "stock" else build


def parse_stage(stage: str) -> tuple[Build, str, Outcome | None]:
    """What was announced: the build, the backend and the extension's outcome, if known."""
    (way, mode), backend, fields = json.loads(stage)
    ours = None if fields is None else Outcome(Verdict(fields[0]), fields[1])
    return (way, mode), backend, ours


def judge_task(task: Task, announce: Announce) -> list[Result]:
    """Judge a task; the function of a worker process."""
    torch.set_num_threads(2)
    programs = [generate(seed, task.device) for seed in task.seeds]
    modes = {mode_of(seed) for seed in task.seeds}
    assert len(modes) == 1, "programs of a batch have one mode"
    judge = Judge(programs, announce)
    if task.ours is not None:
        return [judge.judge_alone(programs[0], task.builds[0], task.ours)]
    return [result for build in task.builds for result in judge.judge(build)]
