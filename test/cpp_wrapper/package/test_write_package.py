"""Packages with several models, and weights in a separate file."""

from __future__ import annotations

import pathlib
import zipfile
from typing import Any

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.hooks.records import CompileRecord


class TestWeightsOutside:
    def test_packages_share_one_file(self, tmp_path: pathlib.Path) -> None:
        model = torch.nn.Linear(40, 30).eval()
        file = tmp_path / "linear.weights"
        inputs = [torch.randn(3, 40), torch.randn(7, 40)]
        times = set()
        for index, x in enumerate(inputs):
            path = str(tmp_path / f"{index}.pt2")
            inductor_ext.aoti_compile_and_package(
                torch.export.export(model, (x,)),
                package_path=path,
                inductor_configs={"aot_weights_file": str(file)},
            )
            times.add(file.stat().st_mtime_ns)
            with zipfile.ZipFile(path) as package:
                assert not [name for name in package.namelist() if name.endswith(".weights")]
            loaded = inductor_ext.load(path, weights=file)
            torch.testing.assert_close(loaded(x), model(x))
        assert len(times) == 1, "the second compile has written the same weights again"

    def test_missing_weights_file(self, tmp_path: pathlib.Path) -> None:
        path, file = str(tmp_path / "m.pt2"), tmp_path / "m.weights"
        inductor_ext.aoti_compile_and_package(
            torch.export.export(torch.nn.Linear(40, 30).eval(), (torch.randn(3, 40),)),
            package_path=path,
            inductor_configs={"aot_weights_file": str(file)},
        )
        with pytest.raises(exc.ArtifactLoadError, match="in a separate file"):
            inductor_ext.load(path)
        file.write_bytes(file.read_bytes()[::-1])
        with pytest.raises(exc.InductorExtError, match="weights"):
            inductor_ext.load(path, weights=file)

    def test_several_models(self, tmp_path: pathlib.Path) -> None:
        program = torch.export.export(torch.nn.Linear(4, 3).eval(), (torch.randn(3, 4),))
        with pytest.raises(exc.SharedWeightsFileError, match="a, b"):
            inductor_ext.aoti_compile_and_package(
                {"a": program, "b": program},
                package_path=tmp_path / "m.pt2",
                inductor_configs={"aot_weights_file": str(tmp_path / "w")},
            )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["absent/w", "."])
    def test_invalid_weights_paths(self, tmp_path: pathlib.Path, name: str) -> None:
        program = torch.export.export(torch.nn.Linear(4, 3).eval(), (torch.randn(3, 4),))
        with (
            events.capture(CompileRecord) as compiles,
            pytest.raises(exc.BadWeightsFileError, match=r"does not exist|it is a folder"),
        ):
            inductor_ext.aoti_compile_and_package(
                program,
                package_path=tmp_path / "m.pt2",
                inductor_configs={"aot_weights_file": str(tmp_path / name)},
            )
        assert not compiles
        assert list(tmp_path.iterdir()) == []


class TestSeveralModels:
    def test_models_of_the_same_code_have_their_own_weights(self, tmp_path: pathlib.Path) -> None:
        x = torch.randn(3, 20)
        models = {name: torch.nn.Linear(20, 20).eval() for name in ("a", "b")}
        path = str(tmp_path / "m.pt2")
        programs = {name: torch.export.export(model, (x,)) for name, model in models.items()}
        inductor_ext.aoti_compile_and_package(programs, package_path=path)
        for name, model in models.items():
            torch.testing.assert_close(inductor_ext.load(path, name)(x), model(x))

    def test_several_models_in_one_package(self, tmp_path: pathlib.Path) -> None:
        x = torch.randn(6)
        models = {"up": torch.nn.Softplus(), "down.v2": torch.nn.LogSigmoid()}
        path = str(tmp_path / "two.pt2")
        inductor_ext.aoti_compile_and_package(
            {name: torch.export.export(model, (x,)) for name, model in models.items()},
            package_path=path,
        )
        for name, model in models.items():
            torch.testing.assert_close(inductor_ext.load(path, name)(x), model(x))
            stock = torch._C._aoti.AOTIModelPackageLoader(path, name, False, 1, -1)
            torch.testing.assert_close(stock.run([x])[0], model(x))

    @pytest.mark.parametrize("name", ["", "../up", "a b", 3])
    def test_invalid_model_names(self, name: Any, tmp_path: pathlib.Path) -> None:
        program = torch.export.export(torch.nn.ReLU(), (torch.randn(2),))
        with pytest.raises(exc.BadModelNameError):
            inductor_ext.aoti_compile_and_package({name: program}, package_path=tmp_path / "m.pt2")
        assert list(tmp_path.iterdir()) == []


def test_packages_without_a_path_have_different_paths() -> None:
    """Two models with the same code and the same file names."""
    x = torch.randn(3, 16)
    models = [torch.nn.Linear(16, 16).eval() for _ in range(2)]
    paths = [
        inductor_ext.aoti_compile_and_package(torch.export.export(model, (x,))) for model in models
    ]
    assert paths[0] != paths[1]
    for path, model in zip(paths, models, strict=True):
        torch.testing.assert_close(inductor_ext.load(path)(x), model(x))
