"""Plans for symbolic sizes: one stacking order, with offsets that hold for every size.

With symbolic sizes a plan cannot be a list of offsets found by a search. It is an order: of any two
buffers that are live at the same time, one is always below the other. A buffer starts at the
aligned maximum end of the buffers below it, which is valid for all non-negative sizes, and the
height of the stack is a longest path. Only the buffers directly below must be considered, those not
already below another one, which keeps the expressions small (transitive reduction: Aho, Garey and
Ullman, 1972).

- `stacking` finds the order. Its candidates are the solver's placements for the hinted sizes and
  for scaled ones, and the placements of a first fit that considers all of these sizes at once. It
  takes the order with the lowest worst-case ratio of peak to lower bound.
- `algebra` builds the expressions and keeps them short.
- `evaluator` evaluates many expressions at many values of their symbols.
- `runtime_replanner` is for arenas where no order is good for all sizes: it plans at run time, once
  per tuple of sizes.

Pure: it knows symbols only through sympy. The caller supplies the functions that round up and take
a maximum, so that a code printer supports their results.

Generated code imports `Replanner` from this package.
"""

from __future__ import annotations

from inductor_ext.memory.planner.symbolic.runtime_replanner import Replanner

__all__ = ["Replanner"]
