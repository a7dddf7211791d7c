"""Compiles as a trace in Chrome's format, for ui.perfetto.dev or chrome://tracing.

torch sends the beginning and the end of each part of a compile to its structured trace, and the
extension its records. `write_trace` listens to the structured trace of this process and writes both
as one file: the parts as slices, the records as points in time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from inductor_ext.reports.text import check_writable, write_file

_LOGGER = "torch.__trace"
"""The logger of torch's structured trace."""

_ARTIFACT = "inductor_ext_"
"""Prefix of the names of the extension's artifacts in the structured trace."""


@contextlib.contextmanager
def write_trace(path: str | os.PathLike[str] | None) -> Iterator[None]:
    """Write the compiles inside to a file, also if an error ends them.

    While it listens, torch formats its graphs for the structured trace, as with `TORCH_TRACE`, so
    that a compile takes longer.

    Args:
        path: file for the trace, which appears complete or not at all; None listens to nothing.

    Raises:
        exc.BadReportFileError: the file cannot be written. This is checked before.
    """
    if path is None:
        yield
        return
    check_writable(os.fspath(path))

    handler = _Handler()
    logger = logging.getLogger(_LOGGER)
    # First: torch's handler removes itself during its first record, and the next one misses it.
    logger.handlers.insert(0, handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        write_file(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": handler.events}))


class _Handler(logging.Handler):
    """Collects the events of a trace in Chrome's format."""

    def __init__(self) -> None:
        super().__init__()
        name = {"name": "torch.compile"}
        self.events: list[Mapping[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": name}
        ]

    def emit(self, record: logging.LogRecord) -> None:
        metadata: Mapping[str, Any] = getattr(record, "metadata", {})
        payload = getattr(record, "payload", None)
        if payload is None:
            return
        name = metadata.get("artifact", {}).get("name", "")
        if "chromium_event" in metadata:
            self.events.append(json.loads(payload))
        elif name.startswith(_ARTIFACT):
            arguments = _summarize(json.loads(payload))
            self.events.append(
                {
                    "name": name.removeprefix(_ARTIFACT),
                    "cat": "inductor_ext",
                    "ph": "i",
                    "s": "t",
                    "ts": record.created * 1e6,
                    "pid": 0,
                    "tid": 0,
                    "args": arguments,
                }
            )


def _summarize(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and texts of a record; the event log has its lists."""
    return {
        key: value
        for key, value in record.items()
        if key != "event" and isinstance(value, (str, int, float))
    }
