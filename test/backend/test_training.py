"""Training through our backend: gradients, hooks, checkpointing, optimizers, data parallelism."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
import torch._functorch.config
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from test.support import compile_util
from test.support.compile_util import (
    BACKEND,
    BACKENDS,
    TRAINING,
    assert_same,
    check,
    compiled_graphs,
    observe,
)


@pytest.fixture(autouse=True)
def _every_graph_compiles() -> Iterator[None]:
    with compile_util.every_graph_compiles():
        yield


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def batch(rows: int = 3) -> tuple[torch.Tensor]:
    return (torch.linspace(-1, 1, rows * 4).view(rows, 4),)


def differentiable_batch() -> tuple[torch.Tensor]:
    return (batch()[0].requires_grad_(),)


class OperatorSpy(CustomGraphPass):
    """A post-grad pass that notes the operators of each graph that compiles."""

    def __init__(self) -> None:
        self.graphs: list[list[Any]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append([node.target for node in graph.nodes if node.op == "call_function"])

    def uuid(self) -> None:
        """No cache: a hit would not run the pass."""


class TestSteps:
    @pytest.mark.parametrize(
        "make_optimizer",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
        ],
        ids=["sgd", "adamw"],
    )
    def test_losses_and_weights_over_ten_steps(self, make_optimizer: Callable[..., Any]) -> None:
        net = Net()

        def train(model: torch.nn.Module, forward: Callable[..., Any]) -> list[float]:
            optimizer = make_optimizer(model.parameters())
            losses = []
            for step in range(10):
                optimizer.zero_grad()
                loss = F.mse_loss(forward(*batch(5)), torch.full((5, 2), 0.5 + step / 20))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        reference = copy.deepcopy(net)
        expected = train(reference, reference)
        with compiled_graphs() as kinds:
            actual = train(net, torch.compile(net, backend=BACKEND))
        assert kinds == TRAINING
        assert actual == pytest.approx(expected, rel=1e-4)
        assert actual[-1] < actual[0] / 2
        assert_same(list(net.parameters()), list(reference.parameters()), tolerance=1e-4)

    def test_whole_step_compiled(self) -> None:
        """Forward, backward and a compiled optimizer step; the step is an inference graph."""

        def train(compiling: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            net = Net()
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            step: Callable[[], Any] = optimizer.step
            forward: Callable[..., Any] = net
            if compiling:
                step = torch.compile(step, backend=BACKEND)
                forward = torch.compile(net, backend=BACKEND)
            for _ in range(3):
                forward(*batch()).square().sum().backward()
                step()
                optimizer.zero_grad()
            state = [s["exp_avg_sq"] for s in optimizer.state.values()]
            return [*(p.detach() for p in net.parameters()), *state]

        expected = train(False)
        with compiled_graphs() as kinds:
            actual = train(True)
        assert_same(actual, expected, tolerance=1e-5)
        # Adam's first step starts from no state, its second from some: two graphs at most.
        assert TRAINING.items() <= kinds.items()
        assert 1 <= kinds["inference"] <= 2

    def test_gradient_accumulation(self) -> None:
        net = Net()
        reference = copy.deepcopy(net)
        compiled = check(net, batch, backward=True)
        observe(compiled, batch(), net, backward=True)
        for _ in range(2):
            observe(reference, batch(), reference, backward=True)
        assert_same([p.grad for p in net.parameters()], [p.grad for p in reference.parameters()])

    def test_frozen_parameters_and_unused_outputs(self) -> None:
        """Gradients that eager mode leaves None stay None."""

        class Partial(Net):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                hidden = self.first(x)
                return hidden.sin(), self.second(hidden).detach(), hidden.argmax(dim=1)

        net = Partial()
        net.first.bias.requires_grad_(False)
        check(net, differentiable_batch, backward=True)
        assert [name for name, p in net.named_parameters() if p.grad is None] == [
            "first.bias",
            "second.weight",
            "second.bias",
        ]

    def test_backward_of_one_output_of_two(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin(), x.exp()

        compiled = torch.compile(f, backend=BACKEND)
        with compiled_graphs() as kinds:
            for function in (f, compiled):
                (x,) = differentiable_batch()
                function(x)[1].sum().backward()
                assert_same(x.grad, x.detach().exp())
        assert kinds == TRAINING

    def test_autograd_grad_of_chosen_inputs(self) -> None:
        net = Net()
        compiled = torch.compile(net, backend=BACKEND)
        (x,) = differentiable_batch()
        expected = torch.autograd.grad(net(x).sum(), [x, net.second.bias])
        actual = torch.autograd.grad(compiled(x).sum(), [x, net.second.bias])
        assert_same(actual, expected)
        assert net.first.weight.grad is None

    def test_retained_graph_runs_its_backward_twice(self) -> None:
        net = Net()
        compiled = torch.compile(net, backend=BACKEND)
        with compiled_graphs() as kinds:
            loss = compiled(*batch()).sum()
            loss.backward(retain_graph=True)
            once = net.first.weight.grad.clone()
            loss.backward()
        assert_same(net.first.weight.grad, once * 2)
        assert kinds == TRAINING

    def test_donated_buffers_forbid_a_retained_graph_as_in_inductor(self) -> None:
        """A backward compiled to reuse saved tensors' memory cannot run twice."""

        def attempt(backend: str) -> None:
            compiled = torch.compile(Net(), backend=backend)
            compiled(*batch()).sum().backward()
            compiled(*batch()).sum().backward(retain_graph=True)

        _, message = compile_util.assert_fails_as_stock(attempt)
        assert "donated_buffer" in message

    def test_second_derivative_fails_as_inductor(self) -> None:
        def attempt(backend: str) -> None:
            (x,) = differentiable_batch()
            y = torch.compile(lambda x: (x.sin() * x).sum(), backend=backend)(x)
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            gradient.sum().backward()

        kind, message = compile_util.assert_fails_as_stock(attempt)
        assert kind is RuntimeError
        # Later releases say what is missing; torch 2.11 leaves the gradient without a graph.
        assert "double backward" in message or "does not require grad" in message

    def test_functional_call(self) -> None:
        net = Net()
        parameters = {name: p.detach() + 1 for name, p in net.named_parameters()}

        def f(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(net, parameters, (x,))

        def inputs() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            return {name: p.clone().requires_grad_() for name, p in parameters.items()}, *batch()

        check(f, inputs, backward=True, fullgraph=True)
        assert all(p.grad is None for p in net.parameters())

    def test_inference_graph_and_training_graph_of_dropout(self) -> None:
        """The mask of the forward is the mask of the backward, equal to eager's."""
        model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
        check(model, differentiable_batch, backward=True, options={"fallback_random": True})

    def test_embedding_and_cross_entropy(self) -> None:
        class Classifier(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.nn.Embedding(10, 4, padding_idx=0)
                self.norm = torch.nn.LayerNorm(4)

            def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return F.cross_entropy(self.norm(self.table(tokens).mean(dim=1)), labels)

        check(
            Classifier(),
            lambda: (torch.tensor([[1, 2, 0], [5, 5, 9]]), torch.tensor([3, 1])),
            backward=True,
            fullgraph=True,
        )


class TestMixedPrecision:
    def test_autocast_with_gradient_scaling(self) -> None:
        """A float16-style loop on CPU: autocast forward, scaled loss, unscaled step."""

        def train(compiling: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            net = Net()
            forward = torch.compile(net, backend=BACKEND) if compiling else net
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = forward(*batch()).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            return [p.detach() for p in net.parameters()]

        expected = train(False)
        with compiled_graphs() as kinds:
            actual = train(True)
        assert kinds == TRAINING
        assert_same(actual, expected, tolerance=2e-2)

    def test_bfloat16_model(self) -> None:
        check(
            Net().to(torch.bfloat16),
            lambda: (batch()[0].to(torch.bfloat16).requires_grad_(),),
            backward=True,
        )


class TestHooks:
    def test_tensor_hooks(self) -> None:
        """On an input, within the graph and on an output: each sees and changes its gradient."""
        seen: list[tuple[str, torch.Tensor]] = []

        def note(name: str, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
            def hook(grad: torch.Tensor) -> torch.Tensor:
                seen.append((name, grad.detach().clone()))
                return grad * factor

            return hook

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            y.register_hook(lambda grad: grad * 3)
            return y * 2

        def run(function: Callable[..., Any]) -> tuple[Any, ...]:
            seen.clear()
            (x,) = differentiable_batch()
            x.register_hook(note("input", 5))
            y = function(x)
            y.register_hook(note("output", 7))
            y.sum().backward()
            return x.grad, list(seen)

        expected = run(f)
        assert [name for name, _ in expected[1]] == ["output", "input"]
        # Dynamo takes a hook within the graph into the graph only under compiled autograd; without
        # it, it hangs the hook on the intermediate, which it makes an output.
        assert_same(run(torch.compile(f, backend=BACKEND)), expected)

    def test_post_accumulate_grad_hooks(self) -> None:
        """An optimizer step inside the backward, parameter by parameter."""

        def train(compiling: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            net = Net()

            def step(parameter: torch.Tensor) -> None:
                with torch.no_grad():
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None

            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(step)
            forward = torch.compile(net, backend=BACKEND) if compiling else net
            for _ in range(3):
                forward(*batch()).square().sum().backward()
            assert all(p.grad is None for p in net.parameters())
            return [p.detach() for p in net.parameters()]

        expected = train(False)
        with compiled_graphs() as kinds:
            actual = train(True)
        assert_same(actual, expected)
        assert kinds == TRAINING

    def test_module_forward_and_backward_hooks(self) -> None:
        """Full backward hooks of a submodule and of the module see eager's gradients, in order."""

        def run(compiling: bool) -> tuple[Any, ...]:
            torch.manual_seed(0)
            net = Net()
            seen: list[torch.Tensor] = []
            net.first.register_forward_hook(lambda module, args, out: out * 2)
            for module in (net, net.second):
                module.register_full_backward_hook(
                    lambda module, inputs, outputs: seen.extend([*inputs, *outputs])
                )
            model = torch.compile(net, backend=BACKEND) if compiling else net
            y = model(*differentiable_batch())
            y.square().sum().backward()
            return y, seen, [p.grad for p in net.parameters()]

        expected = run(False)
        with compiled_graphs() as kinds:
            actual = run(True)
        assert_same(actual, expected)
        assert [gradient.shape for gradient in expected[1]] == [(3, 8), (3, 2), (3, 4), (3, 2)]
        assert kinds == TRAINING

    def test_saved_tensor_hooks(self) -> None:
        """Around the call: what the forward saves goes through pack, what backward uses, unpack."""

        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (x @ w).sin()

        def run(function: Callable[..., Any]) -> tuple[Any, ...]:
            counts = {"pack": 0, "unpack": 0}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                counts["pack"] += 1
                return tensor.double()

            def unpack(tensor: torch.Tensor) -> torch.Tensor:
                counts["unpack"] += 1
                return tensor.float()

            (x,) = differentiable_batch()
            w = torch.linspace(0, 1, 8).view(4, 2).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                y = function(x, w)
            y.sum().backward()
            assert counts["pack"] == counts["unpack"] >= 2
            return y, x.grad, w.grad

        expected = run(f)
        with compiled_graphs() as kinds:
            assert_same(run(torch.compile(f, backend=BACKEND)), expected)
        assert kinds == TRAINING

    def test_save_on_cpu(self) -> None:
        net = Net()
        compiled = torch.compile(net, backend=BACKEND)
        with torch.autograd.graph.save_on_cpu():
            check(net, batch, backward=True, compiled=compiled)


class TestCheckpointing:
    """Recomputation is seen in the graphs: an operator that moves from forward to backward."""

    @staticmethod
    def _graphs(
        function: Callable[..., Any], make_inputs: Callable[[], tuple[Any, ...]]
    ) -> tuple[list[Any], list[Any]]:
        torch._dynamo.reset()
        spy = OperatorSpy()
        with inductor_config.patch(post_grad_custom_post_pass=spy):
            check(function, make_inputs, backward=True, fullgraph=True)
        forward, backward = spy.graphs
        return forward, backward

    @staticmethod
    def _weights() -> tuple[torch.Tensor, torch.Tensor]:
        return (
            torch.linspace(-1, 1, 16).view(4, 4).requires_grad_(),
            torch.linspace(0, 2, 16).view(4, 4).requires_grad_(),
        )

    @staticmethod
    def _block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x, w).sin(), w).cos()

    def test_activation_checkpointing(self) -> None:
        mm = torch.ops.aten.mm.default

        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return checkpoint(self._block, x, w, use_reentrant=False)

        forward, backward = self._graphs(f, self._weights)
        _, plain_backward = self._graphs(self._block, self._weights)
        assert forward.count(mm) == 2
        assert backward.count(mm) == plain_backward.count(mm) + 2

    def test_selective_checkpointing(self) -> None:
        """Products are kept, what is cheap is recomputed."""
        mm, sin = torch.ops.aten.mm.default, torch.ops.aten.sin.default

        def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            keep = operator is mm
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return checkpoint(
                self._block,
                x,
                w,
                use_reentrant=False,
                context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
            )

        forward, backward = self._graphs(f, self._weights)
        _, plain_backward = self._graphs(self._block, self._weights)
        assert forward.count(mm) == 2
        assert backward.count(mm) == plain_backward.count(mm)
        assert backward.count(sin) > plain_backward.count(sin)

    def test_memory_budget(self) -> None:
        """A budget of nothing recomputes everything that comes from the inputs."""
        mm = torch.ops.aten.mm.default
        with torch._functorch.config.patch(activation_memory_budget=0.0):
            _, backward = self._graphs(self._block, self._weights)
        _, plain_backward = self._graphs(self._block, self._weights)
        assert backward.count(mm) > plain_backward.count(mm)

    def test_checkpointed_dropout_reuses_its_mask(self) -> None:
        model = torch.nn.Linear(4, 16)

        def f(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: F.dropout(model(x), 0.5).sin(), x, use_reentrant=False)

        def gradient(function: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
            torch.manual_seed(3)
            (x,) = differentiable_batch()
            y = function(x)
            return y.detach(), torch.autograd.grad(y.sum(), x)[0]

        compiled = torch.compile(f, backend=BACKEND)
        with compiled_graphs() as kinds:
            y, dx = gradient(compiled)
        # dy/dx of sin(mask * scale * (Wx + b)), with the mask read off the output.
        (x,) = batch()
        scale = (y != 0).float() * 2
        expected = ((model(x) * scale).cos() * scale) @ model.weight
        assert_same(dx, expected.detach(), tolerance=1e-4)
        assert kinds == TRAINING


class TestCompiledAutograd:
    @staticmethod
    @contextlib.contextmanager
    def _enabled() -> Iterator[None]:
        compiler = torch.compile(backend=BACKEND, fullgraph=True)
        with torch._dynamo.compiled_autograd._enable(compiler):
            yield

    def test_compiles_an_eager_models_backward(self) -> None:
        net = Net()
        with compiled_graphs() as kinds:
            y = net(*batch())
            with self._enabled():
                y.square().sum().backward()
        actual = [p.grad for p in net.parameters()]
        expected = torch.autograd.grad(net(*batch()).square().sum(), list(net.parameters()))
        assert_same(actual, list(expected))
        assert kinds == {"inference": 1}
        assert counters["compiled_autograd"]["captures"] == 1

    def test_takes_hooks_and_a_compiled_forward_along(self) -> None:
        """The whole backward is one graph: compiled forward's, tensor hook's, accumulation's."""
        net = Net()
        compiled = torch.compile(net, backend=BACKEND)
        with compiled_graphs() as kinds:
            (x,) = differentiable_batch()
            x.register_hook(lambda grad: grad * 10)
            y = compiled(x)
            with self._enabled():
                y.sum().backward()
        (plain,) = torch.autograd.grad(net(x).sum(), x)  # runs the hook too
        assert_same(x.grad, plain)
        assert kinds["forward"] == 1
        assert counters["compiled_autograd"]["captures"] == 1

    def test_config_switch(self) -> None:
        """torch._dynamo.config.compiled_autograd compiles loss.backward() within a step."""
        net = Net()

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = net(x).square().sum()
            loss.backward()
            return loss.detach()

        reference = copy.deepcopy(net)
        with torch._dynamo.config.patch(compiled_autograd=True), compiled_graphs() as kinds:
            loss = torch.compile(step, backend=BACKEND)(*batch())
        expected = reference(*batch()).square().sum()
        expected.backward()
        assert_same(loss, expected.detach())
        assert_same([p.grad for p in net.parameters()], [p.grad for p in reference.parameters()])
        assert kinds["forward"] == 1
        assert counters["compiled_autograd"]["captures"] == 1


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
        """A bucket a layer: as many graphs, so that each bucket's reduction overlaps the rest."""
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
        """A hook that scales gradients instead of averaging them runs once a bucket."""
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


@dataclasses.dataclass
class Loss:
    total: torch.Tensor
    parts: dict[str, torch.Tensor]


def test_dataclass_of_losses() -> None:
    """Outputs in a dataclass stay connected to the backward."""
    net = Net()

    def f(x: torch.Tensor) -> Loss:
        y = net(x)
        parts = {"square": y.square().sum(), "size": y.abs().mean()}
        return Loss(sum(parts.values()), parts)

    def gradients(function: Callable[..., Loss]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(function(*batch()).total, list(net.parameters()))

    with compiled_graphs() as kinds:
        assert_same(gradients(torch.compile(f, backend=BACKEND)), gradients(f))
    assert kinds == TRAINING


def test_both_backends_train_equally() -> None:
    """Both backends on one model, in turns: same gradients, each through its own graphs."""
    net = Net()
    gradients = []
    for backend in (*BACKENDS, *BACKENDS):
        net.zero_grad()
        with compiled_graphs() as kinds:
            torch.compile(net, backend=backend)(*batch()).sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
        first_of_ours = backend == BACKEND and len(gradients) == 2
        assert kinds == (TRAINING if first_of_ours else {})
    for other in gradients[1:]:
        assert_same(other, gradients[0])
