"""Elementwise results that a backward computes again instead of keeping them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import partitioners

from inductor_ext.lowerings.graph import recompute_pointwise
from inductor_ext.lowerings.graph.recompute_segments import list_forward
from inductor_ext.templates.device import KNOWN
from test.support.memory_compiles import compiled, planning

H200 = next(device for device in KNOWN if device.name == "NVIDIA H200")
WIDTH = 32


class Block(nn.Module):
    """Matmuls that read a norm's result, an activation, and a gate's result."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down, self.out = nn.Linear(4 * width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return self.out(nn.functional.gelu(x + y))  # type: ignore[no-any-return]


Chosen = list[tuple[str, int]]
"""The operators whose results may be recomputed, and the numbers of their elements."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    """Let recomputation take any time; returns what is chosen."""
    seen: Chosen = []
    choose = recompute_pointwise.choose_results

    def record(*arguments: Any) -> list[torch.fx.Node]:
        nodes = choose(*arguments)
        seen.extend((str(node.target), node.meta["val"].numel()) for node in nodes)
        return nodes

    monkeypatch.setattr(recompute_pointwise, "TIME_SHARE", 1e6)
    monkeypatch.setattr(recompute_pointwise, "choose_results", record)
    return seen


def step(function: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    function(x).square().mean().backward()
    assert x.grad is not None
    return x.grad


def saved_bytes(function: Callable[..., torch.Tensor], x: torch.Tensor) -> int:
    """Bytes that a compiled call keeps for the backward, beside inputs, parameters and result."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(x)
    modules = [function] if isinstance(function, nn.Module) else []
    kept = [x, result, *(p for module in modules for p in module.parameters())]
    for tensor in kept:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(saved.values())


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        pytest.param(torch.float32, True, id="float32, dynamic"),
        pytest.param(torch.bfloat16, False, id="bfloat16"),
    ],
)
def test_gradients_equal_float64(chosen: Chosen, dtype: torch.dtype, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Block().to(dtype)
    x = torch.randn(5, 7, WIDTH, dtype=dtype)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    with planning():
        grad = step(compiled(model), x)
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    expected = step(exact, x.double())
    # The gate's result, the norm's, and that of GELU.
    assert [count for _, count in chosen] == [35 * 4 * WIDTH, 35 * WIDTH, 35 * WIDTH]
    atol, rtol = (1e-5, 1e-4) if dtype == torch.float32 else (2e-3, 0.1)
    torch.testing.assert_close(grad.double(), expected, atol=atol, rtol=rtol)
    for parameter, reference in zip(model.parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), reference.grad, atol=atol, rtol=rtol)


def test_fewer_bytes_are_saved(chosen: Chosen) -> None:
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(64, WIDTH, requires_grad=True)
    saved = {}
    for recompute in (False, True):
        with planning(memory_recompute=recompute):
            saved[recompute] = saved_bytes(compiled(model), x)
    unit = 64 * WIDTH * 4
    # The gate's result is not saved, and that of the norm or of GELU.
    assert saved[True] <= saved[False] - 5 * unit


def test_the_setting_restores_inductors_choice(chosen: Chosen) -> None:
    model, x = Block(), torch.randn(64, WIDTH, requires_grad=True)
    with planning(memory_recompute=False):
        own = saved_bytes(compiled(model), x)
    torch._dynamo.reset()
    stock = saved_bytes(torch.compile(model, backend="inductor"), x)
    assert own == stock
    assert not chosen


def test_results_that_the_graph_returns_are_not_chosen(chosen: Chosen) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def returned(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * 2)
        kept.append(y.detach())
        return y.view(-1, WIDTH) @ weight

    kept: list[torch.Tensor] = []
    with planning():
        step(compiled(returned), torch.randn(4, 8, WIDTH))
    assert not chosen


def test_the_users_budget_and_checkpoints_are_kept(chosen: Chosen) -> None:
    from torch._functorch import config as functorch_config
    from torch.utils.checkpoint import checkpoint

    model, x = Block(), torch.randn(64, WIDTH)
    with planning(), functorch_config.patch(ban_recompute_materialized_backward=False):
        step(compiled(model), x)
    assert not chosen
    with planning():
        step(compiled(lambda x: checkpoint(model, x, use_reentrant=False)), x)
    assert not chosen


