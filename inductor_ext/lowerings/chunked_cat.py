"""Lowering of the concatenation of chunks: each is written into the result when it is computed.

On a GPU, Inductor may compute a concatenation of pointwise operators in one kernel, which would
keep what all chunks read live until then. Concatenations that `lowerings.graph.chunks` did not make
are left to Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext.lowerings import register_lowering
from inductor_ext.lowerings.graph.chunk_region import CHUNK

_COPIED = (torch.int8, torch.uint8)
"""Dtypes whose concatenation Inductor leaves to ATen on a CPU."""


@register_lowering(torch.ops.aten.cat.default)
def cat(stock: Callable[..., Any], inputs: Sequence[Any], dim: int = 0) -> Any:
    """Lower a concatenation."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    node = V.graph.current_node
    if node is None or CHUNK not in node.meta or inputs[0].get_dtype() in _COPIED:
        return stock(inputs, dim)
    return ir.TensorBox(ir.ConcatKernel.create(inputs, dim % len(inputs[0].get_size())))
