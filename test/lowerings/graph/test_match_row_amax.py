"""Row amax from a matmul's kernel: which patterns match, and the kernel's results."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

pytest.importorskip("triton")

from torch.nn import functional as F

from inductor_ext import config
from inductor_ext.autotune import decide as choose
from inductor_ext.autotune.accuracy import Verifier
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.autotune.reference import program
from inductor_ext.hooks import scope
from inductor_ext.lowerings.graph import match_dequantized, match_row_amax
from inductor_ext.lowerings.graph.fusion_search import find_fusions
from inductor_ext.settings import Settings
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import EpilogueInput
from inductor_ext.templates.triton import cost_model, ranking, search_space
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from test.support import fake_cuda, kernel_compiler, kernel_interpreter
from test.support.gemm_graphs import lowered_graph, tensor
from test.support.gemm_strategies import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn
H200 = device("NVIDIA H200")

TILE = GemmConfig("cp_async", 16, 32, 32, 2, 2)
SWAPPED = GemmConfig("splitk", 16, 64, 32, 2, 2, swap_ab=True)
GEMV = GemmConfig("gemv", 4, 16, 64, 1, 2)
TMA = GemmConfig("persistent_tma", 64, 32, 32, 2, 4, group_m=2, tma=True, flatten=True)


def quantized(y: Tensor) -> tuple[Tensor, Tensor]:
    """Scaled by rows, as in torchao."""
    scale = (y.abs().amax(-1, keepdim=True) / 448.0).to(torch.float32)
    return (y.to(torch.float32) / scale).clamp(-448.0, 448.0).to(FP8), scale


def quantized_by_hand(y: Tensor) -> tuple[Tensor, Tensor]:
    """The same with powers of two, and another form of the row amax, in float32."""
    largest = y.float().abs().max(dim=-1, keepdim=True)[0].clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(448.0 / largest)))
    return (y * scale).to(FP8), scale.reciprocal()


def gate(x: Tensor, g: Tensor, u: Tensor) -> Tensor:
    return F.silu(F.linear(x, g)) * F.linear(x, u)


# What is found


X, X3, W, BIAS = tensor(32, 64), tensor(2, 16, 64), tensor(48, 64), tensor(48)


def find(
    function: Callable[..., Any], *inputs: Tensor, settings: Settings | None = None
) -> list[match_row_amax.RowAmaxFusion]:
    graph = lowered_graph(function, *inputs)
    settings = settings or Settings()
    fusions = [
        *find_fusions(graph, settings),
        *match_dequantized.find_dequantized_matmuls(graph, settings),
    ]
    return match_row_amax.find_row_amax_fusions(graph, settings, fusions)


def quantized_to_int8(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(-1, keepdim=True) / 127
    return (y / scale).round().clamp(-128, 127).to(torch.int8), scale


@pytest.mark.parametrize("scaled", [quantized, quantized_by_hand])
@pytest.mark.parametrize("x", [X, X3])
def test_a_gate_scaled_to_float8(scaled: Any, x: Tensor) -> None:
    (match,) = find(lambda *args: scaled(gate(*args)), x, W, W)
    assert match.problem.epilogue == Epilogue(gated=True, reductions=1, out="float8_e4m3fn")
    assert match.problem.quantized
    assert (match.problem.kernel_dtype, match.problem.stored_dtype) == ("bfloat16", "float8_e4m3fn")
    assert match.constants.absolute
    assert match.scaling[-1].meta["val"].dtype == FP8
    assert match.matmul is None


def test_a_linear_layer_with_bias_and_activation() -> None:
    (match,) = find(lambda x, w, b: quantized(F.gelu(F.linear(x, w, b))), X3, W, BIAS)
    epilogue = match.problem.epilogue
    assert epilogue.inputs == (EpilogueInput("bfloat16", "row"),)
    assert epilogue.pointwise > 4
    assert list(match.chain_inputs) == [match.nodes[0].args[0]]
    assert match.matmul is match.nodes[0]


def test_rows_of_unknown_sizes_seen_in_three_dimensions() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        y = torch.relu(x.flatten(0, 1) @ w.t()).view(x.shape[0], x.shape[1], 48)
        return quantized(y)

    graph = lowered_graph(function, X3, W, dynamic=[(0, 0), (0, 1)])
    (match,) = match_row_amax.find_row_amax_fusions(graph, Settings(), [])
    assert (match.problem.m, match.problem.quantized) == (32, True)


def test_rows_scaled_to_int8() -> None:
    (match,) = find(lambda x, w: quantized_to_int8(F.linear(x, w)), X, W)
    assert match.problem.epilogue == Epilogue(reductions=1, out="int8")
    assert match.problem.quantized


def test_a_norm_before_and_a_residual_behind() -> None:
    def function(x: Tensor, norm: Tensor, w: Tensor, r: Tensor) -> Any:
        y = r + F.linear(F.rms_norm(x, (64,), norm, 1e-5), w)
        return y, quantized(y)

    matches = find(function, X3, tensor(64), W, tensor(2, 16, 48))
    kinds = [case.problem.norm and case.problem.norm.kind for case in matches]
    assert kinds == ["rms", None]
    assert all(case.problem.epilogue.inputs[0].broadcast == "matrix" for case in matches)


def test_float8_layers_one_after_the_other() -> None:
    def function(x: Tensor, w: Tensor, xs: Tensor, ws: Tensor) -> Any:
        matmul = torch._scaled_mm(x, w.t(), xs, ws, out_dtype=torch.bfloat16)
        return quantized(F.relu(matmul))

    scales = tensor(32, 1, dtype=torch.float32), tensor(1, 48, dtype=torch.float32)
    (match,) = find(function, tensor(32, 64, dtype=FP8), tensor(48, 64, dtype=FP8), *scales)
    assert match.problem.operation == "scaled"
    assert len(match.chain_inputs) == 2


@pytest.mark.parametrize(
    ("reduce", "absolute"),
    [
        (lambda y: y.abs().amax(-1), True),
        (lambda y: y.amax(1), False),
        (lambda y: y.float().abs().amax(-1, keepdim=True), True),
        (lambda y: y.abs().max(1)[0], True),
    ],
)
def test_row_amax_without_scaling(reduce: Any, absolute: bool) -> None:
    (match,) = find(lambda x, w: (lambda y: (y, reduce(y)))(F.linear(x, w)), X, W)
    assert match.problem.epilogue == Epilogue(reductions=1)
    assert match.constants.absolute is absolute
    assert match.scaling == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (lambda y: (y, y.abs().amax(0)))(F.linear(x, w)),
        lambda x, w: (lambda y: (y, y.abs().amax()))(F.linear(x, w)),
        lambda x, w: (lambda y: (y, y.abs().amin(-1)))(F.linear(x, w)),
        lambda x, w: (lambda y: (y, y.max(1)))(F.linear(x, w)),
        # An inner value is used elsewhere.
        lambda x, w: (lambda y: (y, y.relu().abs().amax(-1)))(F.linear(x, w)),
        # Another kernel that reads the output can compute the row amax.
        lambda x, w: (lambda y: (y.cos().cumsum(-1), y.abs().amax(-1)))(F.linear(x, w)),
        # Blocks of rows.
        lambda x, w: (lambda y: (y, y.view(32, 2, 24).abs().amax(-1)))(F.linear(x, w)),
        # The row amax is of float32 values, which are not stored.
        lambda x, w: quantized(F.gelu(F.linear(x, w).float())),
        lambda x, w: quantized(torch.softmax(F.linear(x, w), -1)),
        lambda x, w: (x, F.linear(x, w)),
    ],
)
def test_patterns_that_do_not_match(function: Any) -> None:
    assert find(function, X, W) == []


def test_switches() -> None:
    off = Settings(gemm_fuse_row_maxima=False)
    assert find(lambda *args: quantized(gate(*args)), X, W, W, settings=off) == []
    with inductor_config.patch(emulate_precision_casts=True):
        assert find(lambda *args: quantized(gate(*args)), X, W, W) == []


@pytest.mark.skipif(
    not hasattr(inductor_config, "strict_signed_zero"), reason="no strict_signed_zero"
)
def test_signed_zeros_are_ordered_as_by_inductor() -> None:
    assert len(find(lambda *args: quantized(gate(*args)), X, W, W)) == 1
    with inductor_config.patch(strict_signed_zero=True):
        assert find(lambda *args: quantized(gate(*args)), X, W, W) == []


def test_the_graph_computes_the_same_after_the_replacement() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Any:
        y = F.relu(F.linear(x, w, b)) + r
        return (*quantized(y), y)

    inputs = [item.to(torch.float32) for item in (X3, W, BIAS, tensor(2, 16, 48))]
    graph = lowered_graph(function, *inputs)
    (match,) = match_row_amax.find_row_amax_fusions(graph, Settings(), [])
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(inp.shape, generator=generator) for inp in inputs]
    before = torch.fx.Interpreter(torch.nn.Module(), graph=graph).run(*values)

    def kernel(a: Tensor, b: Tensor, *further: Tensor) -> Any:
        chain = torch.fx.GraphModule(torch.nn.Module(), match.chain)
        y = chain(a @ b, *further)
        return y.view(2, 16, 48), y.abs().amax(-1).view(2, 16, 1)

    with fake_cuda.device():
        match_row_amax.apply(graph, match, kernel)
    graph.lint()
    after = torch.fx.Interpreter(torch.nn.Module(), graph=graph).run(*values)
    assert not any("mm" in str(node.target) for node in graph.nodes)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new.float(), old.float())


# The kernels


def residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Any:
    y = r + 1.5 * F.relu(F.linear(x, w, b))
    return y, y.abs().amax(-1, keepdim=True)


def gated(x: Tensor, g: Tensor, u: Tensor) -> Any:
    y = gate(x, g, u)
    return y, y.abs().amax(-1)


def biased(x: Tensor, w: Tensor, b: Tensor) -> Any:
    first, second = F.linear(x, w, b).chunk(2, -1)
    y = first * F.silu(second)
    return y, y.abs().amax(-1)


def scaled(x: Tensor, w: Tensor, b: Tensor) -> Any:
    y = torch.addmm(b, x, w.t(), beta=2, alpha=0.5)
    return y, y.abs().amax(-1)


def signed(x: Tensor, w: Tensor) -> Any:
    y = -torch.relu(F.linear(x, w))
    return y, y.amax(-1)


def plain(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w)
    return y, y.float().abs().amax(-1)


def extreme(x: Tensor, w: Tensor) -> Any:
    y = F.linear(x, w)
    return y, y.amax(-1)


Shapes = list[tuple[int, ...]]

FUNCTIONS: dict[str, tuple[Callable[..., Any], Shapes, GemmConfig]] = {
    "residual of few rows": (residual, [(3, 64), (40, 64), (40,), (3, 40)], GEMV),
    "gate, operands exchanged": (gated, [(18, 64), (40, 64), (40, 64)], SWAPPED),
    "gate by halves with biases, by TMA": (biased, [(70, 64), (80, 64), (80,)], TMA),
    "residual in three dimensions, splits of K": (
        residual,
        [(2, 9, 64), (40, 64), (40,), (2, 9, 40)],
        dataclasses.replace(TILE, template="splitk", split_k=2, fused_split_k=True),
    ),
    "product and row, both scaled": (scaled, [(18, 64), (40, 64), (40,)], TILE),
    "maxima of negative numbers": (signed, [(18, 64), (40, 64)], TILE),
    "infinite": (plain, [(18, 64), (40, 64)], TILE),
    "infinite, signed": (extreme, [(18, 64), (40, 64)], TILE),
}


def inputs(name: str) -> list[Tensor]:
    _, shapes, _ = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).half() / 4 for shape in shapes]
    if "infinite" in name:
        values[0][0] = 6e4
        values[0][3, 5] = float("nan")
        values[0][4, 6] = float("inf")
    return values


def lowered(
    function: Callable[..., Any], chosen: GemmConfig, *shapes: Any, **rest: Any
) -> fake_cuda.Lowered:
    def rule(problem: GemmProblem) -> GemmConfig | None:
        return chosen if problem.epilogue.reductions else None

    with scope.compile_scope(config.snapshot({})), choose.force_config(rule):
        return fake_cuda.lower(function, *shapes, **rest)


@pytest.fixture(scope="module")
def modules() -> dict[str, fake_cuda.Lowered]:
    return {
        name: lowered(function, chosen, *((shape, torch.float16) for shape in shapes))
        for name, (function, shapes, chosen) in FUNCTIONS.items()
    }


@pytest.fixture(scope="module")
def results(modules: dict[str, fake_cuda.Lowered]) -> dict[str, Any]:
    return kernel_interpreter.interpret_modules(
        {name: (modules[name].code, inputs(name)) for name in FUNCTIONS}
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_row_amax_is_of_the_stored_values(name: str, results: dict[str, Any]) -> None:
    function, _, _ = FUNCTIONS[name]
    y, maxima = results[name]
    exact, exact_maxima = function(*(value.double() for value in inputs(name)))
    assert maxima.shape == exact_maxima.shape
    assert y.dtype == torch.float16
    # The row amax is bitwise that of the stored y, including NaN and infinity.
    rows = y.float() if function in (signed, extreme) else y.float().abs()
    expected = rows.amax(-1).reshape(maxima.shape)
    torch.testing.assert_close(maxima.float(), expected, rtol=0, atol=0, equal_nan=True)
    if "infinite" in name:
        assert maxima.isnan().nonzero().flatten().tolist() == [3]
        assert maxima.isinf().nonzero().flatten().tolist() == [0, 4]
        return
    assert (y.double() - exact).abs().max() < 5e-3 * exact.abs().max()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_kernel_reads_the_output_again(name: str, modules: dict[str, fake_cuda.Lowered]) -> None:
    sources = modules[name].kernels()
    assert len(sources) == 2
    assert "extern_kernels." not in modules[name].code
    (reads,) = (source for kernel, source in sources.items() if "_tem_" not in kernel)
    assert "fp16" not in re.findall(r"signature': {([^}]*)", modules[name].code)[-1].split("out")[0]
    assert "tl.dot" not in reads


def test_rows_known_only_at_run_time() -> None:
    def by_size(problem: GemmProblem) -> GemmConfig | None:
        if not problem.epilogue.reductions:
            return None
        return TILE if problem.m > 64 else dataclasses.replace(TILE, group_m=4)

    half = torch.bfloat16
    with scope.compile_scope(config.snapshot({})), choose.force_config(by_size):
        code = fake_cuda.lower(
            lambda *args: quantized(gate(*args)),
            (("rows", 64), half),
            ((48, 64), half),
            ((48, 64), half),
        ).code
    # Two M buckets, each with its kernel and the scaling kernel.
    assert len(re.findall(r"^def triton_gemm_", code, re.M)) == 2
    assert code.count(".to(tl.float8e4nv)") == 1
    assert len(re.findall(r"triton_poi_fused_\w+\.run\(", code)) == 4
    assert "extern_kernels." not in code


@pytest.mark.parametrize(("columns", "behind"), [(96, 1), (4096, 2)])
def test_scaling_takes_few_kernels(columns: int, behind: int) -> None:
    half = torch.bfloat16
    module = lowered(
        lambda x, w: quantized(F.linear(x, w))[0], TILE, ((16, 64), half), ((columns, 64), half)
    )
    # The scaling kernel reduces the row amax of few tiles, a separate kernel that of many.
    assert len(re.findall(r"\.run\(", module.code)) == 1 + behind
    # The kernel that computes the row amax contains nothing that uses it.
    assert ["float8" in source for source in module.kernels().values()] == [*[False] * behind, True]


@pytest.mark.parametrize(("alone", "taken"), [(15.0, True), (11.0, False)])
def test_a_plain_kernel_may_save_more(
    alone: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(problems: list[GemmProblem], *_: Any, **__: Any) -> dict[GemmProblem, Decision]:
        times = {problem: 12.0 if problem.epilogue.reductions else alone for problem in problems}
        return {
            key: Decision(TILE, "cache", (Timing(None, 20.0), Timing(TILE, microseconds)))
            for key, microseconds in times.items()
        }

    monkeypatch.setattr(choose, "decide", decide)
    half = torch.bfloat16
    with scope.compile_scope(config.snapshot({})):
        code = fake_cuda.lower(
            lambda x, w: quantized(F.linear(x, w)), ((32, 64), half), ((48, 64), half)
        ).code
    assert len(re.findall(r"^def triton_gemm_", code, re.M)) == 1
    assert ("ROW_MAXIMA" in code) is taken


@pytest.mark.parametrize(
    ("chosen", "rows"),
    [
        (GemmConfig("persistent_tma", 128, 256, 64, 4, 8, tma=True, flatten=True), 2048),
        (GemmConfig("splitk", 16, 64, 128, 4, 4, pdl=True), 16),
    ],
)
def test_nothing_spills(chosen: GemmConfig, rows: int) -> None:
    half = torch.bfloat16
    shapes = ((rows, 4096), half), ((14336, 4096), half), ((14336, 4096), half)
    module = lowered(lambda *args: quantized(gate(*args)), chosen, *shapes)
    binary = kernel_compiler.compiled_module(module, chosen)
    assert binary.spills == 0
    problem = gate_problem(rows)
    assert legal(problem, chosen, H200)
    assert binary.shared <= chosen.shared_memory(problem)


# Core


def gate_problem(rows: int, **rest: Any) -> GemmProblem:
    epilogue = Epilogue(gated=True, reductions=1, out="float8_e4m3fn")
    return GemmProblem.contiguous(
        "mm", rows, 2 * 14336, 4096, parts=(14336, 14336), epilogue=epilogue, **rest
    )


def test_bytes_count_the_scaled_output_and_the_maxima() -> None:
    problem = gate_problem(16)
    assert problem.bytes_written == 16 * 14336 + 16 * 4
    assert GemmProblem.from_json(problem.to_json()) == problem


def test_candidates_support_row_amax() -> None:
    epilogue = Epilogue(reductions=1)
    problem = GemmProblem.contiguous("mm", 64, 256, 4096, epilogue=epilogue)
    several = dataclasses.replace(problem, parts=(128, 128))
    assert not list(search_space.candidates(several, H200))
    batch = GemmProblem.contiguous("bmm", 64, 256, 64, batch=2, epilogue=epilogue)
    assert not list(search_space.candidates(batch, H200))
    values = list(search_space.candidates(problem, H200))
    assert all(item.split_k == 1 or item.fused_split_k for item in values)
    assert any(item.fused_split_k for item in values)


@pytest.mark.parametrize("rows", [1, 16, 2048])
def test_the_scaling_kernel_is_predicted(rows: int) -> None:
    problem = gate_problem(rows)
    gate_alone = dataclasses.replace(problem, epilogue=Epilogue(gated=True))
    for chosen, prediction in ranking.rank(problem, H200):
        alone = cost_model.predict(gate_alone, chosen, H200)
        assert alone.total < prediction.total < 1.2 * alone.total + 20
        assert prediction.reduction > 0
        assert prediction.total > problem.roofline(H200)


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2", "int8", None])
def test_the_canonical_program_matches_and_is_verified(stored: str | None) -> None:
    epilogue = Epilogue(gated=True, reductions=1, out=stored)
    problem = GemmProblem.contiguous("mm", 33, 96, 64, "float32", parts=(48, 48), epilogue=epilogue)
    canonical = program(problem)
    (match,) = find(canonical.function, *(inp.empty("meta") for inp in canonical.inputs))
    assert match.problem == problem
    values = canonical.make_inputs("cpu")
    outputs = canonical.function(*values)
    assert [output.shape for output in outputs] == [(33, 48), (33,)]
    verifier = Verifier(canonical, values)
    assert verifier.set_stock(outputs) is None
    assert verifier.check(lambda: outputs) is None
    wrong = outputs[0], outputs[1] * 1.25
    assert "in output 1" in str(verifier.check(lambda: wrong))
