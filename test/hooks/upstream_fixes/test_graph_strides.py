"""Inputs with gaps between their rows, which new values of them do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import inductor_ext
from inductor_ext import exc
from test.support.mutating_operators import increment, increment_all

INDEX = torch.tensor([1, 0, 1])


@torch.library.custom_op("inductor_ext_strides_test::reverse_into", mutates_args=("out",))
def _reverse_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.flip(0))


def _with_gaps(rows: int, columns: int = 6) -> torch.Tensor:
    values = torch.arange(rows * (columns + 3), dtype=torch.float32)
    return values.reshape(rows, -1)[:, :columns]


def scatter_and_call(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    x[1:] = values.sum(0)
    increment(x[1:].t())
    return x + 1


def index_put_between_calls(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    increment(x)
    x.index_put_((INDEX,), values, accumulate=True)
    increment(x[1:].t())
    return x * 2


def index_put_of_itself(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    increment_all([x[:1], x[1:]])
    x.index_put_((INDEX,), x[INDEX], accumulate=True)
    increment_all([x[:1], x[1:]])
    return x - values.sum(0)


def index_put_of_a_part(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    part = x[:, :5]
    part.index_put_((INDEX,), values[:, :5])
    increment_all([part[:2], part[2:]])
    return x + 1


def call_on_a_copy_as_well(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    increment_all([x[1:], values])
    x.index_put_((INDEX,), values)
    copy = x.clone()
    increment_all([copy[:2], copy[2:]])
    increment_all([x[:2], x[2:]])
    return copy + x


def copy_what_is_returned(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scattered = torch.slice_scatter(x, values[:2], 0, 1, 3)
    increment(scattered[1:].t())
    x.copy_(scattered)
    return scattered


PROGRAMS: tuple[Callable[..., torch.Tensor], ...] = (
    scatter_and_call,
    index_put_between_calls,
    index_put_of_itself,
    index_put_of_a_part,
    call_on_a_copy_as_well,
    copy_what_is_returned,
)


def _run(program: Callable[..., torch.Tensor], rows: int = 4) -> list[torch.Tensor]:
    """Return the result, the inputs, and the memory of the inputs with its gaps."""
    inputs = [_with_gaps(rows), _with_gaps(3)]
    result = program(*inputs)
    return [result, *inputs, *(x._base for x in inputs if x._base is not None)]


def _assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for index, (value, reference) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(value, reference), index


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_operators_overwrite_new_values_of_inputs_with_gaps(dynamic: bool) -> None:
    for program in PROGRAMS:
        compiled = torch.compile(program, backend="inductor_ext", dynamic=dynamic)
        for rows in (4, 5):
            _assert_equal(_run(compiled, rows), _run(program, rows))


def test_copies_of_operands_keep_their_strides() -> None:
    """With dynamic sizes, strides of one operand are taken from another one that has equal ones."""

    def model(x: torch.Tensor) -> torch.Tensor:
        count = x.sum()
        copy = x.clone()
        _reverse_into(copy[1:], x[:-1])
        return count[None]

    compiled = torch.compile(model, backend="inductor_ext", dynamic=True)
    for rows, columns in ((5, 3), (6, 4)):
        x, reference = (
            (torch.arange(rows * columns).reshape(columns, rows) % 4 > 1).t() for _ in range(2)
        )
        _assert_equal([compiled(x), x], [model(reference), reference])


def test_a_package(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return index_put_between_calls(x, values)

    exported = torch.export.export(Model(), (_with_gaps(4), _with_gaps(3)))
    path = inductor_ext.aoti_compile_and_package(exported, package_path=str(tmp_path / "m.pt2"))
    _assert_equal(_run(inductor_ext.load(path)), _run(index_put_between_calls))


def test_as_strided_of_a_new_value_is_refused() -> None:
    """In eager mode it reads the gaps; AOTAutograd applies it to a tensor without any."""

    def model(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.as_strided((3,), (9,), 1) * 1

    compiled = torch.compile(model, backend="inductor_ext")
    with pytest.raises(Exception, match="as_strided: it reads the memory of an input") as caught:
        compiled(_with_gaps(4))
    assert exc.UnsupportedMutationError.__name__ in str(caught.value)
    # An input without gaps, and one that is not overwritten.
    x = torch.arange(36.0).reshape(4, 9)
    torch.testing.assert_close(compiled(x.clone()), model(x.clone()))
    untouched = torch.compile(lambda x: x.as_strided((3,), (9,), 1) * 1, backend="inductor_ext")
    assert torch.equal(untouched(_with_gaps(4)), torch.tensor([1.0, 10.0, 19.0]))


def test_strides_of_single_elements_do_not_count() -> None:
    """Statistics that a convolution's layout gives other strides: (128, 1, 128, 128), not 1, 1."""
    model = torch.nn.Sequential(
        torch.nn.GroupNorm(128, 128),
        torch.nn.GELU(),
        torch.nn.Conv1d(128, 128, 3, stride=2, bias=False),
    )
    x = torch.randn(4, 128, 90, requires_grad=True)
    gradients = []
    for function in (model, torch.compile(model, backend="inductor_ext")):
        model.zero_grad()
        function(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-3)
