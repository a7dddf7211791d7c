"""The self test of a compiled model: example inputs in its package, and what eager mode computes.

`record` runs the exported program on its example inputs before it is compiled. `run` calls the
compiled model with the same inputs and compares, on the machine where it is deployed: as
`inductor-ext verify --run`. The setting `aot_self_test` turns recording on.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import manifest, zip_reader
from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import Size

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

_TOLERANCES = {
    "float64": 1e-7,
    "complex128": 1e-7,
    "float32": 1e-3,
    "complex64": 1e-3,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Accepted difference by dtype, relative to the largest expected magnitude in a tensor. Kernels
round in another order than eager mode; float32 also covers TF32. Integers must be equal."""

_LOW_PRECISION = 0.25
"""The same for floating-point dtypes of 8 bits and less."""

_LIMIT = 1 << 34
"""Maximum bytes of a recording."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A tensor or another value among the inputs or the results."""

    dtype: str | None = None
    """Such as "float32"; None for a value that is no tensor."""
    shape: tuple[Size, ...] = ()
    stride: tuple[Size, ...] = ()
    """In elements."""
    device: str = "cpu"
    """Device type."""
    offset: Size = 0
    """Where its elements begin in the recording, in bytes. Those between gaps are included."""
    bytes: Size = 0
    value: Any = None
    """The value if it is no tensor."""
    is_compared: bool = True
    """Whether it is the same in every call. Nothing else is recorded of a result that is random."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """The description of a recording, which the manifest has as JSON."""

    file: str
    """Entry with the elements of the tensors."""
    in_spec: str
    """Pytree structure of (args, kwargs), serialized by torch."""
    inputs: tuple[Leaf, ...]
    results: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a self test that succeeded."""

    compared: int
    """Number of results that were compared."""
    difference: float
    """Largest difference, relative to the largest expected magnitude in a tensor."""


def entry(model: str) -> str:
    """Return the entry in a package with the recording of a model."""
    return f"extra/inductor_ext/self_test/{model}.bin"


# --- recording ------------------------------------------------------------------------------------


def record(model: str, program: ExportedProgram) -> tuple[dict[str, Any], bytes]:
    """Run a program on its example inputs; return (description as JSON, content of the entry).

    The program, its buffers, the example inputs and torch's random numbers are as before.

    Args:
        model: name of the model in the package.
        program: the exported program.

    Raises:
        exc.UnrecordableSelfTestError: the program has no example inputs, an input or a result
            cannot be stored, or eager mode fails.
    """
    import torch
    from torch.utils import _pytree as pytree

    if program.example_inputs is None:
        _refuse(model, "the program has no example inputs")
    leaves, spec = pytree.tree_flatten(program.example_inputs)
    writer = _Writer(model)
    inputs = tuple(writer.add(leaf) for leaf in leaves)
    module = program.module()

    def call() -> list[Any]:
        args, kwargs = pytree.tree_unflatten([_copy(leaf) for leaf in leaves], spec)
        return pytree.tree_leaves(module(*args, **kwargs))

    devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda}
    calls = []
    with torch.random.fork_rng(devices), torch.no_grad():
        for _ in range(2):
            with _preserved_buffers(program):
                try:
                    calls.append([_copy(leaf) for leaf in call()])
                except Exception as error:
                    why = f"eager mode raised {type(error).__name__}: {error}"
                    _refuse(model, why.rstrip("."))
    results = tuple(
        writer.add(leaf) if _is_same(leaf, again) else Leaf(is_compared=False)
        for leaf, again in zip(*calls, strict=True)
    )
    recording = Recording(
        file=entry(model), in_spec=pytree.treespec_dumps(spec), inputs=inputs, results=results
    )
    return json_codec.encode(recording), bytes(writer.content)


def _refuse(model: str, why: str) -> NoReturn:
    raise exc.UnrecordableSelfTestError(name=model, why=why)


@contextlib.contextmanager
def _preserved_buffers(program: ExportedProgram) -> Iterator[None]:
    """Restore the buffers and constants that a call of the program changes."""
    import torch

    # The graph need not be functionalized: then its signature does not say what it overwrites.
    values = [*program.constants.values(), *program.state_dict.values()]
    tensors = [
        value
        for value in values
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
    ]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)


