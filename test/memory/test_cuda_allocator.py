"""Memory plans with the features of the CUDA caching allocator: results, peaks, owners of memory.

Peaks are compared with Inductor's in the same situation, in bytes as requested from the allocator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from test.support.cuda_memory import (
    SEGMENT,
    check,
    large_model_and_input,
    model_and_input,
    planning,
    pool_bytes,
    requested_bytes,
    requested_peak,
    reset,
)

pytestmark = pytest.mark.gpu

BACKENDS = ("inductor", "inductor_ext")

ALIGNMENT = 512
"""Bytes to which a member of an arena is aligned."""


@pytest.fixture(autouse=True)
def _no_memory_of_other_tests() -> Iterator[None]:
    reset()
    yield
    reset()


def count_members(records: list[Any]) -> int:
    return sum(storage.arena is not None for record in records for storage in record.storages)


class TestCudaGraphs:
    @torch.no_grad()
    def test_pool_is_at_most_inductors(self) -> None:
        reserved, requested = {}, {}
        for backend in BACKENDS:
            reset()
            model, x = large_model_and_input()
            with planning():
                # Triton's kernels are tuned at their first call, which allocates copies.
                torch.compile(model, backend=backend, dynamic=False)(x)
            reset()
            before = pool_bytes()
            with planning({"triton.cudagraphs": True}) as records:
                run = torch.compile(model, backend=backend, dynamic=False)

                def call(run: Any = run, x: torch.Tensor = x) -> torch.Tensor:
                    torch.compiler.cudagraph_mark_step_begin()
                    result: torch.Tensor = run(x)
                    return result

                # The first call warms up, and the second one is recorded.
                requested[backend] = requested_peak(lambda call=call: (call(), call()))  # type: ignore[misc]
                reserved[backend] = pool_bytes() - before
                call()
                check(call().clone(), model, x)
            del run, call
        assert all(reserved.values()), "nothing was recorded"
        slack = ALIGNMENT * count_members(records)
        assert requested["inductor_ext"] <= requested["inductor"] + slack, requested
        # An arena has a segment of its own, which is rounded up.
        slack = SEGMENT * sum(len(record.arenas) for record in records)
        assert reserved["inductor_ext"] <= reserved["inductor"] + slack, reserved

    @pytest.mark.parametrize("pool", ["intermediates", "outputs", "combined"])
    @torch.no_grad()
    def test_outputs_survive_replays(self, pool: str) -> None:
        """Outputs that share an arena are one storage of the graph's pool."""

        def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a = x @ y
            b = a @ y
            return b @ a, (b.relu() @ y) @ y, a.sum(1)

        settings = {"triton.cudagraphs": True, "memory_pool": pool}
        with planning(settings, memory_arenas="always") as records:
            run = torch.compile(several, backend="inductor_ext")
            generator = torch.Generator("cuda").manual_seed(0)
            for _ in range(5):
                x, y = (
                    torch.randn(256, 256, device="cuda", generator=generator) / 16 for _ in "xy"
                )
                torch.compiler.cudagraph_mark_step_begin()
                got = run(x, y)
                expected = several(x.double(), y.double())
                for value, reference in zip(got, expected, strict=True):
                    torch.testing.assert_close(value.double(), reference, atol=1e-3, rtol=1e-3)
        assert count_members(records) > 0

    def test_training(self) -> None:
        model, x = model_and_input(torch.float32)
        settings = {"triton.cudagraphs": True}
        with planning(settings, memory_arenas="always") as records:
            run = torch.compile(model, backend="inductor_ext")
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                model.zero_grad()
                run(x).square().mean().backward()
            got = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        exact = model.double()
        exact.zero_grad()
        exact(x.double()).square().mean().backward()
        for grad, parameter in zip(got, exact.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(grad.double(), parameter.grad, atol=1e-3, rtol=1e-3)
        assert {record.kind for record in records} == {"forward", "backward"}
        assert count_members(records) > 0


@pytest.mark.parametrize("setting", ["", "expandable_segments:True"])
def test_settings_of_the_allocator(setting: str) -> None:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if setting:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = setting
    child = [sys.executable, "-m", "test.support.children.allocator_peaks"]
    finished = subprocess.run(
        child, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    runs = json.loads(finished.stdout.splitlines()[-1])
    assert all(run["error"] < 1e-3 for run in runs.values()), runs
    assert runs["always"]["members"] > 0 < runs["graphs"]["members"]
    auto, inductor = runs["auto"], runs["inductor"]
    assert auto["requested"] <= inductor["requested"] + ALIGNMENT * auto["members"], runs
    # Expandable segments grow by pages of 20 MiB; other segments are rounded up.
    slack = 20 << 20 if setting else SEGMENT * auto["arenas"]
    assert auto["reserved"] <= inductor["reserved"] + slack, runs


class TestMemoryPools:
    @torch.no_grad()
    def test_a_call_allocates_from_the_current_pool(self) -> None:
        model, x = large_model_and_input()
        with planning(memory_arenas="always") as records:
            run = torch.compile(model, backend="inductor_ext", dynamic=False)
            run(x)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            others = torch.cuda.memory_reserved()
            pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(pool):
                output = run(x)
            torch.cuda.synchronize()
            inside = pool_bytes(pool.id)
            assert torch.cuda.memory_reserved() - others == inside
            assert inside >= max(arena.bytes for record in records for arena in record.arenas)
            check(output, model, x)
            # Only the output keeps memory of the pool.
            live = sum(
                block["requested_size"]
                for segment in torch.cuda.memory_snapshot()
                if tuple(segment["segment_pool_id"]) == tuple(pool.id)
                for block in segment["blocks"]
                if block["state"] == "active_allocated"
            )
            assert live == output.nbytes
            del output

    @torch.no_grad()
    def test_pool_is_at_most_inductors(self) -> None:
        reserved = {}
        for backend in BACKENDS:
            reset()
            model, x = large_model_and_input()
            with planning() as records:
                run = torch.compile(model, backend=backend, dynamic=False)
                run(x)
                pool = torch.cuda.MemPool()
                with torch.cuda.use_mem_pool(pool):
                    for _ in range(2):
                        run(x)
                torch.cuda.synchronize()
                reserved[backend] = pool_bytes(pool.id)
            del run, pool
        arenas = sum(len(record.arenas) for record in records)
        assert 0 < reserved["inductor_ext"] <= reserved["inductor"] + arenas * SEGMENT, reserved


class TestStreams:
    @pytest.mark.parametrize("arenas", ["auto", "always"])
    @torch.no_grad()
    def test_calls_on_two_streams_overlap(self, arenas: str) -> None:
        """An arena belongs to the stream of its call."""
        model, x = model_and_input(torch.float32)
        inputs = [x + index for index in range(8)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        with planning(memory_arenas=arenas) as records:
            run = torch.compile(model, backend="inductor_ext", dynamic=False)
            run(x)
            torch.cuda.synchronize()
            outputs = []
            for index, value in enumerate(inputs):
                stream = streams[index % 2]
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    # The host runs ahead: memory of a call is freed before its kernels have run.
                    torch.cuda._sleep(2_000_000)
                    outputs.append(run(value))
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)
        for value, output in zip(inputs, outputs, strict=True):
            check(output, model, value)
        assert arenas == "auto" or count_members(records) > 0

    @torch.no_grad()
    def test_peak_is_at_most_inductors(self) -> None:
        peaks = {}
        for backend in BACKENDS:
            reset()
            model, x = large_model_and_input()
            side = torch.cuda.Stream()
            with planning() as records:
                run = torch.compile(model, backend=backend, dynamic=False)

                def call(run: Any = run, x: torch.Tensor = x, side: Any = side) -> None:
                    side.wait_stream(torch.cuda.current_stream())
                    first = run(x)
                    with torch.cuda.stream(side):
                        second = run(x)
                    torch.cuda.current_stream().wait_stream(side)
                    (first + second).sum()

                call()
                peaks[backend] = requested_peak(call)
            del run, call
        slack = ALIGNMENT * count_members(records)
        assert peaks["inductor_ext"] <= peaks["inductor"] + slack, peaks

    @pytest.mark.parametrize("arenas", ["auto", "always"])
    @torch.no_grad()
    def test_custom_operator_with_its_own_stream(self, arenas: str) -> None:
        """`record_stream` of an operand protects it until the operator's stream has read it."""
        side = torch.cuda.Stream()

        def start(x: torch.Tensor) -> torch.Tensor:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)
                result = x.sin()
            x.record_stream(side)
            result.record_stream(torch.cuda.current_stream())
            return result

        def wait(result: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
            torch.cuda.current_stream().wait_stream(side)
            return result.clone()

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result = torch.ops.inductor_ext_lag.start(x @ y)
            # Matmuls whose results would overwrite the operand.
            other = ((y @ x) @ y) @ x
            other = (other @ y) @ x
            return torch.ops.inductor_ext_lag.wait(result, other) + other

        with torch.library._scoped_library("inductor_ext_lag", "DEF") as library:
            library.define("start(Tensor x) -> Tensor")
            library.define("wait(Tensor result, Tensor after) -> Tensor")
            library.impl("start", torch.empty_like, "Meta")
            library.impl("wait", lambda result, after: torch.empty_like(result), "Meta")
            library.impl("start", start, "CUDA")
            library.impl("wait", wait, "CUDA")
            x, y = (torch.randn(512, 512, device="cuda") / 512**0.5 for _ in "xy")
            with planning(memory_arenas=arenas, memory_debug=True):
                run = torch.compile(function, backend="inductor_ext", fullgraph=True)
                got = [run(x, y) for _ in range(3)]
            torch.cuda.synchronize()
        x, y = x.double(), y.double()
        other = ((y @ x) @ y) @ x
        other = (other @ y) @ x
        for value in got:
            torch.testing.assert_close(value.double(), (x @ y).sin() + other, atol=1e-3, rtol=1e-3)


class TestPinnedMemory:
    @staticmethod
    def stage(h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Results of the CPU that are copied to the GPU, of the same size."""
        first = (h @ h).to("cuda", non_blocking=True)
        second = (h @ h.t()).to("cuda", non_blocking=True)
        staged = h @ h.cos()
        third = staged.to("cuda", non_blocking=True)
        # A kernel that could write in place of what is copied.
        other = staged + 1
        return first @ y, second @ y, third @ y, other @ h

    @pytest.mark.parametrize("arenas", ["never", "auto", "always"])
    @torch.no_grad()
    def test_copies_to_the_gpu_run_later(self, arenas: str) -> None:
        h = torch.randn(256, 256) / 16
        y = torch.randn(256, 256, device="cuda") / 16
        with planning(memory_arenas=arenas):
            run = torch.compile(self.stage, backend="inductor_ext")
            run(h, y)
            for index in range(3):
                value = h * (index + 1)
                torch.cuda.synchronize()
                # The copies wait for it, while the CPU goes on.
                torch.cuda._sleep(200_000_000)
                got = run(value, y)
                expected = self.stage(value.double(), y.double())
                for one, reference in zip(got, expected, strict=True):
                    torch.testing.assert_close(one.double(), reference, atol=1e-3, rtol=1e-3)

    @torch.no_grad()
    def test_copies_from_the_gpu(self) -> None:
        """An output that is copied asynchronously is pinned and owns its memory."""

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return ((x @ y) @ y).to("cpu", non_blocking=True)

        x, y = (torch.randn(256, 256, device="cuda") / 16 for _ in "xy")
        with planning(memory_arenas="always"):
            run = torch.compile(function, backend="inductor_ext")
            got = [run(x + index, y) for index in range(3)]
        torch.cuda.synchronize()
        for index, value in enumerate(got):
            assert value.is_pinned()
            assert value.untyped_storage().nbytes() == value.nbytes
            expected = ((x.double() + index) @ y.double()) @ y.double()
            torch.testing.assert_close(value.double(), expected.cpu(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("arenas", ["auto", "always"])
@torch.no_grad()
def test_after_a_call_only_the_output_is_allocated(arenas: str) -> None:
    model, x = large_model_and_input()

    def first_rows(x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = model(x)[:1, :2]
        return rows

    with planning(memory_arenas=arenas) as records:
        run = torch.compile(first_rows, backend="inductor_ext", dynamic=False)
        run(x)
        torch.cuda.synchronize()
        before = requested_bytes()
        output = run(x)
        kept = requested_bytes() - before
    assert kept == output.untyped_storage().nbytes() <= x.nbytes
    assert arenas == "auto" or count_members(records) > 0


@torch.no_grad()
def test_peaks_over_changing_shapes() -> None:
    """Calls of many lengths, as `benchmarks.memory.fragmentation` makes them."""
    lengths = [511, 17, 300, 64, 480, 200, 33, 511]
    peaks = {}
    for backend in BACKENDS:
        reset()
        model, x = large_model_and_input()
        inputs = [x[:, :length].contiguous() for length in lengths]
        with planning() as records:
            run = torch.compile(model, backend=backend, dynamic=True)
            for value in inputs:
                run(value)
            peaks[backend] = [
                requested_peak(lambda run=run, value=value: run(value))  # type: ignore[misc]
                for value in inputs
            ]
            check(run(inputs[2]), model, inputs[2])
    slack = ALIGNMENT * count_members(records)
    pairs = zip(peaks["inductor_ext"], peaks["inductor"], strict=True)
    assert all(own <= other + slack for own, other in pairs), peaks
