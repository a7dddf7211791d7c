"""Fix for gradients with `options={"cpp_wrapper": True}` on a GPU, in torch 2.11 and 2.12.

The C++ wrapper needs further options, for example to record the Triton kernels of a graph. Inductor
sets them for the forward graph. The backward graph is compiled by the first backward pass, and by
then the options of `torch.compile` are no longer in effect: the compile fails with
"CudaKernelParamCache not populated". torch 2.13 sets the options for every graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from inductor_ext import _compat
from inductor_ext.hooks import registry
from inductor_ext.hooks.registry import Hook

_FX = "torch._inductor.compile_fx"

HOOKS = (
    Hook(
        "cpp_wrapper_options",
        "changed",
        (f"{_FX}.compile_fx_inner",),
        "hooks.upstream_fixes.cpp_wrapper_options",
        "The function runs with the options of the C++ wrapper for backward graphs too.",
        parameters=("gm",),
        relies_on=(f"{_FX}.get_cpp_wrapper_config",),
        until="2.13",
    ),
)


def use_options(keywords: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Set the options of the C++ wrapper for the compile of one graph.

    Args:
        keywords: the keyword arguments of `compile_fx_inner`.
    """
    from torch._inductor import compile_fx, config

    if (
        not keywords.get("cpp_wrapper")
        or config.triton.store_cubin
        or not registry.is_applicable(HOOKS[0], _compat.torch_version())
    ):
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[Any] = config.patch(
        compile_fx.get_cpp_wrapper_config()
    )
    return patch
