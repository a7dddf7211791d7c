"""Lowerings of the calls by which the planner replaced several nodes.

Each function is the target of an FX call, which Inductor lowers by calling it with IR nodes:
`fused`, `scaled_int_mm` and `with_row_maxima` are lowered to a Triton template, `cutlass` to a
CUTLASS kernel. The plan of the call says which kernel, and which argument is which operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from inductor_ext.lowerings import template_epilogue
from inductor_ext.lowerings.emit import (
    as_contiguous,
    emit_matmul,
    launch_config,
    make_choice,
    with_actual_layouts,
)
from inductor_ext.lowerings.graph.fx_nodes import is_returned, size_expr
from inductor_ext.lowerings.node_info import CutlassArguments, FusedCall, Plan, plan_of
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.tensors import VECTOR_BYTES
from inductor_ext.templates.triton.config import tiles_along_n

aten = torch.ops.aten


def scaled_int_mm(a: Any, b: Any, row_scales: Any, column_scales: Any, bias: Any = None) -> Any:
    """Lower a call by which `match_int8_scales` replaced an int8 matmul and its epilogue.

    Scales and biases are applied in float32.

    Args:
        a: int8 [M, K].
        b: int8 [K, N].
        row_scales: [M, 1] or a scalar, of any floating-point dtype.
        column_scales: [1, N], [N] or a scalar, of any floating-point dtype.
        bias: [1, N] or [N], of any floating-point dtype; None for no bias.
    """
    from torch._inductor.kernel.mm_common import mm_args
    from torch._inductor.lowering import lowerings, to_dtype
    from torch._inductor.virtualized import V

    call = V.current_node
    plan = plan_of(call)
    assert plan is not None
    dtype = call.meta["val"].dtype
    biases = [] if bias is None else [bias]
    *_, layout, left, right = mm_args(a, b, out_dtype=dtype)
    scales = [row_scales, column_scales]
    node = emit_matmul(plan, [left, right], layout, scales=scales, biases=biases)
    if node is None:
        # The operands' layouts do not match the plan.
        node = lowerings[aten._int_mm.default](a, b)
        for scale in scales:
            node = lowerings[aten.mul.Tensor](node, scale)
        for added in biases:
            node = lowerings[aten.add.Tensor](node, added)
        node = to_dtype(node, dtype)
    return node


scaled_int_mm._inductor_lowering_function = True  # type: ignore[attr-defined]


def fused(*inputs: Any) -> Any:
    """Lower a call by which the planner replaced several nodes with one fused Triton kernel.

    Args:
        inputs: as `FusedOperands.flatten` orders them.

    Returns:
        The output; a tuple of one output per weight if there are several weights without gating.
    """
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import to_dtype
    from torch._inductor.virtualized import V

    call = V.current_node
    plan, info = _plan_of_fused(call)
    problem = plan.problem
    has_parts = len(problem.parts) > 1 and not problem.epilogue.gated
    arguments = info.operands.unflatten(inputs)
    scales, biases = arguments.fp8_scales, arguments.biases
    operands = _with_planned_strides(arguments.kernel_operands)
    a = operands[0]
    value = call.meta["val"]
    dtype = (value[0] if has_parts else value).dtype
    in_kernel = bool(arguments.epilogue_operands) and plan.applies_epilogue
    layout = FixedLayout(
        a.get_device_or_error(),
        torch.float32 if scales and not in_kernel else dtype,
        [a.get_size()[0], problem.columns],
    )
    if in_kernel:
        node = emit_matmul(plan, operands, layout, scales=scales, biases=biases)
    else:
        node = emit_matmul(plan, operands, layout)
        node = _apply_epilogue(node, scales, biases, problem.parts)
    assert node is not None
    if arguments.epilogue_operands:
        # Realize here, so that there is one epilogue before the output is split by weight.
        node = to_dtype(node, dtype)
        node.realize()
    return _split_columns(call, node, problem.parts, dtype) if has_parts else node


fused._inductor_lowering_function = True  # type: ignore[attr-defined]


def _apply_epilogue(
    node: Any, scales: Sequence[Any], biases: Sequence[Any], parts: Sequence[int]
) -> Any:
    """Return the accumulators of several matmuls times their fp8 scales, plus their biases.

    Args:
        node: [M, sum of parts].
        scales: of A, then of each weight; or none.
        biases: one per weight, or none.
        parts: the N of each matmul.
    """
    from torch._inductor.lowering import lowerings, pointwise_cat

    if scales:
        scale, *others = scales
        rows = [
            lowerings[aten.expand.default](lowerings[aten.view.default](other, [1, -1]), [1, part])
            for other, part in zip(others, parts, strict=True)
        ]
        node = lowerings[aten.mul.Tensor](node, scale)
        node = lowerings[aten.mul.Tensor](node, pointwise_cat(rows, 1))
    if biases:
        node = lowerings[aten.add.Tensor](node, pointwise_cat(biases))
    return node


def _split_columns(call: Any, node: Any, parts: Sequence[int], dtype: Any) -> tuple[Any, ...]:
    """Return the columns of each matmul, as views where `_may_be_inside` allows it."""
    from torch._inductor.lowering import lowerings

    results, first = [], 0
    for index, part in enumerate(parts):
        columns = lowerings[aten.slice.Tensor](node, 1, first, first + part)
        if first and not _may_be_inside(call, index, first * dtype.itemsize):
            columns = lowerings[aten.clone.default](columns)
        results.append(columns)
        first += part
    return tuple(results)


def _may_be_inside(call: Any, index: int, begin: int) -> bool:
    """Whether a result of a fused call may be a view into the fused output, at byte `begin`.

    In the FX graph the result is a separate, aligned tensor. Consumers in the same graph see the
    view's offset, but the backward graph assumes that saved tensors are aligned, without checking.
    If a subgraph returns such a view, Inductor adds its offset twice.
    """
    from torch._inductor.graph import SubgraphLowering
    from torch._inductor.virtualized import V

    if begin % VECTOR_BYTES:
        return False
    results = (user for user in call.users if user.args[1] == index)
    return not (isinstance(V.graph, SubgraphLowering) and any(map(is_returned, results)))


def with_row_maxima(*inputs: Any) -> Any:
    """Lower a call by which the planner replaced a matmul, its epilogue and a row max or amax.

    Args:
        inputs: as `FusedOperands.flatten` orders them.

    Returns:
        The output, and the maximum element (or absolute value) of each of its rows.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import empty_strided, lowerings, to_dtype
    from torch._inductor.virtualized import V

    call = V.current_node
    plan, info = _plan_of_fused(call)
    arguments = info.operands.unflatten(inputs)
    operands = _with_planned_strides(arguments.kernel_operands)
    assert info.chain is not None
    problem, config = with_actual_layouts(plan, operands), launch_config(plan)
    assert problem is not None
    m, device = operands[0].get_size()[0], operands[0].get_device_or_error()
    values = call.meta["val"]
    layout = FixedLayout(device, values[0].dtype, [m, problem.columns])
    # One partial maximum per tile: needs no initialization, and is deterministic without atomics.
    tiles = empty_strided(
        [tiles_along_n(problem, config.block_n), m], None, dtype=torch.float32, device=device
    )
    choice = make_choice(
        problem,
        config,
        [*operands, tiles],
        layout,
        options=plan.constexprs,
        mutated_inputs=[tiles],
        epilogue_fn=template_epilogue.make_epilogue(info.chain, arguments.epilogue_inputs, layout),
    )
    assert choice is not None
    output = choice.output_node()
    # A small reduction, for which Inductor would otherwise launch two kernels.
    with inductor_config.patch(split_reductions=False):
        maxima = to_dtype(lowerings[aten.amax.default](tiles, [0]), values[1].dtype)
    return tuple(
        lowerings[aten.view.default](result, [size_expr(size) for size in value.shape])
        for result, value in zip((output, maxima), values, strict=True)
    )


