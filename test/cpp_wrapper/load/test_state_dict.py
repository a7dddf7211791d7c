"""`load_state_dict` of a loaded model: the semantics of `Module.load_state_dict`."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from inductor_ext.cpp_wrapper.package import state_names
from test.support.loader_models import changed


class Tied(nn.Module):
    """A tied weight, buffers of every kind, and a layer that the output does not need."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.shift = torch.arange(8.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids)) * self.mask + self.shift
        return self.head(x)  # type: ignore[no-any-return]


IDS = torch.tensor([1, 7, 7, 0])


def make(seed: int) -> Tied:
    torch.manual_seed(seed)
    model = Tied().eval()
    model.norm.running_mean = torch.randn(8)
    return model


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    program = torch.export.export(make(0), (IDS,))
    path = tmp_path_factory.mktemp("state") / "model.pt2"
    return str(inductor_ext.aoti_compile_and_package(program, package_path=str(path)))


@pytest.fixture
def loaded(package: str) -> LoadedModel:
    return inductor_ext.load(package)


def check(loaded: LoadedModel, model: nn.Module) -> None:
    torch.testing.assert_close(loaded(IDS), model(IDS))


def test_the_state_of_another_model_is_loaded(loaded: LoadedModel) -> None:
    check(loaded, make(0))
    other = make(1)
    keys = loaded.load_state_dict(other.state_dict())
    assert keys == ([], []) == other.load_state_dict(other.state_dict())
    check(loaded, other)


def test_values_are_converted_to_the_dtype_of_the_model(loaded: LoadedModel) -> None:
    other = make(2)
    state = {name: value.to(torch.float64) for name, value in other.state_dict().items()}
    loaded.load_state_dict(state)
    check(loaded, other)


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_tied_weight_has_both_names(loaded: LoadedModel, name: str) -> None:
    model = make(0)
    value = torch.randn(10, 8)
    keys = loaded.load_state_dict({name: value}, strict=False)
    expected = model.load_state_dict({name: value}, strict=False)
    # torch does not miss the counter of batches in a state without a version.
    missing = {*expected.missing_keys, "norm.num_batches_tracked"}
    assert (set(keys.missing_keys), keys.unexpected_keys) == (missing, [])
    check(loaded, model)


def test_missing_and_unknown_names(loaded: LoadedModel) -> None:
    model = make(0)
    state: dict[str, Any] = dict(make(3).state_dict())
    del state["norm.bias"]
    state["mask"] = torch.zeros(8)
    with pytest.raises(exc.ConstantMismatchError) as caught:
        loaded.load_state_dict(state)
    message = (
        "the state has no value for 'norm.bias' and an unknown entry 'mask'. With strict=False"
    )
    assert message in str(caught.value)
    check(loaded, model)
    keys = loaded.load_state_dict(state, strict=False)
    assert keys == model.load_state_dict(state, strict=False)
    check(loaded, model)


def test_a_wrong_shape_changes_nothing(loaded: LoadedModel) -> None:
    state = make(3).state_dict()
    state["norm.weight"] = torch.ones(9)
    for strict in (True, False):
        with pytest.raises(exc.ConstantMismatchError, match=r"'norm.weight' is a tensor .*\[9\]"):
            loaded.load_state_dict(state, strict)
    with pytest.raises(exc.ConstantMismatchError, match=r"'norm.weight' is of type list"):
        loaded.load_state_dict({**state, "norm.weight": [1.0]})  # type: ignore[dict-item]
    check(loaded, make(0))


def test_weights_that_were_compiled_into_others_are_refused(tmp_path: pathlib.Path) -> None:
    program = torch.export.export(make(0), (IDS,))
    path = inductor_ext.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "frozen.pt2"),
        inductor_configs={"freezing": True},
    )
    loaded = inductor_ext.load(path)
    with pytest.raises(exc.ConstantMismatchError, match="compiled into the model with freezing"):
        loaded.load_state_dict(make(1).state_dict())
    check(loaded, make(0))


def test_packages_without_the_names_have_those_of_the_constants(package: str) -> None:
    def forget(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        del content["models"]["model"]["state"]

    loaded = inductor_ext.load(changed(package, forget))
    other = make(1)
    keys = loaded.load_state_dict(other.state_dict(), strict=False)
    assert "unused.weight" in keys.unexpected_keys
    check(loaded, other)


def test_packages_of_inductor_have_no_names(tmp_path: pathlib.Path) -> None:
    program = torch.export.export(make(0), (IDS,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    loaded = inductor_ext.load(path)
    with pytest.raises(exc.UnsupportedArtifactError, match="Loading a state_dict is not supported"):
        loaded.load_state_dict(make(1).state_dict())


def test_a_module_without_state_has_no_names(tmp_path: pathlib.Path) -> None:
    class Constant(nn.Module):
        shift: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.randn(16), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() + self.shift

    model, x = Constant(), torch.randn(3, 16)
    program = torch.export.export(model, (x,))
    path = inductor_ext.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    loaded = inductor_ext.load(path)
    assert loaded.get_constant_fqns() == ["shift"]
    assert loaded.load_state_dict({}) == ([], []) == model.load_state_dict({})
    with pytest.raises(exc.ConstantMismatchError, match="an unknown entry 'shift'"):
        loaded.load_state_dict({"shift": torch.zeros(16)})
    torch.testing.assert_close(loaded(x), model(x))


class Shared(nn.Module):
    """Entries of a state on one memory, some of which are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(4, 4)
        self.register_buffer("base", base)
        self.register_buffer("same", base.view(4, 4))
        self.register_buffer("row", base[0])
        self.register_buffer("transposed", base.mT)
        self.register_buffer("copied", base.clone())
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("read", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.base + self.read


def test_only_the_same_elements_are_tied() -> None:
    program = torch.export.export(Shared(), (torch.randn(2, 4),))
    expected = dict.fromkeys(program.state_dict, "") | {"base": "base", "same": "base"}
    # The value of `read` is in the code: loading another one must be refused.
    assert state_names.find_constants(program, {"base"}) == {**expected, "read": "read"}
