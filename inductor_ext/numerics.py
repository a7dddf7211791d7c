"""Predicates over torch's and Inductor's numerics flags.

They read the flags at the time of the call, in the compiling thread, where Inductor's config
patches are active:

- `config.emulate_precision_casts` (torch >= 2.11): a low-precision op rounds its result as in eager
  mode, even if it is fused with other ops.
- `config.eager_numerics.use_pytorch_libdevice` (>= 2.12): math functions match CUDA's.
- `config.batch_invariant` (>= 2.13): a row's result is bitwise the same for every M. Implies
  `config.deterministic`.
- `config.deterministic`, also set by `torch.use_deterministic_algorithms`: a compiled graph is
  bitwise reproducible from run to run.
- `config.numerics` (>= 2.15): "default", "strict_pointwise", "strict_reduction" or "strict".
  "strict_pointwise" implies `emulate_precision_casts`; "strict_reduction" fixes the order of
  summation; "strict" is both. An unknown value counts as "strict".
- flags of `torch.backends.cuda.matmul`, which restrict cuBLAS's kernels.

A flag that the installed torch does not have counts as its default. Inductor is imported only when
a predicate is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

Determinism = tuple[bool, bool, bool]
"""`use_deterministic_algorithms`, its `warn_only`, and `fill_uninitialized_memory`."""

_EXACT_POINTWISE = frozenset({"strict", "strict_pointwise"})
_STRICT_REDUCTIONS = frozenset({"strict", "strict_reduction"})
_MODES = _EXACT_POINTWISE | _STRICT_REDUCTIONS | {"default"}


# --- Inductor's flags ---------------------------------------------------------------------------


def _config() -> Any:
    from torch._inductor import config

    return config


def _mode() -> str:
    """Return `config.numerics`; "default" if torch does not have it."""
    value = getattr(_config(), "numerics", None)
    if value is None:
        return "default"
    name = str(getattr(value, "value", value))
    return name if name in _MODES else "strict"


def has_exact_pointwise() -> bool:
    """Whether every pointwise op must round its result as in eager mode.

    If so, extension kernels must not fuse two of them without rounding in between.
    """
    return bool(_config().emulate_precision_casts) or _mode() in _EXACT_POINTWISE


def uses_cuda_math() -> bool:
    """Whether math functions must match CUDA's library bitwise.

    If so, the extension's approximations must not be used. Inductor loads CUDA's libdevice for
    `emulate_precision_casts` as well (`runtime.compile_tasks._set_triton_libdevice_path`).
    """
    libdevice = getattr(_config().eager_numerics, "use_pytorch_libdevice", False)
    return bool(libdevice) or has_exact_pointwise() or has_strict_reductions()


def is_batch_invariant() -> bool:
    """Whether a row's result must not depend on the number of rows.

    This holds within a kernel and between compiles for different sizes.
    """
    return bool(getattr(_config(), "batch_invariant", False))


def is_deterministic() -> bool:
    """Whether results must be bitwise reproducible from run to run."""
    import torch

    requested = torch.are_deterministic_algorithms_enabled() or bool(_config().deterministic)
    return requested or is_batch_invariant()


def has_strict_reductions(features: Any = None) -> bool:
    """Whether reductions must be computed in upstream's order.

    Args:
        features: Inductor's `SIMDKernelFeatures` of one reduction; None for the compile as a whole.
            Its `strict_reduction_rblock` (torch 2.14: `strict_sum_rblock`) is the RBLOCK that the
            reduction requires, or None.
    """
    if _mode() in _STRICT_REDUCTIONS:
        return True
    names = ("strict_reduction_rblock", "strict_sum_rblock")
    blocks = (getattr(features, name, None) for name in names)
    return any((block() if callable(block) else block) is not None for block in blocks)


def has_ordered_zeros() -> bool:
    """Whether max(-0.0, 0.0) must be 0.0 (`config.strict_signed_zero`, torch >= 2.14)."""
    return bool(getattr(_config(), "strict_signed_zero", False))


def gemm_obstacle() -> str | None:
    """Return the reason why extension GEMM kernels must not be used in this compile, or None.

    The selected kernel depends on M, and so does its order of summation along K, which also differs
    from that of Inductor (default).
    """
    if is_batch_invariant():
        return "config.batch_invariant is set, and the extension's kernels are chosen by M"
    if has_strict_reductions():
        return f"config.numerics is {_mode()!r}, and the extension's kernels use a different order"
    return None


# --- flags of torch.backends.cuda.matmul --------------------------------------------------------

_MATMUL_FLAGS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "float16": {
            "allow_fp16_accumulation": False,
            "allow_fp16_reduced_precision_reduction": True,
            "allow_fp16_reduced_precision_reduction_split_k": True,
        },
        "bfloat16": {
            "allow_bf16_reduced_precision_reduction": True,
            "allow_bf16_reduced_precision_reduction_split_k": True,
        },
    }
)
"""The flags that affect cuBLAS's kernels, with their defaults, by operand dtype."""

