"""Inductor's lowering of CUDA graphs on machines without a GPU.

Inside `device(...)` torch reports to Inductor one GPU of the given compute capability; tensors are
fake, nothing runs, and nothing is timed: a function returns the time of a choice. `lower` returns
what Inductor generates: the choices for each matmul, and the module's Python. `kernels` are the
Triton kernels of the generated module without decorators, to compile for a GPU or to run in
Triton's interpreter.

Needs triton, which needs no GPU for it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch._dynamo.source import ConstantSource
from torch._inductor import config as inductor_config

from inductor_ext.targets import gpu_properties

__all__ = ["Lowered", "device", "lower", "lower_cpp"]

_GPUS = {(8, 0): "A100", (8, 9): "L4", (9, 0): "H200", (10, 0): "B200"}
"""The GPU of each compute capability."""


@dataclasses.dataclass(frozen=True)
class Lowered:
    """Inductor's generated code for a function."""

    code: str
    """The module that it would run."""
    choices: tuple[tuple[str, ...], ...]
    """For each autotuned operator, the names of the candidates."""

    def kernels(self) -> dict[str, str]:
        """Source of the module's Triton kernels by their names there, without decorators."""
        return {name: source for text in _texts(self.code) for name, source in _kernels(text)}


def _texts(code: str) -> Iterator[str]:
    """The module's strings: a kernel's source is one."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _kernels(text: str) -> Iterator[tuple[str, str]]:
    if "@triton.jit" not in text:
        return
    body = ast.parse(text).body
    # A function with its own name is renamed.
    names = {
        node.value.id: node
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
    }
    for node in body:
        if isinstance(node, ast.FunctionDef):
            last = names.get(node.name, node)
            name = ast.unparse(last.targets[0]) if isinstance(last, ast.Assign) else node.name
            lines = text.splitlines()[node.lineno - 1 : last.end_lineno]
            yield name, "\n".join(lines) + "\n"


class Stop(Exception):
    """Raised when the code is generated, before it is loaded."""


def lower(
    function: Callable[..., Any],
    *inputs: tuple[Sequence[int | str], torch.dtype] | torch.Tensor,
    seconds: Callable[[Any], float] = lambda choice: 1.0,
    capability: tuple[int, int] = (9, 0),
    edit: Callable[[torch.fx.Graph], object] = lambda graph: None,
    **configs: Any,
) -> Lowered:
    """Lower a function as for a GPU.

    Args:
        function: a function of tensors, with one or several results.
        inputs: sizes and dtype of each argument, or a tensor (on the "meta" device, for strides).
            A size that is a string is a symbol of that name, which was 64 in the example.
        seconds: the assumed time of a candidate; the fastest is chosen.
        capability: of the GPU, one of `_GPUS`.
        edit: changes the graph of ATen operators before it is lowered.
        configs: Inductor's options, with `__` for the dot in a name.
    """
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.exc import InductorError
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    options = {
        "fx_graph_cache": False,
        "compile_threads": 1,
        # It would run kernels.
        "benchmark_epilogue_fusion": False,
        **{name.replace("__", "."): value for name, value in configs.items()},
    }
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbols: dict[str, Any] = {}
    with device(capability, seconds) as seen, inductor_config.patch(options):
        with mode:
            arguments = [_argument(inp, mode.shape_env, symbols) for inp in inputs]
            module = make_fx(
                lambda *args: _as_tuple(function(*args)), decomposition_table=select_decomp_table()
            )(*arguments)
            edit(module.graph)
            module.recompile()
        context = torch._guards.TracingContext(mode)
        with torch._guards.tracing(context), contextlib.suppress(Stop):
            try:
                compile_fx.compile_fx_inner(module, arguments)
            except InductorError as error:
                if not isinstance(error.inner_exception, Stop):
                    raise
    return Lowered(seen.code, tuple(seen.choices))


def lower_cpp(
    function: Callable[..., Any],
    *inputs: tuple[Sequence[int | str], torch.dtype] | torch.Tensor,
    ahead: bool,
    scratch: int = 0,
    **configs: Any,
) -> str:
    """The module with C++, or only the C++, that the extension generates for a GPU.

    Args:
        function, inputs, configs: as of `lower`.
        ahead: whether it is compiled ahead of time.
        scratch: assumed bytes of global memory per CTA of a Triton kernel.
    """
    from torch._inductor import compile_fx
    from torch._inductor.codecache import CudaKernelParamCache
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V

    from inductor_ext import config
    from inductor_ext.cpp_wrapper.build import artifact
    from inductor_ext.cpp_wrapper.codegen import cpp_wrapper
    from inductor_ext.hooks import scope

    compile_inner, graphs = compile_fx.compile_fx_inner, []

    def compile_cpp(*args: Any) -> Any:
        return compile_inner(*args, cpp_wrapper=True)

    def compile_artifact(graph: Any, wrapper_code: str, *_: Any, **__: Any) -> Any:
        assert isinstance(graph.wrapper_code, cpp_wrapper.AotWrapper)
        graphs.append(wrapper_code)
        raise Stop

    with (
        scope.compile_scope(config.snapshot({})),
        V.set_aot_compilation(ahead),
        mock.patch.object(compile_fx, "compile_fx_inner", compile_cpp),
        mock.patch.object(
            PythonWrapperCodegen,
            "generate_and_run_autotune_block",
            lambda wrapper: _remember(wrapper, scratch),
        ),
        mock.patch.object(artifact, "compile_artifact", compile_artifact),
        mock.patch.dict(CudaKernelParamCache.cache),
    ):
        lowered = lower(
            function,
            *inputs,
            **{
                "cpp_wrapper": True,
                "triton__store_cubin": True,
                "triton__autotune_at_compile_time": True,
                **configs,
            },
        )
    return graphs[0] if ahead else lowered.code


def _remember(wrapper: Any, scratch: int) -> None:
    """Set the compile results of a wrapper's kernels without compiling them."""
    from torch._inductor.codecache import CudaKernelParamCache
    from torch._inductor.runtime.hints import DeviceProperties

    namespace = {"DeviceProperties": DeviceProperties, "torch": torch}
    for text in _texts(wrapper.kernel_autotune_defs.getvalue()):
        if "@triton.jit" not in text:
            continue
        (kernel,) = (item for item in ast.parse(text).body if isinstance(item, ast.FunctionDef))
        arguments = {
            keyword.arg: eval(ast.unparse(keyword.value), namespace)
            for keyword in kernel.decorator_list[0].keywords  # type: ignore[attr-defined]
        }
        triton_meta, inductor_meta = arguments["triton_meta"], arguments["inductor_meta"]
        signature = triton_meta["signature"]
        names = [arg.arg for arg in kernel.args.args if signature[arg.arg] != "constexpr"]
        CudaKernelParamCache.cache[inductor_meta["kernel_name"]] = {
            "mangled_name": kernel.name,
            "num_warps": arguments["num_warps"],
            "shared_mem": 0,
            "config": {},
            "inductor_meta": inductor_meta,
            "triton_meta": triton_meta,
            "def_args": [*names, *inductor_meta["extra_launcher_args"]],
            "call_args": names,
            "global_scratch": scratch,
            "profile_scratch": 0,
            "cubin_path": f"{kernel.name}.cubin",
        }


