"""Operands that are copied to an aligned layout for wide loads and TMA: when, and the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.hooks import scope
from inductor_ext.templates.format import config_words
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import Operand
from inductor_ext.templates.triton import cost_model, ranking
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal, why_not
from inductor_ext.templates.triton.search_space import candidates
from test.support import fake_cuda, kernel_interpreter
from test.support.gemm_strategies import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

H200, A100 = device("NVIDIA H200"), device("NVIDIA A100-SXM4-80GB")
HALF = torch.float16

TILE = GemmConfig("cp_async", 16, 16, 16, 2, 4, align_operands="copy")
TMA = GemmConfig("persistent_tma", 64, 16, 16, 2, 4, tma=True, align_operands="copy")
SPLIT = GemmConfig("splitk", 16, 16, 16, 2, 4, split_k=2, align_operands="copy")
BATCHED = GemmConfig("bmm_persistent", 64, 16, 16, 2, 4, tma=True, align_operands="copy")


@pytest.mark.parametrize(
    ("shape", "strides", "batch", "expected"),
    [
        ((33, 37), (37, 1), 1, (40, 1)),
        ((33, 37), (1, 33), 1, (1, 40)),
        ((33, 37), (74, 2), 1, (40, 1)),
        # One element after the first of the storage.
        ((33, 40), (40, 1), 1, (40, 1)),
        ((33, 37), (37, 1), 3, (40, 1)),
    ],
)
def test_rows_or_columns_begin_at_multiples_of_16_bytes(
    shape: tuple[int, int], strides: tuple[int, int], batch: int, expected: tuple[int, int]
) -> None:
    lain = Operand.of(
        "float16", shape, strides, batch=batch, batch_stride=33 * 37 * (batch > 1), offset=1
    )
    lies = lain.align(*shape, batch)
    assert (lain.alignment, lies.alignment) == (1, 8)
    assert lies.strides == expected
    assert lies.batch_stride == (33 * 40 if batch > 1 else 0)
    assert lies.align(*shape, batch) is lies


def test_one_matrix_for_a_whole_batch_is_copied_once() -> None:
    shared = Operand("float16", (37, 1), 1, 0)
    assert shared.align(33, 37, 8).batch_stride == 0


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (GemmProblem.contiguous("mm", 33, 40, 40), "both operands are aligned"),
        (GemmProblem.contiguous("mm", 33, 40, 37, parts=(24, 16)), "several weights"),
        (GemmProblem.contiguous("int_mm", 33, 40, 37, "int8"), "operands of int_mm"),
    ],
)
def test_operands_that_are_not_copied(problem: GemmProblem, reason: str) -> None:
    assert any(reason in item for item in why_not(problem, TILE, H200))
    assert not any(candidate.align_operands for candidate in candidates(problem, H200))


def test_constraints_are_checked_on_the_copies() -> None:
    odd = GemmProblem.contiguous("mm", 999, 1001, 1003)
    assert legal(odd, TMA, H200)
    assert not legal(odd, dataclasses.replace(TMA, align_operands=None), H200)
    assert not legal(odd, TMA, A100)


@pytest.mark.parametrize("on", [H200, A100], ids=lambda entry: entry.name)
def test_many_odd_rows_are_worth_a_copy_and_few_are_not(on: Any) -> None:
    def first(m: int) -> GemmConfig:
        return ranking.rank(GemmProblem.contiguous("mm", m, 4097, 4095), on)[0][0]

    assert first(2048).align_operands == "copy"
    assert first(1).align_operands is None


def test_copies_are_counted() -> None:
    odd = GemmProblem.contiguous("mm", 999, 1001, 1003)
    whole, own = (cost_model.predict(*item, H200) for item in ((odd, TMA), TMA.of_kernel(odd)))
    moved = 2 * (odd.a_bytes + odd.b_bytes) / H200.bandwidth * 1e6
    assert whole.total > own.total + moved + cost_model.DEFAULT.gap
    assert "realign" in config_words(TMA)


def test_earlier_json_is_read() -> None:
    plain = dataclasses.replace(TMA, align_operands=None)
    assert "realign" not in plain.to_json()
    assert TMA.to_json()["realign"] == "copy"
    for item in (TMA, plain):
        assert GemmConfig.from_json(item.to_json()) == item


Shape = tuple[int, ...]

CASES: dict[str, tuple[GemmConfig, Callable[..., Tensor], list[Shape]]] = {
    "linear": (TILE, functional.linear, [(19, 37), (23, 37)]),
    "relu behind": (TMA, lambda x, w: torch.relu(x @ w.t()), [(67, 37), (23, 37)]),
    "a transposed": (TMA, lambda x, w: x.t() @ w, [(37, 67), (37, 23)]),
    "one of two": (TILE, torch.mm, [(19, 40), (40, 23)]),
    "a bias": (SPLIT, torch.addmm, [(23,), (19, 37), (37, 23)]),
    "a batch": (BATCHED, torch.bmm, [(3, 67, 37), (3, 37, 23)]),
    "an address": (TMA, lambda x, w: x.narrow(0, 1, 67 * 40).view(67, 40) @ w, [(2681,), (40, 24)]),
    "an offset": (TILE, lambda x, w: x.narrow(0, 1, 19).narrow(1, 1, 40) @ w, [(20, 41), (40, 24)]),
}


def lower(name: str) -> fake_cuda.Lowered:
    wanted, function, shapes = CASES[name]
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: wanted):
        return fake_cuda.lower(function, *((shape, HALF) for shape in shapes))


def inputs(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).half() / 4 for shape in CASES[name][2]]


@pytest.fixture(scope="module")
def modules() -> dict[str, fake_cuda.Lowered]:
    return {name: lower(name) for name in CASES}


@pytest.fixture(scope="module")
def results(modules: dict[str, fake_cuda.Lowered]) -> dict[str, Tensor]:
    return kernel_interpreter.interpret_modules(
        {name: (module.code, inputs(name)) for name, module in modules.items()}
    )


@pytest.mark.parametrize("name", CASES)
def test_results_equal_float64(name: str, results: dict[str, Tensor]) -> None:
    expected = CASES[name][1](*(inp.double() for inp in inputs(name)))
    assert results[name].shape == expected.shape
    assert (results[name].double() - expected).abs().max() < 5e-3 * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_only_unaligned_operands_are_copied(
    name: str, modules: dict[str, fake_cuda.Lowered]
) -> None:
    names = list(modules[name].kernels())
    copies = {"one of two": 1, "an address": 1, "an offset": 1}.get(name, 2)
    sums = CASES[name][0].split_k > 1
    assert sum(name.startswith("triton_poi") for name in names) == copies + sums
    assert sum(name.startswith("triton_tem") for name in names) == 1
    assert "extern_kernels." not in modules[name].code


def test_rows_that_are_known_only_at_run_time() -> None:
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: TILE):
        module = fake_cuda.lower(functional.linear, (("rows", 37), HALF), ((23, 37), HALF))
    results = kernel_interpreter.interpret_modules(
        {
            str(rows): (module.code, [torch.ones(rows, 37).half(), torch.ones(23, 37).half()])
            for rows in (3, 50)
        }
    )
    assert all(bool((result == 37).all()) for result in results.values())


@pytest.mark.parametrize("unknown", [0, 1, 2], ids=["m", "k", "n"])
def test_batches_of_sizes_that_are_known_only_at_run_time(unknown: int) -> None:
    sizes: list[int | str] = [67, 37, 23]
    sizes[unknown] = "size"
    m, k, n = sizes
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: BATCHED):
        module = fake_cuda.lower(torch.bmm, ((3, m, k), HALF), ((3, k, n), HALF))
    m, k, n = (size if isinstance(size, int) else 41 for size in sizes)
    inputs = [torch.ones(3, m, k).half(), torch.ones(3, k, n).half()]
    (result,) = kernel_interpreter.interpret_modules({"all": (module.code, inputs)}).values()
    assert result.shape == (3, m, n)
    assert bool((result == k).all())
