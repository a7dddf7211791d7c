"""Constants of a running model: names, values, updates, the inactive set, and folding."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import inductor_ext
from inductor_ext import exc
from test.support import aot_util
from test.support.aot_util import DEVICES, Artifact
from test.support.constant_models import FQNS, Buffers, Updated, fresh, layers


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stored(device: str) -> Artifact:
    return aot_util.compile_model(*layers(device), always_keep_tensor_constants=True)


def test_names_and_dtypes(stored: Artifact, tmp_path: pathlib.Path) -> None:
    runner = stored.runner(tmp_path)
    names = runner.get_constant_names_to_original_fqns()
    assert set(names.values()) == FQNS
    dtypes = {names[name]: dtype for name, dtype in runner.get_constant_names_to_dtypes().items()}
    # torch's scalar type numbers: 6 is float32, 4 is int64.
    assert dtypes == dict.fromkeys(FQNS, 6) | {"order": 4}
    assert set(stored.loaded.get_constant_fqns()) == FQNS


def test_constants_can_be_read_back(stored: Artifact, tmp_path: pathlib.Path) -> None:
    runner = stored.runner(tmp_path)
    constants = runner.extract_constants_map(False)
    expected = {**dict(stored.eager.named_parameters()), **dict(stored.eager.named_buffers())}
    assert set(constants) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(constants[name], tensor), name


def test_weights_left_out_of_the_package(device: str) -> None:
    model, args = layers(device)
    artifact = aot_util.compile_model(
        model, args, aot_inductor__package_constants_in_so=False, always_keep_tensor_constants=True
    )
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    artifact.loaded.load_constants(state, check_full_update=True)
    artifact.check(*args)


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
    """Inductor (default) lists only the main graph's operators, but calls those of folding, too."""

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
from test.support import constant_models
from test.support.aot_util import Artifact
path, device, folder = sys.argv[1:]
model, args = constant_models.layers(device)
updated = constant_models.Updated(
    Artifact(model, torch.export.export(model, args), path), pathlib.Path(folder), args
)
name, value = next(iter(constant_models.fresh(model).items()))
updated.update({name: value}, inactive=True)
updated.check()
updated.swap()
updated.check()
"""


def test_first_update_of_the_inactive_set_may_be_partial(
    stored: Artifact, device: str, tmp_path: pathlib.Path
) -> None:
    """Constants that are not updated have the active set's values.

    In a separate process: an unset entry of the inactive set is a null pointer.
    """
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PARTIAL, stored.path, device, str(tmp_path)],
        cwd=pathlib.Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_freed_inactive_set_can_be_updated(updated: Updated) -> None:
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


def test_update_with_user_managed_tensors(
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
