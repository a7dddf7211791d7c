"""What generated Python code calls of us: checks and poison for debugging, and replanning.

Light: it imports torch and the pure planner, and nothing of Inductor.
"""

from __future__ import annotations

import torch

from inductor_ext import exc

__all__ = ["POISON", "checked_view", "poison"]

POISON = 0xFF
"""What freed ranges are filled with: NaN in every floating point type, -1 in integers."""


def checked_view(
    arena: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A view of `arena`, like `reinterpret_tensor`, that must lie within the arena.

    Args:
        arena: flat, of the view's element type.
        size: of the view.
        stride: of the view, in elements.
        offset: elements from the arena's start.

    Raises:
        exc.ArenaBoundsError: it does not.
    """
    last = offset
    if 0 not in size:
        last += 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if offset < 0 or last > arena.numel():
        raise exc.ArenaBoundsError(
            size=size, stride=stride, offset=offset, end=last, numel=arena.numel()
        )
    return arena.as_strided(size, stride, offset)


def poison(arena: torch.Tensor, offset: int, nbytes: int) -> None:
    """Overwrite `nbytes` of a flat `arena` from byte `offset` on with `POISON`."""
    arena.view(torch.uint8)[offset : offset + nbytes].fill_(POISON)
