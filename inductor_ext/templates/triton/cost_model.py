"""Analytical cost model: the predicted time of a configuration of a template.

`predict` returns microseconds with a breakdown. All parameters that do not follow from the problem,
the configuration or the device are in `Constants`, which `benchmarks/gemm/fit_cost_model.py` fits
to measurements. The model only has to order configurations: those that `ranking` selects are
benchmarked against ATen anyway.

Two timelines overlap, and the longer one dominates:

- SMs: tiles in whole waves (a half-full wave takes as long as a full one), steps along K at the
  tensor core rate for that tile, the latency to fill the pipeline, and the part of the epilogue
  that is not hidden;
- memory: DRAM bytes after reuse in L2 at the DRAM bandwidth, as far as enough loads are in flight
  (Little's law), and bytes from L2 at the rate of one SM.

Launch overhead, the split-K reduction and the kernels that consume the row amax are added. No
prediction is below the problem's roofline, and none increases with the bandwidth, with the number
of SMs of one kind, or with a shorter K of the same alignment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import DTYPE_BITS, Operand, ceiling, size_of
from inductor_ext.templates.triton.config import GemmConfig, tiles_along_n, warpgroup_mma
from inductor_ext.templates.triton.templates import TEMPLATES


@dataclass(frozen=True)
class Constants:
    """Model parameters that only measurements can determine.

    The defaults are fitted to 2213 kernels of 30 problems on an H200, with torch 2.11 and Triton
    3.6.0: bfloat16, M from 1 to 4096; plain, gated, normalized, with fused weights, and batched.
    These do not determine `convert`, `layer_norm`, `warp_specialized`, `gap` and `fused_gap`, which
    were set by hand; `gather_rows` was set from 16x4096x4095 and 64x4097x4095.
    `normalize_with_dequant` and `normalize_warps` are fitted to 64 kernels with M of 1 and 16 and
    int8 weights on an H100 and an H200; `store_descriptor` and `async_store` to the differences
    within 47 pairs of kernels with and without TMA stores on the same GPUs. `modified_operand` was
    fitted when it still applied to all kernels whose threads load.
    """

    latency: float = 0.774
    """Microseconds from requesting a tile to having it, under load."""
    direct_latency: float = 0.275
    """The same for loads into registers, without prefetching."""
    start: float = 1.22
    """Microseconds until the first CTAs have started plus until the last ones have ended, for
    kernels that first fill shared memory."""
    descriptors: float = 0.38
    """Additional microseconds of `start` with TMA loads: descriptors are created and fetched."""
    store_descriptor: float = 1.5
    """Additional microseconds with TMA stores: one more descriptor, and waiting for the last
    store."""
    refill: float = 0.0302
    """Microseconds from the end of a CTA to the first load of the next CTA on its SM."""
    stream: float = 1.0
    """Fraction of the DRAM bandwidth of long copies that tiled loads reach."""
    sharpness: float = 3.26
    """How little a shorter timeline slows down the one that overlaps it: the exponent of a
    p-norm."""
    l2_rate: float = 154e9
    """L2 bandwidth of one SM for reads or writes, bytes/s."""
    reduction_rate: float = 12.9e9
    """Bandwidth per SM, bytes/s, of the separate split-K reduction kernel, including its ramp-up
    and ramp-down."""
    busy_stage: float = 0.318
    """Fraction of a stage that is not available for loads because asynchronous warpgroup
    instructions, which run on while the next stage is awaited, still read it."""
    edge_columns: float = 8.51
    """Extra columns that a tile costs with warpgroup instructions. These read operands from shared
    memory, and the fewer columns of b each row of a is multiplied by, the more they read per
    FLOP."""
    issue_warps: float = 0.0275
    """Throughput that an SM loses to stalls and issue, in units of one warp."""
    modified_operand: float = 0.857
    """Fraction of the warpgroup instruction rate if threads modify an operand first. Loading
    operands by threads costs nothing, since offsets within a tile are constant and only scalars
    advance."""
    mma_sync: float = 0.474
    """Rate of mma.sync relative to warpgroup instructions, on devices with both."""
    fma: float = 1.0
    """Fraction of the float32 rate that loops without tensor cores reach."""
    convert: float = 3.0
    """Operations to dequantize one element."""
    normalize: float = 0.57
    """Operations to normalize one element; tensor cores accumulate the squares."""
    repeated_squares: float = 25.1
    """Additional operations each time that warps compute the squares of other warps again, since
    all of them wait."""
    normalize_with_dequant: float = 8.55
    """Operations to normalize one element in a kernel that also dequantizes b."""
    normalize_warps: float = 12.5
    """Throughput of these operations that an SM loses to stalls and issue, in units of one warp."""
    layer_norm: float = 5.0
    """Operations per element to accumulate mean and deviation of its row, and the same number to
    normalize it; each warp repeats the latter for the rows that it multiplies."""
    thread_reduction: float = 0.1
    """Microseconds per output element to reduce the partial results of a CTA's threads, without
    tensor cores."""
    gather: float = 14.0
    """Operations to load one element individually, if copies are too narrow for cp.async."""
    gather_rows: float = 0.02
    """Additional latency of a step in microseconds per row of a tile that a warp loads this way."""
    narrow: float = 0.244
    """Slowdown of loads narrower than 16 bytes: the exponent of their width over 16."""
    warp_specialized: float = 0.5
    """Fraction of the epilogue that is not hidden if a separate warp group loads."""
    async_store: float = 0.4
    """Fraction of the epilogue that is not hidden with TMA stores."""
    l2_share: float = 0.419
    """Fraction of L2 that retains one operand while the other streams through."""
    gap: float = 2.0
    """Microseconds between two dependent kernels."""
    dependent_gap: float = 0.791
    """The same if the second kernel is a programmatic dependent launch."""
    fused_gap: float = 0.5
    """Microseconds from the last partial accumulator of a tile to the CTA that reduces the splits
    seeing it."""


DEFAULT = Constants()


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of one configuration; the components overlap except where noted."""

    compute: float
    """Steps along K on the busiest SM, including refilling its pipelines after the first wave."""
    memory: float
    """DRAM and L2 traffic."""
    epilogue: float
    """Part of the epilogues that is not hidden; follows `compute`."""
    reduction: float
    """Split-K reduction, or the kernels that consume the row amax; follows everything else."""
    launch: float
    """Launch overhead, start and the first loads; precedes everything else."""
    total: float


