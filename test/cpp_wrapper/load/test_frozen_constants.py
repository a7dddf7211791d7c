"""Updates of packages that were compiled with `freezing`: refused by name, never a mixture."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import exc

X = torch.arange(12)


class Tied(torch.nn.Module):
    """An embedding with its transpose, a scalar, a shift of one element, and a bias that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 16)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.shift = torch.nn.Parameter(torch.randn(1))
        self.weight = torch.nn.Parameter(torch.randn(16, 16))
        self.offset = torch.nn.Parameter(torch.randn(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(x) * self.scale + self.shift
        rows = rows @ (self.weight @ self.weight)
        return rows @ self.embedding.weight.t().exp() + self.offset


@pytest.fixture(scope="module")
def tied() -> Tied:
    torch.manual_seed(0)
    return Tied().eval()


@pytest.fixture(scope="module")
def path(tied: Tied, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("frozen") / "model.pt2"
    with torch.no_grad():
        program = torch.export.export(tied, (X,))
        return str(
            inductor_ext.aoti_compile_and_package(
                program, package_path=str(file), inductor_configs={"freezing": True}
            )
        )


@pytest.mark.parametrize("name", ["embedding.weight", "scale", "shift", "weight"])
def test_frozen_weights_are_refused_by_name(path: str, tied: Tied, name: str) -> None:
    model = inductor_ext.load(path)
    new = {name: torch.zeros_like(tied.state_dict()[name])}
    with pytest.raises(exc.ConstantMismatchError, match=f"{name}.*freezing"):
        model.update_constants(new)
    with pytest.raises(exc.ConstantMismatchError, match="freezing"):
        model.load_constants(tied.state_dict(), check_full_update=True)
    torch.testing.assert_close(model(X), tied(X))


def test_a_full_update_with_the_names_that_remain_is_refused(path: str, tied: Tied) -> None:
    model = inductor_ext.load(path)
    state = tied.state_dict()
    remaining = {name: state[name] + 1 for name in model.get_constant_fqns() if name in state}
    assert "offset" in remaining
    assert "weight" not in remaining
    with pytest.raises(exc.ConstantMismatchError, match="compiled into"):
        model.load_constants(remaining, check_full_update=True)
    for inactive in (False, True):
        with pytest.raises(exc.ConstantMismatchError, match="compiled into"):
            model.update_constants(remaining, inactive=inactive, partial=False)
    torch.testing.assert_close(model(X), tied(X))
    stock = torch._inductor.aoti_load_package(path)
    with pytest.raises(RuntimeError):
        stock.load_constants(remaining, check_full_update=True)
    with pytest.raises(RuntimeError):
        stock.load_constants({"weight": state["weight"]}, check_full_update=False)
    torch.testing.assert_close(stock(X), tied(X))


def test_constants_that_freezing_left_alone_are_updated(path: str, tied: Tied) -> None:
    model = inductor_ext.load(path)
    expected = tied(X) - tied.offset + 3
    model.update_constants({"offset": torch.full((12,), 3.0)})
    torch.testing.assert_close(model(X), expected)


def test_runtime_constant_folding_follows_updates(tied: Tied, tmp_path: pathlib.Path) -> None:
    options = {"aot_inductor.use_runtime_constant_folding": True}
    with torch.no_grad():
        program = torch.export.export(tied, (X,))
        path = inductor_ext.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2"), inductor_configs=options
        )
    model, other = inductor_ext.load(path), Tied().eval()
    assert model.manifest is not None
    content = model.manifest.models["model"]
    assert not content.frozen
    state = {constant.fqn: other.state_dict()[constant.fqn] for constant in content.constants}
    model.load_constants(state, check_full_update=True)
    torch.testing.assert_close(model(X), other(X))
