"""Ways to run a program, for comparison: eager, Inductor's configurations, the extension.

Every compile has its own code object, so that dynamo neither finds the result of another compile
nor counts it as a recompile. Every family of contenders has its own cache folder, empty at first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks.harness import results
from inductor_ext import _compat

__all__ = [
    "CONTENDERS",
    "USUAL",
    "Compiled",
    "Contender",
    "Tuned",
    "chosen",
    "compile_and_call",
    "families",
    "fresh_caches",
    "row",
    "start_workers",
    "synchronize",
    "tuning",
    "unrecorded",
]


@dataclasses.dataclass(frozen=True)
class Contender:
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

CONTENDERS: Mapping[str, Contender] = {
    entry.name: entry
    for entry in (
        Contender("eager", "eager", None),
        Contender("stock", "stock default", "inductor"),
        Contender("stock-max", "stock max-autotune", "inductor", _MAX),
        Contender(
            "stock-max-tma",
            "stock max-autotune, TMA",
            "inductor",
            {**_MAX, "triton.enable_persistent_tma_matmul": True},
        ),
        Contender("ours", "ours", "inductor_ext", _MAX),
        Contender(
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
"""By name. Inductor's third configuration finds in its caches what the second one compiled and
measured."""

USUAL = tuple(name for name in CONTENDERS if name != "ours-cutlass")
"""Those that need no nvcc and none of the minutes that it takes."""


def chosen(names: Sequence[str]) -> list[Contender]:
    """Return the contenders of these names, in the order in which they have to compile."""
    return [item for name, item in CONTENDERS.items() if name in names]


def families(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """Group contenders that share a cache folder: all of one backend."""
    by_backend: dict[str | None, list[Contender]] = {}
    for contender in contenders:
        by_backend.setdefault(contender.backend, []).append(contender)
    return list(by_backend.values())


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program that is ready to run."""

    call: Callable[[], Any]
    seconds: float
    """Wall time of compiling, tuning and the first call; 0 in eager mode."""


def compile_and_call(
    contender: Contender,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a function for its inputs, and call it once.

    Args:
        contender: the contender that compiles it.
        function: a plain Python function of the inputs, no builtin.
        inputs: tensors.
        options: further Inductor options.
    """
    import torch

    if contender.backend is None:
        return Compiled(lambda: function(*inputs), 0.0)
    run = torch.compile(
        _compat.with_own_code(function),
        backend=contender.backend,
        fullgraph=True,
        dynamic=False,
        options={**contender.options, **(options or {})},
    )
    synchronize()
    start = time.perf_counter()
    run(*inputs)
    synchronize()
    return Compiled(lambda: run(*inputs), time.perf_counter() - start)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Compile for CUDA graphs, but without Inductor's recording, which copies inputs.

    The compiled code launches the kernels that would be recorded; the benchmark captures them
    itself.
    """
    from torch._inductor import compile_fx

    with mock.patch.object(compile_fx, "cudagraphify", lambda model, *_, **__: model):
        yield


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A GEMM that the extension has tuned."""

    seconds: float
    """Seconds of tuning; if several GEMMs are tuned together, each gets an equal share."""
    choice: str
    """The selected kernel in words, with its microseconds and Inductor's."""


@contextlib.contextmanager
def tuning() -> Iterator[list[Tuned]]:
    """Collect the GEMMs that the extension tunes inside the block."""
    from inductor_ext.autotune import tuner
    from inductor_ext.templates.format import config_words, problem_words

    found: list[Tuned] = []
    tune = tuner.tune

    def timed(problems: Iterable[Any], *given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        decisions = tune(problems, *given, **named)
        measured = {
            key: decision for key, decision in decisions.items() if decision.origin == "measured"
        }
        spent = time.perf_counter() - start
        for problem, decision in measured.items():
            took = [decision.microseconds(config) for config in (decision.config, None)]
            own, stock = ("-" if item is None else f"{item:.1f}" for item in took)
            words = f"{problem_words(problem)}: {config_words(decision.config)}, {own} us"
            choice = words if decision.config is None else f"{words}, stock {stock}"
            found.append(Tuned(spent / len(measured), choice))
        return decisions

    with mock.patch.object(tuner, "tune", timed):
        yield found


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def row(
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
        values: values by contender.
        stock: the contender for the column `stock`.
        floor: see `results.Row`, also for `spread` and `note`.
    """
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "better": "lower",
        "ours": values.get("ours"),
        "stock": values.get(stock),
        "eager": values.get("eager"),
        "floor": floor,
        "spread": spread,
        "note": note,
    }


@contextlib.contextmanager
def fresh_caches() -> Iterator[None]:
    """Use empty caches of Inductor, Triton and the extension inside the block."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def start_workers(contenders: Sequence[Contender], device: str) -> None:
    """Warm up: compile something small with every contender, and give work to all compile workers.

    Afterwards no measured compile has to start workers or import modules.
    """
    import torch

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b)

    inputs = [torch.ones(256, 256, dtype=torch.bfloat16, device=device) for _ in "ab"]
    with fresh_caches():
        for contender in contenders:
            compile_and_call(contender, product, inputs)
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
