"""Which parts of the toolchain a graph needs, and what is said when one is missing.

`parts` knows what this machine has; here stands what a compile for a device cannot do without.
OpenMP is left out on purpose: finding out takes a compile, 0.3 s in every process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal

from inductor_ext import events
from inductor_ext.toolchain import components

__all__ = ["device_types", "missing", "warn_about_gemm_backends"]

_NEEDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("jit", "cpu"): ("cxx", "python_headers"),
    ("jit", "cuda"): ("triton", "cc", "python_headers"),
    ("aot", "cpu"): ("cxx",),
    ("aot", "cuda"): ("triton", "cc", "cxx", "python_headers", "cuda_headers"),
}


def device_types(values: Iterable[Any]) -> set[str]:
    """The device types ("cpu", "cuda", ...) of the tensors among `values`."""
    import torch

    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def missing(use: Literal["jit", "aot"], devices: Collection[str]) -> components.Part | None:
    """The first part that compiling for `devices` needs and this machine lacks."""
    # The wrapper of an ahead-of-time compile is C++ whatever the kernels run on.
    for device in sorted({*devices, "cpu"} if use == "aot" else devices):
        for name in _NEEDS.get((use, device), ()):
            part = components.probe(name)
            if not part.available:
                return part
    return None


def warn_about_gemm_backends(devices: Collection[str]) -> None:
    """Say once what is missing for CUTLASS choices, where they are asked for and would be used."""
    from torch._inductor import config as inductor_config

    tuned = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    backends = inductor_config.max_autotune_gemm_backends.upper().replace(" ", "").split(",")
    if "cuda" not in devices or not tuned or "CUTLASS" not in backends:
        return
    (feature,) = (feature for feature in components.features() if feature.name == "cutlass-gemm")
    if not feature.available:
        events.warn_once(
            "cutlass-gemm",
            f"no CUTLASS choices for GEMMs: {feature.why}. To mend it: {feature.install}.",
        )
