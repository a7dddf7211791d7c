"""Serialized extern kernel nodes: the operators that a model calls through torch's proxy executor.

Code generation serializes their arguments in torch.export's schema, which has its own numbering of
dtypes, layouts and memory formats. The proxy executor of torch 2.11 reads these numbers as c10's,
so that float64 arrives as complex32; for that executor `for_executor` writes c10's numbers. Later
executors convert the numbers themselves, which is detected by the header that they use for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inductor_ext import _compat
from inductor_ext.cpp_wrapper.codegen import input_checks

_CONVERTER = "include/torch/csrc/inductor/aoti_torch/generated_enum_converters.h"

# Indexed by torch.export's number, which starts at "unknown": sparse COO, CSR, CSC, BSR, BSC,
# mkldnn, strided.
_LAYOUTS = (0, 1, 2, 4, 5, 6, 3, 0)
# Likewise: unknown, contiguous, channels last, channels last 3d, preserve.
_MEMORY_FORMATS = (0, 0, 2, 3, 1)


def takes_export_numbers() -> bool:
    """Whether this torch's proxy executor converts torch.export's enum values to c10's."""
    return (_compat.torch_folder() / _CONVERTER).exists()


def for_executor(text: str) -> str:
    """Return the extern kernel nodes' JSON in the form that this torch's proxy executor reads."""
    return text if takes_export_numbers() else json.dumps(renumber(json.loads(text)))


def has_enumerations(text: str) -> bool:
    """Whether the JSON contains enum values whose meaning depends on the torch version."""
    return any(f'"{key}"' in text for key in ("as_scalar_type", "as_layout", "as_memory_format"))


def renumber(value: Any) -> Any:
    """Return parsed JSON with torch.export's enum values replaced by c10's."""
    if isinstance(value, list):
        return [renumber(item) for item in value]
    if not isinstance(value, dict):
        return value
    numbers: dict[str, Callable[[int], int]] = {
        "as_scalar_type": _scalar_type,
        "as_layout": _LAYOUTS.__getitem__,
        "as_memory_format": _MEMORY_FORMATS.__getitem__,
    }
    return {
        key: numbers[key](item) if key in numbers and isinstance(item, int) else renumber(item)
        for key, item in value.items()
    }


def _scalar_type(number: int) -> int:
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

    dtype = {int(key): value for key, value in _SERIALIZE_TO_TORCH_DTYPE.items()}[number]
    return input_checks.DTYPES.index(str(dtype).removeprefix("torch."))
