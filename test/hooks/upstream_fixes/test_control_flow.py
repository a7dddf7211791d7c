"""Control flow: results of loops without an iteration, and branches of `cond`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from test.support import aot_util
from test.support.aot_util import call, sharing
from test.support.compile_util import BACKEND, TORCH


def repeat(n: Tensor, x: Tensor, step: Any) -> Tensor:
    """Return `x` after `n` steps."""
    result: Tensor = while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, step(x)), (n, x))[1]
    return result


def double(x: Tensor) -> Tensor:
    return x * 2


def loops(n: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
    """Loops whose carried inputs or results are used again."""
    results = []
    a = x.sin()  # An intermediate whose memory could be reused after the loop.
    b = repeat(n, a, double)
    results += [b + 1, b]
    c = x.cos()  # One input of two loops, and a chain of loops.
    d, e = repeat(n, c, double), repeat(n - 1, c, double)
    results += [d.cumsum(0), d, e, repeat(n - 2, e, double), c]
    f = x.exp()  # A view.
    g = repeat(n, f[1:3], double)
    results += [g * 3, g[1:], f + 1]
    m = n + 1  # Nested loops; torch rejects a carried input that the body captures too.
    h = repeat(n, x.tan(), lambda z: repeat(m - 2, z, double))
    results += [h + 1, h]
    i = repeat(n, x.exp() + 1, lambda z: torch.cond(z.sum() > 40, double, torch.sqrt, (z,)))
    results += [i + 1, i]
    j = torch.cond(n > 1, lambda z: repeat(n - 2, z, double), lambda z: z + 1, (x.tanh(),))
    results += [j + 1, j]
    k = repeat(n, y, double)  # A graph input that changes afterwards.
    y.add_(7)
    k.mul_(3)
    return [*results, k, k + 1]


def compile_loops(args: tuple[Any, ...], way: str, arenas: str) -> Any:
    if way == "package":
        return aot_util.compile_model(loops, args, memory_arenas=arenas).loaded
    options = {"cpp_wrapper": way == "cpp", "memory_arenas": arenas}
    return torch.compile(loops, backend=BACKEND, fullgraph=True, options=options)


@pytest.mark.parametrize(
    ("way", "arenas"), [("python", "auto"), ("cpp", "never"), ("package", "auto")]
)
def test_results_of_loops_have_their_own_memory(way: str, arenas: str) -> None:
    args = torch.randn(4, 6), torch.randn(4, 6)
    compiled = compile_loops((torch.tensor(3), *args), way, arenas)
    for n in (0, 1, 3):
        actual = call(compiled, (torch.tensor(n), *args))
        expected = call(loops, (torch.tensor(n), *args))
        torch.testing.assert_close(actual, expected)
        # Eager mode returns the carried input itself if there is no iteration.
        assert set(sharing(actual)) <= set(sharing(expected))


def constants(p: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Tensors that branches and bodies of loops create from numbers."""

    def scatter(z: Tensor) -> Tensor:
        index = torch.tensor([[0, 0, 1], [1, 1, 2], [2, 2, 0], [0, 0, 2]])
        return z[:, ::2].scatter_add(1, index, torch.ones(4, 3))

    def select(z: Tensor) -> Tensor:
        return z[torch.tensor([[3, 1], [0, 2]])]

    def add(z: Tensor) -> Tensor:
        return z + torch.tensor([[0.5, 1.5, 2.5, 1.0, 2.0, 3.0]] * 4)

    def nested(z: Tensor) -> Tensor:
        return torch.cond(z.sum() > 0, scatter, lambda z: z[:, :3] + 1, (z,))

    return (
        torch.cond(p, scatter, lambda z: z[:, 1::2] - 3, (x,)),
        torch.cond(p, lambda z: z[:2, None] + z[:2], select, (x.view(4, 6),))[0],
        torch.cond(p, nested, lambda z: z[:, 1::2] - 3, (x.abs(),)),
        torch.cond(p, add, add, (x,)),
        repeat(p + 1, x.sin(), add),
    )


@pytest.mark.parametrize("way", ["python", "cpp"])
def test_constants_of_branches(way: str) -> None:
    compiled = torch.compile(
        constants, backend=BACKEND, fullgraph=True, options={"cpp_wrapper": way == "cpp"}
    )
    x = torch.randn(4, 6)
    for p in (True, False):
        torch.testing.assert_close(
            compiled(torch.tensor(p), x), constants(torch.tensor(p), x), check_stride=False
        )


