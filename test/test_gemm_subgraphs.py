"""Products in graphs that other graphs call: regions compiled once, and branches of a `cond`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from inductor_ext.templates.config import GemmConfig
from test import kernel_util
from test.test_gemm_pass import lower

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

Tensor = torch.Tensor
HALF = torch.float16
TILE = GemmConfig("splitk", 16, 16, 32, 2, 2)
SIZE = (64, 64)


def parts(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return x @ q, x @ k, x @ v


def gate(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return torch.relu(x @ q) * (x @ k), x @ v


def plain(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return x @ q - x, x @ v


def region(function: Callable[..., Any], *inputs: Tensor) -> Any:
    if inputs[0].dtype is torch.float64:
        return function(*inputs)
    return torch.ops.higher_order.invoke_subgraph(function, function.__name__, *inputs)


def branch(predicate: Tensor, first: Any, second: Any, *inputs: Tensor) -> Any:
    if inputs[0].dtype is torch.float64:
        return (first if predicate else second)(*inputs)
    return torch.ops.higher_order.cond(predicate, first, second, inputs)


def regions(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What a region returns, as the next one's input, and returned."""
    first = region(parts, x, q, k, v)
    return (*region(parts, first[1], q, k, v), *first)


def branches(predicate: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Branches of different kernels, whose input a pass of Inductor's replaces by another."""
    y = x @ q + v.mean(0)
    found: tuple[Tensor, ...] = branch(predicate, gate, plain, y, q, k, v)
    return found


def one_row(predicate: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Parts of one row are contiguous where they are."""
    found: tuple[Tensor, ...] = branch(predicate, parts, other_parts, x, q, k, v)
    return found


def other_parts(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return x @ q, x @ k - 1, (x @ v).sin()


CASES: dict[str, tuple[Callable[..., Any], int, bool | None]] = {
    "regions": (regions, 40, None),
    "first branch": (branches, 40, True),
    "second branch": (branches, 40, False),
    "one row": (one_row, 1, True),
}
"""A function, rows of its input, and a predicate."""


def values(rows: int, predicate: bool | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(rows, 64, generator=generator).half() / 8]
    found += [torch.randn(SIZE, generator=generator).half() / 8 for _ in range(3)]
    return found if predicate is None else [torch.tensor(predicate), *found]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Tensor]]:
    jobs = {}
    for name, (function, rows, predicate) in CASES.items():
        given = values(rows, predicate)
        inputs = [(tuple(each.shape), each.dtype) for each in given]
        lowered, asked = lower(lambda _: TILE, function, *inputs, triton__max_tiles=1)
        assert any(each.parts for each in asked)
        jobs[name] = lowered.code, given
    return kernel_util.interpret_modules(jobs)


@pytest.mark.parametrize("name", CASES)
def test_results_of_subgraphs_are_read_where_they_lie(
    name: str, results: dict[str, list[Tensor]]
) -> None:
    function, rows, predicate = CASES[name]
    given = values(rows, predicate)
    wide = [each.double() if each.is_floating_point() else each for each in given]
    for found, exact in zip(results[name], function(*wide), strict=True):
        assert (found.double() - exact).abs().max() < 4e-3 * exact.abs().max()
