"""The settings of inductor_ext: each with its type, default, environment variable and meaning.

`Settings` is the one table. From it come the `inductor_ext.config` module that users patch, the
options accepted by `torch.compile(..., options=...)`, the part of the cache key that covers
settings, and the table in docs/settings.md. Adding a setting is adding a field here.

This module is pure: it imports neither torch nor Inductor. A value of the wrong type, in an
environment variable or in code, is an error that names it (see `exc`); it is never ignored.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import hashlib
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from inductor_ext import exc

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Settings",
    "accepts",
    "check",
    "describe_type",
    "environment_variable",
    "from_environment",
    "markdown_page",
    "names",
    "nearest",
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
    reads: Callable[[Any], object] | None = None,
) -> Any:
    """Declare a setting.

    Args:
        default: the value when neither environment nor code sets one.
        meaning: one paragraph for the docs.
        in_cache_key: False only for a setting that cannot change what is compiled.
        reads: what makes use of a value that fits the type; its ValueError, whose text says what is
            allowed, is reported as a bad option.
    """
    return dataclasses.field(
        default=default,
        metadata={"meaning": meaning, "in_cache_key": in_cache_key, "reads": reads},
    )


_UNITS = {unit: 1024**power for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))}


def parse_bytes(value: int | str) -> int:
    """A number of bytes, given as an integer or as text with a unit: 8GiB, "1.5 MiB", "4096".

    Raises:
        ValueError: neither; its text says what is allowed.
    """
    allowed = f"a positive number of bytes, or one with a unit of {', '.join(_UNITS)}"
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?\s*", str(value))
    if match is None or (match[2] or "B") not in _UNITS:
        raise ValueError(allowed)
    size = float(match[1]) * _UNITS[match[2] or "B"]
    if not 1 <= size < math.inf:
        raise ValueError(allowed)
    return int(size)


def parse_rows(value: str) -> tuple[int, ...]:
    """Numbers of rows, ascending, given as text with commas between them.

    Raises:
        ValueError: anything else; its text says what is allowed.
    """
    allowed = "positive integers with commas between them, such as 1, 16, 2048"
    numbers = [each.strip() for each in value.split(",")]
    if not all(each.isdecimal() and int(each) for each in numbers):
        raise ValueError(allowed)
    return tuple(sorted({int(each) for each in numbers}))


def _positive(value: int) -> int:
    if value < 1:
        raise ValueError("an integer from 1")
    return value


def _count(value: int) -> int:
    if value < 0:
        raise ValueError("an integer from 0")
    return value


@dataclasses.dataclass(frozen=True)
class Settings:
    """The values that hold for one compile, frozen when it begins and kept for its backward."""

    enabled: bool = _setting(
        True,
        "Master switch. False makes every entry point hand its work to stock Inductor untouched: "
        'with it, `backend="inductor_ext"` is `backend="inductor"`. The way to find out whether '
        "a problem is ours.",
    )
    fallback_to_eager: bool = _setting(
        True,
        "What `torch.compile` does with a graph whose toolchain is missing (no C++ compiler for a "
        "CPU graph, no Triton for a GPU graph): True runs the graph in eager mode and says so "
        "once, False raises `MissingToolchainError`. AOT compilation always raises.",
    )
    allow_unsupported_torch: bool = _setting(
        False,
        "Try a torch release outside the supported range instead of refusing it.",
    )
    gemm_templates: bool = _setting(
        True,
        "Whether GEMMs on a GPU may become kernels of ours: with `max_autotune` those that measure "
        "faster than stock's, otherwise those of which that is known already.",
    )
    gemm_fuse_gated: bool = _setting(
        True,
        "Whether act(x @ w1) * (x @ w2), as in SwiGLU, may become one kernel, with two weights or "
        "with the halves of one, and with biases or without.",
    )
    gemm_fuse_shared_input: bool = _setting(
        True,
        "Whether GEMMs of one input (Q, K and V) may become one kernel. No weight is copied, but "
        "frozen ones (Inductor's `freezing`), which are joined once.",
    )
    gemm_fuse_norm: bool = _setting(
        True,
        "Whether an RMSNorm or LayerNorm whose result only GEMMs of one kernel read may be "
        "computed within it.",
    )
    gemm_fuse_dequantize: bool = _setting(
        True,
        "Whether a GEMM may read int8, float8 or 4-bit weights itself, where the graph dequantises "
        "them to float16 or bfloat16 for it.",
    )
    gemm_fuse_row_maxima: bool = _setting(
        True,
        "Whether the kernel of a GEMM may give the largest absolute elements of its rows as well, "
        "by which rows are then scaled to float8 or int8.",
    )
    gemm_rows: str = _setting(
        "1, 16, 64, 256, 2048",
        "For GEMMs with a number of rows that is known only at run time: the numbers at which is "
        "decided which kernel is best, as far as they are possible. Each decision holds from the "
        "number before up to its own, and the last one beyond. With one number there is one kernel "
        "for all. Without effect where CUDA graphs are recorded, each for its own size.",
        reads=parse_rows,
    )
    persistent_rows: bool = _setting(
        True,
        "Whether Triton kernels that need a row more than once, as norms and softmax do, hold rows "
        "of up to 8192 elements in registers. Inductor's hold up to 1024, and read longer ones "
        "again.",
    )
    memory_arenas: Literal["auto", "always", "never"] = _setting(
        "auto",
        "Whether buffers are placed in arenas, one allocation each. auto: where the simulated peak "
        "is not above that of any other strategy and allocator calls are saved; always: every "
        "buffer that can be placed is, which is also what Inductor's `memory_planning=True` asks "
        "for; never: buffers are allocated one by one, and storage is reused where that cannot "
        "raise the peak. Inductor's `memory_pool` says what may share an arena.",
    )
    memory_reorder: bool = _setting(
        True,
        "Try orders of independent kernels beyond stock's, and keep one only if the peak falls.",
    )
    memory_replan: bool = _setting(
        True,
        "For dynamic shapes: where one stacking order cannot serve all sizes well, let the "
        "generated Python plan anew at run time, once for each tuple of sizes.",
    )
    memory_budget: int | str | None = _setting(
        None,
        'Bytes, or text such as "8GiB". A compile whose planned peak on a device is above it '
        "fails with an error that names the buffers alive at the peak.",
        reads=parse_bytes,
    )
    memory_debug: bool = _setting(
        False,
        "Find planning bugs: freed ranges of an arena are overwritten with a pattern, and every "
        "view is checked against its arena's bounds. Slow.",
    )
    aot_isa: Literal["auto", "x86-64-v2", "x86-64-v3", "x86-64-v4"] = _setting(
        "auto",
        "The CPU that AOT artifacts are compiled for: auto is the highest level that this machine "
        "has. What an artifact needs is recorded in it, and a machine that lacks it is told so "
        "instead of running it.",
    )
    aot_weights_file: str | None = _setting(
        None,
        "Path of a file for the weights of AOT packages, which then are left out of the package; "
        "packages of the same weights may share one. `inductor_ext.load(..., weights=...)` takes "
        "it. The file is replaced unless it has these very weights.",
        in_cache_key=False,
    )
    aot_unit_size: int = _setting(
        1500,
        "Statements of an AOT artifact's host program that are compiled in one C++ unit, about. A "
        "program of more is compiled in several, at the same time and each in bounded memory. 0 "
        "compiles every program whole, as it was generated, which takes several times as long.",
        reads=_count,
    )
    aot_debug_info: bool = _setting(
        False,
        "Compile AOT artifacts with line tables, in a file of their own beside the shared object.",
    )
    artifact_cache: bool = _setting(
        True,
        "Keep what AOT compilation made, and take it from there when the same program is compiled "
        "again with the same options, weights, tools and machine.",
        in_cache_key=False,
    )
    artifact_cache_dir: str | None = _setting(
        None,
        "Folder of that cache, for one user's use; by default a folder in Inductor's cache folder. "
        "Where it cannot be used, artifacts are compiled anew, with one warning. CUTLASS kernels "
        "are kept in it, too, in a folder of their own.",
        in_cache_key=False,
    )
    artifact_cache_size: int | str = _setting(
        "4GiB",
        'Bytes, or text such as "512MiB", that the cache of artifacts holds at most, and likewise '
        "that of CUTLASS kernels, of some 2.5 MB each. Beyond it those used least recently are "
        "removed.",
        in_cache_key=False,
        reads=parse_bytes,
    )
    aot_check_inputs: bool = _setting(
        True,
        "Compile into an artifact the checks of its inputs: number, dtype, sizes and their ranges "
        "and constraints, strides, device and layout. They cost some tens of nanoseconds a tensor. "
        "False leaves them out; wrong inputs then give wrong numbers or crash.",
    )
    tuning_cache: bool = _setting(
        True,
        "Keep what tuning has measured of GEMMs, and look there before measuring; take what was "
        "imported, too. False leaves only what the package ships.",
    )
    tuning_cache_dir: str | None = _setting(
        None,
        "Folder of tuning results; by default a folder in Inductor's cache folder. Processes may "
        "share it. Where it cannot be used, GEMMs are tuned anew, with one warning.",
        in_cache_key=False,
    )
    tuning_cache_entries: int = _setting(
        20_000,
        "GEMMs of which that folder keeps measurements at most, and likewise for imported ones: 2 "
        "to 4 KB each. Beyond it the oldest go; what was added last stays.",
        in_cache_key=False,
        reads=_positive,
    )
    tuning_wait: int = _setting(
        300,
        "Seconds that a process waits for others that are tuning the same GEMMs, counted from the "
        "last result that it got from them. Then it tunes what is left itself.",
        in_cache_key=False,
        reads=_count,
    )
    cutlass_background: bool = _setting(
        False,
        "Build CUTLASS kernels in the background: a compile that wants some that are not there yet "
        "goes on with the other choices, and a GEMM is tuned with CUTLASS's when it is compiled "
        "again after that. False lets the compile wait.",
    )
    event_log: str | None = _setting(
        None,
        "Path of a file to which every decision is appended as one JSON object a line. Processes "
        "may share the file.",
        in_cache_key=False,
    )

    tuning_budget: int = _setting(
        200,
        "Milliseconds of GPU time, about, that measuring the candidates of one GEMM may take under "
        "`max_autotune`. Clear cases take less.",
        in_cache_key=False,
        reads=_positive,
    )

    def cache_key(self) -> str:
        """Hex digest over the settings that can change what is compiled."""
        items = [
            (field.name, getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.metadata["in_cache_key"]
        ]
        return hashlib.sha256(repr(items).encode()).hexdigest()[:16]

    def non_default(self) -> dict[str, Any]:
        """The settings whose value is not the declared default."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def names() -> list[str]:
    """The names of all settings, in the order of their declaration."""
    return [field.name for field in dataclasses.fields(Settings)]


