"""`inductor-ext doctor`: whether the backend can compile on this machine, and what is missing.

`examine()` inspects the machine and returns a `Report`; `render()` formats it as text, and
`Report.as_json()` as JSON. It also works where the backend does not: with an unsupported torch,
without torch, or with unreadable settings; it reports these as problems. It creates no files, not
even a cache folder.

The JSON object of `--json` (within a schema number, keys may be added, but no key changes its
meaning):

    schema        1
    ok            whether the backend can compile for at least one kind of device here
    compiles_for  those kinds: "cpu", "cuda"
    problems      what prevents it from compiling at all: [{"what", "why", "install"}]
    remarks       what does not prevent it, but is worth knowing: [str]
    python        {"version", "implementation", "executable"}
    platform      {"system", "release", "machine", "libc"}
    versions      distribution -> its version, null if it is not installed
    torch         {"version", "cuda", "supported": [lowest, highest], "in_range"}
    hooks         {"checked", "fit", "misfits"}: how many declared hooks were compared with the
                  installed torch, how many fit, and those that do not: [{"hook", "target", "why"}]
    devices       [{"kind", "index", "name", "capability", "memory_bytes"}], the CPU included
    parts         toolchain components: name -> {"title", "available", "version", "path",
                  "detail", "why", "install"}
    features      name -> {"title", "available", "needs", "missing", "compiles_for", "why",
                  "install"}
    caches        [{"name", "path", "exists", "writable", "executable", "size_bytes", "free_bytes"}]
    backend       {"registered", "target"}, of the entry point for backend="inductor_ext"
    settings      those whose value is not the default: name -> value
    environment   the relevant environment variables that are set: name -> value
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import stat
import sys
import textwrap
from importlib import metadata
from typing import Any

from inductor_ext import _compat, exc, settings
from inductor_ext.hooks import registry
from inductor_ext.hooks.hook_table import HOOKS
from inductor_ext.toolchain import components
from inductor_ext.toolchain.components import Feature, Part

__all__ = ["Cache", "Device", "Problem", "Report", "add_arguments", "examine", "render", "run"]

_SCHEMA = 1

_DISTRIBUTIONS = ("inductor_ext", "torch", "triton", "nvidia-cutlass", "sympy", "filelock")

_VARIABLES = (
    "CC",
    "CUDACXX",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "TORCH_COMPILE_DEBUG",
    "TORCH_COMPILE_DISABLE",
    "TORCH_INDUCTOR_INSTALL_GXX",
    "TORCH_LOGS",
    "TORCH_TRACE",
)
_PREFIXES = (settings.ENVIRONMENT_PREFIX, "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_")

_LITTLE_SPACE = 1 << 30
"""Bytes. A max-autotune run of a large model leaves caches of about this size."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """A condition that prevents the backend from compiling at all."""

    what: str
    why: str
    install: str
    """How to fix it."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that torch could compile for."""

    kind: str
    """"cpu" or "cuda"."""
    index: int
    name: str
    capability: str | None
    """"9.0" for CUDA; the vector instructions that torch uses ("AVX512") for the CPU."""
    memory_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Cache:
    """A folder that caches compiled code between processes."""

    name: str
    path: str
    exists: bool
    writable: bool
    executable: bool
    """False on a file system that is mounted noexec: compiled libraries cannot be loaded from
    it."""
    size_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `examine`; the module's docstring explains the fields."""

    schema: int
    ok: bool
    compiles_for: tuple[str, ...]
    problems: tuple[Problem, ...]
    remarks: tuple[str, ...]
    python: dict[str, str]
    platform: dict[str, str]
    versions: dict[str, str | None]
    torch: dict[str, Any]
    hooks: dict[str, Any]
    devices: tuple[Device, ...]
    parts: dict[str, Part]
    features: dict[str, Feature]
    caches: tuple[Cache, ...]
    backend: dict[str, Any]
    settings: dict[str, Any]
    environment: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        report = dataclasses.asdict(self)
        for table in (report["parts"], report["features"]):
            for entry in table.values():
                del entry["name"]  # it is the key
        return report


