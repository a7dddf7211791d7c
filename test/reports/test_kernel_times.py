"""The times of kernels: which events of a profile count, and for what."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.autograd import DeviceType

from inductor_ext.reports import kernel_times
from inductor_ext.reports.compile_facts import KernelTime


def event(key: str, time: float, count: int = 1, *, gpu: bool = False, range_: bool = False) -> Any:
    return types.SimpleNamespace(
        key=key,
        count=count,
        device_type=DeviceType.CUDA if gpu else DeviceType.CPU,
        is_user_annotation=range_,
        self_cpu_time_total=0.0 if gpu else time,
        self_device_time_total=time if gpu else 0.0,
    )


EVENTS = [
    event("## Call CompiledFxGraph key ##", 5.0),
    event("Torch-Compiled Region: 0/0", 2.0),
    event("aten::mm", 30.0, 3),
    event("cudaLaunchKernel", 4.0, 2),
    event("a range of the user", 1.0, range_=True),
    event("aten::empty", 0.0),
]
GPU_EVENTS = [
    event("triton_poi_fused_0", 7.0, 2, gpu=True),
    event("gemm", 11.0, 1, gpu=True),
    event("Torch-Compiled Region: 0/0", 18.0, gpu=True),
    event("a range of the user", 18.0, gpu=True, range_=True),
]


def test_kernels_on_the_gpu_count_if_there_are_any() -> None:
    profile = kernel_times._read_kernels([*EVENTS, *GPU_EVENTS])
    assert profile.device == "cuda"
    assert profile.kernels == (
        KernelTime("gemm", 1, 11.0),
        KernelTime("triton_poi_fused_0", 2, 7.0),
    )
    assert profile.total == 18.0
    assert profile.outside == 8.0


def test_operators_on_a_cpu() -> None:
    profile = kernel_times._read_kernels(EVENTS)
    assert profile.device == "cpu"
    assert [kernel.name for kernel in profile.kernels] == ["aten::mm", "cudaLaunchKernel"]
    in_graphs = {"aten::mm": (1, 10.0), "## Call CompiledFxGraph key ##": (1, 5.0)}
    profile = kernel_times._read_kernels(EVENTS, in_graphs)
    assert profile.kernels == (KernelTime("aten::mm", 1, 10.0),)
    assert profile.outside == 5.0


def test_a_real_profile() -> None:
    x = torch.ones(64, 64)
    with kernel_times.profile_program() as collect:
        x.cos()
        with torch.profiler.record_function("## Call CompiledFxGraph key ##"):
            x.sin()
    assert [kernel.name for kernel in collect().kernels] == ["aten::sin"]
    kernels = kernel_times.profile_kernels(lambda: (x.cos(), x.sin(), x.sin())).kernels
    calls = {kernel.name: kernel.calls for kernel in kernels}
    assert (calls["aten::cos"], calls["aten::sin"]) == (1, 2)
    assert kernel_times.time_call(x.cos) > 0
