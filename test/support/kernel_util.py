"""Kernels of the templates in Inductor's generated code: rendered, interpreted, compiled.

`render` lowers one matmul by one configuration as for a GPU (`fake_cuda`) and returns the generated
module. `interpret` runs such modules, wrapper and kernels, on CPU tensors by Triton's interpreter,
many in one separate process, because the interpreter is selected when triton is imported.
`compiled` compiles a module's kernel for a GPU with Triton.

The interpreter multiplies float16 and float32 (in float32), and bfloat16 wrongly.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from inductor_ext.autotune.reference import ACTIVATIONS
from inductor_ext.templates.fused_ops import Prologue
from inductor_ext.templates.problem import BATCHED, GemmProblem
from inductor_ext.templates.tensors import FP8, Operand
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.semaphores import Counters
from test.support import fake_cuda, triton_interpreter

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_interpreter.accept_numpy()

__all__ = [
    "Case",
    "Compiled",
    "as_bfloat16",
    "compiled",
    "cuobjdump",
    "inputs",
    "interpret",
    "interpret_modules",
    "interpretable",
    "reference",
    "render",
]


def as_bfloat16(problem: GemmProblem) -> GemmProblem:
    """A problem in bfloat16, interpreted in float16."""
    a, prologue = problem.a, problem.prologue
    if a.dtype != "float16":
        return problem
    if problem.dequant is not None and problem.dequant.scale_dtype == "float16":
        dequant = dataclasses.replace(problem.dequant, scale_dtype="bfloat16")
        prologue = Prologue(problem.norm, dequant)
    elif problem.norm is not None and problem.norm.dtype == "float16":
        prologue = Prologue(dataclasses.replace(problem.norm, dtype="bfloat16"))
    b = problem.b
    return dataclasses.replace(
        problem,
        a=dataclasses.replace(a, dtype="bfloat16"),
        b=dataclasses.replace(b, dtype="bfloat16") if b.dtype == "float16" else b,
        out="bfloat16" if problem.out == "float16" else problem.out,
        prologue=prologue,
    )


@dataclass(frozen=True)
class Case:
    """One matmul by one configuration."""

    problem: GemmProblem
    config: GemmConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    """Constants of the kernel: ACTIVATION, EPSILON."""
    after: Callable[[torch.Tensor], torch.Tensor] | None = None
    """An epilogue for Inductor to fuse."""
    offsets: tuple[int, ...] = ()
    """Ends of the groups of a grouped matmul."""
    offset: int = 0
    """Storage offsets of a and b, in elements."""
    mean: float = 0.0
    """A tensor that is added to a."""
    bias: Literal["row", "matrix"] | None = None
    """A tensor that the template's own epilogue adds, with prefix arguments."""
    multiprocessors: int = 0
    """The number of SMs that the kernel is compiled for, of 132; 0 for all."""


def _matrix(
    operand: Operand, rows: int, columns: int, batch: int, offset: int, device: str
) -> torch.Tensor:
    shape = (rows, columns) if batch == 0 else (batch, rows, columns)
    strides = operand.strides if batch == 0 else (operand.batch_stride, *operand.strides)
    dtype = getattr(torch, operand.dtype)
    span = offset + operand.span(rows, columns, max(1, batch))
    if device == "meta":
        storage = torch.empty(span, dtype=dtype, device="meta")
    elif dtype.is_floating_point:
        storage = torch.randn(span, device=device).to(dtype)
    else:
        storage = torch.randint(-8, 8, (span,), device=device).to(dtype)
    return storage.as_strided(shape, strides, offset)


