"""Choices of Inductor from problems and configurations: the one module here that knows it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from inductor_ext.templates.config import GemmConfig
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import tile

__all__ = ["choice"]

_KERNELS: Mapping[str, ModuleType] = {"splitk": tile, "cp_async": tile, "mixed": tile}
"""The module of the kernel of each template."""


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
        problem: sizes are those of a hint where M is symbolic.
        config: legal for the problem.
        inputs: IR nodes: what `rest` says of prefixes; a; every factor b; what a prologue reads.
        layout: of the output, [M, columns]; [split_k * M, columns] in float32 where K is split.
        options: constants that the problem does not tell: the activation, an epsilon.
        rest: what `TritonTemplate.generate` takes besides (prefix_args, epilogue_fn).

    Returns:
        None if Inductor cannot make one.
    """
    from torch._inductor.virtualized import V

    kernel = _KERNELS[config.template]
    a = inputs[rest.get("prefix_args", 0)]
    m, k = a.get_size()
    sizes = V.graph.sizevars
    constants = {
        **kernel.constants(problem, config),
        "EVEN_M": sizes.statically_known_multiple_of(m, config.block_m),
        "EVEN_K": sizes.statically_known_multiple_of(k, config.block_k * config.split_k),
        **options,
    }
    return _template(kernel).generate(
        input_nodes=tuple(inputs),
        layout=layout,
        num_stages=config.stages,
        num_warps=config.warps,
        call_sizes=[m, layout.size[1]],
        triton_meta={"launch_pdl": True} if config.pdl else None,
        **constants,
        **rest,
    )


@functools.cache
def _template(kernel: ModuleType) -> Any:
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

    @SymbolicGridFn
    def grid(m: Any, n: Any, meta: Mapping[str, Any], *, cdiv: Callable[..., Any]) -> Any:
        return cdiv(m, meta["BLOCK_M"]) * meta["TILES_N"], meta["SPLIT_K"], 1

    name = kernel.__name__.rpartition(".")[2]
    return TritonTemplate(name=f"inductor_ext_{name}", grid=grid, source=kernel.SOURCE)
