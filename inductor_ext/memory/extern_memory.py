"""The memory that kernels of torch's libraries allocate themselves, beyond their outputs.

The planner keeps headroom for such a workspace: a known one counts as live bytes at its step, and
at a step with an unbounded one little stays live beyond its use (`placement_policy`).
"""

from __future__ import annotations

import re
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, Min

from inductor_ext.memory import measured_workspace

FALLBACK_HINT = 64
"""Value assumed for a size without a hint (unbacked symbols), as in Inductor's planner."""


def size_hint(expression: Any) -> int:
    """Return the value of a size expression at the size hints of its symbols."""
    value: int = V.graph.sizevars.optimization_hint(expression, fallback=FALLBACK_HINT)
    return value


def scratch_bytes(node: Any) -> Any:
    """Return the workspace bytes of a kernel that allocates its own outputs; None if unknown.

    The result is an int or an expression in the sizes of the operands.

    The formula for float32 attention on CPU follows the allocations in at::native's flash
    attention: each thread has a tile of scores, two statistics per row, and a tile of the output.
    Other kernels on CPU are measured (`measured_workspace`).
    """
    name = str(getattr(node, "op_overload", ""))
    if name.startswith("aten._scaled_dot_product_flash_attention_for_cpu.default"):
        query, key = (value.get_size() for value in node.inputs[:2])
        if node.inputs[0].get_dtype() != torch.float32 or len(node.inputs) > 3:
            # A mask is copied; other dtypes need more tiles.
            return measured_workspace.workspace_bytes(node)
        length, keys, head = map(sympy.sympify, (query[2], key[2], query[3]))
        # 32 rows, 64 from a length of 192 on, 256 from 768 on.
        from_192, from_768 = (Min(1, FloorDiv(length, limit)) for limit in (192, 768))
        rows = Min(32 + 32 * from_192 + 192 * from_768, length)
        columns = Min(512, keys)
        return torch.get_num_threads() * (rows * columns + 2 * rows + rows * head) * 4
    return measured_workspace.workspace_bytes(node)


def out_scratch_bytes(node: Any) -> int | None:
    """Return the workspace bytes of a kernel that is given its outputs; None if unknown."""
    if _is_custom(node):
        return None
    return measured_workspace.workspace_bytes(node) if _copies_operands(node) else 0


def _copies_operands(node: Any) -> bool:
    """Whether a kernel may copy an operand to make it contiguous, as bmm does on CPU."""
    if "bmm" not in (node.get_kernel_name() or "") or node.get_device().type != "cpu":
        return False
    for operand in node.inputs:
        size, stride = operand.get_size(), operand.get_stride()
        rows, columns = size[-2:]
        if [*stride] not in ([rows * columns, columns, 1], [rows * columns, 1, rows]):
            return True
    return False


def _is_custom(node: Any) -> bool:
    """Whether a kernel is the out variant of a custom operator, which torch 2.13 calls."""
    overload = getattr(node, "op_overload", None)
    return isinstance(overload, torch._ops.OpOverload) and overload.namespace != "aten"


_OPERATOR = re.compile(
    r"^(?!\s*(?:assert_|#|//|del ))"
    r".*\b(?:torch\.ops\.|aten\.|aoti_torch_proxy_executor|(?:launch_)?with_workspace\()"
)
"""Matches a line of text that calls an operator, or a kernel with an allocated workspace."""


def may_allocate(text: str) -> bool:
    """Whether a line of generated text calls something that may allocate a workspace."""
    return _OPERATOR.search(text) is not None


_PACKING = (
    "_quantized::_wrapped_linear_prepack",
    "_quantized::wrapped_fbgemm_pack_gemm_matrix_fp16",
)
"""Operators whose result's memory contains an object that is destroyed with the tensor."""


def find_buffers_with_objects() -> set[str]:
    """Return the buffers of the current graph whose memory contains an object.

    To overwrite one crashes, in Inductor's plan too.
    """
    names: set[str] = set()
    for buffer in V.graph.buffers:
        operator = getattr(buffer, "op_overload", None)
        packs = operator is not None and operator.name().split(".")[0] in _PACKING
        if packs or (isinstance(buffer, ir.MultiOutput) and buffer.input_name(0) in names):
            names.add(buffer.get_name())
    return names
