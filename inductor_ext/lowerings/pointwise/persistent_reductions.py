"""Heuristic that makes more of Inductor's inner reductions persistent (row held in registers).

A norm or a softmax reads a row more than once: to reduce it and to apply the result. Inductor's
Triton kernels hold rows of up to 1024 elements in registers ("persistent reduction") and re-read
longer rows in each pass. On an H100, persistent reductions are faster up to 8192 elements: a
LayerNorm of 2048 rows of 4096 bfloat16 took 13.0 instead of 19.9 us, a softmax 13.9 instead of
25.7; a copy of the same size takes 12.1. At 16384 elements a LayerNorm took 57.6 instead of
54.2 us, because of register spills. Norms before matmuls that are not worth fusing into the GEMM's
prologue (`lowerings.graph.match_norm`) become such kernels.

`should_hold_row_in_registers` decides from Inductor's kernel features, and only ever adds
persistent reductions to those that Inductor selects. The decision depends on the number of rows:
Inductor's reduction hint does, and with one row a weight is as large as the input. A persistent
reduction sums in a different order than a looped one. So nothing is added under
`config.batch_invariant`, or where reductions must keep upstream's order
(`numerics.has_strict_reductions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inductor_ext import numerics
from inductor_ext.templates.tensors import next_power_of_two

MOST_ELEMENTS = 8192
"""Maximum number of elements, over all rows, that one CTA holds at the same time."""

_MOST_TILED = 4096
"""Maximum row length if rows may be indexed by two tiled dimensions. Inductor's Triton heuristics
have no configuration for a longer row of such a kernel."""


def passes(schedule: Iterable[Any]) -> int:
    """Return the number of loops over a row in the non-persistent version of a kernel.

    Args:
        schedule: Inductor's `SIMDKernelFeatures.node_schedule`: nodes, and `DisableReduction` and
            `EnableReduction` markers around nodes outside of the reduction loop.
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


def should_hold_row_in_registers(features: Any) -> bool:
    """Whether a reduction that Inductor would generate as a loop should be persistent instead.

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
    padded_length = next_power_of_two(int(length))
    if not 0 < rows <= MOST_ELEMENTS // padded_length:
        return False
    return padded_length <= _MOST_TILED or all(
        dependence.is_contiguous()
        for node in features.scheduler_nodes()
        for dependence in (*node.read_writes.reads, *node.read_writes.writes)
        if is_whole(dependence.name)
    )
