"""Probes of nvcc, CUDA's headers and the CUDA devices."""

from __future__ import annotations

import os
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes import cuda
from test.support.fake_toolchain import NVCC_ANSWER, fake_import, write_script


class TestNvcc:
    def test_missing(self, machine: Path) -> None:
        part = components.probe("nvcc")
        assert (part.why or "").startswith("nvcc is not found on PATH")
        assert "apt-get install nvidia-cuda-toolkit" in (part.install or "")

    def test_order_of_search(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        homes = {name: machine / name.lower() for name in ("CUDA_HOME", "CUDA_PATH")}
        nvcc = write_script(machine / "bin" / "nvcc", NVCC_ANSWER)
        assert components.probe("nvcc").path == nvcc
        for variable in ("CUDA_PATH", "CUDA_HOME"):
            nvcc = write_script(homes[variable] / "bin" / "nvcc", NVCC_ANSWER)
            monkeypatch.setenv(variable, str(homes[variable]))
            assert components.probe("nvcc").path == nvcc
        nvcc = write_script(machine / "own-nvcc", NVCC_ANSWER)
        monkeypatch.setenv("CUDACXX", nvcc)
        assert components.probe("nvcc").path == nvcc
        nvcc = write_script(machine / "inductors-nvcc", NVCC_ANSWER)
        cuda = types.SimpleNamespace(cuda_cxx=nvcc)
        fake_import(monkeypatch, "torch._inductor.config", cuda=cuda)
        assert components.probe("nvcc").path == nvcc
        assert components.probe("nvcc").version == "12.6.85"

    def test_an_empty_cuda_home_does_not_hide_the_one_on_path(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_script(machine / "bin" / "nvcc", NVCC_ANSWER)
        monkeypatch.setenv("CUDA_HOME", str(machine / "nowhere"))
        assert components.probe("nvcc").path == path

    def test_another_program_of_that_name(self, machine: Path) -> None:
        write_script(machine / "bin" / "nvcc", "echo I compile nothing")
        why = components.probe("nvcc").why or ""
        assert "the output of nvcc --version is not that of nvcc: I compile nothing" in why


@pytest.fixture(scope="session")
def torch_cpp_extension() -> types.ModuleType:
    """Imported before a test changes CUDA_HOME, because it caches the result."""
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
        monkeypatch.setattr(cuda, "DEFAULT_CUDA_HOME", toolkit("default"))
        assert components.probe("cuda_headers").available
        components.clear()
        nvcc = write_script(machine / "bin" / "nvcc", NVCC_ANSWER)
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
        write_script(machine / "toolkit" / "bin" / "nvcc", NVCC_ANSWER)
        monkeypatch.setenv(source, root + "/bin" if source == "PATH" else root)
        theirs = torch_cpp_extension._find_cuda_home()
        assert theirs == root
        assert components.probe("cuda_headers").path == os.path.join(theirs, "include")


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
"""All functions that a probe may call; others, such as creating a context, have no symbol."""


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

        monkeypatch.setattr(cuda, "CUDA_DRIVER", driver_library)
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
        gpu.setattr(cuda, "CUDA_DRIVER", "libno-such-driver.so.1")
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

    def test_a_driver_of_the_same_major_release_is_enough(self, gpu: pytest.MonkeyPatch) -> None:
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

    def test_torch_cannot_use_a_device_of_the_driver(self, gpu: pytest.MonkeyPatch) -> None:
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
