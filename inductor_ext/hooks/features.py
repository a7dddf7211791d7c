"""The features, each of which brings its hooks."""

from __future__ import annotations

from typing import Protocol

from inductor_ext.cpp_wrapper import hooks as cpp_wrapper_hooks
from inductor_ext.hooks import compile_again, lowering_dispatch, upstream_fixes
from inductor_ext.hooks.registry import Hook
from inductor_ext.lowerings import hooks as lowerings_hooks
from inductor_ext.memory import hooks as memory_hooks


class Feature(Protocol):
    """The module `hooks` of a feature."""

    @property
    def HOOKS(self) -> tuple[Hook, ...]:
        """The feature's declarations."""

    def install_hooks(self) -> None:
        """Register the feature's lowerings, and install its dispatchers, once per process."""


FEATURES: tuple[Feature, ...] = (lowerings_hooks, memory_hooks, cpp_wrapper_hooks)


def install_hooks() -> None:
    """Install all hooks that affect generated code, once per process."""
    for feature in FEATURES:
        feature.install_hooks()
    upstream_fixes.install_hooks()
    compile_again.install_hooks()
    # The features have registered their lowerings.
    lowering_dispatch.install_hooks()
