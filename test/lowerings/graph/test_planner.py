"""Which kernels the products of a graph get, seen in the code that is generated for a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config

from inductor_ext import config, events, numerics
from inductor_ext.autotune import decide, tuner
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph import post_grad_pass
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import ProductRecord
from inductor_ext.templates.triton import template_kernel
from inductor_ext.templates.triton.config import GemmConfig

pytest.importorskip("triton")

from benchmarks.gemm.models import int8_linear
from test.support import fake_cuda, kernel_util

F = torch.nn.functional
aten = torch.ops.aten
HALF = torch.bfloat16
TILE = GemmConfig("splitk", 16, 32, 64, 2, 2)

Given = tuple[Sequence[Any], torch.dtype]


def lower(
    rule: Callable[[GemmProblem], GemmConfig | None],
    function: Callable[..., Any],
    *inputs: Given,
    **options: Any,
) -> tuple[fake_cuda.Lowered, list[GemmProblem]]:
    """What a function becomes where `rule` decides, and what it was asked about."""
    asked: list[GemmProblem] = []

    def remembered(problem: GemmProblem) -> GemmConfig | None:
        asked.append(problem)
        return rule(problem)

    settings = config.snapshot({})
    with scope.compile_scope(settings), decide.force_config(remembered):
        return fake_cuda.lower(function, *inputs, **options), asked


def matrix(*shape: Any) -> Given:
    return shape, HALF


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def layer(x: Any, g: Any, q: Any, k: Any, v: Any, o: Any, w1: Any, w2: Any, w3: Any) -> Any:
    """A transformer's layer, with a product of its parts in the place of attention."""
    h = norm(x, g)
    x = x + ((h @ q.t()) * torch.cat([h @ k.t(), h @ v.t()], -1)) @ o.t()
    h = norm(x, g)
    return x + (F.silu(h @ w1.t()) * (h @ w2.t())) @ w3.t()


def layer_inputs(rows: int | str) -> list[Given]:
    sizes = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    return [matrix(rows, 256), matrix(256), *(matrix(*size) for size in sizes)]


def test_a_decision_becomes_a_kernel_with_what_follows_fused() -> None:
    lowered, asked = lower(
        lambda _: TILE,
        lambda x, w, b: torch.relu(F.linear(x, w, b)),
        matrix(8, 64),
        matrix(64, 64),
        matrix(64),
    )
    (problem,) = set(asked)
    assert (problem.operation, problem.m, problem.n, problem.k) == ("addmm", 8, 64, 64)
    assert [inp.broadcast for inp in problem.epilogue.inputs] == ["row"]
    (kernel,) = lowered.kernels().values()
    assert "tl.dot" in kernel
    assert "maximum" in kernel
    assert "extern_kernels." not in lowered.code


def test_the_fallback_adds_a_bias_as_eager_mode_does() -> None:
    lowered, _ = lower(
        lambda _: None,
        F.linear,
        *(matrix(512, 256), matrix(768, 256), matrix(768)),
        max_autotune=True,
        # What would copy the bias into each row of the output is never the faster one.
        seconds=lambda choice: 1.0 if choice.name == "addmm" else 2.0,
    )
    assert lowered.choices == ()
    assert "extern_kernels.addmm(arg2_1, arg0_1, " in lowered.code


def scaled_groups(a: Any, b: Any, scale_a: Any, scale_b: Any, ends: Any) -> Any:
    return aten._scaled_grouped_mm.default(
        a, b, scale_a, scale_b, ends, None, None, torch.bfloat16, True
    )


@pytest.mark.parametrize(
    ("function", "inputs", "operator"),
    [
        (lambda x, w: torch.relu(x @ w.t()), (matrix(8, 64), matrix(64, 64)), "mm"),
        (
            lambda a, b, ends: torch.relu(aten._grouped_mm.default(a, b, ends)),
            (matrix(64, 64), matrix(4, 64, 96), ((4,), torch.int32)),
            "_grouped_mm",
        ),
        (
            scaled_groups,
            (
                ((64, 64), torch.float8_e4m3fn),
                torch.empty((4, 96, 64), dtype=torch.float8_e4m3fn, device="meta").mT,
                ((64,), torch.float32),
                ((4, 96), torch.float32),
                ((4,), torch.int32),
            ),
            "_scaled_grouped_mm",
        ),
    ],
    ids=["product", "groups", "groups in float8"],
)
def test_the_fallback_is_used_if_it_is_the_decision(
    function: Any, inputs: Any, operator: str
) -> None:
    lowered, asked = lower(lambda _: None, function, *inputs, max_autotune=True)
    assert asked
    assert f"{operator}(" in lowered.code or f"{operator}.default(" in lowered.code
    # Nothing is measured again, and none of stock's Triton candidates is made.
    assert all("triton" not in name for names in lowered.choices for name in names)
    assert "tl.dot" not in "".join(lowered.kernels().values())


