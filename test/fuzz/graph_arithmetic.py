"""Operators of the graph fuzzer: integers, reductions of all dtypes, 16-bit and complex numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from test.fuzz.graph_operators import (
    FLOATS,
    HALVES,
    INTEGERS,
    draw_literal,
    name_dtype,
    pick_similar,
    pick_value,
    register_operator,
)
from test.fuzz.memory_programs import Draw

# --- integers and reductions --------------------------------------------------------------------


@register_operator("integers", 8)
def _draw_reduction(draw: Draw) -> str:
    a = pick_value(draw, (*INTEGERS, torch.bool, *FLOATS), least=1)
    dtype = draw.pool[a].dtype
    dim, keep = draw.dim(a), draw.random.choice((True, False))
    where = draw.random.choice(("", f"{dim}, keepdim={keep}", f"{dim}"))
    new = draw.new()
    ways = [f"{a}.sum({where})", f"{a}.any({where})", f"{a}.all({where})"]
    ways += [f"{a}.amax({where})", f"{a}.amin({where})"] * 2
    ways += [f"{a}.count_nonzero({dim})", f"{a}.cumsum({dim})", f"{a}.to(f32).mean({where})"]
    if dtype != torch.bool:
        ways += [f"{a}.min()", f"{a}.max()", f"{a}.aminmax()[0]", f"{a}.aminmax(dim={dim})[1]"] * 2
        ways += [f"{a}.max({dim}, keepdim={keep})[0]", f"{a}.min({dim})[0]"]
        ways += [f"{a}.sum({dim}, dtype={name_dtype(draw, a)})", f"{a}.cummax({dim})[0]"]
        ways += [f"{a}.sort({dim}, stable=True)[0]", f"{a}.argmax({dim})", f"{a}.argmin()"]
        ways += [f"({a} > 2).sum({where})", f"{a}.to(f32).std({dim})", f"{a}.sum({where})"]
        ways += [f"{a}.to(f32).var_mean({dim})[0]", f"({a} == {a}.amax()).any({where})"]
        ways += [f"({a}.to(f32) - {a}.min()) / ({a}.max() - {a}.min() + 1).to(f32)"] * 2
        ways += [f"torch.topk({a}, 1, {dim})[0]", f"{a}.prod({dim}, dtype={name_dtype(draw, a)})"]
    else:
        ways += [f"{a}.to(torch.uint8).max()", f"{a}.argmax()", f"{a}.sum({dim}) > 1"]
    return f"{new} = {draw.random.choice(ways)}"


@register_operator("integers", 6)
def _draw_integer_arithmetic(draw: Draw) -> str:
    a = pick_value(draw, INTEGERS)
    shape = draw.pool[a].shape

    def fits(value: Tensor) -> bool:
        return value.dtype in INTEGERS and value.shape in (shape, shape[-1:], torch.Size([]))

    b = draw.pick(fits)
    value = draw_literal(draw, a)
    ways = [
        f"{a} + {b}",
        f"{a} - {b}",
        f"{a} * {b}",
        f"{a} // ({b}.abs() + 1)",
        f"{a} % 7",
        f"{a} & {b}",
        f"{a} ^ {b}",
        f"{a} | {value}",
        f"~{a}",
        f"{a} << 1",
        f"{a} >> 1",
        f"-{a}",
        f"{a}.abs()",
        f"torch.maximum({a}, {b})",
        f"torch.where({a} > {b}, {a}, {b})",
        f"{a}.clamp(2, 50)",
        f"{a} / ({b}.abs() + 1).to(f32)",
        f"({a} > {b})",
        f"{a} == {value}",
        f"{a}.sign()",
        f"{a} * 0.5",
        f"torch.bitwise_not({a}) + {value}",
        f"{a} ** 2",
        f"torch.div({a}, 3, rounding_mode='floor')",
        f"torch.remainder({a}, 5)",
        f"torch.fmod({a}, 5)",
        f"{a}.to(f32).tanh()",
    ]
    return f"{draw.new()} = {draw.random.choice(ways)}"


@register_operator("integers", 4)
def _draw_cast(draw: Draw) -> str:
    a = pick_value(draw, (*INTEGERS, torch.bool))
    to = ("torch.uint8", "torch.int8", "torch.int16", "torch.int32", "torch.int64", "torch.bool")
    if draw.random.random() < 0.3:
        a = pick_value(draw, FLOATS)
        what = f"({a} * 16).clamp(0, 100).round()"
        return f"{draw.new()} = {what}.to({draw.random.choice(to)})"
    return f"{draw.new()} = {a}.to({draw.random.choice((*to, 'f32', 'f16', 'bf16'))})"


@register_operator("integers", 2)
def _draw_logical(draw: Draw) -> str:
    a = pick_value(draw, (torch.bool,))
    b = pick_similar(draw, a)
    ways = (f"{a} & {b}", f"{a} ^ {b}", f"~{a}", f"{a}.logical_or({b})", f"{a}.to(torch.int8)")
    return f"{draw.new()} = {draw.random.choice(ways)}"


# --- 16-bit and complex -------------------------------------------------------------------------


@register_operator("halves", 6)
def _draw_half_arithmetic(draw: Draw) -> str:
    a = pick_value(draw, HALVES)
    b = pick_similar(draw, a)
    ways = [
        f"{a} + {b}",
        f"{a} * 0.5",
        f"{a}.tanh()",
        f"torch.maximum({a}, {b})",
        f"torch.nn.functional.silu({a})",
        f"{a}.to(f32) * 0.25",
        f"({a}.to(f32) + {b}.to(f32)).to({name_dtype(draw, a)})",
        f"torch.where({a} > 0, {a}, {b} * 0.25)",
        f"{a}.abs().sqrt()",
    ]
    if draw.pool[a].dim():
        dim = draw.dim(a)
        ways += [f"{a}.sum({dim}) / 8", f"{a}.softmax({dim})", f"{a}.amax({dim})", f"{a}.mean()"]
        ways += [f"torch.cat([{a}, {b}], {dim})", f"{a}.cumsum({dim}) / 8"]
        ways += [f"functional.layer_norm({a}, {a}.shape[-1:])"]
    if draw.pool[a].dim() == 2:
        ways += [f"{a} @ {a}.mT", f"({a} @ {b}.mT).tanh()"] * 2
    return f"{draw.new()} = {draw.random.choice(ways)}"


@register_operator("halves", 2)
def _draw_half(draw: Draw) -> str:
    a = pick_value(draw, (torch.float32,))
    return f"{draw.new()} = {a}.to({draw.random.choice(('f16', 'bf16'))})"


_COMPLEX = (torch.complex64,)


@register_operator("complex", 8)
def _draw_complex_arithmetic(draw: Draw) -> str:
    a = pick_value(draw, _COMPLEX)
    b = pick_similar(draw, a)
    ways = [
        f"{a} + {b}",
        f"{a} - {b}",
        f"{a} * {b}",
        f"{a} / ({b} + 2)",
        f"{a} / 2",
        f"{a} * (0.5+0.25j)",
        f"{a}.conj()",
        f"{a}.conj() * {b}",
        f"{a}.abs()",
        f"{a}.real",
        f"{a}.imag + 1",
        f"torch.view_as_real({a})",
        f"torch.view_as_real({a}).sum(-1)",
        f"{a}.exp()",
        f"-{a}",
        f"{a} + torch.full((), 1j, device={a}.device)",
        f"torch.complex({a}.real, {b}.imag)",
        f"torch.add({a}, {b}, alpha=2)",
        f"torch.sub({a}, {b}, alpha=0.5)",
        f"{a}.clone()",
        f"{a} == {b}",
        f"torch.polar({a}.abs(), {b}.real)",
        f"{a}.to(torch.complex128).to(c64)",
    ]
    if draw.pool[a].dim():
        dim = draw.dim(a)
        ways += [f"{a}.sum({dim})", f"{a}.mean()", f"torch.cat([{a}, {b}], {dim})"]
        ways += [f"{a}.flip({dim})", f"{a}.cumsum({dim})"]
    if draw.pool[a].dim() == 2:
        ways += [f"{a} @ {b}.mT", f"{a} @ {b}.mH", f"functional.linear({a}, {b})"]
        ways += [f"torch.addmm({a} @ {b}.mT, {a}, {b}.mT)"]
        ways += [f"torch.addmm({a} @ {b}.mT, {a}, {b}.mT, alpha=0.5, beta=2)"]
        ways += [f"torch.baddbmm(({a} @ {b}.mT)[None], {a}[None], {b}.mT[None])"]
        ways += [f"functional.linear({a}, {b}, {b}[:, 0])"]
    return f"{draw.new()} = {draw.random.choice(ways)}"


@register_operator("complex", 3)
def _draw_complex_in_place(draw: Draw) -> str:
    a = pick_value(draw, _COMPLEX, least=1, side=2)
    b = pick_similar(draw, a)
    return draw.random.choice(
        (
            f"{a}.add_({b})",
            f"{a}.mul_(0.5+0.5j)",
            f"{a}[1:] = {a}[:-1].clone()",
            f"{a}[0] = 1j",
            f"{a}.real.mul_(0.5)",
            f"{a}.imag.zero_()",
            f"torch.view_as_real({a})[..., 0].fill_(0.5)",
            f"{a}.copy_({b}.conj())",
        )
    )


@register_operator("complex", 3)
def _draw_complex(draw: Draw) -> str:
    a = pick_value(draw, (torch.float32,))
    if draw.random.random() < 0.5:
        return f"{draw.new()} = torch.complex({a}, {a}.sin())"
    return f"{draw.new()} = {a}.to(c64)"
