"""One decision for all ranks of a torch.distributed run, on however many hosts.

Ranks find different things in their caches, and two tunings of the same GEMM can disagree. So what
a rank decides it offers in the run's key-value store (c10d), and of each GEMM the first offer is
what every rank takes, the one that made it included. Nobody waits: there is no collective call and
no rank that has to be there, for ranks may compile different graphs, in any order, or the same
graph many times, and no rank can know whether a lower one will ever meet a GEMM. A rank that dies
leaves its offers.

A decision holds for the run: what is imported or tuned later changes it for the next one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from inductor_ext import events
from inductor_ext.autotune.decision import Decision
from inductor_ext.autotune.results import Environment, Environments
from inductor_ext.autotune.results_db import Tune
from inductor_ext.templates.problem import GemmProblem, plain, read

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["agree"]


def agree(
    problems: Iterable[GemmProblem],
    decide: Tune,
    environments: Environments,
    scope: str,
    store: torch.distributed.Store | None = None,
) -> dict[GemmProblem, Decision]:
    """Decide on problems as all ranks do.

    Args:
        problems: what this rank has met.
        decide: decides on those of them on which no rank has decided yet; not called for none.
        environments: ranks in other environments decide for themselves.
        scope: what else makes decisions differ rightly, such as whether the compile may tune;
            only offers of the same scope are taken.
        store: the run's own by default. Outside of a run of several ranks, and where the store does
            not answer, `decide` has the last word.
    """
    pending = list(dict.fromkeys(problems))
    store = store or _store()
    if store is None:
        return _decided(decide, pending)
    keys = {problem: _key(problem, environments(problem), scope) for problem in pending}
    agreed: dict[GemmProblem, Decision] = {}
    try:
        for problem in pending:
            if store.check([keys[problem]]):
                agreed[problem] = _read(store.get(keys[problem]))
    except RuntimeError as error:
        _warn(error)
    decided = _decided(decide, [problem for problem in pending if problem not in agreed])
    try:
        for problem, decision in decided.items():
            offer = json.dumps(plain(decision))
            agreed[problem] = _read(store.compare_set(keys[problem], "", offer))
    except RuntimeError as error:
        _warn(error)
    return {**decided, **agreed}


def _decided(decide: Tune, problems: list[GemmProblem]) -> dict[GemmProblem, Decision]:
    return dict(decide(problems)) if problems else {}


def _key(problem: GemmProblem, environment: Environment, scope: str) -> str:
    texts = (scope, json.dumps(plain(environment)), problem.key)
    return f"inductor_ext/gemm/{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()}"


def _read(offer: bytes) -> Decision:
    return read(Decision, json.loads(offer), "decision")


def _store() -> torch.distributed.Store | None:
    """The key-value store of the run at hand; None outside of one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # The ranks of a fake process group are all this process, and its store holds nothing.
    if dist.get_backend() == "fake":
        return None
    # torch has no public name for the store that a process group was made with.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _warn(error: RuntimeError) -> None:
    events.warn_once(
        "gemm_ranks",
        f"ranks cannot agree on GEMM kernels, and each takes its own: {error}",
    )
