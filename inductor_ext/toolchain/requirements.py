"""The toolchain components that a compile requires, and the warning if one is missing.

`components` reports what this machine has; this module lists what a compile for each device type
cannot do without. OpenMP is left out on purpose: checking it takes a compile, 0.3 s in every
process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal

from inductor_ext import events
from inductor_ext.toolchain import components

NEEDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("jit", "cpu"): ("cxx", "python_headers"),
    ("jit", "cuda"): ("triton", "cc", "python_headers"),
    ("aot", "cpu"): ("cxx",),
    ("aot", "cuda"): ("triton", "cc", "cxx", "python_headers", "cuda_headers"),
}


def device_types(values: Iterable[Any]) -> set[str]:
    """Return the device types ("cpu", "cuda", ...) of the tensors among `values`."""
    import torch

    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def find_missing(
    use: Literal["jit", "aot"], devices: Collection[str]
) -> components.Component | None:
    """Return the first component that a compile for `devices` requires and this machine lacks."""
    # The wrapper of an ahead-of-time compile is C++ on every device.
    for device in sorted({*devices, "cpu"} if use == "aot" else devices):
        for name in NEEDS.get((use, device), ()):
            component = components.probe(name)
            if not component.available:
                return component
    return None


def warn_about_gemm_backends(devices: Collection[str]) -> None:
    """Warn once about what CUTLASS choices lack, if they are requested and would be used."""
    from torch._inductor import config as inductor_config

    tuned = inductor_config.max_autotune or inductor_config.max_autotune_gemm
    backends = inductor_config.max_autotune_gemm_backends.upper().replace(" ", "").split(",")
    if "cuda" not in devices or not tuned or "CUTLASS" not in backends:
        return
    (feature,) = (feature for feature in components.features() if feature.name == "cutlass-gemm")
    if not feature.available:
        events.warn_once(
            "cutlass-gemm",
            f"CUTLASS is not used for GEMMs: {feature.why}. To fix: {feature.install}",
        )
