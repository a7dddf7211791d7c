"""CUTLASS kernels among the choices for products: which products ask for them, what is decided, and
what becomes of the graph. Nothing is built.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config

pytest.importorskip("triton")

from torch._dynamo.utils import counters
from torch.nn import functional

from benchmarks.gemm.models import int4_linear
from inductor_ext import config, events
from inductor_ext.autotune import (
    accuracy,
    cutlass_kernels,
    cutlass_options,
    decide,
    inductor_benchmark,
    reference,
)
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import scope
from inductor_ext.lowerings import cutlass_call
from inductor_ext.report import gemm_report as gemm_report
from inductor_ext.templates import kernels
from inductor_ext.templates.cutlass import background_build, runtime
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue as Tree
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import ProductRecord
from inductor_ext.templates.triton import ranking
from test.support import fake_cuda, kernel_util
from test.support.gemm_strategies import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

H200 = device("NVIDIA H200")
HALF, F32 = torch.bfloat16, torch.float32
ASKED = {"max_autotune_gemm_backends": "ATEN,cutlass"}
FUSES = {**ASKED, "cutlass__cutlass_epilogue_fusion_enabled": True}

Given = tuple[Sequence[Any], torch.dtype]
Rule = Callable[[GemmProblem], "kernels.Config | None"]


@dataclasses.dataclass
class Call:
    """A launch that was lowered."""

    config: CutlassConfig
    tree: Tree
    a: Any
    b: Any
    inputs: Sequence[Any]
    layouts: Sequence[Any]
    scalars: Sequence[Any]
    ends: Any


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The launches of what is lowered; no kernel is built."""
    found: list[Call] = []
    launch = cutlass_call.add_launch

    def call(
        config: Any, tree: Any, a: Any, b: Any, inputs: Any, layouts: Any, **rest: Any
    ) -> tuple[Any, ...]:
        found.append(Call(config, tree, a, b, inputs, layouts, **rest))
        return launch(config, tree, a, b, inputs, layouts, **rest)

    monkeypatch.setattr(cutlass_call, "add_launch", call)
    monkeypatch.setattr(cutlass_call.nvcc_build, "build", lambda *_: None)
    kernel = types.SimpleNamespace(workspace_size=lambda *_: 4096)
    monkeypatch.setattr(cutlass_call.runtime, "load", lambda *_, **__: kernel)
    monkeypatch.setattr(cutlass_kernels, "prepare", lambda *_: {})
    monkeypatch.setattr(cutlass_kernels, "missing", lambda: None)
    return found


def best(problem: GemmProblem) -> CutlassConfig | None:
    """The CUTLASS kernel that the model ranks first."""
    if problem.epilogue.tree is None:
        return None
    found = cutlass_options.Options().rank(problem, H200)
    return found[0][0] if found else None


def lower(
    rule: Rule, function: Callable[..., Any], *inputs: Any, **options: Any
) -> tuple[fake_cuda.Lowered, list[GemmProblem]]:
    asked: list[GemmProblem] = []

    def remembered(problem: GemmProblem) -> kernels.Config | None:
        asked.append(problem)
        return rule(problem)

    with scope.compile_scope(config.snapshot({})), decide.force_config(remembered):
        return fake_cuda.lower(function, *inputs, **{**FUSES, **options}), asked


def operations_of(call: Call) -> list[str]:
    return [node.operation for node in call.tree.nodes() if node.arguments]


def matrix(*shape: Any, dtype: torch.dtype = HALF) -> Given:
    return shape, dtype


def test_what_follows_is_in_the_kernel(calls: list[Call]) -> None:
    before = counters["inductor"]["cutlass_epilogue_fusion_counter"]
    lowered, _ = lower(
        best,
        lambda x, w, b, r: torch.relu(functional.linear(x, w, b)) + r,
        matrix(512, 256),
        matrix(384, 256),
        matrix(384),
        matrix(512, 384),
    )
    (call,) = calls
    assert [node.operation for node in call.tree.nodes() if node.arguments] == [
        "add",
        "relu",
        "add",
    ]
    assert not lowered.kernels()
    assert counters["inductor"]["cutlass_epilogue_fusion_counter"] == before + 1


