"""Views by operators without a kernel of Inductor, and writes to the memory that they share.

Each function contains independent variants, with inputs of their own, so that one compile tests
them all. Results and inputs after the call are compared with eager mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import inductor_ext
from test.support.mutating_operators import (
    flip_into,
    increment,
    increment_all,
    increment_all_contiguous,
)

Program = Callable[..., tuple[torch.Tensor, ...]]

FIRST = torch.tensor([0])


def write_complex_inputs(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    a[1:].copy_(a[:-1].clone())
    polar = torch.polar(a.abs(), a.real)
    b[:-1] = b[1:].clone()
    flip_into(b[:2].clone(), b[2:])
    c[FIRST] = 2
    repeated = c.repeat(1, 2)
    c.add_(2)
    real = torch.view_as_real(d) + 1
    d[FIRST] = 3
    before = e.mul(2).sub(e, alpha=0.5)
    increment(e[:1])
    imag = f.imag * 2
    f.mul_(2j)
    return polar, repeated, real * real, before.real * 1, imag * f.real


def write_complex_intermediates(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    a = a * 2
    real = torch.view_as_real(a) + 1
    a[FIRST] = 2
    repeated = a.repeat(1, 2)
    a.add_(3)
    b = b.real.to(torch.complex64)
    b[FIRST] = b[1] * 1
    transposed = b.t() * 2
    b[1:] = b[:-1].clone()
    c = c.t().contiguous()
    c.real.mul_(2)
    c.imag[:2] = c.real[:2]
    d = d.view(torch.float32) + 1
    d[:, 1:] = d.view(torch.int32)[:, :-1].clone().view(torch.float32)
    e = torch.view_as_real(e).clone()
    complex_view = torch.view_as_complex(e) * 2
    increment(e)
    mixed = a.real[:, :2] + real[:, :2, 0]
    return mixed, repeated, a, transposed, b, c, d, complex_view, e * 1


def write_views_of_other_dtypes(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    a.view(torch.float32)[1:] += 1
    half = b.view(torch.float32).view(torch.int16) + 1
    b.mul_(2)
    c = c.real.contiguous()
    halves = c.view(torch.int16)
    first = halves[:, ::2] + 1
    c.add_(1)
    d = torch.view_as_real(d).sum(-1)
    increment(d.view(torch.int16))
    e.view(torch.float32)[FIRST] = 4
    return a * 1, half * 2, first * first, halves * 1, d * 2, e.real + 1


def fill_views_by_masks(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """A value by a mask: the lowering has a way of its own for it."""
    before = a * 2
    floats = a.view(torch.float32)
    floats[floats > 0.5] = 3
    integers = b.view(torch.int32)
    integers[integers > 7] = 5
    integers += 1
    real = torch.view_as_real(c)
    real[real > 0.2] = 3
    magnitude = c.abs()
    d.real[d.real > 0.2] = 3
    real.copy_(real.flip(-1))
    e = e * 2
    doubled = torch.view_as_real(e)
    doubled[doubled > 0.1] = 3
    torch.view_as_real(f).fill_(2)
    return before, integers * 1, magnitude, real.sum(), e, f.real + 1


PROGRAMS: tuple[Program, ...] = (
    fill_views_by_masks,
    write_complex_inputs,
    write_complex_intermediates,
    write_views_of_other_dtypes,
)


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 6, dtype=torch.complex64) for _ in range(6)]


def _compare(program: Program, compiled: Program, inputs: list[torch.Tensor] | None = None) -> None:
    expected_inputs, actual_inputs = (copy.deepcopy(inputs or _inputs()) for _ in range(2))
    expected = [*program(*expected_inputs), *expected_inputs]
    actual = [*compiled(*actual_inputs), *actual_inputs]
    for index, (value, reference) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(value, reference, msg=lambda text, i=index: f"{i}: {text}")


def increment_views_of_tensors_with_gaps(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """Operators get views with the recorded strides, or contiguous copies that are copied back."""
    torch.view_as_real(a)[..., 0].fill_(0.5)
    increment_all([a[:1], a[1:]])
    torch.view_as_real(b)[..., 0].fill_(0.5)
    increment_all([b[:1]])
    before = b + 0
    increment_all([b[1:]])
    c.real.fill_(0.5)
    increment_all([c[1:].t()])
    d[FIRST] = 1
    increment_all([d[:1], d[1:]])
    e.view(torch.float32)[:, 0] = 2
    increment_all([e.view(torch.int16)[:1], e.view(torch.int16)[1:]])
    increment_all_contiguous([f[1:].t(), f[:1].t()])
    f = f * 2
    increment_all_contiguous([f[1:].t()])
    total = f.sum()
    increment_all_contiguous([f[:1].t()])
    return a * 1, before, c.real + 1, f, total


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_views_of_tensors_with_gaps_are_overwritten(cpp_wrapper: bool) -> None:
    program = increment_views_of_tensors_with_gaps
    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(program, backend="inductor_ext", options=options)
    inputs = [x[:, ::2] for x in _inputs()[:4]] + [x[:, :4] for x in _inputs()[4:]]
    _compare(program, compiled, inputs)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_views_and_writes_keep_their_order(program: Program) -> None:
    _compare(program, torch.compile(program, backend="inductor_ext", fullgraph=True))


def conjugate_intermediates(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """Inductor copies views to the strides that eager mode gives them, or that a kernel needs."""
    a = a.mT * 1
    a.real.mul_(0.5)
    b = b.mT * 1
    b.imag.mul_(0.5)
    c = c[None].mT * 1
    c.real.mul_(2)
    d = d.mT * 1
    d.imag.mul_(2)
    results = [(a * 2).conj(), (a * 3).mH, (b.conj() * b).abs(), torch.bmm(c.mH, c)]
    results += [torch.cat([d.conj(), d]).conj(), (e * 2).conj().mT.contiguous()]
    results += [f.conj().imag * 2, torch.view_as_real((f * 2).mH.resolve_conj())]
    return tuple(results)


def _loss(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    weights = [torch.arange(r.numel()).reshape(r.shape) for r in results]
    weighted = [r.resolve_conj() * weight for r, weight in zip(results, weights, strict=True)]
    return torch.stack([x.abs().square().sum() for x in weighted]).sum()


def test_copies_of_conjugate_views_are_conjugate() -> None:
    outcomes = []
    compiled = torch.compile(conjugate_intermediates, backend="inductor_ext", fullgraph=True)
    for function in (conjugate_intermediates, compiled):
        inputs = [x.requires_grad_() for x in _inputs()]
        results = function(*inputs)
        _loss(results).backward()
        outcomes.append([*(result.detach() for result in results), *(x.grad for x in inputs)])
    for index, (reference, value) in enumerate(zip(*outcomes, strict=True)):
        torch.testing.assert_close(value, reference, msg=lambda text, i=index: f"{i}: {text}")


class Buffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in zip("ab", _inputs(), strict=False):
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.a[FIRST] = 2
        repeated = self.a.repeat(1, 2)
        self.a.add_(2)
        real = torch.view_as_real(self.b) + 1
        self.b[1:] = self.b[:-1].clone()
        x[FIRST] = x[1] * 1
        return repeated, real * real, x.abs()


def test_packages_keep_the_order_of_views_and_writes(tmp_path: Path) -> None:
    model, x = Buffers(), _inputs()[2]
    program = torch.export.export(copy.deepcopy(model), (x.clone(),))
    path = inductor_ext.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for _ in range(2):
        actual_input, expected_input = x.clone(), x.clone()
        actual = [*package(actual_input), actual_input]
        for value, reference in zip(actual, [*model(expected_input), expected_input], strict=True):
            torch.testing.assert_close(value, reference)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_writes_into_a_buffer_that_gets_new_memory_later(cpp_wrapper: bool) -> None:
    """Seed 120357 of the graph fuzzer; Inductor (default) is wrong from the second compile on."""

    def program(x):  # type: ignore[no-untyped-def]
        x[:-1] = x[1:].clone()
        half = len(x) // 2
        flip_into(x[:half].clone(), x[len(x) - half :])
        flip_into(x.clone(), x)
        return x.sum()

    options = {"cpp_wrapper": cpp_wrapper, "fx_graph_cache": False}
    # Inductor realizes the operands of an operator only if it compiled a call of it before.
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="inductor_ext", options=options)
        # Rows with other elements in between, so that the operator gets a copy of x.
        actual, expected = (torch.arange(192.0).view(16, 12)[:, :9] for _ in range(2))
        torch.testing.assert_close(compiled(actual), program(expected))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("dynamic", "cpp_wrapper"), [(False, False), (True, True)], ids=["static", "dynamic in C++"]
)
def test_views_of_a_buffer_whose_new_memory_has_other_strides(
    dynamic: bool, cpp_wrapper: bool
) -> None:
    def program(x, w):  # type: ignore[no-untyped-def]
        x.copy_(torch.select_scatter(x, x[-1].clone(), 0, 0))
        before = torch.mm(x[1:], w)
        rows, other = x[1:], x + 1
        # The operator gets a copy of x with the strides of the input.
        increment_all([x, other])
        return before, other, torch.mm(rows, w), x.sort(0)[0]

    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(program, backend="inductor_ext", dynamic=dynamic, options=options)
    w = torch.randn(4, 4)
    actual_input, expected_input = (torch.arange(48.0).view(6, 8)[:, ::2] for _ in range(2))
    actual = [*compiled(actual_input, w), actual_input]
    expected = [*program(expected_input, w), expected_input]
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference)


def test_an_input_is_set_after_a_triton_kernel() -> None:
    """A Triton kernel of the user has no name that a buffer has."""
    pytest.importorskip("triton")
    from inductor_ext import config
    from inductor_ext.hooks import scope
    from test.support import fake_cuda, triton_kernels

    def program(x: torch.Tensor, y: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        total = torch.empty_like(x)
        torch.library.wrap_triton(triton_kernels.add_kernel)[(1,)](x, y, total, 64, BLOCK=64)
        torch.ops.aten.copy_.default(counter, torch.ones_like(counter))
        return total * 2

    inputs = [((64,), torch.float32), ((64,), torch.float32), ((1,), torch.int64)]
    with scope.compile_scope(config.snapshot({})):
        lowered = fake_cuda.lower(program, *inputs)
    assert "add_kernel" in lowered.code


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_gradients_of_a_complex_number(cpp_wrapper: bool) -> None:
    """AOTAutograd calls `_conj` of the number."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * (0.5 + 0.25j)).clone()

    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(program, backend="inductor_ext", options=options)
    actual, expected = (torch.tensor(1 + 2j, requires_grad=True) for _ in range(2))
    for function, x in ((compiled, actual), (program, expected)):
        function(x).abs().sum().backward()
    torch.testing.assert_close(actual.grad, expected.grad)
