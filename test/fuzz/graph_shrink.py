"""Reduces a program of the graph fuzzer and prints it as a standalone script."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from test.fuzz import graph_programs, memory_programs
from test.fuzz.graph_generator import generate, is_reproducible
from test.fuzz.graph_judge import Build, Outcome, Verdict, run_alone
from test.fuzz.graph_programs import Input, Program
from test.fuzz.workers import Announce, Worker

_SIZES = (2, 3, 4, 5, 8, 9, 16, 17, 32)

Candidate = tuple[Program, Build]


def judge_candidate(candidate: Candidate, announce: Announce) -> Outcome:
    """The outcome of one program; the function of a worker process."""
    program, build = candidate
    return run_alone(program, build, "inductor_ext" if build[0] != "stock" else "inductor")


class Runner:
    """Runs programs in a process that may crash."""

    def __init__(self, build: Build, log: str, timeout_s: float) -> None:
        self._build = ("compile", build[1]) if build[0] == "stock" else build
        self._log = log
        self._timeout_s = timeout_s
        self._worker: Worker[Candidate, Outcome] | None = None

    def run(self, program: Program) -> Outcome:
        """The outcome of a program."""
        self._worker = self._worker or Worker(judge_candidate, None, self._log)
        answer, why = self._worker.judge((program, self._build), self._timeout_s)
        if isinstance(answer, Outcome):
            return answer
        self.close()
        return Outcome(Verdict.CRASH, str(why))

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


def shrink(program: Program, run: Callable[[Program], Outcome], outcome: Outcome) -> Program:
    """Reduce a program as long as its outcome has the same verdict.

    Args:
        program: the program.
        run: returns a program's outcome.
        outcome: of the program.
    """
    kind = _kind(outcome)
    # Statements one by one; the body of a function stays with its first line.
    lines = (part for line in program.lines for part in re.split(r"\n(?! )", line))
    program = dataclasses.replace(program, lines=tuple(lines))
    progress = True
    while progress:
        progress = False
        for candidate in _candidates(program):
            if is_reproducible(candidate) and _kind(run(candidate)) == kind:
                program = candidate
                progress = True
                break
    return program


def _kind(outcome: Outcome) -> tuple[Verdict, str]:
    """The verdict and, of an error, its type."""
    is_error = outcome.verdict in (Verdict.ERROR, Verdict.REFUSED)
    return outcome.verdict, outcome.why.split(":")[0] if is_error else ""


def _candidates(program: Program) -> Iterator[Program]:
    """Smaller programs, the smallest first."""
    for field in ("lines", "outputs"):
        values = getattr(program, field)
        size = len(values) // 2
        while size:
            for start in range(0, len(values), size):
                rest = values[:start] + values[start + size :]
                if rest or field == "lines":
                    yield dataclasses.replace(program, **{field: rest})
            size //= 2
    yield from _without_result(program)
    text = "\n".join((*program.lines, *program.outputs))
    for field in ("inputs", "buffers"):
        values = getattr(program, field)
        used = tuple(i for i in values if re.search(rf"\b{i.name}\b", text))
        if len(used) < len(values):
            yield dataclasses.replace(program, **{field: used})
        for index, value in enumerate(values):
            if value.layout != "plain":
                plain = dataclasses.replace(value, layout="plain")
                fewer = (*values[:index], plain, *values[index + 1 :])
                yield dataclasses.replace(program, **{field: fewer})
    if len(program.sizes) > 2:
        yield dataclasses.replace(program, sizes=program.sizes[:2])
    for name, size in program.sizes[0]:
        for smaller in filter(lambda s, size=size: s < size, _SIZES):  # type: ignore[misc]
            yield _resize(program, name, size, smaller)


def _without_result(program: Program) -> Iterator[Program]:
    """Programs with fewer lines and another single result."""
    if len(program.outputs) > 1:
        return
    for index in range(len(program.lines)):
        lines = program.lines[:index] + program.lines[index + 1 :]
        names = dict.fromkeys(re.findall(r"\b(?:t|x)\d+\b", "\n".join(reversed(lines))))
        for name in list(names)[:3]:
            yield dataclasses.replace(program, lines=lines, outputs=(name,))


def _resize(program: Program, name: str, old: int, new: int) -> Program:
    sizes = tuple(
        tuple((n, min(size, new) if n == name else size) for n, size in sizes_of_call)
        for sizes_of_call in program.sizes
    )
    buffers = tuple(
        dataclasses.replace(b, shape=tuple(str(new) if d == str(old) else d for d in b.shape))
        for b in program.buffers
    )
    return dataclasses.replace(program, sizes=sizes, buffers=buffers)


# --- printing -----------------------------------------------------------------------------------

_MAX_LITERAL = 600


def render_value(value: Tensor, source: Input) -> str:
    """An expression for an input, with its layout."""
    plain = value.detach()
    flat = plain.new_empty(0).set_(plain.untyped_storage())  # type: ignore[call-overload]
    if flat.numel() <= _MAX_LITERAL:
        numbers = torch.view_as_real(flat) if flat.dtype.is_complex else flat
        text = f"torch.tensor({numbers.tolist()}"
        if flat.dtype.is_complex:
            text = f"torch.view_as_complex({text}))"
        else:
            text += f", dtype={flat.dtype})"
    elif flat.dtype.is_floating_point or flat.dtype.is_complex:
        text = f"(torch.randn({flat.numel()}, dtype={flat.dtype}) / 8)"
    else:
        high = max(int(flat.max()), 1)
        text = f"torch.randint({int(flat.min())}, {high + 1}, ({flat.numel()},)).to({flat.dtype})"
    layout = f"{tuple(plain.shape)}, {plain.stride()}, {plain.storage_offset()}"
    return f"{text}.as_strided({layout}){'.requires_grad_()' if source.grad else ''}"


def _render_operators(text: str) -> str:
    """The definitions of the custom operators that a program calls."""
    names = sorted(set(re.findall(r"\bfuzz\.(\w+)", text)))
    definitions = []
    for name in names:
        module = graph_programs if hasattr(graph_programs, f"_{name}") else memory_programs
        operator = getattr(module, f"_{name}")
        source = inspect.getsource(operator._init_fn).replace("@_Op(", "@torch.library.custom_op(")
        fake = "lambda *a, **k: None"
        if name == "both":
            fake = "lambda x: (torch.empty_like(x), torch.empty_like(x))"
        elif operator._opoverload._schema.returns:
            fake = "lambda x, *a: torch.empty_like(x)"
        definitions.append(f"{source}\n_{name}.register_fake({fake})\n")
    return "\n\n".join(definitions)


_HEADER = """import torch
from torch import Tensor
from torch.nn import functional
from torch._higher_order_ops.scan import scan

