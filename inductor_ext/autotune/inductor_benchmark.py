"""Compile the reference program of a problem with Inductor, with the kernel forced by the caller.

`InductorBench` is the `candidate_run.BenchmarkBackend` of tuning. It compiles within another
compile and leaves no trace there: on return, tracing context, virtualized globals, counters, modes,
autocast and events are those of the outer compile again, and no cache of compiled graphs is read or
written.

The code of all candidates is generated sequentially in the calling thread, one problem after the
other, with prebuilt kernels last. Inductor's compile workers start on a kernel as soon as its code
exists, so the kernels of all candidates compile in parallel. Loading a module waits for its
kernels only: the candidates of the first problem are timed while those of the others compile. A
candidate that fails to compile yields its exception.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from inductor_ext import events
from inductor_ext.autotune import compile_workers, decide, reference
from inductor_ext.autotune.candidate_run import Candidate, Compiled
from inductor_ext.autotune.timing import CudaStopwatch, Stopwatch
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.kernels import Config
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.toolchain import compiler_errors

_OPTIONS: dict[str, Any] = {
    # The decision is forced, and Inductor's path is ATen: no tuning within tuning.
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    # The kernels of Inductor's epilogue differ little, and each would have to be compiled.
    "triton.autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "benchmark_epilogue_fusion": False,
    "benchmark_kernel": False,
    "profile_bandwidth": False,
    # The module is called directly, from Python.
    "cpp_wrapper": False,
    "fx_wrapper": False,
    "trace.enabled": False,
    "size_asserts": False,
    "nan_asserts": False,
    "triton.autotune_at_compile_time": False,
    "triton.debug_sync_graph": False,
    "triton.debug_sync_kernel": False,
    # These passes are meant for the user's graphs.
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
    "_pre_fusion_custom_pass": None,
    "_post_fusion_custom_pass": None,
}


_CUTLASS_OPTIONS: dict[str, Any] = {
    # The requested tree determines where the epilogue is split.
    "max_autotune_gemm_backends": "ATEN,CUTLASS",
    **{
        f"{section}.{name}": value
        for section in ("cutlass", "cuda")
        for name, value in (
            ("cutlass_epilogue_fusion_enabled", True),
            ("cutlass_enabled_ops", "all"),
            ("cutlass_backend_min_gemm_size", 1),
        )
    },
}
"""Additional options for compiling a CUTLASS kernel."""


class InductorBench:
    """Compiles candidates with Inductor in this process; times them on a CUDA device."""

    def __init__(self, device: str) -> None:
        """Create a bench without any initialization.

        Args:
            device: such as "cuda:0".
        """
        self.device = device

    def warm_up(self) -> None:
        """See `candidate_run.BenchmarkBackend`."""
        import torch

        if self.device.startswith("cuda"):
            compile_workers.warm_up(torch.cuda.get_device_capability(self.device))

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """See `candidate_run.BenchmarkBackend`."""
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
            stack.enter_context(torch._C._DisableAutocast())
            stack.enter_context(torch.no_grad())
            stack.enter_context(restore_counters())
            stack.enter_context(events.muted())
            if self.device.startswith("cuda"):
                stack.enter_context(torch.cuda.device(self.device))
                stack.callback(torch.cuda.empty_cache)
            yield

    def compile(
        self, candidates: Sequence[Candidate], starting: Callable[[int], None]
    ) -> Iterator[Compiled | Exception]:
        """See `candidate_run.BenchmarkBackend`."""
        # The workers start and warm up while code is generated.
        self.warm_up()
        with compile_workers.sending_early():
            codes = self._generate_codes(candidates, starting)
        if not compile_workers.wait_until_ready():
            forget_kernels()
        for index, code in enumerate(codes):
            starting(index)
            result = code if isinstance(code, Exception) else load_code(*code)
            # A kernel that crashes its compile worker also fails the kernels in the other workers.
            if isinstance(result, Exception) and _is_broken_pool(result):
                starting(index)
                forget_kernels()
                result = load_code(*code)
            yield result

    def _generate_codes(
        self, candidates: Sequence[Candidate], starting: Callable[[int], None]
    ) -> list[Any]:
        """Return the result of `generate_code` for each candidate, or its exception."""
        from torch._inductor import config as inductor_config

        traced: dict[GemmProblem, _Traced] = {}
        codes: list[Any] = [None] * len(candidates)
        for index in _sort_for_compiling(candidates):
            problem, config = candidates[index]
            starting(index)
            try:
                options = _CUTLASS_OPTIONS if isinstance(config, CutlassConfig) else {}
                if problem not in traced:
                    traced[problem] = trace_program(problem, self.device)
                with (
                    decide.force_config(_make_rule(problem, config)),
                    inductor_config.patch(options),
                ):
                    codes[index] = generate_code(traced[problem])
            except Exception as error:
                codes[index] = error
        return codes

    @contextlib.contextmanager
    def stopwatch(self, calls: Sequence[Callable[[], object]]) -> Iterator[Stopwatch]:
        """See `candidate_run.BenchmarkBackend`."""
        import torch

        with CudaStopwatch(calls, torch.device(self.device).index or 0) as stopwatch:
            yield stopwatch

    def free_memory(self) -> int | None:
        """See `candidate_run.BenchmarkBackend`."""
        import torch

        if not self.device.startswith("cuda"):
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + cached)

    def synchronize(self) -> None:
        """See `candidate_run.BenchmarkBackend`."""
        import torch

        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)


def cuda_bench(index: int) -> InductorBench:
    """Return the bench of a CUDA device, after slow one-time initialization."""
    import torch
    from torch._inductor import compile_fx  # noqa: F401

    torch.cuda.init()
    return InductorBench(f"cuda:{index}")


def _sort_for_compiling(candidates: Sequence[Candidate]) -> list[int]:
    """Return indices in the order in which code is generated: by problem, as they are timed.

    Prebuilt CUTLASS kernels, which no process compiles, come last.
    """
    positions: dict[GemmProblem, int] = {}
    for problem, _ in candidates:
        positions.setdefault(problem, len(positions))

    def key(index: int) -> tuple[bool, int, tuple[int, float]]:
        problem, config = candidates[index]
        is_prebuilt = isinstance(config, CutlassConfig)
        return is_prebuilt, positions[problem], _compile_priority(config)

    return sorted(range(len(candidates)), key=key)


def _compile_priority(config: Config | None) -> tuple[int, float]:
    """Sort key: generate a problem's slowest-compiling kernels first (most elements per thread).

    A kernel compiles in 0.7 s with 512 elements per thread and in 0.3 s with 128, because ptxas
    unrolls loads.
    """
    if config is None or isinstance(config, CutlassConfig):
        return 1, 0.0
    return 0, -(config.block_m + config.block_n) * config.block_k / config.threads


def _make_rule(problem: GemmProblem, config: Config | None) -> decide.Rule:
    """Return a rule that selects the configuration for the matmul of the problem, and no other.

    The epilogue found in the graph may differ from the problem's, except for the tree of a CUTLASS
    kernel, which was built for exactly that tree. If the matmuls of a fused problem were not fused
    in the graph, none of them matches.
    """

    def shape(problem: GemmProblem) -> tuple[object, ...]:
        prologue = (problem.norm and problem.norm.kind, problem.dequant is not None)
        sizes = (problem.batch, problem.m, problem.n, problem.k)
        epilogue = problem.epilogue
        tree = epilogue.tree if isinstance(config, CutlassConfig) else None
        return (*sizes, problem.parts, epilogue.gated, epilogue.reductions, prologue, tree)

    return lambda query: config if shape(query) == shape(problem) else None


@dataclass(frozen=True)
class _Traced:
    """The program of a problem as a graph; each candidate is generated from a copy."""

    problem: GemmProblem
    graph: Any
    """A GraphModule of ATen operators, with fake values."""
    inputs: tuple[Any, ...]
    """Fake tensors."""
    mode: Any
    """The fake mode of the inputs."""


def trace_program(problem: GemmProblem, device: str) -> _Traced:
    """Trace a program up to Inductor's post-grad passes, which depend on the candidate."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, ir
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    program = reference.program(problem)
    mode = FakeTensorMode()
    with reference.precision(problem), tracing(TracingContext(mode)):
        with mode:
            inputs = program.empty_inputs(device)
            gm = make_fx(program.function, decomposition_table=select_decomp_table())(*inputs)
        with V.set_fake_mode(mode):
            view_to_reshape(gm)
            compile_fx.fake_tensor_prop(gm, inputs)
            ir.gm_original_output_strides(gm)
    return _Traced(problem, gm, tuple(inputs), mode)


