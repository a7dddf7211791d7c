"""The table of all hooks: every use or patch of torch's private API.

The modules that own hooks declare them; this module concatenates the declarations. Importing it
imports neither torch nor a compiler.

`python -m inductor_ext.hooks.hook_table docs/switch.md` updates the table in that page.
"""

from __future__ import annotations

import sys
from pathlib import Path

from inductor_ext.hooks import (
    backend_lookup,
    cache_keys,
    compile_again,
    compile_fx,
    direct_compiles,
    lowering_dispatch,
    offline_gpu,
    registry,
    scope,
    upstream_fixes,
)
from inductor_ext.hooks.features import FEATURES
from inductor_ext.hooks.registry import Hook

_OTHER_HOOKS = (
    Hook(
        "region_options",
        "read",
        ("torch._higher_order_ops.invoke_subgraph.NestedCompileRegionOptions",),
        "_compat",
        "The Inductor options of a nested_compile_region. They are in the metadata of its graph "
        "module and of the node that calls it, which has no public reader.",
        since="2.14",
    ),
    Hook(
        "dynamo_backend",
        "read",
        ("torch._TorchCompileInductorWrapper",),
        "backend",
        "Applies mode and options like `backend='inductor'`, and calls compile_fx.",
    ),
    Hook(
        "aot_compile_result",
        "read",
        ("torch._dynamo.aot_compile_types.BundledAOTAutogradSerializableCallable",),
        "_compat",
        "torch 2.11 serializes only the result of its own backend in `aot_compile`.",
        until="2.12",
    ),
    Hook(
        "autotuning_folder",
        "read",
        ("torch._inductor.runtime.cache_dir_utils.default_cache_dir",),
        "storage.paths",
        "Returns the path of the cache folder without creating it.",
    ),
    Hook(
        "cudagraph_reset",
        "read",
        ("torch._inductor.cudagraph_trees.reset_cudagraph_trees",),
        "backend",
        "torch.compiler.reset drops recorded CUDA graphs of `backend='inductor'`; this function "
        "drops those of the extension.",
    ),
)
"""Private names that modules outside of hooks/ and of the features read."""

HOOKS: tuple[Hook, ...] = (
    *backend_lookup.HOOKS,
    *compile_fx.HOOKS,
    *compile_again.HOOKS,
    *direct_compiles.HOOKS,
    *cache_keys.HOOKS,
    *scope.HOOKS,
    *lowering_dispatch.HOOKS,
    *(hook for feature in FEATURES for hook in feature.HOOKS),
    *upstream_fixes.HOOKS,
    *offline_gpu.HOOKS,
    *_OTHER_HOOKS,
)

_BEGIN, _END = "<!-- hooks: begin -->", "<!-- hooks: end -->"


def update_page(text: str) -> str:
    """Return the text of a page with its table regenerated between the two markers."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{registry.render_table(HOOKS)}\n{_END}{after}"


if __name__ == "__main__":
    _page = Path(sys.argv[1])
    _page.write_text(update_page(_page.read_text(encoding="utf-8")), encoding="utf-8")
