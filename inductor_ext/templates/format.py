"""Short descriptions of GEMM problems and configurations, for tables and logs.

The descriptions omit defaults (such as full alignment) and cannot be parsed; `GemmProblem.key` and
`GemmConfig.to_json` are the machine-readable forms.
"""

from __future__ import annotations

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.fused_ops import Prologue
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import VECTOR_BYTES, EpilogueInput
from inductor_ext.templates.triton.config import GemmConfig

_FLAGS = (
    "one_launch",
    "stream_k",
    "swap",
    "tma",
    "tma_store",
    "warp_specialize",
    "flatten",
    "pdl",
    "index64",
    "realign",
)
"""Options of a Triton configuration, by their keys in JSON, which are also the displayed words."""

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def problem_words(problem: GemmProblem) -> str:
    """Return a one-line description such as `mm 16x14336x4096 bf16 rc`.

    It lists the operation, MxNxK, dtypes, the layouts of A and B (r: row-major, c: column-major, s:
    strided), and everything that is not a default.
    """
    sizes = f"{problem.m}x{problem.n}x{problem.k}"
    if problem.batch > 1:
        sizes = f"{problem.batch}x {sizes}"
    a, b, out = (
        _dtype(dtype) for dtype in (problem.a.dtype, problem.b.dtype, problem.stored_dtype)
    )
    dtypes = a if a == b else f"{a}*{b}"
    if out != a:
        dtypes = f"{dtypes}->{out}"
    layouts = problem.a.layout[0] + problem.b.layout[0]
    pieces = [f"{problem.operation} {sizes} {dtypes} {layouts}"]
    for name, operand in (("a", problem.a), ("b", problem.b)):
        if operand.vector_bytes < VECTOR_BYTES:
            pieces.append(f"{name} aligned to {operand.vector_bytes:g} B")
    if problem.batch > 1 and problem.operation != "grouped":
        shared = [name for name in "ab" if getattr(problem, name).batch_stride == 0]
        pieces.extend(f"one {name} for all" for name in shared)
    if problem.divided != "m":
        pieces.append(f"groups along {problem.divided.upper()}")
    if problem.prologue is not None:
        pieces.append(_prologue(problem.prologue))
    epilogue = problem.epilogue
    if epilogue.gated:
        pieces.append("gated")
    elif problem.parts:
        pieces.append("N = " + "+".join(map(str, problem.parts)))
    pieces.extend(f"+ {_input(inp)}" for inp in epilogue.inputs)
    if epilogue.pointwise:
        pieces.append(f"{epilogue.pointwise} pointwise")
    if epilogue.tree is not None:
        pieces.append("with CUTLASS")
    if epilogue.reductions:
        pieces.append("scaled by maxima of rows" if problem.quantized else "maxima of rows")
    for flag in ("deterministic", "tf32", "fast_accumulation"):
        if getattr(problem, flag):
            pieces.append(flag.replace("_", " "))
    if problem.math_flags is not None:
        pieces.append(problem.math_flags)
    return ", ".join(pieces)


def config_words(config: Config | None) -> str:
    """Return a description such as `splitk 16x64x128, 4 stages, 4 warps, split 8`.

    It lists the template, the tile and the options that are set; for a CUTLASS kernel its name and
    its launch options.
    """
    if config is None:
        return "Inductor"
    if isinstance(config, CutlassConfig):
        pieces = [config.name]
        if config.split_k > 1:
            pieces.append(f"split {config.split_k}")
        pieces.append(f"swizzle {config.swizzle}")
        if config.raster != "heuristic":
            pieces.append(config.raster.replace("_", " "))
        return ", ".join([*pieces, *(["swap"] if config.swap_ab else [])])
    pieces = [
        f"{config.template} {config.block_m}x{config.block_n}x{config.block_k}",
        f"{config.num_stages} stages",
        f"{config.num_warps} warps",
    ]
    if config.group_m != GemmConfig.group_m:
        pieces.append(f"group {config.group_m}")
    if config.split_k > 1:
        pieces.append(f"split {config.split_k}")
    form = config.to_json()
    pieces.extend(key.replace("_", " ") for key in _FLAGS if form.get(key))
    return ", ".join(pieces)


def _dtype(name: str) -> str:
    return _SHORT.get(name, name.replace("float8_", "fp8_"))


def _prologue(prologue: Prologue) -> str:
    norm, dequant = prologue.norm, prologue.dequant
    if dequant is None:
        return "a normalized" if norm and norm.kind == "rms" else "a standardized"
    operands = "a normalized, b" if norm else "b"
    scales = {
        "none": "without scales",
        "tensor": "by one scale",
        "column": "by column",
        "group": f"by {dequant.group} along K",
    }[dequant.scales]
    return f"{operands} dequantized {scales}" + (" with zero points" if dequant.zero_points else "")


def _input(input_: EpilogueInput) -> str:
    return f"{input_.broadcast} {_dtype(input_.dtype)}"
