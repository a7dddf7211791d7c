"""CUTLASS kernels of some large GEMMs on a GPU: measured times, eager mode, and the cost model.

The kernels that rank first are built in parallel, and timed in alternation with eager mode, with
operands in DRAM. Every case is written as one line of JSON as soon as it is measured: microseconds
of eager mode and of every kernel, predicted and measured, and the error against float64 of a few
rows.

    python -m benchmarks.gemm.cutlass_kernels --most 2 --out cutlass.jsonl
    python -m benchmarks.gemm.cutlass_kernels --most 12 --cases linear tail --out regret.jsonl

Building takes most of the time, and its results are kept: `--build-only` only builds, and needs no
GPU if `--device` names one. It prints the seconds of every build.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm import cutlass_launch
from benchmarks.harness import results
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.cost_model import rank
from inductor_ext.templates.cutlass.epilogue import (
    ACCUMULATOR,
    Epilogue,
    Node,
    Tensor,
    apply,
    gelu,
    identity,
    read,
)
from inductor_ext.templates.cutlass.source import source
from inductor_ext.templates.device import KNOWN, Device
from inductor_ext.templates.fused_ops import Dequant, Prologue
from inductor_ext.templates.fused_ops import Epilogue as FusedEpilogue
from inductor_ext.templates.problem import GemmProblem

__all__ = ["CASES", "Case", "main"]

STORE_BYTES = 4 << 30


@dataclass(frozen=True)
class Case:
    """A GEMM with its epilogue, and the equivalent eager computation."""

    problem: GemmProblem
    epilogue: Epilogue
    eager: Callable[..., torch.Tensor]
    """Takes a, b and the epilogue's inputs."""


def _make_case(
    problem: GemmProblem, eager: Callable[..., torch.Tensor], value: Node, *inputs: Tensor
) -> Case:
    fused_inputs = tuple(filter(None, (inp.epilogue_input for inp in inputs)))
    fused = dataclasses.replace(problem, epilogue=FusedEpilogue(fused_inputs, len(fused_inputs)))
    return Case(fused, Epilogue(((problem.out, value),), inputs), eager)


def _make_plain(m: int, n: int, k: int) -> Case:
    problem = GemmProblem.contiguous("mm", m, n, k)
    return Case(problem, identity(problem.out), torch.mm)


def _scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    return torch._scaled_mm(a, b, x, y, out_dtype=torch.bfloat16)


_ROW, _MATRIX = Tensor("bfloat16", "row", 8), Tensor("bfloat16", "matrix", 8)
_BIASED = apply("add", ACCUMULATOR, read(0))
_SCALED = apply("mul", apply("mul", ACCUMULATOR, read(0)), read(1))
_MM = GemmProblem.contiguous

CASES: Mapping[str, Case] = {
    "linear": _make_plain(4096, 14336, 4096),
    "deep": _make_plain(4096, 4096, 14336),
    "square": _make_plain(8192, 8192, 8192),
    "small": _make_plain(2048, 4096, 4096),
    "tail": _make_plain(2176, 4096, 4096),
    "odd": _make_plain(2040, 3584, 3584),
    "bias_gelu": _make_case(
        _MM("mm", 4096, 14336, 4096),
        lambda a, b, x: torch.nn.functional.gelu(a @ b + x),
        gelu(_BIASED),
        _ROW,
    ),
    "residual": _make_case(
        _MM("mm", 2048, 4096, 14336), lambda a, b, x: torch.addmm(x, a, b), _BIASED, _MATRIX
    ),
    "fp8": _make_case(
        _MM("scaled", 4096, 4096, 4096, "float8_e4m3fn"),
        _scaled_matmul,
        _SCALED,
        Tensor("float32", "column"),
        Tensor("float32", "row"),
    ),
    "int8_weights": _make_case(
        _MM("mixed", 2048, 14336, 4096, b_dtype="int8", prologue=Prologue(dequant=Dequant())),
        lambda a, b, x: (a @ b.to(a.dtype)) * x,
        apply("mul", ACCUMULATOR, read(0)),
        _ROW,
    ),
}


