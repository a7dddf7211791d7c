"""`inductor-ext doctor`: whether the backend can compile on this machine, and what is missing.

`--report` writes a bug report to complete.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap

from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.reports import bug_report
from inductor_ext.reports.doctor import Cache, Device, Report, examine
from inductor_ext.reports.text import check_writable, write_file
from inductor_ext.toolchain.components import Component

EXAMPLE = "inductor-ext doctor"
EXIT_CODES = {0: "the backend can compile for at least one kind of device", 1: "it cannot"}

_WIDTH = 100

_REPORT = "inductor_ext-bug.md"

_Row = tuple[str, str]
"""A label and a text."""


def _wrap(text: str, indent: int) -> list[str]:
    """Wrap `text` at the indent, without breaking words, so that commands can be copied."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_table(rows: list[_Row]) -> list[str]:
    """Format rows as two columns, the second one wrapped."""
    if not rows:
        return ["  none"]
    column = max(len(label) for label, _ in rows) + 4
    lines = []
    for label, text in rows:
        first, *rest = _wrap(text, column) or [""]
        lines += [f"  {label:<{column - 2}}{first.strip()}", *rest]
    return lines


def _explain_missing(why: str | None, install: str | None) -> list[_Row]:
    return [("", f"why: {why}"), ("", f"to fix: {install}")]


def render(report: Report) -> str:
    """Format the report as text of at most 100 columns, except for longer paths and commands."""
    sections = {
        "Versions": _format_versions(report),
        "Devices": [_format_device(device) for device in report.devices],
        "Toolchain": [row for value in report.parts.values() for row in _format_component(value)],
        "Features": [_format_feature(report, name) for name in report.features],
        "Cache folders": [_format_cache(cache) for cache in report.caches],
        'backend="inductor_ext"': [("entry point", report.backend["target"] or "not registered")],
        "Settings that differ from their defaults": [
            (name, repr(value)) for name, value in report.settings.items()
        ],
        "Environment variables": list(report.environment.items()),
    }
    lines = []
    for title, rows in sections.items():
        lines += [title, *_format_table(rows), ""]
    for remark in report.remarks:
        lines += _wrap(f"Note: {remark}", 0)
    for problem in report.problems:
        lines += _wrap(f"Problem: {problem.what}.", 0)
        lines += _format_table(_explain_missing(problem.why, problem.install))
    if report.ok:
        lines.append(f"The backend can compile here for: {', '.join(report.compiles_for)}.")
    else:
        lines.append("The backend cannot compile here.")
    return "\n".join(lines)


def _format_versions(report: Report) -> list[_Row]:
    lowest, highest = report.torch["supported"]
    supported = "supported" if report.torch["in_range"] else "NOT supported"
    rows = []
    for name, version in report.versions.items():
        note = (
            f" ({supported}; the supported range is {lowest} to {highest})"
            if name == "torch" and version
            else ""
        )
        rows.append((name, f"{version or 'not installed'}{note}"))
    hooks = report.hooks
    if hooks["checked"]:
        rows.append(("hooks", f"{hooks['fit']} of {hooks['checked']} compatible with this torch"))
    python = report.python
    rows.append(
        ("Python", f"{python['version']} ({python['implementation']}), {python['executable']}")
    )
    rows.append(("platform", " ".join(filter(None, report.platform.values()))))
    return rows


def _format_device(device: Device) -> _Row:
    facts = [device.name]
    if device.capability is not None:
        label = "compute capability " if device.kind == "cuda" else ""
        facts.append(f"{label}{device.capability}")
    if device.memory_bytes is not None:
        facts.append(human_bytes(device.memory_bytes))
    return f"{device.kind}:{device.index}", ", ".join(facts)


def _format_component(component: Component) -> list[_Row]:
    if component.available:
        facts = (component.version, component.detail, component.path)
        return [(component.title, ", ".join(filter(None, facts)))]
    return [(component.title, "MISSING"), *_explain_missing(component.why, component.install)]


def _format_feature(report: Report, name: str) -> _Row:
    feature = report.features[name]
    if feature.available:
        return feature.title, "yes"
    missing = ", ".join(report.parts[part].title for part in feature.missing)
    return feature.title, f"no, missing: {missing}"


def _format_cache(cache: Cache) -> _Row:
    facts = [
        human_bytes(cache.size_bytes) if cache.exists else "not created yet",
        "writable" if cache.writable else "NOT writable",
        f"{human_bytes(cache.free_bytes)} free",
    ]
    if not cache.executable:
        facts.append("mounted noexec")
    return cache.name, f"{cache.path} ({', '.join(facts)})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object")
    output.add_argument(
        "--report",
        nargs="?",
        const=_REPORT,
        metavar="FILE",
        help=f"write a bug report in Markdown, to complete and to send (default: {_REPORT}); - "
        "prints it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the report. The exit code is 0 if the backend can compile for some device here."""
    if arguments.report not in (None, "-"):
        check_writable(arguments.report)
    report = examine()
    if arguments.report is not None:
        home = os.path.expanduser("~")
        _write(arguments.report, bug_report.render(render(report), report.as_json(), home))
    else:
        print(json.dumps(report.as_json(), indent=2) if arguments.json else render(report))
    return 0 if report.ok else 1


def _write(path: str, text: str) -> None:
    if path == "-":
        print(text, end="")
        return
    write_file(path, text)
    print(f"Complete the first sections of {path}, and paste it into a new issue.")
