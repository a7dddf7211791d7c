"""Declares, checks and installs the places where the extension uses torch's private API.

Everything that is done to torch beyond calling its public functions is declared by a `Hook`. The
modules that own hooks have a tuple `HOOKS` of them; `hook_table` concatenates these tuples. This
module knows no hook.

`check` compares declarations with the source files of a torch; it imports nothing and takes about a
second. `inductor-ext doctor` and the tests run it. `replace` installs a dispatcher over a declared
target, and raises `exc.HookError` if the target is missing or lacks a declared parameter. A test
finds undeclared replacements. See docs/upgrading_torch.md for porting to a new torch.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from inductor_ext import _compat, exc
from inductor_ext.hooks.torch_source import TorchSource

Kind = Literal["replaced", "overridden", "changed", "read"]

MakeDispatcher = Callable[[Any], Any]
"""Takes the current function, or other object, and returns the dispatcher that replaces it."""

_MARK = "_inductor_ext_hook"

_lock = threading.Lock()


@dataclass(frozen=True)
class Hook:
    """One use or patch of torch's private API."""

    name: str
    kind: Kind
    """replaced: for the process, by a dispatcher. overridden: by a subclass in the extension.
    changed: an object that belongs to the current compile. read: private state or generated
    text."""
    targets: tuple[str, ...]
    """Dotted paths: names of the same target in different torch releases. One of them must
    exist."""
    owner: str
    """The module of the extension that uses the hook."""
    why: str
    """Why the hook is needed, and why at this place."""
    parameters: tuple[str, ...] = ()
    """Parameters of the target that are passed or read by name or position."""
    relies_on: tuple[str, ...] = ()
    """Other torch names that must exist. `a|b` is satisfied by either."""
    upstream: str = ""
    """Issue of pytorch/pytorch, for workarounds."""
    since: str = ""
    """First torch release that needs it; empty for the lowest supported one."""
    until: str = ""
    """First torch release that no longer needs it; empty if none is known."""


@dataclass(frozen=True)
class Misfit:
    """A hook that does not fit a torch, and why."""

    hook: Hook
    why: str


def is_applicable(hook: Hook, version: str) -> bool:
    """Whether a hook applies to a torch version.

    Args:
        version: such as `2.14.1+cu130`.
    """
    release = _compat.minor_version(version)
    return (not hook.since or release >= _compat.minor_version(hook.since)) and (
        not hook.until or release < _compat.minor_version(hook.until)
    )


def check(folder: str | Path, version: str, hooks: Sequence[Hook]) -> list[Misfit]:
    """Return the hooks that do not fit a torch. Imports nothing.

    Args:
        folder: folder of the torch package.
        version: version of that torch; hooks that do not apply to it are not checked.
    """
    source = TorchSource(folder)
    return [
        Misfit(hook, why)
        for hook in hooks
        if is_applicable(hook, version) and (why := _find_misfit(source, hook))
    ]


def _find_misfit(source: TorchSource, hook: Hook) -> str:
    """Return why a hook does not fit; empty if it does."""
    definition = next(filter(None, map(source.find, hook.targets)), None)
    if definition is None:
        return f"{' or '.join(hook.targets)} does not exist"
    parameters = definition.parameters()
    if hook.parameters:
        why = _missing_parameters(hook, parameters or ())
        if why:
            return why
    for requirement in hook.relies_on:
        if not any(map(source.find, requirement.split("|"))):
            return f"{requirement.replace('|', ' or ')} does not exist"
    return ""


def _missing_parameters(hook: Hook, parameters: Sequence[str]) -> str:
    missing = [name for name in hook.parameters if name not in parameters]
    if not missing:
        return ""
    return (
        f"{hook.targets[0]} has no parameter {', '.join(missing)}; it has {', '.join(parameters)}"
    )


def install(hooks: Sequence[Hook], dispatchers: Mapping[str, MakeDispatcher]) -> None:
    """Install the dispatchers of all hooks of kind "replaced" that apply to this torch.

    Args:
        dispatchers: by name of the hook; see `replace`.
    """
    version = _compat.torch_version()
    for hook in hooks:
        if hook.kind == "replaced" and is_applicable(hook, version):
            replace(hook, dispatchers[hook.name])


def replace(hook: Hook, make: MakeDispatcher) -> None:
    """Install a dispatcher over the target of a hook, unless it is already installed.

    Raises:
        exc.HookError: the target is missing or lacks a parameter.
    """
    with _lock:
        place = find_owner(hook)
        if place is None:
            raise _make_error(hook, f"{' or '.join(hook.targets)} does not exist")
        owner, attribute = place
        current = getattr(owner, attribute)
        if _is_installed(hook, current):
            return
        # Functions written in C have no signature.
        parameters = tuple(inspect.signature(current).parameters) if hook.parameters else ()
        why = _missing_parameters(hook, parameters)
        if why:
            raise _make_error(hook, why)
        dispatcher = make(current)
        setattr(dispatcher, _MARK, hook.name)
        # A function in a class would get the instance as its first argument.
        is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
        setattr(owner, attribute, staticmethod(dispatcher) if is_static else dispatcher)


def _is_installed(hook: Hook, function: Any) -> bool:
    """Whether a function is the dispatcher of a hook, or one over it."""
    while function is not None:
        if getattr(function, _MARK, None) == hook.name:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def has_target(hook: Hook) -> bool:
    """Whether the installed torch has a target of a hook."""
    return find_owner(hook) is not None


def find_owner(hook: Hook) -> tuple[Any, str] | None:
    """Return the object that holds a target of the hook, and the attribute's name."""
    for target in hook.targets:
        path, _, attribute = target.rpartition(".")
        owner = _import(path)
        if owner is not None and hasattr(owner, attribute):
            return owner, attribute
    return None


def _import(path: str) -> Any:
    """Return the module, or the class in a module or class, at a dotted path; None if there is
    none.
    """
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(_import(module), name, None) if module else None


def _make_error(hook: Hook, why: str) -> exc.HookError:
    return exc.HookError(hook=hook.name, why=why, torch=_compat.torch_version())


def render_table(hooks: Sequence[Hook]) -> str:
    """Return declarations as Markdown tables, one per kind."""
    titles: dict[Kind, str] = {
        "replaced": "Replaced for the process, by a dispatcher",
        "overridden": "Overridden in a subclass",
        "changed": "Changed in objects of the compile at hand",
        "read": "Private, read or called",
    }
    lines: list[str] = []
    for kind, title in titles.items():
        lines += [f"### {title}", "", "| target | by | torch | why |", "| --- | --- | --- | --- |"]
        for hook in hooks:
            if hook.kind == kind:
                targets = " or ".join(f"`{target}`" for target in hook.targets)
                issue = f" (pytorch {hook.upstream})" if hook.upstream else ""
                lines.append(
                    f"| {targets} | `{hook.owner}` | {_format_releases(hook)} | {hook.why}{issue} |"
                )
        lines.append("")
    return "\n".join(lines)


def _format_releases(hook: Hook) -> str:
    since, until = hook.since or _compat.SUPPORTED[0], hook.until
    return f"{since} until {until}" if until else f"from {since}"
