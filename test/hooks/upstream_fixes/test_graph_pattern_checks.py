"""Attention that patterns of Inductor take for another one, and reads in random order."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.utils import run_and_get_code

Tensor = torch.Tensor


def _attend(scores: Tensor, values: Tensor, dim: int) -> Tensor:
    return torch.matmul(torch.softmax(scores, dim=dim), values)


def attend_over_other_dimensions(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    scores = torch.matmul(q, k.transpose(-2, -1))
    return [_attend(scores.div(math.sqrt(4)), v, 1), _attend(scores.mul(0.25), v, -2)]


def attend_to_permuted_keys(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Batch, sequence, heads, features: the keys of another batch are attended to."""
    query, key, value = q.permute(0, 2, 1, 3), k.permute(2, 0, 1, 3), v.permute(0, 2, 1, 3)
    scores = torch.matmul(query, key.transpose(-2, -1)).div(math.sqrt(4))
    transposed = torch.matmul(q, k.permute(1, 0, 3, 2)).div(math.sqrt(4))
    return [_attend(scores, value, -1), _attend(transposed, v, -1)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    scores = torch.matmul(q, k.transpose(-2, -1)).div(math.sqrt(4))
    return [_attend(scores, v, -1)]


@pytest.mark.parametrize("training", [False, True])
def test_attention(training: bool) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, 4, 4, requires_grad=training) for _ in range(3)]

    def model(*xs: Tensor) -> list[Tensor]:
        return attend_over_other_dimensions(*xs) + attend_to_permuted_keys(*xs) + attend(*xs)

    compiled = torch.compile(model, backend="inductor_ext", fullgraph=True)
    results, code = run_and_get_code(compiled, *inputs)
    torch.testing.assert_close(results, model(*inputs), atol=1e-4, rtol=1e-4)
    calls = code[0].count("= torch.ops.aten._scaled_dot_product_flash_attention")
    assert calls == 1  # only `attend` is the attention of the pattern


def test_packages_with_attention(tmp_path: Path) -> None:
    """In a new process: a pattern is traced once in each, for a package without a context."""
    done = subprocess.run(
        [sys.executable, "-c", _PACKAGE, str(tmp_path / "attention.pt2")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


_PACKAGE = """
import sys

import torch

import inductor_ext
from test.hooks.upstream_fixes.test_graph_pattern_checks import attend


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return attend(q, k, v)


inputs = tuple(torch.randn(4, 4, 4, 4) for _ in range(3))
options = {"aot_inductor.compile_wrapper_opt_level": "O0", "artifact_cache": False}
with torch.no_grad():
    path = inductor_ext.aoti_compile_and_package(
        torch.export.export(Attention(), inputs), package_path=sys.argv[1], inductor_configs=options
    )
(result,), (expected,) = inductor_ext.load(path)(*inputs), attend(*(x.double() for x in inputs))
torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)
"""


def test_rows_in_random_order() -> None:
    def shuffle(x: Tensor) -> list[Tensor]:
        return [x[torch.randperm(8)], x[torch.randperm(len(x))] * 2, x[torch.randperm(4)[:3]]]

    x = torch.arange(16.0).reshape(8, 2)
    shuffled, doubled, some = torch.compile(shuffle, backend="inductor_ext", fullgraph=True)(x)
    assert torch.equal(shuffled.sort(0).values, x)
    assert torch.equal(doubled.sort(0).values, x * 2)
    assert some.shape == (3, 2)
    assert int(some.max()) < 8
