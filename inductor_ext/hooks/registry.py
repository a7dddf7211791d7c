"""Installs and checks the places where the extension patches torch or relies on its private API.

`hook_table.HOOKS` declares every place once. `check` compares the declarations with the source
files
of a torch; it imports nothing and takes about a second. `inductor-ext doctor` and the tests run it.
`replace` installs a dispatcher over a declared target, and raises `exc.HookError` if the target is
missing or lacks a declared parameter.

`python -m inductor_ext.hooks.registry docs/switch.md` updates the table in that page.

Everything that is done to torch beyond calling its public functions needs an entry in `HOOKS`; a
test finds undeclared replacements. See docs/upgrading_torch.md for porting to a new torch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inductor_ext import _compat, exc
from inductor_ext.hooks.hook_table import HOOKS, Hook, Kind
from inductor_ext.hooks.torch_source import TorchSource

_MARK = "_inductor_ext_hook"

_lock = threading.Lock()


@dataclass(frozen=True)
class Misfit:
    """A hook that does not fit a torch, and why."""

    hook: Hook
    why: str


def concerns(hook: Hook, version: str) -> bool:
    """Whether a hook applies to a torch version.

    Args:
        version: such as `2.14.1+cu130`.
    """
    release = _compat.minor_version(version)
    return (not hook.since or release >= _compat.minor_version(hook.since)) and (
        not hook.until or release < _compat.minor_version(hook.until)
    )


def find(name: str) -> Hook:
    """Return the declaration of a hook.

    Raises:
        KeyError: there is no hook of that name.
    """
    return _BY_NAME[name]


_BY_NAME = {hook.name: hook for hook in HOOKS}


def check(folder: str | Path, version: str, hooks: Sequence[Hook] = HOOKS) -> list[Misfit]:
    """Return the hooks that do not fit a torch. Imports nothing.

    Args:
        folder: folder of the torch package.
        version: version of that torch; hooks that do not apply to it are not checked.
    """
    source = TorchSource(folder)
    return [
        Misfit(hook, why)
        for hook in hooks
        if concerns(hook, version) and (why := _find_misfit(source, hook))
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


def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Install a dispatcher over the target of a declared hook, unless it is already installed.

    Args:
        name: name of the hook, whose kind is "replaced".
        make: takes the current function and returns the dispatcher.

    Raises:
        exc.HookError: the target is missing or lacks a parameter.
    """
    hook = find(name)
    with _lock:
        owner, attribute, current = _resolve(hook)
        if getattr(current, _MARK, None) == name:
            return
        why = _missing_parameters(hook, tuple(inspect.signature(current).parameters))
        if why:
            raise _make_error(hook, why)
        dispatcher = make(current)
        setattr(dispatcher, _MARK, name)
        setattr(owner, attribute, dispatcher)


def has_target(name: str) -> bool:
    """Whether the installed torch has a target of a declared hook."""
    return _located(find(name)) is not None


def _resolve(hook: Hook) -> tuple[Any, str, Callable[..., Any]]:
    """Return the object that holds the target, the target's attribute name, and the target."""
    located = _located(hook)
    if located is None:
        raise _make_error(hook, f"{' or '.join(hook.targets)} does not exist")
    owner, attribute = located
    return owner, attribute, getattr(owner, attribute)


def _located(hook: Hook) -> tuple[Any, str] | None:
    for target in hook.targets:
        path, _, attribute = target.rpartition(".")
        owner = _import(path)
        if owner is not None and hasattr(owner, attribute):
            return owner, attribute
    return None


def _import(path: str) -> Any:
    """Return the module, or the class in a module, at a dotted path; None if there is none."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name, None) if module else None


def _make_error(hook: Hook, why: str) -> exc.HookError:
    return exc.HookError(hook=hook.name, why=why, torch=_compat.torch_version())


def replaced_targets() -> Iterator[str]:
    """Yield the dotted paths of all targets of kind "replaced"."""
    for hook in HOOKS:
        if hook.kind == "replaced":
            yield from hook.targets


# --- the table in docs/switch.md ----------------------------------------------------------------

_BEGIN, _END = "<!-- hooks: begin -->", "<!-- hooks: end -->"


def render_table() -> str:
    """Return the declarations as Markdown tables, one per kind."""
    titles: dict[Kind, str] = {
        "replaced": "Replaced for the process, by a dispatcher",
        "overridden": "Overridden in a subclass",
        "changed": "Changed in objects of the compile at hand",
        "read": "Private, read or called",
    }
    lines: list[str] = []
    for kind, title in titles.items():
        lines += [f"### {title}", "", "| target | by | torch | why |", "| --- | --- | --- | --- |"]
        for hook in HOOKS:
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


def update_page(text: str) -> str:
    """Return the text of a page with its table regenerated between the two markers."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{render_table()}\n{_END}{after}"


if __name__ == "__main__":
    _page = Path(sys.argv[1])
    _page.write_text(update_page(_page.read_text(encoding="utf-8")), encoding="utf-8")
