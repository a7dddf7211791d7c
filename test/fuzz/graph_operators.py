"""Operators of the graph fuzzer's programs, by subject: each function draws one or several lines.

They complement those of the memory fuzzer, which are mostly float32 arithmetic: views, mutation,
dtypes, control flow and layers, in the combinations in which compilers are wrong.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import torch
from torch import Tensor

from test.fuzz.memory_programs import Draw, NoOperandError

Emit = Callable[[Draw], str]

SUBJECTS: dict[str, list[tuple[int, Emit]]] = collections.defaultdict(list)
"""Weights and functions by subject."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


def register_operator(subject: str, weight: int = 2) -> Callable[[Emit], Emit]:
    def register(emit: Emit) -> Emit:
        SUBJECTS[subject].append((weight, emit))
        return emit

    return register


def pick_value(
    draw: Draw, dtypes: tuple[torch.dtype, ...] = (), least: int = 0, most: int = 4, side: int = 1
) -> str:
    """A value of one of the dtypes (any by default) with at least `side` elements a dimension."""

    def accepts(value: Tensor) -> bool:
        fits = least <= value.dim() <= most and all(size >= side for size in value.shape)
        return fits and (not dtypes or value.dtype in dtypes)

    return draw.pick(accepts)


def pick_similar(draw: Draw, name: str) -> str:
    """A value with the same shape and dtype, possibly the same one."""
    value = draw.pool[name]
    return draw.pick(lambda v: v.shape == value.shape and v.dtype == value.dtype)


def draw_literal(draw: Draw, name: str) -> str:
    """A scalar that every operator accepts for a value of this dtype."""
    dtype = draw.pool[name].dtype
    if dtype == torch.bool:
        return draw.random.choice(("True", "False"))
    if dtype.is_complex:
        return draw.random.choice(("0.5", "2", "(0.5+0.25j)"))
    if dtype.is_floating_point:
        return draw.random.choice(("0.5", "-0.25", "2", "0.75"))
    return draw.random.choice(("3", "1", "2", "7"))


def name_dtype(draw: Draw, name: str) -> str:
    """A dtype's name in programs."""
    dtype = draw.pool[name].dtype
    names = {
        torch.float16: "f16",
        torch.bfloat16: "bf16",
        torch.float32: "f32",
        torch.float64: "f64",
        torch.complex64: "c64",
    }
    return names.get(dtype, str(dtype))


# --- views and mutation -------------------------------------------------------------------------


@register_operator("mutation", 6)
def _draw_view(draw: Draw) -> str:
    a = pick_value(draw, least=1, side=2)
    dim = draw.dim(a)
    n = f"{a}.shape[{dim}]"
    ways = [
        f"{a}[1:]",
        f"{a}[:-1]",
        f"{a}[..., ::2]",
        f"{a}[: {a}.shape[0] // 2]",
        f"{a}[{a}.shape[0] // 2 :]",
        f"{a}.transpose(0, {dim})",
        f"{a}.narrow({dim}, 1, {n} - 1)",
        f"{a}.select({dim}, -1)",
        f"{a}.unsqueeze({dim})",
        f"{a}.view(-1)",
        f"{a}.reshape(-1)",
        f"{a}.expand(2, *{a}.shape)",
        f"{a}.unfold({dim}, 2, 1)",
        f"{a}.chunk(2, {dim})[1]",
        f"{a}.unbind({dim})[-1]",
        f"{a}.detach()",
        f"{a}.view_as({a})",
        f"{a}.contiguous()",
        f"{a}.flatten()",
        f"{a}.as_strided(({a}.shape[0] - 1,), (1,))",
    ]
    if draw.pool[a].dim() == 2:
        ways += [f"{a}.diagonal()", f"{a}.t()", f"{a}.mT.reshape(-1)"]
    if draw.pool[a].dim() == 4:
        ways += [f"{a}.permute(0, 2, 3, 1)", f"{a}.contiguous(memory_format=torch.channels_last)"]
    return f"{draw.new()} = {draw.random.choice(ways)}"


