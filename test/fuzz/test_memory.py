"""A few random programs of `test.fuzz.memory`, the same ones in every run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from test.fuzz import memory as memory_fuzz

SAMPLE = (
    ("extern", 2000, ("default", "always", "outputs", "combined")),
    ("extern", 2002, ("default", "always")),
    ("extern_dynamic", 1001, ("default", "always")),
    ("inference", 2001, ("default", "always")),
    ("training", 3010, ("default", "always")),
)
"""Mode, seed and settings. Those called extern need no C++ compiler, and so little time."""


@pytest.mark.parametrize(("mode", "seed", "names"), SAMPLE)
def test_random_programs(mode: str, seed: int, names: tuple[str, ...]) -> None:
    program = memory_fuzz.generate(seed, **memory_fuzz.MODES[mode])
    failures, skipped = memory_fuzz.check(program, names)
    assert skipped is None, "stock Inductor runs it, with eager mode's values"
    assert not failures, "\n".join(failure.script() for failure in failures)


class TestPrograms:
    def test_a_seed_gives_one_program(self) -> None:
        assert memory_fuzz.generate(7) == memory_fuzz.generate(7)
        assert memory_fuzz.generate(7) != memory_fuzz.generate(8)

    @pytest.mark.parametrize("mode", memory_fuzz.MODES)
    def test_eager_mode_runs_them(self, mode: str) -> None:
        for seed in range(2):
            program = memory_fuzz.generate(seed, **memory_fuzz.MODES[mode])
            assert program.lines
            first, second = (memory_fuzz._run(program.function(), program) for _ in range(2))
            assert memory_fuzz._difference(first, second, 0.0) is None

    def test_every_size_is_called(self) -> None:
        program = memory_fuzz.generate(1, dynamic=True)
        sizes = [memory_fuzz.Input("x", ("n",)).make(dict(s), 0).shape[0] for s in program.sizes]
        assert sizes == [dict(s)["n"] for s in program.sizes]


class TestFailures:
    """What is wrong is found, and cut down to what it needs."""

    @pytest.fixture
    def program(self) -> memory_fuzz.Program:
        lines = ("a = x0 @ x0", "b = a @ x0", "c = b @ a", "d = b @ c", "e = x0 @ x0.mT")
        square = memory_fuzz.Input("x0", ("n", "n"))
        return memory_fuzz.Program(0, (square,), lines, ("d", "b", "e"), ((("n", 16),),))

    def test_a_wrong_value(
        self, program: memory_fuzz.Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Members that lie on top of each other."""
        from inductor_ext.memory.planner import arenas
        from inductor_ext.memory.planner.arena_plan import Arena

        plan = arenas.plan_arenas

        def wrong(*arguments: Any, **more: Any) -> tuple[Arena, ...]:
            return tuple(
                dataclasses.replace(
                    arena,
                    members=tuple(dataclasses.replace(m, offset=0) for m in arena.members),
                )
                for arena in plan(*arguments, **more)
            )

        monkeypatch.setattr(arenas, "plan_arenas", wrong)
        (failure,), skipped = memory_fuzz.check(program, ["always"])
        assert (failure.kind, skipped) == ("value", None)
        small = memory_fuzz.reduced(failure)
        assert len(small.program.lines) < len(program.lines)
        assert "def program(x0):" in small.script()

    def test_an_error(self, program: memory_fuzz.Program, monkeypatch: pytest.MonkeyPatch) -> None:
        from inductor_ext.memory import planner_input

        monkeypatch.setattr(planner_input, "max_live_bytes", None)
        (failure,), _ = memory_fuzz.check(program, ["default"])
        assert failure.kind == "error"

    def test_what_eager_mode_refuses_is_skipped(self, program: memory_fuzz.Program) -> None:
        broken = dataclasses.replace(program, lines=("d = b = x0 @ x0[1:]",))
        failures, skipped = memory_fuzz.check(broken, ["default"])
        assert failures == []
        assert skipped is not None
        assert "RuntimeError" in skipped
