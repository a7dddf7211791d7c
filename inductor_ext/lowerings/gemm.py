"""Lowerings of ATen matmul ops, and of fused matmul calls, to the kernels that were selected.

The pass `lowerings.graph.planner` leaves a `Plan` in the metadata of every matmul node that it
supports. If the plan has a `GemmConfig`, the matmul is lowered to that Triton template, into which
Inductor fuses the epilogue. A call that replaced several nodes is lowered to a Triton template
(`fused`, `scaled_int_mm`, `with_row_maxima`) or to a CUTLASS kernel (`cutlass`). Everything else
uses Inductor's lowering, without its CUTLASS candidates, which the extension replaces (`_stock`).
If Inductor's kernels won the benchmark, `sole_candidates` restricts its choices to ATen kernels, so
that nothing is benchmarked again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inductor_ext.autotune import decide
from inductor_ext.autotune.decision import Decision
from inductor_ext.lowerings import register_lowering, template_epilogue
from inductor_ext.lowerings.graph import epilogue_region, matmul_nodes
from inductor_ext.lowerings.graph.formula import is_returned
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import VECTOR_BYTES, GemmProblem, Operand
from inductor_ext.templates.triton import inductor_template
from inductor_ext.templates.triton.config import TEMPLATES, GemmConfig, tiles_along_n
from inductor_ext.templates.triton.constraints import legal

__all__ = [
    "PLAN",
    "Plan",
    "cutlass",
    "finishes",
    "fused",
    "plan_of",
    "scaled_int_mm",
    "sole_candidates",
    "with_row_maxima",
]

aten = torch.ops.aten

PLAN = "inductor_ext_gemm"
"""Key of the `Plan` in a node's metadata."""


@dataclass(frozen=True)
class Plan:
    """The kernel selected for one matmul, or for several that one kernel computes."""

    problem: GemmProblem
    decision: Decision
    device: Device
    options: Mapping[str, Any] = field(default_factory=dict)
    """Constants of the kernel that are not part of the problem, such as an activation or an
    epsilon."""


def plan_of(node: Any) -> Plan | None:
    """Return the plan in a node's metadata, or None; `node` may be None."""
    plan: Plan | None = getattr(node, "meta", {}).get(PLAN)
    return plan


def finishes(plan: Plan) -> bool:
    """Whether the kernel itself applies scales and biases.

    It cannot with split-K and stream-K, where several CTAs hold partial sums of a tile.
    """
    config = plan.decision.config
    alone = isinstance(config, GemmConfig) and config.split_k == 1 and not config.stream_k
    return alone and plan.problem.operation in ("addmm", "scaled", "int_mm")


def sole_candidates(templates: Sequence[Any]) -> list[Any]:
    """Return those of Inductor's candidate templates to try for the matmul being lowered.

    If the matmul is tuned already, these are its ATen kernels only.
    """
    from torch._inductor.select_algorithm import ExternKernelChoice
    from torch._inductor.virtualized import V

    plan = plan_of(V.current_node)
    known = plan is not None and plan.decision.origin != "unknown"
    externs = [template for template in templates if isinstance(template, ExternKernelChoice)]
    return externs if known and externs else list(templates)


