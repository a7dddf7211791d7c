"""The switch: what turns a compile by Inductor into a compile by the extension, and back.

`activate` (for a block of code in this thread), `install` (for the process) and the dynamo backend
only record a request. It takes effect in `compile_fx`, through which every entry point of Inductor
passes (see `hooks.compile_fx`). Compiling is what counts, not calling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from inductor_ext import _compat, config
from inductor_ext.hooks import compile_fx, context

__all__ = ["activate", "install", "requested", "uninstall"]

Overrides = Mapping[str, object]

_installed: Overrides | None = None


def requested() -> Overrides | None:
    """The settings that `activate`, or else `install`, requests; None without either."""
    overrides = context.current().overrides
    return _installed if overrides is None else overrides


@contextlib.contextmanager
def activate(**overrides: object) -> Iterator[None]:
    """Inside, in this thread, everything that Inductor compiles is compiled by the extension.

    Includes Inductor's own entry points (`torch.compile`,
    `torch._inductor.aoti_compile_and_package`). Activations nest: an inner one adds its overrides
    to the outer one's. A function compiled inside stays compiled when called outside, its backward
    graph included, and dynamo reuses for `backend="inductor"` what it compiled under that name.

    Args:
        overrides: settings (see `inductor_ext.settings`) for the compiles inside.

    Raises:
        exc.UnsupportedTorchError, exc.UnknownOptionError, exc.BadOptionError, exc.HookError: before
            anything else.
    """
    merged = _prepare({**(requested() or {}), **overrides})
    with context.enter(overrides=merged):
        yield


def install(**overrides: object) -> None:
    """Activate the extension for the whole process, all its threads, until `uninstall`.

    A second call replaces the overrides of the first. Raises as `activate` does.
    """
    global _installed
    _installed = _prepare(overrides)


def uninstall() -> None:
    """Undo `install`. Without one, nothing happens."""
    global _installed
    _installed = None


def _prepare(overrides: Overrides) -> Overrides:
    settings = config.snapshot(overrides)
    _compat.check_torch(override=settings.allow_unsupported_torch or not settings.enabled)
    compile_fx.install_hooks(requested)
    return overrides
