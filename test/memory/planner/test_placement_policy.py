"""What `memory.planner.placement_policy` decides, replayed independently on random schedules.

`PLANNER_EXAMPLES=100000 python -m pytest test/memory/planner/test_placement_policy.py -k random` is
the long run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext.memory.planner.arena_plan import Arena, Request
from inductor_ext.memory.planner.placement_policy import (
    UNUSED_SHARE,
    Decision,
    LiveRange,
    count_calls,
    decide,
    device_live_bytes,
)
from test.support.planner_examples import unchecked_examples
from test.support.planner_expressions import plan_arenas

GRANULE = 64

UNUSED_SHARES = {"cuda:0": 1 / 2}


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of `decide`."""

    storages: tuple[LiveRange, ...]
    steps: int
    other_memory: dict[str, list[list[int]]] | None
    unbounded_steps: frozenset[int]
    min_size: int

    def decide(self, *, force: bool = False) -> Decision:
        return decide(
            self.storages,
            self.steps,
            plan=plan,
            other_memory=self.other_memory,
            unbounded_steps=self.unbounded_steps,
            unused_shares=UNUSED_SHARES,
            force=force,
            min_size=self.min_size,
        )

    @property
    def devices(self) -> list[str]:
        return sorted({storage.device for storage in self.storages} | set(self.other_memory or ()))

    def profiles(self, device: str) -> list[list[int]]:
        """Other live memory, under each assumption."""
        return (self.other_memory or {}).get(device) or [[0] * self.steps]


def plan(requests: Sequence[Request]) -> tuple[Arena, ...]:
    return plan_arenas(requests, hint=int)


@st.composite
def cases(draw: st.DrawFn, *, most: int = 14) -> Case:
    steps = draw(st.integers(1, 16))
    devices = draw(st.sampled_from([("cpu",), ("cpu", "cuda:0")]))
    storages = []
    for index in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, steps - 1))
        # It is freed at a later step, which may be that of a dead store.
        end = draw(st.integers(start + 1, steps) if draw(st.booleans()) else st.just(steps))
        size = GRANULE * draw(st.integers(0, 12))
        device = draw(st.sampled_from(devices))
        name = str(index)
        placeable = draw(st.integers(0, 3)) > 0
        request = Request(name, start, end, size, GRANULE) if placeable else None
        key = (device, size) if draw(st.integers(0, 4)) else None
        storages.append(
            LiveRange(
                size=size,
                start=start,
                end=end,
                device=device,
                is_allocated_by_code=placeable or draw(st.booleans()),
                request=request,
                group=draw(st.integers(0, 1)) if request else None,
                reuse_key_in=key,
                reuse_key_out=key if draw(st.integers(0, 3)) else None,
            )
        )
    held = None
    if draw(st.booleans()):
        count = draw(st.integers(1, 2))
        profile = st.lists(st.integers(0, 8), min_size=steps, max_size=steps)
        held = {
            device: [[GRANULE * b for b in draw(profile)] for _ in range(count)]
            for device in devices
        }
    return Case(
        tuple(storages),
        steps,
        held,
        draw(st.frozensets(st.integers(0, steps - 1), max_size=4)),
        draw(st.sampled_from((0, 256))),
    )


def spans(case: Case, decision: Decision) -> list[tuple[str, int, int, int]]:
    """(device, bytes, start, end) of each allocation that the decision makes.

    A chain of storages of which each takes over the one before is one allocation, as large as the
    first, from the first one's start to the last one's end.
    """
    members = {int(m.request.name) for arena in decision.arenas for m in arena.members}
    results = []
    for arena in decision.arenas:
        first = case.storages[int(arena.members[0].request.name)]
        results.append((first.device, int(arena.size), arena.start, arena.end))
    later = {earlier: index for index, earlier in decision.reused_from.items()}
    for index, storage in enumerate(case.storages):
        if index in members or index in decision.reused_from:
            continue
        last = index
        while last in later:
            last = later[last]
        results.append((storage.device, storage.size, storage.start, case.storages[last].end))
    return results


def alive(case: Case, allocations: Sequence[tuple[str, int, int, int]], device: str) -> list[int]:
    return [
        sum(size for on, size, start, end in allocations if on == device and start <= step < end)
        for step in range(case.steps)
    ]


