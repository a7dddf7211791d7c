"""Lowering of the concatenation of chunks: each is written into the result when it is computed.

On a GPU, Inductor may compute a concatenation of pointwise operators in one kernel, which would
keep what all chunks read live until then. `hooks.upstream_fixes.concatenations`, which lowers all
concatenations, leaves those of `lowerings.graph.chunks` to this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from inductor_ext.lowerings.graph.chunk_region import CHUNK

if TYPE_CHECKING:
    from torch import fx

_COPIED = (torch.int8, torch.uint8)
"""Dtypes whose concatenation Inductor leaves to ATen on a CPU."""


def is_chunked(node: fx.Node, inputs: Sequence[Any]) -> bool:
    """Whether a node is a concatenation of chunks that `join_chunks` lowers.

    Args:
        node: the FX node that is lowered.
        inputs: its operands in Inductor's IR.
    """
    return CHUNK in node.meta and inputs[0].get_dtype() not in _COPIED


def join_chunks(inputs: Sequence[Any], dim: int) -> Any:
    """Lower a concatenation of chunks along `dim`."""
    from torch._inductor import ir

    return ir.TensorBox(ir.ConcatKernel.create(inputs, dim % len(inputs[0].get_size())))
