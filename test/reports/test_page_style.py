"""The colours of the page of a memory report have the contrast that WCAG 2.2 AA requires."""

from __future__ import annotations

import re

import pytest

from inductor_ext.reports.memory_report import MemoryReport
from test.support.memory_plans import WHOLE, many, plan, storage

TEXT, GRAPHIC = 4.5, 3.0


def luminance(colour: str) -> float:
    """The relative luminance of a colour, by the definition of WCAG 2.2."""
    digits = colour.lstrip("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def page_style() -> str:
    """The style sheet of a page with all colours."""
    modules = plan(tuple(storage(f"b{i}", 64, 0, 1, module=f"m{i}") for i in range(9)))
    without = plan((storage("b", 64, 0, 1, module=""),))
    html = MemoryReport("m", (modules, without)).to_html()
    (style,) = re.findall(r"<style>(.*)</style>", html, re.DOTALL)
    return str(style)


def variables(style: str, mode: str) -> dict[str, str]:
    """The values of the colours on a light or dark page."""
    light, dark = re.findall(r":root \{([^}]*)\}", style)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", light if mode == "light" else dark))


def uses(style: str) -> list[tuple[str, str, str]]:
    """The selector, property and variable of each use of a colour in a rule."""
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", re.sub(r"@media[^\n]*\n", "", style))
    return [
        (selector.strip(), name, colour)
        for selector, body in rules
        if ":root" not in selector
        for name, value in re.findall(r"([\w-]+): ([^;]+);", body)
        for colour in re.findall(r"var\(--([\w-]+)\)", value)
    ]


def test_known_contrasts() -> None:
    assert contrast("#fff", "#000") == pytest.approx(21)
    assert contrast("#777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_contrast(mode: str) -> None:
    style = page_style()
    colours = variables(style, mode)
    checked = set()
    for selector, name, colour in uses(style):
        if colour in ("back", "frame"):
            # The backgrounds. What is drawn with them has an outline of another colour.
            continue
        is_text = name == "color" or "text" in selector
        backs = ["back"]
        if match := re.search(r"\.on-(\w+)", selector):
            backs = [match[1]]
        elif name in ("fill", "background") and re.fullmatch(r"\.(m\d|other|none)", selector):
            # The shapes of storages are drawn on the page and on the frames of arenas.
            backs = ["back", "frame"]
        elif selector in (".held", ".bound"):
            backs = ["back", "alive"]
        for back in backs:
            needed = TEXT if is_text else GRAPHIC
            assert contrast(colours[colour], colours[back]) >= needed, (selector, colour, back)
            checked.add((colour, back))
    assert {colour for colour, _ in checked} == set(colours) - {"back", "frame"}
    assert len(checked) >= 34


def test_colours_are_variables_only() -> None:
    style = page_style()
    rules = re.sub(r":root \{[^}]*\}", "", style)
    assert not re.search(r"#[0-9a-fA-F]{3,6}\b|rgba?\(|opacity", rules)
    assert variables(style, "light").keys() == variables(style, "dark").keys()


def test_each_class_of_a_drawing_has_a_style() -> None:
    report = MemoryReport("m", (*WHOLE.records, many(3000, 1000)), steps=WHOLE.steps)
    html = report.to_html()
    classes = {name for text in re.findall(r' class="([^"]*)"', html) for name in text.split()}
    unstyled = {name for name in classes if not re.search(rf"\.{name}\b", html)}
    # These only name elements, for tests and for styles of readers.
    assert unstyled == {"arena", "call-label", "rest", "x-label", "x-tick", "y-label", "y-tick"}
