"""What `parts` finds: on machines made of scripts, folders and a driver of our own, and here.

The fakes stand at the borders that a probe looks across (PATH, environment variables, `sys.path`,
the CUDA driver's library), so that the whole of a probe runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inductor_ext import exc
from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes import common, cuda

VARIABLES = (
    "CC",
    "CONDA_EXE",
    "CUDACXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "TORCHINDUCTOR_CUTLASS_DIR",
    "TORCH_INDUCTOR_INSTALL_GXX",
)

NVCC_ANSWER = "echo 'Cuda compilation tools, release 12.6, V12.6.85'"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    components.clear()
    yield
    components.clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing on it: PATH is the empty folder <answer>/bin, no variable is set."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cuda, "_CUDA_HOME", str(tmp_path / "no-cuda"))
    # What this test process has imported must not count.
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    monkeypatch.delitem(sys.modules, "torch.utils.cpp_extension", raising=False)
    return tmp_path


@pytest.fixture
def site(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty site-packages folder in place of the real ones."""
    folder = machine / "site"
    folder.mkdir()
    # Packages may be installed elsewhere too, in a folder of PYTHONPATH.
    without_packages = [
        path for path in sys.path if path and not any(Path(path).glob("*.dist-info"))
    ]
    monkeypatch.setattr(sys, "path", [str(folder), *without_packages])
    for module in ("triton", "cutlass_library"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return folder


def script(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def distribution(site: Path, name: str, version: str, requires: str = "") -> None:
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    fields = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    fields += [f"Requires-Dist: {requires}"] if requires else []
    (folder / "METADATA").write_text("\n".join(fields) + "\n")


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Make it look as if a module with these attributes had been imported."""
    module = types.ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


class TestPart:
    def test_require_names_why_and_what_to_do(self, machine: Path) -> None:
        with pytest.raises(exc.MissingToolchainError) as raised:
            components.probe("cxx").require()
        assert raised.value.fields["part"] == "C++ compiler"
        assert raised.value.fields["why"] == "g++ is not found on PATH"
        assert "apt-get install g++" in raised.value.fields["install"]

    def test_require_is_content_with_what_is_there(self, machine: Path) -> None:
        script(machine / "bin" / "gcc", "echo gcc 1.2.3")
        assert components.probe("cc").require() is None

    def test_unknown_name(self) -> None:
        with pytest.raises(
            ValueError, match="unknown component 'gxx'; expected one of torch, cxx, "
        ):
            components.probe("gxx")

    def test_a_probe_that_breaks_is_an_answer(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(program: str) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(shutil, "which", broken)
        part = components.probe("cc")
        assert not part.available
        assert "PermissionError" in (part.why or "")

    def test_exactly_one_of_available_and_why(self) -> None:
        for name, part in components.probe_all().items():
            assert part.name == name
            assert part.available == (part.why is None) == (part.install is None)
            assert "failed with" not in (part.why or ""), "a probe broke on this machine"

    def test_texts_fit_the_sentences_they_are_put_into(self, machine: Path, site: Path) -> None:
        for part in components.probe_all().values():
            for text in filter(None, (part.why, part.install)):
                assert text == text.strip()
                assert not text.endswith(".")
                assert "\n" not in text


class TestCaching:
    @pytest.fixture
    def runs(self, machine: Path) -> Callable[[], int]:
        """How often the machine's g++ has run."""
        log = machine / "log"
        log.touch()
        script(machine / "bin" / "g++", f"echo run >> {log}; echo g++ 9.9")
        return lambda: len(log.read_text().splitlines())

    def test_asks_once(self, runs: Callable[[], int]) -> None:
        assert components.probe("cxx") is components.probe("cxx")
        assert runs() == 1

    def test_clear_forgets(self, runs: Callable[[], int]) -> None:
        components.probe("cxx")
        components.clear()
        components.probe("cxx")
        assert runs() == 2

    def test_an_environment_has_an_answer_of_its_own(
        self, runs: Callable[[], int], machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert components.probe("cxx").available
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("CXX", "nonsense")
            assert not components.probe("cxx").available
        assert components.probe("cxx").available
        assert runs() == 1


class TestCxx:
    def test_default(self, machine: Path) -> None:
        path = script(machine / "bin" / "g++", "echo 'g++ (Maker 1-2) 14.2.0'; echo Copyright")
        part = components.probe("cxx")
        assert (part.path, part.version) == (path, "g++ (Maker 1-2) 14.2.0")

    def test_cxx_names_another(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script(machine / "bin" / "g++", "echo g++ 9.9")
        path = script(machine / "other" / "clang++", "echo clang 18")
        monkeypatch.setenv("CXX", path)
        assert components.probe("cxx").path == path

    @pytest.mark.parametrize(
        ("cxx", "why"),
        [
            ("nonsense", "CXX names 'nonsense', which is not found on PATH"),
            ("/no/such/g++", "CXX names '/no/such/g++', which is not found"),
            (
                "ccache g++",
                "CXX names 'ccache g++', which is taken as the name of one program, ",
            ),
            ("fails", "CXX names 'fails', which --version exits with 3: no licence"),
            ("unreadable", "CXX names 'unreadable', which cannot be started "),
        ],
    )
    def test_cxx_that_does_not_work(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, why: str
    ) -> None:
        script(machine / "bin" / "ccache", "echo ccache 4")
        script(machine / "bin" / "g++", "echo g++ 9.9")
        script(machine / "bin" / "fails", "echo no licence >&2; exit 3")
        Path(script(machine / "bin" / "unreadable", "")).write_text("#!/no/such/interpreter\n")
        monkeypatch.setenv("CXX", cxx)
        assert (components.probe("cxx").why or "").startswith(why)

    def test_a_compiler_that_hangs(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(common, "TIMEOUT", 0.2)
        script(machine / "bin" / "g++", "exec /bin/sleep 20")
        assert "no output" in (components.probe("cxx").why or "")

    def test_inductors_setting_counts_once_it_is_loaded(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = script(machine / "elsewhere" / "g++", "echo g++ 9.9")
        monkeypatch.setenv("CXX", "nonsense")
        cpp = types.SimpleNamespace(cxx=(None, "also-nonsense", path))
        loaded(monkeypatch, "torch._inductor.config", cpp=cpp)
        assert components.probe("cxx").path == path

    def test_a_half_imported_inductor_config(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = script(machine / "bin" / "g++", "echo g++ 9.9")
        loaded(monkeypatch, "torch._inductor.config")
        assert components.probe("cxx").path == path

    @pytest.mark.skipif(sys.platform != "linux", reason="Inductor installs a compiler on Linux")
    def test_inductor_will_install_one(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        marker = machine / "conda-ran"
        monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
        assert "conda is not found" in (components.probe("cxx").why or "")
        monkeypatch.setenv("CONDA_EXE", script(machine / "conda", f"touch {marker}"))
        assert components.probe("cxx").available
        assert components.probe("openmp").available
        assert not marker.exists()

    @pytest.mark.parametrize("cxx", ["g++", "/no/such/g++", "ccache g++", "fails"])
    def test_agrees_with_inductor(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str
    ) -> None:
        from torch._inductor import config, cpp_builder
        from torch._inductor.exc import InvalidCxxCompiler

        for name, body in (("ccache", "echo 4"), ("g++", "echo g++ 9"), ("fails", "exit 3")):
            script(tmp_path / name, body)
        monkeypatch.setenv("PATH", str(tmp_path))
        with config.patch({"cpp.cxx": (None, cxx)}):
            cpp_builder.cpp_compiler_search.cache_clear()
            try:
                theirs: str | None = cpp_builder.get_cpp_compiler()
            except InvalidCxxCompiler:
                theirs = None
            finally:
                cpp_builder.cpp_compiler_search.cache_clear()
            assert components.probe("cxx").path == (theirs and shutil.which(theirs))


class TestOpenMP:
    def test_without_a_compiler(self, machine: Path) -> None:
        part = components.probe("openmp")
        assert part.why == "there is no C++ compiler (g++ is not found on PATH)"
        assert "apt-get install g++" in (part.install or "")

    @pytest.mark.skipif(sys.platform != "linux", reason="not checked on macOS")
    def test_a_compiler_that_cannot_link_it(self, machine: Path) -> None:
        body = (
            '[ "$1" = --version ] && { echo g++ 9.9; exit; }\n'
            "echo '<stdin>: In function f'; echo 'ld: error: cannot find -lgomp' >&2; exit 1"
        )
        path = script(machine / "bin" / "g++", body)
        part = components.probe("openmp")
        assert part.why == (
            f"{path} cannot build a shared library with OpenMP: ld: error: cannot find -lgomp"
        )
        assert "libgomp" in (part.install or "")

    @pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
    def test_this_machine(self) -> None:
        assert components.probe("openmp").available


class TestC:
    def test_gcc_before_clang_as_triton_does(self, machine: Path) -> None:
        clang = script(machine / "bin" / "clang", "echo clang 18")
        assert components.probe("cc").path == clang
        components.clear()
        gcc = script(machine / "bin" / "gcc", "echo gcc 14")
        assert components.probe("cc").path == gcc

    def test_cc_leaves_no_second_choice(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script(machine / "bin" / "gcc", "echo gcc 14")
        monkeypatch.setenv("CC", "nonsense")
        assert components.probe("cc").why == "CC names 'nonsense', which is not found on PATH"


class TestPythonHeaders:
    def test_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sysconfig.get_path", lambda name, **_: str(tmp_path))
        part = components.probe("python_headers")
        assert part.why == f"there is no Python.h in {tmp_path}"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert f"apt-get install python{version}-dev" in (part.install or "")
        (tmp_path / "Python.h").touch()
        components.clear()
        assert components.probe("python_headers").path == str(tmp_path / "Python.h")


class TestNvcc:
    def test_missing(self, machine: Path) -> None:
        part = components.probe("nvcc")
        assert (part.why or "").startswith("nvcc is not found on PATH")
        assert "apt-get install nvidia-cuda-toolkit" in (part.install or "")

    def test_order_of_search(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        homes = {name: machine / name.lower() for name in ("CUDA_HOME", "CUDA_PATH")}
        wanted = script(machine / "bin" / "nvcc", NVCC_ANSWER)
        assert components.probe("nvcc").path == wanted
        for variable in ("CUDA_PATH", "CUDA_HOME"):
            wanted = script(homes[variable] / "bin" / "nvcc", NVCC_ANSWER)
            monkeypatch.setenv(variable, str(homes[variable]))
            assert components.probe("nvcc").path == wanted
        wanted = script(machine / "own-nvcc", NVCC_ANSWER)
        monkeypatch.setenv("CUDACXX", wanted)
        assert components.probe("nvcc").path == wanted
        wanted = script(machine / "inductors-nvcc", NVCC_ANSWER)
        cuda = types.SimpleNamespace(cuda_cxx=wanted)
        loaded(monkeypatch, "torch._inductor.config", cuda=cuda)
        assert components.probe("nvcc").path == wanted
        assert components.probe("nvcc").version == "12.6.85"

    def test_an_empty_cuda_home_does_not_hide_the_one_on_path(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = script(machine / "bin" / "nvcc", NVCC_ANSWER)
        monkeypatch.setenv("CUDA_HOME", str(machine / "nowhere"))
        assert components.probe("nvcc").path == path

    def test_something_else_of_that_name(self, machine: Path) -> None:
        script(machine / "bin" / "nvcc", "echo I compile nothing")
        why = components.probe("nvcc").why or ""
        assert "the output of nvcc --version is not that of nvcc: I compile nothing" in why


@pytest.fixture(scope="session")
def torch_cpp_extension() -> types.ModuleType:
    """Imported before a test changes CUDA_HOME, because it keeps for good what it finds."""
    from torch.utils import cpp_extension

    return cpp_extension


class TestCudaHeaders:
    @pytest.fixture
    def toolkit(self, machine: Path) -> Callable[[str], str]:
        def make(name: str) -> str:
            include = machine / name / "include"
            include.mkdir(parents=True)
            (include / "cuda.h").touch()
            (include / "cuda_runtime_api.h").touch()
            return str(machine / name)

        return make

    def test_missing(self, machine: Path) -> None:
        part = components.probe("cuda_headers")
        assert "CUDA_HOME is not set, there is no nvcc on PATH" in (part.why or "")
        assert "set CUDA_HOME" in (part.install or "")

    @pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
    def test_from_the_environment(
        self, toolkit: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        root = toolkit("toolkit")
        monkeypatch.setenv(variable, root)
        part = components.probe("cuda_headers")
        assert (part.path, part.detail) == (os.path.join(root, "include"), variable)

    def test_an_nvcc_outside_its_toolkit_misleads_torch(
        self, toolkit: Callable[[str], str], machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A wrapper script in /usr/local/bin makes torch look for headers in /usr/local.
        monkeypatch.setattr(cuda, "_CUDA_HOME", toolkit("default"))
        assert components.probe("cuda_headers").available
        components.clear()
        nvcc = script(machine / "bin" / "nvcc", NVCC_ANSWER)
        assert components.probe("cuda_headers").why == (
            f"torch uses {machine} as the CUDA folder (the folder above that of {nvcc}), and its "
            "include folder has no cuda.h and no cuda_runtime_api.h"
        )

    @pytest.mark.parametrize("source", ["CUDA_HOME", "CUDA_PATH", "PATH"])
    def test_agrees_with_torch(
        self,
        torch_cpp_extension: types.ModuleType,
        toolkit: Callable[[str], str],
        machine: Path,
        monkeypatch: pytest.MonkeyPatch,
        source: str,
    ) -> None:
        root = toolkit("toolkit")
        script(machine / "toolkit" / "bin" / "nvcc", NVCC_ANSWER)
        monkeypatch.setenv(source, root + "/bin" if source == "PATH" else root)
        theirs = torch_cpp_extension._find_cuda_home()
        assert theirs == root
        assert components.probe("cuda_headers").path == os.path.join(theirs, "include")


class TestTriton:
    def install(self, site: Path, version: str = "3.6.0", *, library: bool = True) -> Path:
        package = site / "triton"
        (package / "_C").mkdir(parents=True)
        (package / "__init__.py").write_text("raise AssertionError('a probe imports nothing')")
        if library:
            (package / "_C" / "libtriton.so").touch()
        distribution(site, "triton", version)
        return package

    def test_missing(self, site: Path) -> None:
        part = components.probe("triton")
        assert (part.available, part.install) == (False, "pip install triton")

    def test_missing_and_torch_asks_for_a_release(self, site: Path) -> None:
        distribution(site, "torch", "2.11.0", 'triton==3.6.0; platform_system == "Linux"')
        assert components.probe("triton").install == "pip install triton==3.6.0"

    def test_there(self, site: Path) -> None:
        package = self.install(site)
        part = components.probe("triton")
        assert (part.available, part.version, part.path) == (True, "3.6.0", str(package))
        assert part.detail is None
        assert "triton" not in sys.modules

    def test_another_release_than_torch_asks_for(self, site: Path) -> None:
        self.install(site, "3.5.1")
        distribution(site, "torch", "2.11.0", 'triton==3.6.0; platform_system == "Linux"')
        part = components.probe("triton")
        assert (part.available, part.detail) == (True, "this torch requires 3.6.0")

    @pytest.mark.parametrize(
        ("version", "fits"),
        [("3.8.0", True), ("3.8.2+git1", True), ("3.7.1", False), ("3.9.0", False)],
    )
    def test_a_compatible_release(self, site: Path, version: str, fits: bool) -> None:
        """torch 2.14 requires its Triton by `~=`."""
        self.install(site, version)
        requirement = 'triton~=3.8.0; platform_system == "Linux" and python_version < "3.15"'
        distribution(site, "torch", "2.14.1", requirement)
        assert components.probe("triton").detail == (
            None if fits else "this torch requires ~=3.8.0"
        )

    def test_missing_and_torch_asks_for_a_compatible_release(self, site: Path) -> None:
        distribution(site, "torch", "2.14.1", 'triton~=3.8.0; platform_system == "Linux"')
        assert components.probe("triton").install == "pip install triton~=3.8.0"

    def test_for_another_python(self, site: Path) -> None:
        package = self.install(site, library=False)
        (package / "_C" / "libtriton.cpython-27-mips.so").touch()
        part = components.probe("triton")
        assert part.why == f"{package / '_C'} has no libtriton that this Python can load"
        assert part.install == "pip install --force-reinstall triton"

    def test_a_folder_of_that_name_is_not_triton(self, site: Path) -> None:
        (site / "triton").mkdir()
        assert not components.probe("triton").available


class TestCutlass:
    def headers(self, root: Path) -> None:
        (root / "include" / "cutlass").mkdir(parents=True)
        (root / "include" / "cutlass" / "cutlass.h").touch()

    def install(self, site: Path) -> Path:
        package = site / "cutlass_library"
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('a probe imports nothing')")
        distribution(site, "nvidia-cutlass", "4.2.0.0")
        return package / "source"

    def test_missing(self, site: Path) -> None:
        part = components.probe("cutlass")
        assert "nvidia-cutlass is not installed" in (part.why or "")
        assert part.install == "pip install nvidia-cutlass==4.2.0.0"

    def test_the_package(self, site: Path) -> None:
        root = self.install(site)
        self.headers(root)
        part = components.probe("cutlass")
        assert (part.version, part.path) == ("4.2.0.0", str(root))

    def test_the_package_without_its_sources(self, site: Path) -> None:
        root = self.install(site)
        part = components.probe("cutlass")
        assert (part.why or "").startswith(f"{root} ")
        assert part.install == "pip install --force-reinstall nvidia-cutlass==4.2.0.0"

    def test_a_checkout_has_precedence(
        self, site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        self.headers(self.install(site))
        monkeypatch.setenv("TORCHINDUCTOR_CUTLASS_DIR", str(tmp_path / "checkout"))
        assert "TORCHINDUCTOR_CUTLASS_DIR" in (components.probe("cutlass").install or "")
        components.clear()
        self.headers(tmp_path / "checkout")
        assert components.probe("cutlass").path == str(tmp_path / "checkout")


class TestTorch:
    def test_this_one(self) -> None:
        import torch

        part = components.probe("torch")
        assert part.version == torch.__version__
        assert part.path == str(Path(torch.__file__).parent)
        built = f"built with CUDA {torch.version.cuda}"
        assert part.detail == (built if torch.version.cuda else "built without CUDA")

    def test_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        part = components.probe("torch")
        assert part.why == "it is not installed for this Python"
        assert part.install == 'pip install "torch>=2.11,<2.16"'
        assert components.probe("cuda").install == part.install

    def test_broken(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (site / "torch").mkdir()
        (site / "torch" / "__init__.py").write_text("raise OSError('libcudart.so: no such file')")
        distribution(site, "torch", "2.12.1")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        part = components.probe("torch")
        assert part.why == "importing it fails with OSError: libcudart.so: no such file"
        assert part.version == "2.12.1"
        assert (part.install or "").startswith("pip install --force-reinstall")


DRIVER_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char *name) { return atoi(getenv(name)); }
int cuDriverGetVersion(int *version) { *version = number("FAKE_VERSION"); return 0; }
int cuInit(unsigned flags) { return number("FAKE_INIT"); }
int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 802 ? "CUDA_ERROR_SYSTEM_NOT_READY" : 0;
    return 0;
}
int cuDeviceGetCount(int *count) { *count = number("FAKE_COUNT"); return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strcpy(name, device == 40 ? "Fake GPU" : "Other GPU"); return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int capability = number("FAKE_CAPABILITY");
    *value = attribute == 75 ? capability / 10 : capability % 10;
    return 0;
}
"""
"""All that a probe may call: a call for a context, or any other, would not find its symbol."""


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build a driver with")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER_SOURCE)
    command = [compiler, "-shared", "-fPIC", "driver.c", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=folder, check=True)
    return str(folder / "libcuda.so.1")


class TestCuda:
    @pytest.fixture
    def gpu(self, driver_library: str, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
        """One usable device, and a torch that is built for CUDA 13.0."""
        import torch

        monkeypatch.setattr(cuda, "_CUDA_DRIVER", driver_library)
        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in (("VERSION", 13000), ("INIT", 0), ("COUNT", 1), ("CAPABILITY", 90)):
            monkeypatch.setenv(f"FAKE_{name}", str(value))
        return monkeypatch

    def test_one_device(self, gpu: pytest.MonkeyPatch) -> None:
        part = components.probe("cuda")
        assert (part.available, part.version) == (True, "13.0")
        assert part.detail == "Fake GPU (compute capability 9.0); driver for CUDA up to 13.0"

    def test_devices(self, gpu: pytest.MonkeyPatch) -> None:
        gpu.setenv("FAKE_COUNT", "2")
        assert cuda.cuda_devices() == (
            cuda.CudaDevice(0, "Fake GPU", (9, 0), 80 << 30),
            cuda.CudaDevice(1, "Other GPU", (9, 0), 80 << 30),
        )

    def test_torch_without_cuda(self, gpu: pytest.MonkeyPatch) -> None:
        import torch

        gpu.setattr(torch.version, "cuda", None)
        gpu.setattr(torch.version, "hip", None)
        gpu.setattr(torch, "__version__", "2.13.0+cpu")
        part = components.probe("cuda")
        assert part.why == "torch 2.13.0+cpu is built without CUDA"
        assert "pip install --force-reinstall torch==2.13.0 " in (part.install or "")

    def test_torch_for_rocm(self, gpu: pytest.MonkeyPatch) -> None:
        import torch

        gpu.setattr(torch.version, "cuda", None)
        gpu.setattr(torch.version, "hip", "6.4")
        assert components.probe("cuda").why == "torch 2.13.0+cu130 is built with ROCm 6.4"

    def test_no_driver(self, gpu: pytest.MonkeyPatch) -> None:
        gpu.setattr(cuda, "_CUDA_DRIVER", "libno-such-driver.so.1")
        part = components.probe("cuda")
        assert "there is no NVIDIA driver" in (part.why or "")
        assert "--gpus all" in (part.install or "")
        assert cuda.cuda_devices() == ()

    def test_driver_too_old(self, gpu: pytest.MonkeyPatch) -> None:
        gpu.setenv("FAKE_VERSION", "12040")
        part = components.probe("cuda")
        assert part.why == (
            "the driver is too old: it supports CUDA up to 12.4, and torch 2.13.0+cu130 needs "
            "CUDA 13.0"
        )

    def test_a_driver_of_the_same_major_release_will_do(self, gpu: pytest.MonkeyPatch) -> None:
        import torch

        gpu.setattr(torch.version, "cuda", "13.2")
        assert components.probe("cuda").available

    @pytest.mark.parametrize(("init", "count"), [("100", "1"), ("0", "0")])
    def test_no_device(self, gpu: pytest.MonkeyPatch, init: str, count: str) -> None:
        gpu.setenv("FAKE_INIT", init)
        gpu.setenv("FAKE_COUNT", count)
        assert components.probe("cuda").why == "the NVIDIA driver shows no device"
        gpu.setenv("CUDA_VISIBLE_DEVICES", "")
        part = components.probe("cuda")
        assert part.why == "the NVIDIA driver shows no device, with CUDA_VISIBLE_DEVICES=''"
        assert "unset CUDA_VISIBLE_DEVICES" in (part.install or "")

    @pytest.mark.parametrize(
        ("code", "name"), [("802", "CUDA_ERROR_SYSTEM_NOT_READY"), ("999", "error 999")]
    )
    def test_the_driver_does_not_start(self, gpu: pytest.MonkeyPatch, code: str, name: str) -> None:
        gpu.setenv("FAKE_INIT", code)
        assert components.probe("cuda").why == f"the NVIDIA driver cannot be initialized: {name}"

    def test_a_device_too_old_for_triton(self, gpu: pytest.MonkeyPatch) -> None:
        gpu.setenv("FAKE_CAPABILITY", "61")
        part = components.probe("cuda")
        assert "7.0 or higher, and there is Fake GPU (compute capability 6.1)" in (part.why or "")

    def test_torch_cannot_use_what_the_driver_shows(self, gpu: pytest.MonkeyPatch) -> None:
        import warnings

        import torch

        def refuse() -> bool:
            warnings.warn("CUDA initialization: it is Monday", stacklevel=2)
            return False

        gpu.setattr(torch.cuda, "is_available", refuse)
        why = components.probe("cuda").why or ""
        assert why.endswith("but torch cannot use it: CUDA initialization: it is Monday")

    @pytest.mark.gpu
    def test_this_machine(self) -> None:
        import torch

        assert components.probe("cuda").available
        shown = cuda.cuda_devices()
        assert len(shown) == torch.cuda.device_count()
        for device in shown:
            properties = torch.cuda.get_device_properties(device.index)
            assert device.name == properties.name
            assert device.capability == (properties.major, properties.minor)
            assert device.memory_bytes == pytest.approx(properties.total_memory, rel=0.02)


class TestFeatures:
    @pytest.fixture
    def lacking(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., dict[str, components.Feature]]:
        """The features of a machine that has every part but the named ones."""

        def look(*missing: str) -> dict[str, components.Feature]:
            def probe(name: str) -> components.Component:
                gone = name in missing
                why, install = (f"no {name}", f"install {name}") if gone else (None, None)
                return components.Component(name, name.upper(), not gone, why=why, install=install)

            monkeypatch.setattr(components, "probe", probe)
            return {feature.name: feature for feature in components.features()}

        return look

    def test_all_there(self, lacking: Callable[..., dict[str, components.Feature]]) -> None:
        for feature in lacking().values():
            assert feature.available
            assert (feature.missing, feature.why, feature.install) == ((), None, None)

    @pytest.mark.parametrize(
        ("part", "lost"),
        [
            (
                "torch",
                {
                    "cpu",
                    "cuda",
                    "triton-gemm",
                    "cutlass-gemm",
                    "aot-cpu",
                    "aot-cuda",
                    "aot-cuda-portable",
                    "aot-load",
                },
            ),
            ("cxx", {"cpu", "aot-cpu", "aot-cuda", "aot-cuda-portable", "cutlass-gemm"}),
            (
                "triton",
                {"cuda", "triton-gemm", "cutlass-gemm", "aot-cuda", "aot-cuda-portable"},
            ),
            ("cuda", {"cuda", "triton-gemm", "cutlass-gemm", "aot-cuda", "aot-cuda-portable"}),
            ("cc", {"cuda", "triton-gemm", "cutlass-gemm", "aot-cuda", "aot-cuda-portable"}),
            ("nvcc", {"cutlass-gemm", "aot-cuda-portable"}),
            ("cutlass", {"cutlass-gemm"}),
            ("cuda_headers", {"cutlass-gemm", "aot-cuda", "aot-cuda-portable"}),
        ],
    )
    def test_what_a_missing_part_costs(
        self, lacking: Callable[..., dict[str, components.Feature]], part: str, lost: set[str]
    ) -> None:
        features = lacking(part)
        assert {name for name, feature in features.items() if not feature.available} == lost
        for name in lost:
            assert features[name].missing == (part,)
            assert features[name].why == f"{part.upper()}: no {part}"
            assert features[name].install == f"install {part}"

    def test_needs_are_parts(self) -> None:
        for feature in components.features():
            assert set(feature.needs) <= set(components.names())
            assert len(set(feature.needs)) == len(feature.needs)

    def test_one_remedy_for_two_parts_is_said_once(self, machine: Path) -> None:
        (cpu,) = (feature for feature in components.features() if feature.name == "cpu")
        assert {"cxx", "openmp"} <= set(cpu.missing)
        assert (cpu.install or "").count("apt-get install g++") == 1


def test_probing_leaves_nothing_behind(tmp_path: Path) -> None:
    """In a process of its own: no output, no file, no variable, no Inductor, no Triton."""
    folders = {name: tmp_path / name for name in ("HOME", "TMPDIR", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    program = """
import json, os, sys
before = dict(os.environ)
from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes.cuda import cuda_devices
assert "torch" not in sys.modules
components.probe_all()
components.features()
cuda_devices()
loaded = [name for name in ("torch._inductor", "triton", "cutlass_library") if name in sys.modules]
changed = sorted(set(before.items()) ^ set(os.environ.items()))
context = sys.modules["torch"].cuda.is_initialized()
json.dump({"loaded": loaded, "changed": changed, "context": context}, sys.stdout)
"""
    environment = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    environment |= {"HOME": str(folders["HOME"]), "TMPDIR": str(folders["TMPDIR"])}
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=folders["cwd"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"loaded": [], "changed": [], "context": False}
    made = {path.name for folder in folders.values() for path in folder.rglob("*")}
    assert made <= {".nv", "ComputeCache"}, "more than the CUDA driver makes wherever it starts"
