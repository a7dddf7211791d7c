"""Cost model and candidates of CUTLASS kernels: which are worth building for a problem.

A build takes half a minute, so only two kernels are built by default (`rank`), and the model has to
pick the right ones. It shares its constants and terms with the Triton templates'
(`templates.triton.cost_model`). sm_80 kernels are predicted like the Triton template of the same
family. For sm_90 kernels the terms are combined differently: the CTAs of a cluster share loads,
stream-K has no wave quantization, and pingpong overlaps one tile's epilogue with the other's MMAs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from inductor_ext.templates.cutlass.config import CutlassConfig, Filter, Mainloop
from inductor_ext.templates.cutlass.constraints import (
    alignments,
    broadcast_bytes,
    group,
    layouts,
    legal,
)
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import DTYPE_BITS, FP8, INT4, ceiling
from inductor_ext.templates.triton import cost_model
from inductor_ext.templates.triton.config import GemmConfig

_TILES_2X = (
    (128, 256, (3,)),
    (256, 128, (3,)),
    (128, 128, (3, 4, 5)),
    (64, 128, (4, 6)),
    (128, 64, (4, 6)),
    (64, 256, (4,)),
    (256, 64, (4,)),
    (64, 64, (5, 10)),
)
"""Tile M, tile N and stages, as in CUTLASS's own generator for sm_80."""

_PINGPONG = ((64, 128), (64, 256), (128, 128), (64, 64), (128, 64))
_COOPERATIVE = ((128, 256), (256, 128), (128, 128), (128, 64), (256, 64))
_CLUSTERS = ((2, 1, 1), (1, 2, 1), (1, 1, 1))

_MORE_TILES = {
    "warpspecialized": ((64, 64), (64, 128), (64, 256), (64, 32), (64, 16)),
    "warpspecialized_pingpong": ((64, 16), (64, 32), (64, 96), (64, 192), (128, 96), (128, 32)),
    "warpspecialized_cooperative": ((128, 32), (128, 96), (128, 192), (256, 32), (256, 96)),
}
_MORE_CLUSTERS = ((2, 2, 1), (4, 1, 1), (1, 4, 1))
"""Additional clusters (and `_MORE_TILES`: tiles) of an exhaustive search."""

_SKINNY = ((128, 16), (128, 32), (128, 64))
"""Tiles for small M with swapped operands, where the problem's M is the kernel's N."""

_STREAM_K_WASTE = 0.05
"""Minimum fraction of SM time that the last wave leaves idle for stream-K to be a candidate."""


def candidates(problem: GemmProblem, device: Device, level: int = 0) -> Iterator[CutlassConfig]:
    """Yield the legal kernels to consider for a problem, without duplicates.

    The order carries no meaning, but is the same in every process.

    Args:
        problem: the GEMM.
        device: to run on.
        level: above 0 for an exhaustive search over tiles and clusters.
    """
    seen: set[CutlassConfig] = set()
    for config in _propose(problem, device, level):
        if config not in seen and legal(problem, config, device):
            seen.add(config)
            yield config


def _propose(problem: GemmProblem, device: Device, level: int) -> Iterator[CutlassConfig]:
    tma = device.capability == (9, 0)
    if tma:
        yield from _propose_warp_specialized(problem, device, level)
    if problem.operation != "grouped" and (
        not tma or problem.tma_obstacle is not None or level > 0 or not _stores_by_tma(problem)
    ):
        yield from _propose_multistage(problem, device, level)


def _stores_by_tma(problem: GemmProblem) -> bool:
    return alignments(problem, False)[2] * DTYPE_BITS[problem.stored_dtype] == 128


