"""Random programs of GEMMs, from the command line or from a test: no number may be wrong.

A program is the text of a function that does what models do around products: norms before them,
several of one input, gates, biases, residuals, casts, weights of 8 and 4 bits, batches, maxima of
rows, writes into what has been read; in an order, with sizes, strides and other uses of values that
nobody would think of. Some have a symbol for the number of rows, of some the gradients are
computed. It is lowered as for a GPU (`fake_cuda`), each product that the extension asks about gets
any legal configuration or none, and the module that Inductor generates is interpreted. Its results
are held against float64; they may be wrong by a few times what eager mode's are.

A failure is printed with its inputs; with `--reduce` it is cut down to the lines that it needs.

    python -m test.fuzz.gemm --cases 40 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.hooks import scope
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import search_space
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda, kernel_util
from test.support.gemm_strategies import device

__all__ = ["Input", "Program", "failures", "generate", "reduced"]

_DEVICE = device("NVIDIA H200")

_SEEN = 64
"""Rows that a program with a symbol for them has while it is drawn and lowered."""

_LEADING = ((1,), (5,), (16,), (33,), (130,), (2, 9), (4, 6), (3, 1), (2, 2, 3))
"""Dimensions of a program's input before its columns."""

_LARGEST = 64.0
"""No value of a program is larger, so that float16 can hold what is computed of it."""


@dataclass(frozen=True)
class Input:
    """A tensor that a program takes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 1.0
    """Of normally distributed numbers; integers are anything."""
    padding: int = 0
    """Elements between two of the last dimension but one."""
    rows: bool = False
    """Whether the first dimension is that of which programs with a symbol know nothing."""

    def make(self, generator: torch.Generator, rows: int | None = None) -> Tensor:
        """The tensor, with values; of so many rows, if the number is not its own."""
        sizes = (rows, *self.shape[1:]) if rows and self.rows else self.shape
        shape = (*sizes[:-1], sizes[-1] + self.padding)
        if self.dtype.is_floating_point:
            found = (torch.randn(shape, generator=generator) * self.scale).to(self.dtype)
        else:
            low, high = (0, 256) if self.dtype is torch.uint8 else (-127, 128)
            found = torch.randint(low, high, shape, generator=generator).to(self.dtype)
        return found[..., : self.shape[-1]]


@dataclass(frozen=True)
class Program:
    """A function of tensors, as text."""

    seed: int
    dtype: torch.dtype
    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    backward: bool = False
    """Whether what is computed are the results' gradients by all inputs that have one."""
    rows: int | None = None
    """How many there are when it runs, if the number is a symbol."""

    def text(self) -> str:
        """The function's source."""
        names = ", ".join(inp.name for inp in self.inputs)
        found = [f"def program({names}):", *self.lines]
        if not self.backward:
            return "\n    ".join([*found, f"return {', '.join(self.results)},"])
        by = ", ".join(inp.name for inp in self.inputs if inp.dtype.is_floating_point)
        found.insert(1, f"{by}, = [each.detach().requires_grad_() for each in ({by},)]")
        loss = " + ".join(f"wide({result}).square().sum()" for result in self.results)
        found.append(f"return torch.autograd.grad({loss}, ({by},))")
        return "\n    ".join(found)

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """It, of the inputs in order."""
        namespace = dict(_NAMES)
        exec(self.text(), namespace)
        found: Callable[..., tuple[Tensor, ...]] = namespace["program"]
        return found

    def values(self) -> list[Tensor]:
        """Inputs."""
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
    """A program while it is drawn: what fails in eager mode, or becomes too large, is left out."""

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
        self.leading = choose([(_SEEN,), (_SEEN, 3)]) if self.rows else choose(_LEADING)
        padding = 0 if self.rows else choose([0, 0, 8])
        self.values["x0"] = self.input(
            "x", (*self.leading, self.width()), padding=padding, rows=True
        )

    def width(self) -> int:
        return self.random.choice([32, 40, 48, 64, 64, 96])

    def input(self, kind: str, shape: tuple[int, ...], **given: Any) -> Tensor:
        """A new input; its name is that of the kind and a number."""
        name = f"{kind}{len(self.inputs)}"
        made = Input(name, shape, given.pop("dtype", self.dtype), **given)
        self.inputs.append(made)
        self.names[name] = made.make(self.generator)
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
        """A value, rather a late one."""
        names = list(self.values)
        return self.random.choices(names, [2**index for index in range(len(names))])[0]

    def add(self, text: str) -> str | None:
        """A line, if what it computes can be used; the name of that."""
        name = f"v{len(self.lines)}"
        try:
            value = eval(text, self.names)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        if not value.isfinite().all() or value.abs().max() > _LARGEST:
            return None
        if self.rows and (value.ndim != len(self.leading) + 1 or len(value) != _SEEN):
            return None
        self.lines.append(f"{name} = {text}")
        self.names[name] = self.values[name] = value
        return name

    # What models do

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
                factors = self.random.choice(
                    ["", ", beta=0.5", ", alpha=2", ", beta=0", ", beta=2, alpha=0.5"]
                )
                return self.add(f"torch.addmm({bias}, {v}, {m}{factors})")
            return self.add(f"{v} @ {m}" + (f" + {bias}" if bias else ""))
        w = self.matrix(n, k)
        if kind == "t":
            return self.add(f"{v} @ {w}.t()" + (f" + {bias}" if bias else ""))
        return self.add(f"F.linear({v}, {w}, {bias})")

    def quantized(self, n: int, k: int) -> str:
        """The text of a weight [n, k] of few bits."""
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
        """Q, K and V: products of one input, which a norm may have made."""
        v = self.random.choice([self.norm(), self.pick(), self.pick()]) or self.pick()
        sizes = self.random.choice([[48, 48, 48], [64, 32, 32], [32, 40], [64, 64]])
        made = [self.linear(v, n) for n in sizes]
        return made[-1]

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
            one, other = self.linear(v, n), self.linear(v, n)
            if one is None or other is None:
                return None
            a, b = one, other
        if self.random.random() < 0.5:
            a, b = b, a
        factors = [act.format(a), b]
        self.random.shuffle(factors)
        if self.random.random() < 0.2:
            return self.add("(wide({}) * wide({})).to(x0.dtype)".format(*factors))
        return self.add(" * ".join(factors))

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
        """A write into an input, which what is computed before it must not see."""
        # Gradients need what was read before.
        if self.backward:
            return None
        floats = [inp.name for inp in self.inputs if inp.dtype is self.dtype]
        return self.add(f"{self.random.choice(['x0', self.random.choice(floats)])}.{_WRITE}")

    def rounded(self) -> str | None:
        """A product by a weight whose scales are no numbers of the program's dtype."""
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
        # The sizes that baddbmm expands to must be numbers where there is no GPU.
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
"""How often each is drawn."""


