"""Operators of the graph fuzzer: control flow, and the layers of models."""

from __future__ import annotations

import torch

from test.fuzz.graph_operators import (
    FLOATS,
    HALVES,
    INTEGERS,
    draw_literal,
    pick_similar,
    pick_value,
    register_operator,
)
from test.fuzz.memory_programs import Draw, NoOperandError

# --- control flow -------------------------------------------------------------------------------


def _contiguous(draw: Draw, dtypes: tuple[torch.dtype, ...]) -> str:
    """A contiguous value: the body of a loop must return the strides that it was given."""
    return draw.pick(
        lambda v: (
            v.dtype in dtypes
            and v.dim() > 0
            and all(size >= 2 for size in v.shape)
            and v.is_contiguous()
        )
    )


def _number(draw: Draw) -> str:
    """A 0-dim int64 tensor whose value, 0 to 5, is known at run time only."""
    i = draw.pick(lambda v: v.dtype == torch.int64 and v.dim() == 1 and v.numel() > 0)
    return f"({i}[0] % {draw.random.choice((1, 3, 6))})"


@register_operator("control", 5)
def _draw_loop(draw: Draw) -> str:
    if draw.training:
        raise NoOperandError
    a = _contiguous(draw, (*FLOATS, *INTEGERS))
    t, value = draw.new(), draw_literal(draw, a)
    real = draw.pool[a].dtype.is_floating_point
    step = draw.random.choice(
        ("x.flip(0)", "x.roll(1, 0)", f"x + {value}", "x * 0.5" if real else "x ^ 3")
    )
    if real:
        step = f"({step}).clamp(-2, 2)"
    carried = draw.random.choice((a, a, f"{a}[1:]", f"{a}.clone()", f"{a}.clone()[1:]"))
    after = draw.random.choice(
        (
            "",
            f"\n{draw.new()} = {a} + {value}",
            f"\n{a}.add_({value})",
            f"\n{draw.new()} = {t} + {value}",
            f"\n{t}.add_({value})",
        )
    )
    count = draw.new()
    return (
        f"{count} = {_number(draw)}\n"
        f"def {t}_on(i, x):\n"
        f"    return i < {count}\n"
        f"def {t}_body(i, x):\n"
        f"    return i + 1, {step}\n"
        f"{t} = while_loop({t}_on, {t}_body, ({count} * 0, {carried}))[1]{after}"
    )


@register_operator("control", 3)
def _draw_loop_of_two(draw: Draw) -> str:
    if draw.training:
        raise NoOperandError
    a = _contiguous(draw, (*FLOATS, *INTEGERS))
    b = draw.pick(
        lambda v: (
            (v.shape, v.dtype) == (draw.pool[a].shape, draw.pool[a].dtype) and v.is_contiguous()
        )
    )
    t, u, n = draw.new(), draw.new(), _number(draw)
    body = draw.random.choice(("y.clone(), x.clone()", "x.flip(0), y.clone()", "y.flip(0), x * 1"))
    # An operand twice is an error of torch.while_loop.
    operands = f"{a}, {b}" if a != b else f"{a}, {b}.clone()"
    return (
        f"def {t}_on(i, x, y):\n"
        f"    return i > 0\n"
        f"def {t}_body(i, x, y):\n"
        f"    return i - 1, {body}\n"
        f"_, {t}, {u} = while_loop({t}_on, {t}_body, ({n}, {operands}))"
    )


@register_operator("control", 2)
def _draw_nested_loop(draw: Draw) -> str:
    if draw.training:
        raise NoOperandError
    a = _contiguous(draw, (*FLOATS, *INTEGERS))
    t, n = draw.new(), _number(draw)
    return (
        f"def {t}_on(i, x):\n"
        f"    return i > 0\n"
        f"def {t}_inner(j, y):\n"
        f"    return j - 1, y.flip(0) * 1\n"
        f"def {t}_body(i, x):\n"
        f"    return i - 1, while_loop({t}_on, {t}_inner, (i - 1, x + x))[1]\n"
        f"{t} = while_loop({t}_on, {t}_body, ({n}, {a}))[1]"
    )


@register_operator("control", 6)
def _draw_branches(draw: Draw) -> str:
    a = pick_value(draw, (*FLOATS, *INTEGERS), least=1, side=2)
    t, value, n = draw.new(), draw_literal(draw, a), f"{a}.shape[0]"
    bodies = [
        "x.clone()",
        f"x + {value}",
        "x.flip(0)",
        "x * x",
        "torch.where(x > 0, x, -x)",
        "torch.cat([x[1:], x[:1]])",
        "x.index_copy(0, torch.arange(x.shape[0], device=x.device), x.flip(0))",
        "x.scatter_add(0, torch.zeros_like(x, dtype=torch.int64), x)",
    ]
    operand = draw.random.choice(
        (a, a, f"{a}[1:]", f"{a}[..., ::2]", f"{a}.transpose(0, -1)", f"{a}[: {n} // 2]")
    )
    condition = draw.random.choice((f"{_number(draw)} > 1", f"({a} > 0).any()", f"{n} > 4"))
    after = draw.random.choice(
        ("", f"\n{t}.mul_(2)", f"\n{a}.mul_(2)", f"\n{a}[1:] = {a}[:-1] + 1")
    )
    return (
        f"def {t}_yes(x):\n"
        f"    return {draw.random.choice(bodies)}\n"
        f"def {t}_no(x):\n"
        f"    return {draw.random.choice(bodies)}\n"
        f"{t} = cond({condition}, {t}_yes, {t}_no, ({operand},)){after}"
    )


