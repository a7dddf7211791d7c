"""Toolchain components of this machine: compilers, packages, devices, and why some are missing.

`probe(name)` checks one component, `features()` returns what the components together allow. A probe
finds the same program or folder that Inductor, Triton or torch would choose, so its answer agrees
with what a compile does. It never raises, prints nothing, installs nothing, leaves no file behind
and creates no CUDA context. (The component "cuda" does initialize the CUDA driver, as
`torch.cuda.is_available()` does: afterwards a forked child of this process cannot use CUDA. The
driver itself creates an empty folder for its kernel cache in the home folder.)

Answers are cached for the process, by everything that they depend on: environment variables,
`sys.path`, and Inductor's own settings if they name a compiler.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.machinery
import importlib.util
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from inductor_ext import _compat, exc

__all__ = [
    "CUTLASS_INSTALL",
    "CudaDevice",
    "Feature",
    "Part",
    "clear",
    "cuda_devices",
    "features",
    "names",
    "probe",
    "probe_all",
]

CUTLASS_INSTALL = "pip install nvidia-cutlass==4.2.0.0"
"""Installs the release that the templates are written for."""

_LOWEST_CAPABILITY = (7, 0)
"""Inductor refuses to compile Triton kernels for older devices."""

_CUDA_DRIVER = "libcuda.so.1"

_CUDA_HOME = "/usr/local/cuda"
"""Where torch looks for a CUDA toolkit if nothing else names one."""

_SECONDS = 30.0
"""A compiler that takes longer to print its version is considered broken."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A component that a compile may need, as found on this machine."""

    name: str
    title: str
    """Name in messages."""
    available: bool
    version: str | None = None
    path: str | None = None
    """The program, file or folder, absolute."""
    detail: str | None = None
    why: str | None = None
    """Why it is not available: a clause without a full stop. None if it is available."""
    install: str | None = None
    """How to make it available, with the exact commands. None if it is available."""

    def require(self) -> None:
        """Raise unless the component is available.

        Raises:
            exc.MissingToolchainError: it is not available.
        """
        if not self.available:
            raise exc.MissingToolchainError(part=self.title, why=self.why, install=self.install)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A task of the user, and whether the components that it needs are available."""

    name: str
    title: str
    available: bool
    needs: tuple[str, ...]
    """Names of components."""
    missing: tuple[str, ...]
    """Those of `needs` that are not available."""
    compiles_for: str | None
    """The device type for which it enables `torch.compile`; None if it is about something else."""
    why: str | None
    install: str | None


@dataclasses.dataclass(frozen=True)
class CudaDevice:
    """A device that the CUDA driver shows to this process."""

    index: int
    """As in `torch.device("cuda", index)`."""
    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class _Finding:
    """The result of a probe; `_PROBES` adds the name and the title."""

    version: str | None = None
    path: str | None = None
    detail: str | None = None
    why: str | None = None
    install: str | None = None


@dataclasses.dataclass(frozen=True)
class _Probe:
    title: str
    inputs: Callable[[], tuple[Any, ...]]
    """Returns everything that the answer depends on and that may change within a process. Cheap;
    the result is hashable."""
    examine: Callable[..., _Finding]
    """Called with the inputs."""


def names() -> list[str]:
    """Return the names of all components."""
    return list(_PROBES)


def probe(name: str) -> Part:
    """Check one component.

    Raises:
        ValueError: there is no component of that name.
    """
    if name not in _PROBES:
        raise ValueError(f"unknown component {name!r}; expected one of {', '.join(_PROBES)}")
    return _answer(name, _PROBES[name].inputs())


def probe_all() -> dict[str, Part]:
    """Check all components."""
    return {name: probe(name) for name in _PROBES}


def clear() -> None:
    """Clear the cached answers, so that the next probe checks again."""
    _answer.cache_clear()


@functools.cache
def _answer(name: str, inputs: tuple[Any, ...]) -> Part:
    try:
        found = _PROBES[name].examine(*inputs)
    except Exception as error:
        # Never raise, even on unexpected machines: this is where `inductor-ext doctor` is needed
        # most.
        found = _Finding(
            why=f"the check failed with {type(error).__name__}: {error}",
            install="report this to the maintainers of inductor_ext",
        )
    return Part(
        name=name,
        title=_PROBES[name].title,
        available=found.why is None,
        **dataclasses.asdict(found),
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _run(command: list[str], text: str = "") -> tuple[int, str]:
    """Return the exit code and merged output of a program, in English.

    Raises:
        OSError: the program cannot be started.
    """
    try:
        done = subprocess.run(
            command,
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            timeout=_SECONDS,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no output within {_SECONDS:.0f} s"
    return done.returncode, done.stdout


def _ask_version(program: str, setter: str | None) -> tuple[str | None, str]:
    """Return the absolute path of a program and its --version output, or None and the reason.

    Args:
        program: one program name or path. Inductor and Triton start it without a shell, so a value
            with arguments ("ccache g++") is a program name that does not exist.
        setter: the environment variable or setting that names the program, for the message.
    """
    label = f"{setter} names {program!r}, which" if setter else program
    path = shutil.which(program)
    if path is None:
        try:
            words = shlex.split(program)
        except ValueError:
            words = []
        if len(words) > 1 and shutil.which(words[0]):
            return None, f"{label} is taken as the name of one program, arguments and all"
        return None, f"{label} is not found" + ("" if os.path.dirname(program) else " on PATH")
    try:
        code, output = _run([path, "--version"])
    except OSError as error:
        return None, f"{label} cannot be started ({error.strerror})"
    if code:
        return None, f"{label} --version exits with {code}: {_first_line(output)}"
    return os.path.abspath(path), output


def _folder_of(module: str) -> str | None:
    """Return the folder of a package, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return os.path.abspath(next(iter(spec.submodule_search_locations)))


