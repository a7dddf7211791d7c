"""The pages of reports in a real headless Chromium, light and dark, on a desktop and a phone.

Screenshots are written to the test's folder; INDUCTOR_EXT_SCREENSHOTS names another one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inductor_ext.reports.compile_report import CompileReport
from inductor_ext.reports.memory_report import MemoryReport
from test.support import browser as chromium
from test.support.browser import Browser
from test.support.memory_plans import WHOLE, many
from test.support.report_facts import FACTS

pytestmark = pytest.mark.skipif(chromium.EXECUTABLE is None, reason="there is no Chromium")

SIZES = {"desktop": (1200, 900), "phone": (375, 812)}

PAGES = {
    "report": CompileReport(FACTS).to_html(),
    "memory": MemoryReport("m", (*WHOLE.records, many(200, 20)), steps=WHOLE.steps).to_html(),
}

FOCUSED = """(() => {
  const element = document.activeElement, style = getComputedStyle(element);
  return [element.tagName.toLowerCase(), element.className, style.outlineStyle,
          parseFloat(style.outlineWidth), element.getBoundingClientRect().right > 0];
})()"""

UNREACHABLE = """[...document.querySelectorAll("*")].filter((element) => {
  const overflow = getComputedStyle(element).overflowX;
  return /auto|scroll/.test(overflow) && element.tabIndex !== 0;
}).length"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as files."""
    path = tmp_path_factory.mktemp("pages")
    for name, html in PAGES.items():
        (path / f"{name}.html").write_text(html, encoding="utf-8")
    return path


def screenshots(tmp_path: Path) -> Path:
    path = Path(os.environ.get("INDUCTOR_EXT_SCREENSHOTS", tmp_path))
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PAGES)
def test_page(
    browser: Browser, folder: Path, tmp_path: Path, page: str, size: str, dark: bool
) -> None:
    file = folder / f"{page}.html"
    width, height = SIZES[size]
    browser.problems.clear()
    browser.requests.clear()
    browser.open(file, width, height, dark=dark)
    browser.screenshot(screenshots(tmp_path) / f"{page}-{size}-{'dark' if dark else 'light'}.png")

    assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") is dark
    back = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")
    # Nothing but the regions of tables and drawings scrolls sideways.
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert browser.evaluate(UNREACHABLE) == 0
    contrast = browser.measure_contrast()
    assert contrast.count > 100
    assert contrast.too_low == []
    assert browser.problems == []
    assert browser.requests == [file.as_uri()]


def test_the_keyboard_reaches_every_control(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html", *SIZES["phone"])
    controls = browser.evaluate(
        "document.querySelectorAll('a, summary, [tabindex=\"0\"]').length"
        " - document.querySelectorAll('details:not([open]) [tabindex=\"0\"]').length"
    )
    reached = []
    for _ in range(controls):
        browser.press("Tab", 9)
        reached.append(browser.evaluate(FOCUSED))
    # The skip link comes first and is visible when it has the focus.
    assert reached[0][:2] == ["a", "skip"]
    tags = [(tag, name) for tag, name, *_ in reached]
    assert tags.count(("div", "scroll")) >= 8
    assert tags.count(("a", "")) == 7
    assert ("summary", "") in tags
    assert len(tags) == controls
    for tag, name, outline, thickness, is_visible in reached:
        assert (outline, thickness, is_visible) == ("solid", 2, True), (tag, name)


def test_the_skip_link_leads_to_the_content(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html", *SIZES["desktop"])
    browser.press("Tab", 9)
    browser.evaluate("document.activeElement.click()")
    assert browser.evaluate("location.hash") == "#content"


def test_problems_are_noticed(browser: Browser, tmp_path: Path) -> None:
    """The checks above fail on a page that has what they look for."""
    file = tmp_path / "bad.html"
    file.write_text(
        "<!DOCTYPE html><body><p style='color: #999; background: #fff; width: 900px'>text</p>"
        "<div style='overflow-x: auto'>x</div><img src='absent.png'>"
        "<script>console.error('an error')</script></body>"
    )
    browser.problems.clear()
    browser.requests.clear()
    browser.open(file, *SIZES["phone"])
    assert browser.evaluate("document.documentElement.scrollWidth") > 375
    assert [text[:4] for text in browser.measure_contrast().too_low] == ["2.85"]
    assert browser.evaluate(UNREACHABLE) == 1
    assert any("an error" in problem for problem in browser.problems)
    assert any(url.endswith("absent.png") for url in browser.requests)