def plain(case: Case) -> list[tuple[str, int, int, int]]:
    return [(s.device, s.size, s.start, s.end) for s in case.storages]


def check_structure(case: Case, decision: Decision) -> None:
    """Check the invariants of every decision."""
    placed: list[int] = []
    for arena in decision.arenas:
        indices = [int(member.request.name) for member in arena.members]
        inside = [case.storages[index] for index in indices]
        placed += indices
        assert len({(storage.device, storage.group) for storage in inside}) == 1
        assert (arena.start, arena.end) == (
            min(storage.start for storage in inside),
            max(storage.end for storage in inside),
        )
        for storage, member in zip(inside, arena.members, strict=True):
            assert member.request == storage.request
            assert 0 <= int(member.offset) <= int(arena.size) - storage.size
        for (a, x), (b, y) in itertools.combinations(zip(inside, arena.members, strict=True), 2):
            if max(a.start, b.start) < min(a.end, b.end) and a.size and b.size:
                assert int(x.offset) + a.size <= int(y.offset) or int(y.offset) + b.size <= int(
                    x.offset
                )
    assert len(placed) == len(set(placed)), "in one arena at most"

    assert len(set(decision.reused_from.values())) == len(decision.reused_from), "handed on once"
    for index, earlier in decision.reused_from.items():
        assert index not in placed
        assert earlier not in placed
        old, new = case.storages[earlier], case.storages[index]
        assert new.reuse_key_in is not None
        assert new.reuse_key_in == old.reuse_key_out
        assert old.end <= new.start

    allocations = spans(case, decision)
    assumptions = max((len(case.profiles(device)) for device in case.devices), default=1)
    assert len(decision.peaks) == assumptions
    for number, peaks in enumerate(decision.peaks):
        assert sorted(peaks) == case.devices
        for device in case.devices:
            profiles = case.profiles(device)
            other = profiles[min(number, len(profiles) - 1)]
            total = [
                own + besides
                for own, besides in zip(alive(case, allocations, device), other, strict=True)
            ]
            assert peaks[device] == max(total)
    problems = set(range(len(case.storages))) - set(placed) - set(decision.reused_from)
    assert decision.calls == len(decision.arenas) + sum(
        case.storages[i].is_allocated_by_code for i in problems
    )


def check_limits(case: Case, decision: Decision) -> None:
    """Check that no peak increases under any assumption, nor more than a share of it at
    unbounded steps.
    """
    allocations = spans(case, decision)
    for device in case.devices:
        needed = alive(case, plain(case), device)
        used = alive(case, allocations, device)
        for other in case.profiles(device):
            bound = max(a + b for a, b in zip(needed, other, strict=True))
            for step in range(case.steps):
                assert used[step] + other[step] <= bound
                if step in case.unbounded_steps:
                    total = used[step] + other[step]
                    share = UNUSED_SHARES.get(device, UNUSED_SHARE)
                    assert total <= max(needed[step] + other[step], share * bound)


class TestRandomSchedules:
    @unchecked_examples(400)
    @given(cases())
    def test_random_schedules_keep_the_bound(self, case: Case) -> None:
        decision = case.decide()
        check_structure(case, decision)
        check_limits(case, decision)
        assert decision.calls <= count_calls(case.storages)

    @unchecked_examples(200)
    @given(cases())
    def test_random_schedules_without_arenas(self, case: Case) -> None:
        storages = tuple(dataclasses.replace(item, request=None) for item in case.storages)
        case = dataclasses.replace(case, storages=storages)
        decision = case.decide()
        check_structure(case, decision)
        check_limits(case, decision)
        assert decision.arenas == ()

    @unchecked_examples(300)
    @given(cases())
    def test_random_schedules_forced(self, case: Case) -> None:
        decision = case.decide(force=True)
        check_structure(case, decision)
        placed = {int(m.request.name) for arena in decision.arenas for m in arena.members}
        wanted = {i for i, storage in enumerate(case.storages) if storage.request is not None}
        assert placed == wanted

    @unchecked_examples(100)
    @given(cases(most=60))
    def test_random_large_schedules(self, case: Case) -> None:
        decision = case.decide()
        check_structure(case, decision)
        check_limits(case, decision)

    @unchecked_examples(60)
    @given(cases())
    def test_random_schedules_repeat(self, case: Case) -> None:
        assert case.decide() == case.decide()

    @unchecked_examples(100)
    @given(cases())
    def test_random_loads(self, case: Case) -> None:
        for device in case.devices:
            assert device_live_bytes(case.storages, case.steps, device) == alive(
                case, plain(case), device
            )


