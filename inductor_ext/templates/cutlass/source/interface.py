"""The C interface of a built kernel: its two functions and the structs of a call."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

FUNCTIONS: Mapping[str, str] = types.MappingProxyType(
    {"workspace_size": "inductor_ext_workspace_size", "run": "inductor_ext_run"}
)
"""Names of the two C functions of a source."""

CALL_FIELDS = (
    ("int32_t", "m"),
    ("int32_t", "n"),
    ("int32_t", "k"),
    ("int32_t", "batch"),
    ("int32_t", "swizzle"),
    ("int32_t", "raster"),
    ("int32_t", "splits"),
    ("int32_t", "sms"),
    ("Operand const*", "tensors"),
    ("float const*", "scalars"),
)
"""C types and names of the fields of `Call`, in order. Sizes are in the kernel's order; `batch` is
the number of matrices or groups; `sms` is the number of SMs of the device, 0 to query it."""

TENSOR_FIELDS = (("void*", "data"), ("int64_t", "stride"), ("int64_t", "batch"))
"""C types and names of the fields of `Operand`: address, leading stride (between rows, or between
columns if column-major) and batch stride, in elements."""

RASTER: Mapping[str, int] = types.MappingProxyType({"heuristic": 0, "along_m": 1, "along_n": 2})
"""Values of `Call.raster` by name."""


@dataclass(frozen=True)
class Source:
    """The source of a kernel."""

    name: str
    """Kernel name, as shown by profilers: CUTLASS's name and 8 hex digits of a hash of architecture
    and source, which distinguishes epilogues."""
    text: str
    architecture: str
    """nvcc's architecture, such as "90a"."""


FLAGS = "// nvcc: "
"""Prefix of a source's first line if that lists further nvcc arguments."""
