"""The CPU that an artifact is compiled for: the compiler's flags, and the features they ask for.

Stock compiles for whatever machine it runs on (`-march=native`). An artifact of ours is compiled
for a level of the psABI (x86-64-v2, v3, v4) plus what the vectorised kernels use beyond it, so that
what it needs is known, written into it, and checked before it runs. The instruction scheduling is
tuned for this machine as in stock.
"""

from __future__ import annotations

import dataclasses
import platform

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa

__all__ = ["SIMD_LENGTHS", "Target", "current", "inductor_options", "of"]

SIMD_LENGTHS: dict[str, int] = {"x86-64-v2": 1, "x86-64-v3": 256, "x86-64-v4": 512}
"""The widest vectors, in bits, that Inductor may use for a level; 1: none."""

_BEYOND = ("avx512vnni", "avx512bf16", "avx512fp16", "amx-tile", "amx-int8", "amx-bf16", "amx-fp16")
"""What Inductor's kernels may use and no level has."""


@dataclasses.dataclass(frozen=True)
class Target:
    """What a compiler is told, and what a machine has to have in return."""

    flags: tuple[str, ...]
    features: tuple[str, ...]
    """Sorted, as g++'s __builtin_cpu_supports names them."""


def of(vector_flags: str, machine: str, features: frozenset[str]) -> Target:
    """The target of kernels that are compiled with `vector_flags` on a kind of machine.

    Args:
        vector_flags: what Inductor tells the compiler for its vector ISA, such as "-mavx2 -mfma".
        machine: as `platform.machine()` names it.
        features: what this machine's CPU has.
    """
    flags = tuple(vector_flags.split())
    if machine != "x86_64":
        # Arm's levels do not order what kernels use; torch compiles for the machine at hand.
        used = features & {"asimd", "sve", "bf16", "i8mm"} if flags else frozenset[str]()
        return Target(
            (*flags, "-mcpu=native") if machine == "aarch64" else flags, tuple(sorted(used))
        )
    if "-mavx512f" in flags:
        level = "x86-64-v4"
    elif "-mavx2" in flags:
        level = "x86-64-v3"
    else:
        level = "x86-64-v2"
    beyond = {name for name in _BEYOND if f"-m{name}" in flags}
    needed = cpu_isa.features_of(level) | beyond
    return Target((f"-march={level}", "-mtune=native", *flags), tuple(sorted(needed)))


def inductor_options(level: str) -> dict[str, object]:
    """Inductor's options for compiling for a level, or for this machine if it is "auto".

    Raises:
        exc.UnsupportedLevelError: this machine is of another kind, or lacks what the level has, so
            that kernels could not be tried out on it.
    """
    options: dict[str, object] = {}
    if platform.machine() == "x86_64":
        # What stock finds out by compiling and running a probe, 10 CPU seconds for a new cache
        # folder, the CPU itself tells; that torch's headers suit the compiler it does not doubt.
        options["cpp.vec_isa_ok"] = True
    if level == "auto":
        return options
    lacking = (
        cpu_isa.missing(cpu_isa.features_of(level)) if platform.machine() == "x86_64" else [level]
    )
    if lacking:
        raise exc.UnsupportedLevelError(level=level, lacking=", ".join(lacking))
    return {**options, "cpp.simdlen": SIMD_LENGTHS[level]}


def current() -> Target:
    """The target of the compile at hand: of the vector ISA that Inductor picks for it."""
    from torch._inductor import cpu_vec_isa

    picked = cpu_vec_isa.pick_vec_isa()
    flags = "" if picked == cpu_vec_isa.invalid_vec_isa else picked.build_arch_flags()
    return of(flags, platform.machine(), cpu_isa.machine_features() or frozenset())
