"""Random programs against the memory planner, from the command line or from a test.

A program is the text of a function: a few dozen operators over a pool of tensors, drawn so that
memory is reached in many ways (views, changes in place, several outputs, kernels that allocate by
themselves, branches and loops). While it is drawn each line is run in eager mode; one that fails is
dropped. The program is then compiled by stock Inductor without reuse and by us with several
settings, and held against both:

- values of outputs, changed inputs and gradients are those of eager mode (where stock's are too),
  and the outputs of one call are not touched by the next;
- no plan's peak is above the one of stock's reuse, nor, by default, above the lower bound;
- what the CPU allocator hands out at most is not above what it hands out without reuse.

A failure is cut down to the lines that it needs, and printed as a script.

    python -m test.fuzz.memory --cases N --seed S [--settings NAME ...] [--reduce]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.nn import functional

import inductor_ext
from benchmarks.harness import measure
from benchmarks.memory import peak as memory_peak
from inductor_ext import events
from inductor_ext.hooks import compile_fx as compile_hook
from inductor_ext.memory import compiled_callables
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.settings import Settings

__all__ = ["MODES", "SETTINGS", "Failure", "Program", "check", "generate", "reduced"]


# --- operators of our own -----------------------------------------------------------------------


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


# --- programs -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Input:
    """An argument of a program."""

    name: str
    shape: tuple[str, ...]
    """By dimension: the name of a size, or a number."""
    dtype: str = "float32"
    layout: str = "plain"
    """"plain", "transposed" (the last two dimensions) or "offset" (begins inside its storage)."""
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
    """A function's text, and what to call it with."""

    seed: int
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[tuple[tuple[str, int], ...], ...]
    """Values of the sizes, one set for each call; more than one where sizes are dynamic."""

    @property
    def training(self) -> bool:
        """Whether gradients are taken."""
        return any(i.grad for i in self.inputs)

    @property
    def dynamic(self) -> bool:
        """Whether it is compiled for more sizes than one."""
        return len(self.sizes) > 1

    def source(self) -> str:
        """The function's text."""
        body = [line for text in self.lines for line in text.splitlines()]
        body.append(f"return ({', '.join(self.outputs)},)")
        arguments = ", ".join(i.name for i in self.inputs)
        return f"def program({arguments}):\n" + "".join(f"    {line}\n" for line in body)

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """A new function of that text."""
        names = dict(_NAMES)
        exec(compile(self.source(), f"<program {self.seed}>", "exec"), names)
        made: Callable[..., tuple[Any, ...]] = names["program"]
        return made

    def arguments(self, call: int) -> list[Tensor]:
        """New inputs for one of its calls."""
        sizes = dict(self.sizes[call % len(self.sizes)])
        return [i.make(sizes, 1000 * call + k) for k, i in enumerate(self.inputs)]


_NAMES: dict[str, Any] = {
    "torch": torch,
    "functional": functional,
    "fuzz": torch.ops.inductor_ext_fuzz,
    "CONSTANT": torch.linspace(-1, 1, 600).reshape(3, 200),
    "KERNEL": torch.linspace(-0.3, 0.3, 36).reshape(4, 1, 3, 3),
}


class _NoOperandError(Exception):
    """The pool holds nothing that the operator could work on."""


class _Draw:
    """What a program is drawn with: names and their values in eager mode."""

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

    def pick(self, wanted: Callable[[Tensor], bool] = lambda value: True) -> str:
        names = [name for name, value in self.pool.items() if wanted(value)]
        if not names:
            raise _NoOperandError
        # Mostly what is new, so that chains get long; at times what is old, so that it lives long.
        if self.random.random() < 0.6:
            names = names[-6:]
        return self.random.choice(names)

    def real(self, least: int = 0, most: int = 4) -> str:
        return self.pick(lambda v: v.dtype == torch.float32 and least <= v.dim() <= most)

    def wide(self, least: int = 1, most: int = 4, side: int = 2) -> str:
        """Float values of which every side is of some length."""
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
                joined = torch.broadcast_shapes(shape, value.shape)
            except RuntimeError:
                return False
            return torch.Size(joined).numel() <= _LARGEST

        return self.pick(fits)


_LARGEST = 60_000
"""Elements of a value."""

_Emit = Callable[[_Draw], str]
_OPERATORS: list[tuple[int, _Emit]] = []
_EXTERN: list[tuple[int, _Emit]] = []
"""Those that need no kernel to be generated, so that a program compiles within a second."""


def _operator(weight: int = 2, extern: int = 0) -> Callable[[_Emit], _Emit]:
    def register(emit: _Emit) -> _Emit:
        _OPERATORS.append((weight, emit))
        if extern:
            _EXTERN.append((extern, emit))
        return emit

    return register


@_operator(9)
def _unary(draw: _Draw) -> str:
    how = draw.random.choice(("sin", "tanh", "relu", "neg", "sigmoid", "abs", "square", "clone"))
    name = draw.real()
    square = ".clamp(-2, 2)" if how == "square" else ""
    return f"{draw.new()} = {name}{square}.{how}()"


