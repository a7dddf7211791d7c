"""AOT artifacts' constants: how they are stored, named, folded, updated, swapped and mutated."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.custom_tensor import CustomTensorPlainOut
from torch.testing._internal.two_tensor import TwoTensor

import inductor_ext
from inductor_ext import events, exc
from test.support import aot_util
from test.support.aot_util import DEVICES, Artifact, Bundle, Case, Cases

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


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class Buffers(nn.Module):
    """Buffers by name, and what is done with them and the input."""

    def __init__(self, function: Any, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args, **dict(self.named_buffers(remove_duplicate=False)))


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
        """Tensors that are no parameters and no buffers, as attributes and in a closure."""

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
    """Inductor makes small constants part of the code; one that changes has to stay memory."""

    def function(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count

    with torch.device(device):
        model, x = Buffers(function, count=torch.zeros(())), torch.ones(2)
    artifact = aot_util.compile_model(model, (x,))
    for _ in range(3):
        artifact.check(x)


@pytest.mark.parametrize("option", ["freezing", "aot_inductor__use_runtime_constant_folding"])
def test_state_is_not_folded(
    device: str, option: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_warned", set())

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
def test_a_few_numbers_of_float8(device: str, dtype: torch.dtype) -> None:
    """As few as Inductor makes part of the code."""
    with torch.device(device):
        model = Buffers(lambda x, w: x + w.float(), w=torch.tensor([0.5, 1.0, 2.0]).to(dtype))
        x = torch.randn(3)
    aot_util.compile_model(model, (x,)).check(x)


class Layers(nn.Module):
    """Two layers of different size, a buffer and a tensor of another dtype."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 3)
        self.register_buffer("scale", torch.rand(3))
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x).relu()) * self.scale)[:, self.order]


FQNS = {"up.weight", "up.bias", "down.weight", "down.bias", "scale", "order"}


def layers(device: str, width: int = 8) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Layers(width).to(device), (torch.randn(2, 4, device=device),)


@pytest.fixture(scope="module")
def stored(device: str) -> Artifact:
    return aot_util.compile_model(*layers(device), always_keep_tensor_constants=True)


def test_names_and_dtypes(stored: Artifact, tmp_path: pathlib.Path) -> None:
    runner = stored.runner(tmp_path)
    names = runner.get_constant_names_to_original_fqns()
    assert set(names.values()) == FQNS
    dtypes = {names[name]: dtype for name, dtype in runner.get_constant_names_to_dtypes().items()}
    # The numbers of torch's scalar types: 6 is float32, 4 is int64.
    assert dtypes == dict.fromkeys(FQNS, 6) | {"order": 4}
    assert set(stored.loaded.get_constant_fqns()) == FQNS


def test_constants_can_be_read_back(stored: Artifact, tmp_path: pathlib.Path) -> None:
    runner = stored.runner(tmp_path)
    found = runner.extract_constants_map(False)
    expected = {**dict(stored.eager.named_parameters()), **dict(stored.eager.named_buffers())}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


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
def test_ways_to_store(device: str, configs: dict[str, Any]) -> None:
    model, args = layers(device)
    artifact = aot_util.compile_model(model, args, **configs)
    artifact.check(*args)
    artifact.check(args[0] * 3)


def test_large_weights(device: str) -> None:
    """64 MiB in two layers: what stands behind the first one is found as well."""
    model, args = layers(device, 2**21)
    model.eval()
    artifact = aot_util.compile_model(
        model, args, tolerance=1e-3, aot_inductor__force_mmap_weights=True
    )
    artifact.check(*args)


def test_weights_left_out_of_the_package(device: str) -> None:
    model, args = layers(device)
    artifact = aot_util.compile_model(
        model, args, aot_inductor__package_constants_in_so=False, always_keep_tensor_constants=True
    )
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    artifact.loaded.load_constants(state, check_full_update=True)
    artifact.check(*args)


