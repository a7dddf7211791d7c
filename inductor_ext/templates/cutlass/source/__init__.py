"""CUDA source of a CUTLASS kernel, from its configuration and epilogue.

Sizes, strides, scalars, split count, swizzle and raster order are launch arguments. Dtypes,
layouts, alignments, tile, cluster, schedule and the epilogue's expression are compiled in.

A source has a device half and a host half, which `nvcc_build` compiles in parallel: the macro
INDUCTOR_EXT_DEVICE selects the device code; the host code embeds the compiled device code as the
bytes `inductor_ext_cubin`. The host half defines two C functions, the same for all kernels:

    int64_t inductor_ext_workspace_size(Call const* call);
    int32_t inductor_ext_run(Call const* call, void* workspace, cudaStream_t stream);

The first returns bytes, or -1 if the kernel cannot run the call (for example, because of an
alignment). The second launches, and returns 0 or an error: a `cutlass::Status` (see
`cutlassGetStatusString`), or 1000 plus a CUDA error code. `CALL_FIELDS` describes `Call`. Its
tensors are, in the kernel's order: a, b, the output (b, a, the output with swapped operands), the
epilogue's inputs, the epilogue's other outputs. For a grouped GEMM they are a, b, the output and
the end offsets of the groups (int32).

A 4-bit A passes through registers, as does any A that is narrower than B. CUTLASS's conversions
expect the low nibble first and have no zero point; the conversions here support both nibble orders
and a zero point. With group scales along K, TMA needs the scales as [groups, N], but models store
them as [N, groups]: a separate kernel transposes them into the workspace before each launch.

To save compile time the source includes as little as CUTLASS allows: no code for other
architectures, none of CUTLASS's launchers (device adapters) and no host utilities.
"""

from __future__ import annotations

import hashlib

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue, NotExpressible
from inductor_ext.templates.cutlass.evt import render
from inductor_ext.templates.cutlass.source.common import NAME
from inductor_ext.templates.cutlass.source.grouped import render_grouped
from inductor_ext.templates.cutlass.source.interface import (
    CALL_FIELDS,
    FLAGS,
    FUNCTIONS,
    RASTER,
    TENSOR_FIELDS,
    Source,
)
from inductor_ext.templates.cutlass.source.multistage import render_multistage
from inductor_ext.templates.cutlass.source.specialized import render_specialized
from inductor_ext.templates.tensors import INT4

__all__ = ["CALL_FIELDS", "FLAGS", "FUNCTIONS", "RASTER", "TENSOR_FIELDS", "Source", "source"]


def source(config: CutlassConfig, epilogue: Epilogue) -> Source:
    """Return the source of a kernel.

    Args:
        config: its launch parameters are ignored.
        epilogue: of the kernel.

    Raises:
        epilogue.NotExpressible: the kernel does not support the epilogue.
    """
    config = config.compiled
    packed = epilogue.packed
    if (packed is None) == (config.a in INT4) or (epilogue.scales is None) != (
        config.group is None
    ):
        raise NotExpressible("the packing or group scales of the weight do not match the kernel")
    rendered = render(epilogue, config)
    if config.grouped:
        body = render_grouped(config, rendered)
    elif config.arch == 90:
        body = render_specialized(config, rendered, epilogue)
    else:
        body = render_multistage(config, rendered)
    if config.flags:
        body = f"{FLAGS}{' '.join(config.flags)}\n{body}"
    digest = hashlib.sha256(f"{config.architecture}\0{body}".encode()).hexdigest()[:8]
    name = f"{config.name}_{digest}"
    text = body.replace(NAME, name)
    return Source(name, text, config.architecture)
