"""Exported programs: constants that `freezing` computes, guards, and lengths of diagonals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

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


class Sum(torch.nn.Module):
    """Leaves a buffer and an input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("unused", torch.ones(2, 2, 2))

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return x.sum(0)


def test_frozen_programs_whose_example_inputs_are_views() -> None:
    """torch.export guards on the sizes of the tensor that an example input views."""
    rows = torch.ones(4, 10)[:, :7]
    inputs, dims = (torch.ones(3, 2), rows), ({0: Dim.AUTO, 1: Dim.AUTO},) * 2
    exported = torch.export.export(Sum(), inputs, dynamic_shapes=dims, strict=False)
    loaded = aot_util.load(aot_util.compile_program(exported, freezing=True))
    assert loaded(*inputs).equal(Sum()(*inputs))


class Diagonals(torch.nn.Module):
    """Reads and writes diagonals of rectangular matrices."""

    def forward(self, x: Tensor) -> list[Tensor]:
        scattered = torch.diagonal_scatter(x, x.diagonal(1) * 3, 1)
        sums = x.diagonal() + 1, torch.trace(x), torch.diag_embed(x.diagonal(-1))
        x.diagonal().fill_(1)
        return [scattered, *sums]


def test_lengths_of_diagonals_follow_the_sizes_of_each_call() -> None:
    example = torch.arange(30).view(10, 3)
    exported = torch.export.export(
        Diagonals(), (example,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},)
    )
    loaded = aot_util.load(aot_util.compile_program(exported))
    for shape in ((10, 3), (3, 10), (9, 9), (4, 65), (65, 4)):
        x = torch.arange(shape[0] * shape[1]).view(shape)
        inputs = x.clone(), x.clone()
        for actual, expected in zip(loaded(inputs[0]), Diagonals()(inputs[1]), strict=True):
            assert actual.equal(expected)
        assert inputs[0].equal(inputs[1])
