"""Integer matmuls followed by scales and biases: which match, and their results."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from torch._higher_order_ops.out_dtype import out_dtype

from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.autotune.reference import program
from inductor_ext.hooks import scope
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda, kernel_compiler, kernel_interpreter

TILE = GemmConfig("cp_async", 32, 32, 32, 2, 4)
TMA = GemmConfig("persistent_tma", 64, 32, 32, 2, 4, tma=True)
EXCHANGED = GemmConfig("splitk", 16, 64, 32, 2, 4, swap_ab=True)
M, N, K = 40, 48, 64
F32, F16 = torch.float32, torch.float16


def product(x: Tensor, w: Tensor) -> Tensor:
    """A matmul, in float64 if its operands are."""
    return x @ w.t() if x.dtype == torch.float64 else torch._int_mm(x, w.t())


def dynamic(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
    return product(x, w).to(s.dtype) * s * t


def biased(x: Tensor, w: Tensor, s: Tensor, t: Tensor, b: Tensor) -> Tensor:
    """With an input of three dimensions, and an epilogue for Inductor."""
    scaled = (t * (product(x, w).to(s.dtype) * s)).to(b.dtype).view(2, M // 2, N)
    return torch.relu(scaled + b)


def torchao(x: Tensor, w: Tensor, s: Tensor, t: Tensor, b: Tensor) -> Tensor:
    """The matmul of torchao's dynamic quantization: by a higher-order operator, with row scales
    that are expanded to the accumulators."""
    if x.dtype == torch.float64:
        sums = product(x, w)
    else:
        sums = out_dtype(torch.ops.aten.mm.default, torch.int32, x, w.t())
    scaled = (sums * s.expand(M, N)).to(b.dtype)
    return (scaled * t.flatten()).reshape(4, M // 4, N) + b


def static(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """One scale for all activations, and that of the weights first."""
    return (product(x, w).to(t.dtype) * t * s).to(t.dtype)


CASES: dict[str, tuple[Callable[..., Tensor], GemmConfig, tuple[tuple[int, ...], ...]]] = {
    "dynamic": (dynamic, TILE, ((M, 1), (N,))),
    "dynamic, TMA": (dynamic, TMA, ((M, 1), (1, N))),
    "dynamic, exchanged": (dynamic, EXCHANGED, ((M, 1), (N,))),
    "biased": (biased, TILE, ((M, 1), (N,), (N,))),
    "biased, TMA": (biased, TMA, ((M, 1), (N,), (N,))),
    "torchao": (torchao, TILE, ((M, 1), (N, 1), (N,))),
    "static": (static, TILE, ((), (N,))),
    "of tensors": (dynamic, TILE, ((1,), ())),
}


def lowered(function: Callable[..., Tensor], inputs: list[Tensor], asked: GemmConfig) -> str:
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: asked):
        return fake_cuda.lower(function, *(item.to("meta") for item in inputs)).code


def operands(*shapes: tuple[int, ...], dtype: torch.dtype = F16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    bytes_ = [
        torch.randint(-127, 128, size, generator=generator, dtype=torch.int8)
        for size in ((M, K), (N, K))
    ]
    # A sum of 64 products of bytes is about 40,000.
    scales = [(0.5 + torch.rand(size, generator=generator)) * 0.01 for size in shapes]
    return [*bytes_, *(scale.to(dtype) for scale in scales)]


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[Tensor, Tensor]]:
    """The results of the kernel of each case, and in float64."""
    work, exact = {}, {}
    for name, (function, tile, shapes) in CASES.items():
        for dtype in (F32, F16):
            inputs = operands(*shapes, dtype=dtype)
            code = lowered(function, inputs, tile)
            assert "RESCALED : tl.constexpr = True" in code, name
            assert code.count("'''") == 2, f"{name}: more than one kernel"
            work[f"{name}, {dtype}"] = code, inputs
            exact[f"{name}, {dtype}"] = function(*(item.double() for item in inputs))
    results = kernel_interpreter.interpret_modules(work)
    return {name: (results[name], exact[name]) for name in work}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_in_float64(
    found: dict[str, tuple[Tensor, Tensor]], name: str, dtype: torch.dtype
) -> None:
    result, exact = found[f"{name}, {dtype}"]
    assert result.dtype == dtype
    assert result.shape == exact.shape
    error = (result.double() - exact).abs().max() / exact.abs().max()
    assert error < (2e-6 if dtype == F32 else 2e-3)


def test_rows_known_only_at_run_time() -> None:
    def function(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return product(x, w) * s.expand(x.shape[0], N) * t

    work, exact = {}, {}
    x, w, s, t = operands((M, 1), (N,), dtype=F32)
    for tile in (TILE, TMA):
        with (
            scope.compile_scope(config.snapshot({})),
            decide.force_config(lambda _, tile=tile: tile),
        ):
            module = fake_cuda.lower(
                function, (("m", K), torch.int8), ((N, K), torch.int8), (("m", 1), F32), ((N,), F32)
            )
        assert "RESCALED : tl.constexpr = True" in module.code
        work[tile.template] = module.code, [x, w, s, t]
        exact[tile.template] = function(*(item.double() for item in (x, w, s, t)))
    for name, result in kernel_interpreter.interpret_modules(work).items():
        assert (result.double() - exact[name]).abs().max() < 2e-6 * exact[name].abs().max()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, s, t: product(x, w).to(s.dtype) * s,
        lambda x, w, s, t: product(x, w).to(s.dtype) * s * s,
        lambda x, w, s, t: (product(x, w).to(s.dtype) + t) * s,
        lambda x, w, s, t: product(x, w).to(s.dtype) * s * (s + t),
        lambda x, w, s, t: (product(x, w) * 3).to(s.dtype) * s * t,
    ],
    ids=["one", "twice", "biases first", "a matrix", "of integers"],
)
def test_unsupported_scales_are_left_to_inductor(function: Callable[..., Tensor]) -> None:
    code = lowered(function, operands((M, 1), (N,)), TILE)
    assert "ACC_TYPE : tl.constexpr = tl.int32" in code
    assert "RESCALED : tl.constexpr = False" in code


def test_used_accumulators_are_left_to_inductor() -> None:
    def function(x: Tensor, w: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        sums = product(x, w)
        return sums, sums.to(s.dtype) * s * t

    code = lowered(function, operands((M, 1), (N,)), TILE)  # type: ignore[arg-type]
    assert "RESCALED : tl.constexpr = False" in code


@pytest.mark.parametrize("fused_split_k", [False, True])
def test_divided_accumulators_are_left_to_inductor(fused_split_k: bool) -> None:
    split = GemmConfig("splitk", 32, 32, 32, 2, 4, split_k=2, fused_split_k=fused_split_k)
    code = lowered(dynamic, operands((M, 1), (N,)), split)
    assert "RESCALED : tl.constexpr = False" in code
    assert "SPLIT_K : tl.constexpr = 2" in code


def test_emulated_rounding_leaves_scales_to_inductor() -> None:
    from torch._inductor import config as inductor_config

    with inductor_config.patch(emulate_precision_casts=True):
        code = lowered(dynamic, operands((M, 1), (N,)), TILE)
    assert "RESCALED : tl.constexpr = False" in code


@pytest.mark.parametrize("flatten", [False, True])
def test_large_tiles_stay_in_registers(flatten: bool) -> None:
    options = GemmConfig("persistent_tma", 128, 256, 128, 4, 8, tma=True, flatten=flatten)
    inputs = [
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in (
            ((2048, 4096), torch.int8),
            ((14336, 4096), torch.int8),
            ((2048, 1), F32),
            ((14336,), torch.bfloat16),
        )
    ]
    with scope.compile_scope(config.snapshot({})), decide.force_config(lambda _: options):
        module = fake_cuda.lower(lambda *x: dynamic(*x).to(torch.bfloat16), *inputs)
    result = kernel_compiler.compiled_module(module, options)
    assert result.spills == 0
    assert "wgmma.mma_async" in result.ptx
    assert ".s32.s8.s8" in result.ptx


@pytest.mark.parametrize("count", [2, 3], ids=["", "biases"])
def test_models_compile_the_tuned_kernels(count: int) -> None:
    def model(x: Tensor, w: Tensor, s: Tensor, *rest: Tensor) -> Tensor:
        scaled = product(x, w).float() * s * rest[0]
        return (scaled + rest[1] if rest[1:] else scaled).to(F16)

    def kernels(function: Callable[..., object], values: list[Tensor]) -> set[str]:
        problems: list[GemmProblem] = []

        def rule(found: GemmProblem) -> GemmConfig:
            problems.append(found)
            return TILE

        with scope.compile_scope(config.snapshot({})), decide.force_config(rule):
            module = fake_cuda.lower(function, *values)
        assert problems == [problem]
        return {re.sub(r"triton_\w+", "", kernel) for kernel in module.kernels().values()}

    inputs = (
        EpilogueInput("float32", "column"),
        *(EpilogueInput("float16", "row") for _ in range(count - 1)),
    )
    problem = GemmProblem.contiguous(
        "int_mm", M, N, K, "int8", epilogue=Epilogue(inputs, count, out="float16")
    )
    scales, *rest = operands((M, 1), *[(N,)] * (count - 1))[2:]
    values = [*operands()[:2], scales.float(), *rest]
    canonical = program(problem)
    (kernel,) = kernels(model, [item.to("meta") for item in values])
    assert kernels(canonical.function, canonical.empty_inputs("meta")) == {kernel}
    assert "RESCALED : tl.constexpr = True" in kernel
