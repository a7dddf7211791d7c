"""Tables of the pages that are made from results (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.harness.results import Document

__all__ = ["format_table", "link_result"]


def format_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link_result(document: Document) -> str:
    """Return a link from a page in docs/user to the file of a committed result."""
    name = f"{document['suite']}/{document['hardware']}"
    return f"[{name}](../../benchmarks/results/{name}.json)"
