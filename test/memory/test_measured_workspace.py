"""Plans know the workspaces of CPU kernels that follow no formula."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import inductor_ext
from benchmarks.harness.measure import record_allocations
from inductor_ext.hooks.scope import compile_scope
from inductor_ext.memory import measured_workspace
from inductor_ext.reports import memory_measure
from test.support import fake_cuda
from test.support.memory_compiles import compiled, planning

LARGEST_ROUNDING = 64


def peak_of(call: Any) -> int:
    """Bytes above the level before; the second call."""
    call()
    kept: list[Any] = []
    return max(itertools.accumulate(record_allocations(lambda: kept.append(call()))))


class Convolutions(nn.Module):
    def __init__(self, channels: int = 24) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, bias=True)
        self.second = nn.Conv2d(channels, channels, 3, groups=channels)
        self.last = nn.ConvTranspose2d(channels, 5, 2, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x).relu()).sigmoid())  # type: ignore[no-any-return]


def masked_attention(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    query = x * 2
    return F.scaled_dot_product_attention(query, query, query, attn_mask=mask) + 1


@pytest.fixture(autouse=True)
def _nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_workspace, "_measured", {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_planned_peak_of_convolutions_is_measured(dtype: torch.dtype) -> None:
    model = Convolutions().to(dtype)
    x = torch.randn(2, 3, 37, 35, dtype=dtype)
    with planning() as plans, torch.no_grad():
        run = compiled(model)
        result = run(x)
        measured = peak_of(lambda: run(x))
        torch.testing.assert_close(result, model(x))
    (plan,) = plans
    assert plan.peak == pytest.approx(measured, abs=len(plan.storages) * LARGEST_ROUNDING)
    assert min(filter(None, measured_workspace._measured.values())) > 0


def test_the_planned_peak_of_training_is_measured() -> None:
    model = Convolutions()
    x = torch.randn(2, 3, 37, 35)

    def step() -> None:
        run(x).square().sum().backward()

    with planning():
        run = compiled(model)
        step()
        report = inductor_ext.memory_report(run).measure(step)
    assert [row.kind for row in report.measured] == ["forward", "backward"]
    for row in report.measured:
        assert row.predicted == pytest.approx(row.measured, rel=0.01)
    assert None not in measured_workspace._measured.values()


def test_the_planned_peak_of_masked_attention_is_measured() -> None:
    x = torch.randn(2, 4, 33, 16)
    mask = torch.randn(33, 33)
    with planning() as plans, torch.no_grad():
        run = compiled(masked_attention)
        torch.testing.assert_close(run(x, mask), masked_attention(x, mask), atol=1e-4, rtol=1e-4)
        measured = peak_of(lambda: run(x, mask))
    (plan,) = plans
    assert list(measured_workspace._measured.values()) != [None]
    assert plan.peak == pytest.approx(measured, abs=len(plan.storages) * LARGEST_ROUNDING)


def attention_of_rows(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention whose matrices are not contiguous: a row has all heads of a position."""
    return attention(bias, (x @ w).view(33, 6, 16).transpose(0, 1))


