"""Variants of running a program, to compare: eager, Inductor's configurations, the extension.

Every compile has its own code object, so that dynamo neither reuses the result of another compile
nor counts it as a recompile. The variants of a backend share a cache folder, empty at first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks.harness import results
from inductor_ext import _compat

__all__ = [
    "DEFAULT",
    "VARIANTS",
    "CompiledProgram",
    "TunedGemm",
    "Variant",
    "add_argument",
    "collect_tuned_gemms",
    "compile_and_call",
    "group_by_backend",
    "make_row",
    "make_timer",
    "select",
    "start_workers",
    "synchronize",
    "use_fresh_caches",
    "without_recording",
]


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to run a program."""

    name: str
    title: str
    """Its name in tables."""
    backend: str | None
    """None for eager mode."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_stock(self) -> bool:
        """Whether it uses `backend="inductor"`."""
        return self.backend == "inductor"


_MAX = {"max_autotune": True, "autotune_num_choices_displayed": 0}

VARIANTS: Mapping[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("eager", "eager", None),
        Variant("stock", "stock default", "inductor"),
        Variant("stock-max", "stock max-autotune", "inductor", _MAX),
        Variant(
            "stock-max-tma",
            "stock max-autotune, TMA",
            "inductor",
            {**_MAX, "triton.enable_persistent_tma_matmul": True},
        ),
        Variant("ours-default", "ours default", "inductor_ext"),
        Variant("ours", "ours", "inductor_ext", _MAX),
        Variant(
            "ours-cutlass",
            "ours with CUTLASS",
            "inductor_ext",
            {
                **_MAX,
                "max_autotune_gemm_backends": "ATEN,TRITON,CUTLASS",
                "cutlass.cutlass_epilogue_fusion_enabled": True,
            },
        ),
    )
}
"""By name. Inductor's third configuration reuses from the caches what the second one compiled and
measured."""

DEFAULT = tuple(name for name in VARIANTS if name not in ("ours-cutlass", "ours-default"))
"""The variants that tune, and do not need nvcc, which takes minutes."""


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--variants` of a benchmark."""
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        default=DEFAULT,
        metavar="NAME",
        help=f"some of {', '.join(VARIANTS)}; by default {', '.join(DEFAULT)}",
    )


def select(names: Sequence[str]) -> list[Variant]:
    """Return the variants of these names, in the order in which they have to compile."""
    return [variant for name, variant in VARIANTS.items() if name in names]


def group_by_backend(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Group variants that share a cache folder: all of one backend."""
    groups: dict[str | None, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(variant.backend, []).append(variant)
    return list(groups.values())


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A program that is ready to run."""

    call: Callable[[], Any]
    seconds: float
    """Wall time of compiling, tuning and the first call; 0 in eager mode."""


def compile_and_call(
    variant: Variant,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    finish: Callable[[Any], Any] = lambda result: result,
) -> CompiledProgram:
    """Compile a function for its inputs, and call it once.

    Args:
        variant: the variant that compiles it.
        function: a plain Python function of the inputs, no builtin.
        inputs: tensors.
        options: further Inductor options.
        finish: belongs to each call but is not compiled, such as the backward pass.
    """
    import torch

    if variant.backend is None:
        return CompiledProgram(lambda: finish(function(*inputs)), 0.0)
    run = torch.compile(
        _compat.with_own_code(function),
        backend=variant.backend,
        fullgraph=True,
        dynamic=False,
        options={**variant.options, **(options or {})},
    )
    synchronize()
    start = time.perf_counter()
    finish(run(*inputs))
    synchronize()
    return CompiledProgram(lambda: finish(run(*inputs)), time.perf_counter() - start)


@contextlib.contextmanager
def without_recording() -> Iterator[None]:
    """Compile for CUDA graphs, but without Inductor's recording, which copies inputs.

    The compiled code launches the kernels that would be recorded; the benchmark captures them
    itself.
    """
    from torch._inductor import compile_fx

    with mock.patch.object(compile_fx, "cudagraphify", lambda model, *_, **__: model):
        yield


@dataclasses.dataclass(frozen=True)
class TunedGemm:
    """A GEMM that the extension has tuned."""

    seconds: float
    """Seconds of tuning; if several GEMMs are tuned together, each gets an equal share."""
    choice: str
    """The selected kernel in words, with its microseconds and Inductor's."""


@contextlib.contextmanager
def collect_tuned_gemms() -> Iterator[list[TunedGemm]]:
    """Collect the GEMMs that the extension tunes inside the block."""
    from inductor_ext.autotune import tuner
    from inductor_ext.templates.format import config_words, problem_words

    gemms: list[TunedGemm] = []
    tune = tuner.tune

    def tune_and_record(problems: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        decisions = tune(problems, *args, **kwargs)
        new = {
            problem: decision
            for problem, decision in decisions.items()
            if decision.origin == "measured"
        }
        seconds = time.perf_counter() - start
        for problem, decision in new.items():
            times = [decision.microseconds(config) for config in (decision.config, None)]
            selected, fallback = ("-" if item is None else f"{item:.1f}" for item in times)
            words = f"{problem_words(problem)}: {config_words(decision.config)}, {selected} us"
            choice = words if decision.config is None else f"{words}, stock {fallback}"
            gemms.append(TunedGemm(seconds / len(new), choice))
        return decisions

    with mock.patch.object(tuner, "tune", tune_and_record):
        yield gemms


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_timer(call: Callable[[], object]) -> Callable[[], float]:
    """Return a function that runs a call, on the GPU to its end, and returns the seconds."""

    def time_call() -> float:
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        return time.perf_counter() - start

    return time_call


def make_row(
    case: str,
    metric: str,
    unit: str,
    values: Mapping[str, float | None],
    stock: str,
    *,
    floor: float | None = None,
    spread: float | None = None,
    note: str | None = None,
) -> results.Row:
    """Return a measurement as a result row.

    Args:
        case: name of the case.
        metric: the measured quantity; less is better.
        unit: unit of the values.
        values: values by variant.
        stock: the variant for the column `stock`.
        floor: see `results.Row`, also for `spread` and `note`.
    """
    return results.make_row(
        case,
        metric,
        unit,
        ours=values.get("ours"),
        stock=values.get(stock),
        eager=values.get("eager"),
        floor=floor,
        spread=spread,
        note=note,
    )


@contextlib.contextmanager
def use_fresh_caches() -> Iterator[None]:
    """Use empty caches of Inductor, Triton and the extension inside the block."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def start_workers(variants: Sequence[Variant], device: str) -> None:
    """Warm up: compile something small with every variant, and give work to all compile workers.

    Afterwards no measured compile has to start workers or import modules.
    """
    import torch

    def matmul_relu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b)

    inputs = [torch.ones(256, 256, dtype=torch.bfloat16, device=device) for _ in "ab"]
    with use_fresh_caches():
        for variant in variants:
            compile_and_call(variant, matmul_relu, inputs)
    if device == "cuda":
        _wait_for_compile_workers()


def _wait_for_compile_workers() -> None:
    """Wait until as many jobs are done as there are workers; every job takes a while."""
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if get_compile_threads() > 1:
        AsyncCompile.wait_pool_ready()
        pool = AsyncCompile.process_pool()
        for job in [pool.submit(time.sleep, 1.0) for _ in range(get_compile_threads())]:
            job.result()
