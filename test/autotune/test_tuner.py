"""Tuning GEMMs without a GPU: programs of problems, the check of results, the policy of timing,
candidates that fail, variants by Inductor, and what is said about it all."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import statistics
from collections.abc import Generator, Sequence
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from hypothesis import given
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gemm.models import int8_linear
from inductor_ext import config, events, exc
from inductor_ext.autotune import (
    accuracy,
    candidate_run,
    decide,
    inductor_benchmark,
    reference,
    timing,
    tuner,
)
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import activate, compile_fx, scope
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.settings import Settings
from inductor_ext.templates.format import problem_words
from inductor_ext.templates.problem import (
    Epilogue,
    EpilogueInput,
    GemmProblem,
    KernelDetails,
    Operand,
    Prologue,
    RowNorm,
)
from inductor_ext.templates.records import ProductRecord, TuningRecord
from inductor_ext.templates.triton.config import GemmConfig
from test.support import benchmark_backends, fake_cuda
from test.support.benchmark_backends import STOCK, CpuBench, SimulatedStopwatch, candidate
from test.support.gemm_strategies import device, examples, problems

H200 = device("NVIDIA H200")

contiguous = GemmProblem.contiguous
LINEAR = contiguous("mm", 24, 48, 64, "float32")


def inputs_of(*kinds: str, dtype: str = "bfloat16") -> tuple[EpilogueInput, ...]:
    return tuple(EpilogueInput(dtype, kind) for kind in kinds)  # type: ignore[arg-type]


GATED = Epilogue(gated=True)
HALVES = KernelDetails("gelu", "up")
SCALES = inputs_of("column", "row", dtype="float32")

COVERED = [
    contiguous("mm", 16, 512, 256),
    contiguous("mm", 16, 513, 255, "float16", layouts="cr"),
    contiguous("mm", 16, 512, 256, "float32", tf32=True),
    contiguous("addmm", 16, 512, 256, epilogue=Epilogue(inputs_of("row"), 1)),
    contiguous("bmm", 16, 512, 256, batch=4),
    contiguous("baddbmm", 16, 512, 256, batch=4, epilogue=Epilogue(inputs_of("matrix"), 1)),
    contiguous("int_mm", 32, 512, 256, "int8"),
    contiguous("scaled", 32, 512, 256, "float8_e4m3fn", epilogue=Epilogue(SCALES, 2)),
    contiguous(
        "scaled",
        32,
        512,
        256,
        "float8_e4m3fn",
        fast_accumulation=True,
        epilogue=Epilogue((*SCALES, *inputs_of("row")), 3),
    ),
    contiguous("grouped", 64, 512, 256, batch=4),
    contiguous("grouped", 64, 512, 256, "float8_e4m3fn", batch=4, epilogue=Epilogue(SCALES, 2)),
]
"""Problems of single operators."""

NORM = Prologue(RowNorm("rms", 1))
LAYER_NORM = Prologue(RowNorm("layer", 2))

FUSED = [
    contiguous("mm", 16, 512, 256, epilogue=Epilogue((), 3)),
    contiguous("addmm", 16, 512, 256, epilogue=Epilogue(inputs_of("row"), 5)),
    contiguous("bmm", 16, 512, 256, batch=4, epilogue=Epilogue((), 2)),
    contiguous("mm", 16, 512, 256, epilogue=Epilogue(inputs_of("column", "row"), 2, "float32")),
    contiguous("mm", 16, 512, 256, parts=(256, 256), epilogue=GATED),
    contiguous("mm", 16, 512, 256, parts=(256, 256), epilogue=GATED, prologue=NORM),
    contiguous("mm", 16, 512, 256, parts=(256, 256), epilogue=GATED, details=HALVES),
    contiguous(
        "addmm",
        16,
        512,
        256,
        parts=(256, 256),
        epilogue=Epilogue(inputs_of("row"), 1, gated=True),
    ),
    contiguous("mm", 16, 512, 256, parts=(256, 128, 128), prologue=NORM),
    contiguous("mm", 16, 512, 256, parts=(256, 128, 128), prologue=LAYER_NORM),
    contiguous(
        "addmm", 16, 512, 256, parts=(256, 128, 128), epilogue=Epilogue(inputs_of("row"), 1)
    ),
]
"""Problems of several nodes, as our pass over the graph describes them."""

INT_BIAS = inputs_of("row", dtype="int32")

INTEGERS = [
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 6, "int8")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 2, "int64")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 1, "uint8")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue((), 0, "bool")),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue(inputs_of("scalar", dtype="bool"), 1)),
    contiguous("mm", 24, 48, 64, epilogue=Epilogue(inputs_of("column", dtype="int32"), 1)),
    contiguous("mm", 24, 48, 64, "float32", epilogue=Epilogue(inputs_of("row", dtype="uint8"), 1)),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue(INT_BIAS, 1)),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue((*INT_BIAS, *SCALES), 3, "float16")),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue(SCALES, 5, "int8")),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue((), 5, "int8")),
    contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue(SCALES[1:], 2)),
    contiguous("int_mm", 24, 48, 4096, "int8", epilogue=Epilogue((), 1, "float16")),
]
"""Problems that store integers or bools, or add and multiply by some."""


class TestPrograms:
    @examples(60)
    @given(problems(most=60))
    def test_are_right_and_have_inputs_of_the_problems_layout(self, problem: GemmProblem) -> None:
        floats = ("bfloat16", "float16", "float32")
        if problem.norm and problem.a.dtype not in floats:
            return
        program = reference.program(problem)
        inputs = program.make_inputs("cpu")
        a, b = inputs[:2]
        assert a.shape[-2:] == (problem.m, problem.k)
        assert str(a.dtype) == f"torch.{problem.a.dtype}"
        assert (a.stride()[-2:]) == problem.a.strides
        lengths = (problem.m, problem.k)
        found = Operand.of(problem.a.dtype, lengths, problem.a.strides, offset=a.storage_offset())
        assert found.alignment >= problem.a.alignment or problem.a.batch_stride
        if not problem.b.dtype.endswith("int4") and not problem.parts:
            assert b.stride()[-2:] == problem.b.strides
        assert sum(x.untyped_storage().nbytes() for x in inputs) == program.bytes
        if problem.operation == "grouped" or (
            problem.operation == "int_mm" and problem.epilogue != Epilogue()
        ):
            return  # The CPU has no kernel for all of these, and no rounding to int32 is stock's.
        with reference.precision(problem):
            outputs = program.function(*inputs)
        if not all(output.any() for output in outputs):
            return  # Errors are relative to the size of the results.
        verifier = accuracy.Verifier(program, inputs)
        refused = verifier.set_stock(outputs)
        # A chain whose every step is rounded, as in no kernel, may pass the bound.
        assert refused is None or problem.epilogue != Epilogue()
        assert verifier.check(lambda: outputs) is None

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    @pytest.mark.parametrize("problem", COVERED, ids=problem_words)
    def test_of_an_operator_are_matched_in_the_graph(self, problem: GemmProblem) -> None:
        pytest.importorskip("triton")
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        from inductor_ext.lowerings.graph.matmul_nodes import problem_of

        program = reference.program(problem)
        with fake_cuda.device(), FakeTensorMode(), reference.precision(problem):
            inputs = program.empty_inputs("cuda")
            table = select_decomp_table()
            graph = make_fx(program.function, decomposition_table=table)(*inputs).graph
            calls = [node for node in graph.nodes if node.op == "call_function"]
            assert [found for node in calls if (found := problem_of(node))] == [problem]

    def test_an_input_that_is_not_aligned_has_an_offset(self) -> None:
        aligned = contiguous("mm", 16, 512, 256)
        skewed = dataclasses.replace(aligned, b=dataclasses.replace(aligned.b, alignment=2))
        offsets = [
            reference.program(item).make_inputs("cpu")[1].storage_offset()
            for item in (aligned, skewed)
        ]
        assert offsets == [0, 2]

    def test_fused_weights_are_matmuls_of_one_input(self) -> None:
        problem = contiguous("mm", 8, 48, 32, "float32", parts=(32, 8, 8))
        a, *weights = reference.program(problem).make_inputs("cpu")
        outputs = reference.program(problem).function(a, *weights)
        assert [output.shape[1] for output in outputs] == [32, 8, 8]
        assert all(torch.equal(a @ w, out) for w, out in zip(weights, outputs, strict=True))

    def test_gates_norms_and_reductions(self) -> None:
        problem = contiguous(
            "mm",
            8,
            48,
            32,
            "float32",
            parts=(24, 24),
            prologue=Prologue(RowNorm("rms", 1, "float32")),
            epilogue=Epilogue(gated=True, reductions=1),
        )
        a, gate, up, weight = reference.program(problem).make_inputs("cpu")
        out, largest = reference.program(problem).function(a, gate, up, weight)
        normalized = torch.nn.functional.rms_norm(a, (32,), weight, 1e-5)
        expected = torch.nn.functional.silu(normalized @ gate) * (normalized @ up)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(largest, expected.abs().amax(1))

    @pytest.mark.parametrize("first", ["gate", "up"])
    def test_gates_by_halves_of_one_weight(self, first: Literal["gate", "up"]) -> None:
        bias = inputs_of("row", dtype="float32")
        epilogue, details = Epilogue(bias, 1, gated=True), KernelDetails("gelu", first)
        problem = contiguous(
            "addmm", 8, 48, 32, "float32", parts=(24, 24), epilogue=epilogue, details=details
        )
        a, weight, added = reference.program(problem).make_inputs("cpu")
        (out,) = reference.program(problem).function(a, weight, added)
        parts = torch.addmm(added, a, weight).split(24, 1)
        gate, up = parts if first == "gate" else reversed(parts)
        torch.testing.assert_close(out, torch.nn.functional.gelu(gate) * up)

    def test_a_layer_norm_is_torchs(self) -> None:
        prologue = Prologue(RowNorm("layer", 2, "float32"))
        problem = contiguous("mm", 8, 24, 32, "float32", prologue=prologue)
        a, b, weight, bias = reference.program(problem).make_inputs("cpu")
        (out,) = reference.program(problem).function(a, b, weight, bias)
        expected = torch.nn.functional.layer_norm(a, (32,), weight, bias, 1e-5) @ b
        torch.testing.assert_close(out, expected)

    def test_packed_integers_are_unpacked_along_k(self) -> None:
        packed = torch.tensor([[0x12, 0xF8]], dtype=torch.uint8)
        assert reference.unpack_int4(packed, signed=False).tolist() == [[1, 2, 15, 8]]
        assert reference.unpack_int4(packed, signed=True).tolist() == [[1, 2, -1, -8]]

    @pytest.mark.parametrize("divided", ["n", "k"])
    def test_groups_of_columns_and_along_k(self, divided: str) -> None:
        problem = contiguous("grouped", 16, 32, 64, layouts="rr", batch=4, divided=divided)
        program = reference.program(problem)
        a, b, ends = program.make_inputs("cpu")
        assert ends.tolist() == [
            problem.n // 4 * (g + 1) if divided == "n" else 16 * (g + 1) for g in range(4)
        ]
        verifier = accuracy.Verifier(program, [a, b, ends])
        if divided == "n":
            found = torch.cat([a[g] @ b[:, 8 * g : 8 * g + 8] for g in range(4)], 1)
        else:
            found = torch.stack([a[:, s : s + 16] @ b[s : s + 16] for s in range(0, 64, 16)])
        assert verifier.check(lambda: [found]) is None

    @pytest.mark.parametrize("divided", ["m", "n", "k"])
    def test_groups_have_scales_of_their_own(self, divided: str) -> None:
        problem = contiguous(
            "grouped", 16, 32, 64, "float8_e4m3fn", batch=4, layouts="rc", divided=divided
        )
        program = reference.program(problem)
        a, b, ends, scale_a, scale_b = program.make_inputs("cpu")
        spans = [slice(end - end // (g + 1), end) for g, end in enumerate(ends.tolist())]
        wide_a, wide_b = a.double(), b.double()
        if divided == "m":
            wide_a, wide_b = wide_a * scale_a[:, None], wide_b * scale_b[:, None]
            expected = torch.cat([wide_a[span] @ wide_b[g] for g, span in enumerate(spans)])
        elif divided == "n":
            wide_a, wide_b = wide_a * scale_a[:, :, None], wide_b * scale_b
            expected = torch.cat([wide_a[g] @ wide_b[:, span] for g, span in enumerate(spans)], 1)
        else:
            sums = torch.stack([wide_a[:, span] @ wide_b[span] for span in spans])
            expected = sums * scale_a.view(4, 16, 1) * scale_b.view(4, 1, 32)
        rows = torch.tensor([1, 6, 15])
        (some,) = program.reference([a, b, ends, scale_a, scale_b], rows)
        torch.testing.assert_close(some, expected.index_select(-2, rows))


class TestVerification:
    def verifier(self, problem: GemmProblem) -> tuple[accuracy.Verifier, list[torch.Tensor]]:
        program = reference.program(problem)
        inputs = program.make_inputs("cpu")
        found = accuracy.Verifier(program, inputs)
        assert found.set_stock(program.function(*inputs)) is None
        return found, inputs

    def test_the_bound_grows_with_k_and_with_coarser_dtypes(self) -> None:
        fine, long, coarse = (
            accuracy.bound(contiguous("mm", 16, 16, k, dtype))
            for k, dtype in ((64, "float32"), (4096, "float32"), (64, "bfloat16"))
        )
        assert fine < 1e-5 < 4e-5 > long > 4 * fine
        assert 2**-8 < coarse < 2**-7
        assert accuracy.bound(contiguous("int_mm", 16, 16, 64, "int8")) == 0

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    def test_a_kernel_that_skips_one_step_of_k_is_wrong(self, dtype: str) -> None:
        verifier, (a, b) = self.verifier(contiguous("mm", 40, 48, 1025, dtype))
        reason = verifier.check(lambda: [a[:, :-1] @ b[:-1]])
        assert reason is not None
        assert reason.startswith("wrong: error")
        assert verifier.check(lambda: [(a.double() @ b.double()).to(a.dtype)]) is None

    def test_tf32_is_right_where_it_is_allowed(self) -> None:
        for tf32 in (False, True):
            verifier, (a, b) = self.verifier(contiguous("mm", 40, 48, 512, "float32", tf32=tf32))
            # Cut off to 10 bits of fraction.
            cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
            assert (verifier.check(lambda cut=cut: [cut[0] @ cut[1]]) is None) == tf32

    def test_infinity_nan_and_what_is_not_written_are_wrong(self) -> None:
        verifier, (a, b) = self.verifier(contiguous("mm", 40, 48, 64, "float16"))
        for value in (float("nan"), float("inf")):
            out = a @ b
            out[3, 4] = value
            assert verifier.check(lambda out=out: [out]) == "wrong: NaN, infinity or another shape"
        assert verifier.check(lambda: [(a @ b)[:-1]]) == "wrong: NaN, infinity or another shape"
        assert "2 results" in str(verifier.check(lambda: [a @ b, a @ b]))

    def test_unsampled_rows_are_compared_with_the_fallback(self) -> None:
        problem = contiguous("mm", 3 * accuracy.ROWS, 16, 16, "float32")
        rows = accuracy.sampled_rows(problem)
        assert len(rows) == accuracy.ROWS
        assert (rows[0], rows[-1]) == (0, problem.m - 1)
        verifier, (a, b) = self.verifier(problem)
        out = a @ b
        out[min(set(range(problem.m)) - set(rows)), 3] += 0.01
        assert "against Inductor" in str(verifier.check(lambda: [out]))

    def test_integers_are_exact(self) -> None:
        verifier, (a, b) = self.verifier(contiguous("int_mm", 40, 48, 64, "int8"))
        out = torch._int_mm(a, b)
        assert verifier.check(lambda: [out]) is None
        out[0, 0] += 1
        assert verifier.check(lambda: [out]) is not None

    @pytest.mark.parametrize("problem", INTEGERS, ids=problem_words)
    def test_integer_results_do_not_hide_a_matmul(self, problem: GemmProblem) -> None:
        verifier, (a, *others) = self.verifier(problem)
        function = reference.program(problem).function
        assert verifier.check(lambda: function(a, *others)) is None
        reason = verifier.check(lambda: function(torch.zeros_like(a), *others))
        assert str(reason).startswith("wrong: error")

    def test_unsampled_bools_are_compared_with_the_fallback(self) -> None:
        problem = contiguous("mm", 3 * accuracy.ROWS, 16, 16, epilogue=Epilogue((), 0, "bool"))
        verifier, (a, b) = self.verifier(problem)
        out = (a @ b) > 0
        assert verifier.check(lambda: [out]) is None
        row = min(set(range(problem.m)) - set(accuracy.sampled_rows(problem)))
        out[row] ^= True
        assert "against Inductor" in str(verifier.check(lambda: [out]))

    def test_integers_of_many_operations(self) -> None:
        problem = contiguous("int_mm", 24, 48, 64, "int8", epilogue=Epilogue((), 24))
        program = reference.program(problem)
        (out,) = program.function(*program.make_inputs("cpu"))
        assert out.dtype == torch.int32

    def test_deterministic_results_need_equal_bits(self) -> None:
        for deterministic in (False, True):
            problem = dataclasses.replace(LINEAR, deterministic=deterministic)
            verifier, (a, b) = self.verifier(problem)
            outputs = [a @ b, torch.nextafter(a @ b, torch.tensor(9.0))]
            reason = verifier.check(lambda outputs=outputs: [outputs.pop()])
            assert (reason is not None) == deterministic


class TestTiming:
    def chosen(self, *microseconds: float, seeds: int = 40, **options: Any) -> set[int]:
        """The winners, in so many runs."""
        found = set()
        for seed in range(seeds):
            stopwatch = SimulatedStopwatch(microseconds, seed=seed, **options)
            samples = timing.measure(stopwatch, len(microseconds), 200, seed)
            found.add(timing.decide(samples).index)
        return found

    def test_the_fastest_wins_in_spite_of_noise_and_drift(self) -> None:
        assert self.chosen(100, 96, 90, 150, noise=0.01, drift=3.0, cold=2.0) == {2}

    def test_ties_go_to_the_fallback(self) -> None:
        assert self.chosen(100, 100, 99, noise=0.01) == {0}
        assert self.chosen(100, 98.5, noise=0.0) == {0}
        assert self.chosen(100, 97.5, noise=0.0) == {1}

    def test_noise_needs_a_larger_lead(self) -> None:
        assert 0 in self.chosen(100, 97, noise=0.2)
        assert self.chosen(100, 97, noise=0.003) == {1}

    def test_it_begins_when_clocks_are_up(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 50.0), cold=3.0)
        samples = timing.measure(stopwatch, 2, 1000)
        assert [sample.microseconds for sample in samples] == pytest.approx([100, 50], rel=0.02)

    def test_who_is_clearly_behind_is_measured_less(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 99.0, 140.0, 500.0), noise=0.02)
        samples = timing.measure(stopwatch, 4, 1000)
        counts = [len(sample.times) for sample in samples]
        assert counts[3] == counts[2] == 5 < counts[0] == counts[1]

    def test_orders_alternate(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 99.0, 101.0), noise=0.01)
        timing.measure(stopwatch, 3, 1000)
        firsts = {order[0] for order in stopwatch.orders if len(order) == 3}
        assert firsts == {0, 1, 2}

    def test_the_budget_ends_it(self) -> None:
        stopwatch = SimulatedStopwatch((100.0, 100.0), noise=0.05)
        timing.measure(stopwatch, 2, budget=5)
        assert 5e-3 <= stopwatch.now() < 5.3e-3

    def test_a_median_is_settled_sooner_without_noise(self) -> None:
        rounds = [
            len(timing.measure(SimulatedStopwatch((100.0, 99.0), noise), 2, 1000)[0].times)
            for noise in (0.0, 0.03)
        ]
        assert rounds[0] == 12 < rounds[1]

    def test_the_error_of_a_median_is_that_of_normal_values(self) -> None:
        stopwatch = SimulatedStopwatch((100.0,), noise=0.01)
        medians, errors = [], []
        for _ in range(300):
            sample = timing.Sample(tuple(stopwatch.round([0] * 25)))
            medians.append(sample.microseconds)
            errors.append(sample.deviation)
        assert statistics.mean(errors) == pytest.approx(statistics.stdev(medians), rel=0.15)


def tried(
    problem: GemmProblem, *configs: GemmConfig, bench: CpuBench | None = None
) -> candidate_run.Report:
    notified: list[tuple[int, GemmConfig | None]] = []
    job = candidate_run.Job(problem, configs)
    bench = bench or CpuBench()
    (report,) = candidate_run.run([job], bench, 50, lambda *at: notified.append(at))
    assert {at for at in notified if at[1] is None} == {(0, None)}
    return report


class TestTrial:
    def test_what_fails_is_dropped_with_its_reason(self) -> None:
        kinds = (
            benchmark_backends.WRONG,
            benchmark_backends.NOT_A_NUMBER,
            benchmark_backends.RAISES,
            benchmark_backends.NO_COMPILE,
            benchmark_backends.UNUSED,
        )
        bad = [candidate(10, kind) for kind in kinds]
        good = candidate(80)
        report = tried(LINEAR, *bad, good)
        assert report.chosen == good
        assert report.reason == "20.0% less time than Inductor (default)"
        assert [item.config for item in report.timings] == [None, *bad, good]
        assert report.timings[0].microseconds == pytest.approx(STOCK, rel=0.01)
        failures = [item.failure or "" for item in report.timings]
        assert failures[1].startswith("wrong: error")
        assert failures[2:] == [
            "wrong: NaN, infinity or another shape",
            "failed: RuntimeError: an illegal memory access",
            "does not compile: ValueError: no such instruction",
            "generates the same code as Inductor (default): the template was not used",
            "",
        ]
        assert all(item.microseconds is None for item in report.timings[1:-1])

    def test_fallback_stays_without_a_faster_candidate(self) -> None:
        report = tried(LINEAR, candidate(10, benchmark_backends.WRONG))
        assert (report.chosen, report.reason) == (None, "no candidates are left")
        assert report.timings[0].microseconds == pytest.approx(STOCK, rel=0.01)
        report = tried(LINEAR, candidate(99), candidate(120))
        assert report.chosen is None
        assert report.reason.startswith("the best candidate is 1.0% ahead; 2.0%")

    def test_the_same_code_is_measured_once(self) -> None:
        twin = dataclasses.replace(candidate(80), stages=3)
        with mock.patch.object(GemmConfig, "__repr__", return_value="same"):
            report = tried(LINEAR, candidate(80), twin)
        assert (
            report.timings[2].failure
            == "generates the same code as splitk 80x32x32, 2 stages, 4 warps, group 1"
        )

    def test_problems_beyond_memory_fall_back(self) -> None:
        bench = CpuBench()
        bench.free = 1 << 10
        report = tried(LINEAR, candidate(10), bench=bench)
        assert report.chosen is None
        assert report.reason == "tuning needs 0.0 GiB, and 0.0 GiB are free"

    def test_a_broken_device_is_an_error(self) -> None:
        bench = CpuBench()
        bench.broken = True
        with pytest.raises(exc.TuningFaultError, match="splitk 10x32x32") as caught:
            tried(LINEAR, candidate(10, benchmark_backends.RAISES), bench=bench)
        assert "AUTOTUNE_IN_SUBPROC" in str(caught.value)


def tune(*configs: GemmConfig, settings: Settings | None = None, **options: Any) -> Decision:
    """Tune one problem with these candidates."""
    ranked = [(config, mock.Mock(total=50.0)) for config in configs]
    with mock.patch.object(tuner.ranking, "rank", return_value=ranked):
        found = tuner.tune(
            [LINEAR, LINEAR], H200, benchmark_backends.cpu_bench, settings or Settings(), **options
        )
    assert list(found) == [LINEAR]
    return found[LINEAR]


class NoReports:
    """What tells of no job that it was given."""

    def __init__(self) -> None:
        self.jobs: list[candidate_run.Job] = []

    def __call__(
        self, jobs: Sequence[candidate_run.Job], *_: Any
    ) -> Generator[candidate_run.Report, None, None]:
        self.jobs.extend(jobs)
        yield from ()


class TestTuner:
    def test_decides_and_records(self, tmp_path: Any) -> None:
        log = tmp_path / "events.jsonl"
        settings = Settings(event_log=str(log))
        wrong = candidate(10, benchmark_backends.WRONG)
        with events.capture(TuningRecord) as records:
            decision = tune(candidate(80), wrong, settings=settings)
        assert decision.config == candidate(80)
        assert decision.origin == "measured"
        assert decision.microseconds(candidate(80)) == pytest.approx(80)
        assert decision.microseconds(None) == pytest.approx(STOCK)
        (record,) = records
        assert (record.problem, record.chosen) == (LINEAR, candidate(80))
        assert record.reason == "20.0% less time than Inductor (default)"
        assert [item.config for item in record.candidates] == [None, candidate(80), wrong]
        assert [item.predicted for item in record.candidates] == [None, 50.0, 50.0]
        assert "wrong" in (record.candidates[2].failure or "")
        (line,) = map(json.loads, log.read_text().splitlines())
        assert line["candidates"][1]["measured"] == pytest.approx(80)
        assert record.describe().startswith("tuning: mm 24x48x64: splitk: 20.0% less time")

    def test_a_problem_that_no_template_covers_is_not_measured(self) -> None:
        with mock.patch.object(tuner.candidate_run, "run", side_effect=AssertionError):
            assert tune() == Decision(None, "unknown")

    @pytest.mark.parametrize("exhaustive", [False, True])
    def test_what_is_predicted_to_lose_is_not_measured(self, exhaustive: bool) -> None:
        normalized = contiguous("mm", 2048, 4096, 4096, prologue=Prologue(RowNorm("rms", 1)))
        plain = contiguous("mm", 2048, 4096, 4096)
        tried = NoReports()
        search = "EXHAUSTIVE" if exhaustive else "DEFAULT"
        with (
            inductor_config.patch(max_autotune_gemm_search_space=search),
            mock.patch.object(tuner.candidate_run, "run", tried),
        ):
            found = tuner.tune([normalized, plain], H200, benchmark_backends.cpu_bench, Settings())
        measured = [normalized, plain] if exhaustive else [plain]
        assert [job.problem for job in tried.jobs] == measured
        assert found[normalized] == Decision(None, "unknown" if exhaustive else "predicted")

    def test_cutlass_kernels_are_tried_all_the_same(self) -> None:
        problem, options = mock.Mock(), mock.Mock(alone=False)
        options.rank.return_value = {"a CUTLASS kernel": 300.0}
        hopeless = tuner._candidates(problem, H200, False, options, True, True)
        assert hopeless == options.rank.return_value

    def test_everything_dropped_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with mock.patch.object(events, "_warned", set()):
            for _ in range(2):
                assert tune(candidate(10, benchmark_backends.WRONG)).config is None
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1
        assert "mm 24x48x64" in warnings[0].getMessage()

    def test_exhaustive_search_tries_the_whole_space(self) -> None:
        seen = NoReports()
        with (
            inductor_config.patch(max_autotune_gemm_search_space="EXHAUSTIVE"),
            mock.patch.object(tuner.candidate_run, "run", seen),
        ):
            tuner.tune(
                [contiguous("mm", 16, 512, 256)], H200, benchmark_backends.cpu_bench, Settings()
            )
        assert len(seen.jobs[0].configs) > tuner.CANDIDATES

    def test_an_interrupt_leaves_nothing_behind(self) -> None:
        class Bench(CpuBench):
            prepared = inductor_benchmark.InductorBench.prepared

        ranked = [(candidate(80), mock.Mock(total=50.0))]
        other = contiguous("mm", 24, 48, 32, "float32")
        with (
            mock.patch.object(tuner.ranking, "rank", return_value=ranked),
            mock.patch.object(tuner, "_print_table", side_effect=KeyboardInterrupt),
            events.capture(TuningRecord) as records,
            pytest.raises(KeyboardInterrupt) as kept,
        ):
            tuner.tune([LINEAR, other], H200, lambda index: Bench(), Settings())
        assert kept.tb is not None
        assert torch.is_grad_enabled()
        # What was measured until then is told: nothing is muted any longer.
        assert [record.problem for record in records] == [LINEAR]

    def test_a_process_without_stderr_has_no_table(self) -> None:
        with inductor_config.patch(max_autotune=True), mock.patch("sys.stderr", None):
            assert tune(candidate(80)).config == candidate(80)

    @pytest.mark.parametrize("asked", [False, True])
    def test_the_table_is_inductors(self, asked: bool, capsys: pytest.CaptureFixture[str]) -> None:
        with inductor_config.patch(max_autotune=asked):
            tune(candidate(80))
        lines = capsys.readouterr().err.splitlines()
        if not asked:
            assert lines == []
            return
        assert lines[:3] == [
            "AUTOTUNE mm(24x64, 64x48)",
            "strides: [64, 1], [1, 64]",
            "dtypes: torch.float32, torch.float32",
        ]
        assert lines[3].startswith("  splitk 80x32x32, 2 stages, 4 warps, group 1 0.0")
        assert lines[3].endswith("100.0% chosen")
        assert lines[4].startswith("  mm (Inductor) 0.1")
        assert lines[5].startswith("SingleProcess AUTOTUNE benchmarking takes ")
        assert lines[5].endswith("2 choices: 20.0% less time than Inductor (default)")

    def test_progress_is_shown_on_a_terminal_only(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        with mock.patch("sys.stderr", Terminal()) as terminal:
            tune(candidate(80))
        text = terminal.getvalue()
        assert "0/1, compiling" in text
        assert "1/1, best splitk 80x32x32, 2 stages, 4 warps, group 1 80." in text
        assert text.endswith("\r\x1b[K")


def constants(code: str) -> list[str]:
    """The constants of the only product's kernel in a module."""
    kernels = fake_cuda.Lowered(code, ()).kernels().values()
    products = [kernel for kernel in kernels if "tl.dot" in kernel]
    return re.findall(r"\w+ : tl.constexpr = \S+", products[0]) if products else []


