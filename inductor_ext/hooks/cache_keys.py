"""Keys of Inductor's caches. They keep cache entries of the extension apart from Inductor's own.

The key of a graph that the extension compiles includes the package's source, the settings, the
registered lowerings, the inputs of matmul decisions, and which results and operands share memory.
Keys of other compiles are unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from inductor_ext.hooks import context, lowering_table, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.storage import digest

HOOKS = (
    Hook(
        "fx_graph_key",
        "replaced",
        ("torch._inductor.codecache.FxGraphHashDetails.__init__",),
        "hooks.cache_keys",
        "The keys of the FX graph cache and of the AOTAutograd cache are computed from the "
        "attributes of this object; the extension adds one. The public way would be "
        "torch.compiler.config.cache_key_tag, but torch 2.11 keeps it for the whole process.",
        relies_on=("torch._functorch._aot_autograd.autograd_cache.AOTAutogradCacheDetails",),
    ),
)


def install_hooks() -> None:
    """Install the dispatcher, once per process."""
    registry.install(HOOKS, {"fx_graph_key": _dispatch_key})


def _dispatch_key(stock: Callable[..., None]) -> Callable[..., None]:
    from inductor_ext.hooks.upstream_fixes import mutation
    from inductor_ext.lowerings.graph import post_grad_pass

    @functools.wraps(stock)
    def __init__(self: Any, gm: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, gm, *args, **kwargs)
        settings = context.settings()
        if settings is not None:
            parts = [
                digest.source_key(),
                settings.cache_key(),
                lowering_table.registry_key(),
            ]
            if share := context.current().recomputed_share:
                parts.append(f"recompute{share}")
            if chunking := context.current().chunking:
                parts.append(chunking.key)
            parts += [post_grad_pass.cache_key(settings, gm), mutation.cache_key(gm)]
            self.inductor_ext = "-".join(parts)

    return __init__
