"""A CUTLASS kernel: `CutlassConfig`, and its name in CUTLASS's own scheme.

A configuration is what a kernel is compiled for, and how it is launched (splits, swizzle, order of
tiles), which costs no compile: `compiled` tells which share a binary. The allowlist and denylist of
Inductor's CUTLASS settings are matched on its name, by `Filter`. It knows nothing of legality: see
`constraints`.

There are two families. That of capability 9.0 loads and stores by TMA, with warps specialised for
it (CUTLASS 3.x). The other one is of capability 8.0, by cp.async (CUTLASS 2.x), and is built for
what is newer as well, where TMA refuses an alignment.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from inductor_ext import exc
from inductor_ext.templates.problem import (
    DTYPE_BITS,
    FP8,
    OPTIONAL,
    GemmProblem,
    ceiling,
    plain,
    read,
    require,
    size_of,
)

__all__ = ["SHORT_NAMES", "CutlassConfig", "Filter", "Mainloop"]

Mainloop = Literal[
    "multistage",
    "warpspecialized",
    "warpspecialized_pingpong",
    "warpspecialized_cooperative",
]
"""How loading and multiplying are divided among warps. `multistage`: all do both, by cp.async.
`warpspecialized`: one group of four loads by TMA, one multiplies; `_pingpong`: two multiply a tile
each, in turn; `_cooperative`: two multiply one tile together."""

SHORT_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "float32": "f32",
        "float16": "f16",
        "bfloat16": "bf16",
        "float8_e4m3fn": "e4m3",
        "float8_e5m2": "e5m2",
        "int8": "s8",
        "uint8": "u8",
        "int4": "s4",
        "uint4": "u4",
        "int32": "s32",
        "void": "void",
    }
)
"""CUTLASS's names of dtypes, of those that its kernels take here."""

_WARPS: Mapping[tuple[int, int], tuple[int, int]] = types.MappingProxyType(
    {
        (256, 128): (4, 2),
        (128, 256): (2, 4),
        (256, 64): (4, 1),
        (64, 256): (1, 4),
        (128, 128): (2, 2),
        (128, 64): (2, 2),
        (64, 128): (2, 2),
        (64, 64): (2, 2),
    }
)
"""Warps along M and N for a tile, where all warps do the same, as CUTLASS's generator has it."""


