"""docs/user/errors.md has every error with its message, and the files that pages name exist.

test_doc_blocks.py runs the code of the pages.
"""

from __future__ import annotations

import pathlib
import re

import pytest
import write_error_docs

from benchmarks.harness import results
from inductor_ext import exc

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]
ERRORS = (ROOT / "docs" / "user" / "errors.md").read_text()


def test_every_error_is_described_once() -> None:
    described = re.findall(r"^### `(\w+)`$", ERRORS, flags=re.MULTILINE)
    classes = {
        name
        for name, value in vars(exc).items()
        if isinstance(value, type) and issubclass(value, exc.InductorExtError)
    }
    assert set(exc.__all__) == classes
    assert sorted(described) == sorted(classes - {"InductorExtError"})
    sections = ERRORS.split("\n### ")[1:]
    assert [section for section in sections if section.count("**When.**") != 1] == []
    assert [section for section in sections if section.count("**What to do.**") != 1] == []


def test_messages_of_errors_are_those_of_the_classes() -> None:
    """`scripts/write_error_docs.py` brings the page up to date."""
    assert write_error_docs.render_page(ERRORS) == ERRORS


def test_examples_of_messages_fit_their_classes() -> None:
    examples = 0
    for section in ERRORS.split("\n### ")[1:]:
        name = section.split("`")[1]
        for _, message in re.findall(r"\*\*Example\.\*\* (`+)(.+?)\1\n", section):
            assert write_error_docs.match_message(getattr(exc, name), message), name
            examples += 1
    assert examples == ERRORS.count("**Example.**") > 10
    assert not write_error_docs.match_message(exc.ModelNotFoundError, "no such model")


def test_table_is_that_of_the_committed_result() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("quickstart/*.json")
    page = (ROOT / "examples" / "README.md").read_text()
    assert results.render_table(results.read(path)).strip() in page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page
    links = re.findall(r"\]\(([^)#\s]+)", file.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (file.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_into_pages_name_a_heading(page: str) -> None:
    file = ROOT / page
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", file.read_text())
    missing = [f"{name}#{anchor}" for name, anchor in links if anchor not in _anchors(file, name)]
    assert missing == []


def _anchors(page: pathlib.Path, name: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = (page.parent / name if name else page).read_text()
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+)\)", index)}
    pages = {(ROOT / page).resolve() for page in PAGES} - {ROOT / "README.md"}
    assert pages - listed == {ROOT / "docs" / "index.md"}


def test_files_of_the_architecture_exist() -> None:
    package = ROOT / "inductor_ext"
    named = re.findall(r"`([\w/]+\.py|[\w/]+/)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 50
    for name in named:
        # A file may be named without the folder of the one before it.
        exists = any((root / name).exists() for root in (ROOT, package))
        assert exists or list(package.rglob(name)), name


def test_named_tests_exist() -> None:
    """docs/switch.md names a test for each guarantee."""
    page = (ROOT / "docs" / "switch.md").read_text()
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)(\*?)`", page)
    assert len(named) > 8
    for file, name, open_ended in named:
        source = (ROOT / "test" / file).read_text()
        ending = r"\w*" if open_ended else r"\b"
        assert re.search(rf"def {name}{ending}\(", source), f"{file}::{name}"
