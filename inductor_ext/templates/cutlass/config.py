"""Configuration of a CUTLASS kernel (`CutlassConfig`), and its name in CUTLASS's scheme.

A configuration has compile-time parameters and launch parameters (split-K, swizzle, raster order).
Configurations with equal `compiled` share a binary. `Filter` applies Inductor's settings
`cutlass_op_allowlist_regex` and `cutlass_op_denylist_regex` to kernel names. Legality is checked by
`constraints`, not here.

There are two families. Kernels for sm_90 load and store by TMA and are warp-specialized (CUTLASS
3.x). Kernels for sm_80 and newer use cp.async (CUTLASS 2.x); on newer devices they serve operands
whose alignment TMA does not support.
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
from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import KEY, OPTIONAL
from inductor_ext.templates.problem import GemmProblem, read
from inductor_ext.templates.tensors import DTYPE_BITS, FP8, ceiling, require, size_of

Mainloop = Literal[
    "multistage", "warpspecialized", "warpspecialized_pingpong", "warpspecialized_cooperative"
]
"""How loads and MMAs are divided among warps. `multistage`: all warps do both, with cp.async.
`warpspecialized`: one warpgroup loads by TMA, one does MMAs; `_pingpong`: two consumer warpgroups
alternate on a tile each; `_cooperative`: two consumer warpgroups share one tile."""

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
"""CUTLASS's short names of the supported dtypes."""

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
"""Warps along M and N for each multistage tile (M, N), as in CUTLASS's generator."""