@register_operator("control", 2)
def _draw_branches_of_two(draw: Draw) -> str:
    a = pick_value(draw, (*FLOATS, *INTEGERS), least=1, side=2)
    b = pick_similar(draw, a)
    t, u = draw.new(), draw.new()
    return (
        f"def {t}_yes(x, y):\n"
        f"    return x + y, y.clone()\n"
        f"def {t}_no(x, y):\n"
        f"    return cond((x > y).any(), lambda p: p.flip(0), lambda p: p * 1, (y,)), x.clone()\n"
        f"{t}, {u} = cond({_number(draw)} < 1, {t}_yes, {t}_no, ({a}, {b}))"
    )


@register_operator("control", 3)
def _draw_scan(draw: Draw) -> str:
    if draw.training:
        raise NoOperandError
    a = _contiguous(draw, (torch.float32, *INTEGERS))
    t, u = draw.new(), draw.new()
    more = draw.random.choice(("", "", ", reverse=True"))
    step = draw.random.choice(("(c + x) % 7, c * 2", "x + 1, c + x", "c.clone(), x * 2"))
    xs = draw.random.choice((a, f"{a}[1:]", f"{a}.flip(0)"))
    return (
        f"def {t}_step(c, x):\n    return {step}\n"
        f"{t}, {u} = scan({t}_step, {a}[0].clone(), {xs}{more})"
    )


# --- layers -------------------------------------------------------------------------------------


@register_operator("layers", 5)
def _draw_pad(draw: Draw) -> str:
    a = pick_value(draw, (*FLOATS, torch.uint8), least=2, side=3)
    width = 1 if draw.random.random() < 0.6 else 2
    mode = draw.random.choice(("constant", "constant", "reflect", "replicate", "circular"))
    pads = [draw.random.choice((0, 1, width, -1)) for _ in range(2 * draw.random.choice((1, 2)))]
    more = "" if mode == "constant" else f", mode={mode!r}"
    if mode == "constant" and draw.random.random() < 0.3:
        more = ", value=2"
    text = f"functional.pad({a}, {tuple(pads)}{more})"
    if draw.pool[a].dim() == 4 and draw.random.random() < 0.4:
        b = draw.new()
        gelu = f"({a} * 0.5) * (torch.erf({a} * 0.7071) + 1)"
        return (
            f"{b} = {gelu}\n{draw.new()} = functional.pad({b}, {tuple(pads)}) @ "
            f"functional.pad({b}, {tuple(pads)}).permute(0, 1, 3, 2) / 8"
        )
    return f"{draw.new()} = {text}"


@register_operator("layers", 5)
def _draw_convolution(draw: Draw) -> str:
    a = pick_value(draw, (torch.float32,), 4, 4, 3)
    channels = draw.pool[a].shape[1]
    new = draw.new()
    weight = f"CONSTANT.view(-1)[: {4 * channels * 9}].view(4, {channels}, 3, 3)"
    ways = [
        f"functional.max_pool2d({a}, 2)",
        f"functional.avg_pool2d({a}, 3, 2, 1)",
        f"functional.adaptive_avg_pool2d({a}, 2)",
        f"functional.interpolate({a}, scale_factor=2, mode='nearest')",
        f"functional.interpolate({a}, size=(5, 7), mode='bilinear')",
        f"functional.group_norm({a}, 1)",
        f"functional.instance_norm({a})",
        f"functional.pixel_unshuffle({a}[..., :2, :2], 2)",
        f"functional.unfold({a}, 2)",
        f"functional.softmax({a}, 1)",
    ]
    if 36 * channels <= 600:
        normalized = f"functional.group_norm({a}, {channels}, CONSTANT.view(-1)[:{channels}])"
        ways += [
            f"functional.conv2d({a}, {weight})",
            f"functional.conv2d(functional.gelu({normalized}), {weight})",
            f"functional.conv2d({a}, {weight}, padding=1, stride=2)",
            f"functional.conv2d({a}, {weight}, padding=1).relu() + 0.5",
            f"functional.conv_transpose2d({a}, {weight}.transpose(0, 1))",
        ] * 2
    return f"{new} = {draw.random.choice(ways)}"


@register_operator("layers", 5)
def _draw_matmul(draw: Draw) -> str:
    a = pick_value(draw, FLOATS, 2, 4)
    inner, dtype = draw.pool[a].shape[-1], draw.pool[a].dtype
    b = draw.pick(lambda v: v.dtype == dtype and v.dim() == 2 and v.shape[1] == inner)
    columns = f"{b}[:, 0]"
    ways = [
        f"functional.linear({a}, {b}) / 4",
        f"functional.linear({a}, {b}, {columns}).relu()",
        f"functional.gelu(functional.linear({a}, {b})) * 0.5",
        f"({a} @ {b}.mT)",
        f"torch.einsum('...k,nk->...n', {a}, {b})",
    ]
    if draw.pool[a].dim() == 2:
        ways += [
            f"torch.addmm({columns}, {a}, {b}.t(), beta=0.5, alpha=0.25)",
            f"torch.mm({a}, {b}.t()).softmax(-1)",
            f"torch.bmm({a}[None], {b}.t()[None]).squeeze(0)",
            f"torch.mv({a}, {b}[0])",
            f"{a} + functional.linear(functional.linear({a}, {b}), {b}.t()) / 8",
        ]
    return f"{draw.new()} = {draw.random.choice(ways)}"


@register_operator("layers", 3)
def _draw_attention(draw: Draw) -> str:
    a = pick_value(draw, (torch.float32, *HALVES), 3, 4, 2)
    new = draw.new()
    more = draw.random.choice(("", ", is_causal=True", ", scale=0.5"))
    return f"{new} = functional.scaled_dot_product_attention({a}, {a}, {a}.flip(-2){more})"
