"""Finds attention of a few queries to many keys, as decoders compute it with a cache.

torch's operators read keys and values with as many heads as queries. Models with grouped queries
therefore repeat them, `keys[:, :, None].expand(...).reshape(...)`, which copies the cache in every
layer. The match has the keys and values before that, and the bias before it is expanded.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from inductor_ext.lowerings.graph.fusion import is_written_between
from inductor_ext.lowerings.graph.fx_nodes import is_view
from inductor_ext.lowerings.graph.matmul_nodes import call_arguments
from inductor_ext.templates.triton.decode_attention import MAX_ROWS, MAX_SIZE, DecodeAttention

if TYPE_CHECKING:
    from torch import fx

MIN_LENGTH = 64
"""Keys below which launches take most of the time."""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """A call of one of torch's operators for attention, of which only the result is used."""

    result: fx.Node
    """The first result of the operator, [batch, query heads, queries, value size]."""
    query: fx.Node
    key: fx.Node
    value: fx.Node
    bias: fx.Node | None
    """Added to the scaled scores, broadcast to [batch, query heads, queries, keys]."""
    scale: float
    problem: DecodeAttention

    @property
    def operator(self) -> fx.Node:
        """The call, of which `result` is an item."""
        (node,) = self.result.all_input_nodes
        return node


def find_decode_attention(graph: fx.Graph) -> Iterator[AttentionCall]:
    """Yield the calls that a kernel for few queries computes faster: those with a bias, which
    torch's fastest kernels do not split among CTAs, and those with grouped queries.
    """
    import torch

    aten = torch.ops.aten
    for target in (
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
    ):
        for node in graph.find_nodes(op="call_function", target=target):
            call = _match(node)
            if call is not None and (call.bias is not None or call.problem.group > 1):
                yield call


def _match(node: fx.Node) -> AttentionCall | None:
    arguments = call_arguments(node)
    if arguments["dropout_p"] or arguments["is_causal"]:
        return None
    if any(user.target is not operator.getitem for user in node.users):
        return None
    results = [user for user in node.users if user.users]
    if len(results) != 1 or results[0].args[1] != 0:
        return None
    query = arguments["query"]
    (key, *copies), (value, *others) = (
        _skip_repetition(arguments[name]) for name in ("key", "value")
    )
    if is_written_between((node, *copies, *others)):
        # The copies have the old values.
        return None
    bias = _skip_expansion(arguments.get("attn_bias"))
    problem = _describe(query, key, value)
    if problem is None or not _has_dense_rows(query, key, value):
        return None
    scale = arguments["scale"]
    return AttentionCall(
        results[0],
        query,
        key,
        value,
        bias,
        problem.size**-0.5 if scale is None else float(scale),
        problem,
    )


def _describe(query: fx.Node, key: fx.Node, value: fx.Node) -> DecodeAttention | None:
    """Return the problem; None if the kernel does not support it, or it has other shapes."""
    import torch

    q, k, v = (node.meta["val"] for node in (query, key, value))
    sizes = (*q.shape, *k.shape, *v.shape, *q.stride(), *k.stride(), *v.stride())
    if not all(isinstance(size, int) for size in sizes) or {x.dim() for x in (q, k, v)} != {4}:
        return None
    if q.device.type != "cuda" or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    batch, query_heads, queries, size = q.shape
    _, heads, length, value_size = v.shape
    if k.shape != (batch, heads, length, size) or v.shape[0] != batch or query_heads % heads:
        return None
    problem = DecodeAttention(batch, heads, query_heads // heads, queries, length, size, value_size)
    fits = problem.rows <= MAX_ROWS and max(size, value_size) <= MAX_SIZE
    # Offsets in a head are 32-bit numbers.
    fits = fits and max(length * k.stride(2), length * v.stride(2)) < 2**31
    return problem if fits and length >= MIN_LENGTH and {k.dtype, v.dtype} == {q.dtype} else None


def _has_dense_rows(*nodes: fx.Node) -> bool:
    """Whether the elements of each head are adjacent."""
    return all(node.meta["val"].stride(3) == 1 for node in nodes)


def _skip_repetition(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the tensor whose heads are repeated, each for the query heads that are adjacent, and
    the nodes that repeat them.
    """
    import torch

    aten = torch.ops.aten
    if not is_view(node):
        return (node,)
    nodes = [node]
    expanded: Any = node.args[0]
    if expanded.target is aten.clone.default:
        nodes.append(expanded)
        expanded = expanded.args[0]
    if expanded.target is not aten.expand.default:
        return (node,)
    unsqueezed: Any = expanded.args[0]
    if unsqueezed.target is not aten.unsqueeze.default or unsqueezed.args[1] != 2:
        return (node,)
    source: Any = unsqueezed.args[0]
    before, repeated, after = (n.meta["val"].shape for n in (source, expanded, node))
    if len(before) != 4 or len(repeated) != 5:
        return (node,)
    batch, heads, group, *rest = repeated
    if (*before,) == (batch, heads, *rest) and (*after,) == (batch, heads * group, *rest):
        return (source, *nodes, expanded, unsqueezed)
    return (node,)


def _skip_expansion(bias: Any) -> Any:
    import torch

    while bias is not None and bias.target is torch.ops.aten.expand.default:
        if bias.args[0].meta["val"].dim() != bias.meta["val"].dim():
            break
        bias = bias.args[0]
    return bias
