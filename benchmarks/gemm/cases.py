"""The GEMM cases of the benchmark, as data, and the user code of every case.

Sizes are those of model layers: Llama-3 8B (hidden size 4096, MLP size 14336, 8 KV heads), and 70B
with tensor parallelism over 8 GPUs, at decode, small and large batches, and prefill. In addition
there are shapes that libraries handle badly, int8 and int4 weights, fp8, and GEMMs with the
operations that models compute directly before and after them.

FLOP, bytes and the roofline are those of the case's `GemmProblem`.

    program = CASES["llama-8b o 16x4096x4096"].program("cuda")
    program.function(*program.inputs)
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gemm.models import int4_linear, int8_linear, pack_int4
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem, KernelDetails
from inductor_ext.templates.tensors import EpilogueInput

__all__ = ["CASES", "GROUPS", "Case", "Program"]

GROUPS = (
    "llama",
    "square",
    "unaligned",
    "skinny",
    "bmm",
    "grouped",
    "int8",
    "int4",
    "fp8",
    "fused",
    "quantized",
    "frozen",
)

ROWS = (1, 4, 16, 64, 256, 2048, 8192)
"""M of the plain layers."""

DECODE_AND_PREFILL = (1, 16, 2048)
"""M of all fused or quantized cases."""

QKV = (4096, 1024, 1024)
"""N of the Q, K and V projections."""

INT4_GROUP = 128
"""Elements along K that share a scale."""

FP8_MAX = 448.0
"""The largest float8_e4m3fn value."""

GELU_OPERATIONS = 25
"""A bias and an erf GELU, as counted by `lowerings.graph.epilogue_region`."""

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Program:
    """A case's computation on tensors of its sizes."""

    function: Callable[..., Any]
    """Returns a tensor, or a tuple of tensors."""
    inputs: tuple[Tensor, ...]
    reference: Callable[[], tuple[Tensor, ...]]
    """Returns the results in float64."""
    alternatives: Mapping[str, Callable[[], Any]]
    """Other ways to compute the same layer, run without compiling: "bf16" for the layer that is not
    quantized."""
    frozen: bool = False
    """Whether to compile with Inductor's `freezing`: the weights are parameters of a module, not
    inputs."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM case of the suite."""

    group: str
    label: str
    kind: str
    """A key of `KINDS`."""
    m: int
    n: int
    """N of one operand B; for gated kinds, of each of the two weights."""
    k: int
    batch: int = 1
    layouts: str = "rc"
    """Layouts of both operands of a batched or grouped GEMM, as in `GemmProblem.contiguous`."""
    parts: tuple[int, ...] = ()
    """N of several weights that share the input; their sum is `n`."""
    quick: bool = False
    """Whether the case belongs to the small representative subset (`--quick`)."""

    @property
    def name(self) -> str:
        """The case's name, unique in the suite."""
        sizes = f"{self.m}x{self.n}x{self.k}"
        return f"{self.label} {f'{self.batch}x' if self.batch > 1 else ''}{sizes}"

    @functools.cached_property
    def problem(self) -> GemmProblem:
        """The GEMM problem, with everything that can be fused into it."""
        return KINDS[self.kind].problem(self)

    def program(self, device: str | torch.device, seed: int = 0) -> Program:
        """Return the computation, with random inputs scaled so that results are of order 1."""
        generator = torch.Generator(device).manual_seed(seed)
        return KINDS[self.kind].program(self, _Source(device, generator))


