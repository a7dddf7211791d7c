"""The backend on a CUDA device: numerics, backward threads, CUDA graphs, modes and cache keys."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters

import inductor_ext
from inductor_ext import events
from inductor_ext.hooks.records import CompileRecord

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative error of the whole result against float64."""


@pytest.fixture(autouse=True)
def uncached() -> Iterator[None]:
    with inductor_config.patch(force_disable_caches=True):
        yield


class MLP(torch.nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 3 * width)
        self.down = torch.nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(value.double() - reference.double())
    return (difference / torch.linalg.vector_norm(reference.double())).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_training_matches_float64(dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = MLP().cuda()
    reference = MLP().cuda().double()
    reference.load_state_dict(model.state_dict())
    model.to(dtype)
    compiled = torch.compile(model, backend="inductor_ext", dynamic=dynamic)
    with events.capture(CompileRecord) as records:
        for batch in (33, 65):
            x = torch.randn(batch, 96, device="cuda", dtype=dtype, requires_grad=True)
            wide = x.detach().double().requires_grad_()
            out, expected = compiled(x), reference(wide)
            out.square().mean().backward()
            expected.square().mean().backward()
            assert relative_error(out, expected) < TOLERANCE[dtype]
            assert relative_error(x.grad, wide.grad) < 2 * TOLERANCE[dtype]
    kinds = [record.kind for record in records]
    # The backward graphs are compiled in autograd's thread of the device.
    assert kinds == ["forward", "backward"] * (1 if dynamic else 2)


def test_settings_reach_the_backward_thread() -> None:
    x = torch.randn(64, 96, device="cuda", requires_grad=True)
    options = {"fallback_to_eager": False}
    with events.capture(CompileRecord) as records:
        out = torch.compile(MLP().cuda(), backend="inductor_ext", options=options)(x)
        out.sum().backward()
    assert [record.settings for record in records] == [options, options]


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    model = MLP(128).cuda().half()
    x = torch.randn(256, 128, device="cuda", dtype=torch.half)
    with torch.no_grad():
        out = torch.compile(model, backend="inductor_ext", mode=mode)(x)
        assert relative_error(out, model.double()(x.double())) < TOLERANCE[torch.half]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_recorded_and_dropped_on_reset(mode: str) -> None:
    from torch._inductor import cudagraph_trees

    model = MLP(128).cuda().half()
    compiled = torch.compile(model, backend="inductor_ext", mode=mode)
    counters.clear()
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(64, 128, device="cuda", dtype=torch.half)
            assert relative_error(compiled(x), model(x)) < 1e-3
    assert counters["inductor"]["cudagraph_skips"] == 0
    device = torch.cuda.current_device()
    assert cudagraph_trees.get_container(device).tree_manager is not None
    torch.compiler.reset()
    assert cudagraph_trees.get_container(device).tree_manager is None


def test_two_devices_types_in_one_graph() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x).sum(-1).cpu() + y.cos(), y * 2

    x, y = torch.randn(8, 16, device="cuda"), torch.randn(8)
    out = torch.compile(function, backend="inductor_ext")(x, y)
    torch.testing.assert_close(out, function(x, y))


def test_cache_entries_of_both_backends_are_separate() -> None:
    model = MLP().cuda()
    x = torch.randn(8, 96, device="cuda")
    seen = []
    tag = secrets.token_hex()  # no cache hits from an earlier run
    for backend in ("inductor", "inductor_ext", "inductor_ext", "inductor"):
        torch._dynamo.reset()
        counters.clear()
        with (
            inductor_config.patch(force_disable_caches=False),
            inductor_config.patch(fx_graph_cache=True),
            torch.compiler.config.patch(cache_key_tag=tag),
            torch._functorch.config.patch(enable_autograd_cache=False),
            torch.no_grad(),
        ):
            torch.testing.assert_close(
                torch.compile(model, backend=backend)(x), model(x), rtol=1e-4, atol=1e-4
            )
        inductor = counters["inductor"]
        seen.append((inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]))
    assert seen == [(0, 1), (0, 1), (1, 0), (1, 0)]


def test_activation_and_install_reach_inductor_entry_points() -> None:
    x = torch.randn(8, 96, device="cuda")
    model = MLP().cuda()
    with events.capture(CompileRecord) as records, torch.no_grad():
        with inductor_ext.activate():
            out = torch.compile(model)(x)
        torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-4)
    assert [record.kind for record in records] == ["inference"]
