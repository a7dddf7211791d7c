"""The space of configurations for a problem: what is legal and worth a look, a few hundred at most.

Every template has a generator of what makes sense for the sizes at hand. What it proposes has to
pass `constraints.legal`, so that no generator repeats a constraint. A problem that no template
covers has no candidates.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import (
    BATCHED,
    DTYPE_BITS,
    INT32_MAX,
    GemmProblem,
    ceiling,
    next_power_of_two,
)
from inductor_ext.templates.triton.config import (
    CHUNK_BYTES,
    STRIP,
    TEMPLATES,
    GemmConfig,
    TemplateName,
    tiles_along_n,
)
from inductor_ext.templates.triton.constraints import (
    MOST_ACCUMULATORS,
    MOST_SUMS,
    least_block_k,
    legal,
)

__all__ = ["candidates"]

_TILES = (
    (128, 256),
    (256, 128),
    (128, 128),
    (128, 64),
    (64, 256),
    (64, 128),
    (64, 64),
)
"""Tiles for many rows, as the tensor cores see them."""

_SKINNY_ROWS = 64
"""Rows up to which operands are exchanged: wgmma would fill the rest of its 64 with padding."""


def candidates(problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """The legal configurations that make sense for a problem, of all templates; each once.

    The order says nothing; it is the same in every process.
    """
    yield from _of_all_templates(problem, device)
    # To copy b takes longer than to multiply few rows by it.
    if problem.rows > _SKINNY_ROWS and problem.realigned != problem:
        for config in _of_all_templates(problem.realigned, device):
            copying = dataclasses.replace(config, realign="copy")
            if legal(problem, copying, device):
                yield copying


def _of_all_templates(problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    seen: set[GemmConfig] = set()
    for name, template in TEMPLATES.items():
        if problem.operation not in template.operations:
            continue
        for config in _SPACES[name](typing.cast(TemplateName, name), problem, device):
            if config not in seen and legal(problem, config, device):
                seen.add(config)
                yield config


def _shape(
    name: TemplateName, problem: GemmProblem, m: int, n: int, k: int, **options: Any
) -> GemmConfig:
    """A configuration of one stage; `m` and `n` are the tensor cores' axes."""
    if options.get("swap"):
        m, n = n, m
    rows = ceiling(problem.rows, m)
    return GemmConfig(
        name,
        m,
        n,
        k,
        stages=1,
        group_m=min(8, next_power_of_two(rows)),
        index64=problem.largest_span > INT32_MAX,
        **options,
    )


def _staged(
    config: GemmConfig, problem: GemmProblem, device: Device, most: int, count: int
) -> Iterator[GemmConfig]:
    """The `count` deepest pipelines of 2 to `most` stages that fit; one where there is none."""
    if config.gathers(problem):
        most = 2
    elif not config.flatten:
        most = min(most, max(2, config.k_steps(problem)))
    deeper = (dataclasses.replace(config, stages=stages) for stages in range(most, 1, -1))
    fit = (each for each in deeper if each.shared_memory(problem) <= device.shared_memory)
    yield from itertools.islice(fit, count)


def _crowded(
    config: GemmConfig, problem: GemmProblem, device: Device, most: int, count: int
) -> Iterator[GemmConfig]:
    """What `_staged` gives, and for each further CTA that an SM can hold the deepest pipeline with
    which it does: where K is short, others multiply while one begins or ends.
    """
    held = 0
    for staged in _staged(config, problem, device, most, most):
        resident = staged.occupancy(problem, device)
        if count > 0 or resident > held:
            yield staged
        count, held = count - 1, max(held, resident)


def _stored(
    config: GemmConfig, problem: GemmProblem, device: Device, most: int, count: int
) -> Iterator[GemmConfig]:
    """Pipelines of both ways to store; of that by TMA only the deepest, which is the new one."""
    yield from _staged(config, problem, device, most, count)
    if TEMPLATES[config.template].tma_store and not config.swap:
        yield from _staged(dataclasses.replace(config, tma_store=True), problem, device, most, 1)


def _k_blocks(problem: GemmProblem, factors: Iterable[int]) -> list[int]:
    """Tiles along K: multiples of 128 bytes of a, which is one row of swizzled shared memory."""
    unit = 1024 // DTYPE_BITS[problem.a.dtype]
    most = max(least_block_k(problem), next_power_of_two(problem.k))
    return sorted({min(unit * factor, most, 256) for factor in factors})


def _warps(m: int, n: int, rows: int = 128) -> list[int]:
    """4 warps where their registers hold the tile; 8 from `rows` rows of wgmma on."""
    return [w for w in (4, 8) if m * n <= w * 32 * MOST_ACCUMULATORS and (w == 4 or m >= rows)]


Tile = tuple[int, int, bool]
"""Sides of a tile as the tensor cores see it, and whether operands are exchanged."""