def _copy(leaf: Any) -> Any:
    """Return a copy of a tensor with the same strides; any other value itself."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach().resolve_conj().resolve_neg()
    return _span(leaf).clone().as_strided(leaf.shape, leaf.stride())


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements from the first to the last one of a tensor, gaps included, as a view."""
    if tensor.numel() == 0:
        return tensor.new_empty(0)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.as_strided((count,), (1,))


def _is_same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and _difference(one, other) == 0
    return bool(one == other)


class _Writer:
    """Collects the elements of tensors."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.content = bytearray()

    def add(self, leaf: Any) -> Leaf:
        import torch

        is_plain = leaf is None or isinstance(leaf, (bool, int, float, str))
        if is_plain and not (isinstance(leaf, float) and not math.isfinite(leaf)):
            return Leaf(value=leaf)
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            _refuse(self.model, f"a value of {type(leaf).__name__} cannot be stored")
        tensor = _copy(leaf)
        elements = _span(tensor).cpu()
        data = ctypes.string_at(elements.data_ptr(), elements.nbytes)
        offset = len(self.content)
        self.content += data
        if len(self.content) > _LIMIT:
            _refuse(self.model, f"its tensors have more than {_LIMIT >> 30} GiB")
        return Leaf(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stride=tensor.stride(),
            device=tensor.device.type,
            offset=offset,
            bytes=len(data),
        )


# --- running --------------------------------------------------------------------------------------


def run(path: str | os.PathLike[str], model_name: str = "model", **arguments: Any) -> Outcome:
    """Load a model, call it with the recorded inputs, and compare the results.

    Args:
        path: path of the package.
        model_name: name of the model. Default: "model".
        arguments: further arguments of `inductor_ext.load`.

    Raises:
        exc.NoSelfTestError: the package has no recording for this model.
        exc.SelfTestError: a result differs from the recorded one.
        exc.InductorExtError: the model cannot be loaded or called.
    """
    from torch.utils import _pytree as pytree

    from inductor_ext.cpp_wrapper.load.load import load
    from inductor_ext.cpp_wrapper.load.model import Model

    with zip_reader.open_package(path) as package:
        contents = manifest.read(package)
        described = contents[0].model(model_name, package.where) if contents else None
        if contents is None or described is None or described.self_test is None:
            raise exc.NoSelfTestError(path=package.where, name=model_name)
        recording = _decode(described.self_test, package.where)
        data = _read_entry(package, contents[0], recording.file)
    loaded = load(path, model_name, **arguments)
    assert isinstance(loaded, Model)
    device = loaded.device
    args, kwargs = _restore_inputs(recording, data, device, package.where)
    results = pytree.tree_leaves(loaded(*args, **kwargs))
    expected = [_restore(leaf, data, device, package.where) for leaf in recording.results]
    problem, difference = _compare_all(recording.results, results, expected)
    if problem is not None:
        raise exc.SelfTestError(path=package.where, name=model_name, why=problem)
    return Outcome(sum(leaf.is_compared for leaf in recording.results), difference)


def read_inputs(
    package: zip_reader.Package, content: manifest.Manifest, model_name: str, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the recorded arguments of a call, `(args, kwargs)`; None if there are none.

    Args:
        package: the open package.
        content: its manifest.
        model_name: name of the model.
        device: device of the tensors that were not on the CPU.

    Raises:
        exc.BadPackageError: the recording is damaged.
    """
    described = content.models[model_name].self_test
    if described is None:
        return None
    recording = _decode(described, package.where)
    data = _read_entry(package, content, recording.file)
    return _restore_inputs(recording, data, device, package.where)


def _restore_inputs(
    recording: Recording, data: bytes, device: torch.device, where: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from torch.utils import _pytree as pytree

    leaves = [_restore(leaf, data, device, where) for leaf in recording.inputs]
    args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(recording.in_spec))
    return tuple(args), dict(kwargs)


def _decode(form: Mapping[str, Any], where: str) -> Recording:
    try:
        recording: Recording = json_codec.decode(Recording, form)
    except ValueError as error:
        why = f"its self test is damaged: {error}"
        raise exc.BadPackageError(path=where, why=why) from None
    return recording