def generate(seed: int) -> Program:
    """The program of a seed, with one product at least."""
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
    return _pruned(program)


def _pruned(program: Program) -> Program:
    """Without the lines and inputs that no result needs."""
    needed = set(program.results) | {"x0"}
    lines = []
    for line in reversed(program.lines):
        name, _, text = line.partition(" = ")
        if name in needed or text.endswith(_WRITE):
            lines.append(line)
            needed |= set(re.findall(r"[a-z]\d+", text))
    inputs = tuple(inp for inp in program.inputs if inp.name in needed)
    return dataclasses.replace(program, lines=tuple(reversed(lines)), inputs=inputs)


def _rule(program: Program) -> decide.Rule:
    """Any legal configuration for each problem, or stock's path."""

    def rule(problem: GemmProblem) -> GemmConfig | None:
        draw = random.Random(f"{program.seed} {problem.key}")
        legal: dict[str, list[GemmConfig]] = {}
        for candidate in search_space.candidates(problem, _DEVICE):
            # Warp-specialised code is the same to the interpreter, which is slow.
            if not candidate.warp_specialize and candidate.block_m * candidate.block_n <= 1 << 13:
                legal.setdefault(candidate.template, []).append(candidate)
        if not legal or draw.random() < 0.15:
            return None
        # The interpreter has no instructions that wait for other kernels.
        return dataclasses.replace(draw.choice(legal[draw.choice(list(legal))]), pdl=False)

    return rule


def _traced(program: Program) -> Callable[..., Any]:
    """The function, without autograd, which has no stand-in for a GPU."""
    if not program.backward:
        return program.function()
    table = select_decomp_table()
    module = make_fx(program.function(), decomposition_table=table)(*program.values())
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    module.recompile()
    return module


def _lowered(program: Program, rule: decide.Rule) -> str | Exception:
    """The module that Inductor generates."""
    inputs: list[Any] = [
        (("rows" if inp.rows else inp.shape[0], *inp.shape[1:]), inp.dtype)
        if program.rows
        else torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta")
        for inp, made in zip(program.inputs, program.values(), strict=True)
    ]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(kernel_util.interpretable())
            stack.enter_context(scope.compile_scope(config.snapshot({})))
            stack.enter_context(decide.force_config(rule))
            # One dimension for each pointwise kernel, as the stand-in for launchers has.
            return fake_cuda.lower(_traced(program), *inputs, triton__max_tiles=1).code
    except Exception as error:
        return error


