"""CUTLASS kernels on a GPU, against float64: every operator, schedule and kind of epilogue.

All kernels are built first, in parallel, and stored in the caller's Inductor cache.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks.gemm.cutlass_launch import Kernel, call, load
from inductor_ext.autotune.accuracy import bound, error
from inductor_ext.autotune.reference import unpack_int4
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.storage.paths import kernel_folder
from inductor_ext.templates.cutlass.config import CutlassConfig, Filter
from inductor_ext.templates.cutlass.constraints import why_not
from inductor_ext.templates.cutlass.cost_model import rank
from inductor_ext.templates.cutlass.epilogue import (
    ACCUMULATOR,
    Epilogue,
    Node,
    Packed,
    Tensor,
    apply,
    clamp,
    constant,
    gelu,
    identity,
    parameter,
    read,
    relu6,
    silu,
)
from inductor_ext.templates.cutlass.nvcc_build import Toolchain, build_all
from inductor_ext.templates.cutlass.source import Source, source
from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Dequant, Prologue
from inductor_ext.templates.fused_ops import Epilogue as FusedEpilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import INT4, EpilogueInput, Operand
from inductor_ext.toolchain import components

pytestmark = pytest.mark.gpu

BF16 = "bfloat16"
mm = GemmProblem.contiguous


@dataclass(frozen=True)
class Case:
    """A problem, its outputs, and a filter of its kernels."""

    problem: GemmProblem
    epilogue: Epilogue
    only: Filter | None = None
    scalars: tuple[float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Launch parameters of the configuration."""


def product(first: Any, *rest: Any) -> Any:
    for item in rest:
        first = apply("mul", first, item)
    return first


def fused(
    problem: GemmProblem, value: Node, *inputs: Tensor, out: str | None = None, **rest: Any
) -> Case:
    """A case with one output."""
    read_ = tuple(EpilogueInput(inp.dtype, inp.broadcast) for inp in inputs)
    epilogue = FusedEpilogue(read_, 4, out if out != problem.out else None)
    stored = out or problem.out
    return Case(
        dataclasses.replace(problem, epilogue=epilogue),
        Epilogue(((stored, value),), inputs),
        **rest,
    )


def plain(problem: GemmProblem, **rest: Any) -> Case:
    return Case(problem, identity(problem.out), **rest)


X, Y, Z = ACCUMULATOR, read(0), read(1)
LINEAR = apply("add", product(parameter(0), X), product(parameter(1), Y))
ALPHA_BETA = (2.0, 0.4)
ROW, COLUMN, MATRIX = Tensor(BF16, "row"), Tensor(BF16, "column"), Tensor(BF16, "matrix", 8)
ADDMM = mm("addmm", 4096, 25728, 2048)
SMALL = mm("mm", 1000, 1024, 512)
REGULAR = Filter(deny="stream_k")
STREAM_K, PINGPONG, OLD = Filter("stream_k"), Filter("pingpong"), Filter("cutlass_tensorop")
GROUPS = Prologue(dequant=Dequant("group", 64))
HALF_GROUPS = Prologue(dequant=Dequant("group", 64, scale_dtype="float16"))
HALF_SCALES = Tensor("float16", "group")
UNALIGNED = mm("mm", 999, 1001, 510)
SCALES = (Tensor("float32", "column"), Tensor("float32", "row"))
FP8 = mm("scaled", 1024, 2048, 4096, "float8_e4m3fn")
CHAINS: dict[str, Node] = {
    "relu": apply("relu", X),
    "relu6": relu6(X),
    "gelu": gelu(X),
    "gelu_tanh": gelu(X, "tanh"),
    "silu": silu(X),
    "sigmoid": apply("sigmoid", X),
    "tanh": apply("tanh", X),
    "clamp": clamp(X, -0.5, 0.75),
    "scale_shift": apply("add", product(X, constant(0.125)), constant(3.0)),
    "by_size": apply("truediv", X, parameter(0)),
}

