"""Fixes for patterns of the joint graph that match more than they can replace.

Patterns ignore integers, such as the dimensions of a `softmax`. Inductor checks a match again with
the exact pattern, but not if the pattern was compiled in advance, as those of attention are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.hooks.upstream_fixes import graph_nodes

if TYPE_CHECKING:
    from torch.fx import Node

Check = Callable[[Any], bool]
Trace = Callable[[], "Node"]

_MATCHER = "torch._inductor.pattern_matcher"

HOOKS = (
    Hook(
        "pattern_checks",
        "replaced",
        ("torch._inductor.fx_passes.joint_graph.lazy_init",),
        "hooks.upstream_fixes.graph_pattern_checks",
        "Registers patterns, when the first joint graph is compiled. Attention with another "
        "dimension of the softmax or another permutation of the keys matches, and so does "
        "`x[torch.randperm(n)]`, for which the replacement lacks an argument.",
        relies_on=(
            f"{_MATCHER}._known_precompiled_patterns",
            f"{_MATCHER}.gen_pattern_and_search_gm",
            f"{_MATCHER}.ReplacementPatternEntry",
        ),
        upstream="195320, 183988, 158457",
    ),
)

_MARK = "_inductor_ext_checked"

_WITH_DIMENSIONS = frozenset(
    {"permute", "transpose", "_softmax", "amax", "sum", "unsqueeze", "squeeze", "select", "slice"}
)
"""Operators whose integers are dimensions, which do not depend on sizes."""


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"pattern_checks": _dispatch_lazy_init})


def _dispatch_lazy_init(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def lazy_init(*args: Any, **kwargs: Any) -> None:
        stock(*args, **kwargs)
        if context.settings() is not None:
            _add_checks()

    return lazy_init


def _add_checks() -> None:
    """Add a check to the registered patterns that need one, once per pattern."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    matchers = (joint_graph.patterns, post_grad.pass_patterns[1])
    entries = [*itertools.chain.from_iterable(e for m in matchers for e in m.patterns.values())]
    new = [entry for entry in entries if not hasattr(entry, _MARK)]
    if not new:
        return
    precompiled = _find_attention_patterns()
    for entry in new:
        setattr(entry, _MARK, True)
        check = getattr(entry, "extra_check", None)
        if check is None:
            continue
        if id(entry.pattern) in precompiled:
            entry.extra_check = _check_dimensions(check, precompiled[id(entry.pattern)])
        elif _is_whole_permutation(entry.pattern):
            entry.extra_check = _refuse(check)


def _find_attention_patterns() -> dict[int, Trace]:
    """Return the functions that trace the patterns of attention, by the identity of the pattern."""
    from torch._inductor import pattern_matcher

    traces: dict[int, Trace] = {}
    for entry in pattern_matcher._known_precompiled_patterns:
        # A tuple until torch 2.13, and then a record with these fields.
        search_fn, inputs, _, numbers, pattern = (
            entry if isinstance(entry, tuple) else vars(entry).values()
        )
        if search_fn.__name__.startswith("_sfdp_"):
            trace = functools.partial(_trace_pattern, search_fn, inputs, numbers)
            traces[id(pattern)] = functools.cache(trace)
    return traces


def _trace_pattern(search_fn: Any, inputs: Any, numbers: Any) -> Node:
    """Return the result of a pattern, in the forward graph of its example inputs.

    The forward part of a joint graph has the same operators.
    """
    import torch
    from torch._inductor.pattern_matcher import fwd_only, gen_pattern_and_search_gm
    from torch._inductor.virtualized import V

    def copy_tensor(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    # A package is compiled without a tracing context, which would have a fake mode too.
    with V.fake_mode:
        # The example inputs are tensors of another fake mode.
        inputs = torch.utils._pytree.tree_map_only(torch.Tensor, copy_tensor, inputs)
        _, gm = gen_pattern_and_search_gm(search_fn, inputs, fwd_only, numbers)
    for node in gm.graph.nodes:
        node.meta.clear()  # the values refer to the fake mode
    results: Any = gm.graph.output_node().args[0]
    result: Node = results[0] if isinstance(results, (list, tuple)) else results
    return result


def _is_whole_permutation(pattern: Any) -> bool:
    """Whether a pattern indexes a tensor with all numbers of a `randperm`."""
    text = repr(pattern)
    return "aten.randperm." in text and "aten.index.Tensor" in text and "aten.slice." not in text


def _refuse(stock: Check) -> Check:
    @functools.wraps(stock)
    def check(match: Any) -> bool:
        return context.settings() is None and stock(match)

    return check


def _check_dimensions(stock: Check, trace: Trace) -> Check:
    @functools.wraps(stock)
    def check(match: Any) -> bool:
        if not stock(match):
            return False
        return context.settings() is None or has_same_dimensions(match.output_node(), trace())

    return check


def has_same_dimensions(node: Node, pattern: Node) -> bool:
    """Whether a node computes what the node of a traced pattern does, sizes aside."""
    compared = set()
    pairs = [(node, pattern)]
    while pairs:
        node, pattern = pair = pairs.pop()
        if pattern.op == "placeholder" or pair in compared:
            continue
        compared.add(pair)
        if node.target != pattern.target or len(node.args) != len(pattern.args):
            return False
        if graph_nodes.operator_name(node) in _WITH_DIMENSIONS:
            rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
            if _dimensions(node, rank) != _dimensions(pattern, rank):
                return False
        pairs += zip(node.all_input_nodes, pattern.all_input_nodes, strict=False)
    return True


def _dimensions(node: Node, rank: int) -> list[Any]:
    """The second argument of a node, as numbers that are not negative."""
    dims = node.args[1] if len(node.args) > 1 else ()
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return [dim % rank if isinstance(dim, int) else dim for dim in dims]
