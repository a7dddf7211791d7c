"""A fix for concatenations that are overwritten in place.

Inductor computes the operands of a concatenation in slices of its memory. It does not know that a
write into the concatenation, by a custom operator or by an operator that was made in-place, then
also changes an operand, which may be read later. Here the concatenation gets copies of operands
that others read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import lowering_table
from inductor_ext.hooks.registry import Hook

if TYPE_CHECKING:
    from torch.fx import Node

HOOKS: tuple[Hook, ...] = ()


def install_hooks() -> None:
    """Register the lowering, once per process."""
    import torch

    lowering_table.register_once(_lower_cat, torch.ops.aten.cat.default)


def _lower_cat(stock: Callable[..., Any], inputs: Sequence[Any], dim: int = 0) -> Any:
    import torch
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    from inductor_ext.lowerings import chunked_cat

    node = V.graph.current_node
    # The lowerings of other operators call this one, too, with operands of their own.
    if node.target is torch.ops.aten.cat.default and _is_overwritten(node):
        operands: Any = node.args[0]
        inputs = [
            lowering.clone(value) if _is_read_elsewhere(operand) else value
            for operand, value in zip(operands, inputs, strict=True)
        ]
    if chunked_cat.is_chunked(node, inputs):
        return chunked_cat.join_chunks(inputs, dim)
    return stock(inputs, dim)


def _is_overwritten(node: Node) -> bool:
    """Whether an operator writes into the memory of a node."""
    import torch

    pending = list(node.users)
    while pending:
        user = pending.pop()
        schema = getattr(user.target, "_schema", None)
        if user.target is torch.ops.higher_order.triton_kernel_wrapper_mutation:
            return True
        if schema is not None and schema.is_mutable:
            return True
        if _is_view(user):
            pending += user.users
    return False


def _is_read_elsewhere(operand: Node) -> bool:
    """Whether something else than one node reads the memory of an operand."""
    while len(operand.users) == 1:
        if not _is_view(operand):
            return False
        operand = operand.all_input_nodes[0]
    return True


def _is_view(node: Node) -> bool:
    import operator

    import torch
    from torch.fx.passes.reinplace import _is_view_op

    more = (operator.getitem, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)
    return node.op == "call_function" and bool(node.target in more or _is_view_op(node.target))
