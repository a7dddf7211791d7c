"""ATen matmuls lowered to the selected kernel, or to Inductor's choices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from inductor_ext import events
from inductor_ext.templates.records import MatmulRecord
from inductor_ext.templates.triton.config import GemmConfig

pytest.importorskip("triton")

from test.support import fake_cuda
from test.support.matmul_lowering import TILE, Given, lower, matrix

F = torch.nn.functional
aten = torch.ops.aten


def test_a_decision_becomes_a_kernel_with_its_epilogue() -> None:
    lowered, problems = lower(
        lambda _: TILE,
        lambda x, w, b: torch.relu(F.linear(x, w, b)),
        matrix(8, 64),
        matrix(64, 64),
        matrix(64),
    )
    (problem,) = set(problems)
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
        # The variant that copies the bias into the output is slower here.
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
    lowered, problems = lower(lambda _: None, function, *inputs, max_autotune=True)
    assert problems
    assert f"{operator}(" in lowered.code or f"{operator}.default(" in lowered.code
    # Nothing is benchmarked again, and Inductor's Triton candidates are not generated.
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
    matmul, total = lowered.kernels().values()
    assert "SPLIT_K : tl.constexpr = 2" in matmul
    assert "empty_strided_cuda((16, 64), (64, 1), torch.float32)" in lowered.code
    assert "atomic" not in matmul + total


@pytest.mark.skipif(
    not hasattr(inductor_config, "batch_invariant"), reason="torch 2.13 on has batch_invariant"
)
@pytest.mark.parametrize("m", [1, 32])
def test_batch_invariance_leaves_matmuls_to_inductor(m: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    inputs = matrix(m, 512), matrix(512, 64)
    with (
        inductor_config.patch(batch_invariant=True),
        events.capture(MatmulRecord) as records,
    ):
        lowered, problems = lower(lambda _: TILE, function, *inputs)
        inductor = fake_cuda.lower(function, *inputs)
    assert problems == []
    assert lowered.kernels() == inductor.kernels()
    assert "extern_kernels.mm(" in lowered.code
    (record,) = records
    assert record.chosen is None
    assert "batch_invariant" in record.reason


def test_splits_of_k_are_added_up_in_the_same_launch() -> None:
    split = dataclasses.replace(TILE, split_k=2, fused_split_k=True)
    lowered, _ = lower(
        lambda _: split,
        lambda x, w, b: torch.relu(F.linear(x, w, b)) @ w,
        matrix(8, 512),
        matrix(512, 512),
        matrix(512),
    )
    # Relu is in the first kernel.
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
    # Partial sums of 16 rows, of which the output has 8, in memory that is reused.
    (made, reused) = re.findall(r"(workspace_\d+) = (.*)", lowered.code)
    assert "empty_strided_cuda((16384, ), (1, )" in made[1]
    assert reused[1].startswith(made[0])


def test_groups_of_rows_are_one_kernel() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch._grouped_mm(a, b.transpose(-1, -2), offs=ends))

    lowered, problems = lower(
        lambda _: GemmConfig("grouped", 64, 64, 32, 4, 4, tma=True),
        function,
        matrix(512, 256),
        matrix(4, 384, 256),
        ((4,), torch.int32),
    )
    assert [(item.operation, item.batch, item.m) for item in set(problems)] == [("grouped", 4, 512)]
    (kernel,) = lowered.kernels().values()
    assert "OFFSETS" in kernel
    assert "maximum" in kernel


def groups(
    layouts: str, divided: str, tokens: int | str = 512
) -> tuple[Callable[..., torch.Tensor], list[Given]]:
    """A grouped matmul of 4 groups that divide `tokens`, and its inputs."""
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
    lowered, problems = lower(lambda _: config, function, *inputs)
    (problem,) = set(problems)
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


def test_operands_may_be_stored_in_another_layout() -> None:
    """Inductor stores a computed transposed value in rows, whatever the graph says."""

    def function(g: torch.Tensor, a: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm((g * 2).t(), a, offs=ends)

    config = GemmConfig("grouped", 64, 64, 32, 4, 4, tma=True)
    inputs = matrix(512, 384), matrix(512, 256), ((4,), torch.int32)
    lowered, problems = lower(lambda _: config, function, *inputs)
    assert {item.a.layout for item in problems} == {"column"}
    assert "empty_strided_cuda((384, 512), (512, 1)" in lowered.code
    (kernel,) = (text for name, text in lowered.kernels().items() if "tem" in name)
    assert re.search(r"shape=\[M, \w+\],\s+strides=\[512, 1\]", kernel), kernel
