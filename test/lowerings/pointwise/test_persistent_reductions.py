"""Reductions along rows: which kernels are persistent, and that they are correct."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch.nn import functional as F

from inductor_ext import _compat, config
from inductor_ext.hooks import scope
from test.support import fake_cuda, kernel_interpreter

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="lowers as for a GPU")

Function = Callable[..., Any]


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def of_a_sum(x: Tensor, y: Tensor) -> Tensor:
    return rms_norm(x + y)


def lowered(
    function: Function, *shapes: tuple[int, ...], ours: bool = True, **settings: Any
) -> fake_cuda.Lowered:
    inputs = [(shape, torch.float16) for shape in shapes]
    if not ours:
        return fake_cuda.lower(function, *inputs)
    with scope.compile_scope(config.snapshot(settings)):
        return fake_cuda.lower(function, *inputs)


def kinds(result: fake_cuda.Lowered) -> list[str]:
    """The kind of each kernel: `per` if it is persistent, `red` if it loops, `poi` otherwise."""
    return [re.match(r"triton_(\w\w\w)_", name)[1] for name in result.kernels()]  # type: ignore[index]


@without_gpu
@pytest.mark.parametrize("function", [layer_norm, rms_norm, softmax])
@pytest.mark.parametrize("length", [1025, 8192])
def test_rows_that_are_read_twice_are_persistent(function: Function, length: int) -> None:
    assert kinds(lowered(function, (16, length))) == ["per"]
    assert kinds(lowered(function, (16, length), ours=False)) == ["red"]


@without_gpu
@pytest.mark.parametrize("length", [8193, 16384])
def test_longer_rows_are_not_persistent(length: int) -> None:
    assert kinds(lowered(layer_norm, (2048, length))) == ["red"]


@without_gpu
def test_all_rows_of_a_kernel_count() -> None:
    for length, kind in ((4096, "per"), (8192, "red")):
        assert kinds(lowered(of_a_sum, (64, length), (64, length))) == [kind]


@without_gpu
def test_long_rows_in_another_order_are_not_persistent() -> None:
    """Inductor may number them by two indices, and then has no configuration for long ones."""

    def centred(x: Tensor, y: Tensor) -> Tensor:
        wide = x.transpose(0, 1).float()
        return torch.cat([wide - wide.mean(-1, keepdim=True), y])

    for length, kind in ((4096, "per"), (8192, "red")):
        assert kind in kinds(lowered(centred, (64, 4, length), (1, 64, length)))


@without_gpu
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(-1),
        lambda x: x.float().square().sum(-1).sqrt(),
        lambda x: x.argmax(-1),
        lambda x: x - x.mean(0),
    ],
)
def test_rows_read_once_are_left_to_inductor(function: Function) -> None:
    ours, inductor = (lowered(function, (4096, 4096), ours=value) for value in (True, False))
    assert kinds(ours) == kinds(inductor)
    assert "per" not in kinds(ours)[:1]


@without_gpu
def test_passes_without_a_pointwise_end_are_counted() -> None:
    def squares(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide - wide.mean(-1, keepdim=True)).square().sum(-1)

    assert kinds(lowered(squares, (64, 4096))) == ["per"]


@without_gpu
def test_the_setting_switches_it_off() -> None:
    shape = (16, 4096)
    inductor = lowered(layer_norm, shape, ours=False)
    assert lowered(layer_norm, shape, persistent_rows=False).kernels() == inductor.kernels()
    with inductor_config.patch({"triton.persistent_reductions": False}):
        assert kinds(lowered(layer_norm, shape)) == ["red"]


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@without_gpu
@pytest.mark.skipif(
    not hasattr(inductor_config, "batch_invariant"), reason="torch 2.13 on has batch_invariant"
)
def test_batch_invariance_ignores_the_number_of_rows() -> None:
    """With one row the weights are as large as the row: it is not persistent; 32 rows are."""
    sizes = [((rows, 4096), (4096,), (4096,)) for rows in (1, 32)]
    assert [kinds(lowered(affine, *size)) for size in sizes] == [["red"], ["per"]]
    with inductor_config.patch(batch_invariant=True):
        for shapes in sizes:
            ours, inductor = (lowered(affine, *shapes, ours=value) for value in (True, False))
            assert ours.kernels() == inductor.kernels()
            assert kinds(ours) == ["red"]


@without_gpu
@pytest.mark.parametrize("name", ["strict_reduction_rblock", "strict_sum_rblock"])
@pytest.mark.parametrize(("rblock", "kind"), [(None, "per"), (1024, "red")])
def test_a_required_order_of_reductions_is_kept(
    monkeypatch: pytest.MonkeyPatch, name: str, rblock: int | None, kind: str
) -> None:
    """`strict_sum_rblock` is the name in torch 2.14, `strict_reduction_rblock` from 2.15 on."""
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures

    monkeypatch.setattr(SIMDKernelFeatures, name, lambda _: rblock, raising=False)
    assert kinds(lowered(layer_norm, (16, 4096))) == [kind]


@without_gpu
def test_a_users_decision_is_kept() -> None:
    class Looping(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
            return False

    with _compat.choices_handler(Looping()):
        assert kinds(lowered(layer_norm, (16, 4096))) == ["red"]
    with _compat.choices_handler(InductorChoices()):
        assert kinds(lowered(layer_norm, (16, 4096))) == ["per"]


@without_gpu
@pytest.mark.parametrize(
    "function", [layer_norm, rms_norm]
)  # Maximum reductions are slow to interpret.
def test_as_in_float64(function: Function) -> None:
    # Not a power of two: a part of a CTA's block is beyond the row.
    x = (torch.randn(11, 1500, generator=torch.Generator().manual_seed(0)) * 3 + 1).half()
    module = lowered(function, tuple(x.shape))
    assert kinds(module) == ["per"]
    (result,) = kernel_interpreter.interpret_modules({"": (module.code, [x])}).values()
    expected = function(x.double())
    assert (result.double() - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("function", [layer_norm, rms_norm, softmax])
@pytest.mark.parametrize("length", [1025, 3072, 4096, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_with_gradients(function: Function, length: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(length)
    x = torch.randn(97, length, device="cuda", dtype=dtype, generator=generator) * 2 + 1
    weight = torch.randn(x.shape, device="cuda", dtype=dtype, generator=generator)

    def results(function: Function, *argument: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = argument
        x = x.detach().requires_grad_()
        y = function(x)
        (y * weight).sum().backward()
        assert x.grad is not None
        return y, x.grad

    values = results(torch.compile(function, backend="inductor_ext"), x, weight)
    expected = results(function, x.double(), weight.double())
    eps = torch.finfo(dtype).eps
    for extension, exact in zip(values, expected, strict=True):
        assert (extension.double() - exact).norm() <= 4 * eps * exact.norm()
