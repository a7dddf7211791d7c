"""Fixes for sums and other reductions by index.

`index_add`, `scatter_add` and accumulating `index_put` become `tl.atomic_add`, which has no
integers of 8 and 16 bits: the kernel does not compile. Here torch's operator is called, as Inductor
does for the dtypes that it knows to be missing.

A number that `scatter` reduces into a tensor becomes a tensor of the size of the result. The index
may be larger, and torch's operator, if it is called, refuses it. Here the tensor has the size of
the index.

A C++ kernel that vectorizes two loops and adds by index with several threads doubles the position
in the outer tile: it adds to other elements, also outside of the result. Here the position is added
to the index once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_KERNEL = "torch._inductor.codegen.cpp.CppTile2DKernel"
_OWNER = "hooks.upstream_fixes.scatter_atomics"
_WHY = "Small integers count as dtypes that `tl.atomic_add` has. The kernel does not compile."

HOOKS = (
    Hook(
        "scatter_atomics",
        "replaced",
        ("torch._inductor.utils.needs_fallback_due_to_atomic_add_limitations",),
        _OWNER,
        _WHY,
        parameters=("dtype",),
        relies_on=("torch._inductor.utils.use_scatter_fallback",),
    ),
    Hook(
        "index_put_atomics",
        "replaced",
        ("torch._inductor.lowering.needs_fallback_due_to_atomic_add_limitations",),
        _OWNER,
        f"{_WHY} The function is imported by name.",
        parameters=("dtype",),
        relies_on=("torch._inductor.lowering.index_put_impl_",),
    ),
    Hook(
        "scattered_numbers",
        "replaced",
        ("torch._inductor.lowering.scatter_reduce_",),
        _OWNER,
        "A number that is scattered with a reduction becomes a tensor of the size of the result, "
        "which is too small for an index that is larger.",
        parameters=("self", "dim", "index", "src"),
        relies_on=("torch._inductor.lowering.full_like", "torch._inductor.lowering.scatter_"),
    ),
    Hook(
        "tiled_atomics",
        "replaced",
        (f"{_KERNEL}.store",),
        _OWNER,
        "A sum by index in a kernel with two tiled loops doubles the position in the outer tile: "
        "the method adds it to the index, and then the index expression does so again.",
        parameters=("name", "index", "value", "mode"),
        relies_on=(
            f"{_KERNEL}.need_vec_transpose",
            "torch._inductor.codegen.cpp.CppVecKernel.store",
            "torch._inductor.codegen.cpp.CppTile2DOverrides.index_expr",
        ),
        upstream="191837",
        until="2.15",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers: dict[str, Callable[[Any], Any]] = {
        "scatter_atomics": _dispatch_limitations,
        "index_put_atomics": _dispatch_limitations,
        "scattered_numbers": _dispatch_scatter_reduce,
        "tiled_atomics": _dispatch_store,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_limitations(stock: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(stock)
    def needs_fallback_due_to_atomic_add_limitations(dtype: Any) -> bool:
        if context.settings() is not None and not dtype.is_floating_point:
            return stock(dtype) or (dtype.itemsize < 4 and _is_lowered_for_gpu())
        return stock(dtype)

    return needs_fallback_due_to_atomic_add_limitations


def _dispatch_scatter_reduce(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def scatter_reduce_(
        self: Any, dim: int, index: Any, src: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if context.settings() is not None and isinstance(src, (bool, int, float, complex)):
            from torch._inductor import lowering

            src = lowering.full_like(index, src, dtype=self.get_dtype())
        return stock(self, dim, index, src, *args, **kwargs)

    return scatter_reduce_


def _dispatch_store(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> None:
        from torch._inductor.codegen import cpp

        if context.settings() is None or not _adds_atomically(self, index, mode):
            stock(self, name, index, value, mode)
        else:
            cpp.CppVecKernel.store(self, name, index, value, mode)

    return store


def _adds_atomically(kernel: Any, index: Any, mode: Any) -> bool:
    """Whether a kernel with two tiled loops stores by `atomic_add_vec`."""
    from torch._inductor import config

    has_threads = config.cpp.dynamic_threads or kernel.num_threads != 1
    if mode != "atomic_add" or not has_threads:
        return False
    return not kernel.need_vec_transpose(kernel.rename_indexing(index))


def _is_lowered_for_gpu() -> bool:
    """Whether the call that is lowered returns a tensor on a GPU."""
    from torch._inductor.utils import is_gpu
    from torch._inductor.virtualized import V

    node = getattr(V.graph, "current_node", None)
    value = None if node is None else node.meta.get("val")
    return value is not None and is_gpu(value.device.type)
