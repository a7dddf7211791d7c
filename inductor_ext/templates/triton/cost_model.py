"""Which configurations of which templates are worth measuring, by a model of the device.

`predict` gives the microseconds of one configuration, in parts; `rank` puts the whole space of a
problem in order and keeps a few that differ. Everything that the model does not know from the
problem, the configuration and the device is one of the `Constants`, so that measurements can
correct it (`fit`). The model is there to order: what it keeps is measured against ATen anyway.

Two timelines run side by side, and the longer one counts most:

- SMs: tiles in whole rounds (a wave that is half full takes as long as a full one), steps along K
  at the rate of the tensor cores for that tile, the latency that a pipeline needs to fill, and what
  is left visible of the epilogue;
- memory: bytes of DRAM after reuse in L2 at the bandwidth, as far as enough loads are in flight
  (Little's law), and bytes through L2 at the rate of one SM.

Launch, the second step of split-K and what kernels behind do with maxima of rows come on top. No
prediction is below the problem's roofline, and none grows with the bandwidth, with the number of
SMs of one kind, or with a shorter K of the same alignment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import (
    DTYPE_BITS,
    GemmProblem,
    Operand,
    Prologue,
    ceiling,
    size_of,
)
from inductor_ext.templates.triton.config import TEMPLATES, GemmConfig, tiles_along_n, warpgroup_mma
from inductor_ext.templates.triton.search_space import candidates

__all__ = [
    "DEFAULT",
    "Constants",
    "Measurement",
    "Prediction",
    "apart",
    "fit",
    "predict",
    "prologue_pays",
    "rank",
]


@dataclass(frozen=True)
class Constants:
    """What only measurements can tell.

    The defaults are fitted to 2213 kernels of 30 problems on an H200, with torch 2.11 and Triton
    3.6.0: bfloat16, 1 to 4096 rows, plain, gated, normalised, of several parts and batched. Those
    say nothing of `convert`, `standardize`, `specialized`, `gap` and `fused_gap`, which were set by
    hand; `rows` was set by those of 16x4096x4095 and 64x4097x4095. `beside` and `lonely` are fitted
    to 64 kernels of 1 and 16 rows with int8 weights on an H100 and an H200, `store_descriptor` and
    `async_store` to the differences within 47 pairs of kernels with and without such stores there.
    `changed` was fitted when it still stood for all kernels whose threads load.
    """

    latency: float = 0.774
    """Microseconds from asking for a tile to having it, under load."""
    direct: float = 0.275
    """The same of loads into registers, which no pipeline has asked for before."""
    start: float = 1.22
    """Microseconds until the first CTAs have begun and the last ones ended, where they fill shared
    memory first."""
    descriptors: float = 0.38
    """More microseconds of that where TMA loads: its descriptors are made and fetched."""
    store_descriptor: float = 1.5
    """More microseconds where TMA stores: one more descriptor, and the last store is waited for."""
    refill: float = 0.0302
    """Microseconds from the end of a CTA to the first load of its successor."""
    stream: float = 1.0
    """Share of the DRAM's bandwidth that tiles reach, beside long copies."""
    sharpness: float = 3.26
    """How little a shorter time slows down what runs beside it: the exponent of a p-norm."""
    l2_rate: float = 154e9
    """Bytes/s that one SM gets from L2, or writes to it."""
    sums_rate: float = 12.9e9
    """Bytes/s of one SM's share of adding up splits, which begins and ends with a kernel."""
    held: float = 0.318
    """Share of a stage that instructions of warpgroups, which run on while the next is waited for,
    keep from being loaded."""
    edge: float = 8.51
    """Columns by which a tile is more expensive for warpgroups than its area: they read both
    operands from shared memory, and the less of b a row of a is multiplied by, the more of it."""
    warps: float = 0.0275
    """Warps' worth of multiplications that an SM loses to waiting and issuing."""
    changed: float = 0.857
    """Share of the rate of warpgroup instructions where threads change an operand before. That
    they load operands costs nothing, since addresses within a tile stay while scalars walk."""
    old_mma: float = 0.474
    """mma.sync over warpgroup instructions, on devices that have both."""
    fma: float = 1.0
    """Share of the float32 rate that loops without tensor cores reach."""
    convert: float = 3.0
    """Operations to dequantise one element."""
    normalize: float = 0.57
    """Operations to normalise one element; tensor cores sum up the squares."""
    handed: float = 25.1
    """More of them for each time that warps repeat the squares of others, as all of them wait."""
    beside: float = 8.55
    """Operations to normalise one element where b is dequantised beside it."""
    lonely: float = 12.5
    """Warps' worth of these that an SM loses to waiting and issuing."""
    standardize: float = 5.0
    """Operations to add an element to its row's mean and deviation, and as many to standardise it;
    each warp repeats the latter for the rows that it multiplies."""
    folding: float = 0.1
    """Microseconds to add up what the threads of a CTA have of one element of the output, without
    tensor cores."""
    gather: float = 14.0
    """Operations to load an element on its own, where copies are too narrow for cp.async."""
    rows: float = 0.02
    """Microseconds that a step waits longer for each row of a tile that a warp loads so."""
    narrow: float = 0.244
    """How loads of less than 16 bytes slow down: the exponent of their width over 16."""
    specialized: float = 0.5
    """Share of the epilogue that is visible where a group of warps of its own loads."""
    async_store: float = 0.4
    """Share of the epilogue that is visible where TMA stores."""
    l2_share: float = 0.419
    """Share of L2 that keeps one operand while the other streams through."""
    gap: float = 2.0
    """Microseconds between two kernels, one of which waits for the other."""
    dependent_gap: float = 0.791
    """The same where the second is a programmatic dependent launch."""
    fused_gap: float = 0.5
    """From a tile's last sums to the CTA that knows of it, where that adds up the splits."""


