"""Times of the kernels of a call, by torch's profiler, and of the whole call without it."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from inductor_ext.reports.compile_facts import KernelProfile, KernelTime

_CALL = "## Call CompiledFxGraph "
"""Prefix of the name of a graph's call."""

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
    with _run_profiler() as prof:
        call()
    return _read_kernels(prof.key_averages())


@contextlib.contextmanager
def profile_program() -> Iterator[Callable[[], KernelProfile]]:
    """Yield a function that returns the kernels of the context, after it has ended.

    On a CPU these are the operators and kernels in calls of compiled graphs, not those that a
    compile runs. On a GPU they are all kernels, with those that are benchmarked.
    """
    with _run_profiler() as prof:
        yield lambda: _read_kernels(prof.key_averages(), _count_in_graphs(prof.events()))


@contextlib.contextmanager
def _run_profiler() -> Iterator[Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as prof:
        yield prof
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _count_in_graphs(events: Any) -> dict[str, tuple[int, float]]:
    """Return the calls and the own CPU time of operators in calls of compiled graphs, by name."""
    inside: dict[int, bool] = {}
    counts: dict[str, tuple[int, float]] = {}
    # A parent begins before its children.
    for event in sorted(events, key=lambda event: event.time_range.start):
        parent = event.cpu_parent
        is_in_graph = parent is not None and inside.get(id(parent), False)
        inside[id(event)] = is_in_graph or event.name.startswith(_CALL)
        if inside[id(event)]:
            calls, time = counts.get(event.name, (0, 0.0))
            counts[event.name] = (calls + 1, time + event.self_cpu_time_total)
    return counts


def _read_kernels(
    averages: Any, in_graphs: Mapping[str, tuple[int, float]] | None = None
) -> KernelProfile:
    """Return the kernels of a profile.

    Args:
        averages: the events by name.
        in_graphs: the calls and times to use for events on the CPU instead of their own, by name;
            others are left out.
    """
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
            continue
        own = (event.count, event.self_cpu_time_total)
        calls, time = own if in_graphs is None else in_graphs.get(event.key, (0, 0.0))
        if is_range:
            outside += time
        else:
            on_cpu.append(KernelTime(event.key, calls, time))
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
