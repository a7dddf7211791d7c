"""Every code block of the pages of the site runs, or a comment says why it does not.

`test.support.doc_blocks` runs the blocks of a page in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test.support import doc_blocks, doc_setups

ROOT = doc_blocks.ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

BLOCKS = {page: doc_blocks.read_blocks(page) for page in PAGES}

OTHER_LANGUAGES = {"text", "cpp", "cmake"}
"""test/cpp_wrapper/client compiles the C++."""


def has_code(page: Path) -> bool:
    return any(block.is_code and block.reason is None for block in BLOCKS[page])


def name_page(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    # Pages share nothing: any worker may run one.
    [
        pytest.param(page, marks=pytest.mark.xdist_group(name_page(page)), id=name_page(page))
        for page in filter(has_code, PAGES)
    ],
)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": path,
        # The modules that blocks write are in the folder in which they run.
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-m", "test.support.doc_blocks", str(page)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_page)
def test_every_block_is_read(page: Path) -> None:
    fences = [
        line for line in page.read_text(encoding="utf-8").splitlines() if line.strip()[:3] == "```"
    ]
    assert len(fences) == 2 * len(BLOCKS[page])
    for block in BLOCKS[page]:
        where = f"{name_page(page)}:{block.line}"
        assert block.is_code or block.language in OTHER_LANGUAGES, f"{where}: {block.language!r}"
        assert block.reason is None or len(block.reason) > 10, where
        assert block.setup is None or callable(getattr(doc_setups, block.setup)), where
        assert block.language != "text" or (block.setup, block.reason) == (None, None), where


def test_most_blocks_run() -> None:
    blocks = [block for page in PAGES for block in BLOCKS[page] if block.is_code]
    run = [block for block in blocks if block.reason is None]
    assert len(run) > len(blocks) - len(run)


def test_reasons_name_tests_that_exist() -> None:
    reasons = [block.reason or "" for page in PAGES for block in BLOCKS[page]]
    files = {
        name for text in reasons for name in re.findall(r"test/[\w/]+(?:\.py)?|\w\S*\.\w+", text)
    }
    assert len(files) > 5
    folders = (ROOT, ROOT / "test" / "repo", ROOT / "docs")
    assert {name for name in files if not any((f / name).exists() for f in folders)} == set()


PAGE = """\
# A page

<!-- setup: program_file -->

```python
a = 1 + 1
print(a)
```

<!-- output -->

```text
2
```

```bash
test -f model.py
echo one
```

<!-- not run: a reason for that -->

```python
raise RuntimeError
```

```console
$ echo a \\
    b
a b
$ echo c
c
```
"""


class TestRunner:
    """The module that runs the blocks."""

    def read(self, folder: Path, text: str) -> list[doc_blocks.Block]:
        page = folder / "page.md"
        page.write_text(text)
        return doc_blocks.read_blocks(page)

    def test_blocks_and_their_comments(self, tmp_path: Path) -> None:
        first, output, bash, skipped, console = self.read(tmp_path, PAGE)
        assert (first.language, first.line, first.setup) == ("python", 6, "program_file")
        assert (output.language, output.is_output, output.is_code) == ("text", True, False)
        assert (bash.language, bash.reason) == ("bash", None)
        assert skipped.reason == "a reason for that"
        assert list(doc_blocks.list_commands(console)) == ["echo a \\\n    b\n", "echo c\n"]

    def test_a_page_runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read(tmp_path, PAGE)
        monkeypatch.chdir(tmp_path)
        doc_blocks.run_page(tmp_path / "page.md")
        assert (tmp_path / "model.py").exists()

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("```text\n2", "```text\n3", r"page.md:13: the output is\n2"),
            ("echo one", "exit 3", r"page.md:17: exit code 3"),
        ],
    )
    def test_a_page_that_is_wrong_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
    ) -> None:
        assert old in PAGE
        self.read(tmp_path, PAGE.replace(old, new))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit, match=message):
            doc_blocks.run_page(tmp_path / "page.md")

    def test_errors_have_the_line_of_the_page(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.read(tmp_path, PAGE.replace("print(a)", "print(b)"))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(NameError) as raised:
            doc_blocks.run_page(tmp_path / "page.md")
        last = raised.traceback[-1]
        assert (Path(last.path).name, last.lineno + 1) == ("page.md", 7)
