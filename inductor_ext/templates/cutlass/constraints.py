"""Constraints on which CUTLASS kernel can run which GEMM problem on which device.

Each constraint is stated once, as a check that returns None or the reason why it is violated.
Candidate generation, the cost model and tests share them. `legal` is the predicate; `why_not`
returns all reasons. Nothing here raises for an unsupported combination.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from inductor_ext.templates.cutlass.config import SHORT_NAMES, CutlassConfig
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import (
    DTYPE_BITS,
    FP8,
    HALF,
    INT4,
    GemmProblem,
    Operand,
    aligned,
    ceiling,
    size_of,
)
from inductor_ext.templates.triton.constraints import MOST_ACCUMULATORS

__all__ = ["alignments", "group", "layouts", "legal", "why_not"]

Check = Callable[[GemmProblem, CutlassConfig, Device], "str | None"]

_CHECKS: list[Check] = []

_MOST_CLUSTER = 8
"""Maximum portable cluster size, in CTAs, on capability 9.0 (CUDA C++ programming guide)."""


def _constraint(check: Check) -> Check:
    _CHECKS.append(check)
    return check


def layouts(problem: GemmProblem, swap: bool) -> str | None:
    """Return `CutlassConfig.layouts` for a problem; None if an operand has no contiguous dimension.

    With `swap` the kernel computes the transposed problem, which exchanges `t` and `n`.
    """
    names = {"row": "t", "column": "n"}
    if "strided" in (problem.a.layout, problem.b.layout):
        return None
    a, b = names[problem.a.layout], names[problem.b.layout]
    if not swap:
        return f"{a}{b}t"
    other = {"t": "n", "n": "t"}
    return f"{other[b]}{other[a]}n"


def alignments(problem: GemmProblem, swap: bool) -> tuple[int, int, int]:
    """Return the largest alignments, in elements, of a kernel's A, B and D.

    They divide addresses, strides and the size of the contiguous dimension, as CUTLASS checks them.
    """
    a = _whole(problem.a, problem.m, problem.k)
    b = _whole(problem.b, problem.k, problem.n)
    # The output is allocated for this kernel: contiguous, with storage offset 0.
    d = aligned(problem.stored, problem.columns)
    return (b, a, d) if swap else (a, b, d)


def group(problem: GemmProblem) -> int | None:
    """Return the number of elements along K that share a scale of b; None without such groups."""
    return problem.prologue.group or None if problem.prologue is not None else None


def _whole(operand: Operand, rows: int, columns: int) -> int:
    inner = columns if operand.layout == "row" else rows
    return math.gcd(operand.alignment, inner)


@_constraint
def _check_operation(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the operation is a single matmul that the kernel supports."""
    if problem.parts:
        return "CUTLASS kernels take one factor b"
    if problem.epilogue.reductions:
        return "CUTLASS kernels reduce nothing over rows"
    prologue = problem.prologue
    if prologue is not None and (prologue.normalizes or prologue.standardizes):
        return "CUTLASS kernels do not normalise rows"
    if prologue is not None and prologue.zero_points:
        return "zero points of b are not covered"
    if config.group != group(problem):
        return f"scales are of groups of {group(problem)}, and the kernel's of {config.group}"
    if config.grouped != (problem.operation == "grouped"):
        return (
            f"a {'grouped' if config.grouped else 'plain'} kernel does not do {problem.operation}"
        )
    if config.grouped and problem.divided != "m":
        return f"groups that divide {problem.divided} are not covered"
    if config.grouped and config.arch < 90:
        return "grouped products are covered for capability 9.0 only"
    return None


