"""Ranking: which configurations of a problem's search space are worth benchmarking.

`rank` sorts the search space by predicted time and selects a few diverse configurations;
`prologue_pays` predicts whether a fused prologue is faster than a separate pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Prologue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import DTYPE_BITS, Operand, size_of
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.cost_model import DEFAULT, Constants, Prediction, predict
from inductor_ext.templates.triton.search_space import candidates

Ranked = tuple[GemmConfig, Prediction]

_WORTH = 1.5
"""A configuration predicted to take longer than this multiple of the best is not benchmarked."""


def rank(
    problem: GemmProblem,
    device: Device,
    limit: int = 6,
    per_template: int | None = None,
    constants: Constants = DEFAULT,
) -> list[Ranked]:
    """Return the configurations worth benchmarking, fastest by prediction first.

    Of configurations with the same template, tile and prediction, only the first is kept, and none
    predicted to take more than 1.5 times as long as the best. The selection is kept diverse: of
    `limit` places, configurations that differ only in the number of stages get one, those with
    features that the model was not fitted to half, a tile shape two thirds, and a template all but
    one, unless there are no others. Configurations that take seconds to compile are dropped if
    another kernel with the same tile is predicted to be as fast.

    Warp-specialized kernels are excluded: all those measured with Triton 3.6.0 returned NaN.
    `candidates` includes them.

    Args:
        problem: the GEMM.
        device: the GPU.
        limit: maximum number of configurations.
        per_template: maximum number of configurations per template.
        constants: model parameters.
    """
    return _select_diverse(_rank_all(problem, device, constants), limit, per_template)


@functools.lru_cache(maxsize=256)
def _rank_all(problem: GemmProblem, device: Device, constants: Constants) -> tuple[Ranked, ...]:
    """Return all configurations among which `rank` selects, which takes some 10 ms."""
    predictions = sorted(
        (
            (config, predict(problem, config, device, constants))
            for config in candidates(problem, device)
            if not config.warp_specialize
        ),
        key=lambda candidate: candidate[1].total,
    )
    if not predictions:
        return ()
    cutoff = _WORTH * predictions[0][1].total
    selection = [
        candidate for candidate in _drop_duplicates(predictions) if candidate[1].total <= cutoff
    ]
    return tuple(_drop_slow_builds(problem, selection))


def _select_diverse(
    ranking: Sequence[Ranked], limit: int, per_template: int | None
) -> list[Ranked]:
    """Return at most `limit` configurations, of which few are alike, as `rank` describes."""
    counts: dict[object, int] = {}
    selected: list[int] = []
    # Apply all limits first; then relax them one by one, the least important first.
    for bounds in range(4, -1, -1):
        for index, (config, prediction) in enumerate(ranking):
            if len(selected) == limit or math.isinf(prediction.total):
                break
            if index in selected:
                continue
            # Features that the model was not fitted to.
            new = (
                config.fused_split_k or config.stream_k or config.tma_store or config.align_operands
            )
            shares: list[tuple[object, int]] = [
                # The number of stages is the least important difference.
                (dataclasses.replace(config, num_stages=1), 1),
                (("template", config.template), max(1, limit - 1)),
                ((config.block_m, config.block_n), limit - limit // 3),
                (("new", bool(new)), max(1, limit // 2) if new else limit),
            ]
            limits = shares[:bounds]
            if per_template is not None:
                limits.append((("template", config.template), per_template))
            if any(counts.get(key, 0) >= bound for key, bound in limits):
                continue
            selected.append(index)
            for key, _ in shares:
                counts[key] = counts.get(key, 0) + 1
    return [ranking[index] for index in sorted(selected)]


def prologue_pays(problem: GemmProblem, device: Device, constants: Constants = DEFAULT) -> bool:
    """Whether fusing a problem's prologue is predicted to be faster than a separate pass.

    Every tile repeats the prologue, so the more tiles share an operand, the cheaper is a separate
    pass that does it once. True if there is no prologue.

    There is no allowance for the model's error: of 13 norms before GEMMs with M of 64 to 256 on an
    H100, whose fused kernels were predicted at 0.98 to 1.40 times the GEMM plus a pass, only two
    were faster than these, by 4 and 5 %, and one as fast (`gemm-prologues`).

    Args:
        problem: the GEMM.
        device: the GPU.
        constants: model parameters.
    """
    if problem.prologue is None:
        return True
    separate_times = [
        prediction.total + constants.gap + constants.start + pass_bytes / device.bandwidth * 1e6
        for unfused, pass_bytes in without_prologue(problem)
        for _, prediction in rank(unfused, device, 1, constants=constants)
    ]
    fused_kernels = rank(problem, device, 1, constants=constants)
    return all(
        prediction.total <= time for _, prediction in fused_kernels for time in separate_times
    )


def without_prologue(problem: GemmProblem) -> Iterator[tuple[GemmProblem, int]]:
    """Yield the problem without its norm, or without its dequantization, and the bytes that a
    separate pass moves.
    """
    norm, dequant = problem.norm, problem.dequant
    if norm is not None:
        prologue = None if dequant is None else Prologue(dequant=dequant)
        pass_bytes = 2 * size_of(problem.m * problem.k, problem.a.dtype)
        yield dataclasses.replace(problem, prologue=prologue), pass_bytes
    if dequant is not None:
        prologue = None if norm is None else Prologue(norm)
        b = Operand.of(problem.a.dtype, (problem.k, problem.n), problem.b.strides)
        matmul = dataclasses.replace(problem, operation="mm", b=b, prologue=prologue)
        yield matmul, problem.b_bytes + matmul.b_bytes


def _drop_duplicates(predictions: Iterable[Ranked]) -> Iterator[Ranked]:
    """Yield the first of the configurations with the same template, tile and predicted time."""
    seen: set[object] = set()
    for config, prediction in predictions:
        kernel = (
            config.template,
            config.block_m,
            config.block_n,
            config.swap_ab,
            config.align_operands,
        )
        identity = (*kernel, f"{prediction.total:.3e}")
        if identity not in seen:
            seen.add(identity)
            yield config, prediction


def _drop_slow_builds(problem: GemmProblem, predictions: Sequence[Ranked]) -> list[Ranked]:
    """Drop configurations that ptxas unrolls for seconds if another kernel with the same tile,
    which it does not unroll, takes at most 1 % longer.
    """
    tile_times: dict[tuple[int, int], float] = {}
    for config, prediction in predictions:
        if not _is_unrolled(problem, config):
            tile_times.setdefault((config.block_m, config.block_n), prediction.total)
    return [
        (config, prediction)
        for config, prediction in predictions
        if not _is_unrolled(problem, config)
        or tile_times.get((config.block_m, config.block_n), math.inf) > 1.01 * prediction.total
    ]


def _is_unrolled(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether ptxas takes about a second, or several, to unroll a kernel's loop over K.

    It unrolls up to about 23 iterations of 64 elements, or 32 for small tiles, if threads and not
    TMA load. Compile time is proportional to the number of instructions along K times the registers
    that hold accumulators: 1.4, 1.9, 2.9 and 3.5 s for bfloat16 tiles of 128x256 and K of 768,
    1024, 1280 and 1408, and 0.3 s for 2048, which is not unrolled; 0.9 and 2.8 s for 128x128 and K
    of 1280 and 2048 (Triton 3.6.0, one core of an EPYC). The loop bounds of split-K are not known
    at compile time.
    """
    along_k = problem.k * DTYPE_BITS[problem.a.dtype] // _INSTRUCTION_BITS
    unrolled = not config.tma and config.split_k == 1 and along_k <= 128
    return unrolled and 5000 < along_k * config.accumulator_registers < 12000


_INSTRUCTION_BITS = 256
"""Bits of a row of a that one instruction multiplies (PTX ISA, wgmma)."""
