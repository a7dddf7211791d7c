"""Emission of a planned GEMM template, shared by the lowerings of ATen ops and of fused calls.

`emit_matmul` checks the plan against the operands' actual layouts, copies operands that the plan
realigns, and returns the output of the template's choice, or None if the plan does not apply: the
caller then uses Inductor's lowering.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from inductor_ext.autotune import decide
from inductor_ext.lowerings.graph import epilogue_region
from inductor_ext.lowerings.graph.matmul_nodes import with_static_alignment
from inductor_ext.lowerings.node_info import Plan
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import Operand
from inductor_ext.templates.triton import inductor_template
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from inductor_ext.templates.triton.templates import TEMPLATES

aten = torch.ops.aten


def emit_matmul(
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
        scales: of A and of each weight; only if `plan.applies_epilogue`.
        biases: one per weight; only if `plan.applies_epilogue`.
    """
    from torch._inductor.lowering import lowerings

    plan, operands = _realign(plan, operands)
    problem, config = with_actual_layouts(plan, operands), launch_config(plan)
    if problem is None:
        return None
    options = plan.constexprs
    if scales or biases:
        operands = [*operands, *as_contiguous(scales), *as_contiguous(biases)]
        options = {**options, **_epilogue_constexprs(scales, biases)}
    if config.split_k > 1 and not config.fused_split_k:
        return _emit_split_k(problem, config, operands, layout, options, bias, alpha, beta)
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
    choice = make_choice(problem, config, operands, layout, options=options, **rest)
    if choice is None:
        return None
    node = choice.output_node()
    return node if bias is not None or alpha == 1 else lowerings[aten.mul.Tensor](node, alpha)


def as_contiguous(nodes: Sequence[Any]) -> list[Any]:
    from torch._inductor.ir import ExternKernel

    return [ExternKernel.require_contiguous(ExternKernel.realize_input(node)) for node in nodes]


def _epilogue_constexprs(scales: Sequence[Any], biases: Sequence[Any]) -> dict[str, Any]:
    """Return the constexprs that select scaling and bias in a kernel's epilogue."""
    from torch._inductor.utils import sympy_product
    from torch._inductor.virtualized import V

    if not scales:
        return {"BIASED": True}
    whole = [
        V.graph.sizevars.statically_known_equals(sympy_product(scale.get_size()), 1)
        for scale in scales
    ]
    row, *columns = (not is_scalar for is_scalar in whole)
    return {
        "RESCALED": True,
        "ROW_SCALES": row,
        "COLUMN_SCALES": any(columns),
        "BIASED": bool(biases),
    }


def _realign(plan: Plan, operands: Sequence[Any]) -> tuple[Plan, Sequence[Any]]:
    """Copy operands that the plan realigns; return the plan for the copies, and the operands."""
    config = plan.decision.config
    assert isinstance(config, GemmConfig)
    problem, kernel_config = config.of_kernel(plan.problem)
    if kernel_config is config:
        return plan, operands
    a, b, *rest = operands
    copies = [
        operand if before == after else _copy_aligned(operand, _padded_strides(operand, after))
        for operand, before, after in (
            (a, plan.problem.a, problem.a),
            (b, plan.problem.b, problem.b),
        )
    ]
    decision = dataclasses.replace(plan.decision, config=kernel_config)
    return dataclasses.replace(plan, problem=problem, decision=decision), [*copies, *rest]


def _copy_aligned(operand: Any, strides: list[Any]) -> Any:
    """Return an operand with the given strides and a 16-byte aligned address."""
    from torch._inductor.ir import ExternKernel, is_unaligned
    from torch._inductor.lowering import clone

    # This copies nothing if the strides are already these, whatever the address is.
    copy = ExternKernel.require_exact_strides(operand, strides)
    return ExternKernel.require_exact_strides(clone(copy), strides) if is_unaligned(copy) else copy


def _padded_strides(node: Any, operand: Operand) -> list[Any]:
    """Return the padded strides of a copy that has the alignment of a realigned operand."""
    from torch.utils._sympy.functions import CeilDiv

    *batch, rows, columns = node.get_size()
    by_column = operand.layout == "column"
    inner, outer = (rows, columns) if by_column else (columns, rows)
    leading = CeilDiv(inner, operand.alignment) * operand.alignment
    matrix = [1, leading] if by_column else [leading, 1]
    return [*(leading * outer if operand.batch_stride else 0 for _ in batch), *matrix]


