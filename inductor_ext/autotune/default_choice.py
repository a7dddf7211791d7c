"""The kernel of a GEMM without a tuning result, if it is faster than Inductor's for sure.

Without `max_autotune` nothing is measured while a model compiles. Where one kernel replaces
several, where M is small, and for unaligned operands, the cost model's order of the configurations
is good enough to take the first one: most of the gain comes from fewer kernels and from launches,
which it need not predict exactly. `choose` does so for the kinds of GEMMs below, on the GPUs for
which this has been verified; all others keep Inductor's.

The rules come from the 1352 GEMMs in `benchmarks/gemm/measurements`, sizes of model layers drawn at
random and measured on an H100. They take a kernel for 594 of them, 1.62 times as fast as Inductor's
on average (geometric mean), and 0.98 times in the worst case. The shipped tuning tables have other
sizes, and an H200 too. There it takes 103 kernels, 1.01 times as fast in the worst case.
`test_default_choice` checks both.
"""

from __future__ import annotations

import functools
import math

from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import ranking
from inductor_ext.templates.triton.config import GemmConfig

_FEW_ROWS = 16
_SMALL_M = 64
"""For more rows, cuBLAS's choice of a kernel is hard to beat without measuring: there must be
several kernels to replace by one, or operands that cuBLAS does not support well."""
_LARGE_M = 1024
_CAPABILITY = (9, 0)
"""Compute capability of the GPUs that the rules have been verified on."""

_CANDIDATES = 6
"""Configurations of the ranking among which one is taken, as many as were measured."""

_KERNEL = 5.0
"""Microseconds that Inductor's path takes beyond the roofline: one kernel, in a CUDA graph."""
_FURTHER_KERNEL = 4.5
"""The same for each further matmul."""
_POINTWISE = 2.0
"""The same for a pointwise epilogue or a norm, which Inductor fuses with what precedes it."""


@functools.lru_cache(maxsize=1024)
def choose(problem: GemmProblem, device: Device) -> Decision:
    """Return the decision for a problem without a tuning result: a configuration, or Inductor's
    path if none is faster for sure.
    """
    # Ranking takes some 10 ms, which most problems do not need.
    if not _is_covered(problem, device) or not _is_faster(problem, None, math.inf):
        return STOCK
    for config, prediction in ranking.rank(problem, device, _CANDIDATES):
        if _is_predictable(problem, config):
            time = estimate_stock(problem, device)
            if _is_faster(problem, config, time / prediction.total):
                saving = max(0.0, time - prediction.total)
                return Decision(config, "predicted", saving=saving)
            break
    return STOCK


def explain_stock(problem: GemmProblem, device: Device) -> str | None:
    """Return why `choose` keeps Inductor's path for a problem; None if it does not."""
    if device.capability != _CAPABILITY:
        required = ".".join(map(str, _CAPABILITY))
        return f"kernels are taken without a measurement on compute capability {required} only"
    if not _is_covered(problem, device):
        return "no GEMMs of this kind were measured"
    if choose(problem, device).config is not None:
        return None
    return "Inductor's kernel is about as fast, or the cost model is not accurate enough"


def estimate_stock(problem: GemmProblem, device: Device) -> float:
    """Return a low estimate of the microseconds that Inductor's path takes."""
    kernels = max(1, len(problem.parts))
    time = problem.roofline(device) + _KERNEL + (kernels - 1) * _FURTHER_KERNEL
    if problem.epilogue.inputs or problem.epilogue.pointwise:
        time += _POINTWISE
    return time + (_POINTWISE if problem.norm is not None else 0)


def _is_covered(problem: GemmProblem, device: Device) -> bool:
    """Whether a problem is of a kind that has been measured."""
    epilogue = problem.epilogue
    return (
        device.capability == _CAPABILITY
        and problem.batch == 1
        and problem.operation in ("mm", "addmm", "mixed")
        and problem.a.dtype in ("bfloat16", "float16")
        and problem.a.layout == "row"
        and problem.b.layout == "column"
        and not epilogue.reductions
        and epilogue.tree is None
        and (problem.norm is None or problem.norm.kind == "rms")
    )


def _is_predictable(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether a configuration is never much slower than predicted.

    Large blocks of K wait for their loads with few stages, and a fused reduction of splits waits
    for other CTAs. The rest are features that the model was not fitted to.
    """
    if config.template == "gemv":
        return _is_predictable_gemv(problem, config)
    if config.block_k >= 512 and config.num_stages <= 3:
        return False
    untested = config.fused_split_k, config.stream_k, config.tma_store, config.align_operands
    return not any(untested)


def _is_predictable_gemv(problem: GemmProblem, config: GemmConfig) -> bool:
    """The same for `gemv`, which spills accumulators of several rows, and of many columns if the
    matrix is large.
    """
    n, k = problem.n, problem.k
    if problem.m > 1 or config.block_m > 1:
        return False
    if problem.norm is not None or (n <= 4608 and k < 4608):
        return True
    if n > 6656 or k < 4608:
        return config.block_n <= 4
    return n <= 2048 and config.block_n <= 2


def _is_faster(problem: GemmProblem, config: GemmConfig | None, ratio: float) -> bool:
    """Whether a kernel is faster than Inductor's path, by the kind of the problem.

    Args:
        problem: a covered problem.
        config: the configuration; None for any.
        ratio: Inductor's estimated time over the kernel's predicted time. With infinity, the result
            is whether any kernel may be faster.
    """
    epilogue = problem.epilogue
    has_matrix = any(operand.broadcast == "matrix" for operand in epilogue.inputs)
    is_biased = bool(epilogue.inputs or epilogue.pointwise) and not has_matrix
    if problem.m > _SMALL_M:
        return _is_faster_for_many_rows(problem, config, ratio, has_matrix, is_biased)
    m, n, k = problem.m, problem.n, problem.k
    if problem.dequant is not None:
        return problem.norm is None and (m == 1 or ratio >= 0.8)
    if n % 8 or k % 8:
        return not is_biased and problem.norm is None and (m == 1 or ratio >= 0.8)
    if problem.norm is not None:
        is_plain = not epilogue.gated and not is_biased and not has_matrix
        return is_plain and m <= _FEW_ROWS and (m > 1 or k <= 4608)
    if epilogue.gated:
        return m <= _FEW_ROWS or ratio >= 1.1
    if problem.parts or has_matrix:
        return True
    if is_biased:
        return m == 1 or (m <= _FEW_ROWS and k >= 1024 and n <= 8192)
    return m == 1


def _is_faster_for_many_rows(
    problem: GemmProblem,
    config: GemmConfig | None,
    ratio: float,
    has_matrix: bool,
    is_biased: bool,
) -> bool:
    if problem.norm is not None or problem.dequant is not None:
        return False
    if problem.n % 8 or problem.k % 8:
        return not is_biased and not has_matrix and ratio >= 0.75
    if problem.epilogue.gated:
        has_large_tile = config is not None and (config.block_m, config.block_n) == (128, 256)
        return ratio >= 1.05 or (has_large_tile and problem.m >= _LARGE_M)
    if problem.parts:
        return ratio >= 1.2
    if has_matrix:
        return ratio >= 1.05
    return is_biased and ratio >= 1.05
