"""Fixes for results that are views of an input.

AOTAutograd returns such a view by repeating its operators on the input, unless a size, an index or
an offset among their arguments is symbolic. It then takes sizes, strides and offset from what the
compiled graph computes. The graph is functional: it views the new value of the input, which has
other strides and no offset, and the caller gets other elements. `x.mul_(2); return x[n // 2:]` is
wrong for every `x` that is not contiguous or that has an offset. Here the graph views the input.

The compiled graph may view a copy of the input: one for CUDA graphs, or an aligned one. The copy
has no offset. Here the offset of the input is added.

If several inputs share memory, AOTAutograd passes one base of them, and repeats the operators on
this base instead of the input. Here it does not repeat them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_AOT = "torch._functorch._aot_autograd"
_OWNER = "hooks.upstream_fixes.returned_views"

HOOKS = (
    Hook(
        "returned_views",
        "changed",
        ("torch._inductor.compile_fx.compile_fx_inner",),
        _OWNER,
        "The graph that is passed here returns the metadata of views of inputs.",
        parameters=("gm",),
        relies_on=(
            f"{_AOT}.functional_utils.gen_alias_from_base",
            f"{_AOT}.schemas.OutputAliasInfo.view_meta_sequence",
            f"{_AOT}.schemas.InputAliasInfo.mutates_data",
            "torch.fx.passes.reinplace._is_view_op",
        ),
    ),
    Hook(
        "views_of_shared_inputs",
        "replaced",
        (f"{_AOT}.runtime_wrappers.create_synthetic_base_metadata",),
        _OWNER,
        "The operators that lead from an input to a result are repeated on the base that several "
        "inputs share.",
        parameters=("m", "synthetic_base_info"),
        relies_on=(f"{_AOT}.schemas.OutputAliasInfo.view_meta_sequence",),
    ),
    Hook(
        "views_of_copied_inputs",
        "replaced",
        (f"{_AOT}.runtime_wrappers.gen_alias_from_base",),
        _OWNER,
        "The offset of a view is read from the compiled graph, also if it views a copy.",
        parameters=(
            "aliased_base_tensor",
            "target_meta_tensor",
            "target_requires_grad",
            "target_view_meta_sequence",
        ),
    ),
)


class ViewOfInput:
    """Marks a result, in place of AOTAutograd's list of operators that lead to it from an input."""

    sequence = ()
    """The operators to repeat: none. AOTAutograd reads this attribute."""


def install_hooks() -> None:
    """Install the dispatchers, once per process; `compile_fx` calls `view_inputs`."""
    dispatchers: dict[str, registry.MakeDispatcher] = {
        "views_of_shared_inputs": _dispatch_synthetic_bases,
        "views_of_copied_inputs": _dispatch_alias,
    }
    registry.install([hook for hook in HOOKS if hook.name in dispatchers], dispatchers)


