"""The decision about each GEMM of a graph: forced, known, or measured now; else stock's path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar

from inductor_ext.selection.decision import STOCK, Decision
from inductor_ext.templates.config import GemmConfig
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem

__all__ = ["Measure", "Rule", "decide", "forced"]

Rule = Callable[[GemmProblem], "GemmConfig | None"]
"""A configuration for a problem, or None for stock's path."""

Measure = Callable[[list[GemmProblem]], Mapping[GemmProblem, Decision]]
"""What measures the candidates of problems of which nothing is known."""

_rule: ContextVar[Rule | None] = ContextVar("inductor_ext_forced_gemm", default=None)


@contextlib.contextmanager
def forced(rule: Rule) -> Iterator[None]:
    """Inside, in this thread, `rule` decides about every GEMM, and nothing is looked up.

    A configuration that is not legal for its problem is not used: stock's path is.
    """
    token = _rule.set(rule)
    try:
        yield
    finally:
        _rule.reset(token)


def decide(
    problems: Iterable[GemmProblem],
    device: Device,
    lookup: Callable[[GemmProblem], Decision | None],
    measure: Measure | None,
) -> dict[GemmProblem, Decision]:
    """What each problem gets.

    Args:
        problems: of one graph; equal ones count once.
        device: where they run.
        lookup: what is known of a problem.
        measure: None where nothing may be measured.
    """
    different = list(dict.fromkeys(problems))
    rule = _rule.get()
    if rule is not None:
        return {each: Decision(rule(each), "forced") for each in different}
    known = {each: found for each in different if (found := lookup(each)) is not None}
    unknown = [each for each in different if each not in known]
    measured = measure(unknown) if measure is not None and unknown else {}
    return {each: known.get(each) or measured.get(each, STOCK) for each in different}