with_row_maxima._inductor_lowering_function = True  # type: ignore[attr-defined]


def cutlass(*arguments: Any) -> Any:
    """Lower a call by which the planner replaced a matmul and its epilogue with a CUTLASS kernel.

    Args:
        arguments: see `CutlassArguments`.

    Returns:
        The output; a tuple if there are several.
    """
    from torch._inductor.ir import ExternKernel, FixedLayout
    from torch._inductor.virtualized import V

    from inductor_ext.lowerings import cutlass_call

    node = V.current_node
    plan = plan_of(node)
    assert plan is not None
    config, info = plan.decision.config, plan.call
    assert isinstance(config, CutlassConfig)
    assert isinstance(info, CutlassArguments)
    tensors, scalars = info.split(arguments)
    # The kernel was selected for the strides in the metadata.
    a, b, *rest = (
        ExternKernel.require_exact_strides(
            ExternKernel.realize_input(tensor),
            [size_expr(s) for s in argument.meta["val"].stride()],
        )
        for tensor, argument in zip(tensors, node.args, strict=False)
    )
    # The kernel assumes that the group offsets are contiguous.
    (ends,) = as_contiguous([rest.pop(0)]) if info.is_grouped else (None,)
    values = node.meta["val"]
    layouts = [
        FixedLayout(
            a.get_device_or_error(),
            value.dtype,
            [size_expr(size) for size in value.shape],
            [size_expr(stride) for stride in value.stride()],
        )
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    results = cutlass_call.add_launch(
        config, info.epilogue, a, b, rest, layouts, scalars=scalars, ends=ends
    )
    return results if isinstance(values, tuple) else results[0]


cutlass._inductor_lowering_function = True  # type: ignore[attr-defined]


def _plan_of_fused(call: Any) -> tuple[Plan, FusedCall]:
    plan = plan_of(call)
    assert plan is not None
    assert isinstance(plan.call, FusedCall)
    return plan, plan.call


def _with_planned_strides(operands: Sequence[Any]) -> list[Any]:
    """Return the first arguments of the current call, realized with the strides of the graph.

    The kernel assumes that all weights have the strides of the first.
    """
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    return [
        ExternKernel.require_exact_strides(
            ExternKernel.realize_input(operand), argument.meta["val"].stride()
        )
        for operand, argument in zip(operands, V.current_node.args, strict=False)
    ]
