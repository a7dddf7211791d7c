"""Operators of the memory fuzzer's programs: each function draws one or several lines."""

from __future__ import annotations

from collections.abc import Callable

import torch

from test.fuzz.memory_programs import MAX_ELEMENTS, Draw, NoOperandError

Emit = Callable[[Draw], str]
OPERATORS: list[tuple[int, Emit]] = []
EXTERN_OPERATORS: list[tuple[int, Emit]] = []
"""Operators without generated kernels: a program of them compiles within a second."""


def register_operator(weight: int = 2, extern: int = 0) -> Callable[[Emit], Emit]:
    def register(emit: Emit) -> Emit:
        OPERATORS.append((weight, emit))
        if extern:
            EXTERN_OPERATORS.append((extern, emit))
        return emit

    return register


@register_operator(9)
def _draw_unary(draw: Draw) -> str:
    how = draw.random.choice(("sin", "tanh", "relu", "neg", "sigmoid", "abs", "square", "clone"))
    name = draw.real()
    square = ".clamp(-2, 2)" if how == "square" else ""
    return f"{draw.new()} = {name}{square}.{how}()"


@register_operator(9)
def _draw_binary(draw: Draw) -> str:
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


@register_operator(14, extern=14)
def _draw_matmul(draw: Draw) -> str:
    a = draw.wide(2, 3)
    inner = draw.pool[a].shape[-1]
    b = draw.pick(
        lambda v: (
            v.dtype == torch.float32
            and v.dim() == 2
            and inner in v.shape
            and v.numel() // inner * draw.pool[a].numel() // inner <= MAX_ELEMENTS
        )
    )
    right = b if draw.pool[b].shape[0] == inner else f"{b}.mT"
    scale = draw.random.choice((f"({a} @ {right}) / 8", f"torch.tanh({a} @ {right})"))
    if draw.extern:
        scale = f"{a} @ {right}"
    elif draw.random.random() < 0.4:
        # The matmul itself, with values that stay small.
        scale = f"functional.normalize({a}, dim=-1) @ functional.normalize({right}, dim=0)"
    return f"{draw.new()} = {scale}"


@register_operator(3, extern=4)
def _draw_bmm(draw: Draw) -> str:
    a = draw.wide(3, 3)
    shape = draw.pool[a].shape
    b = draw.pick(
        lambda v: v.dtype == torch.float32 and v.dim() == 3 and v.shape[::2] == shape[::2]
    )
    return f"{draw.new()} = torch.bmm({a}, {b}.mT){'' if draw.extern else ' / 8'}"


@register_operator(3, extern=4)
def _draw_addmm(draw: Draw) -> str:
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


@register_operator(5)
def _draw_reduce(draw: Draw) -> str:
    a = draw.wide(1)
    how = draw.random.choice(("mean", "amax", "sum", "logsumexp", "std", "prod"))
    keep = draw.random.choice((True, False))
    inner = f"{a}.clamp(-1, 1)" if how == "prod" else a
    return f"{draw.new()} = {inner}.{how}({draw.dim(a)}, keepdim={keep}).clamp(-4, 4)"


@register_operator(1)
def _draw_full_reduce(draw: Draw) -> str:
    return f"{draw.new()} = {draw.real()}.sum().tanh()"


@register_operator(5)
def _draw_reduce_dim(draw: Draw) -> str:
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


@register_operator(5)
def _draw_cat(draw: Draw) -> str:
    a = draw.wide(1)
    shape = draw.pool[a].shape
    more = [
        draw.pick(lambda v: v.dtype == torch.float32 and v.shape == shape)
        for _ in range(draw.random.choice((1, 1, 2)))
    ]
    if draw.pool[a].numel() * (1 + len(more)) > MAX_ELEMENTS:
        raise NoOperandError
    how = draw.random.choice(("cat", "cat", "stack")) if len(shape) < 3 else "cat"
    return f"{draw.new()} = torch.{how}(({', '.join([a, *more])}), {draw.dim(a)})"


@register_operator(4, extern=3)
def _draw_split(draw: Draw) -> str:
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


@register_operator(9)
def _draw_view(draw: Draw) -> str:
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


