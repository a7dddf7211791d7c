"""The tables and plots of docs/user are those of the committed results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import compatibility, doc_plots, doc_tables
from benchmarks.harness import results
from benchmarks.harness.bar_chart import BarChart, Group

README, BENCHMARKS, COMPATIBILITY = (page.read_text(encoding="utf-8") for page in doc_tables.PAGES)

SVG = "{http://www.w3.org/2000/svg}"

CHART = BarChart(
    "a < b",
    "what it shows",
    (("one", 0), ("two", 2)),
    (Group("first", (2.0, 1.0)), Group("second", (None, 4.0))),
    reference=2.0,
)


@pytest.mark.parametrize("page", doc_tables.PAGES, ids=lambda page: page.stem)
def test_the_page_has_the_committed_results(page: Path) -> None:
    """`python -m benchmarks.doc_tables` brings it up to date."""
    text = page.read_text(encoding="utf-8")
    assert doc_tables.render(text) == text


def test_every_table_is_on_its_page_once() -> None:
    names = re.findall(r"<!-- table: ([\w ]+) -->", BENCHMARKS)
    assert len(names) == len(set(names)) == BENCHMARKS.count("<!-- end -->") == 17
    assert re.findall(r"<!-- table: ([\w ]+) -->", COMPATIBILITY) == list(compatibility.TABLES)


def test_every_result_of_tests_is_in_the_compatibility_tables() -> None:
    linked = set(re.findall(r"\(\.\./\.\./(benchmarks/results/\S+?\.json)\)", COMPATIBILITY))
    files = {
        path.relative_to(results.CHECKOUT).as_posix()
        for pattern in (
            "*-tests*",
            "op-sweep",
            "graphs",
            "across-torch",
            "model-sweep*",
            *compatibility.RELIABILITY,
        )
        for path in results.RESULTS.glob(f"{pattern}/*.json")
    }
    assert linked == files


@pytest.mark.parametrize("name", doc_plots.PLOTS)
def test_the_plot_has_the_committed_results(name: str) -> None:
    drawing = doc_plots.PLOTS[name]().draw()
    assert (doc_plots.FOLDER / name).read_text(encoding="utf-8") == drawing
    pages = (BENCHMARKS.count(f"](images/{name})"), README.count(f"](docs/user/images/{name})"))
    assert pages == ((0, 1) if name == "summary.svg" else (1, 0))
    root = ET.fromstring(drawing)
    title, description = (root.find(SVG + tag) for tag in ("title", "desc"))
    assert title is not None
    assert title.text
    assert description is not None
    assert description.text
    assert "prefers-color-scheme: dark" in drawing
    assert "http" not in drawing.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("name", "suites", "metric"),
    [
        ("tuned_models.svg", ("e2e/nvidia-h200", "e2e-decode/nvidia-h100-80gb-hbm3"), "graphs, "),
        ("untuned_models.svg", ("held-out/nvidia-h200",), "graphs, default in both"),
        ("peak_memory.svg", ("memory-steps/nvidia-h200",), "peak"),
        ("package_load.svg", ("aoti/amd-epyc-2-cores-avx512",), "load, C++ loader"),
    ],
)
def test_a_plot_has_every_case_of_its_files(
    name: str, suites: tuple[str, ...], metric: str
) -> None:
    labels = " ".join(group.label.lower() for group in doc_plots.PLOTS[name]().groups)
    for suite in suites:
        rows = results.read(results.RESULTS / f"{suite}.json")["rows"]
        cases = {row["case"].split(", ")[0] for row in rows if row["metric"].startswith(metric)}
        assert len(cases) > 1
        assert {case for case in cases if case not in labels} == set()


def test_bars_are_proportional() -> None:
    root = ET.fromstring(CHART.draw())
    bars = [rect for rect in root.iter(f"{SVG}rect") if float(rect.get("y", 0)) > 60]
    widths = [float(bar.get("width", 0)) for bar in bars]
    assert widths == [widths[1] * 2, widths[1], widths[1] * 4]
    assert [bar.get("class") for bar in bars] == ["bar0", "bar2", "bar2"]
    (line,) = (path for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray"))
    first = float(bars[0].get("x", 0))
    assert line.get("d", "").startswith(f"M{first + widths[0]} ")
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts == ["a < b", "one", "two", "first", "2.00", "1.00", "second", "4.00"]


def test_the_drawing_is_as_high_as_its_bars() -> None:
    root = ET.fromstring(CHART.draw())
    bottom = max(float(r.get("y", 0)) + float(r.get("height", 0)) for r in root.iter(f"{SVG}rect"))
    assert root.get("viewBox") == f"0 0 680 {CHART.height}"
    assert bottom <= CHART.height
