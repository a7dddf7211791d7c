"""Decide which kernel each GEMM of a graph uses: forced, looked up, or tuned now; else Inductor's.

`decide` applies the rule of `force_config` if there is one. Otherwise it looks up the tuning
results (`results_db`) and, if the compile may tune, benchmarks the problems without an exact
result. A compile that may not tune takes a kernel that is predicted to be faster
(`default_choice`). All other problems get Inductor's path. All ranks of a distributed run make the
same decision (`distributed.share_decisions`). The predicates in this module read Inductor's options
(`max_autotune`, `max_autotune_gemm`, `max_autotune_gemm_backends`). The settings `gemm_templates`
and `tuning_*` apply.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from inductor_ext import numerics
from inductor_ext.autotune import distributed, results_db
from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.autotune.default_choice import choose
from inductor_ext.autotune.results import Environment
from inductor_ext.hooks import context
from inductor_ext.settings import Settings
from inductor_ext.templates.device import Device
from inductor_ext.templates.kernels import Config, legal
from inductor_ext.templates.problem import GemmProblem

Rule = Callable[[GemmProblem], "Config | None"]
"""Maps a problem to a configuration, or to None for Inductor's path."""


@contextlib.contextmanager
def force_config(rule: Rule) -> Iterator[None]:
    """Let `rule` decide about every GEMM in this thread, without any lookup, inside the context.

    If the configuration is not legal for its problem, Inductor's path is used.
    """
    with context.enter(gemm_rule=rule):
        yield


def is_forced() -> bool:
    """Whether a rule is active in this thread."""
    return context.current().gemm_rule is not None


def forced_config(problem: GemmProblem) -> Config | None:
    """Return the configuration that this thread's rule selects for a problem, legal or not.

    A rule must be active.
    """
    rule: Rule | None = context.current().gemm_rule
    assert rule is not None
    return rule(problem)


def backend_enabled(backend: str) -> bool:
    """Whether Inductor's options list a GEMM backend.

    Args:
        backend: its name in `max_autotune_gemm_backends`, in upper case.
    """
    from torch._inductor import config

    backends = config.max_autotune_gemm_backends.split(",")
    return backend in {text.strip().upper() for text in backends}


def may_tune(backend: str) -> bool:
    """Whether Inductor's options allow benchmarking the candidates of a GEMM backend.

    Args:
        backend: as in `backend_enabled`.
    """
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm) and backend_enabled(backend)


def tunes_now(settings: Settings, backend: str) -> bool:
    """Whether the candidates of a GEMM backend are benchmarked during this compile."""
    return settings.tuning == "compile" and may_tune(backend)


def launches_dependents() -> bool:
    """Whether kernels that support programmatic dependent launch (PDL) are launched with it.

    A PDL kernel is launched before the kernel ahead of it has finished. From Python this needs
    Triton's launcher. Other kernels use torch's static launcher in C++, which does not support the
    launch attribute but saves more host time than PDL would save on the GPU. Inside a CUDA graph
    and from a C++ wrapper, both launchers cost the same.
    """
    from torch._inductor import config

    by_torch = config.use_static_cuda_launcher and not config.cpp_wrapper
    return bool(config.triton.cudagraphs or config.triton.enable_pdl or not by_torch)


def may_replace_aten(settings: Settings) -> bool:
    """Whether extension kernels may be compared with Inductor's path here, or a rule decides.

    Args:
        settings: settings of the compile.
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
    candidate_set: str = "",
    predict: bool = False,
    allowed: Callable[[Config], bool] = lambda config: True,
) -> dict[GemmProblem, Decision]:
    """Return the decision for each problem; the same on all ranks of a distributed run.

    Args:
        problems: the problems of one graph; equal problems count once.
        device: the device that they run on.
        settings: the settings of the tuning cache are used.
        tune: None if nothing may be benchmarked. Then results that were measured in another
            environment are also used, see `results_db`.
        candidate_set: identifies the candidate set, see `Environment`.
        predict: whether `default_choice` decides what has no result and is not tuned.
        allowed: whether a configuration that was measured in another environment may be used.
    """
    unique = list(dict.fromkeys(problems))
    rule: Rule | None = context.current().gemm_rule
    if rule is not None:
        configs = {problem: rule(problem) for problem in unique}
        return {
            problem: Decision(
                config if config and legal(problem, config, device) else None, "forced"
            )
            for problem, config in configs.items()
        }
    database = results_db.open_database(settings)

    def environments(problem: GemmProblem) -> Environment:
        return Environment.of(device, problem.operation, candidate_set)

    def decide_here(pending: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        decisions = {}
        for problem in pending:
            result = database.lookup(problem, device, environments)
            if result is None or not (result.exact or tune is None):
                continue
            config = result.decision.config
            if result.exact or config is None or allowed(config):
                decisions[problem] = result.decision
        unknown = [problem for problem in pending if problem not in decisions]
        if tune is not None and unknown:
            decisions |= database.tune_missing(unknown, device, tune, environments)
        elif predict:
            decisions |= {problem: choose(problem, device) for problem in unknown}
        return {problem: decisions.get(problem, STOCK) for problem in pending}

    return distributed.share_decisions(
        unique, decide_here, environments, "known" if tune is None else "tuned"
    )
