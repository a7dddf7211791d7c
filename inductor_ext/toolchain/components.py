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

import dataclasses
import functools
from typing import Any

from inductor_ext import exc
from inductor_ext.toolchain.probes import cuda, cutlass, cxx, python, torch, triton
from inductor_ext.toolchain.probes.common import Finding, Probe


@dataclasses.dataclass(frozen=True)
class Component:
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


_PROBES: dict[str, Probe] = {
    "torch": torch.TORCH,
    "cxx": cxx.CXX,
    "openmp": cxx.OPENMP,
    "python_headers": python.PYTHON_HEADERS,
    "cuda": cuda.CUDA,
    "triton": triton.TRITON,
    "cc": cxx.CC,
    "nvcc": cuda.NVCC,
    "cuda_headers": cuda.CUDA_HEADERS,
    "cutlass": cutlass.CUTLASS,
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


def names() -> list[str]:
    """Return the names of all components."""
    return list(_PROBES)


def probe(name: str) -> Component:
    """Check one component.

    Raises:
        ValueError: there is no component of that name.
    """
    if name not in _PROBES:
        raise ValueError(f"unknown component {name!r}; expected one of {', '.join(_PROBES)}")
    requirements = map(probe, _PROBES[name].requires)
    return _examine(name, (*requirements, *_PROBES[name].inputs()))


def probe_all() -> dict[str, Component]:
    """Check all components."""
    return {name: probe(name) for name in _PROBES}


def clear() -> None:
    """Clear the cached answers, so that the next probe checks again."""
    _examine.cache_clear()


@functools.cache
def _examine(name: str, inputs: tuple[Any, ...]) -> Component:
    try:
        finding = _PROBES[name].examine(*inputs)
    except Exception as error:
        # Never raise, even on unexpected machines: this is where `inductor-ext doctor` is needed
        # most.
        finding = Finding(
            why=f"the check failed with {type(error).__name__}: {error}",
            install="report this to the maintainers of inductor_ext",
        )
    return Component(
        name=name,
        title=_PROBES[name].title,
        available=finding.why is None,
        **dataclasses.asdict(finding),
    )


def features() -> list[Feature]:
    """Return which features the components of this machine allow."""
    result = []
    for name, title, device, needs in _FEATURES:
        missing = [component for component in map(probe, needs) if not component.available]
        result.append(
            Feature(
                name=name,
                title=title,
                available=not missing,
                needs=needs,
                missing=tuple(component.name for component in missing),
                compiles_for=device,
                why="; ".join(f"{c.title}: {c.why}" for c in missing) or None,
                install="; ".join(dict.fromkeys(c.install or "" for c in missing)) or None,
            )
        )
    return result
