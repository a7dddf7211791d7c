"""Replaces attention of a few queries to many keys by calls of the kernels for it.

The kernels are called as user-defined Triton kernels, which Inductor can put into wrappers in
Python and C++, packages and CUDA graphs. `match_attention` finds the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from inductor_ext import events
from inductor_ext.hooks import context
from inductor_ext.lowerings.graph.cleanup import erase_unused
from inductor_ext.lowerings.graph.match_attention import AttentionCall, find_decode_attention
from inductor_ext.lowerings.records import AttentionRecord
from inductor_ext.settings import Settings
from inductor_ext.templates.tensors import next_power_of_two
from inductor_ext.templates.triton import decode_attention as rules
from inductor_ext.templates.triton.decode_attention import DecodeAttention, DecodeConfig


def replace_decode_attention(graph: fx.Graph, settings: Settings) -> int:
    """Replace the operators of a graph, after all other passes; return how many.

    GPUs without bfloat16 matrix instructions keep torch's operators.
    """
    replaced = 0
    # From the last to the first: a result that is the operand of a later call still exists then.
    for call in sorted(find_decode_attention(graph), key=lambda call: call.operator, reverse=True):
        properties = torch.cuda.get_device_properties(call.result.meta["val"].device)
        if properties.major >= 8:
            config = rules.choose(call.problem, properties.multi_processor_count)
            record = AttentionRecord(
                module=events.module_path(call.operator.meta),
                changes=(_describe(call.problem, config),),
            )
            _replace(graph, call, config)
            events.emit(record, event_log=settings.event_log)
            replaced += 1
    return replaced


def _describe(problem: DecodeAttention, config: DecodeConfig) -> str:
    groups = f", {problem.heads} of keys" if problem.group > 1 else ""
    return (
        f"a kernel for {problem.queries} queries and {problem.length} keys, "
        f"{problem.heads * problem.group} heads{groups}, {config.splits} CTAs per head"
    )


def _replace(graph: fx.Graph, call: AttentionCall, config: DecodeConfig) -> None:
    problem, result = call.problem, call.result
    value = result.meta["val"]
    pairs = problem.batch * problem.heads
    with graph.inserting_before(result):
        tensors = {
            "query": call.query,
            "key": call.key,
            "value": call.value,
            "out": _add_empty(graph, value),
        }
        if call.bias is not None:
            tensors["bias"] = call.bias
        values = {name: node.meta["val"] for name, node in tensors.items()}
        attend, combine = constants_of(problem, config, call.scale, **values)
        if config.splits > 1:
            size = (pairs, config.splits, problem.rows, rules.round_up(problem.value_size))
            sums = value.new_empty(size, dtype=torch.float32)
            stats = value.new_empty((*size[:2], 2, problem.rows), dtype=torch.float32)
            tensors |= {"sums": _add_empty(graph, sums), "stats": _add_empty(graph, stats)}
        absent = dict.fromkeys({"bias", "sums", "stats"} - tensors.keys())
        _add_call(graph, "attend", config, (pairs, config.splits), tensors, {**absent, **attend})
        if config.splits > 1:
            parts = {name: tensors[name] for name in ("sums", "stats", "out")}
            _add_call(graph, "combine", config, (pairs, problem.rows), parts, combine)
    result.replace_all_uses_with(tensors["out"])
    operator = call.operator
    operands = operator.all_input_nodes
    for unused in (*operator.users, operator):
        graph.erase_node(unused)
    for operand in operands:
        erase_unused(operand)


def constants_of(
    problem: DecodeAttention,
    config: DecodeConfig,
    scale: float,
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `attend` and of `combine` that are no tensors.

    Args:
        problem: sizes.
        config: how the kernel runs.
        scale: multiplies the scores, the dots of queries and keys.
        query: [batch, query heads, queries, size]; only the strides of tensors are read.
        key: [batch, heads, keys, size].
        value: [batch, heads, keys, value size].
        out: [batch, query heads, queries, value size].
        bias: broadcast to [batch, query heads, queries, keys].
    """
    both = {
        "HEADS": problem.heads,
        "QUERIES": problem.queries,
        "ROWS": problem.rows,
        "VALUE_SIZE": problem.value_size,
        "BLOCK_V": rules.round_up(problem.value_size),
        "SPLITS": config.splits,
        **_name_strides("OUT", "BHM", out.stride()),
    }
    added = (0, 0, 0, 0) if bias is None else _broadcast_strides(bias)
    attend = {
        **both,
        **_name_strides("QUERY", "BHM", query.stride()),
        **_name_strides("KEY", "BHN", key.stride()),
        **_name_strides("VALUE", "BHN", value.stride()),
        **_name_strides("BIAS", "BHMN", added),
        "length": problem.length,
        "share": rules.share(problem.length, config),
        "SCALE": scale,
        "SIZE": problem.size,
        "BLOCK_M": rules.round_up(problem.rows),
        "BLOCK_N": config.block_n,
        "BLOCK_K": rules.round_up(problem.size),
        "BIAS": 0 if bias is None else 2 if added[1] or added[2] else 1,
    }
    return attend, {**both, "BLOCK_SPLITS": next_power_of_two(config.splits)}


