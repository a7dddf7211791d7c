"""Fixes for memory that is reused while an asynchronous copy still reads or writes it.

`x.to("cuda", non_blocking=True)` of a result of the CPU is computed in pinned memory, and the copy
runs on the GPU's stream after the call has returned. In eager mode the allocator of pinned memory
waits for the copy before it gives the memory to another tensor. Inductor lets the next kernel of
the CPU write into it in place, or gives it to another buffer of the same size, so that the copy
reads other values. It also gives memory that is not pinned to a buffer that is to be pinned. Here a
pinned buffer neither takes over memory nor gives it away; it is freed after its last use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_WRAPPER = "torch._inductor.codegen.wrapper"
_OWNER = "hooks.upstream_fixes.pinned_copies"

HOOKS = (
    Hook(
        "reuse_of_pinned_memory",
        "replaced",
        (f"{_WRAPPER}.buffer_reuse_key",),
        _OWNER,
        "The key by which freed buffers are reused does not say whether they are pinned. A copy "
        "from or to pinned memory may still run when its buffer is reused.",
        parameters=("node",),
        relies_on=("torch._inductor.ir.Layout",),
    ),
    Hook(
        "writes_in_place_of_pinned_memory",
        "replaced",
        (f"{_WRAPPER}.PythonWrapperCodegen.can_reuse",),
        _OWNER,
        "A kernel writes in place of a pinned operand that a copy may still read.",
        parameters=("input_buffer", "output_buffer"),
        relies_on=("torch._inductor.scheduler.SchedulerBuffer",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers: dict[str, registry.MakeDispatcher] = {
        "reuse_of_pinned_memory": _dispatch_reuse_key,
        "writes_in_place_of_pinned_memory": _dispatch_can_reuse,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_reuse_key(stock: Callable[..., tuple[Hashable, ...]]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def buffer_reuse_key(node: Any) -> tuple[Hashable, ...]:
        key = stock(node)
        if context.settings() is not None and _is_pinned(node):
            return (*key, node.get_name())
        return key

    return buffer_reuse_key


def _dispatch_can_reuse(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def can_reuse(self: Any, input_buffer: Any, output_buffer: Any = None) -> bool:
        # Without an output the question is whether the buffer is freed.
        is_in_place = output_buffer is not None and context.settings() is not None
        if is_in_place and _is_pinned(input_buffer.node):
            return False
        return stock(self, input_buffer, output_buffer)

    return can_reuse


def _is_pinned(node: Any) -> bool:
    from inductor_ext.memory.graph_buffers import is_pinned

    return is_pinned(node)
