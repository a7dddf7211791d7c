"""Matmuls with dynamic N, K or batch: one kernel for all sizes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda, generated_code, kernel_compiler, kernel_interpreter
from test.support.matmul_lowering import lower

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

Tensor = torch.Tensor
HALF = torch.float16

TILE = GemmConfig("splitk", 16, 32, 32, 2, 2)
GEMV = GemmConfig("gemv", 4, 4, 64, 1, 1)
TMA = GemmConfig("persistent_tma", 64, 32, 32, 2, 4, tma=True, flatten=True)
SPLIT_TMA = GemmConfig(
    "splitk", 16, 64, 32, 2, 4, swap_ab=True, tma=True, split_k=2, fused_split_k=True
)
BATCH = GemmConfig("bmm_persistent", 64, 32, 32, 2, 4, tma=True)

Shape = tuple[int | str, ...]


def joined(x: Tensor, w: Tensor) -> Tensor:
    """K is always a multiple of 8."""
    return x.flatten(1) @ w.flatten(1).t()


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(q, k.transpose(1, 2))


CASES: dict[str, tuple[GemmConfig, Callable[..., Tensor], list[Shape]]] = {
    "bmm": (
        dataclasses.replace(TILE, template="cp_async"),
        torch.bmm,
        [("b", "m", "k"), ("b", "k", "n")],
    ),
    "splits": (dataclasses.replace(TILE, split_k=2), torch.mm, [("m", "k"), ("k", "n")]),
    "gemv": (GEMV, lambda x, w: x @ w.t(), [(3, "k"), ("n", "k")]),
    "tma": (TMA, joined, [("m", "k", 8), ("n", "k", 8)]),
    "tma in splits of one launch": (SPLIT_TMA, joined, [(5, "k", 8), ("n", "k", 8)]),
    "scores": (BATCH, scores, [("b", 37, 32), ("b", "n", 32)]),
}
"""A configuration, a function, and the shapes of its inputs."""

SIZES = {
    "small": {"m": 3, "n": 5, "k": 2, "b": 2},
    "odd": {"m": 19, "n": 67, "k": 9, "b": 1},
}
"""Sizes at run time; the functions are compiled with 64."""


def inputs(shapes: list[Shape], sizes: dict[str, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = ([sizes.get(str(size), size) for size in shape] for shape in shapes)
    return [(torch.randn(shape, generator=generator) / 4).half() for shape in numbers]


@pytest.fixture(scope="module")
def modules() -> dict[str, fake_cuda.Lowered]:
    return {
        name: lower(
            lambda _, config=config: config, function, *((shape, HALF) for shape in shapes)
        )[0]
        for name, (config, function, shapes) in CASES.items()
    }


@pytest.fixture(scope="module")
def results(modules: dict[str, fake_cuda.Lowered]) -> dict[str, Tensor]:
    return kernel_interpreter.interpret_modules(
        {
            f"{name}, {which}": (modules[name].code, inputs(shapes, sizes))
            for name, (_, _, shapes) in CASES.items()
            for which, sizes in SIZES.items()
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_handles_all_sizes(name: str, modules: dict[str, fake_cuda.Lowered]) -> None:
    (config, _, _), code = CASES[name], modules[name].code
    first, *rest = modules[name].kernels().values()
    assert ("make_tensor_descriptor" in first) == config.tma
    assert len(rest) == (config.split_k > 1 and not config.fused_split_k)
    assert "extern_kernels." not in code
    assert "EVEN_N : tl.constexpr = True" not in first


@pytest.mark.parametrize("which", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_unseen_sizes_equal_float64(name: str, which: str, results: dict[str, Tensor]) -> None:
    _, function, shapes = CASES[name]
    expected = function(*(value.double() for value in inputs(shapes, SIZES[which])))
    result = results[f"{name}, {which}"]
    assert result.shape == expected.shape
    assert (result.double() - expected).abs().max() < 5e-3 * expected.abs().max()


def test_sizes_of_one_symbol_are_decided_together() -> None:
    """The matmuls of attention, for all M buckets."""

    def rule(problem: GemmProblem) -> GemmConfig | None:
        return None if problem.m <= 64 else dataclasses.replace(TILE, template="cp_async")

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(scores(q, k), -1), v)

    lowered, problems = lower(rule, attention, *((("b", "s", 32), HALF) for _ in range(3)))
    sizes = (2, 16, 64, 256, 2048)
    assert {(item.m, item.n, item.k) for item in problems} == {
        *((size, size, 32) for size in sizes),
        *((size, 32, size) for size in sizes),
    }
    # Rows of 32 elements are aligned for TMA, those of s elements are not.
    assert all((item.tma_obstacle is None) == (item.k == 32) for item in problems if item.m != 32)
    assert generated_code.dispatch_limits(lowered.code) == [64, 64]
    assert sum("tl.dot" in source for source in lowered.kernels().values()) == 2
    assert lowered.code.count("extern_kernels.bmm(") == 2


def test_problems_of_a_matmul_do_not_change_when_its_epilogue_does() -> None:
    """The first matmul of a chain moves into branches together with the operations that would be
    the epilogue of the second. M and K are the same symbol, as in the gradient of `x @ x.mT`.
    """

    def rule(problem: GemmProblem) -> GemmConfig | None:
        return None if problem.m <= 64 else TILE

    def function(x: Tensor, w: Tensor, z: Tensor) -> Tensor:
        return (z - x.t() @ w - x @ w) * 2

    inputs = ((("m", "m"), HALF), (("m", 65), HALF), (("m", 65), HALF))
    lowered, problems = lower(rule, function, *inputs)
    assert generated_code.dispatch_limits(lowered.code) == [64, 64]
    assert {problem.m for problem in problems} == {2, 16, 64, 256, 2048}


def test_branches_use_sizes_that_are_equal() -> None:
    """The K of the operands are two symbols, which the matmul unifies."""

    def rule(problem: GemmProblem) -> GemmConfig | None:
        return None if problem.m <= 64 else TILE

    code = lower(rule, joined, (("m", "k", 8), HALF), (("n", "k2", 8), HALF))[0].code
    (k,) = set(re.findall(r"reinterpret_tensor\(arg0_1, \(s\d+, 8\*(s\d+)\)", code))
    assert re.findall(r"inductor_ext_rows_\d_args = .*, (s\d+)]", code) == [k, k]


def test_flattened_loops_over_dynamic_k_use_wgmma() -> None:
    config = GemmConfig("persistent_tma", 128, 64, 64, 4, 8, tma=True, flatten=True)
    lowered, _ = lower(
        lambda _: config, joined, (("m", "k", 8), torch.bfloat16), (("n", "k", 8), torch.bfloat16)
    )
    result = kernel_compiler.compiled_module(lowered, config)
    assert result.spills == 0
    assert result.ptx.count("wgmma.mma_async") >= 4
    assert result.ptx.count("cp.async.bulk.tensor") >= 6


def test_branches_read_the_layout_they_expect() -> None:
    """A concatenation whose buffer would contain the matmul's input."""

    def rule(problem: GemmProblem) -> GemmConfig:
        return dataclasses.replace(TILE, block_m=16 if problem.m <= 64 else 32)

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.sin(x)
        return torch.cat([y, y @ w], -1)

    lowered, _ = lower(rule, function, (("m", 64), HALF), ((64, 32), HALF))
    assert generated_code.dispatch_limits(lowered.code) == [64]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).half() / 8 for shape in ((3, 64), (64, 32))]
    result = kernel_interpreter.interpret_modules({"module": (lowered.code, values)})["module"]
    expected = function(*(value.double() for value in values))
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_branches_use_scalars_read_at_run_time(dtype: torch.dtype) -> None:
    """An operand is computed from a scalar, and another scalar is added."""

    def rule(problem: GemmProblem) -> GemmConfig:
        return dataclasses.replace(TILE, block_m=16 if problem.m <= 64 else 32)

    def function(x: Tensor, w: Tensor, n: Tensor, k: Tensor) -> Tensor:
        return (x @ w) * (n.item() * 2 + 1) + k.item()

    inputs = (("m", 64), HALF), ((64, 32), HALF), ((), dtype), ((), dtype)
    code = lower(rule, function, *inputs)[0].code
    assert generated_code.dispatch_limits(code) == [64]
    branches = re.findall(r"^def inductor_ext_rows_\d(?:.|\n)*?\n    return", code, re.M)
    assert len(branches) == 2
    for branch in branches:
        read = set(re.findall(r"\b(?:u|zuf)\d+\b", branch))
        assert len(read) == 2
        assert all(re.search(rf"^    {item} = ", branch, re.M) for item in read)
