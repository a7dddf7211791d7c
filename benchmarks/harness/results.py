"""The file format of all benchmark results. README.md documents its fields.

`Document` and `Row` are the schema: `validate` checks a document against their annotations, and
then the constraints that annotations cannot express. A document records the hardware, versions,
commit and command of the run, but no machine name and no folders.

    python -m benchmarks.harness.results show FILE ...
    python -m benchmarks.harness.results validate [FILE ...]

The module imports torch only to query the name of a GPU or the vector instructions in use.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from inductor_ext.exc import InductorExtError
from inductor_ext.storage.atomic import atomic_write

__all__ = [
    "RESULTS",
    "Document",
    "Header",
    "InvalidResultError",
    "Row",
    "collect_header",
    "find_ratio",
    "format_command",
    "format_number",
    "make_relative_path",
    "make_row",
    "name_hardware",
    "print_line",
    "read",
    "render_table",
    "validate",
    "write",
]

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = CHECKOUT / "benchmarks" / "results"
"""The folder of the committed results."""


class Row(TypedDict):
    """One metric of one case, with a value per variant; None for variants without a value."""

    case: str
    metric: str
    unit: str
    better: Literal["lower", "higher"]
    ours: float | None
    stock: float | None
    eager: float | None
    floor: float | None
    spread: float | None
    note: str | None


class Header(TypedDict):
    """The description of a run, complete before anything is measured."""

    suite: str
    hardware: str
    versions: dict[str, str]
    commit: str | None
    date: str
    command: str


class Document(Header):
    """The content of one result file."""

    rows: list[Row]


class InvalidResultError(InductorExtError):
    """A document that does not follow the schema."""

    template = "Invalid result at {path}: {why}."
    remedy = "benchmarks/README.md documents the schema."


COLUMNS = ("eager", "stock", "ours", "floor")
"""The fields of a row that hold values, in the order of printed tables."""


def make_row(
    case: str,
    metric: str,
    unit: str,
    *,
    better: Literal["lower", "higher"] = "lower",
    ours: float | None = None,
    stock: float | None = None,
    eager: float | None = None,
    floor: float | None = None,
    spread: float | None = None,
    note: str | None = None,
) -> Row:
    """Return a row; benchmarks/README.md documents its fields."""
    return {
        "case": case,
        "metric": metric,
        "unit": unit,
        "better": better,
        "ours": ours,
        "stock": stock,
        "eager": eager,
        "floor": floor,
        "spread": spread,
        "note": note,
    }


_SLUG = re.compile(r"[a-z0-9.]+(-[a-z0-9.]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}(-dirty)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_ABSOLUTE_PATH = re.compile(r"""(^|[\s=:,'"])(/|~|[A-Za-z]:[\\/])""")


def validate(document: object) -> None:
    """Check a document that was read from JSON or is about to be written.

    Raises:
        InvalidResultError: with the path of the first invalid value, as in `rows[3].unit`.
    """
    _check_type(document, Document, "")
    document = typing.cast(Document, document)
    _validate_header(document)
    _require(document["rows"], "rows", "it is empty")
    indices: dict[tuple[str, str], int] = {}
    for index, row in enumerate(document["rows"]):
        path = f"rows[{index}]"
        for key in ("case", "metric", "unit"):
            _require(_field(row, key), f"{path}.{key}", "it is empty")
        has_value = any(_field(row, name) is not None for name in COLUMNS)
        _require(has_value, path, "no variant has a value")
        spread = row["spread"]
        _require(spread is None or spread >= 0, f"{path}.spread", f"{spread} is negative")
        first = indices.setdefault((row["case"], row["metric"]), index)
        _require(first == index, path, f"the case and metric of rows[{first}] again")


def _validate_header(header: Header) -> None:
    for key, pattern in (("suite", _SLUG), ("hardware", _SLUG), ("date", _DATE)):
        text = _field(header, key)
        _require(pattern.fullmatch(text), key, f"{text!r} does not match {pattern.pattern}")
    try:
        datetime.datetime.strptime(header["date"], "%Y-%m-%dT%H:%M:%SZ")
    except ValueError as error:
        raise InvalidResultError(path="date", why=str(error)) from None
    commit = header["commit"]
    _require(
        commit is None or _COMMIT.fullmatch(commit), "commit", f"{commit!r} is no commit's full id"
    )
    _require(header["command"], "command", "it is empty")
    _require(
        not _ABSOLUTE_PATH.search(header["command"]),
        "command",
        f"{header['command']!r} contains an absolute path",
    )
    for name in ("python", "torch", "inductor_ext"):
        _require(name in header["versions"], "versions", f"it lacks {name!r}")


def _field(item: Mapping[str, Any], name: str) -> Any:
    """Read a field whose name the type checker cannot see."""
    return item[name]


def _require(condition: object, path: str, why: str) -> None:
    if not condition:
        raise InvalidResultError(path=path, why=why)


def _check_type(value: object, annotation: Any, path: str) -> None:
    """Check a JSON value against the annotations that `Document` and `Row` use."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    where = path or "the document"
    if typing.is_typeddict(annotation):
        fields = typing.get_type_hints(annotation)
        if not isinstance(value, dict):
            raise _make_type_error(where, value, "an object")
        for name in fields.keys() - value.keys():
            raise InvalidResultError(path=where, why=f"it lacks {name!r}")
        for name in value.keys() - fields.keys():
            raise InvalidResultError(path=where, why=f"it has {name!r}, which the schema lacks")
        for name, field in fields.items():
            _check_type(value[name], field, f"{path}.{name}" if path else name)
    elif origin is list:
        if not isinstance(value, list):
            raise _make_type_error(where, value, "an array")
        for index, item in enumerate(value):
            _check_type(item, args[0], f"{path}[{index}]")
    elif origin is dict:
        if not isinstance(value, dict):
            raise _make_type_error(where, value, "an object")
        for name, item in value.items():
            _check_type(name, args[0], where)
            _check_type(item, args[1], f"{path}.{name}")
    elif origin is Literal:
        if value not in args:
            raise _make_type_error(where, value, " or ".join(map(repr, args)))
    elif origin is types.UnionType:
        if value is not None:
            _check_type(value, args[0], path)
    elif annotation is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _make_type_error(where, value, "a number")
        # JSON has neither infinities nor NaN, and such a value means that nothing was measured.
        if not math.isfinite(value):
            raise _make_type_error(where, value, "a finite number")
    elif not isinstance(value, annotation):
        raise _make_type_error(where, value, "a string")


def _make_type_error(path: str, value: object, allowed: str) -> InvalidResultError:
    return InvalidResultError(path=path, why=f"{value!r} is not {allowed}")


def collect_header(
    suite: str,
    command: str,
    hardware: str | None = None,
    *,
    packages: Sequence[str] = (),
    commit: str | None = None,
) -> Header:
    """Describe the run that is about to start.

    Args:
        suite: the benchmark's name, a slug.
        command: the command that repeats the run in the checkout; see `format_command`.
        hardware: a slug; None for that of the GPU if there is one, else of the CPU.
        packages: distributions to record the versions of, besides torch, triton and inductor_ext.
        commit: commit of the source tree if it is not a git checkout; None to ask git.

    Raises:
        InvalidResultError: the header would be invalid.
    """
    header: Header = {
        "suite": suite,
        "hardware": hardware or name_hardware(),
        "versions": _collect_versions(packages),
        "commit": commit or _read_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command,
    }
    _validate_header(header)
    return header


def format_command(arguments: Sequence[str] | None = None) -> str:
    """Return this process's command as it would be typed in the checkout, without absolute paths.

    A path inside the checkout becomes relative to it. Of any other path only the last component is
    kept, because the rest would reveal details of the machine and mean nothing elsewhere.

    Args:
        arguments: in the format of `sys.argv`; None for `sys.argv`.
    """
    arguments = sys.argv if arguments is None else arguments
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and arguments is sys.argv:
        start = ["python", "-m", spec.name.removesuffix(".__main__")]
    else:
        start = ["python", _make_portable(arguments[0])]
    return shlex.join([*start, *map(_make_portable, arguments[1:])])


def _make_portable(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return argument
    inside = path.is_relative_to(CHECKOUT)
    return option + equals + (str(path.relative_to(CHECKOUT)) if inside else path.name)


def name_hardware(device: Literal["cpu", "cuda"] | None = None) -> str:
    """Name the hardware: the GPU's model, or the CPU's with cores and vector instructions.

    Args:
        device: None for "cuda" if there is a GPU, else "cpu".

    Returns:
        For example `nvidia-h100-80gb-hbm3`, or `amd-epyc-2-cores-avx512`.
    """
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return _make_slug(torch.cuda.get_device_name())
    # The affinity mask, not the machine's core count: a container may have fewer cores.
    cores = len(os.sched_getaffinity(0))
    capability = torch.backends.cpu.get_cpu_capability()
    return _make_slug(f"{_read_cpu_model()} {cores} cores {capability}")


def _read_cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    return re.sub(r"\((R|TM)\)|\bCPU\b|@.*", " ", name, flags=re.IGNORECASE)


def _make_slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _collect_versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "inductor_ext", *packages):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    compiler = _run_command("g++", "-dumpfullversion")
    if compiler is not None:
        versions["g++"] = compiler
    return versions


def _read_commit() -> str | None:
    """Return the checkout's commit, with "-dirty" if the code differs; None outside a checkout."""
    commit = _run_command("git", "rev-parse", "HEAD")
    if commit is None:
        return None
    # Ignore changes of results: after the first of several benchmarks the tree would always be
    # dirty.
    changes = _run_command(
        "git", "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"
    )
    return commit if changes == "" else f"{commit}-dirty"


def _run_command(*command: str) -> str | None:
    try:
        run = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()


def make_relative_path(header: Header) -> Path:
    """Return the path of a document's file in a folder of results."""
    return Path(header["suite"], f"{header['hardware']}.json")


def read(path: str | os.PathLike[str]) -> Document:
    """Read and check one file.

    Raises:
        InvalidResultError: the file is not JSON, violates the schema, or has another document's
            name or folder.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidResultError(path=path.name, why=str(error)) from None
    validate(document)
    checked = typing.cast(Document, document)
    expected = make_relative_path(checked)
    location = Path(*path.absolute().parts[-2:])
    _require(location == expected, str(location), f"its folder and name should be {expected}")
    return checked


def report(header: Header, rows: list[Row], folder: Path | None) -> None:
    """Print the extension's values, and write the result into `folder` unless that is None.

    Raises:
        InvalidResultError: see `write`.
    """
    for row in rows:
        print(f"{row['case']}, {row['metric']}: {row['ours']:.4g} {row['unit']}")
    if folder is not None:
        print(f"written: {write(folder, {**header, 'rows': rows})}")


def write(directory: str | os.PathLike[str], document: Document) -> Path:
    """Write a document into `directory` under its suite and hardware, atomically.

    Returns:
        The file's path.

    Raises:
        InvalidResultError: the document violates the schema; nothing is written.
    """
    validate(document)
    path = Path(directory) / make_relative_path(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        Path(temporary).write_text(json.dumps(document, indent=2) + "\n")
    return path


def print_line(line: str, path: Path | None) -> None:
    """Print a line of JSON, and append it to the file at `path`, if any."""
    print(line, flush=True)
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def render_table(document: Document) -> str:
    """Format a document as plain text: one block per case, one line per metric, columns aligned.

    Variants without any value get no column. `ours/stock` is the extension's value divided by
    Inductor's; below 1 is an improvement if less is better. A "~" marks a difference no larger than
    the spread.
    """
    rows = document["rows"]
    columns = [name for name in COLUMNS if any(_field(row, name) is not None for row in rows)]
    notes: list[str] = []
    lines = [["", "unit", "better", *columns, "ours/stock", "spread"]]
    for case in dict.fromkeys(row["case"] for row in rows):
        lines.append([case])
        for row in (row for row in rows if row["case"] == case):
            metric = f"  {row['metric']}"
            if row["note"]:
                if row["note"] not in notes:
                    notes.append(row["note"])
                metric += f" [{notes.index(row['note']) + 1}]"
            values = [format_number(_field(row, name)) for name in columns]
            spread = "" if row["spread"] is None else f"{row['spread']:.1%}"
            lines.append([metric, row["unit"], row["better"], *values, _format_ratio(row), spread])
    table = [line for line in lines if len(line) > 1]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    body = [_align(line, widths) for line in lines]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    head = [f"{document['suite']} on {document['hardware']}", versions]
    return "\n".join([*head, "", *body, "", *(f"[{i}] {n}" for i, n in enumerate(notes, 1))]) + "\n"


def _align(cells: Sequence[str], widths: Sequence[int]) -> str:
    if len(cells) == 1:
        return cells[0]
    # Left-align names; right-align numbers, so that magnitudes line up.
    left = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  ".join([*left, *right]).rstrip()


def format_number(value: float | None) -> str:
    """Format with four significant digits; from 1000, as an integer with separators."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def find_ratio(row: Row) -> float | None:
    """Return the extension's value over that of Inductor (default); None without both."""
    return None if row["ours"] is None or not row["stock"] else row["ours"] / row["stock"]


def _format_ratio(row: Row) -> str:
    ratio = find_ratio(row)
    if ratio is None:
        return ""
    noise = row["spread"] is not None and abs(ratio - 1) <= row["spread"]
    return f"{'~' if noise else ''}{ratio:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a file is invalid."""
    program = "python -m benchmarks.harness.results"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="print files as tables")
    show.add_argument("files", nargs="+", type=Path)
    check = commands.add_parser("validate", help="check files; without any, the committed ones")
    check.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    failures = 0
    for path in options.files or sorted(RESULTS.glob("*/*.json")):
        try:
            document = read(path)
        except (InvalidResultError, OSError) as error:
            failures += 1
            print(f"{path}: {error}", file=sys.stderr)
        else:
            print(render_table(document) if options.command == "show" else f"{path}: valid")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