@register_operator("mutation", 7)
def _draw_overlapping_write(draw: Draw) -> str:
    """A part of a tensor becomes another part of it."""
    a = pick_value(draw, least=1, side=3)
    dim = draw.dim(a)
    n, half, t = f"{a}.shape[0]", f"({a}.shape[0] // 2)", draw.new()
    return draw.random.choice(
        (
            f"{a}[1:] = {a}[:-1].clone()",
            f"{a}[:-1] = {a}[1:].clone()",
            f"{a}[1:] = {a}[:-1] * 1",
            f"{a}[1:].copy_({a}[:-1].clone())",
            f"{a}[..., 1:] = {a}[..., :-1].clone()",
            f"{a}[{half}:] = {a}[: {n} - {half}].clone()",
            f"{a}.copy_({a}.flip({dim}))",
            f"{a}.copy_({a}.roll(1, {dim}))",
            f"{a}[1:-1] = torch.where({a}[2:] == {a}[:-2], {a}[1:-1], {a}[2:])",
            (
                f"{t} = {a}[:{half}].clone()\n{a}[:{half}] = {a}[{n} - {half} :]\n"
                f"{a}[{n} - {half} :] = {t}"
            ),
            f"{t} = {a}[0].clone()\n{a}[0].copy_({a}[-1])\n{a}[-1].copy_({t})",
            (
                f"{a}.narrow({dim}, 1, {a}.shape[{dim}] - 1).copy_("
                f"{a}.narrow({dim}, 0, {a}.shape[{dim}] - 1).clone())"
            ),
            f"{a}.select({dim}, 0).copy_({a}.select({dim}, -1))",
            f"{t} = {a}.clone()\n{a}.copy_({t}.flip(0))\n{t}.copy_({a})",
        )
    )


@register_operator("mutation", 4)
def _draw_scatter_and_copy(draw: Draw) -> str:
    """A functional scatter whose result is copied into its operand."""
    a = pick_value(draw, least=1, side=2)
    u, value, n = draw.new(), draw_literal(draw, a), f"{a}.shape[0]"
    part = draw.random.choice(
        (
            f"torch.slice_scatter({a}, {a}[1:].clone(), 0, 1, {n})",
            f"torch.slice_scatter({a}, torch.full_like({a}[1:], {value}), 0, 1, {n})",
            f"torch.slice_scatter({a}, {a}[: {n} - 1].clone(), 0, 1, {n})",
            f"torch.select_scatter({a}, {a}[-1].clone(), 0, 0)",
            f"torch.select_scatter({a}, {a}[0].clone(), 0, {n} - 1)",
            f"torch.where({a} == {a}[:1], {a}[-1:], {a})",
            f"{a}.flip(0)",
            f"{a}.clone()",
        )
    )
    after = draw.random.choice(
        (
            f"\n{a}.copy_({u})",
            f"\n{a}.copy_({u})\n{u}[0] = {value}",
            f"\n{u}.copy_({a}.flip(0))",
            "",
        )
    )
    return f"{u} = {part}{after}"


@register_operator("mutation", 7)
def _draw_in_place(draw: Draw) -> str:
    a = pick_value(draw, least=1, side=2)
    b = pick_similar(draw, a)
    value, dim, t = draw_literal(draw, a), draw.dim(a), draw.new()
    ways = [
        f"{a}.fill_({value})",
        f"{a}.zero_()",
        f"{a}[0] = {value}",
        f"{a}[..., -1] = {value}",
        f"{a}[::2] = {value}",
        f"{a}.copy_({b})",
        f"{a}[1:].copy_({b}[:-1].clone())",
        f"{a}.select({dim}, 0).fill_({value})",
        f"{a}.masked_fill_({b} == {b}.clone(), {value})",
        f"{a}[{b} == {a}.flatten()[0]] = {value}",
        f"{a}.unsqueeze(0)[0, 0].fill_({value})",
        f"{a}.view(-1)[1:].fill_({value})",
        f"{t} = {a}[1:]\n{t}.fill_({value})",
        f"{t} = {a}.clone()\n{a}.fill_({value})",
        f"{t} = {a}.clone()\n{t}.transpose_(0, {dim})",
        f"{t} = {a}.clone()\n{t}.unsqueeze_(0)",
        f"{t} = {a}.new_zeros({a}.shape)\n{t}[1:] = {a}[:-1]",
        f"{t} = torch.empty_like({a})\n{t}.copy_({a})\n{a}.copy_({t}.flip(0))",
    ]
    if draw.pool[a].dtype != torch.bool:
        ways += [
            f"{a}.add_({b})",
            f"{a}.mul_({value})",
            f"{a}[1:].add_({b}[1:])",
            f"{a}.select({dim}, 0).add_({b}.select({dim}, -1))",
            f"torch._foreach_add_([{a}, {b}.clone()], {value})",
            f"torch._foreach_mul_([{a}[:1], {a}[1:]], {value})",
            f"{t} = torch.empty_like({a})\ntorch.add({a}, {b}, out={t})",
            f"{a}.sub_({b}.flip(0))",
            f"{a}.add_({a}.clone())",
            f"{a}.transpose(0, {dim}).add_({value})",
            f"{t} = {a} + {value}\n{a}.mul_({value})",
        ]
    if draw.pool[a].dim() == 2:
        ways += [f"{a}.diagonal().fill_({value})", f"{a}.t()[0] = {value}", f"{a}.t_()"]
    return draw.random.choice(ways)


