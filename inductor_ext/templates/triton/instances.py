"""Choices of Inductor from problems and configurations: the one module here that knows it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from inductor_ext.templates.config import TEMPLATES, GemmConfig
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import gemv, grouped, persistent, tile

__all__ = ["choice"]

_KERNELS: Mapping[str, ModuleType] = {
    "splitk": tile,
    "cp_async": tile,
    "mixed": tile,
    "gemv": gemv,
    "grouped": grouped,
    "persistent_tma": persistent,
    "persistent_tma_ws": persistent,
    "bmm_persistent": persistent,
}
"""The module of the kernel of each template, where it does not load by TMA if that is optional."""


def choice(
    problem: GemmProblem,
    config: GemmConfig,
    inputs: Sequence[Any],
    layout: Any,
    *,
    options: Mapping[str, Any],
    **rest: Any,
) -> Any:
    """The choice (`TritonTemplateCaller`) that computes a problem by a configuration.

    Args:
        problem: sizes are those of a hint where M, or the batch, is symbolic; N and K are static.
        config: legal for the problem.
        inputs: IR nodes: what `rest` says of prefixes; a; every factor b; what a prologue reads;
            of a grouped product a; b; where groups end, int32; of fp8, scales of a and of b.
        layout: of the output, [M, columns] or [batch, M, columns]; [split_k * M, columns] in
            float32 where K is split.
        options: constants that the problem does not tell: the activation, an epsilon.
        rest: what `TritonTemplate.generate` takes besides (prefix_args, epilogue_fn).

    Returns:
        None if Inductor cannot make one.
    """
    kernel = persistent if config.tma and config.template == "splitk" else _KERNELS[config.template]
    a, b = inputs[rest.get("prefix_args", 0) :][:2]
    *batch, m, _ = a.get_size()
    if problem.operation == "grouped":
        batch = [problem.batch]
    return _template(kernel).generate(
        input_nodes=tuple(inputs),
        layout=layout,
        num_stages=config.stages,
        num_warps=config.warps,
        call_sizes=[*(batch or [1]), m],
        triton_meta={"launch_pdl": True} if config.pdl else None,
        **{**kernel.constants(problem, config), **_facts(problem, config, a, b), **options},
        **rest,
    )


def _facts(problem: GemmProblem, config: GemmConfig, a: Any, b: Any) -> dict[str, Any]:
    """Constants that depend on what is static in the graph at hand."""
    from torch._inductor.virtualized import V

    sizes = V.graph.sizevars
    m, k = a.get_size()[-2:]
    multiple_of, equal = sizes.statically_known_multiple_of, sizes.statically_known_equals

    def batched(operand: Any) -> bool:
        """Whether there are several matrices, and not the same one each time."""
        if len(operand.get_size()) == 2 or equal(operand.get_size()[0], 1):
            return False
        return not equal(operand.get_stride()[0], 0)

    # The stride of a dimension of size 1 is whatever the tensor happens to have.
    one = equal(k if problem.a.layout == "column" else m, 1)
    return {
        "PERSISTENT": TEMPLATES[config.template].persistent,
        "EVEN_M": multiple_of(m, config.block_m),
        "EVEN_K": multiple_of(k, config.block_k * config.split_k),
        "BATCHED": len(a.get_size()) == 3,
        "A_BATCHED": batched(a),
        "B_BATCHED": batched(b),
        "A_LEADING": problem.a.leading if one else 0,
    }


@functools.cache
def _template(kernel: ModuleType) -> Any:
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate
    from torch._inductor.utils import get_num_sms

    @SymbolicGridFn
    def grid(
        batch: Any,
        m: Any,
        meta: Mapping[str, Any],
        *,
        cdiv: Callable[..., Any],
        min: Callable[..., Any],  # noqa: A002
    ) -> Any:
        tiles = batch * cdiv(m, meta["BLOCK_M"]) * meta["TILES_N"] * meta["SPLIT_K"]
        return min(tiles, get_num_sms()) if meta["PERSISTENT"] else tiles, 1, 1

    name = kernel.__name__.rpartition(".")[2]
    return TritonTemplate(name=f"inductor_ext_{name}", grid=grid, source=kernel.SOURCE)