@_operator(9)
def _binary(draw: _Draw) -> str:
    a = draw.real()
    b = draw.fitting(a)
    how = draw.random.choice(
        (
            "{a} * {b}.tanh()",
            "{a} + {b}",
            "{a} - {b}",
            "torch.maximum({a}, {b})",
            "torch.where({a} > {b}, {a}, 0.5 * {b})",
            "torch.atan2({a}, {b}.abs() + 1)",
        )
    )
    return f"{draw.new()} = ({how.format(a=a, b=b)}).clamp(-3, 3)"


@_operator(14, extern=14)
def _matmul(draw: _Draw) -> str:
    a = draw.wide(2, 3)
    inner = draw.pool[a].shape[-1]
    b = draw.pick(
        lambda v: (
            v.dtype == torch.float32
            and v.dim() == 2
            and inner in v.shape
            and v.numel() // inner * draw.pool[a].numel() // inner <= _LARGEST
        )
    )
    right = b if draw.pool[b].shape[0] == inner else f"{b}.mT"
    scale = draw.random.choice((f"({a} @ {right}) / 8", f"torch.tanh({a} @ {right})"))
    if draw.extern:
        scale = f"{a} @ {right}"
    elif draw.random.random() < 0.4:
        # The product itself, with values that stay small.
        scale = f"functional.normalize({a}, dim=-1) @ functional.normalize({right}, dim=0)"
    return f"{draw.new()} = {scale}"


@_operator(3, extern=4)
def _bmm(draw: _Draw) -> str:
    a = draw.wide(3, 3)
    shape = draw.pool[a].shape
    b = draw.pick(
        lambda v: v.dtype == torch.float32 and v.dim() == 3 and v.shape[::2] == shape[::2]
    )
    return f"{draw.new()} = torch.bmm({a}, {b}.mT){'' if draw.extern else ' / 8'}"


@_operator(3, extern=4)
def _addmm(draw: _Draw) -> str:
    a, b = draw.wide(2, 2), draw.wide(2, 2)
    x, y = draw.pool[a], draw.pool[b]
    right = b if x.shape[1] == y.shape[0] else f"{b}.mT"
    columns = y.shape[1] if x.shape[1] == y.shape[0] else y.shape[0]
    c = draw.pick(
        lambda v: (
            v.dtype == torch.float32
            and v.shape in ((columns,), (x.shape[0], columns))
            and v.numel() > 1
        )
    )
    return f"{draw.new()} = torch.addmm({c}, {a}, {right}, alpha=0.1)"


@_operator(5)
def _reduce(draw: _Draw) -> str:
    a = draw.wide(1)
    how = draw.random.choice(("mean", "amax", "sum", "logsumexp", "std", "prod"))
    keep = draw.random.choice((True, False))
    inner = f"{a}.clamp(-1, 1)" if how == "prod" else a
    return f"{draw.new()} = {inner}.{how}({draw.dim(a)}, keepdim={keep}).clamp(-4, 4)"


@_operator(1)
def _total(draw: _Draw) -> str:
    return f"{draw.new()} = {draw.real()}.sum().tanh()"


@_operator(5)
def _along(draw: _Draw) -> str:
    a = draw.wide(1)
    dim = draw.dim(a)
    how = draw.random.choice(
        (
            f"torch.softmax({a}, {dim})",
            f"{a}.cumsum({dim}).tanh()",
            f"{a}.flip({dim})",
            f"{a}.roll(1, {dim})",
            f"functional.layer_norm({a}, {a}.shape[-1:])",
        )
    )
    return f"{draw.new()} = {how}"


@_operator(5)
def _cat(draw: _Draw) -> str:
    a = draw.wide(1)
    shape = draw.pool[a].shape
    more = [
        draw.pick(lambda v: v.dtype == torch.float32 and v.shape == shape)
        for _ in range(draw.random.choice((1, 1, 2)))
    ]
    if draw.pool[a].numel() * (1 + len(more)) > _LARGEST:
        raise _NoOperandError
    how = draw.random.choice(("cat", "cat", "stack")) if len(shape) < 3 else "cat"
    return f"{draw.new()} = torch.{how}(({', '.join([a, *more])}), {draw.dim(a)})"


@_operator(4, extern=3)
def _parts(draw: _Draw) -> str:
    a = draw.wide(1, side=4)
    x, y = draw.new(), draw.new()
    dim = draw.dim(a)
    n = f"{a}.shape[{dim}]"
    how = draw.random.choice(
        (
            f"{a}.chunk(2, {dim})",
            f"torch.tensor_split({a}, 2, {dim})",
            f"torch.split({a}, [2, {n} - 2], {dim})",
            f"{a}.unbind({dim})[:2]",
        )
    )
    return f"{x}, {y} = {how}"


