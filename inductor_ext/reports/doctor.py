"""Whether the backend can compile on this machine, and what is missing.

`examine()` inspects the machine and returns a `Report`. It also works where the backend does not:
with an unsupported torch, without torch, or with unreadable settings; it reports these as problems.
It creates no files, not even a cache folder. The command `inductor-ext doctor` prints the report.

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

import dataclasses
import os
import platform
import stat
import sys
from importlib import metadata
from typing import Any

from inductor_ext import _compat, exc, settings
from inductor_ext.hooks import registry
from inductor_ext.hooks.hook_table import HOOKS
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.storage.paths import default_inductor_folder
from inductor_ext.toolchain import components
from inductor_ext.toolchain.components import Component, Feature
from inductor_ext.toolchain.probes.common import package_version
from inductor_ext.toolchain.probes.cuda import cuda_devices

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
    parts: dict[str, Component]
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
    parts = components.probe_all()
    features = {feature.name: feature for feature in components.features()}
    values, problems = _read_settings(torch_available=parts["torch"].available)
    torch = _describe_torch(parts["torch"])
    caches, cache_problems = _find_caches(parts["torch"])
    backend = _find_backend()
    hooks = _check_hooks(parts["torch"])

    problems += cache_problems
    problems += _find_version_problems(torch, values)
    problems += _find_hook_problems(hooks)
    problems += _find_registration_problems(backend)
    problems += [problem for cache in caches for problem in _find_cache_problems(cache)]
    problems += _find_compiler_problems(features)
    compiles_for = tuple(
        feature.compiles_for
        for feature in features.values()
        if feature.compiles_for and feature.available and not problems
    )
    return Report(
        schema=_SCHEMA,
        ok=bool(compiles_for),
        compiles_for=compiles_for,
        problems=tuple(problems),
        remarks=tuple(_collect_remarks(parts, values, caches)),
        python={
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        platform=_describe_platform(),
        versions={
            **{name: package_version(name) for name in _DISTRIBUTIONS},
            "torch": torch["version"],  # unlike the distribution's version, includes the build
        },
        torch=torch,
        hooks=hooks,
        devices=tuple(_list_devices(torch_available=parts["torch"].available)),
        parts=parts,
        features=features,
        caches=tuple(caches),
        backend=backend,
        settings=values.non_default(),
        environment=_read_environment(),
    )


def _describe_platform() -> dict[str, str]:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
    }


def _read_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }


def _find_compiler_problems(features: dict[str, Feature]) -> list[Problem]:
    """Return one problem per kind of device, if none of them can be compiled for."""
    compilers = [feature for feature in features.values() if feature.compiles_for]
    if any(feature.available for feature in compilers):
        return []
    return [
        Problem(
            what=f"{feature.title} is not possible",
            why=feature.why or "",
            install=feature.install or "",
        )
        for feature in compilers
    ]


def _describe_torch(part: Component) -> dict[str, Any]:
    cuda = None
    if part.available:
        import torch

        cuda = torch.version.cuda
    return {
        "version": part.version,
        "cuda": cuda,
        "supported": list(_compat.SUPPORTED),
        "in_range": part.version is not None and _compat.is_in_range(part.version),
    }


def _check_hooks(part: Component) -> dict[str, Any]:
    if not part.available or part.path is None or part.version is None:
        return {"checked": 0, "fit": 0, "misfits": []}
    version = part.version
    checked = [hook for hook in HOOKS if registry.is_applicable(hook, version)]
    misfits = registry.check(part.path, version, checked)
    return {
        "checked": len(checked),
        "fit": len(checked) - len(misfits),
        "misfits": [
            {"hook": misfit.hook.name, "target": misfit.hook.targets[0], "why": misfit.why}
            for misfit in misfits
        ],
    }


def _find_hook_problems(hooks: dict[str, Any]) -> list[Problem]:
    return [
        Problem(
            what=f"hook {misfit['hook']} is not compatible with the installed torch",
            why=misfit["why"],
            install="install a supported torch version, and report this",
        )
        for misfit in hooks["misfits"]
    ]


def _find_version_problems(torch: dict[str, Any], values: settings.Settings) -> list[Problem]:
    """Return at most one problem: torch is unsupported. A missing torch is reported elsewhere."""
    if torch["version"] is None or torch["in_range"] or values.allow_unsupported_torch:
        return []
    lowest, highest = _compat.SUPPORTED
    return [
        Problem(
            what=f"torch {torch['version']} is not supported",
            why=f"inductor_ext is written and tested for torch {lowest} to {highest}",
            install=f"install a torch version in that range, or set "
            f"{settings.environment_variable('allow_unsupported_torch')}=1 to use this one",
        )
    ]


def _read_settings(*, torch_available: bool) -> tuple[settings.Settings, list[Problem]]:
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


def _find_backend() -> dict[str, Any]:
    """Return the entry points registered for `torch.compile(..., backend="inductor_ext")`."""
    # If several distributions register the same name, it is undefined which one torch uses.
    entries = metadata.entry_points(group="torch_dynamo_backends", name="inductor_ext")
    targets = sorted({entry.value for entry in entries})
    return {"registered": bool(targets), "target": ", ".join(targets) or None}


def _find_registration_problems(backend: dict[str, Any]) -> list[Problem]:
    if not backend["registered"]:
        why = "no installed distribution registers this backend name as an entry point"
    elif backend["target"].partition(":")[0] != "inductor_ext.entry_point":
        why = f"the name is registered by {backend['target']}"
    else:
        return []
    return [
        Problem(
            what='backend="inductor_ext" does not select this package',
            why=why,
            install="pip install inductor_ext, or pip install . in a checkout",
        )
    ]


def _list_devices(*, torch_available: bool) -> list[Device]:
    capability = None
    if torch_available:
        import torch

        capability = torch.backends.cpu.get_cpu_capability()
    cpu = Device(
        kind="cpu",
        index=0,
        name=f"{_find_cpu_name()}, {os.cpu_count()} logical cores",
        capability=capability,
        memory_bytes=_query_memory_bytes(),
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
            for device in cuda_devices()
        ),
    ]


def _find_cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _query_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _find_caches(torch: Component) -> tuple[list[Cache], list[Problem]]:
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor is None and torch.available:
        try:
            inductor = default_inductor_folder()
        except (ImportError, KeyError, OSError) as error:
            # In a container, the user may have a numeric id without a name, which not every torch
            # supports.
            problem = Problem(
                what="Inductor has no cache folder",
                why=f"looking up the name of this user failed: {error}",
                install="set TORCHINDUCTOR_CACHE_DIR to a writable folder",
            )
            return [], [problem]
    if inductor is None:
        return [], []
    # Inductor puts Triton's cache into its own folder, unless the user has set another one.
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.join(inductor, "triton")
    return [_describe_cache("inductor", inductor), _describe_cache("triton", triton)], []


def _describe_cache(name: str, path: str) -> Cache:
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
        size_bytes=_measure_folder(path) if ancestor == path else 0,
        free_bytes=file_system.f_bavail * file_system.f_frsize,
    )


def _measure_folder(folder: str) -> int:
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


def _find_cache_problems(cache: Cache) -> list[Problem]:
    variable = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}[cache.name]
    if not cache.writable:
        why = "it cannot be written to"
    elif not cache.executable:
        why = "its file system is mounted noexec, so compiled code in it cannot be loaded"
    else:
        return []
    return [
        Problem(
            what=f"the cache folder {cache.path} cannot be used",
            why=why,
            install=f"set {variable} to another folder",
        )
    ]


def _collect_remarks(
    parts: dict[str, Component], values: settings.Settings, caches: list[Cache]
) -> list[str]:
    """Return remarks: conditions that do not prevent compiling, but may surprise the user."""
    remarks = []
    for variable in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(variable) == "1":
            remarks.append(f"{variable}=1 disables torch.compile: models run in eager mode.")
    if not values.enabled:
        remarks.append(
            "The setting enabled=False makes this backend behave like Inductor (default)."
        )
    triton = parts["triton"]
    if triton.available and triton.detail:
        remarks.append(f"Triton {triton.version} is installed, but {triton.detail}.")
    nvcc = parts["nvcc"]
    if nvcc.available and nvcc.version and parts["cuda"].available:
        built = parts["cuda"].version or ""
        if nvcc.version.partition(".")[0] != built.partition(".")[0]:
            remarks.append(
                f"nvcc is from CUDA {nvcc.version}, but torch was built with CUDA {built}."
            )
    for cache in caches:
        if cache.free_bytes < _LITTLE_SPACE:
            remarks.append(
                f"Only {human_bytes(cache.free_bytes)} are free for the cache folder {cache.path}."
            )
    return remarks
