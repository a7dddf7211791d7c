"""Every place where the extension changes torch or relies on what torch keeps private.

`hook_table.HOOKS` declares each place once. `check` compares the declarations with the source files
of a torch; it imports nothing and takes about a second. `inductor-ext doctor` and the tests run it.
`replace` puts a dispatcher in place of a declared target, and refuses a target that is missing or
has another signature.

`python -m inductor_ext.hooks.registry docs/switch.md` writes the table in that page.

A new entry is needed for everything that is done to torch beyond calling its public functions; a
test finds replacements that are not declared. See docs/upgrading_torch.md for a new torch.
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

__all__ = [
    "Misfit",
    "check",
    "concerns",
    "find",
    "has_target",
    "render_table",
    "replace",
    "replaced_targets",
]

_MARK = "_inductor_ext_hook"

_lock = threading.Lock()


@dataclass(frozen=True)
class Misfit:
    """A hook that does not fit a torch."""

    hook: Hook
    why: str


def concerns(hook: Hook, version: str) -> bool:
    """Whether a hook is in use with a torch.

    Args:
        version: such as `2.14.1+cu130`.
    """
    release = _compat.minor(version)
    return (not hook.since or release >= _compat.minor(hook.since)) and (
        not hook.until or release < _compat.minor(hook.until)
    )


def find(name: str) -> Hook:
    """The declaration of a hook.

    Raises:
        KeyError: there is none of that name.
    """
    return _BY_NAME[name]


_BY_NAME = {hook.name: hook for hook in HOOKS}


def check(folder: str | Path, version: str, hooks: Sequence[Hook] = HOOKS) -> list[Misfit]:
    """The hooks that do not fit a torch; nothing is imported.

    Args:
        folder: of the torch package.
        version: of that torch; hooks that do not concern it are not checked.
    """
    source = TorchSource(folder)
    return [
        Misfit(hook, why)
        for hook in hooks
        if concerns(hook, version) and (why := _misfit(source, hook))
    ]


def _misfit(source: TorchSource, hook: Hook) -> str:
    """Why a hook does not fit; empty if it does."""
    found = next(filter(None, map(source.find, hook.targets)), None)
    if found is None:
        return f"{' or '.join(hook.targets)} does not exist"
    parameters = found.parameters()
    if hook.parameters:
        why = _missing_parameters(hook, parameters or ())
        if why:
            return why
    for needed in hook.relies_on:
        if not any(map(source.find, needed.split("|"))):
            return f"{needed.replace('|', ' or ')} does not exist"
    return ""


def _missing_parameters(hook: Hook, parameters: Sequence[str]) -> str:
    missing = [name for name in hook.parameters if name not in parameters]
    if not missing:
        return ""
    return (
        f"{hook.targets[0]} has no parameter {', '.join(missing)}; it takes {', '.join(parameters)}"
    )


def replace(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a dispatcher in place of the target of a declared hook, unless one stands there.

    Args:
        name: of the hook, whose kind is "replaced".
        make: gets the function that stands there and returns the dispatcher.

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
            raise _error(hook, why)
        dispatcher = make(current)
        setattr(dispatcher, _MARK, name)
        setattr(owner, attribute, dispatcher)


def has_target(name: str) -> bool:
    """Whether the installed torch has a target of a declared hook."""
    return _located(find(name)) is not None


def _resolve(hook: Hook) -> tuple[Any, str, Callable[..., Any]]:
    """The object that holds a target, its name there, and the target."""
    located = _located(hook)
    if located is None:
        raise _error(hook, f"{' or '.join(hook.targets)} does not exist")
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
    """The module, or the class in a module, at a dotted path; None if there is none."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name, None) if module else None


def _error(hook: Hook, why: str) -> exc.HookError:
    return exc.HookError(hook=hook.name, why=why, torch=_compat.torch_version())


def replaced_targets() -> Iterator[str]:
    """Dotted paths of all targets of kind "replaced"."""
    for hook in HOOKS:
        if hook.kind == "replaced":
            yield from hook.targets


# --- the table in docs/switch.md ----------------------------------------------------------------

_BEGIN, _END = "<!-- hooks: begin -->", "<!-- hooks: end -->"


def render_table() -> str:
    """The declarations as Markdown tables, one for each kind."""
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
                    f"| {targets} | `{hook.owner}` | {_releases(hook)} | {hook.why}{issue} |"
                )
        lines.append("")
    return "\n".join(lines)


def _releases(hook: Hook) -> str:
    since, until = hook.since or _compat.SUPPORTED[0], hook.until
    return f"{since} until {until}" if until else f"from {since}"


def update_page(text: str) -> str:
    """A page with its table made anew, between the two marks."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{render_table()}\n{_END}{after}"


if __name__ == "__main__":
    _page = Path(sys.argv[1])
    _page.write_text(update_page(_page.read_text(encoding="utf-8")), encoding="utf-8")