@_operator(9)
def _view(draw: _Draw) -> str:
    a = draw.wide(1)
    value = draw.pool[a]
    dim = draw.dim(a)
    ways = [
        f"{a}.reshape(-1)",
        f"{a}.unsqueeze({dim})",
        f"{a}.transpose(0, {dim})",
        f"{a}.narrow({dim}, 1, {a}.shape[{dim}] - 1)",
        f"{a}.select({dim}, 1)",
        f"{a}[..., ::2]",
        f"{a}.expand(2, *{a}.shape)" if value.dim() < 3 else f"{a}.flatten(1)",
        f"{a}.view(torch.int32).bitwise_and(0x7FFFFF00).view(torch.float32).clamp(-3, 3)",
        f"{a}.movedim(0, -1).contiguous()",
        f"{a}.as_strided(({a}.shape[0],), (1,))",
    ]
    if value.dim() == 2:
        ways += [f"{a}.diagonal()", f"{a}.t()", f"{a}.unfold(0, 2, 1)", f"{a}.mT.reshape(-1)"]
    if value.dim() == 3:
        ways += [f"{a}.permute(2, 0, 1)", f"{a}.flatten(0, 1)"]
    return f"{draw.new()} = {draw.random.choice(ways)}"


@_operator(9)
def _in_place(draw: _Draw) -> str:
    a = draw.wide(1)
    b = draw.fitting(a)
    if torch.broadcast_shapes(draw.pool[a].shape, draw.pool[b].shape) != draw.pool[a].shape:
        raise _NoOperandError
    dim = draw.dim(a)
    return draw.random.choice(
        (
            f"{a}.mul_(0.5)",
            f"{a}.add_({b}).clamp_(-3, 3)",
            f"{a}.copy_({b}.tanh())",
            f"{a}.select({dim}, 0).add_(1)",
            f"{a}[1:].mul_(0.25)",
            f"{a}[..., 0] = 0.5",
            f"{a}.transpose(0, {dim}).sin_()",
            f"fuzz.shrink({a})",
            f"{a}.view(-1)[::3].neg_()",
            f"torch.sigmoid({b}.expand_as({a}), out={a})",
        )
    )


@_operator(6)
def _index(draw: _Draw) -> str:
    a = draw.wide(1, 3)
    i = draw.pick(lambda v: v.dtype == torch.int64 and v.dim() == 1 and v.numel() > 0)
    rows = f"({i} % {a}.shape[0])"
    new = draw.new()
    ways = [
        f"{new} = {a}[{rows}]",
        f"{new} = {a}.index_add(0, {rows}, {a}[{rows}] * 0.5)",
        f"{new} = {a}.index_copy(0, {rows}.unique(), {a}[{rows}.unique()])",
        f"{a}.index_put_(({rows},), {a}[{rows}].tanh(), accumulate=True)",
        f"{new} = {a}.index_put(({rows},), torch.tensor(0.5))",
        f"{new} = {a}.masked_fill({a} > 1, 0.5)",
        f"{new} = torch.index_select({a}, 0, {rows})",
    ]
    if draw.pool[a].dim() == 1:
        ways += [
            (
                f"{new} = {a}.scatter_add(0, {rows}, {a}[: {i}.shape[0]].repeat({i}.shape[0])"
                f"[: {i}.shape[0]] * 0.5)"
            ),
            f"{new} = {a}.scatter_reduce(0, {rows}, {rows} * 0.01, 'amax')",
            f"{a}.scatter_(0, {rows}, 0.25)",
        ]
    return draw.random.choice(ways)


@_operator(4)
def _ordered(draw: _Draw) -> str:
    a = draw.wide(1, 3)
    x, y = draw.new(), draw.new()
    dim = draw.dim(a)
    how = draw.random.choice(
        (
            f"torch.sort({a}, dim={dim})",
            f"{a}.argsort({dim}, stable=True).float().sort({dim})",
            f"torch.topk({a}, 2, {dim})",
            f"torch.max({a}, {dim})",
            f"torch.median({a}, {dim})",
        )
    )
    if draw.random.random() < 0.5:
        return f"{x} = {how}[0]"
    return f"{x}, {y} = {how}"


@_operator(2)
def _selected(draw: _Draw) -> str:
    """Sizes that are known only when the code runs."""
    a = draw.wide(2, 2)
    rows = f"{a}[({a}[:, 0] > {draw.random.choice(('0', '5', '-5'))}).nonzero()[:, 0]]"
    how = draw.random.choice(
        (
            f"(({rows} @ {a}.mT).sin() @ {a}).sum(0)",
            f"({rows}.cos() * 0.5 + {rows}).sum(0) / 8",
            f"torch.masked_select({a}, {a} > 0).sin().sum()",
        )
    )
    return f"{draw.new()} = {how}"


@_operator(2)
def _convolution(draw: _Draw) -> str:
    a = draw.wide(2, 2, side=4)
    new = draw.new()
    return draw.random.choice(
        (
            f"{new} = functional.conv2d({a}[None, None], KERNEL)[0]",
            f"{new} = functional.conv2d({a}[None, None], KERNEL, padding=1).sum(1)[0].tanh()",
            f"{new} = functional.max_pool2d({a}[None, None], 2)[0, 0]",
            f"{new} = functional.avg_pool2d({a}[None], 2, ceil_mode=True)[0]",
        )
    )


