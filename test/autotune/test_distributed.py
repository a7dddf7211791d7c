"""One decision for all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inductor_ext.autotune import distributed
from inductor_ext.autotune.decision import Decision
from inductor_ext.templates.problem import GemmProblem
from test.support.children.tuning import CONFIG, decision, here, problem
from test.support.tuning_results import OLD_TRITON, run_child


def test_ranks_take_the_first_offer(tmp_path: Path) -> None:
    one, other = (json.loads(line) for line in run_child("agree", tmp_path / "c10d").splitlines())
    assert one == other
    assert set(one) <= {10.0, 11.0}


def test_ranks_decide_only_pending_problems() -> None:
    import torch.distributed as dist

    shared = dist.HashStore()
    pending = []

    def decide(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        pending.append([item.m for item in batch])
        return {item: decision(float(len(pending))) for item in batch}

    first = distributed.share_decisions([problem(), problem(1)], decide, here, "", shared)
    again = distributed.share_decisions(
        [problem(1), problem(2), problem()], decide, here, "", shared
    )
    assert pending == [[2048, 2049], [2050]]
    assert [again[problem(index)].microseconds(CONFIG) for index in range(3)] == [1.0, 1.0, 2.0]
    assert first[problem()] == again[problem()] == decision(1.0)
    distributed.share_decisions([problem()], decide, here, "tuning", shared)
    distributed.share_decisions([problem()], decide, lambda _: OLD_TRITON, "", shared)
    assert pending[2:] == [[2048], [2048]]
    assert distributed.share_decisions([problem()], decide, here, "") == {problem(): decision(5.0)}


def test_each_rank_decides_if_the_store_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def check(self, *arguments: object) -> bool:
            raise RuntimeError("connection lost")

        compare_set = check

    broken: Any = Broken()

    def decide(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        return dict.fromkeys(batch, decision())

    assert distributed.share_decisions([problem()], decide, here, "", broken) == {
        problem(): decision()
    }
    assert [message.split(":")[0] for message in caplog.messages] == [
        "ranks cannot agree on GEMM kernels, so every rank selects its own"
    ]
