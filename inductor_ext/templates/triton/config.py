"""The templates, what each can do, and `GemmConfig`: one instance of one of them.

Axes are those of the problem, out[M, N] = a[M, K] @ b[K, N], also where a kernel exchanges its
operands. A configuration knows nothing of legality: see `constraints`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from inductor_ext import _compat
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import (
    BATCHED,
    DTYPE_BITS,
    OPTIONAL,
    GemmProblem,
    ceiling,
    next_power_of_two,
    plain,
    read,
    require,
    size_of,
)

__all__ = [
    "CHUNK_BYTES",
    "STATISTICS_STAGES",
    "STRIP",
    "TEMPLATES",
    "GemmConfig",
    "Template",
    "TemplateName",
    "statistics_depth",
    "tiles_along_n",
    "warpgroup_mma",
]


@dataclass(frozen=True)
class Template:
    """What a kernel family can do, whatever its configuration."""

    operations: frozenset[str]
    prologues: frozenset[str] = frozenset()
    """Kinds of `Prologue`."""
    capability: tuple[int, int] = (8, 0)
    """The lowest compute capability."""
    tma: Literal["always", "optional", "never"] = "never"
    persistent: bool = False
    """Whether as many CTAs as SMs take one tile after the other."""
    flatten: bool = False
    """Whether its loops over tiles and over K can be one."""
    split_k: bool = False
    swap: bool = False
    parts: bool = False
    """Whether several factors b can share a."""
    pdl: bool = False
    """Whether it can be a programmatic dependent launch."""
    row_maxima: bool = False
    """Whether its tiles can give the largest elements of their rows."""
    tensor_cores: bool = True
    direct: bool = False
    """Whether what the tensor cores multiply goes from memory straight to registers. The warps of a
    CTA have the same tile then, and divide its K."""
    stationary: bool = False
    """Whether all that a CTA multiplies of a stays in registers, while it walks along N."""
    atomics: bool = False
    """Whether splits of K are added up in the order in which they happen to finish. Ours write
    their sums side by side, and a second step adds those up in one order."""
    fused_reduction: bool = False
    """Whether that second step needs no launch of its own, if a configuration asks for it."""
    stream_k: bool = False
    """Whether CTAs can share tiles of the last rounds, so that all of them end together."""
    tma_store: bool = False
    """Whether tiles can be stored by TMA."""

    @property
    def staged(self) -> bool:
        """Whether operands wait in shared memory to be multiplied."""
        return self.tensor_cores and not self.direct


_PLAIN = frozenset({"mm", "addmm", "int_mm", "scaled"})

TEMPLATES: Mapping[str, Template] = types.MappingProxyType(
    {
        "splitk": Template(
            _PLAIN,
            prologues=frozenset({"normalize", "standardize"}),
            tma="optional",
            split_k=True,
            swap=True,
            parts=True,
            pdl=True,
            fused_reduction=True,
            row_maxima=True,
        ),
        "gemv": Template(
            frozenset({"mm", "addmm", "mixed"}) | BATCHED,
            prologues=frozenset({"dequantize", "normalize", "standardize", "both"}),
            split_k=True,
            parts=True,
            pdl=True,
            tensor_cores=False,
            fused_reduction=True,
            row_maxima=True,
        ),
        "cp_async": Template(
            _PLAIN | BATCHED,
            prologues=frozenset({"normalize", "standardize"}),
            parts=True,
            row_maxima=True,
        ),
        "persistent_tma": Template(
            _PLAIN,
            capability=(9, 0),
            tma="always",
            persistent=True,
            flatten=True,
            swap=True,
            parts=True,
            stream_k=True,
            row_maxima=True,
            tma_store=True,
        ),
        "persistent_tma_ws": Template(
            frozenset({"mm", "addmm", "scaled"}),
            capability=(9, 0),
            tma="always",
            persistent=True,
            parts=True,
            # Stored by TMA, long products come out wrong with Triton 3.6.
        ),
        "bmm_persistent": Template(
            BATCHED,
            capability=(9, 0),
            tma="always",
            persistent=True,
            flatten=True,
            swap=True,
            tma_store=True,
        ),
        "grouped": Template(
            frozenset({"grouped"}),
            capability=(9, 0),
            tma="always",
            persistent=True,
            swap=True,
        ),
        "mixed": Template(
            frozenset({"mixed"}),
            prologues=frozenset({"dequantize", "both"}),
            split_k=True,
            swap=True,
            parts=True,
            pdl=True,
            fused_reduction=True,
            row_maxima=True,
        ),
        "direct": Template(
            frozenset({"mixed"}),
            prologues=frozenset({"dequantize"}),
            split_k=True,
            parts=True,
            pdl=True,
            direct=True,
            fused_reduction=True,
        ),
        "stationary": Template(
            frozenset({"mixed"}),
            prologues=frozenset({"dequantize"}),
            split_k=True,
            parts=True,
            pdl=True,
            direct=True,
            stationary=True,
            fused_reduction=True,
        ),
    }
)
"""The templates by name; where two are predicted to be equal, the first is preferred.

