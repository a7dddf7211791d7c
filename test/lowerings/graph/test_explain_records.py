"""Records of the decision for a matmul: what its kernel fuses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")


from inductor_ext.reports import gemm_report
from test.support.cutlass_lowering import XW, Call, best, linear, lower

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")


def test_reports_list_fused_operations(calls: list[Call]) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w.t()) * 2.0
        return torch.softmax(y, -1) @ v

    with gemm_report.listen() as result:
        lower(best, program, *linear(*XW, (384, 128)))
        first, second = result()
    assert first.record.operator == "fused"
    assert first.fused == ("relu", "mul")
    assert first.separate
    assert all("cutlass_epilogue_fusion_enabled" in item for item in first.separate)
    assert second.fused == second.separate == ()
    assert "pingpong" in str(gemm_report.GemmReport("it", (first, second)))
