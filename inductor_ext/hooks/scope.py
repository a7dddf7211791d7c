"""The scope of a compile: the `InductorChoices` handler that carries its settings.

Inside the scope, this thread's `V.choices` handler is an instance of a subclass of the previous
handler's class, with the frozen settings of the compile. Dispatchers check for this handler to
decide whether the extension is compiling in this thread (`context.settings`). Inductor pickles the
handler when it compiles in a subprocess, so the check gives the same result there. When the scope
closes, the previous handler is restored; if there was none, there is none again.

The handler extends whatever class is in use, including a user's `config.inductor_choices_class`
and, from torch 2.15, the contributors of `register_inductor_choices`: their decisions stay in
effect.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from inductor_ext import _compat
from inductor_ext.hooks import context
from inductor_ext.hooks.registry import Hook
from inductor_ext.lowerings.hooks import KernelChoices
from inductor_ext.settings import Settings

HOOKS = (
    Hook(
        "choices",
        "overridden",
        ("torch._inductor.choices.InductorChoices",),
        "hooks.scope",
        "During a compile, V.choices is an instance of a subclass of the user's class and carries "
        "the settings. Inductor pickles it for compile subprocesses, which get no other state.",
        relies_on=(
            "torch._inductor.choices.InductorChoices.can_fuse",
            "torch._inductor.choices.InductorChoices.get_template_configs",
            "torch._inductor.choices.InductorChoices.should_use_persistent_reduction",
            "torch._inductor.virtualized._choices",
            "torch._inductor.virtualized.threadlocal",
            "torch._inductor.virtualized._choices_default",
            "torch._inductor.virtualized.Virtualized._set_handler",
            "torch._inductor.virtualized.Virtualized._key",
            "torch._inductor.config.inductor_choices_class",
        ),
    ),
)


@contextlib.contextmanager
def compile_scope(values: Settings) -> Iterator[None]:
    """Open the scope of an extension compile in this thread. Re-entrant.

    Args:
        values: the settings of the compile.
    """
    if context.settings() == values:
        yield
        return
    install_hooks()
    with _compat.choices_handler(_extend_choices(values)):
        yield


def install_hooks() -> None:
    """Install all hooks that affect generated code, once per process."""
    # Imported here because an activation alone does not need the features.
    from inductor_ext.hooks import features

    features.install_hooks()


class ExtChoices(KernelChoices, context.SettingsCarrier):
    """Mixin over the current InductorChoices class, with the settings and the features' choices."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_choices, (_base_of(self), _state_of(self), self.settings)


def _base_of(handler: Any) -> type[Any]:
    """Return the class of a handler without the extension's mixin."""
    cls = type(handler)
    return cls.__bases__[1] if issubclass(cls, ExtChoices) else cls


def _state_of(handler: Any) -> dict[str, Any]:
    """Return the attributes of a handler without those of the extension."""
    # In torch 2.15, a handler that composes contributors forwards attribute look-ups to them.
    state: dict[str, Any] = object.__getattribute__(handler, "__dict__")
    return {key: value for key, value in state.items() if key != "settings"}


@functools.cache
def _choices_class(base: type[Any]) -> type[Any]:
    return type("ExtChoices", (ExtChoices, base), {})


def make_choices(base: type[Any], state: dict[str, Any], values: Settings) -> Any:
    """Return a handler that extends a handler of class `base` with the attributes `state`."""
    handler = object.__new__(_choices_class(base))  # type: ignore[arg-type]  # a class is hashable
    object.__getattribute__(handler, "__dict__").update(state, settings=values)
    return handler


def _restore_choices(base: type[Any], state: dict[str, Any], values: Settings) -> Any:
    """Unpickle an ExtChoices, in an Inductor subprocess that compiles for the extension."""
    install_hooks()
    return make_choices(base, state, values)


def _extend_choices(values: Settings) -> Any:
    """Return an ExtChoices that extends the handler that Inductor would use in this thread."""
    handler = _compat.peek_choices()
    if handler is None:
        handler = _compat.default_choices()
    return make_choices(_base_of(handler), _state_of(handler), values)
