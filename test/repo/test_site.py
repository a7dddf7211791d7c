"""The documentation site: a strict build, its links, its API pages, and how it looks in Chromium.

Screenshots are written to the test's folder; INDUCTOR_EXT_SCREENSHOTS names another one.
"""

from __future__ import annotations

import functools
import html.parser
import http.server
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import docs_site
import pytest

import inductor_ext
from test.support import browser as chromium
from test.support.browser import Browser

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]

SIZES = {"desktop": (1280, 900), "phone": (375, 812)}

PAGES = (
    "index",
    "user/start",
    "user/concepts",
    "user/errors",
    "user/settings",
    "user/benchmarks",
    "user/compatibility",
    "api/packages",
    "repository/CONTRIBUTING",
)

needs_chromium = pytest.mark.skipif(chromium.EXECUTABLE is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        # Without the theme's note on its successor.
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING -" not in done.stderr, done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {name for name in (values.get("id"), values.get("name")) if name}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        elif tag == "link" and values.get("rel") not in ("prev", "next", "canonical"):
            self.loaded.append(values.get("href") or "")
        elif values.get("src"):
            self.loaded.append(values["src"] or "")


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """The pages of the site by their path."""
    return {
        path.relative_to(site).as_posix(): Page(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }


def test_links_and_anchors_lead_somewhere(site: Path, pages: dict[str, Page]) -> None:
    assert len(pages) > 40
    broken, count = [], 0
    for name, page in pages.items():
        for link in page.links + page.loaded:
            target, anchor = urldefrag(urljoin(f"http://site.invalid/{name}", link))
            if not target.startswith("http://site.invalid/"):
                continue
            path = unquote(urlsplit(target).path).lstrip("/")
            count += 1
            is_known = (site / path).is_file()
            if anchor and path in pages and not anchor.startswith("__"):
                is_known &= unquote(anchor) in pages[path].anchors
            if not is_known:
                broken.append(f"{name}: {link}")
    assert count > 4000
    assert broken == []


def test_pages_load_nothing_from_elsewhere(pages: dict[str, Page]) -> None:
    assert {
        url for page in pages.values() for url in page.loaded if re.match("(https?:)?//", url)
    } == set()


def test_every_page_of_docs_is_in_the_site(pages: dict[str, Page]) -> None:
    docs = ROOT / "docs"
    expected = {
        path.relative_to(docs).with_suffix(".html").as_posix() for path in docs.rglob("*.md")
    }
    assert expected <= set(pages)
    assert {"repository/index.html", "repository/CONTRIBUTING.html"} <= set(pages)


def test_every_public_name_is_on_one_api_page(pages: dict[str, Page]) -> None:
    reference = {name: page for name, page in pages.items() if name.startswith("api/")}
    for name in inductor_ext.__all__:
        anchor = name if name == "__version__" else f"inductor_ext.{name}"
        assert [page for page, content in reference.items() if anchor in content.anchors] != [], (
            name
        )
        sources = [
            path.name
            for path in (ROOT / "docs" / "api").glob("*.md")
            if re.search(
                rf"^(::: inductor_ext\.{name}$|## `{name}`)", path.read_text(), re.MULTILINE
            )
        ]
        assert len(sources) == 1, (name, sources)


def test_errors_and_methods_are_documented(pages: dict[str, Page]) -> None:
    errors = pages["api/errors.html"].anchors
    assert {f"inductor_ext.exc.{name}" for name in inductor_ext.exc.__all__} <= errors
    model = pages["api/loaded_models.html"].anchors
    prefix = "inductor_ext.cpp_wrapper.load.model.LoadedModel."
    assert {prefix + name for name in ("reload", "update_constants", "signature")} <= model
    assert not any(
        re.search(r"\._[a-z]", anchor) for page in pages.values() for anchor in page.anchors
    )


class TestLinks:
    """The module that adapts links to files outside of docs/."""

    def test_links_into_the_repository(self) -> None:
        text = "[a](../../examples/quickstart.py) [b](start.md#install) [c](https://x.y/z) [d](#e)"
        assert docs_site.adapt_links(text, "docs/user/memory.md") == (
            "[a](../repository/examples/quickstart.py.md) [b](start.md#install) "
            "[c](https://x.y/z) [d](#e)"
        )

    def test_folders_and_results(self) -> None:
        text = "[a](examples) [b](benchmarks/results/op-sweep) [c](docs/index.md) [d](LICENSE)"
        assert docs_site.adapt_links(text, "README.md") == (
            "[a](examples/README.md) [b](benchmarks/results/op-sweep/index.md) "
            "[c](../index.md) [d](LICENSE.md)"
        )

    def test_a_link_to_nothing_stays(self) -> None:
        assert docs_site.adapt_links("[a](../absent.md)", "docs/index.md") == "[a](../absent.md)"

    def test_code_is_not_changed(self) -> None:
        text = "```\n[a](../README.md)\n```\n"
        assert docs_site.adapt_links(text, "docs/index.md") == text
        assert docs_site.find_links(text) == []

    def test_names_of_files_become_titles(self) -> None:
        text = (
            "[user/start.md](user/start.md) [start](user/start.md) "
            "[CONTRIBUTING.md](../CONTRIBUTING.md#tests)"
        )
        assert docs_site.name_pages(text, "docs/index.md") == (
            "[Getting started](user/start.md) [start](user/start.md) "
            "[Contributing](../CONTRIBUTING.md#tests)"
        )

    def test_files_of_the_site(self) -> None:
        outside = list(docs_site.iterate_outside())
        assert len(outside) == len(set(outside))
        assert {
            "README.md",
            "CONTRIBUTING.md",
            "benchmarks/README.md",
            "examples/README.md",
        } <= set(outside)
        assert not any(path.startswith(("docs/", "..", "/")) for path in outside)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium.open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", PAGES)
def test_page(
    browser: Browser, address: str, tmp_path: Path, page: str, size: str, dark: bool
) -> None:
    width, height = SIZES[size]
    browser.problems.clear()
    browser.requests.clear()
    browser.open(f"{address}/{page}.html", width, height, dark=dark)
    scheme = browser.evaluate("document.body.getAttribute('data-md-color-scheme')")
    assert scheme == ("slate" if dark else "default")
    folder = Path(os.environ.get("INDUCTOR_EXT_SCREENSHOTS", tmp_path))
    name = f"site-{page.replace('/', '-')}-{size}-{'dark' if dark else 'light'}.png"
    browser.screenshot(folder / name)

    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("[...document.images].filter((i) => !i.naturalWidth).length") == 0
    contrast = browser.measure_contrast()
    assert contrast.count > 100
    assert contrast.too_low == []
    assert browser.problems == []
    assert [url for url in browser.requests if not url.startswith((address, "data:"))] == []


SEARCH = """(() => {
  const field = document.querySelector("[data-md-component=search-query]");
  field.focus();
  field.value = %r;
  field.dispatchEvent(new Event("input", {bubbles: true}));
  field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
})()"""

RESULTS = """[...document.querySelectorAll(".md-search-result__item a")].map((a) => a.href)"""


@needs_chromium
@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("torch 2.16.0 is not supported: inductor_ext supports torch 2.11", "user/errors.html"),
        (
            "has no self test. Compile it with aot_self_test=True",
            "user/errors.html#noselftesterror",
        ),
        ("dimension 0 is 4, but the model takes 3", "user/errors.html#inputmismatcherror"),
        ("memory_arenas", "user/settings.html"),
        ("fit_batch", "api/memory.html"),
    ],
)
def test_search(browser: Browser, address: str, text: str, target: str) -> None:
    browser.open(f"{address}/index.html", *SIZES["desktop"])
    browser.evaluate(SEARCH % text)
    end = time.monotonic() + 60
    links: list[str] = []
    while not links and time.monotonic() < end:
        time.sleep(0.1)
        links = browser.evaluate(RESULTS)
    paths = [re.sub(r"\?h=[^#]*", "", link.removeprefix(f"{address}/")) for link in links]
    assert any(path.startswith(target) for path in paths[:8]), paths[:8]