def attention_of_spread_heads(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Attention whose matrices are copied: neither rows nor columns are contiguous."""
    return attention(bias, (x @ w).view(33, 16, 6).permute(2, 0, 1))


def attention(bias: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    scores = torch.baddbmm(bias, heads, heads.transpose(1, 2)).softmax(-1)
    return torch.bmm(scores, heads).transpose(0, 1) + 1


@pytest.mark.parametrize(
    ("attend", "copies"), [(attention_of_rows, False), (attention_of_spread_heads, True)]
)
def test_the_planned_peak_of_bmm_is_measured(
    attend: Callable[..., torch.Tensor], copies: bool
) -> None:
    x, w, bias = torch.randn(33, 64), torch.randn(64, 96), torch.randn(6, 33, 33)
    with planning() as plans, torch.no_grad():
        run = compiled(attend)
        expected = attend(x.double(), w.double(), bias.double())
        torch.testing.assert_close(run(x, w, bias).double(), expected, atol=1e-3, rtol=1e-3)
        measured = peak_of(lambda: run(x, w, bias))
    (plan,) = plans
    assert len(measured_workspace._measured) == 2
    assert None not in measured_workspace._measured.values()
    assert any(measured_workspace._measured.values()) == copies
    assert plan.peak == pytest.approx(measured, abs=len(plan.storages) * LARGEST_ROUNDING)
    assert (plan.peak, plan.calls) <= (plan.peak_before, plan.calls_before)


def test_a_kernel_is_measured_once() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)))
    with planning(), torch.no_grad():
        compiled(model)(torch.randn(1, 4, 16, 16))
    assert len(measured_workspace._measured) <= 2  # the layout of the first operand may differ


@pytest.mark.parametrize("limit", ["flops", "bytes"])
def test_large_kernels_are_not_run(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(measured_workspace.LIMITS["cpu"], **{limit: 1000})
    monkeypatch.setitem(measured_workspace.LIMITS, "cpu", limits)
    with planning(), torch.no_grad():
        compiled(Convolutions())(torch.randn(2, 3, 37, 35))
    assert not measured_workspace._measured


def test_kernels_of_dynamic_sizes_are_not_run() -> None:
    with planning(), torch.no_grad():
        compiled(Convolutions(), dynamic=True)(torch.randn(2, 3, 37, 35))
    assert not measured_workspace._measured


def test_garbage_is_not_collected_during_a_measurement() -> None:
    collects = []
    measured_workspace._record(lambda: collects.append(gc.isenabled()), torch.device("cpu"))
    assert collects == [False]
    assert gc.isenabled()


def test_nothing_is_recorded_inside_a_profiler() -> None:
    with planning(), torch.no_grad(), torch.profiler.profile():
        compiled(Convolutions())(torch.randn(2, 3, 37, 35))
    assert not measured_workspace._measured


def test_dropout_is_left_out() -> None:
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
    kernel: Any = types.SimpleNamespace(op_overload=operator, kwargs={"dropout_p": 0.3})
    tensors = [torch.ones(1, 2, 3, 4)] * 3
    arguments = measured_workspace._bind(kernel, tensors)
    assert arguments["dropout_p"] == 0
    assert arguments["value"] is tensors[2]


def test_code_for_a_gpu_is_generated_without_one() -> None:
    """The kernels cannot be run; their workspaces are unknown."""
    pytest.importorskip("triton")
    inputs = [((2, 3, 32, 32), torch.float32), ((8, 3, 3, 3), torch.float32)]
    with compile_scope(inductor_ext.config.snapshot({})):
        code = fake_cuda.lower(lambda x, weight: torch.conv2d(x, weight).relu(), *inputs).code
    assert "extern_kernels.convolution" in code
    assert list(measured_workspace._measured.values()) == [None]


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize(
        "backend",
        [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION],
        ids=["efficient", "flash", "cudnn"],
    )
    def test_the_planned_peak_of_attention_is_measured(self, backend: SDPBackend) -> None:
        x = torch.randn(3, 4, 520, 64, device="cuda", dtype=torch.float16, requires_grad=True)

        def attention(x: torch.Tensor) -> torch.Tensor:
            query = x * 2
            return F.scaled_dot_product_attention(query, query + 1, query - 1) + 1

        with sdpa_kernel(backend):
            check_training_on_a_gpu(attention, x)

    @pytest.mark.parametrize(
        "backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    )
    def test_dropout_draws_no_numbers_during_compilation(self, backend: SDPBackend) -> None:
        x = torch.randn(3, 4, 520, 64, device="cuda", dtype=torch.float16, requires_grad=True)

        def attention(x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(x * 2, x, x, dropout_p=0.3)

        states = []
        with sdpa_kernel(backend), planning():
            run = compiled(attention)
            for _ in range(2):
                torch.manual_seed(0)
                run(x).float().sum().backward()
                states.append(torch.cuda.get_rng_state())
        assert len(measured_workspace._measured) > 1
        assert None not in measured_workspace._measured.values()
        # The first call compiles, and the second one does not.
        torch.testing.assert_close(*states, rtol=0, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_the_planned_peak_of_convolutions_is_measured(self, dtype: torch.dtype) -> None:
        model = Convolutions(64).cuda().to(dtype)
        x = torch.randn(8, 3, 137, 135, device="cuda", dtype=dtype, requires_grad=True)
        check_training_on_a_gpu(model, x)

    def test_no_memory_stays_reserved(self) -> None:
        model = Convolutions(64).cuda()
        with planning(), torch.no_grad():
            compiled(model)(torch.randn(8, 3, 137, 135, device="cuda"))
        assert min(filter(None, measured_workspace._measured.values())) > 0
        pools = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
        assert pools <= {(0, 0)}


def check_training_on_a_gpu(function: Any, x: torch.Tensor) -> None:
    def step() -> None:
        run(x).float().square().sum().backward()

    with planning() as plans:
        run = compiled(function)
        step()
        step()
        measured = memory_measure.measure(plans, step)
    assert [row.kind for row in measured] == ["forward", "backward"]
    assert len(measured_workspace._measured) > 1
    assert None not in measured_workspace._measured.values()
    for row in measured:
        # The allocator does not split a cached block of which less than 1 MB would be left.
        assert row.predicted == pytest.approx(row.measured, rel=0.03)
    result = run(x)
    with sdpa_kernel(SDPBackend.MATH):
        exact = copy.deepcopy(function)
        expected = (exact.double() if isinstance(exact, nn.Module) else exact)(x.double())
    torch.testing.assert_close(result.double(), expected, atol=2e-2, rtol=2e-2)

    def test_garbage_is_not_counted_as_a_workspace(self) -> None:
        """CUDA's allocator reports every tensor that is freed."""

        def call() -> torch.Tensor:
            result = torch.empty(1000, device="cuda")
            gc.set_threshold(1)
            _ = [[] for _ in range(1000)]
            return result

        thresholds = gc.get_threshold()
        gc.set_threshold(1_000_000)
        try:
            cycle: list[Any] = [torch.empty(1 << 20, device="cuda")]
            cycle.append(cycle)
            del cycle
            assert measured_workspace._record(call, torch.device("cuda")) == 0
        finally:
            gc.set_threshold(*thresholds)
