"""Operands and constants of fused matmul calls, by name instead of by position.

FX calls and kernels take flat argument lists. `FusedOperands` is the only place that knows their
order: whoever builds a call flattens one, and whoever reads its arguments unflattens them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class FusedOperands(Generic[T]):
    """The operands of a fused matmul, in the order in which calls and kernels take them.

    The elements are FX nodes, IR nodes or anything else that stands for a tensor. Fields of several
    operands have one per fused matmul, or none, unless they say otherwise.
    """

    a: T
    """Operand A, [M, K]; before the call is built, a norm's input may have more dimensions."""
    weights: tuple[T, ...]
    """Operands B, [K, N] each."""
    scales: tuple[T, ...] = ()
    """Of dequantized weights."""
    zero_points: tuple[T, ...] = ()
    """Of dequantized weights."""
    norm_vectors: tuple[T, ...] = ()
    """Inputs of a norm of A, [K] each: none, a weight, or a weight and a bias."""
    gate_biases: tuple[T, ...] = ()
    """Of the gate and the up projection, added before the gate."""
    fp8_scales: tuple[T, ...] = ()
    """Of A, then of each weight, applied to the accumulators."""
    biases: tuple[T, ...] = ()
    """Added after the matmul and its scales."""
    epilogue_inputs: tuple[T, ...] = ()
    """Inputs of the epilogue of a row amax, in any number."""

    @property
    def kernel_operands(self) -> tuple[T, ...]:
        """The operands that every kernel of the fusion reads, from A to `gate_biases`; what follows
        is applied by the kernel's epilogue or by other kernels.
        """
        return (*self.a_and_weights, *self.norm_vectors, *self.gate_biases)

    @property
    def a_and_weights(self) -> tuple[T, ...]:
        """A and everything that the weights are computed from."""
        return (self.a, *self.weights, *self.scales, *self.zero_points)

    @property
    def epilogue_operands(self) -> tuple[T, ...]:
        """The operands that are applied to the accumulators."""
        return (*self.fp8_scales, *self.biases)

    def without_epilogue(self) -> FusedOperands[T]:
        """Return these without `epilogue_operands`."""
        return dataclasses.replace(self, fp8_scales=(), biases=())

    def flatten(self) -> tuple[T, ...]:
        """Return all operands in order."""
        return (self.a, *chain.from_iterable(getattr(self, name) for name in _SEQUENCES))

    def unflatten(self, values: Sequence[U]) -> FusedOperands[U]:
        """Return values as operands: `operands.unflatten(operands.flatten())` equals `operands`.

        Args:
            values: one for each of these operands, in the order of `flatten`.

        Raises:
            ValueError: the numbers differ.
        """
        if len(values) != len(self.flatten()):
            raise ValueError(f"{len(values)} values for {len(self.flatten())} operands")
        rest = iter(values)
        a = next(rest)
        fields = {name: tuple(islice(rest, len(getattr(self, name)))) for name in _SEQUENCES}
        return FusedOperands(a, **fields)

    def map(self, function: Callable[[T], U]) -> FusedOperands[U]:
        """Return the results of a function for all operands."""
        return self.unflatten([function(operand) for operand in self.flatten()])


_SEQUENCES = tuple(field.name for field in dataclasses.fields(FusedOperands))[1:]


@dataclass(frozen=True)
class KernelConstants:
    """Constants of a fused kernel that are not part of its problem; None where it has none."""

    scale_words: int | None = None
    """Group scales adjacent along K that the kernel reads as one aligned 32-bit word."""
    zero_words: int | None = None
    """The same of zero points."""
    wide: bool | None = None
    """Whether B is dequantized in float32."""
    zero: int | None = None
    """The constant zero point of B."""
    high_first: bool | None = None
    """Whether the upper 4 bits of a byte precede the lower ones along K."""
    activation: str | None = None
    """Of a gate."""
    epsilon: float | None = None
    """Of a norm."""
    absolute: bool | None = None
    """Whether a row amax is of absolute values."""

    def constexprs(self) -> dict[str, Any]:
        """Return the constants as the template takes them, by their names in the kernel."""
        values = {
            field.name.upper(): value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        if self.activation is not None:
            values["ACTIVATION"] = repr(self.activation)
        return values
