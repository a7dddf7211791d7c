"""Judges operators: eager mode, inductor_ext and Inductor (default) on PyTorch's samples.

The sweep checks that inductor_ext agrees with eager mode wherever Inductor (default) does.
Inductor (default) is asked only where the extension does not agree with eager mode in everything,
unless the cases where the extension is better are to be counted too.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from test.fuzz.op_sweep_cases import SAMPLES, Case, Prepared, prepare
from test.fuzz.op_sweep_compare import reason
from test.fuzz.op_sweep_ways import Outcome, Status, compiled_outcomes, export_failure, settings

OURS = "inductor_ext"

STOCK = "inductor"


class Verdict(str, enum.Enum):
    """The verdict of a case on inductor_ext."""

    AGREE = "agree"
    """Eager mode and the extension agree, and Inductor (default) does if it ran."""
    ABOVE_STOCK = "above_stock"
    """The extension agrees with eager mode, Inductor (default) does not."""
    BELOW_STOCK = "below_stock"
    """Inductor (default) agrees with eager mode, the extension does not."""
    BOTH_FAIL = "both_fail"
    EAGER_FAILS = "eager_fails"
    NOT_CAPTURED = "not_captured"
    """Dynamo passed no graph to any backend, or torch.export does not support the case."""


@dataclasses.dataclass(frozen=True)
class Result:
    """One judged case. `stock` and `ours` are None for a backend that did not run."""

    case: Case
    verdict: Verdict
    why: str = ""
    stock: Status | None = None
    ours: Status | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object; `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Result:
        """Raises KeyError or ValueError where `fields` is not what `to_json` writes."""
        stock, ours = fields["stock"], fields["ours"]
        return cls(
            case=Case(**fields["case"]),
            verdict=Verdict(fields["verdict"]),
            why=fields["why"],
            stock=None if stock is None else Status(stock),
            ours=None if ours is None else Status(ours),
        )


_AMONG_OTHERS = "compiled with other operators"
"""Begins the reason of a case that agrees if it is compiled alone."""

Announce = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Judge:
    """How cases are judged.

    Args:
        samples: the number of samples of each operator, from its first.
        always_stock: run Inductor (default) on every case, to find the cases above it.
        known: outcomes by backend of the only case, for a backend that ended its process.
        announce: called with the stage about to start, for the attribution of a crash: "eager" or
            the name of a backend.
    """

    samples: int = SAMPLES
    always_stock: bool = False
    known: Mapping[str, Outcome] = dataclasses.field(default_factory=dict)
    announce: Announce = lambda stage: None

    def judge(self, cases: Sequence[Case]) -> list[Result]:
        """Judge cases of one group, which are compiled together.

        Cases that draw random numbers are judged alone, since other operators' draws would shift
        theirs.
        """
        self.announce("eager")
        results = []
        alone, together = [], []
        with settings():
            for case in cases:
                prepared = prepare(case, self.samples)
                if isinstance(prepared, str):
                    results.append(Result(case, Verdict.EAGER_FAILS, prepared))
                elif case.way == "package" and (why := export_failure(prepared)):
                    results.append(Result(case, Verdict.NOT_CAPTURED, why))
                else:
                    (alone if prepared.uses_random_numbers else together).append(prepared)
            for group in [[prepared] for prepared in alone] + [together]:
                results += self._judge_group(group)
        return sorted(results, key=lambda result: cases.index(result.case))

    def _judge_group(self, group: Sequence[Prepared]) -> list[Result]:
        ours = self.outcomes(OURS, group)
        doubtful = [
            prepared for prepared in group if self.always_stock or not ours[prepared.case].is_eager
        ]
        if any(outcome.why.startswith(_AMONG_OTHERS) for outcome in ours.values()):
            doubtful = list(group)  # Inductor may fail among the same operators.
        stock = self.outcomes(STOCK, doubtful)
        results = []
        for case in (prepared.case for prepared in group):
            verdict, why = verdict_of(stock.get(case), ours[case])
            statuses = stock[case].status if case in stock else None, ours[case].status
            results.append(Result(case, verdict, why, *statuses))
        return results

    def outcomes(self, backend: str, group: Sequence[Prepared]) -> dict[Case, Outcome]:
        """Compile cases together; those that do not agree, and groups that fail, are repeated.

        A case that agrees alone but not among others keeps the outcome among others. Only a case
        compiled alone may have graph breaks.
        """
        if not group:
            return {}
        if backend in self.known:
            return {prepared.case: self.known[backend] for prepared in group}
        self.announce(backend)
        try:
            outcomes = compiled_outcomes(backend, group, whole=len(group) > 1)
        except Exception as error:
            if len(group) == 1:
                return {group[0].case: Outcome(Status.FAILS, reason(error))}
            middle = len(group) // 2
            halves = group[:middle], group[middle:]
            return {**self.outcomes(backend, halves[0]), **self.outcomes(backend, halves[1])}
        found = {}
        for prepared, outcome in zip(group, outcomes, strict=True):
            if len(group) > 1 and not outcome.is_eager:
                alone = self.outcomes(backend, [prepared])[prepared.case]
                if alone.is_eager and outcome.status is Status.DISAGREES:
                    why = f"{_AMONG_OTHERS}: {outcome.why}"
                    outcome = dataclasses.replace(outcome, why=why)
                else:
                    outcome = alone
            found[prepared.case] = outcome
        return found


def verdict_of(stock: Outcome | None, ours: Outcome) -> tuple[Verdict, str]:
    """The verdict that follows from the two backends' outcomes, and its reason.

    Args:
        stock: the outcome of Inductor (default), None if it did not run.
        ours: the extension's outcome.
    """
    works = Status.AGREES, Status.NOT_CAPTURED
    if stock is None:
        return Verdict.AGREE, ""
    if stock.status not in works:
        if ours.status in works:
            return Verdict.ABOVE_STOCK, stock.why
        return Verdict.BOTH_FAIL, ours.why
    if ours.status not in works:
        return Verdict.BELOW_STOCK, ours.why
    if not ours.other_layout <= stock.other_layout:
        return Verdict.BELOW_STOCK, "strides or aliasing differ from eager mode and stock"
    if ours.status is Status.NOT_CAPTURED:
        if stock.status is Status.AGREES:
            return Verdict.BELOW_STOCK, "Dynamo captured no graph"
        return Verdict.NOT_CAPTURED, "Dynamo captured no graph"
    return Verdict.AGREE, ""


def run_cases(cases: Sequence[Case]) -> int:
    """Compile and run cases with the extension without judging them; return how many ran."""
    judge = Judge()
    with settings():
        prepared = [prepare(case, judge.samples) for case in cases]
        group = [case for case in prepared if isinstance(case, Prepared)]
        outcomes = judge.outcomes(OURS, group)
    return sum(outcome.status is not Status.FAILS for outcome in outcomes.values())
