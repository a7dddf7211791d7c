"""The dynamo backend: `torch.compile(model, backend="inductor_ext")`.

Found by torch through the entry point group "torch_dynamo_backends"; nothing has to be imported.
It checks mode and options, sees to it that the graph's toolchain is there, and hands the graph to
Inductor inside an activation. A graph whose toolchain is missing runs in eager mode with one line
of warning, or is refused: setting `fallback_to_eager`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext import _compat, config, events
from inductor_ext import options as _options
from inductor_ext.hooks.activate import activate, requested
from inductor_ext.memory import plan_store
from inductor_ext.toolchain import requirements

if TYPE_CHECKING:
    import torch

    from inductor_ext.settings import Settings
    from inductor_ext.toolchain import components

__all__ = ["inductor_ext"]


def inductor_ext(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one FX graph; called by dynamo.

    Args:
        gm: the graph that dynamo captured; owned by the callee from here on.
        example_inputs: fake tensors, symbolic integers and other inputs of the graph.
        mode: a mode of torch.compile, see `inductor_ext.list_mode_options`.
        options: Inductor's options and ours by name, see `inductor_ext.list_options`.

    Returns:
        A callable with the graph's inputs and outputs.

    Raises:
        exc.UnsupportedTorchError, exc.UnknownModeError, exc.UnknownOptionError, exc.BadOptionError:
            before anything else. Dynamo wraps them in BackendCompilerFailed.
        exc.MissingToolchainError: with `fallback_to_eager=False`.
    """
    import torch
    from torch._inductor import config as inductor_config

    ours, patches = _options.split(mode, options)
    with activate(**ours):
        settings = config.snapshot(requested())
        if settings.enabled:
            devices = requirements.device_types(
                [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
            )
            missing = requirements.missing("jit", devices)
            if missing is not None:
                return _run_eagerly(gm, missing, settings)
            with inductor_config.patch(patches):
                requirements.warn_about_gemm_backends(devices)
        compiled = torch._TorchCompileInductorWrapper(None, patches, None)(gm, example_inputs)
        return _compat.serializable(compiled)


def _reset() -> None:
    """Called by torch.compiler.reset: forget whose graphs were compiled, and drop CUDA graphs.

    Stock's backend drops recorded CUDA graphs, too. Which models were compiled with them is not
    known here; without any, this does nothing.
    """
    plan_store.clear()
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


inductor_ext.reset = _reset  # type: ignore[attr-defined]


def _run_eagerly(
    gm: torch.fx.GraphModule, missing: components.Part, settings: Settings
) -> Callable[..., Any]:
    from torch._dynamo.utils import count_calls

    if not settings.fallback_to_eager:
        missing.require()
    record = events.EagerFallbackRecord(
        part=missing.title,
        why=missing.why or "",
        install=missing.install or "",
        operators=count_calls(gm.graph),
    )
    events.emit(record, event_log=settings.event_log)
    events.warn_once(
        f"eager_fallback:{missing.name}",
        f"{missing.title} is missing ({missing.why}); graphs that need it run in eager mode. "
        f"To mend it: {missing.install}.",
    )
    return gm.forward
