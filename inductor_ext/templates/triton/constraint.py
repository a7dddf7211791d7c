"""One constraint on a configuration, and how functions are registered as constraints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.templates import TEMPLATES

Check = Callable[[GemmProblem, GemmConfig, Device], "str | None"]


@dataclass(frozen=True)
class Constraint:
    """A condition that every legal configuration meets."""

    name: str
    meaning: str
    """Description: the docstring of the check."""
    templates: frozenset[str]
    """Names of the templates that it applies to."""
    check: Check
    """Returns None if the condition holds, else the reason why it does not."""


def register(constraints: dict[str, Constraint], *templates: str) -> Callable[[Check], Check]:
    """Return a decorator that adds a check to constraints under its own name.

    Args:
        constraints: the constraints of a module.
        templates: the templates that it applies to; none for all.
    """

    def add(check: Check) -> Check:
        name = check.__name__.removeprefix("_check_")
        meaning = (check.__doc__ or "").strip()
        constraints[name] = Constraint(name, meaning, frozenset(templates or TEMPLATES), check)
        return check

    return add
