"""A headless Chromium, controlled over a pipe by the Chrome DevTools protocol.

The pipe needs no port and no package. Messages are JSON objects that end with a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXECUTABLE = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)

_TIMEOUT = 120.0
"""Seconds for one answer; the machine may be busy."""


_CONTRAST = """(() => {
  document.querySelectorAll("details").forEach((element) => { element.open = true; });
  const parse = (text) => {
    const values = text.match(/[\\d.]+/g).map(Number);
    return values.length < 4 ? [...values, 1] : values;
  };
  const blend = (over, under) => {
    const alpha = over[3];
    return [0, 1, 2].map((i) => over[i] * alpha + under[i] * (1 - alpha)).concat(1);
  };
  const behind = (element) => {
    if (!element) return [255, 255, 255, 1];
    const colour = parse(getComputedStyle(element).backgroundColor);
    return colour[3] === 1 ? colour : blend(colour, behind(element.parentElement));
  };
  const luminance = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((c) => {
      const value = c / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = {count: 0, low: []};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const isDrawn = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
    // Labels are drawn on coloured shapes; test_page_style.py has their contrast.
    const isLabel = element.classList.contains("label");
    if (!isDrawn || isLabel || !walker.currentNode.data.trim()) continue;
    const style = getComputedStyle(element), under = behind(element);
    const colour = parse(element.closest("svg") ? style.fill : style.color);
    for (let e = element; e; e = e.parentElement) colour[3] *= getComputedStyle(e).opacity;
    const sorted = [luminance(blend(colour, under)), luminance(under)].sort((a, b) => a - b);
    const contrast = (sorted[1] + 0.05) / (sorted[0] + 0.05);
    found.count += 1;
    if (contrast < 4.5) {
      found.low.push(`${contrast.toFixed(2)} ${element.outerHTML.slice(0, 160)}`);
    }
  }
  return found;
})()"""


@dataclasses.dataclass(frozen=True)
class Contrast:
    """The contrast of the texts of a page with what is behind them."""

    count: int
    """Texts that are drawn."""
    too_low: list[str]
    """Contrast and element of each text below 4.5: WCAG 2.2, 1.4.3."""


class Browser:
    """One page of a browser. `problems` has the messages of the console and failed requests."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.problems: list[str] = []
        self.requests: list[str] = []

    def attach(self) -> None:
        """Open an empty page and listen to it."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._outgoing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._handle(answer)

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            piece = os.read(self._incoming, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _handle(self, event: Any) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(parameters))

    def open(self, page: Path | str, width: int, height: int, *, dark: bool = False) -> None:
        """Load a file or an address in a window of a size, with a light or dark preference."""
        scheme = "dark" if dark else "light"
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._loaded = False
        self.send("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        end = time.monotonic() + _TIMEOUT
        while not self._loaded:
            assert time.monotonic() < end, "the page does not load"
            self._handle(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression in the page."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def measure_contrast(self) -> Contrast:
        """Open all details of the page and measure the contrast of its texts."""
        found = self.evaluate(_CONTRAST)
        return Contrast(found["count"], found["low"])

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        image = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(image))


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile in `folder`, and yield a page of it."""
    assert EXECUTABLE is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    command = [
        EXECUTABLE,
        "--headless=new",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
    ]
    if os.geteuid() == 0:
        command.append("--no-sandbox")
    # The browser reads from descriptor 3 and writes to 4.
    shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        browser = Browser(from_read, to_write)
        browser.attach()
        yield browser
    finally:
        os.close(to_write)
        os.close(from_read)
        process.terminate()
        process.wait(60)
