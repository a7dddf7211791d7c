"""Workspaces of CPU kernels that follow no formula: a kernel is run once with its sizes.

oneDNN copies operands and results of convolutions to blocked layouts of its choice, and torch has
no function that tells how many bytes they take. A kernel that has no other effect than its results
is therefore run during compilation, on zeros, and its allocations are recorded. Kernels that would
take long are not run: their workspace stays unknown.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch.utils._python_dispatch import _disable_current_modes

_MAX_FLOPS = 2e9
"""Kernels with more operations are not run: they take some 20 ms on two cores."""

_MAX_BYTES = 1 << 28
"""Kernels with larger operands are not run."""

_Operand = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype."""

_measured: dict[object, int | None] = {}
"""Results of this process, by operator, operands, constants and number of threads."""


def workspace_bytes(node: Any) -> int | None:
    """Return the bytes that a kernel allocates beyond its outputs; None if unknown.

    Args:
        node: a kernel of torch's library that allocates its outputs.
    """
    operator = getattr(node, "op_overload", None)
    count_flops = _list_operators().get(operator)
    if count_flops is None or not all(map(_is_static_on_cpu, node.inputs)) or not _can_record():
        return None
    operands = [
        (
            tuple(map(int, operand.get_size())),
            tuple(map(int, operand.get_stride())),
            operand.get_dtype(),
        )
        for operand in node.inputs
    ]
    bytes_ = sum(math.prod(sizes) * dtype.itemsize for sizes, _, dtype in operands)
    if bytes_ > _MAX_BYTES or count_flops(operands, node) > _MAX_FLOPS:
        return None
    constants = repr((node.constant_args, sorted(node.kwargs.items())))
    key = operator, tuple(operands), constants, torch.get_num_threads()
    if key not in _measured:
        _measured[key] = _measure(node, operands)
    return _measured[key]


def _is_static_on_cpu(operand: Any) -> bool:
    if not isinstance(operand, ir.IRNode) or operand.get_device() != torch.device("cpu"):
        return False
    return all(
        getattr(value, "is_number", True) for value in (*operand.get_size(), *operand.get_stride())
    )


@functools.cache
def _list_operators() -> dict[Any, Callable[[Sequence[_Operand], Any], float]]:
    """Return the operators that may be run, each with a function that bounds its operations."""
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    return {
        aten.convolution.default: lambda operands, node: _convolution_flops(
            (operands[0][0], node.get_size()), operands[1][0]
        ),
        # One convolution each for the gradients of the input and of the weight.
        aten.convolution_backward.default: lambda operands, _: (
            2 * _convolution_flops((operands[0][0], operands[1][0]), operands[2][0])
        ),
        attention.default: lambda operands, _: 2 * _matmul_flops(operands[0][0], operands[1][0]),
        # The scores are computed again.
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda operands, _: (
            5 * _matmul_flops(operands[1][0], operands[2][0])
        ),
    }


def _convolution_flops(images: Sequence[Sequence[Any]], weight: Sequence[int]) -> float:
    """Bound the operations of a convolution, transposed or not.

    Args:
        images: sizes of the input and of the result.
        weight: sizes of the weight.
    """
    return 2.0 * max(math.prod(map(int, sizes)) for sizes in images) * math.prod(weight[1:])


def _matmul_flops(query: Sequence[int], key: Sequence[int]) -> float:
    """Return the operations of the matmul of queries and keys."""
    return 2.0 * math.prod(query) * key[-2]


def _measure(node: Any, operands: Sequence[_Operand]) -> int | None:
    """Run a kernel on zeros; return its workspace in bytes, None if it fails."""
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        tensors = [
            torch.empty_strided(sizes, strides, dtype=dtype).zero_()
            for sizes, strides, dtype in operands
        ]
        arguments, kwargs = _bind(node, tensors)
        try:
            # What a first call keeps, such as a kernel that oneDNN compiles, is no workspace.
            node.op_overload(*arguments, **kwargs)
            return _record(lambda: node.op_overload(*arguments, **kwargs))
        except RuntimeError:
            return None


def _bind(node: Any, tensors: list[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments of a kernel's operator, with `tensors` as the kernel's operands."""
    if isinstance(node, ir.FallbackKernel):
        arguments: tuple[Sequence[Any], dict[str, Any]] = node.unflatten_args(
            tensors, node.constant_args
        )
        return arguments
    # Inductor's lowering of a convolution names the arguments that are no operands.
    names = [argument.name for argument in node.op_overload._schema.arguments]
    return (), dict(zip(names, tensors, strict=False)) | dict(node.kwargs)


def _can_record() -> bool:
    """Whether `_record` works: one profiler cannot run inside another."""
    autograd: Any = torch.autograd
    return hasattr(autograd, "_enable_profiler_legacy") and not autograd._profiler_enabled()


def _record(call: Callable[[], object]) -> int:
    """Return the bytes that a call allocates beyond what its result keeps.

    torch's older profiler records allocations of this thread, and nothing else.
    """
    autograd: Any = torch.autograd
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.CPU,
        False,  # report_input_shapes
        True,  # profile_memory
        False,  # with_stack
        False,  # with_flops
        False,  # with_modules
        torch._C._profiler._ExperimentalConfig(),
    )
    result = None
    autograd._enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        events = autograd._disable_profiler_legacy()
    changes = [
        event.cpu_memory_usage()
        for of_thread in events
        for event in of_thread
        if event.kind() == "memory_alloc"
    ]
    levels: list[int] = [0, *itertools.accumulate(changes)]
    del result
    return max(levels) - levels[-1]