def _tiles(problem: GemmProblem, device: Device, long: Iterable[int]) -> list[Tile]:
    """Tiles for the sizes of a problem.

    For few rows these have one side for all of them, and along N one of `long`; where there are
    instructions of 64 rows, also exchanged. Elsewhere `_TILES`, cut to a narrow output.
    """
    columns = max(problem.parts, default=problem.n) * (2 if problem.epilogue.gated else 1)
    widest = max(32 if problem.epilogue.gated else 16, next_power_of_two(columns))
    if problem.rows > _SKINNY_ROWS:
        return list(dict.fromkeys((m, min(n, widest), False) for m, n in _TILES))
    short = max(16, next_power_of_two(problem.rows))
    sides = list(dict.fromkeys(min(side, widest) for side in long))
    tiles = [(short, side, False) for side in sides]
    if device.capability >= (9, 0):
        tiles += [(side, short, True) for side in long if side >= 64]
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
                shape = _shape(
                    name,
                    problem,
                    m,
                    n,
                    k,
                    warps=warps,
                    swap=swap,
                    tma=True,
                    warp_specialize=specialized,
                    flatten=flatten,
                )
                if not flatten or _flattens(problem, shape, device):
                    yield from _stored(shape, problem, device, 6, 2)
                if not flatten and not specialized and _streams(problem, shape, device):
                    streamed = dataclasses.replace(shape, stream_k=True)
                    yield from _stored(streamed, problem, device, 6, 2)


_IDLE = 0.04
"""Share of the time from which on it is worth to have nothing idle in the last round."""


def _streams(problem: GemmProblem, config: GemmConfig, device: Device) -> bool:
    """Whether CTAs would have nothing to do in the last of several rounds."""
    rounds = config.tiles(problem) / device.sms
    return rounds > 1 and math.ceil(rounds) > rounds * (1 + _IDLE)


def _flattens(problem: GemmProblem, config: GemmConfig, device: Device) -> bool:
    """Whether one loop over tiles and along K can be worth it.

    Where every CTA has one tile there is nothing to go on to. Two products that gate each other
    took up to twice as long on an H200: their loop is not pipelined as one.
    """
    one = not problem.epilogue.gated or config.joins(problem)
    return one and config.tiles(problem) > device.sms


