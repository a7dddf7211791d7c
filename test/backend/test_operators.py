"""Higher-order operators, custom operators, Triton kernels of users, and functorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn import functional as F

from test.support import compile_util
from test.support.compile_util import BACKEND, INFERENCE, assert_same, check, compiled_graphs, randn

pytestmark = pytest.mark.usefixtures("every_graph_compiles")


class TestHigherOrderOperators:
    def test_cond(self) -> None:
        """One graph, in which either branch may be taken at run time."""

        def f(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))

        compiled = check(f, lambda: (torch.ones(3),), fullgraph=True)
        check(f, lambda: (-torch.ones(3),), compiled=compiled, graphs={})

    def test_cond_with_gradients(self) -> None:
        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x, w: x * w, lambda x, w: x - w.sin(), (x, w))

        def inputs(sign: float) -> tuple[torch.Tensor, torch.Tensor]:
            return (sign * torch.ones(3)).requires_grad_(), torch.full(
                (3,), 2.0, requires_grad=True
            )

        compiled = check(f, lambda: inputs(1), fullgraph=True, backward=True)
        check(f, lambda: inputs(-1), compiled=compiled, backward=True, graphs={})

    def test_while_loop(self) -> None:
        from torch._higher_order_ops.while_loop import while_loop

        def f(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x * 2), (n, x))

        compiled = check(f, lambda: (torch.tensor(3), torch.ones(2)), fullgraph=True)
        assert_same(compiled(torch.tensor(5), torch.ones(2))[1], torch.full((2,), 32.0))
        assert_same(compiled(torch.tensor(0), torch.ones(2))[1], torch.ones(2))

    def test_scan(self) -> None:
        from torch._higher_order_ops.scan import scan

        def f(carry: torch.Tensor, xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return scan(lambda c, x: (c + x, c * x), carry, xs, dim=0)

        check(f, lambda: (torch.zeros(3), randn(5, 3)), fullgraph=True)

    def test_associative_scan(self) -> None:
        from torch._higher_order_ops.associative_scan import associative_scan

        def f(x: torch.Tensor) -> torch.Tensor:
            return associative_scan(torch.add, x, dim=0, combine_mode="generic")

        compiled = check(f, lambda: (randn(6, 2),), fullgraph=True)
        x = randn(6, 2)
        assert_same(compiled(x), x.cumsum(0))

    def test_flex_attention(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            def causal(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
                return torch.where(q_idx >= kv_idx, score, -float("inf"))

            return flex_attention(q, k, v, score_mod=causal)

        q, k, v = (randn(1, 2, 128, 32) for _ in range(3))
        with compiled_graphs() as kinds:
            out = torch.compile(f, backend=BACKEND, fullgraph=True)(q, k, v)
        assert_same(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        assert kinds == INFERENCE

    def test_nested_compile_region(self) -> None:
        """invoke_subgraph: the region, called three times, is one subgraph."""

        @torch.compiler.nested_compile_region
        def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (x @ w).relu() + x

        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = layer(x, w)
            return x

        check(
            f,
            lambda: (randn(4, 4, grad=True), randn(4, 4, grad=True)),
            fullgraph=True,
            backward=True,
        )


@torch.library.custom_op("inductor_ext_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() * factor)


@scaled.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _scaled_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return grad * ctx.factor, None


def _scaled_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.factor = inputs[1]


scaled.register_autograd(_scaled_backward, setup_context=_scaled_setup)


@torch.library.custom_op("inductor_ext_test::accumulate", mutates_args={"total"})
def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    total.numpy()[...] += x.numpy()


@torch.library.custom_op("inductor_ext_test::split", mutates_args=())
def split(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x.sum(), [x + 1, x[:1].clone()]


@split.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x.new_empty(()), [torch.empty_like(x), torch.empty_like(x[:1])]


class TestCustomOperators:
    def test_functional_with_autograd(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return scaled(x.sin(), 3.0).cos()

        check(f, lambda: (randn(4, grad=True),), backward=True, fullgraph=True)

    def test_mutating_input_and_intermediate(self) -> None:
        def f(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            accumulate(total, x)
            local = x * 2
            accumulate(local, total)
            return local + 1

        check(f, lambda: (torch.ones(4), randn(4)), fullgraph=True)

    def test_several_outputs(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            total, (more, first) = split(x * 2)
            return more * total + first

        check(f, lambda: (randn(4),), fullgraph=True)

    def test_without_a_fake_implementation_fails_as_inductor(self) -> None:
        @torch.library.custom_op("inductor_ext_test::unknown_shape", mutates_args=())
        def unknown_shape(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        def attempt(backend: str) -> None:
            torch.compile(unknown_shape, backend=backend, fullgraph=True)(randn(2))

        _, message = compile_util.assert_fails_as_stock(attempt)
        assert "fake" in message.lower()

    def test_autograd_function(self) -> None:
        class Clipped(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x.exp()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                (x,) = ctx.saved_tensors
                return (grad * x.exp()).clamp(-0.5, 0.5)

        check(
            lambda x: Clipped.apply(x * 2),
            lambda: (randn(6, grad=True),),
            backward=True,
            fullgraph=True,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("wrapped", [False, True], ids=["called", "triton_op"])
def test_user_defined_triton_kernel(wrapped: bool) -> None:
    import triton

    from test.support.triton_kernels import add_kernel

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel = torch.library.wrap_triton(add_kernel) if wrapped else add_kernel
        kernel[(triton.cdiv(x.numel(), 128),)](x, y, out, x.numel(), BLOCK=128)
        return out

    if wrapped:
        add = torch.library.triton_op("inductor_ext_test::triton_add", mutates_args=())(add)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return add(x.sin(), y) * 2

    check(f, lambda: (randn(1000).cuda(), randn(1000).cuda()), fullgraph=True)


class TestFunctorch:
    def test_vmap(self) -> None:
        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: (row @ w).softmax(0))(x)

        check(f, lambda: (randn(5, 4), randn(4, 3)), fullgraph=True)

    def test_grad(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = torch.func.grad(lambda x: (x.sin() * x).sum())
            return first(x), torch.func.grad(lambda x: first(x).sum())(x)

        check(f, lambda: (randn(4),), fullgraph=True)

    def test_jvp_and_jacobian(self) -> None:
        def g(x: torch.Tensor) -> torch.Tensor:
            return x.sin() * x.sum()

        def f(x: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (*torch.func.jvp(g, (x,), (v,)), torch.func.jacrev(g)(x))

        check(f, lambda: (randn(4), randn(4)), fullgraph=True)

    def test_functional_call_of_stacked_parameters(self) -> None:
        """An ensemble: vmap over the parameters of three models."""
        models = [torch.nn.Linear(4, 2) for _ in range(3)]
        parameters, buffers = torch.func.stack_module_state(models)
        skeleton = torch.nn.Linear(4, 2, device="meta")

        def f(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(
                lambda p: torch.func.functional_call(skeleton, (p, buffers), (x,)).relu()
            )(parameters)

        def inputs() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            copies = {name: p.detach().clone() for name, p in parameters.items()}
            return {name: p.requires_grad_() for name, p in copies.items()}, torch.ones(5, 4)

        check(f, inputs, backward=True, fullgraph=True)

    @pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
    def test_transform_of_a_compiled_function(self, transform: Callable[..., Any]) -> None:
        """Under an outer transform the original function runs, as with Inductor (default)."""

        def f(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * 2).sum()

        x = randn(3, 2) if transform is torch.vmap else randn(3)
        assert_same(transform(torch.compile(f, backend=BACKEND))(x), transform(f)(x))
