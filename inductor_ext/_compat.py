"""Supported torch releases, differences between them, and access to their private state.

All differences between torch and Triton versions are handled here, by feature detection rather than
version number where that is possible. `check_torch` raises for an unsupported release unless the
setting `allow_unsupported_torch` is on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from inductor_ext import exc, settings

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices

SUPPORTED = ("2.11", "2.15")
"""The lowest and the highest supported torch release, inclusive."""

_NEWER = (
    " `inductor-ext doctor` checks the torch internals that the extension relies on; "
    "docs/upgrading_torch.md describes the remaining checks."
)
"""Hint that is added to the error for a torch newer than the supported range."""


@functools.cache
def torch_version() -> str:
    """Return the version of the installed torch distribution, without importing it."""
    return metadata.version("torch")


def torch_folder() -> pathlib.Path:
    """Return the folder of the installed torch package, without importing it.

    Raises:
        ImportError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ImportError("torch is not installed")
    return pathlib.Path(spec.origin).parent


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Return the installed Triton's (major, minor), without importing it; None if there is none."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return minor_version(metadata.version(name))
    return None


def triton_copies_register_operand() -> bool:
    """Whether Triton also allocates shared memory for a wgmma A operand in registers.

    This concerns a tile whose K is multiplied in two slices. For an operand computed in the loop,
    Triton 3.8 converts one slice through scratch memory and loads the other from a separate
    allocation. 3.6 and 3.7 take both from one conversion. No feature can be tested for, so this
    compares versions.
    """
    version = triton_version()
    return version is not None and version >= (3, 8)


