"""Declarations of every place where the extension patches torch or relies on its private API.

A `Hook` says what is replaced, overridden, changed or read, which parameters and other torch names
it relies on, why there is no public API for it, and which torch releases it applies to. This module
is data: `registry` checks it against a torch, installs the replacements, and writes the table in
docs/switch.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["replaced", "overridden", "changed", "read"]


@dataclass(frozen=True)
class Hook:
    """One use or patch of torch's private API."""

    name: str
    kind: Kind
    """replaced: for the process, by a dispatcher. overridden: by a subclass in the extension.
    changed: an object that belongs to the current compile. read: private state or generated
    text."""
    targets: tuple[str, ...]
    """Dotted paths: names of the same target in different torch releases. One of them must
    exist."""
    owner: str
    """The module of the extension that uses the hook."""
    why: str
    """Why the hook is needed, and why at this place."""
    parameters: tuple[str, ...] = ()
    """Parameters of the target that are passed or read by name or position."""
    relies_on: tuple[str, ...] = ()
    """Other torch names that must exist. `a|b` is satisfied by either."""
    upstream: str = ""
    """Issue of pytorch/pytorch, for workarounds."""
    since: str = ""
    """First torch release that needs it; empty for the lowest supported one."""
    until: str = ""
    """First torch release that no longer needs it; empty if none is known."""


_FX = "torch._inductor.compile_fx"
_WRAPPER = "torch._inductor.codegen.wrapper"
_CPP = "torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu"

