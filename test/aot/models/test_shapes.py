"""AOT artifacts of dynamic, unbacked, empty and huge shapes."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn
from torch.export import Dim, ExportedProgram

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.signature.signature import Range
from test.support import aot_util
from test.support.aot_util import Bundle, Case, Cases

DYNAMIC = Cases()
UNBACKED = Cases()


@DYNAMIC
def one_dim() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    return Case(
        model,
        (torch.randn(3, 8),),
        dynamic=({0: Dim("one", min=1, max=512)},),
        calls=tuple((torch.randn(size, 8),) for size in (1, 2, 33, 512)),
    )


@DYNAMIC
def several_dims() -> Case:
    def inputs(a: int, b: int, c: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(a, b, c), torch.randn(b, 1), torch.randn(c)

    a, b, c = Dim("a", min=2), Dim("b", min=2), Dim("c", min=2, max=99)
    return Case(
        lambda x, y, z: ((x * y + z).softmax(1), x.mean((0, 2)), z.flip(0)),
        inputs(3, 4, 5),
        dynamic=({0: a, 1: b, 2: c}, {0: b}, {0: c}),
        calls=(inputs(2, 2, 2), inputs(7, 3, 99), inputs(5, 4, 3)),
    )


@DYNAMIC
def range_that_begins_high() -> Case:
    return Case(
        lambda x: (x[4:] + 1, x[:3].sum(), x.reshape(-1)),
        (torch.randn(7, 3),),
        dynamic=({0: Dim("high", min=6, max=37)},),
        calls=((torch.randn(6, 3),), (torch.randn(37, 3),)),
    )


@DYNAMIC
def derived_dims() -> Case:
    def inputs(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(2 * size, 3), torch.randn(size, 3), torch.randn(size + 1, 3)

    size = Dim("half", min=2, max=40)
    return Case(
        lambda x, y, z: (x.view(2, -1, 3) * y, z[1:] + y, torch.cat([x, z])),
        inputs(4),
        dynamic=({0: 2 * size}, {0: size}, {0: size + 1}),
        calls=(inputs(2), inputs(9), inputs(40)),
    )


@DYNAMIC
def derived_without_a_plain_occurrence() -> Case:
    size = Dim("quarter", min=1, max=16)
    return Case(
        lambda x: (x.view(4, -1).sum(1), x.view(-1, 2).t()),
        (torch.randn(12),),
        dynamic=({0: 4 * size},),
        calls=((torch.randn(8),), (torch.randn(64),)),
    )


@DYNAMIC
def chosen_by_export() -> Case:
    return Case(
        lambda x, y: x @ y,
        (torch.randn(3, 4), torch.randn(4, 5)),
        dynamic=({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.DYNAMIC}),
        calls=((torch.randn(5, 2), torch.randn(2, 7)), (torch.randn(2, 9), torch.randn(9, 3))),
    )


@DYNAMIC
def sizes_as_numbers() -> Case:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = x.shape
        return (
            x * rows / columns,
            torch.arange(rows, device=x.device) + columns,
            torch.full((rows // 2 + 1, 2), rows, device=x.device),
            torch.ones(torch.sym_max(rows, 4), columns % 3 + 2, device=x.device),
            torch.sym_ite(rows > columns, rows, columns) * x,
        )

    return Case(
        function,
        (torch.randn(5, 6),),
        dynamic=({0: Dim("rows", min=3, max=50), 1: Dim("columns", min=4, max=50)},),
        calls=((torch.randn(3, 4),), (torch.randn(9, 5),), (torch.randn(50, 50),)),
    )


@DYNAMIC
def concatenated() -> Case:
    def inputs(a: int, b: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(a, 3), torch.randn(b, 3)

    return Case(
        lambda x, y: (
            torch.cat([x, y]),
            torch.cat([x * 2, torch.zeros(2, 3, device=x.device), y.sin(), x]),
            torch.stack([y, y + 1], 1),
        ),
        inputs(3, 4),
        dynamic=({0: Dim("first", min=2)}, {0: Dim("second", min=2)}),
        calls=(inputs(2, 9), inputs(20, 2)),
    )


@DYNAMIC
def split_padded_unfolded() -> Case:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        head, rest = x[:2], x[2:]
        padded = nn.functional.pad(rest, (1, 2), value=0.5)
        return head.cumsum(1), padded, x.unfold(1, 3, 2).sum(-1), x.repeat(2, 1)

    return Case(
        function,
        (torch.randn(5, 8),),
        dynamic=({0: Dim("split", min=4), 1: Dim("unfolded", min=6)},),
        calls=((torch.randn(4, 6),), (torch.randn(7, 13),)),
    )


@DYNAMIC
def dynamic_strides() -> Case:
    """The second size is the first stride, or the second stride of a transposed input."""
    return Case(
        lambda x, y: (x.t() + 1, y * 2, x @ y),
        (torch.randn(4, 5), torch.randn(6, 5).t()),
        dynamic=({1: Dim("inner", min=2)}, {0: Dim("inner", min=2)}),
        calls=((torch.randn(4, 3), torch.randn(6, 3).t()),),
    )


@DYNAMIC
def down_to_nothing() -> Case:
    """A range that begins at zero: sizes 0 and 1, which export does not specialize."""
    return Case(
        lambda x: (x * 2 + 1, x.sum(0), torch.cat([x, x])),
        (torch.randn(5, 3),),
        dynamic=({0: Dim("nothing", min=0, max=16)},),
        calls=((torch.randn(0, 3),), (torch.randn(1, 3),), (torch.randn(16, 3),)),
    )


@DYNAMIC
def empty_tensors() -> Case:
    return Case(
        lambda x, y: (x + 1, x.sum(), x.sum(0), torch.cat([x, y]), y[2:2] * 2, x.t() @ x),
        (torch.randn(0, 3), torch.randn(4, 3)),
    )


@pytest.fixture(scope="module")
def dynamic(device: str) -> Bundle:
    return DYNAMIC.compile(device)


def test_dynamic_shapes_compile_together(dynamic: Bundle) -> None:
    dynamic.check_whole()


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic(dynamic: Bundle, name: str) -> None:
    dynamic.check(name)


def sized(n: Any, low: int = 0, high: int = 1000) -> Any:
    """Declare to export that an unbacked SymInt is a size within these bounds."""
    torch._check(n >= low)
    torch._check(n <= high)
    return n


@UNBACKED
def item_as_a_size() -> Case:
    def function(n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = sized(n.item())
        return torch.ones(size, 3, device=n.device), torch.arange(size, device=n.device) * 2

    return Case(function, (torch.tensor(4),), calls=((torch.tensor(0),), (torch.tensor(9),)))


@UNBACKED
def item_as_a_number() -> Case:
    return Case(
        lambda x, n, f: (x * n.item(), x + f.item()),
        (torch.randn(3), torch.tensor(2), torch.tensor(0.5)),
        calls=((torch.randn(3), torch.tensor(-7), torch.tensor(1.5)),),
    )


@UNBACKED
def item_as_a_bound() -> Case:
    def function(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = sized(n.item(), 1, x.shape[0])
        head = x.narrow(0, 0, size)
        return head * 2, head.sum(0)

    x = torch.randn(8, 3)
    return Case(function, (x, torch.tensor(4)), calls=((x, torch.tensor(1)), (x, torch.tensor(8))))


@UNBACKED
def nonzero() -> Case:
    return Case(
        lambda x: (x.nonzero() + 1, x[x > 0] * 2, torch.masked_select(x, x < 0)),
        (torch.tensor([1.0, 0.0, -2.0, 3.0]),),
        calls=((torch.zeros(4),), (torch.ones(4),)),
    )


@UNBACKED
def nonzero_and_what_follows() -> Case:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x[x[:, 0] > 0]
        return rows.softmax(0), rows @ x.t(), rows.sum(1), torch.cat([rows, x])

    return Case(
        function,
        (torch.tensor([[1.0, 2.0], [-1.0, 3.0], [2.0, 1.0]]),),
        calls=((torch.rand(3, 2),),),
    )


@UNBACKED
def repeat_interleave() -> Case:
    def function(x: torch.Tensor, repeats: torch.Tensor) -> tuple[torch.Tensor, ...]:
        repeated = torch.repeat_interleave(x, repeats, 0)
        return repeated, repeated + 1

    return Case(
        function,
        (torch.randn(3, 2), torch.tensor([1, 0, 3])),
        calls=((torch.randn(3, 2), torch.tensor([2, 2, 2])),),
    )


@UNBACKED
def expressions_in_sizes_and_strides() -> Case:
    def function(n: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b = sized(n.item(), 2, 50), sized(m.item(), 2, 50)
        grid = torch.arange(2 * a * (b + 1), device=n.device).view(2 * a, b + 1)
        crossed = grid.t() + 1
        return (
            grid * 3,
            crossed.contiguous(),
            grid.new_zeros(a + b, 3),
            torch.empty_strided((a, b), (1, a), device=n.device).fill_(1.5),
            grid.float() @ torch.ones(b + 1, a, device=n.device),
        )

    return Case(
        function,
        (torch.tensor(3), torch.tensor(4)),
        calls=((torch.tensor(2), torch.tensor(2)), (torch.tensor(7), torch.tensor(5))),
    )


@UNBACKED
def list_of_sizes() -> Case:
    def function(x: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
        lengths = sizes.tolist()
        for length in lengths:
            sized(length, 0, 8)
        torch._check(sum(lengths) == x.shape[0])
        return [part * 2 for part in torch.split(x, lengths)]

    return Case(
        function,
        (torch.randn(8), torch.tensor([1, 3, 4])),
        calls=((torch.randn(8), torch.tensor([6, 0, 2])),),
    )


@UNBACKED
def sizes_as_results() -> Case:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        indices = x.nonzero()
        return torch.full((2,), indices.shape[0], device=x.device), indices.shape[0] * x

    return Case(function, (torch.tensor([1.0, 0.0, 2.0]),), calls=((torch.zeros(3),),))


@pytest.fixture(scope="module")
def unbacked(device: str) -> Bundle:
    return UNBACKED.compile(device)


def test_unbacked_shapes_compile_together(unbacked: Bundle) -> None:
    unbacked.check_whole()


@pytest.mark.parametrize("name", UNBACKED)
def test_unbacked(unbacked: Bundle, name: str) -> None:
    unbacked.check(name)


class Pair(nn.Module):
    """Sizes of a matrix and one with twice as many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(torch.cat([x, x]) * y)) + 1

    @staticmethod
    def inputs(rows: int, others: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 8), torch.randn(2 * rows if others is None else others, 8)


