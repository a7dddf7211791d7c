"""The CUTLASS kernels that are to be measured or that decisions name: there before they are used.

A kernel takes a minute to build, so those of all problems are built side by side before anything is
compiled with them. What cannot be built is left out, with its reason; that nvcc or CUTLASS is
missing is said once, with the command that installs it.
"""

from __future__ import annotations

from collections.abc import Iterable

from inductor_ext import cutlass_runtime, events, exc
from inductor_ext.settings import Settings
from inductor_ext.templates import families
from inductor_ext.templates.cutlass import build
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.problem import GemmProblem

__all__ = ["can_build", "missing", "prepare"]

Wanted = tuple[GemmProblem, CutlassConfig]


def missing() -> str | None:
    """What kernels cannot be built without on this machine, and how to get it; None for nothing."""
    try:
        build.Toolchain.find()
    except exc.MissingToolchainError as error:
        return str(error)
    return None


def can_build() -> bool:
    """Whether kernels can be built on this machine; if not, it is said once what is missing."""
    why = missing()
    if why is not None:
        events.warn_once("cutlass_toolchain", f"no CUTLASS kernels can be built: {why}")
    return why is None


def prepare(wanted: Iterable[Wanted], settings: Settings) -> dict[Wanted, str]:
    """Have kernels in the store.

    Args:
        wanted: problems with configurations that are legal for them.
        settings: those of the store are used.

    Returns:
        Why those cannot be had that cannot.
    """
    sources = {each: families.source_of(*each) for each in wanted}
    if not sources:
        return {}
    different = {each.name: each for each in sources.values()}
    if not can_build():
        return dict.fromkeys(sources, "it is not built, and there is nothing to build it with")
    failed = build.build_all(list(different.values()), cutlass_runtime.store(settings))
    return {
        each: f"does not build: {failed[made.name].fields['why']}"
        for each, made in sources.items()
        if made.name in failed
    }
