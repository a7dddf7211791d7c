"""Compiles for a GPU that this machine may not have: what torch reports to Inductor.

Inside `report`, in this thread, torch reports one GPU with the given properties. Nothing runs on
it: tensors are fake, kernels are compiled but not launched, and nothing is timed. Outside of it,
and in other threads, torch reports what the machine has. The dispatchers are installed at the first
use.

Inductor caches some answers for the whole process. `report` clears these caches when it begins and
when it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.templates.device import Device
from inductor_ext.toolchain.probes import cuda


@dataclasses.dataclass(frozen=True)
class GpuProperties:
    """The fields of `torch.cuda.get_device_properties` that Inductor and the extension read."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    regs_per_multiprocessor: int
    total_memory: int
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    gcnArchName: str = ""
    is_integrated: bool = False
    emits_ptx: bool = False
    """Whether the package gets kernels as PTX, for any later GPU, instead of machine code."""

    @classmethod
    def of(cls, device: Device, memory: int) -> GpuProperties:
        """Return the properties of a GPU.

        Args:
            device: the GPU.
            memory: bytes of its memory.
        """
        return cls(
            name=device.name,
            major=device.capability[0],
            minor=device.capability[1],
            multi_processor_count=device.sms,
            shared_memory_per_block_optin=device.shared_memory,
            shared_memory_per_multiprocessor=device.shared_memory_sm,
            L2_cache_size=device.l2,
            regs_per_multiprocessor=device.registers_sm,
            total_memory=memory,
            max_threads_per_multi_processor=1536 if device.capability == (8, 9) else 2048,
        )

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return self.major, self.minor

    @property
    def architecture(self) -> int:
        """The compute capability as one number: 90."""
        return 10 * self.major + self.minor


_Answer = Callable[[GpuProperties], Any]


def _always(value: Any) -> _Answer:
    return lambda gpu: value


def _has_tma(gpu: GpuProperties) -> bool:
    return gpu.major >= 9


def _rng_state(_gpu: GpuProperties) -> Any:
    import torch

    return torch.zeros(16, dtype=torch.uint8)


def _torch_device(_gpu: GpuProperties) -> Any:
    import torch

    return torch.device("cuda", 0)


_INTERFACE = "torch._dynamo.device_interface.CudaInterface"

_ANSWERS: dict[str, _Answer] = {
    "torch.cuda.is_available": _always(True),
    "torch.cuda.device_count": _always(1),
    "torch.cuda.current_device": _always(0),
    "torch.cuda.get_device_properties": lambda gpu: gpu,
    "torch.cuda.get_device_capability": lambda gpu: gpu.capability,
    "torch.cuda.get_device_name": lambda gpu: gpu.name,
    "torch.cuda.get_rng_state": _rng_state,
    "torch.cuda.set_rng_state": _always(None),
    "torch.cuda.synchronize": _always(None),
    "torch.cuda._lazy_init": _always(None),
    "torch.cuda._exchange_device": _always(0),
    "torch.cuda._maybe_exchange_device": _always(0),
    "torch.accelerator.current_accelerator": _torch_device,
    "torch.accelerator.current_device_index": _always(0),
    f"{_INTERFACE}.is_available": _always(True),
    f"{_INTERFACE}.current_device": _always(0),
    f"{_INTERFACE}.get_device_properties": lambda gpu: gpu,
    f"{_INTERFACE}.get_compute_capability": lambda gpu: gpu.architecture,
    f"{_INTERFACE}.is_triton_capable": _always(True),
    f"{_INTERFACE}.raise_if_triton_unavailable": _always(None),
    f"{_INTERFACE}.Worker.current_device": _always(0),
    f"{_INTERFACE}.Worker.get_device_properties": lambda gpu: gpu,
    # The function, and what other modules have imported it as.
    "torch.utils._triton.has_triton": _always(True),
    "torch._inductor.compile_fx.has_triton": _always(True),
    "torch._inductor.scheduler.has_triton": _always(True),
    "torch._inductor.kernel.mm_grouped.has_triton": _always(True),
    "torch.utils._triton.has_triton_tma": _has_tma,
    "torch.utils._triton.has_triton_tma_device": _has_tma,
    "torch.utils._triton.has_triton_stable_tma_api": _has_tma,
    "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": _always(None),
    "torch._subclasses.fake_tensor.init_gpu_context": _always(None),
}
"""What replaced functions of torch return inside `report`, whatever their arguments are."""