@dataclass(frozen=True)
class CutlassConfig:
    """A CUTLASS kernel and its launch parameters, in the kernel's terms.

    With `swap_ab`, the kernel computes the transposed problem: its A is the problem's b,
    transposed, and M and N are exchanged.

    Raises:
        exc.BadGemmError: an unknown dtype, layout or schedule; a number below 1.
    """

    arch: int
    """80 for cp.async kernels (sm_80 and newer), 89 for the same with fp8, 90 for TMA and warp
    specialization."""
    mainloop: Mainloop
    tile: tuple[int, int, int]
    """CTA tile along M, N and K."""
    a: str
    b: str
    d: str
    """Dtype of the output."""
    c: str = "void"
    """Dtype of matrix C that the epilogue reads; `void` for none."""
    accumulator: str = "float32"
    layouts: str = "tnt"
    """Of A, B and D: `t` for row-major, `n` for column-major."""
    alignments: tuple[int, int, int] = (8, 8, 8)
    """Of A, B and D, in elements."""
    cluster: tuple[int, int, int] = (1, 1, 1)
    """CTAs of a cluster, which share loads, along M, N and K."""
    stages: int = 0
    """Pipeline stages; 0 for as many as fit (sm_90 only)."""
    epilogue: Literal["tma", "direct"] = "tma"
    """`tma`: store by TMA from shared memory; `direct`: each thread stores its elements."""
    scheduler: Literal["persistent", "stream_k"] = "persistent"
    """`stream_k` divides the K iterations of all tiles evenly among the SMs."""
    grouped: bool = False
    fast_accumulation: bool = False
    """Whether fp8 products are accumulated in the tensor cores' reduced precision."""
    tf32: bool = False
    """Whether float32 is rounded to tf32."""
    swap_ab: bool = dataclasses.field(default=False, metadata={KEY: "swap"})
    target: int = 0
    """Compute capability that the kernel is built for, such as 86 for 8.6; 0 becomes `arch`."""
    flags: tuple[str, ...] = ()
    """Further arguments of nvcc."""
    split_k: int = 1
    """CTAs that divide K of a tile; a launch parameter."""
    swizzle: int = 1
    """Maximum threadblock swizzle, in tiles; a launch parameter."""
    raster: Literal["heuristic", "along_m", "along_n"] = "heuristic"
    """Raster order of the tiles; a launch parameter."""
    group: int | None = dataclasses.field(default=None, metadata={OPTIONAL: True})
    """Elements along K that share a scale of A; the scales have B's dtype. None for no scales."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", self.target or self.arch)

        def check(field: str, ok: bool, allowed: str) -> None:
            require(ok, "CUTLASS configuration", field, getattr(self, field), allowed)

        check("arch", self.arch in (80, 89, 90), "80, 89, 90")
        for field in ("mainloop", "epilogue", "scheduler", "raster"):
            allowed = typing.get_args(_LITERALS[field])
            check(field, getattr(self, field) in allowed, ", ".join(allowed))
        for field in ("a", "b", "d", "accumulator"):
            is_dtype = getattr(self, field) in SHORT_NAMES and getattr(self, field) != "void"
            check(field, is_dtype, ", ".join(SHORT_NAMES))
        check("c", self.c in SHORT_NAMES, ", ".join(SHORT_NAMES))
        check("layouts", bool(re.fullmatch("[tn]{3}", self.layouts)), "three of t and n")
        for field in ("tile", "cluster", "alignments"):
            value = getattr(self, field)
            check(field, len(value) == 3 and min(value) >= 1, "three numbers of 1 or more")
        check("group", self.group is None or self.group >= 1, "1 or more, or None")
        check("stages", self.stages >= (0 if self.arch == 90 else 2), "2 or more")
        compatible = self.target == 90 if self.arch == 90 else self.target >= self.arch
        check("target", compatible, "arch, and for one below 90 what is newer")
        for field in ("split_k", "swizzle"):
            check(field, getattr(self, field) >= 1, "1 or more")

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serializable value that `from_json` reads."""
        value: dict[str, Any] = json_codec.encode(self)
        return value

    @classmethod
    def from_json(cls, value: object) -> CutlassConfig:
        """Return the configuration that `to_json` wrote.

        Raises:
            exc.BadGemmError: a field is missing, unknown or of a wrong type, or the value is not a
                valid configuration.
        """
        return read(cls, value, "CUTLASS configuration")

    @property
    def compiled(self) -> CutlassConfig:
        """The configuration with default launch parameters; equal for all that share a binary."""
        return dataclasses.replace(self, split_k=1, swizzle=1, raster="heuristic")

    @property
    def architecture(self) -> str:
        """nvcc's architecture, such as "90a" (whose code runs on capability 9.0 only)."""
        return "90a" if self.arch == 90 else str(self.target)

    @property
    def template(self) -> str:
        """The name shown in reports, as `GemmConfig.template`."""
        return "cutlass"

    @property
    def name(self) -> str:
        """The kernel's name in CUTLASS's library scheme; independent of launch parameters."""
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
        accumulator = {"float32": "s", "float16": "h", "int32": "i"}[self.accumulator]
        m, n, k = self.instruction
        fast = "fastaccum" if self.fast_accumulation else ""
        tf32 = "tf32" if self.a == "float32" else ""
        core = f"{accumulator}{m}{n}{k}{fast}{tf32}gemm{'_grouped' if self.grouped else ''}"
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
        """M, N and K of one mma.sync (PTX ISA): K is 256 bits of the wider operand dtype."""
        return (16, 8, 256 // max(DTYPE_BITS[self.a], DTYPE_BITS[self.b]))

    @property
    def has_workspace(self) -> bool:
        """Whether a launch may need a workspace.

        It holds the partial sums of stream-K, the problem descriptions of groups, or scales
        transposed for TMA.
        """
        return self.grouped or self.scheduler == "stream_k" or self.group is not None

    @property
    def warps(self) -> tuple[int, int]:
        """MMA warps along M and N of a tile.

        Raises:
            KeyError: `_WARPS` has no warp layout for this multistage tile.
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
        """32-bit accumulator registers of an MMA thread.

        fp8 without fast accumulation needs twice as many: every few steps the tensor cores'
        accumulators are added to a second set in float32.
        """
        along_m, along_n = self.warps
        sums = 2 if {self.a, self.b} <= FP8 and not self.fast_accumulation else 1
        return sums * ceiling(self.tile[0] * self.tile[1], 32 * along_m * along_n)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of a pipeline stage: A tile, its scales, B tile and barriers."""
        m, n, k = self.tile
        tiles = size_of(m * k, self.a) + size_of(n * k, self.b)
        tiles += size_of(m, self.b) if self.group else 0
        return ceiling(tiles, 128) * 128 + 16 if self.arch == 90 else tiles

    @property
    def epilogue_tile(self) -> tuple[int, int]:
        """Rows and columns of the epilogue subtile that is staged in shared memory for TMA."""
        m, n = self.tile[:2]
        if self.mainloop == "warpspecialized_cooperative":
            return min(128, m), min(32, n)
        wide = DTYPE_BITS[self.d] == 8 and n % 64 == 0
        return min(64, m), min(64 if wide else 32, n)

    @property
    def epilogue_bytes(self) -> int:
        """Bytes of shared memory of the epilogue, without broadcast rows.

        D is staged in two subtiles, C in four. D reuses C's if both have the same element size (of
        more than 8 bits).
        """
        if self.epilogue == "direct":
            return 0
        rows, columns = self.epilogue_tile
        tiles = self.tile[0] * self.tile[1] // (rows * columns)
        d_tiles = min(tiles, 2)
        out = size_of(rows * columns, self.d)
        if self.c == "void":
            return d_tiles * out
        c_tiles = min(tiles, 4)
        if DTYPE_BITS[self.c] == DTYPE_BITS[self.d] > 8:
            return max(c_tiles, d_tiles + 1) * out
        return c_tiles * size_of(rows * columns, self.c) + d_tiles * out

    def pipeline(self, shared_memory: int, extra: int = 0) -> int:
        """Return the number of pipeline stages: `stages`, or as many as fit.

        Args:
            shared_memory: bytes that a CTA may have.
            extra: further bytes of shared memory that the kernel uses.
        """
        if self.stages:
            return self.stages
        # 1 KiB for barriers, the scheduler's state and alignment padding.
        available = shared_memory - self.epilogue_bytes - extra - 1024
        return max(0, available // self.stage_bytes)

    def operand_dtypes(self, problem: GemmProblem) -> tuple[str, str]:
        """Return the dtypes of the problem's operands in the kernel's order."""
        pair = (problem.a.dtype, problem.b.dtype)
        return (pair[1], pair[0]) if self.swap_ab else pair


_LITERALS = typing.get_type_hints(CutlassConfig)


@dataclass(frozen=True)
class Filter:
    """The user's allowlist and denylist of kernel names, as regular expressions (`re.search`)."""

    allow: str | None = None
    """None or empty allows all kernels."""
    deny: str | None = None
    """None or empty denies none."""

    def __post_init__(self) -> None:
        """Validate both patterns.

        Raises:
            exc.BadOptionError: a pattern is not a regular expression.
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
                    actual=type(pattern).__name__,
                    allowed=f"a regular expression ({error})",
                    default=None,
                ) from None

    def passes(self, name: str) -> bool:
        """Whether a kernel with that name may be used."""
        if self.allow and not re.search(self.allow, name):
            return False
        return not (self.deny and re.search(self.deny, name))