@_constraint
def _check_device(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the device can run the kernel's binary.

    sm_90a code runs on capability 9.0 only; other code on the same major version with at least the
    same minor version (CUDA C++ programming guide, binary compatibility).
    """
    major, minor = device.capability
    same = major == config.target // 10 and minor >= config.target % 10
    if not same or (config.arch == 90 and device.capability != (9, 0)):
        return f"code for sm_{config.architecture} does not run on capability {device.capability}"
    return None


@_constraint
def _check_dtypes(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the dtypes are the problem's and that the device has tensor cores for them."""
    if (config.a, config.b) != config.operand_dtypes(problem):
        return f"the kernel multiplies {config.a} and {config.b}"
    if (config.d, config.accumulator) != (problem.stored, problem.accumulator):
        return f"the kernel sums up in {config.accumulator} and stores {config.d}"
    if problem.operation == "mixed":
        narrow, wide = problem.b.dtype, problem.a.dtype
        if wide not in HALF or narrow not in ("int8", *INT4, *FP8):
            return f"{narrow} is not converted to {wide}"
        if config.arch == 90 and not config.swap:
            return "the narrower operand has to be A, which passes through registers"
        if config.arch < 90 and narrow != "int8":
            return f"{narrow} is not converted by mma.sync kernels"
        if config.group and (narrow not in INT4 or problem.prologue.scale_dtype != wide):  # type: ignore[union-attr]
            return f"groups of scales are those of 4 bits, in {wide}"
    elif config.swap and config.arch < 90:
        return "operands are exchanged for warpgroup instructions only"
    elif problem.a.dtype != problem.b.dtype and problem.operation != "scaled":
        return f"{problem.a.dtype} is not multiplied by {problem.b.dtype}"
    if not device.throughput(problem.arithmetic) or problem.arithmetic == "fma":
        return f"{device.name} has no tensor cores for {problem.a.dtype}"
    if problem.arithmetic == "fp8" and config.arch < 89:
        return "8-bit floats need code for sm_89 or newer"
    if config.tf32 != (problem.arithmetic == "tf32"):
        return "float32 is rounded to tf32 if and only if the problem allows it"
    if config.fast_accumulation != (problem.fast_accumulation and problem.arithmetic == "fp8"):
        return "8-bit floats are summed up as the problem says"
    return None


@_constraint
def _check_layouts(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the layouts are the problem's and supported for the dtypes.

    Operands need K contiguous unless they have 16 bits, or 16 bits and more below arch 90.
    """
    found = layouts(problem, config.swap)
    if found is None:
        return "an operand has no contiguous dimension"
    if config.layouts != found:
        return f"the kernel takes {config.layouts}, and the operands are {found}"
    k_major = found[:2] == "tn"
    wide = min(DTYPE_BITS[config.a], DTYPE_BITS[config.b]) >= 16
    if not k_major and not (wide and (DTYPE_BITS[config.a] == 16 or config.arch < 90)):
        return f"{config.a} and {config.b} are multiplied with K contiguous only"
    return None


@_constraint
def _check_alignment(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the operands have the alignment that the kernel assumes.

    The minimum is 16 bytes for TMA and 4 bytes for cp.async.
    """
    found = alignments(problem, config.swap)
    for operand, needed, there in zip("ABD", config.alignments, found, strict=True):
        if there % needed:
            return f"{operand} is aligned to {there} elements, and the kernel needs {needed}"
    dtypes = (config.a, config.b)
    least = 128 if config.arch == 90 else 32
    for operand, dtype, alignment in zip("AB", dtypes, config.alignments, strict=False):
        if alignment * DTYPE_BITS[dtype] < least:
            return (
                f"{operand} is loaded by {alignment} elements, and {least // 8} bytes are the least"
            )
    if config.epilogue == "tma" and config.alignments[2] * DTYPE_BITS[config.d] < 128:
        return f"D is stored by {config.alignments[2]} elements, and TMA needs 16 bytes"
    return None


@_constraint
def _check_schedule(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the kernel family supports the schedule, epilogue, scheduler and cluster."""
    if config.arch < 90:
        if config.mainloop != "multistage" or config.epilogue != "direct":
            return "kernels for capability 8.0 are multistage, and every thread stores"
        if config.cluster != (1, 1, 1):
            return "kernels for capability 8.0 have no clusters"
        if config.scheduler == "stream_k":
            return "stream-K is covered for capability 9.0 only"
        return None
    if config.mainloop == "multistage":
        return "kernels for capability 9.0 are warp-specialised"
    if config.epilogue != "tma":
        return "kernels for capability 9.0 store by TMA"
    cooperative = config.mainloop == "warpspecialized_cooperative"
    if config.scheduler == "stream_k" and not cooperative:
        return "stream-K is there for cooperative kernels only"
    if config.scheduler == "stream_k" and config.grouped:
        return "a grouped kernel has no stream-K"
    if config.grouped and config.mainloop == "warpspecialized":
        return "a grouped kernel is cooperative or pingpong"
    m, n, k = config.cluster
    if k != 1 or m * n > _MOST_CLUSTER or m & (m - 1) or n & (n - 1):
        return f"a cluster of {m}x{n}x{k}: powers of two, {_MOST_CLUSTER} CTAs at most, 1 along K"
    return None


@_constraint
def _check_tile(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the tile is a multiple of the MMA instructions of all warps.

    A wgmma takes 64 rows per warpgroup and 32 bytes along K.
    """
    m, n, k = config.tile
    if config.arch < 90:
        try:
            along_m, along_n = config.warps
        except KeyError:
            return f"there is no division of a tile of {m}x{n} among warps"
        step = config.instruction[2]
        if k % (2 * step) or m % (16 * along_m) or n % (8 * along_n):
            return f"a tile of {m}x{n}x{k} is not made of whole instructions"
        return None
    rows = 128 if config.mainloop == "warpspecialized_cooperative" else 64
    if m % rows:
        return f"{config.mainloop} takes {rows} rows, and the tile has {m}"
    if n % 16 or not 16 <= n <= 256 or m > 256:
        return f"a tile of {m}x{n} is not made of whole instructions"
    narrow, wide = sorted((DTYPE_BITS[config.a], DTYPE_BITS[config.b]))
    if k * wide % 256 or k * wide < 512:
        return f"a tile has {k} elements along K, which is not twice 32 bytes or more"
    if narrow != wide and k * narrow % 256:
        return f"a tile has {k} elements of {narrow} bits along K, and 32 bytes are the least"
    if config.group is not None and config.group % k:
        return f"groups of {config.group} elements along K are not tiles of {k}"
    return None


@_constraint
def _check_registers(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the accumulators leave enough registers for a thread not to spill."""
    try:
        needed = config.accumulator_registers
    except KeyError:
        return None  # `_check_tile` rejects this tile.
    if needed > MOST_ACCUMULATORS:
        return f"{needed} registers a thread hold accumulators; beyond {MOST_ACCUMULATORS} spills"
    return None


@_constraint
def _check_shared_memory(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that at least two pipeline stages and the epilogue fit into a CTA's shared memory."""
    stages = config.pipeline(device.shared_memory, broadcast_bytes(problem, config))
    if stages < 2:
        return f"{stages} stages of the pipeline fit, and 2 are the least"
    needed = stages * config.stage_bytes
    if needed > device.shared_memory:
        return f"needs {needed} bytes of shared memory, and a CTA may have {device.shared_memory}"
    return None


def broadcast_bytes(problem: GemmProblem, config: CutlassConfig) -> int:
    """Return the bytes of shared memory of rows that the epilogue broadcasts.

    With `swap` the kernel's rows are the problem's columns.
    """
    rows = "column" if config.swap else "row"
    inputs = (inp for inp in problem.epilogue.inputs if inp.broadcast == rows)
    return sum(ceiling(size_of(config.tile[1], inp.dtype), 128) * 128 for inp in inputs)


@_constraint
def _check_epilogue(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the epilogue is not gated and reads only what CUTLASS supports."""
    if problem.epilogue.gated:
        return "a tile of one product does not gate another"
    for inp in problem.epilogue.inputs:
        if inp.dtype not in SHORT_NAMES:
            return f"the epilogue reads {inp.dtype}"
    matrices = {inp.dtype for inp in problem.epilogue.inputs if inp.broadcast == "matrix"}
    if config.c != "void" and config.c not in matrices:
        return f"the epilogue reads no matrix of {config.c}"
    if config.grouped and problem.epilogue.inputs:
        return "a grouped kernel's epilogue reads nothing"
    return None


@_constraint
def _check_split_k(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that split-K is allowed, uses the stream-K scheduler, and that every split has work.

    The stream-K scheduler adds up splits in a fixed order.
    """
    if not problem.allows_split_k and (config.split_k > 1 or config.scheduler == "stream_k"):
        return "torch.backends.cuda.matmul does not allow the sum along K to be split"
    if config.split_k == 1:
        return None
    if config.scheduler != "stream_k":
        return "K is split by the stream-K scheduler only"
    steps = ceiling(problem.depth, config.tile[2])
    if config.split_k > steps:
        return f"{config.split_k} splits of {steps} steps along K leave one without work"
    return None


def why_not(problem: GemmProblem, config: CutlassConfig, device: Device) -> list[str]:
    """Return all reasons why a kernel cannot run a problem on a device; empty if it can."""
    reasons = (check(problem, config, device) for check in _CHECKS)
    return [reason for reason in reasons if reason is not None]


def legal(problem: GemmProblem, config: CutlassConfig, device: Device) -> bool:
    """Whether a kernel can run a problem on a device."""
    return all(check(problem, config, device) is None for check in _CHECKS)
