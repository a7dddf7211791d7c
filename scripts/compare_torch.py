#!/usr/bin/env python3
"""Compares the names of torch that inductor_ext uses between two torch releases.

    scripts/compare_torch.py OLD NEW [--json] [--package FOLDER]

OLD and NEW are torch packages: the folder `torch` in site-packages or in an unzipped wheel, the
folder that contains it, a virtual environment, or a Python interpreter that has it installed. Both
are read and neither is imported, so a torch that does not run here can be compared.

The findings, most important first: names that NEW lacks, signatures and bases that differ, defaults
of config keys that differ, names that are looked up with a guard (`hasattr`, a default of
`getattr`, `except AttributeError`) and that only one torch has, classes of wrapper lines, IR nodes
and scheduler nodes that only NEW has, new names in modules in which the extension replaces
something, and names that the source alone does not determine. A function of which only the body
changed is not reported.

Exit code: 0 if no name that is used without a guard is gone or changed, 1 otherwise, 2 if OLD or
NEW is not a torch package.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch_names import TorchNames
from torch_uses import CONFIGS, Use, find_uses

NODE_CLASSES = ("WrapperLine", "ExternKernel", "BaseSchedulerNode")
"""Classes whose subclasses must be in the tables of the memory planner or the kernel order."""

SEVERITIES = {
    "gone": "gone",
    "signature": "signature or bases changed",
    "default": "default or value changed",
    "guarded": "guarded: only in one of the two, and looked up as such",
    "added": "used, and only in the newer one",
    "class": "new classes to decide about",
    "name": "new names in modules in which something is replaced, and new config keys",
    "unresolved": "unresolved: the source alone does not tell",
}
"""The kinds of findings, most important first, with their titles."""

FAILING = ("gone", "signature", "default")

_PART = re.compile(r", |; | (?=\()")


@dataclass
class Finding:
    """One difference, and the places that use the name."""

    severity: str
    path: str
    detail: str = ""
    places: list[str] = field(default_factory=list)


class BadTorchError(Exception):
    """An argument that does not name a torch package."""


# --- the comparison -----------------------------------------------------------------------------


def compare(old: TorchNames, new: TorchNames, uses: Iterable[Use]) -> list[Finding]:
    """Return all findings, most important first."""
    findings: dict[tuple[str, str], Finding] = {}
    modules = {CONFIGS[0]}
    for use in uses:
        if use.path.startswith("torch.version."):
            continue  # Differs in every release.
        finding = _compare_use(old, new, use)
        if use.is_patched:
            modules |= _find_module(old, use.path) | _find_module(new, use.path)
        if finding is not None:
            # A finding names the first missing name of a chain, which may be the same for others.
            first = findings.setdefault((finding.severity, finding.path), finding)
            if first is not finding:
                first.places += [place for place in finding.places if place not in first.places]
    result = [
        *findings.values(),
        *_find_new_classes(old, new),
        *_find_new_names(old, new, modules),
    ]
    for torch in (old, new):
        result += [
            Finding("unresolved", module, f"not read in {torch.version}")
            for module in torch.unreadable
        ]
    order = list(SEVERITIES)
    return sorted(result, key=lambda x: (order.index(x.severity), x.path))


def _compare_use(old: TorchNames, new: TorchNames, use: Use) -> Finding | None:
    before, after = old.resolve(use.path), new.resolve(use.path)
    if use.is_weak and before.status != "defined":
        return None
    location = {"places": list(use.places)}
    if before.status == "defined" and after.status == "missing":
        path = _cut_after(use.path, after.prefix)
        return Finding(
            "guarded" if use.is_guarded else "gone", path, f"not in {new.version}", **location
        )
    if before.status == "missing" and after.status == "defined":
        path = _cut_after(use.path, before.prefix)
        severity = "guarded" if use.is_guarded else "added"
        return Finding(severity, path, f"not in {old.version}", **location)
    if before.status != "defined" or after.status != "defined":
        if use.is_guarded and before.status == after.status == "missing":
            return Finding("guarded", use.path, "in neither", **location)
        shorter = min(before.prefix, after.prefix, key=len)
        if "<" in use.path:
            detail = "a computed name"
        elif before.status == after.status == "missing":
            detail = "in neither"
        else:
            detail = f"from {shorter} on"
        return Finding("unresolved", use.path, detail, **location)
    texts = [
        torch.describe_signature(resolution.objects, use.is_constructed)
        for torch, resolution in ((old, before), (new, after))
    ]
    severity = "signature"
    if texts[0] == texts[1]:
        literal = not use.path.startswith(CONFIGS)
        texts = [
            torch.describe_default(resolution.objects, literal)
            for torch, resolution in ((old, before), (new, after))
        ]
        severity = "default"
    if texts[0] == texts[1]:
        return None
    return Finding(severity, use.path, _describe_change(*texts), **location)


def _describe_change(before: str, after: str) -> str:
    """Return the difference of two signatures or values, one line per side."""
    parts = [list(map(_strip_unbalanced, _PART.split(text))) for text in (before, after)]
    differences = [[part for part in parts[side] if part not in parts[1 - side]] for side in (0, 1)]
    if before and after and len(before) + len(after) > 200 and any(differences):
        before, after = map(", ".join, differences)
    return f"\n- {before or 'none'}\n+ {after or 'none'}"


def _strip_unbalanced(part: str) -> str:
    """Return a parameter without the parenthesis of the list that it begins or ends."""
    surplus = part.count("(") - part.count(")")
    return part.removeprefix("(") if surplus > 0 else part[: len(part) + surplus]


def _cut_after(path: str, prefix: str) -> str:
    """Return the path up to the first name after a prefix."""
    return ".".join(path.split(".")[: prefix.count(".") + 2])


def _find_module(torch: TorchNames, path: str) -> set[str]:
    """Return the module in which a name is replaced; empty if there is none."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if torch.find_module(".".join(parts[:end])):
            return {".".join(parts[:end])}
    return set()


