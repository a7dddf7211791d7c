"""The probes for the C++ compiler, its OpenMP, and the C compiler."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from inductor_ext.toolchain.probes.common import (
    Finding,
    Probe,
    find_program,
    first_line,
    loaded_attribute,
    read_environment,
    run_program,
)

if TYPE_CHECKING:
    from inductor_ext.toolchain.components import Component

_CXX_INSTALL = {
    "linux": "apt-get install g++ (Debian, Ubuntu) or dnf install gcc-c++ (Fedora, RHEL), or set "
    "CXX to a C++ compiler",
    "darwin": "xcode-select --install",
}


def _cxx_inputs() -> tuple[Any, ...]:
    default = "clang++" if sys.platform == "darwin" else "g++"
    configured = loaded_attribute("torch._inductor.config", "cpp.cxx")
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
        *read_environment("PATH", "TORCH_INDUCTOR_INSTALL_GXX", "CONDA_EXE"),
    )


def _examine_cxx(
    candidates: tuple[str | None, ...],
    setter: str | None,
    _path: str | None,
    install_gxx: str | None,
    conda: str | None,
) -> Finding:
    reasons = []
    for candidate in candidates:
        if candidate is None:
            continue
        path, text = find_program(candidate, setter)
        if path:
            return Finding(version=first_line(text), path=path)
        reasons.append(text)
    if install_gxx and None in candidates and sys.platform == "linux":
        # Inductor installs a compiler at its first compile if this is set. A probe does not.
        program = shutil.which(conda or "conda")
        if program:
            return Finding(
                detail=f"Inductor installs one with {program} (TORCH_INDUCTOR_INSTALL_GXX)"
            )
        reasons.append("TORCH_INDUCTOR_INSTALL_GXX is set, and conda is not found")
    return Finding(
        why="; ".join(reasons) or "torch._inductor.config.cpp.cxx names no compiler",
        install=_CXX_INSTALL.get(sys.platform, "set CXX to a C++ compiler"),
    )


_OPENMP_SOURCE = """
#include <cmath>
#include <omp.h>
#include <vector>
extern "C" int threads() { return omp_get_max_threads(); }
"""


def _examine_openmp(cxx: Component, _cpath: str | None, _library_path: str | None) -> Finding:
    if not cxx.available:
        return Finding(why=f"there is no C++ compiler ({cxx.why})", install=cxx.install)
    if cxx.path is None:
        return Finding(detail="comes with the compiler that Inductor installs")
    if sys.platform == "darwin":
        return Finding(detail="not checked: on macOS torch brings its own OpenMP library")
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as folder:
        output = os.path.join(folder, "probe.so")
        # The OpenMP flags are Inductor's, which uses GNU's library also for clang.
        openmp = ["-fiopenmp"] if "Intel" in (cxx.version or "") else ["-fopenmp", "-lgomp"]
        flags = ["-x", "c++", "-", "-std=c++17", "-shared", "-fPIC", "-o", output, *openmp]
        code, text = run_program([cxx.path, *flags], _OPENMP_SOURCE)
    if code == 0:
        return Finding(path=cxx.path)
    complaint = next((line for line in text.splitlines() if "error" in line), first_line(text))
    return Finding(
        why=f"{cxx.path} cannot build a shared library with OpenMP: {complaint.strip()}",
        install="apt-get install g++ libgomp1 (Debian, Ubuntu) or dnf install gcc-c++ libgomp "
        "(Fedora, RHEL); for clang also libomp-dev or libomp-devel",
    )


def _examine_cc(configured: str | None, _path: str | None) -> Finding:
    reasons = []
    for candidate in (configured,) if configured else ("gcc", "clang"):
        path, text = find_program(candidate, "CC" if configured else None)
        if path:
            return Finding(version=first_line(text), path=path)
        reasons.append(text)
    return Finding(
        why="; ".join(reasons),
        install="apt-get install gcc (Debian, Ubuntu) or dnf install gcc (Fedora, RHEL), or set CC "
        "to a C compiler",
    )


CXX = Probe("C++ compiler", _cxx_inputs, _examine_cxx)
OPENMP = Probe(
    "OpenMP for the C++ compiler",
    functools.partial(read_environment, "CPATH", "LIBRARY_PATH"),
    _examine_openmp,
    requires=("cxx",),
)
CC = Probe("C compiler", functools.partial(read_environment, "CC", "PATH"), _examine_cc)
