#!/usr/bin/env python3
"""What a torch release changes among the names of torch that inductor_ext uses.

    scripts/compare_torch.py OLD NEW [--json] [--package FOLDER]

OLD and NEW are torch packages: the folder `torch` in site-packages or in an unzipped wheel, the
folder that holds it, a virtual environment, or a Python interpreter that has it installed. Both are
read and neither is imported, so that a torch can be compared that does not run here.

What is found, most important first: names that NEW lacks, signatures and bases that differ,
defaults of config keys that differ, names that are looked up with a guard (`hasattr`, a default of
`getattr`, `except AttributeError`) and that only one torch has, classes of wrapper lines, IR nodes
and scheduler nodes that only NEW has, new names in modules in which we replace something, and what
the source alone does not tell. A function whose body alone has changed is not found.

Exit code: 0 if nothing that is used without a guard is gone or changed, 1 otherwise, 2 if OLD or
NEW is no torch package.
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

from torch_source import TorchSource
from torch_uses import CONFIGS, Use, find_uses

NODE_CLASSES = ("WrapperLine", "ExternKernel", "BaseSchedulerNode")
"""Classes whose subclasses the memory planner or the kernel order has to decide about."""

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
    """One difference, and where the name is used."""

    severity: str
    path: str
    detail: str = ""
    places: list[str] = field(default_factory=list)


class BadTorchError(Exception):
    """An argument that leads to no torch package."""


# --- the comparison -----------------------------------------------------------------------------


def compare(old: TorchSource, new: TorchSource, uses: Iterable[Use]) -> list[Finding]:
    """All findings, most important first."""
    findings: dict[tuple[str, str], Finding] = {}
    patched = {CONFIGS[0]}
    for use in uses:
        if use.path.startswith("torch.version."):
            continue  # Differs by nature.
        found = _compare_use(old, new, use)
        if use.patched:
            patched |= _modules(old, use.path) | _modules(new, use.path)
        if found is not None:
            # A chain through something that is gone ends there; others may end there as well.
            first = findings.setdefault((found.severity, found.path), found)
            if first is not found:
                first.places += [place for place in found.places if place not in first.places]
    every = [*findings.values(), *_new_classes(old, new), *_new_names(old, new, patched)]
    for torch in (old, new):
        every += [
            Finding("unresolved", item, f"not read in {torch.version}") for item in torch.unreadable
        ]
    order = list(SEVERITIES)
    return sorted(every, key=lambda x: (order.index(x.severity), x.path))


def _compare_use(old: TorchSource, new: TorchSource, use: Use) -> Finding | None:
    before, after = old.resolve(use.path), new.resolve(use.path)
    if use.weak and before.status != "found":
        return None
    where = {"places": list(use.places)}
    if before.status == "found" and after.status == "missing":
        gone = _beyond(use.path, after.prefix)
        return Finding("guarded" if use.guarded else "gone", gone, f"not in {new.version}", **where)
    if before.status == "missing" and after.status == "found":
        added = _beyond(use.path, before.prefix)
        severity = "guarded" if use.guarded else "added"
        return Finding(severity, added, f"not in {old.version}", **where)
    if before.status != "found" or after.status != "found":
        if use.guarded and before.status == after.status == "missing":
            return Finding("guarded", use.path, "in neither", **where)
        shorter = min(before.prefix, after.prefix, key=len)
        at = "in neither" if before.status == after.status == "missing" else f"from {shorter} on"
        at = "a computed name" if "<" in use.path else at
        return Finding("unresolved", use.path, at, **where)
    texts = [
        torch.signature(it.objects, use.constructed) for torch, it in ((old, before), (new, after))
    ]
    severity = "signature"
    if texts[0] == texts[1]:
        literal = not use.path.startswith(CONFIGS)
        texts = [torch.default(it.objects, literal) for torch, it in ((old, before), (new, after))]
        severity = "default"
    if texts[0] == texts[1]:
        return None
    return Finding(severity, use.path, _change(*texts), **where)


def _change(before: str, after: str) -> str:
    """What differs between two signatures or values, one line for each side."""
    parts = [list(map(_balanced, _PART.split(text))) for text in (before, after)]
    only = [[part for part in parts[side] if part not in parts[1 - side]] for side in (0, 1)]
    if before and after and len(before) + len(after) > 200 and any(only):
        before, after = (", ".join(item) for item in only)
    return f"\n- {before or 'none'}\n+ {after or 'none'}"


def _balanced(part: str) -> str:
    """A parameter without a parenthesis of the list that it begins or ends."""
    surplus = part.count("(") - part.count(")")
    return part.removeprefix("(") if surplus > 0 else part[: len(part) + surplus]


def _beyond(path: str, prefix: str) -> str:
    """The path up to the first name that is missing."""
    return ".".join(path.split(".")[: prefix.count(".") + 2])


def _modules(torch: TorchSource, path: str) -> set[str]:
    """The module of what is replaced."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if torch.module(".".join(parts[:end])):
            return {".".join(parts[:end])}
    return set()


