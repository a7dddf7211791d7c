"""Memory planning on a GPU: values, peaks of the caching allocator, CUDA graphs, C++ wrappers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor import config as inductor_config

import inductor_ext
from benchmarks.harness import measure
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def planning(
    inductor: dict[str, Any] | None = None, **extension: Any
) -> Iterator[list[MemoryPlanRecord]]:
    torch._dynamo.reset()
    with (
        inductor_ext.config.patch(extension),
        inductor_config.patch({"fx_graph_cache": False, **(inductor or {})}),
        events.capture(MemoryPlanRecord) as records,
    ):
        yield records


class Block(torch.nn.Module):
    """Attention, a gated feed-forward network and a reduction, in half precision."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 8 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(torch.nn.functional.silu(gate) * value)


def model_and_input(dtype: torch.dtype = torch.float16) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block()).cuda().to(dtype)
    return model, torch.randn(3, 65, 128, device="cuda", dtype=dtype)


def check(got: torch.Tensor, model: torch.nn.Module, x: torch.Tensor) -> None:
    import copy

    expected = copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=2e-2)


def peak(call: Callable[[], Any]) -> int:
    """Peak bytes of the second call, beyond the memory that was allocated before."""
    call()
    torch.cuda.synchronize()
    # Reference cycles of earlier tests would otherwise be freed during the call.
    gc.collect()
    # The allocator does not split a cached block of which less than 1 MB would be left, and counts
    # all of it.
    torch.cuda.empty_cache()
    while True:
        before = torch.cuda.memory_allocated()
        found = measure.measure_gpu_peak(call)
        # What an earlier test left may be freed during the call.
        if torch.cuda.memory_allocated() == before:
            return found


@pytest.mark.parametrize("inductor", [{}, {"cpp_wrapper": True}], ids=["python", "cpp"])
@pytest.mark.parametrize("arenas", ["auto", "always"])
@torch.no_grad()
def test_results_with_freed_memory_overwritten(inductor: dict[str, Any], arenas: str) -> None:
    model, x = model_and_input()
    with planning(inductor, memory_arenas=arenas, memory_debug=True) as records:
        run = torch.compile(model, backend="inductor_ext", dynamic=True)
        for length in (65, 8, 200):
            check(run(x[:, :1].repeat(1, length, 1)), model, x[:, :1].repeat(1, length, 1))
    assert records
    assert all(record.peak <= record.peak_before for record in records) or arenas == "always"
    assert arenas == "auto" or any(record.arenas for record in records)


@torch.no_grad()
def test_peak_is_at_most_the_lowest_of_inductor() -> None:
    model, x = model_and_input(torch.float32)
    peaks = {}
    for name, backend, inductor in (
        ("default", "inductor", {}),
        ("pools", "inductor", {"memory_planning": True}),
        ("no reuse", "inductor", {"allow_buffer_reuse": False}),
        ("ours", "inductor_ext", {}),
    ):
        with planning(inductor) as records:
            run = torch.compile(model, backend=backend)
            peaks[name] = peak(lambda run=run: run(x))  # type: ignore[misc]
    assert peaks["ours"] <= min(peaks.values()), peaks
    (record,) = records
    assert record.peak == record.lower_bound


def test_training() -> None:
    model, x = model_and_input(torch.float32)
    with planning(memory_arenas="always", memory_debug=True) as records:
        torch.compile(model, backend="inductor_ext")(x).square().mean().backward()
    got = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for grad, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, atol=1e-3, rtol=1e-3)
    assert [record.kind for record in records] == ["forward", "backward"]


@torch.no_grad()
def test_cuda_graphs_replay_arenas() -> None:
    model, x = model_and_input(torch.float32)
    with planning({"triton.cudagraphs": True}, memory_arenas="always") as records:
        run = torch.compile(model, backend="inductor_ext")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn_like(x)
            check(run(x).clone(), model, x)
    assert any(record.arenas for record in records)


@torch.no_grad()
def test_members_are_aligned_as_allocations_are() -> None:
    model, x = model_and_input()
    with planning(memory_arenas="always") as records:
        check(torch.compile(model, backend="inductor_ext")(x), model, x)
    offsets = [s.offset for record in records for s in record.storages if s.offset is not None]
    assert offsets
    assert all(offset % 512 == 0 for offset in offsets)


@torch.no_grad()
def test_convolutions_keep_their_workspace() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 32), (32, 48), (48, 3))]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    model = model.cuda()
    x = torch.randn(2, 3, 65, 64, device="cuda")
    peaks = {}
    for name, backend, inductor in (
        ("no reuse", "inductor", {"allow_buffer_reuse": False}),
        ("ours", "inductor_ext", {}),
    ):
        with planning(inductor):
            run = torch.compile(model, backend=backend)
            check(run(x), model, x)
            peaks[name] = peak(lambda run=run: run(x))  # type: ignore[misc]
    assert peaks["ours"] <= peaks["no reuse"], peaks