@_operator(3, extern=2)
def _attention(draw: _Draw) -> str:
    a = draw.wide(2, 2, side=4)
    shape = draw.pool[a].shape
    b = draw.pick(
        lambda v: v.dtype == torch.float32 and v.dim() == 2 and v.shape[1] == shape[1] > 0
    )
    call = "functional.scaled_dot_product_attention"
    return f"{draw.new()} = {call}({a}[None, None], {b}[None, None], {b}[None, None])[0, 0]"


@_operator(5)
def _cast(draw: _Draw) -> str:
    a = draw.real()
    new = draw.new()
    return draw.random.choice(
        (
            f"{new} = {a}.half()",
            f"{new} = {a}.bfloat16()",
            f"{new} = {a}.double()",
            f"{new} = ({a} * 10).long()",
            f"{new} = {a} > 0",
            f"{new} = torch.complex({a}, {a}.sin())",
            f"{new} = ({a} * 10).to(torch.int8)",
        )
    )


@_operator(5)
def _of_other_type(draw: _Draw) -> str:
    a = draw.pick(lambda v: v.dtype != torch.float32)
    dtype, new = draw.pool[a].dtype, draw.new()
    back = f"{new} = {a}.float().clamp(-3, 3)"
    if dtype.is_complex:
        ways = [f"{new} = {a} * {a}.conj() * 0.5", f"{new} = torch.view_as_real({a}).clone()"]
        ways += [f"{new} = {a}.real", f"{new} = {a}.imag + 1", f"{new} = {a}.abs()"]
        ways += [f"{new} = ({a}.mT @ {a}).abs().tanh()"] if draw.pool[a].dim() == 2 else []
    elif dtype == torch.bool:
        ways = [back, f"{new} = ~{a}", f"{new} = {a}.cumsum(0) if {a}.dim() else {a}"]
    elif dtype.is_floating_point:
        ways = [back, f"{new} = {a}.sin()", f"{new} = {a} * 0.5 + {a}.abs()", f"{a}.mul_(0.5)"]
        if draw.pool[a].dim() == 2:
            ways += [f"{new} = torch.tanh({a} @ {a}.mT)"] * 3
    else:
        ways = [back, f"{new} = {a} % 7", f"{new} = {a} + 1", f"{new} = {a}.flatten().sort()[0]"]
    return draw.random.choice(ways)


@_operator(2)
def _complex_view(draw: _Draw) -> str:
    a = draw.pick(
        lambda v: (
            v.dtype == torch.float32 and v.dim() > 0 and v.shape[-1] % 2 == 0 and v.numel() > 1
        )
    )
    if draw.dynamic:
        raise _NoOperandError
    return f"{draw.new()} = torch.view_as_complex({a}.reshape(-1, 2).contiguous())"


@_operator(2)
def _constant(draw: _Draw) -> str:
    a = draw.wide(1)
    size = f"{a}.shape[-1]"
    return draw.new() + draw.random.choice(
        (
            f" = torch.arange({size})",
            f" = torch.ones({size}, {size}) / {size}",
            f" = torch.zeros({a}.shape)",
            " = torch.tensor([0.5, -0.25, 1.0])",
            " = CONSTANT[:, :64] * 1",
            " = CONSTANT[1]",
            f" = {a}[:0]",
            " = torch.full((), 0.5)",
            f" = torch.eye({size})",
            f" = {a}.new_empty(0)",
        )
    )


@_operator(3, extern=6)
def _custom(draw: _Draw) -> str:
    if draw.training:
        raise _NoOperandError
    a = draw.real(1)
    if draw.random.random() < 0.6:
        return f"{draw.new()} = fuzz.tame({a})"
    return f"{draw.new()}, {draw.new()} = fuzz.both({a})"


@_operator(2)
def _branches(draw: _Draw) -> str:
    a = draw.wide(2, 2)
    new = draw.new()
    return (
        f"def {new}_yes(p):\n"
        f"    q = (p @ p.mT).tanh()\n"
        f"    return (q.sin() @ q @ p / 8).tanh() + p.sum()\n"
        f"def {new}_no(p):\n"
        f"    return (torch.softmax(p, -1) * 2).cos()\n"
        f"{new} = torch.cond({draw.real()}.sum() > 0, {new}_yes, {new}_no, ({a}.contiguous(),))"
    )


@_operator(2)
def _loop(draw: _Draw) -> str:
    if draw.training:
        raise _NoOperandError
    a = draw.wide(2, 2)
    new = draw.new()
    captured = draw.random.choice(("q", "q.mT.contiguous().mT", f"q + {a}"))
    return (
        f"def {new}_on(i, p):\n"
        f"    return i < 3\n"
        f"def {new}_body(i, p):\n"
        f"    q = ((p @ p.mT).tanh() @ p / 8).sin()\n"
        f"    return i + 1, ({captured}).tanh() + p.sin()\n"
        f"{new} = torch.while_loop({new}_on, {new}_body, (torch.tensor(0), {a}.clone()))[1]"
    )


