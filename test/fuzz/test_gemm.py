"""A few random programs of `test.fuzz.gemm`, and the detection of wrong kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test.fuzz import gemm as gemm_fuzz
from test.fuzz import gemm_programs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered for a simulated GPU")

SEEDS = range(11, 35)


@pytest.fixture(scope="module")
def programs() -> list[gemm_programs.Program]:
    return [gemm_programs.generate(seed) for seed in SEEDS]


def test_all_results_are_correct(programs: list[gemm_programs.Program]) -> None:
    failures = gemm_fuzz.find_failures(programs)
    assert not failures, failures


def test_programs_differ_and_stay_the_same(programs: list[gemm_programs.Program]) -> None:
    assert gemm_programs.generate(SEEDS[0]) == programs[0]
    assert len({program.text() for program in programs}) == len(programs)
    assert any(program.backward for program in programs)
    assert any(program.rows for program in programs)
    text = "\n".join(program.text() for program in programs)
    usual = ("layer_norm", "torch.uint8", "torch.int8", "bmm", "chunk", "addmm", "amax")
    for expected in (*usual, "mul_(", "torch.int32", "(1 - "):
        assert expected in text + str([program.inputs for program in programs]), expected


def test_wrong_results_are_found_and_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that multiplies by 3 instead of 2."""
    program = gemm_programs.Program(
        0,
        torch.float32,
        tuple(
            gemm_programs.Input(name, (rows, 32), torch.float32)
            for name, rows in (("x0", 5), ("w1", 32))
        ),
        ("v0 = F.linear(x0, w1)", "v1 = 2 * v0", "v2 = v1 + x0"),
        ("v2", "v0"),
    )
    lower = gemm_fuzz._lower

    def change(program: gemm_programs.Program) -> gemm_programs.Program:
        lines = tuple(line.replace("2 *", "3 *") for line in program.lines)
        return dataclasses.replace(program, lines=lines)

    def lower_wrong(program: gemm_programs.Program, rule: Any) -> Any:
        return lower(program if rule is gemm_fuzz._use_inductor else change(program), rule)

    with monkeypatch.context() as patch:
        patch.setattr(gemm_fuzz, "_lower", lower_wrong)
        failures = gemm_fuzz.find_failures([program])
    assert failures[0].startswith("v2: off by")

    def compute_wrong(programs: Any, rule: Any) -> dict[int, Any]:
        """Eager mode in place of kernels, of which many are run to reduce a program."""
        is_wrong = rule is gemm_fuzz._choose_any_legal
        run = [change(program) if is_wrong else program for program in programs]
        return {program.seed: list(program.function()(*program.values())) for program in run}

    monkeypatch.setattr(gemm_fuzz, "_compute_results", compute_wrong)
    smaller = gemm_fuzz.reduce_program(program)
    assert smaller == dataclasses.replace(program, lines=program.lines[:2], results=("v1",))


def test_errors_that_inductor_has_too_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    program = gemm_programs.generate(SEEDS[0])
    right = program.function()(*program.values())
    rough = [item + 0.5 for item in right]
    both: dict[Any, Any] = {gemm_fuzz._choose_any_legal: rough, gemm_fuzz._use_inductor: rough}

    def results(programs: Any, rule: Any) -> dict[int, Any]:
        return {
            program.seed: both[rule if rule is gemm_fuzz._choose_any_legal else rule(program)]
            for program in programs
        }

    monkeypatch.setattr(gemm_fuzz, "_compute_results", results)
    assert gemm_fuzz.find_failures([program]) == {}
    both[gemm_fuzz._use_inductor] = list(right)
    assert list(gemm_fuzz.find_failures([program])) == [program.seed]


def test_programs_that_inductor_cannot_lower_are_skipped() -> None:
    program = gemm_programs.generate(SEEDS[0])
    assert (
        gemm_fuzz._describe_failure(program, RuntimeError("extension"), RuntimeError("Inductor"))
        is None
    )
    assert (
        gemm_fuzz._describe_failure(program, RuntimeError("extension"), [])
        == "RuntimeError: extension"
    )
    assert (
        gemm_fuzz._describe_failure(program, "no such function", "no such function")
        == "no such function"
    )
