"""`load` with `warm_up`: calls that leave no trace."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load import warm_up
from inductor_ext.cpp_wrapper.signature.signature import (
    Range,
    Signature,
    SymbolInput,
    TensorInput,
)
from test.support.loader_models import nested_inputs


class Counter(nn.Module):
    """Returns its number of calls, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(20))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return self.calls + x.sum(), torch.rand(4)


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = torch.export.export(Counter(), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("n")},))
    target = tmp_path_factory.mktemp("warm_up") / "counter.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=target)
    return str(target)


@pytest.mark.parametrize(
    "calls", [True, [(torch.ones(5, 3),)], [{"x": torch.ones(7, 3)}, (torch.ones(2, 3),)]]
)
def test_no_trace_is_left(counter: str, calls: Any) -> None:
    torch.manual_seed(3)
    expected = inductor_ext.load(counter)(torch.zeros(2, 3))
    torch.manual_seed(3)
    model = inductor_ext.load(counter, warm_up=calls)
    torch.testing.assert_close(model(torch.zeros(2, 3)), expected, rtol=0, atol=0)


def test_the_inputs_of_the_self_test_are_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y

    x, y = torch.rand(3), torch.rand(3)
    path = tmp_path / "net.pt2"
    inductor_ext.aoti_compile_and_package(
        torch.export.export(Scaled(), (x, y)),
        package_path=path,
        inductor_configs={"aot_self_test": True},
    )
    seen: list[Any] = []
    monkeypatch.setattr(warm_up, "warm_up", lambda instance, calls: seen.extend(calls))
    inductor_ext.load(path, warm_up=True)
    assert [[t.tolist() for t in call] for call in seen] == [[x.tolist(), y.tolist()]]


def test_a_model_with_all_kinds_of_inputs(path: str) -> None:
    args, kwargs = nested_inputs()
    expected = inductor_ext.load(path, "nested")(*args, **kwargs)
    actual = inductor_ext.load(path, "nested", warm_up=True)(*args, **kwargs)
    torch.testing.assert_close(actual["total"], expected["total"])


@pytest.mark.parametrize("calls", [[torch.ones(2, 3)], (torch.ones(2, 3),), 1, "yes", [3]])
def test_no_calls(counter: str, calls: Any) -> None:
    with pytest.raises(exc.BadArgumentError, match=r"Invalid warm_up=.+: expected True"):
        inductor_ext.load(counter, warm_up=calls)


def test_an_error_of_a_call_is_raised(counter: str, temporary: pathlib.Path) -> None:
    with pytest.raises(exc.InputMismatchError, match="input 'x'"):
        inductor_ext.load(counter, warm_up=[(torch.ones(2, 4),)])
    assert list(temporary.iterdir()) == []


def signature(shape: tuple[Any, ...], symbols: dict[str, Range], *constraints: str) -> Signature:
    stride = tuple(1 for _ in shape)
    inputs = (TensorInput("x", "args[0]", "float32", shape, stride, "cpu"),)
    return Signature(inputs, (), symbols, constraints)


@pytest.mark.parametrize(
    ("shape", "symbols", "constraints", "expected"),
    [
        ((3, 0), {}, (), [3, 0]),
        (("s0", 4), {"s0": Range(0, None)}, (), [2, 4]),
        (("s0",), {"s0": Range(5, 9)}, (), [5]),
        (("s0",), {"s0": Range(0, 1)}, (), [1]),
        (("s0", "s1"), {"s0": Range(2), "s1": Range(2)}, ("s0 % 8 == 0", "s0 == s1"), [8, 8]),
        (("s0", "s1"), {"s0": Range(2), "s1": Range(2)}, ("s1 == 2 * s0 + 1",), [2, 5]),
        (("2*s0 - 10",), {"s0": Range(2)}, (), [0]),
    ],
)
def test_sizes_that_meet_the_conditions(
    shape: tuple[Any, ...],
    symbols: dict[str, Range],
    constraints: tuple[str, ...],
    expected: list[int],
) -> None:
    (tensor,) = warm_up.make_zeros(signature(shape, symbols, *constraints), torch.device("cpu"))
    assert list(tensor.shape) == expected
    assert not tensor.any()


def test_conditions_that_no_small_sizes_meet() -> None:
    impossible = signature(("s0",), {"s0": Range(2)}, "s0 * s0 == 2")
    with pytest.raises(exc.NoExampleError, match=r"model: s0 \* s0 == 2\. Pass inputs"):
        warm_up.make_zeros(impossible, torch.device("cpu"))


def test_scalars() -> None:
    inputs = (
        SymbolInput("n", "args[0]", "int", "s0"),
        SymbolInput("f", "args[1]", "float", "zf"),
        SymbolInput("b", "args[2]", "bool", "zb"),
    )
    tensors = warm_up.make_zeros(Signature(inputs, (), {"s0": Range(4, 8)}), torch.device("cpu"))
    assert [(t.item(), t.dtype) for t in tensors] == [
        (4, torch.int64),
        (0, torch.float64),
        (False, torch.bool),
    ]
