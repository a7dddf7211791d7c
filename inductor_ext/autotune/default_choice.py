"""The kernel of a GEMM without a tuning result, if it is faster than Inductor's for sure.

Without `max_autotune` nothing is measured while a model compiles. Where one kernel replaces
several, where M is small, and for unaligned operands, the cost model's order of the configurations
is good enough to take the first one: most of the gain comes from fewer kernels and from launches,
which it need not predict exactly. `choose` does so for the kinds of GEMMs below, on the GPUs for
which this has been verified; all others keep Inductor's.

The rules come from the 1352 GEMMs in `benchmarks/gemm/measurements`, sizes of model layers drawn at
random and measured on an H100. They take a kernel for 710 of them, 1.68 times as fast as Inductor's
on average (geometric mean), and 0.98 times in the worst case. They were tested on 375 other random
layers on an H200 (189 kernels, 1.50 times, 0.98 in the worst case), and on the shipped tuning
tables of both GPUs (148 kernels, 1.01 in the worst case). `test_default_choice` checks all of this.
"""

from __future__ import annotations

import functools
import math

from inductor_ext.autotune.decision import STOCK, Decision
from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import size_of
from inductor_ext.templates.triton import ranking
from inductor_ext.templates.triton.config import GemmConfig

_FEW_ROWS = 16
_SMALL_M = 64
"""For more rows, cuBLAS's choice of a kernel is hard to beat without measuring: there must be
several kernels to replace by one, or operands that cuBLAS does not support well."""
_SEVERAL_M = 256
_LARGE_M = 1024
_SMALL_SIZE = 512
"""Largest M, N and K of batches of matrices; those that were measured have up to 257."""
_FEW_WEIGHTS = 1 << 20
"""Elements of a matrix of 4 bits below which a kernel gains little."""
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
    if problem.dequant is not None:
        # A separate pass writes the dequantized weights, which the matmul reads.
        dequantized = size_of(problem.n * problem.k, problem.a.dtype)
        time += 2 * dequantized / device.bandwidth * 1e6
    return time + (_POINTWISE if problem.norm is not None else 0)


def _is_covered(problem: GemmProblem, device: Device) -> bool:
    """Whether a problem is of a kind that has been measured."""
    epilogue = problem.epilogue
    is_half = problem.a.dtype in ("bfloat16", "float16") and problem.a.layout == "row"
    if device.capability != _CAPABILITY or not is_half:
        return False
    if problem.operation == "bmm":
        return _is_small_unaligned_batch(problem)
    return (
        problem.operation in ("mm", "addmm", "mixed")
        and problem.b.layout == "column"
        and not epilogue.reductions
        and epilogue.tree is None
        and (problem.norm is None or problem.norm.kind == "rms")
    )


def _is_small_unaligned_batch(problem: GemmProblem) -> bool:
    """Whether a problem is a batch of small matrices with unaligned operands, without epilogue."""
    sizes = (problem.m, problem.n, problem.k)
    is_plain = problem.epilogue == Epilogue() and problem.prologue is None and not problem.parts
    return is_plain and _is_unaligned(problem) and problem.m > 1 and max(sizes) <= _SMALL_SIZE


def _is_unaligned(problem: GemmProblem) -> bool:
    """Whether rows of operands or of the output are no multiple of 16 bytes of 16-bit elements."""
    return bool(problem.n % 8 or problem.k % 8)


def _is_predictable(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether a configuration is never much slower than predicted.

    Large blocks of K wait for their loads with few stages, and a fused reduction of splits waits
    for other CTAs. The rest are features that the model was not fitted to. Kernels that dequantize,
    and most for unaligned operands, gain so much that this does not matter.
    """
    if problem.dequant is not None or _is_always_faster_unaligned(problem):
        return True
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
    if problem.dequant is not None:
        return _is_faster_dequantized(problem)
    if _is_unaligned(problem):
        is_plain = not (epilogue.inputs or epilogue.pointwise or problem.parts or problem.norm)
        return is_plain and _is_faster_unaligned(problem, ratio)
    if problem.m > _SMALL_M:
        return _is_faster_for_many_rows(problem, config, ratio, has_matrix, is_biased)
    m, n, k = problem.m, problem.n, problem.k
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


def _is_faster_dequantized(problem: GemmProblem) -> bool:
    """Whether a kernel that dequantizes the weights is faster.

    Inductor writes the dequantized weights to memory and reads them again in every call, so that
    the kernel is 1.2 to 6 times as fast, except for many rows, and with 4 bits also for small
    matrices.
    """
    is_known = problem.b.dtype in ("int8", "uint4") and problem.norm is None
    if not is_known or problem.m > _SMALL_M:
        return False
    if problem.b.dtype == "int8" or problem.parts:
        return True
    return problem.m == 1 or (problem.m <= _FEW_ROWS and problem.n * problem.k >= _FEW_WEIGHTS)


def _is_faster_unaligned(problem: GemmProblem, ratio: float) -> bool:
    """Whether a kernel is faster for N or K that are not a multiple of 8, for which cuBLAS is slow.

    If K is not, and M is small, threads load elements one by one, which the cost model predicts
    less accurately.
    """
    if _is_always_faster_unaligned(problem):
        return True
    return problem.m == 1 or ratio >= (0.8 if problem.m <= _SMALL_M else 0.75)


def _is_always_faster_unaligned(problem: GemmProblem) -> bool:
    """Whether the first configuration is faster, whatever its features are."""
    if problem.m == 1 or not _is_unaligned(problem):
        return False
    return problem.batch > 1 or problem.k % 8 == 0 or problem.m >= _SEVERAL_M


def _is_faster_for_many_rows(
    problem: GemmProblem,
    config: GemmConfig | None,
    ratio: float,
    has_matrix: bool,
    is_biased: bool,
) -> bool:
    if problem.norm is not None:
        return False
    if problem.epilogue.gated:
        has_large_tile = config is not None and (config.block_m, config.block_n) == (128, 256)
        return ratio >= 1.05 or (has_large_tile and problem.m >= _LARGE_M)
    if problem.parts:
        return ratio >= 1.2
    if has_matrix:
        return ratio >= 1.05
    return is_biased and ratio >= 1.05
