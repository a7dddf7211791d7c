"""Whether a compiled model can run on a machine, by its manifest.

Compiled code needs an operating system, a processor with certain features, for CUDA a driver and a
device of certain architectures, and a torch whose C interface has the functions that it calls.
`check_machine` reports all requirements that are not met. Imports torch only to query a CUDA
device.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence

from inductor_ext import _compat, exc
from inductor_ext.cpp_wrapper.build import cpu_isa, torch_functions
from inductor_ext.cpp_wrapper.package import zip_format
from inductor_ext.cpp_wrapper.package.manifest import Manifest, Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The environment in which a model is to run."""

    torch: str
    """Version of the installed torch."""
    cuda: str | None
    """CUDA version that torch was built with; None without CUDA."""
    system: str
    """`sys.platform`."""
    machine: str
    """Machine type, such as "x86_64"."""
    cpu_features: frozenset[str] | None
    """By the names of `build.cpu_isa`; None if unknown."""
    capability: tuple[int, int] | None = None
    """Compute capability of the selected CUDA device; None without one."""
    torch_headers: pathlib.Path | None = None
    """Folder of torch's headers; None if unknown."""

    @classmethod
    def current(cls, torch_version: str, device: str, index: int = -1) -> Machine:
        """Return this machine's description for a model that runs on `device`.

        Args:
            torch_version: version of the installed torch.
            device: the model's device type. CUDA is described only for "cuda".
            index: index of the CUDA device. Default: -1, the current device.
        """
        cuda, capability = None, None
        if device == "cuda":
            import torch

            cuda = torch.version.cuda
            if torch.cuda.is_available():
                capability = torch.cuda.get_device_capability(index if index >= 0 else None)
        return cls(
            torch=torch_version,
            cuda=cuda,
            system=sys.platform,
            machine=os.uname().machine,
            cpu_features=cpu_isa.machine_features(),
            capability=capability,
            torch_headers=_compat.torch_folder() / "include",
        )


def check_machine(manifest: Manifest, model: Model, machine: Machine, path: str) -> None:
    """Check that a model can run on a machine.

    A minor release of torch other than the one that compiled the model must declare the functions
    that the model calls alike (`build.torch_functions`). A model that depends on a format of torch
    that has no such rule needs the same minor release. The CUDA runtime changes with major
    releases.

    Args:
        manifest: the manifest of the package.
        model: the model to load.
        machine: the environment to check against.
        path: path of the package, for the error message.

    Raises:
        exc.IncompatibleArtifactError: the model cannot run; the message lists all reasons.
    """
    reasons = []
    for name, actual in (("system", machine.system), ("machine", machine.machine)):
        required = manifest.platform.get(name)
        if required is not None and required != actual:
            reasons.append(f"it was compiled for {required}, and this is {actual}")
    fix = "Compile it again for this machine, or load it on a machine that meets its requirements"
    torch = manifest.versions.get("torch")
    if torch is not None and _version_prefix(torch, 2) != _version_prefix(machine.torch, 2):
        why = _find_torch_mismatch(manifest, model, machine)
        if why is not None:
            compiled = f"it was compiled for torch {torch}, and this is torch {machine.torch}"
            reasons.append(f"{compiled}{why}")
            minor = ".".join(_version_prefix(torch, 2))
            fix = f"Compile it again with torch {machine.torch}, or load it with torch {minor}"
    if machine.cpu_features is not None:
        missing_features = sorted(set(model.cpu_features) - machine.cpu_features)
        if missing_features:
            reasons.append(f"its code needs {', '.join(missing_features)}, which this CPU lacks")
    if model.device == "cuda":
        reasons += _find_cuda_mismatches(manifest, model, machine)
    if reasons:
        raise exc.IncompatibleArtifactError(path=path, why="; ".join(reasons), fix=fix)


def _find_torch_mismatch(manifest: Manifest, model: Model, machine: Machine) -> str | None:
    """Return why a model cannot run with another minor release of torch; None if it can.

    The reason continues the sentence that names the releases, and is empty if nothing is known.
    """
    if model.torch_functions is None:
        return ""
    for why, applies in _find_torch_formats(manifest, model):
        if applies:
            return f"; {why}, in a form that may differ"
    if machine.torch_headers is None or not machine.torch_headers.is_dir():
        return ", whose headers are not installed, so that its functions cannot be compared"
    missing, other = torch_functions.find_differences(model.torch_functions, machine.torch_headers)
    if missing:
        return f", which lacks {_list_names(missing)}"
    if other:
        return f", which may declare {_list_names(other)} differently"
    return None


def _find_torch_formats(manifest: Manifest, model: Model) -> Iterator[tuple[str, bool]]:
    """Yield formats of torch that a model can depend on, and whether it does."""
    stem = str(model.library).removesuffix(".so")
    yield "it calls operators by name", f"{stem}.json" in manifest.files
    objects = any(name.startswith(zip_format.CONSTANTS_FOLDER) for name in manifest.files)
    yield "it contains pickled objects", objects
    packed = any(constant.shape and not constant.stride for constant in model.constants)
    yield "its weights are packed by oneDNN", packed


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more functions"


def _find_cuda_mismatches(manifest: Manifest, model: Model, machine: Machine) -> list[str]:
    if machine.cuda is None:
        return ["it runs on CUDA, and this torch is built without it"]
    reasons = []
    cuda = manifest.versions.get("cuda")
    if cuda is not None and _version_prefix(cuda, 1) != _version_prefix(machine.cuda, 1):
        reasons.append(f"it was compiled for CUDA {cuda}, and this torch has CUDA {machine.cuda}")
    if machine.capability is None:
        reasons.append("it runs on CUDA, but this machine has no CUDA device")
    elif model.cuda_architectures and not _has_kernels_for(
        model.cuda_architectures, machine.capability
    ):
        architecture = "sm_{}{}".format(*machine.capability)
        reasons.append(
            f"its kernels are compiled for {', '.join(model.cuda_architectures)}, and the device "
            f"is {architecture}"
        )
    return reasons


def _version_prefix(version: str, count: int) -> tuple[str, ...]:
    return tuple(re.split(r"[.+]", version)[:count])


def _has_kernels_for(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    return rank_architectures(architectures, capability) is not None


def rank_architectures(
    architectures: Sequence[str], capability: tuple[int, int]
) -> tuple[int, ...] | None:
    """Return how well kernels fit a device, as a tuple that is greater for a better fit.

    Machine code is better than PTX, code for a later architecture better than for an earlier one,
    and "sm_90a" better than "sm_90".

    Args:
        architectures: what the kernels were compiled for: "sm_90", "sm_90a", "compute_90".
        capability: compute capability of the device.

    Returns:
        The rank, or None if the kernels do not run on the device.
    """
    ranks = (_rank_architecture(architecture, capability) for architecture in architectures)
    return max((rank for rank in ranks if rank is not None), default=None)


def _rank_architecture(architecture: str, capability: tuple[int, int]) -> tuple[int, ...] | None:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        return None
    compiled = int(match[2]), int(match[3])
    is_ptx, suffix = match[1] == "compute", match[4]
    if is_ptx and not suffix:
        fits = capability >= compiled  # PTX: the driver compiles it for any later device
    elif suffix == "a":
        fits = capability == compiled
    else:
        fits = capability[0] == compiled[0] and capability[1] >= compiled[1]
    return (int(not is_ptx), *compiled, ("", "f", "a").index(suffix)) if fits else None
