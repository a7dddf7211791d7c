"""Which reductions along rows keep a row in registers.

A norm or a softmax needs a row more than once: for its sums, and to apply them. Inductor's Triton
kernels hold a row of up to 1024 elements ("persistent reduction"), and read longer ones again in
each pass. On an H100 holding them is faster up to 8192 elements: a LayerNorm of 2048 rows of 4096
bfloat16 took 13.0 us for 19.9, a softmax 13.9 for 25.7, a copy of as much 12.1. Of 16384 elements
a LayerNorm took 57.6 for 54.2, as some of its registers are spilled. Norms before products that do
not pay as a part of these (`lowerings.graph.match_norm`) are such kernels.

`keeps_rows` decides, from what Inductor says of a kernel; it only adds to stock's decision. It
depends on the number of rows: Inductor's hint about a reduction does, and with one row a weight is
as large as the input. A row that is held is summed in another order than one that is read in a
loop. So nothing is added under `config.batch_invariant`, nor where sums have upstream's order
(`numerics.has_strict_reductions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inductor_ext import numerics
from inductor_ext.templates.problem import next_power_of_two

__all__ = ["MOST_ELEMENTS", "keeps_rows", "passes"]

MOST_ELEMENTS = 8192
"""Of all rows that one CTA holds at the same time."""

_MOST_TILED = 4096
"""Of a row where rows may be numbered by two indices: beyond that Inductor's heuristics for Triton
have no configuration of such a kernel."""


def passes(schedule: Iterable[Any]) -> int:
    """Loops over a row of a kernel that does not hold it.

    Args:
        schedule: Inductor's `SIMDKernelFeatures.node_schedule`: nodes, and markers between which
            nodes stand that have nothing to do with the elements of a row.
    """
    from torch._inductor.codegen.simd_kernel_features import DisableReduction, EnableReduction

    count, inside, begins = 0, True, True
    for entry in schedule:
        if entry is DisableReduction:
            inside = False
        elif entry is EnableReduction:
            inside = begins = True
        elif inside and begins:
            count, begins = count + 1, False
    return count


def keeps_rows(features: Any) -> bool:
    """Whether a kernel that Inductor would let loop over rows should hold them instead.

    Args:
        features: Inductor's `SIMDKernelFeatures`.
    """
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    if numerics.is_batch_invariant() or numerics.has_strict_reductions(features):
        return False
    length = features.reduction_numel
    if not getattr(length, "is_Integer", False) or length > MOST_ELEMENTS:
        return False
    (first, *_) = features.scheduler_nodes()
    if first.get_device().type != "cuda" or features.get_reduction_hint() != ReductionHint.INNER:
        return False
    if passes(features.node_schedule) < 2:
        return False
    whole = features.numel * length
    sizes = V.graph.sizevars

    def is_whole(name: str) -> bool:
        return bool(sizes.statically_known_equals(V.graph.get_numel(name), whole))

    rows = sum(map(is_whole, features.buffer_read_counts()))
    held = next_power_of_two(int(length))
    if not 0 < rows <= MOST_ELEMENTS // held:
        return False
    return held <= _MOST_TILED or all(
        dependence.is_contiguous()
        for node in features.scheduler_nodes()
        for dependence in (*node.read_writes.reads, *node.read_writes.writes)
        if is_whole(dependence.name)
    )