def minor_version(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version string."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_in_range(version: str) -> bool:
    """Whether a torch version is within `SUPPORTED`."""
    lowest, highest = map(minor_version, SUPPORTED)
    return lowest <= minor_version(version) <= highest


def check_torch(*, override: bool) -> None:
    """Check that the installed torch is supported.

    Args:
        override: whether to accept any version.

    Raises:
        exc.UnsupportedTorchError: it is not, and `override` is false.
    """
    version = torch_version()
    if not override and not is_in_range(version):
        raise exc.UnsupportedTorchError(
            actual=version,
            lowest=SUPPORTED[0],
            highest=SUPPORTED[1],
            variable=settings.environment_variable("allow_unsupported_torch"),
            check=_NEWER if minor_version(version) > minor_version(SUPPORTED[1]) else "",
        )


def compile_apart(target: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.compile` of `target` with a recompile limit of its own.

    Dynamo caches compiled code by code object, and all `nn.Sequential` share one. So compiling each
    with a separate backend would count towards one shared recompile limit, beyond which they run in
    eager mode.

    Args:
        target: a function or module.
        options: keyword arguments of torch.compile.
    """
    import torch

    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
        return torch.compile(target, **options)

    # torch 2.11: `target` is inlined into the wrapper's new code object. Only after a graph break
    # is it compiled under its own code object, and counts towards that one's limit.
    return torch.compile(with_own_code(target), **options)


def compiles_on_one_rank() -> bool:
    """Whether generated Python must run on the current device of any rank, without a device index.

    `torch.compiler.config.compile_on_one_rank` requires that since torch 2.14. In earlier releases
    the option of that name only affects collectives.
    """
    from torch.fx.experimental import proxy_tensor

    enabled: Callable[[], bool] | None = getattr(proxy_tensor, "_coor_enabled", None)
    return enabled is not None and bool(enabled())


def with_own_code(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `target` and has a unique code object."""

    def program(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return types.FunctionType(
        program.__code__.replace(), program.__globals__, closure=program.__closure__
    )


def peek_choices() -> InductorChoices | None:
    """Return this thread's InductorChoices handler, or None if none has been created yet.

    `V.choices` cannot be used: reading it creates and keeps the default handler.
    """
    from torch._inductor import virtualized

    handler: InductorChoices | None = getattr(
        virtualized.threadlocal, virtualized._choices._key, None
    )
    return handler


def default_choices() -> InductorChoices:
    """Return a new handler as Inductor creates it in a thread that has none.

    Since torch 2.15 it includes what is registered with `register_inductor_choices`.
    """
    from torch._inductor import choices
    from torch._inductor import config as inductor_config

    create = getattr(choices, "create_inductor_choices", None)
    if create is not None:
        created: InductorChoices = create(inductor_config.inductor_choices_class)
        return created
    handler: InductorChoices = (inductor_config.inductor_choices_class or choices.InductorChoices)()
    return handler


@contextlib.contextmanager
def choices_handler(handler: InductorChoices) -> Iterator[None]:
    """Make `handler` this thread's InductorChoices within a context, and fully restore the state.

    `V.set_choices_handler` alone does not: it creates a default handler in order to restore it,
    which would then ignore a later change of `config.inductor_choices_class`.
    """
    from torch._inductor import virtualized

    unset = peek_choices() is None
    try:
        with virtualized.V.set_choices_handler(handler):
            yield
    finally:
        if unset:
            with contextlib.suppress(AttributeError):
                delattr(virtualized.threadlocal, virtualized._choices._key)


def make_serializable(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backend's result as `torch.compile(...).aot_compile` requires.

    torch 2.11 only wraps the result of the "inductor" backend; later releases wrap any result that
    has a `serialize` method, as the extension's has. Dynamo sets `force_autograd_cache` only while
    it compiles for `aot_compile`.
    """
    import torch._functorch.config
    from torch._dynamo import aot_compile_types

    if minor_version(torch_version()) > (2, 11) or not torch._functorch.config.force_autograd_cache:
        return compiled
    if getattr(compiled, "serialize", None) is None:
        return compiled
    wrapped: Callable[..., Any] = aot_compile_types.BundledAOTAutogradSerializableCallable(compiled)
    return wrapped


def region_patches(module: Any, call: Any = None) -> Mapping[str, Any]:
    """Return the Inductor options of a `nested_compile_region`; empty if it uses the caller's.

    Since torch 2.14 a region may have its own options (`NestedCompileRegionOptions.
    inductor_config_patches`). Inductor applies them around its passes over the region's graph, its
    lowering and its code generation.

    Args:
        module: the region's graph module.
        call: the node that calls it. Its metadata survives transforms that create a new module.
    """
    options = getattr(module, "meta", {}).get("nested_region_config")
    if options is None and call is not None:
        options = call.meta.get("custom", {}).get("nested_region_config")
    patches: Mapping[str, Any] | None = getattr(options, "inductor_config_patches", None)
    return patches or {}


def branch_selector(node: Any) -> Any:
    """Return the selector of a `cond` or `switch`: a scalar tensor or a symbolic expression.

    Args:
        node: an `ir.Switch`, or an `ir.Conditional` before torch 2.14.
    """
    return node.selector if hasattr(node, "selector") else node.predicate


@functools.cache
def scratch_covers_grid() -> bool:
    """Whether Inductor's C++ wrapper allocates a Triton kernel's scratch memory for every CTA.

    torch 2.11 allocates that of a single CTA for the whole grid.
    """
    from torch._inductor.codegen.common import TritonScratchWorkspace, get_device_op_overrides

    workspace = TritonScratchWorkspace(size=1, generate_dtype_str=str)
    scratch = get_device_op_overrides("cuda").cpp_scratch(0, workspace)
    return scratch is not None and any("grid_0" in line for line in scratch[0])


@functools.cache
def options_are_per_process() -> bool:
    """Whether a patch of Inductor's options in one thread is seen by all others.

    So it is in torch 2.11. Later releases keep the patches of each thread apart.
    """
    from contextvars import ContextVar

    from torch._inductor import config

    entry = next(iter(config._config.values()))  # type: ignore[attr-defined]
    return not isinstance(entry.user_override, ContextVar)


def symbol_hints(shape_env: Any) -> Mapping[Any, Any]:
    """Return the size hints of backed symbols: their values in the example inputs.

    The attribute was renamed after torch 2.11; its old name now issues a warning.
    """
    name = "backed_var_to_val" if "backed_var_to_val" in vars(shape_env) else "var_to_val"
    hints: Mapping[Any, Any] = getattr(shape_env, name)
    return hints
