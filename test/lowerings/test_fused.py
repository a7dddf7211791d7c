"""Fused matmuls, from the graph to the generated kernel, which is interpreted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from torch.nn import functional as F

from inductor_ext import config
from inductor_ext.autotune import decide, inductor_benchmark
from inductor_ext.autotune.reference import ACTIVATIONS
from inductor_ext.hooks import scope
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.kernels import common, persistent_tma
from test.support import fake_cuda, generated_code, kernel_interpreter
from test.support.matmul_lowering import lower as lower_by

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

Tensor = torch.Tensor
TILE = GemmConfig("cp_async", 16, 32, 32, 2, 2)

X, W, NARROW, NORM, BIAS = (2, 9, 64), (48, 64), (24, 64), (64,), (48,)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x if x.dtype is torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def gate(x: Tensor, g: Tensor, u: Tensor) -> Tensor:
    return F.silu(F.linear(x, g)) * F.linear(x, u)


def halves(x: Tensor, w: Tensor) -> Tensor:
    a, b = F.linear(x, w).chunk(2, dim=-1)
    return a * F.gelu(b)


def computed(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    y = x.flatten(0, 1) * 2
    # The kernel expects the second weight in the layout of the first.
    return torch.cat([y @ q.t(), y @ torch.relu(k.t())], -1)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], int]] = {
    "gate": (gate, [X, W, W], 1),
    "gate in float32": (
        lambda x, g, u: F.relu(F.linear(x, g)).float() * F.linear(x, u).float(),
        [X, W, W],
        1,
    ),
    "gate by halves, and a residual": (
        lambda x, w, r: r + halves(x, w),
        [X, W, (2, 9, 24)],
        1,
    ),
    "layer norm, gate by halves with a bias": (
        lambda x, n, m, w, b: (lambda h: h[0] * F.gelu(h[1]))(
            F.linear(F.layer_norm(x, NORM, n, m), w, b).chunk(2, dim=-1)
        ),
        [X, NORM, NORM, W, BIAS],
        1,
    ),
    "norm, gate and residual": (
        lambda x, n, g, u, r: r + gate(norm(x, n), g, u),
        [X, NORM, W, W, (2, 9, 48)],
        1,
    ),
    "norm and bias": (lambda x, n, w, b: F.linear(norm(x, n), w, b), [X, NORM, W, BIAS], 1),
    "layer norm, parts and biases": (
        lambda x, n, m, q, k, b, c: (lambda y: torch.cat([F.linear(y, q, b), F.linear(y, k, c)]))(
            F.layer_norm(x, NORM, n, m)
        ),
        [X, NORM, NORM, W, W, BIAS, BIAS],
        2,
    ),
    "parts with biases": (
        lambda x, q, k, b, c: torch.cat([F.linear(x, q, b).sin(), F.linear(x, k, c)], -1),
        [X, W, NARROW, BIAS, (24,)],
        2,
    ),
    "parts of computed factors": (computed, [X, W, NARROW], 4),
}
"""A function, the shapes of its inputs, and the kernels that it becomes."""


def dtype(name: str) -> torch.dtype:
    """The dtype of a function's inputs: weighted elements overflow float16 before normalization."""
    return torch.float32 if name.startswith("norm") else torch.float16


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    scales = [8 if len(shape) == 2 else 1 for shape in shapes]
    return [
        (torch.randn(shape, generator=generator) / scale).to(dtype)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def lowered(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float16
) -> fake_cuda.Lowered:
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: TILE):
        return fake_cuda.lower(function, *((shape, dtype) for shape in shapes))


@pytest.fixture(scope="module")
def modules() -> dict[str, fake_cuda.Lowered]:
    return {
        name: lowered(function, shapes, dtype(name))
        for name, (function, shapes, _) in FUNCTIONS.items()
    }


@pytest.fixture(scope="module")
def results(modules: dict[str, fake_cuda.Lowered]) -> dict[str, Tensor]:
    return kernel_interpreter.interpret_modules(
        {
            name: (modules[name].code, inputs(shapes, dtype(name)))
            for name, (_, shapes, _) in FUNCTIONS.items()
        }
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_kernel_computes_all_matmuls(name: str, modules: dict[str, fake_cuda.Lowered]) -> None:
    sources = modules[name].kernels().values()
    assert sum("tl.dot" in source for source in sources) == 1
    assert len(sources) == FUNCTIONS[name][2]
    assert "extern_kernels." not in modules[name].code


def tuned_and_compiled(
    function: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> tuple[str, str]:
    """The kernel with which a graph's only matmul is tuned, and the graph's kernel."""
    met: list[GemmProblem] = []

    def rule(problem: GemmProblem) -> GemmConfig:
        met.append(problem)
        return TILE

    with scope.compile_scope(config.snapshot({})), decide.force_config(rule):
        compiled = fake_cuda.lower(function, *((shape, torch.float16) for shape in shapes))
        with fake_cuda.device((9, 0)):
            code, _ = inductor_benchmark.generate_code(
                inductor_benchmark.trace_program(met[0], "cuda:0")
            )
    (kernel,) = compiled.kernels().values()
    (tuned,) = fake_cuda.Lowered(code, ()).kernels().values()
    return tuned, kernel


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6])
def test_norms_are_tuned_with_the_model_s_epsilon(epsilon: float) -> None:
    def function(x: Tensor, n: Tensor, m: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.layer_norm(x, NORM, n, m, epsilon), w, b)

    tuned, kernel = tuned_and_compiled(function, [(18, 64), NORM, NORM, W, BIAS])
    assert str(epsilon) in kernel
    assert tuned == kernel