@register_operator("mutation", 4)
def _draw_indexed_write(draw: Draw) -> str:
    a = pick_value(draw, least=1, most=3, side=2)
    i = draw.pick(lambda v: v.dtype == torch.int64 and v.dim() == 1 and v.numel() > 0)
    rows, value = f"({i} % {a}.shape[0])", draw_literal(draw, a)
    unique = f"torch.arange({a}.shape[0], device={a}.device).flip(0)"
    new = draw.new()
    ways = [
        f"{a}[{rows}] = {value}",
        f"{a}.index_fill_(0, {rows}, {value})",
        f"{new} = {a}[{rows}]\n{new}.zero_()",
        f"{a}.index_copy_(0, {unique}, {a}.clone())",
        f"{a}[{unique}] = {a}.clone()",
        f"{a}[{a}.shape[0] - 1 :][0] = {a}[0]",
    ]
    if draw.pool[a].dtype != torch.bool:
        ways += [
            f"{a}.index_add_(0, {rows}, {a}[{rows}])",
            f"{a}.index_put_(({rows},), {a}[{rows}], accumulate=True)",
        ]
    if draw.pool[a].dim() == 1:
        ways += [f"{a}.scatter_(0, {rows}, {value})", f"{new} = {a}.take({rows})"]
    return draw.random.choice(ways)


@register_operator("mutation", 3)
def _draw_dtype_view(draw: Draw) -> str:
    a = pick_value(draw, INTEGERS, least=1, side=2)
    new = draw.new()
    size = draw.pool[a].dtype.itemsize
    narrow = [d for d in ("torch.uint8", "torch.int16", "torch.int32") if eval(d).itemsize < size]
    same = {1: "torch.int8", 2: "torch.int16", 4: "torch.int32", 8: "torch.int64"}[size]
    ways = [f"{new} = {a}.view({same})", f"{new} = {a}.view({same})\n{new}[0] = 1"]
    if size == 4:
        ways.append(f"{new} = ({a} & 0x7FFFFF).view(torch.float32) + 1")
    if size == 2:
        ways.append(f"{new} = ({a} & 0x3BFF).view(torch.float16)")
        ways.append(f"{new} = ({a} & 0x3BFF).view(torch.bfloat16)")
    for dtype in narrow:
        view = f"{a}.view({dtype})"
        ways += [f"{new} = {view}", f"{view}[..., 0] = 3", f"{view}[{view} > 2] = 3"]
    if size == 1:
        ways += [f"{new} = {a}.reshape(-1)[: {a}.numel() // 4 * 4].clone().view(torch.int32)"]
    return draw.random.choice(ways)


