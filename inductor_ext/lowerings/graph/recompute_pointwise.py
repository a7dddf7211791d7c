"""Chooses elementwise results that a backward computes again instead of keeping them.

The gradient of a weight is a matmul that reads the activation which the forward's matmul read: the
result of GELU, of a gate, or of a norm's scale and shift. AOTAutograd's partitioner always saves
such a result, because the backward would have to write it to memory again. The operands of the
elementwise operator are usually saved as well, for its own gradient, so that the result is a second
copy of the same information. It is a third of what a layer of a transformer saves.

`choose_results` returns the results that cost little to write again, compared with the matmuls of
the graph. The partitioner may then leave them out, and does so if fewer bytes are saved.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from inductor_ext.flops import count_flops
from inductor_ext.lowerings.graph.live_values import count_bytes
from inductor_ext.lowerings.graph.operator_kinds import is_pointwise
from inductor_ext.templates.device import Device

if TYPE_CHECKING:
    from torch import fx

TIME_SHARE = 0.01
"""Maximum time of the recomputation, as a share of the time of the graph's matmuls, convolutions
and attention."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast a device computes."""

    matmul: Callable[[torch.dtype, bool], float]
    """FLOP/s of matmuls by the dtype of the operands, and whether it is a convolution."""
    write: float
    """Bytes/s of an elementwise kernel: what it writes."""
    launch: float
    """Seconds per kernel."""


def choose_results(
    graph: fx.Graph,
    is_forward: Callable[[fx.Node], bool],
    rates: Callable[[torch.device], Rates | None],
) -> list[fx.Node]:
    """Choose the results that the backward may compute again, the largest first.

    Args:
        graph: a joint graph of forward and backward, after joint passes.
        is_forward: whether the forward needs a node.
        rates: of a device; None if they are not known.
    """
    rates = functools.cache(rates)
    candidates = sorted(_list_candidates(graph, is_forward), key=count_bytes, reverse=True)
    if not candidates:
        return []
    remaining = TIME_SHARE * sum(_matmul_seconds(node, rates) for node in graph.nodes)
    chosen = []
    for node in candidates:
        rate = rates(node.meta["val"].device)
        seconds = math.inf if rate is None else rate.launch + count_bytes(node) / rate.write
        if seconds <= remaining:
            remaining -= seconds
            chosen.append(node)
    return chosen


def _list_candidates(graph: fx.Graph, is_forward: Callable[[fx.Node], bool]) -> Iterator[fx.Node]:
    """Yield the elementwise results of the forward that an operator of the backward reads from
    memory.
    """
    from torch._functorch.partitioners import get_default_op_list

    operators = get_default_op_list()
    returned = set(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        value = node.meta.get("val")
        if (
            not isinstance(value, torch.Tensor)
            or not is_pointwise(node)
            or not operators.is_recomputable(node)
            or not is_forward(node)
            or "recompute" in node.meta
            # Its size is not known before the run.
            or not count_bytes(node)
        ):
            continue
        names = _list_views(node, operators.is_view)
        # The caller keeps what the graph returns.
        if returned.isdisjoint(names) and any(
            not is_forward(user) and not operators.is_fusible(user)
            for name in names
            for user in name.users
        ):
            yield node


def _list_views(node: fx.Node, is_view: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Return a result and the views of it."""
    views = [node]
    for view in views:
        views += [user for user in view.users if is_view(user) and user not in views]
    return views


def _matmul_seconds(node: fx.Node, rates: Callable[[torch.device], Rates | None]) -> float:
    """Return the time of a matmul, a convolution or attention; 0 for other nodes."""
    flops = count_flops(node)
    if not flops:
        return 0.0
    operand = next(
        value
        for source in node.all_input_nodes
        if isinstance(value := source.meta.get("val"), torch.Tensor)
    )
    rate = rates(operand.device)
    is_convolution = "convolution" in str(node.target)
    return 0.0 if rate is None else flops / rate.matmul(operand.dtype, is_convolution)


def device_rates(device: torch.device) -> Rates | None:
    """Return the rates of a device of this machine; None if they are not known."""
    if device.type == "cpu":
        return cpu_rates(torch.get_num_threads())
    if device.type == "cuda" and torch.version.hip is None:
        return gpu_rates(Device.from_torch(torch.cuda.get_device_properties(device)))
    return None


def gpu_rates(gpu: Device) -> Rates:
    """Return the rates of a GPU."""

    def matmul(dtype: torch.dtype, is_convolution: bool) -> float:
        if dtype.itemsize < 4:
            return max(gpu.half, gpu.fp8 if dtype.itemsize == 1 else 0.0, gpu.fma)
        backends: Any = torch.backends
        # `allow_tf32` raises an error if the precision was set in another way.
        settings = backends.cudnn.conv if is_convolution else backends.cuda.matmul
        is_tf32 = dtype == torch.float32 and settings.fp32_precision == "tf32"
        return max(gpu.tf32, gpu.fma) if is_tf32 else gpu.fma

    # What is computed again reads several saved tensors: the time of a training step of BART on an
    # H200 grew by 1.8 % where reading as much as writing would have meant 1 %.
    return Rates(matmul, gpu.bandwidth / 4, gpu.launch * 1e-6)


def cpu_rates(threads: int) -> Rates:
    """Return the rates of a CPU.

    In FLOP/s per thread, 90e9 in float32 and 210e9 in bfloat16 were measured with AVX-512; AMX is
    faster. GELU of float32 took 2.7 ns per element with two threads, on one socket of an EPYC.
    """

    def matmul(dtype: torch.dtype, is_convolution: bool) -> float:
        return threads * (1e11 if dtype.itemsize >= 4 else 1e12)

    return Rates(matmul, threads * 0.75e9, 0.0)
