"""Compiles a graph a second time, without the extension's kernels, if one of them does not compile.

A kernel that was measured on this machine has compiled. One that is taken without a measurement, or
by a result of another Triton version, need not compile here. The user gets Inductor's kernels then,
and one warning. The FX graph cache keeps what the second compile returns. Setting:
`fallback_to_inductor`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from inductor_ext import events
from inductor_ext.hooks import context, registry, scope
from inductor_ext.hooks.registry import Hook
from inductor_ext.lowerings.records import AttentionRecord
from inductor_ext.settings import Settings
from inductor_ext.templates.records import MatmulRecord
from inductor_ext.toolchain import compiler_errors, requirements

HOOKS = (
    Hook(
        "codegen_and_compile",
        "replaced",
        ("torch._inductor.compile_fx.fx_codegen_and_compile",),
        "hooks.compile_again",
        "Compiles a graph that is in no cache. A graph with a kernel that does not compile is "
        "compiled again without the extension's kernels.",
        parameters=("gm",),
    ),
)

WARNING = "kernels_that_do_not_compile"
"""Key of the warning."""

_COMPILER_ERRORS = frozenset(
    {
        "CompilationError",
        "NoTritonConfigsError",
        "OutOfResources",
        "PTXASError",
        "SubprocException",
    }
)
"""Exceptions of Triton, and of Inductor's compile workers."""

_NO_CONFIGS = "No valid triton configs"
"""Start of Inductor's message, in a RuntimeError, if no configuration of a kernel can be loaded."""


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"codegen_and_compile": _dispatch_codegen_and_compile})


def _dispatch_codegen_and_compile(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def fx_codegen_and_compile(gm: Any, *args: Any, **kwargs: Any) -> Any:
        settings, records = context.settings(), context.current().records
        if settings is None or records is None:
            return stock(gm, *args, **kwargs)
        return compile_graph(gm, lambda gm: stock(gm, *args, **kwargs), settings, records)

    return fx_codegen_and_compile


def compile_graph(
    gm: Any,
    compile_: Callable[[Any], Any],
    settings: Settings,
    records: list[events.Record],
) -> Any:
    """Compile a graph; if a kernel of the extension does not compile, compile a copy without them.

    Args:
        gm: the GraphModule; a compile changes it.
        compile_: compiles a GraphModule.
        settings: of the compile.
        records: the events of the compile, in a list that grows; those of a failed compile are
            removed.

    Returns:
        What `compile_` returns.
    """
    original = copy_graph(gm) if _may_use_kernels(gm, settings) else None
    start = len(records)
    try:
        return compile_(gm)
    except Exception as error:
        reason = _find_compiler_error(error)
        if original is None or reason is None or not any(map(_is_kernel, records[start:])):
            raise
    events.warn_once(
        WARNING,
        f"a kernel of the extension does not compile ({reason}): the graph is compiled again "
        "without the extension's kernels. Please report this; gemm_templates=False and "
        "decode_attention=False avoid the failed attempt.",
    )
    del records[start:]
    without = dataclasses.replace(settings, gemm_templates=False, decode_attention=False)
    with scope.compile_scope(without):
        return compile_(original)


def _may_use_kernels(gm: Any, settings: Settings) -> bool:
    uses_kernels = settings.gemm_templates or settings.decode_attention
    if not (settings.fallback_to_inductor and uses_kernels):
        return False
    inputs = gm.graph.find_nodes(op="placeholder")
    return "cuda" in requirements.device_types(node.meta.get("val") for node in inputs)


def copy_graph(gm: Any) -> Any:
    """Return a copy of a GraphModule and its subgraphs; None if it cannot be copied.

    Tensors and the description of the graph are not copied.
    """
    import torch

    values = [
        value
        for module in gm.modules()
        for values in (vars(module), module._parameters, module._buffers)
        for name, value in values.items()
        if isinstance(value, torch.Tensor) or name == "meta"
    ]
    shared = {id(value): value for value in values}
    with contextlib.suppress(Exception):
        return copy.deepcopy(gm, shared)
    return None


def _find_compiler_error(error: BaseException) -> str | None:
    """Return the compiler's message if a compiler failed."""
    for cause in compiler_errors.walk_causes(error):
        if type(cause).__name__ in _COMPILER_ERRORS or str(cause).startswith(_NO_CONFIGS):
            return compiler_errors.describe(cause)
    return None


def _is_kernel(record: events.Record) -> bool:
    """Whether a record says that a kernel of the extension was used."""
    if isinstance(record, MatmulRecord):
        return record.chosen is not None
    return isinstance(record, AttentionRecord)