DEFAULT = Constants()

_SHARES = (
    "stream",
    "changed",
    "old_mma",
    "fma",
    "specialized",
    "async_store",
    "l2_share",
    "held",
)
"""Constants that are shares, at most 1."""


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one configuration, in parts that overlap except where said."""

    compute: float
    """Steps along K on the busiest SM, and filling its pipelines again after the first time."""
    memory: float
    """DRAM and L2."""
    epilogue: float
    """What is visible of epilogues; follows `compute`."""
    reduction: float
    """Adding up the splits of K, or what is done with maxima of rows; follows everything."""
    launch: float
    """Launch, start and the first loads; precedes everything."""
    total: float


class _Case:
    """What is the same for all configurations of a problem on a device."""

    def __init__(self, problem: GemmProblem, device: Device) -> None:
        self.problem = problem
        self.device = device
        arithmetic = problem.arithmetic
        self.fma_rate = device.fma / device.sms
        self.rate = device.throughput(arithmetic) / device.sms
        self.both_mma = device.capability[0] in (9, 10)
        self.a_bits = DTYPE_BITS[problem.a.dtype]
        self.b_bits = DTYPE_BITS[problem.b.dtype]
        self.out_bits = DTYPE_BITS[problem.kernel_stores]
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
            DTYPE_BITS[each.dtype] / 8
            for each in problem.epilogue.inputs
            if each.broadcast == "matrix"
        )
        self.rest_bytes = problem.fused_bytes + problem.bytes_written
        if problem.quantized:
            scaled = problem.m * problem.columns
            self.rest_bytes += scaled * (self.out_bits - DTYPE_BITS[problem.stored]) // 8
        # A maximum is one of absolute values.
        self.pointwise = problem.epilogue.pointwise + 2 * problem.epilogue.reductions
        prologue = problem.prologue
        self.converts_a = prologue is not None and prologue.normalizes
        self.converts_b = prologue is not None and prologue.dequantizes
        self.standardizes = prologue is not None and prologue.standardizes
        # cp.async moves 4 bytes or more.
        self.columns_share = problem.columns / problem.n


def _waste(operand: Operand) -> float:
    """Bytes moved for each one used: memory is read in sectors of 32 bytes."""
    if operand.layout != "strided":
        return 1.0
    return max(1.0, min(256 / DTYPE_BITS[operand.dtype], *operand.strides))


@functools.lru_cache(maxsize=64)
def _case(problem: GemmProblem, device: Device) -> _Case:
    return _Case(problem, device)


def predict(
    problem: GemmProblem, config: GemmConfig, device: Device, constants: Constants = DEFAULT
) -> Prediction:
    """The microseconds of one launch, with operands in DRAM; infinite without tensor cores for it.

    Legality is not looked at: see `constraints.why_not`.
    """
    return _predicted(_case(problem, device), config, constants)


def _predicted(case: _Case, config: GemmConfig, c: Constants) -> Prediction:
    """Of a configuration with the copies before its kernel."""
    if config.realign is None:
        return _predict(case, config, c)
    problem, own = config.of_kernel(case.problem)
    found, bandwidth = _predict(_case(problem, case.device), own, c), case.device.bandwidth
    copies = sum(
        c.gap + (_waste(lain) + 1) * size / _width(lain.vector_bytes, c) / bandwidth * 1e6
        for lain, lies, size in (
            (case.problem.a, problem.a, problem.a_bytes),
            (case.problem.b, problem.b, problem.b_bytes),
        )
        if lain != lies
    )
    return dataclasses.replace(found, launch=found.launch + copies, total=found.total + copies)


def _predict(case: _Case, config: GemmConfig, c: Constants) -> Prediction:
    problem, device = case.problem, case.device
    occupancy = config.occupancy(problem, device)
    steps = config.k_steps(problem)
    units = config.units(problem)
    most = -(-units // device.sms)
    per_sm = max(1.0, units / device.sms) if config.stream_k else most
    rounds = -(-units // (device.sms * occupancy))
    resident = min(occupancy, most)

    # A loop over all tiles fills its pipeline once, others again for each round of CTAs.
    refills = 0 if config.flatten or config.warp_specialize else rounds - 1
    compute = per_sm * steps * _step(case, config, c, resident) + refills * (c.refill + c.latency)
    epilogue = per_sm / resident * _epilogue(case, config, c)
    if config.warp_specialize:
        epilogue *= c.specialized
    elif config.tma_store:
        epilogue *= c.async_store
    memory = _memory(case, config, c, occupancy, resident, per_sm * steps)
    reduction = 0.0
    if config.split_k > 1:
        reduction = _reduction(case, config, c)
    elif config.stream_k:
        reduction = _exchange(config, c)
    if problem.epilogue.reductions:
        reduction += _rows(case, config, c)

    launch = device.launch + c.latency
    if not TEMPLATES[config.template].direct:
        launch += c.start
    if config.tma:
        launch += c.descriptors
    if config.tma_store:
        launch += c.store_descriptor
    if case.standardizes:
        launch += rounds * _statistics(case, config, c, resident)
    busy = compute + epilogue
    together = _blend((busy, memory), c)
    if TEMPLATES[config.template].tensor_cores and _ahead(case, config, c) < 1:
        # While a CTA multiplies nothing is loaded, but by others of its SM.
        together += (busy + memory - together) / occupancy
    # What is infinite stays so: the difference above is no number then.
    total = math.inf if math.isinf(busy) else launch + together + reduction
    return Prediction(compute, memory, epilogue, reduction, launch, total)


def _statistics(case: _Case, config: GemmConfig, c: Constants, resident: int) -> float:
    """Microseconds of the first pass over the rows of the tiles that an SM has at once."""
    elements = resident * config.block_m * case.problem.k
    moved = elements * case.a_bits / 8 / c.l2_rate
    return c.latency + (moved + elements * c.standardize / (case.fma_rate / 2)) * 1e6


def _step(case: _Case, config: GemmConfig, c: Constants, resident: int) -> float:
    """Microseconds of one step along K, on an SM that has `resident` CTAs in turn."""
    if not case.rate:
        return math.inf
    m, n, k = config.block_m, config.block_n, config.block_k
    warps = config.consumer_warps
    tensor_cores = TEMPLATES[config.template].tensor_cores
    operations = case.converts_b * n * k * c.convert
    if case.converts_a and case.converts_b:
        operations += m * k * c.beside * (1 + c.lonely / (warps * resident))
    elif case.converts_a:
        repeated = warps * _WARP_TILE / m**2 - 1 if tensor_cores else 0.0
        operations += m * k * (c.normalize + c.handed * max(0.0, repeated))
    if case.standardizes:
        alone = not tensor_cores or warpgroup_mma(case.problem, config, case.device)
        # Warps stand side by side along N, each with 16 rows or more.
        operations += m * k * c.standardize * (1.0 if alone else max(1.0, 16 * warps / m))
    if not tensor_cores:
        operations += (m + n) * k  # Which are widened to float32.
    elif config.gathers(case.problem):
        operations += (m + n) * k * c.gather
    # An operation on one element is half of a multiply-add.
    others = operations / (case.fma_rate / 2)
    if TEMPLATES[config.template].stationary:
        # The warps' sums of each strip are written to shared memory, and read.
        others += 2 * warps * m * n * 4 / c.l2_rate
    if not tensor_cores:
        return (2 * m * n * k / (case.fma_rate * c.fma) + others) * 1e6

    rate = case.rate / (1 + c.warps / (warps * resident))
    old_rate = rate * (c.old_mma if case.both_mma else 1.0)
    if case.problem.arithmetic == "fma":
        old_rate = rate * c.fma
    if warpgroup_mma(case.problem, config, case.device):
        multiplied = m * n * (1 + c.edge / config.product_n(case.problem)) / rate
        if case.problem.prologue is not None:
            multiplied /= c.changed
    else:
        # A gate and what it gates are two products.
        products = 2 if case.problem.epilogue.gated else 1
        # Those of a direct kernel have the same tile.
        side_by_side = 1 if TEMPLATES[config.template].direct else warps
        multiplied = max(m * n, products * side_by_side * _WARP_TILE) / old_rate
    if case.converts_a:
        multiplied += max(m * m, warps * _WARP_TILE) / old_rate
    return (2 * k * multiplied + others) * 1e6


_WARP_TILE = 16 * 8
"""Elements of the least that a warp multiplies with mma.sync. Where a product has no more for each
of its warps, they repeat one another."""


def _epilogue(case: _Case, config: GemmConfig, c: Constants) -> float:
    """Microseconds from the last step along K of a tile to its end, alone on an SM."""
    alone = not TEMPLATES[config.template].tensor_cores
    folded = config.block_m * config.block_n * c.folding if alone else 0.0
    if config.split_k > 1:
        return folded + config.block_m * config.block_n * 4 / c.l2_rate * 1e6
    return folded + _stored(case, config, c)


def _stored(case: _Case, config: GemmConfig, c: Constants) -> float:
    """Microseconds of what follows the sums of a tile, until it is stored."""
    elements = int(config.block_m * config.block_n * case.columns_share)
    stored = elements * case.out_bits / 8 / _width(case.store_bytes, c)
    moved = (stored + elements * case.matrix_bytes) / c.l2_rate
    return (moved + elements * case.pointwise / (case.fma_rate / 2)) * 1e6


def _width(bytes_a_thread: float, c: Constants) -> float:
    """Share of the rate of 16-byte accesses that narrower ones reach."""
    return float(math.pow(bytes_a_thread / 16, c.narrow))


def _memory(
    case: _Case, config: GemmConfig, c: Constants, occupancy: int, resident: int, sm_steps: float
) -> float:
    """Microseconds of the memory's timeline.

    Three rates bound it, and the lowest is not reached where another is near: that of DRAM; that
    at which an SM gets bytes from L2; and, by Little's law, the bytes that the CTAs of an SM have
    asked for over the latency.

    Args:
        case: the problem and the device.
        config: the configuration.
        c: the constants.
        occupancy: CTAs that an SM holds at once.
        resident: those of them that there are.
        sm_steps: steps along K of all CTAs of an SM.
    """
    width = 1.0 if config.tma else _width(case.load_bytes, c)
    tile = config.block_n * case.b_bits * case.b_waste
    if TEMPLATES[config.template].tensor_cores:
        tile += config.block_m * case.a_bits * case.a_waste
    l2 = sm_steps * config.block_k * tile / 8 / (c.l2_rate * width) * 1e6
    if not TEMPLATES[config.template].tensor_cores:
        latency = c.direct
    else:
        latency = c.latency / max(1.0, _ahead(case, config, c))
    if config.gathers(case.problem):
        latency += c.rows * (config.block_m + config.block_n) / config.consumer_warps
    waiting = sm_steps * latency / resident
    dram = _dram_bytes(case, config, c, occupancy) / (case.device.bandwidth * c.stream) * 1e6
    return _blend((dram, l2, waiting), c)


def _blend(times: tuple[float, ...], c: Constants) -> float:
    """Microseconds of what runs side by side: the longest, and somewhat more where others are near.

    It is a p-norm of them.
    """
    longest = max(times)
    if math.isinf(longest):
        return longest
    shares = sum((each / longest) ** c.sharpness for each in times)
    return longest * float(math.pow(shares, 1 / c.sharpness))


def _ahead(case: _Case, config: GemmConfig, c: Constants) -> float:
    """Stages that are being loaded while one is multiplied."""
    if TEMPLATES[config.template].direct:
        return 1.0
    if config.gathers(case.problem):
        return 0.0
    held = c.held if warpgroup_mma(case.problem, config, case.device) else 0.0
    return config.stages - 1 - held


def _dram_bytes(case: _Case, config: GemmConfig, c: Constants, occupancy: int) -> float:
    """Bytes of DRAM, after what L2 keeps.

    Tiles are walked in groups of `group_m` rows of tiles. All tiles at work share what they read at
    the same time. A group reads its rows of a again for each further set of columns, and each group
    reads b again, as far as L2 does not keep them.
    """
    problem, device = case.problem, case.device
    kept = c.l2_share * device.l2
    slots = device.sms * occupancy
    along_m = -(-problem.rows // config.block_m)
    along_n = tiles_along_n(problem, config.block_n)
    group = min(config.group_m, along_m)
    slab = min(problem.rows, group * config.block_m) * problem.k * case.a_bits / 8
    a_again = max(0.0, along_n * group * config.split_k / slots - 1) * max(0.0, 1 - kept / slab)
    matrix = problem.n * problem.k * case.b_bits / 8
    sweeps = min(-(-along_m // group), max(1.0, along_m * along_n * config.split_k / slots))
    b_again = (sweeps - 1) * max(0.0, 1 - kept / matrix)
    if config.stream_k:
        # Its shares begin anywhere along K: CTAs of one row or column of tiles do not meet.
        missed = max(0.0, 1 - kept / (problem.a_bytes + problem.b_bytes))
        a_again = max(a_again, missed * (along_n - 1))
        b_again = max(b_again, missed * (along_m - 1))
    a = problem.a_bytes * case.a_waste * (1 + a_again)
    b = problem.b_bytes * case.b_waste * (1 + b_again)
    return a + b + case.rest_bytes


def _reduction(case: _Case, config: GemmConfig, c: Constants) -> float:
    """Microseconds of the second step of split-K: it reads the float32 sums of all splits.

    In the same launch a CTA does it for its whole tile, and what follows.
    """
    problem, device = case.problem, case.device
    if config.one_launch:
        tile = config.block_m * config.block_n
        loads = ceiling(config.split_k * tile, _SUMS_AT_ONCE * config.threads)
        once = loads * c.latency + config.split_k * tile * 4 / c.l2_rate * 1e6
        last = _stored(case, config, c)
        return c.fused_gap + (once + last) * ceiling(config.tiles(problem), device.sms)
    sums = config.split_k * problem.outputs * problem.m * problem.n * 4
    spilled = max(0.0, sums - c.l2_share * device.l2)
    moved = sums / (c.sums_rate * device.sms) + 2 * spilled / device.bandwidth
    return moved * 1e6 + (c.dependent_gap if config.pdl else c.gap)


def _exchange(config: GemmConfig, c: Constants) -> float:
    """Microseconds of a CTA to write its sums of one tile, and to add another's to those of one."""
    moved = 2 * config.block_m * config.block_n * 4 / c.l2_rate * 1e6
    return moved + 2 * c.fused_gap + c.latency


