"""Programs that write into memory which is also read, or which a result does not share.

Each function contains independent variants, with inputs of their own, so that one compile tests
them all. Results, inputs after the call, and which of them share memory are compared with eager
mode.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import inductor_ext
from inductor_ext.hooks.upstream_fixes import mutation
from test.support.memory_sharing import find_sharing
from test.support.mutating_operators import (
    flip_into,
    flip_into_both,
    increment,
    increment_all,
)

Program = Callable[..., tuple[torch.Tensor, ...]]

REVERSED = torch.tensor([5, 4, 3, 2, 1, 0])


def write_overlapping_slices(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    a[1:] = a[:-1].clone()
    b[:, :-2] = b[:, 2:].clone()
    c.view(torch.int32)[2:] = c.view(torch.int32)[:-2].clone()
    first, second = d.chunk(2)
    saved = first.clone()
    first.copy_(second)
    second.copy_(saved)
    e[REVERSED] = e.clone()
    inner = f * 2
    inner[:-1] = inner[1:].clone()
    return a + 1, c * 2, inner


def call_custom_operators(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    flip_into(a.clone(), a)
    flip_into(b[:4].clone(), b[2:])
    flip_into(c.view(torch.int32).clone(), c.view(torch.int32))
    flip_into_both(d[:3].clone(), [d[:3], d[3:]])
    inner = e * 3
    flip_into(inner.clone(), inner)
    fresh = f.view(torch.int32).clone()
    increment(fresh)
    return a * 2, inner, fresh


def return_fresh_results(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    scattered = torch.slice_scatter(a, a[1:3] * 2, 0, 2, 4)
    a.copy_(scattered)
    indexed = torch.index_put(b, (REVERSED[:2],), b[:2] * 2)
    b.copy_(indexed)
    overwritten = torch.slice_scatter(c, c[1:3] * 2, 0, 2, 4)
    c.zero_()
    d.index_fill_(0, REVERSED[:1], 3.0)
    before = d.clone()
    d.clamp_(0, 0.5)
    incremented = e.clone()
    increment(incremented)
    e.copy_(incremented)
    f.mul_(2)
    return scattered[1:], indexed, overwritten, before, incremented, f.clone(), f.clone()


def read_before_write(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    a[:] = b[:]
    b.add_(1)
    saved = c.clone()
    c.copy_(d)
    d.copy_(saved)
    e.index_put_((REVERSED,), e * 2.0)
    e.add_(e.flip(0))
    f.index_put_((REVERSED,), f * 2.0)
    f[1:] = f[:-1].clone()
    return b * 2, c + d


def update_lists(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    torch._foreach_add_([a, b], [b.clone(), a.clone()])
    torch._foreach_mul_([c, d], [d.clone(), d.clone()])
    e.copy_(e.roll(1, 0))
    f.copy_(f.flip(1))
    return (a + b,)


def read_before_fused_write(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """The kernel that writes is fused with an earlier one; the reads between them come first."""
    operators: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x.sort(0, descending=True).values,
        lambda x: x.sum(1),
        lambda x: x @ x.mT,
        lambda x: x.cumsum(0),
        lambda x: x.topk(2, 0).values,
        lambda x: x.amax(0),
    )
    results = []
    for x, operator in zip((a, b, c, d, e, f), operators, strict=True):
        results.append(torch.where(torch.arange(40) == 0, x[:, :1] + 1, x))
        results.append(operator(x))
        x[1:3].mul_(-2)
        x[:, 0] = 1
    return tuple(results)


def read_before_custom_operator(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """What was read from the operand is not in memory yet when the operator overwrites it."""
    first = a.clone()
    flip_into(first, a)
    second = torch.remainder(b, 5)
    flip_into(b.clone(), b)
    third = c.to(torch.int32)
    flip_into_both(c[:3].clone(), [c[:3], c[3:]])
    fourth = d[1:].clone()
    flip_into(fourth, d[1:])
    fifth = e * 1
    flip_into(fifth[1:], e[:-1])
    sixth = (f * 2).clone()
    increment(f)
    return first[3:], second * 2, torch.where(c > third, c, third), fourth.flip(0), fifth[0], sixth


PROGRAMS: tuple[Program, ...] = (
    write_overlapping_slices,
    call_custom_operators,
    return_fresh_results,
    read_before_write,
    update_lists,
    read_before_fused_write,
    read_before_custom_operator,
)


def _inputs(rows: int = 6) -> list[torch.Tensor]:
    values = torch.arange(rows * 40, dtype=torch.float32).reshape(rows, 40)
    return [values + 1000 * index for index in range(1, 7)]


def _compare(program: Program, compiled: Program, inputs: list[torch.Tensor]) -> None:
    expected_inputs, actual_inputs = ([x.clone() for x in inputs] for _ in range(2))
    expected = [*program(*expected_inputs), *expected_inputs]
    actual = [*compiled(*actual_inputs), *actual_inputs]
    for index, (value, reference) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(value, reference), index
    assert find_sharing(actual) == find_sharing(expected)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_agree_with_eager_mode(program: Program) -> None:
    _compare(program, torch.compile(program, backend="inductor_ext"), _inputs())


def test_programs_agree_in_cpp_and_with_dynamic_sizes() -> None:
    program, options = call_custom_operators, {"cpp_wrapper": True}
    compiled = torch.compile(program, backend="inductor_ext", options=options, dynamic=True)
    _compare(program, compiled, _inputs())


def write_what_other_iterations_read(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """The new values, or where they are written, depend on elements that are overwritten."""
    a[a == a.flatten()[0]] = 5
    b[b == b[:1]] = 6
    c.view(-1)[c.view(-1).long()] = 7
    torch._foreach_add_([d], [d.flip(0)])
    e.index_put_((e[0].long() % 6,), e[3] + 1)
    f[1:][f[1:] == f[1, 0]] = 8
    return ()


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
def test_targets_that_are_read_at_other_positions(options: dict[str, bool]) -> None:
    inputs = [x % 7 for x in _inputs()]
    inputs[2].fill_(100).view(-1)[100] = 3
    inputs[4][0] = torch.tensor([5.0] * 20 + [1.0] * 20)
    program = write_what_other_iterations_read
    compiled = torch.compile(program, backend="inductor_ext", options=options)
    _compare(program, compiled, inputs)
    if not options:
        flags = [x > 3 for x in inputs]
        for flag in flags:
            flag[0, 0] = False
        _compare(flip_flags, torch.compile(flip_flags, backend="inductor_ext"), flags[:2])


def flip_flags(a, b):  # type: ignore[no-untyped-def]
    a[a == a.flatten()[0]] = True
    kept = torch.empty_like(a)
    kept.copy_(a)
    a.copy_(kept.flip(0))
    b[b == b[0, 0]] = True
    return ()


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
def test_masked_writes_to_values_without_a_decided_layout(options: dict[str, bool]) -> None:
    def program(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for value in (3, 4):
            numbers = a.view(torch.uint8)
            numbers[numbers > 2] = value
        return (a.view(torch.int16),)

    compiled = torch.compile(program, backend="inductor_ext", options=options)
    _compare(program, compiled, [torch.arange(5) * 1001])


def call_with_views_of_dynamic_offset(a, b, c, d, e):  # type: ignore[no-untyped-def]
    lower = torch.tensor_split(a, 2)[1].t()
    copy = lower.clone()
    flip_into(copy, lower)
    flip_into(b.chunk(2)[1].clone(), b.chunk(2)[1])
    half = c.shape[0] // 2
    flip_into(c[half:].t().clone(), c[half:].t())
    flip_into(d[1:][1:].clone(), d[1:][1:])
    flip_into_both(e[:3].clone(), [e[:3], e[3:]])
    kept = e.clone()
    kept.unsqueeze_(0)
    return copy, kept, a[half:].storage_offset() + b


def test_views_of_dynamic_offset() -> None:
    program, options = call_with_views_of_dynamic_offset, {"cpp_wrapper": True}
    compiled = torch.compile(program, backend="inductor_ext", options=options, dynamic=True)
    for rows in (6, 8):
        inputs = _inputs(rows)[:5]
        inputs[4] = inputs[4][:6].clone()
        _compare(program, compiled, inputs)


def test_operands_that_share_memory_in_the_program_still_do() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flip_into(x, x)
        return (x * 2,)

    def call_with_copy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        flip_into(x.clone(), x)
        return (x * 2,)

    # The graphs are equal once the copy is removed, and must not share a cache entry.
    for program in (call_with_copy, call):
        _compare(program, torch.compile(program, backend="inductor_ext"), _inputs()[:1])


def test_results_that_share_memory_in_the_program_still_do() -> None:
    def return_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x[1:3] = 2
        return (x[2:],)

    def return_fresh(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        updated = torch.slice_scatter(x, torch.full((2, 40), 2.0), 0, 1, 3)
        x.copy_(updated)
        return (updated[2:],)

    for program in (return_fresh, return_view):
        _compare(program, torch.compile(program, backend="inductor_ext"), _inputs()[:1])


class ReturnsBoth(torch.nn.Module):
    """Returns a new value of a view, and the tensor that gets it or its source."""

    def __init__(self, results: str) -> None:
        super().__init__()
        self.results = results

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        base = x if self.results == "input" else x.clone()
        view = base[:-1]
        new = torch.slice_scatter(view, view[1:].clone(), 0, 1, view.shape[0])
        view.copy_(new)
        size = like.shape[0]
        if self.results == "expanded":
            return new.expand(size, *new.shape), base.expand(size, *base.shape)
        return (view.expand(size, *view.shape) if self.results == "input" else base[1:]), new


RESULTS = ("input", "expanded", "parts")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("results", RESULTS)
def test_results_that_share_no_memory_in_the_program_still_share_none(
    results: str, training: bool
) -> None:
    """`slice_scatter` into a view is replaced by a view of the base's new value."""
    model = ReturnsBoth(results)
    compiled = torch.compile(model, backend="inductor_ext", fullgraph=True, dynamic=True)
    for size in (3, 5):
        x = torch.randn(4, 8, requires_grad=training and results != "input")
        like = torch.empty(size)
        actual, expected = compiled(x.clone(), like), model(x.clone(), like)
        assert actual[0].untyped_storage().data_ptr() != actual[1].untyped_storage().data_ptr()
        for result, reference in zip(actual, expected, strict=True):
            assert torch.equal(result, reference)
            assert result.stride() == reference.stride()


