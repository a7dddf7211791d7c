"""Which targets of a package the benchmark runs on a GPU."""

from __future__ import annotations

import pytest

from benchmarks.aot import gpu_targets
from test.cpp_wrapper.package.test_variants import CPU, CUDA


@pytest.mark.parametrize(
    ("capability", "targets"),
    [
        ((9, 0), ["sm_90", "ptx"]),
        ((8, 6), ["sm_80", "ptx"]),
        ((12, 0), ["ptx"]),
        ((7, 5), []),
    ],
)
def test_targets_that_run_on_a_gpu(capability: tuple[int, int], targets: list[str]) -> None:
    assert list(gpu_targets.find_runnable(CUDA, capability)) == targets


@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v4"])
def test_a_target_can_be_forced(target: str) -> None:
    chosen = gpu_targets.choose(target)(CPU, "model", None, "net.pt2")
    assert chosen.models["model"].target == target
    assert chosen.files == CPU.files