def matrix(*size: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return size, dtype


WRITTEN: dict[str, tuple[Any, ...]] = {
    "product": (lambda x, w: x @ w.t(), matrix(16, 512), matrix(256, 512)),
    # Inductor names its kernel after an operator.
    "residual": (
        lambda x, w, y: y + x @ w.t(),
        *(matrix(16, 512), matrix(256, 512), matrix(16, 256)),
    ),
    "relu": (lambda x, w: torch.relu(x @ w.t()), matrix(16, 512), matrix(256, 512)),
    "silu": (
        lambda x, w: torch.nn.functional.silu(x @ w.t()),
        matrix(16, 512),
        matrix(256, 512),
    ),
    "gelu": (
        lambda x, w, bias: torch.nn.functional.gelu(torch.nn.functional.linear(x, w, bias)),
        *(matrix(16, 512), matrix(256, 512), matrix(256)),
    ),
    "int8": (int8_linear, matrix(16, 512), matrix(256, 512, dtype=torch.int8), matrix(256)),
    "gate": (
        lambda x, w1, w2: torch.nn.functional.silu(x @ w1.t()) * (x @ w2.t()),
        *(matrix(16, 512), matrix(256, 512), matrix(256, 512)),
    ),
}
"""Products as models write them, with what they take; the winner is launched as a dependent one."""


def compiled_text(code: str) -> str:
    """What Triton gets to see of the kernel of a template in a module."""
    texts = (node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant))
    (text,) = (text for text in texts if isinstance(text, str) and "triton_gemm" in text)
    meta, name = r"^inductor_meta=.*$", r"^triton_tem_\w+ = \w+\n"
    return re.sub(f"{meta}|{name}", "", text, flags=re.M)