@_operator(0, extern=6)
def _plain_view(draw: _Draw) -> str:
    a = draw.wide(1)
    dim = draw.dim(a)
    ways = [f"{a}.unsqueeze(0)", f"{a}.transpose(0, {dim})", f"{a}.select({dim}, 1)", f"{a}[1:]"]
    ways += [f"{a}.narrow({dim}, 1, {a}.shape[{dim}] - 1)", f"{a}[..., ::2]", f"{a}[:, None]"]
    ways += [f"{a}.view(-1)[: {a}.shape[0] * {a}.shape[0]].view({a}.shape[0], {a}.shape[0])"]
    ways += [f"{a}.expand(2, *{a}.shape)"] if draw.pool[a].dim() == 2 else []
    return f"{draw.new()} = {draw.random.choice(ways)}"


@_operator(0, extern=3)
def _sorted(draw: _Draw) -> str:
    a = draw.wide(1, 3)
    dim = draw.dim(a)
    how = draw.random.choice((f"torch.sort({a}, dim={dim})", f"torch.topk({a}, 2, {dim})"))
    which = draw.random.choice((0, 0, 1))
    return f"{draw.new()} = {how}[{which}]"


@_operator(0, extern=2)
def _filtered(draw: _Draw) -> str:
    a = draw.wide(2, 2, side=4)
    more = draw.random.choice(("", ", padding=1"))
    return f"{draw.new()} = functional.conv2d({a}[None, None], KERNEL{more})[0]"


@_operator(0, extern=4)
def _shrunk(draw: _Draw) -> str:
    return f"fuzz.shrink({draw.wide(1)})"


@_operator(0, extern=2)
def _branches_of_products(draw: _Draw) -> str:
    a = draw.wide(2, 2)
    new = draw.new()
    size = draw.random.choice(("k", "n"))
    yes = {"k": "((p @ p.mT) @ p)", "n": "(p @ (p.mT @ p))"}[size]
    return (
        f"def {new}_yes(p):\n"
        f"    return fuzz.tame({yes})\n"
        f"def {new}_no(p):\n"
        f"    return fuzz.tame(p)\n"
        f"{new} = torch.cond(index[0] > 2, {new}_yes, {new}_no, ({a},))"
    )


@_operator(0, extern=2)
def _loop_of_products(draw: _Draw) -> str:
    if draw.training:
        raise _NoOperandError
    a = draw.wide(2, 2)
    new = draw.new()
    return (
        f"def {new}_on(i, p):\n"
        f"    return i < 3\n"
        f"def {new}_body(i, p):\n"
        f"    q = (p @ p.mT) @ p\n"
        f"    return i + 1, fuzz.tame(q @ (q.mT @ p))\n"
        f"{new} = torch.while_loop({new}_on, {new}_body, (torch.tensor(0), {a}))[1]"
    )


_SIDES = (2, 7, 16, 33, 48, 64, 65, 96, 128)


def generate(
    seed: int, *, training: bool = False, dynamic: bool = False, extern: bool = False
) -> Program:
    """Draw a program; one seed gives the same one always.

    Args:
        seed: of everything that is drawn.
        training: whether gradients are to be taken.
        dynamic: whether it is to be compiled for several sizes.
        extern: of operators that need no kernel to be generated, as far as possible.
    """
    for attempt in range(100):
        program = _attempt(seed, _Draw(seed + 10**6 * attempt, training, dynamic, extern))
        try:
            _run(program.function(), program)
        except Exception:
            # A gradient that needs a value from before it was changed in place.
            continue
        return program
    raise ValueError(f"nothing that eager mode runs was drawn for seed {seed}")


def _attempt(seed: int, draw: _Draw) -> Program:
    training, dynamic, extern = draw.training, draw.dynamic, draw.extern
    pick = draw.random
    sizes = {name: pick.choice(_SIDES[dynamic:]) for name in ("n", "m", "k")}
    shapes = [("n", "m"), ("m", "k"), ("n", "n"), ("k",), ("n", "k"), ("3", "n", "m"), ("2", "m")]
    inputs = []
    for index, shape in enumerate(shapes[: pick.randint(3, len(shapes))]):
        layout = pick.choice(("plain", "plain", "plain", "transposed", "offset"))
        grad = training and (index == 0 or pick.random() < 0.6)
        inputs.append(Input(f"x{index}", shape, layout=layout, grad=grad))
    inputs.append(Input("index", ("5",), dtype="int64"))
    sets = [sizes]
    if dynamic:
        sets += [{name: pick.choice(_SIDES[1:]) for name in sizes} for _ in range(2)]
    every = tuple(tuple(chosen.items()) for chosen in sets)
    program = Program(seed, tuple(inputs), (), (), every)
    worlds = []
    for call in range(len(sets)):
        values = program.arguments(call)
        # A leaf must not be changed in place.
        made = {i.name: v * 1 if i.grad else v for i, v in zip(inputs, values, strict=True)}
        worlds.append({**_NAMES, **made})
    draw.pool = {i.name: worlds[0][i.name] for i in inputs}
    lines = [f"{i.name} = {i.name} * 1" for i in inputs if i.grad]
    weights, operators = zip(*(_EXTERN if extern else _OPERATORS), strict=True)
    wanted = len(lines) + pick.randint(8 if extern else 5, 12 if dynamic else 40)
    for _ in range(10 * wanted):
        if len(lines) >= wanted:
            break
        (emit,) = pick.choices(operators, weights)
        with contextlib.suppress(_NoOperandError):
            line = emit(draw)
            if _run_line(draw, worlds, line):
                lines.append(line)
    if not extern:
        lines += _rest(draw, lines)
    outputs = _outputs(draw, [i.name for i in inputs])
    return dataclasses.replace(program, lines=tuple(lines), outputs=outputs)