def _stock(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call Inductor's lowering, without its CUTLASS candidates if the matmul has a plan.

    If the decision is known (not "unknown"), this is the ATen op as eager mode calls it. With
    `max_autotune`, torch 2.11 would expand the bias of an addmm to a matrix, which is copied into
    the output first, and would benchmark that against a row bias; the row bias is always faster.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V

    plan = plan_of(V.current_node)
    if plan is not None and plan.decision.origin != "unknown" and decide.is_asked("ATEN"):
        with config.patch(max_autotune=False, max_autotune_gemm=False):
            return stock(*args, **kwargs)
    backends = [part.strip() for part in config.max_autotune_gemm_backends.split(",")]
    others = [backend for backend in backends if backend.upper() != "CUTLASS"]
    if plan is None or len(others) == len(backends):
        return stock(*args, **kwargs)
    if "ATEN" not in map(str.upper, others):
        others.append("ATEN")
    with config.patch(max_autotune_gemm_backends=",".join(others)):
        return stock(*args, **kwargs)


def _planned(*operators: Any) -> Plan | None:
    """Return the plan of the current node if it calls one of `operators` and has a GemmConfig."""
    from torch._inductor.virtualized import V

    node = V.current_node
    plan = plan_of(node) if getattr(node, "target", None) in operators else None
    return plan if plan is not None and isinstance(plan.decision.config, GemmConfig) else None


@register_lowering(aten.mm.default, aten.bmm.default)
def mm(stock: Callable[..., Any], mat1: Any, mat2: Any, *args: Any, **kwargs: Any) -> Any:
    plan = _planned(aten.mm.default, aten.bmm.default)
    if plan is not None and not args and not kwargs:
        from torch._inductor.kernel.mm_common import mm_args

        *_, layout, a, b = mm_args(mat1, mat2)
        node = _product(plan, [a, b], layout)
        if node is not None:
            return node
    return _stock(stock, mat1, mat2, *args, **kwargs)


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
    plan = _planned(aten.addmm.default, aten.baddbmm.default)
    if plan is not None and not kwargs:
        from torch._inductor.kernel.mm_common import mm_args

        *_, layout, a, b, bias = mm_args(mat1, mat2, inp)
        if list(inp.get_size()) == layout.size[-1:] and alpha == beta == 1 and finishes(plan):
            node = _product(plan, [a, b], layout, biases=[inp])
        else:
            node = _product(plan, [a, b], layout, bias=bias, alpha=alpha, beta=beta)
        if node is not None:
            return node
    return _stock(stock, inp, mat1, mat2, alpha=alpha, beta=beta, **kwargs)


@register_lowering(aten._int_mm.default)
def int_mm(stock: Callable[..., Any], mat1: Any, mat2: Any, **kwargs: Any) -> Any:
    plan = _planned(aten._int_mm.default)
    if plan is not None and not kwargs:
        from torch._inductor.kernel.mm_common import mm_args

        *_, layout, a, b = mm_args(mat1, mat2, out_dtype=torch.int32)
        node = _product(plan, [a, b], layout)
        if node is not None:
            return node
    return _stock(stock, mat1, mat2, **kwargs)


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
    node = _product(plan, [left, right], layout, scales=scales, biases=biases)
    if node is None:
        # The operands' layouts do not match the plan.
        node = lowerings[aten._int_mm.default](a, b)
        for scale in scales:
            node = lowerings[aten.mul.Tensor](node, scale)
        for item in biases:
            node = lowerings[aten.add.Tensor](node, item)
        node = to_dtype(node, dtype)
    return node


scaled_int_mm._inductor_lowering_function = True  # type: ignore[attr-defined]


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
    plan = _planned(aten._scaled_mm.default)
    if plan is not None and scale_result is None and not kwargs:
        from torch._inductor.kernel.mm_common import mm_args
        from torch._inductor.lowering import lowerings, to_dtype

        dtype = getattr(torch, plan.problem.out)
        biases = [] if bias is None else [bias]
        if finishes(plan):
            *_, layout, a, b = mm_args(mat1, mat2, out_dtype=dtype)
            node = _product(plan, [a, b], layout, scales=[scale_a, scale_b], biases=biases)
            if node is not None:
                return node
        *_, layout, a, b = mm_args(mat1, mat2, out_dtype=torch.float32)
        node = _product(plan, [a, b], layout)
        if node is not None:
            # The scheduler fuses these into the epilogue; unscaled results are never stored.
            for scale in (scale_a, scale_b):
                node = lowerings[aten.mul.Tensor](node, scale)
            for item in biases:
                node = lowerings[aten.add.Tensor](node, to_dtype(item, torch.float32))
            return to_dtype(node, dtype)
    rest = (scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    return _stock(stock, mat1, mat2, *rest, **kwargs)


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
    plan = _planned(aten._grouped_mm.default)
    node = _grouped(plan, [mat_a, mat_b, offs]) if plan is not None and not kwargs else None
    if node is not None:
        return node
    return _stock(stock, mat_a, mat_b, offs, bias, out_dtype, **kwargs)


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
    plan = _planned(aten._scaled_grouped_mm.default)
    inputs = [mat_a, mat_b, offs, scale_a, scale_b]
    node = _grouped(plan, inputs) if plan is not None and not kwargs else None
    if node is not None:
        return node
    rest = (offs, bias, scale_result, out_dtype, use_fast_accum)
    return _stock(stock, mat_a, mat_b, scale_a, scale_b, *rest, **kwargs)


def _grouped(plan: Plan, inputs: Sequence[Any]) -> Any:
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
    operands = [a, b, *_contiguous(inputs[2:])]
    # The op pads the rows of its output; consumers rely on the strides in the metadata.
    value = V.current_node.meta["val"]
    size = [a.get_size()[-2], b.get_size()[-1]]
    if plan.problem.divided == "k":
        size = [plan.problem.batch, *size]
    stride = convert_shape_to_inductor(value.stride())
    layout = FixedLayout(a.get_device_or_error(), value.dtype, size, stride)
    return _product(plan, operands, layout)


def fused(*inputs: Any) -> Any:
    """Lower a call by which the planner replaced several nodes with one fused Triton kernel.

    Args:
        inputs: operand A; every weight; the prologue's inputs; for fp8 the scale of A and those of
            the weights; one bias per weight, or none.

    Returns:
        The output; a tuple of one output per weight if there are several weights without gating.
    """
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import lowerings, pointwise_cat, to_dtype
    from torch._inductor.virtualized import V

    call = V.current_node
    plan = plan_of(call)
    assert plan is not None
    problem = plan.problem
    several = len(problem.parts) > 1 and not problem.epilogue.gated
    operands, behind = _operands(plan, inputs)
    a = operands[0]
    value = call.meta["val"]
    dtype = (value[0] if several else value).dtype
    scaled = 1 + len(problem.parts) if problem.operation == "scaled" else 0
    scales, biases = behind[:scaled], behind[scaled:]
    applied = bool(behind) and finishes(plan)
    layout = FixedLayout(
        a.get_device_or_error(),
        torch.float32 if scaled and not applied else dtype,
        [a.get_size()[0], problem.columns],
    )
    if applied:
        node = _product(plan, operands, layout, scales=scales, biases=biases)
        scales, biases = (), ()
    else:
        node = _product(plan, operands, layout)
    assert node is not None
    if scales:
        scale, *others = scales
        rows = [
            lowerings[aten.expand.default](lowerings[aten.view.default](other, [1, -1]), [1, part])
            for other, part in zip(others, problem.parts, strict=True)
        ]
        node = lowerings[aten.mul.Tensor](node, scale)
        node = lowerings[aten.mul.Tensor](node, pointwise_cat(rows, 1))
    if biases:
        node = lowerings[aten.add.Tensor](node, pointwise_cat(biases))
    if behind:
        # Realize here, so that there is one epilogue before the output is split by weight.
        node = to_dtype(node, dtype)
        node.realize()
    if not several:
        return node
    products, first = [], 0
    for index, part in enumerate(problem.parts):
        columns = lowerings[aten.slice.Tensor](node, 1, first, first + part)
        if first and not _may_be_inside(call, index, first * dtype.itemsize):
            columns = lowerings[aten.clone.default](columns)
        products.append(columns)
        first += part
    return tuple(products)


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


fused._inductor_lowering_function = True  # type: ignore[attr-defined]


def with_row_maxima(*inputs: Any) -> Any:
    """Lower a call by which the planner replaced a matmul, its epilogue and a row max or amax.

    Args:
        inputs: operand A; every weight; the prologue's inputs; the epilogue's inputs.

    Returns:
        The output, and the maximum element (or absolute value) of each of its rows.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import empty_strided, lowerings, to_dtype
    from torch._inductor.virtualized import V

    call = V.current_node
    plan = plan_of(call)
    assert plan is not None
    operands, further = _operands(plan, inputs)
    problem, config = _as_it_lies(plan, operands), _launched(plan)
    assert problem is not None
    m, device = operands[0].get_size()[0], operands[0].get_device_or_error()
    values = call.meta["val"]
    layout = FixedLayout(device, values[0].dtype, [m, problem.columns])
    # One partial maximum per tile: needs no initialization, and is deterministic without atomics.
    tiles = empty_strided(
        [tiles_along_n(problem, config.block_n), m], None, dtype=torch.float32, device=device
    )
    choice = _choice(
        problem,
        config,
        [*operands, tiles],
        layout,
        options=_constants(plan),
        mutated_inputs=[tiles],
        epilogue_fn=template_epilogue.epilogue(plan.options["chain"], further, layout),
    )
    assert choice is not None
    output = choice.output_node()
    # A small reduction, for which Inductor would otherwise launch two kernels.
    with inductor_config.patch(split_reductions=False):
        maxima = to_dtype(lowerings[aten.amax.default](tiles, [0]), values[1].dtype)
    return tuple(
        lowerings[aten.view.default](item, [_size(size) for size in value.shape])
        for item, value in zip((output, maxima), values, strict=True)
    )


with_row_maxima._inductor_lowering_function = True  # type: ignore[attr-defined]


def cutlass(*arguments: Any) -> Any:
    """Lower a call by which the planner replaced a matmul and its epilogue with a CUTLASS kernel.

    Args:
        arguments: operand A; operand B; the group end offsets, if grouped; the epilogue's inputs;
            scalars of the epilogue that are known only at run time.

    Returns:
        The output; a tuple if there are several.
    """
    from torch._inductor.ir import ExternKernel, FixedLayout
    from torch._inductor.virtualized import V

    from inductor_ext.lowerings.cutlass_call import call as launch

    node = V.current_node
    plan = plan_of(node)
    assert plan is not None
    config, options = plan.decision.config, plan.options
    assert isinstance(config, CutlassConfig)
    count = 2 + options["ends"] + options["inputs"]
    # The kernel was selected for the strides in the metadata.
    a, b, *rest = (
        ExternKernel.require_exact_strides(
            ExternKernel.realize_input(argument), [_size(s) for s in given.meta["val"].stride()]
        )
        for argument, given in zip(arguments[:count], node.args, strict=False)
    )
    # The kernel assumes that the group offsets are contiguous.
    (ends,) = _contiguous([rest.pop(0)]) if options["ends"] else (None,)
    numbers = iter(arguments[count:])
    scalars = [next(numbers) if option is None else option for option in options["scalars"]]
    values = node.meta["val"]
    layouts = [
        FixedLayout(
            a.get_device_or_error(),
            value.dtype,
            [_size(size) for size in value.shape],
            [_size(stride) for stride in value.stride()],
        )
        for value in (values if isinstance(values, tuple) else (values,))
    ]
    found = launch(config, options["epilogue"], a, b, rest, layouts, scalars=scalars, ends=ends)
    return found if isinstance(values, tuple) else found[0]


cutlass._inductor_lowering_function = True  # type: ignore[attr-defined]


def _size(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def _operands(plan: Plan, inputs: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """Split the inputs of a fused call into the kernel's operands and the remaining inputs."""
    from torch._inductor.ir import ExternKernel
    from torch._inductor.virtualized import V

    count = plan.options.get("operands", len(inputs))
    # Force the planned strides: the kernel assumes that all weights have those of the first.
    operands = [
        ExternKernel.require_exact_strides(
            ExternKernel.realize_input(inp), argument.meta["val"].stride()
        )
        for inp, argument in zip(inputs[:count], V.current_node.args, strict=False)
    ]
    return operands, inputs[count:]


def _constants(plan: Plan) -> dict[str, Any]:
    """Return the plan's options that are constexprs of the kernel (uppercase names)."""
    return {name: value for name, value in plan.options.items() if name.isupper()}


def _product(
    plan: Plan,
    operands: Sequence[Any],
    layout: Any,
    *,
    bias: Any = None,
    alpha: Any = 1,
    beta: Any = 1,
    scales: Sequence[Any] = (),
    biases: Sequence[Any] = (),
) -> Any:
    """Return the output node of a planned kernel; None if the operands do not match the plan.

    Args:
        plan: its decision is a GemmConfig.
        operands: A, the weights, and what else the kernel reads.
        layout: of the output.
        bias: of `addmm`, of any shape.
        alpha: scale of the matmul.
        beta: scale of `bias`.
        scales: of A and of each weight; only if `finishes(plan)`.
        biases: one per weight; only if `finishes(plan)`.
    """
    plan, operands = _realigned(plan, operands)
    problem, config = _as_it_lies(plan, operands), _launched(plan)
    if problem is None:
        return None
    options = _constants(plan)
    if scales or biases:
        operands = [*operands, *_contiguous(scales), *_contiguous(biases)]
        options = {**options, **_behind(scales, biases)}
    if config.split_k > 1 and not config.one_launch:
        return _split(problem, config, operands, layout, options, bias, alpha, beta)
    rest: dict[str, Any] = {}
    if bias is not None and beta == 0:
        # As in ATen, beta == 0 ignores the bias, which may contain inf or NaN.
        bias = None
    if bias is not None:
        from torch._inductor.kernel.mm_common import addmm_epilogue

        rest = {
            "prefix_args": 1,
            "epilogue_fn": addmm_epilogue(layout.dtype, alpha, beta),
            "epilogue_fn_hash": str(["addmm_epilogue", layout.dtype, alpha, beta]),
        }
        operands = [bias, *operands]
    choice = _choice(problem, config, operands, layout, options=options, **rest)
    if choice is None:
        return None
    node = choice.output_node()
    return node if bias is not None or alpha == 1 else _scaled(node, alpha)


def _contiguous(nodes: Sequence[Any]) -> list[Any]:
    from torch._inductor.ir import ExternKernel

    return [ExternKernel.require_contiguous(ExternKernel.realize_input(node)) for node in nodes]


def _behind(scales: Sequence[Any], biases: Sequence[Any]) -> dict[str, Any]:
    """Return the constexprs that select scaling and bias in a kernel's epilogue."""
    from torch._inductor.utils import sympy_product
    from torch._inductor.virtualized import V

    if not scales:
        return {"BIASED": True}
    whole = [
        V.graph.sizevars.statically_known_equals(sympy_product(scale.get_size()), 1)
        for scale in scales
    ]
    row, *columns = (not item for item in whole)
    return {
        "RESCALED": True,
        "ROW_SCALES": row,
        "COLUMN_SCALES": any(columns),
        "BIASED": bool(biases),
    }


def _realigned(plan: Plan, operands: Sequence[Any]) -> tuple[Plan, Sequence[Any]]:
    """Copy operands that the plan realigns; return the plan for the copies, and the operands."""
    from torch._inductor.ir import ExternKernel

    config = plan.decision.config
    assert isinstance(config, GemmConfig)
    problem, own = config.of_kernel(plan.problem)
    if own is config:
        return plan, operands
    a, b, *rest = operands
    copies = [
        item if before == after else ExternKernel.require_exact_strides(item, _strides(item, after))
        for item, before, after in (
            (a, plan.problem.a, problem.a),
            (b, plan.problem.b, problem.b),
        )
    ]
    decision = dataclasses.replace(plan.decision, config=own)
    return dataclasses.replace(plan, problem=problem, decision=decision), [*copies, *rest]


def _strides(node: Any, lies: Operand) -> list[Any]:
    """Return the padded strides of a copy that has the alignment of a realigned operand."""
    *batch, rows, columns = node.get_size()
    by_column = lies.layout == "column"
    inner, outer = (rows, columns) if by_column else (columns, rows)
    leading = _aligned(inner, lies.alignment)
    matrix = [1, leading] if by_column else [leading, 1]
    return [*(leading * outer if lies.batch_stride else 0 for _ in batch), *matrix]


def _aligned(size: Any, unit: int) -> Any:
    """Return `size` rounded up to a multiple of `unit`."""
    from torch.utils._sympy.functions import CeilDiv

    return CeilDiv(size, unit) * unit


def _scaled(node: Any, alpha: Any) -> Any:
    from torch._inductor.lowering import lowerings

    return lowerings[aten.mul.Tensor](node, alpha)


def _choice(problem: GemmProblem, config: GemmConfig, *args: Any, **kwargs: Any) -> Any:
    """Return `inductor_template.choice` of a configuration, or of it without `tma_store`.

    The fallback is for stores that Inductor cannot generate by TMA. There is none while a
    configuration is being benchmarked, as the time would be recorded for the wrong one.
    """
    choice = inductor_template.choice(problem, config, *args, **kwargs)
    if choice is None and config.tma_store and not decide.is_forced():
        config = dataclasses.replace(config, tma_store=False)
        choice = inductor_template.choice(problem, config, *args, **kwargs)
    return choice


def _split(
    problem: GemmProblem,
    config: Any,
    operands: Sequence[Any],
    layout: Any,
    options: Mapping[str, Any],
    bias: Any,
    alpha: Any,
    beta: Any,
) -> Any:
    """Return the output of split-K with a separate reduction kernel; None if `_choice` is None.

    The template stores partial sums as [split_k * M, N]; Inductor's reduction adds them in order.
    """
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import lowerings, to_dtype

    m, n = layout.size
    accumulator = getattr(torch, problem.accumulator)
    sums = FixedLayout(layout.device, accumulator, [config.split_k * m, n])
    choice = _choice(problem, config, operands, sums, options=options)
    if choice is None:
        return None
    node = lowerings[aten.view.default](choice.output_node(), [config.split_k, m, n])
    total = lowerings[aten.sum.dim_IntList](node, [0])
    if alpha != 1:
        total = lowerings[aten.mul.Tensor](total, alpha)
    if bias is not None and beta != 0:
        wide = to_dtype(bias, accumulator)
        scaled = wide if beta == 1 else lowerings[aten.mul.Tensor](wide, beta)
        total = lowerings[aten.add.Tensor](total, scaled)
    return to_dtype(total, layout.dtype)


def _launched(plan: Plan) -> GemmConfig:
    """Return the configuration of a plan with the launch settings of this compile.

    A configuration that is being benchmarked keeps its own `pdl`. A selected one may have been
    benchmarked for another way to launch, so `pdl` is recomputed. `tma_store` is disabled if
    Inductor would fuse a store into the epilogue that TMA does not support.
    """
    from torch._inductor.virtualized import V

    config = plan.decision.config
    assert isinstance(config, GemmConfig)
    if config.tma_store and _stores_bools(V.current_node):
        config = dataclasses.replace(config, tma_store=False)
    if decide.is_forced():
        return config
    can = TEMPLATES[config.template].pdl and plan.device.capability >= (9, 0)
    return dataclasses.replace(config, pdl=can and decide.launches_dependents())


def _stores_bools(node: Any) -> bool:
    """Whether the epilogue stores bools, as the mask of a ReLU that is saved for the backward.

    Triton has no tensor descriptors of bools.
    """
    if not isinstance(getattr(node, "meta", {}).get("val"), torch.Tensor):
        return False
    together = set(epilogue_region.spread(node))
    return any(
        node.meta["val"].dtype is torch.bool and not set(node.users) <= together
        for node in together
    )


def _as_it_lies(plan: Plan, operands: Sequence[Any]) -> GemmProblem | None:
    """Return a plan's problem with the actual layouts of the operands.

    The plan was made for the strides in the FX graph. Returns None if the configuration is not
    legal for the actual ones.
    """
    config = plan.decision.config
    assert isinstance(config, GemmConfig)
    problem = plan.problem
    if config.tma:
        planned = (problem.a, problem.b)
        a, b = (_operand(*item) for item in zip(operands[:2], planned, strict=True))
        if a is None or b is None:
            return None
        problem = dataclasses.replace(problem, a=a, b=b)
    return problem if legal(problem, config, plan.device) else None


def _operand(node: Any, planned: Operand) -> Operand | None:
    """Return an operand with its actual layout; None if it is unknown and may not be as planned."""
    from torch._inductor.virtualized import V

    node.freeze_layout()
    layout = node.get_layout()
    *batch, rows, columns = layout.size
    strides = layout.stride
    if not _is_number(layout.offset):
        return None
    if not all(map(_is_number, strides)):
        known = V.graph.sizevars
        inner = {"row": -1, "column": -2, "strided": None}[planned.layout]
        if inner is None or not known.statically_known_equals(strides[inner], 1):
            return None
        # Static strides may differ from the planned ones too, so pass all of them.
        places = dict(enumerate((layout.offset, *strides), -1 - len(strides)))
        return matmul_nodes.aligned(planned, places, known.statically_known_multiple_of)
    # Sizes only determine which strides matter: that of a dimension of size 1 does not. Hence any
    # symbolic size may be 2.
    shape = (
        int(rows) if _is_number(rows) else 2,
        int(columns) if _is_number(columns) else 2,
    )
    return Operand.of(
        str(layout.dtype).removeprefix("torch."),
        shape,
        (int(strides[-2]), int(strides[-1])),
        batch=2 if batch and batch[0] != 1 else 1,
        batch_stride=int(strides[0]) if batch else 0,
        offset=int(layout.offset),
    )


def _is_number(size: Any) -> bool:
    return isinstance(size, int) or bool(size.is_number)
