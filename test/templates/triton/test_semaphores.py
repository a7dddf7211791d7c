"""Counters of kernels, as used by generated code."""

from __future__ import annotations

import itertools

import torch

from inductor_ext.templates.triton.semaphores import Counters


class Streams:
    """The current stream: a number, or None while it is captured."""

    current: int | None = 0

    def __call__(self) -> int | None:
        return self.current


def ranges(taken: list[torch.Tensor]) -> list[range]:
    return [range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in taken]


def apart(taken: list[torch.Tensor]) -> bool:
    ordered = sorted(ranges(taken), key=lambda range_: range_.start)
    return all(a.stop <= b.start for a, b in itertools.pairwise(ordered))


def made(capacity: int = 8192) -> tuple[Counters, Streams]:
    streams = Streams()
    return Counters(torch.device("cpu"), streams, capacity), streams


def test_counters_are_shared_within_a_stream_only() -> None:
    counters, streams = made()
    first = counters.take(7)
    assert first.dtype == torch.int32
    assert first.numel() >= 7
    assert ranges([first]) == ranges([counters.take(5)])
    streams.current = 1
    second = counters.take(7)
    assert apart([first, second])
    streams.current = 0
    more = counters.take(2000)
    assert more.numel() >= 2000
    assert apart([second, more])
    assert ranges([more]) == ranges([counters.take(7)])


def test_every_captured_launch_has_its_own_counters() -> None:
    counters, streams = made()
    taken = [counters.take(7)]
    streams.current = None
    taken += [counters.take(7) for _ in range(5)]
    streams.current = 0
    taken.append(counters.take(1060))
    assert apart(taken)


def test_counters_are_cache_lines() -> None:
    counters, streams = made()
    streams.current = None
    starts = {counters.take(count).data_ptr() % 128 for count in (1, 33, 7, 32, 2)}
    assert len(starts) == 1


def test_reused_counters_are_zeroed() -> None:
    counters, streams = made(64)
    streams.current = None
    taken = [counters.take(20) for _ in range(2)]
    taken[0].fill_(1)
    more = counters.take(20)
    assert not more.any()
    assert apart([*taken, more])
    streams.current = 3
    more.fill_(1)
    assert not counters.take(20).any()