def test_nothing_follows_in_the_kernel_where_ops_round(calls: list[Call]) -> None:
    with inductor_config.patch(emulate_precision_casts=True):
        lower(best, lambda x, w: torch.relu(x @ w) * 3, matrix(512, 256), matrix(256, 384))
    (call,) = calls
    assert operations_of(call) == []


def linear(*shapes: Any) -> list[Given]:
    return [matrix(*shape) for shape in shapes]


def quantized(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.silu((x @ w.to(x.dtype).t()) * scale)


def packed(x: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(b + int4_linear(x, w, scales))


def signed(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights in two's complement, the first of two in the lower half, with scales of columns."""
    numbers = torch.stack((w & 15, w >> 4), dim=-1).flatten(-2)
    weight = (numbers.to(torch.int8) ^ 8) - 8
    return functional.silu((x @ weight.to(x.dtype).t()) * scale)


def scaled(a: Any, b: Any, s: Any, t: Any, bias: Any) -> torch.Tensor:
    out = torch._scaled_mm(a, b.t(), s, t, bias=bias, out_dtype=HALF)
    return functional.gelu(out, approximate="tanh")


FP8 = torch.float8_e4m3fn
XW: Any = ((512, 256), (384, 256))

GRAPHS: dict[str, tuple[Callable[..., Any], list[Given], str | None]] = {
    "mm": (lambda x, w: x @ w.t(), linear(*XW), ""),
    "unary": (
        lambda x, w: torch.tanh(torch.exp(-torch.abs(x @ w.t())).sqrt().rsqrt().log()),
        linear(*XW),
        "abs neg exp sqrt rsqrt log tanh",
    ),
    "gelu": (lambda x, w: functional.gelu(x @ w.t()), linear(*XW), "mul mul erf add mul"),
    "gelu tanh": (lambda x, w: functional.gelu(x @ w.t(), approximate="tanh"), linear(*XW), None),
    "clamp": (
        lambda x, w: torch.clamp(functional.relu6(x @ w.t()) / 3.5 - 1.5, -0.5, 0.5),
        linear(*XW),
        None,
    ),
    "where": (
        lambda x, w, r: torch.where(r > 0.25, 1 - x @ w.t(), r * 2.5),
        linear(*XW, (512, 384)),
        None,
    ),
    "sizes": (lambda x, w: (x @ w.t()) / 256 * 384**-0.5 + 512, linear(*XW), None),
    "bias and residual": (
        lambda x, w, b, r: torch.relu(functional.linear(x, w, b)) + r,
        linear(*XW, (384,), (512, 384)),
        "add relu add",
    ),
    "bias of rows": (
        lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2.0, beta=0.4),
        linear(*XW, (512, 1)),
        "mul mul add",
    ),
    "one number": (lambda x, w, s: (x @ w.t()) * s, [*linear(*XW), ((), F32)], "mul"),
    "batch": (
        lambda x, w, r: torch.sigmoid(torch.baddbmm(r, x, w, alpha=0.5)),
        linear((3, 64, 128), (3, 128, 96), (3, 64, 96)),
        "mul add sigmoid",
    ),
    "two outputs": (
        lambda x, w: ((y := x @ w.t()), torch.relu(y) * 1.5),
        linear(*XW),
        "relu mul",
    ),
    "scaled residual": (
        lambda x, w, r: torch.add(torch.relu(x @ w.t()), r, alpha=0.3),
        linear(*XW, (512, 384)),
        "relu mul add",
    ),
    "a value and what is computed of it": (
        lambda x, w: ((y := torch.square(x @ w.t())), y / (torch.abs(y) + 1)),
        linear(*XW),
        "square abs add truediv",
    ),
    "sequence": (
        lambda x, w, b, r: functional.silu(functional.linear(x, w, b)) + r,
        linear((4, 128, 256), (384, 256), (384,), (4, 128, 384)),
        None,
    ),
    "int8": (
        lambda a, b, s: (torch._int_mm(a, b.t()) * s).to(HALF),
        [
            matrix(512, 256, dtype=torch.int8),
            matrix(384, 256, dtype=torch.int8),
            matrix(512, 1, dtype=F32),
        ],
        "mul",
    ),
    "mixed": (
        quantized,
        [matrix(512, 256), matrix(384, 256, dtype=torch.int8), matrix(384)],
        "mul neg exp add truediv",
    ),
    "mixed, scaled before": (
        lambda x, w, s, b: torch.relu(functional.linear(x, w.to(x.dtype) * s, b)),
        [matrix(4, 128, 256), matrix(384, 256, dtype=FP8), matrix(384, 1), matrix(384)],
        "mul add relu",
    ),
    "int4": (
        packed,
        [
            matrix(512, 256),
            matrix(384, 128, dtype=torch.uint8),
            matrix(384, 4),
            matrix(384),
        ],
        "add relu",
    ),
    "int4, signed": (
        signed,
        [matrix(512, 256), matrix(384, 128, dtype=torch.uint8), matrix(384)],
        "mul neg exp add truediv",
    ),
    "fp8 by tensor": (
        lambda a, b, s: torch._scaled_mm(a, b.t(), s, s, out_dtype=F32, use_fast_accum=True),
        [matrix(512, 256, dtype=FP8), matrix(384, 256, dtype=FP8), matrix(dtype=F32)],
        "mul mul",
    ),
    "fp8": (
        scaled,
        [
            matrix(512, 256, dtype=FP8),
            matrix(384, 256, dtype=FP8),
            matrix(512, 1, dtype=F32),
            matrix(1, 384, dtype=F32),
            matrix(384),
        ],
        None,
    ),
    "grouped": (
        lambda a, b, ends: torch.relu(torch._grouped_mm(a, b.transpose(-1, -2), offs=ends)),
        [matrix(512, 256), matrix(4, 384, 256), matrix(4, dtype=torch.int32)],
        "relu",
    ),
}


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_measured_is_what_is_used(name: str, fuses: bool, calls: list[Call]) -> None:
    """The program of a problem asks for the very kernel that the model's graph asks for."""
    function, inputs, operations = GRAPHS[name]
    _, asked = lower(best, function, *inputs, cutlass__cutlass_epilogue_fusion_enabled=fuses)
    (used,) = calls
    if fuses and operations is not None:
        assert [
            node.operation for node in used.tree.nodes() if node.arguments
        ] == operations.split()
    problem = next(item for item in asked if item.epilogue.tree == used.tree)
    bench = inductor_benchmark.InductorBench("cuda:0")
    with (
        fake_cuda.device(),
        scope.compile_scope(config.snapshot({})),
        mock.patch.object(inductor_benchmark, "_load", lambda code, _: code),
        inductor_config.patch(compile_threads=1),
        inductor_benchmark._untraced(),
    ):
        (code,) = bench.compile([(problem, used.config)], lambda index: None)
    assert "extern_kernels." not in code
    measured = calls[1]
    assert (measured.config, measured.tree) == (used.config, used.tree)


@pytest.mark.skipif(
    not kernel_util.takes_strided_offsets(), reason="this torch takes no other offsets"
)
def test_the_ends_of_groups_are_neighbours(calls: list[Call]) -> None:
    function, (a, b, _), _ = GRAPHS["grouped"]
    apart = torch.empty_strided((4,), (2,), dtype=torch.int32, device="meta")
    lower(best, function, a, b, apart)
    (call,) = calls
    assert [*call.ends.get_stride()] == [1]


@pytest.mark.parametrize("name", GRAPHS)
def test_the_program_of_a_tree_equals_float64(name: str, calls: list[Call]) -> None:
    if name == "grouped" or name.startswith("fp8"):
        pytest.skip("the CPU has no such operator")
    function, inputs, _ = GRAPHS[name]
    _, asked = lower(best, function, *inputs)
    problem = next(item for item in asked if item.epilogue.tree == calls[0].tree)
    program = reference.program(problem)
    tensors = program.make_inputs("cpu")
    verifier = accuracy.Verifier(program, tensors)
    outputs = program.function(*tensors)
    verifier.set_stock(outputs)
    assert verifier.check(lambda: outputs) is None
    assert [str(output.dtype).removeprefix("torch.") for output in outputs] == [
        dtype for dtype, _ in calls[0].tree.outputs
    ]


# --- which products ask for CUTLASS kernels ---


def product(*shapes: Any, **options: Any) -> set[bool]:
    """Whether the problems that a product asks about have trees."""
    _, asked = lower(lambda _: None, lambda x, w: x @ w.t(), *linear(*shapes), **options)
    return {item.epilogue.tree is not None for item in asked}


@pytest.mark.parametrize("section", ["cutlass", "cuda"])
def test_only_matmuls_from_the_threshold_on_use_cutlass(section: str, calls: list[Call]) -> None:
    size = 512 * 384 * 256
    for least, expected in ((size - 1, 1), (size, 1), (size + 1, 0)):
        calls.clear()
        option = {f"{section}__cutlass_backend_min_gemm_size": least}
        lowered, _ = lower(best, lambda x, w: x @ w.t(), *linear(*XW), **option)
        assert len(calls) == expected
        assert lowered.code.count("extern_kernels.mm(") == 1 - expected


def test_nobody_else_s_problems_have_trees() -> None:
    assert product(*XW) == {True, False}
    assert product(*XW, max_autotune_gemm_backends="ATEN,TRITON") == {False}
    assert product(*XW, cutlass__cutlass_enabled_ops="bmm") == {False}
    # A width that is known only at run time may be aligned to nothing.
    assert product((512, 256), ("n", 256)) == {False}


@pytest.mark.parametrize("name", ["bias and residual", "mixed", "sequence", "two outputs"])
def test_an_m_bucket_is_split_at_the_threshold(name: str, calls: list[Call]) -> None:
    function, (x, w, *others), _ = GRAPHS[name]
    known: dict[Any, str] = {512: "rows", 128: "rows"}
    inputs = [
        w if other is w else ([known.get(size, size) for size in other[0]], other[1])
        for other in (x, w, *others)
    ]
    lowered, asked = lower(
        best, function, *inputs, cutlass__cutlass_backend_min_gemm_size=100 * 384 * 256
    )
    told = {item.m for item in asked if item.epilogue.tree is not None}
    assert min(told) == 256
    assert max({item.m for item in asked} - told) == 99
    (condition,) = {line for line in lowered.code.splitlines() if " <= 99" in line}
    assert condition
    # Both sizes above want the same kernel, or one each.
    assert len({str(operations_of(call)) for call in calls}) == 1
    assert operations_of(calls[0])
    assert len(re.findall(r"extern_kernels\.(mm|addmm)\(", lowered.code)) == 1


# --- what is decided ---


class Tuned:
    """Tuning that is stood in for, and what it was asked about."""

    def __init__(self) -> None:
        self.asked: list[GemmProblem] = []

    def __call__(self, problems: Any, *_: Any, **__: Any) -> dict[GemmProblem, Decision]:
        self.asked += problems
        found = {}
        for problem in problems:
            candidates = cutlass_options.current().rank(problem, H200)
            configs = [config for config, _ in candidates] if problem.epilogue.tree else []
            timings = (Timing(None, 20.0), *(Timing(config, 10.0) for config in configs))
            chosen = configs[0] if configs else None
            found[problem] = Decision(chosen, "measured", timings)
        return found


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    from inductor_ext.autotune import tuner

    found = Tuned()
    monkeypatch.setattr(tuner, "tune", found)
    return found


def compiled(
    function: Callable[..., Any], *inputs: Any, folder: Any = None, **options: Any
) -> fake_cuda.Lowered:
    """What a function becomes where what is known decides, and what is measured."""
    told = {"tuning_cache": folder is not None, "tuning_cache_dir": str(folder)}
    asked = {**FUSES, "max_autotune": True, **options}
    with scope.compile_scope(config.snapshot(told)):
        return fake_cuda.lower(function, *inputs, **asked)


def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.t())


@pytest.mark.parametrize("denied", [False, True])
def test_lists_leave_only_or_none_of_pingpong(
    denied: bool, tuned: Tuned, calls: list[Call]
) -> None:
    name = "cutlass_op_denylist_regex" if denied else "cutlass_op_allowlist_regex"
    compiled(plain, *linear(*XW), **{f"cutlass__{name}": "pingpong"})
    assert [("pingpong" in call.config.name) for call in calls] == [not denied]


@pytest.mark.parametrize(
    "option",
    [
        {"cutlass__cutlass_op_denylist_regex": "."},
        {"cutlass__cutlass_max_profiling_configs": 0},
        {"cutlass__cutlass_enabled_ops": "addmm"},
    ],
)
def test_without_candidates_cutlass_is_not_probed(
    option: dict[str, Any], tuned: Tuned, calls: list[Call]
) -> None:
    lowered = compiled(
        plain, *linear(*XW), **{**option, "max_autotune_gemm_backends": "TRITON,CUTLASS"}
    )
    assert [item.epilogue.tree for item in tuned.asked] == [None]
    assert not calls
    assert "extern_kernels.mm(" in lowered.code
    # Nor are stock's own kernels of CUTLASS.
    assert lowered.choices in ((), (("mm",),))


def test_what_is_known_is_used_by_compiles_that_measure_nothing(
    tuned: Tuned, calls: list[Call], tmp_path: Any
) -> None:
    compiled(plain, *linear(*XW), folder=tmp_path)
    assert len(tuned.asked) == len(calls) == 1
    for options, expected in (
        ({"max_autotune": False}, 1),
        ({"max_autotune": False, "cutlass__cutlass_op_denylist_regex": "."}, 0),
        ({"max_autotune": False, "max_autotune_gemm_backends": "TRITON"}, 0),
        # Under other settings it is measured again.
        ({"cutlass__cutlass_max_profiling_configs": 5}, 1),
    ):
        calls.clear()
        compiled(plain, *linear(*XW), folder=tmp_path, **options)
        assert len(calls) == expected
    assert len(tuned.asked) == 2


def test_without_nvcc_cutlass_results_are_not_used(
    tuned: Tuned,
    calls: list[Call],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled(plain, *linear(*XW), folder=tmp_path)
    calls.clear()
    tuned.asked.clear()
    monkeypatch.setattr(events, "_warned", set())
    monkeypatch.setattr(cutlass_kernels, "can_build", lambda: False)
    monkeypatch.setattr(
        cutlass_kernels, "prepare", lambda wanted, _: dict.fromkeys(wanted, "there is no nvcc")
    )
    both = {"max_autotune_gemm_backends": "TRITON,CUTLASS"}
    for _ in range(2):
        lowered = compiled(plain, *linear(*XW), folder=tmp_path)
        assert "extern_kernels.mm(" in lowered.code
    compiled(plain, *linear((256, 256), (384, 256)), folder=tmp_path, **both)
    assert [(item.m, item.epilogue.tree) for item in tuned.asked] == [(256, None)]
    assert not calls
    (warning,) = (message for message in caplog.messages if "there is no nvcc" in message)
    assert "falls back to Inductor (default)" in warning


def test_background_builds_are_measured_when_ready(
    tuned: Tuned, calls: list[Call], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    monkeypatch.setattr(cutlass_kernels, "missing", lambda: None)
    monkeypatch.setattr(
        background_build, "build_later", lambda sources, _: [] if there else list(sources)
    )
    settings = {"cutlass_background": True, "artifact_cache_dir": str(tmp_path)}
    both = {"max_autotune_gemm_backends": "TRITON,CUTLASS"}
    with config.patch(**settings):
        compiled(plain, *linear(*XW), folder=tmp_path, **both)
        assert not calls
        there.append(True)
        compiled(plain, *linear(*XW), folder=tmp_path, **both)
        assert len(calls) == 1
        # What is decided needs its kernel, too.
        there.clear()
        calls.clear()
        compiled(plain, *linear(*XW), folder=tmp_path, **both)
    assert not calls
    assert [item.epilogue.tree is None for item in tuned.asked] == [True, False]


def test_a_compile_is_another_one_once_kernels_are_there(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutlass_kernels, "missing", lambda: None)
    settings = config.snapshot({"cutlass_background": True, "artifact_cache_dir": str(tmp_path)})
    empty = cutlass_kernels.generation(settings)
    with runtime.store(settings).publish("0" * 64) as folder:
        (folder / "kernel.so").touch()
    assert cutlass_kernels.generation(settings) != empty
    # Who waits for them gets the same in any case; who cannot build them does not.
    waiting = config.snapshot({"artifact_cache_dir": str(tmp_path)})
    assert cutlass_kernels.generation(waiting) == "all"
    monkeypatch.setattr(cutlass_kernels, "missing", lambda: "there is no nvcc")
    found = {cutlass_kernels.generation(item) for item in (waiting, settings)}
    assert len(found) == 1
    assert not found & {"all", empty}


class GatesTuned(Tuned):
    """One kernel for a gate saves so much of 100 us; CUTLASS's, with what follows, 30 us of 60."""

    def __init__(self, saved: float) -> None:
        super().__init__()
        self.saved = saved

    def __call__(self, problems: Any, *_: Any, **__: Any) -> dict[GemmProblem, Decision]:
        self.asked += problems
        return {problem: self.decision(problem) for problem in problems}

    def decision(self, problem: GemmProblem) -> Decision:
        chosen: kernels.Config | None = None
        stock, ours = 50.0, 55.0
        if problem.epilogue.gated:
            ((chosen, _),) = ranking.rank(problem, H200, 1)
            stock, ours = 100.0, 100.0 - self.saved
        elif problem.epilogue.tree:
            chosen = cutlass_options.current().rank(problem, H200)[0][0]
            stock, ours = 60.0, 30.0
        timings = (Timing(None, stock), *((Timing(chosen, ours),) if chosen else ()))
        return Decision(chosen, "measured", timings)


def gated(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return functional.silu(x @ w.t()) * (x @ v.t())


def turned(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    up = functional.linear(x, v)
    return up * functional.silu(functional.linear(x, w))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(gated, ((512, 256),) + ((384, 256),) * 2), (turned, ((4, 128, 256),) + ((384, 256),) * 2)],
)
@pytest.mark.parametrize("saved", [20.0, 40.0])
def test_a_gate_is_one_kernel_only_if_that_saves_most(
    function: Callable[..., Any],
    shapes: Any,
    saved: float,
    calls: list[Call],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from inductor_ext.autotune import tuner

    monkeypatch.setattr(tuner, "tune", GatesTuned(saved))
    both = {"max_autotune_gemm_backends": "TRITON,CUTLASS"}
    with events.capture(ProductRecord) as records:
        lowered = compiled(function, *linear(*shapes), **both)
    if saved > 30:
        assert not calls
        assert len(lowered.kernels()) == len(records) == 1
        return
    computed = [operations_of(call) for call in calls]
    # Of each pair, one kernel computes what follows both.
    assert sorted(item[-1:] for item in computed if item) == [["mul"]]
    assert not lowered.kernels()
    declined = [item for record in records for item in record.declined]
    assert declined
    assert all("fusing one of the GEMMs alone saves more" in item for item in declined)


def test_values_used_only_by_an_epilogue_are_not_inputs(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    from inductor_ext.autotune import tuner

    def function(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.t()) + torch.exp(y)

    monkeypatch.setattr(tuner, "tune", GatesTuned(0.0))
    compiled(function, *linear(*XW, (512, 384)))
    assert [operations_of(call) for call in calls] == [[]]


# --- what a kernel takes of the graph ---


def test_a_shared_epilogue_belongs_to_one_matmul(calls: list[Call]) -> None:
    lowered, _ = lower(
        best, lambda x, w, y, v: torch.relu(x @ w.t() + y @ v.t()), *linear(*XW, *XW)
    )
    assert [operations_of(call) for call in calls] == [[], ["add", "relu"]]
    assert not lowered.kernels()


def test_nothing_is_computed_before_what_it_needs(calls: list[Call]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w.t())
        return y + torch.softmax(y, -1)

    lower(best, function, *linear(*XW))
    assert [operations_of(call) for call in calls] == [["relu"]]


def test_a_matmul_and_its_epilogue_are_both_stored(calls: list[Call]) -> None:
    before = counters["inductor"]["cutlass_epilogue_fusion_counter"]
    lowered, _ = lower(best, GRAPHS["two outputs"][0], *linear(*XW))
    (call,) = calls
    assert [str(layout.dtype) for layout in call.layouts] == ["torch.bfloat16"] * 2
    assert counters["inductor"]["cutlass_epilogue_fusion_counter"] == before + 1
    assert not lowered.kernels()


def test_what_cannot_be_expressed_is_left_out(calls: list[Call]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w.t()
        z = torch.relu(y)
        return y, z, torch.sin(z * torch.sigmoid(z)) + y

    lower(best, function, *linear(*XW))
    (call,) = calls
    assert operations_of(call) == ["relu"]
    # What is only on the way to the sine is not stored.
    assert len(call.layouts) == 2

    calls.clear()
    lower(best, lambda x, w: torch.sin(y := torch.relu(x @ w.t())) * y, *linear(*XW))
    (call,) = calls
    assert operations_of(call) == ["relu"]
    assert len(call.layouts) == 1


def test_a_sequence_is_computed_as_rows(calls: list[Call]) -> None:
    lowered, _ = lower(best, GRAPHS["sequence"][0], *GRAPHS["sequence"][1])
    (call,) = calls
    assert [list(layout.size) for layout in call.layouts] == [[512, 384]]
    assert [list(inp.get_size()) for inp in call.inputs] == [[384], [512, 384]]
    assert "(4, 128, 384)" in lowered.code


def test_scalars_known_at_the_call_are_arguments(calls: list[Call]) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w.t()) / x.shape[0] + 0.5

    lower(best, function, *linear(("rows", 256), (384, 256)))
    assert {call.tree.parameters for call in calls} == {1}
    assert all(not call.scalars[0].is_number for call in calls)


def test_without_fusion_what_follows_has_a_kernel_of_its_own(calls: list[Call]) -> None:
    lowered, _ = lower(best, plain, *linear(*XW), cutlass__cutlass_epilogue_fusion_enabled=False)
    (call,) = calls
    assert operations_of(call) == []
    assert len(lowered.kernels()) == 1


def test_reports_say_what_a_kernel_takes_in(calls: list[Call]) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w.t()) * 2.0
        return torch.softmax(y, -1) @ v

    with gemm_report.listen() as found:
        lower(best, program, *linear(*XW, (384, 128)))
        first, second = found()
    assert first.record.operator == "fused"
    assert first.fused == ("relu", "mul")
    assert first.separate
    assert all("cutlass_epilogue_fusion_enabled" in item for item in first.separate)
    assert second.fused == second.separate == ()
    assert "pingpong" in str(gemm_report.GemmReport("it", (first, second)))