def compiled_and_tuned(
    function: Any, *inputs: Any, **options: Any
) -> tuple[fake_cuda.Lowered, list[str], list[Any]]:
    """What becomes of a function whose second candidate wins, the code of stock's path and of all
    candidates, and what was said of it.
    """
    pytest.importorskip("triton")
    codes: list[str] = []

    def run(jobs: list[candidate_run.Job], bench: Any, *_: Any) -> Any:
        (job,) = jobs
        wanted = [(job.problem, config) for config in (None, *job.configs)]
        with bench.prepared():
            found = bench.compile(wanted, lambda index: None)
        codes.extend(item.key for item in found)
        timings = tuple(
            Timing(config, 10.0 if config == job.configs[1] else 20.0) for _, config in wanted
        )
        yield candidate_run.Report(job.problem, job.configs[1], timings, "it is", 0.0)

    compile_fx.install_hooks(activate.requested)
    with (
        scope.compile_scope(config.snapshot({"tuning_cache": False})),
        mock.patch.object(candidate_run, "run", run),
        mock.patch.object(
            inductor_benchmark, "_load", lambda code, _: candidate_run.Compiled(list, code)
        ),
        mock.patch.object(torch.cuda, "init"),
        events.capture() as records,
    ):
        lowered = fake_cuda.lower(
            function,
            *inputs,
            max_autotune_gemm=True,
            max_autotune_gemm_backends="ATEN,TRITON",
            **options,
        )
    return lowered, codes, records


