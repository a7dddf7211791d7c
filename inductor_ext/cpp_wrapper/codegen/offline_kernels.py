"""The Triton kernels of a graph, compiled for a GPU that this machine need not have.

Inductor writes the definitions of the kernels into a block of Python code, runs it to choose a
configuration for each kernel, and records the compiled kernel in `CudaKernelParamCache`, from which
the C++ is generated. Here each kernel is compiled with the first of its configurations that the GPU
has the shared memory for, and recorded in the same way. Nothing is launched.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from inductor_ext import exc


def compile_kernels(definitions: str, gpu: Any) -> None:
    """Compile and record all kernels.

    Args:
        definitions: Inductor's Python code.
        gpu: the `hooks.offline_gpu.GpuProperties`.
    """
    for name, source in _find_kernels(definitions):
        _record(_load(name, source), gpu)


def _load(name: str, source: str) -> Any:
    """Return a new kernel of a source.

    That of `PyCodeCache.load` may have been compiled for this machine's GPU, and has no
    configurations any more.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.compile_tasks import _reload_python_module

    key, path = PyCodeCache.write(source)
    return getattr(_reload_python_module(key, path, set_sys_modules=False), name)


def _find_kernels(definitions: str) -> Iterator[tuple[str, str]]:
    """Yield the name and source of each kernel: the arguments of `async_compile.triton`."""
    for node in ast.walk(ast.parse(definitions)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "triton"
            and len(node.args) >= 2
        ):
            name, source = (ast.literal_eval(arg) for arg in node.args[:2])
            yield name, source


def _record(kernel: Any, gpu: Any) -> None:
    limit = gpu.shared_memory_per_block_optin
    for config in kernel.configs:
        result = kernel._precompile_config(config)
        binary = result.kernel
        if binary.metadata.shared <= limit:
            break
    else:
        name = kernel.inductor_meta.get("kernel_name")
        why = f"no configuration of the kernel {name} fits into {limit} bytes of shared memory"
        raise exc.UnsupportedTargetError(target=gpu.name, why=why, fix="Omit this target.")
    # The launcher is described, but never called: there is nothing to load the kernel on.
    binary._init_handles = lambda: None
    binary._run = _refuse_launch
    if gpu.emits_ptx:
        # The driver loads a file with either.
        binary.asm = {**binary.asm, "cubin": binary.asm["ptx"].encode()}
    kernel.save_gpu_kernel(0, result.make_launcher())


def _refuse_launch(*_: Any, **__: Any) -> None:
    raise AssertionError("a kernel of another GPU was launched")