def test_a_configuration_that_is_not_legal_is_not_used() -> None:
    wrong = dataclasses.replace(TILE, block_n=48)
    lowered, _ = lower(lambda _: wrong, lambda x, w: x @ w.t(), matrix(8, 64), matrix(64, 64))
    assert "extern_kernels.mm(" in lowered.code


def test_splits_of_k_are_added_up_by_a_kernel_without_atomics() -> None:
    split = dataclasses.replace(TILE, split_k=2)
    lowered, _ = lower(
        lambda _: split,
        lambda x, w, b: F.linear(x, w, b),
        matrix(8, 512),
        matrix(64, 512),
        matrix(64),
    )
    product, total = lowered.kernels().values()
    assert "SPLIT_K : tl.constexpr = 2" in product
    assert "empty_strided_cuda((16, 64), (64, 1), torch.float32)" in lowered.code
    assert "atomic" not in product + total


@pytest.mark.skipif(
    not hasattr(inductor_config, "batch_invariant"), reason="torch 2.13 on has batch_invariant"
)
@pytest.mark.parametrize("m", [1, 32])
def test_batch_invariance_leaves_matmuls_to_inductor(m: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    given = matrix(m, 512), matrix(512, 64)
    with (
        inductor_config.patch(batch_invariant=True),
        events.capture(ProductRecord) as records,
    ):
        lowered, asked = lower(lambda _: TILE, function, *given)
        stock = fake_cuda.lower(function, *given)
    assert asked == []
    assert lowered.kernels() == stock.kernels()
    assert "extern_kernels.mm(" in lowered.code
    (record,) = records
    assert record.chosen is None
    assert "batch_invariant" in record.reason


def test_where_ops_round_the_records_say_what_is_not_fused() -> None:
    with (
        inductor_config.patch(emulate_precision_casts=True),
        events.capture(ProductRecord) as records,
    ):
        _, asked = lower(lambda _: None, layer, *layer_inputs(16))
    assert asked
    assert all(item.prologue is None and not item.epilogue.gated for item in asked)
    assert records
    for record in records:
        assert sum("emulate_precision_casts" in text for text in record.declined) == 1


def test_flags_that_restrict_cublas_are_in_the_cache_key() -> None:
    settings = config.snapshot({})
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        plain = post_grad_pass.cache_key(settings)
        with numerics.with_matmul_flags("allow_fp16_accumulation"):
            assert post_grad_pass.cache_key(settings) != plain
        assert post_grad_pass.cache_key(settings) == plain


def test_splits_of_k_are_added_up_in_the_same_launch() -> None:
    split = dataclasses.replace(TILE, split_k=2, fused_split_k=True)
    lowered, _ = lower(
        lambda _: split,
        lambda x, w, b: torch.relu(F.linear(x, w, b)) @ w,
        matrix(8, 512),
        matrix(512, 512),
        matrix(512),
    )
    # Relu is in the first.
    first, second = lowered.kernels().values()
    last = first.partition("if before == SPLIT_K - 1:")[2]
    # torch 2.14 on has `tl.maximum(..., tl.PropagateNan.ALL)`.
    assert re.search(r"\b(triton_helpers|tl)\.maximum\(", last)
    for kernel in (first, second):
        assert kernel.count("tl.atomic_add") == 1
        assert kernel.index("if before == SPLIT_K - 1:") < kernel.index("tl.store(out_ptr")
    taken = re.findall(r"semaphores_\d+ = counters_0\.take\((\d+)\)", lowered.code)
    assert taken == ["16", "16"]
    assert "counters_0 = semaphores.counters(0)" in lowered.code
    # Sums of 16 rows, of which the output has 8, in memory that is used twice.
    sums = re.findall(r"workspace_\d+ = reinterpret_tensor\((.*)\)", lowered.code)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    assert "(16384, ), (1, )" in sums[0]


def test_a_layer_has_one_kernel_per_group_of_matmuls() -> None:
    lowered, asked = lower(lambda _: TILE, layer, *layer_inputs(8))
    # Q, K, V with their norm; what stands for attention; its output with the residual; the gate
    # with its norm; and the last product with the residual.
    kernels = lowered.kernels()
    assert [("dot" in source) for source in kernels.values()] == [True, False, True, True, True]
    assert "extern_kernels." not in lowered.code
    fused = {(item.parts, item.prologue is not None, item.epilogue.gated) for item in asked}
    assert ((256, 128, 128), True, False) in fused
    assert ((512, 512), True, True) in fused


@pytest.mark.parametrize("rows", [8, 128])
def test_what_is_likely_to_be_left_is_measured_with_the_fusions(rows: int) -> None:
    """What no fusion has, and of many rows Q, K and V by themselves."""
    asked: list[list[GemmProblem]] = []

    def decided(found: Sequence[GemmProblem], *_: Any) -> dict[GemmProblem, Decision]:
        asked.append(list(found))
        return {item: Decision(TILE, "forced") for item in found}

    with mock.patch.object(decide, "decide", decided):
        lower(lambda _: None, layer, *layer_inputs(rows))
    (together,) = asked
    assert sum(len(item.parts) > 1 for item in together) == 4
    plain = {(item.operation, item.n, item.k) for item in together if not item.parts}
    residuals = {("addmm", 256, 256), ("addmm", 256, 512)}
    assert plain == residuals | ({("mm", 256, 256), ("mm", 128, 256)} if rows > 64 else set())


def test_what_gains_most_is_taken_first() -> None:
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
        # It leaves much to save.
        (8, 60.0, True, False),
        # Sums of many rows take time as well.
        (65, 20.0, True, True),
    ],
    ids=["near", "far", "many rows"],
)
def test_parts_of_what_comes_near_the_roofline_are_not_measured(
    rows: int, microseconds: float, parts_asked: bool, one_kernel: bool
) -> None:
    """Of 100 us stock's path has 50 for each of the parts, whose kernels would take 5."""
    tile = GemmConfig("mixed", 16, 32, 64, 2, 2)
    asked: list[GemmProblem] = []

    def decided(problem: GemmProblem) -> Decision:
        asked.append(problem)
        if problem.operation != "mixed":
            return Decision(None, "measured", (Timing(None, 50.0),))
        ours, stock = (microseconds, 100.0) if problem.epilogue.gated else (5.0, 50.0)
        return Decision(tile, "measured", (Timing(None, stock), Timing(tile, ours)))

    weight = ((128, 256), torch.int8)
    with mock.patch.object(
        decide, "decide", lambda found, *_: {item: decided(item) for item in found}
    ):
        lowered, _ = lower(
            lambda _: None, gate_of_int8, matrix(rows, 256), *(2 * [weight, matrix(128)])
        )
    parts = [item for item in asked if item.operation == "mixed" and not item.epilogue.gated]
    assert bool(parts) == parts_asked
    products = [source.count("tl.dot(") for source in lowered.kernels().values()]
    assert ([product for product in products if product] == [2]) == one_kernel
    assert "extern_kernels." not in lowered.code


