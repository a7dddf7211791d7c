"""The checks of memory_debug: bounds of views into arenas, and poisoned memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_ext import exc
from inductor_ext.memory import arena_runtime
from inductor_ext.memory.planner import arenas
from inductor_ext.memory.planner.arena_plan import Arena
from test.support.memory_compiles import compiled, matmuls, planning, squares


class TestDebug:
    """A planning bug becomes an error or a NaN."""

    @staticmethod
    def shifted(move: Callable[[int, int], int]) -> Callable[..., tuple[Arena, ...]]:
        """`plan_arenas` with every offset moved: a planner with a bug that verification missed."""
        plan = arenas.plan_arenas

        def plan_arenas(requests: Any, **options: Any) -> tuple[Arena, ...]:
            return tuple(
                dataclasses.replace(
                    arena,
                    members=tuple(
                        dataclasses.replace(m, offset=move(int(m.offset), int(arena.size)))
                        for m in arena.members
                    ),
                )
                for arena in plan(requests, **options)
            )

        return plan_arenas

    @pytest.mark.parametrize("cpp", [False, True])
    @torch.no_grad()
    def test_bounds(self, monkeypatch: pytest.MonkeyPatch, cpp: bool) -> None:
        broken = self.shifted(lambda offset, size: offset + size - 64)
        monkeypatch.setattr(arenas, "plan_arenas", broken)
        with planning(memory_arenas="always", memory_debug=True, cpp_wrapper=cpp):
            match = "ends beyond its arena" if cpp else "ends at element .* of an arena of"
            with pytest.raises(RuntimeError, match=match):
                compiled(matmuls)(*squares(32))

    @pytest.mark.parametrize("cpp", [False, True])
    @torch.no_grad()
    def test_poison(self, monkeypatch: pytest.MonkeyPatch, cpp: bool) -> None:
        monkeypatch.setattr(arenas, "plan_arenas", self.shifted(lambda offset, size: 0))
        with planning(memory_arenas="always", memory_debug=True, cpp_wrapper=cpp):
            assert compiled(matmuls)(*squares(32)).isnan().all()

    def test_poison_is_not_a_number(self) -> None:
        arena = torch.zeros(64)
        arena_runtime.poison(arena, 64, 32)
        assert arena.isnan().nonzero().flatten().tolist() == list(range(16, 24))
        assert (arena.view(torch.int32)[16:24] == -1).all()

    def test_checked_view(self) -> None:
        arena = torch.arange(24.0)
        view = arena_runtime.checked_view(arena, (2, 3), (6, 2), 4)
        torch.testing.assert_close(view, torch.tensor([[4.0, 6.0, 8.0], [10.0, 12.0, 14.0]]))
        assert arena_runtime.checked_view(arena, (0, 3), (3, 1), 24).shape == (0, 3)
        for size, stride, offset in (((4, 6), (6, 1), 1), ((1,), (1,), 24), ((1,), (1,), -1)):
            with pytest.raises(exc.ArenaBoundsError, match="memory_arenas"):
                arena_runtime.checked_view(arena, size, stride, offset)
