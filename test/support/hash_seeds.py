"""What a program prints in processes with other hash seeds, and so with sets in another order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["outputs"]

CHECKOUT = Path(__file__).parents[2]


def outputs(code: str, seeds: Iterable[str]) -> list[str]:
    """What `code` prints, in the checkout, in a new process for each seed.

    Raises:
        subprocess.CalledProcessError: one of them failed.
    """
    return [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in seeds
    ]
