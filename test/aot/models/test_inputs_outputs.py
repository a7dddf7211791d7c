"""AOT artifacts' inputs and outputs: mutation, aliasing, pytrees, scalars, dtypes, alignment."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from test.support import aot_util
from test.support.aot_util import Artifact, Bundle, Case, Cases

PLAIN = Cases()
DTYPES = Cases()


@PLAIN
def changed_input() -> Case:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        before = x + 1
        x.add_(y)
        y[0].mul_(2)
        return before * x

    return Case(function, (torch.randn(3, 4), torch.randn(3, 4)))


@PLAIN
def changed_input_that_is_returned() -> Case:
    return Case(lambda x: (x.mul_(2), x.sum()), (torch.randn(3, 4),))


@PLAIN
def changed_input_of_dynamic_size() -> Case:
    def function(x: torch.Tensor, ids: torch.Tensor) -> None:
        x.index_add_(0, ids, torch.ones_like(x))

    return Case(
        function,
        (torch.randn(4, 3), torch.tensor([0, 0, 3, 2])),
        dynamic=({0: Dim("changed", min=2)}, {0: Dim("changed", min=2)}),
        calls=((torch.randn(2, 3), torch.tensor([1, 1])),),
    )


@PLAIN
def changed_input_that_is_strided() -> Case:
    return Case(lambda x: x.add_(1), (torch.randn(4, 3).t(),), calls=((torch.zeros(4, 3).t(),),))


@PLAIN
def inputs_of_one_memory() -> Case:
    x = torch.randn(4, 4)
    return Case(lambda x, y, z: (x + y, z @ x), (x, x, x.t()))


@PLAIN
def results_that_are_inputs_or_views_of_them() -> Case:
    return Case(lambda x: (x, x.t(), x[1:], x.view(-1)[3:], x + 1), (torch.randn(3, 4),))


@PLAIN
def results_that_are_views_of_results() -> Case:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y, y.t(), y[1:, :2], x.sum(0)

    return Case(function, (torch.randn(3, 4),))


@PLAIN
def results_that_are_views_of_something_gone() -> Case:
    return Case(
        lambda x: ((x + 1)[1:], (x @ x.t()).t(), (x * 2).view(-1)[5:], (x * 3).expand(2, 3, 4)),
        (torch.randn(3, 4),),
    )


@PLAIN
def repeated_results() -> Case:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y, x, y, x]

    return Case(function, (torch.randn(3, 4),))


@PLAIN
def constant_results() -> Case:
    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.register_buffer("scale", torch.randn(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.weight, self.scale, self.weight.t(), self.weight, x * self.scale

    # Whether an output aliases a constant of the artifact is not specified.
    return Case(Constants(), (torch.randn(3, 4),), aliases=False)


@PLAIN
def no_results_and_none_among_them() -> Case:
    return Case(lambda x: (None, x + 1, None, [None, {"none": None}]), (torch.randn(3),))


@PLAIN
def none_as_input() -> Case:
    return Case(lambda x, y, z: x + 1 if y is None else z, (torch.randn(3), None, torch.randn(3)))


@PLAIN
def unused_inputs() -> Case:
    args = torch.randn(3), torch.randn(0), torch.randn(2, 2)
    return Case(lambda x, y, z: z * 2, args)


@PLAIN
def results_of_other_strides() -> Case:
    return Case(
        lambda x, y: (
            x.transpose(0, 2) + 1,
            y * 2,
            torch.empty_like(y).fill_(1),
            x.permute(1, 2, 0),
        ),
        (torch.randn(2, 3, 4), torch.randn(1, 3, 4, 4).to(memory_format=torch.channels_last)),
    )


@PLAIN
def inputs_of_other_strides() -> Case:
    args = (
        torch.randn(6, 8)[::2, ::2],
        torch.randn(4, 3).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(100)[7:19].view(3, 4),
    )
    return Case(lambda a, b, c, d: a * b + c - d, args)


@pytest.fixture(scope="module")
def plain(device: str) -> Bundle:
    return PLAIN.compile(device)


def test_inputs_and_outputs_compile_together(plain: Bundle) -> None:
    plain.check_whole()


@pytest.mark.parametrize("name", PLAIN)
def test_inputs_and_outputs(plain: Bundle, name: str) -> None:
    plain.check(name)


@DTYPES
def complex_numbers() -> Case:
    args = torch.randn(3, 4, dtype=torch.complex64), torch.randn(4, 3, dtype=torch.complex128)
    return Case(
        lambda x, y: (x * 2j + 1, x.real + x.imag, x.conj() * x, y.abs(), y @ x.to(y.dtype)), args
    )


@DTYPES
def booleans() -> Case:
    args = torch.tensor([True, False, True]), torch.tensor([True, True, False])
    return Case(lambda x, y: (x & y, ~x, x | (y ^ x), x.any(), x.sum(), x.float() + y), args)


@DTYPES
def int8() -> Case:
    args = torch.tensor([-128, 127, 3], dtype=torch.int8), torch.tensor([1, 2, 3]).to(torch.int8)
    return Case(
        lambda x, y: (x + y, x * 2, x.float() / 2, x // y, x.sum(), x.to(torch.uint8)), args
    )


@DTYPES
def other_integers() -> Case:
    dtypes = torch.uint8, torch.int16, torch.int32, torch.int64
    values = torch.tensor([0, 1, 200])
    return Case(
        lambda *xs: [op for x in xs for op in (x + 1, x >> 1, x.max(), x.float() * 0.5)],
        tuple(values.to(dtype) for dtype in dtypes),
    )


@DTYPES
def unsigned_integers() -> Case:
    """torch supports hardly any operators for them."""
    dtypes = torch.uint16, torch.uint32, torch.uint64
    values = torch.tensor([0, 1, 200])
    return Case(
        lambda a, b, c: (a, b.view(3, 1), c.to(torch.int64) + 1, a.to(torch.float32)),
        tuple(values.to(dtype) for dtype in dtypes),
    )


@DTYPES
def float16() -> Case:
    args = torch.randn(4, 4, dtype=torch.float16), torch.randn(4, 4, dtype=torch.float16)
    return Case(lambda x, y: (x @ y, x * y + 1, x.softmax(-1), x.float().sum()), args)


@DTYPES
def bfloat16() -> Case:
    args = torch.randn(4, 4, dtype=torch.bfloat16), torch.randn(4, 4, dtype=torch.bfloat16)
    return Case(lambda x, y: (x @ y, x * y + 1, x.softmax(-1), x.float().sum()), args)


@DTYPES
def float64() -> Case:
    args = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4)
    return Case(lambda x, y: (x @ y.double(), x * y, x.float()), args)


@DTYPES
def float8() -> Case:
    args = tuple(
        torch.randn(16, 16).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    )
    return Case(lambda x, y: (x, y.t(), x.float() * 2, (x.float() + y.float()).to(x.dtype)), args)


@pytest.fixture(scope="module")
def dtypes(device: str) -> Bundle:
    return DTYPES.compile(device)


def test_dtypes_compile_together(dtypes: Bundle) -> None:
    dtypes.check_whole()


@pytest.mark.parametrize("name", DTYPES)
def test_dtype(dtypes: Bundle, name: str) -> None:
    dtypes.check(name)


@pytest.fixture(scope="module")
def pointwise(device: str) -> Artifact:
    """A kernel large enough for vectorized loads, and a library call."""
    return aot_util.compile_model(
        lambda x, y: (x * 2 + y, x @ y.t()), tuple(torch.randn(16, 64, device=device) for _ in "xy")
    )


@pytest.mark.parametrize("offset", [1, 3, 4, 15])
def test_misaligned_inputs(pointwise: Artifact, device: str, offset: int) -> None:
    """Unaligned tensors, although the example inputs were aligned."""
    memory = torch.randn(16 * 64 + 32, device=device)
    misaligned = memory[offset : offset + 16 * 64].view(16, 64)
    assert misaligned.data_ptr() % 64
    pointwise.check(misaligned, torch.randn(16, 64, device=device))
    pointwise.check(misaligned, misaligned)


def test_misaligned_results(device: str) -> None:
    """Views at unaligned offsets, and an input that is mutated through one."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        x[1:].add_(1)
        return y[1:], y[3:] + 1

    x = torch.randn(67, device=device)
    artifact = aot_util.compile_model(function, (x,))
    artifact.check(x)
    artifact.check(torch.randn(70, device=device)[3:])


