"""Data parallelism: DDP, fully_shard and functional collectives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
import torch._functorch.config
import torch.distributed as dist

from test.support.compile_util import (
    BACKEND,
    TRAINING,
    assert_same,
    check,
    compiled_graphs,
    observe,
)
from test.support.small_net import Net, batch

pytestmark = pytest.mark.usefixtures("every_graph_compiles")


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    """A gloo group of one process, without a network port."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch built without distributed")
@pytest.mark.usefixtures("process_group")
class TestDataParallel:
    @pytest.mark.parametrize("where", ["around", "within"])
    def test_ddp(self, where: str) -> None:
        """torch.compile around DDP, and DDP around a compiled module."""
        from torch.nn.parallel import DistributedDataParallel

        net = Net()
        reference = copy.deepcopy(net)
        if where == "around":
            model = torch.compile(DistributedDataParallel(net), backend=BACKEND)
        else:
            model = DistributedDataParallel(torch.compile(net, backend=BACKEND))
        expected = observe(reference, batch(), reference, backward=True)
        with compiled_graphs() as kinds:
            actual = observe(model, batch(), net, backward=True)
        assert_same(vars(actual), vars(expected))
        assert kinds == TRAINING

    def test_ddp_optimizer_splits_at_buckets(self) -> None:
        """One bucket and one graph per layer, so that each bucket's reduction overlaps the rest."""
        from torch.nn.parallel import DistributedDataParallel

        class Deep(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                # 1 MiB of weights a layer, the size of DDP's first bucket.
                self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x

        net = Deep()
        reference = copy.deepcopy(net)
        model = DistributedDataParallel(net, bucket_cap_mb=1, gradient_as_bucket_view=True)
        x = torch.linspace(-1, 1, 1024).view(2, 512)
        expected = observe(reference, (x,), reference, backward=True)
        with (
            torch._dynamo.config.patch(optimize_ddp="ddp_optimizer"),
            compiled_graphs() as kinds,
        ):
            actual = observe(torch.compile(model, backend=BACKEND), (x,), net, backward=True)
        assert_same(vars(actual), vars(expected))
        assert kinds == {"forward": 3, "backward": 3}

    def test_ddp_communication_hook(self) -> None:
        """A hook that scales gradients instead of averaging them runs once per bucket."""
        from torch.nn.parallel import DistributedDataParallel

        net = Net()
        model = DistributedDataParallel(net)
        calls: list[int] = []

        # Without annotations: DDP checks them, and takes no strings.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            state.append(bucket.index())
            future = torch.futures.Future()
            future.set_result(bucket.buffer() * 4)
            return future

        model.register_comm_hook(calls, hook)
        torch.compile(model, backend=BACKEND)(*batch()).sum().backward()
        plain = torch.autograd.grad(net(*batch()).sum(), list(net.parameters()))
        assert_same([p.grad for p in net.parameters()], [grad * 4 for grad in plain])
        assert calls == [0]

    def test_fully_shard(self) -> None:
        """FSDP2 around compiled blocks and compile around a sharded model."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        net = Net()
        reference = copy.deepcopy(net)
        mesh = init_device_mesh("cpu", (1,))
        for module in (net.first, net.second, net):
            fully_shard(module, mesh=mesh)
        net.compile(backend=BACKEND)
        with compiled_graphs() as kinds:
            y = net(*batch())
            y.square().sum().backward()
        expected = reference(*batch())
        expected.square().sum().backward()
        assert_same(y, expected)
        assert_same(
            [p.grad.full_tensor() for p in net.parameters()],
            [p.grad for p in reference.parameters()],
        )
        assert kinds["forward"] == kinds["backward"] >= 1

    def test_functional_collectives(self) -> None:
        from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

        def f(x: torch.Tensor) -> torch.Tensor:
            y = all_reduce(x.sin(), "sum", dist.group.WORLD)
            return all_gather_tensor(y * 2, 0, dist.group.WORLD) + 1

        check(f, batch, fullgraph=True)
