"""What was measured of a GEMM, where and when, and tables of it as JSON files.

An `Entry` is one measurement: problem, environment, candidates with their microseconds, choice. Of
one problem in one environment the newest entry counts, so that merging tables is a union, and the
same in whatever order it is done.

A table is one JSON object, an entry a line, sorted: version control shows what has changed. It is
read whole or, with the first thing in it that is no entry, refused (`exc.BadTuningFileError`).
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from inductor_ext import _compat, exc
from inductor_ext.autotune.decision import Decision, Origin, Timing
from inductor_ext.storage import artifact_store
from inductor_ext.templates.device import Device
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem, plain, read, require
from inductor_ext.templates.versions import template_version

__all__ = [
    "FORMAT",
    "Entry",
    "Environment",
    "Environments",
    "merged",
    "read_table",
    "write_table",
]

FORMAT = 1
"""Of tables and of the files in the cache folder."""

_LAST_SECOND = 253_402_300_799
"""Of the year 9999, the last one of which Python can say the date."""

_LONGEST_FAILURE = 200
"""Characters. A compiler's complaint can be thousands of lines."""


@functools.cache
def _versions() -> tuple[str | None, str | None]:
    """Of Triton, and of the CUDA that torch was built with."""
    import torch.version

    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name), torch.version.cuda
        except importlib.metadata.PackageNotFoundError:
            continue
    return None, torch.version.cuda


@dataclass(frozen=True)
class Environment:
    """What a measurement holds for, besides its problem: the GPU and the code that ran on it.

    Triton makes our kernels' machine code, down to the assembler, which it brings along; the driver
    loads it as it is. CUDA's version stands for cuBLAS, which is stock's path. torch's own version
    is left out: of our kernels it contributes the epilogue's operations, which all candidates
    share. It is recorded in the entry.

    Raises:
        exc.BadGemmError: a capability that is no pair, SMs below 1.
    """

    device: str
    """As torch.cuda.get_device_name says it."""
    capability: tuple[int, int]
    sms: int
    """Multiprocessors."""
    triton: str | None
    """Version; None if it is not installed."""
    cuda: str | None
    """Version that torch was built with; None for a torch without."""
    templates: str
    """`template_version` of the problem's operation; where CUTLASS kernels were candidates, a plus
    and what tells which."""

    def __post_init__(self) -> None:
        pair = len(self.capability) == 2
        require(pair, "environment", "capability", self.capability, "major and minor")
        require(self.sms >= 1, "environment", "sms", self.sms, "1 or more")

    @classmethod
    def of(cls, device: Device, operation: str, circumstances: str = "") -> Environment:
        """This process's, on a device.

        Args:
            device: see `Device.described`.
            operation: of the problem.
            circumstances: what measurements depend on besides, as one word; none for nothing.
        """
        templates = "+".join(filter(None, (template_version("triton", operation), circumstances)))
        return cls(device.name, device.capability, device.sms, *_versions(), templates)

    def resembles(self, other: Environment) -> bool:
        """Whether what is fast in one can be expected to be fast in the other: a device of the same
        name, or of the same capability and number of SMs, whatever the versions.
        """
        same_size = (self.capability, self.sms) == (other.capability, other.sms)
        return self.device == other.device or same_size

    def differences(self, here: Environment) -> tuple[str, ...]:
        """What another environment, `here`, has otherwise, each in words; none for an equal one."""
        found = []
        if self.device != here.device:
            found.append(f"measured on {self.device}")
        elif (self.capability, self.sms) != (here.capability, here.sms):
            found.append(f"measured on {self.sms} SMs, here {here.sms}")
        if self.triton != here.triton:
            found.append(f"with Triton {self.triton}, here {here.triton}")
        if self.cuda != here.cuda:
            found.append(f"with CUDA {self.cuda}, here {here.cuda}")
        if self.templates != here.templates:
            there, own = (each.templates.partition("+")[0] for each in (self, here))
            what = "template versions" if there != own else "CUTLASS settings"
            found.append(f"with other {what}")
        return tuple(found)


Environments = Callable[[GemmProblem], Environment]
"""The environment of each problem on one device, in one process."""


