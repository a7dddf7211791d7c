"""Our lowerings: one module an operator family, from an ATen call to Inductor IR.

A lowering is a function that gets stock's lowering first and the call's arguments after it:

    @register_lowering(torch.ops.aten.mm.default)
    def mm(stock, mat1, mat2, *, layout=None):
        if not covered(mat1, mat2):
            return stock(mat1, mat2, layout=layout)
        ...

It runs only in compiles of the extension: `hooks.lowerings` puts a dispatcher into Inductor's
process-wide table, which hands every other compile to `stock`. What a lowering does not cover it
hands to `stock` unchanged. This registry is pure bookkeeping and imports no Inductor.
"""

from __future__ import annotations

import hashlib
import inspect
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

__all__ = ["register_lowering", "registered", "registry_key", "unregister_lowering"]

Lowering = Callable[..., Any]
_F = TypeVar("_F", bound=Lowering)

_lowerings: dict[Any, Lowering] = {}
_keys: dict[Any, str] = {}


def register_lowering(*operators: Any) -> Callable[[_F], _F]:
    """Decorator: lower each of `operators` (OpOverload) by the function, in our compiles.

    Raises:
        ValueError: an operator has a lowering of ours already.
    """

    def register(lowering: _F) -> _F:
        for operator in operators:
            if operator in _lowerings:
                raise ValueError(f"{operator} is lowered by {_lowerings[operator]!r} already")
            _lowerings[operator] = lowering
            _keys[operator] = _identity(lowering)
        return lowering

    return register


def unregister_lowering(*operators: Any) -> None:
    """Take lowerings back; stock's path holds again for these operators."""
    for operator in operators:
        del _lowerings[operator], _keys[operator]


def registered() -> Mapping[Any, Lowering]:
    """A live view of operator -> lowering."""
    return MappingProxyType(_lowerings)


def registry_key(*, own: bool = True) -> str:
    """Hex digest over what is registered, for the cache key.

    The package's own source is in the key anyway; this covers lowerings registered elsewhere.

    Args:
        own: whether to count the package's, which are registered when the first compile begins.
    """
    items = sorted(
        (str(operator), key)
        for operator, key in _keys.items()
        if own or _lowerings[operator].__module__.split(".")[0] != "inductor_ext"
    )
    return hashlib.sha256(repr(items).encode()).hexdigest()[:16]


def _identity(lowering: Lowering) -> str:
    try:
        source = inspect.getsource(lowering)
    except (OSError, TypeError):
        # Without source two versions cannot be told apart: never reuse what another process built.
        source = secrets.token_hex()
    qualified = f"{lowering.__module__}.{getattr(lowering, '__qualname__', repr(lowering))}"
    return hashlib.sha256(f"{qualified}\n{source}".encode()).hexdigest()