def _find_new_classes(old: TorchNames, new: TorchNames) -> Iterator[Finding]:
    for root in NODE_CLASSES:
        for path in new.find_subclasses(root) - old.find_subclasses(root):
            yield Finding("class", path, f"subclass of {root}")


def _find_new_names(old: TorchNames, new: TorchNames, modules: set[str]) -> Iterator[Finding]:
    for name in sorted(modules):
        before, after = old.find_module(name), new.find_module(name)
        if before is None or after is None:
            continue
        names = [
            key
            for key, bindings in after.scope.names.items()
            if key not in before.scope.names and not isinstance(bindings[0], str)
        ]
        if names:
            yield Finding("name", name, ", ".join(names))


# --- the command --------------------------------------------------------------------------------


def locate(argument: str) -> Path:
    """Return the folder of the torch package that a command-line argument names.

    Raises:
        BadTorchError: there is none.
    """
    path = Path(argument)
    if path.is_file():
        if path.suffix == ".whl":
            raise BadTorchError(f"{argument} is a wheel: unzip it, and give the folder")
        query = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
        try:
            process = subprocess.run(
                [path, "-c", query], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            raise BadTorchError(
                f"{argument} is neither a folder nor a Python interpreter"
            ) from None
        path = Path(process.stdout.strip())
    candidates = [path, path / "torch", *sorted(path.glob("lib/python3*/site-packages/torch"))]
    for candidate in candidates:
        if (candidate / "_inductor").is_dir() and (candidate / "__init__.py").is_file():
            return candidate
    raise BadTorchError(
        f"{argument} contains no torch package (a folder torch with torch/_inductor)"
    )


def render(findings: Iterable[Finding]) -> str:
    """Return the findings as text, grouped by severity."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.severity, []).append(finding)
    lines = []
    for severity, title in SEVERITIES.items():
        group = groups.get(severity, [])
        lines += [f"{title} ({len(group)})" if group else f"{title}: none"]
        for finding in group:
            places = finding.places
            more = f" and {len(places) - 2} more" if len(places) > 2 else ""
            location = f"  [{', '.join(places[:2])}{more}]" if places else ""
            first, *rest = finding.detail.splitlines() or [""]
            name = f"{finding.path}: {first}" if first else finding.path
            lines += [f"  {name}{location}", *(f"    {line}" for line in rest)]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in ("old", "new"):
        parser.add_argument(name, help="torch folder, site-packages, environment or interpreter")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--package",
        type=Path,
        default=Path(__file__).resolve().parent.parent / "inductor_ext",
        help="the package whose uses of torch are compared",
    )
    options = parser.parse_args(arguments)
    try:
        old, new = TorchNames(locate(options.old)), TorchNames(locate(options.new))
    except BadTorchError as error:
        print(f"compare_torch: {error}", file=sys.stderr)
        return 2
    gc.disable()  # Traversing millions of syntax nodes would take longer than parsing them.
    uses = find_uses(options.package)
    findings = compare(old, new, uses.values())
    has_failure = any(finding.severity in FAILING for finding in findings)
    if options.json:
        report = {
            "old": old.version,
            "new": new.version,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=1))
    else:
        print(f"torch {old.version} -> {new.version}\n{render(findings)}")
    return int(has_failure)


if __name__ == "__main__":
    sys.exit(main())
