"""AOT artifacts with constants: storage, names, folding, and calls that mutate them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.custom_tensor import CustomTensorPlainOut
from torch.testing._internal.two_tensor import TwoTensor

from test.support import aot_util
from test.support.aot_util import Bundle, Case, Cases
from test.support.constant_models import Buffers, layers

CONSTANTS = Cases()

STATE = Cases()

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    *F8,
)


@CONSTANTS
def small() -> Case:
    model = Buffers(lambda x, w, b: (x @ w, x * b), w=torch.randn(3, 3), b=torch.randn(()))
    return Case(model, (torch.randn(2, 3),))


@CONSTANTS
def zero_size() -> Case:
    model = Buffers(
        lambda x, none, flat: (torch.cat([x, none]), x @ flat, none + 1),
        none=torch.empty(0, 3),
        flat=torch.empty(3, 0),
    )
    return Case(model, (torch.randn(2, 3),))


@CONSTANTS
def one_tensor_under_two_names() -> Case:
    weight = torch.randn(3, 3)
    return Case(Buffers(lambda x, a, b: x @ a + b, a=weight, b=weight), (torch.randn(3, 3),))


@CONSTANTS
def equal_values_in_two_tensors() -> Case:
    weight = torch.randn(3, 3)
    model = Buffers(lambda x, a, b: x @ a - b, a=weight, b=weight.clone())
    return Case(model, (torch.randn(3, 3),))


@CONSTANTS
def tied_parameters() -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    return Case(Tied(), (torch.randn(2, 4),))


@CONSTANTS
def views_of_one_storage() -> Case:
    base = torch.randn(6, 4)
    model = Buffers(
        lambda x, whole, rows, columns, crossed, far: (
            x + whole,
            x[:2] * rows,
            x[:, 1:3] - columns,
            x.t() @ crossed.t(),
            x[0] + far,
        ),
        whole=base,
        rows=base[1:3],
        columns=base[:, 1:3],
        crossed=base.t(),
        far=base.view(-1)[19:23],
    )
    return Case(model, (torch.randn(6, 4),))


@CONSTANTS
def offset_into_a_storage_that_nobody_else_has() -> Case:
    # 5 floats: no alignment to rely on.
    return Case(Buffers(lambda x, w: x * w, w=torch.randn(100)[5:13]), (torch.randn(3, 8),))


@CONSTANTS
def strided_and_expanded() -> Case:
    model = Buffers(
        lambda x, strided, expanded, last: (x + strided, x * expanded, x - last),
        strided=torch.randn(8, 6)[::2, ::2],
        expanded=torch.randn(1, 3).expand(4, 3),
        last=torch.randn(3, 4).t(),
    )
    return Case(model, (torch.randn(4, 3),))


@CONSTANTS
def every_dtype() -> Case:
    def function(x: torch.Tensor, **buffers: torch.Tensor) -> list[torch.Tensor]:
        return [
            buffer.float() + x if buffer.dtype in F8 else buffer.to(torch.complex64) + x
            for buffer in buffers.values()
        ]

    values = torch.tensor([[0.0, 1.0], [3.0, 100.0]])
    buffers = {f"of_{dtype}".replace(".", "_"): values.to(dtype) for dtype in DTYPES}
    return Case(Buffers(function, **buffers), (torch.randn(2, 2),))


@CONSTANTS
def infinities_and_nans() -> Case:
    inf, nan = float("inf"), float("nan")
    model = Buffers(
        lambda x, special: (
            x + special,
            torch.where(x > 0, inf, nan),
            torch.full((2,), -inf, device=x.device),
            torch.cat([x, torch.tensor([inf, -inf, nan, -0.0], device=x.device)]),
            x.masked_fill(x > 0, -inf).softmax(0),
        ),
        special=torch.tensor([inf, -inf, nan]),
    )
    return Case(model, (torch.tensor([1.0, -1.0, 2.0]),))


@CONSTANTS
def made_in_the_code() -> Case:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        table = torch.tensor([[1, 2], [3, 4]], device=x.device)
        return x[table[:, 0]], table * 2, torch.tensor(2.5, device=x.device) * x

    return Case(function, (torch.randn(5),))


@CONSTANTS
def plain_attributes() -> Case:
    class Plain(nn.Module):
        """Tensors that are neither parameters nor buffers, as attributes and in a closure."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.randn(3, 3)
            self.register_buffer("passing", torch.randn(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight + self.passing + outside

    outside = torch.randn(3)
    return Case(Plain(), (torch.randn(2, 3),))


@CONSTANTS
def unused() -> Case:
    return Case(Buffers(lambda x, w: x + 1, w=torch.randn(3)), (torch.randn(2, 3),))


@pytest.fixture(scope="module")
def constants(device: str) -> Bundle:
    return CONSTANTS.compile(device)


def test_constants_compile_together(constants: Bundle) -> None:
    constants.check_whole()


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant(constants: Bundle, name: str) -> None:
    constants.check(name)


@STATE
def buffer_read_before_and_after_its_change() -> Case:
    def function(x: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = last + 1
        last.copy_(x)
        return before, last * 2

    model = Buffers(function, last=torch.randn(2, 3))
    return Case(model, (torch.randn(2, 3),), calls=((torch.ones(2, 3),), (torch.zeros(2, 3),)))


@STATE
def part_of_a_buffer() -> Case:
    def function(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        rows[1:3].mul_(2)
        rows[:, 0] = x
        return rows.sum(1)

    model = Buffers(function, rows=torch.randn(4, 3))
    return Case(model, (torch.randn(4),), calls=((torch.ones(4),),))


@STATE
def running_statistics() -> Case:
    class Tracked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.norm(x), self.norm.running_mean + 0, self.norm.running_var + 0

    return Case(Tracked(), (torch.randn(4, 3),), calls=((torch.randn(4, 3),),))


@STATE
def key_value_cache() -> Case:
    class Cache(nn.Module):
        """One step of decoding: store key and value at a position, attend to all up to it."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 2, 8, 4))
            self.register_buffer("values", torch.zeros(1, 2, 8, 4))

        def forward(self, q: torch.Tensor, kv: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.keys.index_copy_(2, at, kv)
            self.values[:, :, at] = kv + 1
            seen = (torch.arange(8, device=q.device) <= at)[None]
            return nn.functional.scaled_dot_product_attention(q, self.keys, self.values, seen)

    def step(at: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4), torch.tensor([at])

    return Case(Cache(), step(0), calls=tuple(step(at) for at in (1, 2, 7, 1)))


@STATE
def a_number_that_is_read_after_the_change() -> Case:
    def function(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, float]:
        count += 1
        return x * count.item(), (count * 2 - 1).item()

    return Case(Buffers(function, count=torch.tensor(4)), (torch.ones(2),))


@STATE
def a_number_that_no_call_changes() -> Case:
    def function(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = count.item()
        torch._check(first >= 1)
        torch._check(first <= 5)
        return x[:first].sum(0), x.new_ones(first)

    return Case(Buffers(function, count=torch.tensor(3)), (torch.randn(5, 4),))


@pytest.fixture(scope="module")
def state(device: str) -> Bundle:
    return STATE.compile(device)


def test_models_with_state_compile_together(state: Bundle) -> None:
    state.check_whole()


@pytest.mark.parametrize("name", STATE)
def test_state(state: Bundle, name: str) -> None:
    """Over several calls: what one call leaves in a buffer the next one reads."""
    state.check(name)
    state.check(name)


def test_state_in_a_scalar(device: str) -> None:
    """Inductor inlines small constants; a mutated one has to stay in memory."""

    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count

    with torch.device(device):
        model, x = Buffers(function, count=torch.zeros(())), torch.ones(2)
    artifact = aot_util.compile_model(model, (x,))
    for _ in range(3):
        artifact.check(x)


@pytest.mark.usefixtures("repeated_warnings")
@pytest.mark.parametrize("option", ["freezing", "aot_inductor__use_runtime_constant_folding"])
def test_state_is_not_folded(device: str, option: str, caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total[1:] += 1
        return x * (total * 2 + 1)

    with torch.device(device):
        model, x = Buffers(function, total=torch.arange(12.0)), torch.ones(12)
    artifact = aot_util.compile_model(model, (x,), **{option: True})
    assert option.replace("__", ".") in caplog.text
    assert "ignored: the program mutates a buffer" in caplog.text
    for _ in range(3):
        artifact.check(x)


@pytest.mark.parametrize("dtype", F8)
def test_small_float8_constants(device: str, dtype: torch.dtype) -> None:
    """Few enough for Inductor to inline them."""
    with torch.device(device):
        model = Buffers(lambda x, w: x + w.float(), w=torch.tensor([0.5, 1.0, 2.0]).to(dtype))
        x = torch.randn(3)
    aot_util.compile_model(model, (x,)).check(x)


@pytest.mark.parametrize(
    "configs",
    [
        {"aot_inductor__force_mmap_weights": True},
        {"aot_inductor__package_constants_on_disk_format": "binary_blob"},
        {"aot_inductor__package_constants_on_disk_format": "pickle_weights"},
        {"aot_inductor__use_consts_asm_build": False},
    ],
    ids=lambda configs: "_".join(str(value) for item in configs.items() for value in item),
)
def test_storage_options(device: str, configs: dict[str, Any]) -> None:
    model, args = layers(device)
    artifact = aot_util.compile_model(model, args, **configs)
    artifact.check(*args)
    artifact.check(args[0] * 3)


def test_large_weights(device: str) -> None:
    """64 MiB in two layers: the second layer's offset is beyond the first one's weights."""
    model, args = layers(device, 2**21)
    model.eval()
    artifact = aot_util.compile_model(
        model, args, tolerance=1e-3, aot_inductor__force_mmap_weights=True
    )
    artifact.check(*args)


def test_tensor_subclass_parameters(device: str) -> None:
    class Wrapped(nn.Module):
        """A subclass whose results are of its class, and one whose results are plain tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.two = nn.Parameter(TwoTensor(torch.randn(3, 4), torch.randn(3, 4)))
            self.plain_out = nn.Parameter(
                CustomTensorPlainOut(torch.randn(3, 4), torch.randn(3, 4))
            )
            self.bias = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            two = 2 * self.two + self.bias
            return x + two.a * two.b + (2 * self.plain_out).exp()

    torch.manual_seed(0)
    with torch.device(device):
        model, x = Wrapped(), torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,))
    loaded = aot_util.load(aot_util.compile_program(program))
    torch.testing.assert_close(loaded(x), expected)
    assert torch.equal(loaded(x), loaded(x.clone()))
