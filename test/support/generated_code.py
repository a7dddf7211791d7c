"""What generated Python code and the installed torch do with dynamic M and with groups."""

from __future__ import annotations

import re

import torch


def dispatch_limits(code: str, size: str = r"s\d+") -> list[int]:
    """The values that generated Python compares M with to choose a branch, ascending.

    That is `if s2 <= 64:`; from torch 2.14 on, which computes the index of the branch first,
    `buf0_selector = int(s2 <= 64)`.

    Args:
        code: of a module.
        size: pattern of M.
    """
    return sorted(map(int, re.findall(rf"(?:\bif |= int\(){size} <= (\d+)[:)]", code)))


def takes_strided_offsets() -> bool:
    """Whether grouped matmuls accept non-contiguous offsets; torch 2.14 and later reject them."""
    a = torch.empty(8, 16, dtype=torch.bfloat16, device="meta")
    b = torch.empty(4, 16, 16, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty_strided((4,), (2,), dtype=torch.int32, device="meta")
    try:
        torch._grouped_mm(a, b, offs=offsets)
    except RuntimeError as error:
        if "must have stride" not in str(error):
            raise
        return False
    return True