def generate_code(traced: _Traced) -> tuple[str, dict[str, Any]]:
    """Return the source of the module that computes a problem, and its constants."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor_config
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import NullHandler, V

    gm, inputs = copy.deepcopy(traced.graph), list(traced.inputs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(reference.precision(traced.problem))
        stack.enter_context(inductor_config.patch(_OPTIONS))
        stack.enter_context(tracing(TracingContext(traced.mode)))
        stack.enter_context(V.set_fake_mode(traced.mode))
        stack.enter_context(V.set_aot_compilation(False))
        stack.enter_context(V.set_debug_handler(DebugContext()))
        stack.enter_context(V.set_current_node(NullHandler()))
        stack.enter_context(V.set_extern_kernel_nodes([]))
        compile_fx._recursive_post_grad_passes(gm, is_inference=True)
        graph = GraphLowering(gm, example_inputs=inputs, is_inference=True)
        graph.freeze_runtime_asserts()
        stack.enter_context(V.set_graph_handler(graph))
        graph.run(*inputs)
        code: Any = graph.codegen()[0]
    return code.value, {**graph.constants, **graph.torchbind_constants}


def load_code(code: str, attributes: dict[str, Any]) -> Compiled | Exception:
    """Load a module of generated code; this waits for its kernels to compile."""
    from torch._inductor.codecache import PyCodeCache

    try:
        key, path = PyCodeCache.write(code)
        module: Any = PyCodeCache.load_by_key_path(key, path, attrs=attributes)
    except Exception as error:
        return error
    # The module clears the list that it receives.
    return Compiled(
        lambda *tensors: module.call(list(tensors)), hashlib.sha256(code.encode()).hexdigest()
    )


def _is_broken_pool(error: BaseException) -> bool:
    return any(isinstance(e, BrokenProcessPool) for e in compiler_errors.walk_causes(error))


def forget_kernels() -> None:
    """Clear kernels whose compilation failed or is in progress, so that they are compiled again."""
    from torch._inductor.async_compile import CompiledTritonKernels

    CompiledTritonKernels.cache_clear()


@contextlib.contextmanager
def restore_counters() -> Iterator[None]:
    """Restore the counters and metrics of the outer compile on exit."""
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    saved_counters = {name: counter.copy() for name, counter in counters.items()}
    saved_metrics = {name: getattr(metrics, name) for name in metrics.get_metric_fields()}
    try:
        yield
    finally:
        counters.clear()
        counters.update(saved_counters)
        for name, value in saved_metrics.items():
            setattr(metrics, name, value)
