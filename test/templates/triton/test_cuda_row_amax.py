"""Row amax from a matmul's kernel on a CUDA device, and rows scaled by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import events
from inductor_ext.autotune import decide, reference
from inductor_ext.autotune.accuracy import Verifier
from inductor_ext.templates.fused_ops import Epilogue
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulRecord
from inductor_ext.templates.triton import search_space
from inductor_ext.templates.triton.config import GemmConfig
from test.support import gpu_util
from test.support.gpu_util import device

pytestmark = pytest.mark.gpu

F = torch.nn.functional
FP8 = torch.float8_e4m3fn
Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    torch.manual_seed(0)
    with gpu_util.compiling():
        yield


@pytest.fixture(scope="module", autouse=True)
def float8() -> None:
    if device().capability < (8, 9):
        pytest.skip("needs conversions to float8")


Results = tuple[Tensor, Tensor, Tensor, Tensor]


def quantized(y: Tensor) -> Results:
    """The unscaled output, the scaled one, the row scales, and the row amax."""
    largest = y.abs().amax(-1, keepdim=True)
    scale = largest.float().clamp(min=1e-12) / 448.0
    return y, (y.float() / scale).clamp(-448.0, 448.0).to(FP8), scale, largest


class Gated(torch.nn.Module):
    """The float8 input of a matmul after a gate."""

    def __init__(self, width: int = 256, hidden: int = 520) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, hidden, bias=False)
        self.up = torch.nn.Linear(width, hidden, bias=False)

    def output(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x: Tensor) -> Results:
        return quantized(self.output(x))


class Activated(torch.nn.Module):
    """The same after a layer with a bias, an activation and a residual."""

    def __init__(self, width: int = 256, hidden: int = 520) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, hidden)
        self.residual = torch.nn.Parameter(torch.randn(hidden))

    def output(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x)) + self.residual

    def forward(self, x: Tensor) -> Results:
        return quantized(self.output(x))


def only_with_maxima(pick: Callable[[list[GemmConfig]], GemmConfig | None]) -> decide.Rule:
    def rule(problem: GemmProblem) -> GemmConfig | None:
        return pick(list(search_space.candidates(problem, device()))) if problem.quantized else None

    return rule


def first(*templates: str) -> decide.Rule:
    return only_with_maxima(
        lambda found: next((item for item in found if item.template in templates), None)
    )


ANY = only_with_maxima(lambda found: found[0])


def check(module: Any, x: Tensor, results: Results) -> None:
    wide = type(module)().cuda().double()
    wide.load_state_dict(module.state_dict())
    exact = wide.output(x.double())
    difference = torch.linalg.vector_norm(results[0].double() - exact)
    assert difference < 1e-2 * torch.linalg.vector_norm(exact)
    check_scaling(results)


def check_scaling(results: Results) -> None:
    """Check that the row amax is bitwise that of the stored values."""
    y, scaled, scale, largest = results
    assert torch.equal(largest, y.abs().amax(-1, keepdim=True))
    _, expected, expected_scale, _ = quantized(y)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    # Divisions differ in the last bit, which changes the rounding between two values.
    away = (scaled.float() - expected.float()).abs()
    assert (away <= 0.13 * expected.float().abs() + 2**-9).all()
    assert (away > 0).float().mean() < 0.02


def run(
    module: Any, x: Tensor, rule: decide.Rule, **options: Any
) -> tuple[Any, list[MatmulRecord]]:
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="inductor_ext", options=options or None, dynamic=False)
    with torch.no_grad(), decide.force_config(rule), events.capture(MatmulRecord) as records:
        for _ in range(3):
            results = tuple(tensor.clone() for tensor in compiled(x))
    return results, [record for record in records if record.problem is not None]


@pytest.mark.parametrize("kind", [Gated, Activated])
@pytest.mark.parametrize(
    ("template", "rows"),
    [
        ("gemv", 1),
        ("gemv", 5),
        ("splitk", 16),
        ("splitk", 33),
        ("cp_async", 300),
        ("persistent_tma", 64),
        ("persistent_tma", 1000),
    ],
)
def test_every_template(template: str, rows: int, kind: Any) -> None:
    if template == "persistent_tma" and device().capability < (9, 0):
        pytest.skip("needs TMA")
    module = kind().cuda().bfloat16()
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    results, records = run(module, x, first(template))
    (record,) = records
    assert record.chosen is not None
    assert record.chosen.template == template
    assert record.problem is not None
    assert record.problem.quantized
    check(module, x, results)


@pytest.mark.parametrize(
    ("flag", "rows"), [("swap_ab", 16), ("fused_split_k", 16), ("flatten", 4096)]
)
def test_every_form(flag: str, rows: int) -> None:
    module = Activated(2048).cuda().bfloat16()
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    rule = only_with_maxima(lambda found: next((c for c in found if getattr(c, flag)), None))
    results, records = run(module, x, rule)
    assert [getattr(record.chosen, flag) for record in records] == [True]
    check_scaling(results)


def test_nan_and_infinity_are_the_largest_of_their_rows_alone() -> None:
    module = Gated().cuda().bfloat16()
    x = torch.randn(40, 256, device="cuda", dtype=torch.bfloat16)
    x[3, 7], x[35, 9] = float("nan"), float("inf")
    for template in ("splitk", "persistent_tma"):
        (y, _, _, largest), _ = run(module, x, first(template))
        expected = y.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(largest, expected, rtol=0, atol=0, equal_nan=True)
        assert largest[3].isnan()
        assert largest.isfinite().sum() == 38


def test_the_fallback_is_used_if_it_is_the_decision() -> None:
    module = Gated().cuda().bfloat16()
    x = torch.randn(33, 256, device="cuda", dtype=torch.bfloat16)
    _, records = run(module, x, lambda problem: None)
    assert {record.chosen for record in records} == {None}
    assert all("scaled by maxima of rows" in " ".join(record.declined) for record in records)


@pytest.mark.parametrize("options", [{"cpp_wrapper": True}, {"triton.cudagraphs": True}], ids=str)
def test_other_ways_to_compile_equal_float64(options: dict[str, Any]) -> None:
    module = Activated().cuda().bfloat16()
    x = torch.randn(24, 256, device="cuda", dtype=torch.bfloat16)
    results, records = run(module, x, ANY, **options)
    check(module, x, results)
    assert all(record.chosen is not None for record in records)


def test_rows_known_only_at_run_time() -> None:
    module = Gated().cuda().bfloat16()
    compiled = torch.compile(module, backend="inductor_ext", dynamic=True)
    with torch.no_grad(), decide.force_config(ANY):
        for rows in (7, 16, 17, 64, 65, 300, 2048, 3000):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            check(module, x, compiled(x))


def test_a_package(tmp_path: Path) -> None:
    module = Gated().cuda().bfloat16()
    x = torch.randn(24, 256, device="cuda", dtype=torch.bfloat16)
    program = torch.export.export(module, (x,))
    with inductor_ext.activate(artifact_cache=False), decide.force_config(ANY):
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "gated.pt2")
        )
    check(module, x, tuple(inductor_ext.load(package)(x)))


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "int8", None])
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_the_canonical_program_is_verified(rows: int, stored: str | None) -> None:
    epilogue = Epilogue(gated=True, reductions=1, out=stored)
    problem = GemmProblem.contiguous("mm", rows, 1040, 256, parts=(520, 520), epilogue=epilogue)
    canonical = reference.program(problem)
    inputs = canonical.make_inputs("cuda")
    verifier = Verifier(canonical, inputs)
    verifier.set_stock(canonical.function(*inputs))
    config = next(iter(search_space.candidates(problem, device())))
    torch._dynamo.reset()

    def rule(met: GemmProblem) -> GemmConfig | None:
        return config if met.epilogue.reductions else None

    compiled = torch.compile(canonical.function, backend="inductor_ext", dynamic=False)
    with torch.no_grad(), decide.force_config(rule), events.capture(MatmulRecord) as records:
        assert verifier.check(lambda: compiled(*inputs)) is None
    assert [record.problem for record in records] == [problem]
