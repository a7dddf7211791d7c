"""Masked loads of vectorized C++ kernels: nothing outside of an input is read."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

_DTYPES = (torch.float32, torch.float16, torch.int64)

_mappings: list[mmap.mmap] = []


def _guarded(values: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """A tensor at the end or at the beginning of a page, between pages that cannot be read."""
    page = mmap.PAGESIZE
    mapping = mmap.mmap(-1, 3 * page)
    _mappings.append(mapping)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for start in (address, address + 2 * page):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), page, 0) == 0
    offset = page + (page - values.nbytes if at_end else 0)
    count = values.numel()
    return torch.frombuffer(mapping, dtype=values.dtype, count=count, offset=offset).copy_(values)


def _program(*inputs: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for x in inputs:
        results += [torch.cat([x[1:], x]), F.pad(x, (3, 2)).sum()]
    return results


def _check(*, dynamic: bool) -> None:
    inputs = [
        _guarded((torch.arange(19) % 3).to(dtype), at_end=at_end)
        for dtype in (*_DTYPES, torch.bool)
        for at_end in (True, False)
    ]
    compiled = torch.compile(_program, backend="inductor_ext", dynamic=dynamic)
    for actual, expected in zip(compiled(*inputs), _program(*inputs), strict=True):
        assert actual.equal(expected)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses mprotect")
def test_nothing_outside_of_an_input_is_read() -> None:
    result = subprocess.run([sys.executable, __file__], stderr=subprocess.PIPE, text=True)
    assert result.returncode != -signal.SIGSEGV, "memory outside of an input was read"
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    _check(dynamic=False)
    torch._dynamo.reset()
    _check(dynamic=True)
