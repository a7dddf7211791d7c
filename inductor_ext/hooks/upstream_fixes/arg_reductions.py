"""Fixes for `argmin` and `argmax` over several dimensions, and for the indices of pooling."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from inductor_ext.hooks import context, lowering_table, registry
from inductor_ext.hooks.registry import Hook

HOOKS = (
    Hook(
        "row_major_index",
        "replaced",
        ("torch._inductor.lowering._make_reduction_inner",),
        "hooks.upstream_fixes.arg_reductions",
        "A kernel reports its own iteration index, which is the row-major index only if it "
        "iterates the input in row-major order. Inductor decides that before it has fixed the "
        "order, and only for some inputs.",
        parameters=("axis", "keepdims", "reduction_type"),
        upstream="193751",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    import torch

    aten = torch.ops.aten
    registry.install(HOOKS, {"row_major_index": _dispatch_row_major_index})
    # What is left of these operators after decomposition has large windows.
    pooling = aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default
    lowering_table.register_once(_lower_max_pool, *pooling)


def _dispatch_row_major_index(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _make_reduction_inner(x: Any, **kwargs: Any) -> Any:
        reduction = stock(x, **kwargs)
        if context.settings() is None or kwargs.get("reduction_type") not in ("argmax", "argmin"):
            return reduction
        sizes = reduction["reduction_ranges"]
        if len(sizes) < 2 or _is_stored_row_major(x):
            return reduction
        if not _can_report_index(x):
            return stock(_store_row_major(x), **kwargs)
        reduction["inner_fn"] = _report_index(reduction["inner_fn"], sizes)
        return reduction

    return _make_reduction_inner


def _lower_max_pool(stock: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower a pooling, whose indices are those of `argmax` over the elements of each window."""
    if not _is_stored_row_major(x):
        x = _store_row_major(x)
    return stock(x, *args, **kwargs)


def _can_report_index(x: Any) -> bool:
    """Whether the kernels of the input's device take an index with each value."""
    import inspect

    import torch
    from torch._inductor import config
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.ir import is_triton

    if x.get_device() == torch.device("cpu") and config.cpu_backend == "cpp":
        # C++ kernels of torch 2.11 do not.
        return "logical_index" in inspect.unwrap(CppKernel.reduction).__code__.co_varnames
    return is_triton(x)


def _is_stored_row_major(x: Any) -> bool:
    """Whether the input is a buffer with a fixed contiguous layout."""
    from torch._inductor import ir

    storage = x.data
    if not isinstance(storage, ir.StorageBox) or not isinstance(storage.data, ir.Buffer):
        return False
    layout = storage.data.layout
    return isinstance(layout, ir.FixedLayout) and bool(layout.is_contiguous())


def _store_row_major(x: Any) -> Any:
    """Return the input in a contiguous buffer, which kernels iterate in row-major order."""
    from torch._inductor import ir

    return ir.ExternKernel.require_contiguous_strides(x)


def _report_index(load: Callable[..., Any], sizes: Sequence[Any]) -> Callable[..., Any]:
    """Return a loader of values with their row-major indices."""
    import torch
    from torch._inductor.virtualized import ops

    def load_with_index(index: Sequence[Any], reduction_index: Sequence[Any]) -> Any:
        value = load(index, reduction_index)
        if isinstance(value, tuple):
            return value
        first, *others = reduction_index
        pairs = zip(others, itertools.islice(sizes, 1, None), strict=True)
        linear = functools.reduce(lambda total, pair: total * pair[1] + pair[0], pairs, first)
        return value, ops.index_expr(linear, torch.int64)

    return load_with_index