def test_kernels_that_are_known_need_their_backend_as_well(tmp_path: Path) -> None:
    decision = Decision(TILE, "measured", (Timing(None, 100.0), Timing(TILE, 50.0)))

    def ours(**options: Any) -> bool:
        with scope.compile_scope(config.snapshot({"tuning_cache_dir": str(tmp_path)})):
            lowered = fake_cuda.lower(torch.mm, matrix(8, 64), matrix(64, 64), **options)
        return any("tl.dot" in kernel for kernel in lowered.kernels().values())

    with mock.patch.object(tuner, "tune", lambda found, *_, **__: dict.fromkeys(found, decision)):
        assert ours(max_autotune=True)
    for tunes in (True, False):
        for backends, expected in (("ATEN, triton", True), ("aten", False), ("ATEN,CPP", False)):
            options = {"max_autotune": tunes, "max_autotune_gemm_backends": backends}
            assert ours(**options) == expected


@pytest.mark.parametrize("computed", [False, True])
def test_a_norm_saves_less_if_it_computes_a_residual(computed: bool) -> None:
    """3 % of 96 us and half a launch are more than the 4 us that it saves alone."""

    def decided(problem: GemmProblem) -> Decision:
        if problem.prologue is None:
            return Decision(None, "measured", (Timing(None, 50.0),))
        return Decision(TILE, "measured", (Timing(None, 100.0), Timing(TILE, 96.0)))

    def function(x: Any, r: Any, g: Any, w: Any) -> Any:
        return norm(x + r if computed else x, g) @ w.t()

    rows = matrix(8, 256)
    with mock.patch.object(
        decide, "decide", lambda found, *_: {item: decided(item) for item in found}
    ):
        lowered, _ = lower(lambda _: None, function, rows, rows, matrix(256), matrix(256, 256))
    kernels = list(lowered.kernels().values())
    assert ("tl.dot" in kernels[-1]) == (not computed)
    assert ("extern_kernels.mm(" in lowered.code) == computed