def _name_strides(name: str, axes: str, strides: Iterable[int]) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides, strict=False)}


def _broadcast_strides(bias: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a bias, 0 where it is broadcast, also of dimensions that it lacks."""
    strides = (
        0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True)
    )
    return (*[0] * (4 - bias.dim()), *strides)


def _add_empty(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    node = graph.call_function(
        torch.ops.aten.empty_strided.default,
        (list(value.shape), list(value.stride())),
        {"dtype": value.dtype, "device": value.device},
    )
    node.meta["val"] = value
    return node


def _add_call(
    graph: fx.Graph,
    name: str,
    config: DecodeConfig,
    grid: tuple[int, int],
    tensors: Mapping[str, fx.Node],
    constants: Mapping[str, Any],
) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_mutation,
    )

    warps, stages = (config.warps, config.stages) if name == "attend" else (2, 1)
    kwargs: dict[str, Any] = {
        "kernel_idx": kernel_side_table.add_kernel(_kernel(name, warps, stages)),
        "constant_args_idx": kernel_side_table.add_constant_args(dict(constants)),
        "grid": [(*grid, 1)],
        "tma_descriptor_metadata": {},
        "kwargs": dict(tensors),
    }
    node = graph.call_function(triton_kernel_wrapper_mutation, (), kwargs)
    node.meta["val"] = None
    # Inductor gives the operands these strides.
    values = {name: tensor.meta["val"] for name, tensor in tensors.items()}
    node.meta["eager_input_vals"] = ((), {**kwargs, "kwargs": values})


@functools.cache
def _kernel(name: str, warps: int, stages: int) -> Any:
    """Return a kernel with launch options; always the same object, which Inductor compiles once."""
    import triton

    from inductor_ext.templates.triton.kernels import decode_attention

    options = triton.Config({}, num_warps=warps, num_stages=stages)
    return triton.autotune(configs=[options], key=[])(getattr(decode_attention, name))


def remember_accesses(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Cache Inductor's analysis of what a Triton kernel reads and writes, for these kernels.

    The analysis compiles a kernel to Triton IR, for every call of it, twice.
    """
    results: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(stock)
    def identify(kernel: Any, kwargs: Mapping[str, Any], *args: Any) -> Any:
        if context.settings() is None:
            return stock(kernel, kwargs, *args)
        from inductor_ext.templates.triton.kernels import decode_attention

        # The kernel, with or without launch options.
        function = kernel
        while hasattr(function, "fn"):
            function = function.fn
        if function not in (decode_attention.attend.fn, decode_attention.combine.fn):
            return stock(kernel, kwargs, *args)
        # Sizes, strides, dtypes and launch options do not change what is accessed.
        key = (function, frozenset(name for name in kwargs if kwargs[name] is not None))
        if key not in results:
            results[key] = stock(kernel, kwargs, *args)
        return results[key]

    return identify
