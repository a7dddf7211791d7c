"""Decides which storages of a schedule are placed in arenas and which reuse memory (pure).

A schedule is a sequence of steps, some of which allocate and some of which free. If every storage
is freed right after its last use, the maximum number of live bytes is the schedule's lower bound:
no allocation strategy needs less. Saving allocator calls extends lifetimes beyond that. An arena
occupies its peak size for its whole life, and a storage that a later one reuses stays live in
between. `decide` does either only where the peak stays at the lower bound, so its result needs no
more memory than any other strategy, with as few allocator calls as it can find. It never fails: in
the worst case every storage is allocated and freed on its own.

All sizes are in bytes as the allocator counts them (rounded up to its granularity), at the size
hint. Sizes that depend on symbols can also be given at further samples of the symbols; the decision
then keeps the lower bound at every sample.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence

from inductor_ext.memory.planner.arena_plan import Arena, Request
from inductor_ext.memory.planner.interval import live_bytes


@dataclasses.dataclass(frozen=True)
class LiveRange:
    """Memory that one or more buffers use, one after the other.

    It is live in [start, end).
    """

    size: int
    start: int
    end: int
    device: str
    """Identifies one memory. Peaks of different devices are never offset against each other."""
    is_allocated_by_code: bool = True
    """Whether the generated code allocates it, as opposed to a kernel or a caller."""
    request: Request | None = None
    """The arena request; None if it cannot be placed in an arena."""
    group: Hashable = None
    """Only storages of the same group can share an arena."""
    reuse_key_out: Hashable = None
    """Reuse key that it offers to a later storage when it ends; None: it cannot be reused."""
    reuse_key_in: Hashable = None
    """Reuse key that it accepts from an earlier storage; None: it cannot reuse memory."""
    sample_sizes: tuple[int, ...] = ()
    """Sizes at the further samples."""

    def size_at(self, sample: int) -> int:
        """Return the size at a sample; sample 0 is the size hint."""
        return self.sample_sizes[sample - 1] if sample else self.size


Plan = Callable[[Sequence[Request]], tuple[Arena, ...]]


UNUSED_SHARE = 1 / 8
"""Share of the peak up to which memory may be live at a step with an unknown workspace, if it is
not in use there. Without it, the small layers of a convolutional network allocate every buffer
again, which costs host time. A workspace of up to 7/8 of the peak still does not raise the peak."""

_VIEW_COST = 1 / 2
"""Host time of a view of an arena, in allocator calls of CUDA's caching allocator."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The result of `decide`."""

    arenas: tuple[Arena, ...]
    """The requests of their members are those of the storages."""
    reused_from: Mapping[int, int]
    """Index of a storage -> index of the storage whose memory it reuses."""
    peaks: tuple[dict[str, int], ...]
    """Peak bytes by device, under each assumption about external live memory."""
    calls: int
    """Allocator calls of the generated code."""

    @property
    def host_cost(self) -> float:
        """Host time of allocations and of views of arenas, in allocator calls."""
        return self.calls + _VIEW_COST * sum(len(arena.members) for arena in self.arenas)


def decide(
    storages: Sequence[LiveRange],
    steps: int,
    *,
    plan: Plan,
    sizes: Callable[[Arena], Sequence[int]] = lambda arena: (),
    other_memory: Mapping[str, Sequence[Sequence[int]]] | None = None,
    unbounded_steps: Collection[int] = (),
    unused_shares: Mapping[str, float] | None = None,
    force: bool = False,
    min_size: int = 0,
) -> Decision:
    """Choose arenas and memory reuse that keep the schedule's lower bound.

    Args:
        storages: storages of one schedule.
        steps: number of steps of the schedule.
        plan: places requests of one group in arenas (`arenas.plan_arenas` with its arguments
            bound).
        sizes: returns an arena's bytes at the further samples.
        other_memory: by device, further memory that callers may keep live, as one profile of bytes
            per step for each assumption. The lower bound of every assumption is kept.
        unbounded_steps: steps at which kernels may need an unknown amount of workspace. Storages
            stay live there beyond their use only below a share of the peak.
        unused_shares: this share, by device; `UNUSED_SHARE` for other devices.
        force: place every storage that can be placed, regardless of the peak.
        min_size: storages with fewer bytes are not placed, unless `force` is set.
    """
    headrooms = _make_headrooms(
        storages, steps, other_memory or {}, unbounded_steps, unused_shares or {}
    )
    arenas: list[Arena] = []
    members: set[int] = set()
    groups: dict[tuple[str, Hashable], list[int]] = {}
    for index, storage in enumerate(storages):
        if storage.request is not None and (force or storage.size >= min_size):
            groups.setdefault((storage.device, storage.group), []).append(index)
    for (device, _), indices in groups.items():
        for arena, inside in _find_arenas(storages, indices, headrooms[device], plan, sizes, force):
            arena_bytes = (arena.peak_hint, *sizes(arena))
            for headroom in headrooms[device]:
                member_bytes = _member_bytes(storages, inside, arena, headroom.sample)
                headroom.replace(arena.start, arena_bytes[headroom.sample], member_bytes)
            arenas.append(arena)
            members.update(inside)
    reused_from = _assign_reuse(storages, members, headrooms)
    calls = len(arenas) + sum(
        storage.is_allocated_by_code and index not in members and index not in reused_from
        for index, storage in enumerate(storages)
    )
    return Decision(tuple(arenas), reused_from, _peaks(headrooms), calls)