def _run_line(draw: _Draw, worlds: Sequence[dict[str, Any]], line: str) -> bool:
    """Run a line in eager mode, for every set of sizes, and keep what it makes.

    Returns:
        Whether it ran, and made nothing that is too large.
    """
    after = [dict(world) for world in worlds]
    try:
        for world in after:
            exec(line, world)
    except Exception:
        return False
    made: list[dict[str, Tensor]] = [
        {
            name: value
            for name, value in new.items()
            if isinstance(value, Tensor) and value is not world.get(name)
        }
        for new, world in zip(after, worlds, strict=True)
    ]
    if any(v.numel() > _LARGEST or v.dim() > 5 for found in made for v in found.values()):
        return False
    for world, new in zip(worlds, after, strict=True):
        world.update(new)
    draw.pool.update(made[0])
    return True


def _rest(draw: _Draw, lines: Sequence[str]) -> list[str]:
    """A line that uses most of what nothing else does, so that it is not dropped."""
    text = "\n".join(lines)
    unused = [
        name
        for name in draw.pool
        if len(re.findall(rf"\b{name}\b", text)) == 1 and draw.random.random() < 0.9
    ]
    if not unused:
        return []
    draw.pool["rest"] = torch.tensor(0.0)
    terms = (f"{name}.{'abs()' if draw.pool[name].is_complex() else 'float()'}" for name in unused)
    return [f"rest = {' + '.join(f'{term}.sum() / 1000' for term in terms)}"]


def _outputs(draw: _Draw, inputs: list[str]) -> tuple[str, ...]:
    names = [name for name in draw.pool if name not in inputs]
    if not names:
        names = list(inputs)
    if draw.extern:
        # Each keeps alive what it is made of, which a sum would be too.
        names = [name for name in names if not draw.pool[name].is_complex()]
    chosen = [*names[-2:], *draw.random.sample(names, min(len(names), draw.random.randint(1, 6)))]
    if draw.random.random() < 0.3:
        chosen.append(draw.random.choice(names[-4:]))
    if draw.random.random() < 0.2:
        chosen.append(draw.random.choice(inputs))
    if draw.random.random() < 0.3:
        wide = [name for name in chosen if draw.pool[name].dim() > 0]
        chosen += [f"{name}[1:]" for name in wide[:1]]
    return tuple(chosen)


# --- running them -------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "always": {"memory_arenas": "always", "memory_debug": True},
    "debug": {"memory_debug": True},
    "outputs": {"memory_planning": True, "memory_pool": "outputs"},
    "combined": {"memory_planning": True, "memory_pool": "combined", "memory_debug": True},
    "cpp": {"cpp_wrapper": True},
    "cpp_always": {"cpp_wrapper": True, "memory_arenas": "always", "memory_debug": True},
    "aot": {"memory_arenas": "always", "memory_debug": True},
    "partition": {"graph_partition": True},
}
"""By name: settings of ours and of Inductor's."""

MODES: dict[str, dict[str, bool]] = {
    "inference": {},
    "training": {"training": True},
    "dynamic": {"dynamic": True},
    "dynamic_training": {"training": True, "dynamic": True},
    "extern": {"extern": True},
    "extern_dynamic": {"extern": True, "dynamic": True},
}
"""Keyword arguments of `generate`."""

CALLS = 2
"""Calls of a compiled program, at least; outputs of one are kept over the next."""

Result = list[Any]


@dataclasses.dataclass(frozen=True)
class Failure:
    """What is wrong with a program under one of the settings."""

    program: Program
    settings: str
    kind: str
    """"error", "value" or "peak"."""
    text: str

    def script(self) -> str:
        """A description that can be pasted into a test."""
        inputs = "\n".join(f"#   {i}" for i in self.program.inputs)
        return (
            f"# seed {self.program.seed}, settings {self.settings}, {self.kind}: {self.text}\n"
            f"#   sizes {[dict(sizes) for sizes in self.program.sizes]}\n"
            f"{inputs}\n{self.program.source()}"
        )


def _run(function: Callable[..., Any], program: Program) -> Result:
    """Call a function with all of a program's inputs; outputs, changed inputs, gradients."""
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
            # Equal to what they are after the other calls.
            results += [value.detach().clone() for value in outputs]
    for outputs, arguments in kept:
        results += [value.detach().clone() for value in outputs]
        results += [value.detach().clone() for value in arguments]
        results += [value.grad for value in arguments]
    return results


