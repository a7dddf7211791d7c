"""Runs the code blocks of a page, in order, as a user would.

    python -m test.support.doc_blocks PAGE

Python blocks of a page share their variables, and run in the current folder, in which the bash and
console blocks run too. A comment before a block controls it:

- `<!-- not run: REASON -->`: the block is not run.
- `<!-- setup: NAME -->`: the function of `doc_setups` runs before the block.
- `<!-- output -->`: a text block that has to be the output of the block before it.

A Python block whose first line is a comment with a file's name is written to this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from test.support import doc_setups

ROOT = Path(__file__).parents[2]

LANGUAGES = ("python", "bash", "console")
"""The languages of blocks that run."""

_BLOCK = re.compile(
    r"(?P<comments>(?:^<!-- [^\n]* -->\n+)*)^(?P<indent> *)```(?P<language>[\w+]*)\n"
    r"(?P<text>.*?)^ *```$",
    flags=re.MULTILINE | re.DOTALL,
)

_COMMENT = re.compile(r"<!-- (not run|setup|output)(?:: (.+?))? -->")

_FILE = re.compile(r"# ([\w/]+\.py)\n")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """The line of the page with the first line of the text."""
    language: str
    text: str
    reason: str | None
    """Why it is not run, if it is not."""
    setup: str | None
    """The name of the function that runs before it, if there is one."""
    is_output: bool

    @property
    def is_code(self) -> bool:
        """Whether it is of a language that runs."""
        return self.language in LANGUAGES


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        marks = dict(_COMMENT.findall(match["comments"]))
        line = text[: match.start("text")].count("\n") + 1
        body = match["text"]
        if match["indent"]:
            body = re.sub(rf"^{match['indent']}", "", body, flags=re.MULTILINE)
        reason, setup = marks.get("not run"), marks.get("setup")
        blocks.append(Block(page, line, match["language"], body, reason, setup, "output" in marks))
    return blocks


def list_commands(block: Block) -> Iterator[str]:
    """Yield the shell scripts of a bash or console block."""
    if block.language == "bash":
        yield block.text
    else:
        yield from re.findall(r"^\$ (.+\n(?:    .+\n)*)", block.text, flags=re.MULTILINE)


def run_block(block: Block, names: dict[str, Any]) -> str:
    """Run a block with the variables of the page, and return what it prints."""
    file = _FILE.match(block.text)
    if block.language == "python" and file:
        Path(file[1]).write_text(block.text, encoding="utf-8")
        return ""
    if block.language == "python":
        # Tracebacks have the lines of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        return printed.getvalue()
    output = ""
    for command in list_commands(block):
        done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True)
        if done.returncode:
            where = f"{block.page}:{block.line}"
            raise SystemExit(f"{where}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        output += done.stdout
    return output


def run_page(page: Path) -> None:
    """Run the blocks of a page."""
    names: dict[str, Any] = {"__name__": "page"}
    output = ""
    for block in read_blocks(page):
        if block.setup:
            getattr(doc_setups, block.setup)(names)
        if block.is_output and block.text != output:
            raise SystemExit(f"{page}:{block.line}: the output is\n{output}")
        if block.is_code and block.reason is None:
            output = run_block(block, names)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
