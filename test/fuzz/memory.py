"""Fuzzer of the memory planner, for the command line and for tests.

A program is the text of a function: a few dozen operators over a pool of tensors, drawn so that
memory is reached in many ways (views, mutation, several outputs, kernels that allocate by
themselves, branches and loops). Each line is run in eager mode while it is drawn; one that fails is
dropped. The program is compiled by Inductor (default) without reuse, and by the extension with
several settings. Three properties are checked:

- outputs, mutated inputs and gradients equal eager mode's (if those of Inductor (default) do), and
  a call does not change the outputs of the call before it;
- the peak of a plan is not above the peak of Inductor's reuse, and by default not above the lower
  bound;
- the peak of the CPU allocator is not above the peak without reuse.

A failure is reduced to the lines that it needs, and printed as a script.

    python -m test.fuzz.memory --cases N --seed S [--settings NAME ...] [--reduce]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config

import inductor_ext
from benchmarks.harness import measure
from benchmarks.memory import peak as memory_peak
from inductor_ext import events
from inductor_ext.hooks import compile_fx as compile_hook
from inductor_ext.memory import compiled_callables
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.settings import Settings
from test.fuzz.memory_generator import generate
from test.fuzz.memory_programs import Program, Result, run_program

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "always": {"memory_arenas": "always", "memory_debug": True},
    "debug": {"memory_debug": True},
    "outputs": {"memory_planning": True, "memory_pool": "outputs"},
    "combined": {"memory_planning": True, "memory_pool": "combined", "memory_debug": True},
    "cpp": {"cpp_wrapper": True},
    "cpp_always": {"cpp_wrapper": True, "memory_arenas": "always", "memory_debug": True},
    "aot": {"memory_arenas": "always", "memory_debug": True},
    "partition": {"graph_partition": True},
}
"""Settings of the extension and of Inductor, by name."""

MODES: dict[str, dict[str, bool]] = {
    "inference": {},
    "training": {"training": True},
    "dynamic": {"dynamic": True},
    "dynamic_training": {"training": True, "dynamic": True},
    "extern": {"extern": True},
    "extern_dynamic": {"extern": True, "dynamic": True},
}
"""Keyword arguments of `generate`."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failure of a program under one of the settings."""

    program: Program
    settings: str
    kind: str
    """"error", "value" or "peak"."""
    text: str

    def script(self) -> str:
        """A description that can be pasted into a test."""
        inputs = "\n".join(f"#   {i}" for i in self.program.inputs)
        return (
            f"# seed {self.program.seed}, settings {self.settings}, {self.kind}: {self.text}\n"
            f"#   sizes {[dict(sizes) for sizes in self.program.sizes]}\n"
            f"{inputs}\n{self.program.source()}"
        )


PLAIN = "plain"
"""Inductor (default) without reuse, with which the settings are compared."""


