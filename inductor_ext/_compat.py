"""Which torch releases are supported, what differs between them, and state they keep private.

Differences are found by feature, not by version number, where that is possible.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from inductor_ext import exc, settings

if TYPE_CHECKING:
    from torch._inductor.choices import InductorChoices

__all__ = [
    "SUPPORTED",
    "branch_selector",
    "check_torch",
    "choices_handler",
    "compile_apart",
    "compiles_on_one_rank",
    "default_choices",
    "in_range",
    "minor",
    "peek_choices",
    "region_patches",
    "scratch_covers_grid",
    "serializable",
    "symbol_hints",
    "torch_version",
    "triton_copies_register_operand",
    "triton_version",
    "with_own_code",
]

SUPPORTED = ("2.11", "2.15")
"""The lowest and the highest supported torch release, both included."""

_NEWER = (
    " `inductor-ext doctor` checks what of torch is relied on, and docs/upgrading_torch.md says "
    "how to check the rest."
)
"""What is said about a torch that has come out later."""


@functools.cache
def torch_version() -> str:
    """The version of the installed torch distribution, without importing it."""
    return metadata.version("torch")


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Major and minor version of the installed Triton, without importing it; None for none."""
    for name in ("triton", "pytorch-triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return minor(metadata.version(name))
    return None


def triton_copies_register_operand() -> bool:
    """Whether Triton keeps the first operand of a wgmma that it reads from registers in shared
    memory besides, while the K of a tile is multiplied in two slices.

    Triton 3.8 does for an operand that is computed in the loop: one slice is converted through
    scratch memory, and the other one is loaded from an allocation of its own. 3.6 and 3.7 take both
    from one conversion. There is no feature to ask for.
    """
    version = triton_version()
    return version is not None and version >= (3, 8)


def minor(version: str) -> tuple[int, int]:
    """Major and minor number of a version."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def in_range(version: str) -> bool:
    """Whether a torch version lies within `SUPPORTED`."""
    lowest, highest = map(minor, SUPPORTED)
    return lowest <= minor(version) <= highest


def check_torch(*, override: bool) -> None:
    """Refuse a torch outside the supported range.

    Raises:
        exc.UnsupportedTorchError: unless `override` is set.
    """
    version = torch_version()
    if not override and not in_range(version):
        raise exc.UnsupportedTorchError(
            found=version,
            lowest=SUPPORTED[0],
            highest=SUPPORTED[1],
            variable=settings.environment_variable("allow_unsupported_torch"),
            check=_NEWER if minor(version) > minor(SUPPORTED[1]) else "",
        )


def compile_apart(target: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` that counts for no other's recompile limit, nor others for its own.

    Dynamo keeps what it has compiled by code object, and all `nn.Sequential` share one: with a
    backend of its own, each call would bring all others nearer to the limit, beyond which they run
    in eager mode.

    Args:
        target: a function or module.
        options: the arguments of torch.compile.
    """
    import torch

    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
        return torch.compile(target, **options)

    # torch 2.11: what is called is compiled as part of this. Only behind a graph break it is
    # compiled by its own code object, and counts there.
    return torch.compile(with_own_code(target), **options)


def compiles_on_one_rank() -> bool:
    """Whether generated Python is for the current device of any rank, and so without an index.

    `torch.compiler.config.compile_on_one_rank` does that from torch 2.14 on. Before, an option of
    that name concerned only collectives.
    """
    from torch.fx.experimental import proxy_tensor

    enabled: Callable[[], bool] | None = getattr(proxy_tensor, "_coor_enabled", None)
    return enabled is not None and bool(enabled())


def with_own_code(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a code object that no other has, and that does nothing but call `target`."""

    def program(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return types.FunctionType(
        program.__code__.replace(), program.__globals__, closure=program.__closure__
    )


def peek_choices() -> InductorChoices | None:
    """This thread's InductorChoices handler, or None when none has been made yet.

    `V.choices` cannot be asked: reading it makes the default handler, which then stays.
    """
    from torch._inductor import virtualized

    handler: InductorChoices | None = getattr(
        virtualized.threadlocal, virtualized._choices._key, None
    )
    return handler


def default_choices() -> InductorChoices:
    """A new handler as Inductor makes it in a thread that has none.

    From torch 2.15 on the handler includes what `register_inductor_choices` has registered.
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
    """Make `handler` this thread's InductorChoices, and leave no trace afterwards.

    `V.set_choices_handler` alone leaves a trace: to know what to restore it makes the default
    handler, which would then ignore a later change of `config.inductor_choices_class`.
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


def serializable(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compile(...).aot_compile` needs a backend's result to be.

    torch 2.11 makes that of stock Inductor's result alone; later ones of any result that, as ours,
    has a `serialize`. Dynamo sets `force_autograd_cache` only while it compiles for that purpose.
    """
    import torch._functorch.config
    from torch._dynamo import aot_compile_types

    if minor(torch_version()) > (2, 11) or not torch._functorch.config.force_autograd_cache:
        return compiled
    if getattr(compiled, "serialize", None) is None:
        return compiled
    wrapped: Callable[..., Any] = aot_compile_types.BundledAOTAutogradSerializableCallable(compiled)
    return wrapped


def region_patches(module: Any, call: Any = None) -> Mapping[str, Any]:
    """The Inductor options of a `nested_compile_region`; empty where the caller's options hold.

    From torch 2.14 on a region has options of its own (`NestedCompileRegionOptions.
    inductor_config_patches`). Inductor applies them around each of its passes over the region's
    graph, its lowering and its code generation.

    Args:
        module: the region's graph module.
        call: the node that calls it. Its metadata survives transforms that make a new module.
    """
    options = getattr(module, "meta", {}).get("nested_region_config")
    if options is None and call is not None:
        options = call.meta.get("custom", {}).get("nested_region_config")
    patches: Mapping[str, Any] | None = getattr(options, "inductor_config_patches", None)
    return patches or {}


def branch_selector(node: Any) -> Any:
    """What selects the branch of a `cond` or `switch`: a scalar tensor or a symbolic expression.

    Args:
        node: an `ir.Switch`, or an `ir.Conditional` before torch 2.14.
    """
    return node.selector if hasattr(node, "selector") else node.predicate


@functools.cache
def scratch_covers_grid() -> bool:
    """Whether Inductor's C++ gives each CTA of a Triton kernel the scratch that it needs.

    That of torch 2.11 gives all of them the memory of one.
    """
    from torch._inductor.codegen.common import TritonScratchWorkspace, get_device_op_overrides

    workspace = TritonScratchWorkspace(size=1, generate_dtype_str=str)
    scratch = get_device_op_overrides("cuda").cpp_scratch(0, workspace)
    return scratch is not None and any("grid_0" in line for line in scratch[0])


def symbol_hints(shape_env: Any) -> Mapping[Any, Any]:
    """The sizes that backed symbols had in the example inputs.

    The attribute was renamed after torch 2.11, and its old name warns since.
    """
    name = "backed_var_to_val" if "backed_var_to_val" in vars(shape_env) else "var_to_val"
    hints: Mapping[Any, Any] = getattr(shape_env, name)
    return hints
