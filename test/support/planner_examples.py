"""How many random problems the planner's tests draw: the same few in each run, or many.

With `PLANNER_EXAMPLES=100000` every test that uses `examples` draws that many new ones.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from hypothesis import HealthCheck, settings

__all__ = ["examples", "unchecked_examples"]

_EXAMPLES = os.environ.get("PLANNER_EXAMPLES")


def examples(default: int, suppress: Collection[HealthCheck] = ()) -> settings:
    """The same `default` examples in each run, or the number that the variable sets."""
    return settings(
        max_examples=int(_EXAMPLES or default),
        derandomize=_EXAMPLES is None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, *suppress],
    )


def unchecked_examples(default: int) -> settings:
    """`examples` without hypothesis' health checks, for problems that take long to draw."""
    return examples(default, suppress=tuple(HealthCheck))