@dataclasses.dataclass(frozen=True)
class _Source:
    """Generates random tensors."""

    device: str | torch.device
    generator: torch.Generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        value = torch.randn(
            shape, dtype=torch.bfloat16, device=self.device, generator=self.generator
        )
        return value.mul_(scale)

    def weight(self, n: int, k: int) -> Tensor:
        """Return a weight [n, k], in the layout of nn.Linear."""
        return self.normal(n, k, scale=k**-0.5)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return integers in [low, high)."""
        return torch.randint(
            low, high, shape, dtype=dtype, device=self.device, generator=self.generator
        )

    def scales(self, *shape: int, around: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return positive scales within a factor of 2 of each other."""
        value = torch.rand(shape, device=self.device, generator=self.generator)
        return ((value + 1) * around).to(dtype)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Maps a case to its GEMM problem and to the user code."""

    problem: Callable[[Case], GemmProblem]
    program: Callable[[Case, _Source], Program]


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _make_program(
    function: Callable[..., Any],
    *inputs: Tensor,
    alternatives: Mapping[str, Callable[[], Any]] | None = None,
) -> Program:
    """Return a program whose reference is the function with floating-point inputs in float64."""

    def reference() -> tuple[Tensor, ...]:
        wide = (inp.double() if inp.is_floating_point() else inp for inp in inputs)
        return _as_tuple(function(*wide))

    return Program(function, inputs, reference, alternatives or {})


# A problem and a program for every kind.


def _make_mm_problem(case: Case, **rest: Any) -> GemmProblem:
    return GemmProblem.contiguous("mm", case.m, case.n, case.k, **rest)


def _make_mm(case: Case, source: _Source) -> Program:
    return _make_program(F.linear, source.normal(case.m, case.k), source.weight(case.n, case.k))


def _make_bmm_problem(case: Case) -> GemmProblem:
    return GemmProblem.contiguous(
        "bmm", case.m, case.n, case.k, batch=case.batch, layouts=case.layouts
    )


def _make_bmm(case: Case, source: _Source) -> Program:
    def operand(rows: int, columns: int, layout: str, scale: float) -> Tensor:
        if layout == "r":
            return source.normal(case.batch, rows, columns, scale=scale)
        return source.normal(case.batch, columns, rows, scale=scale).transpose(1, 2)

    a = operand(case.m, case.k, case.layouts[0], 1.0)
    return _make_program(torch.bmm, a, operand(case.k, case.n, case.layouts[1], case.k**-0.5))


def _make_grouped_problem(case: Case) -> GemmProblem:
    divided: Any = case.kind[-1]
    sizes = case.m, case.n, case.k
    return GemmProblem.contiguous(
        "grouped", *sizes, batch=case.batch, layouts=case.layouts, divided=divided
    )


def _make_grouped(case: Case, source: _Source) -> Program:
    """Grouped GEMM with equal groups; the kind ends with the dimension that the groups divide."""
    divided, sizes = case.kind[-1], {"m": case.m, "n": case.n, "k": case.k}
    length = sizes[divided] // case.batch
    depth = length if divided == "k" else case.k

    def operand(rows: str, columns: str, other: str, layout: str, scale: float) -> Tensor:
        batch = (case.batch,) if divided == other else ()
        if layout == "r":
            return source.normal(*batch, sizes[rows], sizes[columns], scale=scale)
        transposed = source.normal(*batch, sizes[columns], sizes[rows], scale=scale)
        return transposed.transpose(-1, -2)

    a = operand("m", "k", "n", case.layouts[0], 1.0)
    b = operand("k", "n", "m", case.layouts[1], depth**-0.5)
    ends = torch.arange(1, case.batch + 1, dtype=torch.int32, device=source.device) * length

    def function(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=ends)

    def reference() -> tuple[Tensor, ...]:
        def split(operand: Tensor, axis: int | None) -> Any:
            return operand.double() if axis is None else operand.double().split(length, axis)

        a_parts = split(a, {"m": 0, "n": None, "k": 1}[divided])
        b_parts = split(b, {"m": None, "n": 1, "k": 0}[divided])
        outputs = [a_part @ b_part for a_part, b_part in zip(a_parts, b_parts, strict=True)]
        join = torch.stack if divided == "k" else torch.cat
        return (join(outputs, 1 if divided == "n" else 0),)

    return Program(function, (a, b, ends), reference, {})


def _make_int8_problem(case: Case) -> GemmProblem:
    return GemmProblem.contiguous("mixed", case.m, case.n, case.k, b_dtype="int8")


def _plain_int8_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Compute an int8-weight linear layer as written by hand.

    Inductor generates another kernel for torchao's form."""
    return F.linear(x, weight.to(x.dtype)) * scales


def _make_int8(case: Case, source: _Source) -> Program:
    function = int8_linear if case.kind == "int8_torchao" else _plain_int8_linear
    x = source.normal(case.m, case.k)
    weight = source.integers(-127, 128, case.n, case.k, dtype=torch.int8)
    # The standard deviation of these uniform integers is 73.
    scales = source.scales(case.n, around=case.k**-0.5 / 73)
    wide = source.weight(case.n, case.k)
    return _make_program(
        function, x, weight, scales, alternatives={"bf16": lambda: F.linear(x, wide)}
    )


