"""Tuning GEMMs on a CUDA device: timing, the accuracy check, and whole batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

from inductor_ext import config, events
from inductor_ext.autotune import (
    accuracy,
    candidate_run,
    inductor_benchmark,
    reference,
    subprocess_runner,
    timing,
    tuner,
)
from inductor_ext.autotune.candidate_run import BenchmarkBackend, Compiled
from inductor_ext.autotune.decision import Decision
from inductor_ext.hooks import activate, compile_fx, scope
from inductor_ext.settings import Settings
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import TuningRecord
from inductor_ext.templates.tensors import EpilogueInput, Operand
from inductor_ext.templates.triton import ranking
from test.support import cuda_benchmark_backends

pytestmark = pytest.mark.gpu

contiguous = GemmProblem.contiguous

DECODE = contiguous("mm", 16, 4096, 4096)
SQUARE = contiguous("mm", 512, 1024, 1024, "float16")

OUTPUTS = (
    DECODE,
    contiguous("mm", 1000, 513, 257, "float16", layouts="cr"),
    contiguous("mm", 128, 256, 512, "float32"),
    contiguous("mm", 128, 256, 512, "float32", tf32=True),
    contiguous("addmm", 64, 512, 256, epilogue=Epilogue((EpilogueInput("bfloat16", "row"),), 1)),
    contiguous("bmm", 64, 128, 256, batch=8, epilogue=Epilogue((), 2)),
    contiguous("int_mm", 32, 512, 256, "int8"),
    contiguous("mixed", 16, 512, 256, b_dtype="int8"),
    contiguous(
        "mixed", 16, 512, 256, b_dtype="uint4", prologue=Prologue(dequant=Dequant("group", 64))
    ),
    contiguous("mm", 16, 512, 256, parts=(256, 256), epilogue=Epilogue(gated=True)),
    contiguous("mm", 16, 512, 256, parts=(256, 128, 128), prologue=Prologue(RowNorm("rms", 1))),
    contiguous("mm", 16, 512, 256, parts=(256, 128, 128), prologue=Prologue(RowNorm("layer", 2))),
    contiguous(
        "addmm",
        16,
        512,
        256,
        parts=(256, 256),
        epilogue=Epilogue((EpilogueInput("bfloat16", "row"),), 1, gated=True),
    ),
    contiguous("mm", 2 * accuracy.ROWS, 256, 64, epilogue=Epilogue((), 1, "float8_e4m3fn", 1)),
)
"""Problems that Inductor (default) can compute on every device from capability 8.9 on."""


def this_device() -> Device:
    return Device.from_torch(torch.cuda.get_device_properties(0))


@pytest.fixture(autouse=True)
def compiling() -> Iterator[None]:
    """The scope of a compile by the extension, without any cache."""
    compile_fx.install_hooks(activate.requested)
    with (
        inductor_config.patch(force_disable_caches=True),
        scope.compile_scope(config.snapshot()),
    ):
        yield
    subprocess_runner.close_workers()


def tune(
    *problems: GemmProblem,
    bench: Callable[[int], BenchmarkBackend] = inductor_benchmark.cuda_bench,
    **options: Any,
) -> dict[GemmProblem, Decision]:
    return tuner.tune(problems, this_device(), bench, Settings(), **options)


@pytest.mark.parametrize("problem", OUTPUTS, ids=problem_words)
def test_the_fallback_counts_as_correct(problem: GemmProblem) -> None:
    if problem.stored_dtype.startswith("float8") and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8")
    bench = inductor_benchmark.cuda_bench(0)
    program = reference.program(problem)
    with bench.prepared(), reference.precision(problem):
        (compiled,) = bench.compile([(problem, None)], lambda index: None)
        assert isinstance(compiled, Compiled), compiled
        inputs = program.make_inputs(bench.device)
        verifier = accuracy.Verifier(program, inputs)
        refused = verifier.set_stock(compiled.call(*inputs))
        # A chain is rounded after every step, a single matmul once.
        plain = problem.epilogue == Epilogue() and not problem.parts
        assert refused is None or not plain
        assert verifier.check(lambda: compiled.call(*inputs)) is None
        wrong = list(compiled.call(*inputs))
        wrong[0] = wrong[0].clone()
        wrong[0].view(torch.uint8)[..., -1, -1] ^= 0x55
        assert verifier.check(lambda: wrong) is not None


def test_operands_at_unaligned_addresses() -> None:
    unaligned = [Operand("float16", strides, 1) for strides in ((2048, 1), (1, 2048))]
    problem = GemmProblem("mm", 2048, 2048, 2048, *unaligned, "float16")
    timings = tune(problem)[problem].timings
    assert [timing.failure for timing in timings] == [None] * len(timings)


def test_slow_and_uncapturable_kernels_are_timed() -> None:
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.half) for _ in range(2))
    small = torch.randn(256, 256, device="cuda", dtype=torch.half)

    def waits() -> torch.Tensor:
        matmul = a @ b
        matmul[0, 0].item()
        return matmul

    calls = [lambda: a @ b, lambda: a @ b @ b, lambda: small @ small, waits]
    for call in calls:
        call()
    with timing.CudaStopwatch(calls, 0) as stopwatch:
        samples = timing.measure(stopwatch, len(calls), 300)
    one, two, tiny, waiting = (sample.microseconds for sample in samples)
    assert two == pytest.approx(2 * one, rel=0.2)
    assert tiny < one / 5
    assert waiting > one
    assert timing.decide(samples).index == 2
    # The device still works.
    torch.testing.assert_close(calls[0](), a @ b)


def test_a_slow_host_gets_a_longer_lead() -> None:
    small = torch.randn(256, 256, device="cuda", dtype=torch.half)
    calls = [lambda: small @ small] * 4
    with timing.CudaStopwatch(calls, 0) as stopwatch:
        first = stopwatch.lead

        def late(run: Any) -> Any:
            return lambda: (time.sleep(3e-4), run())

        stopwatch._runs = [late(run) for run in stopwatch._runs]
        behind = [item.microseconds for item in timing.measure(stopwatch, len(calls), 100)]
    assert stopwatch.lead > first
    # Other tests keep the host as well: it can be late once more, for one of four. Where the lead
    # is too short, a matmul takes as long as the host sleeps.
    assert statistics.median(behind) < 150


def test_operands_come_from_memory() -> None:
    properties: Any = torch.cuda.get_device_properties(0)
    known = this_device()
    source = torch.randn(properties.L2_cache_size // 8, device="cuda")
    target = torch.empty_like(source)
    with timing.CudaStopwatch([lambda: target.copy_(source)], 0) as stopwatch:
        (sample,) = timing.measure(stopwatch, 1, 100)
    # Half of the L2 is read; that no faster than memory can.
    assert sample.microseconds > 0.75 * source.nbytes / known.bandwidth * 1e6


def test_two_shapes_are_tuned_in_seconds() -> None:
    begun = time.perf_counter()
    with events.capture(TuningRecord) as records:
        decisions = tune(DECODE, SQUARE)
    seconds = time.perf_counter() - begun
    for problem, decision in decisions.items():
        assert decision.origin == "measured"
        timed = [item for item in decision.timings if item.microseconds is not None]
        print(problem_words(problem), seconds, *decision.timings, sep="\n    ")
        assert len(timed) > 1, [item.failure for item in decision.timings]
        least = problem.roofline(this_device())
        assert all(item.microseconds > 0.9 * least for item in timed)
        best = min(item.microseconds for item in timed)
        taken = decision.microseconds(decision.config)
        assert taken is not None
        assert taken <= best * 1.05
    assert [record.problem for record in records] == [DECODE, SQUARE]


@pytest.mark.parametrize("isolated", [False, True])
def test_a_wrong_candidate_is_dropped(isolated: bool) -> None:
    decision = tune(DECODE, bench=cuda_benchmark_backends.wrong_bench, isolated=isolated)[DECODE]
    first = decision.timings[1]
    assert first.failure is not None
    assert first.failure.startswith("wrong: error")
    assert decision.config != first.config
    assert decision.microseconds(None) is not None


def test_a_device_fault_ends_only_its_own_process() -> None:
    bad, good = (config for config, _ in ranking.rank(DECODE, this_device(), 2))
    job = candidate_run.Job(DECODE, (bad, good))
    (report,) = subprocess_runner.run([job], cuda_benchmark_backends.faulty_bench, 0, 100, 60)
    failures = {item.config: item.failure for item in report.timings}
    assert failures[bad] is not None
    # The fault shows wherever the device is waited for next.
    assert "left the device in an error state" in failures[bad] or "CUDA error" in failures[bad]
    assert failures[good] is failures[None] is None
    assert torch.ones(2, device="cuda").sum().item() == 2
