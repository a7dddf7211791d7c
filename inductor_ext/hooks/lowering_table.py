"""The table of the extension's lowerings, by operator.

A lowering is a function whose first argument is Inductor's own lowering (`stock`), followed by the
call's arguments. `lowering_dispatch` installs a dispatcher for each into Inductor's process-wide
table. This module imports neither Inductor nor a feature, so every feature can register lowerings.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

Lowering = Callable[..., Any]
_F = TypeVar("_F", bound=Lowering)

_lowerings: dict[Any, Lowering] = {}
_keys: dict[Any, str] = {}


def register_lowering(*operators: Any) -> Callable[[_F], _F]:
    """Register the decorated function as the lowering of `operators` in the extension's compiles.

    Args:
        operators: OpOverloads.

    Raises:
        ValueError: an operator is already registered.
    """

    def register(lowering: _F) -> _F:
        for operator in operators:
            if operator in _lowerings:
                raise ValueError(
                    f"{operator} already has a lowering: {_lowerings[operator]!r}; remove it "
                    "with unregister_lowering first"
                )
            _lowerings[operator] = lowering
            _keys[operator] = _identity(lowering)
        return lowering

    return register


def register_once(lowering: Lowering, *operators: Any) -> None:
    """Register a lowering of the package for those of the operators that have none of a user's.

    Raises:
        ValueError: the package has another lowering for an operator.
    """
    missing = []
    for operator in operators:
        existing = _lowerings.get(operator)
        if existing is None or (existing is not lowering and _is_own(existing)):
            missing.append(operator)
    register_lowering(*missing)(lowering)


def _is_own(lowering: Lowering) -> bool:
    """Whether a lowering is one of the package."""
    return lowering.__module__.split(".")[0] == "inductor_ext"


def unregister_lowering(*operators: Any) -> None:
    """Remove the lowerings of `operators`, which restores Inductor's own."""
    for operator in operators:
        del _lowerings[operator], _keys[operator]


def registered() -> Mapping[Any, Lowering]:
    """Return a live, read-only view of operator -> lowering."""
    return MappingProxyType(_lowerings)


def registry_key(*, own: bool = True) -> str:
    """Return a hex digest of the registered lowerings, for the cache key.

    The cache key already covers the package's own source; this adds lowerings registered elsewhere.

    Args:
        own: whether to include the package's own lowerings, which are registered when the first
            compile begins.
    """
    items = sorted(
        (str(operator), key)
        for operator, key in _keys.items()
        if own or not _is_own(_lowerings[operator])
    )
    return hashlib.sha256(repr(items).encode()).hexdigest()[:16]


def _identity(lowering: Lowering) -> str:
    try:
        source = inspect.getsource(lowering)
    except (OSError, TypeError):
        # Without source, two versions are indistinguishable: a random key prevents cache reuse
        # across processes.
        source = secrets.token_hex()
    qualified = f"{lowering.__module__}.{getattr(lowering, '__qualname__', repr(lowering))}"
    return hashlib.sha256(f"{qualified}\n{source}".encode()).hexdigest()