def _make_base(problem: GemmProblem, swap: bool) -> CutlassConfig | None:
    """Return a configuration with all fields that the problem determines; None if unsupported."""
    operand_layouts = layouts(problem, swap)
    dtypes = (problem.a.dtype, problem.b.dtype)
    a, b = reversed(dtypes) if swap else dtypes
    matrices = [inp.dtype for inp in problem.epilogue.inputs if inp.broadcast == "matrix"]
    if operand_layouts is None or not {a, b, problem.stored_dtype, *matrices[:1]} <= _DTYPES:
        return None
    return CutlassConfig(
        90,
        "warpspecialized_pingpong",
        (64, 64, 64),
        a,
        b,
        problem.stored_dtype,
        matrices[0] if matrices else "void",
        problem.accumulator,
        operand_layouts,
        alignments(problem, swap),
        grouped=problem.operation == "grouped",
        fast_accumulation=problem.fast_accumulation and problem.arithmetic == "fp8",
        tf32=problem.arithmetic == "tf32",
        swap_ab=swap,
        group=group(problem),
    )


_DTYPES = frozenset({"float32", "float16", "bfloat16", *FP8, *INT4, "int8", "int32"})


def _propose_warp_specialized(
    problem: GemmProblem, device: Device, level: int
) -> Iterator[CutlassConfig]:
    mixed = problem.operation == "mixed"
    small_m = problem.rows <= 64
    for swap in (True,) if mixed else (False, True) if small_m else (False,):
        base = _make_base(problem, swap)
        if base is None:
            return
        # 128 bytes of the wider operand, one row of 128-byte swizzled shared memory. The narrower
        # operand has 64 or 32 bytes, which still is a swizzle row.
        depth = 1024 // max(DTYPE_BITS[base.a], DTYPE_BITS[base.b])
        names: tuple[tuple[Mainloop, tuple[tuple[int, int], ...]], ...] = (
            ("warpspecialized_pingpong", _PINGPONG + (_SKINNY if swap else ())),
            ("warpspecialized_cooperative", _COOPERATIVE + (_SKINNY if swap else ())),
        )
        if level > 0:
            names = tuple((name, tiles + _MORE_TILES[name]) for name, tiles in names)
            names += (("warpspecialized", _MORE_TILES["warpspecialized"]),)
        for mainloop, tiles in names:
            for m, n in dict.fromkeys(tiles):
                for cluster in _CLUSTERS + (_MORE_CLUSTERS if level > 0 else ()):
                    config = dataclasses.replace(
                        base, mainloop=mainloop, tile=(m, n, depth), cluster=cluster
                    )
                    yield from _launches(problem, config, device)


def _launches(
    problem: GemmProblem, config: CutlassConfig, device: Device
) -> Iterator[CutlassConfig]:
    """Yield `config` with a swizzle and raster order for the sizes, and a stream-K variant."""
    along_m, along_n = _tiles(problem, dataclasses.replace(config, swizzle=1))
    raster: Literal["along_m", "along_n"] = "along_m" if along_m <= along_n else "along_n"
    # A wave of about square shape loads the fewest bytes of A and B.
    side = min(along_m, along_n, math.isqrt(device.sms))
    swizzles = [swizzle for swizzle in (8, 4, 2, 1) if swizzle <= side]
    shapes = [dataclasses.replace(config, swizzle=swizzle, raster=raster) for swizzle in swizzles]
    units = [_units(problem, shape) for shape in shapes]
    # Take the largest swizzle with the fewest waves: tiles padded by the swizzle cost time too.
    waves = [ceiling(unit, device.sms) for unit in units]
    yield shapes[waves.index(min(waves))]
    if config.mainloop != "warpspecialized_cooperative":
        return
    shape_index = next(index for index, unit in enumerate(units) if unit <= 1.02 * units[-1])
    if 1 - units[shape_index] / (min(waves) * device.sms) >= _STREAM_K_WASTE:
        yield dataclasses.replace(shapes[shape_index], scheduler="stream_k")


def _sizes(problem: GemmProblem, config: CutlassConfig) -> tuple[int, int]:
    """Return M and N in the kernel's terms."""
    sizes = (problem.rows, problem.width)
    return (sizes[1], sizes[0]) if config.swap_ab else sizes


