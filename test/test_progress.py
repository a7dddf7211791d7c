"""What a long compile shows on a terminal, and that nothing is shown elsewhere."""

from __future__ import annotations

import io
import os
import pathlib
import pty
import subprocess
import sys
import threading

import pytest

from inductor_ext import progress

CHECKOUT = pathlib.Path(__file__).parents[1]

PROGRAM = """
import sys
import torch
from inductor_ext import progress

progress.DELAY = 0.0
if sys.argv[1] == "lines":
    sys.modules["rich.console"] = None
options = {"progress": sys.argv[2] == "True"}
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
torch.compile(model, backend="inductor_ext", options=options)(torch.randn(2, 8))
"""


def run_on_terminal(*arguments: str, **environment: str) -> str:
    """Run the program with a terminal as stderr; return what it writes there."""
    reader, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stderr=terminal,
        cwd=CHECKOUT,
        env={**os.environ, "TERM": "xterm", **environment},
    )
    os.close(terminal)
    parts = []
    try:
        while part := os.read(reader, 4096):
            parts.append(part)
    except OSError:
        pass  # the terminal's other end is closed
    os.close(reader)
    assert process.wait() == 0
    return b"".join(parts).decode()


def test_lines() -> None:
    written = run_on_terminal("lines", "True")
    lines = [line for line in written.splitlines() if line.startswith("inductor_ext: ")]
    assert any(line.startswith("inductor_ext: compiling") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert len(set(lines)) == len(lines)


def test_rich() -> None:
    pytest.importorskip("rich")
    written = run_on_terminal("rich", "True")
    assert "inductor_ext: compiling" in written
    assert "\x1b[" in written


@pytest.mark.parametrize(
    ("setting", "environment"), [("False", {}), ("True", {"RANK": "1"}), ("True", {"TERM": "dumb"})]
)
def test_nothing_is_shown(setting: str, environment: dict[str, str]) -> None:
    assert "inductor_ext: " not in run_on_terminal("lines", setting, **environment)


def test_nothing_is_shown_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.stage("a") as stage:
        stage.advance()
    assert capfd.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if "progress" in thread.name]


class Stream(io.StringIO):
    """Collects text, and says when a line has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_stages_are_shown_from_the_outermost_to_the_innermost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream, times = Stream(), iter([10.0, *[17.0] * 1000])
    with progress.stage("compiling", shown=False):
        with progress.stage("graph 2"), progress.stage("C++ units", 12) as units:
            units.advance()
            units.advance()
            display = progress.Display(stream, 0.0, lambda: next(times))
            display.start()
            assert stream.written.wait(60)
            display.close()
        assert [str(stage) for stage in progress._stages] == ["compiling"]
    assert progress._stages == []
    assert stream.getvalue() == "inductor_ext: compiling: graph 2: C++ units 2/12, 7 s\n"


def test_a_compile_that_ends_before_the_delay_shows_nothing() -> None:
    stream = Stream()
    display = progress.Display(stream, 3600.0)
    display.start()
    display.close()
    assert stream.getvalue() == ""


def test_an_error_ends_the_stages() -> None:
    with pytest.raises(ZeroDivisionError), progress.stage("a"), progress.stage("b"):
        raise ZeroDivisionError
    assert progress._stages == []


def test_a_terminal_that_is_closed_does_not_end_the_compile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Stream()
    stream.close()
    with progress.stage("a", shown=False):
        display = progress.Display(stream, 0.0)
        display.start()
        display.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.stage("a"):
        pass
