"""Generation of random programs for the memory fuzzer, whose lines all run in eager mode."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from test.fuzz.memory_operators import EXTERN_OPERATORS, OPERATORS
from test.fuzz.memory_programs import (
    MAX_ELEMENTS,
    NAMES,
    Draw,
    Input,
    NoOperandError,
    Program,
    run_program,
)

_SIDES = (2, 7, 16, 33, 48, 64, 65, 96, 128)


def generate(
    seed: int, *, training: bool = False, dynamic: bool = False, extern: bool = False
) -> Program:
    """Draw a program, the same for the same seed.

    Args:
        seed: of all random choices.
        training: whether gradients are computed.
        dynamic: whether the program is compiled for several sizes.
        extern: whether to prefer operators without generated kernels.
    """
    for attempt in range(100):
        program = _draw_program(seed, Draw(seed + 10**6 * attempt, training, dynamic, extern))
        try:
            run_program(program.function(), program)
        except Exception:
            # A gradient needs a value that was mutated in place.
            continue
        return program
    raise ValueError(f"nothing that eager mode runs was drawn for seed {seed}")


def _draw_program(seed: int, draw: Draw) -> Program:
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
    all_sizes = tuple(tuple(sizes_of_call.items()) for sizes_of_call in sets)
    program = Program(seed, tuple(inputs), (), (), all_sizes)
    worlds = []
    for call in range(len(sets)):
        values = program.arguments(call)
        # A leaf must not be mutated in place.
        values_by_name = {
            i.name: v * 1 if i.grad else v for i, v in zip(inputs, values, strict=True)
        }
        worlds.append({**NAMES, **values_by_name})
    draw.pool = {i.name: worlds[0][i.name] for i in inputs}
    lines = [f"{i.name} = {i.name} * 1" for i in inputs if i.grad]
    weights, operators = zip(*(EXTERN_OPERATORS if extern else OPERATORS), strict=True)
    target = len(lines) + pick.randint(8 if extern else 5, 12 if dynamic else 40)
    for _ in range(10 * target):
        if len(lines) >= target:
            break
        (emit,) = pick.choices(operators, weights)
        with contextlib.suppress(NoOperandError):
            line = emit(draw)
            if _run_line(draw, worlds, line):
                lines.append(line)
    if not extern:
        lines += _sum_unused_values(draw, lines)
    outputs = _draw_outputs(draw, [i.name for i in inputs])
    return dataclasses.replace(program, lines=tuple(lines), outputs=outputs)


def _run_line(draw: Draw, worlds: Sequence[dict[str, Any]], line: str) -> bool:
    """Run a line in eager mode, for every set of sizes, and add its results to the pool.

    Returns:
        Whether it ran, without results that are too large.
    """
    after = [dict(world) for world in worlds]
    try:
        for world in after:
            exec(line, world)
    except Exception:
        return False
    results: list[dict[str, Tensor]] = [
        {
            name: value
            for name, value in new.items()
            if isinstance(value, Tensor) and value is not world.get(name)
        }
        for new, world in zip(after, worlds, strict=True)
    ]
    if any(v.numel() > MAX_ELEMENTS or v.dim() > 5 for values in results for v in values.values()):
        return False
    for world, new in zip(worlds, after, strict=True):
        world.update(new)
    draw.pool.update(results[0])
    return True


def _sum_unused_values(draw: Draw, lines: Sequence[str]) -> list[str]:
    """A line that adds up most of the unused values, which would else be dead code."""
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


def _draw_outputs(draw: Draw, inputs: list[str]) -> tuple[str, ...]:
    names = [name for name in draw.pool if name not in inputs]
    if not names:
        names = list(inputs)
    if draw.extern:
        # A complex output would keep alive the memory of its operands.
        names = [name for name in names if not draw.pool[name].is_complex()]
    outputs = [*names[-2:], *draw.random.sample(names, min(len(names), draw.random.randint(1, 6)))]
    if draw.random.random() < 0.3:
        outputs.append(draw.random.choice(names[-4:]))
    if draw.random.random() < 0.2:
        outputs.append(draw.random.choice(inputs))
    if draw.random.random() < 0.3:
        wide = [name for name in outputs if draw.pool[name].dim() > 0]
        outputs += [f"{name}[1:]" for name in wide[:1]]
    return tuple(outputs)