def check_unbacked_rows(program: ExportedProgram, model: nn.Module, upper: int) -> None:
    """Up to `upper` rows the results are those of eager mode; other sizes are rejected."""
    artifact = aot_util.Artifact(model, program, aot_util.compile_program(program))
    x, y = artifact.loaded.signature.tensors
    assert re.fullmatch(r"u\d+", x.shape[0])
    assert y.shape[0] == f"2*{x.shape[0]}"
    assert artifact.loaded.signature.symbols == {x.shape[0]: Range(0, upper)}
    # Sizes that export specializes if they are backed are no exceptions.
    for rows in (0, 1, 5, upper):
        artifact.check(*Pair.inputs(rows))
    for inputs in (Pair.inputs(upper + 1), Pair.inputs(4, 4), Pair.inputs(1, 3)):
        with pytest.raises(exc.InputMismatchError, match="dimension 0"):
            artifact(*inputs)


def test_inputs_that_are_marked_unbacked() -> None:
    inputs, model = Pair.inputs(5), Pair().eval()

    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            torch._check(y.shape[0] == 2 * x.shape[0])
            torch._check(x.shape[0] <= 64)
            return self.model(x, y)

    for tensor in inputs:
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    program = torch.export.export(Checked().eval(), inputs, strict=True)
    check_unbacked_rows(program, Checked().eval(), 64)