def _version_of(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _if_loaded(module: str, attribute: str) -> Any:
    """Return an attribute of a module, or None unless the module is completely imported."""
    try:
        return operator.attrgetter(attribute)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _import_path() -> tuple[tuple[str, ...]]:
    return (tuple(sys.path),)


def _examine_torch(_path: tuple[str, ...]) -> _Finding:
    lowest, highest = _compat.SUPPORTED
    major, minor = highest.split(".")
    wanted = f'"torch>={lowest},<{major}.{int(minor) + 1}"'
    if importlib.util.find_spec("torch") is None:
        return _Finding(why="it is not installed for this Python", install=f"pip install {wanted}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except Exception as error:
        return _Finding(
            version=_version_of("torch"),
            path=_folder_of("torch"),
            why=f"importing it fails with {type(error).__name__}: {_first_line(str(error))}",
            install=f"pip install --force-reinstall {wanted}",
        )
    if torch.version.cuda:
        build = f"built with CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"built with ROCm {torch.version.hip}"
    else:
        build = "built without CUDA"
    return _Finding(version=str(torch.__version__), path=_folder_of("torch"), detail=build)


_CXX_INSTALL = {
    "linux": "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, RHEL), or set "
    "CXX to a C++ compiler",
    "darwin": "xcode-select --install",
}


def _cxx_inputs() -> tuple[Any, ...]:
    default = "clang++" if sys.platform == "darwin" else "g++"
    configured = _if_loaded("torch._inductor.config", "cpp.cxx")
    if configured is None:
        candidates: tuple[str | None, ...] = (None, os.environ.get("CXX", default))
        setter = "CXX"
    else:
        # Inductor reads CXX when its config is imported; later changes of the environment have no
        # effect on it.
        candidates = (configured,) if isinstance(configured, str) else tuple(configured)
        setter = "CXX or torch._inductor.config.cpp.cxx"
    return (
        candidates,
        None if candidates == (None, default) else setter,
        os.environ.get("PATH"),
        os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"),
        os.environ.get("CONDA_EXE"),
    )


def _examine_cxx(
    candidates: tuple[str | None, ...],
    setter: str | None,
    _path: str | None,
    install_gxx: str | None,
    conda: str | None,
) -> _Finding:
    refusals = []
    for candidate in candidates:
        if candidate is None:
            continue
        found, text = _ask_version(candidate, setter)
        if found:
            return _Finding(version=_first_line(text), path=found)
        refusals.append(text)
    if install_gxx and None in candidates and sys.platform == "linux":
        # Inductor installs a compiler at its first compile if this is set. A probe does not.
        program = shutil.which(conda or "conda")
        if program:
            return _Finding(
                detail=f"Inductor installs one with {program} (TORCH_INDUCTOR_INSTALL_GXX)"
            )
        refusals.append("TORCH_INDUCTOR_INSTALL_GXX is set, and conda is not found")
    return _Finding(
        why="; ".join(refusals) or "torch._inductor.config.cpp.cxx names no compiler",
        install=_CXX_INSTALL.get(sys.platform, "set CXX to a C++ compiler"),
    )


_OPENMP_SOURCE = """
#include <cmath>
#include <omp.h>
#include <vector>
extern "C" int threads() { return omp_get_max_threads(); }
"""


def _openmp_inputs() -> tuple[Any, ...]:
    return (_cxx_inputs(), os.environ.get("CPATH"), os.environ.get("LIBRARY_PATH"))


def _examine_openmp(
    cxx_inputs: tuple[Any, ...], _cpath: str | None, _library_path: str | None
) -> _Finding:
    cxx = _answer("cxx", cxx_inputs)
    if not cxx.available:
        return _Finding(why=f"there is no C++ compiler ({cxx.why})", install=cxx.install)
    if cxx.path is None:
        return _Finding(detail="comes with the compiler that Inductor installs")
    if sys.platform == "darwin":
        return _Finding(detail="not checked: on macOS torch brings its own OpenMP library")
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as folder:
        output = os.path.join(folder, "probe.so")
        # The OpenMP flags are Inductor's, which uses GNU's library also for clang.
        openmp = ["-fiopenmp"] if "Intel" in (cxx.version or "") else ["-fopenmp", "-lgomp"]
        flags = ["-x", "c++", "-", "-std=c++17", "-shared", "-fPIC", "-o", output, *openmp]
        code, text = _run([cxx.path, *flags], _OPENMP_SOURCE)
    if code == 0:
        return _Finding(path=cxx.path)
    complaint = next((line for line in text.splitlines() if "error" in line), _first_line(text))
    return _Finding(
        why=f"{cxx.path} cannot build a shared library with OpenMP: {complaint.strip()}",
        install="apt-get install g++ libgomp1 (Debian, Ubuntu) or dnf install gcc-c++ libgomp "
        "(Fedora, RHEL); for clang also libomp-dev or libomp-devel",
    )


def _headers_inputs() -> tuple[tuple[str, ...]]:
    folders = (sysconfig.get_path("include"), sysconfig.get_path("include", scheme="posix_prefix"))
    return (tuple(dict.fromkeys(folder for folder in folders if folder)),)


def _examine_python_headers(folders: tuple[str, ...]) -> _Finding:
    for folder in folders:
        header = os.path.join(folder, "Python.h")
        if os.path.isfile(header):
            return _Finding(path=header)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _Finding(
        why=f"there is no Python.h in {' or '.join(folders)}",
        install=f"apt-get install python{version}-dev (Debian, Ubuntu) or dnf install "
        f"python{version}-devel (Fedora), or use a Python that comes with its headers",
    )


def _cc_inputs() -> tuple[str | None, ...]:
    return (os.environ.get("CC"), os.environ.get("PATH"))


def _examine_cc(configured: str | None, _path: str | None) -> _Finding:
    refusals = []
    for candidate in (configured,) if configured else ("gcc", "clang"):
        found, text = _ask_version(candidate, "CC" if configured else None)
        if found:
            return _Finding(version=_first_line(text), path=found)
        refusals.append(text)
    return _Finding(
        why="; ".join(refusals),
        install="apt-get install gcc (Debian, Ubuntu) or dnf install gcc (Fedora, RHEL), or set CC "
        "to a C compiler",
    )


def _nvcc_inputs() -> tuple[str | None, ...]:
    return (
        _if_loaded("torch._inductor.config", "cuda.cuda_cxx"),
        os.environ.get("CUDACXX"),
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        os.environ.get("PATH"),
    )


def _examine_nvcc(
    configured: str | None,
    cudacxx: str | None,
    cuda_home: str | None,
    cuda_path: str | None,
    _path: str | None,
) -> _Finding:
    candidates = [
        (configured, "torch._inductor.config.cuda.cuda_cxx"),
        (cudacxx, "CUDACXX"),
        (cuda_home and os.path.join(cuda_home, "bin", "nvcc"), "CUDA_HOME"),
        (cuda_path and os.path.join(cuda_path, "bin", "nvcc"), "CUDA_PATH"),
        ("nvcc", None),
        (os.path.join(_CUDA_HOME, "bin", "nvcc"), None),
    ]
    refusals = []
    for program, setter in candidates:
        if not program:
            continue
        found, text = _ask_version(program, setter)
        if not found:
            refusals.append(text)
            continue
        release = re.search(r"release [\d.]+, V([\d.]+)", text)
        if release:
            return _Finding(version=release[1], path=found)
        refusals.append(
            f"the output of {program} --version is not that of nvcc: {_first_line(text)}"
        )
    return _Finding(
        why="; ".join(refusals),
        install="apt-get install nvidia-cuda-toolkit, or install NVIDIA's CUDA toolkit in the "
        "version that torch was built with, and set CUDA_HOME to it",
    )


def _cuda_headers_inputs() -> tuple[str | None, ...]:
    return (
        _if_loaded("torch.utils.cpp_extension", "CUDA_HOME"),
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        os.environ.get("PATH"),
    )


def _examine_cuda_headers(
    loaded: str | None, cuda_home: str | None, cuda_path: str | None, _path: str | None
) -> _Finding:
    # torch selects one root, and looks nowhere else if the headers are not in it.
    nvcc = shutil.which("nvcc")
    roots = (
        (loaded, "torch.utils.cpp_extension.CUDA_HOME"),
        (cuda_home, "CUDA_HOME"),
        (cuda_path, "CUDA_PATH"),
        (nvcc and os.path.dirname(os.path.dirname(nvcc)), f"the folder above that of {nvcc}"),
        (_CUDA_HOME if os.path.isdir(_CUDA_HOME) else None, "torch's default"),
    )
    root, origin = next(((root, origin) for root, origin in roots if root), (None, ""))
    install = (
        "install NVIDIA's CUDA toolkit in the version that torch was built with, and set CUDA_HOME "
        "to its folder before Python starts"
    )
    if root is None:
        return _Finding(
            why=f"CUDA_HOME is not set, there is no nvcc on PATH and no {_CUDA_HOME}",
            install=install,
        )
    wanted = ("cuda.h", "cuda_runtime_api.h")
    absent = [name for name in wanted if not os.path.isfile(os.path.join(root, "include", name))]
    if absent:
        return _Finding(
            why=f"torch uses {root} as the CUDA folder ({origin}), and its include folder has no "
            f"{' and no '.join(absent)}",
            install=install,
        )
    return _Finding(path=os.path.join(root, "include"), detail=origin)


def _triton_requirement() -> str | None:
    """Return the Triton that this torch requires ("triton==3.6.0", from torch 2.14 on
    "triton~=3.8.0").

    torch's CPU builds require none.
    """
    try:
        requirements: Iterable[str] = metadata.requires("torch") or ()
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(r"((?:pytorch-)?triton\s*[=~]=\s*[\w.+]+)", requirement)
        if match:
            return match[1].replace(" ", "")
    return None


def _examine_triton(_path: tuple[str, ...]) -> _Finding:
    wanted = _triton_requirement()
    folder = _folder_of("triton")
    version = _version_of("triton", "pytorch-triton")
    if folder is None:
        return _Finding(
            why="it is not installed for this Python", install=f"pip install {wanted or 'triton'}"
        )
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    libraries = [os.path.join(folder, "_C", f"libtriton{suffix}") for suffix in suffixes]
    if not any(map(os.path.isfile, libraries)):
        return _Finding(
            version=version,
            path=folder,
            why=f"{os.path.join(folder, '_C')} has no libtriton that this Python can load",
            install=f"pip install --force-reinstall {wanted or 'triton'}",
        )
    asked = re.split(r"([=~]=)", wanted or "", maxsplit=1)[1:]
    fits = not asked or _fits(version, *asked)
    detail = None if fits else f"this torch requires {''.join(asked).removeprefix('==')}"
    return _Finding(version=version, path=folder, detail=detail)


def _fits(version: str | None, operator: str, asked: str) -> bool:
    """Whether a version meets `==asked` or `~=asked` (whose last number may be higher)."""
    if operator == "==" or version is None:
        return version == asked
    release, wanted = (list(map(int, re.findall(r"\d+", text)[:3])) for text in (version, asked))
    return release[: len(wanted) - 1] == wanted[:-1] and release >= wanted


def _cutlass_inputs() -> tuple[Any, ...]:
    variable = os.environ.get("TORCHINDUCTOR_CUTLASS_DIR")
    torch = _if_loaded("torch", "__file__")
    # The default of Inductor's settings, a folder that exists in builds from source only.
    unset = torch and os.path.realpath(f"{os.path.dirname(torch)}/../third_party/cutlass/")
    known = (None, unset, variable and os.path.realpath(variable))
    for setting in ("cutlass.cutlass_dir", "cuda.cutlass_dir"):
        folder = _if_loaded("torch._inductor.config", setting)
        if folder not in known:
            return (tuple(sys.path), folder, f"torch._inductor.config.{setting}")
    return (tuple(sys.path), variable, "TORCHINDUCTOR_CUTLASS_DIR")


def _examine_cutlass(_path: tuple[str, ...], configured: str | None, setter: str) -> _Finding:
    if configured:
        root, version, origin = configured, None, f"from {setter}"
    else:
        folder = _folder_of("cutlass_library")
        if folder is None:
            return _Finding(
                why="nvidia-cutlass is not installed for this Python, and "
                "TORCHINDUCTOR_CUTLASS_DIR is not set",
                install=CUTLASS_INSTALL,
            )
        root, version = os.path.join(folder, "source"), _version_of("nvidia-cutlass")
        origin = "from the package nvidia-cutlass"
    if not os.path.isfile(os.path.join(root, "include", "cutlass", "cutlass.h")):
        return _Finding(
            version=version,
            why=f"{root} ({origin}) has no include/cutlass/cutlass.h",
            install=f"unset {setter} or set it to a checkout of CUTLASS"
            if configured
            else CUTLASS_INSTALL.replace("install", "install --force-reinstall", 1),
        )
    return _Finding(version=version, path=os.path.abspath(root), detail=origin)


@dataclasses.dataclass(frozen=True)
class _Driver:
    """Answers of the CUDA driver to queries that need no context."""

    error: str | None = None
    """The name of the error with which initialization failed; None if it succeeded."""
    loaded: bool = True
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA version that the driver supports."""
    devices: tuple[CudaDevice, ...] = ()


def _cuda_inputs() -> tuple[Any, ...]:
    return (tuple(sys.path), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _ask_driver(library: str) -> _Driver:
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
    return _ask_driver(_CUDA_DRIVER).devices


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _examine_cuda(path: tuple[str, ...], visible: str | None) -> _Finding:
    installed = _answer("torch", (path,))
    if not installed.available:
        return _Finding(why=f"torch is missing ({installed.why})", install=installed.install)
    import torch

    version = str(torch.__version__)
    if torch.version.cuda is None:
        release = version.partition("+")[0]
        return _Finding(
            why=f"torch {version} is {installed.detail}",
            install=f"pip install --force-reinstall torch=={release} from an index with torch's "
            "CUDA builds (for Linux, PyPI is one)",
        )
    driver = _ask_driver(_CUDA_DRIVER)
    if not driver.loaded:
        return _Finding(
            why=f"there is no NVIDIA driver ({_CUDA_DRIVER} cannot be loaded)",
            install="apt-get install nvidia-driver on a machine with an NVIDIA GPU, or start the "
            "container with the machine's GPUs (docker run --gpus all)",
        )
    needed = torch.version.cuda
    if 0 < driver.cuda[0] < int(needed.split(".")[0]):
        return _Finding(
            why=f"the driver is too old: it supports CUDA up to {_dotted(driver.cuda)}, and torch "
            f"{version} needs CUDA {needed}",
            install=f"install an NVIDIA driver for CUDA {needed} or newer, or a torch built for "
            f"CUDA {driver.cuda[0]}",
        )
    hidden = "" if visible is None else f", with CUDA_VISIBLE_DEVICES={visible!r}"
    if driver.error is not None and driver.error != "CUDA_ERROR_NO_DEVICE":
        return _Finding(
            why=f"the NVIDIA driver cannot be initialized: {driver.error}",
            install="run nvidia-smi and follow what it reports; after an update of the driver, "
            "restart the machine",
        )
    if not driver.devices:
        return _Finding(
            why=f"the NVIDIA driver shows no device{hidden}",
            install="unset CUDA_VISIBLE_DEVICES or name existing devices in it"
            if visible is not None
            else "run on a machine with an NVIDIA GPU, or start the container with the machine's "
            "GPUs (docker run --gpus all)",
        )
    listing = ", ".join(
        f"{device.name} (compute capability {_dotted(device.capability)})"
        for device in driver.devices
    )
    if max(device.capability for device in driver.devices) < _LOWEST_CAPABILITY:
        return _Finding(
            why=f"Triton kernels need compute capability {_dotted(_LOWEST_CAPABILITY)} or higher, "
            f"and there is {listing}",
            install="run on a Volta or newer GPU",
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        said = _first_line(str(caught[-1].message)) if caught else "it gives no reason"
        return _Finding(
            why=f"the driver shows {listing}, but torch cannot use it: {said}",
            install="run python -c 'import torch; torch.cuda.init()' and follow what it reports",
        )
    return _Finding(
        version=needed, detail=f"{listing}; driver for CUDA up to {_dotted(driver.cuda)}"
    )


_PROBES: dict[str, _Probe] = {
    "torch": _Probe("torch", _import_path, _examine_torch),
    "cxx": _Probe("C++ compiler", _cxx_inputs, _examine_cxx),
    "openmp": _Probe("OpenMP for the C++ compiler", _openmp_inputs, _examine_openmp),
    "python_headers": _Probe("Python's C headers", _headers_inputs, _examine_python_headers),
    "cuda": _Probe("CUDA device", _cuda_inputs, _examine_cuda),
    "triton": _Probe("Triton", _import_path, _examine_triton),
    "cc": _Probe("C compiler", _cc_inputs, _examine_cc),
    "nvcc": _Probe("nvcc", _nvcc_inputs, _examine_nvcc),
    "cuda_headers": _Probe("CUDA's C headers", _cuda_headers_inputs, _examine_cuda_headers),
    "cutlass": _Probe("CUTLASS", _cutlass_inputs, _examine_cutlass),
}

_CPU = ("torch", "cxx", "openmp", "python_headers")
# Triton builds each kernel's launcher with a C compiler against Python.h.
_CUDA = ("torch", "cuda", "triton", "cc", "python_headers")
_AOT_CUDA = (*_CUDA, "cxx", "openmp", "cuda_headers")

_FEATURES: tuple[tuple[str, str, str | None, tuple[str, ...]], ...] = (
    ("cpu", "torch.compile on CPU", "cpu", _CPU),
    ("cuda", "torch.compile on CUDA", "cuda", _CUDA),
    ("triton-gemm", "GEMMs as Triton templates", None, _CUDA),
    ("cutlass-gemm", "GEMMs as CUTLASS kernels", None, (*_AOT_CUDA, "nvcc", "cutlass")),
    ("aot-cpu", "AOT packages for CPU", None, ("torch", "cxx", "openmp")),
    ("aot-cuda", "AOT packages for CUDA", None, _AOT_CUDA),
    # aot_inductor.emit_multi_arch_kernel uses nvcc to combine cubin and PTX into one fat binary.
    ("aot-cuda-portable", "AOT packages for several GPU generations", None, (*_AOT_CUDA, "nvcc")),
    ("aot-load", "loading AOT packages", None, ("torch",)),
)
"""Name, title, device type that it compiles for, and required components of each feature."""


def features() -> list[Feature]:
    """Return which features the components of this machine allow."""
    answer = []
    for name, title, device, needs in _FEATURES:
        missing = [part for part in map(probe, needs) if not part.available]
        answer.append(
            Feature(
                name=name,
                title=title,
                available=not missing,
                needs=needs,
                missing=tuple(part.name for part in missing),
                compiles_for=device,
                why="; ".join(f"{part.title}: {part.why}" for part in missing) or None,
                install="; ".join(dict.fromkeys(part.install or "" for part in missing)) or None,
            )
        )
    return answer