def failures(programs: Sequence[Program]) -> dict[int, str]:
    """What is wrong with programs, by their seeds; those that are right are not in it.

    Some are so ill-conditioned that stock's order of rounding is as far from eager mode's as ours:
    a gradient where a unit is at zero, or a norm of what is normalised. Then stock's error counts.
    And some cannot be traced without a GPU, which is nobody's fault.
    """
    ours = _results(programs, _rule)
    doubtful = [program for program in programs if _wrong(program, ours[program.seed])]
    stock = _results(doubtful, lambda _: _stock)
    found = {item.seed: _wrong(item, ours[item.seed], stock[item.seed]) for item in doubtful}
    return {seed: why for seed, why in found.items() if why}


_Result = list[Tensor] | str | Exception
"""What a program computes, or how its kernels fail, or why it cannot be lowered."""


def _wrong(program: Program, ours: _Result, stock: _Result | None = None) -> str | None:
    """What is wrong with a result, also beside stock's, if that is known."""
    if isinstance(ours, Exception):
        return None if isinstance(stock, Exception) else f"{type(ours).__name__}: {ours}"
    if isinstance(ours, str):
        return ours
    known = stock if isinstance(stock, list) else None
    return next(_differences(program, ours, known), None)


def _stock(problem: GemmProblem) -> GemmConfig | None:
    """The rule of stock's path for everything."""
    return None


def _results(
    programs: Sequence[Program], rule: Callable[[Program], decide.Rule]
) -> dict[int, _Result]:
    """That of each program, as it is lowered by a rule, by its seed."""
    found: dict[int, _Result] = {}
    work: dict[str, tuple[str, list[Tensor]]] = {}
    for program in programs:
        code = _lowered(program, rule(program))
        if isinstance(code, Exception):
            found[program.seed] = code
        else:
            work[str(program.seed)] = code, program.values()
    results = kernel_util.interpret_modules(work, strict=False) if work else {}
    for seed, result in results.items():
        found[int(seed)] = [result] if isinstance(result, Tensor) else result
    return found


def _differences(
    program: Program, ours: Sequence[Tensor], stock: Sequence[Tensor] | None
) -> Iterator[str]:
    values = program.values()
    function = program.function()
    exact = function(*(value.double() if value.is_floating_point() else value for value in values))
    eager = function(*values)
    names = program.results
    if program.backward:
        names = tuple(inp.name for inp in program.inputs if inp.dtype.is_floating_point)
    unit = 2**-9 if program.dtype is torch.float16 else 2**-18
    for index, (name, found, right) in enumerate(zip(names, ours, exact, strict=True)):
        like = [item[index] for item in (eager, stock) if item is not None]
        if (found.shape, found.dtype) != (like[0].shape, like[0].dtype):
            yield f"{name}: {found.dtype} {list(found.shape)}, eager {like[0].dtype}"
        elif all(item.isfinite().all() for item in like):
            theirs = max(float((item - right).abs().max()) for item in like)
            error = float((found - right).abs().max())
            if not error <= 4 * theirs + 4 * unit * float(right.abs().max()):
                yield f"{name}: off by {error:.2e}, others by {theirs:.2e}"


def reduced(program: Program) -> Program:
    """The program with as few lines as fail in some way."""
    for index in reversed(range(len(program.results))):
        fewer = tuple(result for at, result in enumerate(program.results) if at != index)
        smaller = _pruned(dataclasses.replace(program, results=fewer))
        if fewer and failures([smaller]):
            return reduced(smaller)
    names = [line.partition(" = ")[0] for line in program.lines]
    for name in names[:-1]:
        # A result that is nearer to the inputs.
        smaller = _pruned(dataclasses.replace(program, results=(name,)))
        if failures([smaller]):
            return reduced(smaller)
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a program failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--at-once", type=int, default=20, help="interpreted in one process")
    parser.add_argument("--reduce", action="store_true", help="cut failures down")
    options = parser.parse_args(arguments)
    failed = 0
    for start in range(options.seed, options.seed + options.cases, options.at_once):
        stop = min(start + options.at_once, options.seed + options.cases)
        programs = {seed: generate(seed) for seed in range(start, stop)}
        for seed, why in failures(list(programs.values())).items():
            failed += 1
            smaller = reduced(programs[seed]) if options.reduce else programs[seed]
            inputs = "\n".join(str(inp) for inp in smaller.inputs)
            print(f"--- {seed}: {why}\n{inputs}\n{smaller.text()}\n", flush=True)
        print(f"{stop - options.seed} programs, {failed} wrong", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
