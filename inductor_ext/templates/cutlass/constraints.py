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
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import (
    DTYPE_BITS,
    FP8,
    HALF,
    INT4,
    Operand,
    aligned,
    ceiling,
    size_of,
)
from inductor_ext.templates.triton.constraints import MOST_ACCUMULATORS

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
    transpose = {"t": "n", "n": "t"}
    return f"{transpose[b]}{transpose[a]}n"


def alignments(problem: GemmProblem, swap: bool) -> tuple[int, int, int]:
    """Return the largest alignments, in elements, of a kernel's A, B and D.

    They divide addresses, strides and the size of the contiguous dimension, as CUTLASS checks them.
    """
    a = _whole(problem.a, problem.m, problem.k)
    b = _whole(problem.b, problem.k, problem.n)
    # The output is allocated for this kernel: contiguous, with storage offset 0.
    d = aligned(problem.stored_dtype, problem.columns)
    return (b, a, d) if swap else (a, b, d)


def group(problem: GemmProblem) -> int | None:
    """Return the number of elements along K that share a scale of b; None without such groups."""
    return problem.dequant.group or None if problem.dequant is not None else None


def _whole(operand: Operand, rows: int, columns: int) -> int:
    inner = columns if operand.layout == "row" else rows
    return math.gcd(operand.alignment, inner)