@pytest.mark.skipif(
    "ParamsSpec" not in inspect.getsource(torch.export.export),
    reason="torch.export takes no ParamsSpec before torch 2.14",
)
def test_inputs_with_a_shapes_spec() -> None:
    from torch.fx.experimental.dynamic_spec import ParamsSpec, ShapeVar, TensorSpec

    inputs, model = Pair.inputs(5), Pair().eval()
    rows = ShapeVar("rows", max=64)
    spec = ParamsSpec({"x": TensorSpec([rows, None]), "y": TensorSpec([2 * rows, None])})
    check_unbacked_rows(torch.export.export(model, inputs, dynamic_shapes=spec), model, 64)


def test_index_math_above_2_to_the_31(device: str) -> None:
    """Sizes, strides and offsets whose products need 64 bits; little of the memory is touched."""

    def function(wide: torch.Tensor, far: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = wide.shape
        return (
            wide[-1, -3:] + 1,
            wide[:, :2].sum(),
            torch.arange(3, device=wide.device) + rows * columns,
            far.int() * 2,
            far.t()[1] + far[:, 0],
        )

    rows, columns = Dim("huge_rows", min=2, max=2**20), Dim("huge_columns", min=4, max=2**20)
    shapes = ({0: rows, 1: columns}, {0: Dim("far", min=2, max=8)})
    memory = torch.empty(2**31 + 4096, dtype=torch.int8, device=device)
    far = memory.as_strided((2, 3), (2**31, 1))
    far.copy_(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    wide = torch.tensor([7.0], device=device).expand(50_000, 60_000)
    with torch.no_grad():
        program = torch.export.export(
            aot_util.as_module(function), (wide, far), dynamic_shapes=shapes
        )
    loaded = aot_util.load(aot_util.compile_program(program))
    for args in ((wide, far), (wide[:, :47_000], far)):
        aot_util.assert_same(loaded(*args), function(*args))


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))


