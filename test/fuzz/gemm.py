"""Fuzzer of GEMM kernels, for the command line and for tests.

A program is the text of a function that does what models do around matmuls: norms before them,
several matmuls of one input, gates, biases, residuals, casts, 8-bit and 4-bit weights, batches, row
maxima, and writes into values that were read before, in unusual orders, with unusual sizes and
strides. Some have a dynamic number of rows, of some the gradients are computed. A program is
lowered as for a GPU (`fake_cuda`), each matmul that the extension decides on gets any legal
configuration or none, and the generated module is interpreted. The results are compared with
float64: errors may be a few times as large as eager mode's.

A failure is printed with its inputs; `--reduce` reduces it to the lines that it needs.

    python -m test.fuzz.gemm --cases 40 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext import config
from inductor_ext.autotune import decide
from inductor_ext.hooks import scope
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton import search_space
from inductor_ext.templates.triton.config import GemmConfig
from test.fuzz.gemm_programs import Program, generate, prune_program
from test.support import fake_cuda, kernel_interpreter
from test.support.gemm_strategies import device

_DEVICE = device("NVIDIA H200")


def _choose_any_legal(program: Program) -> decide.Rule:
    """A rule that takes any legal configuration for a problem, or Inductor's path."""

    def rule(problem: GemmProblem) -> GemmConfig | None:
        draw = random.Random(f"{program.seed} {problem.key}")
        legal: dict[str, list[GemmConfig]] = {}
        for candidate in search_space.candidates(problem, _DEVICE):
            # The interpreter is slow, and runs warp-specialized code like any other.
            if not candidate.warp_specialize and candidate.block_m * candidate.block_n <= 1 << 13:
                legal.setdefault(candidate.template, []).append(candidate)
        if not legal or draw.random() < 0.15:
            return None
        # The interpreter has no instructions that wait for other kernels.
        return dataclasses.replace(draw.choice(legal[draw.choice(list(legal))]), pdl=False)

    return rule


def _trace(program: Program) -> Callable[..., Any]:
    """The function without autograd, which cannot be simulated for a GPU."""
    if not program.backward:
        return program.function()
    table = select_decomp_table()
    module = make_fx(program.function(), decomposition_table=table)(*program.values())
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
    module.recompile()
    return module


def _lower(program: Program, rule: decide.Rule) -> str | Exception:
    """The module that Inductor generates."""
    inputs: list[Any] = [
        (("rows" if inp.rows else inp.shape[0], *inp.shape[1:]), inp.dtype)
        if program.rows
        else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for inp, value in zip(program.inputs, program.values(), strict=True)
    ]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(kernel_interpreter.interpretable())
            stack.enter_context(scope.compile_scope(config.snapshot({})))
            stack.enter_context(decide.force_config(rule))
            # The simulated launcher has one dimension for each pointwise kernel.
            return fake_cuda.lower(_trace(program), *inputs, triton__max_tiles=1).code
    except Exception as error:
        return error


def find_failures(programs: Sequence[Program]) -> dict[int, str]:
    """Run programs; return failures by seed.

    Some programs are so ill-conditioned that Inductor's results differ from eager mode's as much as
    the extension's: a gradient of a unit at zero, or a norm of a normalized value. The tolerance is
    then that of Inductor's error. A program that cannot be traced without a GPU is not a failure.
    """
    results = _compute_results(programs, _choose_any_legal)
    doubtful = [
        program for program in programs if _describe_failure(program, results[program.seed])
    ]
    inductor = _compute_results(doubtful, lambda _: _use_inductor)
    failures = {
        item.seed: _describe_failure(item, results[item.seed], inductor[item.seed])
        for item in doubtful
    }
    return {seed: why for seed, why in failures.items() if why}


_Result = list[Tensor] | str | Exception
"""Outputs of a program, a traceback of its kernels, or why it cannot be lowered."""


def _describe_failure(
    program: Program, result: _Result, inductor: _Result | None = None
) -> str | None:
    """Describe what is wrong with a result, given Inductor's if it was computed."""
    if isinstance(result, Exception):
        return None if isinstance(inductor, Exception) else f"{type(result).__name__}: {result}"
    if isinstance(result, str):
        return result
    other = inductor if isinstance(inductor, list) else None
    return next(_find_differences(program, result, other), None)


def _use_inductor(problem: GemmProblem) -> GemmConfig | None:
    """A rule that leaves every problem to Inductor."""
    return None


def _compute_results(
    programs: Sequence[Program], rule: Callable[[Program], decide.Rule]
) -> dict[int, _Result]:
    """Results of programs by seed, each lowered by its rule."""
    results: dict[int, _Result] = {}
    work: dict[str, tuple[str, list[Tensor]]] = {}
    for program in programs:
        code = _lower(program, rule(program))
        if isinstance(code, Exception):
            results[program.seed] = code
        else:
            work[str(program.seed)] = code, program.values()
    outputs = kernel_interpreter.interpret_modules(work, strict=False) if work else {}
    for seed, output in outputs.items():
        results[int(seed)] = [output] if isinstance(output, Tensor) else output
    return results


def _find_differences(
    program: Program, results: Sequence[Tensor], inductor: Sequence[Tensor] | None
) -> Iterator[str]:
    values = program.values()
    function = program.function()
    exact = function(*(value.double() if value.is_floating_point() else value for value in values))
    eager = function(*values)
    names = program.results
    if program.backward:
        names = tuple(inp.name for inp in program.inputs if inp.dtype.is_floating_point)
    unit = 2**-9 if program.dtype is torch.float16 else 2**-18
    for index, (name, result, right) in enumerate(zip(names, results, exact, strict=True)):
        others = [item[index] for item in (eager, inductor) if item is not None]
        if (result.shape, result.dtype) != (others[0].shape, others[0].dtype):
            yield f"{name}: {result.dtype} {list(result.shape)}, eager {others[0].dtype}"
        elif all(item.isfinite().all() for item in others):
            allowed = max(float((item - right).abs().max()) for item in others)
            error = float((result - right).abs().max())
            if not error <= 4 * allowed + 4 * unit * float(right.abs().max()):
                yield f"{name}: off by {error:.2e}, others by {allowed:.2e}"


def reduce_program(program: Program) -> Program:
    """Reduce a program to few lines, as long as it fails."""
    for index in reversed(range(len(program.results))):
        fewer = tuple(result for at, result in enumerate(program.results) if at != index)
        smaller = prune_program(dataclasses.replace(program, results=fewer))
        if fewer and find_failures([smaller]):
            return reduce_program(smaller)
    names = [line.partition(" = ")[0] for line in program.lines]
    for name in names[:-1]:
        # A result that is computed earlier.
        smaller = prune_program(dataclasses.replace(program, results=(name,)))
        if find_failures([smaller]):
            return reduce_program(smaller)
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a program failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--at-once", type=int, default=20, help="interpreted in one process")
    parser.add_argument("--reduce", action="store_true", help="reduce failures")
    options = parser.parse_args(arguments)
    failed = 0
    for start in range(options.seed, options.seed + options.cases, options.at_once):
        stop = min(start + options.at_once, options.seed + options.cases)
        programs = {seed: generate(seed) for seed in range(start, stop)}
        for seed, why in find_failures(list(programs.values())).items():
            failed += 1
            smaller = reduce_program(programs[seed]) if options.reduce else programs[seed]
            inputs = "\n".join(str(inp) for inp in smaller.inputs)
            print(f"--- {seed}: {why}\n{inputs}\n{smaller.text()}\n", flush=True)
        print(f"{stop - options.seed} programs, {failed} wrong", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
