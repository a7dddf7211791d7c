"""One decision per GEMM for all ranks of a torch.distributed run, on any number of hosts.

Ranks may have different tuning caches, and two tuning runs of the same GEMM can disagree. Each rank
therefore publishes its decision in the key-value store of the run (c10d). For each GEMM all ranks
use the first decision that was published, including the rank that published it. No rank waits:
there is no collective call and no rank that must take part, because ranks may compile different
graphs, in any order, or the same graph many times, and no rank can know whether a lower rank will
ever compile a given GEMM. The decisions of a rank that dies remain.

A decision holds for the run; results that are imported or tuned later apply to the next run. If the
store fails, each rank uses its own decisions, with one warning.
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
from inductor_ext.storage import json_codec
from inductor_ext.templates.problem import GemmProblem, read

if TYPE_CHECKING:
    import torch.distributed


def share_decisions(
    problems: Iterable[GemmProblem],
    decide: Tune,
    environments: Environments,
    scope: str,
    store: torch.distributed.Store | None = None,
) -> dict[GemmProblem, Decision]:
    """Return decisions for problems on which all ranks agree.

    Args:
        problems: the problems of this rank.
        decide: called with the problems on which no rank has decided yet; not called if there are
            none.
        environments: ranks in other environments decide for themselves.
        scope: what else may legitimately make decisions differ, such as whether the compile may
            tune; only decisions of the same scope are shared.
        store: the store of the run by default. Outside of a run with several ranks, and if the
            store fails, the result of `decide` is used.
    """
    pending = list(dict.fromkeys(problems))
    store = store or _store()
    if store is None:
        return _decide_pending(decide, pending)
    keys = {problem: _key(problem, environments(problem), scope) for problem in pending}
    shared: dict[GemmProblem, Decision] = {}
    try:
        for problem in pending:
            if store.check([keys[problem]]):
                shared[problem] = _read(store.get(keys[problem]))
    except RuntimeError as error:
        _warn(error)
    decisions = _decide_pending(decide, [problem for problem in pending if problem not in shared])
    try:
        for problem, decision in decisions.items():
            offer = json.dumps(json_codec.encode(decision))
            shared[problem] = _read(store.compare_set(keys[problem], "", offer))
    except RuntimeError as error:
        _warn(error)
    return {**decisions, **shared}


def _decide_pending(decide: Tune, problems: list[GemmProblem]) -> dict[GemmProblem, Decision]:
    return dict(decide(problems)) if problems else {}


def _key(problem: GemmProblem, environment: Environment, scope: str) -> str:
    texts = (scope, json.dumps(json_codec.encode(environment)), problem.key)
    return f"inductor_ext/gemm/{hashlib.sha256(chr(0).join(texts).encode()).hexdigest()}"


def _read(offer: bytes) -> Decision:
    return read(Decision, json.loads(offer), "decision")


def _store() -> torch.distributed.Store | None:
    """Return the key-value store of the current run; None outside of one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # All ranks of a fake process group are this process, and its store does not keep anything.
    if dist.get_backend() == "fake":
        return None
    # torch has no public name for the store that a process group was created with.
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _warn(error: RuntimeError) -> None:
    events.warn_once(
        "gemm_ranks",
        f"ranks cannot agree on GEMM kernels, so every rank selects its own: {error}",
    )
