"""Hooks of memory: the order of kernels, the plan of a wrapper's lines, and plans by cache key.

Reading the declarations imports no compiler.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_WRAPPER = "torch._inductor.codegen.wrapper"

HOOKS = (
    Hook(
        "kernel_order",
        "replaced",
        ("torch._inductor.memory.reorder_for_peak_memory",),
        "memory.hooks",
        "The extension reorders kernels after Inductor has chosen their order. "
        "config._post_fusion_custom_pass runs earlier and belongs to the user.",
        parameters=("nodes", "name_to_buf", "graph_outputs"),
        relies_on=(
            "torch._inductor.memory.estimate_peak_memory",
            "torch._inductor.scheduler.BaseSchedulerNode.mpi_node",
            "torch._inductor.scheduler.Scheduler.name_to_buf",
        ),
    ),
    Hook(
        "memory_planning",
        "replaced",
        (f"{_WRAPPER}.PythonWrapperCodegen.run_wrapper_ir_passes",),
        "memory.hooks",
        "At this point the lines of a wrapper are final, and Inductor decides how buffers share "
        "memory. The wrapper classes of all devices inherit it; registering other wrapper classes "
        "would replace those of the device for the process.",
        parameters=("is_inference",),
        relies_on=(
            f"{_WRAPPER}.PythonWrapperCodegen.memory_plan_reuse",
            f"{_WRAPPER}.PythonWrapperCodegen.lines",
            f"{_WRAPPER}.PythonWrapperCodegen.estimate_peak",
            f"{_WRAPPER}.EfficientPeakEstimate",
            f"{_WRAPPER}.MemoryPlanningState",
            f"{_WRAPPER}.buffer_reuse_key",
        ),
    ),
    Hook(
        "compiled_graph",
        "replaced",
        ("torch._inductor.output_code.CompiledFxGraph.post_compile",),
        "memory.hooks",
        "A graph that the AOTAutograd cache returns together with its backward reports its key "
        "only here; its memory plan is stored under that key.",
        relies_on=("torch._inductor.output_code.CompiledFxGraph._fx_graph_cache_key",),
    ),
    Hook(
        "out_variants",
        "changed",
        ("torch._inductor.ir.FallbackKernel",),
        "memory.out_variants",
        "A fallback with an out variant becomes a kernel that writes into planned memory. The "
        "class of the node is changed after Inductor has created it, because there is no hook "
        "after the lowerings of these operators.",
        relies_on=(
            "torch._inductor.ir.MultiOutput",
            "torch._inductor.ir.MultiOutput.should_allocate",
            "torch._inductor.ir.FallbackKernel.op_overload",
            "torch._inductor.ir.FallbackKernel.outputs",
            "torch._inductor.ir.FallbackKernel.unbacked_bindings",
            "torch._inductor.ir.FallbackKernel.mutation_outputs",
            "torch._inductor.ir.FallbackKernel.codegen_args",
            "torch._inductor.ir.FallbackKernel.codegen_kwargs",
            "torch._inductor.graph.GraphLowering.removed_buffers",
            f"{_WRAPPER}.PythonWrapperCodegen.freed",
        ),
    ),
    Hook(
        "saved_inputs",
        "replaced",
        ("torch._inductor.graph.GraphLowering.find_nodes_prefer_channels_last",),
        "memory.hooks",
        "A forward graph saves copies in channels_last of the weights and images that convolutions "
        "read, instead of the weights and images, so that both exist until the backward graph has "
        "used them.",
    ),
    Hook(
        "kept_buffers",
        "changed",
        ("torch._inductor.graph.GraphLowering.never_reuse_buffers",),
        "memory_planning",
        "Buffers whose memory contains a C++ object must not be reused for other buffers.",
    ),
)


def install_hooks() -> None:
    """Register the lowerings, and install the dispatchers, once per process."""
    # Importing this module registers its lowerings.
    from inductor_ext.memory import out_variants  # noqa: F401

    dispatchers = {
        "kernel_order": _dispatch_kernel_order,
        "memory_planning": _dispatch_memory_planning,
        "compiled_graph": _dispatch_compiled_graph,
        "saved_inputs": _dispatch_channels_last,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_kernel_order(stock: Callable[..., Any]) -> Callable[..., Any]:
    from inductor_ext.memory import reorder_kernels

    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def reorder_for_peak_memory(*args: Any, **kwargs: Any) -> Any:
        order = stock(*args, **kwargs)
        settings = context.settings()
        if settings is None or not settings.memory_reorder:
            return order
        call = signature.bind(*args, **kwargs)
        return reorder_kernels.improve(order, call.arguments["graph_outputs"])

    return reorder_for_peak_memory


def _dispatch_memory_planning(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def run_wrapper_ir_passes(self: Any, is_inference: bool) -> None:
        settings = context.settings()
        if settings is None:
            stock(self, is_inference)
            return
        from inductor_ext import memory_planning

        memory_planning.plan_wrapper(stock, self, is_inference, settings)

    return run_wrapper_ir_passes


def _dispatch_compiled_graph(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if context.settings() is not None:
            from inductor_ext.memory import compiled_callables

            compiled_callables.note_graph(self._fx_graph_cache_key)

    return post_compile


def _dispatch_channels_last(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def find_nodes_prefer_channels_last(self: Any) -> Any:
        nodes = stock(self)
        if context.settings() is None:
            return nodes
        # A convolution copies such an input for itself, and the copy is freed after it.
        saved = set(self.module.graph.output_node().all_input_nodes)
        return type(nodes)(node for node in nodes if node.op != "placeholder" or node not in saved)

    return find_nodes_prefer_channels_last
