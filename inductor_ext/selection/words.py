"""GEMMs and configurations in words: for tables, records and messages. Pure."""

from __future__ import annotations

from inductor_ext.templates.config import GemmConfig
from inductor_ext.templates.problem import GemmProblem, Operand

__all__ = ["config_name", "problem_words"]


def problem_words(problem: GemmProblem) -> str:
    """A GEMM in one line, such as "mm 16x14336x4096 bfloat16 row*column": M x N x K."""
    size = f"{problem.m}x{problem.n}x{problem.k}"
    batch = f"{problem.batch}x" if problem.batch > 1 else ""
    a, b = problem.a, problem.b
    dtypes = a.dtype if a.dtype == b.dtype else f"{a.dtype}*{b.dtype}"
    words = [f"{problem.operation} {batch}{size} {dtypes} {_layout(a)}*{_layout(b)}"]
    if problem.parts:
        kind = "gated" if problem.epilogue.gated else "parts"
        words.append(f"{kind} {'+'.join(map(str, problem.parts))}")
    if problem.prologue is not None:
        words.append(_prologue(problem))
    epilogue = problem.epilogue
    if epilogue.inputs:
        words.append("with " + "+".join(each.broadcast for each in epilogue.inputs))
    if epilogue.pointwise:
        words.append(f"{epilogue.pointwise} pointwise")
    if epilogue.reductions:
        words.append(f"{epilogue.reductions} reduced over N")
    if problem.stored != a.dtype:
        words.append(f"to {problem.stored}")
    if problem.a.dtype == "float32" and problem.tf32:
        words.append("tf32")
    if problem.deterministic:
        words.append("deterministic")
    return ", ".join(words)


def _layout(operand: Operand) -> str:
    aligned = operand.layout == "strided" or operand.vector_bytes >= 16
    return operand.layout if aligned else f"{operand.layout}@{operand.vector_bytes:g}B"


def _prologue(problem: GemmProblem) -> str:
    prologue = problem.prologue
    assert prologue is not None
    if prologue.kind == "normalize":
        return "normalized"
    scales = f"group of {prologue.group}" if prologue.scales == "group" else prologue.scales
    return f"scales: {scales}" + (" with zero points" if prologue.zero_points else "")


def config_name(config: GemmConfig | None) -> str:
    """A configuration in one word, such as "splitk_16x64x128_s6_w4_k8_swap_tma"; "stock" for None.

    The numbers are the tile (M x N x K), stages, warps and, where there is more than one, splits
    of K and the tiles of a group.
    """
    if config is None:
        return "stock"
    words = [
        config.template,
        f"{config.block_m}x{config.block_n}x{config.block_k}",
        f"s{config.stages}",
        f"w{config.warps}",
    ]
    words += [f"k{config.split_k}"] if config.split_k > 1 else []
    words += [f"g{config.group_m}"] if config.group_m > 1 else []
    # warp_specialize is in the template's name.
    flags = {"swap": config.swap, "tma": config.tma, "flat": config.flatten, "pdl": config.pdl}
    words += [name for name, given in flags.items() if given]
    words += ["i64"] if config.index64 else []
    return "_".join(words)
