"""For tests of memory on a GPU: a transformer, its reference, and what the allocator counts."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch._inductor import config as inductor_config

import inductor_ext
from benchmarks.harness import measure
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord

__all__ = [
    "SEGMENT",
    "Block",
    "check",
    "large_model_and_input",
    "model_and_input",
    "peak",
    "planning",
    "pool_bytes",
    "requested_bytes",
    "requested_peak",
    "reset",
]

SEGMENT = 2 << 20
"""Bytes to which the caching allocator rounds a large segment."""


@contextlib.contextmanager
def planning(
    inductor: dict[str, Any] | None = None, **extension: Any
) -> Iterator[list[MemoryPlanRecord]]:
    """Compile uncached, with settings of the extension and of Inductor; yield the plans."""
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
    """Two blocks and an input of odd length, on the GPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block()).cuda().to(dtype)
    return model, torch.randn(3, 65, 128, device="cuda", dtype=dtype)


def large_model_and_input() -> tuple[torch.nn.Module, torch.Tensor]:
    """A model of which most buffers have segments of their own, and its input."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(512, 8), Block(512, 8)).cuda()
    return model, torch.randn(8, 511, 512, device="cuda")


def check(got: torch.Tensor, model: torch.nn.Module, x: torch.Tensor) -> None:
    """Compare with eager mode in float64."""
    expected = copy.deepcopy(model).double()(x.double())
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=2e-2)


def reset() -> None:
    """Forget compiled code and recorded graphs, and return all free memory to the GPU.

    cuBLAS keeps a workspace for each stream (32 MiB on an H100). CUDA graphs run on a stream that
    earlier work may have used, so that only some calls would allocate it.
    """
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    torch._dynamo.reset()
    reset_cudagraph_trees()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()


def pool_bytes(pool: tuple[int, int] | None = None) -> int:
    """Return the bytes that a memory pool has reserved.

    Args:
        pool: id of the pool; None for all pools except the default one, such as those of CUDA
            graphs.
    """
    segments = torch.cuda.memory_snapshot()
    ids = [tuple(segment["segment_pool_id"]) for segment in segments]
    return sum(
        segment["total_size"]
        for segment, owner in zip(segments, ids, strict=True)
        if (owner != (0, 0) if pool is None else owner == tuple(pool))
    )


def requested_bytes(moment: str = "current") -> int:
    """Return the bytes of all allocations as they were requested.

    The allocator does not split a cached block of which less than 1 MB would be left, and counts
    all of it as allocated.

    Args:
        moment: "current", or "peak" for the maximum since peaks were reset.
    """
    requested: int = torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"]
    return requested


def requested_peak(call: Callable[[], Any]) -> int:
    """Return the peak of `requested_bytes` in a call, above the level before it."""
    torch.cuda.synchronize()
    # Reference cycles of earlier tests would otherwise be freed during the call.
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = requested_bytes()
    call()
    torch.cuda.synchronize()
    return requested_bytes("peak") - before


def peak(call: Callable[[], Any]) -> int:
    """Peak bytes of the second call, beyond the memory that was allocated before."""
    call()
    torch.cuda.synchronize()
    # Reference cycles of earlier tests would otherwise be freed during the call.
    gc.collect()
    # The allocator does not split a cached block of which less than 1 MB would be left, and counts
    # all of it.
    torch.cuda.empty_cache()
    for _ in range(5):
        before = torch.cuda.memory_allocated()
        found = measure.measure_gpu_peak(call)
        # What an earlier test left may be freed during the call.
        if torch.cuda.memory_allocated() == before:
            return found
    raise AssertionError("every call changes the level of allocated memory")
