"""`load` with the weights of a `state_dict()`, on a named device, and with damaged weights."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from inductor_ext.cpp_wrapper.package.checksums import BLOCK
from test.support.loader_models import Plain, changed, check, find_weights


class Stateful(nn.Module):
    """Tied weights, a counter, a buffer that is not persistent, and one that is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("unread", torch.zeros(3))
        self.register_buffer("scale", torch.rand(24), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.second(self.first(x).relu()) * self.scale + self.calls


@pytest.fixture(scope="module")
def stateful() -> Stateful:
    torch.manual_seed(1)
    return Stateful().eval()


@pytest.fixture(scope="module")
def package(stateful: Stateful, tmp_path_factory: pytest.TempPathFactory) -> str:
    program = torch.export.export(stateful, (torch.randn(3, 24),))
    target = tmp_path_factory.mktemp("weights") / "stateful.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=target)
    return str(target)


@pytest.fixture
def other(stateful: Stateful) -> Stateful:
    """Another module of this class, with the same buffer that is not in its `state_dict()`."""
    torch.manual_seed(2)
    other = Stateful().eval()
    other.scale.copy_(stateful.scale)
    return other


class TestStateDict:
    @torch.no_grad()
    def test_its_tensors_are_used_by_several_models(self, package: str, other: Stateful) -> None:
        state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        state["second.weight"] = state["first.weight"]
        models = [inductor_ext.load(package, weights=state) for _ in range(2)]
        x = torch.randn(3, 24)
        for model in models:
            torch.testing.assert_close(model(x), other(x))
        assert state["calls"].item() == 2
        state["first.weight"].mul_(3)
        other.first.weight.mul_(3)
        torch.testing.assert_close(models[0](x), other(x))
        for model in models:
            assert model.constants()["first.bias"].data_ptr() == state["first.bias"].data_ptr()

    @torch.no_grad()
    def test_they_can_be_replaced(self, package: str, stateful: Stateful, other: Stateful) -> None:
        model = inductor_ext.load(package, weights=stateful.state_dict())
        before = stateful.first.weight.clone()
        model.load_state_dict(other.state_dict())
        x = torch.randn(3, 24)
        torch.testing.assert_close(model(x), other(x))
        assert torch.equal(stateful.first.weight, before)

    @torch.no_grad()
    def test_reload(self, package: str, stateful: Stateful, other: Stateful) -> None:
        model = inductor_ext.load(package, weights=stateful.state_dict())
        model.reload(weights=other.state_dict())
        x = torch.randn(3, 24)
        actual = model(x)
        assert other.calls.item() == 1
        torch.testing.assert_close(actual, other(x) - 1)
        assert model.constants()["first.bias"].data_ptr() == other.first.bias.data_ptr()

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda state: state.pop("first.bias"), "no value for 'first.bias'"),
            (lambda state: state.update(extra=torch.ones(1)), "an unknown entry 'extra'"),
            (lambda state: state.update(calls=torch.ones(1).double()), "'calls' is a tensor"),
            (lambda state: state.update(calls=torch.ones(2)), "'calls' is a tensor"),
            (
                lambda state: state.update({"first.weight": torch.rand(24, 24).t()}),
                "to be used without a copy it needs",
            ),
        ],
    )
    def test_a_wrong_entry_is_named(
        self, package: str, stateful: Stateful, temporary: pathlib.Path, change: Any, why: str
    ) -> None:
        state = dict(stateful.state_dict())
        change(state)
        if "first.weight" in state:
            state["second.weight"] = state["first.weight"]
        with pytest.raises(exc.ConstantMismatchError, match=why):
            inductor_ext.load(package, weights=state)
        assert list(temporary.iterdir()) == []

    def test_only_the_other_constants_are_read(
        self, package: str, stateful: Stateful, tmp_path: pathlib.Path
    ) -> None:
        damaged = tmp_path / "damaged.pt2"
        for name, is_read in (("first.bias", False), ("scale", True)):
            described, begin, _ = find_weights(package)
            (offset,) = {item.offset for item in described.constants if item.fqn == name}
            data = bytearray(pathlib.Path(package).read_bytes())
            data[begin + (offset or 0)] ^= 1
            damaged.write_bytes(data)
            if is_read:
                with pytest.raises(exc.BadPackageError, match="does not match the manifest"):
                    inductor_ext.load(damaged, weights=stateful.state_dict())
            else:
                inductor_ext.load(damaged, weights=stateful.state_dict())

    def test_packages_of_inductor_refuse_it(self, stock_path: str, plain: Plain) -> None:
        with pytest.raises(exc.UnsupportedArtifactError, match="argument weights"):
            inductor_ext.load(stock_path, weights=plain.state_dict())


class TestDevice:
    def test_the_device_of_the_model(self, path: str, plain: Plain) -> None:
        for device in ("cpu", torch.device("cpu")):
            model = inductor_ext.load(path, device=device)
            check(model, plain)
            assert model.device == torch.device("cpu")  # type: ignore[attr-defined]

    def test_another_type_of_device(self, path: str) -> None:
        with pytest.raises(exc.IncompatibleArtifactError, match="compiled for cpu, and the device"):
            inductor_ext.load(path, device="cuda:0")

    @pytest.mark.parametrize("device", ["gpu", 1.5, object()])
    def test_no_device(self, path: str, device: Any) -> None:
        with pytest.raises(exc.BadArgumentError, match="Invalid device="):
            inductor_ext.load(path, device=device)

    @pytest.mark.parametrize("name", ["tpu", "c}u", "cuda:0", ""])
    def test_a_package_for_an_unknown_device(self, path: str, name: str) -> None:
        def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
            content["models"]["model"]["device"] = name

        with pytest.raises(exc.ArtifactLoadError, match="for which there is no AOTI runner"):
            inductor_ext.load(changed(path, change))

    def test_a_device_and_an_index(self, path: str) -> None:
        with pytest.raises(exc.BadArgumentError, match="Invalid device_index=0"):
            inductor_ext.load(path, device="cpu", device_index=0)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(3 * BLOCK // 4 + 100), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table.sum()


def test_damage_in_any_block_is_found(tmp_path: pathlib.Path) -> None:
    program = torch.export.export(Large(), (torch.rand(3),))
    path = tmp_path / "large.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    _, begin, size = find_weights(path)
    assert size > 3 * BLOCK
    data = bytearray(path.read_bytes())
    damaged = tmp_path / "damaged.pt2"
    for position in (0, BLOCK - 1, BLOCK, 3 * BLOCK - 1, 3 * BLOCK, size - 1):
        data[begin + position] ^= 1
        damaged.write_bytes(data)
        data[begin + position] ^= 1
        with pytest.raises(exc.BadPackageError, match="does not match the manifest"):
            inductor_ext.load(damaged)
    damaged.write_bytes(data)
    assert isinstance(inductor_ext.load(damaged), LoadedModel)
