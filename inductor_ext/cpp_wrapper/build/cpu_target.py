"""The CPU target of a compiled model: the compiler's flags and the CPU features that they require.

Inductor compiles for the machine it runs on (`-march=native`). On x86-64 the extension compiles for
a level of the psABI (x86-64-v2, v3, v4) plus the features that the vectorized kernels use beyond
it. The requirements are therefore known, recorded in the compiled model, and checked before it
runs. The setting `aot_isa` selects the level. By default it is this machine's highest, and
instruction scheduling is tuned for this machine, as in Inductor.

A named target (`targets`) is compiled with the vector ISA of its level only, so that every machine
builds the same code, also for CPUs with features that it lacks. Nothing of it is run. Its level can
be another architecture (see `cross_compile`).
"""

from __future__ import annotations

import dataclasses
import functools
import platform
from typing import Any

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa, cross_compile
from inductor_ext.hooks import context

SIMD_LENGTHS: dict[str, int] = {
    "x86-64-v2": 1,
    "x86-64-v3": 256,
    "x86-64-v4": 512,
    "aarch64": 128,
}
"""The maximum vector width, in bits, that Inductor may use for a level; 1: no vectors. "aarch64" is
the baseline of 64-bit Arm, with Neon."""

FURTHER_FEATURES = (
    "avx512vnni",
    "avx512bf16",
    "avx512fp16",
    "amx-tile",
    "amx-int8",
    "amx-bf16",
    "amx-fp16",
)
"""Features that Inductor's kernels may use and no level includes."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Compiler flags, and the CPU features that the compiled code requires."""

    flags: tuple[str, ...]
    features: tuple[str, ...]
    """Sorted, by their names in g++'s __builtin_cpu_supports."""


def of(vector_flags: str, machine: str, features: frozenset[str], tune: str = "native") -> Target:
    """Return the target of kernels that are compiled with `vector_flags` for an architecture.

    Args:
        vector_flags: Inductor's compiler flags for its vector ISA, such as "-mavx2 -mfma".
        machine: architecture, as in `platform.machine()`.
        features: the features of this machine's CPU.
        tune: the CPU whose instruction scheduling is assumed, as in -mtune. "generic" on aarch64
            also means that only the baseline is used.
    """
    flags = tuple(vector_flags.split())
    if machine == "aarch64" and tune != "native":
        return Target((*flags, "-march=armv8-a"), tuple(sorted(cpu_isa.features_of(machine))))
    if machine != "x86_64":
        # Arm's levels do not rank what kernels use; torch compiles for the current machine.
        kernel_features = features & {"asimd", "sve", "bf16", "i8mm"} if flags else frozenset[str]()
        return Target(
            (*flags, "-mcpu=native") if machine == "aarch64" else flags,
            tuple(sorted(kernel_features)),
        )
    if "-mavx512f" in flags:
        level = "x86-64-v4"
    elif "-mavx2" in flags:
        level = "x86-64-v3"
    else:
        level = "x86-64-v2"
    further_features = {name for name in FURTHER_FEATURES if f"-m{name}" in flags}
    required = cpu_isa.features_of(level) | further_features
    return Target((f"-march={level}", f"-mtune={tune}", *flags), tuple(sorted(required)))


def inductor_options(level: str) -> dict[str, object]:
    """Return Inductor's options to compile for a level, or for this machine if it is "auto".

    Raises:
        exc.UnsupportedLevelError: this machine has another architecture, or lacks features of the
            level, so that kernels could not be tested on it.
    """
    # Skip Inductor's probe of the vector ISA, which compiles and runs code (10 CPU seconds for a
    # new cache directory): the CPU reports its features, and torch's headers are assumed to work
    # with the compiler.
    options: dict[str, object] = {"cpp.vec_isa_ok": True} if platform.machine() == "x86_64" else {}
    if level == "auto":
        return options
    missing_features = (
        cpu_isa.missing(cpu_isa.features_of(level)) if platform.machine() == "x86_64" else [level]
    )
    if missing_features:
        raise exc.UnsupportedLevelError(level=level, lacking=", ".join(missing_features))
    return {**options, "cpp.simdlen": SIMD_LENGTHS[level]}


def target_options(level: str) -> dict[str, object]:
    """Return Inductor's options to compile for a named target, inside `context.enter(cpu_level=)`.

    Args:
        level: a key of `SIMD_LENGTHS`; this machine may lack its features.
    """
    options: dict[str, object] = {"cpp.vec_isa_ok": True, "cpp.simdlen": SIMD_LENGTHS[level]}
    if cpu_isa.missing(cpu_isa.features_of(level)):
        # The candidates of CPU matmuls cannot be benchmarked here: ATen computes them.
        options |= {"max_autotune": False, "max_autotune_gemm": False}
    return options


@functools.cache
def vector_isas(level: str) -> list[Any]:
    """Return the vector ISAs of a named target as Inductor lists them, widest first."""
    from torch._inductor import cpu_vec_isa

    common = {"__bool__": lambda isa: True, "__hash__": cpu_vec_isa.VecISA.__hash__}
    # Without the features that Inductor adds if this machine has them.
    plain = {
        "is_avx512_bf16_supported": lambda isa: False,
        "build_arch_flags": lambda isa: isa._arch_flags,
    }
    avx2: Any = type("AVX2", (cpu_vec_isa.VecAVX2,), common)
    avx512: Any = type("AVX512", (cpu_vec_isa.VecAVX512,), {**common, **plain})
    neon: Any = type("NEON", (cpu_vec_isa.VecNEON,), common)
    isas: dict[str, list[Any]] = {
        "x86-64-v2": [],
        "x86-64-v3": [avx2()],
        "x86-64-v4": [avx512(), avx2()],
        "aarch64": [neon()],
    }
    return isas[level]


def machine_of(level: str | None) -> str:
    """Return the architecture of a level, as in `platform.machine()`; of this machine for None."""
    if level is None:
        return platform.machine()
    return "x86_64" if level.startswith("x86-64") else level


def current(level: str = "auto") -> Target:
    """Return the target of the current compile: that of the vector ISA that Inductor picks.

    Args:
        level: the setting `aot_isa`. Code for a named level is not tuned for this machine's CPU.
    """
    from torch._inductor import cpu_vec_isa

    isa = cpu_vec_isa.pick_vec_isa()
    flags = "" if isa == cpu_vec_isa.invalid_vec_isa else isa.build_arch_flags()
    machine = machine_of(context.current().cpu_level)
    if cross_compile.is_needed(machine):
        return of(flags, machine, frozenset(), "generic")
    features = cpu_isa.machine_features() or frozenset()
    return of(flags, machine, features, "native" if level == "auto" else "generic")
