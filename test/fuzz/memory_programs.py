"""Programs of the memory fuzzer: their text, inputs, custom operators, and how they are run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@torch.library.custom_op("inductor_ext_fuzz::tame", mutates_args=())
def _tame(x: Tensor) -> Tensor:
    return x / (4 * x.abs().amax() + 1e-6)


@_tame.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("inductor_ext_fuzz::both", mutates_args=())
def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


@_both.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@torch.library.custom_op("inductor_ext_fuzz::shrink", mutates_args={"x"})
def _shrink(x: Tensor) -> None:
    x.mul_(0.75)


@_shrink.register_fake
def _(x: Tensor) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program."""

    name: str
    shape: tuple[str, ...]
    """For each dimension the name of a size, or a number."""
    dtype: str = "float32"
    layout: str = "plain"
    """"plain", "transposed" (the last two dimensions) or "offset" (a nonzero storage offset)."""
    grad: bool = False

    def make(self, sizes: Mapping[str, int], seed: int) -> Tensor:
        """Equal values on every call."""
        shape = [sizes[d] if d in sizes else int(d) for d in self.shape]
        generator = torch.Generator().manual_seed(seed)
        if self.dtype == "int64":
            return torch.randint(0, min(sizes.values()), shape, generator=generator)
        if self.layout == "transposed" and len(shape) > 1:
            shape[-1], shape[-2] = shape[-2], shape[-1]
            value = torch.randn(shape, generator=generator).mT
        elif self.layout == "offset":
            count = 1
            for size in shape:
                count *= size
            value = torch.randn(count + 3, generator=generator)[3:].view(shape)
        else:
            value = torch.randn(shape, generator=generator)
        value = value.to(getattr(torch, self.dtype)) / 8
        return value.detach().requires_grad_() if self.grad else value


@dataclasses.dataclass(frozen=True)
class Program:
    """The text of a function, and its inputs."""

    seed: int
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[tuple[tuple[str, int], ...], ...]
    """Values of the sizes, one set for each call; several if sizes are dynamic."""

    @property
    def training(self) -> bool:
        """Whether gradients are computed."""
        return any(i.grad for i in self.inputs)

    @property
    def dynamic(self) -> bool:
        """Whether the program is compiled for several sizes."""
        return len(self.sizes) > 1

    def source(self) -> str:
        """The function's text."""
        body = [line for text in self.lines for line in text.splitlines()]
        body.append(f"return ({', '.join(self.outputs)},)")
        arguments = ", ".join(i.name for i in self.inputs)
        return f"def program({arguments}):\n" + "".join(f"    {line}\n" for line in body)

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """A new function with this text."""
        names = dict(NAMES)
        exec(compile(self.source(), f"<program {self.seed}>", "exec"), names)
        program: Callable[..., tuple[Any, ...]] = names["program"]
        return program

    def arguments(self, call: int) -> list[Tensor]:
        """New inputs for one call."""
        sizes = dict(self.sizes[call % len(self.sizes)])
        return [i.make(sizes, 1000 * call + k) for k, i in enumerate(self.inputs)]


NAMES: dict[str, Any] = {
    "torch": torch,
    "functional": functional,
    "fuzz": torch.ops.inductor_ext_fuzz,
    "CONSTANT": torch.linspace(-1, 1, 600).reshape(3, 200),
    "KERNEL": torch.linspace(-0.3, 0.3, 36).reshape(4, 1, 3, 3),
}

CALLS = 2
"""Minimum number of calls of a compiled program; outputs of a call are kept during the next."""

Result = list[Any]


def run_program(function: Callable[..., Any], program: Program) -> Result:
    """Call a function with a program's inputs; return outputs, mutated inputs and gradients."""
    results: Result = []
    kept = []
    for call in range(max(CALLS, len(program.sizes))):
        arguments = program.arguments(call)
        with torch.set_grad_enabled(program.training):
            outputs = function(*arguments)
        if program.training:
            real = [value for value in outputs if value.requires_grad]
            if real:
                sum((value.abs().float() * 0.1).sum() for value in real).backward()
        kept.append((outputs, arguments))
        if call == 0:
            # They must be equal after the other calls.
            results += [value.detach().clone() for value in outputs]
    for outputs, arguments in kept:
        results += [value.detach().clone() for value in outputs]
        results += [value.detach().clone() for value in arguments]
        results += [value.grad for value in arguments]
    return results


MAX_ELEMENTS = 60_000
"""Maximum number of elements of a value."""


class NoOperandError(Exception):
    """The pool has no operand for the operator."""


class Draw:
    """The state of a draw: names and their values in eager mode."""

    def __init__(self, seed: int, training: bool, dynamic: bool, extern: bool) -> None:
        self.random = random.Random(seed)
        self.extern = extern
        self.training = training
        self.dynamic = dynamic
        self.pool: dict[str, Tensor] = {}
        self.count = 0

    def new(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def pick(self, accepts: Callable[[Tensor], bool] = lambda value: True) -> str:
        names = [name for name, value in self.pool.items() if accepts(value)]
        if not names:
            raise NoOperandError
        # Mostly new values, so that chains get long; sometimes old ones, for long live ranges.
        if self.random.random() < 0.6:
            names = names[-6:]
        return self.random.choice(names)

    def real(self, least: int = 0, most: int = 4) -> str:
        return self.pick(lambda v: v.dtype == torch.float32 and least <= v.dim() <= most)

    def wide(self, least: int = 1, most: int = 4, side: int = 2) -> str:
        """A float value with at least `side` elements in every dimension."""
        return self.pick(
            lambda v: (
                v.dtype == torch.float32
                and least <= v.dim() <= most
                and all(size >= side for size in v.shape)
            )
        )

    def dim(self, name: str) -> int:
        return self.random.randrange(-self.pool[name].dim(), self.pool[name].dim())

    def fitting(self, name: str) -> str:
        """A value that can be broadcast with another."""
        shape = self.pool[name].shape

        def fits(value: Tensor) -> bool:
            if value.dtype != torch.float32:
                return False
            try:
                shape_of_both = torch.broadcast_shapes(shape, value.shape)
            except RuntimeError:
                return False
            return torch.Size(shape_of_both).numel() <= MAX_ELEMENTS

        return self.pick(fits)
