"""Functions that generated code calls to check `memory_budget` at the sizes of a call.

Lightweight: it imports nothing of torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext import exc
from inductor_ext.hooks import context

_MAX_ACCEPTED = 4096
"""Number of tuples of sizes that a `BudgetCheck` keeps."""


class NotCalled(Exception):
    """Raised in place of a call of generated code while its checks are collected."""


@contextlib.contextmanager
def collect_checks() -> Iterator[list[BudgetCheck]]:
    """Collect the checks of the code that this thread generates and loads.

    Calls of code with a check raise `NotCalled` before they do anything.
    """
    checks: list[BudgetCheck] = []
    with context.enter(budget_checks=checks):
        yield checks


class BudgetCheck:
    """Checks the peak of a generated function, once per tuple of sizes.

    Generated code calls it only if the sizes are not in `accepted`, which is what a call costs that
    is within the budget.

    Args:
        graph: the function's name.
        budget: bytes.
        sizes: what each argument is, for the error.
        devices: devices of the results of `peaks`.
        peaks: returns the peak on each device, in bytes, at the given sizes.
    """

    def __init__(
        self,
        graph: str,
        budget: int,
        sizes: tuple[str, ...],
        devices: tuple[str, ...],
        peaks: Callable[..., tuple[int, ...]],
    ) -> None:
        self.graph = graph
        self.budget = budget
        self.sizes = sizes
        self.devices = devices
        self.peaks = peaks
        self.accepted: set[Any] = set()
        """The sizes within the budget: a tuple for two and more."""
        if (collected := context.current().budget_checks) is not None:
            collected.append(self)

    def __call__(self, *sizes: int) -> None:
        """Check a call and add its sizes to `accepted`.

        Raises:
            exc.MemoryBudgetCallError: the peak on a device is above the budget.
            NotCalled: checks are collected, see `collect_checks`.
        """
        if context.current().budget_checks is not None:
            raise NotCalled
        for device, needed in zip(self.devices, self.peaks(*sizes), strict=True):
            if needed > self.budget:
                raise exc.MemoryBudgetCallError(
                    graph=self.graph,
                    sizes=", ".join(
                        f"{name} = {size}" for name, size in zip(self.sizes, sizes, strict=True)
                    ),
                    needed=needed,
                    device=device,
                    budget=self.budget,
                )
        if len(self.accepted) >= _MAX_ACCEPTED:
            self.accepted.clear()
        self.accepted.add(sizes if len(sizes) > 1 else sizes[0])


def raise_budget_errors(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that raises the budget errors of generated C++ as their own class."""

    @functools.wraps(call)
    def checked_call(args: Any) -> Any:
        try:
            return call(args)
        except RuntimeError as error:
            budget_error = exc.MemoryBudgetCallError.from_message(str(error))
            if budget_error is None:
                raise
        raise budget_error

    return checked_call
