"""Small graphs that are hard on a memory planner, for tests.

Each has something that a planner may get wrong: memory that is aliased, that a kernel or a caller
keeps, whose size is unbacked, or that is needed in another scope. All values stay of the order of
one, so that errors are visible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["GRAPHS", "SIDE", "Graph", "matrix"]

SIDE = 96
"""Rows and columns of the matrices."""


@dataclasses.dataclass(frozen=True)
class Graph:
    """A function with inputs."""

    name: str
    function: Callable[..., Any]
    make_inputs: Callable[[], tuple[Any, ...]]
    """A function that returns equal values on every call."""
    backward: bool = False
    """Whether gradients are computed."""
    dynamic: bool = False


GRAPHS: dict[str, Graph] = {}


def matrix(rows: int = SIDE, columns: int = SIDE, *, seed: int = 0, grad: bool = False) -> Tensor:
    """Random values that keep the size of what they are multiplied with."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) / rows**0.5
    return values.requires_grad_(grad)


def _two(grad: bool = False) -> tuple[Tensor, Tensor]:
    return matrix(seed=1, grad=grad), matrix(seed=2, grad=grad)


def _graph(
    make_inputs: Callable[[], tuple[Any, ...]] = _two, **properties: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        GRAPHS[name] = Graph(name, function, make_inputs, **properties)
        return function

    return register


# --- a peak before, something in between, a peak after ------------------------------------------


def _peak_before(x: Tensor, w: Tensor) -> Tensor:
    """A scalar, after three matmuls were live at once."""
    a = x @ w
    b = a @ w
    c = b @ w
    return (a * b * c).sum()


def _peak_after(z: Tensor, w: Tensor) -> Tensor:
    """Sums, after three matmuls were live at once: they could reuse the others' memory."""
    u = z @ w
    v = u @ w
    t = v @ w
    return (u * v * t).sum(0)


def _branch(x: Tensor) -> Tensor:
    a = x @ x
    b = a.relu() @ x
    return ((a + b) @ x).sin()


def _other_branch(x: Tensor) -> Tensor:
    a = (x + 1) @ x
    return (a * (a @ x)).cos()


@_graph()
def between_branches(x: Tensor, w: Tensor) -> Tensor:
    """A branch's memory adds to that of buffers which are live across it."""
    s = _peak_before(x, w)
    return _peak_after(torch.cond(s > 0, _branch, _other_branch, (x,)), w)


@_graph()
def across_loop(x: Tensor, w: Tensor) -> Tensor:
    """Likewise for a loop."""

    def go_on(i: Tensor, a: Tensor) -> Tensor:
        return i < 3

    def body(i: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        t = a @ w
        u = (t.tanh() @ w).sin()
        return i + 1, (t @ w + u).tanh()

    s = _peak_before(x, w)
    _, z = torch.while_loop(go_on, body, (torch.tensor(0), x * s))
    return _peak_after(z, w)


@_graph(lambda: (*_two(), torch.arange(4 * SIDE) % SIDE > 2))
def unbacked(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """Unbacked sizes, which are large at run time."""
    s = _peak_before(x, w)
    y = torch.ops.aten.index(x * s, [mask.nonzero()[:, 0] % SIDE])
    a = y @ w
    b = a @ w
    c = b @ w
    return _peak_after(x * (a * b * c).sum(0), w)


@_graph()
def partitioned(x: Tensor, w: Tensor) -> Tensor:
    """Buffers that are live across the two sorts at which a test splits the graph."""
    a = x @ w
    b = a.relu() @ w
    c = torch.ops.aten.sort(b @ w, dim=1)[0]
    d = (c @ w + a).sin()
    e = torch.ops.aten.sort(d @ w + b, dim=1)[0]
    return (e @ w + a + d).cos() @ w


# --- aliased memory -----------------------------------------------------------------------------


@_graph()
def outputs_share_memory(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Outputs that are views of an intermediate, one output twice, one that is an input's view."""
    a = (x @ w).sin()
    b = (a @ w).cos()
    c = b @ w
    return a[1:], a.t(), b, b, c.view(-1)[5:50], x[3], c.sum(0), (c @ w)[:, ::2]


@_graph()
def in_place(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Inputs and intermediates that are mutated, whole and in part."""
    a = x @ w
    a[2:7] = a[:5] * 2
    a.mul_(0.5).add_(1)
    b = (a @ w).relu_()
    x.copy_(b @ w)
    w[0].zero_()
    c = b.t().contiguous()
    c[:, 3].fill_(0.25)
    return c @ a, b.index_put((torch.tensor([1, 1, 2]),), a[:3], accumulate=True)


@_graph()
def complex_numbers(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Views that a fallback operator returns, and memory of another dtype."""
    a = torch.view_as_complex((x @ w).view(SIDE, -1, 2))
    b = a * a.conj() + a
    c = torch.view_as_real(b).flatten(1) @ w
    d = torch.fft.rfft(c @ w)
    e = torch.fft.irfft(d * 0.5) @ w
    return c.real + e, torch.view_as_real(d).sum(0), b.imag


@_graph()
def reinterpreted(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The same bytes read as another dtype and with other strides."""
    a = x @ w
    bits = a.view(torch.int32) & -256
    b = bits.view(torch.float32) @ w
    c = torch.as_strided(b @ w, (SIDE // 2, SIDE // 2), (SIDE, 2), 1)
    return c @ c + c, (a @ w).view(torch.int16).long().sum(1)


@_graph()
def many_results(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Operators that allocate several results, some of them unused."""
    a = x @ w
    values, order = a.sort(dim=1)
    best, where = (values @ w).topk(7, dim=0)
    q, r = torch.linalg.qr(values @ w + torch.eye(SIDE))
    parts = torch.split(q @ w, [10, 50, SIDE - 60])
    mean = torch.var_mean(parts[1] @ w, dim=0)
    return best @ w, where + order[:7], parts[0] @ w, mean[0] + mean[1], r.diagonal() * 2


@torch.library.custom_op("inductor_ext_test::rotate", mutates_args=())
def _rotate(x: Tensor, steps: int) -> Tensor:
    return x.roll(steps, 0)


@_rotate.register_fake
def _(x: Tensor, steps: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("inductor_ext_test::accumulate", mutates_args=("total",))
def _accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x)


@_graph()
def custom_operators(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Custom operators: one allocates, one mutates its argument."""
    a = x @ w
    b = _rotate(a, 3)
    _accumulate(b, a.sin())
    c = _rotate(b @ w, 1) @ w
    half = c[: SIDE // 2]
    _accumulate(half, b[: SIDE // 2])
    _accumulate(x, c)
    return (c @ w).cos(), half @ w


# --- unusual tensors ----------------------------------------------------------------------------


@_graph()
def empty_and_tiny(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """No elements, no dimensions, one byte: between buffers that are large enough to plan."""
    none = (x[:0] @ w).sin()
    nothing = x[:, :0] @ w[:0]
    total = (nothing + x @ w).sum()
    flag = total > 0
    a = torch.where(flag, x @ w * total, w)
    b = torch.cat([none, a, none]) @ w
    return b.sum(0), none @ w, flag, total.exp(), (b @ w)[:0], b.max().unsqueeze(0)


@_graph()
def mixed_dtypes(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Element sizes from one byte to eight, odd numbers of elements."""
    a = (x @ w)[:, :77].contiguous()
    small = (a * 50).to(torch.int8).sort(dim=0)[0]
    double = a.double() @ a.double().t()
    half = (double.bfloat16() @ small.bfloat16()).float()
    truth = (half > half.mean()).cumsum(0)
    wide = torch.cat([truth, truth], dim=1)[:, 3:]
    return wide.sum(1), half @ half.t(), (double @ double)[5], small.long().cumsum(0)


def _attention_inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 3, 40, 32), (2, 3, 40, 32), (2, 3, 40, 32), (4, 3, 20, 20), (8, 3, 3, 3))
    return tuple(
        (torch.randn(shape, generator=generator) * 0.3).requires_grad_() for shape in shapes
    )


@_graph(_attention_inputs, backward=True)
def attention_and_convolution(
    query: Tensor, key: Tensor, value: Tensor, image: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Kernels with internal workspaces, and their gradients."""
    attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    attention = F.scaled_dot_product_attention(attention.tanh(), key, attention)
    y = F.conv2d(image.tanh(), weight, padding=1)
    y = F.max_pool2d(F.relu(y), 2)
    return attention.square().sum(), F.conv_transpose2d(y, weight, stride=2).square().mean()


@_graph(lambda: (*_two(grad=True), torch.arange(SIDE) % 7), backward=True)
def saved_for_backward(x: Tensor, w: Tensor, classes: Tensor) -> Tensor:
    """Activations that the backward frees, saved views, and an accumulated gradient."""
    table = torch.stack([w.sum(0), *w[:6]])
    a = (x @ w + F.embedding(classes, table)).tanh()
    b, c = (a @ w).chunk(2, dim=1)
    d = torch.cat([c.sigmoid() * b, b.exp()], dim=1)
    e = F.layer_norm(d @ w, (SIDE,)) @ a.t()
    return F.cross_entropy(e @ w, classes) + (d * a).mean()


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    return matrix(rows, SIDE, seed=rows), matrix(SIDE, 3 * SIDE, seed=9)


@_graph(lambda: _batch(24), dynamic=True)
def any_batch(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Matmuls whose sizes depend on the batch size, on its square, or on neither."""
    a, b, c = (x @ w).chunk(3, dim=1)
    scores = (a @ b.t()).softmax(-1)
    d = scores @ c
    e = torch.cat([d, a.relu()], dim=1) @ w[:, : 2 * SIDE].t()
    return (e.t() @ d).sin() @ w, (scores @ e).sum(0), d[: d.shape[0] // 2]
