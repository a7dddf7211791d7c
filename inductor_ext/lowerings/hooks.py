"""Hooks of the matmul kernels: passes over FX graphs, choices, templates, benchmarks of candidates.

Reading the declarations imports no compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from inductor_ext.hooks import context, registry
from inductor_ext.hooks.registry import Hook
from inductor_ext.settings import Settings

_FX = "torch._inductor.compile_fx"
_WRAP = "torch._higher_order_ops.triton_kernel_wrap"

HOOKS = (
    Hook(
        "pre_grad_passes",
        "replaced",
        (f"{_FX}._recursive_pre_grad_passes",),
        "lowerings.hooks",
        "AOTAutograd decomposes attention by the kernel that torch selects for its operands, so "
        "these must be replaced before. config.pre_grad_custom_pass belongs to the user.",
        parameters=("gm",),
    ),
    Hook(
        "joint_passes",
        "replaced",
        (f"{_FX}._recursive_joint_graph_passes",),
        "lowerings.hooks",
        "Padding of matmuls, a joint pass, may change the strides of an exported program's results "
        "and of the results of control-flow branches.",
        parameters=("gm",),
    ),
    Hook(
        "saved_values",
        "replaced",
        ("torch._functorch.partitioners.solve_min_cut",),
        "lowerings.hooks",
        "The partitioner saves every result that the backward would have to write to memory again. "
        "It may leave out cheap elementwise results, which takes another argument of this "
        "function: its options apply to all operators.",
        parameters=("joint_graph", "node_info", "min_cut_options", "dont_ban"),
        relies_on=(
            "torch._functorch.partitioners.MinCutOptions",
            "torch._functorch.partitioners.NodeInfo.is_required_fw",
            "torch._functorch.partitioners.get_default_op_list",
        ),
    ),
    Hook(
        "output_strides",
        "replaced",
        (f"{_FX}.record_original_output_strides",),
        "lowerings.hooks",
        "Inductor records here, after the joint passes, which strides results must keep; padded "
        "results get a copy.",
        parameters=("gm",),
    ),
    Hook(
        "pad_mm",
        "replaced",
        ("torch._inductor.fx_passes.pad_mm.can_pad",),
        "lowerings.hooks",
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
        "lowerings.hooks",
        "Fused matmuls are planned after Inductor's passes over a graph and its subgraphs. The "
        "hook at the end of these passes, config.post_grad_custom_post_pass, belongs to the user.",
        parameters=("gm",),
    ),
    Hook(
        "accessed_tensors",
        "replaced",
        (
            f"{_WRAP}.identify_accessed_tensors",
            f"{_WRAP}.identify_mutated_tensors",
        ),
        "lowerings.hooks",
        "Inductor compiles a user's Triton kernel to Triton IR for every call, to find out what it "
        "writes. The results for the kernels of decode attention are cached.",
        parameters=("kernel", "kwargs"),
    ),
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
        "cuda_objects",
        "changed",
        ("torch._inductor.codecache.CUDACodeCache.aot_kernels_o",),
        "lowerings.cutlass_call",
        "The object files of CUTLASS kernels that a package links; the list is cleared after the "
        "build.",
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
        "compile_workers",
        "changed",
        ("torch._inductor.async_compile.AsyncCompile.use_process_pool",),
        "autotune.compile_workers",
        "While candidates are generated, the kernels of this thread are sent to compile workers "
        "that are still starting. The pipe to them takes more kernels than by default.",
        relies_on=(
            "torch._inductor.async_compile.maybe_warm_pool",
            "torch._inductor.async_compile.AsyncCompile._ready_future",
            "torch._inductor.async_compile.AsyncCompile.wait_pool_ready",
            "torch._inductor.async_compile.AsyncCompile.process_pool",
            "torch._inductor.compile_worker.subproc_pool.SubprocPool.write_pipe",
        ),
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
        "chunks",
        "read",
        ("torch._inductor.ir.ConcatKernel.create",),
        "lowerings.chunked_cat",
        "Chunks of a value are written into their concatenation. Inductor's lowering may compute "
        "them in one kernel instead, which reads what all chunks need at once.",
        relies_on=(
            "torch._inductor.pattern_matcher.stable_topological_sort",
            "torch.fx.Graph.graph_copy",
        ),
    ),
    Hook(
        "ephemeral_precision",
        "changed",
        ("torch.backends.cuda.matmul",),
        "autotune.reference.operators",
        "The float32 precision is set for the reference program while a candidate is measured, "
        "and restored afterwards.",
    ),
)


def install_hooks() -> None:
    """Register the lowerings, and install the dispatchers, once per process."""
    # Importing these modules registers their lowerings.
    from inductor_ext.lowerings import aten, fused  # noqa: F401
    from inductor_ext.lowerings.graph import decode_attention
    from inductor_ext.lowerings.pointwise import division, erf, tanh  # noqa: F401

    dispatchers = {
        "pre_grad_passes": _dispatch_pre_grad_passes,
        "joint_passes": _dispatch_joint_passes,
        "output_strides": _dispatch_output_strides,
        "saved_values": _dispatch_min_cut,
        "pad_mm": _dispatch_can_pad,
        "post_grad_passes": _dispatch_post_grad_passes,
        "accessed_tensors": decode_attention.remember_accesses,
    }
    registry.install(HOOKS, dispatchers)


def _dispatch_pre_grad_passes(stock: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import config as inductor_config

    @functools.wraps(stock)
    def _recursive_pre_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> Any:
        settings = context.settings()
        if settings is not None and inductor_config.use_pre_grad_passes:
            from inductor_ext.lowerings.graph import attention_operands

            attention_operands.replace_operands(gm, settings)
        return stock(gm, *args, **kwargs)

    return _recursive_pre_grad_passes


def _dispatch_joint_passes(stock: Callable[..., Any]) -> Callable[..., Any]:
    from inductor_ext.lowerings.graph import pad_mm_policy

    @functools.wraps(stock)
    def _recursive_joint_graph_passes(gm: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor.virtualized import V

        if context.settings() is None:
            return stock(gm, *args, **kwargs)
        # In a JIT compile strides need not be kept: dynamo receives the outputs and queries the
        # strides of each tensor, and the FX graph cache keys the graph as it is after the passes.
        before = pad_mm_policy.result_strides(gm) if V.aot_compilation is True else None
        with pad_mm_policy.track_control_flow(gm):
            result = stock(gm, *args, **kwargs)
        if before is not None:
            pad_mm_policy.record_strides(result, before)
        if share := context.current().recomputed_share:
            from inductor_ext.lowerings.graph import recompute_segments

            recompute_segments.mark_segments(result.graph, share)
        if chunking := context.current().chunking:
            from inductor_ext.lowerings.graph import recompute_chunked

            recompute_chunked.mark_chunked_values(result.graph, max(chunking.saved.values()))
        return result

    return _recursive_joint_graph_passes


def _dispatch_min_cut(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def solve_min_cut(
        joint_graph: Any, node_info: Any, min_cut_options: Any, dont_ban: Any = None
    ) -> Any:
        settings = context.settings()
        # With a budget of its own, or if all operators may be recomputed, torch passes other
        # arguments.
        if (
            settings is not None
            and settings.memory_recompute
            and dont_ban is None
            and min_cut_options.ban_if_materialized_backward
        ):
            from torch.utils._ordered_set import OrderedSet

            from inductor_ext.lowerings.graph import recompute_pointwise

            dont_ban = OrderedSet(
                recompute_pointwise.choose_results(
                    joint_graph, node_info.is_required_fw, recompute_pointwise.device_rates
                )
            )
        return stock(joint_graph, node_info, min_cut_options, dont_ban)

    return solve_min_cut


def _dispatch_output_strides(stock: Callable[..., None]) -> Callable[..., None]:
    from inductor_ext.lowerings.graph import pad_mm_policy

    @functools.wraps(stock)
    def record_original_output_strides(gm: Any) -> None:
        stock(gm)
        if context.settings() is not None:
            pad_mm_policy.restore_strides(gm)

    return record_original_output_strides


def _dispatch_can_pad(stock: Callable[..., bool]) -> Callable[..., bool]:
    from inductor_ext.autotune import decide
    from inductor_ext.lowerings.graph import pad_mm_policy

    @functools.wraps(stock)
    def can_pad(mat1: Any, mat2: Any, *args: Any, **kwargs: Any) -> bool:
        settings = context.settings()
        if settings is not None:
            if not pad_mm_policy.may_pad():
                return False
            if decide.may_replace_aten(settings) and pad_mm_policy.is_only_m_unaligned(mat1, mat2):
                return False
        return stock(mat1, mat2, *args, **kwargs)

    return can_pad


def _dispatch_post_grad_passes(stock: Callable[..., None]) -> Callable[..., None]:
    from torch._inductor import config as inductor_config

    @functools.wraps(stock)
    def _recursive_post_grad_passes(gm: Any, *args: Any, **kwargs: Any) -> None:
        outer = context.current().graph_in_passes
        settings = context.settings()
        if settings is None or (outer is not None and gm in outer.modules()):
            # Passes over the outer graph trace its subgraphs, which must consist of plain operators
            # until then. Subgraphs are therefore planned together with the outer graph.
            stock(gm, *args, **kwargs)
            return
        if inductor_config.use_post_grad_passes:
            from inductor_ext.lowerings.graph import cpu_woq_int8, shared_masks

            shared_masks.share_masks(gm.graph)
            if settings.gemm_templates:
                cpu_woq_int8.transpose_before_conversion(gm.graph)
        with context.enter(graph_in_passes=gm):
            stock(gm, *args, **kwargs)
        if inductor_config.use_post_grad_passes:
            from inductor_ext.lowerings.graph import post_grad_pass

            post_grad_pass.plan_matmuls(gm, settings)

    return _recursive_post_grad_passes


class KernelChoices:
    """Mixin over an InductorChoices class that overrides decisions about kernels."""

    settings: Settings

    def get_template_configs(
        self, kernel_inputs: Any, templates: Any, op_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Return Inductor's candidates for a matmul, without those that are known to be slower."""
        from inductor_ext.lowerings import aten

        templates = aten.sole_candidates(templates)
        stock: Any = super()
        return stock.get_template_configs(kernel_inputs, templates, op_name, *args, **kwargs)

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """Whether two kernels may be fused: Inductor's cases, but never two chunks of one value."""
        stock: Any = super()
        if not stock.can_fuse(scheduler, node1, node2, shared_data_score):
            return False
        if context.current().chunking is None:
            return True
        from inductor_ext.lowerings.graph import chunks

        return chunks.allows_fusion(_list_origins(node1), _list_origins(node2))

    def should_use_persistent_reduction(self, features: Any, cooperative_reduction: bool) -> bool:
        """Whether a reduction keeps its row in registers: Inductor's cases, and further ones.

        A user's class that overrides this method takes precedence.
        """
        from torch._inductor import config as inductor_config
        from torch._inductor.choices import InductorChoices

        from inductor_ext.lowerings.pointwise import persistent_reductions

        stock: Any = super()
        if stock.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        stock_class: Any = super(KernelChoices, type(self))
        return (
            self.settings.persistent_rows
            and stock_class.should_use_persistent_reduction
            is InductorChoices.should_use_persistent_reduction
            and inductor_config.triton.persistent_reductions
            and not cooperative_reduction
            and persistent_reductions.should_hold_row_in_registers(features)
        )


def _list_origins(node: Any) -> Iterator[Any]:
    """Yield the FX nodes that a scheduler node computes."""
    for part in node.get_nodes():
        if part.node is not None:
            yield from part.node.get_origins()
