"""Build the CUTLASS kernels that are candidates or that decisions name, before they are used.

A kernel takes half a minute to build. The kernels of all problems are therefore built in parallel
before anything is compiled with them, or in the background if the setting `cutlass_background` is
on. A kernel that cannot be built is left out, with its reason. A missing nvcc or CUTLASS is
reported once, with the command that installs it. Kernels that are already in the store need
neither.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from inductor_ext import events, exc
from inductor_ext.settings import Settings
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass import background_build, nvcc_build, runtime
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.source import Source
from inductor_ext.templates.problem import GemmProblem

Candidate = tuple[GemmProblem, CutlassConfig]


def find_missing_tools() -> str | None:
    """Return what this machine lacks to build kernels, and how to install it; None if nothing."""
    try:
        nvcc_build.Toolchain.find()
    except exc.MissingToolchainError as error:
        return str(error)
    return None


def can_build() -> bool:
    """Whether kernels can be built on this machine; if not, warn once about what is missing."""
    why = find_missing_tools()
    if why is not None:
        events.warn_once("cutlass_toolchain", f"CUTLASS kernels cannot be built: {why}")
    return why is None


def find_pending(
    candidates: Mapping[GemmProblem, Iterable[CutlassConfig]], settings: Settings
) -> set[GemmProblem]:
    """Return the problems whose kernels are being built in the background; start builds if needed.

    Args:
        candidates: problems with configurations that are legal for them.
        settings: `cutlass_background` (the result is empty without it) and the settings of the
            store.
    """
    if not settings.cutlass_background or find_missing_tools() is not None:
        return set()
    sources = _sources(candidates)
    all_sources = [source for group in sources.values() for source in group]
    pending = set(background_build.build_later(all_sources, runtime.store(settings)))
    return {problem for problem, group in sources.items() if pending & set(group)}


def find_unavailable(
    candidates: Mapping[GemmProblem, Iterable[CutlassConfig]], settings: Settings
) -> set[GemmProblem]:
    """Return the problems without a kernel in the store, if none can be built; warn once about it.

    Args:
        candidates: problems with configurations that are legal for them.
        settings: the settings of the store are used.
    """
    store = runtime.store(settings)
    problems = {
        problem
        for problem, group in _sources(candidates).items()
        if not any(nvcc_build.is_built(source, store) for source in group)
    }
    return set() if not problems or can_build() else problems


def _sources(
    candidates: Mapping[GemmProblem, Iterable[CutlassConfig]],
) -> dict[GemmProblem, list[Source]]:
    return {
        problem: [kernels.source_of(problem, config) for config in configs]
        for problem, configs in candidates.items()
    }


def generation(settings: Settings) -> str:
    """Return text that changes when the set of available kernels changes."""
    can_compile = find_missing_tools() is None
    if can_compile and not settings.cutlass_background:
        return "all"
    stored_keys = "".join(runtime.store(settings).entry_keys())
    return f"{can_compile}-{hashlib.sha256(stored_keys.encode()).hexdigest()[:16]}"


def prepare(candidates: Iterable[Candidate], settings: Settings) -> dict[Candidate, str]:
    """Build the kernels that are not in the store.

    Args:
        candidates: problems with configurations that are legal for them.
        settings: the settings of the store are used.

    Returns:
        The reason for each kernel that cannot be obtained.
    """
    sources = {candidate: kernels.source_of(*candidate) for candidate in candidates}
    if not sources:
        return {}
    by_name = {source.name: source for source in sources.values()}
    store = runtime.store(settings)
    try:
        failures = nvcc_build.build_all(list(by_name.values()), store)
    except exc.MissingToolchainError:
        can_build()
        return {
            key: "not built, and the tools to build it are missing"
            for key, source in sources.items()
            if not nvcc_build.is_built(source, store)
        }
    return {
        key: f"failed to build: {failures[source.name].fields['why']}"
        for key, source in sources.items()
        if source.name in failures
    }