def inputs(case: Case, device: str = "cpu", seed: int = 0) -> list[torch.Tensor]:
    """Operands of a case: a; every b, with scales and zero points; other inputs of its prologue;
    biases of gates; offsets; a bias.

    Parts are separate matrices with b's layout.
    """
    torch.manual_seed(seed)
    problem = case.problem
    batch = problem.batch if problem.operation in BATCHED else 0
    groups = problem.batch if problem.operation == "grouped" else 0
    a_batch = groups if groups and problem.divided == "n" else batch
    b_batch = groups if groups and problem.divided == "m" else batch
    operands = [_matrix(problem.a, problem.m, problem.k, a_batch, case.offset, device)]
    if case.mean:
        operands[0] += case.mean
    for part in problem.parts or (problem.n,):
        b = problem.b
        if problem.parts:
            strides = (part, 1) if b.layout == "row" else b.strides
            b = Operand.of(b.dtype, (problem.k, part), strides)
        if b.dtype in ("int4", "uint4"):
            pairs = torch.randint(256, (part, problem.k // 2), device=device)
            operands.append(pairs.to(torch.uint8).t())
        else:
            operands.append(_matrix(b, problem.k, part, b_batch, case.offset, device))
    dequant = problem.dequant
    if dequant is not None:
        dtype = getattr(torch, dequant.scale_dtype)
        zeros = []
        for part in problem.parts or (problem.n,):
            if dequant.scales in ("column", "tensor"):
                count = part if dequant.scales == "column" else 1
                operands.append(torch.rand(count, device=device).to(dtype))
            elif dequant.scales == "group":
                groups = (part, -(-problem.k // dequant.group))
                operands.append(torch.rand(groups, device=device).to(dtype).t())
                if dequant.zero_points:
                    zeros.append(torch.randint(-4, 4, groups, device=device).to(torch.int8).t())
        operands += zeros
    if problem.norm is not None:
        operands += [
            torch.rand(problem.k, device=device).to(operands[0].dtype)
            for _ in range(problem.norm.vectors)
        ]
    if problem.epilogue.gated and problem.operation == "addmm":
        operands += [
            torch.randn(part, device=device).to(operands[0].dtype) for part in problem.parts
        ]
    if case.offsets:
        operands.append(torch.tensor(case.offsets, dtype=torch.int32, device=device))
        if problem.a.dtype in FP8:
            # One per row of a and column of b for each group, but only one if groups divide them.
            for size, axis in ((problem.m, "m"), (problem.n, "n")):
                count = size * (1 if problem.divided == axis else problem.batch)
                operands.append(torch.rand(count, device=device))
    if case.bias:
        size = _size(case) if case.bias == "matrix" else [problem.columns]
        operands.append(torch.randn(size, device=device).to(operands[0].dtype))
    return operands


def reference(case: Case, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    problem = case.problem
    parts = len(problem.parts or (problem.n,))
    a, *rest = values
    factors, rest = rest[:parts], rest[parts:]
    a, factors = a.double(), [_numbers(case, factor) for factor in factors]
    norm, dequant = problem.norm, problem.dequant
    scales: list[torch.Tensor] = []
    if dequant is not None and dequant.scales != "none":
        scales, rest = [item.double() for item in rest[:parts]], rest[parts:]
    if dequant is not None and dequant.scales == "group":

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double().repeat_interleave(dequant.group, 0)[: problem.k]

        if dequant.zero_points:
            zeros, rest = rest[:parts], rest[parts:]
            factors = [b - spread(zero) for b, zero in zip(factors, zeros, strict=True)]
        factors = [b * spread(scale) for b, scale in zip(factors, scales, strict=True)]
    if norm is not None and norm.kind == "rms":
        scale = torch.rsqrt(a.square().mean(-1, keepdim=True) + case.options["EPSILON"])
        a = a * scale * (rest.pop(0).double() if norm.vectors else 1)
    if norm is not None and norm.kind == "layer":
        variance, mean = torch.var_mean(a, -1, correction=0, keepdim=True)
        a = (a - mean) * torch.rsqrt(variance + case.options["EPSILON"])
        vectors = [rest.pop(0).double() for _ in range(norm.vectors)]
        a = a * vectors[0] if vectors else a
        a = a + vectors[1] if len(vectors) > 1 else a
    if case.offsets:
        product = _grouped(a, factors[0], case.offsets)
        if problem.a.dtype in FP8:
            rows, columns = (
                item.double().view(1 if problem.divided == axis else problem.batch, -1)
                for item, axis in zip(rest[1:3], "mn", strict=True)
            )
            counts = torch.tensor((0, *case.offsets)).diff().to(columns.device)
            if problem.divided == "m":
                rows, columns = rows.t(), columns.repeat_interleave(counts, 0)
            elif problem.divided == "n":
                rows = rows.repeat_interleave(counts, 0).t()
            else:
                rows, columns = rows[:, :, None], columns[:, None]
            product = product * rows * columns
        products = [product]
    else:
        products = [a @ factor for factor in factors]
    if dequant is not None and dequant.scales in ("column", "tensor"):
        products = [product * scale for product, scale in zip(products, scales, strict=True)]
    if problem.epilogue.gated and problem.operation == "addmm":
        products = [product + rest.pop(0).double() for product in products]
    if problem.epilogue.gated:
        activation = ACTIVATIONS[case.options["ACTIVATION"].strip("'")]
        result = activation(products[0]) * products[1]
    else:
        result = torch.cat(products, -1)
    if case.bias:
        result = result + values[-1].double()
    return result if case.after is None else case.after(result)


def _numbers(case: Case, b: torch.Tensor) -> torch.Tensor:
    """The values of an operand b, without the scales and zero points of groups."""
    kind = case.problem.b.dtype
    if kind in ("int4", "uint4"):
        pair = (b >> 4, b & 15) if case.options.get("HIGH_FIRST") else (b & 15, b >> 4)
        b = torch.stack(pair, 1).flatten(0, 1).int()
        b = (b ^ 8) - 8 if kind == "int4" else b
    return b.double() - case.options.get("ZERO", 0)


def _grouped(a: torch.Tensor, b: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    begins = (0, *offsets[:-1])
    spans = [slice(begin, end) for begin, end in zip(begins, offsets, strict=True)]
    if a.dim() == 2 and b.dim() == 3:
        return torch.cat([a[span] @ b[g] for g, span in enumerate(spans)])
    if a.dim() == 3:
        return torch.cat([a[g] @ b[:, span] for g, span in enumerate(spans)], 1)
    return torch.stack([a[:, span] @ b[span] for span in spans])


def dispatch_limits(code: str, size: str = r"s\d+") -> list[int]:
    """The values that generated Python compares M with to choose a branch, ascending.

    That is `if s2 <= 64:`; from torch 2.14 on, which computes the index of the branch first,
    `buf0_selector = int(s2 <= 64)`.

    Args:
        code: of a module.
        size: pattern of M.
    """
    return sorted(map(int, re.findall(rf"(?:\bif |= int\(){size} <= (\d+)[:)]", code)))


def takes_strided_offsets() -> bool:
    """Whether grouped matmuls accept non-contiguous offsets; torch 2.14 and later reject them."""
    a = torch.empty(8, 16, dtype=torch.bfloat16, device="meta")
    b = torch.empty(4, 16, 16, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty_strided((4,), (2,), dtype=torch.int32, device="meta")
    try:
        torch._grouped_mm(a, b, offs=offsets)
    except RuntimeError as error:
        if "must have stride" not in str(error):
            raise
        return False
    return True


@torch.library.custom_op("inductor_ext_test::product", mutates_args=())
def _product(operands: list[torch.Tensor], size: list[int], dtype: torch.dtype) -> torch.Tensor:
    raise NotImplementedError("it is lowered, and not called")


@_product.register_fake
def _(operands: list[torch.Tensor], size: list[int], dtype: torch.dtype) -> torch.Tensor:
    return operands[0].new_empty(size, dtype=dtype)


def _size(case: Case) -> list[int]:
    problem = case.problem
    split = _sums(case)
    if problem.operation in BATCHED:
        return [problem.batch, split * problem.m, problem.columns]
    if problem.divided == "k":
        return [problem.batch, problem.m, problem.columns]
    return [split * problem.m, problem.columns]


def _sums(case: Case) -> int:
    """The number of split-K partial results for a second kernel; 1 if the kernel reduces them."""
    return 1 if case.config.fused_split_k else case.config.split_k


def _dtype(case: Case) -> torch.dtype:
    problem = case.problem
    name = problem.accumulator if _sums(case) > 1 else problem.out
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@contextlib.contextmanager
def lowering_of(case: Case) -> Iterator[Callable[..., torch.Tensor]]:
    """A function of `inputs`, which Inductor lowers to the case's kernel inside this context."""
    from torch._inductor import lowering
    from torch._inductor.ir import FixedLayout
    from torch._inductor.kernel.mm_common import addmm_epilogue, realize_inputs

    from inductor_ext.templates.triton import inductor_template

    def lower(operands: Any, size: Any, dtype: torch.dtype) -> Any:
        rest: dict[str, Any] = {}
        if case.bias:
            operands = [lowering.expand(operands[-1], size), *operands[:-1]]
            rest = {"prefix_args": 1, "epilogue_fn": addmm_epilogue(dtype, 1, 1)}
        nodes = realize_inputs(*operands)
        layout = FixedLayout(nodes[-1].get_device(), dtype, size)
        choice = inductor_template.choice(
            case.problem, case.config, nodes, layout, options=case.options, **rest
        )
        return choice.output_node()

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        product = torch.ops.inductor_ext_test.product(list(tensors), _size(case), _dtype(case))
        return product if case.after is None else case.after(product)

    operator = torch.ops.inductor_ext_test.product.default
    with mock.patch.dict(lowering.lowerings, {operator: lower}):
        yield function


def render(case: Case, capability: tuple[int, int] = (9, 0)) -> fake_cuda.Lowered:
    """Inductor's generated code for a case."""
    others = case.multiprocessors and 132 - case.multiprocessors
    with (
        mock.patch.object(torch._C, "_get_sm_carveout_experimental", return_value=others),
        lowering_of(case) as function,
    ):
        return fake_cuda.lower(function, *inputs(case, "meta"), capability=capability)


@contextlib.contextmanager
def interpretable() -> Iterator[None]:
    """Inside, lowered code has no GPU instructions that the interpreter lacks."""
    from torch._inductor.virtualized import ops

    from inductor_ext.lowerings.pointwise import erf
    from inductor_ext.templates.triton.kernels import dequantize

    plain = dequantize.constants
    with (
        mock.patch.object(dequantize, "constants", lambda p: {**plain(p), "BITS": False}),
        mock.patch.object(erf, "_erf", lambda _, x: ops.erf(x)),
    ):
        yield


def interpret(cases: Mapping[str, Case]) -> dict[str, torch.Tensor]:
    """Results of cases by Triton's interpreter, with split-K partial results reduced."""
    results = interpret_modules(
        {name: (render(case).code, inputs(case)) for name, case in cases.items()}
    )
    for name, case in cases.items():
        split = _sums(case)
        if split > 1:
            results[name] = results[name].unflatten(-2, (split, -1)).sum(-3)
    return results


def interpret_modules(
    work: Mapping[str, tuple[str, list[torch.Tensor]]], strict: bool = True
) -> dict[str, Any]:
    """The results of generated modules by Triton's interpreter: a tensor, or a list if a module
    has several.

    Args:
        work: modules, each with its inputs.
        strict: whether none may fail; otherwise the error replaces the results.

    Raises:
        AssertionError: some failed; the message says how.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, results = Path(folder, "given.pt"), Path(folder, "results.pt")
        torch.save(dict(work), inputs)
        subprocess.run(
            [sys.executable, "-m", "test.support.kernel_util", str(inputs), str(results)],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            check=True,
        )
        outputs: dict[str, Any] = torch.load(results)
    failed = [f"{name}: {why}" for name, why in outputs.items() if isinstance(why, str)]
    assert not strict or not failed, "\n".join(failed)
    return outputs


class _Kernel:
    """Replaces a kernel that Inductor has loaded."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def run(self, *arguments: Any, stream: Any) -> None:
        if "r0_numel" in self.function.arg_names:
            # Persistent rows may be long.
            looped = "R0_BLOCK" in self.function.arg_names
            blocks = {"XBLOCK": 64, "R0_BLOCK": 64} if looped else {"XBLOCK": 8}
            self.function[(-(-arguments[-2] // blocks["XBLOCK"]),)](*arguments, **blocks)
            return
        if "XBLOCK" in self.function.arg_names:
            # Pointwise code, not a template: Inductor's launcher would choose block and grid by
            # the last argument, the number of elements.
            self.function[(-(-arguments[-1] // 64),)](*arguments, XBLOCK=64)
            return
        *operands, x, y, z = arguments
        self.function[(x, y, z)](*operands)


def _run(code: str, values: Sequence[torch.Tensor], folder: Path, name: str) -> Any:
    """Run a generated module's wrapper, with its kernels interpreted."""
    from torch._inductor.select_algorithm import extern_kernels

    tree = ast.parse(code)
    (runner,) = (item for item in tree.body if getattr(item, "name", None) == "Runner")
    (call,) = (item for item in runner.body if getattr(item, "name", None) == "call")  # type: ignore[attr-defined]
    lowered = fake_cuda.Lowered(code, ())
    namespace: dict[str, Any] = {
        "torch": torch,
        "assert_size_stride": lambda *_: None,
        # torch 2.14 on.
        "assert_size_stride_grouped": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "assert_tensor_metadata": lambda *_: None,
        "copy_if_misaligned": lambda tensor: tensor,
        # The name in torch 2.12.
        "copy_misaligned": lambda tensor: tensor,
        "empty_strided_cuda": _unwritten,
        "get_raw_stream": lambda _: 0,
        # Shared by all kernels: each has to leave zeros.
        "counters_0": _COUNTERS,
        "extern_kernels": extern_kernels,
        "reinterpret_tensor": torch._C._dynamo.guards._reinterpret_tensor,  # type: ignore[attr-defined]
    }
    for index, (kernel, source) in enumerate(lowered.kernels().items()):
        namespace[kernel] = _Kernel(load(f"{name}_{index}", source, folder))
    # The module also contains the graphs of the M buckets.
    functions = [item for item in tree.body if isinstance(item, ast.FunctionDef)]
    exec(compile(ast.Module([*functions, call], []), "<wrapper>", "exec"), namespace)
    results = namespace["call"](types.SimpleNamespace(), list(values))
    return results[0] if len(results) == 1 else list(results)


_COUNTERS = Counters(torch.device("cpu"), lambda: 0)


def _unwritten(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A buffer in which unwritten elements are visible."""
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    return tensor.fill_(float("nan") if dtype.is_floating_point else -77)


_HEAD = """\
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
from test.support.kernel_util import Libdevice

libdevice = Libdevice.where_interpreted(libdevice)


@triton.jit
"""


class Libdevice:
    """NumPy versions of libdevice functions, which the interpreter lacks."""

    _FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "erf": np.vectorize(math.erf, otypes=[np.float64]),
        **{
            name: getattr(np, name)
            for name in ("exp", "log", "sqrt", "tanh", "sin", "cos", "isnan", "isinf")
        },
    }

    @classmethod
    def where_interpreted(cls, library: Any) -> Any:
        """Replaces libdevice in a process that interprets kernels."""
        return cls() if os.environ.get("TRITON_INTERPRET") == "1" else library

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        from triton import language
        from triton.runtime.interpreter import TensorHandle

        if name not in self._FUNCTIONS:
            raise AttributeError(name)
        function = self._FUNCTIONS[name]

        def call(x: Any) -> Any:
            data = x.handle.data
            result = TensorHandle(function(data).astype(data.dtype), x.handle.dtype)
            return language.tensor(result, x.type)

        return call


def load(name: str, source: str, folder: Path) -> Any:
    """A kernel from its source, which Triton reads from a file."""
    file = folder / f"{name}.py"
    file.write_text(_HEAD + source)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The kernel may have two names.
    return next(var for var in vars(module).values() if hasattr(var, "arg_names"))


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for a GPU."""

    ptx: str
    shared: int
    """Bytes of shared memory per CTA."""
    spills: int
    """Bytes of spilled registers."""
    registers: int
    """Of a thread."""
    scratch: int
    """Bytes of global memory that each CTA writes its descriptors to."""


_TRITON = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
}


def compiled(case: Case, capability: tuple[int, int] = (9, 0)) -> Compiled:
    """The kernel of a case, compiled for a GPU by Triton and ptxas."""
    return compiled_module(render(case, capability), case.config, capability)


def compiled_module(
    lowered: fake_cuda.Lowered, config: GemmConfig, capability: tuple[int, int] = (9, 0)
) -> Compiled:
    """The only template kernel of a module, compiled by Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    ((name, source),) = (
        item for item in lowered.kernels().items() if item[0].startswith("triton_tem")
    )
    arguments = lowered.code[lowered.code.index("@triton_heuristics.template") :]
    signature = dict(re.findall(r"'(\w+)': '(\*\w+|i32|i64)'", arguments.split("\n@triton.jit")[0]))
    with tempfile.TemporaryDirectory() as folder:
        kernel = load(name, source, Path(folder))
        declared = {name: signature[name] for name in kernel.arg_names}
        attributes = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if declared[name].startswith("*")
        }
        target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.pdl:
            options["launch_pdl"] = True
        with mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
            binary = triton.compile(
                ASTSource(kernel, declared, {}, attributes), target=target, options=options
            )
        registers, spills = _resources(binary.asm["cubin"])
    return Compiled(
        binary.asm["ptx"],
        binary.metadata.shared,
        spills,
        registers,
        binary.metadata.global_scratch_size,
    )


def cuobjdump(cubin: bytes, option: str) -> str:
    """The output of CUDA's cuobjdump for a kernel."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, option, file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of spilled ones."""
    listing = cuobjdump(cubin, "--dump-resource-usage")
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", listing)
    registers, stack, local = (int(item) for item in usage)
    return registers, stack + local


def _main(inputs: str, results: str) -> None:
    work = torch.load(inputs)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(torch.cuda, "_DeviceGuard", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "set_device"),
    ):
        outputs: dict[str, Any] = {}
        for index, (name, (code, values)) in enumerate(work.items()):
            try:
                outputs[name] = _run(code, values, Path(folder), f"case{index}")
            except Exception:
                outputs[name] = traceback.format_exc()
        torch.save(outputs, results)


if __name__ == "__main__":
    _main(*sys.argv[1:])
