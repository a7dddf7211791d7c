"""What GPU tests of products share: the device, and compiles that only the test decides about."""

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
    return Device.described(torch.cuda.get_device_properties(0))


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, every graph is compiled, with the products that it has.

    A cache of graphs would serve a graph whatever a test forces; what compilers make of a kernel's
    source is the same every time, and is kept. Of odd sizes stock measures whether a padded product
    is faster, and no fusion is found around the slice of one: that depends on the clock.
    """
    with (
        inductor_config.patch(fx_graph_cache=False, shape_padding=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield
