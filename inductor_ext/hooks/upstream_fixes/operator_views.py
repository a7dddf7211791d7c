"""Fixes for custom operators that overwrite a view which AOTAutograd cannot describe.

AOTAutograd replaces the call of an operator that mutates a view by one that gets the base of the
view and the view's sizes and strides. There are three cases in which the call mutates other
elements than the program does, or memory behind the base:

- The base has another dtype, as that of `x.real`.
- A view by `x.view(dtype)` is a base of its own. Of several views of `x`, only what the operator
  writes into the last one is kept.
- The view has been created before its base got a new value of other strides: `row = x[1]`, then
  `x.mul_(2)`, for an `x` with gaps between its rows. The strides are those of the old value.

Here such an operand is copied, and the operator's values are written back through the view.

Inductor computes a view of another dtype in the kernels that read it, unless its base is in memory
when the view is created. An operator then writes into a copy, which Inductor cannot write back.
Here the base is computed first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from inductor_ext import exc
from inductor_ext.hooks import context, lowering_table, registry
from inductor_ext.hooks.registry import Hook

_FUNCTIONALIZE = "torch._higher_order_ops.auto_functionalize"
_OWNER = "hooks.upstream_fixes.operator_views"

HOOKS = (
    Hook(
        "operands_of_another_dtype",
        "replaced",
        (f"{_FUNCTIONALIZE}.do_auto_functionalize_v2",),
        _OWNER,
        "A view that an operator mutates is passed as its base with sizes and strides, which count "
        "elements of the base's dtype, and which the base's new value may not have.",
        parameters=("mode", "op", "args", "kwargs"),
        relies_on=(
            f"{_FUNCTIONALIZE}.get_base",
            f"{_FUNCTIONALIZE}.is_alias",
            f"{_FUNCTIONALIZE}.try_use_slice",
        ),
    ),
)


def install_hooks() -> None:
    """Install the dispatcher and register the lowering, once per process."""
    import torch

    registry.install(HOOKS, {"operands_of_another_dtype": _dispatch_functionalize})
    lowering_table.register_once(_lower_view, torch.ops.aten.view.dtype)


def _dispatch_functionalize(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def do_auto_functionalize_v2(mode: Any, op: Any, args: Any, kwargs: Any) -> Any:
        import torch

        if context.settings() is None or not isinstance(op, torch._ops.OpOverload):
            return stock(mode, op, args, kwargs)
        views = _find_views(mode, op, args, kwargs)
        if not views:
            return stock(mode, op, args, kwargs)
        _refuse_shared_memory(op, args, kwargs, views)
        with mode:
            copies = {key: view.clone() for key, view in views.items()}
        results = stock(mode, op, *_replace(args, kwargs, views, copies))
        with mode:
            for key, view in views.items():
                view.copy_(copies[key])
        return _replace_results(op, args, kwargs, results)

    return do_auto_functionalize_v2


def _find_views(mode: Any, op: Any, args: Any, kwargs: Any) -> dict[int, Any]:
    """The mutated operands that AOTAutograd cannot describe by their base, by identity."""
    operands = _find_tensors(_mutated_operands(op, args, kwargs))
    bases = [(_find_base(value), _find_memory(value)) for value in operands]
    views = {}
    for operand in operands:
        base, memory = _find_base(operand), _find_memory(operand)
        if (
            base.dtype != operand.dtype
            or any(other is not base and other_memory == memory for other, other_memory in bases)
            or not _is_described(mode, operand, base)
        ):
            views[id(operand)] = operand
    return views


def _is_described(mode: Any, view: Any, base: Any) -> bool:
    """Whether the description of a view of a base gives the view, applied to the base's value."""
    from torch._higher_order_ops import auto_functionalize
    from torch._subclasses.functional_tensor import PythonFunctionalizeAPI
    from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

    if view is base:
        return True
    api: Any = PythonFunctionalizeAPI(mode=mode)
    value, base_value = api.unwrap_tensors([view, base])
    if auto_functionalize.is_alias(base, view):
        strides, offset = base_value.stride(), base_value.storage_offset()
    elif (slice_ := auto_functionalize.try_use_slice(base, view)) is not None:
        dim, start, _ = slice_
        strides = base_value.stride()
        offset = base_value.storage_offset() + start * strides[dim]
    else:
        strides, offset = view.stride(), view.storage_offset()
    actual, described = (*value.stride(), value.storage_offset()), (*strides, offset)
    return bool(statically_known_true(sym_eq(actual, described)))


