"""The scope of a compile: the `InductorChoices` handler that carries its settings.

Inside the scope, this thread's `V.choices` handler is an instance of a subclass of the previous
handler's class, with the frozen settings of the compile. Dispatchers check for this handler to
decide whether the extension is compiling in this thread (`settings`). Inductor pickles the handler
when it compiles in a subprocess, so the check gives the same result there. When the scope closes,
the previous handler is restored; if there was none, there is none again.

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
from inductor_ext.lowerings.pointwise import persistent_reductions
from inductor_ext.settings import Settings


def settings() -> Settings | None:
    """Return the settings of the extension's compile in this thread; None outside of one."""
    handler = _compat.peek_choices()
    return handler.settings if isinstance(handler, ExtChoices) else None


@contextlib.contextmanager
def compile_scope(values: Settings) -> Iterator[None]:
    """Open the scope of an extension compile in this thread. Re-entrant.

    Args:
        values: the settings of the compile.
    """
    if settings() == values:
        yield
        return
    install_hooks()
    with _compat.choices_handler(_extend_choices(values)):
        yield


def install_hooks() -> None:
    """Install all hooks that affect generated code, once per process."""
    # Imported here because a compile subprocess starts by unpickling the handler.
    from inductor_ext.hooks import aot, graph_passes, lowerings, upstream_fixes

    for module in (graph_passes, aot, upstream_fixes, lowerings):
        module.install_hooks()


class ExtChoices:
    """Mixin over the current InductorChoices class that overrides some of its decisions."""

    settings: Settings

    def get_template_configs(
        self, kernel_inputs: Any, templates: Any, op_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Return Inductor's candidates for a matmul, without those that are known to be slower."""
        from inductor_ext.lowerings import aten

        templates = aten.sole_candidates(templates)
        stock: Any = super()
        return stock.get_template_configs(kernel_inputs, templates, op_name, *args, **kwargs)

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        """Whether a reduction keeps its row in registers: Inductor's cases, and further ones.

        A user's class that overrides this method takes precedence.
        """
        from torch._inductor import config as inductor_config
        from torch._inductor.choices import InductorChoices

        stock: Any = super()
        if stock.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        base_method = _base_of(self).should_use_persistent_reduction
        return (
            self.settings.persistent_rows
            and base_method is InductorChoices.should_use_persistent_reduction
            and inductor_config.triton.persistent_reductions
            and not cooperative_reduction
            and persistent_reductions.should_hold_row_in_registers(features)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_choices, (_base_of(self), _state_of(self), self.settings)


def _base_of(handler: Any) -> type[Any]:
    """Return the class of a handler without the extension's mixin."""
    cls = type(handler)
    return cls.__mro__[2] if issubclass(cls, ExtChoices) else cls


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