HOOKS: tuple[Hook, ...] = (
    # --- the entry and the cache ------------------------------------------------------------------
    Hook(
        "compile_fx",
        "replaced",
        (f"{_FX}.compile_fx",),
        "hooks.compile_fx",
        "Every Inductor entry point calls this function: torch.compile, AOT compilation, "
        "standalone_compile, torch._inductor.compile. Inductor has no hook around a whole "
        "compile.",
        parameters=("model_", "example_inputs_", "inner_compile"),
        relies_on=(
            f"{_FX}.compile_fx_inner",
            f"{_FX}.fx_compile_mode",
            f"{_FX}.fx_compile_async",
            f"{_FX}.fx_compile_progressive",
            "torch._inductor.virtualized._V.aot_compilation",
            "torch._dynamo.utils.counters",
            "torch._dynamo.utils.count_calls",
        ),
    ),
    Hook(
        "precompile",
        "replaced",
        ("torch._functorch.aot_autograd.compile_to_python",),
        "hooks.direct_compiles",
        "torch.compiler.precompile returns source that must run without this package, so it falls "
        "back to Inductor (default). It captures its graph with compile_fx and its own "
        "inner_compile.",
        relies_on=("torch._precompile.PrecompiledModule",),
        since="2.14",
    ),
    Hook(
        "precompile_graph",
        "replaced",
        ("torch._inductor.compile_to_python",),
        "hooks.direct_compiles",
        "As `precompile`, for callers of Inductor's part of it.",
        since="2.14",
    ),
    Hook(
        "region_compiler",
        "replaced",
        ("torch._higher_order_ops.invoke_subgraph.invoke_subgraph_inductor_compile",),
        "hooks.direct_compiles",
        "A nested_compile_region whose options name a compiler calls compile_fx_inner instead of "
        "compile_fx, so it falls back to Inductor (default), with one warning.",
        relies_on=(f"{_FX}.compile_fx_inner",),
    ),
    Hook(
        "fx_graph_key",
        "replaced",
        ("torch._inductor.codecache.FxGraphHashDetails.__init__",),
        "hooks.cache_keys",
        "The keys of the FX graph cache and of the AOTAutograd cache are computed from the "
        "attributes of this object; the extension adds one. The public way would be "
        "torch.compiler.config.cache_key_tag, but torch 2.11 keeps it for the whole process.",
        relies_on=("torch._functorch._aot_autograd.autograd_cache.AOTAutogradCacheDetails",),
    ),
    Hook(
        "compiled_graph",
        "replaced",
        ("torch._inductor.output_code.CompiledFxGraph.post_compile",),
        "hooks.cache_keys",
        "A graph that the AOTAutograd cache returns together with its backward reports its key "
        "only here; its memory plan is stored under that key.",
        relies_on=("torch._inductor.output_code.CompiledFxGraph._fx_graph_cache_key",),
    ),
    Hook(
        "choices",
        "overridden",
        ("torch._inductor.choices.InductorChoices",),
        "hooks.scope",
        "During a compile, V.choices is an instance of a subclass of the user's class and carries "
        "the settings. Inductor pickles it for compile subprocesses, which get no other state.",
        relies_on=(
            "torch._inductor.choices.InductorChoices.get_template_configs",
            "torch._inductor.choices.InductorChoices.should_use_persistent_reduction",
            "torch._inductor.virtualized._choices",
            "torch._inductor.virtualized.threadlocal",
            "torch._inductor.virtualized._choices_default",
            "torch._inductor.virtualized.Virtualized._set_handler",
            "torch._inductor.virtualized.Virtualized._key",
            "torch._inductor.config.inductor_choices_class",
        ),
    ),
    # --- passes -----------------------------------------------------------------------------------
    Hook(
        "joint_passes",
        "replaced",
        (f"{_FX}._recursive_joint_graph_passes",),
        "hooks.graph_passes",
        "Padding of matmuls, a joint pass, may change the strides of an exported program's results "
        "and of the results of control-flow branches.",
        parameters=("gm",),
    ),
    Hook(
        "output_strides",
        "replaced",
        (f"{_FX}.record_original_output_strides",),
        "hooks.graph_passes",
        "Inductor records here, after the joint passes, which strides results must keep; padded "
        "results get a copy.",
        parameters=("gm",),
    ),
    Hook(
        "pad_mm",
        "replaced",
        ("torch._inductor.fx_passes.pad_mm.can_pad",),
        "hooks.graph_passes",
        "Decides whether a matmul is padded. It must not be in branches of control flow, and need "
        "not be if only M is unaligned, which the extension's kernels support.",
        parameters=("mat1", "mat2"),
        relies_on=(
            "torch._inductor.fx_passes.pad_mm.get_alignment_size",
            "torch._inductor.fx_passes.pad_mm.get_padded_length",
        ),
    ),
    Hook(
        "post_grad_passes",
        "replaced",
        (f"{_FX}._recursive_post_grad_passes",),
        "hooks.graph_passes",
        "Fused matmuls are planned after Inductor's passes over a graph and its subgraphs. The "
        "hook at the end of these passes, config.post_grad_custom_post_pass, belongs to the user.",
        parameters=("gm",),
    ),
    Hook(
        "kernel_order",
        "replaced",
        ("torch._inductor.memory.reorder_for_peak_memory",),
        "hooks.graph_passes",
        "The extension reorders kernels after Inductor has chosen their order. "
        "config._post_fusion_custom_pass runs earlier and belongs to the user.",
        parameters=("nodes", "name_to_buf", "graph_outputs"),
        relies_on=(
            "torch._inductor.memory.estimate_peak_memory",
            "torch._inductor.scheduler.BaseSchedulerNode.mpi_node",
            "torch._inductor.scheduler.Scheduler.name_to_buf",
        ),
    ),
    Hook(
        "memory_planning",
        "replaced",
        (f"{_WRAPPER}.PythonWrapperCodegen.run_wrapper_ir_passes",),
        "hooks.graph_passes",
        "At this point the lines of a wrapper are final, and Inductor decides how buffers share "
        "memory. The wrapper classes of all devices inherit it; registering other wrapper classes "
        "would replace those of the device for the process.",
        parameters=("is_inference",),
        relies_on=(
            f"{_WRAPPER}.PythonWrapperCodegen.memory_plan_reuse",
            f"{_WRAPPER}.PythonWrapperCodegen.lines",
            f"{_WRAPPER}.PythonWrapperCodegen.estimate_peak",
            f"{_WRAPPER}.EfficientPeakEstimate",
            f"{_WRAPPER}.MemoryPlanningState",
            f"{_WRAPPER}.buffer_reuse_key",
        ),
    ),
    Hook(
        "lowerings",
        "replaced",
        ("torch._inductor.lowering.lowerings",),
        "hooks.lowerings",
        "The table, which is process-wide, gets a dispatcher for every operator that the "
        "extension has a lowering for.",
        relies_on=("torch._inductor.lowering.make_pointwise",),
    ),
    # --- AOT packages -----------------------------------------------------------------------------
    Hook(
        "wrapper_class",
        "replaced",
        ("torch._inductor.graph.get_wrapper_codegen_for_device",),
        "hooks.aot",
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
        "hooks.aot",
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
        "exported_inputs",
        "replaced",
        (f"{_FX}._extract_inputs_from_exported_gm",),
        "hooks.upstream_fixes",
        "Inductor replaces the inputs of an exported program that are not tensors by None, and "
        "fails if the graph uses them.",
        parameters=("gm", "example_inputs_"),
    ),
    Hook(
        "constant_items",
        "replaced",
        ("torch._subclasses.fake_tensor.FakeTensorMode.may_turn_const",),
        "hooks.upstream_fixes",
        "The constants of an AOT package are real tensors during the compile, so a value that "
        "`item` reads from a buffer would be compiled in, although calls may change the buffer.",
    ),
    Hook(
        "branch_symbols",
        "replaced",
        (
            "torch._inductor.ir.Switch.get_free_symbol_uses",
            "torch._inductor.ir.Conditional.get_free_symbol_uses",
        ),
        "hooks.upstream_fixes",
        "A predicate such as u0 > 2 is a relation, in which Inductor finds no symbols: the code "
        "that computes u0 is removed as dead, and the generated code does not compile.",
        parameters=("unbacked_only",),
        relies_on=("torch._inductor.ir.Switch.selector|torch._inductor.ir.Conditional.predicate",),
    ),
    Hook(
        "aot_wrapper",
        "overridden",
        (_CPP,),
        "cpp_wrapper.codegen.cpp_wrapper",
        "Generates the code around a model: its description instead of torch's model class, input "
        "checks, and copies back to inputs that were copied for alignment.",
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
            f"{_CPP}.header",
            f"{_CPP}.prefix",
        ),
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
        "cuda_objects",
        "changed",
        ("torch._inductor.codecache.CUDACodeCache.aot_kernels_o",),
        "lowerings.cutlass_call",
        "The object files of CUTLASS kernels that a package links; the list is cleared after the "
        "build.",
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
    # --- kernels ----------------------------------------------------------------------------------
    Hook(
        "triton_template",
        "overridden",
        ("torch._inductor.select_algorithm.TritonTemplateKernel.render_hooks",),
        "templates.triton.template_kernel",
        "Stores through TMA descriptors: the code of the store hook is rewritten, because the "
        "public hook has no such option in torch 2.11.",
        relies_on=(
            "torch._inductor.select_algorithm.TritonTemplate.generate",
            "torch._inductor.select_algorithm.TritonTemplateKernel.store_output",
            "torch._inductor.select_algorithm.TritonTemplateKernel.render",
            "torch._inductor.select_algorithm.TritonTemplateKernel.use_jit",
            "torch._inductor.select_algorithm.TritonTemplateKernel.triton_meta",
            "torch._inductor.select_algorithm.TritonTemplateCaller.bmreq",
            "torch._inductor.autotune_process.TritonBenchmarkRequest.module_path",
        ),
    ),
    Hook(
        "triton_template_device",
        "overridden",
        ("torch._inductor.select_algorithm.TritonTemplateKernel.jit_lines",),
        "templates.triton.template_kernel",
        "With torch.compiler.config.compile_on_one_rank, the device index is removed from the "
        "decorator of a template. Inductor removes it from kernels that are not templates.",
        relies_on=(
            "torch.fx.experimental.proxy_tensor._coor_enabled",
            "torch._inductor.codegen.common.DeviceOpOverrides.current_device_idx_expr",
        ),
        since="2.14",
    ),
    Hook(
        "out_variants",
        "changed",
        ("torch._inductor.ir.FallbackKernel",),
        "memory.out_variants",
        "A fallback with an out variant becomes a kernel that writes into planned memory. The "
        "class of the node is changed after Inductor has created it, because there is no hook "
        "after the lowerings of these operators.",
        relies_on=(
            "torch._inductor.ir.MultiOutput",
            "torch._inductor.ir.MultiOutput.should_allocate",
            "torch._inductor.ir.FallbackKernel.op_overload",
            "torch._inductor.ir.FallbackKernel.outputs",
            "torch._inductor.ir.FallbackKernel.unbacked_bindings",
            "torch._inductor.ir.FallbackKernel.mutation_outputs",
            "torch._inductor.ir.FallbackKernel.codegen_args",
            "torch._inductor.ir.FallbackKernel.codegen_kwargs",
            "torch._inductor.graph.GraphLowering.removed_buffers",
            f"{_WRAPPER}.PythonWrapperCodegen.freed",
        ),
    ),
    Hook(
        "kept_buffers",
        "changed",
        ("torch._inductor.graph.GraphLowering.never_reuse_buffers",),
        "memory_planning",
        "Buffers whose memory contains a C++ object must not be reused for other buffers.",
    ),
    Hook(
        "removed_buffers",
        "changed",
        ("torch._inductor.graph.GraphLowering.removed_buffers",),
        "lowerings.cutlass_call",
        "The output of a CUTLASS kernel is required even if fusion has removed it.",
    ),
    Hook(
        "compiled_triton_kernels",
        "changed",
        ("torch._inductor.async_compile.CompiledTritonKernels.cache_clear",),
        "autotune.inductor_benchmark",
        "Removes kernels that were compiled for candidates from the process.",
    ),
    Hook(
        "compile_counters",
        "changed",
        ("torch._dynamo.utils.counters",),
        "autotune.inductor_benchmark",
        "Compiles of candidates and reference programs are not counted as the user's.",
        relies_on=("torch._inductor.metrics.get_metric_fields|torch._inductor.metrics.reset",),
    ),
    Hook(
        "config_defaults",
        "read",
        ("torch.utils._config_module.ConfigModule._config",),
        "autotune.cutlass_options",
        "Tells whether a CUTLASS option was set under its old or its new name: the default of an "
        "option has no public reader.",
    ),
    Hook(
        "region_options",
        "read",
        ("torch._higher_order_ops.invoke_subgraph.NestedCompileRegionOptions",),
        "_compat",
        "The Inductor options of a nested_compile_region. They are in the metadata of its graph "
        "module and of the node that calls it, which has no public reader.",
        since="2.14",
    ),
    Hook(
        "ephemeral_precision",
        "changed",
        ("torch.backends.cuda.matmul",),
        "autotune.reference.operators",
        "The float32 precision is set for the reference program while a candidate is measured, "
        "and restored afterwards.",
    ),
    # --- other private names ----------------------------------------------------------------------
    Hook(
        "dynamo_backend",
        "read",
        ("torch._TorchCompileInductorWrapper",),
        "backend",
        "Applies mode and options like `backend='inductor'`, and calls compile_fx.",
    ),
    Hook(
        "aot_compile_result",
        "read",
        ("torch._dynamo.aot_compile_types.BundledAOTAutogradSerializableCallable",),
        "_compat",
        "torch 2.11 serializes only the result of its own backend in `aot_compile`.",
        until="2.12",
    ),
    Hook(
        "autotuning_folder",
        "read",
        ("torch._inductor.runtime.cache_dir_utils.default_cache_dir",),
        "report.doctor",
        "Returns the path of the cache folder without creating it.",
    ),
    Hook(
        "cudagraph_reset",
        "read",
        ("torch._inductor.cudagraph_trees.reset_cudagraph_trees",),
        "backend",
        "torch.compiler.reset drops recorded CUDA graphs of `backend='inductor'`; this function "
        "drops those of the extension.",
    ),
)
