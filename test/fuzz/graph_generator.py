"""Generation of random programs for the graph fuzzer.

Each line runs in eager mode while it is drawn: with the program's dtypes, with inputs that are
changed by about one rounding error, and in double precision. A line is dropped if it fails, or if
its results differ between them by more than rounding errors explain, or at all if they are
integers. Thus a compiler has to reproduce what remains.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import Tensor

from test.fuzz import graph_arithmetic as graph_arithmetic  # Registers its operators.
from test.fuzz import graph_layers as graph_layers
from test.fuzz import memory_operators
from test.fuzz.graph_operators import SUBJECTS, Emit
from test.fuzz.graph_programs import Input, Program, Run, namespace, perturb, run_eager, to_double
from test.fuzz.memory_programs import Draw, NoOperandError

BATCH = 8
"""Consecutive programs of one mode, which can be compiled together."""

MODES = (
    "inference",
    "dynamic",
    "inference",
    "training",
    "inference",
    "dynamic",
    "inference",
    "training",
    "inference",
    "dynamic_training",
)

_SIDES = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 65)
_MAX_ELEMENTS = 20_000
_KINDS = ("actual", "perturbed", "double")
_SUBJECTS = (*sorted(SUBJECTS), "floats")
_REAL_DTYPES = ("float32", "float32", "float16", "bfloat16")
_INTEGER_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "bool")
_DTYPES = {
    "integers": _INTEGER_DTYPES,
    "halves": ("float16", "bfloat16"),
    "complex": ("complex64",),
    "layers": ("float32", "float32", "float32", "float16", "bfloat16"),
    "floats": ("float32",),
}
_SHAPES = (("n", "m"), ("n", "m"), ("n",), ("m", "m"), ("k", "m"), ("2", "n", "m"), ("m",), ())


def mode_of(seed: int) -> str:
    """One of `MODES`; the same for the seeds of a batch."""
    return MODES[seed // BATCH % len(MODES)]


def generate(seed: int, device: str = "cpu") -> Program:
    """Draw a program, the same for the same seed, device type and torch."""
    for attempt in range(100):
        program = _Drawing(seed, attempt, device).program()
        if program.lines and is_reproducible(program):
            return program
    raise ValueError(f"nothing that eager mode runs was drawn for seed {seed}")


def is_reproducible(program: Program) -> bool:
    """Whether eager mode runs the program, with the same results up to rounding errors."""
    try:
        actual = run_eager(program)
        others = [run_eager(program, perturbed=True), run_eager(program, double=True)]
    except Exception:
        return False
    return all(_is_finite(v) for v in actual.values.values() if v is not None) and all(
        _agree(actual, other) for other in others
    )


def _agree(actual: Run, other: Run) -> bool:
    for name, value in actual.values.items():
        right = other.values[name]
        if (value is None) != (right is None):
            return False
        if value is not None and right is not None and not _is_stable(value, right):
            return False
    return True


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value).all())


_STABLE = {torch.float16: 3e-2, torch.bfloat16: 1e-1}


def _is_stable(actual: Tensor, other: Tensor) -> bool:
    """Whether two values differ only as rounding errors explain."""
    if actual.shape != other.shape:
        return False
    if not (actual.dtype.is_floating_point or actual.dtype.is_complex):
        return torch.equal(actual, other)
    if not actual.numel():
        return True
    actual, other = actual.detach(), other.detach()
    allowed = _STABLE.get(actual.dtype, 1e-3)
    wide = to_double(actual)
    difference = float((wide - to_double(other)).abs().max())
    # One element may lose more digits than a large one in the same tensor.
    return difference <= allowed * max(float(wide.abs().max()), 1e-2)


class _Drawing:
    """A program while it is drawn."""

    def __init__(self, seed: int, attempt: int, device: str) -> None:
        mode = mode_of(seed)
        self.draw = Draw(seed + 10**7 * attempt, "training" in mode, "dynamic" in mode, False)
        pick = self.draw.random
        self.subjects = pick.sample(_SUBJECTS, 2)
        sizes = {name: pick.choice(_SIDES) for name in ("n", "m", "k")}
        sets = [sizes]
        if self.draw.dynamic:
            # 2 is as dynamic as any other size, but 0 and 1 are specialized.
            sets += [{name: pick.choice(_SIDES) for name in sizes} for _ in range(2)]
        inputs = self._draw_inputs()
        buffers = self._draw_buffers(sizes)
        self.base = Program(
            seed,
            inputs,
            tuple(f"{b.name} = self.{b.name}" for b in buffers)
            + tuple(f"{i.name} = {i.name} * 1" for i in inputs if i.grad),
            (),
            tuple(tuple(sizes_of_call.items()) for sizes_of_call in sets),
            buffers=buffers,
            device=device,
        )
        self.lines: list[str] = []
        self.worlds: list[dict[str, Any]] = []
        self._restart()

    def _dtype(self) -> str:
        names = [n for subject in self.subjects for n in _DTYPES.get(subject, ())]
        if self.draw.training:
            names = [n for n in names if n in _REAL_DTYPES or n == "complex64"]
        if not names or self.draw.random.random() < 0.2:
            names = ["float32", "float32", "int64", "uint8", "int32", "float16", "bool"]
        return self.draw.random.choice(names)

    def _draw_inputs(self) -> tuple[Input, ...]:
        pick, inputs = self.draw.random, []
        for index in range(pick.randint(2, 4)):
            shape = pick.choice(_SHAPES)
            layouts = ["plain"] * 4 + ["transposed", "offset", "padded", "strided"]
            if "layers" in self.subjects and pick.random() < 0.6:
                shape = pick.choice(
                    (("2", "3", "n", "m"), ("1", "8", "m", "m"), ("1", "4", "n", "n"))
                )
                layouts = ["plain", "channels_last"]
            dtype = self._dtype()
            real = dtype in _REAL_DTYPES or dtype == "complex64"
            grad = self.draw.training and real and (index == 0 or pick.random() < 0.7)
            inputs.append(Input(f"x{index}", shape, dtype, pick.choice(layouts), grad))
        inputs.append(Input("index", ("5",), dtype="int64"))
        return tuple(inputs)

    def _draw_buffers(self, sizes: dict[str, int]) -> tuple[Input, ...]:
        pick, buffers = self.draw.random, []
        count = pick.randint(1, 2) if "buffers" in self.subjects else int(pick.random() < 0.15)
        for index in range(count):
            # A buffer's shape is static.
            shape = tuple(str(sizes.get(s, s)) for s in pick.choice(_SHAPES))
            buffers.append(Input(f"b{index}", shape, self._dtype()))
        if self.draw.training or "layers" in self.subjects:
            grad = self.draw.training
            shape = (pick.choice(("4", "8", str(sizes["n"]))), str(sizes["m"]))
            buffers.append(Input("w0", shape, "float32", grad=grad))
        return tuple(buffers)

    def _restart(self) -> None:
        """Run all lines again, without the effects of lines that were dropped."""
        self.worlds = [
            self._world(call, kind) for call in range(len(self.base.sizes)) for kind in _KINDS
        ]
        with torch.set_grad_enabled(self.base.training):
            for world in self.worlds:
                for line in (*self.base.lines, *self.lines):
                    exec(line, world)
        first = self.worlds[0]
        self.draw.pool = {name: v for name, v in first.items() if isinstance(v, Tensor)}
        for name in ("CONSTANT", "KERNEL"):
            self.draw.pool.pop(name)

    def _world(self, call: int, kind: str) -> dict[str, Any]:
        double = kind == "double"
        module = self.base.module(double=double)
        arguments = self.base.arguments(call, double=double)
        if kind == "perturbed":
            with torch.no_grad():
                for value in (*module.buffers(), *module.parameters(), *arguments):
                    value.copy_(perturb(value))
        names = namespace(self.base.device, double=double)
        inputs = zip((i.name for i in self.base.inputs), arguments, strict=True)
        return {**names, **dict(inputs), "self": module}

    def _add(self, line: str) -> bool:
        """Run a line in eager mode; return whether it is part of the program now."""
        if self._writes_differentiated(line):
            return False
        try:
            with torch.set_grad_enabled(self.base.training):
                for world in self.worlds:
                    exec(line, world)
        except Exception:
            self._restart()
            return False
        if not self._is_good():
            self._restart()
            return False
        self.lines.append(line)
        new = re.findall(r"\b(?:t\d+|x\d+|b\d+|w0)\b", line)
        for name in new:
            value = self.worlds[0].get(name)
            if isinstance(value, Tensor):
                # The latest values come last: `Draw.pick` prefers them.
                self.draw.pool.pop(name, None)
                self.draw.pool[name] = value
        return True

    def _writes_differentiated(self, line: str) -> bool:
        """Whether a custom operator, which has no gradient, may write what requires one.

        Eager mode then returns the gradient of the values before the write.
        """
        operators = [
            getattr(torch.ops.inductor_ext_fuzz, n) for n in re.findall(r"fuzz\.(\w+)", line)
        ]
        if not any(operator.default._schema.is_mutable for operator in operators):
            return False
        values = (self.worlds[0].get(name) for name in re.findall(r"\b[a-z]\w*\b", line))
        return any(isinstance(value, Tensor) and value.requires_grad for value in values)

    def _is_good(self) -> bool:
        for start in range(0, len(self.worlds), len(_KINDS)):
            actual, *others = self.worlds[start : start + len(_KINDS)]
            for name, value in actual.items():
                if not isinstance(value, Tensor) or name in ("CONSTANT", "KERNEL"):
                    continue
                if value.numel() > _MAX_ELEMENTS or value.dim() > 5 or not _is_finite(value):
                    return False
                if not all(_is_stable(value, other[name]) for other in others):
                    return False
        return True

    def _draw_line(self) -> str:
        pick = self.draw.random
        subject = pick.choice((*self.subjects * 3, *_SUBJECTS))
        operators: list[tuple[int, Emit]] = (
            memory_operators.OPERATORS if subject == "floats" else SUBJECTS[subject]
        )
        weights, emits = zip(*operators, strict=True)
        text: str = pick.choices(emits, weights)[0](self.draw)
        return text if subject != "floats" else _translate(text)

    def program(self) -> Program:
        """Draw lines and outputs."""
        pick = self.draw.random
        count = pick.randint(2, 8)
        for _ in range(6 * count):
            if len(self.lines) >= count:
                break
            try:
                line = self._draw_line()
            except NoOperandError:
                continue
            self._add(line)
        return dataclasses.replace(
            self.base,
            lines=(*self.base.lines, *self.lines),
            outputs=self._draw_outputs(),
        )

    def _draw_outputs(self) -> tuple[str, ...]:
        pick = self.draw.random
        text = "\n".join(self.lines)
        new = [name for name in self.draw.pool if re.fullmatch(r"t\d+", name)]
        outputs = [name for name in new if len(re.findall(rf"\b{name}\b", text)) == 1]
        outputs += pick.sample(new, min(len(new), pick.randint(1, 3)))
        used = [n for n in self.draw.pool if n not in new and re.search(rf"\b{n}\b", text)]
        if used and (not outputs or pick.random() < 0.3):
            outputs.append(pick.choice(used))
        if not outputs:
            outputs.append(pick.choice(list(self.draw.pool)))
        if pick.random() < 0.15:
            outputs.append(f"{pick.choice(outputs)}[None]")
        return tuple(dict.fromkeys(outputs))


_TRANSLATIONS = {
    "torch.cond(": "cond(",
    "torch.while_loop(": "while_loop(",
    ".half()": ".to(f16)",
    ".bfloat16()": ".to(bf16)",
    ".float()": ".to(f32)",
    ".double()": ".to(f64)",
}


def _translate(text: str) -> str:
    """An operator of the memory fuzzer in the words of these programs."""
    for old, new in _TRANSLATIONS.items():
        text = text.replace(old, new)
    return text
