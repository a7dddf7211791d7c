"""The kernels of a graph's matmuls, in the code that is generated for a GPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config

from inductor_ext import config, events
from inductor_ext.autotune import decide
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import scope
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulRecord
from inductor_ext.templates.triton.config import GemmConfig

pytest.importorskip("triton")

from benchmarks.gemm.models import int8_linear
from test.support import fake_cuda, generated_code
from test.support.matmul_lowering import TILE, layer, layer_inputs, lower, matrix, norm

F = torch.nn.functional
aten = torch.ops.aten


def test_with_rounding_ops_records_say_what_is_not_fused() -> None:
    with (
        inductor_config.patch(emulate_precision_casts=True),
        events.capture(MatmulRecord) as records,
    ):
        _, problems = lower(lambda _: None, layer, *layer_inputs(16))
    assert problems
    assert all(item.prologue is None and not item.epilogue.gated for item in problems)
    assert records
    for record in records:
        assert sum("emulate_precision_casts" in text for text in record.declined) == 1


def test_a_layer_has_one_kernel_per_group_of_matmuls() -> None:
    lowered, problems = lower(lambda _: TILE, layer, *layer_inputs(8))
    # Q, K, V with their norm; the imitation of attention; its output with the residual; the gate
    # with its norm; and the last matmul with the residual.
    kernels = lowered.kernels()
    assert [("dot" in source) for source in kernels.values()] == [True, False, True, True, True]
    assert "extern_kernels." not in lowered.code
    fused = {(item.parts, item.prologue is not None, item.epilogue.gated) for item in problems}
    assert ((256, 128, 128), True, False) in fused
    assert ((512, 512), True, True) in fused


@pytest.mark.parametrize("rows", [8, 128])
def test_likely_remainders_are_tuned_with_the_fusions(rows: int) -> None:
    """Matmuls outside fusions, and for many rows Q, K and V separately."""
    problems: list[list[GemmProblem]] = []

    def decided(results: Sequence[GemmProblem], *_: Any, **__: Any) -> dict[GemmProblem, Decision]:
        problems.append(list(results))
        return {item: Decision(TILE, "forced") for item in results}

    with mock.patch.object(decide, "decide", decided):
        lower(lambda _: None, layer, *layer_inputs(rows))
    (together,) = problems
    assert sum(len(item.parts) > 1 for item in together) == 4
    plain = {(item.operation, item.n, item.k) for item in together if not item.parts}
    residuals = {("addmm", 256, 256), ("addmm", 256, 512)}
    assert plain == residuals | ({("mm", 256, 256), ("mm", 128, 256)} if rows > 64 else set())


def test_the_fusion_with_the_largest_gain_is_first() -> None:
    def only_gates(problem: GemmProblem) -> GemmConfig | None:
        return TILE if problem.epilogue.gated and problem.prologue is None else None

    lowered, _ = lower(only_gates, layer, *layer_inputs(8))
    (kernel,) = (source for source in lowered.kernels().values() if "tl.dot" in source)
    assert "tl.sigmoid" in kernel
    assert "rsqrt" not in kernel
    assert len(re.findall(r"extern_kernels\.(mm|addmm|bmm)\(", lowered.code)) == 5


def gate_of_int8(x: Any, w1: Any, s1: Any, w2: Any, s2: Any) -> Any:
    gate, up = int8_linear(x, w1, s1), int8_linear(x, w2, s2)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    ("rows", "microseconds", "parts_asked", "one_kernel"),
    [
        (8, 20.0, False, True),
        # It is far from the roofline.
        (8, 60.0, True, False),
        # Accumulators of many rows take time as well.
        (65, 20.0, True, True),
    ],
    ids=["near", "far", "many rows"],
)
def test_parts_of_fusions_near_the_roofline_are_not_tuned(
    rows: int, microseconds: float, parts_asked: bool, one_kernel: bool
) -> None:
    """Inductor takes 100 us, 50 for each part; kernels of the parts would take 5."""
    tile = GemmConfig("mixed", 16, 32, 64, 2, 2)
    problems: list[GemmProblem] = []

    def decided(problem: GemmProblem) -> Decision:
        problems.append(problem)
        if problem.operation != "mixed":
            return Decision(None, "measured", (Timing(None, 50.0),))
        extension, inductor = (microseconds, 100.0) if problem.epilogue.gated else (5.0, 50.0)
        return Decision(tile, "measured", (Timing(None, inductor), Timing(tile, extension)))

    weight = ((128, 256), torch.int8)
    with mock.patch.object(
        decide, "decide", lambda results, *_, **__: {item: decided(item) for item in results}
    ):
        lowered, _ = lower(
            lambda _: None, gate_of_int8, matrix(rows, 256), *(2 * [weight, matrix(128)])
        )
    parts = [item for item in problems if item.operation == "mixed" and not item.epilogue.gated]
    assert bool(parts) == parts_asked
    matmuls = [source.count("tl.dot(") for source in lowered.kernels().values()]
    assert ([matmul for matmul in matmuls if matmul] == [2]) == one_kernel
    assert "extern_kernels." not in lowered.code


@pytest.mark.parametrize("computed", [False, True])
def test_a_norm_saves_less_if_it_computes_a_residual(computed: bool) -> None:
    """3 % of 96 us and half a launch are more than the 4 us that the norm saves."""

    def decided(problem: GemmProblem) -> Decision:
        if problem.prologue is None:
            return Decision(None, "measured", (Timing(None, 50.0),))
        return Decision(TILE, "measured", (Timing(None, 100.0), Timing(TILE, 96.0)))

    def function(x: Any, r: Any, g: Any, w: Any) -> Any:
        return norm(x + r if computed else x, g) @ w.t()

    rows = matrix(8, 256)
    with mock.patch.object(
        decide, "decide", lambda results, *_, **__: {item: decided(item) for item in results}
    ):
        lowered, _ = lower(lambda _: None, function, rows, rows, matrix(256), matrix(256, 256))
    kernels = list(lowered.kernels().values())
    assert ("tl.dot" in kernels[-1]) == (not computed)
    assert ("extern_kernels.mm(" in lowered.code) == computed


def test_a_prologue_of_a_norm_saves_no_kernel() -> None:
    def function(x: Any, r: Any, w: Any, b: Any, g: Any, v: Any) -> Any:
        h = F.linear(x, w, b) + r
        return F.linear(norm(h, g), v, b) + h

    rows, square, columns = matrix(8, 256), matrix(256, 256), matrix(256)
    _, problems = lower(lambda _: None, function, rows, rows, square, columns, columns, square)
    plain = {item for item in problems if item.prologue is None}
    read = {tuple(inp.broadcast for inp in item.epilogue.inputs) for item in plain}
    assert read == {("row",), ("row", "matrix")}


class TestUnknownRows:
    @pytest.fixture(scope="class")
    def dispatched(self) -> tuple[fake_cuda.Lowered, list[GemmProblem]]:
        def rule(problem: GemmProblem) -> GemmConfig | None:
            if problem.m > 256:
                return None
            return dataclasses.replace(TILE, block_m=16 if problem.m <= 16 else 64)

        return lower(rule, layer, *layer_inputs("rows"))

    def test_every_size_is_looked_up(
        self, dispatched: tuple[fake_cuda.Lowered, list[GemmProblem]]
    ) -> None:
        _, problems = dispatched
        # Dynamo guarantees that a dynamic size is neither 0 nor 1.
        sizes = {2, 16, 64, 256, 2048}
        assert {item.m for item in problems if item.epilogue.gated} == sizes
        assert {item.m for item in problems if item.operation == "addmm"} == sizes

    def test_ranges_of_one_decision_share_a_branch(
        self, dispatched: tuple[fake_cuda.Lowered, list[GemmProblem]]
    ) -> None:
        lowered, _ = dispatched
        # Four matmuls of the layer, with three kernels each.
        assert generated_code.dispatch_limits(lowered.code) == [16] * 4 + [256] * 4

    def test_each_branch_has_its_kernel(
        self, dispatched: tuple[fake_cuda.Lowered, list[GemmProblem]]
    ) -> None:
        lowered, _ = dispatched
        sources = [source for source in lowered.kernels().values() if "tl.dot" in source]
        blocks = [re.findall(r"BLOCK_M : tl.constexpr = (\d+)", source)[0] for source in sources]
        assert sorted(blocks) == ["16"] * 4 + ["64"] * 4
        assert "extern_kernels.mm(" in lowered.code

    def test_one_decision_for_all_sizes_needs_no_branch(self) -> None:
        lowered, _ = lower(
            lambda _: TILE, lambda x, w: x @ w.t(), matrix("rows", 64), matrix(64, 64)
        )
        assert " <= " not in lowered.code.partition("def call(")[2].partition("\ndef ")[0]
        assert len(lowered.kernels()) == 1

    def test_one_kernel_where_cuda_graphs_are_recorded(self) -> None:
        lowered, problems = lower(
            lambda problem: TILE if problem.m <= 64 else None,
            lambda x, w: x @ w.t(),
            matrix("rows", 64),
            matrix(64, 64),
            triton__cudagraphs=True,
        )
        assert {item.m for item in problems} == {64}
        assert len(lowered.kernels()) == 1

    @pytest.mark.parametrize(
        ("function", "inputs"),
        [
            (torch.bmm, [matrix(8, "rows", 512), matrix(8, 512, 256)]),
            (lambda x, w: x.t() @ w, [matrix(512, "rows"), matrix(512, 256)]),
            # torch 2.11 specializes the number of rows for `@`.
            (
                lambda x, w: torch.bmm(x.transpose(1, 2), w),
                [matrix(8, 512, "rows"), matrix(8, 512, 256)],
            ),
        ],
        ids=["batches", "columns", "batches of columns"],
    )
    def test_strides_follow_the_requested_size(self, function: Any, inputs: Any) -> None:
        _, problems = lower(lambda _: None, function, *inputs)
        results = {item.m: item for item in problems}
        assert sorted(results) == [2, 16, 64, 256, 2048]
        for rows, problem in results.items():
            known = [
                (tuple(rows if size == "rows" else size for size in shape), dtype)
                for shape, dtype in inputs
            ]
            _, (static, *_) = lower(lambda _: None, function, *known)
            # Only the alignment differs, which must be valid for all sizes.
            a = dataclasses.replace(static.a, alignment=problem.a.alignment)
            assert problem == dataclasses.replace(static, a=a)

    def test_unbounded_sizes_have_a_fallback(self) -> None:
        # The number of rows is a difference.
        lowered, problems = lower(
            lambda problem: TILE if problem.m <= 64 else None,
            lambda x, y, w: aten.slice(torch.cat([x, x]), 0, y.shape[0], 2**63 - 1) @ w,
            *(matrix("more", 64), matrix("fewer", 1), matrix(64, 64)),
        )
        assert {item.m for item in problems} >= {64, 2048}
        assert "extern_kernels.mm(" in lowered.code
        assert any("tl.dot" in kernel for kernel in lowered.kernels().values())


@pytest.mark.parametrize("predict", [True, False])
def test_layers_without_tuning(predict: bool) -> None:
    """With few rows all matmuls get kernels that were not measured for these sizes."""
    settings = config.snapshot({"gemm_predict": predict, "tuning_cache": False})
    with scope.compile_scope(settings), events.capture(MatmulRecord) as records:
        lowered = fake_cuda.lower(layer, *layer_inputs(8))
    origins = {record.origin for record in records if record.chosen is not None}
    assert origins == ({"predicted"} if predict else set())
    assert ("extern_kernels.mm" in lowered.code) != predict


def test_dynamic_rows_need_a_measurement() -> None:
    settings = config.snapshot({"tuning_cache": False})
    with scope.compile_scope(settings), events.capture(MatmulRecord) as records:
        fake_cuda.lower(
            lambda x, w: x @ w.t(), (("m", 512), torch.bfloat16), ((512, 512), torch.bfloat16)
        )
    assert {record.chosen for record in records} == {None}