`splitk`, for skinny products, with one split as well; `gemv`, without tensor cores, for up to 8
rows; `cp_async`, for capability 8 and for what TMA refuses; `persistent_tma` (flattened or not) and
its warp-specialised twin; `bmm_persistent`; `grouped`; `mixed`, which dequantises b on the way;
`direct`, which does so for up to 8 rows; and `stationary`, for up to 16 and a long K.
"""

TemplateName = Literal[
    "splitk",
    "gemv",
    "cp_async",
    "persistent_tma",
    "persistent_tma_ws",
    "bmm_persistent",
    "grouped",
    "mixed",
    "direct",
    "stationary",
]


CHUNK_BYTES = 64
"""Of a column of b, what a warp of a direct kernel loads at once, 16 bytes a lane."""

STRIP = 16
"""Columns that a CTA of a stationary kernel multiplies at a time, as tensor cores take them."""


_PIECE_BYTES = 128
"""Of a thread, when a tile of 16-bit elements changes its layout: what Triton 3.6 and 3.7 take at
most, as compiled for capability 9.0."""

_BARRIER_BYTES = 1024
"""At most, of the pipelines that Triton 3.6 and 3.7 compile, warp-specialised ones included."""


@dataclass(frozen=True)
class GemmConfig:
    """One instance of a template.

    Raises:
        exc.BadGemmError: an unknown template, a number below 1.
    """

    template: TemplateName
    block_m: int
    block_n: int
    block_k: int
    stages: int
    """Tiles of a and b in shared memory at once."""
    warps: int
    """Of a warp-specialised kernel, of the group that it is launched with; see `consumer_warps`."""
    group_m: int = 8
    """Tiles along M that are walked before the next step along N, so that they share b in L2."""
    split_k: int = 1
    """CTAs that divide K of one tile among them."""
    one_launch: bool = False
    """Whether that of them which is done last adds up their sums, and no second kernel."""
    stream_k: bool = False
    """Whether CTAs share tiles of the last rounds of a persistent kernel, two a tile at most, so
    that all have as many steps along K (stream-K, Osama et al. 2023)."""
    swap: bool = False
    """Whether the tensor cores see b as their first operand, so that N is the long side there."""
    tma: bool = False
    tma_store: bool = False
    """Whether tiles are stored by TMA as well, from shared memory, while the CTA goes on; where
    what Inductor stores behind an epilogue cannot be, threads do it."""
    warp_specialize: bool = False
    flatten: bool = False
    """Whether the loops over tiles and over K are one, pipelined across tiles."""
    pdl: bool = False
    index64: bool = False
    """Whether addresses are computed with 64-bit indices."""
    realign: Literal["copy"] | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """`copy`: factors whose rows, or columns, do not all begin at multiples of 16 bytes are copied
    to where they do, by kernels before this one (`GemmProblem.realigned`)."""

    def __post_init__(self) -> None:
        require(
            self.template in TEMPLATES,
            "configuration",
            "template",
            self.template,
            ", ".join(TEMPLATES),
        )
        for name in (
            "block_m",
            "block_n",
            "block_k",
            "stages",
            "warps",
            "group_m",
            "split_k",
        ):
            value = getattr(self, name)
            require(value >= 1, "configuration", name, value, "1 or more")

    def to_json(self) -> dict[str, Any]:
        """What `json.dumps` takes; `from_json` reads it."""
        value: dict[str, Any] = plain(self)
        return value

    @classmethod
    def from_json(cls, value: object) -> GemmConfig:
        """What `to_json` has written.

        Raises:
            exc.BadGemmError: something is missing, unknown, of a wrong type or no configuration.
        """
        return read(cls, value, "configuration")

    def of_kernel(self, problem: GemmProblem) -> tuple[GemmProblem, GemmConfig]:
        """What the kernel itself is made for: a problem and a configuration without copies."""
        if self.realign is None:
            return problem, self
        return problem.realigned, dataclasses.replace(self, realign=None)

    @property
    def mma_m(self) -> int:
        """Rows of a tile as the tensor cores see it."""
        return self.block_n if self.swap else self.block_m

    @property
    def mma_n(self) -> int:
        """Columns of a tile as the tensor cores see it."""
        return self.block_m if self.swap else self.block_n

    def product_m(self, problem: GemmProblem) -> int:
        """Rows of one product as the tensor cores see it: a gate and what it gates are two, of half
        the tile's columns each.
        """
        return self.mma_m // 2 if self.swap and problem.epilogue.gated else self.mma_m

    def joins(self, problem: GemmProblem) -> bool:
        """Whether a gate and what it gates are one product: TMA loads a tile of both factors at
        once, wherever they lie, and side by side along N if K is contiguous in them.
        """
        joined = self.tma and not self.swap and problem.b.layout == "column"
        return problem.epilogue.gated and joined

    def product_n(self, problem: GemmProblem) -> int:
        """Columns of one product as the tensor cores see it."""
        halved = problem.epilogue.gated and not self.swap and not self.joins(problem)
        return self.mma_n // 2 if halved else self.mma_n

    @property
    def consumer_warps(self) -> int:
        """Warps that hold accumulators.

        Triton makes three groups of four of a warp-specialised kernel: one loads, two multiply.
        """
        return 8 if self.warp_specialize else self.warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * (self.consumer_warps + 4 if self.warp_specialize else self.warps)

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers of a thread that hold accumulators."""
        sums = self.block_m * self.columns_at_once
        if not TEMPLATES[self.template].tensor_cores:
            sums *= self.block_k
        elif TEMPLATES[self.template].direct:
            sums *= self.warps
        return ceiling(sums, 32 * self.consumer_warps)

    @property
    def columns_at_once(self) -> int:
        """Columns of a tile that have accumulators at the same time."""
        return STRIP if TEMPLATES[self.template].stationary else self.block_n

    @property
    def registers(self) -> int:
        """An estimate of the 32-bit registers of a thread: accumulators, and 64 for the rest; in a
        direct kernel also a step's elements of a, in 16 bits, and of b, in 8; fewer for the rest
        where nothing is loaded but b.
        """
        template = TEMPLATES[self.template]
        operands = 0
        if template.direct:
            elements = 2 * self.block_m + self.columns_at_once
            operands = elements * self.block_k // (self.threads * 4)
        rest = 24 if template.stationary else 64
        return min(255, self.accumulator_registers + operands + rest)

    @property
    def cta_registers(self) -> int:
        """An estimate of the 32-bit registers of a CTA; threads that only load give theirs away."""
        consumers = 32 * self.consumer_warps
        return consumers * self.registers + (self.threads - consumers) * 24

    def stage_bytes(self, problem: GemmProblem) -> int:
        """Bytes of shared memory of one stage: a tile of a and one of b, and what groups share."""
        if not TEMPLATES[self.template].staged:
            return 0
        a = size_of(self.block_m * self.block_k, problem.a.dtype)
        return a + size_of(self.block_n * self.block_k, problem.b.dtype) + self._shared(problem)

    def _shared(self, problem: GemmProblem) -> int:
        """Bytes of the scales and zero points of a tile's groups, in copies of 4 bytes or more, of
        which each thread may have one of every factor.
        """
        prologue = problem.prologue
        if prologue is None or prologue.scales != "group":
            return 0
        column = size_of(ceiling(self.block_k, prologue.group), prologue.scale_dtype)
        factors = 2 if problem.epilogue.gated else 1
        copied = max(self.block_n * max(4, column), 4 * self.threads * factors)
        return copied * (2 if prologue.zero_points else 1)

    def extra_bytes(self, problem: GemmProblem) -> int:
        """Bytes of shared memory besides the stages.

        A tile on its way out, whose layout changes there: in place of the stages, unless those of
        the next tile are being loaded; in pieces if elements have 16 bits or fewer; whole and
        beside everything else for TMA to store it. Barriers, for TMA. And an operand that a
        prologue has changed in registers, unless it is the first of the tensor cores' operands, the
        only one that they read from registers.
        """
        template = TEMPLATES[self.template]
        if template.direct:
            # Sums of all warps, of one product after the other.
            products = 2 if problem.epilogue.gated and not template.stationary else 1
            return self.warps * self.block_m * self.columns_at_once // products * 4
        prologue = problem.prologue
        # Of the loop before the one over tiles, whose stages are in the same place.
        first = 0
        if prologue is not None and prologue.standardizes:
            depth = statistics_depth(problem, self)
            stage = size_of(self.block_m * depth, problem.a.dtype)
            first = (STATISTICS_STAGES - 1) * stage if problem.k > depth else 0
        if not template.tensor_cores:
            return first
        room = self.stages * self.stage_bytes(problem)
        columns = self.block_n // 2 if problem.epilogue.gated else self.block_n
        sums = self.split_k > 1 or self.stream_k
        stored = problem.accumulator if sums else problem.kernel_stores
        extra = size_of(self.block_m * columns, stored)
        if DTYPE_BITS[stored] <= 16:
            extra = min(extra, _PIECE_BYTES * 32 * self.consumer_warps)
        if not self.flatten and not self.warp_specialize:
            extra = max(0, extra - room)
        if self.tma_store:
            # It may be under way while the next tile is multiplied.
            tile = size_of(self.block_m * columns, problem.kernel_stores)
            extra = extra + tile if sums or problem.epilogue.inputs else tile
        if self.tma:
            extra += _BARRIER_BYTES
        # Fewer rows or warps are multiplied by mma.sync, which reads both from registers.
        warpgroups = self.mma_m >= 64 and self.warps % 4 == 0
        if prologue is None:
            return extra
        if prologue.dequantizes and not self.swap and warpgroups:
            extra += size_of(self.block_n * self.block_k, problem.a.dtype)
        if (prologue.normalizes or prologue.standardizes) and self.swap:
            extra += size_of(self.block_m * self.block_k, problem.multiplied)
        if prologue.standardizes:
            vectors = prologue.vectors * size_of(self.block_k, prologue.scale_dtype)
            extra += self.stages * vectors
            # An upper bound: 32 elements along K are one slice, and with 128 there was no copy.
            sliced = warpgroups and not self.swap and self.block_k >= 64
            if sliced and _compat.triton_copies_register_operand():
                extra += size_of(self.block_m * self.block_k, problem.multiplied)
        return max(extra, first - room)

    def chunks(self, problem: GemmProblem) -> int:
        """Loads of each column of b in a step of a warp of a direct kernel; 0 for less than one."""
        return size_of(self.block_k // self.warps, problem.b.dtype) // CHUNK_BYTES

    def gathers(self, problem: GemmProblem) -> bool:
        """Whether threads load elements of a or b one by one into registers, and pipelines have
        nothing on the way: cp.async copies 4 bytes or more.
        """
        narrow = min(problem.a.vector_bytes, problem.b.vector_bytes) < 4
        return narrow and not self.tma and TEMPLATES[self.template].staged

    def gathered(self, problem: GemmProblem) -> int:
        """Elements of a step along K that a thread loads one by one."""
        elements = (self.block_m + self.block_n) * self.block_k
        return ceiling(elements, self.threads) if self.gathers(problem) else 0

    def shared_memory(self, problem: GemmProblem) -> int:
        """Bytes of shared memory of a CTA: the stages, and `extra_bytes`."""
        stages = 1 if self.gathers(problem) else self.stages
        return stages * self.stage_bytes(problem) + self.extra_bytes(problem)

    def tiles(self, problem: GemmProblem) -> int:
        """Tiles of all outputs; no tile reaches over the border of two parts or matrices."""
        along_m = ceiling(problem.rows, self.block_m)
        return problem.batch * along_m * tiles_along_n(problem, self.block_n)

    def units(self, problem: GemmProblem) -> int:
        """Pieces of work: tiles times splits of K."""
        return self.tiles(problem) * self.split_k

    def ctas(self, problem: GemmProblem, device: Device) -> int:
        """CTAs of the launch."""
        units = self.units(problem)
        return min(units, device.sms) if TEMPLATES[self.template].persistent else units

    def occupancy(self, problem: GemmProblem, device: Device) -> int:
        """CTAs that an SM holds at once, by shared memory (1 KiB of each is the driver's),
        registers and threads; at least 1. A persistent kernel launches no more than one.
        """
        if TEMPLATES[self.template].persistent:
            return 1
        by_memory = device.shared_memory_sm // (self.shared_memory(problem) + 1024)
        by_registers = device.registers_sm // self.cta_registers
        return max(1, min(by_memory, by_registers, 2048 // self.threads, 32))

    def k_steps(self, problem: GemmProblem) -> int:
        """Steps along K of the unit that has most."""
        return ceiling(ceiling(problem.depth, self.block_k), self.split_k)


STATISTICS_STAGES = 3
"""Of the loop that finds mean and deviation of rows: it does little but wait for memory."""


def statistics_depth(problem: GemmProblem, config: GemmConfig) -> int:
    """Columns of a tile of rows whose mean and deviation are looked for: 32 elements a thread."""
    depth = max(16, 32 * config.threads // config.block_m)
    return min(depth, next_power_of_two(problem.k))


def tiles_along_n(problem: GemmProblem, block_n: int) -> int:
    """Tiles of `block_n` columns; where parts gate each other, a tile has half of it of each."""
    if problem.epilogue.gated or not problem.parts:
        return ceiling(problem.width, block_n)
    return sum(ceiling(part, block_n) for part in problem.parts)


def warpgroup_mma(problem: GemmProblem, config: GemmConfig, device: Device) -> bool:
    """Whether a tile runs on the instructions of four warps (wgmma, tcgen05) and not on mma.sync.

    PTX ISA, wgmma: 64 rows for each group of four warps; K has to be contiguous for all dtypes but
    the 16-bit ones.
    """
    return (
        device.capability[0] in (9, 10)
        and TEMPLATES[config.template].tensor_cores
        and config.product_m(problem) >= 64
        and config.warps % 4 == 0
        and problem.arithmetic != "fma"
        and (problem.arithmetic == "half" or problem.k_major)
    )
