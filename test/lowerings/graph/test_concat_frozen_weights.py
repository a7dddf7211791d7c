"""Matmuls of one input by frozen weights: which are joined, their results, and cached code.

On the CPU, for which `frozen.is_covered` is replaced.
"""

from __future__ import annotations

import contextlib
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

from inductor_ext.lowerings.graph import concat_frozen_weights
from test.support import aot_util

aten = torch.ops.aten

MATMULS = (aten.mm.default, aten.addmm.default)


class Attention(nn.Module):
    """Q, K and V of different widths, which are not returned."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.q = nn.Linear(16, 24, bias=bias)
        self.k = nn.Linear(16, 8, bias=bias)
        self.v = nn.Linear(16, 4, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x).unflatten(-1, (3, 8)).relu(), self.k(x).sigmoid(), self.v(x) * 2


class Transposed(nn.Module):
    """Weights that are not transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(16, 6))
        self.second = nn.Parameter(torch.randn(16, 10))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ self.first).relu(), (x @ self.second).relu()


class Three(nn.Module):
    """Three matmuls of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in (4, 8, 12))

    def matmuls(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


class Returned(Three):
    """The second of three matmuls is returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = self.matmuls(x)
        return first.relu(), second.view(2, 2, 8), third.relu()


class Windows(Three):
    """The first of three matmuls is read by as_strided."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second, third = self.matmuls(x)
        return first.as_strided((3, 2, 4), (4, 4, 1)).relu(), second.relu(), third.relu()


class Tied(nn.Module):
    """One weight is used twice, and three matmuls have other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.two(self.one(self.one(x).relu()).relu()).relu(), self.two(x).relu()


class Unlike(nn.Module):
    """One matmul has a bias and the other has none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).relu(), self.two(x).relu()


@pytest.fixture(autouse=True)
def covered() -> Iterator[None]:
    """All matmuls are covered. In float64 Inductor does not replace them by oneDNN kernels.

    Whether it packs weights for oneDNN depends on the first compile with freezing in the process.
    """
    torch.set_default_dtype(torch.float64)
    with mock.patch.object(concat_frozen_weights, "is_covered", return_value=True):
        yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def freezing(wanted: bool = True) -> Iterator[list[fx.Node]]:
    """Compile with frozen weights or not; yield the matmuls that Inductor gets."""
    results: list[fx.Node] = []
    run = concat_frozen_weights.concat_frozen_weights

    def recorded(gm: fx.GraphModule, settings: Any) -> None:
        run(gm, settings)
        results.extend(node for node in gm.graph.nodes if node.target in MATMULS)

    with (
        config.patch(freezing=wanted),  # Dynamo reads it before there are options.
        mock.patch.object(concat_frozen_weights, "concat_frozen_weights", recorded),
        torch.no_grad(),
    ):
        yield results


def columns(matmuls: list[fx.Node]) -> list[int]:
    return sorted(matmul.meta["val"].shape[1] for matmul in matmuls)


def compiled(model: nn.Module, x: Tensor, *, wanted: bool = True, **options: Any) -> list[fx.Node]:
    """The matmuls that Inductor gets, after comparing results."""
    torch._dynamo.reset()
    model = copy.deepcopy(model).double()
    copied = torch.compile(copy.deepcopy(model), backend="inductor_ext", options=options)
    with freezing(wanted) as matmuls:
        results, expected = copied(x), model(x)
    torch.testing.assert_close(results, expected)
    assert [item.stride() for item in results] == [item.stride() for item in expected]
    return matmuls


@pytest.mark.parametrize("bias", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("rows", [(5,), (2, 3)], ids=["matrix", "batch"])
def test_matmuls_of_one_input_become_one(bias: bool, rows: tuple[int, ...]) -> None:
    (matmul,) = compiled(Attention(bias=bias).eval(), torch.randn(*rows, 16))
    assert columns([matmul]) == [24 + 8 + 4]


def test_rows_may_be_known_only_at_run_time() -> None:
    model = Attention(bias=True).eval()
    torch._dynamo.reset()
    run = torch.compile(copy.deepcopy(model), backend="inductor_ext", dynamic=True)
    with freezing() as matmuls:
        for rows in (3, 7):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(x), model(x))
    assert columns(matmuls) == [36]


@pytest.mark.parametrize(
    ("model", "stride"),
    [(Transposed(), (16, 1)), (Attention(bias=False), (1, 16))],
    ids=["rows of the factor", "columns of the factor"],
)
def test_weights_keep_their_order_in_memory(model: nn.Module, stride: tuple[int, ...]) -> None:
    (matmul,) = compiled(model.eval(), torch.randn(5, 16))
    weight = matmul.all_input_nodes[-1]
    assert weight.op == "get_attr"
    assert weight.meta["val"].stride() == stride


def test_returned_results_stay_contiguous() -> None:
    assert columns(compiled(Returned().eval(), torch.randn(4, 16))) == [8, 4 + 12]


def test_as_strided_results_keep_their_own_memory() -> None:
    assert columns(compiled(Windows().eval(), torch.randn(4, 16))) == [4, 8 + 12]


@pytest.mark.parametrize(
    ("model", "expected"), [(Tied(), [8, 8, 16, 16]), (Unlike(), [8, 16])], ids=["tied", "unlike"]
)
def test_other_matmuls_stay(model: nn.Module, expected: list[int]) -> None:
    assert columns(compiled(model.eval(), torch.randn(5, 16))) == expected


@pytest.mark.parametrize(
    "options",
    [{"wanted": False}, {"gemm_fuse_shared_input": False}, {"gemm_templates": False}],
    ids=["no freezing", "gemm_fuse_shared_input", "gemm_templates"],
)
def test_the_setting_switches_it_off(options: dict[str, Any]) -> None:
    result = compiled(Attention(bias=True).eval(), torch.randn(5, 16), **options)
    assert columns(result) == [4, 8, 24]


def test_cached_code_multiplies_by_the_weights_of_its_model() -> None:
    x = torch.randn(5, 16)
    with fresh_cache():
        for hits in (0, 1):
            before = counters["inductor"]["fxgraph_cache_hit"]
            result = compiled(Attention(bias=True).eval(), x, fx_graph_cache=True)
            assert columns(result) == [36]
            assert counters["inductor"]["fxgraph_cache_hit"] == before + hits


def test_a_package_has_joined_weights() -> None:
    model, x = Attention(bias=True).eval(), torch.randn(5, 16)
    with freezing() as matmuls:
        artifact = aot_util.compile_model(model, (x,))
    assert columns(matmuls) == [36]
    artifact.check(x)
