"""The instruction set extensions of this machine's CPU, detected without a compiler.

Names are those of g++'s `__builtin_cpu_supports` ("avx512f", "sse4.2", "amx-tile"), on aarch64
those of the Linux kernel ("asimd", "sve2"). They come from the kernel's list in /proc/cpuinfo,
which omits features that the CPU has but the OS has not enabled. If it cannot be read, features
are unknown and none counts as missing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

_V2 = ("cmpxchg16b", "lahf_lm", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3")
_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "osxsave")
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

LEVELS: dict[str, frozenset[str]] = {
    "x86-64": frozenset(),
    "x86-64-v2": frozenset(_V2),
    "x86-64-v3": frozenset(_V2 + _V3),
    "x86-64-v4": frozenset(_V2 + _V3 + _V4),
    "aarch64": frozenset({"asimd"}),
}
"""The features of each baseline of the x86-64 psABI or of Arm."""

_RENAMED = {
    "abm": "lzcnt",
    "avx_vnni": "avxvnni",
    "avx_ifma": "avxifma",
    "avx_vnni_int8": "avxvnniint8",
    "bmi1": "bmi",
    "cx16": "cmpxchg16b",
    "pni": "sse3",
    "sse4_1": "sse4.1",
    "sse4_2": "sse4.2",
}
"""The Linux kernel's names that follow no rule."""

_ENOUGH = 1 << 14
"""Bytes of /proc/cpuinfo that contain its first processor. The kernel generates the text while it
is read, which takes tens of milliseconds on large machines."""


def _name(flag: str) -> str:
    if flag.startswith("avx512_"):
        return "avx512" + flag[len("avx512_") :]
    if flag.startswith("amx_"):
        return flag.replace("_", "-")
    return _RENAMED.get(flag, flag)


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Return the features of the first processor in the text of /proc/cpuinfo."""
    match = re.search(r"^(flags|Features)\s*:(.*)\n", text, re.MULTILINE)
    if match is None:
        return frozenset()
    flags = {_name(flag) for flag in match[2].split()}
    if match[1] == "flags" and "avx" in flags:
        # The kernel lists AVX only if it saves the wide registers, which is what osxsave means.
        flags.add("osxsave")
    return frozenset(flags)


@functools.cache
def machine_features() -> frozenset[str] | None:
    """Return the features that the CPU has and the OS enables; None if they cannot be read."""
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            text = b""
            while len(text) < _ENOUGH and (part := file.read(_ENOUGH - len(text))):
                text += part
    except OSError:
        return None
    return parse_cpuinfo(text.decode("ascii", "replace")) or None


def features_of(level: str) -> frozenset[str]:
    """Return the features of a baseline of `LEVELS`.

    Raises:
        ValueError: there is no such baseline.
    """
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}; there are {', '.join(LEVELS)}")
    return LEVELS[level]


def missing(needed: Collection[str]) -> list[str]:
    """Return, sorted, the features of `needed` that this machine is known to lack."""
    available = machine_features()
    return sorted(set(needed) - available) if available is not None else []