def _argument(
    description: tuple[Sequence[int | str], torch.dtype] | torch.Tensor,
    shape_env: Any,
    symbols: dict[str, Any],
) -> torch.Tensor:
    if isinstance(description, torch.Tensor):
        return torch.empty_strided(
            description.shape, description.stride(), dtype=description.dtype, device="cuda"
        )
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    shape, dtype = description
    for name in shape:
        if isinstance(name, str) and name not in symbols:
            source = ConstantSource(name)
            # As many symbols as names, although all were 64.
            symbol = shape_env.create_symbol(64, source, DimDynamic.DYNAMIC)
            symbols[name] = shape_env.create_symintnode(symbol, hint=64, source=source)
    sizes = tuple(symbols[size] if isinstance(size, str) else size for size in shape)
    return torch.empty(sizes, dtype=dtype, device="cuda")


def _as_tuple(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


@contextlib.contextmanager
def device(
    capability: tuple[int, int] = (9, 0), seconds: Callable[[Any], float] = lambda choice: 1.0
) -> Iterator[Any]:
    """Let torch report a GPU; yields an object that records the generated code."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx, scheduler, select_algorithm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.kernel import mm_grouped
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from torch.utils import _triton

    seen = types.SimpleNamespace(code="", choices=[])
    major, minor = capability
    properties = gpu_properties(_GPUS[capability])

    def compile_to_module(graph: Any) -> Any:
        code, _ = graph.codegen()
        seen.code = getattr(code, "value", code)
        raise Stop

    def lookup(
        _self: Any,
        choices: Sequence[Any],
        _operator: str,
        _inputs: str,
        benchmark: Callable[..., Any] | None,
        **_: Any,
    ) -> Mapping[Any, float]:
        # Without a benchmark Inductor checks whether there is anything to precompile, except
        # under Python 3.11.8 and earlier.
        if benchmark is not None:
            seen.choices.append(tuple(choice.name for choice in choices))
        return {choice: seconds(choice) for choice in choices}

    returned: dict[tuple[Any, str], Any] = {
        (torch.cuda, "is_available"): True,
        (torch.cuda, "device_count"): 1,
        (torch.cuda, "current_device"): 0,
        (torch.cuda, "get_device_properties"): properties,
        (torch.cuda, "get_device_capability"): capability,
        (torch.cuda, "get_rng_state"): torch.zeros(16, dtype=torch.uint8),
        (torch.cuda, "set_rng_state"): None,
        (torch.cuda, "synchronize"): None,
        (torch.cuda, "_lazy_init"): None,
        (torch.cuda, "_exchange_device"): 0,
        (torch.cuda, "_maybe_exchange_device"): 0,
        (torch.accelerator, "current_accelerator"): torch.device("cuda"),
        (torch.accelerator, "current_device_index"): 0,
        (CudaInterface, "is_available"): True,
        (CudaInterface, "current_device"): 0,
        (CudaInterface, "get_device_properties"): properties,
        (CudaInterface, "get_compute_capability"): 10 * major + minor,
        (CudaInterface, "is_triton_capable"): True,
        (CudaInterface, "raise_if_triton_unavailable"): None,
        (CudaInterface.Worker, "current_device"): 0,
        (CudaInterface.Worker, "get_device_properties"): properties,
        # The function, and what other modules have imported it as.
        **{(module, "has_triton"): True for module in (_triton, compile_fx, mm_grouped, scheduler)},
        (triton_helpers, "set_driver_to_gpu"): None,
        (fake_tensor, "init_gpu_context"): None,
    }
    if hasattr(_triton, "has_triton_tma"):
        # Whether the device has a tensor memory accelerator.
        for name in ("has_triton_tma", "has_triton_tma_device", "has_triton_stable_tma_api"):
            returned[_triton, name] = major >= 9
    with contextlib.ExitStack() as stack:
        for (owner, name), value in returned.items():
            function = mock.Mock(side_effect=lambda *_, value=value, **__: value)
            wrapped = staticmethod(function) if isinstance(owner, type) else function
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        # Replaces the lookup of timings in caches and their measurement.
        cache = select_algorithm.AlgorithmSelectorCache
        stack.enter_context(mock.patch.object(cache, "lookup", lookup))
        stack.enter_context(
            mock.patch.object(GraphLowering, "compile_to_module", compile_to_module)
        )
        driver = _driver(capability)
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        yield seen


def _driver(capability: tuple[int, int]) -> Any:
    from triton.backends.compiler import GPUTarget

    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        get_current_device=lambda: 0,
        get_device_capability=lambda *_: capability,
        get_current_stream=lambda *_: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
    )
