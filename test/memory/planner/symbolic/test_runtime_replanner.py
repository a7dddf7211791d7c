"""Planning at run time: what is cached, and how a planner is pickled."""

from __future__ import annotations

import itertools
import pickle
import threading

import pytest

from inductor_ext import exc
from inductor_ext.memory.planner import interval as problem
from inductor_ext.memory.planner import solver
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.memory.planner.symbolic import Replanner, runtime_replanner


@pytest.fixture
def replanner() -> Replanner:
    return Replanner(starts=(0, 1, 2), ends=(2, 3, 4), alignments=(64, 64, 16), which=(0, 1, 0))


def test_a_replanner_plans_each_tuple_of_sizes_once(
    replanner: Replanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replanner.plan((64, 1000))
    assert first == (1088, (1024, 0, 1024))
    assert replanner.plan((640, 64))[0] == 704
    monkeypatch.setattr(solver, "solve", None)
    assert replanner.plan((64, 1000)) is first


def test_a_replanner_is_rebuilt_from_its_repr(replanner: Replanner) -> None:
    for copy in (eval(repr(replanner)), pickle.loads(pickle.dumps(replanner))):
        assert copy == replanner
        assert copy.plan((64, 1000)) == replanner.plan((64, 1000))


def test_a_replanner_needs_no_more_than_a_known_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_above_the_other(intervals: list[Interval], **_: object) -> problem.Placement:
        offsets = [0, *itertools.accumulate(interval.rounded_size for interval in intervals)]
        bound = problem.lower_bound(intervals)
        return problem.Placement(tuple(offsets[:-1]), offsets[-1], bound, "stacked", 0)

    monkeypatch.setattr(solver, "solve", one_above_the_other)
    fields = {"starts": (0, 1, 2), "ends": (2, 3, 4), "alignments": (64,) * 3, "which": (0, 1, 0)}
    assert Replanner(**fields).plan((64, 128)) == (256, (0, 64, 192))
    assert Replanner(**fields, order=(1, 0, 2)).plan((64, 128)) == (192, (128, 0, 128))


def test_a_replanner_forgets_the_oldest(replanner: Replanner) -> None:
    for size in range(runtime_replanner.MAX_CACHED + 10):
        replanner.plan((size, 0))
    assert replanner.plan.cache_info().currsize == runtime_replanner.MAX_CACHED  # type: ignore[attr-defined]


def test_a_replanner_refuses_a_negative_size(replanner: Replanner) -> None:
    with pytest.raises(exc.BadIntervalError):
        replanner.plan((64, -1))


def test_threads_share_a_replanner(replanner: Replanner) -> None:
    sizes = [(64 * a, 64 * b) for a, b in itertools.product(range(1, 8), repeat=2)]
    expected = [Replanner(**vars_of(replanner)).plan(pair) for pair in sizes]
    results: list[list[object]] = []

    def work() -> None:
        results.append([replanner.plan(pair) for pair in sizes])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def vars_of(replanner: Replanner) -> dict[str, tuple[int, ...]]:
    names = ("starts", "ends", "alignments", "which")
    return {name: getattr(replanner, name) for name in names}
