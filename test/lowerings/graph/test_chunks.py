"""Graphs in chunks compute what they did before, and are refused where rows depend on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from inductor_ext.lowerings.graph import chunks
from inductor_ext.lowerings.graph.chunk_region import CHUNK, grow
from inductor_ext.lowerings.graph.chunk_rows import TOTAL, Rows, list_rows
from inductor_ext.lowerings.graph.live_values import estimate

Function = Callable[..., Any]

HIDDEN, VOCABULARY = 8, 96
X = torch.randn(2, 37, HIDDEN, generator=torch.Generator().manual_seed(0))
W = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(2))
LABELS[0, :3] = -100


def trace(function: Function, *inputs: Tensor) -> fx.GraphModule:
    return make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)


def check(gm: fx.GraphModule, function: Function, *inputs: Tensor, **tolerance: float) -> None:
    """Compare with eager in float64."""
    wide = [value.double() if value.is_floating_point() else value for value in inputs]
    expected = pytree.tree_leaves(function(*wide))
    for value, reference in zip(pytree.tree_leaves(gm(*inputs)), expected, strict=True):
        assert value.shape == reference.shape
        torch.testing.assert_close(
            value.to(reference.dtype), reference, **{"atol": 1e-4, "rtol": 1e-4, **tolerance}
        )


def divide(
    function: Function, *inputs: Tensor, share: float = 0.6
) -> tuple[fx.GraphModule, chunks.ChunkedGraph | None]:
    """Divide a function's graph such that its estimated peak falls by a share."""
    gm = trace(function, *inputs)
    dtypes = [value.dtype for value in pytree.tree_leaves(gm(*inputs))]
    result = chunks.chunk_graph(gm, int(share * estimate(gm.graph).peak))
    assert dtypes == [value.dtype for value in pytree.tree_leaves(gm(*inputs))]
    if result is not None:
        assert result.peak == estimate(gm.graph).peak < result.peak_before
    return gm, result


def cross_entropy(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).flatten(0, 1), labels.flatten())


