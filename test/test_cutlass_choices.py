"""CUTLASS kernels among the choices for products: which products ask for them, what is decided, and
what becomes of the graph. Launches are stood in for; nothing is built.
"""

from __future__ import annotations

import dataclasses
import sys
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

from inductor_ext import activation, config
from inductor_ext.selection import (
    choose,
    cutlass_kernels,
    cutlass_options,
    programs,
    variants,
    verify,
)
from inductor_ext.templates import families
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue as Tree
from inductor_ext.templates.problem import GemmProblem
from test import fake_cuda
from test.gemm_problems import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

H200 = device("NVIDIA H200")
HALF, F32 = torch.bfloat16, torch.float32
ASKED = {"max_autotune_gemm_backends": "ATEN,cutlass"}
FUSES = {**ASKED, "cutlass__cutlass_epilogue_fusion_enabled": True}

Given = tuple[Sequence[Any], torch.dtype]
Rule = Callable[[GemmProblem], "families.Config | None"]


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
    """The launches of what is lowered."""
    from torch._inductor.lowering import empty_strided
    from torch._inductor.virtualized import V

    found: list[Call] = []

    def call(
        config: Any, tree: Any, a: Any, b: Any, inputs: Any, layouts: Any, **rest: Any
    ) -> tuple[Any, ...]:
        found.append(Call(config, tree, a, b, inputs, layouts, **rest))
        outputs = [
            empty_strided(each.size, each.stride, dtype=each.dtype, device=each.device)
            for each in layouts
        ]
        for each in outputs:
            each.realize()
            # What is written to is not taken for what it was filled with.
            V.graph.mutated_buffers.add(each.get_name())
        return tuple(outputs)

    stand_in = types.SimpleNamespace(call=call)
    monkeypatch.setitem(sys.modules, "inductor_ext.lowerings.cutlass", stand_in)
    monkeypatch.setattr(cutlass_kernels, "prepare", lambda *_: {})
    monkeypatch.setattr(cutlass_kernels, "can_build", lambda: True)
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

    def remembered(problem: GemmProblem) -> families.Config | None:
        asked.append(problem)
        return rule(problem)

    with activation._scope(config.snapshot({})), choose.forced(remembered):
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
    assert [each.operation for each in call.tree.nodes() if each.arguments] == [
        "add",
        "relu",
        "add",
    ]
    assert not lowered.kernels()
    assert counters["inductor"]["cutlass_epilogue_fusion_counter"] == before + 1


def linear(*shapes: Any) -> list[Given]:
    return [matrix(*each) for each in shapes]


def quantized(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return functional.silu((x @ w.to(x.dtype).t()) * scale)


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
    problem = next(each for each in asked if each.epilogue.tree == used.tree.text)
    bench = variants.InductorBench("cuda:0")
    with (
        fake_cuda.device(),
        activation._scope(config.snapshot({})),
        mock.patch.object(variants, "_load", lambda code, _: code),
        inductor_config.patch(compile_threads=1),
        variants._untraced(),
    ):
        (code,) = bench.compile([(problem, used.config)], lambda index: None)
    assert "extern_kernels." not in code
    measured = calls[1]
    assert (measured.config, measured.tree) == (used.config, used.tree)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_program_of_a_tree_equals_float64(name: str, calls: list[Call]) -> None:
    if name in ("grouped", "fp8"):
        pytest.skip("the CPU has no such operator")
    function, inputs, _ = GRAPHS[name]
    _, asked = lower(best, function, *inputs)
    problem = next(each for each in asked if each.epilogue.tree == calls[0].tree.text)
    program = programs.program(problem)
    tensors = program.make_inputs("cpu")
    verifier = verify.Verifier(program, tensors)
    outputs = program.function(*tensors)
    verifier.set_stock(outputs)
    assert verifier.check(lambda: outputs) is None
    assert [str(each.dtype).removeprefix("torch.") for each in outputs] == [
        dtype for dtype, _ in calls[0].tree.outputs
    ]
