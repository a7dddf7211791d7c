"""What the user requires of numerical results, as torch's and Inductor's flags say it.

Predicates over the flags that upstream has for numerics. They are read when they are asked, in the
thread that compiles, where Inductor's config patches hold:

- `config.emulate_precision_casts` (torch 2.11 on): a low-precision op rounds its result, as in
  eager mode, also where it is fused with others.
- `config.eager_numerics.use_pytorch_libdevice` (2.12 on): math functions are CUDA's.
- `config.batch_invariant` (2.13 on): a row's result has the same bits whatever M is. Implies
  `config.deterministic`.
- `config.deterministic`, which `torch.use_deterministic_algorithms` sets as well: a compiled graph
  gives the same bits in every run.
- `config.numerics` (2.15 on): "default", "strict_pointwise", "strict_reduction" or "strict".
  "strict_pointwise" implies `emulate_precision_casts`; "strict_reduction" fixes the order of sums;
  "strict" is both. A value that is not known here counts as "strict".
- flags of `torch.backends.cuda.matmul`, by which cuBLAS's kernels are restricted.

A flag that the installed torch does not have has its default. Needs torch; Inductor is imported
when a predicate is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

__all__ = [
    "Determinism",
    "determinism",
    "gemm_obstacle",
    "has_exact_pointwise",
    "has_ordered_zeros",
    "has_strict_reductions",
    "is_batch_invariant",
    "is_deterministic",
    "matmul_flags",
    "uses_cuda_math",
    "with_determinism",
    "with_matmul_flags",
]

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
    """`config.numerics`; "default" for a torch without it."""
    value = getattr(_config(), "numerics", None)
    if value is None:
        return "default"
    name = str(getattr(value, "value", value))
    return name if name in _MODES else "strict"


def has_exact_pointwise() -> bool:
    """Whether pointwise ops round as in eager mode, so that no two of them may be computed in
    float32 in a kernel of ours.
    """
    return bool(_config().emulate_precision_casts) or _mode() in _EXACT_POINTWISE


def uses_cuda_math() -> bool:
    """Whether math functions have the bits of CUDA's library, so that no approximation of ours may
    replace them.

    Upstream loads CUDA's libdevice also for `emulate_precision_casts`
    (`runtime.compile_tasks._set_triton_libdevice_path`).
    """
    named = getattr(_config().eager_numerics, "use_pytorch_libdevice", False)
    return bool(named) or has_exact_pointwise() or has_strict_reductions()


def is_batch_invariant() -> bool:
    """Whether a row's result may not depend on the number of rows, within a kernel and between
    compiles for different sizes.
    """
    return bool(getattr(_config(), "batch_invariant", False))


def is_deterministic() -> bool:
    """Whether every run must give the same bits."""
    import torch

    asked = torch.are_deterministic_algorithms_enabled() or bool(_config().deterministic)
    return asked or is_batch_invariant()


def has_strict_reductions(features: Any = None) -> bool:
    """Whether sums are computed in upstream's order.

    Args:
        features: Inductor's `SIMDKernelFeatures` of a reduction, if the question is about one.
            Their `strict_reduction_rblock` (2.14: `strict_sum_rblock`) is the block along the row
            that the reduction requires, or None.
    """
    if _mode() in _STRICT_REDUCTIONS:
        return True
    names = ("strict_reduction_rblock", "strict_sum_rblock")
    blocks = (getattr(features, name, None) for name in names)
    return any((block() if callable(block) else block) is not None for block in blocks)


def has_ordered_zeros() -> bool:
    """Whether a maximum of -0.0 and 0.0 must be 0.0 (`config.strict_signed_zero`, 2.14 on)."""
    return bool(getattr(_config(), "strict_signed_zero", False))


def gemm_obstacle() -> str | None:
    """Why no GEMM kernel of ours may be used in this compile, in words; None if they may.

    Which of them is chosen depends on M, and so does the order in which it adds up K. Nor is that
    order the one of Inductor (default).
    """
    if is_batch_invariant():
        return "config.batch_invariant is set, and the extension's kernels are chosen by M"
    if has_strict_reductions():
        return f"config.numerics is {_mode()!r}, and the extension's kernels have their own order"
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
"""By the dtype of the operands, the flags that change cuBLAS's kernels, with their defaults."""

_SPLIT_K = "_split_k"
"""Ends the name of the flag that is the second value of another one."""


def matmul_flags(dtype: str | None = None) -> str | None:
    """The flags of `torch.backends.cuda.matmul` that are not at their defaults, as text.

    `fp32_precision` is not among them: it is `GemmProblem.tf32`.

    Args:
        dtype: of a matmul's operands, for the flags that matter to it; None for all.

    Returns:
        Such as "allow_fp16_accumulation"; with a minus in front of what is not allowed. None where
        all are at their defaults.
    """
    import torch

    found = []
    for owner, flags in _MATMUL_FLAGS.items():
        for name, default in flags.items():
            value = _flag(torch.backends.cuda.matmul, name, default)
            if dtype in (None, owner) and value != default:
                found.append(name if value else f"-{name}")
    return ",".join(found) or None


def _flag(matmul: Any, name: str, default: bool) -> bool:
    """A flag; its default in a torch that does not have it."""
    try:
        return bool(getattr(matmul, name))
    except AttributeError:
        return default


@contextlib.contextmanager
def with_matmul_flags(flags: str | None, dtype: str | None = None) -> Iterator[None]:
    """Inside, the flags of `torch.backends.cuda.matmul` for a dtype are those of a text.

    Args:
        flags: as `matmul_flags` returns it. A flag that it does not name has its default.
        dtype: as of `matmul_flags`; the flags of other dtypes stay as they are.
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
    named = {each.lstrip("-"): not each.startswith("-") for each in (flags or "").split(",")}
    for owner, defaults in _MATMUL_FLAGS.items():
        if dtype not in (None, owner):
            continue
        values = {name: named.get(name, default) for name, default in defaults.items()}
        for name, value in values.items():
            if name.endswith(_SPLIT_K):
                continue
            split_k = values.get(f"{name}{_SPLIT_K}", True)
            # Both values are set by one flag; a torch without the second one takes a bool alone.
            setattr(matmul, name, value if split_k else (value, split_k))


# --- torch.use_deterministic_algorithms ---------------------------------------------------------


def determinism() -> Determinism:
    """What `torch.use_deterministic_algorithms` has set in this process."""
    import torch
    import torch.utils.deterministic

    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
    )


@contextlib.contextmanager
def with_determinism(wanted: Determinism) -> Iterator[None]:
    """Inside, torch is in the deterministic mode that `determinism` has returned elsewhere.

    Inductor's `config.deterministic` stays as it is.
    """
    before = determinism()
    _set_determinism(wanted)
    try:
        yield
    finally:
        _set_determinism(before)


def _set_determinism(wanted: Determinism) -> None:
    import torch
    import torch.utils.deterministic

    enabled, warn_only, fill = wanted
    config = _config()
    before = config.deterministic
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    # The function sets it as well.
    config.deterministic = before
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
