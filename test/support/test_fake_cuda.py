"""The simulated GPU for tests of lowering: code that Inductor (default) generates for it."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from test.support import fake_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands in for a GPU")

BF16 = torch.bfloat16


def activated(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.addmm(b, x, w.t()))


def lower_activated(faster: bool) -> fake_cuda.Lowered:
    """The generated code, with Triton templates faster or slower than the library."""
    return fake_cuda.lower(
        activated,
        *(((256, 512), BF16), ((1024, 512), BF16), ((1024,), BF16)),
        seconds=lambda choice: 1.0 if choice.name.startswith("triton") == faster else 2.0,
        max_autotune_gemm=True,
        max_autotune_gemm_backends="TRITON,ATEN",
    )


def test_the_fastest_template_is_generated_with_its_epilogue() -> None:
    lowered = lower_activated(faster=True)
    (names,) = lowered.choices
    assert sum(name.startswith("triton_mm") for name in names) > 10
    assert "addmm" in names or "bias_addmm" in names
    (kernel,) = lowered.kernels().values()
    assert "tl.dot" in kernel
    # torch 2.14 on has `tl.maximum(..., tl.PropagateNan.ALL)`.
    assert re.search(r"\b(triton_helpers|tl)\.maximum\(", kernel)


def test_a_library_is_called_where_it_is_faster() -> None:
    lowered = lower_activated(faster=False)
    assert "extern_kernels." in lowered.code
    assert all("tl.dot" not in kernel for kernel in lowered.kernels().values())


def test_torch_is_restored_afterwards() -> None:
    lowered = fake_cuda.lower(lambda x: x + 1, ((8,), torch.float32))
    assert len(lowered.kernels()) == 1
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