@pytest.mark.parametrize("name", common.ACTIVATIONS)
def test_gates_are_tuned_with_their_activation(name: str) -> None:
    def function(x: Tensor, g: Tensor, u: Tensor) -> Tensor:
        return ACTIVATIONS[name](F.linear(x, g)) * F.linear(x, u)

    tuned, kernel = tuned_and_compiled(function, [(18, 64), W, W])
    assert f"ACTIVATION : tl.constexpr = '{name}'" in kernel
    assert tuned == kernel


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [0, 1])
def test_gates_by_halves_are_tuned_with_halves(gate: int, bias: bool) -> None:
    def function(x: Tensor, w: Tensor, *b: Tensor) -> Tensor:
        parts = F.linear(x, w, *b).chunk(2, dim=-1)
        return F.silu(parts[gate]) * parts[1 - gate]

    tuned, kernel = tuned_and_compiled(function, [(18, 64), W, *[BIAS][:bias]])
    assert ("arg_B1 + " in kernel) != ("arg_B0 + " in kernel)
    assert tuned == kernel


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_in_float64(name: str, results: dict[str, Tensor]) -> None:
    function, shapes, _ = FUNCTIONS[name]
    values = inputs(shapes, dtype(name))
    expected = function(*(value.double() for value in values))
    assert results[name].dtype == function(*values).dtype
    error = (results[name].double() - expected.double()).abs().max()
    assert error < 5e-3 * expected.abs().max()


@pytest.mark.parametrize(("rows", "template"), [(18, "cp_async"), (3, "gemv")])
def test_large_elements_of_norms_in_float16_stay_finite(rows: int, template: str) -> None:
    """Elements times the norm's weight overflow float16 if rows are scaled only afterwards."""
    configs = {"cp_async": TILE, "gemv": GemmConfig("gemv", 4, 8, 64, 1, 2)}

    def function(x: Tensor, n: Tensor, w: Tensor) -> Tensor:
        return F.linear(norm(x, n), w)

    shapes: list[tuple[int, ...]] = [(rows, 64), NORM, W]
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: configs[template]):
        module = fake_cuda.lower(function, *((shape, torch.float16) for shape in shapes))
    assert len(module.kernels()) == (1 if template == "gemv" else 2)
    x, n, w = inputs(shapes)
    values = [x * 5000, n.abs() + 15, w]
    (result,) = kernel_interpreter.interpret_modules({"": (module.code, values)}).values()
    exact = function(*(item.double() for item in values))
    assert (result.double() - exact).abs().max() < 5e-3 * exact.abs().max()


def test_as_strided_views_read_the_result_s_own_memory() -> None:
    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        windows = F.linear(x, q).view(3, 6, 48).as_strided((17, 2, 48), (48, 48, 1))
        return windows * 2, F.linear(x, k), F.linear(x, v)

    shapes: list[tuple[int, ...]] = [(18, 64), W, W, NARROW]
    module = lowered(function, shapes)
    assert sum("tl.dot" in source for source in module.kernels().values()) == 2
    arguments = inputs(shapes)
    values = kernel_interpreter.interpret_modules({"all": (module.code, arguments)})["all"]
    for extension, exact in zip(
        values, function(*(item.double() for item in arguments)), strict=True
    ):
        assert (extension.double() - exact).abs().max() < 5e-3 * exact.abs().max()


