"""Operators whose fake implementation predicts other strides than the operator returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inductor_ext
from inductor_ext import _compat
from inductor_ext.hooks.upstream_fixes import stride_runtime
from test.support import aot_util
from test.support.compile_util import BACKEND

LIBRARY = "inductor_ext_strides"


@torch.library.custom_op(f"{LIBRARY}::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return (x * 2).contiguous()


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{LIBRARY}::several", mutates_args=())
def several(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return transpose_memory(x * 2), x + 1, transpose_memory(x.sin())


@several.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op(f"{LIBRARY}::shorter", mutates_args=())
def shorter(x: Tensor) -> Tensor:
    return x[1:].clone()


@shorter.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def transpose_memory(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


class Model(nn.Module):
    """Each result reads one that has other strides than predicted."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.conv = nn.Conv1d(3, 8, 3, padding=1)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        encoded = self.encoder(self.conv(x).permute(0, 2, 1))
        a, b, c = torch.ops.inductor_ext_strides.several(y.cos())
        image = double(y.view(1, 2, 3, -1).to(memory_format=torch.channels_last))
        return (
            encoded * 2,
            encoded.transpose(1, 2).reshape(len(x), -1).cumsum(1),
            double(y.t()) + 1,
            double(y.t()),
            a.reshape(-1) + 1,
            b * c,
            c.cumsum(0),
            image.flatten() - 1,
        )


def compile_model(model: nn.Module, args: tuple[Any, ...], way: str) -> Any:
    if way == "package":
        return aot_util.compile_model(model, args).loaded
    options: dict[str, Any] = {"cpp_wrapper": way == "cpp"}
    if way == "dynamic":
        options["size_asserts"] = False  # The copies do not depend on Inductor's assertions.
    return torch.compile(
        model, backend=BACKEND, fullgraph=True, options=options, dynamic=way == "dynamic"
    )


@pytest.mark.parametrize("way", ["dynamic", "cpp", "package"])
def test_results_with_other_strides_are_copied(way: str) -> None:
    torch.manual_seed(0)
    model = Model().eval()
    if way == "dynamic" and _compat.minor_version(torch.__version__) < (2, 12):
        # torch 2.11 has no fake implementation of _transformer_encoder_layer_fwd.
        model.encoder = nn.Identity()
    args = torch.randn(2, 3, 10), torch.randn(6, 4)
    with torch.no_grad():
        expected = model(*args)
        actual = compile_model(model, args, way)(*args)
    for ours, eager in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, eager)


def test_equal_strides_cost_no_call_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(stride_runtime, "match_strides", lambda *arguments: calls.append(arguments))
    x = torch.randn(4, 3)
    compiled = torch.compile(lambda x: double(x) + 1, backend=BACKEND)
    torch.testing.assert_close(compiled(x), double(x) + 1)
    assert not calls


def test_a_result_of_another_size_is_an_error() -> None:
    compiled = torch.compile(lambda x: shorter(x) + 1, backend=BACKEND)
    with pytest.raises(AssertionError, match="expected size 3==4"):
        compiled(torch.randn(4, 2))


def test_elements_of_a_result_have_their_own_memory() -> None:
    """Until torch 2.13, a write into a part of an expanded tensor has its strides."""

    def function(rows: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.slice_scatter(rows.expand_as(x), x[:, 1:], 1, 1, 3),
            torch.select_scatter((rows + 1).expand_as(x), x[:, 1], 1, 1),
            torch.diagonal_scatter(rows.expand_as(x), x[:3, 1]),
            (rows * 2).expand_as(x),
        )

    inputs = torch.randn(3), torch.randn(4, 3)
    compiled = torch.compile(function, backend=BACKEND, fullgraph=True)
    for actual, expected in zip(compiled(*inputs), function(*inputs), strict=True):
        assert actual.equal(expected)
        assert actual.stride() == expected.stride()


def test_expanded_complex_results_are_not_copied() -> None:
    """On torch 2.11 and 2.12, `expand` of complex numbers is an operator that is not lowered."""

    def function(x: Tensor) -> Tensor:
        return (x * 1).expand(2, *x.shape)

    x = torch.randn(3, 4, dtype=torch.complex64)
    result = torch.compile(function, backend=BACKEND)(x)
    assert result.stride() == (0, 4, 1)
    assert torch.equal(result, function(x))


def test_inductor_is_unchanged() -> None:
    def function(x: Tensor) -> Tensor:
        return double(x.t()) + 1

    with inductor_ext.activate():
        torch.compile(function)(torch.randn(4, 3))
    torch._dynamo.reset()
    with pytest.raises(AssertionError, match="stride"):
        torch.compile(function)(torch.randn(4, 3))
