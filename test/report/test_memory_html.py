"""The HTML page of a memory report: its drawings are parsed and compared with the plan."""

from __future__ import annotations

import itertools
import pathlib
import re
from xml.etree import ElementTree

import pytest

from inductor_ext import exc
from inductor_ext.report import memory_html
from inductor_ext.report.memory_report import MemoryReport
from test.support.memory_plans import SMALL, SVG, drawings, many, plan, random_plan, storage

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
        bottom = memory_html.CURVE_TOP + memory_html.CURVE_HEIGHT
        heights = {
            name: bottom - min(float(y) for y in re.findall(r"V([\d.]+)", paths[name]))
            for name in ("held", "alive")
        }
        _, bound = numbers(paths["bound"])[:2]
        assert heights["held"] == memory_html.CURVE_HEIGHT
        assert heights["alive"] / heights["held"] == pytest.approx(6144 / 7168, abs=0.001)
        assert (bottom - bound) / heights["held"] == pytest.approx(6144 / 7168, abs=0.001)
        at, top, _ = numbers(paths["peak"])
        (frame,) = rectangles(svg.findall(f"{SVG}g")[0], "frame")
        assert top == memory_html.CURVE_TOP
        assert at == pytest.approx(frame.left + 2.5 * (frame.right - frame.left) / 5, abs=SLACK)

    def test_ten_thousand_storages(self) -> None:
        record = many(10_000, 3_000)
        html = MemoryReport("m", (record,)).to_html()
        assert len(html) < 2_000_000
        _, (svg,) = drawings(html)
        singles = [e for e in svg.iter(f"{SVG}rect") if "s" in e.attrib["class"].split()]
        assert len(singles) == memory_html.MOST_LOOSE + memory_html.MOST_MEMBERS
        rest = [e.findtext(f"{SVG}title") or "" for e in svg.iter(f"{SVG}path")]
        counts = [int(match[1]) for text in rest if (match := re.match(r"(\d+) smaller", text))]
        assert sum(counts) + len(singles) == 10_000

    def test_the_page_is_self_contained(self) -> None:
        html = MemoryReport("m", (random_plan(30, 5, 1),)).to_html()
        addresses = set(re.findall(r"https?://[^\"'\s>]+", html))
        assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
        assert not re.search(r"<(script|link|img|iframe|object)\b|@import|url\(", html)
        assert "@media (prefers-color-scheme: dark)" in html

    def test_module_colors_do_not_depend_on_sizes(self) -> None:
        def colours(*sizes: int) -> dict[str, str]:
            names = ("embed", "layers.0", "layers.10", "layers.2", "head")
            record = plan(
                tuple(
                    storage(name, size, 0, 1, module=name)
                    for name, size in zip(names, sizes, strict=True)
                )
            )
            groups = memory_html.ModuleGroups([record])
            return {name: groups.css_class(name) for name in names}

        classes = colours(1, 2, 3, 4, 5)
        assert classes == colours(5, 4, 3, 2, 1)
        assert list(classes.values()) == ["m0", "m2", "m4", "m3", "m1"]

    def test_depth_is_limited_by_the_palette(self) -> None:
        record = plan(
            tuple(storage(f"b{i}", 9 - i % 3, 0, 1, module=f"net.{i}.fc") for i in range(9))
        )
        groups = memory_html.ModuleGroups([record])
        assert {groups.css_class(f"net.{i}.fc") for i in range(9)} == {"m0"}
        wide = plan(tuple(storage(f"b{i}", 20 - i, 0, 1, module=f"m{i}") for i in range(9)))
        groups = memory_html.ModuleGroups([wide])
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
