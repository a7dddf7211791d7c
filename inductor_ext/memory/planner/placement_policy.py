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

from inductor_ext.memory.planner import arenas as _arenas
from inductor_ext.memory.planner.interval import live_bytes

__all__ = ["Decision", "Storage", "count_calls", "decide", "load"]


@dataclasses.dataclass(frozen=True)
class Storage:
    """Memory that one or more buffers use, one after the other.

    It is live in [start, end).
    """

    size: int
    start: int
    end: int
    device: str
    """Identifies one memory. Peaks of different devices are never offset against each other."""
    counted: bool = True
    """Whether the generated code allocates it, as opposed to a kernel or a caller."""
    request: _arenas.Request | None = None
    """The arena request; None if it cannot be placed in an arena."""
    group: Hashable = None
    """Only storages of the same group can share an arena."""
    leaves: Hashable = None
    """Reuse key that it offers to a later storage when it ends; None: it cannot be reused."""
    wants: Hashable = None
    """Reuse key that it accepts from an earlier storage; None: it cannot reuse memory."""
    more: tuple[int, ...] = ()
    """Sizes at the further samples."""

    def at(self, sample: int) -> int:
        """Return the size at a sample; sample 0 is the size hint."""
        return self.more[sample - 1] if sample else self.size


Plan = Callable[[Sequence[_arenas.Request]], tuple[_arenas.Arena, ...]]


@dataclasses.dataclass(frozen=True)
class Decision:
    """The result of `decide`."""

    arenas: tuple[_arenas.Arena, ...]
    """The requests of their members are those of the storages."""
    taken_over: Mapping[int, int]
    """Index of a storage -> index of the storage whose memory it reuses."""
    peaks: tuple[dict[str, int], ...]
    """Peak bytes by device, under each assumption about external live memory."""
    calls: int
    """Allocator calls of the generated code."""


def load(storages: Iterable[Storage], steps: int, device: str, sample: int = 0) -> list[int]:
    """Return the live bytes on `device` at each of the `steps`, at a sample of the sizes."""
    own = (storage for storage in storages if storage.device == device)
    spans = ((max(s.start, 0), min(s.end, steps), s.at(sample)) for s in own)
    return live_bytes(spans, steps)


def count_calls(storages: Iterable[Storage]) -> int:
    """Return the number of allocator calls if each storage is allocated on its own."""
    return sum(storage.counted for storage in storages)


def _limit(profile: Sequence[int], rigid: Collection[int]) -> list[int]:
    limit = [max(profile, default=0)] * len(profile)
    for step in rigid:
        limit[step] = profile[step]
    return limit


@dataclasses.dataclass
class _Room:
    """Live bytes and their limit, under one assumption about the callers and at one sample."""

    sample: int
    profile: list[int]
    limit: list[int]
    """Limit in bytes at each step."""

    def scarcest(self, start: int, own: Sequence[int]) -> tuple[int, int]:
        """Return the largest constant allocation that can replace `own`, and the limiting step.

        `own[i]` are the bytes at step start + i; the allocation spans the same steps. The second
        value is the first step at which nothing larger fits under the limit.
        """
        return min(
            (self.limit[step] - self.profile[step] + mine, step)
            for step, mine in enumerate(own, start)
        )

    def replace(self, start: int, size: int, own: Sequence[int]) -> None:
        for step, mine in enumerate(own, start):
            self.profile[step] += size - mine


