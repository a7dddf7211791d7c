"""The suites of benchmarks: which module measures each, with which arguments, on what."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SUITES", "Suite"]


@dataclass(frozen=True)
class Suite:
    """A suite, `results/<name>/` once it is stored.

    Attributes:
        module: run as `python -m module`, with the folder of the results after `output`.
        arguments: with which the committed results were measured.
        gpu: whether it needs a GPU.
        about: what it measures.
    """

    name: str
    module: str
    about: str
    arguments: tuple[str, ...] = ()
    gpu: bool = False
    output: str = "--json-out"

    def command(self, folder: str, *more: str) -> list[str]:
        """Arguments of Python that run the suite and write to `folder`."""
        return ["-m", self.module, *self.arguments, *more, self.output, folder]


_HELD_OUT = ("--held-out", "--variants", "eager", "stock", "ours-default")
_TUNED = (
    *("--held-out", "--suite", "held-out-tuned", "--without-tables"),
    *("--variants", "eager", "stock", "stock-max", "ours", "ours-default"),
)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        # on a CPU
        Suite("aoti", "benchmarks.aot.run", "AOT packages: compile, load, call, refused inputs"),
        Suite(
            "aot-build-memory", "benchmarks.aot.build_memory", "memory that 10 GB of weights take"
        ),
        Suite("aot-soak", "benchmarks.aot.soak", "calls while weights and packages change"),
        Suite("aot-gpu-load", "benchmarks.aot.gpu_load", "loading 5 GB of weights onto a GPU"),
        Suite("gpu-targets", "benchmarks.aot.gpu_targets", "a package for several GPUs"),
        Suite("compile-time", "benchmarks.compile_time", "compile time with and without the fixes"),
        Suite("kernel-order", "benchmarks.memory.reorder", "what the order of kernels saves"),
        Suite("memory-budget", "benchmarks.memory.budget", "training steps within a budget"),
        Suite("memory-peak", "benchmarks.memory.peak", "peaks of models, inference and training"),
        Suite(
            "memory-steps",
            "benchmarks.memory.steps",
            "peak and time of whole calls and training steps",
            ("--rounds", "0"),
        ),
        Suite("memory-wrapper", "benchmarks.memory.wrapper", "time of allocation in a call"),
        Suite("planner", "benchmarks.memory.planner", "the planner on public instances"),
        Suite("quickstart", "examples.quickstart", "the quickstart"),
        Suite(
            "graphs",
            "test.fuzz.graphs",
            "random programs against eager mode",
            ("--count", "5000"),
        ),
        Suite(
            "op-sweep",
            "test.fuzz.op_sweep",
            "every operator against eager mode",
            ("--all",),
            output="--results",
        ),
        Suite(
            "address-sanitizer",
            "test.fuzz.address_sanitizer",
            "generated C++ under the address sanitizer",
            ("--count", "64"),
            output="--results",
        ),
        Suite(
            "cpp-client",
            "test.fuzz.cpp_client",
            "calls from C++ under the address and thread sanitizers",
            ("--calls", "10000"),
            output="--results",
        ),
        Suite(
            "compile-growth",
            "benchmarks.reliability.compile_growth",
            "memory of a process that compiles many graphs",
        ),
        Suite("threads", "benchmarks.reliability.threads", "compiles in several threads"),
        Suite("service", "benchmarks.reliability.service", "the service example under clients"),
        Suite("faults", "benchmarks.reliability.faults", "compiles while the machine fails"),
        Suite("model-sweep", "benchmarks.reliability.model_sweep", "models not developed with"),
        Suite(
            "model-sweep-targets",
            "benchmarks.reliability.model_sweep",
            "packages of these models for a GPU",
            ("--suite", "model-sweep-targets", "--ways", "package for sm_90"),
        ),
        # on a GPU
        Suite("gemm", "benchmarks.gemm.run", "matmuls", gpu=True),
        Suite("e2e", "benchmarks.gemm.e2e", "whole models", gpu=True),
        Suite("held-out", "benchmarks.gemm.e2e", "models that no table has seen", _HELD_OUT, True),
        Suite("held-out-tuned", "benchmarks.gemm.e2e", "the same, max-autotune", _TUNED, True),
        Suite("host-time", "benchmarks.gemm.host_time", "calls without CUDA graphs", gpu=True),
        Suite(
            "kernel-kinds", "benchmarks.gemm.kernel_kinds", "what the GPU time goes to", gpu=True
        ),
        Suite("reductions", "benchmarks.gemm.reductions", "norms and softmax", gpu=True),
        Suite(
            "speed-of-light", "benchmarks.gemm.speed_of_light", "lower bounds of times", gpu=True
        ),
        Suite("tuning-cost", "benchmarks.gemm.tuning_cost", "what tuning costs", gpu=True),
        Suite("memory-gpu", "benchmarks.memory.gpu", "peak and time of a call", gpu=True),
        Suite("memory-fragmentation", "benchmarks.memory.fragmentation", "200 steps", gpu=True),
    )
}
"""All suites that one command measures, by their names."""
