"""The search space: legal, sensible configurations for a problem, a few hundred at most.

Every template has a generator of configurations that make sense for the problem's sizes.
`candidates` filters them with `constraints.legal`, so generators need not repeat constraints. A
problem that no template supports has no candidates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import BATCHED, GemmProblem
from inductor_ext.templates.tensors import DTYPE_BITS, INT32_MAX, ceiling, next_power_of_two
from inductor_ext.templates.triton.config import GemmConfig, tiles_along_n
from inductor_ext.templates.triton.constraints import MOST_ACCUMULATORS, least_block_k, legal
from inductor_ext.templates.triton.small_m_constraints import MOST_SUMS
from inductor_ext.templates.triton.templates import CHUNK_BYTES, STRIP, TEMPLATES, TemplateName

_TILES = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64))
"""Tiles for M above `_SKINNY_ROWS`, as the tensor cores see them."""

_SKINNY_ROWS = 64
"""Up to this M operands are swapped: otherwise wgmma would pad M to 64."""


def candidates(problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Return the legal, sensible configurations of all templates for a problem, without duplicates.

    The order has no meaning; it is the same in every process.
    """
    yield from _of_all_templates(problem, device)
    # For a small M copying b takes longer than the matmul.
    if problem.rows > _SKINNY_ROWS and problem.with_aligned_operands != problem:
        for config in _of_all_templates(problem.with_aligned_operands, device):
            copy_config = dataclasses.replace(config, align_operands="copy")
            if legal(problem, copy_config, device):
                yield copy_config