def decide(
    storages: Sequence[Storage],
    steps: int,
    *,
    plan: Plan,
    sizes: Callable[[_arenas.Arena], Sequence[int]] = lambda arena: (),
    held: Mapping[str, Sequence[Sequence[int]]] | None = None,
    rigid: Collection[int] = (),
    place: bool = True,
    force: bool = False,
    smallest: int = 0,
) -> Decision:
    """Choose arenas and memory reuse that keep the schedule's lower bound.

    Args:
        storages: storages of one schedule.
        steps: number of steps of the schedule.
        plan: places requests of one group in arenas (`arenas.plan_arenas` with its arguments
            bound).
        sizes: returns an arena's bytes at the further samples.
        held: by device, further memory that callers may keep live, as one profile of bytes per step
            for each assumption. The lower bound of every assumption is kept. None: nothing.
        rigid: steps with unbounded workspace, at which kernels may need an unknown amount of
            memory. No storage stays live there beyond its use, so the kernels have as much headroom
            as without a plan.
        place: False for no arenas.
        force: place every storage that can be placed, regardless of the peak.
        smallest: storages with fewer bytes are not placed, unless `force` is set.
    """
    held = held or {}
    devices = dict.fromkeys([*(storage.device for storage in storages), *held])
    samples = 1 + max((len(storage.more) for storage in storages), default=0)
    rooms: dict[str, list[_Room]] = {device: [] for device in devices}
    for device, sample in itertools.product(devices, range(samples)):
        base = load(storages, steps, device, sample)
        for more in held.get(device) or [[0] * steps]:
            profile = [a + b for a, b in zip(base, more, strict=True)]
            rooms[device].append(_Room(sample, profile, _limit(profile, rigid)))

    placed: list[_arenas.Arena] = []
    members: set[int] = set()
    if place:
        groups: dict[tuple[str, Hashable], list[int]] = {}
        for index, storage in enumerate(storages):
            if storage.request is not None and (force or storage.size >= smallest):
                groups.setdefault((storage.device, storage.group), []).append(index)
        for (device, _), indices in groups.items():
            for arena, inside in _fit(storages, indices, rooms[device], plan, sizes, force):
                at = (arena.peak_hint, *sizes(arena))
                for room in rooms[device]:
                    own = _own(storages, inside, arena, room.sample)
                    room.replace(arena.start, at[room.sample], own)
                placed.append(arena)
                members.update(inside)

    taken_over = _take_over(storages, members, rooms)
    calls = len(placed) + sum(
        storage.counted and index not in members and index not in taken_over
        for index, storage in enumerate(storages)
    )
    at_hint = {
        device: [room for room in found if room.sample == 0] for device, found in rooms.items()
    }
    peaks = tuple(
        # A device with fewer profiles has the same profile under the further assumptions.
        {
            device: max(found[min(number, len(found) - 1)].profile, default=0)
            for device, found in at_hint.items()
        }
        for number in range(max(map(len, at_hint.values()), default=1))
    )
    return Decision(tuple(placed), taken_over, peaks, calls)


def _own(
    storages: Sequence[Storage], inside: Iterable[int], arena: _arenas.Arena, sample: int
) -> list[int]:
    """Return the live bytes of the arena's members at each step of its life, if not in an arena."""
    shifted = [
        dataclasses.replace(
            storages[i], start=storages[i].start - arena.start, end=storages[i].end - arena.start
        )
        for i in inside
    ]
    return load(shifted, arena.end - arena.start, shifted[0].device, sample)


def _fit(
    storages: Sequence[Storage],
    indices: list[int],
    rooms: Sequence[_Room],
    plan: Plan,
    sizes: Callable[[_arenas.Arena], Sequence[int]],
    force: bool,
) -> Iterator[tuple[_arenas.Arena, list[int]]]:
    """Yield arenas of one group's storages, each with its members, that all keep the limit.

    The caller must update `rooms` with each arena before it requests the next one.
    """
    pending = [indices]
    attempts = 0
    while pending:
        part = pending.pop()
        if not part or (len(part) < 2 and not force) or attempts == _ATTEMPTS:
            continue
        attempts += 1
        requests = {request.name: index for index in part if (request := storages[index].request)}
        found = plan([request for index in part if (request := storages[index].request)])
        for arena in found:
            inside = [requests[member.request.name] for member in arena.members]
            if force:
                yield arena, inside
            elif len(inside) > 1:
                at = (arena.peak_hint, *sizes(arena))
                own = [_own(storages, inside, arena, sample) for sample in range(len(at))]
                # Divide the storages at the worst violation.
                allowed, step, sample = max(
                    (
                        (left, step, room.sample)
                        for room in rooms
                        for left, step in [room.scarcest(arena.start, own[room.sample])]
                    ),
                    key=lambda found: (at[found[2]] - found[0]) / (at[found[2]] or 1),
                )
                if at[sample] <= allowed:
                    yield arena, inside
                else:
                    pending += _split(storages, inside, own[sample], sample, step, allowed)