def _new_classes(old: TorchSource, new: TorchSource) -> Iterator[Finding]:
    for root in NODE_CLASSES:
        for path in new.subclasses(root) - old.subclasses(root):
            yield Finding("class", path, f"subclass of {root}")


def _new_names(old: TorchSource, new: TorchSource, modules: set[str]) -> Iterator[Finding]:
    for name in sorted(modules):
        before, after = old.module(name), new.module(name)
        if before is None or after is None:
            continue
        added = [
            key
            for key, bindings in after.scope.names.items()
            if key not in before.scope.names and not isinstance(bindings[0], str)
        ]
        if added:
            yield Finding("name", name, ", ".join(added))


# --- the command --------------------------------------------------------------------------------


def locate(argument: str) -> Path:
    """The folder of the torch package that an argument of the command names.

    Raises:
        BadTorchError: if there is none.
    """
    path = Path(argument)
    if path.is_file():
        if path.suffix == ".whl":
            raise BadTorchError(f"{argument} is a wheel: unzip it, and give the folder")
        query = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
        try:
            asked = subprocess.run([path, "-c", query], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            raise BadTorchError(
                f"{argument} is neither a folder nor a Python interpreter"
            ) from None
        path = Path(asked.stdout.strip())
    candidates = [path, path / "torch", *sorted(path.glob("lib/python3*/site-packages/torch"))]
    for candidate in candidates:
        if (candidate / "_inductor").is_dir() and (candidate / "__init__.py").is_file():
            return candidate
    raise BadTorchError(f"{argument} holds no torch package (a folder torch with torch/_inductor)")


def render(findings: Iterable[Finding]) -> str:
    """The findings as text, grouped by what they are."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.severity, []).append(finding)
    lines = []
    for severity, title in SEVERITIES.items():
        group = groups.get(severity, [])
        lines += [f"{title} ({len(group)})" if group else f"{title}: none"]
        for item in group:
            more = f" and {len(item.places) - 2} more" if len(item.places) > 2 else ""
            where = f"  [{', '.join(item.places[:2])}{more}]" if item.places else ""
            first, *rest = item.detail.splitlines() or [""]
            name = f"{item.path}: {first}" if first else item.path
            lines += [f"  {name}{where}", *(f"    {line}" for line in rest)]
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
        help="the package whose uses of torch are looked at",
    )
    given = parser.parse_args(arguments)
    try:
        old, new = TorchSource(locate(given.old)), TorchSource(locate(given.new))
    except BadTorchError as error:
        print(f"compare_torch: {error}", file=sys.stderr)
        return 2
    gc.disable()  # Millions of syntax nodes, and no garbage among them.
    uses = find_uses(given.package)
    findings = compare(old, new, uses.values())
    failed = any(finding.severity in FAILING for finding in findings)
    if given.json:
        report = {
            "old": old.version,
            "new": new.version,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(report, indent=1))
    else:
        print(f"torch {old.version} -> {new.version}\n{render(findings)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