@dataclass(frozen=True)
class CutlassConfig:
    """One CUTLASS kernel and how it is launched, as the kernel sees it: with `swap`, its A is the
    problem's b, transposed, and M and N are exchanged.

    Raises:
        exc.BadGemmError: an unknown dtype, layout or schedule; a number below 1.
    """

    arch: int
    """80 for capability 8.0 and newer by cp.async, 89 for the same with 8-bit floats, 90 for TMA
    and warp specialisation."""
    mainloop: Mainloop
    tile: tuple[int, int, int]
    """M, N and K that a CTA has at once."""
    a: str
    b: str
    d: str
    """Dtype of the output."""
    c: str = "void"
    """Dtype of the matrix that the epilogue reads, `void` for none."""
    accumulator: str = "float32"
    layouts: str = "tnt"
    """Of A, B and D: `t` where elements of a row are neighbours, `n` for those of a column."""
    alignments: tuple[int, int, int] = (8, 8, 8)
    """Elements, of A, B and D."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    """CTAs that share loads, along M, N and K."""
    stages: int = 0
    """Of the pipeline; 0 for as many as fit, which is of capability 9.0 only."""
    epilogue: Literal["tma", "direct"] = "tma"
    """By TMA from shared memory, or by each thread."""
    scheduler: Literal["persistent", "stream_k"] = "persistent"
    """`stream_k` divides all steps along K of all tiles evenly among the SMs."""
    grouped: bool = False
    fast_accumulation: bool = False
    """Whether 8-bit floats are summed up in the tensor cores' own precision."""
    tf32: bool = False
    """Whether float32 is rounded to tf32."""
    swap: bool = False
    target: int = 0
    """Capability of the devices that it is built for, as in 86 for 8.6; 0 becomes `arch`."""
    flags: tuple[str, ...] = ()
    """Further arguments of nvcc."""
    split_k: int = 1
    """CTAs that divide K of a tile; costs no compile."""
    swizzle: int = 1
    """Tiles side by side that are walked as one, at most; costs no compile."""
    raster: Literal["heuristic", "along_m", "along_n"] = "heuristic"
    """In which order tiles are walked; costs no compile."""
    group: int | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Elements along K that share a scale of A, which has B's dtype; None where it has none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", self.target or self.arch)

        def check(field: str, ok: bool, allowed: str) -> None:
            require(ok, "CUTLASS configuration", field, getattr(self, field), allowed)

        check("arch", self.arch in (80, 89, 90), "80, 89, 90")
        for field in ("mainloop", "epilogue", "scheduler", "raster"):
            allowed = typing.get_args(_LITERALS[field])
            check(field, getattr(self, field) in allowed, ", ".join(allowed))
        for field in ("a", "b", "d", "accumulator"):
            known = getattr(self, field) in SHORT_NAMES and getattr(self, field) != "void"
            check(field, known, ", ".join(SHORT_NAMES))
        check("c", self.c in SHORT_NAMES, ", ".join(SHORT_NAMES))
        check("layouts", bool(re.fullmatch("[tn]{3}", self.layouts)), "three of t and n")
        for field in ("tile", "cluster", "alignments"):
            value = getattr(self, field)
            check(field, len(value) == 3 and min(value) >= 1, "three numbers of 1 or more")
        check("group", self.group is None or self.group >= 1, "1 or more, or None")
        check("stages", self.stages >= (0 if self.arch == 90 else 2), "2 or more")
        fits = self.target == 90 if self.arch == 90 else self.target >= self.arch
        check("target", fits, "arch, and for one below 90 what is newer")
        for field in ("split_k", "swizzle"):
            check(field, getattr(self, field) >= 1, "1 or more")

    def to_json(self) -> dict[str, Any]:
        """What `json.dumps` takes; `from_json` reads it."""
        value: dict[str, Any] = plain(self)
        return value

    @classmethod
    def from_json(cls, value: object) -> CutlassConfig:
        """What `to_json` has written.

        Raises:
            exc.BadGemmError: something is missing, unknown, of a wrong type or no configuration.
        """
        return read(cls, value, "CUTLASS configuration")

    @property
    def compiled(self) -> CutlassConfig:
        """What is compiled: the same without what only a launch decides."""
        return dataclasses.replace(self, split_k=1, swizzle=1, raster="heuristic")

    @property
    def architecture(self) -> str:
        """nvcc's, as in "90a", whose code runs on 9.0 alone."""
        return "90a" if self.arch == 90 else str(self.target)

    @property
    def template(self) -> str:
        """As of `GemmConfig`: what people are told of it in a word."""
        return "cutlass"

    @property
    def name(self) -> str:
        """As CUTLASS's own library names such a kernel; the same for all that share a binary."""
        if self.arch < 90:
            return self._name_2x
        dtypes = (self.a, self.b, self.accumulator, self.c, self.d)
        parts = [
            "cutlass3x_sm90_tensorop",
            "gemm_grouped" if self.grouped else "gemm",
            *(SHORT_NAMES[dtype] for dtype in dtypes),
            "x".join(map(str, self.tile)),
            "x".join(map(str, self.cluster)),
            str(self.stages),
            self.layouts,
            f"align{max(self.alignments[:2])}",
        ]
        if self.scheduler == "stream_k":
            parts.append("stream_k")
        parts.append(self.mainloop)
        if self.fast_accumulation:
            parts.append("fp8_fastaccum")
        parts.append("epi_tma" if self.epilogue == "tma" else "epi_nosmem")
        return "_".join(parts)

    @property
    def _name_2x(self) -> str:
        short = {"float32": "s", "float16": "h", "int32": "i"}[self.accumulator]
        m, n, k = self.instruction
        fast = "fastaccum" if self.fast_accumulation else ""
        rounded = "tf32" if self.a == "float32" else ""
        core = f"{short}{m}{n}{k}{fast}{rounded}gemm{'_grouped' if self.grouped else ''}"
        parts = ["cutlass_tensorop"]
        if self.d != self.accumulator:
            parts.append(SHORT_NAMES[self.d])
        parts.append(core)
        if self.a != self.b:
            parts += [SHORT_NAMES[self.a], SHORT_NAMES[self.b]]
        elif self.a != self.accumulator:
            parts.append(SHORT_NAMES[self.a])
        tile_m, tile_n, tile_k = self.tile
        parts.append(f"{tile_m}x{tile_n}_{tile_k}x{self.stages}")
        parts += [self.layouts[:2], f"align{max(self.alignments[:2])}"]
        return "_".join(parts)

    @property
    def instruction(self) -> tuple[int, int, int]:
        """M, N and K of one mma.sync (PTX ISA, 256 bits of A along K; the wider dtype's)."""
        return (16, 8, 256 // max(DTYPE_BITS[self.a], DTYPE_BITS[self.b]))

    @property
    def has_workspace(self) -> bool:
        """Whether a launch needs memory beside its operands: for the sums of parts of K, for what
        groups are made known by, or for scales in the order in which TMA loads them.
        """
        return self.grouped or self.scheduler == "stream_k" or self.group is not None

    @property
    def warps(self) -> tuple[int, int]:
        """Warps along M and N that multiply a tile.

        Raises:
            KeyError: a tile that CUTLASS 2.x does not divide among warps.
        """
        if self.arch < 90:
            return _WARPS[self.tile[:2]]
        return (8, 1) if self.mainloop == "warpspecialized_cooperative" else (4, 1)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        along_m, along_n = self.warps
        warps = along_m * along_n
        if self.mainloop == "warpspecialized_pingpong":
            warps *= 2
        return 32 * (warps + 4 if self.arch == 90 else warps)

    @property
    def accumulator_registers(self) -> int:
        """32-bit registers that hold the accumulators of a thread that multiplies.

        Sums of 8-bit floats in the tensor cores' own precision are added up, every few steps, to
        others in float32.
        """
        along_m, along_n = self.warps
        sums = 2 if {self.a, self.b} <= FP8 and not self.fast_accumulation else 1
        return sums * ceiling(self.tile[0] * self.tile[1], 32 * along_m * along_n)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of one stage of the pipeline: a tile of A with its scales, one of
        B, barriers.
        """
        m, n, k = self.tile
        tiles = size_of(m * k, self.a) + size_of(n * k, self.b)
        tiles += size_of(m, self.b) if self.group else 0
        return ceiling(tiles, 128) * 128 + 16 if self.arch == 90 else tiles

    @property
    def epilogue_tile(self) -> tuple[int, int]:
        """Rows and columns that are in shared memory at once on their way out by TMA."""
        m, n = self.tile[:2]
        if self.mainloop == "warpspecialized_cooperative":
            return min(128, m), min(32, n)
        wide = DTYPE_BITS[self.d] == 8 and n % 64 == 0
        return min(64, m), min(64 if wide else 32, n)

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of shared memory of the epilogue, besides rows that are broadcast.

        The output has two such tiles; the matrix that is read four, which are reused for the output
        where elements are of one size (of more than 8 bits).
        """
        if self.epilogue == "direct":
            return 0
        rows, columns = self.epilogue_tile
        tiles = self.tile[0] * self.tile[1] // (rows * columns)
        stored = min(tiles, 2)
        out = size_of(rows * columns, self.d)
        if self.c == "void":
            return stored * out
        loaded = min(tiles, 4)
        if DTYPE_BITS[self.c] == DTYPE_BITS[self.d] > 8:
            return max(loaded, stored + 1) * out
        return loaded * size_of(rows * columns, self.c) + stored * out

    def pipeline(self, shared_memory: int, extra: int = 0) -> int:
        """Stages of the pipeline: those asked for, or as many as fit.

        Args:
            shared_memory: bytes that a CTA may have.
            extra: bytes that something else takes.
        """
        if self.stages:
            return self.stages
        # A kilobyte for barriers, the scheduler's state and what alignment costs.
        left = shared_memory - self.epilogue_bytes - extra - 1024
        return max(0, left // self.stage_bytes)

    def operand_dtypes(self, problem: GemmProblem) -> tuple[str, str]:
        """The problem's a and b in the kernel's order."""
        pair = (problem.a.dtype, problem.b.dtype)
        return (pair[1], pair[0]) if self.swap else pair


_LITERALS = typing.get_type_hints(CutlassConfig)


@dataclass(frozen=True)
class Filter:
    """The kernels that a user lets in, by regular expressions that are searched for in a name."""

    allow: str | None = None
    """None or an empty one for all."""
    deny: str | None = None
    """None or an empty one for none."""

    def __post_init__(self) -> None:
        """Check both.

        Raises:
            exc.BadOptionError: one is no regular expression.
        """
        for option, pattern in (
            ("cutlass_op_allowlist_regex", self.allow),
            ("cutlass_op_denylist_regex", self.deny),
        ):
            try:
                re.compile(pattern or "")
            except (re.error, TypeError) as error:
                raise exc.BadOptionError(
                    name=option,
                    value=pattern,
                    found=type(pattern).__name__,
                    allowed=f"a regular expression ({error})",
                    default=None,
                ) from None

    def passes(self, name: str) -> bool:
        """Whether a kernel of that name is let in."""
        if self.allow and not re.search(self.allow, name):
            return False
        return not (self.deny and re.search(self.deny, name))