_SUMS_AT_ONCE = 128
"""Sums of splits that a thread asks for before it waits."""


def _rows(case: _Case, config: GemmConfig, c: Constants) -> float:
    """Microseconds behind a kernel whose tiles give maxima of rows: one kernel makes one of those
    of all tiles of a row; if rows are scaled by them, another reads the output, from L2 as far as
    that keeps it.
    """
    problem, device = case.problem, case.device
    maxima = tiles_along_n(problem, config.block_n) * problem.m * 4
    found = c.gap + maxima / (c.sums_rate * device.sms) * 1e6
    if problem.quantized:
        elements = problem.m * problem.columns
        read, written = elements * case.out_bits / 8, size_of(elements, problem.stored)
        spilled = max(0.0, read - c.l2_share * device.l2)
        found += c.gap + (read / (c.l2_rate * device.sms)) * 1e6
        found += (spilled + written) / device.bandwidth * 1e6
    return found


_WORTH = 1.5
"""Beyond so many times the best prediction a configuration is not worth measuring."""


def rank(
    problem: GemmProblem,
    device: Device,
    limit: int = 6,
    per_template: int | None = None,
    constants: Constants = DEFAULT,
) -> list[tuple[GemmConfig, Prediction]]:
    """The configurations worth measuring, fastest by prediction first.

    Of those of one template and tile that the model cannot tell apart one is kept, and none that is
    predicted to take half as long again as the first. The list is not filled by one idea: of
    `limit` places what differs in its number of stages gets one, what the model knows nothing of by
    measurements half, a tile's shape two thirds, and a template all but one, unless nothing else is
    left. What takes seconds to compile is left out where another kernel of its tile is predicted to
    do as well.

    Warp-specialised kernels are not among them: what Triton 3.6.0 made of each that was measured
    gave NaN. `candidates` has them.

    Args:
        problem: what is to be computed.
        device: where.
        limit: how many at most.
        per_template: how many of one template at most.
        constants: of the model.
    """
    case = _Case(problem, device)
    found = [
        (config, _predicted(case, config, constants))
        for config in candidates(problem, device)
        if not config.warp_specialize
    ]
    if not found:
        return []
    found.sort(key=lambda each: each[1].total)
    worth = [each for each in _distinct(found) if each[1].total <= _WORTH * found[0][1].total]
    worth = _quickly_built(problem, worth)
    counts: dict[object, int] = {}
    chosen: list[int] = []
    # All bounds first; then the least important one is dropped, and the next.
    for bounds in range(4, -1, -1):
        for index, (config, prediction) in enumerate(worth):
            if len(chosen) == limit or math.isinf(prediction.total):
                break
            if index in chosen:
                continue
            # Of what the model knows nothing by measurements.
            new = config.one_launch or config.stream_k or config.tma_store or config.realign
            shares: list[tuple[object, int]] = [
                # Whether a pipeline is deeper by one stage is the least that there is to try.
                (dataclasses.replace(config, stages=1), 1),
                (("template", config.template), max(1, limit - 1)),
                ((config.block_m, config.block_n), limit - limit // 3),
                (("new", bool(new)), max(1, limit // 2) if new else limit),
            ]
            kept = shares[:bounds]
            if per_template is not None:
                kept.append((("template", config.template), per_template))
            if any(counts.get(key, 0) >= most for key, most in kept):
                continue
            chosen.append(index)
            for key, _ in shares:
                counts[key] = counts.get(key, 0) + 1
    return [worth[index] for index in sorted(chosen)]


def prologue_pays(problem: GemmProblem, device: Device, constants: Constants = DEFAULT) -> bool:
    """Whether kernels of a problem gain, by prediction, from what they do to operands on the way.

    Each tile does it again, and the more of them share an operand, the less a pass that does it
    once for all takes beside the product. True where there is nothing to be done.

    There is no allowance for the model's error: of 13 norms before 64 to 256 rows on an H100,
    predicted at 0.98 to 1.40 of the product and a pass, only two took less than these, by 4 and
    5 %, and one as much (`gemm-prologues`).

    Args:
        problem: what is to be computed.
        device: where.
        constants: of the model.
    """
    if problem.prologue is None:
        return True
    separate = [
        prediction.total + constants.gap + constants.start + moved / device.bandwidth * 1e6
        for left, moved in apart(problem)
        for _, prediction in rank(left, device, 1, constants=constants)
    ]
    together = rank(problem, device, 1, constants=constants)
    return all(prediction.total <= other for _, prediction in together for other in separate)


def apart(problem: GemmProblem) -> Iterator[tuple[GemmProblem, int]]:
    """What is left of a problem where a norm, or dequantising, is a pass by itself, and the bytes
    that the pass moves.
    """
    prologue = problem.prologue
    if prologue is None:
        return
    left: Prologue | None
    if prologue.normalizes or prologue.standardizes:
        dequantizing = dataclasses.replace(prologue, kind="dequantize", vectors=0)
        left = dequantizing if prologue.dequantizes else None
        moved = 2 * size_of(problem.m * problem.k, problem.a.dtype)
        yield dataclasses.replace(problem, prologue=left), moved
    if prologue.dequantizes:
        left = Prologue("normalize", vectors=prologue.vectors) if prologue.normalizes else None
        b = Operand.of(problem.a.dtype, (problem.k, problem.n), problem.b.strides)
        plain = dataclasses.replace(problem, operation="mm", b=b, prologue=left)
        yield plain, problem.b_bytes + plain.b_bytes


def _distinct(
    found: Iterable[tuple[GemmConfig, Prediction]],
) -> Iterator[tuple[GemmConfig, Prediction]]:
    """The first of those of one template and tile that are predicted to take the same time."""
    seen: set[object] = set()
    for config, prediction in found:
        told = (config.template, config.block_m, config.block_n, config.swap, config.realign)
        identity = (*told, f"{prediction.total:.3e}")
        if identity not in seen:
            seen.add(identity)
            yield config, prediction


def _quickly_built(
    problem: GemmProblem, found: Sequence[tuple[GemmConfig, Prediction]]
) -> list[tuple[GemmConfig, Prediction]]:
    """All but those that ptxas unrolls for seconds where another kernel of the same tile, which it
    does not, takes no more than 1 % longer.
    """
    slow = [_unrolled(problem, config) for config, _ in found]
    quick = {
        (config.block_m, config.block_n): prediction.total
        for (config, prediction), left_out in reversed(list(zip(found, slow, strict=True)))
        if not left_out
    }
    return [
        (config, prediction)
        for (config, prediction), left_out in zip(found, slow, strict=True)
        if not left_out
        or quick.get((config.block_m, config.block_n), math.inf) > 1.01 * prediction.total
    ]


def _unrolled(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether ptxas takes most of a second, or several, to unroll a kernel's loop over K.

    It does so for up to some 23 turns of 64 elements, or 32 of small tiles, where threads load, not
    TMA, and takes seconds in proportion to instructions along K times the registers that hold
    accumulators: 1.4, 1.9, 2.9 and 3.5 s for bfloat16 tiles of 128x256 and K of 768, 1024, 1280 and
    1408, and 0.3 s for 2048, not unrolled; 0.9 and 2.8 s for 128x128 and K of 1280 and 2048 (Triton
    3.6.0, one core of an EPYC). Shares of split-K have bounds that it cannot know.
    """
    along_k = problem.k * DTYPE_BITS[problem.a.dtype] // _INSTRUCTION_BITS
    unrolled = not config.tma and config.split_k == 1 and along_k <= 128
    return unrolled and 5000 < along_k * config.accumulator_registers < 12000


_INSTRUCTION_BITS = 256
"""Of a row of a that one instruction multiplies (PTX ISA, wgmma)."""


@dataclass(frozen=True)
class Measurement:
    """What one configuration took on a device."""

    problem: GemmProblem
    config: GemmConfig
    device: Device
    microseconds: float


def error(measurements: Iterable[Measurement], constants: Constants) -> float:
    """The mean square of log(predicted / measured).

    Every problem counts the same, and in it what is slow counts less: by the square of the fastest
    over the measured time.
    """
    return sum(each**2 for each in _residuals(_weighted(measurements), constants))


_Weighted = list[tuple[_Case, GemmConfig, float, float]]
"""The case, its configuration, the measured microseconds and the weight of each measurement."""


def _weighted(measurements: Iterable[Measurement]) -> _Weighted:
    """Measurements with weights, of which the sum is 1."""
    groups: dict[tuple[GemmProblem, Device], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.problem, each.device), []).append(each)
    found = []
    for (problem, device), group in groups.items():
        weights = [each.microseconds**-2 for each in group]
        whole = sum(weights) * len(groups)
        for each, weight in zip(group, weights, strict=True):
            found.append((_case(problem, device), each.config, each.microseconds, weight / whole))
    return found


def _residuals(measurements: _Weighted, constants: Constants) -> list[float]:
    """Of which the sum of squares is `error`."""
    return [
        math.sqrt(weight) * math.log(_predicted(case, config, constants).total / microseconds)
        for case, config, microseconds, weight in measurements
    ]


_PULL = 1e-5
"""Mean square error that it is worth to leave a constant within a factor e of where it began, so
that those of which measurements say nothing stay there."""


def fit(
    measurements: Sequence[Measurement],
    constants: Constants = DEFAULT,
    rounds: int = 30,
    names: Sequence[str] | None = None,
) -> Constants:
    """Constants that predict measurements better, by least squares.

    It is the method of Levenberg and Marquardt, on the logarithms of the constants: a step where
    the predictions are taken for linear, the shorter the less it has been trusted.

    Args:
        measurements: one or more; many of different templates, tiles and sizes.
        constants: where to begin.
        rounds: steps at most; each predicts every measurement once for each constant, and a few
            times more.
        names: of the constants to change; None for all.

    Returns:
        Constants whose `error` is no higher than that of `constants`.
    """
    import torch

    names = names or [field.name for field in dataclasses.fields(Constants)]
    weighted = _weighted(measurements)

    def residuals(tried: Constants) -> torch.Tensor:
        away = [math.log(getattr(tried, name) / getattr(constants, name)) for name in names]
        pulls = [math.sqrt(_PULL) * each for each in away]
        return torch.tensor(_residuals(weighted, tried) + pulls, dtype=torch.float64)

    def changed(logarithms: Sequence[float]) -> Constants:
        return dataclasses.replace(
            best,
            **{
                name: _bounded(name, getattr(best, name) * math.exp(each))
                for name, each in zip(names, logarithms, strict=True)
            },
        )

    best, found, damping = constants, residuals(constants), 1e-2
    for _ in range(rounds):
        columns = []
        for name in names:
            # Downwards, where a share cannot be larger.
            near = dataclasses.replace(best, **{name: getattr(best, name) * math.exp(-_STEP)})
            columns.append((found - residuals(near)) / _STEP)
        slopes = torch.stack(columns, 1)
        squares, gradient = slopes.T @ slopes, slopes.T @ found
        while damping < _MOST_DAMPING:
            damped = squares + damping * torch.diag(squares.diagonal())
            step = torch.linalg.solve(damped, -gradient).clamp(-_LONGEST, _LONGEST)
            tried = changed(step.tolist())
            after = residuals(tried)
            if after @ after < found @ found:
                break
            damping *= 4
        else:
            break
        best, found, damping = tried, after, damping / 4
    return best


_STEP = 1e-3
"""Of a logarithm, to see what a constant changes."""

_LONGEST = 0.7
"""That a logarithm is changed by at once; beyond a factor of two nothing is linear."""

_MOST_DAMPING = 1e6
"""Steps are too short then to be worth it."""


def _bounded(name: str, value: float) -> float:
    return min(value, 1.0) if name in _SHARES else value