_CACHED = (
    ("torch._inductor.utils", "is_big_gpu"),
    ("torch._inductor.utils", "get_gpu_type"),
    ("torch._inductor.utils", "get_max_num_sms"),
    ("torch._inductor.utils", "get_gpu_shared_memory"),
    ("torch._inductor.utils", "using_b200"),
    ("torch._inductor.utils", "get_device_tflops"),
    ("torch._inductor.utils", "get_gpu_dram_gbps"),
    ("torch._inductor.codegen.cuda.cuda_env", "get_cuda_arch"),
    ("torch.utils._triton", "has_datacenter_blackwell_tma_device"),
    ("torch.utils._triton", "has_triton_tensor_descriptor_host_tma"),
    ("torch.utils._triton", "has_triton_experimental_host_tma"),
)
"""Functions of torch whose results for one GPU are kept for the process."""

_CREATE = "torch._inductor.runtime.hints.DeviceProperties.create"

HOOKS = (
    *(
        Hook(
            f"offline:{path.removeprefix('torch.')}",
            "replaced",
            (path,),
            "hooks.offline_gpu",
            "Reports the GPU of a named target to the compile for it, in its thread. Upstream "
            "compiles for the GPUs of this machine only.",
        )
        for path in _ANSWERS
    ),
    Hook(
        "offline_headers",
        "replaced",
        ("torch.utils.cpp_extension._join_cuda_home",),
        "hooks.offline_gpu",
        "Finds CUDA's headers in NVIDIA's or Triton's Python package. torch looks for them in a "
        "CUDA toolkit only.",
    ),
    Hook(
        "offline_fakes",
        "replaced",
        ("torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init",),
        "hooks.offline_gpu",
        "Fake tensors do not initialize CUDA. Upstream initializes it if there is a GPU.",
    ),
    Hook(
        "offline_device",
        "replaced",
        (_CREATE,),
        "hooks.offline_gpu",
        "Describes the GPU of a named target; upstream caches the description for the process.",
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    for hook in HOOKS:
        if registry.has_target(hook):
            make = _SPECIAL.get(hook.name, _dispatch)
            registry.replace(hook, functools.partial(make, hook.targets[0]))
    _install_driver()


def _dispatch(path: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    answer = _ANSWERS[path]

    @functools.wraps(stock)
    def dispatcher(*args: Any, **kwargs: Any) -> Any:
        gpu = context.current().target_gpu
        return stock(*args, **kwargs) if gpu is None else answer(gpu)

    _keep_cache_functions(stock, dispatcher)
    return dispatcher


def _dispatch_create(_path: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    uncached = stock.__func__.__wrapped__  # type: ignore[attr-defined]
    cls = stock.__self__  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def create(device: Any) -> Any:
        if context.current().target_gpu is None:
            return stock(device)
        return uncached(cls, device)

    _keep_cache_functions(stock, create)
    return create


def _dispatch_home(_path: str, stock: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(stock)
    def join_cuda_home(*paths: str) -> str:
        home = cuda.find_home() if context.current().target_gpu is not None else None
        return stock(*paths) if home is None else os.path.join(home, *paths)

    return join_cuda_home


class _Property(property):
    """A property that can be marked as a dispatcher."""


def _dispatch_fakes(_path: str, stock: property) -> property:
    def avoid_device_init(mode: Any) -> bool:
        return context.current().target_gpu is not None or stock.__get__(mode)

    return _Property(avoid_device_init)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "offline_device": _dispatch_create,
    "offline_fakes": _dispatch_fakes,
    "offline_headers": _dispatch_home,
}
"""Dispatchers of hooks that are not in `_ANSWERS`."""


def _keep_cache_functions(stock: Any, dispatcher: Any) -> None:
    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(stock, name):
            setattr(dispatcher, name, getattr(stock, name))


def _clear_caches() -> None:
    import importlib

    for module, name in _CACHED:
        function: Any = getattr(importlib.import_module(module), name, None)
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def report(gpu: GpuProperties) -> Iterator[None]:
    """Let torch report one GPU with these properties, in this thread."""
    install_hooks()
    _clear_caches()
    try:
        with context.enter(target_gpu=gpu):
            yield
    finally:
        _clear_caches()


def _install_driver() -> None:
    """Let Triton find a driver for the reported GPU; there is none on a machine without one."""
    import triton

    config: Any = type(triton.runtime.driver)
    stock: property = config.active
    if isinstance(stock, _Property):
        return

    def active(self: Any) -> Any:
        gpu = context.current().target_gpu
        return stock.__get__(self) if gpu is None else _make_driver(gpu)

    config.active = _Property(active)


@functools.cache
def _make_driver(gpu: GpuProperties) -> Any:
    """Return what Triton and Inductor need of a driver to compile."""
    import torch
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", gpu.architecture, 32),
        get_current_device=lambda: 0,
        get_device_capability=lambda *_: gpu.capability,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
