"""Custom operators that overwrite a view of another dtype than its base.

Each function contains independent variants, with inputs of their own, so that one compile tests
them all. Results and inputs after the call are compared with eager mode.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import inductor_ext
from inductor_ext import exc
from test.support.mutating_operators import flip_into, flip_into_both, increment, increment_all


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.randn(4, 6, dtype=torch.complex64))

    def forward(self, a, b, c, d, e):  # type: ignore[no-untyped-def]
        increment(a.real)
        increment(a.imag[1:])
        flip_into(a.real[:2], a.imag[2:])
        doubled = b * 2
        increment(torch.view_as_real(doubled)[:2])
        flip_into(torch.view_as_real(doubled)[:2], torch.view_as_real(doubled)[2:])
        magnitude = c.abs()
        flip_into_both(magnitude, [c.real, c.imag])
        before = torch.view_as_real(d)[:, 0] * 1
        increment(d.t().real)
        d.mul_(2)
        increment(self.state.imag)
        interleaved = torch.view_as_complex(e)
        increment(interleaved.t()[1:])
        increment(e[::2])
        return doubled, magnitude, before, d.real + 1, self.state * 1, interleaved.abs()


def increment_parts(a, b, c):  # type: ignore[no-untyped-def]
    """Each `view(dtype)` and `detach` is a base of its own for AOTAutograd."""
    increment_all([a.view(torch.int32)[:1], a.view(torch.int32)[1:]])
    b = b * 2
    increment_all([b.view(torch.int16)[:2], b.view(torch.uint8)[2:], b.detach()[2:2]])
    increment_all([c.detach()[0], c.detach()[1:], c[0][:0]])
    return a + 1, b, c + 1


def increment_views_of_old_values(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """The new values of inputs with gaps have none; the views were created before."""
    row = a[1]
    a.mul_(2)
    twice = row + row
    increment_all([row, twice])
    top, row, part = b[:2], b[2], b[3:, 1:]
    b.mul_(2)
    increment_all([top, row, part])
    transposed = c.t()[1:]
    c.add_(1)
    increment(transposed)
    first, third = d[0], d[2]
    d.mul_(3)
    flip_into(first * 2, third)
    before, later = e[:2], e
    e.mul_(2)
    increment_all([before, later[2:].t()])
    whole, end = f.view(4, 5), f[1:]
    f.mul_(2)
    increment(whole)
    increment(end.t())
    return a + 1, twice, b * 2, c - 1, d * 2, e + 1, f + 1


def _inputs_with_gaps() -> list[torch.Tensor]:
    return [torch.arange(40.0).reshape(4, 10)[:, ::2] for _ in range(6)]


def _inputs(rows: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = [torch.randn(rows, 6, dtype=torch.complex64) for _ in range(4)]
    return [*inputs, torch.randn(rows, 6, 2)]


def _compare(compiled, model: Model, rows: int = 4) -> None:  # type: ignore[no-untyped-def]
    actual_inputs, expected_inputs = _inputs(rows), _inputs(rows)
    actual = [*compiled(*actual_inputs), *actual_inputs]
    expected = [*model(*expected_inputs), *expected_inputs]
    for index, (value, reference) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(value, reference, msg=lambda text, i=index: f"{i}: {text}")


def test_the_elements_of_the_view_are_overwritten() -> None:
    model = Model()
    compiled = torch.compile(copy.deepcopy(model), backend="inductor_ext", fullgraph=True)
    for _ in range(2):
        _compare(compiled, model)


def test_packages_overwrite_the_elements_of_the_view(tmp_path: Path) -> None:
    model = Model()
    program = torch.export.export(copy.deepcopy(model), (*_inputs(),))
    path = inductor_ext.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    package = inductor_ext.load(path)
    for _ in range(2):
        _compare(package, model)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_views_of_one_tensor_are_all_overwritten(cpp_wrapper: bool) -> None:
    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(increment_parts, backend="inductor_ext", options=options)
    actual_inputs, expected_inputs = ([torch.ones(4, 6) for _ in "abc"] for _ in range(2))
    actual, expected = compiled(*actual_inputs), increment_parts(*expected_inputs)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_inputs, expected_inputs)


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_views_of_old_values_are_overwritten(cpp_wrapper: bool) -> None:
    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(increment_views_of_old_values, backend="inductor_ext", options=options)
    actual_inputs, expected_inputs = _inputs_with_gaps(), _inputs_with_gaps()
    actual = compiled(*actual_inputs)
    torch.testing.assert_close(actual, increment_views_of_old_values(*expected_inputs))
    for value, reference in zip(actual_inputs, expected_inputs, strict=True):
        torch.testing.assert_close(value._base, reference._base)


def test_dynamic_sizes() -> None:
    def program(x):  # type: ignore[no-untyped-def]
        y = x * 2
        increment(y.real[1:])
        return y

    def overwrite_old_view(x):  # type: ignore[no-untyped-def]
        transposed = x.t()[1:]
        x.mul_(2)
        increment(transposed)

    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True, dynamic=True)
    for rows in (4, 7):
        x = torch.randn(rows, 3, dtype=torch.complex64)
        torch.testing.assert_close(compiled(x), program(x))
    compiled = torch.compile(overwrite_old_view, backend="inductor_ext", dynamic=True)
    for rows in (4, 7):
        actual, expected = (torch.arange(rows * 6.0).view(rows, 6)[:, ::2] for _ in range(2))
        compiled(actual)
        overwrite_old_view(expected)
        assert torch.equal(actual._base, expected._base)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: flip_into(torch.view_as_real(x)[:2], torch.view_as_real(x)[1:3]),
        lambda x: flip_into(x.real, x.real),
        lambda x: flip_into_both(x.imag[:2], [x.real[:2], torch.view_as_real(x)[:2, :, 0]]),
        lambda x: increment_all([x.view(torch.float32)[:2], x.view(torch.int32)[1:]]),
    ],
    ids=["halves", "itself", "list", "dtypes"],
)
def test_operands_that_overlap_are_refused(program) -> None:  # type: ignore[no-untyped-def]
    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(torch.randn(4, 3, dtype=torch.complex64))
    error = raised.value.inner_exception
    assert isinstance(error, exc.UnsupportedMutationError)
    assert "inductor_ext_mutation_test" in str(error)
    assert "clone of the view" in str(error)


def test_views_of_computed_tensors() -> None:
    def program(x, y):  # type: ignore[no-untyped-def]
        view = x.view(torch.int8)
        view[0] = 1
        flip_into(x.clone(), x)
        doubled = (y * 2).view(torch.int32)[1:]
        total = doubled.sum()
        increment(doubled.t())
        return view, doubled, total

    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True)
    actual_inputs, expected_inputs = (
        (torch.arange(5, dtype=torch.uint8), torch.arange(12.0).view(3, 4)) for _ in range(2)
    )
    actual = [*compiled(*actual_inputs), *actual_inputs]
    expected = [*program(*expected_inputs), *expected_inputs]
    for value, reference in zip(actual, expected, strict=True):
        assert value.equal(reference)
