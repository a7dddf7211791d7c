"""The tables of docs/user/benchmarks.md are those of the committed results."""

from __future__ import annotations

import re

from benchmarks import doc_tables

PAGE = doc_tables.PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_committed_results() -> None:
    """`python -m benchmarks.doc_tables` brings it up to date."""
    assert doc_tables.render(PAGE) == PAGE


def test_every_table_is_on_the_page_once() -> None:
    names = re.findall(r"<!-- table: ([\w ]+) -->", PAGE)
    assert len(names) == len(set(names)) == PAGE.count("<!-- end -->") == 15
