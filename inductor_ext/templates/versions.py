"""The versions by which tuning results name the kernels that were measured.

A tuning result holds for the kernels that ran, which a digest of their sources would identify. Such
a digest also changes when a source is moved, reworded or adapted to another torch, and then every
result of a user's tuning folder and of the shipped tables is lost. So versions are constants, and a
change of a template that may change its speed, its results or the configurations that it can be
compiled with comes with a new one. `test_gemm_store.py` records the sources and fails when one
has changed, until whoever changed it has decided.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Literal

__all__ = ["VERSIONS", "template_version"]

VERSIONS: Mapping[str, str] = types.MappingProxyType(
    {
        "triton": "ddeef6e98311cabc",
        "triton.mixed": "4b5583be121312c7",
        "triton.grouped": "ed7b6c1ed071b6cf",
        "cutlass": "80dbe03242a4af5b",
    }
)
"""By kernel family, and by operation where kernels of a family compute that operation alone.

Any word without a plus does. These are digests of the sources, as results were identified before.
"""


def template_version(family: Literal["triton", "cutlass"], operation: str = "") -> str:
    """The version of the kernels that compute an operation.

    Args:
        family: of kernels.
        operation: of a `GemmProblem`; empty for the family's version.
    """
    return VERSIONS.get(f"{family}.{operation}", VERSIONS[family])