def _patches(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the extension, and of Inductor."""
    patches = SETTINGS[name] if name != PLAIN else {"allow_buffer_reuse": False}
    own = {key: value for key, value in patches.items() if key in inductor_ext.settings.names()}
    inductor = {key: value for key, value in patches.items() if key not in own}
    return own, {"fx_graph_cache": False, "cpp.simdlen": 1, **inductor}


@contextlib.contextmanager
def _configured(name: str) -> Iterator[None]:
    own, inductor = _patches(name)
    with inductor_ext.config.patch(own), inductor_config.patch(inductor):
        yield


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        yield


def _copy_module(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph module and of the subgraphs that it calls; metadata is shared."""
    graph = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    module = torch.fx.GraphModule(gm, graph)
    module.meta = copy.copy(gm.meta)
    for name, inner in gm.named_children():
        if isinstance(inner, torch.fx.GraphModule):
            setattr(module, name, _copy_module(inner))
    return module


class _Compiled:
    """A program compiled with several settings; it is traced and differentiated once for all."""

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self.names = names
        self.active = names[0]
        """The settings whose code is run."""
        self.records: dict[str, list[Any]] = {name: [] for name in names}
        self.errors: dict[str, str] = {}
        self.function: Callable[..., Any] = torch.compile(
            program.function(), backend=self._compile, dynamic=program.dynamic
        )

    def _compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        entry: Any = compile_fx.compile_fx
        with inductor_config.patch({"fx_graph_cache": False}):
            compiled: Callable[..., Any] = entry(gm, inputs, inner_compile=self._compile_graph)
        return compiled

    def _compile_graph(self, gm: Any, inputs: Any, **more: Any) -> Callable[..., Any]:
        compiled: dict[str, Callable[..., Any]] = {}
        for name in self.names:
            try:
                with _configured(name), events.capture(MemoryPlanRecord) as records:
                    compiled[name] = self._compile_one(name, _copy_module(gm), inputs, more)
                self.records[name] += records
            except Exception as error:
                self.errors[name] = "".join(traceback.format_exception(error)[-5:])

        if PLAIN in self.errors:
            raise RuntimeError(self.errors[PLAIN])

        def run(arguments: list[Any]) -> Any:
            return compiled[self.active](arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _compile_one(self, name: str, gm: Any, inputs: Any, more: Any) -> Callable[..., Any]:
        inner: Callable[..., Any] = compile_fx.compile_fx_inner
        if name != PLAIN:
            settings = dataclasses.replace(Settings(), **_patches(name)[0])
            inner = compile_hook.scoped_inner_compile(
                inner, settings, compiled_callables.begin_compile()
            )
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides:
            # The previous settings' compile has stored the same strides.
            context.output_strides.clear()
        compiled: Callable[..., Any] = inner(gm, inputs, **more)
        return compiled


_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-3}


def find_difference(results: Result, expected: Result, tolerance: float) -> str | None:
    """Describe the first difference of two results; None if there is none."""
    for index, (actual, right) in enumerate(zip(results, expected, strict=True)):
        if (actual is None) != (right is None):
            return f"value {index}: {type(actual).__name__} instead of {type(right).__name__}"
        if actual is None:
            continue
        if (actual.shape, actual.dtype) != (right.shape, right.dtype):
            return (
                f"value {index}: {actual.dtype}{[*actual.shape]}, not {right.dtype}{[*right.shape]}"
            )
        allowed = max(tolerance, _TOLERANCES.get(right.dtype, 0.0) if tolerance > 1e-4 else 0)
        numeric = right.numel() > 0 and right.dtype != torch.bool
        scale = float(right.abs().max().double()) if numeric else 0.0
        at_zero = allowed * min(max(scale, 1e-12), 1.0)
        equal = torch.isclose(actual, right, rtol=allowed, atol=at_zero, equal_nan=True)
        if not equal.all():
            return f"value {index} {[*right.shape]}: {int((~equal).sum())} elements are wrong"
    return None


def _measure_peak(function: Callable[..., Any], program: Program) -> int:
    """Peak of the allocator, in bytes, during the first call."""
    arguments = program.arguments(0)
    with torch.set_grad_enabled(program.training):
        changes = memory_peak.record_allocations(lambda: function(*arguments))
    return measure.find_peak(changes)


def check(
    program: Program, names: Sequence[str], *, peaks: bool = True
) -> tuple[list[Failure], str | None]:
    """Compile and run a program; return failures, and why the program was skipped.

    Args:
        program: the program to compile.
        names: of `SETTINGS`.
        peaks: whether to measure peaks.
    """
    together = [PLAIN, *(name for name in names if not _needs_cpp(name))]
    failures: list[Failure] = []
    with _fresh():
        compiled = _Compiled(program, together)
        try:
            expected = run_program(program.function(), program)
            plain = run_program(compiled.function, program)
        except Exception as error:
            return [], f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        if not peaks or program.training or program.dynamic:
            bound = None
        else:
            bound = _measure_peak(compiled.function, program)
        for name in together[1:]:
            compiled.active = name
            failure = _check_one(compiled, program, plain, bound if name == "default" else None)
            if failure is not None:
                failures.append(Failure(program, name, *failure))
    for name in filter(_needs_cpp, names):
        with _fresh(), _configured(name):
            try:
                different = find_difference(
                    run_program(_compile_alone(program, name), program), plain, 1e-4
                )
            except Exception as error:
                text = "".join(traceback.format_exception(error)[-5:])
                failures.append(Failure(program, name, "error", text))
            else:
                if different is not None:
                    failures.append(Failure(program, name, "value", different))
    return failures, find_difference(plain, expected, 1e-2)


def _check_one(
    compiled: _Compiled, program: Program, plain: Result, bound: int | None
) -> tuple[str, str] | None:
    name = compiled.active
    if name in compiled.errors:
        return "error", compiled.errors[name]
    try:
        results = run_program(compiled.function, program)
    except Exception as error:
        return "error", "".join(traceback.format_exception(error)[-5:])
    if name in compiled.errors:
        return "error", compiled.errors[name]
    if (different := find_difference(results, plain, 1e-4)) is not None:
        return "value", different
    if not _forces_arenas(name) and not program.dynamic:
        for record in compiled.records[name]:
            planned = f"{record.graph}, {record.kind}: {record.peak} planned"
            if record.peak > record.peak_before:
                return "peak", f"{planned}, {record.peak_before} by Inductor"
            if record.peak > record.lower_bound:
                return "peak", f"{planned}, bound {record.lower_bound}, {record.strategy}"
    if bound is not None and (measured := _measure_peak(compiled.function, program)) > bound:
        return "peak", f"{measured} bytes measured, {bound} without reuse"
    return None


def _forces_arenas(name: str) -> bool:
    patches = SETTINGS[name]
    return patches.get("memory_arenas") == "always" or bool(patches.get("memory_planning"))


def _needs_cpp(name: str) -> bool:
    return name == "aot" or "cpp_wrapper" in SETTINGS[name]


def _compile_alone(program: Program, name: str) -> Callable[..., Any]:
    if name == "aot":
        return _compile_package(program)
    compiled: Callable[..., Any] = torch.compile(
        program.function(), backend="inductor_ext", dynamic=program.dynamic
    )
    return compiled


def _compile_package(program: Program) -> Callable[..., Any]:
    run = program.function()

    class Module(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Any:
            return run(*arguments)

    with torch.no_grad():
        exported = torch.export.export(Module(), tuple(program.arguments(0)), strict=False)
        path = str(inductor_ext.aoti_compile_and_package(exported))
        loaded: Callable[..., Any] = torch._inductor.aoti_load_package(path)
    Path(path).unlink()
    return loaded


def reduce_failure(failure: Failure, *, seconds: float = 240) -> Failure:
    """Reduce a failure to few lines and outputs, as long as it stays of the same kind."""
    limit = time.monotonic() + seconds

    def fails(program: Program) -> Failure | None:
        try:
            program.function()(*program.arguments(0))
        except Exception:
            return None
        failures, _ = check(program, [failure.settings])
        return failures[0] if failures and failures[0].kind == failure.kind else None

    best = failure
    for field in ("outputs", "lines"):
        size = max(1, len(getattr(best.program, field)) // 2)
        while size:
            start = 0
            while start < len(values := getattr(best.program, field)):
                if time.monotonic() > limit:
                    return best
                shorter = values[:start] + values[start + size :]
                program = dataclasses.replace(best.program, **{field: shorter})
                smaller = fails(program) if shorter or field == "lines" else None
                if smaller is None:
                    start += size
                else:
                    best = smaller
            size //= 2
    return best


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument(
        "--settings", nargs="+", choices=sorted(SETTINGS), default=["default", "always"]
    )
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--reduce", action="store_true", help="reduce failures")
    parser.add_argument("--show", action="store_true", help="print programs, and compile none")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return exit code 1 if a program failed."""
    options = _parse(arguments)
    failed = skipped = 0
    for seed in range(options.seed, options.seed + options.cases):
        mode = options.modes[seed % len(options.modes)]
        program = generate(seed, **MODES[mode])
        if options.show:
            print(program.source())
            continue
        begin = time.perf_counter()
        failures, why = check(program, options.settings)
        seconds = time.perf_counter() - begin
        lines = len(program.lines)
        word = ", ".join(f"{f.settings} {f.kind}" for f in failures) or (
            "skipped" if why else "good"
        )
        print(f"seed {seed} {mode}: {lines} lines, {seconds:.0f} s, {word} {why or ''}", flush=True)
        skipped += why is not None
        failed += bool(failures)
        for failure in failures:
            print((reduce_failure(failure) if options.reduce else failure).script(), flush=True)
    print(f"{options.cases} programs, {failed} with failures, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
