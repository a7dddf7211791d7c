"""Inputs that are negated views, such as `x.conj().imag`: their graphs run in eager mode."""

from __future__ import annotations

import pytest
import torch

from inductor_ext import events


def _negated(rows: int = 3) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(rows, 4, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    return x


def _update(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.mul_(3)
    return x + y, x @ y.mT, x[1:], x.sum(0)


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=str)
def test_signs_of_negated_inputs_are_kept(
    options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(events, "warn_once", lambda key, message: warnings.append(key))
    compiled = torch.compile(_update, backend="inductor_ext", options=options, dynamic=True)
    for rows in (3, 5):
        (x, y), (expected_x, expected_y) = ((_negated(rows), _negated(rows)) for _ in range(2))
        for value, expected in zip(compiled(x, y), _update(expected_x, expected_y), strict=True):
            torch.testing.assert_close(value, expected)
        torch.testing.assert_close(x, expected_x)
    assert set(warnings) == {"negated_inputs"}


def test_gradients_of_negated_inputs() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return (x * x.exp()).sum()

    gradients = []
    for function in (square, torch.compile(square, backend="inductor_ext")):
        x = _negated().detach().requires_grad_()
        function(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
