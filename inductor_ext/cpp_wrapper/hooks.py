"""Hooks of AOT packages: the wrapper class, the compile of its code, and what export recorded.

Reading the declarations imports no compiler.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook

_WRAPPER = "torch._inductor.codegen.wrapper"
_CPP = "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu"

HOOKS = (
    Hook(
        "wrapper_class",
        "replaced",
        ("torch._inductor.graph.get_wrapper_codegen_for_device",),
        "cpp_wrapper.hooks",
        "Selects the class that generates the C++ of an AOT package. Registering a class would "
        "replace that of the device for the process.",
        relies_on=(
            "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu",
            "torch._inductor.codegen.cpp_wrapper_gpu.CppWrapperGpu",
            f"{_WRAPPER}.PythonWrapperCodegen.create",
            f"{_WRAPPER}.PythonWrapperCodegen.supports_caching",
        ),
    ),
    Hook(
        "aot_compile",
        "replaced",
        ("torch._inductor.codecache.AotCodeCompiler.compile",),
        "cpp_wrapper.hooks",
        "Compiles the C++ of an AOT package; Inductor has no hook for it.",
        parameters=(
            "graph",
            "wrapper_code",
            "kernel_code",
            "serialized_extern_kernel_nodes",
            "device_type",
            "additional_files",
        ),
        relies_on=("torch._inductor.codecache.split_aot_inductor_output_path",),
    ),
    Hook(
        "same_constant",
        "replaced",
        ("torch._inductor.graph.is_same_tensor",),
        "cpp_wrapper.hooks",
        "Constants of a named GPU target are fake tensors, which all have the same address. "
        "Inductor would take those of equal shapes for one.",
        parameters=("data", "value"),
    ),
    Hook(
        "offline_kernels",
        "overridden",
        ("torch._inductor.codegen.wrapper.PythonWrapperCodegen.generate_and_run_autotune_block",),
        "cpp_wrapper.codegen.offline_kernels",
        "Compiles the Triton kernels of a named GPU target. Upstream runs them to choose one.",
        relies_on=(
            "torch._inductor.runtime.triton_heuristics.CachingAutotuner._precompile_config",
            "torch._inductor.runtime.triton_heuristics.CachingAutotuner.save_gpu_kernel",
            "torch._inductor.codecache.CudaKernelParamCache",
        ),
    ),
    Hook(
        "vector_isas",
        "replaced",
        ("torch._inductor.cpu_vec_isa.valid_vec_isa_list",),
        "cpp_wrapper.hooks",
        "Offers Inductor the vector ISA of a named CPU target. Upstream lists those of this "
        "machine's CPU, after running code of each.",
        relies_on=(
            "torch._inductor.cpu_vec_isa.VecAVX2",
            "torch._inductor.cpu_vec_isa.VecAVX512.is_avx512_bf16_supported",
        ),
    ),
    Hook(
        "constant_origins",
        "replaced",
        ("torch._inductor.constant_folding.replace_node_with_constant",),
        "cpp_wrapper.hooks",
        "With freezing, constants are computed from weights at compile time, and Inductor forgets "
        "from which. An update of these weights must be refused.",
        parameters=("gm", "node", "constant", "name"),
    ),
    Hook(
        "aot_wrapper",
        "overridden",
        (_CPP,),
        "cpp_wrapper.codegen.cpp_wrapper",
        "Generates the code around a model: its description instead of torch's model class, input "
        "checks, names of sizes in the messages of asserts, and copies back to inputs that were "
        "copied for alignment.",
        relies_on=(
            f"{_CPP}.write_header",
            f"{_CPP}.write_wrapper_decl",
            f"{_CPP}.codegen_model_kernels",
            f"{_CPP}.generate_before_suffix",
            f"{_CPP}.codegen_model_constructor",
            f"{_CPP}.codegen_const_run_driver",
            f"{_CPP}.generate_return",
            f"{_CPP}.codegen_inputs",
            f"{_CPP}.generate_input_output_runtime_checks",
            f"{_CPP}.finalize_prefix",
            f"{_CPP}.writeline",
            "torch._inductor.ir.AssertScalar.codegen",
            f"{_CPP}.header",
            f"{_CPP}.prefix",
        ),
    ),
    Hook(
        "decorated_call",
        "overridden",
        (f"{_CPP}.generate_end",),
        "cpp_wrapper.codegen.cpp_wrapper",
        "Decorates the function `call` of a module with generated C++, to raise errors of C++ code "
        "as the extension's classes.",
        parameters=("result",),
    ),
    Hook(
        "loop_outputs",
        "overridden",
        (f"{_CPP}.codegen_while_loop",),
        "cpp_wrapper.codegen.upstream_fixes",
        "The generated C++ initializes the outputs of a while_loop as aliases of its carried "
        "inputs. With zero iterations they stay aliases, and later writes to the input change the "
        "output.",
        parameters=("while_loop", "stack_output"),
        relies_on=(
            "torch._inductor.ir.WhileLoop.carried_inputs",
            "torch._inductor.ir.WhileLoop.outputs",
            "torch._inductor.ir.WhileLoop.mutation_outputs",
        ),
    ),
    Hook(
        "aot_text",
        "changed",
        ("torch._inductor.utils.IndentedBuffer._lines",),
        "cpp_wrapper.codegen.upstream_fixes",
        "torch's model class and interface are removed from the generated C++: upstream writes "
        "them in one piece. Marks between lines begin the sections of the code, by which a long "
        "program is split into translation units.",
        relies_on=("torch._inductor.utils.LineContext",),
    ),
    Hook(
        "triton_launchers",
        "changed",
        ("torch._inductor.codegen.cpp_wrapper_gpu.CppWrapperGpu._triton_call_wrappers",),
        "cpp_wrapper.codegen.cpp_wrapper",
        "C++ launchers of Triton kernels take floating-point arguments as double.",
    ),
    Hook(
        "extern_kernel_nodes",
        "changed",
        ("torch._inductor.virtualized._V.extern_kernel_nodes",),
        "cpp_wrapper.codegen.cpp_wrapper",
        "Operators called by the constant-folding graph are numbered before those of the main "
        "graph.",
        relies_on=("torch._inductor.virtualized._V.set_extern_kernel_nodes",),
    ),
    Hook(
        "symbol_guards",
        "changed",
        ("torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_expr",),
        "cpp_wrapper.signature.guard_filter",
        "In the shape environment of one exported program: queries about sizes that only select "
        "the faster code must not add guards. The calling file identifies them.",
        relies_on=("torch.fx.experimental.symbolic_shapes.ShapeEnv.suppress_guards",),
    ),
)


def install_hooks() -> None:
    """Install the dispatchers, once per process."""
    dispatchers = {
        "wrapper_class": _dispatch_wrapper_class,
        "aot_compile": _dispatch_compile,
        "same_constant": _dispatch_same,
        "vector_isas": _dispatch_isas,
        "constant_origins": _dispatch_replace,
    }
    registry.install(HOOKS, dispatchers)


@contextlib.contextmanager
def use_exported_ranges(model: Any) -> Iterator[None]:
    """Wrap a `compile_fx` call, which may be an AOT compile: read what export left on the module.

    Used for every entry point, since all of them call `compile_fx`. Does nothing for a JIT compile.

    Args:
        model: the `model_` argument of compile_fx.
    """
    from torch._inductor.virtualized import V

    if V.aot_compilation is not True or not hasattr(model, "graph"):
        yield
        return
    from inductor_ext.cpp_wrapper.codegen import frozen_constants
    from inductor_ext.cpp_wrapper.signature import from_graph

    recorder = frozen_constants.Recorder(model)
    with from_graph.use_exported_ranges(model), context.enter(folding=recorder):
        yield


def _dispatch_same(stock: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(stock)
    def is_same_tensor(data: Any, value: Any) -> bool:
        if context.current().constant_values is None:
            return stock(data, value)
        from inductor_ext.cpp_wrapper import program_on_gpu

        return program_on_gpu.is_same_constant(data, value)

    return is_same_tensor


def _dispatch_isas(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def valid_vec_isa_list() -> Any:
        level = context.current().cpu_level
        if level is None:
            return stock()
        from inductor_ext.cpp_wrapper.build import cpu_target

        return cpu_target.vector_isas(level)

    for name in ("cache_clear", "cache_info", "cache_parameters"):
        if hasattr(stock, name):
            setattr(valid_vec_isa_list, name, getattr(stock, name))
    return valid_vec_isa_list


def _dispatch_replace(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def replace_node_with_constant(
        gm: Any, node: Any, constant: Any = None, name: str | None = None
    ) -> None:
        recorder = context.current().folding
        if recorder is None or name is not None:
            # A name is given for constants that are computed at run time.
            return stock(gm, node, constant, name)
        from inductor_ext.cpp_wrapper.codegen import frozen_constants

        sources = frozen_constants.find_sources(node)
        stock(gm, node, constant, name)
        recorder.add(f"_frozen_param{gm._frozen_param_count - 1}", sources)
        return None

    return replace_node_with_constant


def _dispatch_wrapper_class(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_wrapper_codegen_for_device(*args: Any, **kwargs: Any) -> Any:
        generator = stock(*args, **kwargs)
        settings = context.settings()
        from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

        # Compiles with a Python wrapper do not wait for the import.
        if settings is None or not issubclass(generator, CppWrapperCpu):
            return generator
        from inductor_ext.cpp_wrapper.codegen import cpp_wrapper

        return cpp_wrapper.generator(generator, settings)

    return get_wrapper_codegen_for_device


def _dispatch_compile(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def compile_code(graph: Any, *args: Any, **kwargs: Any) -> Any:
        from inductor_ext.cpp_wrapper.build import artifact
        from inductor_ext.cpp_wrapper.codegen import cpp_wrapper

        settings = context.settings()
        if settings is None or not isinstance(graph.wrapper_code, cpp_wrapper.AotWrapper):
            return stock(graph, *args, **kwargs)
        return artifact.compile_artifact(graph, *args, **kwargs, values=settings)

    return compile_code