def _make_int4_problem(case: Case) -> GemmProblem:
    prologue = Prologue(dequant=Dequant("group", INT4_GROUP))
    return GemmProblem.contiguous(
        "mixed", case.m, case.n, case.k, b_dtype="uint4", prologue=prologue
    )


def _make_int4(case: Case, source: _Source) -> Program:
    x = source.normal(case.m, case.k)
    weight = pack_int4(source.integers(0, 16, case.n, case.k, dtype=torch.uint8))
    # The standard deviation of these uniform integers is 4.6.
    scales = source.scales(case.n, case.k // INT4_GROUP, around=case.k**-0.5 / 4.6)
    wide = source.weight(case.n, case.k)
    return _make_program(
        int4_linear, x, weight, scales, alternatives={"bf16": lambda: F.linear(x, wide)}
    )


def _scaled(function: Callable[..., Tensor], *inputs: Tensor) -> Program:
    """Return a program for x and weights with per-row and per-column scales after the matmul."""

    def reference() -> tuple[Tensor, ...]:
        wide, wide_weight, rows, columns = (inp.double() for inp in inputs)
        return ((wide @ wide_weight.t()) * rows * columns,)

    return Program(function, inputs, reference, {})


def _make_fp8_problem(case: Case) -> GemmProblem:
    inputs = (EpilogueInput("float32", "column"), EpilogueInput("float32", "row"))
    return GemmProblem.contiguous(
        "scaled",
        case.m,
        case.n,
        case.k,
        "float8_e4m3fn",
        epilogue=Epilogue(inputs),
        fast_accumulation=True,
    )


def _fp8_linear(x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor) -> Tensor:
    return torch._scaled_mm(
        x, weight.t(), x_scales, weight_scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _make_fp8(case: Case, source: _Source) -> Program:
    x = source.normal(case.m, case.k).to(torch.float8_e4m3fn)
    weight = source.normal(case.n, case.k).to(torch.float8_e4m3fn)
    x_scales = source.scales(case.m, 1, around=1.0, dtype=torch.float32)
    weight_scales = source.scales(1, case.n, around=case.k**-0.5, dtype=torch.float32)
    return _scaled(_fp8_linear, x, weight, x_scales, weight_scales)


def _make_int8_by_int8_problem(case: Case) -> GemmProblem:
    inputs = (EpilogueInput("float32", "column"), EpilogueInput("bfloat16", "row"))
    epilogue = Epilogue(inputs, 2, out="bfloat16")
    return GemmProblem.contiguous("int_mm", case.m, case.n, case.k, "int8", epilogue=epilogue)


def _int8_by_int8_linear(
    x: Tensor, weight: Tensor, x_scales: Tensor, weight_scales: Tensor
) -> Tensor:
    return (torch._int_mm(x, weight.t()).float() * x_scales * weight_scales).to(torch.bfloat16)


def _make_int8_by_int8(case: Case, source: _Source) -> Program:
    """Both operands are int8, as in torchao's dynamic quantization."""
    x = source.integers(-127, 128, case.m, case.k, dtype=torch.int8)
    weight = source.integers(-127, 128, case.n, case.k, dtype=torch.int8)
    # The standard deviation of these uniform integers is 73.
    x_scales = source.scales(case.m, 1, around=1 / 73, dtype=torch.float32)
    weight_scales = source.scales(case.n, around=case.k**-0.5 / 73)
    return _scaled(_int8_by_int8_linear, x, weight, x_scales, weight_scales)


def _make_several_problem(case: Case) -> GemmProblem:
    """Return the problem of a quantized gate-up pair, or of the quantized weights of `parts`."""
    weights, _, layer = case.kind.partition("_")
    parts = case.parts or (case.n, case.n)
    whole = dataclasses.replace(case, n=sum(parts), kind=weights)
    epilogue = Epilogue(gated=layer == "swiglu")
    problem = {"int8": _make_int8_problem, "int4": _make_int4_problem, "fp8": _make_fp8_problem}[
        weights
    ](whole)
    if weights == "fp8":
        epilogue = problem.epilogue
    return dataclasses.replace(problem, parts=parts, epilogue=epilogue)


def _make_several(case: Case, source: _Source) -> Program:
    weights, _, kind = case.kind.partition("_")
    make = {"int8": _make_int8, "int4": _make_int4, "fp8": _make_fp8}[weights]
    parts = case.parts or (case.n, case.n)
    programs = [
        make(dataclasses.replace(case, n=part, kind=_TORCHAO.get(weights, weights)), source)
        for part in parts
    ]
    layer = programs[0].function
    # The first input is shared, together with its scales if it is quantized.
    shared = (0, 2) if weights == "fp8" else (0,)
    separate = [index for index in range(len(programs[0].inputs)) if index not in shared]

    def function(*inputs: Tensor) -> Any:
        common, rest = inputs[: len(shared)], inputs[len(shared) :]
        outputs = []
        for index in range(len(parts)):
            arguments: dict[int, Tensor] = dict(zip(shared, common, strict=True))
            arguments |= zip(separate, rest[len(separate) * index :], strict=False)
            outputs.append(layer(*(arguments[position] for position in sorted(arguments))))
        return F.silu(outputs[0]) * outputs[1] if kind == "swiglu" else tuple(outputs)

    inputs = [programs[0].inputs[position] for position in shared]
    inputs += [program.inputs[position] for program in programs for position in separate]
    if weights == "fp8":

        def reference() -> tuple[Tensor, ...]:
            x, x_scales, *rest = (inp.double() for inp in inputs)
            pairs = zip(rest[::2], rest[1::2], strict=True)
            return tuple((x @ weight.t()) * x_scales * scales for weight, scales in pairs)

        return Program(function, tuple(inputs), reference, {})
    x, wide = inputs[0], [source.weight(part, case.k) for part in parts]

    def bf16() -> Any:
        outputs = [F.linear(x, item) for item in wide]
        return F.silu(outputs[0]) * outputs[1] if kind == "swiglu" else tuple(outputs)

    return _make_program(function, *inputs, alternatives={"bf16": bf16})


_TORCHAO = {"int8": "int8_torchao"}
"""Maps the weight type to the kind in torchao's form, where there are several forms."""


def _make_bias_gelu_problem(case: Case) -> GemmProblem:
    epilogue = Epilogue((EpilogueInput("bfloat16", "row"),), GELU_OPERATIONS)
    return GemmProblem.contiguous("addmm", case.m, case.n, case.k, epilogue=epilogue)


def _make_bias_gelu(case: Case, source: _Source) -> Program:
    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.linear(x, weight, bias))

    x, weight = source.normal(case.m, case.k), source.weight(case.n, case.k)
    return _make_program(function, x, weight, source.normal(case.n))


def _make_residual_problem(case: Case) -> GemmProblem:
    epilogue = Epilogue((EpilogueInput("bfloat16", "matrix"),), 1)
    return GemmProblem.contiguous("addmm", case.m, case.n, case.k, epilogue=epilogue)


def _make_residual(case: Case, source: _Source) -> Program:
    def function(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(x, weight)

    x, weight = source.normal(case.m, case.k), source.weight(case.n, case.k)
    return _make_program(function, x, weight, source.normal(case.m, case.n))


def _make_swiglu_problem(case: Case) -> GemmProblem:
    return GemmProblem.contiguous(
        "mm",
        case.m,
        2 * case.n,
        case.k,
        parts=(case.n, case.n),
        epilogue=Epilogue(gated=True),
    )


def _make_swiglu(case: Case, source: _Source) -> Program:
    def function(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    gate, up = source.weight(case.n, case.k), source.weight(case.n, case.k)
    return _make_program(function, source.normal(case.m, case.k), gate, up)


def _make_swiglu_fp8_problem(case: Case) -> GemmProblem:
    problem = _make_swiglu_problem(case)
    epilogue = Epilogue(gated=True, reductions=1, out="float8_e4m3fn")
    return dataclasses.replace(problem, epilogue=epilogue)


def _make_swiglu_fp8(case: Case, source: _Source) -> Program:
    """SwiGLU quantized to fp8 by row amax, as the input of the next fp8 matmul."""

    def scale_of(y: Tensor) -> Tensor:
        return y.abs().amax(-1, keepdim=True).to(torch.float32).clamp(min=1e-12) / FP8_MAX

    def function(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(F.linear(x, gate)) * F.linear(x, up)
        scale = scale_of(y)
        scaled = (y.to(torch.float32) / scale).clamp(-FP8_MAX, FP8_MAX)
        return scaled.to(torch.float8_e4m3fn), scale

    gate, up = source.weight(case.n, case.k), source.weight(case.n, case.k)
    x = source.normal(case.m, case.k)

    def reference() -> tuple[Tensor, ...]:
        wide, wide_gate, wide_up = x.double(), gate.double(), up.double()
        y = F.silu(F.linear(wide, wide_gate)) * F.linear(wide, wide_up)
        scale = y.abs().amax(-1, keepdim=True) / FP8_MAX
        return y / scale, scale

    return Program(function, (x, gate, up), reference, {})


def _make_geglu_problem(case: Case) -> GemmProblem:
    return GemmProblem.contiguous(
        "addmm",
        case.m,
        2 * case.n,
        case.k,
        parts=(case.n, case.n),
        epilogue=Epilogue((EpilogueInput("bfloat16", "row"),), 1, gated=True),
        details=KernelDetails(activation="gelu", packed_first="up"),
    )


def _make_geglu(case: Case, source: _Source) -> Program:
    """GEGLU as in the transformers of diffusion models."""

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden, gate = F.linear(x, weight, bias).chunk(2, dim=-1)
        return hidden * F.gelu(gate)

    x, weight = source.normal(case.m, case.k), source.weight(2 * case.n, case.k)
    return _make_program(function, x, weight, source.normal(2 * case.n))


def _make_qkv_problem(case: Case) -> GemmProblem:
    return _make_mm_problem(case, parts=case.parts)


def _make_qkv(case: Case, source: _Source) -> Program:
    def function(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in weights)

    weights = [source.weight(n, case.k) for n in case.parts]
    return _make_program(function, source.normal(case.m, case.k), *weights)


class _Projections(nn.Module):
    """QKV projections, with outputs as in attention and the KV cache: [heads, M, head_dim]."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight, False) for weight in weights)
        self.head = math.gcd(128, *(len(weight) for weight in weights))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outputs = (F.linear(x, weight) for weight in self.weights)
        heads = (output.unflatten(-1, (-1, self.head)) for output in outputs)
        return tuple(head.transpose(0, 1).contiguous() for head in heads)


def _make_qkv_frozen(case: Case, source: _Source) -> Program:
    module = _Projections([source.weight(n, case.k) for n in case.parts])
    x = source.normal(case.m, case.k)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(module(x))

    def reference() -> tuple[Tensor, ...]:
        return tuple(copy.deepcopy(module).double()(x.double()))

    return Program(function, (x,), reference, {}, frozen=True)


def _make_rmsnorm_problem(case: Case) -> GemmProblem:
    return _make_mm_problem(case, prologue=Prologue(RowNorm("rms", 1)))


def _make_rmsnorm(case: Case, source: _Source) -> Program:
    def function(x: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (x.shape[-1],), norm, EPSILON), weight)

    x = source.normal(case.m, case.k)
    return _make_program(
        function, x, source.scales(case.k, around=0.7), source.weight(case.n, case.k)
    )


def _make_layernorm_problem(case: Case) -> GemmProblem:
    epilogue = Epilogue((EpilogueInput("bfloat16", "row"),), 1)
    prologue = Prologue(RowNorm("layer", 2))
    return GemmProblem.contiguous(
        "addmm",
        case.m,
        case.n,
        case.k,
        parts=case.parts,
        prologue=prologue,
        epilogue=epilogue,
    )


def _make_layernorm(case: Case, source: _Source) -> Program:
    parts = case.parts or (case.n,)

    def function(x: Tensor, norm: Tensor, shift: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        y = F.layer_norm(x, (x.shape[-1],), norm, shift, EPSILON)
        pairs = zip(rest[: len(parts)], rest[len(parts) :], strict=True)
        return tuple(F.linear(y, weight, bias) for weight, bias in pairs)

    vectors = source.scales(case.k, around=0.7), source.normal(case.k, scale=0.1)
    weights = [source.weight(n, case.k) for n in parts]
    biases = [source.normal(n) for n in parts]
    return _make_program(function, source.normal(case.m, case.k), *vectors, *weights, *biases)


KINDS: Mapping[str, Kind] = {
    "mm": Kind(_make_mm_problem, _make_mm),
    "bmm": Kind(_make_bmm_problem, _make_bmm),
    **{f"grouped_{divided}": Kind(_make_grouped_problem, _make_grouped) for divided in "mnk"},
    "int8": Kind(_make_int8_problem, _make_int8),
    "int8_torchao": Kind(_make_int8_problem, _make_int8),
    "int4": Kind(_make_int4_problem, _make_int4),
    "fp8": Kind(_make_fp8_problem, _make_fp8),
    "int8_by_int8": Kind(_make_int8_by_int8_problem, _make_int8_by_int8),
    **{
        f"{weights}_{layer}": Kind(_make_several_problem, _make_several)
        for weights, layer in (
            ("int8", "qkv"),
            ("int8", "swiglu"),
            ("int4", "qkv"),
            ("int4", "swiglu"),
            ("fp8", "qkv"),
        )
    },
    "bias_gelu": Kind(_make_bias_gelu_problem, _make_bias_gelu),
    "residual": Kind(_make_residual_problem, _make_residual),
    "swiglu": Kind(_make_swiglu_problem, _make_swiglu),
    "swiglu_fp8": Kind(_make_swiglu_fp8_problem, _make_swiglu_fp8),
    "geglu": Kind(_make_geglu_problem, _make_geglu),
    "qkv": Kind(_make_qkv_problem, _make_qkv),
    "qkv_frozen": Kind(_make_qkv_problem, _make_qkv_frozen),
    "rmsnorm": Kind(_make_rmsnorm_problem, _make_rmsnorm),
    "layernorm": Kind(_make_layernorm_problem, _make_layernorm),
    "layernorm_qkv": Kind(_make_layernorm_problem, _make_layernorm),
}


# The suite.

LAYERS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "llama-8b": {
        "kv": (1024, 4096),
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate": (14336, 4096),
        "down": (4096, 14336),
    },
    "llama-70b-tp8": {
        "kv": (128, 8192),
        "qkv": (1280, 8192),
        "o": (8192, 1024),
        "gate": (3584, 8192),
        "down": (8192, 3584),
    },
}
"""N and K of a layer's weights: `kv` is K or V alone, `qkv` is one merged weight, `o` is the output
projection (in 8B also Q), `gate` is the gate or the up projection."""

QUICK_LLAMA = frozenset(
    {
        ("llama-8b", "kv", 1),
        ("llama-8b", "o", 1),
        ("llama-8b", "gate", 16),
        ("llama-8b", "down", 64),
        ("llama-8b", "qkv", 256),
        ("llama-8b", "o", 2048),
        ("llama-8b", "gate", 8192),
        ("llama-70b-tp8", "o", 4),
        ("llama-70b-tp8", "gate", 16),
        ("llama-70b-tp8", "qkv", 64),
        ("llama-70b-tp8", "down", 2048),
    }
)


def _yield_llama() -> Iterator[Case]:
    for (model, layers), m in itertools.product(LAYERS.items(), ROWS):
        for layer, (n, k) in layers.items():
            quick = (model, layer, m) in QUICK_LLAMA
            yield Case("llama", f"{model} {layer}", "mm", m, n, k, quick=quick)


def _yield_quantized() -> Iterator[Case]:
    for kind, (n, k), m in itertools.product(
        ("int8", "int4"), ((14336, 4096), (4096, 14336)), DECODE_AND_PREFILL
    ):
        yield Case(kind, f"{kind} weight", kind, m, n, k, quick=n > k and m > 1)
    for m in DECODE_AND_PREFILL:
        yield Case("int8", "int8 torchao", "int8_torchao", m, 14336, 4096, quick=m == 16)


def _yield_quantized_layers() -> Iterator[Case]:
    """Yield int8 and int4 weights that share an input, fp8 QKV, and int8 by int8."""
    for weights in ("int8", "int4"):
        for m in DECODE_AND_PREFILL[:2]:
            quick = m == 16
            yield Case(
                "quantized",
                f"{weights} SwiGLU",
                f"{weights}_swiglu",
                m,
                14336,
                4096,
                quick=quick,
            )
            yield Case(
                "quantized",
                f"{weights} QKV",
                f"{weights}_qkv",
                m,
                6144,
                4096,
                parts=QKV,
                quick=quick,
            )
    for m in DECODE_AND_PREFILL[1:]:
        yield Case("quantized", "fp8 QKV", "fp8_qkv", m, 6144, 4096, parts=QKV, quick=m == 16)
    # cuBLAS has no int8 kernels for M <= 16.
    for m in (64, 2048):
        yield Case("quantized", "int8 by int8", "int8_by_int8", m, 14336, 4096, quick=m > 64)


_RARELY_QUICK = ("geglu", "layernorm", "layernorm_qkv")
"""Kinds with only one representative (quick) case."""


def _yield_fused() -> Iterator[Case]:
    kinds: tuple[tuple[str, str, int, int, tuple[int, ...]], ...] = (
        ("QKV", "qkv", 6144, 4096, QKV),
        ("SwiGLU", "swiglu", 14336, 4096, ()),
        ("GEGLU", "geglu", 5120, 1280, ()),
        ("RMSNorm + linear", "rmsnorm", 4096, 4096, ()),
        ("LayerNorm + linear", "layernorm", 4096, 4096, ()),
        ("LayerNorm + QKV", "layernorm_qkv", 3072, 1024, (1024, 1024, 1024)),
        ("residual", "residual", 4096, 14336, ()),
        ("bias + gelu", "bias_gelu", 16384, 4096, ()),
    )
    for (label, kind, n, k, parts), m in itertools.product(kinds, DECODE_AND_PREFILL):
        quick = kind == "qkv" or m == 16 or (m != 1 and kind not in _RARELY_QUICK)
        yield Case("fused", label, kind, m, n, k, parts=parts, quick=quick)
    for m in (16, 2048):
        yield Case(
            "frozen", "QKV of heads, frozen", "qkv_frozen", m, 6144, 4096, parts=QKV, quick=True
        )
        yield Case("fused", "SwiGLU to fp8", "swiglu_fp8", m, 14336, 4096, quick=True)


def _yield_others() -> Iterator[Case]:
    yield Case("square", "cube", "mm", 1024, 1024, 1024, quick=True)
    yield Case("square", "rectangle", "mm", 2040, 3584, 3584)
    # 17 x 16 tiles of 128 x 256 are 8 tiles more than two waves on 132 SMs.
    yield Case("square", "wave tail", "mm", 2176, 4096, 4096)
    for m, n, k in (
        (4096, 4095, 4096),
        (2048, 4096, 4095),
        (64, 4097, 4095),
        (16, 4096, 4095),
        (999, 1001, 1003),
    ):
        yield Case("unaligned", "unaligned", "mm", m, n, k, quick=m in (16, 2048))
    for m, n, k in ((256, 256, 65536), (64, 64, 65536), (512, 512, 32768), (32, 256, 131072)):
        yield Case("skinny", "large K", "mm", m, n, k, quick=m == 256)
    bmm = (
        ("scores", 64, 512, 512, 64, "rc"),
        ("scores", 32, 2048, 2048, 128, "rc"),
        ("values", 64, 512, 64, 512, "rr"),
        ("values", 32, 2048, 128, 2048, "rr"),
        ("decode scores", 128, 4, 1024, 128, "rc"),
        ("decode values", 128, 4, 128, 1024, "rr"),
        ("experts", 8, 64, 14336, 4096, "rc"),
        ("cubes", 16, 512, 512, 512, "rr"),
    )
    for label, batch, m, n, k, layouts in bmm:
        quick = label in ("values", "experts") and m != 512
        yield Case("bmm", label, "bmm", m, n, k, batch, layouts, quick=quick)
    # Mixtral's experts, 2 of 8 per token for 2048 tokens: forward, and gradients of both operands.
    for label, divided, m, n, k, layouts in (
        ("experts", "m", 4096, 14336, 4096, "rc"),
        ("experts' inputs", "m", 4096, 4096, 14336, "rr"),
        ("experts' weights", "k", 14336, 4096, 4096, "cr"),
        ("experts, transposed", "n", 14336, 4096, 4096, "rc"),
    ):
        quick = label != "experts' inputs"
        yield Case("grouped", label, f"grouped_{divided}", m, n, k, 8, layouts, quick=quick)
    for m, n, k in ((16, 14336, 4096), (2048, 14336, 4096), (4096, 4096, 4096)):
        yield Case("fp8", "fp8 row-wise", "fp8", m, n, k, quick=m == n)


CASES: Mapping[str, Case] = {
    case.name: case
    for case in sorted(
        (
            *_yield_fused(),
            *_yield_quantized(),
            *_yield_quantized_layers(),
            *_yield_others(),
            *_yield_llama(),
        ),
        # Last, since Inductor tunes fp8 for half a minute.
        key=lambda case: (not case.quick, case.kind.startswith("fp8")),
    )
}
"""By name, most important cases first."""