def _tiles(problem: GemmProblem, config: CutlassConfig) -> tuple[int, int]:
    """Return the tiles along M and N as CUTLASS's tile schedulers count them.

    They are rounded up to whole clusters times the swizzle, which CUTLASS reduces if there are few
    tiles.
    """
    m, n = (
        ceiling(size, tile)
        for size, tile in zip(_sizes(problem, config), config.tile, strict=False)
    )
    min_tiles = min(
        ceiling(m, config.cluster[0]) * config.cluster[0],
        ceiling(n, config.cluster[1]) * config.cluster[1],
    )
    thresholds = {8: 6, 4: 3, 2: 2, 1: 0}
    swizzle = next(
        candidate
        for candidate in thresholds
        if candidate <= config.swizzle and min_tiles >= thresholds[candidate]
    )
    multiples = (swizzle * ctas for ctas in config.cluster[:2])
    along_m, along_n = (ceiling(a, b) * b for a, b in zip((m, n), multiples, strict=True))
    return along_m, along_n


def _units(problem: GemmProblem, config: CutlassConfig) -> int:
    """Return the number of tiles of all output matrices."""
    copies = problem.batch if problem.operation == "grouped" else problem.outputs
    return math.prod(_tiles(problem, config)) * copies


def _propose_multistage(
    problem: GemmProblem, device: Device, level: int
) -> Iterator[CutlassConfig]:
    base = _make_base(problem, False)
    arch = 89 if problem.arithmetic == "fp8" else 80
    target = 10 * device.capability[0] + device.capability[1]
    if base is None or target < arch:
        return
    min_bits = min(DTYPE_BITS[base.a], DTYPE_BITS[base.b])
    for m, n, stages in _TILES_2X:
        for depth in (512 // max(min_bits, 8), 1024 // max(min_bits, 8)):
            for count in stages:
                if depth > 512 // max(min_bits, 8):
                    count = ceiling(count, 2) + 1
                yield dataclasses.replace(
                    base,
                    arch=arch,
                    target=target,
                    mainloop="multistage",
                    # The epilogue visitors load matrices; there is no C operand.
                    c="void",
                    epilogue="direct",
                    tile=(m, n, depth),
                    stages=count,
                    swizzle=8,
                )


def predict(
    problem: GemmProblem,
    config: CutlassConfig,
    device: Device,
    constants: cost_model.Constants = cost_model.DEFAULT,
) -> float:
    """Return the predicted microseconds of a launch with operands in DRAM.

    The result is infinite if the device has no tensor cores for the problem. Legality is not
    checked; see `constraints.why_not`.
    """
    triton_config = _find_similar(problem, config, device)
    if config.arch < 90:
        return cost_model.predict(problem, triton_config, device, constants).total
    return _predict(problem, config, triton_config, device, constants)


def _find_similar(problem: GemmProblem, config: CutlassConfig, device: Device) -> GemmConfig:
    """Return the most similar Triton configuration, in the problem's axes, for the shared model."""
    m, n, k = config.tile
    stages = max(2, config.pipeline(device.shared_memory, broadcast_bytes(problem, config)))
    if config.arch < 90:
        along_m, along_n = config.warps
        template = "mixed" if problem.operation == "mixed" else "cp_async"
        return GemmConfig(template, m, n, k, stages, along_m * along_n, config.swizzle)  # type: ignore[arg-type]
    if config.swap_ab:
        m, n = n, m
    warps = 8 if config.mainloop == "warpspecialized_cooperative" else 4
    return GemmConfig(
        "persistent_tma",
        m,
        n,
        k,
        stages,
        warps,
        config.swizzle,
        config.split_k,
        swap_ab=config.swap_ab,
        tma=True,
        flatten=True,
    )


def _predict(
    problem: GemmProblem,
    config: CutlassConfig,
    triton_config: GemmConfig,
    device: Device,
    c: cost_model.Constants,
) -> float:
    case = cost_model.case_of(problem, device)
    units = _units(problem, config) * config.split_k
    steps = ceiling(ceiling(problem.depth, config.tile[2]), config.split_k)
    per_sm: float = ceiling(units, device.sms)
    reduction = 0.0
    if config.scheduler == "stream_k" and config.split_k == 1:
        per_sm = max(units / device.sms, 2 / steps)
        # Partial tiles of the last wave are reduced through memory: each SM has one.
        partial = 2 * 4 * config.tile[0] * config.tile[1]
        reduction = partial / c.l2_rate * 1e6 + c.fused_gap
    elif config.split_k > 1:
        reduction = cost_model.reduction_time(case, triton_config, c)
    # Pingpong: two consumer warpgroups alternate, with a tile each.
    consumers = 2 if config.mainloop == "warpspecialized_pingpong" and per_sm > 1 else 1
    compute = per_sm * steps * cost_model.step_time(case, triton_config, c, consumers)
    epilogue = cost_model.epilogue_time(case, triton_config, c)
    compute += epilogue if consumers == 2 else max(1.0, per_sm) * epilogue

    rows, columns = (triton_config.block_m, triton_config.block_n)
    shared_a, shared_b = config.cluster[1], config.cluster[0]
    if config.swap_ab:
        shared_a, shared_b = shared_b, shared_a
    step_bits = triton_config.block_k * (
        rows * case.a_bits / shared_a + columns * case.b_bits / shared_b
    )
    l2 = per_sm * steps * step_bits / 8 / c.l2_rate * 1e6
    latency = per_sm * steps * c.latency / max(1.0, cost_model.stages_ahead(case, triton_config, c))
    dram = cost_model.dram_bytes(case, triton_config, c, 1) / (device.bandwidth * c.stream) * 1e6
    if math.isinf(compute):
        return math.inf
    memory = cost_model.blend((dram, l2, latency), c)
    launch = device.launch + c.latency + c.start + c.descriptors
    return launch + cost_model.blend((compute, memory), c) + reduction


def rank(
    problem: GemmProblem,
    device: Device,
    limit: int = 2,
    only: Filter | None = None,
    level: int = 0,
    constants: cost_model.Constants = cost_model.DEFAULT,
    *,
    tma_only: bool = False,
) -> list[tuple[CutlassConfig, float]]:
    """Return the kernels worth building and their predicted microseconds, fastest first.

    Kernels with different schedules are preferred, then those with different tiles: on an H200
    pingpong and cooperative differ by 4% for some sizes, which the model cannot resolve.

    Args:
        problem: the GEMM.
        device: to run on.
        limit: maximum number of kernels.
        only: the user's allowlist and denylist.
        level: see `candidates`.
        constants: of the model.
        tma_only: whether to exclude kernels that do not store by TMA.
    """
    predictions = [
        (config, predict(problem, config, device, constants))
        for config in candidates(problem, device, level)
        if (only is None or only.passes(config.name)) and (not tma_only or config.epilogue == "tma")
    ]
    predictions = [prediction for prediction in predictions if not math.isinf(prediction[1])]
    # Break ties by name, so that every process selects the same kernels.
    predictions.sort(key=lambda prediction: (prediction[1], prediction[0].name))
    selected: list[tuple[CutlassConfig, float]] = []
    for kind in (_schedule, _tile, _identity):
        seen = {kind(config) for config, _ in selected}
        for prediction in predictions:
            if kind(prediction[0]) not in seen:
                seen.add(kind(prediction[0]))
                selected.append(prediction)
    del selected[limit:]
    return sorted(selected, key=lambda prediction: (prediction[1], prediction[0].name))


def _schedule(config: CutlassConfig) -> object:
    return config.mainloop, config.scheduler, config.swap_ab


def _tile(config: CutlassConfig) -> object:
    return _schedule(config), config.tile


def _identity(config: CutlassConfig) -> object:
    return config
