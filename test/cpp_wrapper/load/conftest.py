"""A package with two models, one of Inductor's, and the loaded models."""

from __future__ import annotations

import pathlib
import tempfile

import pytest
import torch
import torch._inductor
from torch.export import Dim

import inductor_ext
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from test.support import aot_util
from test.support.loader_models import Nested, Plain, Point, nested_inputs


@pytest.fixture(scope="session")
def plain() -> Plain:
    torch.manual_seed(0)
    return Plain().eval()


@pytest.fixture(scope="session")
def nested() -> Nested:
    return Nested().eval()


@pytest.fixture(scope="session")
def path(plain: Plain, nested: Nested, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package of the extension with the models "model" and "nested"."""
    rows = {0: Dim("rows", min=2, max=64)}
    shapes = {
        "batch": {"ids": [rows, None], "mask": None},
        "point": Point(None, None),  # type: ignore[arg-type]
        "pair": [None, None],
        "times": None,
        "flag": None,
        "bias": None,
        "mode": None,
    }
    args, kwargs = nested_inputs()
    programs = {
        "model": torch.export.export(plain, (torch.randn(4, 8),), dynamic_shapes=(rows,)),
        "nested": torch.export.export(nested, args, kwargs, dynamic_shapes=shapes),
    }
    target = tmp_path_factory.mktemp("loader") / "net.pt2"
    inductor_ext.aoti_compile_and_package(programs, package_path=target)
    return str(target)


@pytest.fixture(scope="session")
def stock_path(plain: Plain, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A package of Inductor (default) of the model `plain`, for batches of 4."""
    program = torch.export.export(plain, (torch.randn(4, 8),))
    target = str(tmp_path_factory.mktemp("stock") / "net.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=target)
    return target


@pytest.fixture(scope="session")
def stock_loads(stock_path: str) -> None:
    """Skip tests that load packages of Inductor (default) if these crash the process."""
    if aot_util.crashes_at_load(stock_path):
        pytest.skip("packages of Inductor crash at load on this machine")


@pytest.fixture
def model(path: str) -> LoadedModel:
    return inductor_ext.load(path)


@pytest.fixture(autouse=True)
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder for temporary files, empty before each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