class Case:
    """Values that are the same for all configurations of a problem on a device."""

    def __init__(self, problem: GemmProblem, device: Device) -> None:
        self.problem = problem
        self.device = device
        arithmetic = problem.arithmetic
        self.fma_rate = device.fma / device.sms
        self.rate = device.throughput(arithmetic) / device.sms
        self.has_both_mma = device.capability[0] in (9, 10)
        self.a_bits = DTYPE_BITS[problem.a.dtype]
        self.b_bits = DTYPE_BITS[problem.b.dtype]
        self.out_bits = DTYPE_BITS[problem.kernel_dtype]
        a, b = problem.a, problem.b
        self.a_waste = _waste(a)
        self.b_waste = _waste(b)
        inner_a = problem.k if a.layout == "row" else problem.rows
        inner_b = problem.n if b.layout == "row" else problem.k
        self.load_bytes = min(
            math.gcd(a.alignment, inner_a) * self.a_bits / 8,
            math.gcd(b.alignment, inner_b) * self.b_bits / 8,
        )
        self.store_bytes = math.gcd(problem.columns, 128 // self.out_bits) * self.out_bits / 8
        self.matrix_bytes = sum(
            DTYPE_BITS[inp.dtype] / 8
            for inp in problem.epilogue.inputs
            if inp.broadcast == "matrix"
        )
        self.rest_bytes = problem.fused_bytes + problem.bytes_written
        if problem.quantized:
            elements = problem.m * problem.columns
            self.rest_bytes += elements * (self.out_bits - DTYPE_BITS[problem.stored_dtype]) // 8
        # Two operations per reduction: abs and max.
        self.pointwise = problem.epilogue.pointwise + 2 * problem.epilogue.reductions
        norm = problem.norm and problem.norm.kind
        self.converts_a = norm == "rms"
        self.converts_b = problem.dequant is not None
        self.has_layer_norm = norm == "layer"
        self.columns_share = problem.columns / problem.n


def _waste(operand: Operand) -> float:
    """Return the bytes moved per byte used: memory is read in 32-byte sectors."""
    if operand.layout != "strided":
        return 1.0
    return max(1.0, min(256 / DTYPE_BITS[operand.dtype], *operand.strides))


@functools.lru_cache(maxsize=64)
def case_of(problem: GemmProblem, device: Device) -> Case:
    """Return the cached case of a problem."""
    return Case(problem, device)


def predict(
    problem: GemmProblem, config: GemmConfig, device: Device, constants: Constants = DEFAULT
) -> Prediction:
    """Return the predicted time of one launch in microseconds, with operands in DRAM.

    Infinite if the device has no tensor cores for the dtypes. Legality is not checked: see
    `constraints.why_not`.
    """
    return _predict_with_copies(case_of(problem, device), config, constants)


def _predict_with_copies(case: Case, config: GemmConfig, c: Constants) -> Prediction:
    """Return the prediction of a configuration, including the copies of `align_operands`."""
    if config.align_operands is None:
        return _predict(case, config, c)
    problem, kernel = config.of_kernel(case.problem)
    gemm, bandwidth = _predict(case_of(problem, case.device), kernel, c), case.device.bandwidth
    copies = sum(
        c.gap + (_waste(source) + 1) * size / _width(source.vector_bytes, c) / bandwidth * 1e6
        for source, copy, size in (
            (case.problem.a, problem.a, problem.a_bytes),
            (case.problem.b, problem.b, problem.b_bytes),
        )
        if source != copy
    )
    return dataclasses.replace(gemm, launch=gemm.launch + copies, total=gemm.total + copies)


def _predict(case: Case, config: GemmConfig, c: Constants) -> Prediction:
    problem, device = case.problem, case.device
    occupancy = config.occupancy(problem, device)
    steps = config.k_steps(problem)
    units = config.units(problem)
    max_per_sm = -(-units // device.sms)
    per_sm = max(1.0, units / device.sms) if config.stream_k else max_per_sm
    rounds = -(-units // (device.sms * occupancy))
    resident = min(occupancy, max_per_sm)

    # A flattened or warp-specialized loop fills its pipeline once, other kernels in each wave of
    # CTAs.
    refills = 0 if config.flatten or config.warp_specialize else rounds - 1
    compute = per_sm * steps * step_time(case, config, c, resident)
    compute += refills * (c.refill + c.latency)
    epilogue = per_sm / resident * epilogue_time(case, config, c)
    if config.warp_specialize:
        epilogue *= c.warp_specialized
    elif config.tma_store:
        epilogue *= c.async_store
    memory = _memory_time(case, config, c, occupancy, resident, per_sm * steps)
    reduction = 0.0
    if config.split_k > 1:
        reduction = reduction_time(case, config, c)
    elif config.stream_k:
        reduction = _exchange_time(config, c)
    if problem.epilogue.reductions:
        reduction += _row_amax_time(case, config, c)

    launch = device.launch + c.latency
    if not TEMPLATES[config.template].direct:
        launch += c.start
    if config.tma:
        launch += c.descriptors
    if config.tma_store:
        launch += c.store_descriptor
    if case.has_layer_norm:
        launch += rounds * _statistics_time(case, config, c, resident)
    sm_time = compute + epilogue
    kernel_time = blend((sm_time, memory), c)
    if TEMPLATES[config.template].tensor_cores and stages_ahead(case, config, c) < 1:
        # Without prefetching, a CTA's loads do not overlap its multiplications, but other CTAs of
        # the SM do.
        kernel_time += (sm_time + memory - kernel_time) / occupancy
    # Keep infinity: the difference above would be NaN.
    total = math.inf if math.isinf(sm_time) else launch + kernel_time + reduction
    return Prediction(compute, memory, epilogue, reduction, launch, total)


def _statistics_time(case: Case, config: GemmConfig, c: Constants, resident: int) -> float:
    """Return the microseconds of the first pass over the rows of the tiles resident on an SM."""
    elements = resident * config.block_m * case.problem.k
    load_time = elements * case.a_bits / 8 / c.l2_rate
    return c.latency + (load_time + elements * c.layer_norm / (case.fma_rate / 2)) * 1e6


def step_time(case: Case, config: GemmConfig, c: Constants, resident: int) -> float:
    """Return the microseconds of one step along K of one CTA, on an SM shared by `resident`
    CTAs.
    """
    if not case.rate:
        return math.inf
    m, n, k = config.block_m, config.block_n, config.block_k
    warps = config.consumer_warps
    tensor_cores = TEMPLATES[config.template].tensor_cores
    operations = case.converts_b * n * k * c.convert
    if case.converts_a and case.converts_b:
        operations += (
            m * k * c.normalize_with_dequant * (1 + c.normalize_warps / (warps * resident))
        )
    elif case.converts_a:
        redundancy = warps * _WARP_TILE / m**2 - 1 if tensor_cores else 0.0
        operations += m * k * (c.normalize + c.repeated_squares * max(0.0, redundancy))
    if case.has_layer_norm:
        exclusive = not tensor_cores or warpgroup_mma(case.problem, config, case.device)
        # Warps are arranged along N, each with at least 16 rows.
        operations += m * k * c.layer_norm * (1.0 if exclusive else max(1.0, 16 * warps / m))
    if not tensor_cores:
        operations += (m + n) * k  # Conversion to float32.
    elif config.gathers(case.problem):
        operations += (m + n) * k * c.gather
    # The FLOP rate counts a multiply-add as two operations.
    overhead = operations / (case.fma_rate / 2)
    if TEMPLATES[config.template].stationary:
        # The warps' accumulators of each strip are exchanged through shared memory.
        overhead += 2 * warps * m * n * 4 / c.l2_rate
    if not tensor_cores:
        return (2 * m * n * k / (case.fma_rate * c.fma) + overhead) * 1e6

    rate = case.rate / (1 + c.issue_warps / (warps * resident))
    mma_sync_rate = rate * (c.mma_sync if case.has_both_mma else 1.0)
    if case.problem.arithmetic == "fma":
        mma_sync_rate = rate * c.fma
    if warpgroup_mma(case.problem, config, case.device):
        mma_time = m * n * (1 + c.edge_columns / config.matmul_n(case.problem)) / rate
        if case.problem.prologue is not None:
            mma_time /= c.modified_operand
    else:
        # Gate and up projection are two matmuls.
        matmuls = 2 if case.problem.epilogue.gated else 1
        # The warps of a direct kernel compute the same tile.
        side_by_side = 1 if TEMPLATES[config.template].direct else warps
        mma_time = max(m * n, matmuls * side_by_side * _WARP_TILE) / mma_sync_rate
    if case.converts_a:
        mma_time += max(m * m, warps * _WARP_TILE) / mma_sync_rate
    return (2 * k * mma_time + overhead) * 1e6


_WARP_TILE = 16 * 8
"""Minimum tile of a warp with mma.sync, in elements. If a matmul has fewer elements per warp, warps
compute the same elements redundantly."""


def epilogue_time(case: Case, config: GemmConfig, c: Constants) -> float:
    """Return the microseconds from a tile's last step along K to its end, if alone on an SM."""
    uses_fma = not TEMPLATES[config.template].tensor_cores
    fold_time = config.block_m * config.block_n * c.thread_reduction if uses_fma else 0.0
    if config.split_k > 1:
        return fold_time + config.block_m * config.block_n * 4 / c.l2_rate * 1e6
    return fold_time + _tile_epilogue_time(case, config, c)


def _tile_epilogue_time(case: Case, config: GemmConfig, c: Constants) -> float:
    """Return the microseconds of a tile's epilogue and store."""
    elements = int(config.block_m * config.block_n * case.columns_share)
    output_bytes = elements * case.out_bits / 8 / _width(case.store_bytes, c)
    l2_time = (output_bytes + elements * case.matrix_bytes) / c.l2_rate
    return (l2_time + elements * case.pointwise / (case.fma_rate / 2)) * 1e6


def _width(bytes_a_thread: float, c: Constants) -> float:
    """Return the fraction of the rate of 16-byte accesses that narrower accesses reach."""
    return float(math.pow(bytes_a_thread / 16, c.narrow))


def _memory_time(
    case: Case, config: GemmConfig, c: Constants, occupancy: int, resident: int, sm_steps: float
) -> float:
    """Return the microseconds of the memory timeline.

    Three limits are blended with a p-norm: DRAM bandwidth; L2 bandwidth of one SM; and, by Little's
    law, the bytes in flight of an SM's CTAs over the latency.

    Args:
        case: the problem and the device.
        config: the configuration.
        c: the constants.
        occupancy: CTAs that fit on an SM.
        resident: CTAs that are actually resident.
        sm_steps: steps along K of all CTAs of an SM.
    """
    width = 1.0 if config.tma else _width(case.load_bytes, c)
    tile = config.block_n * case.b_bits * case.b_waste
    if TEMPLATES[config.template].tensor_cores:
        tile += config.block_m * case.a_bits * case.a_waste
    l2 = sm_steps * config.block_k * tile / 8 / (c.l2_rate * width) * 1e6
    if not TEMPLATES[config.template].tensor_cores:
        latency = c.direct_latency
    else:
        latency = c.latency / max(1.0, stages_ahead(case, config, c))
    if config.gathers(case.problem):
        latency += c.gather_rows * (config.block_m + config.block_n) / config.consumer_warps
    latency_time = sm_steps * latency / resident
    dram = dram_bytes(case, config, c, occupancy) / (case.device.bandwidth * c.stream) * 1e6
    return blend((dram, l2, latency_time), c)


def blend(times: tuple[float, ...], c: Constants) -> float:
    """Return the p-norm of overlapping times in microseconds.

    This is the longest time, or somewhat more if others are close to it.
    """
    longest = max(times)
    if math.isinf(longest):
        return longest
    shares = sum((time / longest) ** c.sharpness for time in times)
    return longest * float(math.pow(shares, 1 / c.sharpness))


def stages_ahead(case: Case, config: GemmConfig, c: Constants) -> float:
    """Return the number of stages that are being loaded while one is multiplied."""
    if TEMPLATES[config.template].direct:
        return 1.0
    if config.gathers(case.problem):
        return 0.0
    unavailable = c.busy_stage if warpgroup_mma(case.problem, config, case.device) else 0.0
    return config.num_stages - 1 - unavailable


def dram_bytes(case: Case, config: GemmConfig, c: Constants, occupancy: int) -> float:
    """Return the DRAM traffic in bytes after reuse in L2.

    Tiles are visited in groups of `group_m` rows of tiles. All concurrent tiles share what they
    read. A group reads its rows of a again for each further set of columns, and each group reads b
    again, unless L2 retains them.
    """
    problem, device = case.problem, case.device
    l2_capacity = c.l2_share * device.l2
    slots = device.sms * occupancy
    along_m = -(-problem.rows // config.block_m)
    along_n = tiles_along_n(problem, config.block_n)
    group = min(config.group_m, along_m)
    slab = min(problem.rows, group * config.block_m) * problem.k * case.a_bits / 8
    a_reloads = max(0.0, along_n * group * config.split_k / slots - 1) * max(
        0.0, 1 - l2_capacity / slab
    )
    matrix = problem.n * problem.k * case.b_bits / 8
    sweeps = min(-(-along_m // group), max(1.0, along_m * along_n * config.split_k / slots))
    b_reloads = (sweeps - 1) * max(0.0, 1 - l2_capacity / matrix)
    if config.stream_k:
        # Stream-K work starts at arbitrary positions along K, so CTAs of one row or column of tiles
        # do not read the same data at the same time.
        miss_rate = max(0.0, 1 - l2_capacity / (problem.a_bytes + problem.b_bytes))
        a_reloads = max(a_reloads, miss_rate * (along_n - 1))
        b_reloads = max(b_reloads, miss_rate * (along_m - 1))
    a = problem.a_bytes * case.a_waste * (1 + a_reloads)
    b = problem.b_bytes * case.b_waste * (1 + b_reloads)
    return a + b + case.rest_bytes


def reduction_time(case: Case, config: GemmConfig, c: Constants) -> float:
    """Return the microseconds of the split-K reduction, which reads the accumulators of all splits.

    If fused into the same launch, one CTA reduces a whole tile and runs its epilogue.
    """
    problem, device = case.problem, case.device
    if config.fused_split_k:
        tile = config.block_m * config.block_n
        loads = ceiling(config.split_k * tile, _LOADS_IN_FLIGHT * config.threads)
        load_time = loads * c.latency + config.split_k * tile * 4 / c.l2_rate * 1e6
        tile_epilogue = _tile_epilogue_time(case, config, c)
        return c.fused_gap + (load_time + tile_epilogue) * ceiling(
            config.tiles(problem), device.sms
        )
    sums = config.split_k * problem.outputs * problem.m * problem.n * 4
    spill_bytes = max(0.0, sums - c.l2_share * device.l2)
    transfer_time = sums / (c.reduction_rate * device.sms) + 2 * spill_bytes / device.bandwidth
    return transfer_time * 1e6 + (c.dependent_gap if config.pdl else c.gap)


def _exchange_time(config: GemmConfig, c: Constants) -> float:
    """Return the microseconds for a CTA to write the accumulators of one tile and to add another
    CTA's accumulators to those of one tile.
    """
    transfer_time = 2 * config.block_m * config.block_n * 4 / c.l2_rate * 1e6
    return transfer_time + 2 * c.fused_gap + c.latency


_LOADS_IN_FLIGHT = 128
"""Partial accumulators that a thread requests before it waits for them."""


def _row_amax_time(case: Case, config: GemmConfig, c: Constants) -> float:
    """Return the microseconds after a kernel whose tiles compute the row amax.

    One kernel reduces the values of all tiles of a row. If rows are quantized, another kernel reads
    the output, from L2 as far as L2 retains it.
    """
    problem, device = case.problem, case.device
    maxima = tiles_along_n(problem, config.block_n) * problem.m * 4
    total = c.gap + maxima / (c.reduction_rate * device.sms) * 1e6
    if problem.quantized:
        elements = problem.m * problem.columns
        read_bytes, write_bytes = (
            elements * case.out_bits / 8,
            size_of(elements, problem.stored_dtype),
        )
        spill_bytes = max(0.0, read_bytes - c.l2_share * device.l2)
        total += c.gap + (read_bytes / (c.l2_rate * device.sms)) * 1e6
        total += (spill_bytes + write_bytes) / device.bandwidth * 1e6
    return total
