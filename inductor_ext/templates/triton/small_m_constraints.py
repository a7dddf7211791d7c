"""Constraints of the templates for a small M: `gemv`, `direct` and `stationary`.

Their threads load operands into registers, so that what a thread holds limits the tile.
"""

from __future__ import annotations

import functools

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import DTYPE_BITS, next_power_of_two
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraint import Constraint, register
from inductor_ext.templates.triton.templates import CHUNK_BYTES, STRIP

CONSTRAINTS: dict[str, Constraint] = {}

_constraint = functools.partial(register, CONSTRAINTS)


@_constraint("gemv")
def _check_gemv(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """M is at most 8, in one tile; what a thread holds at once stays in registers; 8-bit b has at
    most one scale per column.
    """
    dequant = problem.dequant
    if dequant is not None and (dequant.scales == "group" or dequant.zero_points):
        return "gemv supports per-tensor and per-column scales only, and no zero points"
    if DTYPE_BITS[problem.b.dtype] < 8:
        return f"gemv does not unpack {problem.b.dtype}"
    if problem.rows > 8:
        return f"gemv supports M up to 8, and M is {problem.rows}"
    if config.block_m < problem.rows:
        return f"gemv takes all {problem.rows} rows in one tile, and block_m is {config.block_m}"
    a, b = DTYPE_BITS[problem.a.dtype], DTYPE_BITS[problem.b.dtype]
    operands = (config.block_m * a + config.block_n * b) * config.block_k // 32 // config.threads
    products = config.block_m * config.block_n * config.block_k // config.threads
    if operands > 64 or products > 128:
        return (
            f"a thread would hold {operands} registers of operands and {products} of products; 64 "
            "and 128 are free"
        )
    return None


@_constraint("direct", "stationary")
def _check_words(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Lanes load 16 bytes of a column of b at a time, in whole steps of K, and a load does not
    cross the border of a scale group.
    """
    a, b, dequant = problem.a, problem.b, problem.dequant
    if b.dtype not in ("int8", "uint8", "int4", "uint4"):
        return f"{config.template} loads integers, and b is {b.dtype}"
    if a.layout != "row" or b.layout != "column" or min(a.vector_bytes, b.vector_bytes) < 16:
        return "rows of a or columns of b are not contiguous and 16-byte aligned"
    if problem.k % (config.block_k * config.split_k):
        return f"K of {problem.k} is no whole number of steps of {config.block_k} for every split"
    if dequant is None:
        return None
    if dequant.zero_points:
        return f"{config.template} supports only one zero point for all of b"
    chunk = 8 * CHUNK_BYTES // DTYPE_BITS[b.dtype]
    if dequant.group and dequant.group % chunk:
        return f"a scale group of {dequant.group} ends within a load"
    return None


@_constraint("direct")
def _check_direct(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """M is at most 8, in tiles of 16 to 64 columns; a step is one or two loads per warp."""
    columns = config.block_n // (2 if problem.epilogue.gated else 1)
    if problem.rows > 8 or config.block_m != 8 or columns not in (16, 32, 64):
        return (
            "direct has up to 8 rows in tiles of 8 by 16 to 64 columns, and not "
            f"{problem.rows} in tiles of {config.block_m} by {columns}"
        )
    if config.chunks(problem) not in (1, 2):
        warps = config.num_warps
        return f"a step of {config.block_k} is not one or two loads of each of {warps} warps"
    return None


MOST_STATIONARY = 64
"""Registers per thread that hold elements of a: half of the 128 at which two CTAs of 8 warps fit on
an SM. A strip of 8-bit b takes 32, its accumulators 8."""

MOST_SUMS = 32
"""Accumulator registers per thread in the final split-K reduction, which covers all columns of a
CTA at once. With more, this step would need more registers than the main loop, or spill."""


@_constraint("stationary")
def _check_stationary(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """M is at most 16, and the CTA's part of a fits in registers. Each CTA has a single step along
    K; the splits of K are reduced in the same launch.
    """
    if problem.rows > config.block_m or config.block_m not in (8, 16):
        return (
            "stationary has up to 16 rows in tiles of 8 or 16, and not "
            f"{problem.rows} in tiles of {config.block_m}"
        )
    matmuls = 2 if problem.epilogue.gated else 1
    columns = STRIP * matmuls
    if config.block_n % columns:
        return f"block_n is {config.block_n}, not a multiple of the {columns} columns of strips"
    width = next_power_of_two(config.block_n // matmuls) * matmuls
    if config.block_m * width > MOST_SUMS * config.threads:
        return (
            f"accumulators of {config.block_m} rows by {width} columns are more than {MOST_SUMS} "
            f"for each of {config.threads} threads"
        )
    registers = config.block_m * config.block_k // (2 * config.threads)
    if config.chunks(problem) < 1 or registers > MOST_STATIONARY:
        return (
            f"a step of {config.block_k} is less than a load of each of {config.num_warps} warps, "
            f"or its {registers} registers a thread for rows of a are more than {MOST_STATIONARY}"
        )
    if not config.fused_split_k or problem.k != config.block_k * config.split_k:
        return (
            f"K of {problem.k} is not {config.split_k} steps of {config.block_k}, two or more, "
            "that are reduced in the same launch"
        )
    return None