@functools.cache
def types_of() -> Mapping[str, Any]:
    """Each setting's name and its type annotation, resolved."""
    return types.MappingProxyType(typing.get_type_hints(Settings))


def environment_variable(name: str) -> str:
    """The environment variable that sets `name`."""
    return ENVIRONMENT_PREFIX + name.upper()


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known name most like `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""


def accepts(value: object, annotation: Any) -> bool:
    """Whether `value` fits a type annotation.

    Understands classes, None, unions, Literal and the element types of list, tuple, set and dict;
    what it cannot judge (a protocol, a type variable, a forward reference) it accepts. An int
    fits float; a bool fits int, as it does in Python, and only a bool fits bool.
    """
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, (str, typing.TypeVar)):
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is float:
        return isinstance(value, (float, int)) and not isinstance(value, bool)
    if origin in (typing.Union, types.UnionType):
        return any(accepts(value, arg) for arg in args)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is typing.Annotated:
        return accepts(value, args[0])
    if origin is collections.abc.Callable or annotation is collections.abc.Callable:
        return callable(value)
    if origin in (list, set, frozenset, collections.abc.Sequence):
        return isinstance(value, origin) and all(accepts(item, args[0]) for item in value)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return isinstance(value, tuple) and all(accepts(item, args[0]) for item in value)
        return (
            isinstance(value, tuple) and len(value) == len(args) and all(map(accepts, value, args))
        )
    if origin is dict:
        return isinstance(value, dict) and all(
            accepts(key, args[0]) and accepts(item, args[1]) for key, item in value.items()
        )
    if isinstance(origin, type):
        return isinstance(value, origin)
    if isinstance(annotation, type):
        try:
            return isinstance(value, annotation)
        except TypeError:  # a protocol that cannot be checked at run time
            return True
    return True


def describe_type(annotation: Any) -> str:
    """A type annotation as a user would write it."""
    if annotation is type(None):
        return "None"
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def check(name: str, value: object) -> None:
    """Raise unless `name` is a setting and `value` fits it.

    Raises:
        exc.UnknownOptionError: no setting has that name.
        exc.BadOptionError: the value has the wrong type.
    """
    annotations = types_of()
    if name not in annotations:
        raise exc.UnknownOptionError(
            name=name, value=value, nearest=nearest(name, annotations), count=len(annotations)
        )
    allowed = None if accepts(value, annotations[name]) else describe_type(annotations[name])
    reads = _readers()[name]
    if allowed is None and value is not None and reads is not None:
        try:
            reads(value)
        except ValueError as error:
            allowed = str(error)
    if allowed is not None:
        raise exc.BadOptionError(
            name=name,
            value=value,
            found=type(value).__name__,
            allowed=allowed,
            default=getattr(Settings(), name),
        )


@functools.cache
def _readers() -> dict[str, Callable[[Any], object] | None]:
    return {field.name: field.metadata["reads"] for field in dataclasses.fields(Settings)}


def resolve(current: Mapping[str, object], overrides: Mapping[str, object]) -> Settings:
    """Freeze the `current` values of all settings, with `overrides` on top.

    Raises:
        exc.UnknownOptionError, exc.BadOptionError: see `check`.
    """
    values = {**current, **overrides}
    for name, value in values.items():
        check(name, value)
    return Settings(**values)  # type: ignore[arg-type]


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _parse(text: str, annotation: Any) -> object:
    """Read the text of an environment variable; ValueError when it does not fit."""
    if typing.get_origin(annotation) is Literal:
        if text not in typing.get_args(annotation):
            raise ValueError(text)
        return text
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        args = typing.get_args(annotation)
        if type(None) in args and text == "":
            return None
        # Of several types, text is itself the one that loses nothing.
        kinds = [arg for arg in args if arg is not type(None)]
        annotation = str if str in kinds else kinds[0]
    if annotation is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(text)
    return annotation(text)


def _nearest_variable(name: str) -> str:
    """As `nearest`, of the variables of all settings, told by what follows their prefix."""
    match = difflib.get_close_matches(name, types_of(), n=1, cutoff=0.6)
    return f" Did you mean {environment_variable(match[0])!r}?" if match else ""


def from_environment(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings that `INDUCTOR_EXT_*` variables give, by setting name.

    Raises:
        exc.BadEnvironmentError: a variable's text cannot be read as its setting's type; as
            `exc.UnknownVariableError`, a variable with our prefix names no setting.
    """
    environment = os.environ if environment is None else environment
    annotations = types_of()
    known = {environment_variable(name): name for name in annotations}
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = known.get(variable)
        if name is None:
            # The prefix, which all have, would make any two look alike.
            wanted = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            raise exc.UnknownVariableError(
                variable=variable, value=text, nearest=_nearest_variable(wanted)
            )
        allowed = describe_type(annotations[name])
        try:
            values[name] = _parse(text, annotations[name])
            check(name, values[name])
        except (ValueError, exc.BadOptionError) as error:
            if isinstance(error, exc.BadOptionError):
                allowed = error.fields["allowed"]
            raise exc.BadEnvironmentError(variable=variable, value=text, allowed=allowed) from None
    return values


_PAGE = """# Settings

Every setting can be given in five ways; a later one wins: the environment variable, read when the
process first uses inductor_ext; `inductor_ext.config.<name> = value`; `with
inductor_ext.config.patch(<name>=value):`; `inductor_ext.activate(<name>=value)` and
`inductor_ext.install(<name>=value)`; and, for one model, `torch.compile(model,
backend="inductor_ext", options={"<name>": value})` or `inductor_ext.aoti_compile_and_package(...,
inductor_configs={"<name>": value})`, where Inductor's own options may stand beside ours.

`python -m inductor_ext.settings > docs/settings.md` writes this page.

"""


def markdown_page() -> str:
    """The text of docs/settings.md."""
    lines = [
        "| setting | type | default | environment variable | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    annotations = types_of()
    for field in dataclasses.fields(Settings):
        kind = describe_type(annotations[field.name]).replace("|", "\\|")
        variable = environment_variable(field.name)
        meaning = field.metadata["meaning"]
        lines.append(
            f"| `{field.name}` | `{kind}` | `{field.default!r}` | `{variable}` | {meaning} |"
        )
    return _PAGE + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown_page(), end="")
