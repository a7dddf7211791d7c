"""Parts that the HTML pages of reports have in common: documents, sections, tables, bars (pure).

All text is escaped. A page is well-formed XML, loads nothing and runs no scripts. Tables and
drawings that may be wider than the screen scroll in a region of their own, which the keyboard can
reach.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

from inductor_ext.reports import page_style

BAR_WIDTH, BAR_HEIGHT = 200, 16
"""Units of the view box of a bar."""


class Markup(str):
    """A cell of a table that is HTML, such as a bar, and is not escaped."""

    __slots__ = ()


def render_document(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a whole page.

    Args:
        title: of the document.
        body: HTML inside of the body.
        style: rules beside those of all pages.
    """
    return (
        "<!DOCTYPE html>\n"
        '<html xmlns="http://www.w3.org/1999/xhtml" lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>{page_style.STYLE}{style}</style>\n"
        "</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def render_landmarks(
    heading: str, introduction: str, sections: Sequence[tuple[str, str, Iterable[str]]]
) -> list[str]:
    """Return the body of a page with a skip link, a header, a navigation and sections.

    Args:
        heading: text of the only `h1`.
        introduction: HTML below it.
        sections: id, title and HTML of each section.
    """
    links = "".join(
        f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title, _ in sections
    )
    body = [
        '<a class="skip" href="#content">Skip to the content</a>',
        f"<header><h1>{escape(heading)}</h1>\n{introduction}</header>",
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
        '<main id="content">',
    ]
    for name, title, parts in sections:
        body.append(f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>')
        body += [*parts, "</section>"]
    return [*body, "</main>"]


def render_paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(text)}</p>"


def render_facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names and values as a description list."""
    entries = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f'<dl class="facts">{entries}</dl>'


def make_scrollable(content: str, label: str) -> str:
    """Return HTML in a region that scrolls sideways if it is wider than the page.

    Args:
        content: HTML.
        label: name of the region, for screen readers.
    """
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">\n'
        f"{content}</div>"
    )


def render_table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[int] = (),
    *,
    row_head: int | None = None,
) -> str:
    """Return a table in a scrollable region.

    Args:
        caption: what the table shows.
        heads: of the columns.
        rows: the cells.
        numbers: columns with numbers, which are right-aligned.
        row_head: the column whose cells are the headers of their rows. Default: none.
    """

    def render_cell(index: int, cell: str, is_head: bool) -> str:
        scope = "col" if is_head else "row" if index == row_head else ""
        tag = f'th scope="{scope}"' if scope else "td"
        kind = ' class="n"' if index in numbers else ""
        text = cell if isinstance(cell, Markup) else escape(cell)
        return f"<{tag}{kind}>{text}</{tag[:2]}>"

    def render_row(cells: Sequence[str], is_head: bool) -> str:
        inner = "".join(render_cell(index, cell, is_head) for index, cell in enumerate(cells))
        return f"<tr>{inner}</tr>"

    body = "".join(f"{render_row(row, False)}\n" for row in rows)
    table = (
        f"<table><caption>{escape(caption)}</caption>\n<thead>{render_row(heads, True)}</thead>"
        f"\n<tbody>{body}</tbody></table>"
    )
    return make_scrollable(table, caption)


def draw_bar(
    identifier: str,
    bars: Sequence[tuple[str, float]],
    whole: float,
    title: str,
    description: str,
    *,
    marker: float | None = None,
) -> Markup:
    """Return horizontal bars, one above the other, as SVG for the cell of a table.

    Args:
        identifier: unique in the page.
        bars: CSS class and value of each bar.
        whole: the value that fills the width.
        title, description: what a screen reader reads.
        marker: value at which a vertical line is drawn. Default: none.
    """

    def scale(value: float) -> float:
        return round(min(1.0, value / whole) * BAR_WIDTH, 2) if whole > 0 else 0.0

    height = BAR_HEIGHT / len(bars)
    shapes = [f'<rect class="bar-back" width="{BAR_WIDTH}" height="{BAR_HEIGHT}"/>']
    shapes += [
        f'<rect class="{kind}" y="{round(index * height, 2)}" width="{scale(value)}" '
        f'height="{round(height - 1, 2)}"/>'
        for index, (kind, value) in enumerate(bars)
    ]
    if marker is not None:
        at = max(1.0, scale(marker))
        shapes.append(f'<path class="bar-bound" d="M{at} 0V{BAR_HEIGHT}"/>')
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bar" viewBox="0 0 {BAR_WIDTH} '
        f'{BAR_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-labelledby="{identifier}t {identifier}w"><title id="{identifier}t">{escape(title)}'
        f'</title><desc id="{identifier}w">{escape(description)}</desc>{"".join(shapes)}</svg>'
    )