def storage(size: int, start: int, end: int, **fields: Any) -> LiveRange:
    return LiveRange(size, start, end, "cpu", **fields)


def reusable(size: int, start: int, end: int) -> LiveRange:
    return storage(size, start, end, reuse_key_in=size, reuse_key_out=size)


class TestRoom:
    """The memory that may stay allocated across a gap is the headroom of the lower bound."""

    @pytest.mark.parametrize(("between", "taken"), [(64, {1: 0}), (65, {})])
    def test_headroom_of_a_gap(self, between: int, taken: dict[int, int]) -> None:
        storages = [
            reusable(64, 0, 2),
            reusable(64, 3, 5),
            storage(between, 2, 3),
            storage(128, 5, 6),
        ]
        decision = decide(storages, 6, plan=plan)
        assert decision.reused_from == taken
        assert decision.peaks == ({"cpu": 128},)
        assert decision.calls == 4 - len(taken)

    @pytest.mark.parametrize(("peak", "taken"), [(8 * 64 - 1, {}), (8 * 64, {1: 0})])
    def test_a_step_with_unknown_workspace(self, peak: int, taken: dict[int, int]) -> None:
        storages = [reusable(64, 0, 2), reusable(64, 3, 5), storage(peak, 5, 6)]
        assert decide(storages, 6, plan=plan).reused_from == {1: 0}
        assert decide(storages, 6, plan=plan, unbounded_steps={2}).reused_from == taken
        assert decide(storages, 6, plan=plan, unbounded_steps={1, 3, 4, 5}).reused_from == {1: 0}

    @pytest.mark.parametrize(("share", "taken"), [(1 / 2, {1: 0}), (0.49, {})])
    def test_the_share_of_a_device(self, share: float, taken: dict[int, int]) -> None:
        storages = [reusable(64, 0, 2), reusable(64, 3, 5), storage(128, 5, 6)]
        decision = decide(storages, 6, plan=plan, unbounded_steps={2}, unused_shares={"cpu": share})
        assert decision.reused_from == taken

    def test_every_assumption_counts(self) -> None:
        storages = [reusable(64, 0, 2), reusable(64, 3, 5), storage(128, 5, 6)]
        low, high = [0] * 6, [0, 0, 100, 0, 0, 0]
        assert decide(storages, 6, plan=plan, other_memory={"cpu": [low]}).reused_from == {1: 0}
        both = decide(storages, 6, plan=plan, other_memory={"cpu": [low, high]})
        assert both.reused_from == {}
        assert both.peaks == ({"cpu": 128}, {"cpu": 128})

    def test_devices_have_separate_headroom(self) -> None:
        elsewhere = dataclasses.replace(storage(10_000, 2, 3), device="cuda:0")
        storages = [reusable(64, 0, 2), reusable(64, 3, 5), storage(64, 2, 3), elsewhere]
        assert decide(storages, 6, plan=plan).reused_from == {}
        decision = decide([*storages, storage(128, 5, 6)], 6, plan=plan)
        assert decision.reused_from == {1: 0}
        assert decision.peaks == ({"cpu": 128, "cuda:0": 10_000},)

    def test_host_cost_counts_views_of_arenas(self) -> None:
        requests = [Request(str(index), index, index + 2, 512, GRANULE) for index in range(4)]
        storages = [
            storage(512, request.start, request.end, request=request, group=0)
            for request in requests
        ]
        decision = decide(storages, 6, plan=plan)
        assert decision.calls == len(decision.arenas) == 1
        assert decision.host_cost == 1 + 4 / 2

    def test_no_storage_at_all(self) -> None:
        assert decide([], 4, plan=plan) == Decision((), {}, ({},), 0)
        assert decide([], 4, plan=plan, other_memory={"cpu": [[1, 5, 2, 0]]}).peaks == ({"cpu": 5},)