CASES: dict[str, Case] = {
    **{
        f"mm_{layouts}": plain(mm("mm", 512, 768, 320, layouts=layouts))
        for layouts in ("rr", "rc", "cr", "cc")
    },
    "mm_float16": plain(mm("mm", 512, 768, 320, "float16")),
    "mm_float32_out": plain(mm("mm", 512, 768, 320, out="float32")),
    "mm_tf32": plain(mm("mm", 512, 768, 320, "float32", tf32=True)),
    "mm_few_rows": plain(mm("mm", 5 * 8, 4096, 4096)),
    **{
        f"{name}_{m}x{n}x{k}": plain(mm("mm", m, n, k), only=only)
        for m, n, k in (
            (128, 16, 128),
            (1024, 256, 1024),
            (16384, 1024, 16384),
            (16384, 1408, 16384),
        )
        for name, only in (("regular", REGULAR), ("stream_k", STREAM_K))
    },
    "split_k": plain(mm("mm", 256, 256, 16384), only=STREAM_K, options={"split_k": 4}),
    "pingpong_tail": plain(mm("mm", 2176, 4096, 4096), only=PINGPONG),
    "unaligned": plain(UNALIGNED),
    "unaligned_bias": fused(UNALIGNED, gelu(apply("add", X, Y)), ROW),
    "older": plain(mm("mm", 1000, 1032, 520), only=OLD, options={"level": 1}),
    "bmm": plain(mm("bmm", 300, 256, 128, batch=7)),
    "bmm_older": plain(mm("bmm", 300, 256, 128, batch=7), only=OLD, options={"level": 1}),
    "baddbmm": fused(mm("baddbmm", 304, 256, 128, batch=3), LINEAR, MATRIX, scalars=ALPHA_BETA),
    "addmm_row": fused(ADDMM, LINEAR, ROW, scalars=ALPHA_BETA),
    "addmm_column": fused(ADDMM, LINEAR, COLUMN, scalars=ALPHA_BETA),
    "addmm_matrix": fused(ADDMM, LINEAR, MATRIX, scalars=ALPHA_BETA),
    "residual_and_bias": fused(
        SMALL, silu(apply("add", apply("add", X, Y), Z)), MATRIX, Tensor("float32", "row")
    ),
    "two_matrices": fused(
        SMALL, apply("add", product(X, Y), Z), MATRIX, Tensor("float32", alignment=4)
    ),
    "scalar_input": fused(SMALL, product(X, Y), Tensor("float32", "scalar")),
    **{
        name: fused(SMALL, value, scalars=(1024.0,) if name == "by_size" else ())
        for name, value in CHAINS.items()
    },
    "float32_stored": fused(SMALL, apply("relu", X), out="float32"),
    "two_outputs": Case(SMALL, Epilogue(((BF16, silu(X)), ("float32", X)))),
    "two_outputs_older": Case(
        SMALL, Epilogue(((BF16, silu(X)), ("float32", X))), only=OLD, options={"level": 1}
    ),
    "int_mm": plain(mm("int_mm", 1024, 512, 2048, "int8")),
    "int_mm_scaled": fused(
        mm("int_mm", 1024, 512, 2048, "int8"), product(X, Y, Z), *SCALES, out=BF16
    ),
    "fp8_row_wise": fused(FP8, product(X, Y, Z), *SCALES),
    "fp8_fast": fused(dataclasses.replace(FP8, fast_accumulation=True), product(X, Y, Z), *SCALES),
    "fp8_tensor_wise": fused(FP8, product(X, Y, Z), *(Tensor("float32", "scalar"),) * 2),
    **{
        f"mixed_{dtype}": fused(
            mm("mixed", rows, 1024, 2048, b_dtype=dtype, prologue=Prologue(dequant=Dequant())),
            product(X, Y),
            ROW,
        )
        for dtype, rows in (("int8", 256), ("float8_e4m3fn", 16))
    },
    **{
        f"mixed_{dtype}_{rows}": Case(
            mm("mixed", rows, 1000, k, kind, b_dtype=dtype, prologue=prologue),
            Epilogue(((kind, apply("relu", apply("add", X, Y))),), (ROW, *groups), packed=packed),
        )
        for dtype, rows, k, kind, prologue, groups, packed in (
            ("uint4", 256, 2112, BF16, GROUPS, (Tensor(BF16, "group"),), Packed(True, 8)),
            ("int4", 256, 2112, BF16, GROUPS, (Tensor(BF16, "group"),), Packed(False, 3)),
            # Few rows divide K.
            ("uint4", 16, 4096, BF16, GROUPS, (Tensor(BF16, "group"),), Packed()),
            ("int4", 100, 512, "float16", HALF_GROUPS, (HALF_SCALES,), Packed(True)),
            ("uint4", 300, 480, "float16", Prologue(dequant=Dequant()), (), Packed(False, 7)),
        )
    },
    "grouped": plain(mm("grouped", 2048, 1024, 512, batch=8)),
    "grouped_pingpong": plain(mm("grouped", 2048, 1024, 512, batch=8), only=PINGPONG),
}


@functools.cache
def device() -> Device:
    return Device.from_torch(torch.cuda.get_device_properties(0))


def config_of(case: Case) -> CutlassConfig:
    """The best kernel for a case; skips if the GPU has none."""
    options = dict(case.options)
    level = options.pop("level", 0)
    # For any size, as these are too small for candidates.
    results = rank(case.problem, device(), 1, case.only, level)
    if not results and case.only == STREAM_K:
        cooperative = rank(case.problem, device(), 1, Filter("cooperative", "stream_k"))
        results = [
            (dataclasses.replace(item, scheduler="stream_k"), us) for item, us in cooperative
        ]
    if not results:
        pytest.skip(f"no kernel for {device().name}")
    return dataclasses.replace(results[0][0], **options)