@pytest.mark.parametrize(
    ("options", "dependent"),
    [
        ({}, False),
        ({"triton__cudagraphs": True}, True),
        ({"triton__enable_pdl": True}, True),
        ({"use_static_cuda_launcher": False}, True),
    ],
    ids=["torch's launcher", "graphs", "asked for", "Triton's launcher"],
)
@pytest.mark.parametrize("measured", [False, True], ids=["", "measured"])
def test_dependent_launches_only_without_host_cost(
    options: dict[str, bool], dependent: bool, measured: bool
) -> None:
    tile = dataclasses.replace(TILE, pdl=measured)
    decision = Decision(tile, "measured", (Timing(None, 100.0), Timing(tile, 50.0)))
    decided = mock.patch.object(decide, "decide", lambda found, *_: dict.fromkeys(found, decision))
    with scope.compile_scope(config.snapshot({})), decided:
        lowered = fake_cuda.lower(
            lambda x, w: x @ w.t(), matrix(8, 64), matrix(64, 64), max_autotune=True, **options
        )
    (kernel,) = (kernel for kernel in lowered.kernels().values() if "tl.dot" in kernel)
    assert ("gdc_wait" in kernel) == dependent
    assert ("'launch_pdl': True" in lowered.code) == dependent


def test_cpp_launches_dependents() -> None:
    assert not decide.launches_dependents()
    with inductor_config.patch(cpp_wrapper=True):
        assert decide.launches_dependents()


def test_a_prologue_of_a_norm_saves_no_kernel() -> None:
    def function(x: Any, r: Any, w: Any, b: Any, g: Any, v: Any) -> Any:
        h = F.linear(x, w, b) + r
        return F.linear(norm(h, g), v, b) + h

    rows, square, columns = matrix(8, 256), matrix(256, 256), matrix(256)
    _, asked = lower(lambda _: None, function, rows, rows, square, columns, columns, square)
    plain = {item for item in asked if item.prologue is None}
    read = {tuple(given.broadcast for given in item.epilogue.inputs) for item in plain}
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
        _, asked = dispatched
        # Dynamo has promised that a size that it takes for unknown is neither 0 nor 1.
        sizes = {2, 16, 64, 256, 2048}
        assert {item.m for item in asked if item.epilogue.gated} == sizes
        assert {item.m for item in asked if item.operation == "addmm"} == sizes

    def test_ranges_of_one_decision_share_a_branch(
        self, dispatched: tuple[fake_cuda.Lowered, list[GemmProblem]]
    ) -> None:
        lowered, _ = dispatched
        # Four products of the layer, each with three kernels.
        assert kernel_util.dispatch_limits(lowered.code) == [16] * 4 + [256] * 4

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
        lowered, asked = lower(
            lambda problem: TILE if problem.m <= 64 else None,
            lambda x, w: x @ w.t(),
            matrix("rows", 64),
            matrix(64, 64),
            triton__cudagraphs=True,
        )
        assert {item.m for item in asked} == {64}
        assert len(lowered.kernels()) == 1

    @pytest.mark.parametrize(
        ("function", "inputs"),
        [
            (torch.bmm, [matrix(8, "rows", 512), matrix(8, 512, 256)]),
            (lambda x, w: x.t() @ w, [matrix(512, "rows"), matrix(512, 256)]),
            # torch 2.11 gives `@` here the number of rows that it sees.
            (
                lambda x, w: torch.bmm(x.transpose(1, 2), w),
                [matrix(8, 512, "rows"), matrix(8, 512, 256)],
            ),
        ],
        ids=["batches", "columns", "batches of columns"],
    )
    def test_strides_follow_the_requested_size(self, function: Any, inputs: Any) -> None:
        _, asked = lower(lambda _: None, function, *inputs)
        found = {item.m: item for item in asked}
        assert sorted(found) == [2, 16, 64, 256, 2048]
        for rows, problem in found.items():
            known = [
                (tuple(rows if size == "rows" else size for size in shape), dtype)
                for shape, dtype in inputs
            ]
            _, (static, *_) = lower(lambda _: None, function, *known)
            # Only alignment is not what it may happen to be.
            a = dataclasses.replace(static.a, alignment=problem.a.alignment)
            assert problem == dataclasses.replace(static, a=a)

    def test_sizes_of_which_no_bound_is_known(self) -> None:
        # How many rows are left is a difference.
        lowered, asked = lower(
            lambda problem: TILE if problem.m <= 64 else None,
            lambda x, y, w: aten.slice(torch.cat([x, x]), 0, y.shape[0], 2**63 - 1) @ w,
            *(matrix("more", 64), matrix("fewer", 1), matrix(64, 64)),
        )
        assert {item.m for item in asked} >= {64, 2048}
        assert "extern_kernels.mm(" in lowered.code
        assert any("tl.dot" in kernel for kernel in lowered.kernels().values())


