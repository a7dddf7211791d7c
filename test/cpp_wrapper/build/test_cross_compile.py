"""Packages for another processor architecture.

Most tests compile with a stand-in for the cross compiler. The last one compiles for aarch64, and
runs the package under qemu; it needs a cross compiler, qemu-aarch64 and torch for aarch64
(TEST_AARCH64_TORCH).
"""

from __future__ import annotations

import os
import pathlib
import platform
import shutil
import sys
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import _compat, exc, settings, targets
from inductor_ext.cpp_wrapper.build import cross_compile
from inductor_ext.cpp_wrapper.package import manifest, zip_reader
from test.support import aarch64

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles on x86-64")

CLIENT = pathlib.Path(__file__).parent.parent / "client"


class Net(torch.nn.Module):
    """Vectorized kernels with math functions, a reduction, an index and two kinds of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 64)
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.nn.functional.gelu(self.up(x + self.table(ids)))
        return torch.softmax(self.down(hidden), -1), hidden.exp().sum(0).tanh(), x.half().sin()


@pytest.fixture(scope="module")
def program() -> Any:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch", min=2, max=64)
    args = torch.randn(5, 64), torch.randint(0, 50, (5,))
    return torch.export.export(Net().eval(), args, dynamic_shapes=({0: batch}, {0: batch}))


@pytest.fixture
def commands(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Install the stand-in for the cross compiler; the file has its commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return aarch64.make_compiler(folder)


def read(path: pathlib.Path) -> manifest.Manifest:
    with zip_reader.open_package(path) as package:
        found = manifest.read(package)
    assert found is not None
    return found[0]


def test_a_package_for_both_architectures(
    program: Any, commands: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path, other_torch = tmp_path / "net.pt2", aarch64.make_torch(tmp_path / "torch")
    inductor_ext.aoti_compile_and_package(
        program,
        package_path=path,
        inductor_configs={"aot_cross_torch": other_torch, "artifact_cache": False},
        cpu_targets=["aarch64", "x86-64-v3"],
    )
    content = read(path)
    model = content.models["model"]
    (variant,) = model.variants
    assert content.platform == {"system": sys.platform, "machine": "x86_64"}
    assert (model.target, model.machine) == ("x86-64-v3", None)
    assert (variant.target, variant.machine) == ("aarch64", "aarch64")
    assert variant.cpu_features == ("asimd",)
    assert variant.torch_functions is not None
    assert "aoti_torch_cpu_addmm_out" in variant.torch_functions
    assert not any(tmp_path.name in str(value) for value in variant.options.values())

    lines = commands.read_text().splitlines()
    compiles = [line for line in lines if " -c " in line]
    links = [line for line in lines if f"-L{other_torch}/lib" in line]
    assert len(links) == 1
    assert len(compiles) > 3
    for line in compiles:
        assert "-march=armv8-a" in line or "/runtime/" in line
        assert f"-I{other_torch}/include" in line
        assert not any(text in line for text in ("-mavx", "native", "x86-64", f"-I{sys.prefix}"))
    for line in (*compiles, *links):
        assert str(_compat.torch_folder()) not in line

    # Here, the code for x86-64 runs.
    loaded = inductor_ext.load(path)
    x, ids = torch.randn(7, 64), torch.randint(0, 50, (7,))
    for one, two in zip(loaded(x, ids), program.module()(x, ids), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3)


def test_a_package_for_another_architecture_is_refused_here(
    program: Any, commands: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "net.pt2"
    inductor_ext.aoti_compile_and_package(
        program,
        package_path=path,
        inductor_configs={"aot_cross_torch": aarch64.make_torch(tmp_path / "torch")},
        cpu_targets=["aarch64"],
    )
    assert read(path).platform["machine"] == "aarch64"
    with pytest.raises(exc.IncompatibleArtifactError, match="compiled for aarch64, and this is x8"):
        inductor_ext.load(path)


@pytest.mark.parametrize(
    ("folder", "why"),
    [
        (None, r"libraries for aarch64 are not known.*`pip download torch=="),
        ({}, None),
        ({"version": f"{torch.__version__.partition('+')[0]}+cu130"}, None),
        ({"version": "1.0.0"}, r"contains torch 1\.0\.0, and this is"),
        ({"machine": 62}, "are not for aarch64"),
        ("empty", r"does not contain lib/libtorch_cpu\.so"),
    ],
)
def test_the_folder_of_torch_is_checked(
    folder: Any, why: str | None, commands: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    if isinstance(folder, dict):
        folder = aarch64.make_torch(tmp_path / "torch", **folder)
    elif folder is not None:
        folder = str(tmp_path / folder)
    values = settings.Settings(aot_cross_torch=folder)
    selected = targets.parse(None, ["x86-64-v3", "aarch64"])
    if why is None:
        targets.check(selected, {"cpu"}, {}, values)
        return
    with pytest.raises(exc.UnsupportedTargetError, match=why):
        targets.check(selected, {"cpu"}, {}, values)


def test_the_compiler_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_compile.shutil, "which", lambda name: None)
    with pytest.raises(exc.UnsupportedTargetError, match=r"g\+\+ is not installed"):
        targets.parse(None, ["aarch64"])


def test_what_an_aarch64_target_does_not_support(
    commands: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    values = settings.Settings(aot_cross_torch=aarch64.make_torch(tmp_path / "torch"))
    with pytest.raises(exc.UnsupportedTargetError, match="freezing does not support named targets"):
        targets.check(targets.parse(None, ["aarch64"]), {"cpu"}, {"freezing": True}, values)
    with pytest.raises(exc.UnsupportedTargetError, match="has host code for x86_64"):
        targets.parse(["sm_90"], ["aarch64"])


def test_folders_outside_of_torch_are_left_out() -> None:
    own = _compat.torch_folder()
    folders = [f"{own}/include", f"{sys.prefix}/include", "", f"{own}/lib"]
    assert cross_compile.move_folders(folders, pathlib.Path("/other")) == [
        "/other/include",
        "/other/lib",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not aarch64.is_available(), reason="needs tools and torch for aarch64")
@pytest.mark.parametrize("names", [["aarch64"], ["x86-64-v2", "aarch64"]])
def test_the_code_runs_under_qemu(program: Any, names: list[str], tmp_path: pathlib.Path) -> None:
    assert shutil.which(aarch64.COMPILER)
    path = tmp_path / "net.pt2"
    inductor_ext.aoti_compile_and_package(
        program,
        package_path=path,
        inductor_configs={
            "aot_cross_torch": aarch64.TORCH,
            "aot_self_test": True,
            "artifact_cache": False,
        },
        cpu_targets=names,
    )
    compared, difference = aarch64.run(CLIENT / "self_test.cpp", tmp_path, [str(path)]).split()
    assert int(compared) == 3
    assert float(difference) < 1e-3