@pytest.mark.parametrize("reach", [persistent_tma.REACH, 1025])
def test_weights_in_both_orders_are_one_matmul_by_tma(reach: int) -> None:
    """At any distance between the weights, also beyond 16 KB."""
    config_ = GemmConfig("persistent_tma", 64, 32, 32, 2, 4, tma=True, flatten=True)

    def gate_last(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        a, g = F.linear(x, w, b).chunk(2, dim=-1)
        return a * F.gelu(g)

    def gate_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        g, a = F.linear(x, w, b).chunk(2, dim=-1)
        return F.silu(g) * a

    arguments = inputs([(90, 72), (256, 72), (256,)])
    work: dict[str, tuple[str, list[Tensor]]] = {}
    for function in (gate_last, gate_first):
        shapes = ((tuple(tensor.shape), tensor.dtype) for tensor in arguments)
        with (
            scope.compile_scope(config.snapshot({})),
            decide.force_config(lambda _: config_),
            mock.patch.object(persistent_tma, "REACH", reach),
        ):
            code = fake_cuda.lower(function, *shapes).code
        assert "JOINED : tl.constexpr = True" in code
        assert f"REACH : tl.constexpr = {reach}\n" in code
        work[function.__name__] = code, arguments
    values = kernel_interpreter.interpret_modules(work)
    wide = [item.double() for item in arguments]
    for function in (gate_last, gate_first):
        exact = function(*wide)
        assert (values[function.__name__].double() - exact).abs().max() < 5e-3 * exact.abs().max()


def test_scales_and_biases_of_fp8() -> None:
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    # Rows and columns that are not multiples of the tile.
    m, k, parts = 17, 64, (48, 32)

    def matmul(x: Tensor, w: Tensor, s: Tensor, t: Tensor, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(x, w.t(), s, t, bias=bias, out_dtype=bf16, use_fast_accum=True)

    def function(x: Tensor, s: Tensor, *rest: Tensor) -> Tensor:
        groups = list(zip(*[iter(rest)] * 3, strict=True))
        return torch.cat([matmul(x, w, s, t, b) for w, t, b in groups], -1)

    def unbiased(x: Tensor, s: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return matmul(x, w, s, t, None)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    work: dict[str, tuple[str, list[Tensor]]] = {}
    expected: dict[str, Tensor] = {}
    for rows in (False, True):
        x = (random(m, k) - 1).to(fp8)
        s = random(m, 1) if rows else random()
        weights = [
            ((random(n, k) - 1).to(fp8), random(1, n) if rows else random(), random(n).to(bf16))
            for n in parts
        ]
        for count in (1, 2):
            arguments = [x, s, *(item for factor in weights[:count] for item in factor)]
            matmuls = [
                (x.double() @ w.double().t()) * s.double() * t.double() + b.double()
                for w, t, b in weights[:count]
            ]
            work[f"{rows} {count}"] = _scaled_module(function, arguments), arguments
            expected[f"{rows} {count}"] = torch.cat(matmuls, -1)
        arguments = arguments[:4]
        work[f"{rows} unbiased"] = _scaled_module(unbiased, arguments), arguments
        expected[f"{rows} unbiased"] = matmuls[0] - weights[0][2].double()
    values = kernel_interpreter.interpret_modules(work)
    for name, exact in expected.items():
        # The interpreter truncates to bfloat16.
        assert (values[name].double() - exact).abs().max() < 2**-7 * exact.abs().max(), name


def _scaled_module(function: Callable[..., Tensor], values: list[Tensor]) -> str:
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: TILE):
        code = fake_cuda.lower(function, *(item.to("meta") for item in values)).code
    assert "RESCALED : tl.constexpr = True" in code
    return code


def test_saved_parts_are_aligned_to_16_bytes() -> None:
    """A backward assumes that saved tensors are aligned, by their sizes and strides."""

    def heads(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return x @ a.t(), x @ b.t(), x @ c.t()

    narrow = GemmConfig("splitk", 16, 16, 32, 2, 2)
    inputs = (((size, 64), torch.float16) for size in (32, 4, 16, 12))
    lowered, problems = lower_by(lambda _: narrow, heads, *inputs)
    assert problems[0].parts == (4, 16, 12)
    (returned,) = re.findall(r"return \((.*)\)\n\nrunner", lowered.code)
    # The other parts would begin at 8 and at 40 bytes.
    assert re.findall(r"reinterpret_tensor\(buf0, [^)]*\), [^)]*\), (\d+)\)", returned) == ["0"]
    assert returned.count("buf") == 3


def test_group_scales_are_strided() -> None:
    """The operator requires contiguous scales within a group, with any stride between groups."""
    fp8 = torch.float8_e4m3fn
    chosen = GemmConfig("grouped", 32, 64, 64, 2, 4, tma=True)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) + 0.5

    def function(a: Tensor, b: Tensor, s: Tensor, t: Tensor, ends: Tensor) -> Tensor:
        call = torch.ops.aten._scaled_grouped_mm.default
        return call(a, b, s, t, ends, None, None, torch.bfloat16, True)

    a, b = (random(64, 64) - 1).to(fp8), (random(2, 64, 64) - 1).to(fp8).mT
    s, ends = random(64), torch.tensor([[24, 0], [64, 0]], dtype=torch.int32)[:, 0]
    if not generated_code.takes_strided_offsets():
        ends = ends.contiguous()
    scales = {"padded": random(2, 96)[:, :64], "one for all": random(1, 64).expand(2, 64)}
    work = {}
    for name, t in scales.items():
        arguments = [a, b, s, t, ends]
        seen = [
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            for tensor in arguments
        ]
        lowered, _ = lower_by(lambda _: chosen, function, *seen)
        assert "extern_kernels." not in lowered.code
        work[name] = lowered.code, arguments
    values = kernel_interpreter.interpret_modules(work)
    for name, t in scales.items():
        rows = (slice(0, 24), slice(24, 64))
        matmuls = [a[row].double() @ b[g].double() * t[g] for g, row in enumerate(rows)]
        exact = torch.cat(matmuls) * s[:, None]
        assert (values[name].double() - exact).abs().max() < 2**-7 * exact.abs().max(), name