@pytest.mark.parametrize("results", RESULTS)
def test_results_of_packages_share_no_memory(results: str, tmp_path: Path) -> None:
    model, like = ReturnsBoth(results), torch.empty(3)
    x = torch.randn(4, 8)
    path = inductor_ext.aoti_compile_and_package(
        torch.export.export(model, (x, like)), package_path=str(tmp_path / "model.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    actual, expected = package(x.clone(), like), model(x.clone(), like)
    assert actual[0].untyped_storage().data_ptr() != actual[1].untyped_storage().data_ptr()
    for result, reference in zip(actual, expected, strict=True):
        assert torch.equal(result, reference)
        assert result.stride() == reference.stride()


class NeutralOperations(torch.nn.Module):
    """Results that are equal to others or to an input, but have memory of their own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros, ones, y = torch.zeros_like(x), torch.ones_like(x), x.abs()
        return y + zeros, y, y * ones + zeros, zeros + (y - zeros) / ones, ones * x, (zeros + x)[1:]


class CopyOfCopy(torch.nn.Module):
    """Returns a copy of a part of a copy of an input that is overwritten."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        copy = x.clone()
        flip_into(x, copy)
        return copy[:2].clone(), torch.cat([copy[3:], copy[:1]])


@pytest.mark.parametrize("model", [NeutralOperations(), CopyOfCopy()], ids=["neutral", "copies"])
@pytest.mark.parametrize("packaged", [False, True])
def test_equal_results_have_memory_of_their_own(
    model: torch.nn.Module, packaged: bool, tmp_path: Path
) -> None:
    x = torch.randn(3, 8)
    if packaged:
        program = torch.export.export(model, (x.clone(),))
        path = str(tmp_path / "model.pt2")
        inductor_ext.aoti_compile_and_package(program, package_path=path)
        compiled: Any = torch._inductor.aoti_load_package(path)
    else:
        compiled = torch.compile(model, backend="inductor_ext", fullgraph=True)
    actual_input, expected_input = x.clone(), x.clone()
    actual, expected = compiled(actual_input), model(expected_input)
    memory = [tensor.untyped_storage().data_ptr() for tensor in (actual_input, *actual)]
    assert len(set(memory)) == len(memory)
    for result, reference in zip((actual_input, *actual), (expected_input, *expected), strict=True):
        assert torch.equal(result, reference)


@pytest.mark.parametrize("training", [False, True])
def test_results_of_one_view_operator_stay_views(training: bool) -> None:
    """AOTAutograd does not report that they share memory with the input."""

    def views(x: torch.Tensor) -> list[torch.Tensor]:
        results = [*x.chunk(2), *x.unbind(1), x.split([1, 3])[0].t()]
        return [*results, *torch.unsafe_chunk(x, 2), *torch.unsafe_split(x, 2)]

    def copies(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.clone()[1:], *x.clone().chunk(2), x.sin()]

    def function(x: torch.Tensor) -> list[list[torch.Tensor]]:
        return [views(x), copies(x)]

    x = torch.randn(4, 4, requires_grad=training)
    compiled = torch.compile(function, backend="inductor_ext", fullgraph=True)
    for results, is_view in zip(compiled(x), (True, False), strict=True):
        shared = {r.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for r in results}
        assert shared == {is_view}


def test_gradients_use_values_from_before_the_write() -> None:
    def train(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        updated = x.clone()
        updated[1:3] = weight[1:3]
        x.copy_(updated.detach())
        return (updated * weight).sum()

    gradients = []
    for function in (train, torch.compile(train, backend="inductor_ext")):
        x, weight = (tensor.clone() for tensor in _inputs()[:2])
        weight.requires_grad_()
        loss = function(x, weight)
        x.zero_()
        loss.backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


class Buffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in zip("abcdef", _inputs(), strict=True):
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.a[1:] = self.a[:-1].clone()
        copy = self.b.clone()
        flip_into(copy, self.b)
        before = self.c.clone()
        self.c.add_(1)
        updated = torch.slice_scatter(self.d, self.d[1:3] * 2, 0, 2, 4)
        self.d.copy_(updated)
        self.e.copy_(self.f)
        self.f.add_(x)
        x[1:] = x[:-1].clone()
        return self.a * x, copy, before, updated, self.e * 1, self.f.clone()


def test_packages_agree_with_eager_mode(tmp_path: Path) -> None:
    x = torch.rand(6, 40)
    path = inductor_ext.aoti_compile_and_package(
        torch.export.export(Buffers(), (x.clone(),)), package_path=str(tmp_path / "model.pt2")
    )
    package, eager = torch._inductor.aoti_load_package(path), Buffers()
    for _ in range(2):
        actual_input, expected_input = x.clone(), x.clone()
        actual, expected = package(actual_input), eager(expected_input)
        for value, reference in zip(actual, expected, strict=True):
            assert torch.equal(value, reference)
            value.zero_()  # a result that is a buffer would show in the next call
        assert torch.equal(actual_input, expected_input)


class StaticRows(torch.nn.Module):
    """Writes a copied operand; torch.export finds that its number of rows is static."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x.unbind(0)
        copy = x.clone()
        flip_into(copy, x)
        kept = y.clone()
        flip_into(y, kept)
        return rows[-1].clone(), copy, y.unbind(0)[0] * 2, kept


def test_sizes_that_are_found_static_by_export(tmp_path: Path) -> None:
    inputs, auto = _inputs()[:2], torch.export.Dim.AUTO
    exported = torch.export.export(
        StaticRows(),
        tuple(x.clone() for x in inputs),
        dynamic_shapes=[{0: auto, 1: auto}] * 2,
        strict=False,
    )
    path = inductor_ext.aoti_compile_and_package(exported, package_path=tmp_path / "model.pt2")
    _compare(StaticRows(), inductor_ext.load(path), inputs)


class UpperHalf(torch.nn.Module):
    """Whether the slices overlap depends on the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[1:] * 2
        half = y.shape[0] // 2
        y[half:] = y[: y.shape[0] - half].clone()
        return y


def test_a_package_allows_sizes_for_which_slices_overlap(tmp_path: Path) -> None:
    rows = {0: torch.export.Dim.DYNAMIC}
    exported = torch.export.export(UpperHalf(), (torch.rand(9),), dynamic_shapes=(rows,))
    model = inductor_ext.load(
        inductor_ext.aoti_compile_and_package(exported, package_path=tmp_path / "model.pt2")
    )
    for count in (9, 4, 10):
        x = torch.rand(count)
        assert torch.equal(model(x), UpperHalf()(x))


class Cache(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 64, 40))
        self.register_buffer("values", torch.zeros(2, 64, 40))

    def forward(self, new: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.keys.index_copy_(1, position, new)
        self.values[:, 3:4] = new
        return ((self.keys * self.values).sum(-1), self.keys[:, :8])


def test_updates_of_a_cache_stay_in_place() -> None:
    codes = []
    for backend in ("inductor", "inductor_ext"):
        torch._dynamo.reset()
        compiled = torch.compile(Cache(), backend=backend)
        _, code = run_and_get_code(compiled, torch.ones(2, 1, 40), torch.tensor([5]))
        codes.append([code[0].count(text) for text in ("async_compile.cpp", "empty_strided")])
    assert codes[0] == codes[1]


def test_a_size_that_only_the_second_trace_of_a_call_knows() -> None:
    """Seed 310089 of the graph fuzzer: the copy of an operand has as many elements plus one."""

    def program(index: torch.Tensor) -> torch.Tensor:
        result = index ^ index
        increment_all([index[:-1]])
        return result.copy_(index)

    compiled = torch.compile(program, backend="inductor_ext", dynamic=True)
    actual, expected = torch.arange(5), torch.arange(5)
    assert compiled(actual).equal(program(expected))
    assert actual.equal(expected)


def test_kernels_without_a_result_are_not_unused_sizes() -> None:
    """The call of a custom operator or of a Triton kernel is traced before it is lowered."""
    pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_mutation,
    )

    from test.support.triton_kernels import add_kernel

    kernel = kernel_side_table.add_kernel(add_kernel)
    constants = kernel_side_table.add_constant_args({"n": 8, "BLOCK": 8})

    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        x.shape[0] * 2
        tensors = {"x_ptr": x, "y_ptr": x, "out_ptr": out}
        triton_kernel_wrapper_mutation(
            kernel_idx=kernel,
            constant_args_idx=constants,
            grid=[(1, 1, 1)],
            tma_descriptor_metadata={},
            kwargs=tensors,
        )
        return out

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        inputs = [mode.from_tensor(torch.empty(8), static_shapes=False) for _ in range(2)]
        graph = mutation.trace_without_unused_sizes(call, inputs).graph
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    assert targets == [triton_kernel_wrapper_mutation]


def return_scattered_values(a, b, c, d):  # type: ignore[no-untyped-def]
    """What is written into a part of an input is also returned. Positions depend on sizes."""
    part = a[: a.shape[0] // 2]
    scattered = torch.select_scatter(part, part[0].clone(), 0, part.shape[0] - 1)
    part.copy_(scattered)
    row = b[b.shape[0] - 2]
    changed = torch.slice_scatter(row, row[:2] * 2, 0, row.shape[0] - 2, row.shape[0])
    row.copy_(changed)
    columns = c[:, c.shape[1] // 3 :]
    written = torch.select_scatter(columns, columns[0] + 1, 0, c.shape[0] - 1)
    columns.copy_(written)
    block = d[d.shape[0] // 2 :, : d.shape[1] - 1]
    diagonal = torch.diagonal_scatter(block, block.diagonal() * 3)
    block.copy_(diagonal)
    return scattered, changed, written, diagonal


@pytest.mark.parametrize("options", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
def test_scattered_values_with_dynamic_sizes(options: dict[str, bool]) -> None:
    program = return_scattered_values
    compiled = torch.compile(program, backend="inductor_ext", options=options, dynamic=True)
    for rows, columns in ((7, 5), (10, 8)):
        inputs = [torch.arange(rows * columns * 1.0).view(rows, columns) + i for i in range(4)]
        _compare(program, compiled, inputs)
