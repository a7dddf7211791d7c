"""Sums by index: dtypes without atomic operations, numbers, and kernels with two tiled loops."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from inductor_ext import config
from inductor_ext.hooks import scope
from test.support import fake_cuda

SMALL = (torch.int8, torch.uint8, torch.int16)


def _program(x, index):  # type: ignore[no-untyped-def]
    rows = torch.ops.aten.index.Tensor(x * 2, [index])
    wide = index.unsqueeze(1).expand(-1, x.shape[1])
    return (
        x.index_add(0, index, rows),
        x.scatter_add(0, wide, rows),
        x.scatter_reduce(0, wide, rows, "sum"),
        torch.ops.aten.index_put.default(x, [index], rows, True),
    )


def _lower(dtype: torch.dtype) -> str:
    pytest.importorskip("triton")
    with scope.compile_scope(config.snapshot({})):
        return fake_cuda.lower(_program, ((8, 16), dtype), ((5,), torch.int64)).code


@pytest.mark.skipif(torch.cuda.is_available(), reason="lowered for a simulated GPU")
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_small_integers_are_added_by_torch(dtype: torch.dtype) -> None:
    code = _lower(dtype)
    assert "tl.atomic_add" not in code
    assert code.count("aten.scatter_reduce_.two(") == 2
    assert code.count("aten.index_put_(") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="lowered for a simulated GPU")
def test_other_dtypes_are_added_by_kernels() -> None:
    assert _lower(torch.int32).count("tl.atomic_add") == 4


def test_cpu_kernels_add_small_integers() -> None:
    compiled = torch.compile(_program, backend="inductor_ext")
    x = torch.randint(-50, 50, (8, 16), dtype=torch.int8)
    index = torch.tensor([1, 1, 3, 7, 1])
    actual, (code,) = run_and_get_code(compiled, x, index)
    assert "aten.index_put_" not in code
    for value, reference in zip(actual, _program(x, index), strict=True):
        assert value.equal(reference)


def _scatter_numbers(x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
    return [x.scatter(0, index, 0.5, reduce=how) for how in ("add", "multiply")]


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_numbers_are_scattered_by_an_index_that_is_larger_than_the_result(
    cpp_wrapper: bool,
) -> None:
    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(_scatter_numbers, backend="inductor_ext", options=options)
    x, index = torch.randn(2, 3), torch.tensor([[0, 1, 0]] * 40 + [[1, 1, 0]])
    for value, reference in zip(compiled(x, index), _scatter_numbers(x, index), strict=True):
        torch.testing.assert_close(value, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_values(dtype: torch.dtype) -> None:
    x = torch.randint(0, 50, (8, 16), dtype=dtype, device="cuda")
    index = torch.tensor([1, 1, 3, 7, 1], device="cuda")
    compiled = torch.compile(_program, backend="inductor_ext", fullgraph=True)
    for value, reference in zip(compiled(x, index), _program(x, index), strict=True):
        assert value.equal(reference)


def _add_transposed(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    result = values.new_zeros(3, 50, 5, 40)
    columns = values.transpose(1, 2).unsqueeze(2) * 2
    return torch.ops.aten.index_put.default(result, [None, None, index], columns, True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_with_two_tiled_loops_add_to_the_elements_of_the_index(
    threads: int, dtype: torch.dtype
) -> None:
    values = torch.randn(3, 40, 50).to(dtype)
    index = torch.tensor([-2])
    with inductor_config.patch({"cpp.threads": threads}):
        compiled = torch.compile(_add_transposed, backend="inductor_ext", dynamic=False)
        result, (code,) = run_and_get_code(compiled, values, index)
    assert result.equal(_add_transposed(values, index))
    # Without vector instructions, no loop is tiled.
    if dtype == torch.float32 and "loadu" in code:
        assert ("atomic_add_vec" in code) == (threads > 1)
