"""CUTLASS kernels selected for matmuls of whole graphs on a CUDA device; needs nvcc and CUTLASS.

What the tests force is built first, side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters

from benchmarks.gemm.models import int4_linear
from inductor_ext import config, events
from inductor_ext.autotune import cutlass_kernels, cutlass_options, decide
from inductor_ext.templates import kernels as families
from inductor_ext.templates.cutlass import nvcc_build, runtime
from inductor_ext.templates.cutlass.config import CutlassConfig, Filter
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulRecord, TuningRecord
from inductor_ext.toolchain import components
from test.support import gpu_util
from test.support.gpu_util import device

pytestmark = pytest.mark.gpu

F = torch.nn.functional
HALF = torch.bfloat16
FP8 = torch.float8_e4m3fn

ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, HALF: 8e-3}
"""Relative error of the whole result against float64."""

FUSES = {
    "max_autotune_gemm_backends": "CUTLASS",
    "cutlass.cutlass_epilogue_fusion_enabled": True,
}

Tensors = list[torch.Tensor]


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, kernels are kept where no run of the tests begins with nothing: each takes a minute
    to build.
    """
    folder = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "cutlass-kernels"
    with gpu_util.compiling(), config.patch(artifact_cache_dir=str(folder)):
        yield


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    torch.manual_seed(0)
    with compiling():
        yield


