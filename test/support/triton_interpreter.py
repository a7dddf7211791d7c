"""Triton's interpreter with a newer NumPy.

The interpreter of Triton 3.6 converts the array of a scalar, of shape [1], by `int`. NumPy 2.4 does
so for arrays without dimensions only. Triton 3.7 removes the dimension first.
"""

from __future__ import annotations

from typing import Any

__all__ = ["accept_numpy"]


def accept_numpy() -> None:
    """Let scalars of this process's interpreter be indices; no change for later Triton."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
