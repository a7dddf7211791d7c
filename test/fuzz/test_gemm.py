"""Random programs of GEMMs: those of a few seeds are right, and what is wrong is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test.fuzz import gemm as gemm_fuzz

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

SEEDS = range(11, 35)


@pytest.fixture(scope="module")
def programs() -> list[gemm_fuzz.Program]:
    return [gemm_fuzz.generate(seed) for seed in SEEDS]


def test_all_results_are_correct(programs: list[gemm_fuzz.Program]) -> None:
    failures = gemm_fuzz.failures(programs)
    assert not failures, failures


def test_programs_differ_and_stay_the_same(programs: list[gemm_fuzz.Program]) -> None:
    assert gemm_fuzz.generate(SEEDS[0]) == programs[0]
    assert len({program.text() for program in programs}) == len(programs)
    assert any(program.backward for program in programs)
    assert any(program.rows for program in programs)
    text = "\n".join(program.text() for program in programs)
    usual = ("layer_norm", "torch.uint8", "torch.int8", "bmm", "chunk", "addmm", "amax")
    for found in (*usual, "mul_(", "torch.int32", "(1 - "):
        assert found in text + str([program.inputs for program in programs]), found


def test_what_is_wrong_is_found_and_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that gives three times instead of twice as much."""
    program = gemm_fuzz.Program(
        0,
        torch.float32,
        tuple(
            gemm_fuzz.Input(name, (rows, 32), torch.float32)
            for name, rows in (("x0", 5), ("w1", 32))
        ),
        ("v0 = F.linear(x0, w1)", "v1 = 2 * v0", "v2 = v1 + x0"),
        ("v2", "v0"),
    )
    lowered = gemm_fuzz._lowered

    def wrong(program: gemm_fuzz.Program, rule: Any) -> Any:
        lines = tuple(line.replace("2 *", "3 *") for line in program.lines)
        is_stock = rule is gemm_fuzz._stock
        return lowered(program if is_stock else dataclasses.replace(program, lines=lines), rule)

    monkeypatch.setattr(gemm_fuzz, "_lowered", wrong)
    found = gemm_fuzz.failures([program])
    assert found[0].startswith("v2: off by")
    smaller = gemm_fuzz.reduced(program)
    assert smaller == dataclasses.replace(program, lines=program.lines[:2], results=("v1",))


def test_what_inductor_rounds_as_badly_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    program = gemm_fuzz.generate(SEEDS[0])
    right = program.function()(*program.values())
    rough = [item + 0.5 for item in right]
    both: dict[Any, Any] = {gemm_fuzz._rule: rough, gemm_fuzz._stock: rough}

    def results(programs: Any, rule: Any) -> dict[int, Any]:
        return {
            program.seed: both[rule if rule is gemm_fuzz._rule else rule(program)]
            for program in programs
        }

    monkeypatch.setattr(gemm_fuzz, "_results", results)
    assert gemm_fuzz.failures([program]) == {}
    both[gemm_fuzz._stock] = list(right)
    assert list(gemm_fuzz.failures([program])) == [program.seed]


def test_only_what_cannot_be_lowered_at_all_is_excused() -> None:
    program = gemm_fuzz.generate(SEEDS[0])
    assert gemm_fuzz._wrong(program, RuntimeError("ours"), RuntimeError("stock's")) is None
    assert gemm_fuzz._wrong(program, RuntimeError("ours"), []) == "RuntimeError: ours"
    assert gemm_fuzz._wrong(program, "no such function", "no such function") == "no such function"
