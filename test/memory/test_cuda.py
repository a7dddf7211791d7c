"""Memory planning on a GPU: values, peaks of the caching allocator, CUDA graphs, C++ wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

from test.support.cuda_memory import check, model_and_input, peak, planning

pytestmark = pytest.mark.gpu


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