@dataclass(frozen=True)
class Entry:
    """One measurement.

    Raises:
        exc.BadGemmError: a time that is none, or a choice that was not measured.
    """

    problem: GemmProblem
    environment: Environment
    config: Config | None
    """What was chosen; None for stock's path."""
    timings: tuple[Timing, ...]
    """Of all candidates."""
    measured: int
    """When, in seconds since 1970."""
    torch: str
    """Its version."""

    def __post_init__(self) -> None:
        for timing in self.timings:
            took = timing.microseconds
            ok = took is None or (math.isfinite(took) and took > 0)
            require(ok, "entry", "microseconds", took, "a number above 0")
        chosen = self.config is None or self.decision("cache").microseconds(self.config) is not None
        require(chosen, "entry", "config", self.config, "one of those that were measured, or null")
        dated = 0 <= self.measured <= _LAST_SECOND
        require(dated, "entry", "measured", self.measured, "seconds since 1970")

    @classmethod
    def of(cls, problem: GemmProblem, decision: Decision, environment: Environment) -> Entry:
        """What was decided just now."""
        timings = tuple(
            Timing(each.config, each.microseconds, each.failure and _short(each.failure))
            for each in decision.timings
        )
        now, torch = int(time.time()), _compat.torch_version()
        return cls(problem, environment, decision.config, timings, now, torch)

    def decision(self, origin: Origin) -> Decision:
        """What the entry says to do."""
        return Decision(self.config, origin, self.timings)

    def to_json(self) -> dict[str, Any]:
        """What `json.dumps` takes; `from_json` reads it."""
        value: dict[str, Any] = plain(self)
        return value

    @classmethod
    def from_json(cls, value: object) -> Entry:
        """What `to_json` has written.

        Raises:
            exc.BadGemmError: something is missing, unknown, of a wrong type or no entry.
        """
        return read(cls, value, "entry")

    @functools.cached_property
    def line(self) -> str:
        """The entry as one line of JSON, the same in every process."""
        return json.dumps(self.to_json(), sort_keys=True)


def _short(failure: str) -> str:
    return " ".join(failure.split())[:_LONGEST_FAILURE]


def merged(entries: Iterable[Entry]) -> list[Entry]:
    """The newest entry of each problem and environment, sorted by these.

    Of two of the same second the one with the greater text is kept, so that the result does not
    depend on the order.
    """
    newest: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        key = (entry.problem.key, json.dumps(plain(entry.environment)))
        known = newest.get(key)
        if known is None or (known.measured, known.line) < (entry.measured, entry.line):
            newest[key] = entry
    return [newest[key] for key in sorted(newest)]


# Tables


def read_table(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a table.

    Raises:
        exc.BadTuningFileError: it cannot be read, or holds something else.
    """
    found = []
    for index, value in enumerate(raw_table(path)):
        try:
            found.append(Entry.from_json(value))
        except exc.BadGemmError as error:
            why = exc.BadGemmError.template.format(**error.fields)
            raise _bad(path, why, f", entry {index + 1}") from None
    return found


def raw_table(path: str | os.PathLike[str]) -> list[Any]:
    """The entries of a table as JSON has them, unchecked.

    Raises:
        exc.BadTuningFileError: it cannot be read, or is no table of our format.
    """
    try:
        table = json.loads(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"it is no JSON: {error}") from None
    if not isinstance(table, dict) or not isinstance(table.get("entries"), list):
        raise _bad(path, "it is no table of tuning results")
    if table.get("format") != FORMAT:
        raise _bad(path, f"it is of format {table.get('format')!r}, and this reads {FORMAT}")
    entries: list[Any] = table["entries"]
    return entries


def write_table(path: str | os.PathLike[str], entries: Iterable[Entry]) -> int:
    """Write a table, a file atomically; entries of the same problem and environment are merged.

    Returns:
        The number of entries.

    Raises:
        exc.BadTuningFileError: it cannot be written.
    """
    lines = [entry.line for entry in merged(entries)]
    text = f'{{"format": {FORMAT}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            # A pipe, or /dev/stdout, is written to and not replaced.
            pathlib.Path(path).write_text(text, encoding="utf-8")
        else:
            with artifact_store.publish(os.path.realpath(path)) as temporary:
                pathlib.Path(temporary).write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"it cannot be written: {error.strerror or error}"
        raise exc.BadTuningFileError(
            file=os.fspath(path), where="", why=why, mend="Give a path in a writable folder"
        ) from None
    return len(lines)


def _bad(path: str | os.PathLike[str], why: str, where: str = "") -> exc.BadTuningFileError:
    # A value that is quoted may be long.
    why = why if len(why) <= 300 else f"{why[:200]} ... {why[-80:]}"
    mend = "Give files that `inductor-ext tune export` has written"
    return exc.BadTuningFileError(file=os.fspath(path), where=where, why=why.rstrip("."), mend=mend)
