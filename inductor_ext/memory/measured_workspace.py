"""Workspaces of library kernels that follow no formula: a kernel is run once with its sizes.

oneDNN copies operands and results of convolutions to blocked layouts of its choice, cuDNN chooses
an algorithm with a workspace, the backward of attention accumulates in buffers of its own, and bmm
on a CPU copies operands whose matrices are not contiguous.
torch has no function that tells how many bytes these take. A kernel that has no other effect than
its results is therefore run during compilation, on zeros, and its allocations are recorded.
Kernels that would take long are not run: their workspace stays unknown. On a GPU the memory is a
pool of its own, which is returned to the driver.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch.utils._python_dispatch import _disable_current_modes


@dataclasses.dataclass(frozen=True)
class _Limits:
    """The largest kernels that are run."""

    flops: float
    bytes: int
    """Of the operands."""


LIMITS = {
    # Some 100 ms on two cores.
    "cpu": _Limits(flops=1e10, bytes=1 << 28),
    # Some 400 ms in float32 on an H100, as long as in the model.
    "cuda": _Limits(flops=2e13, bytes=1 << 34),
}
"""By device type; kernels on other devices are not run."""

_SHARE_OF_FREE_MEMORY = 1 / 4
"""Of the free memory of a GPU: operands that take more are not allocated. The results and the
workspace need memory too."""


@dataclasses.dataclass(frozen=True)
class _Operand:
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    def zeros(self) -> torch.Tensor:
        return torch.empty_strided(
            self.sizes, self.strides, dtype=self.dtype, device=self.device
        ).zero_()


_measured: dict[object, int | None] = {}
"""Results of this process, by operator, operands, constants and settings of the libraries."""


def workspace_bytes(node: Any) -> int | None:
    """Return the bytes that a kernel allocates on its device beyond its outputs; None if unknown.

    Args:
        node: a kernel of torch's library, which allocates its outputs or is given its only one.
    """
    count_flops = _list_operators().get(getattr(node, "op_overload", None))
    if count_flops is None or not all(map(_is_static, node.inputs)) or not _can_record():
        return None
    operands = list(map(_describe, node.inputs))
    result = _describe(node) if isinstance(node, ir.ExternKernelOut) else None
    device = operands[0].device
    limits = LIMITS.get(device.type)
    # The state of a random generator may be on the CPU beside operands on a GPU.
    if limits is None or {operand.device for operand in operands} - {device, _CPU}:
        return None
    sizes = [operand.sizes for operand in operands]
    if (
        sum(operand.bytes for operand in operands) > limits.bytes
        or count_flops(sizes, node) > limits.flops
    ):
        return None
    constants = repr((node.constant_args, sorted(node.kwargs.items())))
    key = node.op_overload, tuple(operands), result, constants, _library_settings(device)
    if key not in _measured:
        _measured[key] = _measure(node, operands, device)
    return _measured[key]


_CPU = torch.device("cpu")


def _describe(tensor: Any) -> _Operand:
    """Return the description of a tensor of static sizes in Inductor's IR."""
    return _Operand(
        tuple(map(int, tensor.get_size())),
        tuple(map(int, tensor.get_stride())),
        tensor.get_dtype(),
        tensor.get_device(),
    )


def _is_static(operand: Any) -> bool:
    if not isinstance(operand, ir.IRNode) or operand.get_device() is None:
        return False
    return all(
        getattr(value, "is_number", True) for value in (*operand.get_size(), *operand.get_stride())
    )


def _library_settings(device: torch.device) -> object:
    """Return the settings that the choice of an algorithm depends on."""
    if device == _CPU:
        return torch.get_num_threads()
    cudnn = torch.backends.cudnn
    return (
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.are_deterministic_algorithms_enabled(),
    )


