"""The probes for CUDA: devices that torch can use, nvcc, and the C headers of the toolkit."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import re
import shutil
import warnings
from typing import TYPE_CHECKING

from inductor_ext.toolchain.probes.common import (
    Finding,
    Probe,
    find_program,
    first_line,
    loaded_attribute,
    package_folder,
    read_environment,
)

if TYPE_CHECKING:
    from inductor_ext.toolchain.components import Component

_LOWEST_CAPABILITY = (7, 0)
"""Inductor refuses to compile Triton kernels for older devices."""

CUDA_DRIVER = "libcuda.so.1"

DEFAULT_CUDA_HOME = "/usr/local/cuda"
"""Where torch looks for a CUDA toolkit if nothing else names one."""


@dataclasses.dataclass(frozen=True)
class CudaDevice:
    """A device that the CUDA driver shows to this process."""

    index: int
    """As in `torch.device("cuda", index)`."""
    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class _Driver:
    """Answers of the CUDA driver to queries that need no context."""

    error: str | None = None
    """The name of the error with which initialization failed; None if it succeeded."""
    loaded: bool = True
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA version that the driver supports."""
    devices: tuple[CudaDevice, ...] = ()


def _query_driver(library: str) -> _Driver:
    # Use the driver API, because torch.cuda creates a context to query the name of a device, and
    # NVML knows neither CUDA_VISIBLE_DEVICES nor CUDA's device order.
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return _Driver(loaded=False)
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    cuda = (version.value // 1000, version.value % 1000 // 10)
    code = driver.cuInit(0)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        return _Driver(error=(text.value or b"error %d" % code).decode(), cuda=cuda)
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    devices = tuple(_describe_device(driver, index) for index in range(count.value))
    return _Driver(cuda=cuda, devices=devices)


def _describe_device(driver: ctypes.CDLL, index: int) -> CudaDevice:
    capability_attributes = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    device, value, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in capability_attributes:
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return CudaDevice(index, name.value.decode(), (capability[0], capability[1]), memory.value)


def cuda_devices() -> tuple[CudaDevice, ...]:
    """Return the devices that the CUDA driver shows to this process, usable by torch or not."""
    return _query_driver(CUDA_DRIVER).devices


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _examine_cuda(torch_component: Component, visible: str | None) -> Finding:
    if not torch_component.available:
        why = f"torch is missing ({torch_component.why})"
        return Finding(why=why, install=torch_component.install)
    import torch

    version = str(torch.__version__)
    if torch.version.cuda is None:
        release = version.partition("+")[0]
        return Finding(
            why=f"torch {version} is {torch_component.detail}",
            install=f"pip install --force-reinstall torch=={release} from an index with torch's "
            "CUDA builds (for Linux, PyPI is one)",
        )
    driver = _query_driver(CUDA_DRIVER)
    problem = _driver_problem(driver, torch.version.cuda, version) or _device_problem(
        driver, visible
    )
    if problem is not None:
        return problem
    devices = _list_devices(driver)
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        reason = first_line(str(messages[-1].message)) if messages else "it gives no reason"
        return Finding(
            why=f"the driver shows {devices}, but torch cannot use it: {reason}",
            install="run python -c 'import torch; torch.cuda.init()' and follow what it reports",
        )
    return Finding(
        version=torch.version.cuda,
        detail=f"{devices}; driver for CUDA up to {_dotted(driver.cuda)}",
    )


def _driver_problem(driver: _Driver, cuda: str, torch_version: str) -> Finding | None:
    """Return why a torch built for `cuda` cannot use the driver, or None."""
    if not driver.loaded:
        return Finding(
            why=f"there is no NVIDIA driver ({CUDA_DRIVER} cannot be loaded)",
            install="apt-get install nvidia-driver on a machine with an NVIDIA GPU, or start the "
            "container with the machine's GPUs (docker run --gpus all)",
        )
    if 0 < driver.cuda[0] < int(cuda.split(".")[0]):
        return Finding(
            why=f"the driver is too old: it supports CUDA up to {_dotted(driver.cuda)}, and torch "
            f"{torch_version} needs CUDA {cuda}",
            install=f"install an NVIDIA driver for CUDA {cuda} or newer, or a torch built for "
            f"CUDA {driver.cuda[0]}",
        )
    if driver.error is not None and driver.error != "CUDA_ERROR_NO_DEVICE":
        return Finding(
            why=f"the NVIDIA driver cannot be initialized: {driver.error}",
            install="run nvidia-smi and follow what it reports; after an update of the driver, "
            "restart the machine",
        )
    return None


def _device_problem(driver: _Driver, visible: str | None) -> Finding | None:
    """Return why no device can run Triton kernels, or None."""
    if not driver.devices:
        hidden = "" if visible is None else f", with CUDA_VISIBLE_DEVICES={visible!r}"
        return Finding(
            why=f"the NVIDIA driver shows no device{hidden}",
            install="unset CUDA_VISIBLE_DEVICES or name existing devices in it"
            if visible is not None
            else "run on a machine with an NVIDIA GPU, or start the container with the machine's "
            "GPUs (docker run --gpus all)",
        )
    if max(device.capability for device in driver.devices) < _LOWEST_CAPABILITY:
        return Finding(
            why=f"Triton kernels need compute capability {_dotted(_LOWEST_CAPABILITY)} or higher, "
            f"and there is {_list_devices(driver)}",
            install="run on a Volta or newer GPU",
        )
    return None


def _list_devices(driver: _Driver) -> str:
    return ", ".join(
        f"{device.name} (compute capability {_dotted(device.capability)})"
        for device in driver.devices
    )


def _nvcc_inputs() -> tuple[str | None, ...]:
    return (
        loaded_attribute("torch._inductor.config", "cuda.cuda_cxx"),
        *read_environment("CUDACXX", "CUDA_HOME", "CUDA_PATH", "PATH"),
    )


def _examine_nvcc(
    configured: str | None,
    cudacxx: str | None,
    cuda_home: str | None,
    cuda_path: str | None,
    _path: str | None,
) -> Finding:
    candidates = [
        (configured, "torch._inductor.config.cuda.cuda_cxx"),
        (cudacxx, "CUDACXX"),
        (cuda_home and os.path.join(cuda_home, "bin", "nvcc"), "CUDA_HOME"),
        (cuda_path and os.path.join(cuda_path, "bin", "nvcc"), "CUDA_PATH"),
        ("nvcc", None),
        (os.path.join(DEFAULT_CUDA_HOME, "bin", "nvcc"), None),
    ]
    reasons = []
    for program, setter in candidates:
        if not program:
            continue
        path, text = find_program(program, setter)
        if path is None:
            reasons.append(text)
            continue
        release = re.search(r"release [\d.]+, V([\d.]+)", text)
        if release:
            return Finding(version=release[1], path=path)
        reasons.append(f"the output of {program} --version is not that of nvcc: {first_line(text)}")
    return Finding(
        why="; ".join(reasons),
        install="apt-get install nvidia-cuda-toolkit, or install NVIDIA's CUDA toolkit in the "
        "version that torch was built with, and set CUDA_HOME to it",
    )


def _cuda_headers_inputs() -> tuple[str | None, ...]:
    return (
        loaded_attribute("torch.utils.cpp_extension", "CUDA_HOME"),
        *read_environment("CUDA_HOME", "CUDA_PATH", "PATH"),
    )


def _examine_cuda_headers(
    loaded: str | None, cuda_home: str | None, cuda_path: str | None, _path: str | None
) -> Finding:
    # torch selects one root, and looks nowhere else if the headers are not in it.
    nvcc = shutil.which("nvcc")
    roots = (
        (loaded, "torch.utils.cpp_extension.CUDA_HOME"),
        (cuda_home, "CUDA_HOME"),
        (cuda_path, "CUDA_PATH"),
        (nvcc and os.path.dirname(os.path.dirname(nvcc)), f"the folder above that of {nvcc}"),
        (DEFAULT_CUDA_HOME if os.path.isdir(DEFAULT_CUDA_HOME) else None, "torch's default"),
    )
    root, origin = next(((root, origin) for root, origin in roots if root), (None, ""))
    install = (
        "install NVIDIA's CUDA toolkit in the version that torch was built with, and set CUDA_HOME "
        "to its folder before Python starts"
    )
    if root is None:
        return Finding(
            why=f"CUDA_HOME is not set, there is no nvcc on PATH and no {DEFAULT_CUDA_HOME}",
            install=install,
        )
    headers = ("cuda.h", "cuda_runtime_api.h")
    absent = [name for name in headers if not os.path.isfile(os.path.join(root, "include", name))]
    if absent:
        return Finding(
            why=f"torch uses {root} as the CUDA folder ({origin}), and its include folder has no "
            f"{' and no '.join(absent)}",
            install=install,
        )
    return Finding(path=os.path.join(root, "include"), detail=origin)


CUDA = Probe(
    "CUDA device",
    functools.partial(read_environment, "CUDA_VISIBLE_DEVICES"),
    _examine_cuda,
    requires=("torch",),
)
NVCC = Probe("nvcc", _nvcc_inputs, _examine_nvcc)
CUDA_HEADERS = Probe("CUDA's C headers", _cuda_headers_inputs, _examine_cuda_headers)


def find_home() -> str | None:
    """Return a folder with CUDA's C headers below `include`; None if there is none.

    It is the toolkit that torch uses, or the folder of NVIDIA's or of Triton's Python package.
    """
    from torch.utils import cpp_extension

    headers = ("cuda.h", "cuda_runtime_api.h", os.path.join("crt", "host_defines.h"))
    for root in (cpp_extension.CUDA_HOME, *_packaged_homes()):
        if root and all(os.path.isfile(os.path.join(root, "include", name)) for name in headers):
            return str(root)
    return None


def _packaged_homes() -> list[str]:
    homes = []
    if (folder := package_folder("nvidia")) is not None:
        found = [name for name in os.listdir(folder) if re.fullmatch(r"cu\d+|cuda_runtime", name)]
        homes = [os.path.join(folder, name) for name in sorted(found, reverse=True)]
    if (folder := package_folder("triton")) is not None:
        homes.append(os.path.join(folder, "backends", "nvidia"))
    return homes
