"""A comparison of eager mode, Inductor (default) and the extension on one model."""

from __future__ import annotations

import json
import pathlib
from xml.etree import ElementTree

import pytest
import torch

from inductor_ext.cli import main
from inductor_ext.reports import comparison, comparison_page

MODEL = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x, scale=1.0):
        return self.down(torch.nn.functional.gelu(self.up(x))) * scale


def make():
    torch.manual_seed(0)
    return Net().eval(), (torch.randn(8, 32),), {"scale": 2.0}


def nothing():
    return 3
"""


@pytest.fixture
def source(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_the_command(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", source, "--seconds", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["title"], report["reference"]) == ("Net", "float64")
    assert report["calls"] >= 5
    assert [outcome["way"] for outcome in report["outcomes"]] == list(comparison.WAYS)
    for outcome in report["outcomes"]:
        assert outcome["failure"] is None
        assert 0 < outcome["error"] < 1e-5
        assert outcome["milliseconds"] > 0
        # The result alone has 1 KiB.
        assert 1024 <= outcome["memory_bytes"]["cpu"] < 65_536
        assert (outcome["compile_seconds"] is None) == (outcome["way"] == "eager")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (":nothing", "'nothing' gives no tuple (module, args) or (module, args, kwargs), but a"),
        (":absent", "it defines no 'absent'"),
        ("x", "there is no such file"),
    ],
)
def test_a_source_without_a_model(
    name: str, why: str, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", f"{source}{name}"]) == 2
    assert why in capsys.readouterr().err


class Rounded(torch.nn.Module):
    """Does not run in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype != torch.float64
        return x * 3


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: torch.nn.Module, backend: str, **_: object) -> torch.nn.Module:
        if backend == "inductor_ext":
            raise RuntimeError("no compiler\nsecond line")
        return model

    monkeypatch.setattr(torch, "compile", fail)
    compared = comparison.compare(Rounded(), (torch.ones(4),), seconds=0.0)
    assert compared.reference == "eager"
    assert compared.calls == 5
    title, empty, head, eager, inductor, ours, failed = str(compared).splitlines()
    assert title == "Rounded: medians of 5 calls, error against eager"
    assert empty == ""
    assert head.split("  ")[-1] == "error"
    assert eager.split()[0] == "eager"
    assert inductor.split()[2] == "1.00"
    assert ours.split() == ["inductor_ext", *"-----"]
    assert failed == "inductor_ext failed: no compiler"


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 8.5], [1.25, 8.0], 0.5 / 8),
        ([1.0, NAN, INF], [1.0, NAN, INF], 0.0),
        ([1.5, INF], [2.0, INF], 0.25),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, -INF], [1.0, INF], INF),
        ([1 + 2j], [1 + 1j], 2**-0.5),
        ([True, False], [True, True], 1.0),
    ],
)
def test_an_error_is_relative_to_the_largest_value(
    actual: list[float], expected: list[float], error: float
) -> None:
    found = comparison._find_error([torch.tensor(actual), 3], [torch.tensor(expected), 3])
    assert found == pytest.approx(error)


def test_the_page(source: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.html"
    assert main.main(["bench", source, "--seconds", "1", "--html", str(path)]) == 0
    page = ElementTree.fromstring(path.read_text().removeprefix("<!DOCTYPE html>"))
    titles = [heading.text for heading in page.iterfind(".//{*}h2")]
    assert titles[:3] == ["Comparison", "Matmuls", "Fusions"]
    table = next(page.iterfind(".//{*}table"))
    rows = [[cell.text for cell in row] for row in table.iterfind(".//{*}tr")]
    text = capsys.readouterr().out
    assert [row[0] for row in rows[1:]] == list(comparison.WAYS)
    for row in rows[1:]:
        assert f" {row[1]} " in text
    assert len(list(table.iterfind(".//{*}svg"))) == 6


def test_the_page_of_a_failure() -> None:
    failed = comparison.Outcome(way="inductor_ext", failure="no <compiler>")
    compared = comparison.Comparison(title="M", reference="eager", calls=0, outcomes=(failed,))
    page = comparison_page.render_page(compared, None)
    assert "Comparison on M" in page
    assert "inductor_ext failed: no &lt;compiler&gt;" in page
    assert "<svg" not in page


def test_the_page_is_checked_before(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", source, "--html", "absent/page.html"]) == 2
    assert "absent does not exist" in capsys.readouterr().err
