"""Random signatures, and calls that are valid or invalid in one or two places."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import input_checks
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.signature import (
    Extent,
    Range,
    Signature,
    SymbolInput,
    TensorInput,
)
from test.support.checks_library import contiguous, tensor_input

PROPERTIES = 120


def random_signature(generator: random.Random) -> Signature:
    """Sizes and strides like those of exported programs, and some that are rare."""
    symbols = ["s0", "s1", "s2"]

    def extent() -> Extent:
        first, second = generator.choices(symbols, k=2)
        number = generator.randint(1, 4)
        kinds: list[Extent] = [generator.randint(0, 6), generator.randint(1, 6), *[first] * 4]
        kinds += [f"{number}*{first} + {generator.randint(0, 3)}", f"{number}*{first}"]
        kinds += [f"{first}*{second}", f"{first} + {second}", f"{first} // {number + 1}"]
        kinds += [f"max(1, {first})", f"{first} - {number} + {second}"]
        return generator.choice(kinds)

    inputs: list[TensorInput | SymbolInput] = []
    for index in range(generator.randint(1, 4)):
        if generator.random() < 0.15:
            inputs.append(SymbolInput(f"n{index}", "", "int", generator.choice(symbols)))
            continue
        shape = [extent() for _ in range(generator.randint(0, 3))]
        stride = list(contiguous(shape))
        kind = generator.random()
        if kind < 0.2 and len(shape) > 1:
            shape[0], shape[1] = shape[1], shape[0]
            stride[0], stride[1] = stride[1], stride[0]
        elif kind < 0.3 and shape:
            stride = ["t0", *stride[1:]]
        elif kind < 0.4 and shape:
            stride = [f"t0*({size})" for size in stride]
        dtype = generator.choice(["float32", "float32", "int64", "bfloat16", "bool", "complex64"])
        inputs.append(tensor_input(f"x{index}", shape, stride, dtype))
    first, second = generator.sample(symbols, 2)
    number = generator.randint(1, 4)
    conditions = [
        f"{first} % {number} == 0",
        f"{first} < {second} + {number}",
        f"{first}*{second} <= 30",
        f"{first} // {number} != {second}",
        f"{second} % {first} == 0",
        f"{first} == {number} or {second} > 1",
    ]
    limits = {
        symbol: Range(*generator.choice([(2, None), (0, 5), (2, 7), (None, 6), (0, None)]))
        for symbol in symbols
    }
    chosen = generator.sample(conditions, generator.choice([0, 0, 1, 2]))
    return Signature(tuple(inputs), (), {**limits, "t0": Range()}, tuple(chosen))


def random_signatures() -> list[Signature]:
    """Random signatures whose symbols can be derived from the inputs."""
    generator = random.Random(0)
    signatures: list[Signature] = []
    while len(signatures) < PROPERTIES:
        candidate = random_signature(generator)
        try:
            input_checks.render(candidate)
        except exc.UncheckableInputError:
            continue
        signatures.append(candidate)
    return signatures


def random_calls(
    signature: Signature, generator: random.Random
) -> Iterator[list[torch.Tensor | None]]:
    """Calls close to a signature, most of them invalid in one place."""
    for _ in range(60):
        values = {
            name: generator.randint(limits.min or 0, min(limits.max or 9, 9))
            for name, limits in signature.symbols.items()
        }
        call: list[torch.Tensor | None] = []
        for tensor in signature.tensors:
            if isinstance(tensor, SymbolInput):
                call.append(torch.tensor(values[tensor.symbol]))
                continue
            extents = [
                [max(0, expression.evaluate(expression.parse(str(e)), values)) for e in part]
                for part in (tensor.shape, tensor.stride)
            ]
            call.append(torch.empty_strided(*extents, dtype=getattr(torch, tensor.dtype)))
        yield call
        yield mutated(call, generator)
        yield mutated(mutated(call, generator), generator)


def mutated(call: list[torch.Tensor | None], generator: random.Random) -> list[torch.Tensor | None]:
    place = generator.randrange(len(call))
    tensor = call[place]
    changed = tensor
    kind = generator.randrange(8)
    if tensor is None or kind == 0:
        changed = None
    elif kind == 1:
        other = generator.choice([torch.float64, torch.int8, torch.float32])
        changed = torch.empty_like(tensor, dtype=other)
    elif kind == 2:
        changed = tensor.unsqueeze(0) if generator.random() < 0.5 else tensor.reshape(-1)
    elif kind in (3, 4) and tensor.dim():
        sizes, strides = list(tensor.shape), list(tensor.stride())
        where = generator.randrange(len(sizes))
        changes = sizes if kind == 3 else strides
        changes[where] = max(0, changes[where] + generator.choice([-1, 1, 2]))
        changed = torch.empty_strided(sizes, strides, dtype=tensor.dtype)
    elif kind == 5 and tensor.dim() > 1:
        changed = tensor.transpose(0, 1)
    elif kind == 6:
        changed = tensor.clone()
    elif kind == 7 and tensor.dim() == 0 and tensor.dtype == torch.int64:
        changed = torch.tensor(generator.randint(-2, 9))
    return [*call[:place], changed, *call[place + 1 :]]
