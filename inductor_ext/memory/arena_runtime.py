"""Functions that generated Python code calls to debug arenas: bounds checks and poisoning.

Lightweight: it imports torch, but nothing of Inductor. `memory_debug` adds the calls. A view
outside its arena raises exc.ArenaBoundsError.
"""

from __future__ import annotations

import torch

from inductor_ext import exc

POISON = 0xFF
"""Byte that freed ranges are filled with: NaN in every floating-point dtype, -1 in integers."""


def checked_view(
    arena: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a view of `arena`, like `reinterpret_tensor`, that must be inside the arena.

    Args:
        arena: flat, with the view's dtype.
        size: size of the view.
        stride: stride of the view, in elements.
        offset: elements from the arena's start.

    Raises:
        exc.ArenaBoundsError: the view is not inside the arena.
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
    """Overwrite `nbytes` of a flat `arena` with `POISON`, starting at byte `offset`."""
    arena.view(torch.uint8)[offset : offset + nbytes].fill_(POISON)