def _make_tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    problem = case.problem
    torch.manual_seed(0)

    def random(dtype: str, *sizes: int) -> torch.Tensor:
        if dtype == "int8":
            return torch.randint(-100, 100, sizes, device="cuda", dtype=torch.int8)
        return torch.randn(sizes, device="cuda").to(getattr(torch, dtype))

    sizes = {
        "matrix": (problem.m, problem.n),
        "row": (1, problem.n),
        "column": (problem.m, 1),
        "scalar": (1, 1),
    }
    a = random(problem.a.dtype, problem.m, problem.k)
    b = random(problem.b.dtype, problem.n, problem.k).t()
    return a, b, [random(inp.dtype, *sizes[inp.broadcast]) for inp in case.epilogue.inputs]


def _measure(
    case: Case, ranked: Sequence[tuple[CutlassConfig, float]], store: ArtifactStore, sms: int
) -> dict[str, Any]:
    """Measure one case; return its output line."""
    from inductor_ext.autotune.timing import CudaStopwatch, measure

    a, b, inputs = _make_tensors(case)
    expected = case.eager(a, b, *inputs)
    rows = slice(0, 64)
    # Inputs with one row, and scalars, apply to all rows.
    sliced = [inp[rows] if inp.shape[0] > 1 else inp for inp in inputs]
    accumulator = a[rows].double() @ b.double()
    (exact,) = case.epilogue.evaluate(accumulator, tuple(sliced))
    calls: list[Callable[[], object]] = [lambda: case.eager(a, b, *inputs)]
    entries: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    for config, predicted in ranked:
        kernel = cutlass_launch.load(source(config, case.epilogue), store)
        out = torch.zeros_like(expected)
        arguments = cutlass_launch.call(config, a, b, out, inputs, sms=sms)
        size = kernel.workspace_size(arguments)
        if size is None:
            entries.append({"kernel": config.name, "failure": "cannot run this call"})
            continue
        workspace = torch.empty(max(1, size), dtype=torch.uint8, device="cuda")

        def run(kernel: Any = kernel, call: Any = arguments, space: Any = workspace) -> int:
            stream = torch.cuda.current_stream().cuda_stream
            return int(kernel.run(call, space.data_ptr(), stream))

        status = run()
        torch.cuda.synchronize()
        difference = torch.linalg.vector_norm(out[rows].double() - exact.double())
        error = (difference / torch.linalg.vector_norm(exact.double())).item()
        entry = {
            "kernel": config.name,
            "launch": config.to_json(),
            "predicted": predicted,
            "status": status,
            "error": error,
        }
        entries.append(entry)
        if status == 0:
            timed.append(entry)
            calls.append(run)
    with CudaStopwatch(calls, torch.cuda.current_device()) as watch:
        samples = measure(watch, len(calls), budget=2000)
    for entry, sample in zip(timed, samples[1:], strict=True):
        entry["microseconds"] = sample.microseconds
    return {"eager": samples[0].microseconds, "kernels": entries}


def _build(
    kernels: Mapping[str, Sequence[tuple[CutlassConfig, float]]], store: ArtifactStore
) -> None:
    """Build all kernels, and print the seconds of every build, including waiting."""
    toolchain = nvcc_build.Toolchain.find()

    def build_one(name: str, config: CutlassConfig) -> str:
        start = time.perf_counter()
        kernel_source = source(config, CASES[name].epilogue)
        nvcc_build.build(kernel_source, store, toolchain)
        return f"{time.perf_counter() - start:7.1f} s  {name}  {kernel_source.name}"

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        running = [
            pool.submit(build_one, name, config)
            for name, ranked in kernels.items()
            for config, _ in ranked
        ]
        for done in concurrent.futures.as_completed(running):
            print(done.result(), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--most", type=int, default=2, help="kernels per case")
    parser.add_argument("--level", type=int, default=0, help="above 0 for all tiles and clusters")
    parser.add_argument("--out", type=Path, help="file to which a line of JSON per case is added")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument(
        "--device", choices=[entry.name for entry in KNOWN], help="GPU to build for"
    )
    options = parser.parse_args(arguments)
    device = next((entry for entry in KNOWN if entry.name == options.device), None)
    if device is None:
        device = Device.from_torch(torch.cuda.get_device_properties(0))
    kernels = {
        name: rank(CASES[name].problem, device, options.most, level=options.level)
        for name in options.cases
    }
    store = ArtifactStore(kernel_folder(), STORE_BYTES)
    _build(kernels, store)
    if options.build_only:
        return 0
    for name, ranked in kernels.items():
        line = json.dumps(
            {
                "case": name,
                "device": device.name,
                **_measure(CASES[name], ranked, store, device.sms),
            }
        )
        results.print_line(line, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
