"""The benchmark of compile time with and without the fixes of Inductor bugs."""

from __future__ import annotations

import subprocess
import sys

# Inductor's code for the minimum of 8-bit integers also reads lanes that were not loaded.
SCRIPT = """
import torch
from benchmarks.compile_time import Fixes
from torch._inductor.utils import fresh_cache

fixes = Fixes()
x = torch.arange(40, 80, dtype=torch.uint8)

def compiled():
    torch.compiler.reset()
    with fresh_cache():
        return int(torch.compile(torch.min, backend="inductor_ext")(x))

with_fixes = compiled()
with fixes.without():
    without_fixes = compiled()
print(with_fixes, without_fixes, compiled())
"""


def test_fixes_are_off_only_inside() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True
    )
    before, inside, after = map(int, done.stdout.split())
    assert (before, after) == (40, 40)
    assert inside < 40
