"""For GPU tests of matmuls: the device, and compiles whose kernels only the test selects."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from inductor_ext.templates.device import Device

__all__ = ["compiling", "device"]


@functools.cache
def device() -> Device:
    """The first GPU."""
    return Device.from_torch(torch.cuda.get_device_properties(0))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, every graph is compiled, with its matmuls unchanged.

    A graph cache would return a graph regardless of what a test forces; compiled kernels are
    cached. For odd sizes Inductor measures whether a padded matmul is faster, and no fusion matches
    its slice, so results would depend on timings.
    """
    with (
        inductor_config.patch(fx_graph_cache=False, shape_padding=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