def make_choice(problem: GemmProblem, config: GemmConfig, *args: Any, **kwargs: Any) -> Any:
    """Return `inductor_template.choice` of a configuration, or of it without `tma_store`.

    The fallback is for stores that Inductor cannot generate by TMA. There is none while a
    configuration is being benchmarked, as the time would be recorded for the wrong one.
    """
    choice = inductor_template.choice(problem, config, *args, **kwargs)
    if choice is None and config.tma_store and not decide.is_forced():
        config = dataclasses.replace(config, tma_store=False)
        choice = inductor_template.choice(problem, config, *args, **kwargs)
    return choice


def _emit_split_k(
    problem: GemmProblem,
    config: Any,
    operands: Sequence[Any],
    layout: Any,
    options: Mapping[str, Any],
    bias: Any,
    alpha: Any,
    beta: Any,
) -> Any:
    """Return the output of split-K with a separate reduction kernel; None if `make_choice` is None.

    The template stores partial sums as [split_k * M, N]; Inductor's reduction adds them in order.
    """
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import lowerings, to_dtype

    m, n = layout.size
    accumulator = getattr(torch, problem.accumulator)
    sums = FixedLayout(layout.device, accumulator, [config.split_k * m, n])
    choice = make_choice(problem, config, operands, sums, options=options)
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


def launch_config(plan: Plan) -> GemmConfig:
    """Return the configuration of a plan with the launch settings of this compile.

    A configuration that is being benchmarked keeps its own `pdl`. A selected one may have been
    benchmarked for another way to launch, so `pdl` is recomputed. `tma_store` is disabled if
    Inductor would fuse a store into the epilogue that TMA does not support.
    """
    from torch._inductor.virtualized import V

    config = plan.decision.config
    assert isinstance(config, GemmConfig)
    if config.tma_store and _has_bool_store(V.current_node):
        config = dataclasses.replace(config, tma_store=False)
    if decide.is_forced():
        return config
    can = TEMPLATES[config.template].pdl and plan.device.capability >= (9, 0)
    return dataclasses.replace(config, pdl=can and decide.launches_dependents())


def _has_bool_store(node: Any) -> bool:
    """Whether the epilogue stores bools, as the mask of a ReLU that is saved for the backward.

    Triton has no tensor descriptors of bools.
    """
    if not isinstance(getattr(node, "meta", {}).get("val"), torch.Tensor):
        return False
    together = set(epilogue_region.reachable_pointwise(node))
    return any(
        node.meta["val"].dtype is torch.bool and not set(node.users) <= together
        for node in together
    )


def with_actual_layouts(plan: Plan, operands: Sequence[Any]) -> GemmProblem | None:
    """Return a plan's problem with the actual layouts of the operands.

    The plan was made for the strides in the FX graph. Returns None if the configuration is not
    legal for the actual ones.
    """
    config = plan.decision.config
    assert isinstance(config, GemmConfig)
    problem = plan.problem
    if config.tma:
        planned_operands = (problem.a, problem.b)
        a, b = (_actual_operand(*pair) for pair in zip(operands[:2], planned_operands, strict=True))
        if a is None or b is None:
            return None
        problem = dataclasses.replace(problem, a=a, b=b)
    return problem if legal(problem, config, plan.device) else None


def _actual_operand(node: Any, operand: Operand) -> Operand | None:
    """Return an operand with its actual layout; None if it is unknown and may not be as planned."""
    from torch._inductor.virtualized import V

    node.freeze_layout()
    layout = node.get_layout()
    *batch, rows, columns = layout.size
    strides = layout.stride
    if not _is_number(layout.offset):
        return None
    if not all(map(_is_number, strides)):
        sizevars = V.graph.sizevars
        inner = {"row": -1, "column": -2, "strided": None}[operand.layout]
        if inner is None or not sizevars.statically_known_equals(strides[inner], 1):
            return None
        # Static strides may differ from the planned ones too, so pass all of them.
        places = dict(enumerate((layout.offset, *strides), -1 - len(strides)))
        return with_static_alignment(operand, places, sizevars.statically_known_multiple_of)
    # Sizes only determine which strides matter: that of a dimension of size 1 does not. Hence any
    # symbolic size may be 2.
    shape = (int(rows) if _is_number(rows) else 2, int(columns) if _is_number(columns) else 2)
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