class TestVariants:
    def test_a_program_is_compiled_by_inductor_and_leaves_no_trace(self) -> None:
        bench = inductor_benchmark.InductorBench("cpu")
        program = reference.program(LINEAR)
        inputs = program.make_inputs("cpu")
        started: list[int] = []
        before = json.dumps(counters)
        outer = torch._guards.TracingContext(FakeTensorMode())
        with (
            inductor_config.patch(compile_threads=1, max_autotune=True),
            torch.autocast("cpu", torch.bfloat16),
            torch._guards.tracing(outer),
            events.capture() as records,
            bench.prepared(),
        ):
            (compiled,) = bench.compile([(LINEAR, None)], started.append)
            assert isinstance(compiled, candidate_run.Compiled)
            (out,) = compiled.call(*inputs)
        assert out.dtype == torch.float32
        assert accuracy.Verifier(program, inputs).check(lambda: [out]) is None
        assert started == [0, 0]
        assert records == []
        assert json.dumps(counters) == before

    def test_what_cannot_be_compiled_is_returned_as_its_error(self) -> None:
        bench = inductor_benchmark.InductorBench("cpu")
        with (
            inductor_config.patch(compile_threads=1),
            mock.patch.object(inductor_benchmark, "_generate", side_effect=ValueError("no")),
        ):
            (error,) = bench.compile([(LINEAR, None)], lambda index: None)
        assert isinstance(error, ValueError)

    def test_what_takes_long_to_compile_is_generated_first(self) -> None:
        light, heavy = candidate(1), dataclasses.replace(candidate(1), block_k=4096)
        bench = inductor_benchmark.InductorBench("cpu")
        begun: list[int] = []
        with (
            inductor_config.patch(compile_threads=1),
            mock.patch.object(inductor_benchmark, "_trace"),
            mock.patch.object(inductor_benchmark, "_generate", side_effect=ValueError("no")),
        ):
            bench.compile([(LINEAR, None), (LINEAR, light), (LINEAR, heavy)], begun.append)
        assert begun[:3] == [2, 1, 0]

    def test_a_crashed_compile_worker_is_retried_per_kernel(self) -> None:
        from concurrent.futures.process import BrokenProcessPool

        loaded = []

        def load(code: str, attributes: Any) -> Any:
            loaded.append(code)
            try:
                raise BrokenProcessPool
            except BrokenProcessPool as error:
                crash = RuntimeError("a compilation subprocess exited")
                crash.__cause__ = error
            return (
                crash
                if code == "bad" or loaded.count(code) < 2
                else candidate_run.Compiled(list, code)
            )

        bench = inductor_benchmark.InductorBench("cpu")
        codes = [("good", {}), ("bad", {}), ("better", {})]
        with (
            inductor_config.patch(compile_threads=1),
            mock.patch.object(inductor_benchmark, "_generate", side_effect=codes),
            mock.patch.object(inductor_benchmark, "_load", load),
        ):
            found = bench.compile([(LINEAR, None)] * 3, lambda index: None)
        assert [isinstance(item, candidate_run.Compiled) for item in found] == [True, False, True]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    @pytest.mark.parametrize("problem", FUSED, ids=problem_words)
    def test_what_is_fused_is_met_by_the_pass_as_the_same_problem(
        self, problem: GemmProblem
    ) -> None:
        pytest.importorskip("triton")
        met: list[GemmProblem] = []
        compile_fx.install_hooks(activate.requested)
        with (
            fake_cuda.device(),
            scope.compile_scope(config.snapshot()),
            decide.forced(met.append),  # type: ignore[func-returns-value]
            inductor_benchmark._untraced(),
        ):
            inductor_benchmark._generate(inductor_benchmark._trace(problem, "cuda:0"))
        assert problem in met

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    def test_a_decision_is_for_its_own_problem(self) -> None:
        pytest.importorskip("triton")
        problem = contiguous("mm", 256, 512, 256, epilogue=Epilogue((), 2))
        tile = GemmConfig("cp_async", 64, 64, 64, 3, 4)
        parts = dataclasses.replace(problem, parts=(256, 256), epilogue=GATED)
        bench = inductor_benchmark.InductorBench("cuda:0")
        compile_fx.install_hooks(activate.requested)
        with (
            fake_cuda.device(),
            scope.compile_scope(config.snapshot()),
            mock.patch.object(
                inductor_benchmark, "_load", lambda code, _: candidate_run.Compiled(list, code)
            ),
            mock.patch.object(
                inductor_benchmark, "_trace", wraps=inductor_benchmark._trace
            ) as trace,
            mock.patch.object(bench, "device", "cuda:0"),
            inductor_config.patch(compile_threads=1),
            inductor_benchmark._untraced(),
        ):
            wanted = [(problem, None), (problem, tile), (parts, None)]
            found = bench.compile(wanted, lambda index: None)
        assert [item.args[0] for item in trace.call_args_list] == [problem, parts]
        codes = [
            item.key if isinstance(item, candidate_run.Compiled) else repr(item) for item in found
        ]
        assert "extern_kernels.mm" in codes[0]
        assert "extern_kernels.mm" not in codes[1]
        assert "tl.dot" in codes[1]
        assert codes[2].count("extern_kernels.mm(") == 2

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    def test_a_compile_benchmarks_and_uses_the_fastest(self) -> None:
        lowered, codes, records = compiled_and_tuned(
            lambda x, w: torch.relu(x @ w.t()), matrix(64, 512), matrix(256, 512)
        )
        kinds = [type(record) for record in records]
        assert kinds.count(TuningRecord) == kinds.count(ProductRecord) == 1
        assert kinds.count(MemoryPlanRecord) == 1
        assert len(set(codes)) == len(codes) == 7
        taken = [constants(code) for code in codes]
        assert constants(lowered.code) == taken[2] != taken[1]
        assert lowered.choices == ()

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")
    @pytest.mark.parametrize("graphs", [False, True], ids=["", "graphs"])
    @pytest.mark.parametrize("name", WRITTEN)
    def test_the_winner_has_been_compiled_with_the_variants(self, name: str, graphs: bool) -> None:
        function, *inputs = WRITTEN[name]
        lowered, codes, _ = compiled_and_tuned(function, *inputs, triton__cudagraphs=graphs)
        assert ("gdc_wait" in lowered.code) == graphs
        assert compiled_text(lowered.code) == compiled_text(codes[2])
