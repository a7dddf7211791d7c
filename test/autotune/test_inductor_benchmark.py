"""Compiles of candidates restore torch's state."""

from __future__ import annotations

import pytest
import torch

from inductor_ext.autotune import inductor_benchmark, reference
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import Operand


def test_counters_and_metrics_are_restored() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    counters["inductor"]["inductor_ext_test"] = 3
    before = metrics.generated_kernel_count
    try:
        with inductor_benchmark.restore_counters():
            counters["inductor"]["inductor_ext_test"] += 1
            counters["inductor_ext_test"]["other"] += 1
            metrics.generated_kernel_count += 2
        assert counters["inductor"]["inductor_ext_test"] == 3
        assert "inductor_ext_test" not in counters
        assert metrics.generated_kernel_count == before
        assert "generated_kernel_count" in metrics.get_metric_fields()
    finally:
        counters.clear()


def test_failed_kernels_are_forgotten() -> None:
    from torch._inductor.async_compile import CompiledTritonKernels

    future = object()
    CompiledTritonKernels.save("source of a kernel", future)  # type: ignore[arg-type]
    assert CompiledTritonKernels.get("source of a kernel") is future
    inductor_benchmark.forget_kernels()
    assert CompiledTritonKernels.get("source of a kernel") is None


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
@pytest.mark.parametrize("tf32", [False, True])
def test_float32_precision_is_restored(before: str, tf32: bool) -> None:
    matmul = torch.backends.cuda.matmul
    saved = matmul.fp32_precision
    operand = Operand.of("float32", (8, 8), (8, 1))
    problem = GemmProblem("mm", 8, 8, 8, operand, operand, "float32", tf32=tf32)
    matmul.fp32_precision = before
    try:
        with reference.precision(problem):
            assert (matmul.fp32_precision == "tf32") == tf32
        assert matmul.fp32_precision == before
    finally:
        matmul.fp32_precision = saved