def _find_tensors(operands: Any) -> list[Any]:
    import torch

    leaves = torch.utils._pytree.tree_leaves(operands)
    return [value for value in leaves if isinstance(value, torch.Tensor)]


def _find_base(tensor: Any) -> Any:
    from torch._higher_order_ops.auto_functionalize import get_base

    base = get_base(tensor)
    return tensor if base is None else base


def _find_memory(tensor: Any) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def _mutated_operands(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The operands that an operator mutates, in the order of its schema."""
    operands = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if argument.name in kwargs:
            operands.append(kwargs[argument.name])
        elif index < len(args):
            operands.append(args[index])
    return operands


def _refuse_shared_memory(op: Any, args: Any, kwargs: Any, views: dict[int, Any]) -> None:
    """Raise UnsupportedMutationError if another operand may share elements with one to copy."""
    tensors = _find_tensors((args, kwargs))
    for view in views.values():
        # An operand that is passed twice is two operands.
        if sum(_may_overlap(value, view) for value in tensors) > 1:
            raise exc.UnsupportedMutationError(
                operator=op,
                why="it overwrites a view that has another dtype than its base, or several views "
                "by view(dtype) or detach(), or a view created before a tensor with gaps got a new "
                "value, and another operand shares the memory",
                fix="Call the operator with a clone of the view, and then copy the clone into the "
                "view.",
            )


def _may_overlap(first: Any, second: Any) -> bool:
    if _find_memory(first) != _find_memory(second):
        return False
    spans = [_find_bytes(value) for value in (first, second)]
    (start, length, strides), (other_start, other_length, other_strides) = spans
    numbers = (start, length, other_start, other_length, *strides, *other_strides)
    if not all(isinstance(number, int) for number in numbers):
        return True
    if start + length <= other_start or other_start + other_length <= start:
        return False
    # All elements of a tensor begin at `start` plus multiples of `step`.
    step = math.gcd(*strides, *other_strides)
    if not step:
        return True
    distance = (other_start - start) % step
    return bool(distance < first.itemsize or step - distance < second.itemsize)


def _find_bytes(value: Any) -> tuple[Any, Any, list[Any]]:
    """First byte, number of bytes from there to the last one, and strides in bytes of a tensor."""
    size = value.itemsize
    dims = [(n, stride * size) for n, stride in zip(value.shape, value.stride(), strict=True)]
    length = sum((n - 1) * stride for n, stride in dims) + size
    return value.storage_offset() * size, length, [stride for _, stride in dims]


def _replace(
    args: Any, kwargs: Any, views: dict[int, Any], copies: dict[int, Any]
) -> tuple[Any, Any]:
    from torch.utils import _pytree as pytree

    return pytree.tree_map(  # type: ignore[no-any-return]
        lambda value: copies[id(value)] if id(value) in views else value, (args, kwargs)
    )


def _replace_results(op: Any, args: Any, kwargs: Any, results: Any) -> Any:
    """The results of a call, in which operands that the operator returns are the program's."""
    if not any(r.alias_info is not None for r in op._schema.returns):
        return results
    operands = _mutated_operands(op, args, kwargs)
    return tuple(operands) if isinstance(results, tuple) else operands[0]


def _lower_view(stock: Callable[..., Any], x: Any, dtype: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if _is_written(V.graph.current_node):
        x = ir.TensorBox(ir.ExternKernel.realize_input(x))
    return stock(x, dtype)


def _is_written(view: Any) -> bool:
    """Whether an operator or a user's Triton kernel may write into a view of a graph."""
    import torch

    pending = [view]
    while pending:
        node = pending.pop()
        for user in node.users:
            target = user.target
            if isinstance(target, torch._ops.HigherOrderOperator):
                return True
            if not isinstance(target, torch._ops.OpOverload):
                continue
            written = _mutated_operands(target, user.args, user.kwargs)
            if node in torch.utils._pytree.tree_leaves(written):
                return True
            if target.is_view:
                pending.append(user)
    return False