def _dispatch_synthetic_bases(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create_synthetic_base_metadata(
        m: Any, synthetic_base_info: Any, *args: Any, **kwargs: Any
    ) -> Any:
        metadata, indices = stock(m, synthetic_base_info, *args, **kwargs)
        if context.settings() is not None:
            for index, info in enumerate(m.output_info):
                if _is_view_of_shared_input(info, synthetic_base_info):
                    metadata.output_info[index] = dataclasses.replace(
                        metadata.output_info[index], view_meta_sequence=None
                    )
        return metadata, indices

    return create_synthetic_base_metadata


def _is_view_of_shared_input(info: Any, synthetic_base_info: Any) -> bool:
    is_input = info.output_type.name in ("alias_of_input", "is_input")
    # An input that shares no memory with another one has an integer.
    return is_input and isinstance(synthetic_base_info[info.base_idx], tuple)


def _dispatch_alias(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def gen_alias_from_base(
        base: Any, target: Any, requires_grad: bool, views: Any = None, *, replay_views: bool
    ) -> Any:
        if type(views) is ViewOfInput:
            target, views = _add_offset(target, base), None
        return stock(base, target, requires_grad, views, replay_views=replay_views)

    return gen_alias_from_base


def _add_offset(view: Any, source: Any) -> Any:
    """Return a view with the memory of `source`, if it is one of a copy of `source`."""
    storage = source.untyped_storage()
    if view.untyped_storage()._cdata == storage._cdata:
        return view
    offset = source.storage_offset() * source.itemsize // view.itemsize + view.storage_offset()
    return view.new_empty(0).set_(storage, offset, view.size(), view.stride())


def view_inputs(gm: Any) -> None:
    """Let a forward graph return views of changed inputs, where AOTAutograd reads their strides.

    Args:
        gm: the functional graph that Inductor compiles.
    """
    from inductor_ext.hooks.upstream_fixes import graph_nodes

    metadata = graph_nodes.find_metadata(gm.graph) if hasattr(gm, "graph") else None
    if metadata is None or not metadata.num_outputs_aliased:
        return
    output = gm.graph.output_node()
    inputs = gm.graph.find_nodes(op="placeholder")[len(metadata.tokens) :]
    # The inputs of tensor subclasses are several tensors each.
    if not isinstance(output.args[0], (list, tuple)) or len(inputs) != len(metadata.input_info):
        return
    results, start = list(output.args[0]), graph_nodes.first_result(metadata)
    # Torch 2.14 has recorded the strides that results must have.
    strides = output.meta.get("original_output_strides", [None] * len(results))
    is_changed = False
    for index, info in _find_views(metadata):
        metadata.output_info[index] = dataclasses.replace(info, view_meta_sequence=ViewOfInput())
        if not metadata.input_info[info.base_idx].mutates_data:
            continue
        source = inputs[info.base_idx]
        new_values = _find_new_values(source, results[len(metadata.tokens) :], info, metadata)
        view = _repeat_views(gm.graph, results[start + index], source, new_values)
        if view is not None:
            results[start + index] = view
            strides[start + index] = view.meta["val"].stride()
            is_changed = True
    if is_changed:
        output.args = (type(output.args[0])(results),)
        gm.recompile()


def _find_views(metadata: Any) -> Iterator[tuple[int, Any]]:
    """Yield what AOTAutograd knows of results that view an input and are not repeated on it."""
    import torch._functorch.config

    repeats = torch._functorch.config.view_replay_for_aliased_outputs
    for index, info in enumerate(metadata.output_info):
        if info.output_type.name != "alias_of_input":
            continue
        views = info.view_meta_sequence
        is_repeated = repeats and views is not None and not isinstance(views, ViewOfInput)
        if not is_repeated or any(view.has_symbolic_inputs for view in views.sequence):
            yield index, info


def _find_new_values(source: Any, results: Any, info: Any, metadata: Any) -> list[Any]:
    """The nodes that compute an input's new value, which the graph writes or returns."""
    import torch

    copy = torch.ops.aten.copy_.default
    written = [u.args[1] for u in source.users if u.target is copy and u.args[0] is source]
    indices = metadata.mutated_inp_runtime_indices
    if info.base_idx in indices:
        written.append(results[indices.index(info.base_idx)])
    return written


def _repeat_views(graph: Any, result: Any, source: Any, new_values: list[Any]) -> Any:
    """Repeat the views that lead to a result on an input, and return the last one.

    None if the result is a view of the input already, or is not found to be one of its new value.
    """
    views = []
    node = result
    while node not in new_values:
        if node is None or node is source:
            return None
        views.append(node)
        node = _viewed_node(node)
    value = source
    with graph.inserting_before(graph.output_node()):
        for view in reversed(views):
            value = graph.call_function(view.target, (value, *view.args[1:]), view.kwargs)
            value.meta = dict(view.meta)
            value.meta["val"] = _compute_value(value)
    return value


def _viewed_node(node: Any) -> Any:
    """The tensor that a node views, or the node whose result it picks; None if there is none."""
    from torch.fx.passes.reinplace import _is_view_op

    if node.target is operator.getitem:
        return node.args[0]
    is_view = node.op == "call_function" and _is_view_op(node.target)
    return node.args[0] if is_view else None


def _compute_value(node: Any) -> Any:
    import torch

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)
