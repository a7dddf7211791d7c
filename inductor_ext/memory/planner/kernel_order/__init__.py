"""Searches for an order of kernels with a lower peak of live bytes (pure).

Kernels are steps 0, 1, ...; a buffer has a size, a producer step and consumer steps. A step
allocates its outputs while its inputs are live; buffers with no later consumer are freed after it.
Every topological order is valid, and the peak is the highest load of a step. Finding the lowest
peak is NP-complete (Sethi, "Complete register allocation problems", SIAM J. Comput. 4(3), 1975), so
`find_order` improves a given order and never returns a worse one:

1. Windows around the peak are reordered by dynamic programming over the sets of steps already run,
   with the current peak as the ceiling. Both ideas are from Ahn et al., "Ordering Chaos:
   Memory-Aware Scheduling of Irregularly Wired Neural Networks for Edge Devices", MLSys 2020. Only
   the best states of each size are kept, so that windows can be long.
2. A buffer that is live across the peak but not used there is consumed before the peak or produced
   after it, together with all steps that must move along.
3. List schedules, forwards from the inputs and backwards from the outputs, are further starting
   points.

The search stops at the lower bound or when its effort is spent. Effort is counted in elementary
operations and not in time, so the same problem gives the same order on every machine. An invalid
order raises exc.OrderError.
"""

from __future__ import annotations

from inductor_ext.memory.planner.kernel_order.problem import Buffer, OrderProblem
from inductor_ext.memory.planner.kernel_order.search import (
    EFFORT,
    Ordering,
    Profile,
    find_order,
    profile,
)

__all__ = ["EFFORT", "Buffer", "OrderProblem", "Ordering", "Profile", "find_order", "profile"]
