"""C++ matmuls in processes that get fewer threads than the kernel asks for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inductor_ext.hooks.upstream_fixes.cpu_matmuls import compute_all_tiles

SCRIPT = """
import torch
import torch._inductor.config

torch.set_num_threads(4)
torch.manual_seed(0)
options = {
    "freezing": True,
    "max_autotune": True,
    "max_autotune_gemm_backends": "CPP",
    "cpp.gemm_max_k_slices": 4,
}
model = torch.nn.Sequential(torch.nn.Linear(256, 48), torch.nn.ReLU()).eval()
# Dynamo takes parameters for constants only if the setting holds outside of the compile.
with torch.no_grad(), torch._inductor.config.patch(options):
    for dynamic in (False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="inductor_ext", dynamic=dynamic)
        for rows in (64, 17):
            x = torch.randn(rows, 256)
            torch.testing.assert_close(compiled(x), model(x))
print("equal")
"""


@pytest.mark.parametrize("limit", [1, 2])
def test_results_with_fewer_threads(limit: int) -> None:
    environment = {**os.environ, "OMP_THREAD_LIMIT": str(limit)}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "equal"


KERNEL = """\
    #pragma omp parallel num_threads(3)
    {

        const int tid = omp_get_thread_num();
        if (tid < n) {
            y[tid] = x[tid];
        }
    }
    y[3] = 0;"""


def test_each_tile_has_a_thread() -> None:
    assert (
        compute_all_tiles(KERNEL)
        == """\
    #pragma omp parallel num_threads(3)
    {

for (int tid = omp_get_thread_num(); tid < 3; tid += omp_get_num_threads()) {
        if (tid < n) {
            y[tid] = x[tid];
        }
}
    }
    y[3] = 0;"""
    )


@pytest.mark.parametrize(
    "source",
    [
        KERNEL.replace("const int tid = omp_get_thread_num();", "#pragma omp for"),
        KERNEL.replace("parallel num_threads(3)", "parallel for"),
        "y[0] = x[0];",
    ],
)
def test_other_kernels_are_unchanged(source: str) -> None:
    assert compute_all_tiles(source) == source
