"""Phases of a compile, by the stack."""

from __future__ import annotations

import time

import pytest

from inductor_ext.reports.compile_phases import FIRST_CALL, find_phase, sample_phases

_TORCH = "/site-packages/torch/"
_OURS = "/inductor_ext/"

_STACKS = {
    # From the innermost frame.
    ("<frozen importlib._bootstrap>:_find_and_load", f"{_OURS}autotune/tuner.py:tune"): "import",
    (
        f"{_TORCH}_inductor/async_compile.py:wait_pool_ready",
        f"{_OURS}autotune/compile_workers.py:wait_until_ready",
        f"{_OURS}autotune/tuner.py:tune",
    ): "tuning, wait for workers",
    (f"{_OURS}autotune/timing.py:measure", f"{_OURS}autotune/tuner.py:tune"): "tuning, time",
    (
        f"{_TORCH}_inductor/graph.py:run",
        f"{_OURS}autotune/inductor_benchmark.py:_generate_codes",
        f"{_OURS}autotune/tuner.py:tune",
        f"{_OURS}lowerings/graph/post_grad_pass.py:plan_matmuls",
    ): "tuning, generate code",
    (
        f"{_TORCH}_inductor/select_algorithm.py:do_autotuning",
        f"{_TORCH}_inductor/graph.py:run",
    ): "Inductor's tuning, time",
    (
        f"{_TORCH}_inductor/runtime/triton_heuristics.py:benchmark_all_configs",
        "/tmp/cab.py:call",
    ): "Inductor's tuning, other kernels",
    (
        f"{_TORCH}_inductor/scheduler.py:codegen",
        f"{_TORCH}_inductor/graph.py:codegen",
    ): "code generation",
    (f"{_TORCH}_inductor/graph.py:run", f"{_TORCH}_dynamo/convert_frame.py:_compile"): "lowering",
    (f"{_TORCH}_dynamo/convert_frame.py:_compile",): "dynamo",
    ("/tmp/cab.py:call",): FIRST_CALL,
}


@pytest.mark.parametrize("stack", _STACKS, ids=_STACKS.values())
def test_a_stack_tells_the_phase(stack: tuple[str, ...]) -> None:
    assert find_phase(list(stack)) == _STACKS[stack]


def test_the_named_functions_exist() -> None:
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    from inductor_ext.autotune import candidate_run, compile_workers, inductor_benchmark

    for owner, names in (
        (AsyncCompile, ("wait", "_wait_futures")),
        (compile_workers, ("wait_until_ready",)),
        (GraphLowering, ("codegen", "compile_to_module", "run")),
        (CachingAutotuner, ("benchmark_all_configs", "precompile", "_make_launchers")),
        (AlgorithmSelectorCache, ("make_precompile_fn", "do_autotuning")),
        (candidate_run._Trial, ("_verify_candidates",)),
        (inductor_benchmark, ("load_code",)),
        (inductor_benchmark.InductorBench, ("_generate_codes",)),
    ):
        assert all(callable(getattr(owner, name)) for name in names)


def test_every_second_belongs_to_a_phase() -> None:
    start = time.perf_counter()
    with sample_phases(interval=0.001) as seconds:
        entered = time.perf_counter()
        sum(range(100_000))
        left = time.perf_counter()
    end = time.perf_counter()
    assert left - entered <= sum(seconds.values()) <= end - start
    assert seconds.keys() <= {FIRST_CALL, "import"}


def test_only_compiles_count_if_asked() -> None:
    with sample_phases(interval=0.001, only_compiles=True) as seconds:
        _wait_in("/site-packages/importlib.py", "_find_and_load")
    assert seconds.keys() == {FIRST_CALL}
    with sample_phases(interval=0.001, only_compiles=True) as seconds:
        _wait_in("/torch/_dynamo/convert_frame.py", "_compile")
    assert seconds["dynamo"] > 0.04


def _wait_in(file: str, name: str) -> None:
    """Wait in a function of a file that does not exist."""
    scope: dict[str, object] = {"sleep": time.sleep}
    exec(compile(f"def {name}():\n    sleep(0.05)", file, "exec"), scope)
    function = scope[name]
    assert callable(function)
    function()