def _splits(problem: GemmProblem, config: GemmConfig, device: Device) -> list[int]:
    """1, and those that fill the SMs about once, twice and four times."""
    tiles, steps = config.tiles(problem), ceiling(problem.k, config.block_k)
    found = {1}
    for waves in (1, 2, 4):
        splits = min(waves * device.sms // tiles, steps // 2)
        if splits > 1:
            # The same number of steps for all, and no split without any.
            found.add(ceiling(steps, ceiling(steps, splits)))
    return sorted(found)


def _divided(
    problem: GemmProblem, config: GemmConfig, device: Device, count: int | None = None
) -> Iterator[GemmConfig]:
    """A configuration with the first `count` numbers of splits, added up by the last CTA or by a
    second kernel.
    """
    for splits in _splits(problem, config, device)[:count]:
        divided = dataclasses.replace(config, split_k=splits)
        yield divided
        if splits > 1:
            yield dataclasses.replace(divided, one_launch=True)


def _splitk(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """For few rows, and for a K that is long beside few tiles."""
    skinny = problem.rows <= _SKINNY_ROWS
    few = ceiling(problem.rows, 128) * tiles_along_n(problem, 128) < device.sms
    mixed = name == "mixed"
    if not skinny and not few and not mixed:
        return
    pdl = device.capability >= (9, 0)
    tma = [True, False] if pdl and problem.tma_obstacle is None and not mixed else [False]
    if skinny:
        yield from _few_rows(name, problem, device)
    for m, n, swap in _tiles(problem, device, (32, 64, 128)):
        if (m * n > 128 * 128 and not mixed) or (skinny and (mixed or not swap)):
            continue
        # Of a long K few bytes of a row at a time are far apart in DRAM.
        for k in _k_blocks(problem, (1, 2, 4) if problem.k >= _LONG else (1, 2)):
            for by_tma in tma:
                for warps in _warps(m, n)[-1:]:
                    shape = _shape(
                        name, problem, m, n, k, warps=warps, swap=swap, tma=by_tma, pdl=pdl
                    )
                    for divided in _divided(problem, shape, device):
                        yield from _staged(divided, problem, device, 6, 2)


_LONG = 16384
"""K from which on a step along it may be longer than two rows of swizzled shared memory."""

_STEP_BYTES = (4096, 32768)
"""Of b, in one step along K of a tile with few rows: fewer leave too little on the way, and of
more than that an SM has not enough stages."""


def _few_rows(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Loads by threads into deep tiles: b streams through, and rows are too few to share it.

    On an H200 the best of a wide grid were 16 to 64 columns by 256 to 512 bytes along K, with 2
    warps, and 128 columns with 4.
    """
    pdl = device.capability >= (9, 0)
    rows = max(16, next_power_of_two(problem.rows))
    bits = DTYPE_BITS[problem.b.dtype]
    longest = max(least_block_k(problem), next_power_of_two(problem.k))
    widest = max(32 if problem.epilogue.gated else 16, next_power_of_two(problem.n))
    least, most = _STEP_BYTES
    # Warps stand side by side along N, each with 8 columns or more of each product.
    products = 2 if problem.epilogue.gated else 1
    for n in sorted({min(side, widest) for side in (16, 32, 64, 128)}):
        for k in sorted({min(depth, longest) for depth in (64, 128, 256, 512)}):
            size = n * k * bits // 8
            if size > most or (size < least and n < widest and k < longest):
                continue
            for warps in (2, 4) if n <= 64 else (4,):
                if rows * n > warps * 32 * MOST_ACCUMULATORS or n < 8 * warps * products:
                    continue
                shape = _shape(name, problem, rows, n, k, warps=warps, pdl=pdl)
                for divided in _divided(problem, shape, device):
                    yield from _staged(divided, problem, device, 4, 2)


def _gemv(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    if problem.rows > 8:
        return
    pdl = device.capability >= (9, 0)
    rows = next_power_of_two(problem.rows)
    longest = next_power_of_two(problem.k)
    widest = next_power_of_two(max(problem.parts, default=problem.n))
    # Where a thread's 16 bytes of a row of a are those that it needs for its elements of b, they
    # need not change places: one load of all threads is a step along K.
    vector = 128 // DTYPE_BITS[problem.a.dtype]
    for warps in (1, 2, 4, 8):
        if problem.b.layout == "row":
            tiles = [(n, k) for n in (16, 32, 64) for k in (64, 128, 256)]
        else:
            tiles = [(n, vector * 32 * warps) for n in (2, 4, 8, 16)]
        for n, k in dict.fromkeys((min(n, widest), min(k, longest)) for n, k in tiles):
            shape = _shape(name, problem, rows, n, k, warps=warps, pdl=pdl)
            yield from _divided(problem, shape, device, count=3)


def _direct(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Integers for few rows, where warps have nothing in common but their columns.

    Measured on an H200: of 16 rows those that wait for memory are too many, of 16 warps too few fit
    an SM, and of 64 columns each of few CTAs waits for too much: they took up to 1.4 times as long.
    """
    if problem.rows > 8:
        return
    pdl = device.capability >= (9, 0)
    products = 2 if problem.epilogue.gated else 1
    chunk = CHUNK_BYTES * 8 // DTYPE_BITS[problem.b.dtype]
    for n, warps, chunks in itertools.product((16, 32), (2, 4, 8), (1, 2)):
        shape = _shape(name, problem, 8, n * products, warps * chunks * chunk, warps=warps, pdl=pdl)
        yield from _divided(problem, shape, device, count=2)


def _stationary(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Integers for few rows, each warp with 128 or 256 of K.

    Every CTA walks as far as there is work for as many as the SMs hold at once, or for a power of
    two of them on each, as registers are an estimate, but no farther than registers can add up.
    With half as far, and twice as many CTAs, none was faster on an H200.
    """
    if problem.rows > 16:
        return
    pdl = device.capability >= (9, 0)
    products = 2 if problem.epilogue.gated else 1
    strips = sum(ceiling(part, STRIP) for part in problem.parts or (problem.n,)) // products
    for warps, depth in itertools.product((4, 8), (128, 256)):
        splits, rest = divmod(problem.k, warps * depth)
        if rest or splits < 2:
            continue
        rows = 8 if problem.rows <= 8 else 16
        shape = _shape(name, problem, rows, STRIP, warps * depth, warps=warps, pdl=pdl)
        shape = dataclasses.replace(shape, split_k=splits, one_launch=True)
        held = shape.occupancy(problem, device)
        most = MOST_SUMS * shape.threads // (rows * products) // STRIP
        for resident in dict.fromkeys((held, next_power_of_two(held + 1) // 2)):
            walked = ceiling(strips, max(1, resident * device.sms // splits))
            yield dataclasses.replace(shape, block_n=STRIP * min(walked, most) * products)


def _batched(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    """Persistent kernels over many matrices, of equal or unequal numbers of rows."""
    if problem.tma_obstacle is not None or device.capability < (9, 0):
        return
    for m, n, swap in _tiles(problem, device, (64, 128)):
        for k in _k_blocks(problem, (1, 2)):
            for warps in _warps(m, n):
                for flatten in (True, False):
                    shape = _shape(
                        name, problem, m, n, k, warps=warps, swap=swap, tma=True, flatten=flatten
                    )
                    if not flatten or _flattens(problem, shape, device):
                        yield from _stored(shape, problem, device, 5, 2)


def _cp_async(name: TemplateName, problem: GemmProblem, device: Device) -> Iterator[GemmConfig]:
    if problem.rows <= _SKINNY_ROWS and problem.operation not in BATCHED:
        return  # splitk has these.
    for m, n, swap in _tiles(problem, device, (32, 64, 128)):
        if swap:
            continue
        for k in _k_blocks(problem, (1,) if m * n > 64 * 128 else (1, 2)):
            for warps in _warps(m, n, rows=64):
                shape = _shape(name, problem, m, n, k, warps=warps)
                yield from _crowded(shape, problem, device, 5, 2)


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