cond, while_loop, fuzz = torch.cond, torch.while_loop, torch.ops.inductor_ext_fuzz
f16, bf16, f32, f64, c64 = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64
)
CONSTANT = torch.linspace(-1, 1, 600).reshape(3, 200)
KERNEL = torch.linspace(-0.3, 0.3, 36).reshape(4, 1, 3, 3)
torch._dynamo.config.capture_scalar_outputs = True
torch._dynamo.config.capture_dynamic_output_shape_ops = True
"""

_COMPILES = {
    "compile": 'compiled = torch.compile({model}, backend="inductor_ext", dynamic={dynamic})',
    "cpp_wrapper": 'compiled = torch.compile({model}, backend="inductor_ext", dynamic={dynamic}, '
    'options={{"cpp_wrapper": True}})',
    "package": """import inductor_ext

exported = torch.export.export({model}, make(0))  # static sizes
compiled = inductor_ext.load(inductor_ext.aoti_compile_and_package(exported))""",
}


def render_script(program: Program, build: Build) -> str:
    """A standalone script that shows the program's disagreement."""
    init = ["    def __init__(self):", "        super().__init__()"]
    for index, buffer in enumerate(program.buffers):
        value = render_value(buffer.make(dict(program.sizes[0]), 77 + index), buffer)
        wrapped = f"torch.nn.Parameter({value}.detach())" if buffer.grad else value
        kind = "parameter" if buffer.grad else "buffer"
        init.append(f'        self.register_{kind}("{buffer.name}", {wrapped})')
    forward = ["    " + line for line in program.source().splitlines()]
    calls = []
    for call in range(program.calls):
        values = zip(program.inputs, program.arguments(call), strict=True)
        calls.append(f"    if call == {call}:")
        calls.append("        return (")
        calls += [f"            {render_value(v.cpu(), i)}," for i, v in values]
        calls.append("        )")
    dynamic = len({dict(sizes)["n"] for sizes in program.sizes}) > 1 or len(program.sizes) > 1
    way = "compile" if build[0] == "stock" else build[0]
    model = f"model().to({program.device!r})" if program.device != "cpu" else "Model()"
    compile_line = _COMPILES[way].format(model=model, dynamic=dynamic)
    if build[0] == "stock":
        compile_line = compile_line.replace('"inductor_ext"', '"inductor"')
    return "\n".join(
        (
            _HEADER,
            _render_operators("\n".join(program.lines)),
            "",
            "class Model(torch.nn.Module):",
            *init,
            "",
            *forward,
            "",
            "def make(call):",
            *calls,
            "",
            compile_line,
            "eager = Model()",
            f"for call in range({program.calls}):",
            f"    with torch.set_grad_enabled({program.training}):",
            "        for name, function in (('eager', eager), ('compiled', compiled)):",
            "            inputs = make(call)",
            "            print(call, name, function(*inputs), 'inputs', inputs)",
        )
    )


def main(options: argparse.Namespace) -> int:
    """Print a program, or reduce it and print a script; the commands of `graphs`."""
    if options.show is not None:
        program = generate(options.show, options.device)
        print(*program.inputs, *program.buffers, dict(program.sizes[0]), program.source(), sep="\n")
        return 0
    program = generate(options.shrink, options.device)
    build = (options.ways[-1], options.modes[-1])
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        runner = Runner(build, log.name, options.timeout)
        try:
            outcome = runner.run(program)
            print(f"# seed {options.shrink}, {build[0]}, {build[1]}: {outcome.verdict.value}")
            if outcome.verdict in (Verdict.RIGHT, Verdict.SKIPPED):
                print(program.source())
                return 0
            program = shrink(program, runner.run, outcome)
            print(f"# {runner.run(program).why}")
        finally:
            runner.close()
    print(render_script(program, build))
    return 1
