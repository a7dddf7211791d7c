"""The report on a compile or a package: its facts, its page, and its errors."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.cli import main
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.reports import page_style
from inductor_ext.reports.compile_facts import CompileFacts
from inductor_ext.reports.compile_phases import FIRST_CALL, PHASES
from inductor_ext.reports.compile_report import CompileReport
from inductor_ext.reports.contents_report import ContentsReport
from inductor_ext.reports.gemm_report import GemmReport
from test.support.memory_plans import SVG
from test.support.report_facts import FACTS, UNCOVERED

HTML = "{http://www.w3.org/1999/xhtml}"
SECTIONS = [
    "Matmuls",
    "Fusions",
    "Memory",
    "Kernels by time",
    "Compile time",
    "Caches",
    "Inductor (default)",
]


def parse(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def text_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def section(page: ElementTree.Element, name: str) -> str:
    """The text of the section with a heading of this id."""
    (found,) = [s for s in page.iter(f"{HTML}section") if s.attrib["aria-labelledby"] == name]
    return text_of(found)


def rows(page: ElementTree.Element, caption: str) -> list[list[str]]:
    """The cells of the table whose caption starts with some words, without the head."""
    (table,) = [
        table
        for table in page.iter(f"{HTML}table")
        if text_of(table.find(f"{HTML}caption")).startswith(caption)  # type: ignore[arg-type]
    ]
    found = [[text_of(cell) for cell in row] for row in table.iter(f"{HTML}tr")]
    return found[1:]


# The page


def test_every_section_has_a_heading_and_a_link() -> None:
    page = parse(CompileReport(FACTS).to_html())
    (heading,) = page.iter(f"{HTML}h1")
    assert heading.text == "Report on <Model> & more"
    assert [h.text for h in page.iter(f"{HTML}h2")] == SECTIONS
    ids = [e.attrib["id"] for e in page.iter() if "id" in e.attrib]
    assert len(ids) == len(set(ids))
    targets = [a.attrib["href"].removeprefix("#") for a in page.iter(f"{HTML}a")]
    assert len(targets) == len(SECTIONS) + 1
    assert set(targets) <= set(ids)
    levels = [int(e.tag[-1]) for e in page.iter() if re.fullmatch(rf"{HTML}h\d", e.tag)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_the_page_is_self_contained_and_accessible() -> None:
    html = CompileReport(FACTS).to_html()
    page = parse(html)
    assert not re.search(r"https?://(?!www\.w3\.org/)|<script|<link|<img|url\(|@import", html)
    assert page.attrib["lang"] == "en"
    assert {e.tag.removeprefix(HTML) for e in page.iter()} >= {"header", "nav", "main", "section"}
    scrolled = {
        child
        for region in page.iter(f"{HTML}div")
        for child in region
        if region.attrib.get("tabindex") == "0" and region.attrib.get("aria-label")
    }
    for table in page.iter(f"{HTML}table"):
        assert table in scrolled
        assert text_of(table[0])
        assert table[0].tag == f"{HTML}caption"
        assert all(cell.attrib["scope"] in ("col", "row") for cell in table.iter(f"{HTML}th"))
        lengths = {len(row) for row in table.iter(f"{HTML}tr")}
        assert len(lengths) == 1
    texts = {e.attrib["id"]: e.text for e in page.iter() if "id" in e.attrib}
    drawings = list(page.iter(f"{SVG}svg"))
    assert len(drawings) == 1 + 20 + 2 + 2
    for svg in drawings:
        assert svg.attrib["role"] == "img"
        assert all(texts[name] for name in svg.attrib["aria-labelledby"].split())


def test_every_class_has_a_style() -> None:
    html = CompileReport(FACTS).to_html()
    classes = {name for text in re.findall(r' class="([^"]*)"', html) for name in text.split()}
    unstyled = {name for name in classes if not re.search(rf"\.{name}\b", page_style.STYLE)}
    named = {"arena", "x-label", "x-tick", "y-label", "y-tick"}
    assert {name for name in unstyled if not re.fullmatch(r"(on-)?(m\d|other|none)", name)} <= named


def test_matmuls_are_compared_with_the_roofline() -> None:
    page = parse(CompileReport(FACTS).to_html())
    first, second = rows(page, "Matmuls in the order")
    assert first[:6] == ["1. mm 16x1024x4096 bf16 rc", "2", "5.0", "8.0", "2.0", "40%"]
    assert "kernel 5.0 us, Inductor (default) 8.0 us, roofline 2.0 us" in first[6]
    assert first[7:] == [
        "cp_async 64x64x64, 3 stages, 4 warps",
        "measured: 5.0 us, Inductor (default) 8.0 us",
        "layers.0.key, layers.1.key",
    ]
    assert second[2:] == [
        *("", "same kernel", "", "", "not measured"),
        *("Inductor", "uncovered: it runs on cpu", "not known"),
    ]
    (bar,) = [s for s in page.iter(f"{SVG}svg") if s.attrib["aria-labelledby"] == "m1bt m1bw"]
    widths = [float(r.attrib["width"]) for r in bar.iter(f"{SVG}rect")]
    assert widths == [200, 125, 200]
    (marker,) = bar.iter(f"{SVG}path")
    assert marker.attrib["d"].startswith("M50.0 ")
    default = section(page, "default")
    assert (
        "2 matmuls with an extension kernel instead of ATen or Inductor. Those that were measured "
        "take 10.0 us; with Inductor (default) they take 16.0 us." in default
    )


def test_fusions_have_reasons() -> None:
    page = parse(CompileReport(FACTS).to_html())
    name = "1. mm 16x1024x4096 bf16 rc"
    assert rows(page, "Operators beside matmuls") == [
        [name, "fused", "relu", ""],
        [name, "not fused", "softmax", "it is a reduction"],
        [name, "not fused", "gated <up>", "predicted to be slower"],
    ]
    assert rows(page, "Kernels without matmuls") == [
        ["1. mul, sum", "fused", "mul, sum", ""],
        ["1. mul, sum", "not fused", "sqrt", "nodes numel/rnumel incompatibility"],
    ]


def test_kernels_phases_and_caches() -> None:
    page = parse(CompileReport(FACTS).to_html())
    kernels = rows(page, "Kernels on cuda")
    assert len(kernels) == 21
    assert kernels[0][:4] == ["triton_<fused>_0", "40.0", "6.2%", "2"]
    assert kernels[-1] == ["3 other kernels", "40.0", "6.2%", "", ""]
    assert "The kernels take 650.0 us." in section(page, "kernels")
    phases = rows(page, "The 4.00 s of the compile")
    assert [row[:3] for row in phases] == [
        ["code generation", "3.00", "75.0%"],
        ["dynamo", "1.00", "25.0%"],
    ]
    assert rows(page, "The graphs of the second compile") == [["1. inference", "9", "0.25", "hit"]]
    caches = section(page, "caches")
    assert "1 of 1 graph came from a cache, and Inductor took 0.25 s." in caches
    assert "benchmarked in this compile: 1. Matmuls of the model with a tuning result: 2." in caches


def test_memory_is_compared_with_inductor() -> None:
    page = parse(CompileReport(FACTS).to_html())
    assert rows(page, "Memory: Inductor")[0] == [
        *("call (inference)", "9.00 KiB", "7.00 KiB", "22.2%", "4 -> 2")
    ]
    memory = section(page, "memory")
    assert "1. call (inference): peak 9.00 KiB -> 7.00 KiB" in memory
    assert "Memory plan of call on cpu" in memory


EMPTY = CompileFacts("f", (), GemmReport("f", ()), (), (), ())


def test_empty_sections_say_so() -> None:
    page = parse(CompileReport(EMPTY).to_html())
    assert [h.text for h in page.iter(f"{HTML}h2")] == SECTIONS
    for name, words in {
        "matmuls": "There are no matmuls.",
        "fusions": "No operator was fused with a matmul",
        "memory": "There is no memory plan",
        "kernels": "Not measured",
        "compile-time": "Nothing was compiled.",
        "caches": "Not measured",
        "default": "There is nothing to compare",
    }.items():
        assert words in section(page, name)
    only = dataclasses.replace(FACTS, gemms=GemmReport("f", (UNCOVERED,)), recompiled=())
    page = parse(CompileReport(only).to_html())
    assert "No matmul was measured, so there are no bars." in section(page, "matmuls")
    assert rows(page, "Matmuls in the order") == [
        [
            *("1. aten.addmm float32[512] x float32[32, 256]", "1", "same kernel", "not measured"),
            *("Inductor", "uncovered: it runs on cpu", "not known"),
        ]
    ]
    assert "Every matmul uses the kernel of Inductor (default)." in section(page, "default")
    assert "compiled no graph" in section(page, "caches")


def test_json_and_text() -> None:
    report = CompileReport(FACTS)
    loaded = json.loads(report.to_json())
    assert loaded["schema"] == 1
    assert [gemm["reason"] for gemm in loaded["gemms"]][1] == "it runs on cpu"
    assert loaded["kernels"]["kernels"][1] == {
        "name": "triton_<fused>_1",
        "calls": 2,
        "microseconds": 39.0,
    }
    assert loaded["phases"][0] == {"name": "code generation", "seconds": 3.0}
    assert loaded["recompiled"][0]["cache"] == "hit"
    assert len(loaded["plans"]) == 2
    text = str(report)
    assert text.startswith("GEMMs of <Model> & more: 3, of which 2 use an extension kernel")
    assert "Kernels of one call on cuda:\n      40.0 us     2  triton_<fused>_0\n" in text
    assert text.endswith(
        "Compile of 1 graph: 4.00 s\nCompiled again with the caches: 0.25 s, 1 of 1 from a cache"
    )


# Real compiles, on the CPU


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompileReport, Path]:
    path = tmp_path_factory.mktemp("report") / "page.html"
    compiled = torch.compile(Layers(), backend="inductor_ext")
    with torch.no_grad():
        report = inductor_ext.report(compiled, torch.randn(4, 8), path=path)
    return report, path


def test_a_compiled_model_on_a_cpu(written: tuple[CompileReport, Path]) -> None:
    report, path = written
    assert isinstance(report, CompileReport)
    facts = report.facts
    assert facts.title == "Layers"
    assert [gemm.modules for gemm in facts.gemms.gemms] == [("first",), ("second",)]
    assert [graph.cache for graph in facts.graphs] == ["off"]
    assert [plan.kind for plan in facts.plans] == ["inference"]
    assert facts.recompiled is not None
    assert [graph.cache for graph in facts.recompiled] in (["hit"], ["miss"])
    assert facts.call_microseconds is not None
    assert facts.kernels is not None
    assert facts.kernels.device == "cpu"
    kernels = {kernel.name: kernel.calls for kernel in facts.kernels.kernels}
    assert kernels["aten::addmm"] == 2
    assert any("cpp_fused" in name for name in kernels)
    assert not any(name.startswith(("Torch-Compiled", "## Call")) for name in kernels)
    assert facts.compile_seconds > 0
    # The first relu is an operator between two matmuls, and cannot be fused with either.
    assert [gemm.separate for gemm in facts.gemms.gemms] == [
        ("relu (library kernels cannot be fused)",)
    ] * 2
    # Found by sampling: a short phase may be missing.
    assert {phase.name for phase in facts.phases} <= {*PHASES, FIRST_CALL}
    assert sum(phase.seconds for phase in facts.phases) > 0
    assert dict(facts.environment)["torch"] == torch.__version__
    assert dict(facts.environment)["device"].startswith("CPU (")
    assert path.read_text() == report.to_html()
    page = parse(path.read_text())
    assert [h.text for h in page.iter(f"{HTML}h2")] == SECTIONS
    assert len(rows(page, "Matmuls in the order")) == 2


def test_nothing_that_was_compiled_before_changes() -> None:
    model, x = Layers(), torch.randn(4, 8)
    compiled = torch.compile(model, backend="inductor_ext")
    with torch.no_grad():
        expected = compiled(x)
        report = inductor_ext.report(compiled, x, path=None, recompile=False)
        with events.capture(CompileRecord) as compiles:
            torch.testing.assert_close(compiled(x), expected)
    assert not compiles
    assert report.facts.recompiled is None
    assert report.facts.call_microseconds is None


def test_a_bad_call_is_rejected_before_the_compile(tmp_path: Path) -> None:
    fn: Callable[..., Any] = Layers()
    x = torch.randn(4, 8)
    with events.capture(CompileRecord) as compiles:
        with pytest.raises(exc.BadReportFileError, match="does not exist"):
            inductor_ext.report(fn, x, path=tmp_path / "absent" / "page.html")
        with pytest.raises(exc.BadArgumentError, match="target"):
            inductor_ext.report(3, path=None)
        with pytest.raises(exc.BadArgumentError, match="nothing but a path"):
            inductor_ext.report("model.pt2", x, path=None)
        with pytest.raises(exc.UnknownOptionError):
            inductor_ext.report(fn, x, path=None, options={"max_autotun": True})
    assert not compiles


def test_fusions_of_kernels_without_matmuls() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return (x.exp() + 1).sum(0).cumsum(0)

    report = inductor_ext.report(program, torch.randn(64, 32), path=None, recompile=False)
    assert report.facts.gemms.gemms == ()
    (kernel,) = report.facts.other_kernels
    assert kernel.operators == ("exp", "add", "sum")
    ((operator, reason),) = [text.split(" (") for text in kernel.separate]
    assert operator == "cumsum"
    assert reason


# Packages


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    program = torch.export.export(Layers(), (torch.randn(4, 8),))
    inductor_ext.aoti_compile_and_package(program, package_path=str(path))
    return path


def test_contents_of_a_package(package: Path, tmp_path: Path) -> None:
    out = tmp_path / "contents.html"
    report = inductor_ext.report(package, path=out)
    assert isinstance(report, ContentsReport)
    assert out.read_text() == report.to_html()
    page = parse(out.read_text())
    assert [h.text for h in page.iter(f"{HTML}h2")] == ["Model model", "Files"]
    assert "runs hereyes" in text_of(page)
    assert rows(page, "Inputs.") == [["x", "float32", "[4, 8]", "strides [8, 1]", "cpu"]]
    assert {row[2] for row in rows(page, "Constants: ")} == {"[16, 8]", "[8, 16]", "[16]", "[8]"}
    names = [row[0] for row in rows(page, "Kernels.")]
    assert any("cpp_fused" in name for name in names)
    files = [row[0] for row in rows(page, f"{len(report.package.entries)} files")]
    assert files == [entry.name for entry in report.package.entries]
    assert str(report).startswith(f"{package}: ")
    assert json.loads(report.to_json())["fits"] == {"model": True}


def test_command_shows_a_package(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert main.main(["report", "-o", str(out), str(package)]) == 0
    assert capsys.readouterr().out == f"The report is in {out}.\n"
    assert "Contents of" in out.read_text()
    assert main.main(["report", "-o", str(out), "--json", str(package)]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(package)
    assert main.main(["report", "-o", str(out), str(tmp_path / "absent.pt2")]) == 2
    assert "absent.pt2" in capsys.readouterr().err


# The report of a package of Inductor, which has no manifest


def test_contents_without_a_manifest() -> None:
    from inductor_ext.cpp_wrapper.package.zip_format import Entry
    from inductor_ext.reports import package_report

    entries = (Entry("a/data/aotinductor/model/x.so", 0, 10, 10, None),)
    metadata = {"model": {"AOTI_DEVICE_KEY": "cpu", "empty": ""}}
    report = ContentsReport(package_report.Report("<p>", 10, entries, None, metadata, {}))
    text = text_of(parse(report.to_html()))
    assert "Contents of <p>" in text
    assert "Inductor (default): there is no manifest" in text
    assert "AOTI_DEVICE_KEY" in text
    assert "empty" not in text