def examine() -> Report:
    """Inspect this machine and this Python, and return the report."""
    found = components.probe_all()
    features = {feature.name: feature for feature in components.features()}
    values, unreadable = _settings(torch_available=found["torch"].available)
    torch = _torch(found["torch"])
    caches, no_cache = _caches(found["torch"])
    backend = _backend()

    hooks = _hooks(found["torch"])

    problems = [*unreadable, *no_cache, *_version_problems(torch, values)]
    problems += _hook_problems(hooks)
    problems += _registration_problems(backend)
    problems += [problem for cache in caches for problem in _cache_problems(cache)]
    compilers = [feature for feature in features.values() if feature.compiles_for]
    if not any(feature.available for feature in compilers):
        problems += [
            Problem(
                what=f"{feature.title} is not possible",
                why=feature.why or "",
                install=feature.install or "",
            )
            for feature in compilers
        ]
    compiles_for = tuple(
        feature.compiles_for
        for feature in compilers
        if feature.compiles_for and feature.available and not problems
    )
    return Report(
        schema=_SCHEMA,
        ok=bool(compiles_for),
        compiles_for=compiles_for,
        problems=tuple(problems),
        remarks=tuple(_remarks(found, values, caches)),
        python={
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        platform={
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
        },
        versions={
            **{name: _version(name) for name in _DISTRIBUTIONS},
            "torch": torch["version"],  # unlike the distribution's version, includes the build
        },
        torch=torch,
        hooks=hooks,
        devices=tuple(_devices(torch_available=found["torch"].available)),
        parts=found,
        features=features,
        caches=tuple(caches),
        backend=backend,
        settings=values.non_default(),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith(_PREFIXES)
        },
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch(part: Part) -> dict[str, Any]:
    cuda = None
    if part.available:
        import torch

        cuda = torch.version.cuda
    return {
        "version": part.version,
        "cuda": cuda,
        "supported": list(_compat.SUPPORTED),
        "in_range": part.version is not None and _compat.in_range(part.version),
    }


def _hooks(part: Part) -> dict[str, Any]:
    """Check the declared hooks against the installed torch."""
    if not part.available or part.path is None or part.version is None:
        return {"checked": 0, "fit": 0, "misfits": []}
    version = part.version
    checked = [hook for hook in HOOKS if registry.concerns(hook, version)]
    misfits = registry.check(part.path, version, checked)
    return {
        "checked": len(checked),
        "fit": len(checked) - len(misfits),
        "misfits": [
            {"hook": misfit.hook.name, "target": misfit.hook.targets[0], "why": misfit.why}
            for misfit in misfits
        ],
    }


def _hook_problems(hooks: dict[str, Any]) -> list[Problem]:
    return [
        Problem(
            what=f"hook {misfit['hook']} does not fit the installed torch",
            why=misfit["why"],
            install="install a supported torch, and report this",
        )
        for misfit in hooks["misfits"]
    ]


def _version_problems(torch: dict[str, Any], values: settings.Settings) -> list[Problem]:
    """Return at most one problem: torch is unsupported. A missing torch is reported elsewhere."""
    if torch["version"] is None or torch["in_range"] or values.allow_unsupported_torch:
        return []
    lowest, highest = _compat.SUPPORTED
    return [
        Problem(
            what=f"torch {torch['version']} is not supported",
            why=f"inductor_ext is written and tested for torch {lowest} to {highest}",
            install=f"install a torch within that range, or set "
            f"{settings.environment_variable('allow_unsupported_torch')}=1 to try this one",
        )
    ]


def _settings(*, torch_available: bool) -> tuple[settings.Settings, list[Problem]]:
    """Return this process's settings; if they cannot be read, the defaults and a problem."""
    try:
        if torch_available:
            from inductor_ext import config

            return config.snapshot(), []
        return settings.Settings(**settings.from_environment()), []
    except exc.InductorExtError as error:
        problem = Problem(
            what="the settings cannot be read",
            why=error.template.format(**error.fields).rstrip("."),
            install=error.remedy.format(**error.fields).rstrip("."),
        )
        return settings.Settings(), [problem]


def _backend() -> dict[str, Any]:
    """Return the entry points registered for `torch.compile(..., backend="inductor_ext")`."""
    # If several distributions register the same name, it is undefined which one torch uses.
    entries = metadata.entry_points(group="torch_dynamo_backends", name="inductor_ext")
    targets = sorted({entry.value for entry in entries})
    return {"registered": bool(targets), "target": ", ".join(targets) or None}


def _registration_problems(backend: dict[str, Any]) -> list[Problem]:
    if not backend["registered"]:
        why = "no installed distribution has the entry point, so torch does not know the name"
    elif backend["target"].partition(":")[0] != "inductor_ext.backend":
        why = f"the name leads to {backend['target']}"
    else:
        return []
    return [
        Problem(
            what='backend="inductor_ext" is not this package',
            why=why,
            install="pip install inductor_ext, or pip install . in a checkout",
        )
    ]


def _devices(*, torch_available: bool) -> list[Device]:
    capability = None
    if torch_available:
        import torch

        capability = torch.backends.cpu.get_cpu_capability()
    cpu = Device(
        kind="cpu",
        index=0,
        name=f"{_cpu_name()}, {os.cpu_count()} logical cores",
        capability=capability,
        memory_bytes=_memory_bytes(),
    )
    return [
        cpu,
        *(
            Device(
                kind="cuda",
                index=device.index,
                name=device.name,
                capability=".".join(map(str, device.capability)),
                memory_bytes=device.memory_bytes,
            )
            for device in components.cuda_devices()
        ),
    ]


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _caches(torch: Part) -> tuple[list[Cache], list[Problem]]:
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None and torch.available and torch.path is not None:
        try:
            inductor = _default_cache(torch.path)
        except (ImportError, KeyError, OSError) as error:
            # In a container, the user may have a numeric id without a name, which not every torch
            # supports.
            problem = Problem(
                what="Inductor finds no place for its cache",
                why=f"asking for this user's name fails with {error}",
                install="set TORCHINDUCTOR_CACHE_DIR to a writable folder",
            )
            return [], [problem]
    if inductor is None:
        return [], []
    # Inductor puts Triton's cache into its own folder, unless the user has set another one.
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(inductor, "triton")
    return [_cache("inductor", inductor), _cache("triton", triton)], []


def _default_cache(torch_folder: str) -> str:
    # Importing torch._inductor would create the folder and set the environment variable that a user
    # may use to choose another one. The module that computes the path can be loaded on its own.
    file = os.path.join(torch_folder, "_inductor", "runtime", "cache_dir_utils.py")
    spec = importlib.util.spec_from_file_location("cache_dir_utils", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.default_cache_dir())


def _cache(name: str, path: str) -> Cache:
    path = os.path.abspath(path)
    ancestor = path
    while not os.path.exists(ancestor) and os.path.dirname(ancestor) != ancestor:
        ancestor = os.path.dirname(ancestor)
    file_system = os.statvfs(ancestor)
    return Cache(
        name=name,
        path=path,
        exists=ancestor == path,
        writable=os.path.isdir(ancestor) and os.access(ancestor, os.W_OK | os.X_OK),
        executable=not file_system.f_flag & getattr(os, "ST_NOEXEC", 0),
        size_bytes=_size_bytes(path) if ancestor == path else 0,
        free_bytes=file_system.f_bavail * file_system.f_frsize,
    )


def _size_bytes(folder: str) -> int:
    """Return the size of the regular files under a folder; files deleted meanwhile count as 0."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                status = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
    return total


def _cache_problems(cache: Cache) -> list[Problem]:
    variable = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}[cache.name]
    if not cache.writable:
        why = "it cannot be written to"
    elif not cache.executable:
        why = "its file system is mounted noexec, so that compiled code in it cannot be loaded"
    else:
        return []
    return [
        Problem(
            what=f"the cache folder {cache.path} is of no use",
            why=why,
            install=f"set {variable} to another folder",
        )
    ]


def _remarks(found: dict[str, Part], values: settings.Settings, caches: list[Cache]) -> list[str]:
    """Return remarks: conditions that do not prevent compiling, but may surprise the user."""
    remarks = []
    for variable in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(variable) == "1":
            remarks.append(f"{variable}=1 makes torch.compile do nothing.")
    if not values.enabled:
        remarks.append("The setting enabled=False makes this backend the stock one.")
    triton = found["triton"]
    if triton.available and triton.detail:
        remarks.append(f"Triton is {triton.version}, and {triton.detail}.")
    nvcc = found["nvcc"]
    if nvcc.available and nvcc.version and found["cuda"].available:
        built = found["cuda"].version or ""
        if nvcc.version.partition(".")[0] != built.partition(".")[0]:
            remarks.append(
                f"nvcc is of CUDA {nvcc.version}, and torch was built with CUDA {built}."
            )
    for cache in caches:
        if cache.free_bytes < _LITTLE_SPACE:
            remarks.append(f"Only {_bytes(cache.free_bytes)} are free for {cache.path}.")
    return remarks


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{count} B"


_WIDTH = 100

_Row = tuple[str, str]
"""A label and a text."""


def _wrapped(text: str, indent: int) -> list[str]:
    """Wrap `text` at the indent, without breaking words, so that commands can be copied."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(rows: list[_Row]) -> list[str]:
    """Format rows as two columns, the second one wrapped."""
    if not rows:
        return ["  none"]
    column = max(len(label) for label, _ in rows) + 4
    lines = []
    for label, text in rows:
        first, *rest = _wrapped(text, column) or [""]
        lines += [f"  {label:<{column - 2}}{first.strip()}", *rest]
    return lines


def _shortcoming(why: str | None, install: str | None) -> list[_Row]:
    return [("", f"why: {why}"), ("", f"to mend it: {install}")]


def render(report: Report) -> str:
    """Format the report as text of at most 100 columns, except for longer paths and commands."""
    sections = {
        "Versions": _version_rows(report),
        "Devices": [_device_row(device) for device in report.devices],
        "Parts": [row for part in report.parts.values() for row in _part_rows(part)],
        "What they allow": [_feature_row(report, name) for name in report.features],
        "Cache folders": [_cache_row(cache) for cache in report.caches],
        'backend="inductor_ext"': [("entry point", report.backend["target"] or "not registered")],
        "Settings that are not the default": [
            (name, repr(value)) for name, value in report.settings.items()
        ],
        "Environment variables that matter": list(report.environment.items()),
    }
    lines = []
    for title, rows in sections.items():
        lines += [title, *_table(rows), ""]
    for remark in report.remarks:
        lines += _wrapped(f"Note: {remark}", 0)
    for problem in report.problems:
        lines += _wrapped(f"Problem: {problem.what}.", 0)
        lines += _table(_shortcoming(problem.why, problem.install))
    if report.ok:
        lines.append(f"The backend can compile here for: {', '.join(report.compiles_for)}.")
    else:
        lines.append("The backend cannot compile here.")
    return "\n".join(lines)


def _version_rows(report: Report) -> list[_Row]:
    lowest, highest = report.torch["supported"]
    range_note = "supported are" if report.torch["in_range"] else "NOT supported, which are"
    rows = []
    for name, version in report.versions.items():
        note = f" ({range_note} {lowest} to {highest})" if name == "torch" and version else ""
        rows.append((name, f"{version or 'not installed'}{note}"))
    hooks = report.hooks
    if hooks["checked"]:
        rows.append(("hooks", f"{hooks['fit']} of {hooks['checked']} fit this torch"))
    python = report.python
    rows.append(
        ("Python", f"{python['version']} ({python['implementation']}), {python['executable']}")
    )
    rows.append(("platform", " ".join(filter(None, report.platform.values()))))
    return rows


def _device_row(device: Device) -> _Row:
    facts = [device.name]
    if device.capability is not None:
        label = "compute capability " if device.kind == "cuda" else ""
        facts.append(f"{label}{device.capability}")
    if device.memory_bytes is not None:
        facts.append(_bytes(device.memory_bytes))
    return f"{device.kind}:{device.index}", ", ".join(facts)


def _part_rows(part: Part) -> list[_Row]:
    if part.available:
        return [(part.title, ", ".join(filter(None, (part.version, part.detail, part.path))))]
    return [(part.title, "MISSING"), *_shortcoming(part.why, part.install)]


def _feature_row(report: Report, name: str) -> _Row:
    feature = report.features[name]
    if feature.available:
        return feature.title, "yes"
    missing = ", ".join(report.parts[part].title for part in feature.missing)
    return feature.title, f"no, for lack of: {missing}"


def _cache_row(cache: Cache) -> _Row:
    facts = [
        _bytes(cache.size_bytes) if cache.exists else "not yet made",
        "writable" if cache.writable else "NOT writable",
        f"{_bytes(cache.free_bytes)} free",
    ]
    if not cache.executable:
        facts.append("mounted noexec")
    return cache.name, f"{cache.path} ({', '.join(facts)})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to the parser."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. The exit code is 0 if the backend can compile for some device here."""
    report = examine()
    print(json.dumps(report.as_json(), indent=2) if arguments.json else render(report))
    return 0 if report.ok else 1