def source_of(case: Case) -> Source:
    return source(config_of(case), case.epilogue)


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest) -> ArtifactStore:
    """A store with the kernels of all selected cases."""
    for part in (components.probe("nvcc"), components.probe("cutlass")):
        if not part.available:
            pytest.skip(f"no {part.title}: {part.why}")
    result = ArtifactStore(kernel_folder(), 4 << 30)
    problems = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_results_match_float64
    }
    sources = {}
    for name in problems:
        try:
            output = source_of(CASES[name])
        except pytest.skip.Exception:
            continue
        sources[output.name] = output
    # A failed build is reported by the test that needs it.
    build_all(list(sources.values()), result, Toolchain.find())
    return result


def values_of(operand: Operand, shape: tuple[int, ...], k: int) -> torch.Tensor:
    """Random elements in the operand's layout, so that results are of the order of 1."""
    *batch, rows, columns = shape
    if operand.layout == "column":
        shape = (*batch, columns, rows)
    if operand.dtype in INT4:
        # Two values along K per byte.
        (rows, columns) = shape
        return torch.randint(0, 256, (rows, columns // 2), device="cuda", dtype=torch.uint8).mT
    dtype = getattr(torch, operand.dtype)
    if dtype == torch.int8:
        result = torch.randint(-100, 100, shape, device="cuda", dtype=dtype)
    else:
        result = (torch.randn(shape, device="cuda") / k**0.25).to(dtype)
    return result.mT if operand.layout == "column" else result


def inputs_of(case: Case) -> list[torch.Tensor]:
    problem = case.problem
    batch = (problem.batch,) if problem.operation in ("bmm", "baddbmm") else ()
    sizes = {
        "matrix": (*batch, problem.m, problem.n),
        "row": (1, problem.n),
        "column": (problem.m, 1),
        "scalar": (1, 1),
    }
    if problem.dequant is not None and problem.dequant.group:
        sizes["group"] = (problem.n, problem.k // problem.dequant.group)
    return [
        torch.randn(sizes[inp.broadcast], device="cuda").to(getattr(torch, inp.dtype))
        for inp in case.epilogue.inputs
    ]


def launch(kernel: Kernel, config: CutlassConfig, *tensors: Any, **options: Any) -> None:
    arguments = call(config, *tensors, sms=device().sms, **options)
    size = kernel.workspace_size(arguments)
    assert size is not None, "the kernel cannot run this call"
    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    assert kernel.run(arguments, workspace.data_ptr(), stream) == 0
    torch.cuda.synchronize()


def factors_of(problem: GemmProblem) -> tuple[torch.Tensor, torch.Tensor]:
    batched = problem.operation in ("bmm", "baddbmm")
    a_batch = (problem.batch,) if batched else ()
    b_batch = (problem.batch,) if batched or problem.operation == "grouped" else ()
    return (
        values_of(problem.a, (*a_batch, problem.m, problem.k), problem.k),
        values_of(problem.b, (*b_batch, problem.k, problem.n), problem.k),
    )


def dequantized(case: Case, b: torch.Tensor, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Operand b in float64."""
    packed, scales = case.epilogue.packed, case.epilogue.scales
    if packed is None:
        return b.double()
    signed = case.problem.b.dtype == "int4"
    numbers = unpack_int4(b.mT, signed, packed.high_first).to(torch.float64) - packed.zero
    if scales is not None:
        wide = inputs[scales].double().repeat_interleave(case.problem.dequant.group, 1)  # type: ignore[union-attr]
        # In the dtype in which it is multiplied, that of the other operand.
        numbers = (numbers * wide).to(inputs[scales].dtype).double()
    return numbers.mT


@pytest.mark.parametrize("name", CASES)
def test_results_match_float64(store: ArtifactStore, name: str) -> None:
    case, problem = CASES[name], CASES[name].problem
    config = config_of(case)
    assert why_not(problem, config, device()) == []
    kernel = load(source(config, case.epilogue), store)
    torch.manual_seed(0)
    a, b = factors_of(problem)
    inputs = inputs_of(case)
    grouped = problem.operation == "grouped"
    shape = (*(() if grouped else a.shape[:-2]), problem.m, problem.n)
    outputs = [
        torch.full(shape, 77, device="cuda", dtype=getattr(torch, dtype))
        for dtype, _ in case.epilogue.outputs
    ]
    ends = None
    if grouped:
        # One group is empty, and no group is a multiple of a tile.
        sizes = [100, 0, 333, 257, 500, 58, 400, 400]
        ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    launch(kernel, config, a, b, outputs[0], inputs, outputs[1:], ends=ends, scalars=case.scalars)
    if grouped:
        rows = itertools.pairwise([0, *ends.tolist()])
        exact = torch.cat(
            [a[i:j].double() @ b[group].double() for group, (i, j) in enumerate(rows)]
        )
    else:
        exact = a.double() @ dequantized(case, b, inputs)
    expected = _exactly(case.epilogue, exact, inputs, case.scalars)
    for result, wanted, (dtype, _) in zip(outputs, expected, case.epilogue.outputs, strict=True):
        epilogue = dataclasses.replace(problem.epilogue, out=dtype)
        allowed = bound(dataclasses.replace(problem, epilogue=epilogue))
        scale = wanted.square().mean().sqrt().item()
        # Fast functions of activations are good to float32.
        assert error(result, wanted, scale) <= 2 * allowed + 1e-6, config.name


def _exactly(
    epilogue: Epilogue, accumulator: torch.Tensor, inputs: list[torch.Tensor], scalars: Any
) -> list[torch.Tensor]:
    """The outputs in float64."""

    def value(node: Node) -> torch.Tensor:
        operands = [value(argument) for argument in node.arguments]
        if node.operation == "accumulator":
            return accumulator
        if node.operation == "read":
            return inputs[node.index].double()
        if node.operation in ("constant", "parameter"):
            number = node.value if node.operation == "constant" else scalars[node.index]
            return torch.tensor(number, dtype=torch.float64, device="cuda")
        name = {"truediv": "true_divide"}.get(node.operation, node.operation)
        result: torch.Tensor = getattr(torch, name)(*operands)
        return result

    return [value(node).expand(accumulator.shape) for _, node in epilogue.outputs]


def test_one_binary_serves_other_shapes(store: ArtifactStore) -> None:
    """Also other strides, batches, swizzles and raster orders."""
    case = CASES["mm_rc"]
    config = config_of(case)
    kernel = load(source(config, case.epilogue), store)
    for m, n, k in ((64, 64, 64), (1, 8, 8), (1000, 4096, 72), (3000, 520, 2048)):
        for swizzle, raster in ((1, "along_m"), (8, "along_n")):
            changed = dataclasses.replace(config, swizzle=swizzle, raster=raster)  # type: ignore[arg-type]
            a, b = (
                torch.randn(rows, k + 8, device="cuda", dtype=torch.bfloat16)[:, :k]
                for rows in (m, n)
            )
            out = torch.full((m, n), 77.0, device="cuda", dtype=torch.bfloat16)
            launch(kernel, changed, a, b.t(), out)
            exact = a.double() @ b.double().t()
            scale = exact.square().mean().sqrt().item()
            assert error(out, exact, scale) <= 2 * bound(mm("mm", m, n, k))


def test_results_of_stream_k_have_the_same_bits_each_time(
    store: ArtifactStore,
) -> None:
    case = CASES["stream_k_1024x256x1024"]
    config = config_of(case)
    kernel = load(source(config, case.epilogue), store)
    a, b = factors_of(case.problem)
    outs = [torch.empty(1024, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for out in outs:
        launch(kernel, config, a, b, out)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_unaligned_operands_are_refused(
    store: ArtifactStore,
) -> None:
    case = CASES["mm_rc"]
    config = config_of(case)
    if config.arch != 90:
        pytest.skip("nothing is refused without TMA")
    kernel = load(source(config, case.epilogue), store)
    a, b = torch.zeros(64, 68, device="cuda"), torch.zeros(64, 68, device="cuda")
    half = (a.bfloat16(), b.bfloat16().t(), torch.empty(64, 64, device="cuda").bfloat16())
    assert kernel.workspace_size(call(config, *half)) is None


def test_the_graph_of_a_launch_can_be_replayed(store: ArtifactStore) -> None:
    case = CASES["addmm_row"]
    config = config_of(case)
    kernel = load(source(config, case.epilogue), store)
    a, b = torch.randn(256, 64, device="cuda").bfloat16(), torch.randn(64, 512, device="cuda")
    b = b.bfloat16().t().contiguous().t()
    bias = torch.randn(1, 512, device="cuda").bfloat16()
    out = torch.zeros(256, 512, device="cuda", dtype=torch.bfloat16)
    arguments = call(config, a, b, out, [bias], scalars=ALPHA_BETA, sms=device().sms)
    size = kernel.workspace_size(arguments)
    assert size is not None
    workspace = torch.empty(max(1, size), dtype=torch.uint8, device="cuda")
    # The first launch sets attributes of the kernel.
    assert kernel.run(arguments, workspace.data_ptr(), 0) == 0
    torch.cuda.synchronize()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        assert kernel.run(arguments, workspace.data_ptr(), stream) == 0
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
