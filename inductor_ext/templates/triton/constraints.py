"""Constraints: which configuration can run which problem on which device.

Each constraint is stated once, here or in `small_m_constraints`, with the templates that it applies
to and a readable reason.
The search space, `templates.kernels.legal` and the tests use the same checks. `why_not` returns all
reasons, `legal` only whether there is none.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import BATCHED, GemmProblem
from inductor_ext.templates.tensors import (
    DTYPE_BITS,
    FP8,
    HALF,
    INT32_MAX,
    ceiling,
    next_power_of_two,
)
from inductor_ext.templates.triton import small_m_constraints
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraint import Check, Constraint, register
from inductor_ext.templates.triton.templates import TEMPLATES

_constraints: dict[str, Constraint] = {}

_constraint = functools.partial(register, _constraints)

_TENSOR_CORES = tuple(name for name, template in TEMPLATES.items() if template.tensor_cores)
_STAGED = tuple(name for name, template in TEMPLATES.items() if template.staged)
_PERSISTENT_TMA = ("persistent_tma", "persistent_tma_ws")


@_constraint()
def _check_operation(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """The template supports the operation, its prologue and its fused weights."""
    template = TEMPLATES[config.template]
    if problem.operation not in template.operations:
        return f"{config.template} does not support {problem.operation}"
    if problem.norm is not None and problem.norm.kind not in template.norms:
        return f"{config.template} has no prologue to {_prologue_words(problem)}"
    if len(problem.parts) > 1 and not template.parts:
        return f"{config.template} takes one weight, not {len(problem.parts)} fused ones"
    if len(problem.parts) > 1 and problem.operation in BATCHED:
        return f"a batched matmul takes one weight per matrix, not {len(problem.parts)}"
    return None


def _prologue_words(problem: GemmProblem) -> str:
    if problem.norm is None:
        return "dequantize"
    if problem.dequant is not None:
        return "normalize a and dequantize b"
    return "normalize" if problem.norm.kind == "rms" else "apply a LayerNorm"


@_constraint()
def _check_capability(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """The device has the instructions that the template needs."""
    capability = TEMPLATES[config.template].capability
    for feature, is_used in (("TMA", config.tma), ("dependent launch", config.pdl)):
        if is_used and device.capability < (9, 0):
            return f"{feature} needs compute capability 9.0, and this is {_dotted(device)}"
    if device.capability < capability:
        return (
            f"{config.template} needs compute capability {capability[0]}.{capability[1]}, and "
            f"this is {_dotted(device)}"
        )
    return None


def _dotted(device: Device) -> str:
    return f"{device.capability[0]}.{device.capability[1]}"


@_constraint()
def _check_dtype(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """The template supports these dtypes, and the device has tensor cores for them."""
    a, b = problem.a.dtype, problem.b.dtype
    if problem.operation == "mixed":
        if a not in HALF or b not in ("int8", "uint8", "int4", "uint4", *FP8):
            return f"{b} is not dequantized to {a}"
        if b in FP8 and device.capability < (8, 9):
            return f"{device.name} does not convert {b}"
        return None
    if problem.operation == "int_mm":
        ok = a == b == "int8"
    elif problem.operation == "scaled":
        ok = a in FP8 and b in FP8
    elif problem.operation == "grouped":
        ok = (a == b and (a in HALF or a == "float32")) or (a in FP8 and b in FP8)
    else:
        ok = (a == b or (a == "float32" and problem.multiply_dtype == b)) and b in HALF | {
            "float32"
        }
    if not ok:
        return f"{problem.operation} of {a} and {b} is not supported"
    arithmetic = problem.arithmetic
    if not device.throughput(arithmetic):
        return f"{device.name} has no tensor cores for {arithmetic}"
    if arithmetic == "fma" and config.tma:
        return "float32 without tf32 does not run on tensor cores, for which TMA loads"
    return None


@_constraint()
def _check_flags(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """The template supports the options that the configuration sets."""
    template = TEMPLATES[config.template]
    if config.warp_specialize != (config.template == "persistent_tma_ws"):
        return "only persistent_tma_ws is warp-specialized"
    if config.tma != (template.tma == "always") and template.tma != "optional":
        return f"{config.template} {template.tma} loads by TMA"
    if config.tma and problem.prologue is not None:
        return f"a kernel that loads by TMA has no prologue to {_prologue_words(problem)}"
    if config.flatten and not template.flatten:
        return f"{config.template} does not flatten the loops over tiles and K"
    if config.swap_ab and not template.swap_ab:
        return f"{config.template} does not swap its operands"
    if config.pdl and not template.pdl:
        return f"{config.template} does not support programmatic dependent launch"
    return None


@_constraint("persistent_tma_ws")
def _check_warp_specialization(
    problem: GemmProblem, config: GemmConfig, device: Device
) -> str | None:
    """Triton specializes warps only with 4 warps and without a flattened loop, which the template
    does not have; otherwise it silently compiles the kernel without warp specialization.
    """
    if config.num_warps != 4:
        return f"warp specialization needs 4 warps, not {config.num_warps}"
    return None


_MOST: Mapping[str, int] = types.MappingProxyType(
    {"num_warps": 16, "num_stages": 16, "group_m": 1024}
)
"""Upper limits that no useful kernel exceeds. Triton unrolls the prologue of a pipeline and takes
minutes for hundreds of stages; the number of tiles of a larger group may overflow 32 bits."""


@_constraint()
def _check_blocks(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Tile sizes and warp counts are powers of two (tl.arange; Triton's num_warps), and values are
    within the limits that any valid table respects.
    """
    stationary = TEMPLATES[config.template].stationary
    for name in ("block_m", "block_n", "block_k", "num_warps"):
        value = getattr(config, name)
        # A stationary kernel loops over strips along N, so its block_n is any multiple of the
        # strip.
        if value & (value - 1) and not (stationary and name == "block_n"):
            return f"{name} is {value}, not a power of two"
    for name, limit in _MOST.items():
        if getattr(config, name) > limit:
            return f"{name} is {getattr(config, name)}, which is more than {limit}"
    return None


