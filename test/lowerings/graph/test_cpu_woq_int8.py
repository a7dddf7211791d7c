"""Matmuls with int8 weights and few rows on a CPU get the form that Inductor replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

N, K = 48, 64

REPLACEMENT = "_weight_int8pack_mm("


def linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype)) * scales


def also_returned(x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    result = F.linear(x, weight.to(x.dtype))
    return result * scales, result


def converted_for_two(x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    wide = weight.to(x.dtype)
    return F.linear(x, wide) * scales, wide.sum(0)


def make_inputs(rows: int, **changes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs = {
        "x": torch.randn(rows, K, generator=generator).bfloat16(),
        "weight": torch.randint(-127, 128, (N, K), dtype=torch.int8, generator=generator),
        "scales": torch.rand(N, generator=generator).bfloat16() / 600,
    }
    return list({**inputs, **changes}.values())


def compile_and_run(
    function: Callable[..., Any], inputs: list[Tensor], dynamic: bool = False, **settings: Any
) -> tuple[Any, str]:
    """Return the results and the generated code."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="inductor_ext", dynamic=dynamic, options=settings)
    with torch.no_grad():
        result, (code,) = run_and_get_code(compiled, *inputs)
    return result, code


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_few_rows_use_int8_weights(rows: int) -> None:
    inputs = make_inputs(rows)
    result, code = compile_and_run(linear, inputs)
    assert REPLACEMENT in code
    exact = linear(*(value.double() for value in inputs))
    error = (result.double() - exact).norm()
    assert error <= 1.05 * (linear(*inputs).double() - exact).norm()


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        pytest.param(linear, make_inputs(17), id="many rows"),
        pytest.param(linear, make_inputs(4, scales=torch.tensor(0.01).bfloat16()), id="one scale"),
        pytest.param(
            linear, make_inputs(4, scales=torch.rand(4, 1).bfloat16()), id="scales of rows"
        ),
        pytest.param(linear, make_inputs(4, scales=torch.rand(N)), id="float32 scales"),
        pytest.param(linear, make_inputs(4, x=torch.randn(4, K).half()), id="float16"),
        pytest.param(also_returned, make_inputs(4), id="the matmul has another user"),
        pytest.param(converted_for_two, make_inputs(4), id="the weight has another user"),
    ],
)
def test_other_matmuls_stay(function: Callable[..., Any], inputs: list[Tensor]) -> None:
    result, code = compile_and_run(function, inputs)
    assert REPLACEMENT not in code
    torch.testing.assert_close(result, function(*inputs))


def test_an_unknown_number_of_rows_stays() -> None:
    result, code = compile_and_run(linear, make_inputs(4), dynamic=True)
    assert REPLACEMENT not in code
    torch.testing.assert_close(result, linear(*make_inputs(4)))


def test_settings_that_forbid_it() -> None:
    inputs = make_inputs(4)
    _, code = compile_and_run(linear, inputs, gemm_templates=False)
    assert REPLACEMENT not in code
    with inductor_config.patch(emulate_precision_casts=True):
        result, code = compile_and_run(linear, inputs)
    assert REPLACEMENT not in code
    assert torch.equal(result, linear(*inputs))


def test_inductor_does_not_find_them() -> None:
    """When this fails, the pass has become unnecessary."""
    compiled = torch.compile(linear, dynamic=False)
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, *make_inputs(4))
    assert REPLACEMENT not in code
