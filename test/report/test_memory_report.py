"""The memory report: of hand-made plans, of what was compiled here, and of what came from a cache.

Plans that are drawn at random are valid ones, placed by first fit; the pictures of them are parsed
and held to what a picture of a plan must be.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import random
import re
import subprocess
import sys
import textwrap
from typing import Any
from xml.etree import ElementTree

import pytest

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.cli import main
from inductor_ext.cpp_wrapper.records import PackageRecord
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.memory import compiled_callables, plan_store
from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.records import MemoryPlanRecord, PlannedArena, PlannedStorage
from inductor_ext.report import memory_html, memory_measure, memory_report
from inductor_ext.report.memory_measure import Allocation, Measured
from inductor_ext.report.memory_report import MemoryReport

CHECKOUT = pathlib.Path(__file__).parents[2]


def storage(
    name: str,
    size: int,
    start: int,
    end: int,
    offset: int | None = None,
    *,
    arena: int | None = None,
    kind: str = "intermediate",
    operator: str = "addmm",
    module: str = "encoder.layer.0",
    device: str = "cpu",
) -> PlannedStorage:
    if offset is not None and arena is None:
        arena = 0
    return PlannedStorage(name, size, start, end, kind, device, arena, offset, operator, module)


def plan(
    storages: tuple[PlannedStorage, ...], arenas: tuple[PlannedArena, ...] = (), **fields: Any
) -> MemoryPlanRecord:
    """A record whose totals are those of its parts."""
    steps = max([1, *(part.end for part in (*storages, *arenas))])
    values: dict[str, Any] = {
        "graph": "call",
        "kind": "inference",
        "cache_key": None,
        "strategy": "arenas",
        "peak_before": 0,
        "peak": 0,
        "lower_bound": 0,
        "steps": steps,
        "calls_before": len(storages),
        "calls": len(arenas) + sum(storage.arena is None for storage in storages),
        "peak_reordered_from": None,
        "seconds": 0.25,
        "arenas": arenas,
        "storages": storages,
    }
    record = MemoryPlanRecord(**{**values, **fields})
    devices = peak_report.devices(record)
    total = sum(max(peak_report.allocated_bytes(record, device)) for device in devices)
    bound = sum(max(peak_report.storage_bytes(record, device)) for device in devices)
    totals = {"peak_before": total, "peak": total, "lower_bound": bound}
    return dataclasses.replace(record, **{**totals, **fields})


SMALL = plan(
    (
        storage("buf0", 4096, 0, 3, 0),
        storage("buf1", 1024, 1, 4, 4096, operator="mul", module="encoder.layer.1"),
        storage("buf2", 1024, 2, 6, kind="output", operator="amax, sub", module=""),
        storage("buf3", 2048, 3, 5, 0),
    ),
    (PlannedArena("arena_0", "cpu", 6144, 5120, 0, 5, "6144"),),
    peak_before=9216,
    lower_bound=6144,
)

TABLE = """\
Held on cpu at the peak, step 2 of 6:
    bytes    share  buffer   kind          operator   module           live
 4.00 KiB   57.1 %  buf0     intermediate  addmm      encoder.layer.0  [0, 3)
 1.00 KiB   14.3 %  arena_0  unused                                    [0, 5)
 1.00 KiB   14.3 %  buf1     intermediate  mul        encoder.layer.1  [1, 4)
 1.00 KiB   14.3 %  buf2     output        amax, sub                   [2, 6)
 7.00 KiB  100.0 %  in all"""


def random_plan(count: int, loose: int, seed: int) -> MemoryPlanRecord:
    """`count` storages, the first `loose` of them outside of the two arenas."""
    rng = random.Random(seed)
    steps = 2 * count + 10
    modules = ["", "embed", *(f"layers.{i}.{part}" for i in range(3) for part in ("attn", "mlp"))]
    placed: list[list[PlannedStorage]] = [[], []]
    own = []
    for index in range(count):
        start = rng.randrange(steps - 3)
        end = min(steps, start + rng.choice((1, 2, 3, 8, 40, steps // 3)))
        size = 1 << rng.randrange(6, 22)
        module = rng.choice(modules)
        if index < loose:
            kind = rng.choice(("extern", "output", "input", "subgraph"))
            own.append(storage(f"own{index}", size, start, end, kind=kind, module=module))
            continue
        arena = rng.randrange(2)
        offset = 0
        for other in sorted(placed[arena], key=lambda other: other.offset or 0):
            if other.start < end and start < other.end:
                if offset + size <= (other.offset or 0):
                    break
                offset = max(offset, (other.offset or 0) + other.bytes)
        placed[arena].append(
            storage(f"buf{index}", size, start, end, offset, arena=arena, module=module)
        )
    arenas = tuple(
        PlannedArena(
            f"arena_{index}",
            "cpu",
            max(s.offset + s.bytes for s in inside if s.offset is not None),
            1,
            min(s.start for s in inside),
            max(s.end for s in inside),
            "s0*64",
        )
        for index, inside in enumerate(placed)
    )
    return plan((*own, *placed[0], *placed[1]), arenas)


def many(count: int, loose: int) -> MemoryPlanRecord:
    """`count` storages of growing size, each alive for three steps, in an arena of four places."""
    own = [storage(f"own{i}", 64 + i, i, i + 3, module=f"m{i % 5}") for i in range(loose)]
    inside = [
        storage(f"buf{i}", 64 + i % 192, i, i + 3, 256 * (i % 4), module=f"m{i % 3}")
        for i in range(count - loose)
    ]
    arena = PlannedArena("arena_0", "cpu", 1024, 1024, 0, count - loose + 2, "1024")
    return plan((*own, *inside), (arena,))


class TestPeak:
    def test_table(self) -> None:
        expected = textwrap.dedent("\n".join(line[1:] for line in TABLE.splitlines()[1:]))
        title, *rows = peak_report.peak_table(SMALL).splitlines()
        assert title == TABLE.splitlines()[0]
        assert "\n".join(rows) == expected

    def test_table_cut_short_still_sums_to_the_peak(self) -> None:
        assert peak_report.peak_table(SMALL, 2).splitlines()[-2:] == [
            "2.00 KiB   28.6 %  2 others",
            "7.00 KiB  100.0 %  in all",
        ]

    @pytest.mark.parametrize("seed", range(20))
    def test_rows_sum_to_the_peak(self, seed: int) -> None:
        record = random_plan(40, 10, seed)
        rows = peak_report.peak_rows(record, "cpu")
        assert sum(row.bytes for row in rows) == record.peak
        step = peak_report.peak_step(record, "cpu")
        assert all(row.start <= step < row.end for row in rows)
        assert [row.bytes for row in rows] == sorted((r.bytes for r in rows), reverse=True)

    def test_each_device_has_a_peak_of_its_own(self) -> None:
        record = plan(
            (
                storage("a", 100, 0, 1, device="cuda:0"),
                storage("b", 70, 1, 2),
                storage("c", 60, 1, 2, device="cuda:0"),
            )
        )
        assert record.peak == 170
        assert peak_report.peak_step(record, "cuda:0") == 0
        assert peak_report.peak_step(record, "cpu") == 1
        assert [row.name for row in peak_report.peak_rows(record, "cuda:0")] == ["a"]
        tables = peak_report.peak_table(record).split("\n\n")
        assert [table.split()[2] for table in tables] == ["cuda:0", "cpu"]
        assert peak_report.peak_table(record, device="cpu") == tables[1]

    def test_long_texts_are_cut_where_they_say_least(self) -> None:
        record = plan((storage("a", 1, 0, 1, operator="x" * 50, module="m." * 50 + "last"),))
        (row,) = peak_report.peak_table(record).splitlines()[2:-1]
        assert row.split()[-4:-2] == ["x" * 29 + "...", "..." + ("m." * 50 + "last")[-37:]]

    def test_an_empty_plan(self) -> None:
        assert peak_report.peak_table(plan(())) == "No memory is allocated."
        assert peak_report.allocated_bytes(plan(()), "cpu") == [0]

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536 * 1024, "1.50 MiB"),
            (5 << 40, "5.00 TiB"),
        ],
    )
    def test_human_bytes(self, count: int, text: str) -> None:
        assert peak_report.human_bytes(count) == text

    def test_budget_error_names_the_buffers(self) -> None:
        error = exc.MemoryBudgetError(
            graph="call (inference)",
            device="cpu",
            peak="7.00 KiB",
            budget="1.00 KiB",
            table=peak_report.peak_table(SMALL),
        )
        first, *rest = str(error).splitlines()
        assert first.startswith(
            "The planned memory peak of call (inference) on cpu is 7.00 KiB, above the budget of "
            "1.00 KiB. Raise memory_budget"
        )
        assert rest == peak_report.peak_table(SMALL).splitlines()


class TestReport:
    REPORT = MemoryReport(
        "a model",
        (SMALL, plan((storage("big", 8192, 0, 1),), graph="partition_0", kind="backward")),
        (Measured("call", "inference", None, "cpu", 7168, 7168),),
    )

    def test_values_are_those_of_the_highest_peak(self) -> None:
        assert (self.REPORT.peak, self.REPORT.lower_bound, self.REPORT.ratio) == (8192, 8192, 1.0)
        assert [row.name for row in self.REPORT.largest()] == ["big"]
        only = MemoryReport("m", (SMALL,))
        assert (only.peak, only.lower_bound) == (7168, 6144)
        assert only.ratio == pytest.approx(7 / 6)
        assert [row.name for row in only.largest(2)] == ["buf0", "arena_0"]

    def test_text(self) -> None:
        text = str(self.REPORT)
        assert text.startswith(
            "Memory of a model\n\n1. call (inference): peak 9.00 KiB -> 7.00 KiB, lower bound "
            "6.00 KiB, ratio 1.167, 1 arena, allocator calls 4 -> 2\n\n"
            + peak_report.peak_table(SMALL)
            + "\n\n2. partition_0 (backward): peak 8.00 KiB -> "
        )
        assert text.endswith(
            "Measured, relative to the memory in use before the call:\n"
            "  call (inference) on cpu: predicted 7.00 KiB, measured 7.00 KiB, deviation +0.0 %"
        )

    def test_the_documented_example_is_this_one(self) -> None:
        text = (CHECKOUT / "docs" / "user" / "memory_report.md").read_text()
        assert f"1. {memory_report.headline(SMALL)}\n\n{peak_report.peak_table(SMALL)}\n" in text

    def test_reordering_is_reported(self) -> None:
        record = dataclasses.replace(SMALL, peak_reordered_from=10240)
        assert "6.00 KiB (10.00 KiB in Inductor's kernel order)" in memory_report.headline(record)

    def test_json_round_trip(self, tmp_path: pathlib.Path) -> None:
        path = tmp_path / "report.json"
        path.write_text(self.REPORT.to_json())
        assert memory_report.read(str(path)) == self.REPORT

    def test_nothing_planned(self) -> None:
        report = MemoryReport("nothing", ())
        assert (report.peak, report.lower_bound, report.ratio, report.largest()) == (0, 0, 1.0, [])
        assert str(report) == "Memory of nothing\n\nNo memory is allocated."
        assert "No memory is allocated" in report.to_html()

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"peak": "many"}, "peak is 'many', expected an integer"),
            ({"peak": True}, "peak is True, expected an integer"),
            ({"arenas": None}, "arenas is None, expected a list"),
            ({"storages": [{}]}, "storages[0] is {}, expected an object with 'name'"),
            ({"storages": [3]}, "storages[0] is 3, expected an object"),
            ({"arenas": []}, "storages[0].arena is 0, and there are 0"),
        ],
    )
    def test_bad_records_are_named(self, change: dict[str, Any], why: str) -> None:
        entry = json.loads(json.dumps(SMALL.as_json()))
        assert plan_store.parse(entry) == SMALL
        with pytest.raises(ValueError) as error:
            plan_store.parse({**entry, **change})
        assert str(error.value) == why

    def test_a_lifetime_backwards_is_named(self) -> None:
        entry = json.loads(json.dumps(SMALL.as_json()))
        entry["storages"][2]["end"] = 1
        with pytest.raises(ValueError, match=r"storages\[2\] has a negative size or lifetime"):
            plan_store.parse(entry)


SVG = "{http://www.w3.org/2000/svg}"
SLACK = 0.021
"""Coordinates are rounded to hundredths."""


class Rectangle:
    def __init__(self, element: ElementTree.Element) -> None:
        self.classes = element.attrib["class"].split()
        self.left, self.top, width, height = (
            float(element.attrib[name]) for name in ("x", "y", "width", "height")
        )
        self.right, self.bottom = self.left + width, self.top + height

    def within(self, other: Rectangle) -> bool:
        return (
            self.left >= other.left - SLACK
            and self.right <= other.right + SLACK
            and self.top >= other.top - SLACK
            and self.bottom <= other.bottom + SLACK
        )

    def overlaps(self, other: Rectangle) -> bool:
        return (
            min(self.right, other.right) - max(self.left, other.left) > SLACK
            and min(self.bottom, other.bottom) - max(self.top, other.top) > SLACK
        )


def rectangles(parent: ElementTree.Element, kind: str) -> list[Rectangle]:
    """The rectangles of a class directly below an element."""
    found = [Rectangle(element) for element in parent.findall(f"{SVG}rect")]
    return [rectangle for rectangle in found if kind in rectangle.classes]


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]


def overlapping(found: list[Rectangle]) -> list[tuple[Rectangle, Rectangle]]:
    return [pair for pair in itertools.combinations(found, 2) if pair[0].overlaps(pair[1])]


def drawings(html: str) -> tuple[ElementTree.Element, list[ElementTree.Element]]:
    """The page and its drawings, as XML."""
    page = ElementTree.fromstring(html)
    return page, list(page.iter(f"{SVG}svg"))


class TestPicture:
    @pytest.mark.parametrize("seed", range(6))
    def test_is_one_of_a_plan(self, seed: int) -> None:
        record = random_plan(60, 12, seed)
        html = MemoryReport("a <model> & more", (record,)).to_html()
        page, (svg,) = drawings(html)
        style = "".join(element.text or "" for element in page.iter() if "style" in element.tag)
        view = dict(zip(("x", "y", "width", "height"), svg.attrib["viewBox"].split(), strict=True))
        whole = Rectangle(ElementTree.Element("rect", {"class": "", **view}))
        own = rectangles(svg, "s")
        assert len(own) == 12
        frames = []
        for group in svg.findall(f"{SVG}g"):
            (frame,) = rectangles(group, "frame")
            frames.append(frame)
            members = rectangles(group, "s")
            assert overlapping(members) == []
            assert all(member.within(frame) for member in members)
        members = [s for g in svg.findall(f"{SVG}g") for s in rectangles(g, "s")]
        assert len(members) == 48
        assert overlapping([*frames, *own]) == []
        for rectangle in (*frames, *own, *members):
            assert rectangle.within(whole)
        for rectangle in (*own, *members):
            (colour,) = [name for name in rectangle.classes if name not in ("s", "input")]
            assert re.search(rf"^\.{colour} {{ fill: #[0-9A-Fa-f]{{6}};", style, re.MULTILINE)

    def test_heights_are_bytes_and_widths_are_steps(self) -> None:
        _, (svg,) = drawings(MemoryReport("m", (SMALL,)).to_html())
        (group,) = svg.findall(f"{SVG}g")
        (frame,) = rectangles(group, "frame")
        scale = (frame.bottom - frame.top) / 6144
        step = (frame.right - frame.left) / 5
        by_name = {
            (element.findtext(f"{SVG}title") or "").partition(":")[0]: Rectangle(element)
            for element in svg.iter(f"{SVG}rect")
            if element.find(f"{SVG}title") is not None
        }
        for part in SMALL.storages:
            drawn = by_name[part.name]
            assert drawn.bottom - drawn.top == pytest.approx(part.bytes * scale, abs=SLACK)
            assert drawn.right - drawn.left == pytest.approx(
                (part.end - part.start) * step, abs=SLACK
            )
            if part.offset is not None:
                assert frame.bottom - drawn.bottom == pytest.approx(part.offset * scale, abs=SLACK)

    def test_everything_has_words(self) -> None:
        html = MemoryReport("m", (SMALL,)).to_html()
        _, (svg,) = drawings(html)
        titles = [element.text or "" for element in svg.iter(f"{SVG}title")]
        assert (
            "buf1: 1.00 KiB, intermediate\nmul\nmodule encoder.layer.1\nlive [1, 4), arena_0 + 4096"
            in titles
        )
        assert "buf2: 1.00 KiB, output\namax, sub\nlive [2, 6), separate allocation" in titles
        assert any(title.startswith("arena_0: 6.00 KiB") for title in titles)
        assert "lower bound 6.00 KiB" in titles
        assert "peak, step 2: 7.00 KiB" in [element.text for element in svg.iter(f"{SVG}text")]
        labelled = svg.attrib["aria-labelledby"].split()
        ids = {element.attrib.get("id"): element.text or "" for element in svg.iter()}
        assert "7.00 KiB are held at the peak, step 2 of 6" in ids[labelled[1]]

    def test_curves_reach_the_peak_and_the_bound(self) -> None:
        _, (svg,) = drawings(MemoryReport("m", (SMALL,)).to_html())
        paths = {element.attrib["class"]: element.attrib["d"] for element in svg.iter(f"{SVG}path")}
        bottom = memory_html._CURVE_TOP + memory_html._CURVE_HEIGHT
        heights = {
            name: bottom - min(float(y) for y in re.findall(r"V([\d.]+)", paths[name]))
            for name in ("held", "alive")
        }
        _, bound = numbers(paths["bound"])[:2]
        assert heights["held"] == memory_html._CURVE_HEIGHT
        assert heights["alive"] / heights["held"] == pytest.approx(6144 / 7168, abs=0.001)
        assert (bottom - bound) / heights["held"] == pytest.approx(6144 / 7168, abs=0.001)
        at, top, _ = numbers(paths["peak"])
        (frame,) = rectangles(svg.findall(f"{SVG}g")[0], "frame")
        assert top == memory_html._CURVE_TOP
        assert at == pytest.approx(frame.left + 2.5 * (frame.right - frame.left) / 5, abs=SLACK)

    def test_ten_thousand_storages(self) -> None:
        record = many(10_000, 3_000)
        html = MemoryReport("m", (record,)).to_html()
        assert len(html) < 2_000_000
        _, (svg,) = drawings(html)
        singles = [e for e in svg.iter(f"{SVG}rect") if "s" in e.attrib["class"].split()]
        assert len(singles) == memory_html._MOST_LOOSE + memory_html._MOST_MEMBERS
        rest = [e.findtext(f"{SVG}title") or "" for e in svg.iter(f"{SVG}path")]
        counts = [int(match[1]) for text in rest if (match := re.match(r"(\d+) smaller", text))]
        assert sum(counts) + len(singles) == 10_000

    def test_needs_nothing_else(self) -> None:
        html = MemoryReport("m", (random_plan(30, 5, 1),)).to_html()
        addresses = set(re.findall(r"https?://[^\"'\s>]+", html))
        assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
        assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\(", html)
        assert "@media (prefers-color-scheme: dark)" in html

    def test_modules_keep_their_colour_whatever_their_size(self) -> None:
        def colours(*sizes: int) -> dict[str, str]:
            names = ("embed", "layers.0", "layers.10", "layers.2", "head")
            record = plan(
                tuple(
                    storage(name, size, 0, 1, module=name)
                    for name, size in zip(names, sizes, strict=True)
                )
            )
            groups = memory_html._Groups([record])
            return {name: groups.css_class(name) for name in names}

        found = colours(1, 2, 3, 4, 5)
        assert found == colours(5, 4, 3, 2, 1)
        assert list(found.values()) == ["m0", "m2", "m4", "m3", "m1"]

    def test_depth_is_limited_by_the_palette(self) -> None:
        record = plan(
            tuple(storage(f"b{i}", 9 - i % 3, 0, 1, module=f"net.{i}.fc") for i in range(9))
        )
        groups = memory_html._Groups([record])
        assert {groups.css_class(f"net.{i}.fc") for i in range(9)} == {"m0"}
        wide = plan(tuple(storage(f"b{i}", 20 - i, 0, 1, module=f"m{i}") for i in range(9)))
        groups = memory_html._Groups([wide])
        assert [groups.css_class(f"m{i}") for i in range(9)] == [
            *(f"m{i}" for i in range(7)),
            "other",
            "other",
        ]
        assert "2 other modules" in groups.legend()

    def test_the_page_appears_whole_or_not_at_all(self, tmp_path: pathlib.Path) -> None:
        report = MemoryReport("m", (SMALL,))
        report.write_html(tmp_path / "a.html")
        assert (tmp_path / "a.html").read_text() == report.to_html()
        with pytest.raises(exc.BadReportFileError, match="absent"):
            report.write_html(tmp_path / "absent" / "a.html")
        assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


class TestCommand:
    @pytest.fixture
    def log(self, tmp_path: pathlib.Path) -> str:
        path = str(tmp_path / "events.jsonl")
        events.emit(PackageRecord(path="a.pt2", bytes=3, seconds=0.5), event_log=path)
        for record in TestReport.REPORT.records:
            events.emit(record, event_log=path)
        return path

    def test_an_event_log(self, log: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["memory", log]) == 0
        printed = capsys.readouterr().out
        expected = MemoryReport(log, TestReport.REPORT.records).table()
        assert printed == expected + "\n"

    def test_json_and_html(
        self, log: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out.html"
        assert main.main(["memory", log, "--json", "--html", str(out)]) == 0
        printed = capsys.readouterr().out
        assert json.loads(printed)["records"][0]["storages"][1]["module"] == "encoder.layer.1"
        assert len(drawings(out.read_text())[1]) == 2
        again = tmp_path / "report.json"
        again.write_text(printed)
        assert main.main(["memory", str(again), "--top", "1"]) == 0
        assert "3 others" in capsys.readouterr().out

    @pytest.mark.parametrize("wanted", ["2", "partition_0", "backward"])
    def test_one_graph(self, log: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["memory", log, "--graph", wanted]) == 0
        printed = capsys.readouterr().out
        assert "1. partition_0 (backward)" in printed
        assert "call (inference)" not in printed

    def test_an_unknown_graph(self, log: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["memory", log, "--graph", "3"]) == 2
        assert (
            "it has no graph '3'. Its graphs are: 1. call (inference), 2. partition_0 (backward)."
            in capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("", "it contains no memory plan. Compile with the setting event_log"),
            ('{"event": "package"}\n', "it contains no memory plan"),
            ('{"event": "package"}\n{"event":', "line 2: it is not a JSON object"),
            ("3\n", "line 1: it is not an event"),
            ('\n{"event": "memory_plan"}\n', "expected an object with 'graph'"),
            ("{}", "it is not a report of schema 1"),
            (
                '{"schema": 1, "records": [{}]}',
                "records[0]: the value is {}, expected an object with 'graph'",
            ),
            ('{"schema": 1, "records": [], "measured": [{}]}', "measured: "),
        ],
    )
    def test_what_cannot_be_read_is_named_before_anything_is_written(
        self,
        tmp_path: pathlib.Path,
        capsys: pytest.CaptureFixture[str],
        text: str,
        complaint: str,
    ) -> None:
        path = tmp_path / "file"
        path.write_text(text)
        assert main.main(["memory", str(path), "--html", str(tmp_path / "out.html")]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert str(path) in captured.err
        assert complaint in captured.err
        assert [found.name for found in tmp_path.iterdir()] == ["file"]

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["absent"], "absent: No such file or directory. Pass the path"),
            (["events.jsonl", "--html", "."], ".: cannot be written: it is a folder."),
            (["events.jsonl", "--html", "no/out.html"], "no/out.html: cannot be written: the "),
            (["binary"], "binary: it is not text in UTF-8."),
            (["archive"], "archive: torch.export.load fails with "),
        ],
    )
    @pytest.mark.usefixtures("log")
    def test_files_that_are_not_there(
        self,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        complaint: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        (tmp_path / "archive").write_bytes(b"PK and no more")
        assert main.main(["memory", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert complaint in captured.err


class TestMeasure:
    def test_growth(self) -> None:
        changes = [(1, 100), (2, 50), (9, -30), (1, -100), (3, 90), (1, 20), (1, -20)]
        allocations = [Allocation(t, "cpu", p, b) for t, (p, b) in enumerate(changes)]
        assert memory_measure.growth(allocations) == (150, [30])

    def test_inputs_count_as_freed_where_the_run_frees_them(self) -> None:
        record = plan(
            (
                storage("kept", 4096, 0, 1, kind="input"),
                storage("donated", 1024, 0, 1, kind="input"),
                storage("buf", 2048, 1, 2),
                storage("out", 1024, 0, 2, kind="output"),
            )
        )
        assert memory_measure._predict(record, "cpu", [1000]) == 2048
        assert memory_measure._predict(record, "cpu", []) == 3072
        assert memory_measure._predict(record, "cpu", [4096, 1024]) == 1024
        assert memory_measure._predict(record, "cpu", [999_999]) == 3072

    def test_deviation(self) -> None:
        measured = Measured("call", "forward", None, "cpu", 1000, 1025)
        assert measured.deviation == 2.5
        assert measured.describe().endswith("measured 1.00 KiB, deviation +2.5 %")
        assert Measured("call", "forward", None, "cpu", 0, 0).deviation == 0

    def test_graphs_without_a_key_are_identified_by_order(self) -> None:
        windows = [("None", 0, 1), ("key", 2, 3), ("None", 4, 5)]
        assert memory_measure._identify_calls(windows, ["None0", "None1", "key"]) == [
            ("key", 2, 3),
            ("None0", 0, 1),
            ("None1", 4, 5),
        ]
        assert memory_measure._identify_calls(windows, ["None0"]) == [
            ("key", 2, 3),
            ("None0", 0, 1),
            ("None0", 4, 5),
        ]
        assert memory_measure._identify_calls(windows, ["None0", "None1", "None2"]) == [
            ("key", 2, 3)
        ]


def nested_calls() -> None:
    """What a graph break looks like to those who ask whose a graph is: one call in another."""
    compiled_callables.begin_compile().add("inner", None)


class TestOwners:
    """Whose a compile is; here begun by hand, below what really compiles."""

    def test_a_function_owns_what_is_compiled_while_it_runs(self) -> None:
        def other() -> None:
            nested_calls()

        nested_calls()
        other()
        assert [len(compiled_callables.find_compiles(f)) for f in (other, nested_calls)] == [1, 2]
        compiled_callables.forget_compiles()
        assert compiled_callables.find_compiles(other) == []

    def test_a_module_owns_what_is_compiled_in_its_call(self) -> None:
        import torch

        class Block(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                nested_calls()
                return x

        model = torch.nn.Sequential(Block(), Block())
        model[0](torch.ones(1))
        assert [len(compiled_callables.find_compiles(m)) for m in (model[0], model[1], model)] == [
            1,
            0,
            0,
        ]
        model(torch.ones(1))
        assert [len(compiled_callables.find_compiles(m)) for m in (model[0], model[1], model)] == [
            2,
            1,
            2,
        ]

    def test_plans_are_kept_by_key_and_read_again(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        compiled_callables.begin_compile().add("fkey", [SMALL, PackageRecord("a", 1, 0.1)])
        expected = (dataclasses.replace(SMALL, cache_key="fkey"),)
        assert plan_store.load("fkey") == expected
        plan_store._plans.clear()
        assert plan_store.load("fkey") == expected
        plan_store._plans.clear()
        (path,) = tmp_path.rglob("fkey.json")
        path.write_text("[{}]")
        assert plan_store.load("fkey") is None
        assert plan_store.load("absent") is None

    def test_a_folder_that_cannot_be_written_costs_a_warning(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: pathlib.Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "inductor_ext").write_text("a file where the folder should be")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        for key in ("fa", "fb"):
            compiled_callables.begin_compile().add(key, [SMALL])
        (message,) = caplog.messages
        assert message.startswith("memory plans cannot be stored in ")
        assert plan_store.load("fb") == (dataclasses.replace(SMALL, cache_key="fb"),)


class TestCompiled:
    """Reports of what Inductor really compiled."""

    def test_training_here_and_from_the_cache_in_another_process(
        self, tmp_path: pathlib.Path
    ) -> None:
        import torch

        from test.support.children.memory_report import Model

        eager = Model()
        compiled = torch.compile(eager, backend="inductor_ext")
        with pytest.raises(exc.NothingCompiledError, match="Model by inductor_ext"):
            memory_report.memory_report(compiled)
        x = torch.randn(32, 64)
        loss = compiled(x)
        assert [record.kind for record in memory_report.memory_report(compiled).records] == [
            "forward"
        ]
        loss.backward()
        report = memory_report.memory_report(compiled)
        assert report == memory_report.memory_report(eager)
        assert report.title == "Model"
        assert [record.kind for record in report.records] == ["forward", "backward"]
        assert all(record.cache_key is not None for record in report.records)
        rows = peak_report.peak_rows(report.records[0], "cpu")
        assert 32 * 256 * 4 in [row.bytes for row in rows]
        assert any(row.module.endswith("up") for row in rows)

        # What other tests have set in this process may be part of its keys: a process of its own
        # fills the cache for the next one.
        filled = self.in_another_process(tmp_path)
        found = self.in_another_process(tmp_path)
        assert (found["events"], found["caches"]) == (["compile"], ["hit"])
        assert found["report"] == filled["report"]
        assert found["error"].startswith("A graph of Model was loaded from a cache entry (key f")
        assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in found["error"]

        measured = report.measure(lambda: compiled(x).backward()).measured
        assert [item.kind for item in measured] == ["forward", "backward"]
        for item in measured:
            assert item.predicted > 32 * 256 * 4
            assert abs(item.deviation) <= 1
        with pytest.raises(exc.NothingMeasuredError):
            report.measure(torch.sin, x)
        torch._dynamo.reset()
        with pytest.raises(exc.NothingCompiledError):
            memory_report.memory_report(compiled)

    def in_another_process(self, folder: pathlib.Path) -> Any:
        done = subprocess.run(
            [
                sys.executable,
                "-Wignore",
                "-m",
                "test.support.children.memory_report",
                str(folder),
            ],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_graph_breaks_and_instances_that_share_code(self) -> None:
        import torch
        import torch._functorch.config as autograd_config

        class Broken(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = torch.sinh(x) + 1
                torch._dynamo.graph_break()
                return torch.cosh(y) * 2

        first, second = (torch.compile(Broken(), backend="inductor_ext") for _ in range(2))
        x = torch.randn(64)
        first(x)
        report = memory_report.memory_report(first)
        assert len(report.records) == 2
        with events.capture() as records:
            second(x)
        assert records == []
        assert memory_report.memory_report(second) == report

        torch._dynamo.reset()
        with events.capture() as records, autograd_config.patch(enable_autograd_cache=False):
            first(x)
        assert [record.cache for record in records] == ["hit", "hit"]
        assert memory_report.memory_report(first) == report

    def test_functions_that_are_not_inlined(self) -> None:
        import torch

        def inner(x: torch.Tensor) -> torch.Tensor:
            y = torch.sinh(x) + 1
            torch._dynamo.graph_break()
            return torch.cosh(y) * 2

        def outer(x: torch.Tensor) -> torch.Tensor:
            return inner(torch.tanh(x)) - 3

        with inductor_ext.activate():
            compiled = torch.compile(outer, dynamic=False)
            compiled(torch.randn(64))
        names = [
            record.storages[0].operator for record in memory_report.memory_report(compiled).records
        ]
        assert names == ["tanh", "add, sinh", "cosh, mul", "sub"]
        inside = [
            record.storages[0].operator for record in memory_report.memory_report(inner).records
        ]
        assert inside == names[1:3]

    def test_a_function_outside_of_the_caches(self) -> None:
        import torch

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x, -1) @ x

        compiled = torch.compile(function, backend="inductor_ext")
        x = torch.randn(64, 64)
        with torch.compiler.config.patch(force_disable_caches=True):
            compiled(x)
        report = memory_report.memory_report(compiled)
        (record,) = report.records
        assert record.cache_key is None
        (measured,) = report.measure(compiled, x).measured
        assert abs(measured.deviation) <= 1
        assert measured.measured >= 2 * 64 * 64 * 4

    def test_an_exported_program(self, tmp_path: pathlib.Path) -> None:
        import torch

        from test.support.children.memory_report import Model

        program = torch.export.export(Model(), (torch.randn(32, 64),))
        path = tmp_path / "program.pt2"
        torch.export.save(program, path)
        with events.capture(MemoryPlanRecord, CompileRecord) as records:
            report = memory_report.read(str(path))
        assert [type(record) for record in records] == [
            MemoryPlanRecord,
            CompileRecord,
        ]
        (record,) = report.records
        assert (record.kind, record.graph) == ("aot", "call")
        assert {row.module for row in report.largest()} >= {"up"}
        assert [found.name for found in tmp_path.iterdir()] == ["program.pt2"]

    @pytest.mark.parametrize("target", [3, int, None])
    def test_what_has_no_report(self, target: Any) -> None:
        with pytest.raises(exc.NotReportableError, match=type(target).__name__):
            memory_report.memory_report(target)

    def test_options_are_for_exported_programs(self) -> None:
        with pytest.raises(exc.NotReportableError, match="with options: it has been compiled"):
            memory_report.memory_report(lambda: 0, options={"memory_arenas": "never"})

    @pytest.mark.gpu
    @pytest.mark.parametrize("cached", [True, False])
    def test_training_on_a_gpu(self, cached: bool) -> None:
        import torch

        from test.support.children.memory_report import Model

        compiled = torch.compile(Model().cuda(), backend="inductor_ext")
        x = torch.randn(4096, 64, device="cuda")
        with torch.compiler.config.patch(force_disable_caches=not cached):
            compiled(x).backward()
        report = memory_report.memory_report(compiled)
        assert {device for r in report.records for device in peak_report.devices(r)} == {"cuda:0"}
        report = report.measure(lambda: compiled(x).backward())
        assert [item.kind for item in report.measured] == ["forward", "backward"]
        for item in report.measured:
            assert item.predicted > 4096 * 256 * 4
            assert abs(item.deviation) <= 1, str(report)
