"""Fix for vectorized C++ loads of elements that a program does not read.

`cat`, `pad` and other operations load an input only where a mask is true. At the end of a loop, the
mask is also true for lanes beyond the last iteration, and loads of Booleans ignore the mask. The
values are not used, but the loads can be outside of the input's memory, and end the process if that
is not mapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_KERNEL = "torch._inductor.codegen.cpp.CppVecKernel"
_LOADU = ".template loadu<"

HOOKS = (
    Hook(
        "masked_loads",
        "replaced",
        (f"{_KERNEL}._get_vec_load_line",),
        "hooks.upstream_fixes.cpu_loads",
        "A masked load reads a whole vector, also in the last iterations, and Booleans also where "
        "the mask is false.",
        parameters=("var", "index", "dtype", "load_mask"),
        relies_on=(f"{_KERNEL}._get_mask_type",),
    ),
)


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"masked_loads": _dispatch_load_line})


def _dispatch_load_line(stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def _get_vec_load_line(
        self: Any, var: str, index: Any, dtype: Any, load_mask: Any = None
    ) -> str:
        if context.settings() is None or load_mask is None:
            return stock(self, var, index, dtype, load_mask)
        import torch

        mask_type = self._get_mask_type(torch.float)
        if dtype != torch.bool:
            return _limit_lanes(self, mask_type, stock(self, var, index, dtype, load_mask))
        line = stock(self, f"(const uint8_t*){var}", index, torch.uint8, load_mask)
        line = _limit_lanes(self, mask_type, line)
        return f"{mask_type}::from(at::vec::VectorizedN<uint8_t,1>({line}))"

    return _get_vec_load_line


def _limit_lanes(kernel: Any, mask_type: str, line: str) -> str:
    """Return a masked load that reads only the lanes of the kernel's iterations."""
    if not kernel.tail_size:
        return line
    from torch._inductor.codegen.cpp_utils import cexpr_index

    mask, load = line.rsplit(_LOADU, 1)
    count = cexpr_index(kernel.num_elems)
    return f"{mask_type}::set({mask_type}(), {mask}, {count}){_LOADU}{load}"
