"""Uncached compiles with memory planning, and a chain of matmuls that has several live buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch._inductor import config as inductor_config

import inductor_ext
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord


@contextlib.contextmanager
def planning(**patches: Any) -> Iterator[list[MemoryPlanRecord]]:
    """Compile uncached, with settings of the extension and of Inductor by name; yield the plans."""
    torch._dynamo.reset()
    own = {name: value for name, value in patches.items() if name.startswith("memory_")}
    theirs = {name: own.pop(name) for name in ("memory_planning", "memory_pool") if name in own}
    theirs |= {name: value for name, value in patches.items() if name not in own | theirs}
    with (
        inductor_ext.config.patch(own),
        inductor_config.patch({"fx_graph_cache": False, **theirs}),
        events.capture(MemoryPlanRecord) as records,
    ):
        yield records


def matmuls(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Six matmuls; five square intermediates are alive at the peak's kernel or before."""
    a = x @ y
    b = a @ z
    c = b.relu() @ a
    return ((c @ b) @ c).sum(0)


def squares(size: int, count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, size, generator=generator) / size**0.5 for _ in range(count)]


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="inductor_ext", **options)


def check(run: Callable[..., Any], reference: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Compare with eager in float64."""
    expected = reference(*(value.double() for value in inputs))
    torch.testing.assert_close(run(*inputs).double(), expected, atol=1e-4, rtol=1e-4)
