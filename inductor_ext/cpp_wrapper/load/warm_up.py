"""The first calls of a model, made while it is loaded, so that later calls are fast.

The first call of a model loads its GPU kernels, creates the handles and workspaces of libraries,
folds constants, and takes memory from the system. `warm_up` makes it on recorded inputs, on inputs
of the caller, or on zeros, and leaves no trace: buffers that the call changes get their values
back, as do the states of random number generators.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.calling_convention import SCALAR_DTYPES
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.signature import (
    Extent,
    Signature,
    SymbolInput,
    TensorInput,
)

if TYPE_CHECKING:
    from inductor_ext.cpp_wrapper.load.instance import ExtensionInstance

Example: TypeAlias = "Sequence[Any] | Mapping[str, Any]"
"""The arguments of a call: positional ones, or keyword arguments."""

_CALLS = 2
"""Calls on each example. The second has the memory that the first one has released."""

_LARGEST = 4096
"""Largest size that is tried for a dynamic dimension beyond its minimum."""

_TRIALS = 20_000
"""Combinations of sizes that are tried."""


def warm_up(instance: ExtensionInstance, examples: Sequence[Sequence[torch.Tensor]]) -> None:
    """Call a model on each example, without a lasting effect.

    Args:
        instance: the model.
        examples: the tensors that `instance.run` takes.

    Raises:
        exc.InductorExtError: a call failed, see `LoadedModel.__call__`.
    """
    with preserved_state(instance):
        for tensors in examples:
            for _ in range(_CALLS):
                _run(instance, tensors)
        if instance.device.type == "cuda":
            torch.cuda.synchronize(instance.device)


def _run(instance: ExtensionInstance, tensors: Sequence[torch.Tensor]) -> None:
    try:
        instance.run_compiled(tensors)
    except RuntimeError as error:
        instance.translate(error, (), {})
        raise


@contextlib.contextmanager
def preserved_state(instance: ExtensionInstance) -> Iterator[None]:
    """Restore the buffers that calls change, and the random number generators, at the end."""
    constants = instance.runner.extract_constants_map(False) if instance.mutated_buffers else {}
    saved = {
        name: constants[name].clone() for name in instance.mutated_buffers if name in constants
    }
    devices = [instance.device.index or 0] if instance.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for name, values in saved.items():
            constants[name].copy_(values)


def flatten(
    instance: ExtensionInstance, examples: Sequence[Example], argument: str
) -> list[list[torch.Tensor]]:
    """Return the tensors that calls with these arguments pass to the compiled model.

    Args:
        instance: the model.
        examples: the arguments of each call.
        argument: name of the argument of `load` that has the examples, for errors.

    Raises:
        exc.InputMismatchError: the arguments have another structure than the exported ones.
    """
    calls = []
    for index, example in enumerate(examples):
        args, kwargs = ((), example) if isinstance(example, Mapping) else (tuple(example), {})
        try:
            calls.append(list(instance.convention.flatten(args, kwargs)))
        except exc.InputMismatchError as error:
            why = f"{argument}[{index}]: {error.fields['why']}"
            raise exc.InputMismatchError(**{**error.fields, "why": why}) from None
    return calls


def make_zeros(signature: Signature, device: torch.device) -> list[torch.Tensor]:
    """Return inputs of zeros with the smallest sizes that the signature allows.

    A size is at least 2 if it may be, because 0 and 1 are special cases in much code.

    Args:
        signature: the signature of the model.
        device: device of the inputs that are not on the CPU.

    Raises:
        exc.NoExampleError: no sizes were found that meet all conditions.
    """
    sizes = _choose_sizes(signature)
    return [_make_input(inp, sizes, device) for inp in signature.tensors]


def _make_input(
    inp: TensorInput | SymbolInput, sizes: Mapping[str, int], device: torch.device
) -> torch.Tensor:
    if isinstance(inp, SymbolInput):
        is_size = inp.type == "int" and set(
            expression.symbols(expression.parse(inp.symbol))
        ) <= set(sizes)
        value = _evaluate(inp.symbol, sizes) if is_size else 0
        return torch.tensor(value, dtype=SCALAR_DTYPES[inp.type], device="cpu")
    shape = [_evaluate(size, sizes) for size in inp.shape]
    stride = [_evaluate(step, sizes) for step in inp.stride]
    target = torch.device("cpu") if inp.device == "cpu" else device
    tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, inp.dtype), device=target)
    return tensor.zero_()


def _choose_sizes(signature: Signature) -> dict[str, int]:
    conditions = [expression.parse(text) for text in signature.constraints]
    expected = [extent for inp in signature.tensors for extent in _extents(inp)]

    def is_allowed(sizes: Mapping[str, int]) -> bool:
        try:
            return all(expression.evaluate(node, sizes) for node in conditions) and all(
                _evaluate(extent, sizes) >= 0 for extent in expected
            )
        except ZeroDivisionError:
            return False

    ranges = {}
    for name, limits in signature.symbols.items():
        first = max(2, limits.min or 0)
        if limits.max is not None:
            first = min(first, limits.max)
        last = first + _LARGEST if limits.max is None else min(limits.max, first + _LARGEST)
        ranges[name] = range(first, max(first, last) + 1)
    # Sizes are often equal or multiples of a number: try equal ones first.
    equal = (
        {name: min(max(size, values[0]), values[-1]) for name, values in ranges.items()}
        for size in range(2, _LARGEST)
    )
    others = (dict(zip(ranges, values, strict=True)) for values in _combinations(ranges))
    for sizes in itertools.islice(itertools.chain(equal, others), _TRIALS):
        if is_allowed(sizes):
            return sizes
    raise exc.NoExampleError(conditions=", ".join(signature.constraints))


def _combinations(ranges: Mapping[str, range]) -> Iterator[tuple[int, ...]]:
    """Yield combinations, those of small values first."""
    for bound in (4, 8, 16, 32, 64, 128):
        yield from itertools.product(*(values[:bound] for values in ranges.values()))


def _extents(inp: TensorInput | SymbolInput) -> tuple[Extent, ...]:
    return () if isinstance(inp, SymbolInput) else (*inp.shape, *inp.stride)


def _evaluate(extent: Extent, sizes: Mapping[str, int]) -> int:
    if isinstance(extent, int):
        return extent
    return expression.evaluate(expression.parse(extent), sizes)