def train(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    loss = cross_entropy(x, w, labels)
    return loss, *torch.autograd.grad(loss, (x, w))


def top_probabilities(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = F.softmax(F.linear(x, w), -1).topk(4, -1)
    return values, indices


def mlp(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, w[:, 0])) @ w + x


def masked_rows(x: Tensor, w: Tensor) -> Tensor:
    """Broadcasts operands over the rows, over the columns and over both."""
    logits = F.linear(x, w).masked_fill(x[..., :1] > 0.5, -1.0) * w[:, 0] + x.mean()
    return torch.where(logits > 0, logits, 0.0).amax(-1)


def column_sums(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Reductions over the rows and over everything, of one value."""
    logits = torch.tanh(F.linear(x, w))
    return logits.sum((0, 1)), (logits * logits).mean()


def normalized(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, w), (VOCABULARY,)).cumsum(-1)[..., ::16].sum(-1)


def padded(x: Tensor, w: Tensor) -> Tensor:
    a, b = F.pad(F.linear(x, w), (0, 4)).split(50, -1)
    return (torch.cat([a, b.exp()], -1).permute(2, 0, 1) * 2).amax(0)


@pytest.mark.parametrize(
    "function", [top_probabilities, mlp, masked_rows, column_sums, normalized, padded]
)
@pytest.mark.parametrize("rows", [(2, 37), (1, 64), (5, 16)])
def test_chunks_compute_the_same(function: Function, rows: tuple[int, int]) -> None:
    x = torch.randn(*rows, HIDDEN, generator=torch.Generator().manual_seed(3))
    gm, result = divide(function, x, W, share=0.4)
    assert result is not None
    check(gm, function, x, W)


@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
def test_a_loss_is_added_up(share: float) -> None:
    gm, result = divide(cross_entropy, X, W, LABELS, share=share)
    assert result is not None
    assert result.regions == 1
    check(gm, cross_entropy, X, W, LABELS)
    # The logits are never whole.
    whole = X.shape[0] * X.shape[1] * VOCABULARY
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "call_function"]
    assert max(value.numel() for value in values) < whole


def test_gradients_are_added_up() -> None:
    gm, result = divide(train, X, W, LABELS, share=0.6)
    assert result is not None
    check(gm, train, X, W, LABELS)


def test_half_precision_is_added_up_in_float32() -> None:
    def gradient(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w.mT).mT @ x

    x = torch.randn(512, HIDDEN).bfloat16()
    gm, result = divide(gradient, x, W.bfloat16(), share=0.5)
    assert result is not None
    check(gm, gradient, x, W.bfloat16(), rtol=2e-2, atol=1.0)
    added = [node for node in gm.graph.nodes if node.target is torch.ops.aten.add.Tensor]
    assert len(added) == result.count - 1
    assert all(node.meta["val"].dtype == torch.float32 for node in added)


def test_batches_of_attention() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    q, k, v = (torch.randn(6, 40, 4) for _ in range(3))
    gm, result = divide(attention, q, k, v, share=0.5)
    assert result is not None
    check(gm, attention, q, k, v)


def test_columns_are_chunked_where_rows_depend_on_each_other() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x @ w.mT, 0).sum(0)

    x = torch.randn(37, HIDDEN)
    gm, result = divide(function, x, W)
    assert result is not None
    check(gm, function, x, W)
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.amax.default:
            assert node.args[0].meta["val"].shape[0] == 37


REFUSED: dict[str, Function] = {
    "softmax over rows and columns": lambda x, w: torch.softmax((x @ w.mT).flatten(), 0).amax(),
    "cumsum along rows, softmax of columns": lambda x, w: (x @ w.mT).cumsum(0).softmax(-1).amax(),
    "views across rows": lambda x, w: (x @ w.mT).view(-1, 6 * 37).softmax(-1).amax(),
    "random": lambda x, w: torch.rand_like(x @ w.mT).softmax(0).softmax(1).amax(),
    "read by strides": lambda x, w: (x @ w.mT).as_strided((30, 90), (7, 5)).exp().amax(),
    "a custom layout is returned": lambda x, w: (x @ w.mT).mT.contiguous().mT,
}


@pytest.mark.parametrize("name", REFUSED)
def test_dependent_rows_are_refused(name: str) -> None:
    x = torch.randn(37, HIDDEN)
    gm = trace(REFUSED[name], x, W)
    before = str(gm.graph)
    assert chunks.chunk_graph(gm, estimate(gm.graph).peak // 2) is None
    assert str(gm.graph) == before


def test_inputs_that_are_overwritten_in_between_are_refused() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        logits = x @ w.mT
        x.add_(1)
        return (logits.exp() @ w).amax()

    x = torch.randn(37, HIDDEN)
    gm = trace(function, x.clone(), W)
    live = estimate(gm.graph)
    seed = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.mm.default)
    assert grow(seed, Rows(0, 1), 37, live, 1) is None


def test_symbolic_rows_are_left_alone() -> None:
    gm = make_fx(cross_entropy, select_decomp_table(), tracing_mode="symbolic")(X, W, LABELS)
    assert chunks.chunk_graph(gm, estimate(gm.graph).peak // 2) is None


def test_chunks_are_not_fused() -> None:
    gm, result = divide(column_sums, X, W, share=0.5)
    assert result is not None
    of_chunk: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if (chunk := node.meta.get(CHUNK, (0, None))[1]) is not None:
            of_chunk.setdefault(chunk, []).append(node)
    assert len(of_chunk) == result.count
    assert chunks.allows_fusion(of_chunk[0], of_chunk[0])
    assert not chunks.allows_fusion(of_chunk[0], of_chunk[1])
    others = [node for node in gm.graph.nodes if CHUNK not in node.meta]
    assert chunks.allows_fusion(others, of_chunk[1])


def test_rows_are_adjacent_dimensions() -> None:
    assert list(list_rows((2, 3, 4), 6)) == [Rows(0, 2)]
    assert list(list_rows((2, 1, 3, 1), 6)) == [Rows(0, 3)]
    assert list(list_rows((6, 6), 6)) == [Rows(0, 1), Rows(1, 1)]
    assert not list(list_rows((2, 4), 6))
    assert Rows(1, 2).replace((5, 2, 3, 4), 6) == [5, 6, 4]
    assert [Rows(1, 2).map_dim(dim) for dim in range(4)] == [0, 1, 1, 2]
    assert TOTAL.count == 0
