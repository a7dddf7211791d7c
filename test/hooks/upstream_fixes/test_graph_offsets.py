"""Custom operators that overwrite copies of parts of a tensor, and `as_strided` of such copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import inductor_ext
from test.support.memory_sharing import find_sharing
from test.support.mutating_operators import increment, increment_all

Program = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


@torch.library.custom_op("inductor_ext_offsets_test::advance", mutates_args=("state",))
def advance(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    state.add_(x)
    return state * 2


@torch.library.custom_op("inductor_ext_offsets_test::scale_all", mutates_args=("xs",))
def scale_all(xs: list[torch.Tensor]) -> None:
    for index, x in enumerate(xs):
        x.mul_(index + 2)


advance.register_fake(lambda state, x: torch.empty_like(state))


def copy_of_an_input(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[1:].clone()
    return advance(part, x[:-1]), part


def copy_of_a_value_that_is_returned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    value = x * 2
    part = value[1:].clone()
    return advance(part, value[:-1]), part, value


def copy_of_a_value(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = (x * 2)[2:].clone()
    scale_all([part.t()[1:], part.t()[:1]])
    return (part,)


def copy_of_columns(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x.t()[1:].clone()
    return advance(part, part.clone()), part


def copy_as_complex_numbers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    numbers = torch.view_as_complex(x)
    part = numbers[1:].clone()
    return advance(part, part.clone()), part


def part_of_an_input_as_complex_numbers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    numbers = torch.view_as_complex(x)
    return advance(numbers[1:], numbers[:-1].clone()), numbers


def copy_as_integers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x.view(torch.int32)[1:].clone()
    return advance(part, part.clone()), part


def copy_after_a_write(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    advance(x[1:], x[1:] * 2)
    part = x[2:].clone()
    return advance(part, part + 1), part


def copies_of_copies(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[1:].clone()
    smaller = part[1:].clone()
    scale_all([part, smaller])
    scale_all([part[1:], smaller[1:].clone()])
    return part, smaller


def views_of_copies(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[3:].clone()
    scale_all([part.view(-1)[2:], part.view(-1)[:2]])
    other = (x + 1)[1:].clone()
    increment_all([other.t()[:1], other.t()[1:]])
    increment(other.view(-1)[3:])
    return part, other, x[3:] + 1


def strided_copies(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part, value = x[1:].clone(), (x * 2)[1:].clone()
    return (
        part.as_strided((3, 2), (2, 1), 0) + 1,
        value.as_strided((3, 2), (2, 1), 2),
        value,
        part[2:].as_strided((2,), (1,)) + 1,
    )


def strided_write_to_a_copy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[1:].clone()
    part.as_strided((3,), (2,), 1).mul_(3)
    return part, x + 1


def strided_results_that_are_written_in_place(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = (x * 2)[1:]
    new = part.index_put((torch.tensor([1, 0]),), torch.ones(2, 2))
    return (new.as_strided((4,), (1,), 0) + 1,)


def strided_sum_with_zeros(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[1:] + torch.zeros(2)
    return (part.as_strided((4,), (1,), 0) * 2,)


def strided_view_of_a_copy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[1:].clone().view(-1)[1:]
    return (part.as_strided((4,), (1,), 0) * 2,)


def sum_with_zeros(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = x[1:] + torch.zeros(2)
    return advance(part, x[:-1]), part


PROGRAMS: tuple[Program, ...] = (
    copy_of_an_input,
    copy_of_a_value_that_is_returned,
    copy_of_a_value,
    copy_of_columns,
    copy_as_complex_numbers,
    part_of_an_input_as_complex_numbers,
    copy_as_integers,
    copy_after_a_write,
    copies_of_copies,
    views_of_copies,
    strided_copies,
    strided_write_to_a_copy,
    strided_results_that_are_written_in_place,
    strided_sum_with_zeros,
    strided_view_of_a_copy,
    sum_with_zeros,
)


def _compare(program: Program, compiled: Program, rows: int) -> None:
    expected_input, actual_input = (torch.arange(rows * 2.0).reshape(rows, 2) for _ in range(2))
    expected = [*program(expected_input), expected_input]
    actual = [*compiled(actual_input), actual_input]
    for index, (value, reference) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(value, reference), index
    assert find_sharing(actual) == find_sharing(expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_agree_with_eager_mode(program: Program, dynamic: bool) -> None:
    compiled = torch.compile(program, backend="inductor_ext", dynamic=dynamic)
    for rows in (8, 11) if dynamic else (8,):
        _compare(program, compiled, rows)


class Programs(torch.nn.Module):
    def forward(self, *inputs: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [program(x) for program, x in zip(PROGRAMS, inputs, strict=True)]


def test_a_package(tmp_path: Path) -> None:
    def draw(rows: int) -> list[torch.Tensor]:
        return [torch.arange(rows * 2.0).reshape(rows, 2) for _ in PROGRAMS]

    rows = torch.export.Dim("rows", min=6, max=64)
    exported = torch.export.export(
        Programs(), tuple(draw(8)), dynamic_shapes=(({0: rows},) * len(PROGRAMS),)
    )
    path = inductor_ext.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "programs.pt2")
    )
    package = inductor_ext.load(path)
    for count in (8, 13):
        expected_inputs, actual_inputs = draw(count), draw(count)
        expected = Programs()(*expected_inputs)
        actual = package(*actual_inputs)
        for program, values, references in zip(PROGRAMS, actual, expected, strict=True):
            for value, reference in zip(values, references, strict=True):
                assert torch.equal(value, reference), program.__name__
        for program, value, reference in zip(PROGRAMS, actual_inputs, expected_inputs, strict=True):
            assert torch.equal(value, reference), program.__name__