_SPLIT_K = "_split_k"
"""Suffix of the name of a flag that is set as the second value of the flag without the suffix."""


def matmul_flags(dtype: str | None = None) -> str | None:
    """Return the flags of `torch.backends.cuda.matmul` that differ from their defaults, as text.

    `fp32_precision` is not included; see `GemmProblem.tf32`.

    Args:
        dtype: operand dtype of a matmul, for the flags that affect it; None for all flags.

    Returns:
        Comma-separated names, such as "allow_fp16_accumulation", with a leading minus for flags
        that are off. None if all flags have their defaults.
    """
    import torch

    names = []
    for owner, flags in _MATMUL_FLAGS.items():
        for name, default in flags.items():
            value = _flag(torch.backends.cuda.matmul, name, default)
            if dtype in (None, owner) and value != default:
                names.append(name if value else f"-{name}")
    return ",".join(names) or None


def _flag(matmul: Any, name: str, default: bool) -> bool:
    """Return a flag's value; its default if torch does not have it."""
    try:
        return bool(getattr(matmul, name))
    except AttributeError:
        return default


@contextlib.contextmanager
def with_matmul_flags(flags: str | None, dtype: str | None = None) -> Iterator[None]:
    """Set the flags of `torch.backends.cuda.matmul` for a dtype within a context.

    Args:
        flags: text as returned by `matmul_flags`. Flags that it does not name are set to their
            defaults.
        dtype: see `matmul_flags`; flags of other dtypes are unchanged.
    """
    before = matmul_flags(dtype)
    if before == flags:
        yield
        return
    _set_matmul_flags(flags, dtype)
    try:
        yield
    finally:
        _set_matmul_flags(before, dtype)


def _set_matmul_flags(flags: str | None, dtype: str | None) -> None:
    import torch

    matmul: Any = torch.backends.cuda.matmul
    enabled = {part.lstrip("-"): not part.startswith("-") for part in (flags or "").split(",")}
    for owner, defaults in _MATMUL_FLAGS.items():
        if dtype not in (None, owner):
            continue
        values = {name: enabled.get(name, default) for name, default in defaults.items()}
        for name, value in values.items():
            if name.endswith(_SPLIT_K):
                continue
            split_k = values.get(f"{name}{_SPLIT_K}", True)
            # One attribute sets both values; a torch without the second one only takes a bool.
            setattr(matmul, name, value if split_k else (value, split_k))


# --- torch.use_deterministic_algorithms ---------------------------------------------------------


def determinism() -> Determinism:
    """Return the current deterministic mode of this process."""
    import torch
    import torch.utils.deterministic

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
    )


@contextlib.contextmanager
def with_determinism(state: Determinism) -> Iterator[None]:
    """Set torch's deterministic mode within a context; `wanted` is a result of `determinism`.

    Inductor's `config.deterministic` is unchanged.
    """
    before = determinism()
    _set_determinism(state)
    try:
        yield
    finally:
        _set_determinism(before)


def _set_determinism(state: Determinism) -> None:
    import torch
    import torch.utils.deterministic

    enabled, warn_only, fill = state
    config = _config()
    before = config.deterministic
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    # `use_deterministic_algorithms` sets it as well.
    config.deterministic = before
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
