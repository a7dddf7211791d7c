"""`inductor-ext tune`: its report on tuning results, and their transfer to other machines."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inductor_ext.autotune import results_db as stores
from inductor_ext.autotune.results import read_table, write_table
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.cli import main
from inductor_ext.templates.format import config_words, problem_words
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput, Operand
from inductor_ext.templates.triton.config import GemmConfig
from test.support.children.tuning import H200, HERE, decision, entry, here, problem

CHECKOUT = Path(__file__).parents[2]
ON_H100 = dataclasses.replace(HERE, device="NVIDIA H100 80GB HBM3")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TuningDatabase:
    """The store that the command reads, with a measurement of this machine and an import."""
    monkeypatch.setenv("INDUCTOR_EXT_TUNING_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(stores, "TABLES", tmp_path / "no_tables")
    store = TuningDatabase(tmp_path / "store")
    store.put({problem(): decision(80.0)}, H200, here)
    store.add([entry(1, 50.0, ON_H100)])
    return store


def tune(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main.main(["tune", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def shown(*filters: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(tune("show", "--json", *filters, capsys=capsys))[
        "entries"
    ]
    return rows


def test_show_lists_by_environment(
    store: TuningDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tune("show", capsys=capsys).splitlines()
    assert lines[0] == (
        "NVIDIA H100 80GB HBM3 (sm_90, 132 SMs), Triton 3.7.1, CUDA 13.0, templates "
        "0123456789abcdef"
    )
    assert lines[1].split() == [
        *("GEMM", "chosen", "us", "Inductor", "us", "speedup", "source", "date")
    ]
    tile = "persistent_tma 128x256x64, 3 stages, 8 warps, tma, flatten"
    gemm = "mm 2049x4096x4096 bf16 rc"
    assert lines[2].split() == [
        *gemm.split(),
        *tile.split(),
        *("50.0", "100.0", "2.000", "imported", "2023-11-14"),
    ]
    assert lines[6].split()[-3:-1] == ["1.250", "measured"]
    assert lines[-1] == f"2 measurements, folder {store.folder}"


def test_show_prints_json(store: TuningDatabase, capsys: pytest.CaptureFixture[str]) -> None:
    measured, imported = shown(capsys=capsys)
    assert imported == {
        "words": "mm 2049x4096x4096 bf16 rc",
        "chosen_words": "persistent_tma 128x256x64, 3 stages, 8 warps, tma, flatten",
        "microseconds": 50.0,
        "stock_microseconds": 100.0,
        "ratio": 2.0,
        "source": "imported",
        "measured": "2023-11-14T22:13:20+00:00",
        "entry": entry(1, 50.0, ON_H100).to_json(),
    }
    assert measured["source"] == "measured"


@pytest.mark.parametrize(
    ("filters", "sources"),
    [
        ((), ["measured", "imported"]),
        (("--device", "h100"), ["imported"]),
        (("--source", "measured"), ["measured"]),
        (("--source", "shipped"), []),
        (("--match", "MM 2049x"), ["imported"]),
        (("--match", "BF16", "--device", "nvidia"), ["measured", "imported"]),
    ],
)
def test_filters(
    store: TuningDatabase,
    capsys: pytest.CaptureFixture[str],
    filters: tuple[str, ...],
    sources: list[str],
) -> None:
    origins = [row["source"] for row in shown(*filters, capsys=capsys)]
    assert origins == sources


def test_this_device_needs_a_gpu(
    store: TuningDatabase, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main.main(["tune", "show", "--device", "this"]) == 2
    assert "A GPU is missing" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert [row["source"] for row in shown("--device", "this", capsys=capsys)] == ["measured"]


def test_a_table_is_imported_on_another_machine(
    store: TuningDatabase,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = tmp_path / "table.json"
    assert tune("export", table, capsys=capsys) == f"{table}: 2 measurements\n"
    assert tune("export", tmp_path / "h100.json", "--device", "H100", capsys=capsys)
    assert read_table(tmp_path / "h100.json") == [entry(1, 50.0, ON_H100)]
    monkeypatch.setenv("INDUCTOR_EXT_TUNING_CACHE_DIR", str(tmp_path / "other"))
    output = tune("import", table, tmp_path / "h100.json", capsys=capsys)
    assert (
        output
        == "2 measurements: 2 new, 0 updated, 0 ignored (the existing result is as new or newer)\n"
    )
    result = TuningDatabase(tmp_path / "other").lookup(problem(), H200, here)
    assert result is not None
    assert (result.exact, result.origin) == (True, "imported")
    write_table(table, [entry(), entry(1, 40.0, ON_H100, measured=2_000_000_000)])
    output = tune("import", table, capsys=capsys)
    assert output.startswith("2 measurements: 0 new, 1 updated, 1 ignored")


def test_invalid_imports_change_nothing(
    store: TuningDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "good.json", [entry(2)])
    (tmp_path / "bad.json").write_text('{"format": 1, "entries": [{}]}')
    before = store.generation(tuning=True)
    files = [str(tmp_path / "good.json"), str(tmp_path / "bad.json")]
    assert main.main(["tune", "import", *files]) == 2
    assert f"{files[1]}, entry 1: " in capsys.readouterr().err
    assert len(store.entries("imported")) == 1
    assert store.generation(tuning=True) == before


def test_import_into_a_folder_that_cannot_be_written_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INDUCTOR_EXT_TUNING_CACHE_DIR", str(tmp_path / "file" / "store"))
    write_table(tmp_path / "table.json", [entry()])
    assert main.main(["tune", "import", str(tmp_path / "table.json")]) == 2
    assert "the folder cannot be written" in capsys.readouterr().err


def test_partial_changes_fail_and_are_reported(
    store: TuningDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The fourth problem's file can neither be replaced nor removed.
    store.files.path_of("imported", problem(3)).mkdir()
    write_table(tmp_path / "table.json", [entry(index) for index in range(5)])
    assert main.main(["tune", "import", str(tmp_path / "table.json")]) == 2
    errors = capsys.readouterr().err
    assert "2 measurements were not added. Added: 3 measurements: 3 new, 0 updated" in errors
    assert len(store.entries("imported")) == 4
    assert main.main(["tune", "clear", "--source", "imported"]) == 2
    errors = capsys.readouterr().err
    left = len(list((store.files.path / "imported").glob("*.json")))
    assert f"removed the results of {4 - left} GEMM" in errors
    assert f"the results of {left} GEMM" in errors


def test_clear_forgets_one_source_or_both(
    store: TuningDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "results of 1 GEMM from" in tune("clear", "--source", "imported", capsys=capsys)
    assert [len(store.entries(source)) for source in ("measured", "imported")] == [1, 0]
    tune("clear", capsys=capsys)
    assert store.entries("measured") == []


def test_an_unused_folder_is_noted_apart_from_the_output(
    store: TuningDatabase, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDUCTOR_EXT_TUNING_CACHE", "0")
    assert main.main(["tune", "show", "--json"]) == 0
    output = capsys.readouterr()
    assert len(json.loads(output.out)["entries"]) == 2
    assert output.err == "The folder is not used: INDUCTOR_EXT_TUNING_CACHE is 0.\n"


def test_it_needs_no_torch_and_makes_no_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from inductor_ext.cli.main import main; main(['tune', 'show']); "
        "assert 'torch' not in sys.modules, "
        "sorted(name for name in sys.modules if name.startswith('torch'))"
    )
    environment = {"INDUCTOR_EXT_TUNING_CACHE_DIR": str(tmp_path / "none"), "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert not (tmp_path / "none").exists()


# --- words ---

INT4 = GemmProblem(
    "mixed",
    16,
    4096,
    512,
    Operand("bfloat16", (512, 1), 8),
    Operand("int4", (1, 512), 32),
    "bfloat16",
    prologue=Prologue(dequant=Dequant("group", 128, zero_points=True)),
)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (GemmProblem.contiguous("mm", 1, 1000, 8, "float16"), "mm 1x1000x8 fp16 rc"),
        (
            GemmProblem.contiguous("bmm", 5, 6, 7, "float32", batch=3, layouts="cr", tf32=True),
            "bmm 3x 5x6x7 fp32 cr, a aligned to 4 B, b aligned to 8 B, tf32",
        ),
        (
            GemmProblem.contiguous("scaled", 16, 64, 64, "float8_e4m3fn", fast_accumulation=True),
            "scaled 16x64x64 fp8_e4m3fn->bf16 rc, fast accumulation",
        ),
        (
            INT4,
            "mixed 16x4096x512 bf16*int4 rc, b dequantized by 128 along K with zero points",
        ),
        (
            GemmProblem.contiguous(
                "mm",
                16,
                128,
                64,
                prologue=Prologue(RowNorm("rms")),
                parts=(64, 64),
                epilogue=Epilogue(gated=True),
            ),
            "mm 16x128x64 bf16 rc, a normalized, gated",
        ),
        (
            GemmProblem.contiguous("mm", 16, 128, 64, prologue=Prologue(RowNorm("layer", 2))),
            "mm 16x128x64 bf16 rc, a standardized",
        ),
        (
            GemmProblem.contiguous(
                "addmm",
                16,
                128,
                64,
                parts=(96, 32),
                deterministic=True,
                epilogue=Epilogue((EpilogueInput("float32", "row"),), 0, "float8_e5m2", 1),
            ),
            (
                "addmm 16x128x64 bf16->fp8_e5m2 rc, N = 96+32, + row fp32, scaled by maxima of "
                "rows, deterministic"
            ),
        ),
    ],
)
def test_a_problem_in_words(problem: GemmProblem, words: str) -> None:
    assert problem_words(problem) == words


def test_a_configuration_in_words() -> None:
    config = GemmConfig("splitk", 16, 64, 128, 4, 4, group_m=4, split_k=8, swap_ab=True, pdl=True)
    assert config_words(config) == (
        "splitk 16x64x128, 4 stages, 4 warps, group 4, split 8, swap, pdl"
    )
    assert config_words(None) == "Inductor"
