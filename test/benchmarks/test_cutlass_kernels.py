"""The cases of the CUTLASS benchmark have kernels, and agree with eager mode."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.gemm.cutlass_kernels import CASES
from inductor_ext.templates.cutlass.constraints import why_not
from inductor_ext.templates.cutlass.cost_model import rank
from inductor_ext.templates.cutlass.source import source
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")


@pytest.mark.parametrize("name", CASES)
def test_case_has_kernels(name: str) -> None:
    case = CASES[name]
    ranked = rank(case.problem, H200)
    assert len(ranked) == 2
    for config, _ in ranked:
        assert why_not(case.problem, config, H200) == []
        assert source(config, case.epilogue).name.startswith(config.name)


@pytest.mark.parametrize("name", [name for name in CASES if name != "fp8"])
def test_epilogue_agrees_with_eager_mode(name: str) -> None:
    case = CASES[name]
    a, b = torch.randn(8, 16), torch.randn(16, 24)
    sizes = {"matrix": (8, 24), "row": (1, 24), "column": (8, 1), "scalar": (1, 1)}
    inputs = [torch.randn(sizes[inp.broadcast]) for inp in case.epilogue.inputs]
    ((_, value),) = case.epilogue.outputs
    epilogue = dataclasses.replace(case.epilogue, outputs=(("float32", value),))
    (result,) = epilogue.evaluate(a @ b, tuple(inputs))
    torch.testing.assert_close(result, case.eager(a, b, *inputs), rtol=1e-5, atol=1e-5)
