"""Tuning results of GEMMs, and tables of them as JSON files.

A `TuningResult` has the problem, the environment, the candidates with their times, and the choice.
For a problem in an environment only the newest result counts, so merging tables is a union and does
not depend on the order.

A table is one JSON object with one entry per line, sorted, so that version control shows readable
diffs. A table is read completely or rejected (`exc.BadTuningFileError`); the error names the first
value that is not a valid entry.
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
from inductor_ext.storage import json_codec
from inductor_ext.storage.atomic import atomic_write
from inductor_ext.templates.device import Device
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem, read
from inductor_ext.templates.tensors import require
from inductor_ext.templates.versions import template_version

FORMAT = 1
"""Format version of tables and of the files in the cache folder."""

_LAST_SECOND = 253_402_300_799
"""The last second of the year 9999, the last year that Python's dates can represent."""

_LONGEST_FAILURE = 200
"""Maximum length in characters. Compiler errors can have thousands of lines."""


@functools.cache
def _versions() -> tuple[str | None, str | None]:
    """Return the versions of Triton and of the CUDA that torch was built with."""
    import torch.version

    for name in ("triton", "pytorch-triton"):
        try:
            return importlib.metadata.version(name), torch.version.cuda
        except importlib.metadata.PackageNotFoundError:
            continue
    return None, torch.version.cuda


@dataclass(frozen=True)
class Environment:
    """What a tuning result depends on besides its problem: the GPU and the versions of the code.

    The Triton version determines the machine code of the extension's Triton kernels, because Triton
    bundles its own assembler and the driver loads the result unchanged. The CUDA version stands for
    cuBLAS, which Inductor's path calls. torch's own version is left out: all it contributes to
    extension kernels are the pointwise operations of the epilogue, which all candidates share. It
    is recorded in the entry.

    Raises:
        exc.BadGemmError: the capability is not a pair, or `sms` is below 1.
    """

    device: str
    """As returned by torch.cuda.get_device_name."""
    capability: tuple[int, int]
    sms: int
    """Number of streaming multiprocessors."""
    triton: str | None
    """Version; None if Triton is not installed."""
    cuda: str | None
    """Version that torch was built with; None for a torch without CUDA."""
    templates: str
    """`template_version` of the problem's operation. If CUTLASS kernels were candidates, followed
    by a plus sign and a string that identifies the candidate set."""

    def __post_init__(self) -> None:
        pair = len(self.capability) == 2
        require(pair, "environment", "capability", self.capability, "major and minor")
        require(self.sms >= 1, "environment", "sms", self.sms, "1 or more")

    @classmethod
    def of(cls, device: Device, operation: str, candidate_set: str = "") -> Environment:
        """Return the environment of this process on a device.

        Args:
            device: see `Device.from_torch`.
            operation: operation of the problem.
            candidate_set: one word for what else the measurements depend on; empty for nothing.
        """
        templates = "+".join(filter(None, (template_version("triton", operation), candidate_set)))
        return cls(device.name, device.capability, device.sms, *_versions(), templates)

    def is_similar_to(self, other: Environment) -> bool:
        """Whether a kernel that is fast in one environment is expected to be fast in the other.

        True for devices of the same name, or of the same capability and number of SMs, whatever the
        versions.
        """
        same_size = (self.capability, self.sms) == (other.capability, other.sms)
        return self.device == other.device or same_size

    def differences(self, here: Environment) -> tuple[str, ...]:
        """Return the differences to another environment, `here`, as text; empty if equal."""
        differences = []
        if self.device != here.device:
            differences.append(f"measured on {self.device}")
        elif (self.capability, self.sms) != (here.capability, here.sms):
            differences.append(f"measured on {self.sms} SMs, here {here.sms}")
        if self.triton != here.triton:
            differences.append(f"with Triton {self.triton}, here {here.triton}")
        if self.cuda != here.cuda:
            differences.append(f"with CUDA {self.cuda}, here {here.cuda}")
        if self.templates != here.templates:
            version, local_version = (
                environment.templates.partition("+")[0] for environment in (self, here)
            )
            subject = "template versions" if version != local_version else "CUTLASS settings"
            differences.append(f"with different {subject}")
        return tuple(differences)


Environments = Callable[[GemmProblem], Environment]
"""Maps a problem to its environment on one device, in one process."""


