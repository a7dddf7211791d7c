"""AOT packages of the extension's and torch's functions, loaded by torch's loaders."""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from typing import IO, Any

import pytest
import torch
import torch._inductor
from torch.export import Dim, ExportedProgram

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.cpp_wrapper.package import output_path
from inductor_ext.cpp_wrapper.package import write_package as packaging
from inductor_ext.cpp_wrapper.records import PackageRecord
from inductor_ext.hooks import activate
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.toolchain import components
from test.support import aot_util, cpp_client


class Net(torch.nn.Module):
    """A linear layer, an activation, a buffer and a dynamic batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.nn.functional.gelu(self.linear(x))
        return y * self.scale, y.sum(-1)


@pytest.fixture(scope="module")
def net() -> Net:
    return Net().eval()


@pytest.fixture(scope="module")
def program(net: Net) -> ExportedProgram:
    batch = Dim("batch", min=2, max=64)
    return torch.export.export(net, (torch.randn(3, 8),), dynamic_shapes=({0: batch},))


EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def package(program: ExportedProgram, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A package of the extension's function, and the records of its compile."""
    path = tmp_path_factory.mktemp("aot") / "net.pt2"
    configs = {"fallback_to_eager": False, "aot_inductor.use_runtime_constant_folding": False}
    configs_before = dict(configs)
    with events.capture(CompileRecord, PackageRecord) as records:
        result = inductor_ext.aoti_compile_and_package(
            program, package_path=path, inductor_configs=configs
        )
    assert result == str(path)
    assert configs == configs_before
    return str(path), records


def check(net: Net, run: Callable[..., Any]) -> None:
    """Compare with eager on fresh inputs of several batch sizes."""
    for batch in (2, 5, 64):
        x = torch.randn(batch, 8)
        torch.testing.assert_close(tuple(run(x)), net(x))


def test_inductor_loader_loads_it(net: Net, package: tuple[str, Any]) -> None:
    check(net, torch._inductor.aoti_load_package(package[0]))


def test_inductor_cpp_loader_binding_loads_it(net: Net, package: tuple[str, Any]) -> None:
    loader = torch._C._aoti.AOTIModelPackageLoader(package[0], "model", False, 1, -1)
    check(net, lambda x: loader.run([x]))


def check_program(net: Net, program: pathlib.Path, package: str) -> None:
    """Check what the example prints: sums of the results, before and after its weights change."""
    done = subprocess.run([program, package], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "input x: float32 [batch, 8] on cpu",
        "output [0]: float32 [batch, 4] on cpu",
        "output [1]: float32 [batch] on cpu",
        "batch: 2 to 64",
    ]
    doubled = copy.deepcopy(net)
    for tensor in doubled.state_dict().values():
        tensor.mul_(2)
    for line, what, model in (
        (lines[4], "sums", net),
        (lines[6], "with doubled weights", doubled),
    ):
        label, _, sums = line.partition(":")
        expected = [output.sum().item() for output in model(torch.ones(5, 8))]
        assert label == what
        assert [float(value) for value in sums.split()] == pytest.approx(expected, rel=1e-4)
    assert lines[5] == "refused: input 'x': dimension 1 is 7, but the model takes 8."
    assert lines[7:] == ["calls of 4 threads with the same result: 400"]


