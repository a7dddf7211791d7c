"""The address sanitizer on generated code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from test.fuzz import address_sanitizer

_SANITIZER = address_sanitizer.Sanitizer.find()

_CHILD = """
import ctypes, os, subprocess, sys
from pathlib import Path

import torch

from test.fuzz import address_sanitizer

folder = Path(sys.argv[1])
address_sanitizer.set_report_path(folder / "bad")
source = folder / "bad.cpp"
source.write_text('extern "C" void fill(float* p, long n) { while (n >= 0) p[n--] = 1; }')
library = folder / "bad.so"
subprocess.run([os.environ["CXX"], "-shared", "-fPIC", source, "-o", library], check=True)
values = torch.empty(66)
ctypes.CDLL(library).fill(ctypes.c_void_p(values.data_ptr()), ctypes.c_long(66))

address_sanitizer.set_report_path(folder / "graph")


def model(x):
    gelu = (x * 0.5) * (torch.erf(x * 0.7071067811865476) + 1)
    rows = torch.nn.functional.pad(gelu.permute(3, 2, 1, 0), (0, 0, 0, 10), value=0.5)
    columns = torch.nn.functional.pad(gelu, (0, 0, 0, 0, 0, 10), value=0.5)
    return torch.matmul(columns, rows)


x = torch.randn(1, 8, 18, 18).contiguous(memory_format=torch.channels_last)
compiled = torch.compile(model, backend=sys.argv[2])
torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(_SANITIZER is None, reason="g++ has no libasan")
def test_bad_code_is_reported_and_generated_code_is_not(tmp_path: Path) -> None:
    """The graph is that of a kernel of Inductor (default) that writes beyond its result."""
    assert _SANITIZER is not None
    subprocess.run(
        [sys.executable, "-c", _CHILD, str(tmp_path), "inductor_ext"],
        env=_SANITIZER.environment(tmp_path),
        check=True,
    )
    assert [r.split(" in ")[0] for r in address_sanitizer.read_reports(tmp_path, "bad")] == [
        "heap-buffer-overflow"
    ]
    assert address_sanitizer.read_reports(tmp_path, "graph") == []