@register_operator(9)
def _draw_in_place(draw: Draw) -> str:
    a = draw.wide(1)
    b = draw.fitting(a)
    if torch.broadcast_shapes(draw.pool[a].shape, draw.pool[b].shape) != draw.pool[a].shape:
        raise NoOperandError
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


@register_operator(6)
def _draw_index(draw: Draw) -> str:
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


@register_operator(4)
def _draw_sort(draw: Draw) -> str:
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


@register_operator(2)
def _draw_select(draw: Draw) -> str:
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


@register_operator(2)
def _draw_convolution(draw: Draw) -> str:
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


@register_operator(3, extern=2)
def _draw_attention(draw: Draw) -> str:
    a = draw.wide(2, 2, side=4)
    shape = draw.pool[a].shape
    b = draw.pick(
        lambda v: v.dtype == torch.float32 and v.dim() == 2 and v.shape[1] == shape[1] > 0
    )
    call = "functional.scaled_dot_product_attention"
    return f"{draw.new()} = {call}({a}[None, None], {b}[None, None], {b}[None, None])[0, 0]"


@register_operator(5)
def _draw_cast(draw: Draw) -> str:
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


@register_operator(5)
def _draw_mixed_dtypes(draw: Draw) -> str:
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


@register_operator(2)
def _draw_complex_view(draw: Draw) -> str:
    a = draw.pick(
        lambda v: (
            v.dtype == torch.float32 and v.dim() > 0 and v.shape[-1] % 2 == 0 and v.numel() > 1
        )
    )
    if draw.dynamic:
        raise NoOperandError
    return f"{draw.new()} = torch.view_as_complex({a}.reshape(-1, 2).contiguous())"


@register_operator(2)
def _draw_constant(draw: Draw) -> str:
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


@register_operator(3, extern=6)
def _draw_custom(draw: Draw) -> str:
    if draw.training:
        raise NoOperandError
    a = draw.real(1)
    if draw.random.random() < 0.6:
        return f"{draw.new()} = fuzz.tame({a})"
    return f"{draw.new()}, {draw.new()} = fuzz.both({a})"


@register_operator(2)
def _draw_branches(draw: Draw) -> str:
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


@register_operator(2)
def _draw_loop(draw: Draw) -> str:
    if draw.training:
        raise NoOperandError
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


@register_operator(0, extern=6)
def _draw_plain_view(draw: Draw) -> str:
    a = draw.wide(1)
    dim = draw.dim(a)
    ways = [f"{a}.unsqueeze(0)", f"{a}.transpose(0, {dim})", f"{a}.select({dim}, 1)", f"{a}[1:]"]
    ways += [f"{a}.narrow({dim}, 1, {a}.shape[{dim}] - 1)", f"{a}[..., ::2]", f"{a}[:, None]"]
    ways += [f"{a}.view(-1)[: {a}.shape[0] * {a}.shape[0]].view({a}.shape[0], {a}.shape[0])"]
    ways += [f"{a}.expand(2, *{a}.shape)"] if draw.pool[a].dim() == 2 else []
    return f"{draw.new()} = {draw.random.choice(ways)}"


@register_operator(0, extern=3)
def _draw_sorted(draw: Draw) -> str:
    a = draw.wide(1, 3)
    dim = draw.dim(a)
    how = draw.random.choice((f"torch.sort({a}, dim={dim})", f"torch.topk({a}, 2, {dim})"))
    which = draw.random.choice((0, 0, 1))
    return f"{draw.new()} = {how}[{which}]"


@register_operator(0, extern=2)
def _draw_nonzero_select(draw: Draw) -> str:
    a = draw.wide(2, 2, side=4)
    more = draw.random.choice(("", ", padding=1"))
    return f"{draw.new()} = functional.conv2d({a}[None, None], KERNEL{more})[0]"


@register_operator(0, extern=4)
def _draw_mutating_operator(draw: Draw) -> str:
    return f"fuzz.shrink({draw.wide(1)})"


@register_operator(0, extern=2)
def _draw_branches_of_matmuls(draw: Draw) -> str:
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


@register_operator(0, extern=2)
def _draw_loop_of_matmuls(draw: Draw) -> str:
    if draw.training:
        raise NoOperandError
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
