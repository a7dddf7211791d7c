"""Link CUTLASS kernels into AOT-compiled models.

The object of a kernel contains the static CUDA runtime and has two global symbols, the same for all
kernels; `link` renames them per kernel. So loading a model needs neither nvcc nor CUTLASS, and the
kernels' CUDA runtime does not conflict with the one that torch has loaded.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import Any

from inductor_ext import exc
from inductor_ext.settings import Settings
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.templates.cutlass import nvcc_build, runtime
from inductor_ext.templates.cutlass.source import FUNCTIONS, Source


def kernels_of(wrapper: Any) -> dict[Source, str]:
    """Return a wrapper's mutable dict of kernels to the names that its code uses for them."""
    kernels: dict[Source, str] = vars(wrapper).setdefault("inductor_ext_cutlass", {})
    return kernels


@dataclass(frozen=True)
class KernelObject:
    """The object of a kernel, as a `hooks.wrapper_codegen.LinkedObject`."""

    source: Source

    @property
    def name(self) -> str:
        """Name of the kernel, as profilers show it."""
        return self.source.name

    def write(self, folder: str, settings: Settings) -> str:
        """Write the object into a folder and return its path; see `link` for the errors."""
        path = os.path.join(folder, f"{symbol(self.source)}.o")
        link(self.source, runtime.store(settings), path)
        return path


def symbol(source: Source) -> str:
    """Return the prefix of a kernel's function names in a linked model."""
    return f"cutlass_{nvcc_build.key(source)[:32]}"


def link(source: Source, store: ArtifactStore, output: str) -> None:
    """Write the object of a kernel, for linking into a model; build the kernel if necessary.

    Args:
        source: of the kernel.
        store: of built kernels.
        output: path of the object.

    Raises:
        exc.MissingToolchainError, exc.KernelBuildError: see `nvcc_build.built`; or objcopy fails.
    """
    renames = (
        f"--redefine-sym={name}={symbol(source)}_{suffix}" for suffix, name in FUNCTIONS.items()
    )
    with nvcc_build.built(source, store) as library:
        command = ["objcopy", *renames, str(library.with_name(nvcc_build.OBJECT)), output]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode != 0:
        raise exc.KernelBuildError(kernel=source.name, why=result.stderr.strip() or "objcopy fails")
