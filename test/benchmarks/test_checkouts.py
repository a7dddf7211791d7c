"""Benchmarks that compare two checkouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import checkouts

COMPARISON = checkouts.Comparison("example", "one call", {"call": "us"}, rounds=3)

SCRIPT = """
import json, os, pathlib, sys

assert sys.argv[1:] == ["--child"]
folder = pathlib.Path(os.environ["PYTHONPATH"])
print(json.dumps({"call": float((folder / "inductor_ext" / "figure").read_text())}))
"""


def checkout(folder: Path, figure: float) -> Path:
    (folder / "inductor_ext").mkdir(parents=True)
    (folder / "inductor_ext" / "figure").write_text(str(figure))
    return folder


def test_ratio_is_this_checkout_over_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "example.py"
    script.write_text(SCRIPT)
    baseline = checkout(tmp_path / "before", 8.0)
    monkeypatch.chdir(checkout(tmp_path / "now", 6.0))
    argv = ["--baseline", str(baseline), "--json-out", str(tmp_path / "results")]

    assert checkouts.main(COMPARISON, script, None, argv) == 0

    assert "ratio 0.750" in capsys.readouterr().out
    (stored,) = (tmp_path / "results").rglob("*.json")
    (row,) = json.loads(stored.read_text())["rows"]
    assert row["ours"] == 6.0
    assert "before: 8.000 us" in row["note"]


def test_baseline_without_the_package_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        checkouts.main(COMPARISON, tmp_path, None, ["--baseline", str(tmp_path)])
    assert "--baseline must name a checkout" in capsys.readouterr().err


def test_single_round_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--baseline", str(checkout(tmp_path, 1.0)), "--rounds", "1"]
    with pytest.raises(SystemExit):
        checkouts.main(COMPARISON, tmp_path, None, argv)
    assert "--rounds is 1" in capsys.readouterr().err
