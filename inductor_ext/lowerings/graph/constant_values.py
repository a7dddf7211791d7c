"""Values of nodes that depend on no input, such as the masks that models make for attention.

The graph is the one that Inductor's pre-grad passes read: that of dynamo or of an exported program,
before AOTAutograd. Operators in it may write in place. A value is therefore computed only if it and
all that is made of it is read by operators of the lists below, none of which writes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

MAX_NODES = 256
"""Nodes that a value may depend on."""

MAX_BYTES = 2**27
"""Memory of a value while the model is compiled."""

_VIEWS = frozenset(
    {
        *("alias", "contiguous", "detach", "expand", "expand_as", "flatten", "getitem", "narrow"),
        *("permute", "reshape", "select", "slice", "squeeze", "to", "_to_copy", "transpose"),
        *("type_as", "unsqueeze", "view", "bool", "int", "long", "float", "half", "bfloat16"),
    }
)
"""Operators whose result may share memory with the operand."""

_OPERATORS = frozenset(
    {
        *("arange", "full", "ones", "zeros"),
        *("clone", "where", "masked_fill", "tril", "triu", "index"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "invert"),
        *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
        *("__and__", "__or__", "__xor__", "__invert__"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"),
        *("add", "sub", "rsub", "mul", "neg", "abs", "floordiv", "mod", "diff", "cumsum"),
        *("minimum", "maximum", "clamp", "any", "all"),
    }
)
"""Operators with a result of its own, which is the same on every device."""

_LIKE = frozenset({"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"})
"""Operators that read only sizes and dtype of their first operand."""

_READERS = frozenset(
    {"scaled_dot_product_attention", "embedding", "matmul", "_assert_tensor_metadata"}
)
"""Further operators that only read, at least their first operand."""

_MODULES = (operator, torch, torch.nn.functional, torch._C._nn)


def evaluate(node: fx.Node) -> torch.Tensor | None:
    """Return the value of a node on the CPU; None if it depends on an input or is not known.

    Args:
        node: of a graph whose nodes have fake tensors (see `fake_value`). Sizes that are symbols
            are inputs.
    """
    nodes = _find_ancestors(node)
    expected = fake_value(node)
    if nodes is None or expected is None or not all(map(_is_only_read, nodes)):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"):
        for ancestor in node.graph.nodes:
            if ancestor in nodes:
                values[ancestor] = _compute(ancestor, values)
    value = values[node]
    is_expected = (
        isinstance(value, torch.Tensor)
        and value.shape == expected.shape
        and value.dtype == expected.dtype
    )
    return value if is_expected else None


def fake_value(node: Any) -> torch.Tensor | None:
    """Return the tensor that dynamo or torch.export recorded for a node, if any."""
    meta: Mapping[str, Any] = node.meta if isinstance(node, fx.Node) else {}
    value = meta.get("example_value", meta.get("val"))
    return value if isinstance(value, torch.Tensor) else None


def _find_ancestors(node: fx.Node) -> set[fx.Node] | None:
    """Return a node and what it depends on; None if one of them cannot be computed."""
    found, pending = {node}, [node]
    while pending:
        ancestor = pending.pop()
        name = _name(ancestor)
        value = fake_value(ancestor)
        if name not in _VIEWS | _OPERATORS | _LIKE:
            return None
        if value is None or not _is_small(value):
            return None
        if name == "cumsum" and value.dtype.is_floating_point:
            # The order of summation differs between devices.
            return None
        sources = ancestor.all_input_nodes
        if name in _LIKE:
            value = fake_value(sources.pop(0))
            if value is None or not _is_small(value):
                return None
        new = set(sources) - found
        found |= new
        pending += new
        if len(found) > MAX_NODES:
            return None
    return found


def _is_small(value: torch.Tensor) -> bool:
    sizes = (*value.shape, *value.stride())
    if not all(isinstance(size, int) for size in sizes):
        return False
    return value.untyped_storage().nbytes() <= MAX_BYTES


def _is_only_read(node: fx.Node) -> bool:
    """Whether no operator writes into a node or a view of it."""
    found, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            name = _name(user)
            if name in _VIEWS and user not in found:
                found.add(user)
                pending.append(user)
            elif user.op == "output":
                continue
            elif name not in _VIEWS | _OPERATORS | _LIKE | _READERS or "out" in user.kwargs:
                return False
    return True


def _name(node: fx.Node) -> str | None:
    """Return the name of torch's operator or method that a node calls; None for all others."""
    target = node.target
    if node.op == "call_method":
        # Python's name; those of methods that write end with an underscore.
        name = str(target)
        return None if name in ("and_", "or_") else name
    if node.op != "call_function":
        return None
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace == "aten" and not target._schema.is_mutable else None
    name = getattr(target, "__name__", "")
    return name if any(getattr(module, name, None) is target for module in _MODULES) else None


def _compute(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    def value_of(operand: fx.Node) -> Any:
        return values[operand] if operand in values else _make_alike(operand)

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value_of)
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.device, lambda _: torch.device("cpu"), (args, kwargs)
    )
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _make_alike(operand: fx.Node) -> torch.Tensor:
    """Return a tensor with the sizes and the dtype of an operand of `_LIKE`."""
    value: Any = fake_value(operand)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
