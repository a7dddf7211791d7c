"""The HTML page of a memory report: its drawings are parsed and compared with the plan."""

from __future__ import annotations

import itertools
import pathlib
import re
from xml.etree import ElementTree

import pytest

from inductor_ext import exc
from inductor_ext.reports import page_style, page_terms, plan_drawing, plot, timeline_drawing
from inductor_ext.reports.memory_report import MemoryReport
from inductor_ext.reports.step_timeline import StepTimeline
from test.support.memory_plans import (
    REPORT,
    SMALL,
    SVG,
    WHOLE,
    drawings,
    many,
    plan,
    random_plan,
    storage,
)

HTML = "{http://www.w3.org/1999/xhtml}"

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
    candidates = [Rectangle(element) for element in parent.findall(f"{SVG}rect")]
    return [rectangle for rectangle in candidates if kind in rectangle.classes]


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path)]


def texts(svg: ElementTree.Element, kind: str) -> list[str]:
    """The texts of a class, in order."""
    elements = svg.iter(f"{SVG}text")
    return [element.text or "" for element in elements if element.attrib.get("class") == kind]


def overlapping(candidates: list[Rectangle]) -> list[tuple[Rectangle, Rectangle]]:
    return [pair for pair in itertools.combinations(candidates, 2) if pair[0].overlaps(pair[1])]


