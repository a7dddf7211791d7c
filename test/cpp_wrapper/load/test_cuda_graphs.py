"""`load` with `cuda_graphs`, with weights of the caller, and with `warm_up`, on a GPU."""

from __future__ import annotations

import concurrent.futures
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.cuda_graphs import CudaGraphs

gpu = pytest.mark.gpu


class Net(nn.Module):
    """A matmul, a counter, and a sum that keeps a size of 1."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        y = self.linear(x).relu()
        return y + self.calls, y.sum(1, keepdim=True).expand(-1, 3)


def compile_model(
    model: nn.Module, args: tuple[Any, ...], path: pathlib.Path, shapes: Any = None
) -> str:
    program = torch.export.export(model, args, dynamic_shapes=shapes)
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    return str(path)


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval().cuda()


@pytest.fixture(scope="module")
def package(net: Net, tmp_path_factory: pytest.TempPathFactory) -> str:
    x = torch.randn(4, 256, device="cuda")
    path = tmp_path_factory.mktemp("graphs") / "net.pt2"
    return compile_model(net, (x,), path, ({0: Dim("rows", min=1, max=64)},))


def graphs_of(model: Any) -> CudaGraphs:
    graphs = model._instance.graphs
    assert isinstance(graphs, CudaGraphs)
    return graphs


def count_replays(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one with each launch of a graph."""
    launches: list[int] = []
    original = torch.cuda.CUDAGraph.replay

    def replay(self: torch.cuda.CUDAGraph) -> None:
        launches.append(1)
        original(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    return launches


def expected_results(net: Net, x: torch.Tensor, calls: int) -> tuple[torch.Tensor, torch.Tensor]:
    y = net.linear(x).relu()
    return y + calls, y.sum(1, keepdim=True).expand(-1, 3)


@gpu
@torch.no_grad()
def test_calls_of_captured_sizes_launch_a_graph(
    package: str, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [(torch.randn(rows, 256, device="cuda"),) for rows in (1, 4)]
    model = inductor_ext.load(package, cuda_graphs=examples)
    launches = count_replays(model, monkeypatch)
    kept = []
    for number, (rows, total) in enumerate([(4, 1), (1, 2), (3, 2), (4, 3), (64, 3)], 1):
        x = torch.randn(rows, 256, device="cuda")
        kept.append((model(x), expected_results(net, x, number)))
        assert len(launches) == total
    for actual, expected in kept:  # later calls did not overwrite results
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@gpu
@torch.no_grad()
def test_new_constants_reach_the_graphs(
    package: str, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 256, device="cuda")
    model = inductor_ext.load(package, cuda_graphs=[(x,)])
    launches = count_replays(model, monkeypatch)
    torch.manual_seed(1)
    others = [Net().eval().cuda() for _ in range(4)]

    def check(expected: Net) -> None:
        before = len(launches)
        result = model(x)
        assert len(launches) == before + 1
        calls = int(model.constants()["calls"].item())
        torch.testing.assert_close(
            result, expected_results(expected, x, calls), rtol=1e-3, atol=1e-3
        )

    check(net)
    model.load_state_dict(others[0].state_dict())
    check(others[0])
    model.update_constants(dict(others[1].state_dict()), inactive=True)
    check(others[0])
    model.swap_constants()
    check(others[1])
    model.load_constants(dict(others[2].state_dict()), check_full_update=True, user_managed=True)
    check(others[2])
    model.update_constants({"linear.weight": others[3].linear.weight.cpu()})
    others[3].linear.bias.copy_(others[2].linear.bias)
    check(others[3])


@gpu
@torch.no_grad()
def test_buffers_keep_their_values(package: str) -> None:
    x = torch.zeros(4, 256, device="cuda")
    model = inductor_ext.load(package, warm_up=True, cuda_graphs=[(x,), {"x": x[:2]}])
    assert model.constants()["calls"].item() == 0
    model(x)
    assert model.constants()["calls"].item() == 1


@gpu
@torch.no_grad()
def test_threads_and_streams(package: str, net: Net) -> None:
    model = inductor_ext.load(
        package, num_runners=4, cuda_graphs=[(torch.zeros(4, 256, device="cuda"),)]
    )
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for number in range(40):
                rows = 4 if number % 3 else 1 + seed
                x = torch.randn(rows, 256, device="cuda", generator=generator)
                actual = model(x)[1]
                expected = net.linear(x).relu().sum(1, keepdim=True).expand(-1, 3)
                if not torch.allclose(actual, expected, rtol=1e-3, atol=1e-2):
                    wrong.append(f"{seed}: {number}")

    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert wrong == []


@gpu
@torch.no_grad()
def test_random_numbers_differ_between_launches(tmp_path: pathlib.Path) -> None:
    class Noise(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    x = torch.zeros(1000, device="cuda")
    model = inductor_ext.load(
        compile_model(Noise(), (x,), tmp_path / "noise.pt2"), cuda_graphs=[(x,)]
    )
    one, two = model(x), model(x)
    assert not torch.equal(one, two)
    for result in (one, two):
        assert 0.4 < result.mean().item() < 0.6


class ChangesInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2


class TakesCpu(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y.to("cuda")


class TakesScalar(nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x * n


class Waits(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


@gpu
@pytest.mark.parametrize(
    ("model", "args", "shapes", "why"),
    [
        (ChangesInput(), (8,), None, "it changes its inputs"),
        (TakesCpu(), (8, "cpu"), None, "input 'y' is on cpu"),
        (TakesScalar(), (8, 3), (None, Dim.DYNAMIC), "input 'n' is on cpu"),  # type: ignore[attr-defined]
        (Waits(), (8,), None, "captur"),
    ],
    ids=["changes its input", "CPU input", "scalar", "waits"],
)
def test_what_cannot_be_captured_is_refused(
    model: nn.Module, args: Sequence[Any], shapes: Any, why: str, tmp_path: pathlib.Path
) -> None:
    values = tuple(
        torch.ones(8, device="cuda") if value == 8 else torch.ones(8) if value == "cpu" else value
        for value in args
    )
    path = compile_model(model, values, tmp_path / "net.pt2", shapes)
    expected = inductor_ext.load(path)(*(v.clone() if torch.is_tensor(v) else v for v in values))
    with pytest.raises(exc.CudaGraphError, match=why):
        inductor_ext.load(path, cuda_graphs=[values])
    # The failed capture leaves a GPU that works, and a generator that has lost no numbers.
    torch.cuda.manual_seed(0)
    expected_numbers = torch.rand(4, device="cuda")
    torch.cuda.manual_seed(0)
    with pytest.raises(exc.CudaGraphError, match=why):
        inductor_ext.load(path, cuda_graphs=[values])
    assert torch.equal(torch.rand(4, device="cuda"), expected_numbers)
    actual = inductor_ext.load(path)(*(v.clone() if torch.is_tensor(v) else v for v in values))
    torch.testing.assert_close(actual, expected)


@gpu
@torch.no_grad()
def test_a_state_dict_on_the_gpu_is_used_without_a_copy(package: str, net: Net) -> None:
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    state["calls"].zero_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    models = [inductor_ext.load(package, weights=state) for _ in range(3)]
    assert torch.cuda.memory_allocated() == before
    x = torch.randn(4, 256, device="cuda")
    for number, model in enumerate(models, 1):
        expected = expected_results(net, x, number)
        torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    assert state["calls"].item() == 3


@gpu
def test_tensors_of_the_caller_must_be_aligned_and_on_the_device(package: str, net: Net) -> None:
    state = dict(net.state_dict())
    shifted = torch.empty(256 * 256 + 1, device="cuda")[1:].view(256, 256)
    for name, tensor, why in (
        ("linear.weight", shifted, "is not aligned to 16 bytes"),
        ("linear.bias", net.linear.bias.detach().cpu(), "is on cpu, and the model's is on cuda:"),
    ):
        with pytest.raises(exc.ConstantMismatchError, match=why):
            inductor_ext.load(package, weights={**state, name: tensor})


@gpu
@torch.no_grad()
@pytest.mark.parametrize("gap", [0, 100_003])
def test_weights_of_many_blocks_reach_the_gpu(tmp_path: pathlib.Path, gap: int) -> None:
    """Constants of odd sizes, over many blocks, are bit for bit those of the module."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index, size in enumerate((1, 1_000_003 + gap, 5, 3_000_001, 77)):
                self.register_buffer(f"table{index}", torch.randn(size, device="cuda"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + sum(table.sum() for table in self.buffers())

    module = Tables()
    path = compile_model(module, (torch.zeros(2, device="cuda"),), tmp_path / "tables.pt2")
    model = inductor_ext.load(path)
    for name, tensor in model.constants().items():
        assert torch.equal(tensor, module.get_buffer(name))


def test_models_on_the_cpu_refuse_graphs(path: str) -> None:
    with pytest.raises(exc.CudaGraphError, match="it runs on the CPU"):
        inductor_ext.load(path, cuda_graphs=[(torch.ones(4, 8),)])


@pytest.mark.parametrize("calls", [1, None, [3], [torch.ones(4, 8)]])
def test_no_calls(path: str, calls: Any) -> None:
    with pytest.raises(exc.BadArgumentError, match="Invalid cuda_graphs="):
        inductor_ext.load(path, cuda_graphs=calls)