def fresh(model: nn.Module) -> dict[str, torch.Tensor]:
    """New values for all parameters and floating buffers, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: torch.rand_like(tensor) if tensor.is_floating_point() else tensor.flip(0)
        for name, tensor in tensors.items()
    }


class Updated:
    """A runner of an artifact, and the eager models that belong to its two sets of constants."""

    def __init__(self, artifact: Artifact, folder: pathlib.Path, args: tuple[Any, ...]) -> None:
        self.runner = artifact.runner(folder)
        self.args = args
        self.active = aot_util.clone(artifact.eager)
        self.inactive = aot_util.clone(artifact.eager)
        fqns = self.runner.get_constant_names_to_original_fqns()
        self._names = {fqn: name for name, fqn in fqns.items()}

    def update(
        self, values: dict[str, torch.Tensor], *, inactive: bool = False, **options: bool
    ) -> None:
        named = {self._names[fqn]: value for fqn, value in values.items()}
        full = len(values) == len(self._names)
        self.runner.update_constant_buffer(named, inactive, full, **options)
        model = self.inactive if inactive else self.active
        model.load_state_dict(values, strict=False)

    def swap(self) -> None:
        self.runner.swap_constant_buffer()
        self.active, self.inactive = self.inactive, self.active

    def check(self) -> None:
        with torch.no_grad():
            expected = self.active(*self.args)
        (actual,) = self.runner.run(list(self.args))
        torch.testing.assert_close(actual, expected)


@pytest.fixture(scope="module")
def folded(device: str) -> Artifact:
    """Constants that are computed from others when the artifact is loaded."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.bias = nn.Parameter(torch.randn(4))
            self.register_buffer("kept", torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight.t().relu() + self.bias) + self.kept

    torch.manual_seed(0)
    return aot_util.compile_model(
        Folded().to(device),
        (torch.randn(2, 4, device=device),),
        aot_inductor__use_runtime_constant_folding=True,
        always_keep_tensor_constants=True,
    )


def test_folding_at_run_time(folded: Artifact, device: str) -> None:
    for _ in range(2):
        folded.check(torch.randn(2, 4, device=device))


@torch.library.custom_op("test_aot_constants::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("test_aot_constants::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


for operator in (twice, thrice):
    operator.register_fake(torch.empty_like)


def test_folding_by_custom_operators(device: str) -> None:
    """Stock writes the operators of the graph proper alone, and calls those of folding by them."""

    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return thrice(x) @ (twice(self.weight) + 1)

    args = (torch.randn(2, 4, device=device),)
    artifact = aot_util.compile_model(
        Folded().to(device),
        args,
        aot_inductor__use_runtime_constant_folding=True,
        always_keep_tensor_constants=True,
    )
    artifact.check(*args)
    model = aot_util.load(artifact.path)
    model.fold_constants()
    weight = torch.randn(4, 4, device=device)
    for number in (1, 2):
        model.load_constants({"weight": number * weight}, check_full_update=True)
        model.fold_constants()
        torch.testing.assert_close(model(*args), 3 * args[0] @ (2 * number * weight + 1))


@pytest.fixture(params=["stored", "folded"])
def updated(request: pytest.FixtureRequest, device: str, tmp_path: pathlib.Path) -> Updated:
    artifact = request.getfixturevalue(request.param)
    return Updated(artifact, tmp_path, (torch.randn(2, 4, device=device),))


def test_update_of_all(updated: Updated) -> None:
    for _ in range(2):
        updated.update(fresh(updated.active))
        updated.check()


def test_update_of_some(updated: Updated) -> None:
    for name, value in fresh(updated.active).items():
        updated.update({name: value})
        updated.check()


def test_update_of_the_inactive_set(updated: Updated) -> None:
    updated.check()
    updated.update(fresh(updated.active), inactive=True)
    updated.check()
    updated.swap()
    updated.check()
    updated.update(fresh(updated.active), inactive=True)
    updated.check()
    updated.swap()
    updated.check()


def test_update_of_some_of_the_inactive_set(updated: Updated) -> None:
    updated.update(fresh(updated.active), inactive=True)
    for name, value in fresh(updated.active).items():
        updated.update({name: value}, inactive=True)
    updated.check()
    updated.swap()
    updated.check()


FIRST_PARTIAL = """
import pathlib, sys, torch
from test.cpp_wrapper.load import test_constants as test_aot_constants
from test.support.aot_util import Artifact
path, device, folder = sys.argv[1:]
model, args = test_aot_constants.layers(device)
updated = test_aot_constants.Updated(
    Artifact(model, torch.export.export(model, args), path), pathlib.Path(folder), args
)
name, value = next(iter(test_aot_constants.fresh(model).items()))
updated.update({name: value}, inactive=True)
updated.check()
updated.swap()
updated.check()
"""


def test_first_update_of_the_inactive_set_may_be_of_some(
    stored: Artifact, device: str, tmp_path: pathlib.Path
) -> None:
    """What is not given has the active set's value then.

    In a process of its own: an entry of the inactive set that nobody filled is a null pointer.
    """
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PARTIAL, stored.path, device, str(tmp_path)],
        cwd=pathlib.Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_freed_inactive_set_comes_back(updated: Updated) -> None:
    updated.update(fresh(updated.active), inactive=True)
    updated.swap()
    updated.runner.free_inactive_constant_buffer()
    updated.check()
    updated.update(fresh(updated.active), inactive=True)
    updated.swap()
    updated.check()


