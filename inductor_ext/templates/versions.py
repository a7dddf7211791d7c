"""Kernel versions by which tuning results identify the measured kernels.

A tuning result is valid only for the kernels that were measured. A digest of their sources would
identify them, but it would also change when a source is moved, reworded or adapted to another
torch, and then all results in a user's tuning folder and in the shipped tables would be lost.
Versions are therefore constants: a change of a template that may affect its speed, its results or
its legal configurations must come with a new version. `test/autotune/test_results_db.py` records
the sources, and fails when one has changed until its author has decided about the version.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Literal

VERSIONS: Mapping[str, str] = types.MappingProxyType(
    {
        "triton": "ddeef6e98311cabc",
        "triton.mixed": "4b5583be121312c7",
        "triton.grouped": "ed7b6c1ed071b6cf",
        "cutlass": "80dbe03242a4af5b",
    }
)
"""Versions by kernel family, or by "family.operation" for an operation with kernels of its own.

A version can be any string without a plus sign. The current ones are digests of the sources, which
identified results before there were versions."""


def template_version(family: Literal["triton", "cutlass"], operation: str = "") -> str:
    """Return the version of the kernels that compute an operation.

    Args:
        family: kernel family.
        operation: `GemmProblem.operation`; empty for the version of the family.
    """
    return VERSIONS.get(f"{family}.{operation}", VERSIONS[family])
