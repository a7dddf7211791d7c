"""Creates Inductor's `TritonTemplateCaller` choices from problems and configurations.

`choice` returns None if Inductor cannot generate a kernel as the configuration says, and warns once
if its code for stores is not the expected code. `template_kernel` has the kernel class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from inductor_ext import events
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig, statistics_depth
from inductor_ext.templates.triton.kernels import (
    dequant_a_stationary,
    dequant_register,
    gemv,
    grouped,
    persistent_tma,
    tile,
)
from inductor_ext.templates.triton.templates import TEMPLATES

_KERNELS: Mapping[str, ModuleType] = {
    "splitk": tile,
    "cp_async": tile,
    "mixed": tile,
    "direct": dequant_register,
    "stationary": dequant_a_stationary,
    "gemv": gemv,
    "grouped": grouped,
    "persistent_tma": persistent_tma,
    "persistent_tma_ws": persistent_tma,
    "bmm_persistent": persistent_tma,
}
"""The kernel module of each template; for templates with optional TMA, the one without TMA."""


def choice(
    problem: GemmProblem,
    config: GemmConfig,
    inputs: Sequence[Any],
    layout: Any,
    *,
    options: Mapping[str, Any],
    **rest: Any,
) -> Any:
    """Return the choice (`TritonTemplateCaller`) that computes a problem with a configuration.

    Args:
        problem: sizes are size hints where they are symbolic. With fused weights, a prologue or a
            gate only M may be symbolic; with groups only the dimension that they divide.
        config: legal for the problem.
        inputs: IR nodes: prefix args; a; every weight b; what a prologue reads; any biases of gate
            and up projection. For a grouped GEMM a; b; the int32 end offsets of the groups; for
            fp8, the scales of a and b. With `ABSOLUTE`, last an output [tiles along N, M] in
            float32 for the row amax.
        layout: layout of the output, [M, columns] or [batch, M, columns]; [split_k * M, columns] in
            float32 if K is split and another kernel reduces the splits.
        options: constants that do not follow from the problem: the activation, an epsilon;
            `ABSOLUTE`, if tiles compute row maxima: whether those are of absolute values.
        rest: further arguments of `TritonTemplate.generate` (prefix_args, epilogue_fn).

    Returns:
        None if Inductor cannot generate the kernel as the configuration says.
    """
    if config.tma_store and not _has_aligned_rows(layout):
        return None
    kernel = (
        persistent_tma if config.tma and config.template == "splitk" else _KERNELS[config.template]
    )
    a, b = inputs[rest.get("prefix_args", 0) :][:2]
    *batch, m, k = a.get_size()
    n = b.get_size()[-1]
    if problem.operation == "grouped":
        batch = [problem.batch]
    constants = {**kernel.constants(problem, config), **_facts(problem, config, a, b), **options}
    if TEMPLATES[config.template].direct and not constants["EVEN_K"]:
        return None
    if kernel is dequant_a_stationary and _is_unknown(n):
        return None
    for size, names in ((n, ("TILES_N",)), (k, ("K", "SHARE"))):
        if _is_unknown(size):
            # The kernel computes these values if they are not given as constants.
            constants = {name: value for name, value in constants.items() if name not in names}
    caller = _template(kernel).generate(
        input_nodes=tuple(inputs),
        layout=layout,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        call_sizes=[*(batch or [1]), m, n],
        triton_meta={"launch_pdl": True} if config.pdl else None,
        **constants,
        **rest,
    )
    if config.tma_store and caller is not None and not _stores_by_tma(caller):
        return None
    return caller


def _stores_by_tma(caller: Any) -> bool:
    """Whether a choice's code has the TMA store that it should have; warn if not."""
    from inductor_ext.templates.triton import template_kernel

    if template_kernel.stores_by_tma(caller):
        return True
    events.warn_once(
        "tma_store",
        "Inductor generates unexpected code for storing a tile, so GEMM kernels do not use TMA "
        "stores. Results are not affected. Please report this with your torch version.",
    )
    return False


def _has_aligned_rows(layout: Any) -> bool:
    """Whether the rows of an output are known to be multiples of 16 bytes, as TMA requires."""
    from torch._inductor.virtualized import V

    row = layout.size[-1] * layout.dtype.itemsize
    return bool(V.graph.sizevars.statically_known_multiple_of(row, 16))


def _facts(problem: GemmProblem, config: GemmConfig, a: Any, b: Any) -> dict[str, Any]:
    """Return constants that depend on which sizes and strides are static in the current graph."""
    from torch._inductor.virtualized import V

    sizes = V.graph.sizevars
    m, k = a.get_size()[-2:]
    n = b.get_size()[-1]
    multiple_of, equal = sizes.statically_known_multiple_of, sizes.statically_known_equals

    def batched(operand: Any) -> bool:
        """Whether the operand has a batch of more than one matrix with a non-zero batch stride."""
        if len(operand.get_size()) == 2 or equal(operand.get_size()[0], 1):
            return False
        return not equal(operand.get_stride()[0], 0)

    # The tensor's stride of a dimension of size 1 is arbitrary.
    is_unit = equal(k if problem.a.layout == "column" else m, 1)
    facts = {
        "PERSISTENT": TEMPLATES[config.template].persistent,
        "EVEN_M": multiple_of(m, config.block_m),
        "EVEN_K": multiple_of(k, config.block_k * config.split_k),
        "EVEN_DEPTH": multiple_of(k, statistics_depth(problem, config)),
        "BATCHED": len(a.get_size()) == 3,
        "A_BATCHED": batched(a),
        "B_BATCHED": batched(b),
        "A_LEADING": problem.a.leading if is_unit else 0,
    }
    if _is_unknown(n):
        facts["EVEN_N"] = multiple_of(n, config.block_n)
    return facts


def _is_unknown(size: Any) -> bool:
    return not isinstance(size, int) and not size.is_number


@functools.cache
def _template(kernel: ModuleType) -> Any:
    from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate
    from torch._inductor.utils import get_num_sms

    from inductor_ext.templates.triton import template_kernel

    name = kernel.__name__.rpartition(".")[2]

    class Kernel(template_kernel.GemmKernel):
        source_name = name

    class Template(TritonTemplate):
        kernel_type = Kernel

    @SymbolicGridFn
    def grid(
        batch: Any,
        m: Any,
        n: Any,
        meta: Mapping[str, Any],
        *,
        cdiv: Callable[..., Any],
        min: Callable[..., Any],  # noqa: A002
    ) -> Any:
        tiles = template_kernel.count_tiles(batch, m, n, meta, cdiv) * meta["SPLIT_K"]
        return min(tiles, get_num_sms()) if meta["PERSISTENT"] else tiles, 1, 1

    return Template(name=f"inductor_ext_{name}", grid=grid, source=kernel.SOURCE)