def values(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    """Random elements, so that results are of the order of 1."""
    if dtype == torch.int8:
        return torch.randint(-100, 100, shape, device="cuda", dtype=dtype)
    scale = shape[-1] ** -0.25 if len(shape) > 1 and shape[-1] > 1 else 1.0
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def linear(*shapes: tuple[int, ...], dtype: torch.dtype = HALF) -> Tensors:
    return [values(*shape, dtype=dtype) for shape in shapes]


def scaled_addmm(b: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b, x, w.t(), alpha=2.0, beta=0.4)


def quantized(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.silu((x @ w.to(x.dtype).t()) * scale)


def packed(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return F.silu(int4_linear(x, w.long() if x.dtype == torch.float64 else w, scales))


def dynamic_int8(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.float64:
        return a @ b.t() * s
    return (torch._int_mm(a, b.t()) * s).to(HALF)


def fp8(a: Any, b: Any, s: Any, t: Any, bias: Any) -> torch.Tensor:
    if a.dtype == torch.float64:
        return F.gelu(a @ b.t() * s * t + bias, approximate="tanh")
    out = torch._scaled_mm(a, b.t(), s, t, bias=bias, out_dtype=HALF)
    return F.gelu(out, approximate="tanh")


def groups(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.float64:
        bounds = [0, *(int(end) for end in ends)]
        spans = itertools.pairwise(bounds)
        rows = [a[first:last] @ b[g].t() for g, (first, last) in enumerate(spans)]
        return torch.relu(torch.cat(rows))
    return torch.relu(torch._grouped_mm(a, b.transpose(-1, -2), offs=ends))


def two_outputs(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w.t()
    return y, torch.relu(y) * 1.5


XW = ((1024, 512), (768, 512))

ADDMM = ((4096, 2048), (25728, 2048))

GRAPHS: dict[str, tuple[Callable[..., Any], Callable[[], Tensors]]] = {
    **{
        f"addmm with a bias of {shape}": (
            scaled_addmm,
            lambda shape=shape: [values(*shape), *linear(*ADDMM)],  # type: ignore[misc]
        )
        for shape in ((25728,), (4096, 1), (4096, 25728))
    },
    "float16": (lambda x, w: x @ w.t(), lambda: linear(*XW, dtype=torch.float16)),
    "bias and residual": (
        lambda x, w, b, r: torch.relu(F.linear(x, w, b)) + r,
        lambda: linear(*XW, (768,), (1024, 768)),
    ),
    "sequence": (
        lambda x, w, b, r: F.silu(F.linear(x, w, b)) + r,
        lambda: linear((4, 256, 512), XW[1], (768,), (4, 256, 768)),
    ),
    "batch": (
        lambda r, x, w: torch.sigmoid(torch.baddbmm(r, x, w, alpha=0.5)),
        lambda: linear((3, 256, 96), (3, 256, 128), (3, 128, 96)),
    ),
    "two outputs": (two_outputs, lambda: linear(*XW)),
    "int8": (
        dynamic_int8,
        lambda: [*linear(*XW, dtype=torch.int8), values(1024, 1, dtype=torch.float32) * 1e-4],
    ),
    "mixed": (
        quantized,
        lambda: [values(*XW[0]), values(*XW[1], dtype=torch.int8), values(768) * 1e-2],
    ),
    "int4": (
        packed,
        lambda: [
            values(*XW[0]),
            torch.randint(0, 256, (768, 256), device="cuda", dtype=torch.uint8),
            torch.rand(768, 4, device="cuda").to(HALF) * 0.02 + 0.01,
        ],
    ),
    "fp8": (
        fp8,
        lambda: [
            *linear(*XW, dtype=FP8),
            torch.rand(1024, 1, device="cuda") + 0.5,
            torch.rand(1, 768, device="cuda") + 0.5,
            values(768),
        ],
    ),
    "grouped": (
        groups,
        lambda: [
            *linear(XW[0], (4, *XW[1])),
            torch.tensor([100, 100, 700, 1024], device="cuda", dtype=torch.int32),
        ],
    ),
}
"""A function, which computes float64 inputs in float64, and its inputs."""

REGULAR = CutlassConfig(90, "warpspecialized_cooperative", (128, 128, 64), *("bfloat16",) * 3)
FORCED = {
    "regular": REGULAR,
    "stream_k": CutlassConfig.from_json({**REGULAR.to_json(), "scheduler": "stream_k"}),
}

SIZES = ((128, 16, 128), (1024, 256, 1024), (16384, 1024, 16384), (16384, 1408, 16384))


def best(problem: GemmProblem, only: Filter | None = None) -> CutlassConfig | None:
    """The CUTLASS kernel that the model ranks first."""
    if problem.epilogue.tree is None:
        return None
    results = cutlass_options.Options(only=only or Filter(), limit=1).rank(problem, device())
    return results[0][0] if results else None


def compiled(function: Callable[..., Any], inputs: Tensors, **options: Any) -> Any:
    """The results of a newly compiled function."""
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch({**FUSES, **options}):
        return torch.compile(function, backend="inductor_ext", dynamic=False)(*inputs)


def asked_for(function: Callable[..., Any], inputs: Tensors) -> list[GemmProblem]:
    """The unique problems of a function's matmul that a CUTLASS kernel could compute."""
    problems: dict[GemmProblem, None] = {}

    # Records problems without a decision.
    with decide.force_config(problems.setdefault):
        compiled(function, inputs)
    return [item for item in problems if item.epilogue.tree is not None]


def mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


@pytest.fixture(scope="module")
def kernels() -> Mapping[str, str]:
    """Why kernels cannot be had that are forced, by what is computed; all others are there then."""
    for part in (components.probe("nvcc"), components.probe("cutlass")):
        if not part.available:
            pytest.skip(f"no {part.title}: {part.why}")
    if device().capability != (9, 0):
        pytest.skip(f"{device().name} has no TMA and warpgroup instructions")
    with compiling():
        wanted = {}
        for name, (function, inputs) in GRAPHS.items():
            for problem in asked_for(function, inputs()):
                chosen = best(problem)
                if chosen is not None:
                    wanted[name] = (problem, chosen)
                    break
        (identity,) = asked_for(mm, linear(*XW))
        wanted |= {name: (identity, item) for name, item in FORCED.items()}
        reasons = cutlass_kernels.prepare(wanted.values(), config.snapshot({}))
        return {name: reasons[item] for name, item in wanted.items() if item in reasons}


def exactly(function: Callable[..., Any], inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """The results in float64."""
    wide = [inp if inp.dtype == torch.int32 else inp.double() for inp in inputs]
    result = function(*wide)
    return result if isinstance(result, tuple) else (result,)


def assert_right(result: Any, function: Callable[..., Any], inputs: Tensors) -> None:
    outputs = result if isinstance(result, tuple) else (result,)
    for output, reference in zip(outputs, exactly(function, inputs), strict=True):
        assert output.shape == reference.shape
        difference = torch.linalg.vector_norm(output.double() - reference)
        assert difference <= ERROR[output.dtype] * torch.linalg.vector_norm(reference)


def chosen(records: list[events.Record]) -> list[families.Config | None]:
    return [record.chosen for record in records if isinstance(record, MatmulRecord)]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_matmul_and_its_epilogue_are_one_kernel(name: str, kernels: Mapping[str, str]) -> None:
    assert name not in kernels, kernels[name]
    function, make = GRAPHS[name]
    inputs = make()
    before = counters["inductor"]["cutlass_epilogue_fusion_counter"]
    with decide.force_config(best), events.capture() as records:
        result = compiled(function, inputs)
    assert_right(result, function, inputs)
    (config_,) = chosen(records)
    assert isinstance(config_, CutlassConfig)
    alone = name == "float16" or name.startswith("addmm")
    assert counters["inductor"]["cutlass_epilogue_fusion_counter"] - before == (not alone)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("name", FORCED)
def test_one_kernel_takes_all_sizes(
    name: str, size: tuple[int, int, int], kernels: Mapping[str, str]
) -> None:
    assert name not in kernels, kernels[name]
    m, n, k = size
    inputs = linear((m, k), (n, k))

    def rule(problem: GemmProblem) -> CutlassConfig | None:
        return FORCED[name] if problem.epilogue.tree is not None else None

    with decide.force_config(rule), events.capture() as records:
        result = compiled(mm, inputs)
    assert_right(result, mm, inputs)
    assert chosen(records) == [FORCED[name]]


@pytest.mark.parametrize(
    "switch", ["allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"]
)
@pytest.mark.parametrize("on", [False, True])
def test_float16_is_accumulated_in_float32(
    switch: str, on: bool, kernels: Mapping[str, str]
) -> None:
    function, make = GRAPHS["float16"]
    inputs = make()
    matmul: Any = torch.backends.cuda.matmul
    before = getattr(matmul, switch)
    setattr(matmul, switch, on)
    try:
        with decide.force_config(best), events.capture() as records:
            result = compiled(function, inputs)
    finally:
        setattr(matmul, switch, before)
    assert_right(result, function, inputs)
    (config_,) = chosen(records)
    assert isinstance(config_, CutlassConfig)
    assert config_.accumulator == "float32"


def test_rows_that_are_known_only_at_run_time(kernels: Mapping[str, str]) -> None:
    """Above the threshold a CUTLASS kernel, below it the ATen/cuBLAS fallback, in the same code."""

    def rule(problem: GemmProblem) -> CutlassConfig | None:
        return REGULAR if problem.epilogue.tree is not None else None

    (w,) = linear((768, 512))
    options = {**FUSES, "cutlass.cutlass_backend_min_gemm_size": 100 * 768 * 512}
    with (
        decide.force_config(rule),
        inductor_config.patch(options),
        torch.no_grad(),
        events.capture() as records,
    ):
        function = torch.compile(mm, backend="inductor_ext")
        for rows in (2048, 100, 99, 3):
            x = values(rows, 512)
            torch._dynamo.mark_dynamic(x, 0)
            assert_right(function(x, w), mm, [x, w])
    # Compiled once.
    assert chosen(records) == [None, REGULAR]


@pytest.mark.parametrize("denied", [False, True])
def test_lists_leave_only_or_none_of_pingpong(
    denied: bool, kernels: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    name = "cutlass_op_denylist_regex" if denied else "cutlass_op_allowlist_regex"
    options = {f"cutlass.{name}": "pingpong", "cutlass.cutlass_max_profiling_configs": 1}
    inputs = linear((2048, 1024), (1024, 1024))
    with (
        config.patch(tuning_cache_dir=str(tmp_path)),
        events.capture(TuningRecord) as records,
    ):
        result = compiled(mm, inputs, max_autotune=True, **options)
    assert_right(result, mm, inputs)
    (record,) = records
    candidates = [candidate for candidate in record.candidates if candidate.config is not None]
    assert ["pingpong" in candidate.config.name for candidate in candidates] == [not denied]
    assert all(candidate.measured is not None for candidate in candidates), candidates


FAULTS = {
    "illegal memory access": "run<<<1, 1, 0, stream>>>(reinterpret_cast<int*>(16));",
    "wrong": "",
}
"""The launch code of faulty kernels; the second one does nothing."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_dropped_for_the_fallback(
    fault: str, kernels: Mapping[str, str], tmp_path: pathlib.Path
) -> None:
    inputs = linear((1024, 1024), (512, 1024))
    with config.patch(artifact_cache_dir=str(tmp_path / "kernels"), tuning_cache=False):
        options = {"cutlass.cutlass_max_profiling_configs": 1, "max_autotune": True}
        (problem,) = asked_for(mm, inputs)
        output = best(problem)
        assert output is not None
        _put_faulty(families.source_of(problem, output), FAULTS[fault])
        with events.capture(TuningRecord) as records:
            result = compiled(mm, inputs, **options)
    assert_right(result, mm, inputs)
    (record,) = records
    assert record.chosen is None
    (dropped,) = (candidate for candidate in record.candidates if candidate.config is not None)
    assert fault.split()[0] in (dropped.failure or "").lower()


def _put_faulty(source: Any, launch: str) -> None:
    """Replace a stored kernel by another one."""
    toolchain = nvcc_build.Toolchain.find()
    store = runtime.store(config.snapshot({}))
    text = f"""#include <cstdint>
__global__ void run(int* at) {{ *at = 1; }}
extern "C" int64_t inductor_ext_workspace_size(void const*) {{ return 0; }}
extern "C" int32_t inductor_ext_run(void const*, void*, cudaStream_t stream) {{
  {launch}
  return 0;
}}
"""
    with store.publish(nvcc_build.key(source)) as folder:
        file = folder / "kernel.cu"
        file.write_text(text)
        target = f"-gencode=arch=compute_{source.architecture},code=sm_{source.architecture}"
        arguments = [target, "-shared", "-Xcompiler=-fPIC", "-o", str(folder / "kernel.so")]
        subprocess.run([toolchain.nvcc, *arguments, str(file)], check=True)
