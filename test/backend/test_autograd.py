"""Autograd around compiled graphs: hooks, checkpointing, compiled autograd."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.compiled_autograd
import torch._functorch.config
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from test.support.compile_util import BACKEND, TRAINING, assert_same, check, compiled_graphs
from test.support.small_net import Net, batch, differentiable_batch

pytestmark = pytest.mark.usefixtures("every_graph_compiles")


class OperatorSpy(CustomGraphPass):
    """A post-grad pass that notes the operators of each graph that compiles."""

    def __init__(self) -> None:
        self.graphs: list[list[Any]] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs.append([node.target for node in graph.nodes if node.op == "call_function"])

    def uuid(self) -> None:
        """No cache: a hit would not run the pass."""


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
        # Dynamo traces a hook into the graph only under compiled autograd; without
        # it, it registers the hook on the intermediate, which becomes an output.
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
        """Matmuls are saved, cheap operators are recomputed."""
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

    def test_includes_hooks_and_a_compiled_forward(self) -> None:
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
