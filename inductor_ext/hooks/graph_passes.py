"""Hooks into passes over FX graphs, over scheduler nodes and over wrapper lines."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, registry, scope
from inductor_ext.lowerings.graph import pad_mm_policy
from inductor_ext.memory import reorder_kernels


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.replace("joint_passes", _dispatch_joint_passes)
    registry.replace("output_strides", _dispatch_output_strides)
    registry.replace("pad_mm", _dispatch_can_pad)
    registry.replace("post_grad_passes", _dispatch_post_grad_passes)
    registry.replace("kernel_order", _dispatch_kernel_order)
    registry.replace("memory_planning", _dispatch_memory_planning)


def _dispatch_joint_passes(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def _recursive_joint_graph_passes(gm: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        if scope.settings() is None:
            return stock(gm, *args, **kwargs)
        # In a JIT compile strides need not be kept: dynamo receives the outputs and queries the
        # strides of each tensor, and the FX graph cache keys the graph as it is after the passes.
        before = pad_mm_policy.result_strides(gm) if V.aot_compilation is True else None
        with pad_mm_policy.track_control_flow(gm):
            result = stock(gm, *args, **kwargs)
        if before is not None:
            pad_mm_policy.record_strides(result, before)
        return result

    return _recursive_joint_graph_passes


def _dispatch_output_strides(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def record_original_output_strides(gm: Any) -> None:
        stock(gm)
        if scope.settings() is not None:
            pad_mm_policy.restore_strides(gm)

    return record_original_output_strides


def _dispatch_can_pad(stock: Callable[..., bool]) -> Callable[..., bool]:
    from inductor_ext.autotune import decide

    @functools.wraps(stock)
    def can_pad(mat1: Any, mat2: Any, *args: Any, **kwargs: Any) -> bool:
        settings = scope.settings()
        if settings is not None:
            if not pad_mm_policy.may_pad():
                return False
            if decide.may_replace_aten(settings) and pad_mm_policy.is_only_m_unaligned(mat1, mat2):
                return False
        return stock(mat1, mat2, *args, **kwargs)

    return can_pad


def _dispatch_post_grad_passes(stock: Callable[..., None]) -> Callable[..., None]:
    from torch._inductor import config as inductor_config

    @functools.wraps(stock)
    def _recursive_post_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> None:
        outer = context.current().graph_in_passes
        settings = scope.settings()
        if settings is None or (outer is not None and gm in outer.modules()):
            # Passes over the outer graph trace its subgraphs, which must consist of plain operators
            # until then. Subgraphs are therefore planned together with the outer graph.
            stock(gm, *args, **kwargs)
            return
        with context.enter(graph_in_passes=gm):
            stock(gm, *args, **kwargs)
        if inductor_config.use_post_grad_passes:
            from inductor_ext.lowerings.graph import post_grad_pass

            post_grad_pass.plan_matmuls(gm, settings)

    return _recursive_post_grad_passes


def _dispatch_kernel_order(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def reorder_for_peak_memory(*args: Any, **kwargs: Any) -> Any:
        order = stock(*args, **kwargs)
        settings = scope.settings()
        if settings is None or not settings.memory_reorder:
            return order
        call = signature.bind(*args, **kwargs)
        return reorder_kernels.improve(order, call.arguments["graph_outputs"])

    return reorder_for_peak_memory


def _dispatch_memory_planning(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def run_wrapper_ir_passes(self: Any, is_inference: bool) -> None:
        settings = scope.settings()
        if settings is None:
            stock(self, is_inference)
            return
        from inductor_ext import memory_planning

        memory_planning.plan_wrapper(stock, self, is_inference, settings)

    return run_wrapper_ir_passes
