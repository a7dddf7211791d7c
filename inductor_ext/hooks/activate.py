"""Turns the extension on and off: `activate`, `install`, `uninstall`.

`activate` (for a block of code in this thread), `install` (for the process) and the dynamo backend
only record a request. It takes effect in `compile_fx`, which every Inductor entry point calls (see
`hooks.compile_fx`). What matters is whether the request is active when a graph is compiled, not
when the compiled function is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from inductor_ext import _compat, config
from inductor_ext.hooks import compile_fx, context

Overrides = Mapping[str, object]

_installed: Overrides | None = None


def requested() -> Overrides | None:
    """Return the settings requested by `activate`, or else by `install`; None without either."""
    overrides = context.current().overrides
    return _installed if overrides is None else overrides


@contextlib.contextmanager
def activate(**overrides: object) -> Iterator[None]:
    """In this block and thread, compile everything that Inductor compiles with the extension.

    This includes Inductor's own entry points (`torch.compile`,
    `torch._inductor.aoti_compile_and_package`). Activations nest: an inner activation adds its
    overrides to those of the outer one. A function compiled inside stays compiled when it is called
    outside, including its backward graph. For `backend="inductor"`, dynamo reuses what it compiled
    under that name, inside or outside.

    Args:
        overrides: settings (see `inductor_ext.settings`) for the compiles inside.

    Raises:
        exc.UnsupportedTorchError, exc.UnknownOptionError, exc.BadOptionError, exc.HookError: raised
            on entry, before anything is changed.
    """
    merged = _prepare({**(requested() or {}), **overrides})
    with context.enter(overrides=merged):
        yield


def install(**overrides: object) -> None:
    """Activate the extension for the whole process, in all its threads, until `uninstall`.

    A second call replaces the overrides of the first. Raises the same errors as `activate`.
    """
    global _installed
    _installed = _prepare(overrides)


def uninstall() -> None:
    """Undo `install`. Do nothing if `install` was not called."""
    global _installed
    _installed = None


def _prepare(overrides: Overrides) -> Overrides:
    settings = config.snapshot(overrides)
    _compat.check_torch(override=settings.allow_unsupported_torch or not settings.enabled)
    compile_fx.install_hooks(requested)
    return overrides
