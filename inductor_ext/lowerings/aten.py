"""Lowerings of ATen matmul ops to the kernels that were selected.

`lowerings.graph.planner` leaves a `Plan` on every matmul node that it supports. If the plan has a
`GemmConfig`, the matmul is lowered to that Triton template, into which Inductor fuses the epilogue.
Everything else uses Inductor's lowering, without its CUTLASS candidates, which the
extension replaces (`_call_inductor`). If Inductor's kernels won the benchmark, `sole_candidates`
restricts its choices to ATen kernels, so that nothing is benchmarked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext.autotune import decide
from inductor_ext.hooks import context
from inductor_ext.lowerings import register_lowering
from inductor_ext.lowerings.emit import as_contiguous, emit_matmul
from inductor_ext.lowerings.node_info import Plan, plan_of
from inductor_ext.templates.triton.config import GemmConfig

aten = torch.ops.aten


def sole_candidates(templates: Sequence[Any]) -> list[Any]:
    """Return those of Inductor's candidate templates to try for the matmul being lowered.

    If the matmul is tuned already, these are its ATen kernels only.
    """
    from torch._inductor.select_algorithm import ExternKernelChoice
    from torch._inductor.virtualized import V

    plan = plan_of(V.current_node)
    is_tuned = plan is not None and plan.decision.origin != "unknown"
    externs = [template for template in templates if isinstance(template, ExternKernelChoice)]
    return externs if is_tuned and externs else list(templates)


def _call_inductor(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Inductor's lowering, without its CUTLASS candidates if the matmul has a plan.

    If the decision is known (not "unknown") or the matmul is tuned in the background, this is the
    ATen op as eager mode calls it. With
    `max_autotune`, torch 2.11 would expand the bias of an addmm to a matrix, which is copied into
    the output first, and would benchmark that against a row bias; the row bias is always faster.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V

    plan = plan_of(V.current_node)
    if plan is not None and _is_settled(plan) and decide.backend_enabled("ATEN"):
        with config.patch(max_autotune=False, max_autotune_gemm=False):
            return stock(*args, **kwargs)
    backends = [name.strip() for name in config.max_autotune_gemm_backends.split(",")]
    other_backends = [backend for backend in backends if backend.upper() != "CUTLASS"]
    if plan is None or len(other_backends) == len(backends):
        return stock(*args, **kwargs)
    if "ATEN" not in map(str.upper, other_backends):
        other_backends.append("ATEN")
    with config.patch(max_autotune_gemm_backends=",".join(other_backends)):
        return stock(*args, **kwargs)


def _is_settled(plan: Plan) -> bool:
    """Whether Inductor must not benchmark a matmul in this compile."""
    settings = context.settings()
    is_later = settings is not None and settings.tuning == "background"
    return is_later or plan.decision.origin != "unknown"


def _planned_matmul(*operators: Any) -> Plan | None:
    """Return the plan of the current node if it calls one of `operators` and has a GemmConfig."""
    from torch._inductor.virtualized import V

    node = V.current_node
    plan = plan_of(node) if getattr(node, "target", None) in operators else None
    return plan if plan is not None and isinstance(plan.decision.config, GemmConfig) else None


@register_lowering(aten.mm.default, aten.bmm.default)
def mm(stock: Callable[..., Any], mat1: Any, mat2: Any, *args: Any, **kwargs: Any) -> Any:
    plan = _planned_matmul(aten.mm.default, aten.bmm.default)
    node = _emit(plan, mat1, mat2) if plan is not None and not args and not kwargs else None
    if node is not None:
        return node
    return _call_inductor(stock, mat1, mat2, *args, **kwargs)


@register_lowering(aten.addmm.default, aten.baddbmm.default)
def addmm(
    stock: Callable[..., Any],
    inp: Any,
    mat1: Any,
    mat2: Any,
    *,
    alpha: Any = 1,
    beta: Any = 1,
    **kwargs: Any,
) -> Any:
    plan = _planned_matmul(aten.addmm.default, aten.baddbmm.default)
    if plan is not None and not kwargs:
        from torch._inductor.kernel.mm_common import mm_args

        *_, layout, a, b, bias = mm_args(mat1, mat2, inp)
        if (
            list(inp.get_size()) == layout.size[-1:]
            and alpha == beta == 1
            and plan.applies_epilogue
        ):
            node = emit_matmul(plan, [a, b], layout, biases=[inp])
        else:
            node = emit_matmul(plan, [a, b], layout, bias=bias, alpha=alpha, beta=beta)
        if node is not None:
            return node
    return _call_inductor(stock, inp, mat1, mat2, alpha=alpha, beta=beta, **kwargs)


@register_lowering(aten._int_mm.default)
def int_mm(stock: Callable[..., Any], mat1: Any, mat2: Any, **kwargs: Any) -> Any:
    plan = _planned_matmul(aten._int_mm.default)
    node = _emit(plan, mat1, mat2, torch.int32) if plan is not None and not kwargs else None
    if node is not None:
        return node
    return _call_inductor(stock, mat1, mat2, **kwargs)


@register_lowering(aten._scaled_mm.default)
def scaled_mm(
    stock: Callable[..., Any],
    mat1: Any,
    mat2: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    **kwargs: Any,
) -> Any:
    plan = _planned_matmul(aten._scaled_mm.default)
    if plan is not None and scale_result is None and not kwargs:
        from torch._inductor.lowering import lowerings, to_dtype

        dtype = getattr(torch, plan.problem.out)
        biases = [] if bias is None else [bias]
        if plan.applies_epilogue:
            node = _emit(plan, mat1, mat2, dtype, scales=[scale_a, scale_b], biases=biases)
            if node is not None:
                return node
        node = _emit(plan, mat1, mat2, torch.float32)
        if node is not None:
            # The scheduler fuses these into the epilogue; unscaled results are never stored.
            for scale in (scale_a, scale_b):
                node = lowerings[aten.mul.Tensor](node, scale)
            for added in biases:
                node = lowerings[aten.add.Tensor](node, to_dtype(added, torch.float32))
            return to_dtype(node, dtype)
    rest = (scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    return _call_inductor(stock, mat1, mat2, *rest, **kwargs)


@register_lowering(aten._grouped_mm.default)
def grouped_mm(
    stock: Callable[..., Any],
    mat_a: Any,
    mat_b: Any,
    offs: Any = None,
    bias: Any = None,
    out_dtype: Any = None,
    **kwargs: Any,
) -> Any:
    plan = _planned_matmul(aten._grouped_mm.default)
    node = _emit_grouped(plan, [mat_a, mat_b, offs]) if plan is not None and not kwargs else None
    if node is not None:
        return node
    return _call_inductor(stock, mat_a, mat_b, offs, bias, out_dtype, **kwargs)


@register_lowering(aten._scaled_grouped_mm.default)
def scaled_grouped_mm(
    stock: Callable[..., Any],
    mat_a: Any,
    mat_b: Any,
    scale_a: Any,
    scale_b: Any,
    offs: Any = None,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
    **kwargs: Any,
) -> Any:
    plan = _planned_matmul(aten._scaled_grouped_mm.default)
    inputs = [mat_a, mat_b, offs, scale_a, scale_b]
    node = _emit_grouped(plan, inputs) if plan is not None and not kwargs else None
    if node is not None:
        return node
    rest = (offs, bias, scale_result, out_dtype, use_fast_accum)
    return _call_inductor(stock, mat_a, mat_b, scale_a, scale_b, *rest, **kwargs)


def _emit(
    plan: Plan, mat1: Any, mat2: Any, out_dtype: torch.dtype | None = None, **epilogue: Any
) -> Any:
    """Return the node of a matmul; None if the operands do not match the plan.

    Args:
        plan: of the call.
        mat1, mat2: A and B.
        out_dtype: dtype of the result, by default that of A.
        epilogue: further arguments of `emit_matmul`.
    """
    from torch._inductor.kernel.mm_common import mm_args

    *_, layout, a, b = mm_args(mat1, mat2, out_dtype=out_dtype)
    return emit_matmul(plan, [a, b], layout, **epilogue)


def _emit_grouped(plan: Plan, inputs: Sequence[Any]) -> Any:
    """Return the node of a grouped GEMM, or None if the operands do not match the plan.

    Args:
        plan: of the call.
        inputs: a, b, the end offsets of the groups, and for fp8 the scales of a and b.
    """
    from torch._inductor.ir import FixedLayout
    from torch._inductor.kernel.mm_common import realize_inputs
    from torch._inductor.utils import convert_shape_to_inductor
    from torch._inductor.virtualized import V

    a, b = realize_inputs(*inputs[:2])
    # The kernel assumes that group offsets and scales are contiguous.
    operands = [a, b, *as_contiguous(inputs[2:])]
    # The op pads the rows of its output; consumers rely on the strides in the metadata.
    value = V.current_node.meta["val"]
    size = [a.get_size()[-2], b.get_size()[-1]]
    if plan.problem.divided == "k":
        size = [plan.problem.batch, *size]
    stride = convert_shape_to_inductor(value.stride())
    layout = FixedLayout(a.get_device_or_error(), value.dtype, size, stride)
    return emit_matmul(plan, operands, layout)
