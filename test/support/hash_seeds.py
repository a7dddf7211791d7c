"""The output of a program in processes with other hash seeds, and thus another order of sets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["outputs"]

CHECKOUT = Path(__file__).parents[2]


def outputs(code: str, seeds: Iterable[str]) -> list[str]:
    """The output of `code`, run in the checkout in a new process for each seed.

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