def device_live_bytes(
    storages: Iterable[LiveRange], steps: int, device: str, sample: int = 0
) -> list[int]:
    """Return the live bytes on `device` at each of the `steps`, at a sample of the sizes."""
    on_device = (storage for storage in storages if storage.device == device)
    spans = ((max(s.start, 0), min(s.end, steps), s.size_at(sample)) for s in on_device)
    return live_bytes(spans, steps)


def count_calls(storages: Iterable[LiveRange]) -> int:
    """Return the number of allocator calls if each storage is allocated on its own."""
    return sum(storage.is_allocated_by_code for storage in storages)


@dataclasses.dataclass
class _Headroom:
    """Live bytes and their limit, under one assumption about the callers and at one sample."""

    sample: int
    profile: list[int]
    limit: list[int]
    """Limit in bytes at each step."""

    def largest_fit(self, start: int, member_bytes: Sequence[int]) -> tuple[int, int]:
        """Return the largest constant allocation that can replace members, and the limiting step.

        `member_bytes[i]` are the bytes at step start + i; the allocation spans the same steps. The
        second value is the first step at which nothing larger fits under the limit.
        """
        return min(
            (self.limit[step] - self.profile[step] + load, step)
            for step, load in enumerate(member_bytes, start)
        )

    def fits(self, gap: slice, storage: LiveRange) -> bool:
        """Whether a storage may stay live throughout a gap as well."""
        size = storage.size_at(self.sample)
        profile, limit = self.profile[gap], self.limit[gap]
        return all(load + size <= most for load, most in zip(profile, limit, strict=True))

    def replace(self, start: int, size: int, member_bytes: Sequence[int]) -> None:
        """Count an allocation of constant size instead of `member_bytes`."""
        for step, load in enumerate(member_bytes, start):
            self.profile[step] += size - load


def _make_headrooms(
    storages: Sequence[LiveRange],
    steps: int,
    other_memory: Mapping[str, Sequence[Sequence[int]]],
    unbounded_steps: Collection[int],
    unused_shares: Mapping[str, float],
) -> dict[str, list[_Headroom]]:
    """Return, by device, the headroom under each assumption and at each sample."""
    devices = dict.fromkeys([*(storage.device for storage in storages), *other_memory])
    samples = 1 + max((len(storage.sample_sizes) for storage in storages), default=0)
    headrooms: dict[str, list[_Headroom]] = {device: [] for device in devices}
    for device, sample in itertools.product(devices, range(samples)):
        base = device_live_bytes(storages, steps, device, sample)
        for other in other_memory.get(device) or [[0] * steps]:
            profile = [a + b for a, b in zip(base, other, strict=True)]
            peak = max(profile, default=0)
            limit = [peak] * steps
            for step in unbounded_steps:
                limit[step] = max(
                    profile[step], int(unused_shares.get(device, UNUSED_SHARE) * peak)
                )
            headrooms[device].append(_Headroom(sample, profile, limit))
    return headrooms


def _peaks(headrooms: Mapping[str, Sequence[_Headroom]]) -> tuple[dict[str, int], ...]:
    """Return the peak at the hint by device, under each assumption."""
    peaks = {
        device: [max(headroom.profile, default=0) for headroom in on_device if headroom.sample == 0]
        for device, on_device in headrooms.items()
    }
    return tuple(
        # A device with fewer profiles has the same profile under the further assumptions.
        {
            device: device_peaks[min(number, len(device_peaks) - 1)]
            for device, device_peaks in peaks.items()
        }
        for number in range(max(map(len, peaks.values()), default=1))
    )


def _member_bytes(
    storages: Sequence[LiveRange], inside: Iterable[int], arena: Arena, sample: int
) -> list[int]:
    """Return the live bytes of the arena's members at each step of its life, if not in an arena."""
    shifted = [
        dataclasses.replace(
            storages[i], start=storages[i].start - arena.start, end=storages[i].end - arena.start
        )
        for i in inside
    ]
    return device_live_bytes(shifted, arena.end - arena.start, shifted[0].device, sample)


_MAX_ATTEMPTS = 64
"""Maximum number of sets of storages of one group to try. The rest is not placed in arenas."""