@functools.cache
def _list_operators() -> dict[Any, Callable[[Sequence[Sequence[int]], Any], float]]:
    """Return the operators that may be run, each with a function that bounds its operations.

    The function's arguments are the sizes of the operands and the kernel.
    """
    aten = torch.ops.aten
    operators: dict[Any, Callable[[Sequence[Sequence[int]], Any], float]] = {
        aten.convolution.default: lambda sizes, node: _convolution_flops(
            (sizes[0], node.get_size()), sizes[1]
        ),
        # One convolution each for the gradients of the input and of the weight.
        aten.convolution_backward.default: lambda sizes, _: (
            2 * _convolution_flops(sizes[:2], sizes[2])
        ),
        aten.bmm.out: lambda sizes, _: 2.0 * math.prod(sizes[0]) * sizes[1][-1],
        aten.baddbmm.out: lambda sizes, _: 2.0 * math.prod(sizes[1]) * sizes[2][-1],
    }
    for kind in (
        "flash_attention_for_cpu",
        "flash_attention",
        "efficient_attention",
        "cudnn_attention",
    ):
        forward = getattr(aten, f"_scaled_dot_product_{kind}").default
        # The scores are computed again.
        backward = getattr(aten, f"_scaled_dot_product_{kind}_backward").default
        operators[forward] = lambda sizes, _: 2 * _matmul_flops(sizes[0], sizes[1])
        operators[backward] = lambda sizes, _: 5 * _matmul_flops(sizes[1], sizes[2])
    return operators


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


def _measure(node: Any, operands: Sequence[_Operand], device: torch.device) -> int | None:
    """Run a kernel on zeros; return its workspace in bytes, None if it cannot be run."""
    with (
        _disable_current_modes(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        if device == _CPU:
            return _run(node, operands, device)
        if not _can_allocate(sum(operand.bytes for operand in operands), device):
            return None
        with torch.cuda.device(device):
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                return _run(node, operands, device)


def _can_allocate(bytes_: int, device: torch.device) -> bool:
    """Whether a GPU can run a kernel with operands of `bytes_`, in a memory pool of its own."""
    return (
        torch.cuda.is_initialized()
        and not torch.cuda.is_current_stream_capturing()
        and torch.cuda.memory.get_allocator_backend() == "native"
        and bytes_ <= _SHARE_OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]
    )


def _run(node: Any, operands: Sequence[_Operand], device: torch.device) -> int | None:
    try:
        arguments = _bind(node, [operand.zeros() for operand in operands])
        if isinstance(node, ir.ExternKernelOut):
            arguments["out"] = _describe(node).zeros()
        # What a first call keeps, such as a kernel that oneDNN compiles, is no workspace.
        node.op_overload(**arguments)
        return _record(lambda: node.op_overload(**arguments), device)
    except RuntimeError:
        return None


def _bind(node: Any, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return the arguments of a kernel's operator, with `tensors` as the kernel's operands.

    Dropout is left out: it needs no workspace, but it would advance the random generator, and its
    seed is on the CPU although Inductor describes it as a tensor on the GPU.
    """
    names = [argument.name for argument in node.op_overload._schema.arguments]
    if isinstance(node, ir.FallbackKernel):
        positional, kwargs = node.unflatten_args(tensors, node.constant_args)
        arguments: dict[str, Any] = dict(zip(names, positional, strict=False)) | kwargs
    else:
        # Inductor's lowering of a convolution names the arguments that are no operands.
        arguments = dict(zip(names, tensors, strict=False)) | dict(node.kwargs)
    if "dropout_p" in arguments:
        arguments["dropout_p"] = 0.0
    return arguments


def _can_record() -> bool:
    """Whether `_record` works: one profiler cannot run inside another."""
    autograd: Any = torch.autograd
    return hasattr(autograd, "_enable_profiler_legacy") and not autograd._profiler_enabled()


def _record(call: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that a call allocates on a device beyond what its result keeps.

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
    # Garbage with tensors would be freed in this thread, and counted as a workspace.
    collects = gc.isenabled()
    gc.disable()
    autograd._enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        events = autograd._disable_profiler_legacy()
        if collects:
            gc.enable()
    changes = [
        event.cpu_memory_usage() if device == _CPU else event.cuda_memory_usage()
        for of_thread in events
        for event in of_thread
        if event.kind() == "memory_alloc"
    ]
    levels: list[int] = [0, *itertools.accumulate(changes)]
    del result
    return max(levels) - levels[-1]