def _read_entry(package: zip_reader.Package, content: manifest.Manifest, name: str) -> bytes:
    if name not in content.files:
        why = f"its manifest does not list {name!r}"
        raise exc.BadPackageError(path=package.where, why=why)
    parts = package.read_chunks(name, content.files[name].sha256)
    return b"".join(bytes(part) for part in parts)


def _restore(leaf: Leaf, data: bytes, device: torch.device, where: str) -> Any:
    """Return the recorded value, on the model's device unless it was a CPU tensor."""
    import torch

    if leaf.dtype is None:
        return leaf.value
    try:
        dtype = getattr(torch, leaf.dtype)
        content = bytearray(data[leaf.offset : leaf.offset + leaf.bytes])
        elements = (
            torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        )
        tensor = elements.as_strided(leaf.shape, leaf.stride)
    except (AttributeError, RuntimeError, ValueError, TypeError) as error:
        why = f"its self test is damaged: {error}".splitlines()[0].rstrip(".")
        raise exc.BadPackageError(path=where, why=why) from None
    if leaf.device == "cpu":
        return tensor
    return elements.to(device).as_strided(leaf.shape, leaf.stride)


def _compare_all(
    leaves: Sequence[Leaf], actual: Sequence[Any], expected: Sequence[Any]
) -> tuple[str | None, float]:
    """Return (the first thing that is wrong or None, the largest relative difference)."""
    if len(actual) != len(expected):
        return f"it returns {len(actual)} values and not {len(expected)}", 0.0
    largest = 0.0
    for index, (leaf, found, wanted) in enumerate(zip(leaves, actual, expected, strict=True)):
        problem, difference = _compare(leaf, found, wanted)
        if problem is not None:
            return f"result {index} {problem}", difference
        largest = max(largest, difference)
    return None, largest


def _compare(leaf: Leaf, actual: Any, expected: Any) -> tuple[str | None, float]:
    """Return (what is wrong with a result or None, its relative difference)."""
    import torch

    if not leaf.is_compared:
        return None, 0.0
    if not isinstance(expected, torch.Tensor):
        is_right = not isinstance(actual, torch.Tensor) and actual == expected
        return (None if is_right else f"is {actual!r} and not {expected!r}"), 0.0
    if not isinstance(actual, torch.Tensor):
        return f"is {type(actual).__name__} and not a tensor", 0.0
    for what, found, wanted in (
        ("dtype", actual.dtype, expected.dtype),
        ("shape", tuple(actual.shape), tuple(expected.shape)),
    ):
        if found != wanted:
            return f"has the {what} {found} and not {wanted}", 0.0
    difference = _difference(actual.to(expected.device), expected)
    is_exact = not (expected.is_floating_point() or expected.is_complex())
    tolerance = 0.0 if is_exact else _TOLERANCES.get(str(leaf.dtype), _LOW_PRECISION)
    if difference > tolerance:
        return f"differs by {difference:.3g} of its largest value, allowed are {tolerance:g}", (
            difference
        )
    return None, difference


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest finite magnitude; inf if NaN or
    infinite values differ."""
    import torch

    wide = torch.complex128 if expected.is_complex() else torch.float64
    if not (expected.is_floating_point() or expected.is_complex()):
        return 0.0 if torch.equal(actual, expected) else float("inf")
    actual, expected = actual.to(wide), expected.to(wide)
    is_finite = expected.isfinite()
    if not torch.equal(is_finite, actual.isfinite()) or not torch.equal(
        actual[~is_finite].nan_to_num(), expected[~is_finite].nan_to_num()
    ):
        return float("inf")
    distances = (actual[is_finite] - expected[is_finite]).abs()
    if not distances.numel() or not distances.max():
        return 0.0
    return float(distances.max() / expected[is_finite].abs().max().clamp(min=1e-30))


def count_results(form: Mapping[str, Any] | None) -> int:
    """Return how many results the self test in a manifest compares; 0 without one."""
    results: Sequence[Any] = (form or {}).get("results", ())
    return sum(isinstance(leaf, dict) and leaf.get("is_compared") is True for leaf in results)