def test_groups_of_rows_are_one_kernel() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch._grouped_mm(a, b.transpose(-1, -2), offs=ends))

    lowered, asked = lower(
        lambda _: GemmConfig("grouped", 64, 64, 32, 4, 4, tma=True),
        function,
        matrix(512, 256),
        matrix(4, 384, 256),
        ((4,), torch.int32),
    )
    assert [(item.operation, item.batch, item.m) for item in set(asked)] == [("grouped", 4, 512)]
    (kernel,) = lowered.kernels().values()
    assert "OFFSETS" in kernel
    assert "maximum" in kernel


def groups(
    layouts: str, divided: str, tokens: int | str = 512
) -> tuple[Callable[..., torch.Tensor], list[Given]]:
    """A grouped product of 4 groups that divide `tokens`, and its inputs besides."""
    transposed = [layout == "c" for layout in layouts]
    a, b = {"n": ([4, 96, 64], [64, tokens]), "k": ([96, tokens], [tokens, 64])}[divided]
    shapes = [
        [*size[:-2], size[-1], size[-2]] if flip else size
        for size, flip in zip((a, b), transposed, strict=True)
    ]

    def function(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        a, b = (
            item.transpose(-1, -2) if flip else item
            for item, flip in zip((a, b), transposed, strict=True)
        )
        return torch._grouped_mm(a, b, offs=ends)

    return function, [*(matrix(*shape) for shape in shapes), ((4,), torch.int32)]


@pytest.mark.parametrize(
    ("layouts", "divided", "tokens"),
    [("rr", "n", 512), ("rc", "n", "tokens"), ("cr", "k", "tokens"), ("rc", "k", 512)],
)
def test_a_backward_of_groups_is_one_kernel(layouts: str, divided: str, tokens: int | str) -> None:
    function, inputs = groups(layouts, divided, tokens)
    config = GemmConfig("grouped", 64, 16, 16, 2, 4, tma=True)
    lowered, asked = lower(lambda _: config, function, *inputs)
    (problem,) = set(asked)
    length = 64 if tokens == "tokens" else 512
    assert (problem.batch, problem.divided) == (4, divided)
    assert (problem.m, problem.n, problem.k) == (
        (96, length, 64) if divided == "n" else (96, 64, length)
    )
    assert problem.a.layout[0] + problem.b.layout[0] == layouts
    (kernel,) = lowered.kernels().values()
    assert f"DIVIDED : tl.constexpr = '{divided}'" in kernel
    assert (" K : tl.constexpr" in kernel) == (divided == "n" or tokens == 512)
    size = "(4, 96, 64), (6144, 64, 1)" if divided == "k" else "(96, "
    assert f"empty_strided_cuda({size}" in lowered.code


def test_an_operand_that_is_stored_otherwise_than_planned() -> None:
    """Inductor stores a transposed value that it computes row by row, whatever the graph says."""

    def function(g: torch.Tensor, a: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm((g * 2).t(), a, offs=ends)

    config = GemmConfig("grouped", 64, 64, 32, 4, 4, tma=True)
    inputs = matrix(512, 384), matrix(512, 256), ((4,), torch.int32)
    lowered, asked = lower(lambda _: config, function, *inputs)
    assert {item.a.layout for item in asked} == {"column"}
    assert "empty_strided_cuda((384, 512), (512, 1)" in lowered.code
    (kernel,) = (text for name, text in lowered.kernels().items() if "tem" in name)
    assert re.search(r"shape=\[M, \w+\],\s+strides=\[512, 1\]", kernel), kernel


@pytest.mark.parametrize(
    ("follows", "stores"),
    [
        (lambda y: (torch.relu(y), torch.relu(y) <= 0), 0),
        (lambda y: (torch.relu(y).sum(), y <= 0), 0),
        (lambda y: torch.where(y > 1, y, -y), 1),
        (torch.relu, 1),
    ],
    ids=["kept", "alone", "read within", "none"],
)
def test_bools_are_not_stored_by_tma(follows: Callable[..., Any], stores: int) -> None:
    """Triton has no descriptors of them; a ReLU keeps some for its backward."""
    config = GemmConfig("persistent_tma", 128, 64, 64, 3, 4, tma=True, tma_store=True)
    lowered, _ = lower(
        lambda _: config, lambda x, w: follows(x @ w), matrix(256, 256), matrix(256, 64)
    )
    assert kernel_util.compiled_module(lowered, config).spills == 0
    assert sum(text.count("descriptor(out_ptr") for text in lowered.kernels().values()) == stores


STORED_BY_TMA = GemmConfig("persistent_tma", 128, 64, 64, 3, 4, tma=True, tma_store=True)


def stores_by_tma(
    tmp_path: Path,
    *inputs: Given,
    chosen: GemmConfig = STORED_BY_TMA,
    rule: bool = False,
    function: Callable[..., Any] = torch.mm,
) -> tuple[int, str]:
    """How many tiles are stored by TMA where that was chosen, and the code."""
    decision = Decision(chosen, "measured", (Timing(None, 9.0), Timing(chosen, 5.0)))
    with (
        scope.compile_scope(config.snapshot({"tuning_cache_dir": str(tmp_path)})),
        decide.force_config(lambda _: chosen) if rule else contextlib.nullcontext(),
        mock.patch.object(tuner, "tune", lambda found, *_, **__: dict.fromkeys(found, decision)),
    ):
        lowered = fake_cuda.lower(function, *inputs, max_autotune=True)
    stores = sum(text.count("descriptor(out_ptr") for text in lowered.kernels().values())
    return stores, lowered.code


class TestStoreByTma:
    """`template_kernel` writes it in the place of a store that Inductor has generated."""

    WARNING = "unexpected code"

    @pytest.mark.parametrize(
        ("function", "inputs", "template"),
        [
            (torch.mm, [matrix(256, 256), matrix(256, 64)], "persistent_tma"),
            (torch.bmm, [matrix(3, 256, 256), matrix(3, 256, 64)], "bmm_persistent"),
            (
                lambda x, w: torch.relu(x @ w) * 2,
                [matrix(256, 256), matrix(256, 64)],
                "persistent_tma",
            ),
        ],
        ids=["mm", "bmm", "epilogue"],
    )
    def test_the_installed_torch_has_the_store_to_replace(
        self, function: Any, inputs: list[Given], template: str, tmp_path: Path, caplog: Any
    ) -> None:
        chosen = dataclasses.replace(STORED_BY_TMA, template=template)
        stores, _ = stores_by_tma(tmp_path, *inputs, chosen=chosen, function=function)
        assert stores == 1
        assert self.WARNING not in caplog.text

    def test_another_store_is_kept_and_reported(
        self, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(events, "_warned", set())
        monkeypatch.setattr(template_kernel, "_WHOLE_TILE", re.compile("another text"))
        stores, code = stores_by_tma(tmp_path, matrix(256, 256), matrix(256, 64))
        assert (stores, code.count("tl.dot(")) == (0, 1)
        assert caplog.text.count(self.WARNING) == 1

    def test_it_is_not_measured_as_a_store_by_tma(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(template_kernel, "_WHOLE_TILE", re.compile("another text"))
        _, code = stores_by_tma(tmp_path, matrix(256, 256), matrix(256, 64), rule=True)
        assert "extern_kernels.mm(" in code
        assert "tl.dot(" not in code

    def test_rows_of_unknown_length_are_stored_otherwise(self, tmp_path: Path, caplog: Any) -> None:
        stores, code = stores_by_tma(
            tmp_path, matrix(256, 256), matrix("n", 256), function=F.linear
        )
        assert (stores, code.count("tl.dot(")) == (0, 1)
        assert self.WARNING not in caplog.text
