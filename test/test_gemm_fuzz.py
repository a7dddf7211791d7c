"""Random programs of GEMMs: those of a few seeds are right, and what is wrong is found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from test import gemm_fuzz

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

SEEDS = range(24)


@pytest.fixture(scope="module")
def programs() -> list[gemm_fuzz.Program]:
    return [gemm_fuzz.generate(seed) for seed in SEEDS]


def test_all_numbers_are_right(programs: list[gemm_fuzz.Program]) -> None:
    failures = gemm_fuzz.failures(programs)
    assert not failures, failures


def test_programs_differ_and_stay_the_same(programs: list[gemm_fuzz.Program]) -> None:
    assert gemm_fuzz.generate(SEEDS[0]) == programs[0]
    assert len({each.text() for each in programs}) == len(programs)
    assert any(each.backward for each in programs)
    assert any(each.rows for each in programs)
    text = "\n".join(each.text() for each in programs)
    for found in ("layer_norm", "torch.uint8", "torch.int8", "bmm", "chunk", "addmm", "amax"):
        assert found in text + str([each.inputs for each in programs]), found


def test_what_is_wrong_is_found_and_cut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that eager mode does not compute as it is lowered."""
    program = gemm_fuzz.Program(
        0,
        torch.float32,
        tuple(
            gemm_fuzz.Input(name, (rows, 32), torch.float32)
            for name, rows in (("x0", 5), ("w1", 32))
        ),
        ("v0 = F.linear(x0, w1)", "v1 = twice(v0)", "v2 = v1 + x0"),
        ("v2", "v0"),
    )

    def twice(value: torch.Tensor) -> torch.Tensor:
        return value * (3 if value.device.type == "cuda" else 2)

    monkeypatch.setattr(gemm_fuzz, "_NAMES", {**gemm_fuzz._NAMES, "twice": twice})
    found = gemm_fuzz.failures([program])
    assert found[0].startswith("v2: off by")
    smaller = gemm_fuzz.reduced(program)
    assert smaller == dataclasses.replace(program, lines=program.lines[:2], results=("v1",))