class Point(NamedTuple):
    x: Any
    y: Any


pytree._register_namedtuple(Point, serialized_type_name="test_aot_inputs_outputs.Point")


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    extra: dict[str, Any]


torch.export.register_dataclass(Batch, serialized_type_name="test_aot_inputs_outputs.Batch")


def tree(*, size: int = 3, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of all kinds of containers."""

    def tensor() -> torch.Tensor:
        return torch.randn(size, 2, device=device)

    args = (
        [tensor(), (tensor(), tensor())],
        {"b": tensor(), "a": [tensor()]},
        Point(tensor(), None),
        Batch(tensor(), {"deep": (tensor(),)}),
    )
    return args, {"scale": tensor(), "options": collections.OrderedDict(z=tensor(), k=tensor())}


class Trees(nn.Module):
    """Arguments and results in containers; every leaf has a different value."""

    def forward(
        self,
        pairs: list[Any],
        named: dict[str, Any],
        point: Point,
        batch: Batch,
        *,
        scale: torch.Tensor,
        options: dict[str, torch.Tensor],
    ) -> Any:
        first, (second, third) = pairs
        return {
            "list": [first + 1, (second * 2, third - scale)],
            "point": Point(point.x * 3, {"none": None}),
            "batch": Batch(batch.ids / 2, {"deep": batch.extra["deep"][0] - named["b"]}),
            "ordered": collections.OrderedDict(k=options["k"] + 4, z=options["z"] - named["a"][0]),
            "empty": ([], {}, ()),
        }


@pytest.fixture(scope="module")
def trees(device: str) -> Artifact:
    torch.manual_seed(0)
    args, kwargs = tree(device=device)
    return aot_util.compile_model(Trees(), args, kwargs)


def test_containers(trees: Artifact, device: str) -> None:
    args, kwargs = tree(device=device)
    trees.check(*args, **kwargs)


def test_keyword_arguments_in_another_order(trees: Artifact, device: str) -> None:
    args, kwargs = tree(device=device)
    trees.check(*args, **dict(reversed(kwargs.items())))


def test_dicts_in_another_order(trees: Artifact, device: str) -> None:
    args, kwargs = tree(device=device)
    named = dict(reversed(args[1].items()))
    trees.check(args[0], named, *args[2:], **kwargs)


@pytest.fixture(scope="module")
def keywords(device: str) -> Artifact:
    def function(x: torch.Tensor, y: torch.Tensor, *, z: torch.Tensor, w: Any = None) -> Any:
        return x - 2 * y + 3 * z, w

    tensors = [torch.randn(3, device=device) for _ in range(3)]
    return aot_util.compile_model(
        function, (tensors[0],), {"z": tensors[1], "y": tensors[2], "w": None}
    )


def test_keyword_arguments(keywords: Artifact, device: str) -> None:
    x, y, z = (torch.randn(3, device=device) for _ in range(3))
    keywords.check(x, y=y, z=z, w=None)
    keywords.check(x, w=None, z=z, y=y)


@pytest.fixture(scope="module")
def scalars(device: str) -> Artifact:
    """Scalars that are constant for export, and sizes, among inputs and results."""

    def function(x: torch.Tensor, n: int, f: float, b: bool, s: str, none: None) -> Any:
        factor = f if b and s == "scale" else 1.0
        return x * n * factor, n, [x.shape[0], x.shape[0] * x.shape[1] + n], none, x.shape[1]

    return aot_util.compile_model(
        function,
        (torch.randn(4, 2, device=device), 3, 0.5, True, "scale", None),
        None,
        ({0: Dim("scalar_rows", min=2, max=9)}, None, None, None, None, None),
    )


@pytest.mark.parametrize("size", [2, 4, 9])
def test_scalars(scalars: Artifact, device: str, size: int) -> None:
    scalars.check(torch.randn(size, 2, device=device), 3, 0.5, True, "scale", None)


def test_constant_results_of_other_types(device: str) -> None:
    """Values that are neither tensors nor sizes: a float, a bool and a string."""

    def function(x: torch.Tensor) -> Any:
        return x + 1, 2.5, True, "text"

    artifact = aot_util.compile_model(function, (torch.randn(3, device=device),))
    artifact.check(torch.randn(3, device=device))


def test_symbolic_scalar_input(device: str) -> None:
    """An int that differs between calls, as a multiplier and as a size."""

    def function(x: torch.Tensor, n: int) -> Any:
        return x * n, x.new_ones(n, 2), n + 1

    x = torch.randn(3, device=device)
    artifact = aot_util.compile_model(function, (x, 4), None, (None, Dim.DYNAMIC))
    for n in (4, 7, 20):
        artifact.check(x, n)


def test_many_inputs_and_outputs(device: str) -> None:
    """More than fit in registers or a small vector."""

    def function(*xs: torch.Tensor) -> list[torch.Tensor]:
        # From torch 2.14 on Inductor returns the input itself for x + 0.
        return [x + i for i, x in enumerate(xs, 1)]

    xs = tuple(torch.randn(2, device=device) for _ in range(80))
    aot_util.compile_model(function, xs).check(*xs)


def test_outputs_survive_the_next_call(pointwise: Artifact, device: str) -> None:
    first, second = (torch.randn(16, 64, device=device) for _ in range(2))
    output = pointwise(first, first)
    pointwise(second, second)
    aot_util.assert_same(output, pointwise.eager(first, first))


def test_outputs_survive_the_artifact(pointwise: Artifact, device: str) -> None:
    x = torch.randn(16, 64, device=device)
    loaded = aot_util.load(pointwise.path)
    output = loaded(x, x)
    del loaded
    aot_util.assert_same(output, pointwise.eager(x, x))