@register_operator("custom", 6)
def _draw_mutating_operator(draw: Draw) -> str:
    a = pick_value(draw, least=1, side=2)
    b = pick_similar(draw, a)
    t, n = draw.new(), f"{a}.shape[0]"
    half = f"({n} // 2)"
    ways = [
        f"{t} = {a}.clone()\nfuzz.flip_into({t}, {a})",
        f"{t} = {a}.clone()\nfuzz.flip_into({a}, {t})",
        f"{t} = {a}.clone()\nfuzz.flip_first_into({a}, {t})",
        f"{t} = {a}.clone()\nfuzz.flip_into({t}[1:], {a}[:-1])",
        f"fuzz.flip_into({a}[: {half}].clone(), {a}[{n} - {half} :])",
        f"{t} = torch.empty_like({a})\nfuzz.flip_into({a}, {t})",
        f"{t} = {a}.flip(0)\nfuzz.exchange({a}, {t})",
        f"fuzz.exchange({a}[:1], {a}[-1:])",
        f"fuzz.flip_into({b}.clone(), {a})",
        f"{t} = {a}.reshape(-1)\nfuzz.flip_into({t}.clone(), {t})",
    ]
    if draw.pool[a].dtype != torch.bool:
        ways += [
            f"{t} = fuzz.advance({a}, {b}.clone())",
            f"{t} = fuzz.advance({a}[1:], {a}[:-1].clone())",
            f"fuzz.negate_all([{a}[:1], {a}[1:]])",
            f"{t} = {a} + {b}\nfuzz.negate_all([{a}, {t}])",
            f"fuzz.scale_into({a}, 2)",
            f"fuzz.scale_into({a}, {a}.shape[0], {b}.clone())",
            f"{t} = {a}.clone()\nfuzz.scale_into({a}, 3, {t})\n{t}.add_({a})",
        ]
    return draw.random.choice(ways)


# --- buffers ------------------------------------------------------------------------------------


@register_operator("buffers", 6)
def _draw_buffer_update(draw: Draw) -> str:
    names = [name for name in draw.pool if name.startswith("b") and name[1:].isdigit()]
    if not names:
        raise NoOperandError
    b = draw.random.choice(names)
    a = pick_similar(draw, b)
    i = draw.pick(lambda v: v.dtype == torch.int64 and v.dim() == 1 and v.numel() > 0)
    value, t = draw_literal(draw, b), draw.new()
    ways = [
        f"self.{b}.copy_({a})",
        f"self.{b}.fill_({value})",
        f"{t} = self.{b}.clone()",
        f"{t} = self.{b}",
        f"{t} = self.{b}.flatten()[1:]",
        f"self.{b} = {a}.flip(0)" if draw.pool[b].dim() else f"self.{b} = {a}.clone()",
        f"{t} = self.{b} + 0 if {value} else self.{b}",
    ]
    if draw.pool[b].dim():
        ways += [
            f"self.{b}[1:] = self.{b}[:-1].clone()",
            f"self.{b}.copy_(self.{b}.roll(1, 0))",
            f"self.{b}[{i} % self.{b}.shape[0]] = {value}",
            f"self.{b}[-1] = {a}[0]",
        ]
    if draw.pool[b].dtype != torch.bool:
        ways += [f"self.{b}.add_({value})", f"{t} = self.{b} * 2\nself.{b}.add_({t})"]
    if draw.pool[b].dtype.is_floating_point:
        ways += [f"self.{b}.mul_(0.5).add_({a} * 0.5)", f"self.{b}.lerp_({a}, 0.25)"]
    return draw.random.choice(ways)


# --- any dtype ----------------------------------------------------------------------------------


@register_operator("shapes", 5)
def _draw_shape(draw: Draw) -> str:
    a = pick_value(draw, least=1, side=1)
    b = pick_similar(draw, a)
    dim = draw.dim(a)
    n = f"{a}.shape[{dim}]"
    ways = [
        f"torch.cat([{a}, {b}], {dim})",
        f"torch.stack([{a}, {b}], {dim})",
        f"torch.cat([{a}[1:], {a}[:1]])",
        f"{a}.flip({dim})",
        f"{a}.roll(2, {dim})",
        f"{a}.repeat_interleave(2, {dim})",
        f"{a}.tile(2)",
        f"{a}.clone()",
        f"{a}.new_zeros({a}.shape[0] * 2)",
        f"torch.arange({n}, device={a}.device)",
        f"torch.full_like({a}, {draw_literal(draw, a)})",
        f"torch.where({a} == {b}, {a}, {b})",
        f"{a}.index_select({dim}, torch.arange({n}, device={a}.device).flip(0))",
        f"{a}[:0]",
        f"{a}.reshape(-1, 2)",
        f"{a}.expand(3, *{a}.shape).contiguous()",
        f"torch.nn.functional.pad({a}, (1, 0))",
        f"{a}.masked_select({a} == {a}.flatten()[0]).sum()",
    ]
    if draw.pool[a].dim() == 2:
        ways += [f"{a}.tril()", f"{a}.triu(1)", f"{a}.t().contiguous()", f"{a}.rot90()"]
    return f"{draw.new()} = {draw.random.choice(ways)}"
