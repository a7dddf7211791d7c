"""Products of one input by frozen weights: which become one, what comes out, and caches of them.

On the CPU, for which `frozen.is_covered` is replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.utils import fresh_cache

from inductor_ext.lowerings import frozen
from test import aot_util

aten = torch.ops.aten


class Attention(nn.Module):
    """Q, K and V of different widths, and what keeps them from being returned."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(16, 24, bias=bias)
        self.k = nn.Linear(16, 8, bias=bias)
        self.v = nn.Linear(16, 4, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x).unflatten(-1, (3, 8)).relu(), self.k(x).sigmoid(), self.v(x) * 2


class Transposed(nn.Module):
    """Weights whose rows are those of the second factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 6))
        self.second = nn.Parameter(torch.randn(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).relu().sum(1) + (x @ self.second).relu().sum(1)


class Returned(nn.Module):
    """The second of three products is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in (4, 8, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = (layer(x) for layer in self.layers)
        return first.relu(), second.view(2, 2, 8), third.relu()


class Tied(nn.Module):
    """One weight is used twice, and three products have inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(self.one(x).relu()).relu()).relu() + self.two(x).relu()


class Unlike(nn.Module):
    """One product has a bias and the other has none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).relu(), self.two(x).relu()


@pytest.fixture(autouse=True)
def covered() -> Iterator[None]:
    with mock.patch.object(frozen, "is_covered", return_value=True):
        yield


def products(
    model: nn.Module, x: Tensor, *, freezing: bool = True, **options: Any
) -> list[tuple[int, ...]]:
    """Sizes of the products of what Inductor is given, after results have been compared."""
    seen: list[tuple[int, ...]] = []
    run = frozen.run

    def recorded(gm: fx.GraphModule, settings: Any) -> None:
        run(gm, settings)
        nodes = (
            each for each in gm.graph.nodes if each.target in (aten.mm.default, aten.addmm.default)
        )
        seen.extend(tuple(each.meta["val"].shape) for each in nodes)

    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend="inductor_ext", options=options)
    # Dynamo asks for it as well, before there are options.
    # Nor are weights to be what only oneDNN reads.
    frozen_weights = config.patch({"freezing": freezing, "cpp.weight_prepack": False})
    with frozen_weights, mock.patch.object(frozen, "run", recorded), torch.no_grad():
        found = compiled(x)
        torch.testing.assert_close(found, model(x))
        expected = [each.stride() for each in (*model(x),)]
        assert [each.stride() for each in (*found,)] == expected
    return seen


@pytest.mark.parametrize("bias", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=["matrix", "batch"])
def test_products_of_one_input_become_one(bias: bool, rows: tuple[int, ...]) -> None:
    found = products(Attention(bias=bias).eval(), torch.randn(*rows, 16))
    assert [columns for _, columns in found] == [24 + 8 + 4]


def test_rows_may_be_known_only_at_run_time() -> None:
    model = Attention(bias=True).eval()
    compiled = torch.compile(copy.deepcopy(model), backend="inductor_ext", dynamic=True)
    for rows in (3, 7):
        x = torch.randn(rows, 16)
        with config.patch({"freezing": True, "cpp.weight_prepack": False}), torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))


def test_weights_keep_their_order_in_memory() -> None:
    assert products(Transposed().eval(), torch.randn(5, 16)) == [(5, 16)]


def test_what_is_returned_stays_contiguous() -> None:
    assert sorted(products(Returned().eval(), torch.randn(4, 16))) == [(4, 8), (4, 16)]


@pytest.mark.parametrize(
    ("model", "expected"), [(Tied(), [8, 8, 16, 16]), (Unlike(), [8, 16])], ids=["tied", "unlike"]
)
def test_other_products_stay(model: nn.Module, expected: list[int]) -> None:
    assert sorted(columns for _, columns in products(model.eval(), torch.randn(5, 16))) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"freezing": False},
        {"gemm_fuse_shared_input": False},
        {"gemm_templates": False},
    ],
    ids=lambda each: next(iter(each)),
)
def test_it_can_be_switched_off(options: dict[str, Any]) -> None:
    found = products(Attention(bias=True).eval(), torch.randn(5, 16), **options)
    assert sorted(columns for _, columns in found) == [4, 8, 24]


def test_cached_code_multiplies_by_the_weights_of_its_model() -> None:
    x = torch.randn(5, 16)
    with fresh_cache():
        for hits in (0, 1):
            before = counters["inductor"]["fxgraph_cache_hit"]
            found = products(Attention(bias=True).eval(), x, fx_graph_cache=True)
            assert [columns for _, columns in found] == [36]
            assert counters["inductor"]["fxgraph_cache_hit"] == before + hits


def test_a_package_holds_them_joined() -> None:
    model, x = Attention(bias=True).eval(), torch.randn(5, 16)
    artifact = aot_util.compile_model(model, (x,), freezing=True, cpp__weight_prepack=False)
    artifact.check(x)
