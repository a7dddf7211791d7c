"""Programs of the GEMM fuzzer: what models do around matmuls, drawn at random.

What fails in eager mode, or has values that float16 cannot hold, is not part of a program.
"""

from __future__ import annotations

import dataclasses
import random
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_TRACED_ROWS = 64
"""Number of rows of a program with dynamic rows while it is drawn and lowered."""

_LEADING_SHAPES = ((1,), (5,), (16,), (33,), (130,), (2, 9), (4, 6), (3, 1), (2, 2, 3))
"""Leading dimensions of a program's input, without its columns."""

_MAX_VALUE = 64.0
"""Maximum of a program's values, so that float16 can hold results that are computed from them."""


@dataclass(frozen=True)
class Input:
    """An input of a program."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    """Standard deviation of normal values; integers have any value."""
    padding: int = 0
    """Elements between the rows of the last dimension."""
    rows: bool = False
    """Whether the first dimension is dynamic in programs with dynamic rows."""

    def make(self, generator: torch.Generator, rows: int | None = None) -> Tensor:
        """The tensor with values, and with `rows` rows if they are dynamic."""
        sizes = (rows, *self.shape[1:]) if rows and self.rows else self.shape
        shape = (*sizes[:-1], sizes[-1] + self.padding)
        if self.dtype.is_floating_point:
            value = (torch.randn(shape, generator=generator) * self.scale).to(self.dtype)
        else:
            low, high = (0, 256) if self.dtype is torch.uint8 else (-127, 128)
            value = torch.randint(low, high, shape, generator=generator).to(self.dtype)
        return value[..., : self.shape[-1]]


@dataclass(frozen=True)
class Program:
    """The text of a function of tensors."""

    seed: int
    dtype: torch.dtype
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    backward: bool = False
    """Whether the program computes the gradients of its results instead."""
    rows: int | None = None
    """Number of rows at run time if they are dynamic."""

    def text(self) -> str:
        """The function's source."""
        names = ", ".join(inp.name for inp in self.inputs)
        lines = [f"def program({names}):", *self.lines]
        if not self.backward:
            return "\n    ".join([*lines, f"return {', '.join(self.results)},"])
        inputs = ", ".join(inp.name for inp in self.inputs if inp.dtype.is_floating_point)
        lines.insert(1, f"{inputs}, = [x.detach().requires_grad_() for x in ({inputs},)]")
        loss = " + ".join(f"wide({result}).square().sum()" for result in self.results)
        lines.append(f"return torch.autograd.grad({loss}, ({inputs},))")
        return "\n    ".join(lines)

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The function, whose arguments are the inputs in order."""
        namespace = dict(_NAMES)
        exec(self.text(), namespace)
        function: Callable[..., tuple[Tensor, ...]] = namespace["program"]
        return function

    def values(self) -> list[Tensor]:
        """Values of the inputs."""
        generator = torch.Generator().manual_seed(self.seed)
        return [inp.make(generator, self.rows) for inp in self.inputs]


def _wide(value: Tensor) -> Tensor:
    return value if value.dtype is torch.float64 else value.float()


_NAMES: Mapping[str, Any] = types.MappingProxyType({"torch": torch, "F": functional, "wide": _wide})

_GATES = (
    "F.silu({})",
    "F.gelu({})",
    "F.gelu({}, approximate='tanh')",
    "F.relu({})",
    "torch.sigmoid({})",
    "torch.tanh({})",
)

_POINTWISE = (
    "{} * 0.5",
    "-{}",
    "torch.sin({})",
    "{}.clamp(-1, 1)",
    "(wide({}) * 0.75).to(x0.dtype)",
    "{}.abs() + 0.25",
    *_GATES,
)


class _Draw:
    """A program while it is drawn, without lines that fail in eager mode or have large results."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.random.choices([torch.float16, torch.float32], [4, 1])[0]
        self.inputs: list[Input] = []
        self.lines: list[str] = []
        self.values: dict[str, Tensor] = {}
        self.names: dict[str, Any] = dict(_NAMES)
        self.leading: tuple[int, ...]
        self.rows = self.random.choice([1, 3, 17, 130]) if self.random.random() < 0.2 else None
        self.backward = self.rows is None and self.random.random() < 0.2
        choose = self.random.choice
        self.leading = (
            choose([(_TRACED_ROWS,), (_TRACED_ROWS, 3)]) if self.rows else choose(_LEADING_SHAPES)
        )
        padding = 0 if self.rows else choose([0, 0, 8])
        self.values["x0"] = self.input(
            "x", (*self.leading, self.width()), padding=padding, rows=True
        )

    def width(self) -> int:
        return self.random.choice([32, 40, 48, 64, 64, 96])

    def input(self, kind: str, shape: tuple[int, ...], **fields: Any) -> Tensor:
        """Add an input, whose name is the kind and a number."""
        name = f"{kind}{len(self.inputs)}"
        added = Input(name, shape, fields.pop("dtype", self.dtype), **fields)
        self.inputs.append(added)
        self.names[name] = added.make(self.generator)
        return self.names[name]

    def last(self) -> str:
        """The name of the newest input."""
        return self.inputs[-1].name

    def vector(self, size: int) -> str:
        self.input("b", (size,))
        return self.last()

    def matrix(self, rows: int, columns: int) -> str:
        padding = 0 if self.rows else self.random.choice([0, 0, 0, 8])
        self.input("w", (rows, columns), scale=max(rows, columns) ** -0.5, padding=padding)
        return self.last()

    def pick(self) -> str:
        """A value, more likely a late one."""
        names = list(self.values)
        return self.random.choices(names, [2**index for index in range(len(names))])[0]

    def add(self, text: str) -> str | None:
        """Add a line, and return the name of its value; None if the value cannot be used."""
        name = f"v{len(self.lines)}"
        try:
            value = eval(text, self.names)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        if not value.isfinite().all() or value.abs().max() > _MAX_VALUE:
            return None
        if self.rows and (value.ndim != len(self.leading) + 1 or len(value) != _TRACED_ROWS):
            return None
        self.lines.append(f"{name} = {text}")
        self.names[name] = self.values[name] = value
        return name

    def norm(self, of: str | None = None) -> str | None:
        v = of or self.pick()
        size = self.values[v].shape[-1]
        epsilon = self.random.choice([1e-5, 1e-6, 1e-3])
        w = self.random.choice([None, self.vector(size)])
        b = self.random.choice([None, self.vector(size)]) if w else None
        rms = f"wide({v}) * torch.rsqrt(wide({v}).pow(2).mean(-1, keepdim=True) + {epsilon})"
        return self.add(
            self.random.choice(
                [
                    f"F.layer_norm({v}, ({size},), {w}, {b}, {epsilon})",
                    f"({rms}).to(x0.dtype)" + (f" * {w}" if w else ""),
                    f"({rms}{f' * {w}' if w else ''}).to(x0.dtype)",
                ]
            )
        )

    def linear(self, of: str | None = None, n: int | None = None) -> str | None:
        v = of or self.pick()
        k, n = self.values[v].shape[-1], n or self.width()
        bias = self.vector(n) if self.random.random() < 0.4 else None
        kind = self.random.choice(["linear", "linear", "t", "m", "addmm", "quantized", "quantized"])
        if kind == "quantized":
            return self.add(f"F.linear({v}, {self.quantized(n, k)}, {bias})")
        if kind in ("m", "addmm"):
            m = self.matrix(k, n)
            if kind == "addmm" and self.values[v].ndim == 2 and bias:
                scales = self.random.choice(
                    ["", ", beta=0.5", ", alpha=2", ", beta=0", ", beta=2, alpha=0.5"]
                )
                return self.add(f"torch.addmm({bias}, {v}, {m}{scales})")
            return self.add(f"{v} @ {m}" + (f" + {bias}" if bias else ""))
        w = self.matrix(n, k)
        if kind == "t":
            return self.add(f"{v} @ {w}.t()" + (f" + {bias}" if bias else ""))
        return self.add(f"F.linear({v}, {w}, {bias})")

    def quantized(self, n: int, k: int) -> str:
        """The expression of an 8-bit or 4-bit weight [n, k]."""
        groups = self.random.choice([1, k // 16]) if k % 16 == 0 else 1
        if self.random.random() < 0.5:
            self.input("q", (n, k), dtype=torch.int8)
            whole = f"{self.last()}.to(x0.dtype)"
            scale = 1 / (64 * k**0.5)
        else:
            self.input("p", (n, k // 2), dtype=torch.uint8)
            p = self.last()
            order = self.random.choice([f"{p} & 15, {p} >> 4", f"{p} >> 4, {p} & 15"])
            whole = f"(torch.stack(({order}), -1).reshape({n}, {k}).to(x0.dtype) - 8)"
            scale = 1 / (4 * k**0.5)
        self.input("s", (n, groups), scale=scale)
        s = self.last()
        if groups == 1:
            return f"({whole} * {s})"
        return f"({whole}.reshape({n}, {groups}, -1) * {s}.unsqueeze(-1)).reshape({n}, {k})"

    def several(self) -> str | None:
        """Matmuls of one input, such as Q, K and V, possibly after a norm."""
        v = self.random.choice([self.norm(), self.pick(), self.pick()]) or self.pick()
        sizes = self.random.choice([[48, 48, 48], [64, 32, 32], [32, 40], [64, 64]])
        outputs = [self.linear(v, n) for n in sizes]
        return outputs[-1]

    def gate(self) -> str | None:
        v = self.random.choice([self.norm(), self.pick(), self.pick()]) or self.pick()
        n = self.width()
        act = self.random.choice(_GATES)
        if self.random.random() < 0.3:
            both = self.linear(v, 2 * n)
            if both is None:
                return None
            # The gradient of a slice cannot be lowered without a GPU.
            if self.backward or self.random.random() < 0.5:
                a, b = f"{both}.chunk(2, -1)[0]", f"{both}.chunk(2, -1)[1]"
            else:
                a, b = f"{both}.narrow(-1, 0, {n})", f"{both}.narrow(-1, {n}, {n})"
        else:
            gate, up = self.linear(v, n), self.linear(v, n)
            if gate is None or up is None:
                return None
            a, b = gate, up
        if self.random.random() < 0.5:
            a, b = b, a
        operands = [act.format(a), b]
        self.random.shuffle(operands)
        if self.random.random() < 0.2:
            return self.add("(wide({}) * wide({})).to(x0.dtype)".format(*operands))
        return self.add(" * ".join(operands))

    def residual(self) -> str | None:
        v = self.pick()
        same = [name for name, value in self.values.items() if value.shape == self.values[v].shape]
        other = self.random.choice(same)
        if other == v or self.random.random() < 0.3:
            self.input("r", tuple(self.values[v].shape), rows=True)
            other = self.last()
        return self.add(f"{self.random.choice(['', '0.5 * '])}{other} + {v}")

    def pointwise(self) -> str | None:
        return self.add(self.random.choice(_POINTWISE).format(self.pick()))

    def scaled(self) -> str | None:
        v = self.pick()
        shape = self.values[v].shape
        size = self.random.choice([(shape[-1],), (*shape[:-1], 1), (1,)])
        self.input("c", size, rows=len(size) > 1)
        return self.add(f"{v} * {self.last()}")

    def maxima(self) -> str | None:
        return self.add(f"wide({self.pick()}).abs().amax(-1, keepdim=True).to(x0.dtype)")

    def joined(self) -> str | None:
        a, b = self.pick(), self.pick()
        return self.add(f"torch.cat([{a}, {b}], -1)")

    def heads(self) -> str | None:
        v = self.pick()
        return self.add(f"{v}.unflatten(-1, (-1, 8)).transpose(-3, -2)")

    def written(self) -> str | None:
        """Mutation of an input, which must not affect values that were computed before."""
        # Gradients need the values from before.
        if self.backward:
            return None
        floats = [inp.name for inp in self.inputs if inp.dtype is self.dtype]
        return self.add(f"{self.random.choice(['x0', self.random.choice(floats)])}.{_WRITE}")

    def rounded(self) -> str | None:
        """A matmul with a weight whose scales are not exact in the program's dtype."""
        # Integers have no gradient.
        if self.backward:
            return None
        v = self.pick()
        k, n = self.values[v].shape[-1], self.width()
        self.input("q", (n, k), dtype=torch.int8)
        q = self.last()
        self.input("s", (n, 1), scale=20.0)
        scale = f"({self.last()}.to(torch.int32).to(x0.dtype) / 256)"
        return self.add(f"F.linear({v}, ({q}.to(x0.dtype) * {scale}) * {1 / (16 * k**0.5)})")

    def masked(self) -> str | None:
        v = self.pick()
        k, n = self.values[v].shape[-1], self.width()
        m, w = self.matrix(n, k), self.matrix(n, k)
        return self.add(f"F.linear({v}, (1 - {m}) * {w})")

    def batched(self) -> str | None:
        v = self.pick()
        if self.values[v].ndim != 3:
            return None
        count, rows, k = self.values[v].shape
        # Without a GPU, baddbmm cannot expand to dynamic sizes.
        kinds = ["own", "bmm"] if self.rows else ["own", "bmm", "baddbmm"]
        kind = self.random.choice(kinds)
        if kind == "own":
            return self.add(f"torch.bmm({v}, {v}.transpose(1, 2)) * {k**-0.5}")
        self.input("u", (count, k, 40), scale=k**-0.5, rows=True)
        u = self.last()
        if kind == "bmm":
            return self.add(f"torch.bmm({v}, {u})")
        size = self.random.choice([(count, rows, 40), (40,), (1, rows, 1)])
        self.input("r", size, rows=len(size) > 1 and size[0] == count)
        return self.add(f"torch.baddbmm({self.last()}, {v}, {u}, beta=0.5, alpha=2)")


_WRITE = "mul_(0.5)"

_STEPS: Mapping[str, int] = types.MappingProxyType(
    {
        "norm": 2,
        "linear": 4,
        "several": 3,
        "gate": 4,
        "residual": 4,
        "pointwise": 4,
        "scaled": 1,
        "maxima": 1,
        "joined": 1,
        "heads": 1,
        "batched": 4,
        "written": 2,
        "rounded": 1,
        "masked": 1,
    }
)
"""Weights with which the steps are drawn."""


def generate(seed: int) -> Program:
    """The program of a seed, with at least one matmul."""
    draw = _Draw(seed)
    draw.linear(draw.norm() if draw.random.random() < 0.5 else None)
    for _ in range(draw.random.randint(2, 6)):
        (step,) = draw.random.choices(list(_STEPS), list(_STEPS.values()))
        getattr(draw, step)()
    names = [name for name in draw.values if name != "x0"]
    results = {names[-1]: None}
    for _ in range(draw.random.randint(0, 2)):
        results[draw.random.choice(names)] = None
    program = Program(
        seed,
        draw.dtype,
        tuple(draw.inputs),
        tuple(draw.lines),
        tuple(results),
        backward=draw.backward,
        rows=draw.rows,
    )
    return prune_program(program)


def prune_program(program: Program) -> Program:
    """Remove the lines and inputs that no result needs."""
    needed = set(program.results) | {"x0"}
    lines = []
    for line in reversed(program.lines):
        name, _, text = line.partition(" = ")
        if name in needed or text.endswith(_WRITE):
            lines.append(line)
            needed |= set(re.findall(r"[a-z]\d+", text))
    inputs = tuple(inp for inp in program.inputs if inp.name in needed)
    return dataclasses.replace(program, lines=tuple(reversed(lines)), inputs=inputs)