def test_update_of_expanded_constants(device: str) -> None:
    with torch.device(device):
        values = {"rows": torch.randn(1, 12).expand(3, 12), "other": torch.randn(12)}
        model, x = Buffers(lambda x, rows, other: x * rows + other, **values), torch.randn(12)
        rows, other = torch.randn(12).expand(3, 12), torch.randn(12)
    artifact = aot_util.compile_model(model, (x,))
    loaded = inductor_ext.load(artifact.path)
    loaded.update_constants({"other": other}, inactive=True)
    loaded.swap_constants()
    torch.testing.assert_close(loaded(x), x * values["rows"] + other)
    with pytest.raises(exc.ConstantMismatchError, match="not expanded along dimension 0"):
        loaded.update_constants({"other": x, "rows": torch.randn(3, 12, device=device)})
    torch.testing.assert_close(loaded(x), x * values["rows"] + other)
    loaded.update_constants({"rows": rows})
    torch.testing.assert_close(loaded(x), x * rows + other)


def test_update_copies(updated: Updated) -> None:
    values = fresh(updated.active)
    updated.update(values)
    for value in values.values():
        value.zero_()
    updated.check()


def test_update_with_tensors_that_stay_the_callers(
    stored: Artifact, tmp_path: pathlib.Path, device: str
) -> None:
    updated = Updated(stored, tmp_path, (torch.randn(2, 4, device=device),))
    values = fresh(updated.active)
    updated.update(values, user_managed=True)
    updated.check()
    with torch.no_grad():
        for name in ("up.weight", "down.bias"):
            values[name].mul_(2)
            updated.active.get_parameter(name).mul_(2)
    updated.check()


def test_load_constants_of_the_loaded_model(stored: Artifact, device: str) -> None:
    loaded, eager = aot_util.load(stored.path), aot_util.clone(stored.eager)
    x = torch.randn(2, 4, device=device)
    for values in (fresh(eager), {"down.bias": torch.ones(3, device=device)}):
        loaded.load_constants(values, check_full_update=len(values) == len(FQNS))
        eager.load_state_dict(values, strict=False)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), eager(x))
    with pytest.raises(RuntimeError):
        loaded.load_constants({"down.bias": torch.ones(3)}, check_full_update=True)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), eager(x))


def test_two_loaded_models_have_constants_of_their_own(stored: Artifact, device: str) -> None:
    x = torch.randn(2, 4, device=device)
    first, second = aot_util.load(stored.path), aot_util.load(stored.path)
    before = second(x)
    first.load_constants(fresh(stored.eager), check_full_update=True)
    assert not torch.equal(first(x), before)
    assert torch.equal(second(x), before)


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