@dataclass(frozen=True)
class TuningResult:
    """One tuning result.

    Raises:
        exc.BadGemmError: a time is not a positive finite number, the chosen configuration was not
            measured, or the date is out of range.
    """

    problem: GemmProblem
    environment: Environment
    config: Config | None
    """The chosen configuration; None for Inductor's path."""
    timings: tuple[Timing, ...]
    """Timings of all candidates."""
    measured: int
    """Time of the measurement, in seconds since 1970."""
    torch: str
    """Version of torch."""

    def __post_init__(self) -> None:
        for timing in self.timings:
            microseconds = timing.microseconds
            ok = microseconds is None or (math.isfinite(microseconds) and microseconds > 0)
            require(ok, "entry", "microseconds", microseconds, "a number above 0")
        is_measured = (
            self.config is None or self.decision("cache").microseconds(self.config) is not None
        )
        require(
            is_measured, "entry", "config", self.config, "one of those that were measured, or null"
        )
        dated = 0 <= self.measured <= _LAST_SECOND
        require(dated, "entry", "measured", self.measured, "seconds since 1970")

    @classmethod
    def of(cls, problem: GemmProblem, decision: Decision, environment: Environment) -> TuningResult:
        """Return an entry for a decision that was just made."""
        timings = tuple(
            Timing(timing.config, timing.microseconds, timing.failure and _shorten(timing.failure))
            for timing in decision.timings
        )
        now, torch = int(time.time()), _compat.torch_version()
        return cls(problem, environment, decision.config, timings, now, torch)

    def decision(self, origin: Origin) -> Decision:
        """Return the decision that the entry records."""
        return Decision(self.config, origin, self.timings)

    def to_json(self) -> dict[str, Any]:
        """Return a value for `json.dumps`; `from_json` is the inverse."""
        value: dict[str, Any] = json_codec.encode(self)
        return value

    @classmethod
    def from_json(cls, value: object) -> TuningResult:
        """Return the entry that `to_json` serialized.

        Raises:
            exc.BadGemmError: a key is missing, unknown or of the wrong type, or the value is not an
                entry.
        """
        return read(cls, value, "entry")

    @functools.cached_property
    def line(self) -> str:
        """The entry as one line of JSON, identical in every process."""
        return json.dumps(self.to_json(), sort_keys=True)


def _shorten(failure: str) -> str:
    return " ".join(failure.split())[:_LONGEST_FAILURE]


def merge_results(entries: Iterable[TuningResult]) -> list[TuningResult]:
    """Return the newest entry of each problem and environment, sorted by problem and environment.

    Of two entries of the same second, the one with the greater text is kept, so that the result
    does not depend on the order.
    """
    newest: dict[tuple[str, str], TuningResult] = {}
    for entry in entries:
        key = (entry.problem.key, json.dumps(json_codec.encode(entry.environment)))
        other = newest.get(key)
        if other is None or (other.measured, other.line) < (entry.measured, entry.line):
            newest[key] = entry
    return [newest[key] for key in sorted(newest)]


# Tables


def read_table(path: str | os.PathLike[str]) -> list[TuningResult]:
    """Return the entries of a table.

    Raises:
        exc.BadTuningFileError: the file cannot be read, or holds something else.
    """
    results = []
    for index, value in enumerate(raw_table(path)):
        try:
            results.append(TuningResult.from_json(value))
        except exc.BadGemmError as error:
            why = exc.BadGemmError.template.format(**error.fields)
            raise _make_error(path, why, f", entry {index + 1}") from None
    return results


def raw_table(path: str | os.PathLike[str]) -> list[Any]:
    """Return the entries of a table as JSON values, without checking them.

    Raises:
        exc.BadTuningFileError: the file cannot be read, or is not a table of format `FORMAT`.
    """
    try:
        table = json.loads(pathlib.Path(path).read_bytes())
    except OSError as error:
        raise _make_error(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _make_error(path, f"it is not JSON: {error}") from None
    if not isinstance(table, dict) or not isinstance(table.get("entries"), list):
        raise _make_error(path, "it is not a table of tuning results")
    if table.get("format") != FORMAT:
        raise _make_error(
            path, f"it has format {table.get('format')!r}, and this version reads format {FORMAT}"
        )
    entries: list[Any] = table["entries"]
    return entries


def write_table(path: str | os.PathLike[str], entries: Iterable[TuningResult]) -> int:
    """Write a table, atomically if `path` is a regular file or does not exist.

    Entries of the same problem and environment are merged.

    Returns:
        The number of entries.

    Raises:
        exc.BadTuningFileError: the file cannot be written.
    """
    lines = [entry.line for entry in merge_results(entries)]
    text = f'{{"format": {FORMAT}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            # Write directly to a pipe or /dev/stdout; these must not be replaced.
            pathlib.Path(path).write_text(text, encoding="utf-8")
        else:
            with atomic_write(os.path.realpath(path)) as temporary:
                pathlib.Path(temporary).write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"it cannot be written: {error.strerror or error}"
        raise exc.BadTuningFileError(
            file=os.fspath(path), where="", why=why, fix="Pass a path in a writable folder"
        ) from None
    return len(lines)


def _make_error(path: str | os.PathLike[str], why: str, where: str = "") -> exc.BadTuningFileError:
    # The message may quote a long value.
    why = why if len(why) <= 300 else f"{why[:200]} ... {why[-80:]}"
    fix = "Pass files written by `inductor-ext tune export`"
    return exc.BadTuningFileError(file=os.fspath(path), where=where, why=why.rstrip("."), fix=fix)
