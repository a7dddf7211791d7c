"""Keys of Inductor's caches. They keep cache entries of the extension apart from Inductor's own.

The key of a graph that the extension compiles includes the package's source, the settings, the
registered lowerings, and the inputs of matmul decisions. Keys of other compiles are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import lowering_table, registry, scope
from inductor_ext.memory import compiled_callables
from inductor_ext.storage import digest


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    registry.replace("fx_graph_key", _dispatch_key)
    registry.replace("compiled_graph", _dispatch_compiled_graph)


def _dispatch_key(stock: Callable[..., None]) -> Callable[..., None]:
    from inductor_ext.lowerings.graph import post_grad_pass

    @functools.wraps(stock)
    def __init__(self: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, gm, *args, **kwargs)
        settings = scope.settings()
        if settings is not None:
            parts = [
                digest.source_key(),
                settings.cache_key(),
                lowering_table.registry_key(),
            ]
            self.inductor_ext = "-".join([*parts, post_grad_pass.cache_key(settings, gm)])

    return __init__


def _dispatch_compiled_graph(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if scope.settings() is not None:
            compiled_callables.note_graph(self._fx_graph_cache_key)

    return post_compile
