"""AOT packages of the extension's and torch's functions, loaded by torch's loaders."""

from __future__ import annotations

import errno
import io
import json
import os
import pathlib
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
from test.support import aot_util


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


def header_of(package: str, folder: pathlib.Path) -> pathlib.Path:
    """The C header of a package, extracted to a folder."""
    with zipfile.ZipFile(package) as file:
        (name,) = [name for name in file.namelist() if name.endswith("/model.h")]
        (folder / "model.h").write_bytes(file.read(name))
    return folder


def check_program(net: Net, program: pathlib.Path, package: str) -> None:
    done = subprocess.run([program, package], capture_output=True, text=True, check=True)
    sums = [output.sum().item() for output in net(torch.ones(5, 8))]
    assert [float(line) for line in done.stdout.split()] == pytest.approx(sums, rel=1e-4)


@pytest.mark.slow
def test_a_cpp_program_loads_it(net: Net, package: tuple[str, Any], tmp_path: pathlib.Path) -> None:
    from torch.utils import cpp_extension

    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    folders = [*cpp_extension.include_paths(), header_of(package[0], tmp_path)]
    libraries = cpp_extension.library_paths()
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O0"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-I{path}" for path in folders)]
    command += [str(EXAMPLE / "main.cpp"), "-o", str(tmp_path / "main")]
    command += [flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
    check_program(net, tmp_path / "main", package[0])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_a_cmake_project_loads_it(
    net: Net, package: tuple[str, Any], tmp_path: pathlib.Path
) -> None:
    build = tmp_path / "build"
    configure = ["cmake", "-S", str(EXAMPLE), "-B", str(build), "-DCMAKE_BUILD_TYPE=Debug"]
    configure += [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"]
    configure += [f"-DMODEL_HEADERS={header_of(package[0], tmp_path)}"]
    done = subprocess.run(configure, capture_output=True, text=True)
    if "PyTorch: CUDA cannot be found" in done.stderr:
        # torch's own CMake files require it, whatever device the project uses.
        pytest.skip(f"no complete CUDA toolkit, and torch {torch.__version__} is built for CUDA")
    assert done.returncode == 0, done.stderr
    subprocess.run(["cmake", "--build", str(build)], check=True, capture_output=True)
    check_program(net, build / "run_model", package[0])


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no CMake")
def test_the_cmake_project_says_that_it_needs_the_header(tmp_path: pathlib.Path) -> None:
    configure = ["cmake", "-S", str(EXAMPLE), "-B", str(tmp_path)]
    done = subprocess.run(configure, capture_output=True, text=True)
    assert done.returncode != 0
    assert "unzip -j model.pt2 '*/model.h'" in " ".join(done.stderr.split())


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


def test_disabled_means_inductor(
    program: ExportedProgram, tmp_path: pathlib.Path, net: Net
) -> None:
    path = str(tmp_path / "net.pt2")
    with events.capture(CompileRecord) as records:
        inductor_ext.aoti_compile_and_package(
            program, package_path=path, inductor_configs={"enabled": False}
        )
    assert records == []
    if not aot_util.crashes_at_load(path):
        check(net, torch._inductor.aoti_load_package(path))


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