@_constraint
def _check_operation(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the operation is a single matmul that the kernel supports."""
    if problem.parts:
        return "CUTLASS kernels multiply by one weight, not by several fused ones"
    if problem.epilogue.reductions:
        return "CUTLASS kernels have no reductions over rows in the epilogue"
    if problem.norm is not None:
        return "CUTLASS kernels do not fuse a norm of A"
    if problem.dequant is not None and problem.dequant.zero_points:
        return "CUTLASS kernels do not support zero points of the weight"
    if config.group != group(problem):
        return f"the scales have groups of {group(problem)}, but the kernel expects {config.group}"
    if config.grouped != (problem.operation == "grouped"):
        kind = "grouped" if config.grouped else "plain"
        return f"a {kind} kernel does not compute {problem.operation}"
    if config.grouped and problem.divided != "m":
        return f"grouped matmuls that are divided along {problem.divided.upper()} are not supported"
    if config.grouped and config.arch < 90:
        return "grouped matmuls are supported for compute capability 9.0 only"
    return None


@_constraint
def _check_device(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the device can run the kernel's binary.

    sm_90a code runs on capability 9.0 only; other code on the same major version with at least the
    same minor version (CUDA C++ programming guide, binary compatibility).
    """
    major, minor = device.capability
    compatible = major == config.target // 10 and minor >= config.target % 10
    if not compatible or (config.arch == 90 and device.capability != (9, 0)):
        return f"code for sm_{config.architecture} does not run on capability {device.capability}"
    return None


@_constraint
def _check_dtypes(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the dtypes are the problem's and that the device has tensor cores for them."""
    if (config.a, config.b) != config.operand_dtypes(problem):
        return f"the kernel multiplies {config.a} and {config.b}"
    if (config.d, config.accumulator) != (problem.stored_dtype, problem.accumulator):
        return f"the kernel accumulates in {config.accumulator} and stores {config.d}"
    if problem.operation == "mixed":
        narrow, wide = problem.b.dtype, problem.a.dtype
        if wide not in HALF or narrow not in ("int8", *INT4, *FP8):
            return f"CUTLASS kernels do not convert {narrow} to {wide}"
        if config.arch == 90 and not config.swap_ab:
            return "the kernel's A must be the narrower operand, as A passes through registers"
        if config.arch < 90 and narrow != "int8":
            return f"kernels before sm_90 do not convert {narrow}"
        if config.group and (narrow not in INT4 or problem.dequant.scale_dtype != wide):  # type: ignore[union-attr]
            return f"group scales are supported for 4-bit weights only, in {wide}"
    elif config.swap_ab and config.arch < 90:
        return "operands are swapped in sm_90 kernels only"
    elif problem.a.dtype != problem.b.dtype and problem.operation != "scaled":
        return f"CUTLASS kernels do not multiply {problem.a.dtype} by {problem.b.dtype}"
    if not device.throughput(problem.arithmetic) or problem.arithmetic == "fma":
        return f"{device.name} has no tensor cores for {problem.a.dtype}"
    if problem.arithmetic == "fp8" and config.arch < 89:
        return "8-bit floats need code for sm_89 or newer"
    if config.tf32 != (problem.arithmetic == "tf32"):
        return "the kernel uses tf32 and the problem does not allow it, or the reverse"
    if config.fast_accumulation != (problem.fast_accumulation and problem.arithmetic == "fp8"):
        return "the fast accumulation mode (float8) differs from that of the problem"
    return None


@_constraint
def _check_layouts(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the layouts are the problem's and supported for the dtypes.

    Operands need K contiguous unless they have 16 bits, or 16 bits and more below arch 90.
    """
    names = layouts(problem, config.swap_ab)
    if names is None:
        return "an operand has no contiguous dimension"
    if config.layouts != names:
        return f"the kernel takes the layouts {config.layouts}, but the operands are {names}"
    k_major = names[:2] == "tn"
    wide = min(DTYPE_BITS[config.a], DTYPE_BITS[config.b]) >= 16
    if not k_major and not (wide and (DTYPE_BITS[config.a] == 16 or config.arch < 90)):
        return f"{config.a} times {config.b} needs operands with K contiguous"
    return None


@_constraint
def _check_alignment(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the operands have the alignment that the kernel assumes.

    The minimum is 16 bytes for TMA and 4 bytes for cp.async.
    """
    tensor_alignments = alignments(problem, config.swap_ab)
    for operand, required, available in zip(
        "ABD", config.alignments, tensor_alignments, strict=True
    ):
        if available % required:
            return f"{operand} is aligned to {available} elements, but the kernel needs {required}"
    dtypes = (config.a, config.b)
    bits = 128 if config.arch == 90 else 32
    for operand, dtype, alignment in zip("AB", dtypes, config.alignments, strict=False):
        if alignment * DTYPE_BITS[dtype] < bits:
            return (
                f"{operand} is loaded {alignment} elements at a time, less than {bits // 8} bytes"
            )
    if config.epilogue == "tma" and config.alignments[2] * DTYPE_BITS[config.d] < 128:
        return f"D is stored {config.alignments[2]} elements at a time, but TMA needs 16 bytes"
    return None


@_constraint
def _check_schedule(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the kernel family supports the schedule, epilogue, scheduler and cluster."""
    if config.arch < 90:
        if config.mainloop != "multistage" or config.epilogue != "direct":
            return "kernels before sm_90 must be multistage, with a direct epilogue"
        if config.cluster != (1, 1, 1):
            return "kernels before sm_90 have no clusters"
        if config.scheduler == "stream_k":
            return "stream-K is supported for sm_90 only"
        return None
    if config.mainloop == "multistage":
        return "kernels for sm_90 are warp-specialized"
    if config.epilogue != "tma":
        return "kernels for sm_90 store by TMA"
    cooperative = config.mainloop == "warpspecialized_cooperative"
    if config.scheduler == "stream_k" and not cooperative:
        return "stream-K is supported for cooperative kernels only"
    if config.scheduler == "stream_k" and config.grouped:
        return "grouped kernels do not support stream-K"
    if config.grouped and config.mainloop == "warpspecialized":
        return "grouped kernels must be cooperative or pingpong"
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
            return f"a tile of {m}x{n} has no division among warps"
        step = config.instruction[2]
        if k % (2 * step) or m % (16 * along_m) or n % (8 * along_n):
            return f"a tile of {m}x{n}x{k} is not a multiple of the MMA instruction"
        return None
    rows = 128 if config.mainloop == "warpspecialized_cooperative" else 64
    if m % rows:
        return f"{config.mainloop} needs a multiple of {rows} rows, but the tile has {m}"
    if n % 16 or not 16 <= n <= 256 or m > 256:
        return f"a tile of {m}x{n} is not a multiple of the MMA instruction"
    narrow, wide = sorted((DTYPE_BITS[config.a], DTYPE_BITS[config.b]))
    if k * wide % 256 or k * wide < 512:
        return (
            f"a tile of {k} elements along K is less than two steps of 32 bytes, or not a multiple"
        )
    if narrow != wide and k * narrow % 256:
        return f"a tile of {k} elements of {narrow} bits along K is not a multiple of 32 bytes"
    if config.group is not None and config.group % k:
        return f"groups of {config.group} elements along K are not a multiple of the tile's {k}"
    return None


@_constraint
def _check_registers(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the accumulators leave enough registers for a thread not to spill."""
    try:
        registers = config.accumulator_registers
    except KeyError:
        return None  # `_check_tile` rejects this tile.
    if registers > MOST_ACCUMULATORS:
        return (
            f"accumulators need {registers} registers per thread; above {MOST_ACCUMULATORS} they "
            "spill"
        )
    return None


@_constraint
def _check_shared_memory(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that at least two pipeline stages and the epilogue fit into a CTA's shared memory."""
    stages = config.pipeline(device.shared_memory, broadcast_bytes(problem, config))
    if stages < 2:
        return f"the shared memory fits {stages} stages of the pipeline; at least 2 are needed"
    mainloop_bytes = stages * config.stage_bytes
    if mainloop_bytes > device.shared_memory:
        return (
            f"the kernel needs {mainloop_bytes} bytes of shared memory; a CTA has "
            f"{device.shared_memory}"
        )
    return None


def broadcast_bytes(problem: GemmProblem, config: CutlassConfig) -> int:
    """Return the bytes of shared memory of rows that the epilogue broadcasts.

    With `swap` the kernel's rows are the problem's columns.
    """
    rows = "column" if config.swap_ab else "row"
    inputs = (inp for inp in problem.epilogue.inputs if inp.broadcast == rows)
    return sum(ceiling(size_of(config.tile[1], inp.dtype), 128) * 128 for inp in inputs)


@_constraint
def _check_epilogue(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that the epilogue is not gated and reads only what CUTLASS supports."""
    if problem.epilogue.gated:
        return "CUTLASS kernels do not compute gated epilogues (gate and up projection)"
    for inp in problem.epilogue.inputs:
        if inp.dtype not in SHORT_NAMES:
            return f"CUTLASS epilogues do not read {inp.dtype}"
    matrices = {inp.dtype for inp in problem.epilogue.inputs if inp.broadcast == "matrix"}
    if config.c != "void" and config.c not in matrices:
        return f"the epilogue reads no matrix of {config.c}, which the kernel loads as C"
    if config.grouped and problem.epilogue.inputs:
        return "the epilogue of a grouped kernel may not read tensors"
    return None


@_constraint
def _check_split_k(problem: GemmProblem, config: CutlassConfig, device: Device) -> str | None:
    """Check that split-K is allowed, uses the stream-K scheduler, and that every split has work.

    The stream-K scheduler adds up splits in a fixed order.
    """
    if not problem.allows_split_k and (config.split_k > 1 or config.scheduler == "stream_k"):
        return "torch.backends.cuda.matmul does not allow split-K"
    if config.split_k == 1:
        return None
    if config.scheduler != "stream_k":
        return "split-K needs the stream-K scheduler"
    steps = ceiling(problem.depth, config.tile[2])
    if config.split_k > steps:
        return f"{config.split_k} splits of {steps} steps along K leave a split without work"
    return None


def why_not(problem: GemmProblem, config: CutlassConfig, device: Device) -> list[str]:
    """Return all reasons why a kernel cannot run a problem on a device; empty if it can."""
    reasons = (check(problem, config, device) for check in _CHECKS)
    return [reason for reason in reasons if reason is not None]


def legal(problem: GemmProblem, config: CutlassConfig, device: Device) -> bool:
    """Whether a kernel can run a problem on a device."""
    return all(check(problem, config, device) is None for check in _CHECKS)