@_constraint(*_STAGED)
def _check_mma(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """tl.dot takes tiles of at least 16 along M, N and K, and 32 along K if a or b has 8 bits or
    fewer. A side has at most 256 elements, the limit of a TMA box; 512 along K without TMA. Larger
    tiles do not fit anyway.
    """
    min_k = least_block_k(problem)
    for name, value, minimum in (
        ("block_m", config.block_m, 16),
        ("block_n", config.block_n, 32 if problem.epilogue.gated else 16),
        ("block_k", config.block_k, min_k),
    ):
        if value < minimum:
            return f"{name} is {value}, and tensor cores need {minimum}"
        maximum = 512 if name == "block_k" and not config.tma else 256
        if value > maximum:
            return f"{name} is {value}, and a tile has at most {maximum} elements there"
    return None


def least_block_k(problem: GemmProblem) -> int:
    """Return the smallest block_k that tensor cores support."""
    return 32 if min(DTYPE_BITS[problem.a.dtype], DTYPE_BITS[problem.b.dtype]) <= 8 else 16


@_constraint(*_PERSISTENT_TMA)
def _check_warpgroups(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """A warpgroup's wgmma has 64 rows; K is contiguous unless the dtype has 16 bits."""
    groups = max(1, config.consumer_warps // 4)
    rows = config.matmul_m(problem)
    if config.num_warps % 4:
        return f"wgmma needs whole groups of four warps, and there are {config.num_warps} warps"
    if rows < 64 * groups:
        return f"{groups} warpgroups need {64 * groups} rows of wgmma, and the tile has {rows}"
    if device.capability[0] == 9 and problem.arithmetic != "half" and not problem.k_major:
        return f"wgmma reads {problem.a.dtype} with K contiguous only"
    return None


@_constraint(*_TENSOR_CORES)
def _check_shared_memory(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """The CTA's shared memory does not exceed the opt-in limit per block."""
    size = config.shared_memory(problem)
    if size > device.shared_memory:
        return f"needs {size} bytes of shared memory, and a block may have {device.shared_memory}"
    return None


MOST_ACCUMULATORS = 128
"""Accumulator registers per thread: half of the 255 available. Operands, addresses and the epilogue
need the rest; beyond that registers spill."""


MOST_GATHERED = 176
"""Limit on the accumulators of a thread plus the elements that it loads one by one, which need an
address each. At 192 and above, kernels with M of 16 to 999 took 3 to 70 times as long as others on
an H200."""


@_constraint(*_TENSOR_CORES)
def _check_registers(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Accumulators and all else that a thread needs fit into registers without spilling. Where
    operands pass through registers as well, they need as many again, so the limit is halved:
    without tensor cores, and where elements are loaded one by one. The latter are limited, too.
    """
    accumulators, gathered = config.accumulator_registers, config.gathered(problem)
    limit = MOST_ACCUMULATORS
    if problem.arithmetic == "fma" or gathered:
        limit //= 2
    if gathered and accumulators + gathered > MOST_GATHERED:
        return (
            f"a thread has {accumulators} accumulators and loads {gathered} elements one by one; "
            f"beyond {MOST_GATHERED} spills"
        )
    if accumulators > limit:
        return f"{accumulators} registers a thread hold accumulators; beyond {limit} spills"
    if config.cta_registers > device.registers_sm:
        return (
            f"a CTA needs some {config.cta_registers} registers, and an SM has "
            f"{device.registers_sm}"
        )
    return None


@_constraint("persistent_tma", "persistent_tma_ws", "splitk", "bmm_persistent", "grouped")
def _check_tma_alignment(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Operands that TMA loads have a contiguous dimension; addresses and strides are multiples of
    16 bytes.
    """
    return problem.tma_obstacle if config.tma else None


_NO_SPLIT_K = "torch.backends.cuda.matmul does not allow the sum along K to be split"


@_constraint()
def _check_split_k(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Every split has work, and the reduction order is fixed if results must be deterministic."""
    template = TEMPLATES[config.template]
    if config.fused_split_k and not template.fused_reduction:
        return f"{config.template} does not reduce splits"
    if config.split_k == 1:
        return "there are no splits to reduce" if config.fused_split_k else None
    if not template.split_k:
        return f"{config.template} does not split K"
    if problem.operation in BATCHED:
        return "the splits of a batch of matrices have no reduction"
    if not problem.allows_split_k:
        return _NO_SPLIT_K
    if problem.epilogue.gated and not template.stationary:
        return "the gate needs complete accumulators, which no split has"
    if problem.norm is not None and problem.norm.kind == "rms":
        return "the norm needs the sum of squares of a row, which no split has"
    if problem.deterministic and template.atomics:
        return "splits are accumulated by atomics in any order, but results must be deterministic"
    steps = ceiling(problem.k, config.block_k)
    if (config.split_k - 1) * ceiling(steps, config.split_k) >= steps:
        return f"{config.split_k} splits of {steps} steps along K leave one without work"
    return None


@_constraint()
def _check_tma_store(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """TMA stores rows that are multiples of 16 bytes, of a single weight, in the tile's layout."""
    if not config.tma_store:
        return None
    if not TEMPLATES[config.template].tma_store:
        return f"{config.template} does not store by TMA"
    if problem.columns * DTYPE_BITS[problem.kernel_dtype] % 128:
        return f"rows of {problem.columns} {problem.kernel_dtype} are not a multiple of 16 bytes"
    if problem.parts and not problem.epilogue.gated:
        return "a tile of one fused weight would overlap the columns of the next one"
    if config.swap_ab:
        return "tiles of swapped operands are transposed"
    return None


@_constraint()
def _check_stream_k(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """CTAs can share tiles of a single matmul if the loop over tiles is not flattened."""
    if not config.stream_k:
        return None
    if not TEMPLATES[config.template].stream_k:
        return f"{config.template} does not support stream-K"
    if not problem.allows_split_k:
        return _NO_SPLIT_K
    if config.flatten:
        return "a flattened loop processes whole tiles"
    if problem.epilogue.gated:
        return "the gate needs complete accumulators, which two CTAs share"
    return None


@_constraint(*(name for name in _TENSOR_CORES if name != "persistent_tma_ws"))
def _check_pipeline(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """A loop along K has at least as many steps as stages; 2 stages are always allowed."""
    steps = config.k_steps(problem)
    if config.num_stages > max(2, steps) and not config.flatten:
        return f"{config.num_stages} stages are more than the {steps} steps along K"
    return None


@_constraint()
def _check_padding(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """A tile is not so large that half of it or more is padding, except for the smallest tile."""
    cores = TEMPLATES[config.template].tensor_cores
    minimum = 16 if cores else 1
    min_m = min_n = minimum
    if config.template in _PERSISTENT_TMA:
        min_m, min_n = (16, 64) if config.swap_ab else (64, 16)
    elif config.swap_ab:
        min_n = 64
    if problem.epilogue.gated:
        min_n = max(min_n, 32)
    for name, block, size, min_block in (
        ("block_m", config.block_m, problem.rows, min_m),
        ("block_n", config.block_n, max(problem.parts, default=problem.n), min_n),
        ("block_k", config.block_k, problem.k, least_block_k(problem) if cores else 1),
    ):
        if name == "block_n" and problem.epilogue.gated:
            size *= 2
        if block > max(min_block, next_power_of_two(size)):
            return f"{name} is {block} for a size of {size}: more than half would be padding"
    return None


@_constraint()
def _check_normalization(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """The squares of rows are accumulated next to the matmul, in an accumulator tile of their own.
    a is multiplied by the norm's weight before it is normalized, which may overflow float16.
    """
    if problem.norm is None or problem.norm.kind != "rms":
        return None
    if problem.norm.vectors and problem.a.dtype == "float16" and config.template != "gemv":
        return "a's elements times the norm's weight may overflow float16"
    if config.block_m > 64:
        return (
            f"block_m is {config.block_m}, and squares of more than 64 rows need too many registers"
        )
    return None


@_constraint("gemv", "mixed")
def _check_scale_groups(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """block_k is a multiple of the group size of the scales, or the other way round."""
    if problem.dequant is None or not problem.dequant.group:
        return None
    group, block = problem.dequant.group, config.block_k
    if max(group, block) % min(group, block):
        return f"groups of {group} that share a scale do not fit tiles of {block} along K"
    return None


@_constraint("gemv", "mixed")
def _check_quantized(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Scales or zero points that are applied to b itself require that K runs along the rows of its
    tile; 4-bit pairs, adjacent along K, are multiplied by 32-bit words of two adjacent elements of
    a.
    """
    dequant = problem.dequant
    if dequant is None:
        return None
    if config.template == "gemv" and problem.b.dtype == "uint8":
        return "gemv does not subtract a zero point from b"
    packed = DTYPE_BITS[problem.b.dtype] == 4
    if packed or dequant.scales == "group" or dequant.zero_points:
        if config.template == "gemv":
            return "gemv supports per-tensor and per-column scales only, and no 4-bit weights"
        if config.swap_ab:
            return "group scales and 4-bit weights are not supported with swapped operands"
    if packed and (problem.k % 2 or problem.a.layout != "row" or problem.a.alignment < 2):
        return "rows of a are not whole words of two elements"
    if dequant.scales == "none" and dequant.zero_points:
        return "zero points without scales are not supported"
    return None


@_constraint()
def _check_reductions(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Each tile computes the row amax of a single output, from complete accumulators."""
    if not problem.epilogue.reductions:
        return None
    template = TEMPLATES[config.template]
    if problem.epilogue.reductions > 1:
        return "the row amax is the only supported reduction"
    if not template.row_maxima:
        return f"{config.template} does not reduce rows of its output"
    if problem.operation in BATCHED:
        return "reductions over the rows of a batch are not supported"
    if problem.parts and not problem.epilogue.gated:
        return "reductions are supported for a single output only"
    if config.split_k > 1 and not config.fused_split_k:
        return "splits are reduced after the kernel, which therefore has no complete rows"
    return None


@_constraint()
def _check_index(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Tensors beyond 2^31 - 1 elements are addressed with 64-bit indices."""
    if problem.largest_span > INT32_MAX and not config.index64:
        return f"a tensor spans {problem.largest_span} elements, which needs 64-bit indices"
    return None


@_constraint()
def _check_align_operands(problem: GemmProblem, config: GemmConfig, device: Device) -> str | None:
    """Only unaligned operands of a plain matmul, with nothing fused into them, are copied."""
    if config.align_operands is None:
        return None
    if problem.operation not in ("mm", "addmm", "bmm", "baddbmm"):
        return f"operands of {problem.operation} are not copied"
    if problem.prologue is not None or problem.parts:
        return "operands of a matmul with several weights or a prologue are not copied"
    if problem.with_aligned_operands == problem:
        return "both operands are aligned"
    return None


CONSTRAINTS: Mapping[str, Constraint] = types.MappingProxyType(
    _constraints | small_m_constraints.CONSTRAINTS
)
"""All constraints by name."""


@functools.cache
def _checks(template: str) -> tuple[Check, ...]:
    return tuple(
        constraint.check for constraint in CONSTRAINTS.values() if template in constraint.templates
    )


def why_not(problem: GemmProblem, config: GemmConfig, device: Device) -> list[str]:
    """Return all reasons why a configuration cannot run a problem on a device; empty if it can."""
    return list(_reasons(problem, config, device))


def legal(problem: GemmProblem, config: GemmConfig, device: Device) -> bool:
    """Whether a configuration can run a problem on a device."""
    return next(_reasons(problem, config, device), None) is None


def _reasons(problem: GemmProblem, config: GemmConfig, device: Device) -> Iterator[str]:
    if config.align_operands is not None and (
        reason := _check_align_operands(problem, config, device)
    ):
        yield reason
    kernel_problem, kernel_config = config.of_kernel(problem)
    for check in _checks(config.template):
        if (reason := check(kernel_problem, kernel_config, device)) is not None:
            yield reason
