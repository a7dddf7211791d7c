"""The dynamo backend: `torch.compile(model, backend="inductor_ext")`.

Found by torch through the entry point group "torch_dynamo_backends"; nothing has to be imported.
It checks mode and options, sees to it that the graph's toolchain is there, and hands the graph to
Inductor inside an activation. A graph whose toolchain is missing runs in eager mode with one line
of warning, or is refused: setting `fallback_to_eager`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext import activation, config, events, parts
from inductor_ext import options as _options

if TYPE_CHECKING:
    import torch

    from inductor_ext.settings import Settings

__all__ = ["inductor_ext"]

_TOOLCHAIN = {"cpu": ("cxx",), "cuda": ("triton", "cxx")}
"""Parts without which Inductor can compile nothing for a device type."""


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

    ours, patches = _options.split(mode, options)
    with activation.activate(**ours):
        settings = config.snapshot(activation.requested())
        missing = _missing_part(gm, example_inputs)
        if missing is not None:
            return _run_eagerly(gm, missing, settings)
        return torch._TorchCompileInductorWrapper(None, patches, None)(gm, example_inputs)


def _reset() -> None:
    """Called by torch.compiler.reset: drop recorded CUDA graphs, as stock's backend does."""
    import torch

    torch._TorchCompileInductorWrapper(None, None, None).reset()


inductor_ext.reset = _reset  # type: ignore[attr-defined]


def _missing_part(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> parts.Part | None:
    """The first part that the graph's devices need and this machine lacks."""
    for device in sorted(_device_types(gm, example_inputs)):
        for name in _TOOLCHAIN.get(device, ()):
            part = parts.probe(name)
            if not part.available:
                return part
    return None


def _device_types(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> set[str]:
    import torch

    values = [*example_inputs, *(node.meta.get("example_value") for node in gm.graph.nodes)]
    return {value.device.type for value in values if isinstance(value, torch.Tensor)}


def _run_eagerly(
    gm: torch.fx.GraphModule, missing: parts.Part, settings: Settings
) -> Callable[..., Any]:
    from torch._dynamo.utils import count_calls

    if not settings.fallback_to_eager:
        missing.require()
    record = events.EagerFallbackRecord(
        part=missing.name,
        why=missing.why or "",
        install=missing.install or "",
        operators=count_calls(gm.graph),
    )
    events.emit(record, event_log=settings.event_log)
    events.warn_once(
        f"eager_fallback:{missing.name}",
        f"{missing.name} is missing ({missing.why}); graphs that need it run in eager mode. "
        f"To mend it: {missing.install}.",
    )
    return gm.forward