class TestPicture:
    @pytest.mark.parametrize("seed", range(6))
    def test_storages_do_not_overlap_in_the_drawing(self, seed: int) -> None:
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
            assert re.search(rf"^\.{colour} {{ fill: var\(--{colour}\);", style, re.MULTILINE)
            assert re.search(rf"--{colour}: #[0-9a-f]{{6}};", style)

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

    def test_every_element_has_a_title(self) -> None:
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
        bottom = plan_drawing.CURVE_TOP + plan_drawing.PLOT_HEIGHT
        heights = {
            name: bottom - min(float(y) for y in re.findall(r"V([\d.]+)", paths[name]))
            for name in ("held", "alive")
        }
        _, bound = numbers(paths["bound"])[:2]
        assert heights["held"] == plan_drawing.PLOT_HEIGHT
        assert heights["alive"] / heights["held"] == pytest.approx(6144 / 7168, abs=0.001)
        assert (bottom - bound) / heights["held"] == pytest.approx(6144 / 7168, abs=0.001)
        at, top, _ = numbers(paths["peak"])
        (frame,) = rectangles(svg.findall(f"{SVG}g")[0], "frame")
        assert top == plan_drawing.PLAN_TOP
        assert at == pytest.approx(frame.left + 2.5 * (frame.right - frame.left) / 5, abs=SLACK)

    def test_both_drawings_have_labelled_axes_on_one_scale(self) -> None:
        _, (svg,) = drawings(MemoryReport("m", (random_plan(60, 12, 3),)).to_html())
        assert texts(svg, "x-label") == [plan_drawing.X_LABEL] * 2
        assert texts(svg, "y-label") == [plan_drawing.CURVE_LABEL, plan_drawing.PLAN_LABEL]
        ticks = [
            (element.text or "", float(element.attrib["x"]), float(element.attrib["y"]))
            for element in svg.iter(f"{SVG}text")
            if element.attrib.get("class") in ("x-tick", "y-tick")
        ]
        upper, lower = ticks[: len(ticks) // 2], ticks[len(ticks) // 2 :]
        distance = plan_drawing.PLAN_TOP - plan_drawing.CURVE_TOP
        moved = [(text, x, pytest.approx(y + distance, abs=SLACK)) for text, x, y in upper]
        assert lower == moved
        assert (upper[0][0], next(t for t, _, _ in upper if "B" not in t)) == ("0 B", "0")
        # The lower drawing is as high as a storage of the same bytes in the upper one.
        _, (svg,) = drawings(MemoryReport("m", (SMALL,)).to_html())
        paths = {element.attrib["class"]: element.attrib["d"] for element in svg.iter(f"{SVG}path")}
        (frame,) = rectangles(svg.findall(f"{SVG}g")[0], "frame")
        _, bound = numbers(paths["bound"])[:2]
        bottom = plan_drawing.CURVE_TOP + plan_drawing.PLOT_HEIGHT
        assert bottom - bound == pytest.approx(frame.bottom - frame.top, abs=SLACK)

    @pytest.mark.parametrize(
        ("lowest", "highest", "expected"),
        [
            (0, 1, [0, 1]),
            (0, 7168, [0, 2048, 4096, 6144]),
            (-3000, 9000, [-2048, 0, 2048, 4096, 6144, 8192]),
            (-5, 0, [-5, -4, -3, -2, -1, 0]),
        ],
    )
    def test_ticks_of_bytes(self, lowest: int, highest: int, expected: list[int]) -> None:
        assert plot.find_byte_ticks(lowest, highest) == expected

    @pytest.mark.parametrize(
        ("length", "last", "count"), [(1, 1, 2), (10, 10, 11), (11, 10, 6), (999, 900, 10)]
    )
    def test_ticks_of_steps(self, length: int, last: int, count: int) -> None:
        ticks = plot.find_step_ticks(length)
        assert (ticks[0], len(ticks), ticks[-1]) == ((0, "0"), count, (last, str(last)))

    def test_ten_thousand_storages(self) -> None:
        record = many(10_000, 3_000)
        html = MemoryReport("m", (record,)).to_html()
        assert len(html) < 2_000_000
        _, (svg,) = drawings(html)
        singles = [e for e in svg.iter(f"{SVG}rect") if "s" in e.attrib["class"].split()]
        assert len(singles) == plan_drawing.MOST_LOOSE + plan_drawing.MOST_MEMBERS
        rest = [e.findtext(f"{SVG}title") or "" for e in svg.iter(f"{SVG}path")]
        counts = [int(match[1]) for text in rest if (match := re.match(r"(\d+) smaller", text))]
        assert sum(counts) + len(singles) == 10_000

    def test_the_page_is_self_contained(self) -> None:
        html = MemoryReport("m", (random_plan(30, 5, 1),)).to_html()
        addresses = set(re.findall(r"https?://[^\"'\s>]+", html))
        assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
        assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\(", html)
        assert "@media (prefers-color-scheme: dark)" in html

    def test_every_number_is_explained(self) -> None:
        page, _ = drawings(WHOLE.to_html())
        terms = {element.text for element in page.iter(f"{HTML}dt")}
        heads = {element.text for element in page.iter(f"{HTML}th")}
        assert len(heads) > 25
        assert heads <= terms
        for caption in (text for e in page.iter(f"{HTML}h2") if "peak" in (text := e.text or "")):
            labels = re.findall(r"(?:^|[:,]) *([a-z][a-z ]*[a-z]) [\d(]", caption)
            assert {"peak", "lower bound", "ratio", "allocator calls"} <= set(labels)
            assert set(labels) <= terms
        plain = {element.text for element in drawings(REPORT.to_html())[0].iter(f"{HTML}dt")}
        assert plain == {*page_terms.PLAN_TERMS, *page_terms.MEASURED_TERMS}

    def test_drawings_have_titles_and_tables(self) -> None:
        page, svgs = drawings(WHOLE.to_html())
        assert len(svgs) == 3
        ids = [element.attrib["id"] for element in page.iter() if "id" in element.attrib]
        assert len(ids) == len(set(ids)) == 6
        for svg in svgs:
            assert svg.attrib["role"] == "img"
            assert set(svg.attrib["aria-labelledby"].split()) <= set(ids)
        (details, *_) = [e for e in page.iter(f"{HTML}details") if "open" not in e.attrib]
        rows = [[cell.text for cell in row] for row in details.iter(f"{HTML}tr")]
        assert rows[0] == ["step", "held", "live"]
        assert rows[1:] == [
            ["0", "6.00 KiB", "4.00 KiB"],
            ["1", "6.00 KiB", "5.00 KiB"],
            ["2", "7.00 KiB", "6.00 KiB"],
            ["3", "7.00 KiB", "4.00 KiB"],
            ["4", "7.00 KiB", "3.00 KiB"],
            ["5", "1.00 KiB", "1.00 KiB"],
        ]

    def test_the_step_is_drawn_on_one_scale(self) -> None:
        svg = drawings(WHOLE.to_html())[1][0]
        assert texts(svg, "title") == ["Compiled: peak 6.00 KiB", "Eager: peak 8.00 KiB"]
        assert texts(svg, "call-label") == ["1. inference", "AdamW.step"]
        assert texts(svg, "x-label") == [timeline_drawing.X_LABEL] * 2
        assert texts(svg, "y-label") == [timeline_drawing.Y_LABEL] * 2
        levels = [e.attrib["d"] for e in svg.iter(f"{SVG}path") if e.attrib["class"] == "held"]
        heights = []
        for path in levels:
            start = numbers(path)[1]
            heights.append([round(start - float(y), 1) for y in re.findall(r"V([\d.]+)", path)])
        scale = heights[1][1] / 8192
        assert heights[0] == pytest.approx([0, 6144 * scale, -1024 * scale, 0], abs=0.1)
        assert heights[1] == pytest.approx([0, 8192 * scale, 0], abs=0.1)
        (planned,) = [e.attrib["d"] for e in svg.iter(f"{SVG}path") if e.attrib["class"] == "bound"]
        start = numbers(levels[0])[1]
        assert start - numbers(planned)[1] == pytest.approx(7168 * scale, abs=0.1)

    def test_a_long_step_keeps_its_extremes(self) -> None:
        count = 100_000
        levels = [0, *((i * 7919) % 5000 for i in range(count))]
        levels[77_777], levels[5] = 9999, -44
        timeline = StepTimeline("compiled", "cpu", count, tuple(range(count + 1)), tuple(levels))
        text = timeline_drawing.draw_timelines("s", [timeline])
        assert len(text) < 150_000
        (path,) = re.findall(r'class="held" d="([^"]*)"', text)
        heights = [float(y) for y in re.findall(r"V([\d.]+)", path)]
        (top, bottom) = min(heights), max(heights)
        zero = numbers(path)[1]
        assert (zero - top) / (bottom - top) == pytest.approx(9999 / (9999 + 44), abs=0.001)

    def test_module_colors_do_not_depend_on_sizes(self) -> None:
        def colours(*sizes: int) -> dict[str, str]:
            names = ("embed", "layers.0", "layers.10", "layers.2", "head")
            record = plan(
                tuple(
                    storage(name, size, 0, 1, module=name)
                    for name, size in zip(names, sizes, strict=True)
                )
            )
            groups = page_style.ModuleGroups([record])
            return {name: groups.css_class(name) for name in names}

        classes = colours(1, 2, 3, 4, 5)
        assert classes == colours(5, 4, 3, 2, 1)
        assert list(classes.values()) == ["m0", "m2", "m4", "m3", "m1"]

    def test_depth_is_limited_by_the_palette(self) -> None:
        record = plan(
            tuple(storage(f"b{i}", 9 - i % 3, 0, 1, module=f"net.{i}.fc") for i in range(9))
        )
        groups = page_style.ModuleGroups([record])
        assert {groups.css_class(f"net.{i}.fc") for i in range(9)} == {"m0"}
        wide = plan(tuple(storage(f"b{i}", 20 - i, 0, 1, module=f"m{i}") for i in range(9)))
        groups = page_style.ModuleGroups([wide])
        assert [groups.css_class(f"m{i}") for i in range(9)] == [
            *(f"m{i}" for i in range(7)),
            "other",
            "other",
        ]
        assert "2 other modules" in groups.legend()

    def test_the_page_is_written_atomically(self, tmp_path: pathlib.Path) -> None:
        report = MemoryReport("m", (SMALL,))
        report.write_html(tmp_path / "a.html")
        assert (tmp_path / "a.html").read_text() == report.to_html()
        with pytest.raises(exc.BadReportFileError, match="absent"):
            report.write_html(tmp_path / "absent" / "a.html")
        assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
