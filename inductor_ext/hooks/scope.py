"""The scope of a compile: the `InductorChoices` handler that carries its settings.

In the scope, this thread's handler `V.choices` is an instance of a subclass of whatever class was
there, with the frozen settings of the compile. Its presence is the answer to the question of every
dispatcher, "is a compile of the extension running in this thread?" (`settings`). Inductor pickles
the handler when it compiles in a subprocess, so that the answer is the same there. When the scope
closes, the handler is what it was before; where there was none, there is none.

The handler extends the class at hand, also a user's `config.inductor_choices_class` and, from torch
2.15, the contributors of `register_inductor_choices`: what these decide stays decided.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from inductor_ext import _compat
from inductor_ext.lowerings.pointwise import persistent_reductions
from inductor_ext.settings import Settings

__all__ = ["ExtChoices", "compile_scope", "install_hooks", "make_choices", "settings"]


def settings() -> Settings | None:
    """The settings of the extension's compile that runs in this thread; None outside of one."""
    handler = _compat.peek_choices()
    return handler.settings if isinstance(handler, ExtChoices) else None


@contextlib.contextmanager
def compile_scope(values: Settings) -> Iterator[None]:
    """Inside, this thread compiles by the extension; re-entrant.

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
    """Put in place everything that decides about code, once."""
    # Here, since a compile subprocess begins by unpickling the handler.
    from inductor_ext.hooks import aot, graph_passes, lowerings, upstream_fixes

    for module in (graph_passes, aot, upstream_fixes, lowerings):
        module.install_hooks()


class ExtChoices:
    """Mixed into the InductorChoices class at hand: the extension's part in Inductor's choices."""

    settings: Settings

    def get_template_configs(
        self, kernel_inputs: Any, templates: Any, op_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Inductor's candidates for a matmul, without those that are known to lose."""
        from inductor_ext.lowerings import gemm

        templates = gemm.sole_candidates(templates)
        stock: Any = super()
        return stock.get_template_configs(kernel_inputs, templates, op_name, *args, **kwargs)

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        """Whether a kernel holds a row in registers: where Inductor does, and where more pays.

        A user's class that overrides this method has the last word.
        """
        from torch._inductor import config as inductor_config
        from torch._inductor.choices import InductorChoices

        stock: Any = super()
        if stock.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        decided = _base_of(self).should_use_persistent_reduction
        return (
            self.settings.persistent_rows
            and decided is InductorChoices.should_use_persistent_reduction
            and inductor_config.triton.persistent_reductions
            and not cooperative_reduction
            and persistent_reductions.keeps_rows(features)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_choices, (_base_of(self), _state_of(self), self.settings)


def _base_of(handler: Any) -> type[Any]:
    """The class of a handler without our mixin."""
    cls = type(handler)
    return cls.__mro__[2] if issubclass(cls, ExtChoices) else cls


def _state_of(handler: Any) -> dict[str, Any]:
    """The attributes of a handler without our own."""
    # A handler that composes several (torch 2.15) answers attribute look-ups by its parts.
    state: dict[str, Any] = object.__getattribute__(handler, "__dict__")
    return {key: value for key, value in state.items() if key != "settings"}


@functools.cache
def _choices_class(base: type[Any]) -> type[Any]:
    return type("ExtChoices", (ExtChoices, base), {})


def make_choices(base: type[Any], state: dict[str, Any], values: Settings) -> Any:
    """A handler that extends one of class `base` with attributes `state`."""
    handler = object.__new__(_choices_class(base))  # type: ignore[arg-type]  # a class is hashable
    object.__getattribute__(handler, "__dict__").update(state, settings=values)
    return handler


def _restore_choices(base: type[Any], state: dict[str, Any], values: Settings) -> Any:
    """Unpickle an ExtChoices: Inductor's compile subprocess is about to compile for us."""
    install_hooks()
    return make_choices(base, state, values)


def _extend_choices(values: Settings) -> Any:
    """An ExtChoices over the handler that Inductor would use in this thread."""
    handler = _compat.peek_choices()
    if handler is None:
        handler = _compat.default_choices()
    return make_choices(_base_of(handler), _state_of(handler), values)