_ATTEMPTS = 64
"""Maximum number of sets of storages of one group to try. The rest is not placed in arenas."""


def _split(
    storages: Sequence[Storage],
    inside: list[int],
    own: Sequence[int],
    sample: int,
    at: int,
    allowed: int,
) -> list[list[int]]:
    """Return smaller sets to try, the first one last, after one arena for all exceeds the limit.

    An arena for all may have `allowed` bytes, limited by the headroom at step `at`. If `allowed` is
    at least half of the load, storages are evicted that do not fit and that are preferably not live
    at `at`. They get their own arena, which can end earlier and then leaves headroom at `at`.
    Otherwise time is split at `at`, and the storages that are live there are not placed.
    """
    if 2 * allowed >= max(own):
        kept, apart = _evict(storages, inside, sample, at, allowed)
        if apart and kept:
            return [apart, kept]
    before = [index for index in inside if storages[index].end <= at]
    after = [index for index in inside if storages[index].start > at]
    return [after, before]


def _evict(
    storages: Sequence[Storage], inside: list[int], sample: int, at: int, allowed: int
) -> tuple[list[int], list[int]]:
    """Evict storages until the others need at most `allowed` bytes at every step.

    Storages that are live at step `at` are evicted last.
    """
    alive: dict[int, None] = {}
    used = 0
    apart: dict[int, None] = {}
    ends: list[tuple[int, int]] = []

    def preference(index: int) -> tuple[bool, bool, int, int, int]:
        storage, size, over = storages[index], storages[index].at(sample), used - allowed
        stays = storage.start <= at < storage.end
        return stays, size < over, abs(size - over), -storage.end, index

    for index in sorted(inside, key=lambda index: (storages[index].start, index)):
        storage = storages[index]
        while ends and ends[0][0] <= storage.start:
            gone = heapq.heappop(ends)[1]
            if gone in alive:
                del alive[gone]
                used -= storages[gone].at(sample)
        alive[index] = None
        used += storage.at(sample)
        heapq.heappush(ends, (storage.end, index))
        while used > allowed and alive:
            chosen = min(alive, key=preference)
            del alive[chosen]
            used -= storages[chosen].at(sample)
            apart[chosen] = None
    return [index for index in inside if index not in apart], list(apart)


def _take_over(
    storages: Sequence[Storage],
    members: set[int],
    rooms: Mapping[str, Sequence[_Room]],
) -> dict[int, int]:
    """Let storages outside of arenas reuse the memory of earlier ones where the limit is kept."""
    free: dict[Hashable, list[int]] = {}
    taken: dict[int, int] = {}
    outside = [index for index in range(len(storages)) if index not in members]
    wanting = [index for index in outside if storages[index].wants is not None]
    leaving = [index for index in outside if storages[index].leaves is not None]
    starts = sorted(wanting, key=lambda index: (storages[index].start, index))
    ends = sorted(leaving, key=lambda index: (storages[index].end, index))
    ended = 0
    for index in starts:
        storage = storages[index]
        while ended < len(ends) and storages[ends[ended]].end <= storage.start:
            gone = ends[ended]
            free.setdefault(storages[gone].leaves, []).append(gone)
            ended += 1
        waiting = free.get(storage.wants)
        if not waiting:
            continue
        earlier = storages[waiting[-1]]
        gap = slice(earlier.end, storage.start)
        device_rooms = rooms[storage.device]
        if any(
            held + storage.at(room.sample) > limit
            for room in device_rooms
            for held, limit in zip(room.profile[gap], room.limit[gap], strict=True)
        ):
            # Storages that ended earlier have a longer gap, which includes this one.
            continue
        for room in device_rooms:
            room.profile[gap] = [held + storage.at(room.sample) for held in room.profile[gap]]
        taken[index] = waiting.pop()
    return taken
