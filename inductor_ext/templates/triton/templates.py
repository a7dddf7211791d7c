"""The Triton templates and their capabilities."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from inductor_ext.templates.fused_ops import NormKind
from inductor_ext.templates.problem import BATCHED


@dataclass(frozen=True)
class Template:
    """Capabilities of a kernel family, independent of the configuration."""

    operations: frozenset[str]
    norms: frozenset[NormKind] = frozenset()
    """Norms that the prologue can compute; it can dequantize if there is the operation `mixed`."""
    capability: tuple[int, int] = (8, 0)
    """Minimum compute capability."""
    tma: Literal["always", "optional", "never"] = "never"
    persistent: bool = False
    """Whether the kernel is persistent: one CTA per SM loops over tiles."""
    flatten: bool = False
    """Whether the loops over tiles and over K can be flattened into one."""
    split_k: bool = False
    swap_ab: bool = False
    parts: bool = False
    """Whether several fused weights can share a."""
    pdl: bool = False
    """Whether programmatic dependent launch is supported."""
    row_maxima: bool = False
    """Whether the epilogue can compute the row max or row amax of each tile."""
    tensor_cores: bool = True
    direct: bool = False
    """Whether tensor core operands are loaded from global memory straight into registers. All warps
    of a CTA then compute the same tile and divide its K."""
    stationary: bool = False
    """Whether the CTA's part of a stays in registers while the CTA loops over N."""
    atomics: bool = False
    """Whether split-K accumulates with atomics, in nondeterministic order. The extension's
    templates write partial accumulators to a workspace, and a second step reduces them in a fixed
    order."""
    fused_reduction: bool = False
    """Whether that second step can run in the same launch, if the configuration asks for it."""
    stream_k: bool = False
    """Whether CTAs can share the tiles of the last rounds (stream-K), so that all CTAs finish
    together."""
    tma_store: bool = False
    """Whether tiles can be stored by TMA."""

    @property
    def staged(self) -> bool:
        """Whether operands are staged in shared memory."""
        return self.tensor_cores and not self.direct


_PLAIN = frozenset({"mm", "addmm", "int_mm", "scaled"})

_DIRECT = Template(
    frozenset({"mixed"}), split_k=True, parts=True, pdl=True, direct=True, fused_reduction=True
)

TEMPLATES: Mapping[str, Template] = types.MappingProxyType(
    {
        "splitk": Template(
            _PLAIN,
            norms=frozenset({"rms", "layer"}),
            tma="optional",
            split_k=True,
            swap_ab=True,
            parts=True,
            pdl=True,
            fused_reduction=True,
            row_maxima=True,
        ),
        "gemv": Template(
            frozenset({"mm", "addmm", "mixed"}) | BATCHED,
            norms=frozenset({"rms", "layer"}),
            split_k=True,
            parts=True,
            pdl=True,
            tensor_cores=False,
            fused_reduction=True,
            row_maxima=True,
        ),
        "cp_async": Template(
            _PLAIN | BATCHED, norms=frozenset({"rms", "layer"}), parts=True, row_maxima=True
        ),
        "persistent_tma": Template(
            _PLAIN,
            capability=(9, 0),
            tma="always",
            persistent=True,
            flatten=True,
            swap_ab=True,
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
            # With a TMA store, long matmuls give wrong results with Triton 3.6.
        ),
        "bmm_persistent": Template(
            BATCHED,
            capability=(9, 0),
            tma="always",
            persistent=True,
            flatten=True,
            swap_ab=True,
            tma_store=True,
        ),
        "grouped": Template(
            frozenset({"grouped"}), capability=(9, 0), tma="always", persistent=True, swap_ab=True
        ),
        "mixed": Template(
            frozenset({"mixed"}),
            norms=frozenset({"rms"}),
            split_k=True,
            swap_ab=True,
            parts=True,
            pdl=True,
            fused_reduction=True,
            row_maxima=True,
        ),
        "direct": _DIRECT,
        "stationary": replace(_DIRECT, stationary=True),
    }
)
"""The templates by name; if two are predicted to be equal, the first is preferred.

`splitk`: skinny GEMMs, also with a single split; `gemv`: up to 8 rows, without tensor cores;
`cp_async`: capability 8 and operands that TMA cannot load; `persistent_tma` (flattened or not) and
its warp-specialized variant `persistent_tma_ws`; `bmm_persistent`; `grouped`; `mixed`: dequantizes
b in the prologue; `direct`: the same for up to 8 rows, without shared memory; `stationary`: the
same for up to 16 rows and a long K."""

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
"""Bytes of a column of b that a warp of a `direct` kernel loads at once, 16 bytes per lane."""

STRIP = 16
"""Columns that a CTA of a `stationary` kernel multiplies at a time: one side of an mma
instruction."""