class NoArgument(Weight):
    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight * 2, torch.zeros(2, device=self.weight.device)


class NoOperator(Weight):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class NothingButAWeight(Weight):
    def forward(self) -> torch.Tensor:
        return self.weight


@pytest.mark.parametrize("kind", [NoArgument, NoOperator, NothingButAWeight])
def test_trivial_graphs(device: str, kind: type[Weight]) -> None:
    if kind is NothingButAWeight and device != "cpu":
        pytest.skip("a graph without operators runs nowhere, and its weight is on a GPU")
    torch.manual_seed(0)
    args = (torch.randn(3, device=device),) if kind is NoOperator else ()
    artifact = aot_util.compile_model(kind().to(device), args)
    artifact.check(*args)
    artifact.check(*args)


def test_no_result(device: str) -> None:
    artifact = aot_util.compile_model(lambda x: (), (torch.randn(3, device=device),))
    artifact.check(torch.randn(3, device=device))


def test_ranges_of_a_module_that_is_compiled_alone() -> None:
    """torch's function inside an activation has no exported program with the user's ranges.

    The ranges of the shape environment begin at 2 and are narrowed by performance-only guards.
    """
    x = torch.randn(6, 9)
    shapes = {0: Dim("rows", max=100_000), 1: Dim("columns", max=100)}
    program = aot_util.export(lambda x: (x.sum(), x.mean(0)), (x,), None, (shapes,))
    with inductor_ext.activate():
        files = torch._inductor.aot_compile(
            program.module(), (x,), options={"aot_inductor.package": True}
        )
    (library,) = [file for file in files if str(file).endswith(".so")]
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1)
    for size in ((1, 1), (100_000, 2), (3, 100)):
        x = torch.randn(size)
        for ours, eager in zip(runner.run([x]), (x.sum(), x.mean(0)), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError):
        runner.run([torch.randn(2, 101)])
