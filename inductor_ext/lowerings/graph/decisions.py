"""The decisions of one compile: which kernel each problem gets, among Triton, CUTLASS and Inductor.

Problems whose epilogue is a CUTLASS expression tree are decided among all kernels, others without
CUTLASS. What is not stored is tuned if this compile may benchmark, or in the background (setting
`tuning`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from inductor_ext import events
from inductor_ext.autotune import cutlass_kernels, cutlass_options, decide, results_db
from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.settings import Settings
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.device import Device
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.problem import GemmProblem


class Decider:
    """Maps problems to decisions, each decided once."""

    def __init__(self, settings: Settings, device: Device, index: int) -> None:
        """Start without decisions.

        Args:
            settings: of the compile.
            device: the GPU of the matmuls.
            index: the index of that GPU.
        """
        from inductor_ext.lowerings import cutlass_call

        self.settings = settings
        self.device = device
        self.index = index
        disabled = cutlass_options.Options(enabled=False, tunes=False)
        self.options = cutlass_options.current() if cutlass_call.is_supported() else disabled
        self._decisions: dict[GemmProblem, Decision] = {}

    def __getitem__(self, problem: GemmProblem) -> Decision:
        return self._decisions[problem]

    def decide(self, problems: Iterable[GemmProblem], *, predict: bool = False) -> None:
        """Add the decisions for problems.

        Args:
            problems: those that have been decided before are not decided again.
            predict: whether a kernel may be taken without a measurement.
        """
        unknown = [problem for problem in dict.fromkeys(problems) if problem not in self._decisions]
        trees = [problem for problem in unknown if problem.epilogue.tree is not None]
        if trees:
            self._decisions |= self._with_cutlass(trees, predict)
        plain = [problem for problem in unknown if problem not in trees]
        self._decisions |= self._without_cutlass(plain, predict)

    def wants_cutlass(self, problem: GemmProblem) -> bool:
        """Whether a problem is large enough for CUTLASS and has a CUTLASS kernel."""
        if decide.is_forced():
            return self.options.covers(problem)
        return self.options.has_any(problem, self.device)

    def _without_cutlass(
        self, unknown: Sequence[GemmProblem], predict: bool
    ) -> dict[GemmProblem, Decision]:
        """Decide among Triton kernels and Inductor's lowering."""
        if not unknown:
            return {}
        if not decide.backend_enabled("TRITON") and not decide.is_forced():
            # Ignore stored tuning results, too.
            return dict.fromkeys(unknown, STOCK)
        tunes_now = decide.tunes_now(self.settings, "TRITON")
        if self.settings.tuning == "background" and not decide.is_forced():
            from inductor_ext.autotune import background_tuning

            background_tuning.tune_later(
                unknown,
                self.device,
                self.index,
                self.settings,
                results_db.open_database(self.settings),
                dependent=decide.launches_dependents(),
            )
        return decide.decide(
            unknown,
            self.device,
            self.settings,
            self._tune if tunes_now else None,
            predict=predict and self.settings.gemm_predict,
        )

    def _with_cutlass(
        self, unknown: Sequence[GemmProblem], predict: bool
    ) -> dict[GemmProblem, Decision]:
        """Decide among all kernels. Problems without a stored CUTLASS result that cannot be tuned
        now, and problems whose CUTLASS kernel is still being built, are decided without CUTLASS.
        """
        tunes_now = self.options.tunes and self.settings.tuning == "compile"
        tune = self._tune_with_cutlass if tunes_now else None
        decisions = decide.decide(
            unknown,
            self.device,
            self.settings,
            tune,
            candidate_set=self.options.candidate_set,
            allowed=self.options.allows,
        )
        selected = {
            problem: decision.config
            for problem, decision in decisions.items()
            if isinstance(decision.config, CutlassConfig)
        }
        later = cutlass_kernels.find_pending(
            {problem: [config] for problem, config in selected.items()}, self.settings
        )
        others = {
            problem: _without_tree(problem)
            for problem, decision in decisions.items()
            if decision.origin == "unknown" or problem in later
        }
        fallbacks = self._without_cutlass(list(dict.fromkeys(others.values())), predict)
        decisions |= {problem: fallbacks[other] for problem, other in others.items()}
        needed = [pair for pair in selected.items() if pair[0] not in later]
        for (problem, config), why in cutlass_kernels.prepare(needed, self.settings).items():
            events.warn_once(
                f"cutlass_kernel:{config.name}",
                f"{problem_words(problem)} falls back to Inductor (default) because "
                f"{config_words(config)} cannot be used: {why}",
            )
            decisions[problem] = dataclasses.replace(decisions[problem], config=None)
        return decisions

    def _tune_with_cutlass(self, unknown: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        """Tune the problems whose CUTLASS kernels are available now."""
        candidates = {
            problem: [config for config, _ in self.options.rank(problem, self.device)]
            for problem in unknown
        }
        later = cutlass_kernels.find_pending(candidates, self.settings)
        later |= cutlass_kernels.find_unavailable(candidates, self.settings)
        return self._tune([other for other in unknown if other not in later])

    def _tune(self, unknown: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        from inductor_ext.autotune import inductor_benchmark, tuner

        return tuner.tune(
            unknown,
            self.device,
            inductor_benchmark.cuda_bench,
            self.settings,
            index=self.index,
            dependent=decide.launches_dependents(),
        )


def _without_tree(problem: GemmProblem) -> GemmProblem:
    epilogue = dataclasses.replace(problem.epilogue, tree=None)
    return dataclasses.replace(problem, epilogue=epilogue)