def _find_arenas(
    storages: Sequence[LiveRange],
    indices: list[int],
    headrooms: Sequence[_Headroom],
    plan: Plan,
    sizes: Callable[[Arena], Sequence[int]],
    force: bool,
) -> Iterator[tuple[Arena, list[int]]]:
    """Yield arenas of one group's storages, each with its members, that all keep the limit.

    The caller must update `headrooms` with each arena before it requests the next one.
    """
    pending = [indices]
    attempts = 0
    while pending:
        part = pending.pop()
        if not part or (len(part) < 2 and not force) or attempts == _MAX_ATTEMPTS:
            continue
        attempts += 1
        requests = {request.name: index for index in part if (request := storages[index].request)}
        for arena in plan([request for index in part if (request := storages[index].request)]):
            inside = [requests[member.request.name] for member in arena.members]
            if force:
                yield arena, inside
            elif len(inside) > 1:
                arena_bytes = (arena.peak_hint, *sizes(arena))
                member_bytes = [
                    _member_bytes(storages, inside, arena, sample)
                    for sample in range(len(arena_bytes))
                ]
                # Divide the storages at the worst violation.
                allowed, step, sample = max(
                    (
                        (fit, step, headroom.sample)
                        for headroom in headrooms
                        for fit, step in [
                            headroom.largest_fit(arena.start, member_bytes[headroom.sample])
                        ]
                    ),
                    key=lambda limit: (
                        (arena_bytes[limit[2]] - limit[0]) / (arena_bytes[limit[2]] or 1)
                    ),
                )
                if arena_bytes[sample] <= allowed:
                    yield arena, inside
                else:
                    pending += _divide(
                        storages, inside, member_bytes[sample], sample, step, allowed
                    )


def _divide(
    storages: Sequence[LiveRange],
    inside: list[int],
    member_bytes: Sequence[int],
    sample: int,
    step: int,
    allowed: int,
) -> list[list[int]]:
    """Return smaller sets to try, the first one last, after one arena for all exceeds the limit.

    An arena for all may have `allowed` bytes, limited by the headroom at `step`. If `allowed` is at
    least half of the load, storages are evicted that do not fit and that are preferably not live at
    `step`. They get their own arena, which can end earlier and then leaves headroom at `step`.
    Otherwise time is split at `step`, and the storages that are live there are not placed.
    """
    if 2 * allowed >= max(member_bytes):
        rest, evicted = _evict(storages, inside, sample, step, allowed)
        if evicted and rest:
            return [evicted, rest]
    before = [index for index in inside if storages[index].end <= step]
    after = [index for index in inside if storages[index].start > step]
    return [after, before]


def _evict(
    storages: Sequence[LiveRange], inside: list[int], sample: int, step: int, allowed: int
) -> tuple[list[int], list[int]]:
    """Evict storages until the others need at most `allowed` bytes at every step.

    Storages that are live at `step` are evicted last.
    """
    live: dict[int, None] = {}
    live_size = 0
    evicted: dict[int, None] = {}
    ends: list[tuple[int, int]] = []

    def preference(index: int) -> tuple[bool, bool, int, int, int]:
        storage, size, over = storages[index], storages[index].size_at(sample), live_size - allowed
        stays = storage.start <= step < storage.end
        return stays, size < over, abs(size - over), -storage.end, index

    for index in sorted(inside, key=lambda index: (storages[index].start, index)):
        storage = storages[index]
        while ends and ends[0][0] <= storage.start:
            ended = heapq.heappop(ends)[1]
            if ended in live:
                del live[ended]
                live_size -= storages[ended].size_at(sample)
        live[index] = None
        live_size += storage.size_at(sample)
        heapq.heappush(ends, (storage.end, index))
        while live_size > allowed and live:
            victim = min(live, key=preference)
            del live[victim]
            live_size -= storages[victim].size_at(sample)
            evicted[victim] = None
    return [index for index in inside if index not in evicted], list(evicted)


def _assign_reuse(
    storages: Sequence[LiveRange],
    members: set[int],
    headrooms: Mapping[str, Sequence[_Headroom]],
) -> dict[int, int]:
    """Let storages outside of arenas reuse the memory of earlier ones where the limit is kept."""
    free: dict[Hashable, list[int]] = {}
    reused_from: dict[int, int] = {}
    outside = [index for index in range(len(storages)) if index not in members]
    receivers = [index for index in outside if storages[index].reuse_key_in is not None]
    donors = [index for index in outside if storages[index].reuse_key_out is not None]
    receivers.sort(key=lambda index: (storages[index].start, index))
    donors.sort(key=lambda index: (storages[index].end, index))
    ended = 0
    for index in receivers:
        storage = storages[index]
        while ended < len(donors) and storages[donors[ended]].end <= storage.start:
            donor = donors[ended]
            free.setdefault(storages[donor].reuse_key_out, []).append(donor)
            ended += 1
        candidates = free.get(storage.reuse_key_in)
        if not candidates:
            continue
        gap = slice(storages[candidates[-1]].end, storage.start)
        if all(headroom.fits(gap, storage) for headroom in headrooms[storage.device]):
            for headroom in headrooms[storage.device]:
                size = storage.size_at(headroom.sample)
                headroom.profile[gap] = [load + size for load in headroom.profile[gap]]
            reused_from[index] = candidates.pop()
        # Otherwise storages that ended earlier do not fit either: their gaps include this one.
    return reused_from