PLAIN = "plain"
"""Stock Inductor without reuse: what the other ways are held against."""


def _patches(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of ours and of Inductor's."""
    patches = SETTINGS[name] if name != PLAIN else {"allow_buffer_reuse": False}
    own = {key: value for key, value in patches.items() if key in inductor_ext.settings.names()}
    theirs = {key: value for key, value in patches.items() if key not in own}
    return own, {"fx_graph_cache": False, "cpp.simdlen": 1, **theirs}


@contextlib.contextmanager
def _configured(name: str) -> Iterator[None]:
    own, theirs = _patches(name)
    with inductor_ext.config.patch(own), inductor_config.patch(theirs):
        yield


@contextlib.contextmanager
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        yield


def _copy(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a graph and of the graphs that it calls; what its nodes stand for is shared."""
    graph = torch.fx.Graph()
    nodes: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in gm.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    made = torch.fx.GraphModule(gm, graph)
    made.meta = copy.copy(gm.meta)
    for name, inner in gm.named_children():
        if isinstance(inner, torch.fx.GraphModule):
            setattr(made, name, _copy(inner))
    return made


class _Compiled:
    """A program, compiled in several ways; it is traced and differentiated once for all of them."""

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self.names = names
        self.way = names[0]
        """The one that is run."""
        self.records: dict[str, list[Any]] = {name: [] for name in names}
        self.errors: dict[str, str] = {}
        self.function: Callable[..., Any] = torch.compile(
            program.function(), backend=self._compile, dynamic=program.dynamic
        )

    def _compile(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        entry: Any = compile_fx.compile_fx
        with inductor_config.patch({"fx_graph_cache": False}):
            made: Callable[..., Any] = entry(gm, inputs, inner_compile=self._compile_graph)
        return made

    def _compile_graph(self, gm: Any, inputs: Any, **more: Any) -> Callable[..., Any]:
        compiled: dict[str, Callable[..., Any]] = {}
        for name in self.names:
            try:
                with _configured(name), events.capture(MemoryPlanRecord) as records:
                    compiled[name] = self._compile_one(name, _copy(gm), inputs, more)
                self.records[name] += records
            except Exception as error:
                self.errors[name] = "".join(traceback.format_exception(error)[-5:])

        if PLAIN in self.errors:
            raise RuntimeError(self.errors[PLAIN])

        def run(arguments: list[Any]) -> Any:
            return compiled[self.way](arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _compile_one(self, name: str, gm: Any, inputs: Any, more: Any) -> Callable[..., Any]:
        inner: Callable[..., Any] = compile_fx.compile_fx_inner
        if name != PLAIN:
            settings = dataclasses.replace(Settings(), **_patches(name)[0])
            inner = compile_hook.scoped_inner_compile(
                inner, settings, compiled_callables.begin_compile()
            )
        context = torch._guards.TracingContext.try_get()
        if context is not None and context.output_strides:
            # Those that the way before found; each finds the same.
            context.output_strides.clear()
        made: Callable[..., Any] = inner(gm, inputs, **more)
        return made


_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-3}


def _difference(found: Result, expected: Result, tolerance: float) -> str | None:
    """Where two results differ, or None."""
    for index, (ours, right) in enumerate(zip(found, expected, strict=True)):
        if (ours is None) != (right is None):
            return f"value {index}: {type(ours).__name__} instead of {type(right).__name__}"
        if ours is None:
            continue
        if (ours.shape, ours.dtype) != (right.shape, right.dtype):
            return f"value {index}: {ours.dtype}{[*ours.shape]}, not {right.dtype}{[*right.shape]}"
        allowed = max(tolerance, _TOLERANCES.get(right.dtype, 0.0) if tolerance > 1e-4 else 0)
        numeric = right.numel() > 0 and right.dtype != torch.bool
        scale = float(right.abs().max().double()) if numeric else 0.0
        at_zero = allowed * min(max(scale, 1e-12), 1.0)
        equal = torch.isclose(ours, right, rtol=allowed, atol=at_zero, equal_nan=True)
        if not equal.all():
            return f"value {index} {[*right.shape]}: {int((~equal).sum())} elements are wrong"
    return None


def _measured(function: Callable[..., Any], program: Program) -> int:
    """The most bytes that the first call holds, as the allocator hands them out."""
    arguments = program.arguments(0)
    with torch.set_grad_enabled(program.training):
        changes = memory_peak.allocator_changes(lambda: function(*arguments))
    return measure.peak_of_changes(changes)


def check(
    program: Program, names: Sequence[str], *, peaks: bool = True
) -> tuple[list[Failure], str | None]:
    """Compile and run a program; what is wrong, and why it was not held against us, if so.

    Args:
        program: what to compile.
        names: of `SETTINGS`.
        peaks: whether to measure as well.
    """
    together = [PLAIN, *(name for name in names if not _needs_cpp(name))]
    failures: list[Failure] = []
    with _fresh():
        compiled = _Compiled(program, together)
        try:
            expected = _run(program.function(), program)
            plain = _run(compiled.function, program)
        except Exception as error:
            return [], f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        if not peaks or program.training or program.dynamic:
            bound = None
        else:
            bound = _measured(compiled.function, program)
        for name in together[1:]:
            compiled.way = name
            found = _check_one(compiled, program, plain, bound if name == "default" else None)
            if found is not None:
                failures.append(Failure(program, name, *found))
    for name in filter(_needs_cpp, names):
        with _fresh(), _configured(name):
            try:
                different = _difference(_run(_alone(program, name), program), plain, 1e-4)
            except Exception as error:
                text = "".join(traceback.format_exception(error)[-5:])
                failures.append(Failure(program, name, "error", text))
            else:
                if different is not None:
                    failures.append(Failure(program, name, "value", different))
    return failures, _difference(plain, expected, 1e-2)


def _check_one(
    compiled: _Compiled, program: Program, plain: Result, bound: int | None
) -> tuple[str, str] | None:
    name = compiled.way
    if name in compiled.errors:
        return "error", compiled.errors[name]
    try:
        results = _run(compiled.function, program)
    except Exception as error:
        return "error", "".join(traceback.format_exception(error)[-5:])
    if name in compiled.errors:
        return "error", compiled.errors[name]
    if (different := _difference(results, plain, 1e-4)) is not None:
        return "value", different
    if not _forced(name) and not program.dynamic:
        for record in compiled.records[name]:
            planned = f"{record.graph}, {record.kind}: {record.peak} planned"
            if record.peak > record.peak_before:
                return "peak", f"{planned}, {record.peak_before} by stock"
            if record.peak > record.lower_bound:
                return "peak", f"{planned}, bound {record.lower_bound}, {record.strategy}"
    if bound is not None and (measured := _measured(compiled.function, program)) > bound:
        return "peak", f"{measured} bytes measured, {bound} without reuse"
    return None


def _forced(name: str) -> bool:
    patches = SETTINGS[name]
    return patches.get("memory_arenas") == "always" or bool(patches.get("memory_planning"))


def _needs_cpp(name: str) -> bool:
    return name == "aot" or "cpp_wrapper" in SETTINGS[name]


def _alone(program: Program, name: str) -> Callable[..., Any]:
    if name == "aot":
        return _packaged(program)
    made: Callable[..., Any] = torch.compile(
        program.function(), backend="inductor_ext", dynamic=program.dynamic
    )
    return made


def _packaged(program: Program) -> Callable[..., Any]:
    run = program.function()

    class Module(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Any:
            return run(*arguments)

    with torch.no_grad():
        exported = torch.export.export(Module(), tuple(program.arguments(0)), strict=False)
        path = str(inductor_ext.aoti_compile_and_package(exported))
        loaded: Callable[..., Any] = torch._inductor.aoti_load_package(path)
    Path(path).unlink()
    return loaded


def reduced(failure: Failure, *, seconds: float = 240) -> Failure:
    """The failure with as few lines and outputs as it keeps its kind with."""
    limit = time.monotonic() + seconds

    def fails(program: Program) -> Failure | None:
        try:
            program.function()(*program.arguments(0))
        except Exception:
            return None
        found, _ = check(program, [failure.settings])
        return found[0] if found and found[0].kind == failure.kind else None

    best = failure
    for field in ("outputs", "lines"):
        size = max(1, len(getattr(best.program, field)) // 2)
        while size:
            start = 0
            while start < len(values := getattr(best.program, field)):
                if time.monotonic() > limit:
                    return best
                shorter = values[:start] + values[start + size :]
                program = dataclasses.replace(best.program, **{field: shorter})
                smaller = fails(program) if shorter or field == "lines" else None
                if smaller is None:
                    start += size
                else:
                    best = smaller
            size //= 2
    return best


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument(
        "--settings", nargs="+", choices=sorted(SETTINGS), default=["default", "always"]
    )
    parser.add_argument("--modes", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--reduce", action="store_true", help="cut failures down")
    parser.add_argument("--show", action="store_true", help="print programs, and compile none")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 when something is wrong."""
    options = _parse(arguments)
    failed = skipped = 0
    for seed in range(options.seed, options.seed + options.cases):
        mode = options.modes[seed % len(options.modes)]
        program = generate(seed, **MODES[mode])
        if options.show:
            print(program.source())
            continue
        begin = time.perf_counter()
        found, why = check(program, options.settings)
        seconds = time.perf_counter() - begin
        lines = len(program.lines)
        word = ", ".join(f"{f.settings} {f.kind}" for f in found) or ("skipped" if why else "good")
        print(f"seed {seed} {mode}: {lines} lines, {seconds:.0f} s, {word} {why or ''}", flush=True)
        skipped += why is not None
        failed += bool(found)
        for failure in found:
            print((reduced(failure) if options.reduce else failure).script(), flush=True)
    print(f"{options.cases} programs, {failed} with failures, {skipped} not equal in stock either")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
