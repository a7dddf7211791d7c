"""CUTLASS kernels in a model that is compiled ahead of time: what it is linked with.

Objects of kernels have CUDA's runtime inside, and two global symbols, which are the same in all:
`link` gives those of each kernel names of their own. So a model needs neither nvcc nor CUTLASS
where it is loaded, and its kernels' runtime does not meet the one that torch has loaded.
"""

from __future__ import annotations

import subprocess
from typing import Any

from inductor_ext import exc
from inductor_ext.storage import artifact_store
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.source import FUNCTIONS, Source

__all__ = ["kernels_of", "link", "symbol"]


def kernels_of(wrapper: Any) -> dict[Source, str]:
    """The kernels that a wrapper's code calls, and what it calls them; to read and to add to."""
    found: dict[Source, str] = vars(wrapper).setdefault("inductor_ext_cutlass", {})
    return found


def symbol(source: Source) -> str:
    """What the names of a kernel's functions begin with where it is linked with others."""
    return f"cutlass_{nvcc_build.key(source)[:32]}"


def link(source: Source, store: artifact_store.Store, output: str) -> None:
    """Make an object of a kernel, for a model to be linked with.

    Args:
        source: of the kernel.
        store: where it lies.
        output: path of the object.

    Raises:
        exc.MissingToolchainError, exc.KernelBuildError: see `build.built`; or objcopy fails.
    """
    renamed = (
        f"--redefine-sym={name}={symbol(source)}_{short}" for short, name in FUNCTIONS.items()
    )
    with nvcc_build.built(source, store) as library:
        command = ["objcopy", *renamed, str(library.with_name(nvcc_build.OBJECT)), output]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise exc.KernelBuildError(kernel=source.name, why=done.stderr.strip() or "objcopy fails")
