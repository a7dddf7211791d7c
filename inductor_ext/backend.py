"""The Dynamo backend: `torch.compile(model, backend="inductor_ext")`.

torch finds it through the entry point group "torch_dynamo_backends"; no import is needed. The
backend validates mode and options, checks that the graph's toolchain is installed, and calls
Inductor with the extension activated. If the toolchain is missing, the graph runs in eager mode
with a one-line warning, or `exc.MissingToolchainError` is raised (setting `fallback_to_eager`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from inductor_ext import _compat, config, events
from inductor_ext import options as _options
from inductor_ext.autotune import compile_workers
from inductor_ext.hooks.activate import activate, requested
from inductor_ext.memory import compiled_callables
from inductor_ext.toolchain import requirements

if TYPE_CHECKING:
    import torch

    from inductor_ext.settings import Settings
    from inductor_ext.toolchain import components


@dataclasses.dataclass(frozen=True)
class EagerFallbackRecord(events.Record):
    """A graph that runs in eager mode because its toolchain is missing."""

    name: ClassVar[str] = "eager_fallback"

    part: str
    why: str
    install: str
    operators: int


def inductor_ext(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one FX graph. Dynamo calls this function.

    Args:
        gm: the graph captured by Dynamo. The backend takes ownership of it.
        example_inputs: the graph's inputs: fake tensors, SymInts and other values.
        mode: a mode of torch.compile, see `inductor_ext.list_mode_options`. Default: None.
        options: options of Inductor and settings of the extension by name, see
            `inductor_ext.list_options`. Default: None.

    Returns:
        A callable with the same inputs and outputs as the graph.

    Raises:
        exc.UnsupportedTorchError, exc.UnknownModeError, exc.UnknownOptionError, exc.BadOptionError:
            before anything else happens. Dynamo wraps them in BackendCompilerFailed.
        exc.MissingToolchainError: the toolchain is missing and `fallback_to_eager` is False.
    """
    import torch
    from torch._inductor import config as inductor_config

    values, patches = _options.split_options(mode, options)
    with activate(**values):
        settings = config.snapshot(requested())
        if settings.enabled:
            devices = requirements.device_types(
                [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
            )
            missing = requirements.find_missing("jit", devices)
            if missing is not None:
                return _run_eagerly(gm, missing, settings)
            with inductor_config.patch(patches):
                if "cuda" in devices:
                    # As early as possible: the imports of the compile take as long as their start.
                    compile_workers.start()
                requirements.warn_about_gemm_backends(devices)
        compiled = torch._TorchCompileInductorWrapper(None, patches, None)(gm, example_inputs)
        return _compat.make_serializable(compiled)


def _reset() -> None:
    """Forget which callables were compiled and drop recorded CUDA graphs.

    `torch.compiler.reset` calls this function. Inductor's own backend drops recorded CUDA graphs,
    too. The backend does not track which models use CUDA graphs; if none was recorded, nothing is
    dropped.
    """
    compiled_callables.forget_compiles()
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()


inductor_ext.reset = _reset  # type: ignore[attr-defined]


def _run_eagerly(
    gm: torch.fx.GraphModule, missing: components.Component, settings: Settings
) -> Callable[..., Any]:
    from torch._dynamo.utils import count_calls

    if not settings.fallback_to_eager:
        missing.require()
    record = EagerFallbackRecord(
        part=missing.title,
        why=missing.why or "",
        install=missing.install or "",
        operators=count_calls(gm.graph),
    )
    events.emit(record, event_log=settings.event_log)
    events.warn_once(
        f"eager_fallback:{missing.name}",
        f"{missing.title} is missing ({missing.why}); graphs that need it run in eager mode. "
        f"To fix: {missing.install}",
    )
    return gm.forward
