"""Shows on a terminal what a compile that takes long is doing.

`stage` names a part of the work, and stages nest. If the outermost one takes longer than `DELAY`,
the stages are shown until it ends: in one line that is updated if the package `rich` is installed,
else in a new line for each change. Nothing is shown if stderr is not a terminal, nor in the
processes of a distributed program other than the first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

DELAY = 3.0
"""Seconds after which the stages are shown."""

_PERIOD = 0.2
"""Seconds between updates."""

_PREFIX = "inductor_ext: "


@dataclasses.dataclass(eq=False)
class Stage:
    """A part of the work. Any thread may change it."""

    text: str
    done: int = 0
    total: int | None = None

    def advance(self) -> None:
        """Count one of the `total` parts as done."""
        self.done += 1

    def __str__(self) -> str:
        return self.text if self.total is None else f"{self.text} {self.done}/{self.total}"


_stages: list[Stage] = []
"""The stages of all threads, in the order in which they began."""

_lock = threading.Lock()


@contextlib.contextmanager
def stage(text: str, total: int | None = None, *, shown: bool = True) -> Iterator[Stage]:
    """Name what is done inside.

    Args:
        text: what is done: "compiling graph 3".
        total: number of parts, of which `Stage.advance` counts one as done. Default: None.
        shown: False shows neither this stage nor those inside, if it is the outermost one.
    """
    this = Stage(text, total=total)
    with _lock:
        display = Display(sys.stderr, DELAY) if shown and not _stages and _is_visible() else None
        _stages.append(this)
    if display is not None:
        display.start()
    try:
        yield this
    finally:
        with _lock:
            _stages.remove(this)
        if display is not None:
            display.close()


def _is_visible() -> bool:
    if sys.stderr is None or os.environ.get("RANK", "0") != "0":
        return False
    try:
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # it is closed
        return False


class Display:
    """Shows the current stages, in a thread, until it is closed."""

    def __init__(
        self, stream: TextIO, delay: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            stream: where to show them.
            delay: seconds after which they are shown.
            clock: the time in seconds.
        """
        self._stream, self._delay, self._clock = stream, delay, clock
        self._begin = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="inductor_ext-progress")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Remove what is shown, and end the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        if self._ended.wait(self._delay):
            return
        # A closed terminal must not end the compile.
        with contextlib.suppress(OSError, ValueError), _open_output(self._stream) as show:
            while True:
                show(self._describe(), self._clock() - self._begin)
                if self._ended.wait(_PERIOD):
                    return

    @staticmethod
    def _describe() -> str:
        with _lock:
            return ": ".join(map(str, _stages))


@contextlib.contextmanager
def _open_output(stream: TextIO) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows a text and the seconds since the beginning."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        yield _LineOutput(stream)
        return
    console = Console(file=stream)
    with console.status(Text(_PREFIX)) as status:
        yield lambda text, seconds: status.update(Text(f"{_PREFIX}{text}, {seconds:.0f} s"))


class _LineOutput:
    """Shows each new text in a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""

    def __call__(self, text: str, seconds: float) -> None:
        if text and text != self._last:
            self._last = text
            self._stream.write(f"{_PREFIX}{text}, {seconds:.0f} s\n")
            self._stream.flush()
