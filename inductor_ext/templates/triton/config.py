"""`GemmConfig`: one instance of a Triton template.

Axes are those of the problem, out[M, N] = a[M, K] @ b[K, N], also for kernels that swap the
operands. A configuration is not checked for legality here; see `constraints`. Register and shared
memory sizes are estimates that constraints and cost model share.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from inductor_ext import _compat
from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import KEY, OPTIONAL
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem, read
from inductor_ext.templates.tensors import DTYPE_BITS, ceiling, next_power_of_two, require, size_of
from inductor_ext.templates.triton.templates import (
    CHUNK_BYTES,
    STRIP,
    TEMPLATES,
    TemplateName,
)

_PIECE_BYTES = 128
"""Maximum scratch bytes per thread for a layout conversion of a tile of 16-bit elements, as Triton
3.6 and 3.7 compile it for capability 9.0."""

_BARRIER_BYTES = 1024
"""Maximum bytes of the barriers of the pipelines that Triton 3.6 and 3.7 compile, including
warp-specialized ones."""


@dataclass(frozen=True)
class GemmConfig:
    """One instance of a template.

    Raises:
        exc.BadGemmError: an unknown template, a value below 1.
    """

    template: TemplateName
    block_m: int
    block_n: int
    block_k: int
    num_stages: int = dataclasses.field(metadata={KEY: "stages"})
    """Pipeline depth: tiles of a and b in shared memory at the same time."""
    num_warps: int = dataclasses.field(metadata={KEY: "warps"})
    """Warps of the launch; for the warps that multiply in a warp-specialized kernel see
    `consumer_warps`."""
    group_m: int = 8
    """Swizzle: tiles along M that are visited before the next step along N, so that they share b in
    L2."""
    split_k: int = 1
    """Number of CTAs that split the K of one tile."""
    fused_split_k: bool = dataclasses.field(default=False, metadata={KEY: "one_launch"})
    """Whether the last CTA of a tile reduces the splits, instead of a second kernel."""
    stream_k: bool = False
    """Whether CTAs share tiles of the last rounds of a persistent kernel, at most two CTAs per
    tile, so that all CTAs have equally many steps along K (stream-K, Osama et al. 2023)."""
    swap_ab: bool = dataclasses.field(default=False, metadata={KEY: "swap"})
    """Whether b is the first operand of the tensor cores, so that N is the M of the instruction."""
    tma: bool = False
    tma_store: bool = False
    """Whether tiles are also stored by TMA, asynchronously from shared memory. Stores of the
    epilogue that TMA cannot do are done by threads."""
    warp_specialize: bool = False
    flatten: bool = False
    """Whether the loops over tiles and over K are flattened into one, pipelined across tiles."""
    pdl: bool = False
    index64: bool = False
    """Whether addresses are computed with 64-bit indices."""
    align_operands: Literal["copy"] | None = dataclasses.field(
        default=None, metadata={KEY: "realign", OPTIONAL: True}
    )
    """`copy`: kernels before this one copy operands whose rows, or columns, are not all 16-byte
    aligned to an aligned layout (`GemmProblem.with_aligned_operands`)."""

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
            "num_stages",
            "num_warps",
            "group_m",
            "split_k",
        ):
            value = getattr(self, name)
            require(value >= 1, "configuration", name, value, "1 or more")

    def to_json(self) -> dict[str, Any]:
        """Return a value for `json.dumps`; `from_json` reads it."""
        value: dict[str, Any] = json_codec.encode(self)
        return value

    @classmethod
    def from_json(cls, value: object) -> GemmConfig:
        """Return the configuration that `to_json` wrote.

        Raises:
            exc.BadGemmError: a key is missing or unknown, a type is wrong, or the configuration is
                invalid.
        """
        return read(cls, value, "configuration")

    def of_kernel(self, problem: GemmProblem) -> tuple[GemmProblem, GemmConfig]:
        """Return problem and configuration of the GEMM kernel, which reads aligned copies."""
        if self.align_operands is None:
            return problem, self
        return problem.with_aligned_operands, dataclasses.replace(self, align_operands=None)

    @property
    def mma_m(self) -> int:
        """Rows of a tile as the tensor cores see it."""
        return self.block_n if self.swap_ab else self.block_m

    @property
    def mma_n(self) -> int:
        """Columns of a tile as the tensor cores see it."""
        return self.block_m if self.swap_ab else self.block_n

    def matmul_m(self, problem: GemmProblem) -> int:
        """Return the rows of one matmul as the tensor cores see it.

        Gate and up projection are two matmuls with half of the tile's columns each.
        """
        return self.mma_m // 2 if self.swap_ab and problem.epilogue.gated else self.mma_m

    def joins(self, problem: GemmProblem) -> bool:
        """Whether gate and up projection are computed by one matmul.

        TMA loads a tile of both weights at once, wherever they are in memory. They are adjacent
        along N if K is contiguous in both.
        """
        adjacent = self.tma and not self.swap_ab and problem.b.layout == "column"
        return problem.epilogue.gated and adjacent

    def matmul_n(self, problem: GemmProblem) -> int:
        """Return the columns of one matmul as the tensor cores see it."""
        halved = problem.epilogue.gated and not self.swap_ab and not self.joins(problem)
        return self.mma_n // 2 if halved else self.mma_n

    @property
    def consumer_warps(self) -> int:
        """Warps that hold accumulators.

        For a warp-specialized kernel Triton creates three groups of four warps: one loads, two
        multiply.
        """
        return 8 if self.warp_specialize else self.num_warps

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return 32 * (self.consumer_warps + 4 if self.warp_specialize else self.num_warps)

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers per thread that hold accumulators."""
        sums = self.block_m * self.columns_at_once
        if not TEMPLATES[self.template].tensor_cores:
            sums *= self.block_k
        elif TEMPLATES[self.template].direct:
            sums *= self.num_warps
        return ceiling(sums, 32 * self.consumer_warps)

    @property
    def columns_at_once(self) -> int:
        """Columns of a tile whose accumulators are live at the same time."""
        return STRIP if TEMPLATES[self.template].stationary else self.block_n

    @property
    def registers(self) -> int:
        """Estimated 32-bit registers per thread.

        Accumulators plus 64 for everything else. `direct` kernels also hold one step's elements of
        a (16-bit) and of b (8-bit). `stationary` kernels need fewer than 64, since their loop loads
        only b.
        """
        template = TEMPLATES[self.template]
        operands = 0
        if template.direct:
            elements = 2 * self.block_m + self.columns_at_once
            operands = elements * self.block_k // (self.threads * 4)
        overhead = 24 if template.stationary else 64
        return min(255, self.accumulator_registers + operands + overhead)

    @property
    def cta_registers(self) -> int:
        """Estimated 32-bit registers per CTA; producer warps release most of theirs."""
        consumers = 32 * self.consumer_warps
        return consumers * self.registers + (self.threads - consumers) * 24

    def stage_bytes(self, problem: GemmProblem) -> int:
        """Return the shared memory of one stage in bytes: a tile of a, one of b, and group
        scales.
        """
        if not TEMPLATES[self.template].staged:
            return 0
        a = size_of(self.block_m * self.block_k, problem.a.dtype)
        return a + size_of(self.block_n * self.block_k, problem.b.dtype) + self._shared(problem)

    def _shared(self, problem: GemmProblem) -> int:
        """Return the bytes of the scales and zero points of a tile's groups.

        They are copied in units of 4 bytes or more, and each thread copies at least one unit per
        weight.
        """
        dequant = problem.dequant
        if dequant is None or dequant.scales != "group":
            return 0
        column = size_of(ceiling(self.block_k, dequant.group), dequant.scale_dtype)
        weights = 2 if problem.epilogue.gated else 1
        scale_bytes = max(self.block_n * max(4, column), 4 * self.threads * weights)
        return scale_bytes * (2 if dequant.zero_points else 1)

    def extra_bytes(self, problem: GemmProblem) -> int:
        """Return the bytes of shared memory in addition to the stages.

        These are the output tile, barriers (for TMA), operands that a prologue has changed, and the
        stages of the statistics loop, which runs first and uses the same memory. A `direct` kernel
        has only the accumulators of all warps; those of gate and up are exchanged one after the
        other.
        """
        template = TEMPLATES[self.template]
        if template.direct:
            matmuls = 2 if problem.epilogue.gated and not template.stationary else 1
            return self.num_warps * self.block_m * self.columns_at_once // matmuls * 4
        statistics = self._statistics_bytes(problem)
        if not template.tensor_cores:
            return statistics
        extra = self._output_bytes(problem) + self._prologue_bytes(problem)
        if self.tma:
            extra += _BARRIER_BYTES
        return max(extra, statistics - self.num_stages * self.stage_bytes(problem))

    def _statistics_bytes(self, problem: GemmProblem) -> int:
        """Return the bytes of the stages of the loop that computes a LayerNorm's statistics."""
        depth = statistics_depth(problem, self)
        if problem.norm is None or problem.norm.kind != "layer" or problem.k <= depth:
            return 0
        return (STATISTICS_STAGES - 1) * size_of(self.block_m * depth, problem.a.dtype)

    def _output_bytes(self, problem: GemmProblem) -> int:
        """Return the bytes of the output tile, whose layout is converted in shared memory.

        It reuses the memory of the stages, unless those of the next tile are being loaded
        (`flatten`, `warp_specialize`). It is converted in pieces if elements have 16 bits or fewer,
        except for tiles of 256 rows, if the rows of the output are not aligned to 4 bytes.
        For a TMA store it is a whole tile with memory of its own.
        """
        columns = self.block_n // 2 if problem.epilogue.gated else self.block_n
        sums = self.split_k > 1 or self.stream_k
        dtype = problem.accumulator if sums else problem.kernel_dtype
        extra = size_of(self.block_m * columns, dtype)
        bits = DTYPE_BITS[dtype]
        unaligned = any(bits * width % 32 for width in problem.parts or (problem.n,))
        if bits <= 16 and not (unaligned and self.block_m > 128):
            extra = min(extra, _PIECE_BYTES * 32 * self.consumer_warps)
        if not self.flatten and not self.warp_specialize:
            extra = max(0, extra - self.num_stages * self.stage_bytes(problem))
        if self.tma_store:
            # The store may still be in flight while the next tile is multiplied.
            tile = size_of(self.block_m * columns, problem.kernel_dtype)
            extra = extra + tile if sums or problem.epilogue.inputs else tile
        return extra

    def _prologue_bytes(self, problem: GemmProblem) -> int:
        """Return the bytes of operands that a prologue has changed, and of a norm's vectors.

        The first operand of the tensor cores, the only one that wgmma reads from registers, is not
        written back. With fewer rows or warps mma.sync is used, which reads both from registers.
        """
        extra, norm = 0, problem.norm
        warpgroups = self.mma_m >= 64 and self.num_warps % 4 == 0
        if problem.dequant is not None and not self.swap_ab and warpgroups:
            extra += size_of(self.block_n * self.block_k, problem.a.dtype)
        if norm is not None and self.swap_ab:
            extra += size_of(self.block_m * self.block_k, problem.multiply_dtype)
        if norm is not None and norm.kind == "layer":
            extra += self.num_stages * norm.vectors * size_of(self.block_k, norm.dtype)
            # An upper bound: 32 elements along K are one slice, and with 128 there was no copy.
            sliced = warpgroups and not self.swap_ab and self.block_k >= 64
            if sliced and _compat.triton_copies_register_operand():
                extra += size_of(self.block_m * self.block_k, problem.multiply_dtype)
        return extra

    def chunks(self, problem: GemmProblem) -> int:
        """Return the loads per column of b in one step of a warp of a `direct` kernel; 0 for less
        than one.
        """
        return size_of(self.block_k // self.num_warps, problem.b.dtype) // CHUNK_BYTES

    def gathers(self, problem: GemmProblem) -> bool:
        """Whether threads load elements of a or b one by one into registers, without a pipeline,
        because cp.async copies at least 4 bytes.
        """
        narrow = min(problem.a.vector_bytes, problem.b.vector_bytes) < 4
        return narrow and not self.tma and TEMPLATES[self.template].staged

    def gathered(self, problem: GemmProblem) -> int:
        """Return the elements that a thread loads one by one in a step along K."""
        elements = (self.block_m + self.block_n) * self.block_k
        return ceiling(elements, self.threads) if self.gathers(problem) else 0

    def shared_memory(self, problem: GemmProblem) -> int:
        """Return the shared memory of a CTA in bytes: the stages, and `extra_bytes`."""
        stages = 1 if self.gathers(problem) else self.num_stages
        return stages * self.stage_bytes(problem) + self.extra_bytes(problem)

    def tiles(self, problem: GemmProblem) -> int:
        """Return the number of tiles of all outputs; no tile crosses the border of two parts or
        matrices.
        """
        along_m = ceiling(problem.rows, self.block_m)
        return problem.batch * along_m * tiles_along_n(problem, self.block_n)

    def units(self, problem: GemmProblem) -> int:
        """Return the number of work units: tiles times splits of K."""
        return self.tiles(problem) * self.split_k

    def ctas(self, problem: GemmProblem, device: Device) -> int:
        """Return the number of CTAs of the launch."""
        units = self.units(problem)
        return min(units, device.sms) if TEMPLATES[self.template].persistent else units

    def occupancy(self, problem: GemmProblem, device: Device) -> int:
        """Return the CTAs that fit on an SM, at least 1.

        Limits are shared memory (the driver reserves 1 KiB per CTA), registers and threads.
        Persistent kernels launch at most one CTA per SM.
        """
        if TEMPLATES[self.template].persistent:
            return 1
        by_memory = device.shared_memory_sm // (self.shared_memory(problem) + 1024)
        by_registers = device.registers_sm // self.cta_registers
        return max(1, min(by_memory, by_registers, 2048 // self.threads, 32))

    def k_steps(self, problem: GemmProblem) -> int:
        """Return the maximum number of steps along K of any work unit."""
        return ceiling(ceiling(problem.depth, self.block_k), self.split_k)


STATISTICS_STAGES = 3
"""Stages of the loop that computes mean and deviation of rows; it is bound by memory latency."""


def statistics_depth(problem: GemmProblem, config: GemmConfig) -> int:
    """Return the columns of a tile of the statistics loop: 32 elements per thread."""
    depth = max(16, 32 * config.threads // config.block_m)
    return min(depth, next_power_of_two(problem.k))


def tiles_along_n(problem: GemmProblem, block_n: int) -> int:
    """Return the number of tiles along N; for gate and up a tile of `block_n` holds half of
    each.
    """
    if problem.epilogue.gated or not problem.parts:
        return ceiling(problem.width, block_n)
    return sum(ceiling(part, block_n) for part in problem.parts)


def warpgroup_mma(problem: GemmProblem, config: GemmConfig, device: Device) -> bool:
    """Whether a tile runs on warpgroup instructions (wgmma, tcgen05) instead of mma.sync.

    PTX ISA, wgmma: 64 rows per group of four warps; K must be contiguous except for 16-bit dtypes.
    """
    return (
        device.capability[0] in (9, 10)
        and TEMPLATES[config.template].tensor_cores
        and config.matmul_m(problem) >= 64
        and config.num_warps % 4 == 0
        and problem.arithmetic != "fma"
        and (problem.arithmetic == "half" or problem.k_major)
    )
