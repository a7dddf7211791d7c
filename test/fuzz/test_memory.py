"""A few random programs of `test.fuzz.memory`, the same ones in every run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from test.fuzz import memory as memory_fuzz
from test.fuzz import memory_generator, memory_programs

SAMPLE = (
    ("extern", 2000, ("default", "always", "outputs", "combined")),
    ("extern", 2002, ("default", "always")),
    ("extern_dynamic", 1001, ("default", "always")),
    ("inference", 2001, ("default", "always")),
    ("training", 3010, ("default", "always")),
)
"""Mode, seed and settings. The extern modes need no C++ compiler and take little time."""


@pytest.mark.parametrize(("mode", "seed", "names"), SAMPLE)
def test_random_programs_equal_eager(mode: str, seed: int, names: tuple[str, ...]) -> None:
    program = memory_generator.generate(seed, **memory_fuzz.MODES[mode])
    failures, skipped = memory_fuzz.check(program, names)
    assert skipped is None, "Inductor (default) runs it with eager mode's values"
    assert not failures, "\n".join(failure.script() for failure in failures)


class TestPrograms:
    def test_a_seed_always_draws_the_same_program(self) -> None:
        assert memory_generator.generate(7) == memory_generator.generate(7)
        assert memory_generator.generate(7) != memory_generator.generate(8)

    @pytest.mark.parametrize("mode", memory_fuzz.MODES)
    def test_eager_mode_runs_programs(self, mode: str) -> None:
        for seed in range(2):
            program = memory_generator.generate(seed, **memory_fuzz.MODES[mode])
            assert program.lines
            first, second = (
                memory_programs.run_program(program.function(), program) for _ in range(2)
            )
            assert memory_fuzz.find_difference(first, second, 0.0) is None

    def test_each_set_of_sizes_is_called(self) -> None:
        program = memory_generator.generate(1, dynamic=True)
        sizes = [
            memory_programs.Input("x", ("n",)).make(dict(s), 0).shape[0] for s in program.sizes
        ]
        assert sizes == [dict(s)["n"] for s in program.sizes]


class TestFailures:
    """Failures are found and reduced."""

    @pytest.fixture
    def program(self) -> memory_programs.Program:
        lines = ("a = x0 @ x0", "b = a @ x0", "c = b @ a", "d = b @ c", "e = x0 @ x0.mT")
        square = memory_programs.Input("x0", ("n", "n"))
        return memory_programs.Program(0, (square,), lines, ("d", "b", "e"), ((("n", 16),),))

    def test_wrong_values_are_found_and_reduced(
        self, program: memory_programs.Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Members of an arena overlap."""
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
        small = memory_fuzz.reduce_failure(failure)
        assert len(small.program.lines) < len(program.lines)
        assert "def program(x0):" in small.script()

    def test_errors_are_found(
        self, program: memory_programs.Program, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from inductor_ext.memory import planner_input

        monkeypatch.setattr(planner_input, "max_live_bytes", None)
        (failure,), _ = memory_fuzz.check(program, ["default"])
        assert failure.kind == "error"

    def test_programs_that_fail_in_eager_mode_are_skipped(
        self, program: memory_programs.Program
    ) -> None:
        broken = dataclasses.replace(program, lines=("d = b = x0 @ x0[1:]",))
        failures, skipped = memory_fuzz.check(broken, ["default"])
        assert failures == []
        assert skipped is not None
        assert "RuntimeError" in skipped
