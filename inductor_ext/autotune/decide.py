"""The decision about each GEMM of a graph: forced, known, or measured now; else stock's path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from inductor_ext import numerics
from inductor_ext.autotune import distributed, results_db
from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.autotune.results import Environment
from inductor_ext.hooks import context
from inductor_ext.settings import Settings
from inductor_ext.templates.device import Device
from inductor_ext.templates.kernels import Config, legal
from inductor_ext.templates.problem import GemmProblem

__all__ = [
    "Rule",
    "compares",
    "decide",
    "forced",
    "forced_on",
    "is_asked",
    "is_forced",
    "launches_dependents",
    "may_tune",
]

Rule = Callable[[GemmProblem], "Config | None"]
"""A configuration for a problem, or None for stock's path."""


@contextlib.contextmanager
def forced(rule: Rule) -> Iterator[None]:
    """Inside, in this thread, `rule` decides about every GEMM, and nothing is looked up.

    A configuration that is not legal for its problem is not used: stock's path is.
    """
    with context.enter(gemm_rule=rule):
        yield


def is_forced() -> bool:
    """Whether a rule holds in this thread."""
    return context.current().gemm_rule is not None


def forced_on(problem: GemmProblem) -> Config | None:
    """What the rule of this thread, which there has to be, wants for a problem, legal or not."""
    rule: Rule | None = context.current().gemm_rule
    assert rule is not None
    return rule(problem)


def is_asked(backend: str) -> bool:
    """Whether Inductor's options name a backend for GEMMs.

    Args:
        backend: its name in `max_autotune_gemm_backends`, in capitals.
    """
    from torch._inductor import config

    named = config.max_autotune_gemm_backends.split(",")
    return backend in {each.strip().upper() for each in named}


def may_tune(backend: str) -> bool:
    """Whether Inductor's options let the candidates of a backend for GEMMs be measured.

    Args:
        backend: as of `is_asked`.
    """
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm) and is_asked(backend)


def launches_dependents() -> bool:
    """Whether kernels that can be are launched before the one ahead of them has ended.

    Python launches these by Triton's launcher and others by torch's own, in C++, which knows no
    such attribute, and saves the host more than the GPU would gain. In a graph, and from C++, both
    cost the same.
    """
    from torch._inductor import config

    by_torch = config.use_static_cuda_launcher and not config.cpp_wrapper
    return bool(config.triton.cudagraphs or config.triton.enable_pdl or not by_torch)


def compares(settings: Settings) -> bool:
    """Whether kernels of ours may be compared with stock's path here, or a rule decides.

    Args:
        settings: of the compile.
    """
    if not settings.gemm_templates or numerics.gemm_obstacle() is not None:
        return False
    return may_tune("TRITON") or may_tune("CUTLASS") or is_forced()


def decide(
    problems: Iterable[GemmProblem],
    device: Device,
    settings: Settings,
    tune: results_db.Tune | None,
    *,
    circumstances: str = "",
    allowed: Callable[[Config], bool] = lambda config: True,
) -> dict[GemmProblem, Decision]:
    """What each problem gets; the same on all ranks of a distributed run.

    Args:
        problems: of one graph; equal ones count once.
        device: where they run.
        settings: those of the tuning cache are used.
        tune: None where nothing may be measured. Then also what was measured under other
            circumstances counts, see `store`.
        circumstances: text that tells what else the measurements depend on, see `Environment`.
        allowed: whether a configuration that was measured under other circumstances may be used.
    """
    different = list(dict.fromkeys(problems))
    rule: Rule | None = context.current().gemm_rule
    if rule is not None:
        chosen = {each: rule(each) for each in different}
        return {
            each: Decision(config if config and legal(each, config, device) else None, "forced")
            for each, config in chosen.items()
        }
    known = results_db.of_settings(settings)

    def environments(problem: GemmProblem) -> Environment:
        return Environment.of(device, problem.operation, circumstances)

    def decide_here(pending: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        found = {}
        for problem in pending:
            entry = known.lookup(problem, device, environments)
            if entry is None or not (entry.exact or tune is None):
                continue
            if entry.exact or entry.decision.config is None or allowed(entry.decision.config):
                found[problem] = entry.decision
        unknown = [each for each in pending if each not in found]
        if tune is not None and unknown:
            found |= known.settle(unknown, device, tune, environments)
        return {each: found.get(each, STOCK) for each in pending}

    return distributed.agree(
        different, decide_here, environments, "known" if tune is None else "tuned"
    )
