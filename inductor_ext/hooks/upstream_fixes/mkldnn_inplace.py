"""Fixes for oneDNN kernels that add to one of their operands in place (the post-operation "sum").

Inductor fuses `residual + conv(x)`, and a quantized `residual + linear(x)`, into a kernel that
writes its result into the memory of `residual`. It checks only the FX users of `residual`, and
therefore overwrites graph inputs, buffers and parameters, and memory that is read later through a
view. Here a kernel adds in place only if it is the last reader of that memory. Otherwise a
quantized kernel gets a copy of the residual, and a convolution allocates its result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import context, lowering_table, registry
from inductor_ext.hooks.registry import Hook

if TYPE_CHECKING:
    import torch

HOOKS = (
    Hook(
        "accumulates_in_place",
        "replaced",
        ("torch._inductor.fx_passes.mkldnn_fusion._can_be_inplace",),
        "hooks.upstream_fixes.mkldnn_inplace",
        "A fused convolution or quantized linear layer adds to its residual in place even if the "
        "residual is an input or a buffer, or is read later through a view. The lowerings of the "
        "extension decide, because calls with several users do not come here; an answer of False "
        "fails the compile of a quantized convolution.",
        relies_on=(
            "torch._inductor.graph.GraphLowering.current_node",
            "torch._inductor.graph.GraphLowering.try_get_buffer",
            "torch._inductor.ir.BaseView.unwrap_view",
            "torch._inductor.ir.Buffer.get_inputs_that_alias_output",
            "torch._inductor.ir.Buffer.get_mutation_names",
        ),
        upstream="ao #4566",
    ),
)


def install_hooks() -> None:
    """Register the lowerings and install the dispatcher, once per process."""
    import torch

    if not torch._C._has_mkldnn:
        return
    registry.install(HOOKS, {"accumulates_in_place": _dispatch_can_be_inplace})
    onednn, mkldnn = torch.ops.onednn, torch.ops.mkldnn
    lowering_table.register_once(
        _lower_quantized,
        onednn.qlinear_pointwise.binary,
        onednn.qlinear_pointwise.binary_tensor,
        onednn.qconv2d_pointwise.binary,
        onednn.qconv2d_pointwise.binary_tensor,
    )
    lowering_table.register_once(_lower_conv, mkldnn._convolution_pointwise_.binary)


def _dispatch_can_be_inplace(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def can_be_inplace(operand: Any) -> bool:
        return context.settings() is not None or stock(operand)

    return can_be_inplace


def _lower_quantized(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(stock).bind(*args, **kwargs)
    residual = "accum" if "accum" in call.arguments else "x2"
    operand = call.arguments[residual]
    if call.arguments["binary_attr"] == "sum" and not _is_overwritable(operand):
        from torch._inductor.lowering import clone

        call.arguments[residual] = clone(operand)
    return stock(*call.args, **call.kwargs)


def _lower_conv(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(stock).bind(*args, **kwargs)
    if not _is_overwritable(call.arguments["other"]):
        import torch
        from torch._inductor.lowering import lowerings

        stock = lowerings[torch.ops.mkldnn._convolution_pointwise.binary]
    return stock(*args, **kwargs)


def _is_overwritable(operand: Any) -> bool:
    """Whether the current node is the last reader of an operand's memory, and reads it once."""
    from torch._inductor import ir

    operand.realize()
    names = _memory_names(operand)
    if len(names) != 1:  # it shares memory with other buffers
        return False
    buffer = _unwrap(operand)
    return (
        not isinstance(buffer, ir.InputBuffer)
        and _is_whole(operand, buffer)
        and sum(_count_uses(node) for node in _nodes_that_share(names)) <= 1
    )


def _is_whole(operand: Any, buffer: Any) -> bool:
    """Whether an operand is a buffer, or a reshape of a whole contiguous one."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    while isinstance(operand, ir.MutableBox):
        operand = operand.data
    if not isinstance(operand, ir.BaseView):
        return True
    return (
        ir.is_contiguous_storage_and_layout(operand)
        and buffer.get_layout().is_contiguous()
        and V.graph.sizevars.statically_known_equals(operand.get_numel(), buffer.get_numel())
    )


def _nodes_that_share(names: set[str]) -> Iterator[torch.fx.Node]:
    """Yield the FX nodes with a value in the memory of the named buffers."""
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_leaves

    for node, value in V.graph.env.items():
        if any(not names.isdisjoint(_memory_names(leaf)) for leaf in tree_leaves(value)):
            yield node


def _count_uses(node: torch.fx.Node) -> int:
    """Return how often the current node and the nodes after it use the value of a node."""
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_leaves

    current = V.graph.current_node
    if node.graph is not current.graph:
        return 2  # the order of nodes of two graphs is unknown
    uses = 0
    for user in node.users:
        if not user < current:
            uses += tree_leaves((user.args, user.kwargs)).count(node)
    return uses


def _memory_names(value: Any) -> set[str]:
    """Return the buffers whose memory a value of Inductor's IR is in; none if it has no memory."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    names: set[str] = set()
    pending = [_unwrap(value)]
    while pending:
        buffer = pending.pop()
        if isinstance(buffer, ir.Buffer) and buffer.get_name() not in names:
            names.add(buffer.get_name())
            shared = (*buffer.get_inputs_that_alias_output(), *buffer.get_mutation_names())
            pending += [_unwrap(V.graph.try_get_buffer(name)) for name in shared]
    return names


def _unwrap(value: Any) -> Any:
    from torch._inductor import ir

    while isinstance(value, (ir.MutableBox, ir.BaseView)):
        value = value.data
    return value
