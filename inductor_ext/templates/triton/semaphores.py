"""Counters by which the CTAs of a kernel tell each other what they have done, for generated code.

A kernel finds its counters at 0 and leaves them at 0, so that nothing has to be launched to write
zeros before it. That asks for counters which no other launch has at the same time:

- launches of one stream follow each other, and share what their stream has;
- what is captured in a CUDA graph may be replayed on any stream, and as long as the graph lives:
  every launch has counters of its own, which are never handed out again. They are a few hundred
  bytes.

All are cut from one tensor a device, which is made when generated code is loaded: never from the
memory of a CUDA graph, to which calls before and during a capture allocate. When it is used up,
zeros are written again for each launch, which is slower and just as right.

Light: it imports torch, and nothing of Inductor.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["CAPACITY", "Counters", "counters"]

CAPACITY = 1 << 20
"""Counters of a device: 4 MiB."""

_LINE = 32
"""Counters of 128 bytes: kernels take pointers to be aligned, and share no line of a cache."""

_LEAST = 1024
"""Of a stream at once, so that few kernels ask for more."""


class Counters:
    """The counters of one GPU."""

    def __init__(
        self, device: torch.device, current: Callable[[], int | None], capacity: int = CAPACITY
    ) -> None:
        """Make them; they are 0 once what the current stream has to do is done.

        Args:
            device: where.
            current: tells which stream is the current one; None while it is being captured.
            capacity: how many there are to hand out.
        """
        self._device = device
        self._current = current
        self._free = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._of_stream: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def take(self, count: int) -> torch.Tensor:
        """Counters for the next launch on the current stream, which has to leave them at 0.

        Returns:
            int32 [count or more], zeros by the time of the launch.
        """
        stream = self._current()
        found = None if stream is None else self._of_stream.get(stream)
        if found is not None and found.numel() >= count:
            return found
        found = self._cut(count if stream is None else max(count, _LEAST))
        if found is None:
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        if stream is not None:
            self._of_stream[stream] = found
        return found

    def _cut(self, count: int) -> torch.Tensor | None:
        """Counters that nobody has; None if too few are left."""
        whole = -(-count // _LINE) * _LINE
        with self._lock:
            if whole > self._free.numel():
                return None
            found, self._free = self._free[:whole], self._free[whole:]
        return found


@functools.cache
def counters(index: int) -> Counters:
    """The counters of a GPU, which are made when they are first asked for.

    Args:
        index: of the GPU.
    """
    device = torch.device("cuda", index)
    # A handle, without an object around it: this is called before every launch.
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def current() -> int | None:
        return None if torch.cuda.is_current_stream_capturing() else stream(index)

    # Code is loaded while graphs of fake tensors are compiled.
    with _disable_current_modes():
        found = Counters(device, current)
    # Other streams may come first.
    torch.cuda.current_stream(device).synchronize()
    return found
