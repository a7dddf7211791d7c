"""Global-memory counters with which the CTAs of a kernel synchronize, for generated code.

A kernel expects its counters to be 0 and resets them to 0, so that no kernel has to be launched to
zero them first. This requires counters that no concurrent launch uses:

- launches on one stream are ordered and share the counters of that stream;
- a launch captured in a CUDA graph may be replayed on any stream, as long as the graph lives: every
  such launch gets counters of its own, which are never reused. They are a few hundred bytes.

All counters of a device are slices of one tensor, allocated when generated code is loaded: never
from the memory pool of a CUDA graph, from which calls before and during a capture allocate. When
the tensor is used up, new zeroed counters are allocated for each launch, which is slower but also
correct.

This module imports torch, but not Inductor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

CAPACITY = 1 << 20
"""Counters per device: 4 MiB."""

_LINE = 32
"""Counters per 128 bytes: kernels assume aligned pointers, and allocations share no cache line."""

_LEAST = 1024
"""Minimum number of counters allocated to a stream, so that few kernels need more."""


class Counters:
    """The counters of one GPU."""

    def __init__(
        self, device: torch.device, current: Callable[[], int | None], capacity: int = CAPACITY
    ) -> None:
        """Allocate the counters; they are 0 once the work of the current stream is done.

        Args:
            device: the GPU.
            current: returns the current stream; None while it is being captured.
            capacity: number of counters.
        """
        self._device = device
        self._current = current
        self._free = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._of_stream: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def take(self, count: int) -> torch.Tensor:
        """Return counters for the next launch on the current stream, which has to leave them at 0.

        Returns:
            int32 [count or more], zeros by the time of the launch.
        """
        stream = self._current()
        counters = None if stream is None else self._of_stream.get(stream)
        if counters is not None and counters.numel() >= count:
            return counters
        counters = self._cut(count if stream is None else max(count, _LEAST))
        if counters is None:
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        if stream is not None:
            self._of_stream[stream] = counters
        return counters

    def _cut(self, count: int) -> torch.Tensor | None:
        """Return unused counters; None if too few are left."""
        size = -(-count // _LINE) * _LINE
        with self._lock:
            if size > self._free.numel():
                return None
            counters, self._free = self._free[:size], self._free[size:]
        return counters


@functools.cache
def counters(index: int) -> Counters:
    """Return the counters of a GPU, allocated on first use.

    Args:
        index: device index.
    """
    device = torch.device("cuda", index)
    # The raw handle, without a stream object: this is called before every launch.
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def current() -> int | None:
        return None if torch.cuda.is_current_stream_capturing() else stream(index)

    # Generated code may be loaded under a fake tensor mode.
    with _disable_current_modes():
        gpu_counters = Counters(device, current)
    # Another stream may use the counters first.
    torch.cuda.current_stream(device).synchronize()
    return gpu_counters