def sizes(p: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Branches whose results differ in an inner size."""
    a = torch.cond(p, lambda x, y: x + 1, lambda x, y: y * 2, (x, y))
    b = torch.cond(p, lambda x, y: torch.cat([x, x]), lambda x, y: y * 2, (x.sin(), y.cos()))
    c = torch.cond(p, lambda x, y: (x + 1).t(), lambda x, y: (y * 2).t(), (x, y))
    d, e = torch.cond(p, lambda x, y: (x + 1, x.sum(0)), lambda x, y: (y * 2, y.sum(0)), (x, y))
    f = torch.cond(
        p,
        lambda x, y: x[:, :, None].repeat(1, 1, 3),
        lambda x, y: y[:, :, None].repeat(1, 1, 3),
        (x, y),
    )
    return a, a.sum(1), b, b.sum(0), c, c * 3, d, e, d + e, f, f.sum(2)


@pytest.mark.parametrize("way", ["python", "cpp"])
def test_branches_that_differ_in_an_inner_size(way: str) -> None:
    compiled = torch.compile(
        sizes, backend=BACKEND, fullgraph=True, dynamic=True, options={"cpp_wrapper": way == "cpp"}
    )
    for p, m, n in ((True, 7, 8), (False, 7, 8), (True, 9, 4)):
        args = torch.tensor(p), torch.randn(5, m), torch.randn(5, n)
        torch.testing.assert_close(compiled(*args), sizes(*args))


@pytest.mark.parametrize("operator", ["while_loop", "scan"])
def test_unsupported_loops_are_refused_by_name(operator: str) -> None:
    """Or compiled rightly, by torch releases that can."""

    def function(x: Tensor) -> Any:
        if operator == "scan":
            return scan(lambda c, z: (c + z, c * 2), x[0], x[1:])
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, x))[1]

    x = torch.randn(5, 4)
    try:
        actual = torch.compile(function, backend=BACKEND, dynamic=True, fullgraph=True)(x)
    except Exception as error:
        causes = str(error)
        # The error of torch 2.11 and 2.12 names the operator.
        assert "UnsupportedControlFlowError" in causes or TORCH < (2, 13)
        assert operator in causes
    else:
        torch.testing.assert_close(actual, function(x))


def update_operands(a: Tensor, b: Tensor, c: Tensor, d: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """The operands of `cond` are updated in place, and inputs that are not contiguous."""
    a[i] = 0.5
    first = torch.cond(a.sum() > 0, double, torch.neg, (a[: a.shape[0] // 2],))
    a.mul_(2)
    b.index_add_(0, i, b[i])
    second = torch.cond(b.sum() > 1e9, double, torch.neg, (b,))
    c[1:] = c[:-1].clone()
    third = torch.cond(c.sum() > 0, double, torch.neg, (c.t()[1:],))
    d[i, i] = 2.0
    fourth = torch.cond(d.sum() > 0, lambda x: x @ x, torch.neg, (d,))
    fifth = torch.cond(d.sum() > 0, double, torch.neg, (d[0].expand(3, 6),))
    return first, second, third, fourth, fifth


@pytest.mark.parametrize("way", ["compile", "cpp_wrapper"])
def test_operands_of_branches_that_are_updated_in_place(way: str) -> None:
    inputs = [torch.rand(12)[::2], torch.rand(6, 12)[:, ::2], torch.rand(6, 6).t()]
    inputs += [torch.rand(12, 12)[::2, 1::2], torch.tensor([1, 0, 1])]
    copies = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in inputs]
    options = {"cpp_wrapper": way == "cpp_wrapper"}
    compiled = torch.compile(update_operands, backend=BACKEND, options=options, fullgraph=True)
    torch.testing.assert_close(compiled(*copies), update_operands(*inputs))
    torch.testing.assert_close(copies, inputs)


def update_results(i: Tensor) -> tuple[Tensor, ...]:
    """The loop of a scan writes into its result, which the program then updates in place."""
    last, totals = scan(lambda c, z: (z + 1, c + z), i[0].clone(), i)
    before = totals + 1
    totals.scatter_(0, i % 5, 7)
    rows = scan(lambda c, z: (c * 1, c - z), last, i)[1]
    rows.mul_(3)
    return before, totals, rows, rows * last


@pytest.mark.parametrize("way", ["python", "package"])
def test_results_of_scans_that_are_updated_in_place(way: str) -> None:
    args = (torch.tensor([0, 1, 1, 0, 1]),)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        if way == "package":
            compiled = aot_util.compile_model(update_results, args).loaded
        else:
            compiled = torch.compile(update_results, backend=BACKEND, fullgraph=True)
        torch.testing.assert_close([*compiled(*args)], [*update_results(*args)])


@torch.compiler.nested_compile_region
def region(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.sin() @ b) * c + b.cos()


def regions(x: Tensor, y: Tensor) -> Tensor:
    start = torch.nn.functional.normalize(x, dim=-1) @ torch.nn.functional.normalize(y, dim=0)
    first = region(start, y, x)
    second = region(first, start, y)
    return first * second + region(first, second, start)


def branches(x: Tensor, y: Tensor) -> Tensor:
    """The backward graph's branches get zeros as the gradient of their second result."""
    start = torch.nn.functional.normalize(x, dim=-1) @ torch.nn.functional.normalize(x, dim=0)
    result: Tensor = torch.cond(
        y[0, 0] > 0,
        lambda x, y: (x + y, y.clone()),
        lambda x, y: (y.flip(0), x.clone()),
        (start, start),
    )[0]
    return result * y


@pytest.mark.parametrize(
    ("function", "cpp_wrapper"), [(regions, False), (branches, False), (branches, True)]
)
def test_subgraphs_of_backward_graphs_keep_their_operands(function: Any, cpp_wrapper: bool) -> None:
    compiled = torch.compile(function, backend=BACKEND, options={"cpp_wrapper": cpp_wrapper})
    gradients = []
    for version in (compiled, function):
        torch.manual_seed(0)
        inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
        gradients.append(torch.autograd.grad(version(*inputs).sin().sum(), inputs))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dynamic", [False, True])
def test_scans_and_maps_need_no_setting(dynamic: bool) -> None:
    """Inductor (default) fails unless `capture_scalar_outputs` is set: the loop reads its index."""

    def model(initial: Tensor, rows: Tensor) -> list[Tensor]:
        last, scaled = scan(lambda carry, row: (carry + row, carry * row), initial, rows, dim=0)
        return [last, scaled, map_rows(lambda row, scale: row * scale + 1, rows, initial)]

    compiled = torch.compile(model, backend=BACKEND, fullgraph=True, dynamic=dynamic)
    initial = torch.arange(3.0)
    for count in (3, 1, 5):
        rows = torch.arange(3.0 * count).reshape(count, 3) - 4
        for result, value in zip(compiled(initial, rows), model(initial, rows), strict=True):
            assert torch.equal(result, value)