def _of_all_templates(problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    seen: set[GemmConfig] = set()
    for name, template in TEMPLATES.items():
        if problem.operation not in template.operations:
            continue
        for config in _SPACES[name](typing.cast(TemplateName, name), problem, device):
            if config not in seen and legal(problem, config, device):
                seen.add(config)
                yield config


def _make_config(
    name: TemplateName, problem: GemmProblem, m: int, n: int, k: int, **options: Any
) -> GemmConfig:
    """Return a configuration with one stage; `m` and `n` are the tensor cores' axes."""
    if options.get("swap_ab"):
        m, n = n, m
    rows = ceiling(problem.rows, m)
    return GemmConfig(
        name,
        m,
        n,
        k,
        num_stages=1,
        group_m=min(8, next_power_of_two(rows)),
        index64=problem.largest_span > INT32_MAX,
        **options,
    )


def _vary_stages(
    config: GemmConfig, problem: GemmProblem, device: Device, max_stages: int, count: int
) -> Iterator[GemmConfig]:
    """Yield the `count` deepest pipelines of 2 to `max_stages` that fit; nothing if none fits."""
    if config.gathers(problem):
        max_stages = 2
    elif not config.flatten:
        max_stages = min(max_stages, max(2, config.k_steps(problem)))
    pipelines = (
        dataclasses.replace(config, num_stages=stages) for stages in range(max_stages, 1, -1)
    )
    feasible = (
        pipeline
        for pipeline in pipelines
        if pipeline.shared_memory(problem) <= device.shared_memory
    )
    yield from itertools.islice(feasible, count)


def _vary_occupancy(
    config: GemmConfig, problem: GemmProblem, device: Device, max_stages: int, count: int
) -> Iterator[GemmConfig]:
    """Yield what `_vary_stages` yields and, for each higher occupancy, the deepest pipeline with
    that occupancy.

    With a short K, a higher occupancy lets other CTAs multiply while one starts or finishes.
    """
    max_occupancy = 0
    for pipeline in _vary_stages(config, problem, device, max_stages, max_stages):
        occupancy = pipeline.occupancy(problem, device)
        if count > 0 or occupancy > max_occupancy:
            yield pipeline
        count, max_occupancy = count - 1, max(max_occupancy, occupancy)


def _vary_stores(
    config: GemmConfig, problem: GemmProblem, device: Device, max_stages: int, count: int
) -> Iterator[GemmConfig]:
    """Yield pipelines with both kinds of stores; with TMA stores only the deepest."""
    yield from _vary_stages(config, problem, device, max_stages, count)
    if TEMPLATES[config.template].tma_store and not config.swap_ab:
        yield from _vary_stages(
            dataclasses.replace(config, tma_store=True), problem, device, max_stages, 1
        )


def _k_blocks(problem: GemmProblem, factors: Iterable[int]) -> list[int]:
    """Return block_k values: multiples of 128 bytes of a, one row of swizzled shared memory."""
    unit = 1024 // DTYPE_BITS[problem.a.dtype]
    limit = max(least_block_k(problem), next_power_of_two(problem.k))
    return sorted({min(unit * factor, limit, 256) for factor in factors})


def _warps(m: int, n: int, rows: int = 128) -> list[int]:
    """Return the warp counts whose registers hold the tile: 4, and 8 if `m` is at least `rows`."""
    return [w for w in (4, 8) if m * n <= w * 32 * MOST_ACCUMULATORS and (w == 4 or m >= rows)]


Tile = tuple[int, int, bool]
"""Sides of a tile as the tensor cores see it, and whether operands are swapped."""


def _tiles(problem: GemmProblem, device: Device, widths: Iterable[int]) -> list[Tile]:
    """Return tiles for the sizes of a problem.

    For a small M a tile covers all of M, with one of `widths` along N, and also with swapped
    operands if there are warpgroup instructions (64 rows). Otherwise `_TILES`, limited to the width
    of the output.
    """
    columns = max(problem.parts, default=problem.n) * (2 if problem.epilogue.gated else 1)
    max_width = max(32 if problem.epilogue.gated else 16, next_power_of_two(columns))
    if problem.rows > _SKINNY_ROWS:
        return list(dict.fromkeys((m, min(n, max_width), False) for m, n in _TILES))
    height = max(16, next_power_of_two(problem.rows))
    unique_widths = list(dict.fromkeys(min(width, max_width) for width in widths))
    tiles = [(height, width, False) for width in unique_widths]
    if device.capability >= (9, 0):
        tiles += [(width, height, True) for width in widths if width >= 64]
    return tiles


def _persistent_tma(
    name: TemplateName, problem: GemmProblem, device: Device
) -> Iterator[GemmConfig]:
    if problem.tma_obstacle is not None or device.capability < (9, 0):
        return
    specialized = name == "persistent_tma_ws"
    for m, n, swap in _tiles(problem, device, (64, 128, 256)):
        for k in _k_blocks(problem, (1, 2)):
            options = (
                [(4, False)]
                if specialized
                else [(w, f) for w in _warps(m, n) for f in (False, True)]
            )
            for warps, flatten in options:
                shape = _make_config(
                    name,
                    problem,
                    m,
                    n,
                    k,
                    num_warps=warps,
                    swap_ab=swap,
                    tma=True,
                    warp_specialize=specialized,
                    flatten=flatten,
                )
                if not flatten or _flattens(problem, shape, device):
                    yield from _vary_stores(shape, problem, device, 6, 2)
                if not flatten and not specialized and _streams(problem, shape, device):
                    stream_k_config = dataclasses.replace(shape, stream_k=True)
                    yield from _vary_stores(stream_k_config, problem, device, 6, 2)


_IDLE = 0.04
"""Minimum share of the time that is lost in a partial last round for stream-K to be tried."""


def _streams(problem: GemmProblem, config: GemmConfig, device: Device) -> bool:
    """Whether CTAs would be idle in the last of several rounds."""
    rounds = config.tiles(problem) / device.sms
    return rounds > 1 and math.ceil(rounds) > rounds * (1 + _IDLE)


def _flattens(problem: GemmProblem, config: GemmConfig, device: Device) -> bool:
    """Whether one flattened loop over tiles and K can be faster.

    It cannot if every CTA has one tile. Nor if gate and up projection are two matmuls: these took
    up to twice as long on an H200, since their flattened loop is not pipelined as one.
    """
    single_matmul = not problem.epilogue.gated or config.joins(problem)
    return single_matmul and config.tiles(problem) > device.sms


def _splits(problem: GemmProblem, config: GemmConfig, device: Device) -> list[int]:
    """Return split_k values: 1, and those that give about one, two and four CTAs per SM."""
    tiles, steps = config.tiles(problem), ceiling(problem.k, config.block_k)
    counts = {1}
    for waves in (1, 2, 4):
        splits = min(waves * device.sms // tiles, steps // 2)
        if splits > 1:
            # Distribute the steps evenly, with no empty split.
            counts.add(ceiling(steps, ceiling(steps, splits)))
    return sorted(counts)


def _vary_splits(
    problem: GemmProblem, config: GemmConfig, device: Device, count: int | None = None
) -> Iterator[GemmConfig]:
    """Yield a configuration with the first `count` split_k values, with fused and separate
    reduction.
    """
    for splits in _splits(problem, config, device)[:count]:
        split = dataclasses.replace(config, split_k=splits)
        yield split
        if splits > 1:
            yield dataclasses.replace(split, fused_split_k=True)


def _splitk(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Yield configurations for a small M, or a long K with few tiles."""
    skinny = problem.rows <= _SKINNY_ROWS
    few_tiles = ceiling(problem.rows, 128) * tiles_along_n(problem, 128) < device.sms
    mixed = name == "mixed"
    if not skinny and not few_tiles and not mixed:
        return
    pdl = device.capability >= (9, 0)
    tma = [True, False] if pdl and problem.tma_obstacle is None and not mixed else [False]
    if skinny:
        yield from _few_rows(name, problem, device)
    for m, n, swap in _tiles(problem, device, (32, 64, 128)):
        if (m * n > 128 * 128 and not mixed) or (skinny and (mixed or not swap)):
            continue
        # With a long K, consecutive rows are far apart in DRAM, so short row segments are slow.
        for k in _k_blocks(problem, (1, 2, 4) if problem.k >= _LONG else (1, 2)):
            for by_tma in tma:
                for warps in _warps(m, n)[-1:]:
                    shape = _make_config(
                        name, problem, m, n, k, num_warps=warps, swap_ab=swap, tma=by_tma, pdl=pdl
                    )
                    for split in _vary_splits(problem, shape, device):
                        yield from _vary_stages(split, problem, device, 6, 2)


_LONG = 16384
"""K from which on block_k may be more than two rows of swizzled shared memory."""

_STEP_BYTES = (4096, 32768)
"""Minimum and maximum bytes of b per step along K of a skinny tile: fewer bytes leave too few loads
in flight; with more, too few stages fit on an SM."""


def _few_rows(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Yield skinny tiles with a large block_k, loaded by threads: b is streamed and not shared.

    On an H200 the best of a wide grid were 16 to 64 columns by 256 to 512 bytes along K, with 2
    warps, and 128 columns with 4 warps.
    """
    pdl = device.capability >= (9, 0)
    rows = max(16, next_power_of_two(problem.rows))
    bits = DTYPE_BITS[problem.b.dtype]
    max_k = max(least_block_k(problem), next_power_of_two(problem.k))
    max_n = max(32 if problem.epilogue.gated else 16, next_power_of_two(problem.n))
    min_bytes, max_bytes = _STEP_BYTES
    # Warps are arranged along N, each with at least 8 columns of each matmul.
    matmuls = 2 if problem.epilogue.gated else 1
    for n in sorted({min(width, max_n) for width in (16, 32, 64, 128)}):
        for k in sorted({min(depth, max_k) for depth in (64, 128, 256, 512)}):
            size = n * k * bits // 8
            if size > max_bytes or (size < min_bytes and n < max_n and k < max_k):
                continue
            for warps in (2, 4) if n <= 64 else (4,):
                if rows * n > warps * 32 * MOST_ACCUMULATORS or n < 8 * warps * matmuls:
                    continue
                shape = _make_config(name, problem, rows, n, k, num_warps=warps, pdl=pdl)
                for split in _vary_splits(problem, shape, device):
                    yield from _vary_stages(split, problem, device, 4, 2)


def _gemv(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    if problem.rows > 8:
        return
    pdl = device.capability >= (9, 0)
    rows = next_power_of_two(problem.rows)
    max_k = next_power_of_two(problem.k)
    max_n = next_power_of_two(max(problem.parts, default=problem.n))
    # If the 16 bytes of a row of a that a thread loads are those that it multiplies by its elements
    # of b, no layout conversion is needed: a step along K is then one load of all threads.
    vector = 128 // DTYPE_BITS[problem.a.dtype]
    for warps in (1, 2, 4, 8):
        if problem.b.layout == "row":
            tiles = [(n, k) for n in (16, 32, 64) for k in (64, 128, 256)]
        else:
            tiles = [(n, vector * 32 * warps) for n in (2, 4, 8, 16)]
        for n, k in dict.fromkeys((min(n, max_n), min(k, max_k)) for n, k in tiles):
            shape = _make_config(name, problem, rows, n, k, num_warps=warps, pdl=pdl)
            yield from _vary_splits(problem, shape, device, count=3)


def _direct(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Yield configurations for integer b and a small M, in which warps share only their columns.

    Excluded since they took up to 1.4 times as long on an H200: 16 rows (too many warps wait for
    memory), 16 warps (too few CTAs fit on an SM) and 64 columns (too few CTAs, each of which waits
    for too much).
    """
    if problem.rows > 8:
        return
    pdl = device.capability >= (9, 0)
    matmuls = 2 if problem.epilogue.gated else 1
    chunk = CHUNK_BYTES * 8 // DTYPE_BITS[problem.b.dtype]
    for n, warps, chunks in itertools.product((16, 32), (2, 4, 8), (1, 2)):
        shape = _make_config(
            name, problem, 8, n * matmuls, warps * chunks * chunk, num_warps=warps, pdl=pdl
        )
        yield from _vary_splits(problem, shape, device, count=2)


def _stationary(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Yield configurations for integer b and a small M; each warp has 128 or 256 elements of K.

    Every CTA loops over as many strips along N as needed for the grid to fill the SMs once: with
    the estimated occupancy and, since registers are an estimate, with the largest power of two up
    to it. The limit is `MOST_SUMS`. Half as many strips with twice as many CTAs was never faster on
    an H200.
    """
    if problem.rows > 16:
        return
    pdl = device.capability >= (9, 0)
    matmuls = 2 if problem.epilogue.gated else 1
    strips = sum(ceiling(part, STRIP) for part in problem.parts or (problem.n,)) // matmuls
    for warps, depth in itertools.product((4, 8), (128, 256)):
        splits, remainder = divmod(problem.k, warps * depth)
        if remainder or splits < 2:
            continue
        rows = 8 if problem.rows <= 8 else 16
        shape = _make_config(name, problem, rows, STRIP, warps * depth, num_warps=warps, pdl=pdl)
        shape = dataclasses.replace(shape, split_k=splits, fused_split_k=True)
        occupancy = shape.occupancy(problem, device)
        max_strips = MOST_SUMS * shape.threads // (rows * matmuls) // STRIP
        for resident in dict.fromkeys((occupancy, next_power_of_two(occupancy + 1) // 2)):
            strips_per_cta = ceiling(strips, max(1, resident * device.sms // splits))
            yield dataclasses.replace(
                shape, block_n=STRIP * min(strips_per_cta, max_strips) * matmuls
            )


def _batched(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Yield persistent configurations for a batch of matrices with equal or different M."""
    if problem.tma_obstacle is not None or device.capability < (9, 0):
        return
    for m, n, swap in _tiles(problem, device, (64, 128)):
        for k in _k_blocks(problem, (1, 2)):
            for warps in _warps(m, n):
                for flatten in (True, False):
                    shape = _make_config(
                        name,
                        problem,
                        m,
                        n,
                        k,
                        num_warps=warps,
                        swap_ab=swap,
                        tma=True,
                        flatten=flatten,
                    )
                    if not flatten or _flattens(problem, shape, device):
                        yield from _vary_stores(shape, problem, device, 5, 2)


def _cp_async(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    if problem.rows <= _SKINNY_ROWS and problem.operation not in BATCHED:
        return  # Covered by splitk.
    for m, n, swap in _tiles(problem, device, (32, 64, 128)):
        if swap:
            continue
        for k in _k_blocks(problem, (1,) if m * n > 64 * 128 else (1, 2)):
            for warps in _warps(m, n, rows=64):
                shape = _make_config(name, problem, m, n, k, num_warps=warps)
                yield from _vary_occupancy(shape, problem, device, 5, 2)


_SPACES: Mapping[str, Callable[[TemplateName, GemmProblem, Device], Iterator[GemmConfig]]] = {
    "persistent_tma": _persistent_tma,
    "persistent_tma_ws": _persistent_tma,
    "splitk": _splitk,
    "gemv": _gemv,
    "bmm_persistent": _batched,
    "grouped": _batched,
    "mixed": _splitk,
    "direct": _direct,
    "stationary": _stationary,
    "cp_async": _cp_async,
}
