"""Hooks of MkDocs for the documentation site; mkdocs.yml names this file.

The pages in docs/ are written for GitHub. They link to files outside of docs/, such as
CONTRIBUTING.md, an example or a result of a benchmark. The site contains these files too, below
`repository/`:

- a Markdown file is a page, and so are the files that it links to;
- a folder is its README.md, or a page with a list of its files;
- a result (JSON) is copied;
- another text file is a page that shows it.

A link to a file that does not exist stays as it is, so that the strict build fails.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

OUTSIDE = "repository"
"""The folder of the site with files from outside of docs/."""

START = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages outside of docs/ that are in the site even if no page links to them."""

BOOST = {"user/errors.md": 3.0, "notes/": 0.2}
"""What the search multiplies scores of pages by: a message that is pasted leads to its error."""

_LANGUAGES = {".py": "python", ".cpp": "cpp", ".hpp": "cpp", ".sh": "bash"}

_LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")

_FENCE = re.compile(r"^ *(`{3,}|~{3,})")


def rewrite_links(text: str, replace: Callable[[str], str]) -> str:
    """Return Markdown with other targets of its links to files.

    Args:
        text: the page.
        replace: gets the target of a link without its anchor, and returns another one. It is not
            called for addresses with a scheme, for anchors of the same page and in code blocks.
    """

    def rewrite(match: re.Match[str]) -> str:
        target = match[2]
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        return f"{match[1]}{replace(target)}{match[3]}"

    lines = []
    fence = ""
    for line in text.split("\n"):
        opened = _FENCE.match(line)
        if opened and not fence:
            fence = opened[1]
        elif opened and opened[1].startswith(fence):
            fence = ""
        lines.append(line if fence else _LINK.sub(rewrite, line))
    return "\n".join(lines)


def find_links(text: str) -> list[str]:
    """Return the targets of a page's links to files, without anchors."""
    targets: list[str] = []

    def collect(target: str) -> str:
        targets.append(target)
        return target

    rewrite_links(text, collect)
    return targets


def resolve(page: str, target: str) -> str:
    """Return the path in the repository that a link leads to, relative to the root.

    Args:
        page: path of the page in the repository.
        target: the link's target, relative to the page's folder.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    # GitHub shows the README of a folder.
    readme = posixpath.join(path, "README.md")
    return readme if (ROOT / readme).is_file() and (ROOT / path).is_dir() else path


def locate(path: str) -> str:
    """Return the path among the sources of the site of a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{OUTSIDE}/{path}/index.md"
    if PurePosixPath(path).suffix in (".md", ".json"):
        return f"{OUTSIDE}/{path}"
    return f"{OUTSIDE}/{path}.md"


def adapt_links(text: str, page: str) -> str:
    """Return a page with the links that lead to the same files in the site.

    Args:
        text: the Markdown of the page.
        page: its path in the repository.
    """

    def replace(target: str) -> str:
        path = resolve(page, target)
        if not (ROOT / path).exists():
            return target
        return posixpath.relpath(locate(path), posixpath.dirname(locate(page)))

    return rewrite_links(text, replace)


_NAMED = re.compile(r"\[((?:\.\./)*(?:[\w-]+/)*[\w-]+\.md)\]\(([^)\s#]+\.md)(#[^)\s]*)?\)")


def name_pages(text: str, page: str) -> str:
    """Return a page whose links with the file name of a page have the title of that page.

    Args:
        text: the Markdown of the page, with the links of the repository.
        page: its path in the repository.
    """

    def replace(match: re.Match[str]) -> str:
        path = ROOT / resolve(page, match[2])
        title = (
            re.search(r"^# (.+)$", path.read_text("utf-8"), re.MULTILINE)
            if path.is_file()
            else None
        )
        return f"[{title[1]}]({match[2]}{match[3] or ''})" if title else match[0]

    return _NAMED.sub(replace, text)


def iterate_outside() -> Iterator[str]:
    """Yield the files and folders outside of docs/ that pages of the site lead to, each once."""
    docs = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
    waiting = [*reversed(docs), *START]
    reached = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            yield path
        links: list[str] = []
        if path.endswith(".md"):
            links = find_links((ROOT / path).read_text(encoding="utf-8"))
        elif (ROOT / path).is_dir():
            links = list_folder(path)
        base = f"{path}/" if (ROOT / path).is_dir() else path
        for target in (resolve(base, link) for link in links):
            if target not in reached and (ROOT / target).exists():
                reached.add(target)
                waiting.append(target)


def list_folder(path: str) -> list[str]:
    """Return the names of the files and folders in a folder of the repository."""
    return sorted(
        child.name
        for child in (ROOT / path).iterdir()
        if not child.name.startswith((".", "__pycache__")) and child.suffix not in (".pyc", ".pt2")
    )


def render_outside(path: str) -> str:
    """Return the content of a file or folder outside of docs/ as the site has it."""
    source = ROOT / path
    if source.is_dir():
        rows = "".join(f"- [{name}]({name})\n" for name in list_folder(path))
        return adapt_links(f"# {path}\n\n{rows}", f"{path}/index.md")
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return adapt_links(name_pages(text, path), path)
    if source.suffix == ".json":
        return text
    language = _LANGUAGES.get(source.suffix, "text")
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    return f"{head}# {path}\n\n````{language}\n{text}\n````\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from outside of docs/."""
    from mkdocs.structure.files import File, InclusionLevel

    pages_of_nav = str(config.nav)
    for path in iterate_outside():
        added = File.generated(config, locate(path), content=render_outside(path))
        if added.src_uri not in pages_of_nav:
            added.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(added)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt the links of a page in docs/; those of other pages are adapted in `on_files`."""
    for prefix, boost in BOOST.items():
        if page.file.src_uri.startswith(prefix):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri.startswith(f"{OUTSIDE}/"):
        return markdown
    path = f"docs/{page.file.src_uri}"
    return adapt_links(name_pages(markdown, path), path)
