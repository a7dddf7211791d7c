"""Times of the kernels of a call, by torch's profiler, and of the whole call without it."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

from inductor_ext.report.compile_facts import KernelProfile, KernelTime

_OUTSIDE = re.compile(
    r"^(?:TorchDynamo|Torch-Compiled Region|Pregraph bytecode|AOTDispatcher|CompiledFunction"
    r"|## Call CompiledFxGraph|ProfilerStep|autograd::engine)"
)
"""Ranges of the runtime. Their own time is not that of a kernel."""


def profile_kernels(call: Callable[[], object]) -> KernelProfile:
    """Run `call` once under torch's profiler and return its kernels.

    These are the kernels on the GPU if there are any. Otherwise they are the operators and the C++
    kernels on the CPU; code must be generated with `cpp.enable_kernel_profile` for the latter.

    Args:
        call: must have run before, so that nothing is compiled.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as prof:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return _read_kernels(prof.key_averages())


def _read_kernels(averages: Any) -> KernelProfile:
    from torch.autograd import DeviceType

    on_gpu: list[KernelTime] = []
    on_cpu: list[KernelTime] = []
    outside = 0.0
    for event in averages:
        is_range = _OUTSIDE.search(event.key) or event.is_user_annotation
        if event.device_type == DeviceType.CUDA:
            # A range of the CPU has a second event on the GPU, which contains kernels.
            if not is_range:
                on_gpu.append(KernelTime(event.key, event.count, event.self_device_time_total))
        elif is_range:
            outside += event.self_cpu_time_total
        else:
            on_cpu.append(KernelTime(event.key, event.count, event.self_cpu_time_total))
    kernels = [kernel for kernel in on_gpu or on_cpu if kernel.microseconds > 0]
    kernels.sort(key=lambda kernel: (-kernel.microseconds, kernel.name))
    return KernelProfile("cuda" if on_gpu else "cpu", tuple(kernels), outside)


def time_call(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the median time of some calls in microseconds, until the GPU has finished."""
    import torch

    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)
