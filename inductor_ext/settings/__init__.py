"""The settings of inductor_ext: type, default, environment variable and meaning of each.

`Settings` is the single source. The `inductor_ext.config` module, the options accepted by
`torch.compile(..., options=...)`, the settings part of the cache key, and the table in
docs/user/settings.md are derived from it. To add a setting, add a field here.

This module imports neither torch nor Inductor. A value of the wrong type, from an environment
variable or from code, raises an error that names it (see `exc`); it is never ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from inductor_ext import exc
from inductor_ext.settings.type_checks import describe_values, has_type, suggest_name
from inductor_ext.settings.value_parsers import (
    check_not_negative,
    check_positive,
    parse_bytes,
    parse_rows,
)

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Settings",
    "check",
    "environment_variable",
    "from_environment",
    "names",
    "parse_bytes",
    "parse_rows",
    "resolve",
    "types_of",
]

ENVIRONMENT_PREFIX = "INDUCTOR_EXT_"


def _setting(
    default: Any,
    meaning: str,
    *,
    in_cache_key: bool = True,
    parse: Callable[[Any], object] | None = None,
) -> Any:
    """Declare a setting.

    Args:
        default: the value if neither the environment nor code sets one.
        meaning: one paragraph for the docs.
        in_cache_key: False only for a setting that cannot change the compiled code. Default: True.
        parse: parses or validates a value of the right type. Raises ValueError, whose text
            describes the allowed values; it is reported as `exc.BadOptionError`. Default: None.
    """
    return dataclasses.field(
        default=default,
        metadata={"meaning": meaning, "in_cache_key": in_cache_key, "parse": parse},
    )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one compile. Frozen when the compile starts, and reused for its backward."""

    enabled: bool = _setting(
        True,
        "Master switch. False passes every compile to Inductor (default) unchanged: "
        '`backend="inductor_ext"` then behaves like `backend="inductor"`. Use it to find out '
        "whether the extension causes a problem.",
    )
    fallback_to_eager: bool = _setting(
        True,
        "What `torch.compile` does with a graph whose toolchain is missing (no C++ compiler for a "
        "CPU graph, no Triton for a GPU graph): True runs the graph in eager mode and warns once; "
        "False raises `MissingToolchainError`. AOT compilation always raises.",
    )
    fallback_to_inductor: bool = _setting(
        True,
        "What happens to a GPU graph if one of the extension's kernels does not compile: True "
        "compiles the graph again without them and warns once; False raises the compiler's error.",
    )
    allow_unsupported_torch: bool = _setting(
        False,
        "Allow torch versions outside the supported range instead of raising an error.",
    )
    fuse_attention: bool = _setting(
        True,
        "Whether operands of `scaled_dot_product_attention` for which torch has no fused kernel, "
        "but which the model does not need, are replaced: a constant mask is removed or becomes "
        "`is_causal`, and operands whose last dimension is not dense are copied. The scores are "
        "then not stored.",
    )
    decode_attention: bool = _setting(
        True,
        "Whether attention of a few queries per sequence to many keys on a GPU (decoding with a "
        "cache), with a mask or grouped queries, gets a kernel of the extension. It reads grouped "
        "keys and values where they are, which models otherwise repeat for each query head.",
    )
    gemm_templates: bool = _setting(
        True,
        "Whether GEMMs on a GPU may use the extension's kernels: with `max_autotune`, kernels "
        "that benchmark faster than Inductor's; otherwise, kernels that a stored tuning result "
        "already shows to be faster, and those of `gemm_predict`.",
    )
    gemm_predict: bool = _setting(
        True,
        "Whether, without `max_autotune`, GEMMs with a static M and without a stored tuning result "
        "use a kernel of the extension if it is known to be faster for all sizes of that kind: "
        "with few rows, fused gates, projections with one input, residuals, norms, dequantized "
        "weights, and some others, on Hopper GPUs. Nothing is measured.",
    )
    gemm_fuse_gated: bool = _setting(
        True,
        "Whether act(x @ w1) * (x @ w2), as in SwiGLU, may be fused into one kernel, with two "
        "weights or a packed gate-up weight, with or without biases.",
    )
    gemm_fuse_shared_input: bool = _setting(
        True,
        "Whether GEMMs with the same input (Q, K and V projections) may be fused into one kernel. "
        "Weights are not copied, except frozen ones (Inductor's `freezing`), which are "
        "concatenated once.",
    )
    gemm_fuse_norm: bool = _setting(
        True,
        "Whether an RMSNorm or LayerNorm may be fused into a GEMM kernel. Its result must be read "
        "only by GEMMs of that kernel.",
    )
    gemm_fuse_dequantize: bool = _setting(
        True,
        "Whether a GEMM kernel may read int8, float8 or 4-bit weights directly where the graph "
        "dequantizes them to float16 or bfloat16 for the GEMM.",
    )
    gemm_fuse_row_maxima: bool = _setting(
        True,
        "Whether a GEMM kernel may also compute the row amax (the largest absolute value of each "
        "output row), which is then used to scale the rows to float8 or int8.",
    )
    gemm_rows: str = _setting(
        "1, 16, 64, 256, 2048",
        "Comma-separated values of M at which a kernel is chosen for GEMMs with dynamic M; values "
        "that M cannot take are skipped. A choice applies to all M up to its value and above the "
        "previous one; the last choice also applies to larger M. With a single value, one kernel "
        "is used for all M. Has no effect with CUDA graphs, which are recorded separately for "
        "each size.",
        parse=parse_rows,
    )
    persistent_rows: bool = _setting(
        True,
        "Whether Triton reduction kernels that read a row more than once (norms, softmax) keep "
        "rows of up to 8192 elements in registers. Inductor (default) does so for up to 1024 "
        "elements and reads longer rows again.",
    )
    memory_arenas: Literal["auto", "always", "never"] = _setting(
        "auto",
        "Whether buffers are placed in arenas (one allocation for several buffers). auto: if the "
        "simulated peak is not above that of any other strategy and allocator calls are saved. "
        "always: place every buffer that can be placed, which is also what Inductor's "
        "`memory_planning=True` requests. never: allocate buffers individually, and reuse storage "
        "where that cannot raise the peak. Inductor's `memory_pool` controls which buffers may "
        "share an arena.",
    )
    memory_reorder: bool = _setting(
        True,
        "Try orders of independent kernels other than Inductor's. An order is used only if it "
        "lowers the peak.",
    )
    memory_replan: bool = _setting(
        True,
        "For dynamic shapes: if no single order of stacking buffers in an arena is good for all "
        "sizes, the generated Python code plans again at run time, once per tuple of sizes.",
    )
    memory_recompute: bool = _setting(
        True,
        "In training, compute elementwise results (GELU, gates, the scale and shift of norms) in "
        "the backward again instead of saving them for it, if that takes less than 1 % of the "
        "estimated time of the graph's matmuls. Inductor saves the ones that a matmul of the "
        "backward reads.",
    )
    memory_budget: float | str | None = _setting(
        None,
        'Bytes, or a string such as "8GiB", for the planned peak on each device. A graph that '
        "exceeds it computes large values in chunks, and a training graph also recomputes "
        "activations, until it fits. If it cannot fit, the compile fails with an error that lists "
        "the buffers live at the peak. With dynamic shapes each call is checked at its sizes.",
        parse=parse_bytes,
    )
    memory_debug: bool = _setting(
        False,
        "Detect planning bugs: overwrite freed ranges of an arena with a pattern, and check each "
        "view against the bounds of its arena. Slow.",
    )
    aot_isa: Literal["auto", "x86-64-v2", "x86-64-v3", "x86-64-v4"] = _setting(
        "auto",
        "CPU level that AOT packages are compiled for. auto: the highest level that this machine "
        "supports, tuned for its CPU. With a named level, machines with other CPUs build the same "
        "package. It records its requirements; loading it on a machine that does not meet them "
        "raises an error.",
    )
    aot_cross_torch: str | None = _setting(
        None,
        'Folder of torch for the processor architecture in `cpu_targets=["aarch64"]`: the folder '
        "`torch` of an unpacked wheel of the same release.",
        in_cache_key=False,
    )
    aot_weights_file: str | None = _setting(
        None,
        "Path of a file for the weights of AOT packages, which are then not stored in the "
        "package. Packages with the same weights may share one file. Pass it to "
        "`inductor_ext.load(..., weights=...)`. An existing file is replaced unless it contains "
        "exactly these weights.",
        in_cache_key=False,
    )
    aot_unit_size: int = _setting(
        1500,
        "Approximate number of statements of the generated C++ wrapper per translation unit. A "
        "larger wrapper is split into several units, which are compiled in parallel, each in "
        "bounded memory. 0 never splits, which takes several times as long.",
        parse=check_not_negative,
    )
    aot_debug_info: bool = _setting(
        False,
        "Compile AOT packages with line tables, in a separate file next to the shared library.",
    )
    aot_self_test: bool = _setting(
        False,
        "Store the example inputs of the exported program in AOT packages, with what eager mode "
        "computes for them. `inductor-ext verify --run` then compares on any machine. Such "
        "packages are not cached.",
    )
    artifact_cache: bool = _setting(
        True,
        "Cache the results of AOT compilation, and reuse them when the same program is compiled "
        "again with the same options, weights, tools and machine.",
        in_cache_key=False,
    )
    artifact_cache_dir: str | None = _setting(
        None,
        "Folder of the cache of compiled models, for a single user. Default: a folder in "
        "Inductor's cache folder. If the folder cannot be used, models are compiled again, with "
        "one warning. CUTLASS kernels are cached in a subfolder.",
        in_cache_key=False,
    )
    artifact_cache_size: float | str = _setting(
        "4GiB",
        'Maximum size of the cache of compiled models, in bytes or as a string such as "512MiB". '
        "The same limit applies separately to the cache of CUTLASS kernels (about 2.5 MB each). "
        "The least recently used entries are removed first.",
        in_cache_key=False,
        parse=parse_bytes,
    )
    aot_check_inputs: bool = _setting(
        True,
        "Compile input checks into the model: number, dtype, sizes with their ranges and "
        "constraints, strides, device and layout. They cost some tens of nanoseconds per tensor. "
        "False omits them; invalid inputs then give wrong results or crash.",
    )
    tuning_cache: bool = _setting(
        True,
        "Store GEMM tuning results, and look them up, including imported ones, before "
        "benchmarking. False uses only the tables shipped with the package.",
    )
    tuning_cache_dir: str | None = _setting(
        None,
        "Folder of tuning results. Default: a folder in Inductor's cache folder. Processes may "
        "share it. If the folder cannot be used, GEMMs are tuned again, with one warning.",
        in_cache_key=False,
    )
    tuning_cache_entries: int = _setting(
        20_000,
        "Maximum number of GEMMs whose tuning results are kept in that folder; the same limit "
        "applies separately to imported results. An entry takes 2 to 4 KB. The oldest entries are "
        "removed first; those just added are kept.",
        in_cache_key=False,
        parse=check_positive,
    )
    tuning_wait: int = _setting(
        300,
        "Seconds to wait for other processes that are tuning the same GEMMs, counted from the "
        "last result received from them. After that the process tunes the remaining GEMMs itself.",
        in_cache_key=False,
        parse=check_not_negative,
    )
    cutlass_background: bool = _setting(
        False,
        "Build CUTLASS kernels in the background: a compile continues without the CUTLASS kernels "
        "that are not built yet, and they become candidates the next time the GEMM is compiled. "
        "False: the compile waits for the build.",
    )
    repro_dir: str | None = _setting(
        None,
        "Folder for programs that repeat a compile which failed by a bug; the error names them. "
        "They have the graph, but neither weights nor inputs. Default: a folder in Inductor's "
        "cache folder.",
        in_cache_key=False,
    )
    progress: bool = _setting(
        True,
        "Whether a compile that takes longer than 3 s shows on the terminal what it is doing. "
        "Nothing is shown if stderr is not a terminal.",
        in_cache_key=False,
    )
    event_log: str | None = _setting(
        None,
        "Path of a file to which every decision is appended as one JSON object per line. "
        "Processes may share the file.",
        in_cache_key=False,
    )

    tuning: Literal["compile", "background"] = _setting(
        "compile",
        "When GEMMs are tuned. `compile`: during a compile with `max_autotune`. `background`: "
        "with and without `max_autotune`, a process of low priority measures while the GPU is "
        "idle, and later compiles use the results; `inductor-ext tune status` shows it.",
    )
    tuning_budget: int = _setting(
        200,
        "Approximate GPU time, in milliseconds, for benchmarking the candidates of one GEMM under "
        "`max_autotune`. Clear cases take less.",
        in_cache_key=False,
        parse=check_positive,
    )

    def cache_key(self) -> str:
        """Return a hex digest over the settings that can change the compiled code."""
        items = [
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.metadata["in_cache_key"]
        ]
        return hashlib.sha256(repr(items).encode()).hexdigest()[:16]

    def non_default(self, *, only_of_code: bool = False) -> dict[str, Any]:
        """Return the settings with another value than the default, on request only of the code."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
            and (field.metadata["in_cache_key"] or not only_of_code)
        }


def names() -> list[str]:
    """Return the names of all settings in declaration order."""
    return [field.name for field in dataclasses.fields(Settings)]


@functools.cache
def types_of() -> Mapping[str, Any]:
    """Return the resolved type annotation of each setting by name."""
    return types.MappingProxyType(typing.get_type_hints(Settings))


def environment_variable(name: str) -> str:
    """Return the environment variable that sets `name`."""
    return ENVIRONMENT_PREFIX + name.upper()


def check(name: str, value: object) -> None:
    """Check that `name` is a setting and `value` is valid for it.

    Raises:
        exc.UnknownOptionError: there is no setting of that name.
        exc.BadOptionError: the value has the wrong type or is out of range.
    """
    annotations = types_of()
    if name not in annotations:
        nearest = suggest_name(name, annotations)
        raise exc.UnknownOptionError(name=name, value=value, nearest=nearest)
    allowed = None if has_type(value, annotations[name]) else describe_values(annotations[name])
    parse = _parsers()[name]
    if allowed is None and value is not None and parse is not None:
        try:
            parse(value)
        except ValueError as error:
            allowed = str(error)
    if allowed is not None:
        raise exc.BadOptionError(
            name=name,
            value=value,
            actual=type(value).__name__,
            allowed=allowed,
            default=getattr(Settings(), name),
        )


@functools.cache
def _parsers() -> dict[str, Callable[[Any], object] | None]:
    return {field.name: field.metadata["parse"] for field in dataclasses.fields(Settings)}


def resolve(current: Mapping[str, object], overrides: Mapping[str, object]) -> Settings:
    """Return frozen settings: the `current` values of all settings, updated by `overrides`.

    Raises:
        exc.UnknownOptionError, exc.BadOptionError: see `check`.
    """
    values = {**current, **overrides}
    for name, value in values.items():
        check(name, value)
    return Settings(**values)  # type: ignore[arg-type]


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_BOOLEANS = "1 (or true, yes, on) or 0 (or false, no, off)"


def _parse(text: str, annotation: Any) -> object:
    """Convert the text of an environment variable; raise ValueError if it does not match."""
    if typing.get_origin(annotation) is Literal:
        if text not in typing.get_args(annotation):
            raise ValueError(text)
        return text
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        args = typing.get_args(annotation)
        if type(None) in args and text == "":
            return None
        # If str is one of several types, keep the text: the conversion loses nothing.
        kinds = [arg for arg in args if arg is not type(None)]
        annotation = str if str in kinds else kinds[0]
    if annotation is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(text)
    return annotation(text)


def from_environment(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the settings that `INDUCTOR_EXT_*` environment variables set, by setting name.

    Args:
        environment: the environment variables. Default: None, `os.environ`.

    Raises:
        exc.BadEnvironmentError: the text of a variable cannot be converted to the setting's type.
        exc.UnknownVariableError: a variable with the prefix names no setting. A subclass of
            `exc.BadEnvironmentError`.
    """
    environment = os.environ if environment is None else environment
    annotations = types_of()
    names_by_variable = {environment_variable(name): name for name in annotations}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = names_by_variable.get(variable)
        if name is None:
            # Compare without the common prefix, which would make any two names look similar.
            suffix = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            suggestion = suggest_name(suffix, annotations, display=environment_variable)
            raise exc.UnknownVariableError(variable=variable, value=text, nearest=suggestion)
        allowed = _BOOLEANS if annotations[name] is bool else describe_values(annotations[name])
        try:
            values[name] = _parse(text, annotations[name])
            check(name, values[name])
        except (ValueError, exc.BadOptionError) as error:
            if isinstance(error, exc.BadOptionError):
                allowed = error.fields["allowed"]
            raise exc.BadEnvironmentError(variable=variable, value=text, allowed=allowed) from None
    return values
