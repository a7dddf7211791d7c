"""Constants that `freezing` computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from test.support import aot_util
from test.support.compile_util import BACKEND


class Views(torch.nn.Module):
    """Conjugate and negated views of a buffer, also next to the buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("z", torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> list[Tensor]:
        conjugate = self.z.conj()
        return [conjugate, self.z.mH @ x, conjugate[0], conjugate.imag, x @ conjugate, x @ self.z]


@pytest.mark.parametrize(
    "options",
    [{}, {"aot_inductor__use_runtime_constant_folding": True}],
    ids=["at compile time", "at load time"],
)
def test_packages_have_the_elements_of_frozen_views(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Views(), torch.randn(3, 3, dtype=torch.complex64)
    with torch.no_grad():
        loaded = aot_util.compile_model(model, (x,), freezing=True, **options).loaded
    for actual, expected in zip(loaded(x), model(x), strict=True):
        torch.testing.assert_close(actual.resolve_conj(), expected.resolve_conj().resolve_neg())


class Writes(torch.nn.Module):
    """Writes of numbers into elements; without a buffer, nothing is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x.view(torch.uint8)[0] = 3
        return x + self.number


def test_frozen_numbers_are_written_into_elements() -> None:
    inputs = torch.arange(5), torch.arange(5)
    with torch.no_grad():
        compiled = torch.compile(Writes(), backend=BACKEND, options={"freezing": True})
        assert compiled(inputs[0]).equal(Writes()(inputs[1]))
    assert inputs[0].equal(inputs[1])