def joint_graph(function: nn.Module, x: torch.Tensor) -> torch.fx.Graph:
    """Return the graph of forward and backward, which is partitioned as by Inductor."""
    from torch._functorch.aot_autograd import aot_module
    from torch._inductor.decomposition import select_decomp_table

    graphs = []

    def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs.append(copy.deepcopy(gm.graph))
        return partitioners.min_cut_rematerialization_partition(gm, *args, **kwargs)

    aot_module(
        function,
        fw_compiler=lambda gm, _: gm.forward,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(x)
    return graphs[0]


def choose(graph: torch.fx.Graph, rates: recompute_pointwise.Rates) -> list[torch.fx.Node]:
    forward = set(list_forward(graph))
    return recompute_pointwise.choose_results(graph, forward.__contains__, lambda device: rates)


@pytest.mark.parametrize(
    ("width", "dtype", "count"),
    [
        # The matmuls of a layer take time with the square of the width.
        (256, torch.bfloat16, 0),
        (4096, torch.bfloat16, 1),
        (2048, torch.float32, 3),
        (128, torch.float32, 0),
    ],
)
def test_recomputation_must_cost_little_on_a_gpu(
    width: int, dtype: torch.dtype, count: int
) -> None:
    with torch.device("meta"):
        model, x = Block(width).to(dtype), torch.randn(8192, width, dtype=dtype)
    graph = joint_graph(model, x.requires_grad_())
    rates = recompute_pointwise.gpu_rates(H200)
    nodes = choose(graph, rates)
    assert len(nodes) == count
    sizes = [node.meta["val"].numel() for node in nodes]
    assert sizes == sorted(sizes, reverse=True)


def test_the_largest_results_that_fit_into_the_time_are_chosen() -> None:
    with torch.device("meta"):
        model, x = Block(64), torch.randn(1000, 64)
    graph = joint_graph(model, x.requires_grad_())
    # Ten matmuls of 64 x 256 and six of 64 x 64 take a second per 1e9 FLOPs.
    seconds = 2 * 1000 * (9 * 64 * 256 + 3 * 64 * 64) / 1e9
    write = 1000 * 256 * 4 / (recompute_pointwise.TIME_SHARE * seconds)
    largest = choose(graph, recompute_pointwise.Rates(lambda *_: 1e9, write * 1.01, 0.0))
    assert [node.meta["val"].numel() for node in largest] == [1000 * 256]
    # It does not fit, but a smaller one does.
    smaller = choose(graph, recompute_pointwise.Rates(lambda *_: 1e9, write * 0.99, 0.0))
    assert [node.meta["val"].numel() for node in smaller] == [1000 * 64, 1000 * 64]
    launch = recompute_pointwise.TIME_SHARE * seconds
    assert not choose(graph, recompute_pointwise.Rates(lambda *_: 1e9, write * 100, launch))


def test_rates_of_a_cpu() -> None:
    one, four = (recompute_pointwise.cpu_rates(threads) for threads in (1, 4))
    assert four.matmul(torch.float32, False) == 4 * one.matmul(torch.float32, False)
    assert four.write == 4 * one.write
    assert one.matmul(torch.bfloat16, False) > one.matmul(torch.float32, False)
    found = recompute_pointwise.device_rates(torch.device("cpu"))
    assert found is not None
    assert found.launch == 0
    assert recompute_pointwise.device_rates(torch.device("xpu")) is None


@pytest.mark.parametrize("is_convolution", [False, True])
def test_the_rate_of_a_gpu_depends_on_the_precision(
    is_convolution: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: Any = torch.backends
    settings = backends.cudnn.conv if is_convolution else backends.cuda.matmul
    matmul = recompute_pointwise.gpu_rates(H200).matmul
    for precision, rate in (("ieee", H200.fma), ("tf32", H200.tf32)):
        monkeypatch.setattr(settings, "fp32_precision", precision)
        assert matmul(torch.float32, is_convolution) == rate
        assert matmul(torch.float64, is_convolution) == H200.fma
        assert matmul(torch.bfloat16, is_convolution) == H200.half


def test_nothing_is_chosen_on_other_devices() -> None:
    with torch.device("meta"):
        model, x = Block(64), torch.randn(1000, 64)
    graph = joint_graph(model, x.requires_grad_())
    assert recompute_pointwise.choose_results(graph, lambda node: True, lambda device: None) == []
