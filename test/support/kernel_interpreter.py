"""Modules that Inductor generates for a GPU, run on CPU tensors by Triton's interpreter.

The interpreter is selected when triton is imported, so that `interpret_modules` runs many modules,
wrappers and kernels, in one process of its own. It multiplies float16 and float32 (in float32), and
bfloat16 wrongly.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import math
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from inductor_ext.templates.triton.semaphores import Counters
from test.support import fake_cuda, triton_interpreter
from test.support.kernel_cases import Case, inputs, partial_sums, render

if os.environ.get("TRITON_INTERPRET") == "1":
    triton_interpreter.accept_numpy()


@contextlib.contextmanager
def interpretable() -> Iterator[None]:
    """Inside, lowered code has no GPU instructions that the interpreter lacks."""
    from torch._inductor.virtualized import ops

    from inductor_ext.lowerings.pointwise.inline_ptx import PtxFunction
    from inductor_ext.templates.triton.kernels import dequantize

    plain = dequantize.constants
    with (
        mock.patch.object(dequantize, "constants", lambda p: {**plain(p), "BITS": False}),
        mock.patch.object(PtxFunction, "compute", lambda self, _, x: getattr(ops, self.name)(x)),
    ):
        yield


def interpret(cases: Mapping[str, Case]) -> dict[str, torch.Tensor]:
    """Results of cases by Triton's interpreter, with split-K partial results reduced."""
    results = interpret_modules(
        {name: (render(case).code, inputs(case)) for name, case in cases.items()}
    )
    for name, case in cases.items():
        split = partial_sums(case)
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
            [sys.executable, "-m", "test.support.kernel_interpreter", str(inputs), str(results)],
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
from test.support.kernel_interpreter import Libdevice

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