@pytest.mark.slow
def test_a_cpp_program_loads_it(net: Net, package: tuple[str, Any], tmp_path: pathlib.Path) -> None:
    program = cpp_client.build(EXAMPLE / "main.cpp", tmp_path / "main", "-O0")
    check_program(net, program, package[0])
    done = subprocess.run([program, "missing.pt2"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error 1: There is no package at ")


def configure(build: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    prefixes = f"{inductor_ext.cmake_prefix_path()};{torch.utils.cmake_prefix_path}"
    command = ["cmake", "-S", str(EXAMPLE), "-B", str(build), "-DCMAKE_BUILD_TYPE=Debug"]
    command += [f"-DCMAKE_PREFIX_PATH={prefixes}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if "PyTorch: CUDA cannot be found" in done.stderr:
        # torch's own CMake files require it, whatever device the project uses.
        pytest.skip(f"no complete CUDA toolkit, and torch {torch.__version__} is built for CUDA")
    return done


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_a_cmake_project_loads_it(
    net: Net, package: tuple[str, Any], tmp_path: pathlib.Path
) -> None:
    build = tmp_path / "build"
    done = configure(build)
    assert done.returncode == 0, done.stderr
    subprocess.run(["cmake", "--build", str(build)], check=True, capture_output=True)
    check_program(net, build / "run_model", package[0])


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_cmake_knows_the_version(tmp_path: pathlib.Path) -> None:
    """A project can require a version; another minor version is refused."""
    text = (EXAMPLE / "CMakeLists.txt").read_text()
    major, minor, _ = inductor_ext.__version__.split(".")
    versions = {
        f"{major}.{minor}": True,
        inductor_ext.__version__: True,
        f"{major}.{int(minor) + 1}": False,
    }
    script = ["cmake_minimum_required(VERSION 3.18)", "project(versions LANGUAGES NONE)"]
    for version in versions:
        # A target of this name keeps the configuration from looking for Torch.
        script += [
            f"find_package(inductor_ext {version} QUIET)",
            f'message(STATUS "{version} is ${{inductor_ext_FOUND}}")',
            "unset(inductor_ext_DIR CACHE)",
        ]
    script.insert(2, "add_library(torch INTERFACE IMPORTED)")
    (tmp_path / "CMakeLists.txt").write_text("\n".join(script))
    command = ["cmake", "-S", str(tmp_path), "-B", str(tmp_path / "build")]
    command += [f"-DCMAKE_PREFIX_PATH={inductor_ext.cmake_prefix_path()}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"-- (\S+) is (\d)", done.stdout))
    assert {version: found[version] == "1" for version in versions} == versions
    assert "find_package(inductor_ext REQUIRED)" in text


def test_records_describe_the_package(package: tuple[str, Any]) -> None:
    path, records = package
    compiled, packaged = records
    assert (compiled.kind, compiled.settings) == ("aot", {"fallback_to_eager": False})
    assert (packaged.path, packaged.bytes) == (path, os.path.getsize(path))


def test_manifest_names_the_compiler(package: tuple[str, Any]) -> None:
    """gcc answers Inductor's `-v` with its configuration."""
    with zipfile.ZipFile(package[0]) as archive:
        versions = json.loads(archive.read("net/extra/inductor_ext/manifest.json"))["versions"]
    version = subprocess.check_output([components.probe("cxx").path, "--version"], text=True)
    assert versions["compiler"] == version.splitlines()[0]


def test_package_is_named_after_its_path(package: tuple[str, Any]) -> None:
    """The name is torch's; a package published under another name would contain that one."""
    with zipfile.ZipFile(package[0]) as archive:
        roots = {name.split("/")[0] for name in archive.namelist()}
    assert roots == {"net"}


def test_no_temporary_files_remain(package: tuple[str, Any]) -> None:
    assert os.listdir(os.path.dirname(package[0])) == ["net.pt2"]


def test_inductor_function_inside_an_activation(
    net: Net, program: ExportedProgram, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "net.pt2")
    with events.capture(CompileRecord) as records, inductor_ext.activate():
        assert torch._inductor.aoti_compile_and_package(program, package_path=path) == path
    assert [record.kind for record in records] == ["aot"]
    check(net, torch._inductor.aoti_load_package(path))


def test_inductor_function_after_install_and_into_a_buffer(
    net: Net, program: ExportedProgram
) -> None:
    buffer = io.BytesIO()
    inductor_ext.install()
    try:
        with events.capture(CompileRecord) as records:
            torch._inductor.aoti_compile_and_package(program, package_path=buffer)
    finally:
        inductor_ext.uninstall()
    assert [record.kind for record in records] == ["aot"]
    buffer.seek(0)
    check(net, torch._inductor.aoti_load_package(buffer))


def test_disabled_means_inductor(tmp_path: pathlib.Path) -> None:
    # Inductor takes long to compile a package.
    net = torch.nn.Linear(8, 4)
    x = torch.randn(3, 8)
    program = torch.export.export(net, (x,))
    path = str(tmp_path / "net.pt2")
    with events.capture(CompileRecord) as records:
        inductor_ext.aoti_compile_and_package(
            program, package_path=path, inductor_configs={"enabled": False}
        )
    assert records == []
    if not aot_util.crashes_at_load(path):
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), net(x))


class TestRefusals:
    """Each before any compile, without touching the disk or Inductor."""

    @pytest.fixture(autouse=True)
    def no_compile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("compiled although the input is bad")

        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)

    @pytest.mark.parametrize("wrong", [torch.nn.Linear(2, 2), None, "model.pt2"])
    def test_not_a_program(self, wrong: Any) -> None:
        with pytest.raises(exc.NotAnExportedProgramError, match=r"torch\.export\.export"):
            inductor_ext.aoti_compile_and_package(wrong)

    def test_wrong_suffix(self, program: ExportedProgram, tmp_path: pathlib.Path) -> None:
        with pytest.raises(exc.BadPackagePathError, match=r"does not end in \.pt2"):
            inductor_ext.aoti_compile_and_package(program, package_path=tmp_path / "net.so")

    def test_absent_folder(self, program: ExportedProgram, tmp_path: pathlib.Path) -> None:
        with pytest.raises(exc.BadPackagePathError, match="does not exist"):
            inductor_ext.aoti_compile_and_package(program, package_path=tmp_path / "a" / "n.pt2")
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_as_path(self, program: ExportedProgram, tmp_path: pathlib.Path) -> None:
        (tmp_path / "net.pt2").mkdir()
        with pytest.raises(exc.BadPackagePathError, match="it is a folder"):
            inductor_ext.aoti_compile_and_package(program, package_path=tmp_path / "net.pt2")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_unwritable_folder(self, program: ExportedProgram, tmp_path: pathlib.Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(exc.BadPackagePathError, match="not writable"):
            inductor_ext.aoti_compile_and_package(program, package_path=tmp_path / "net.pt2")

    def test_disk_that_is_full(self, tmp_path: pathlib.Path) -> None:
        """Errors that occur only when the package is written are classes of the extension, too."""

        def second_half() -> bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        path = str(tmp_path / "net.pt2")
        with (
            pytest.raises(exc.BadPackagePathError, match=r"net\.pt2': No space left on device"),
            output_path.open_for_writing(path) as file,
        ):
            file.writelines(half() for half in (lambda: b"the first", second_half))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("wrong", [3, io.StringIO, b"net.pt2"])
    def test_neither_path_nor_buffer(self, program: ExportedProgram, wrong: Any) -> None:
        with pytest.raises(exc.BadPackagePathError):
            inductor_ext.aoti_compile_and_package(program, package_path=wrong)

    @pytest.mark.parametrize(
        ("configs", "error"),
        [
            ({"max_autotun": True}, exc.UnknownOptionError),
            ({"aot_inductor.package": 1}, exc.BadOptionError),
            ({"event_log": 1}, exc.BadOptionError),
        ],
    )
    def test_options(
        self, program: ExportedProgram, configs: dict[str, Any], error: type[Exception]
    ) -> None:
        with pytest.raises(error):
            inductor_ext.aoti_compile_and_package(program, inductor_configs=configs)

    def test_no_cpp_compiler(
        self, program: ExportedProgram, no_compiler: None, tmp_path: pathlib.Path
    ) -> None:
        with pytest.raises(exc.MissingToolchainError, match="is not found on PATH"):
            inductor_ext.aoti_compile_and_package(program, package_path=tmp_path / "n.pt2")
        assert list(tmp_path.iterdir()) == []


def test_a_failed_compile_leaves_the_old_package(
    program: ExportedProgram, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: IO[bytes], *args: Any, **kwargs: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(packaging, "write_package", fail)
    path = tmp_path / "net.pt2"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        inductor_ext.aoti_compile_and_package(program, package_path=path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    assert activate.requested() is None


@pytest.mark.skipif(
    not hasattr(torch.compiler.config, "compile_on_one_rank"),
    reason="this torch has no such option",
)
def test_compile_on_one_rank_is_refused_as_by_inductor(tmp_path: pathlib.Path) -> None:
    """A package from the cache would be another rank's."""
    program = torch.export.export(Net().eval(), (torch.randn(2, 8),))
    path = tmp_path / "net.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=str(path))
    path.unlink()
    with (
        torch.compiler.config.patch(compile_on_one_rank=True),
        pytest.raises(RuntimeError, match="compile-on-one-rank"),
    ):
        inductor_ext.aoti_compile_and_package(program, package_path=str(path))
    assert not path.exists()
