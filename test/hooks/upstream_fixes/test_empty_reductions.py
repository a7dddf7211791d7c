"""Means of empty tensors that are computed along with a variance."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_mean_of_nothing_is_nan() -> None:
    def model(x: torch.Tensor, half: torch.Tensor, full: torch.Tensor) -> list[torch.Tensor]:
        results = [*torch.var_mean(x), *torch.std_mean(x, dim=[0, 1], correction=0)]
        results += [*torch.var_mean(x, dim=1, keepdim=True), *torch.var_mean(x, dim=0)]
        results += [*torch.var_mean(half.flatten()), *torch.std_mean(half, unbiased=False)]
        # Only the run determines the number of elements.
        for selected in (full[full > 100], full[full < 100]):
            results += [*torch.var_mean(selected), *torch.std_mean(selected * 2, correction=0)]
        return results

    inputs = torch.randn(3, 0), torch.randn(0, 4).bfloat16(), torch.randn(5, 7)
    expected = model(*inputs)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(model, backend="inductor_ext", fullgraph=True)
        results = compiled(*inputs)
    assert sum(bool(r.isnan().any()) for r in expected) == 14
    torch.testing.assert_close(results, expected, equal_nan=True)
