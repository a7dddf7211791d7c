"""Graph breaks, gradient modes, autocast and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.nn import functional as F

from test.support import compile_util
from test.support.compile_util import BACKEND, TRAINING, assert_same, check, randn

pytestmark = pytest.mark.usefixtures("every_graph_compiles")


class TestGraphBreaks:
    def test_in_the_middle(self) -> None:
        seen: list[float] = []

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x.sin() * 2
            torch._dynamo.graph_break()
            seen.append(1.0)
            return y.cos() + 1

        check(f, lambda: (randn(4, grad=True),), backward=True, graphs=dict.fromkeys(TRAINING, 2))
        assert len(seen) == 2

    def test_on_data(self) -> None:
        """Each branch is compiled when it is first taken."""

        def f(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return y.sin() if y.sum() > 0 else y.cos()

        compiled = check(f, lambda: (torch.ones(3),), graphs={"inference": 2})
        check(f, lambda: (-torch.ones(3),), compiled=compiled)
        check(f, lambda: (-torch.ones(3) * 4,), compiled=compiled, graphs={})

    def test_in_a_loop_leaves_the_frame_eager(self) -> None:
        """Dynamo does not resume within a loop: what the loop calls is compiled, once."""

        def step(x: torch.Tensor) -> torch.Tensor:
            return x.sin() + 1

        def f(x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = step(x)
                torch._dynamo.graph_break()
            return x

        check(f, lambda: (randn(4),))

    def test_fullgraph_fails_as_inductor(self) -> None:
        def attempt(backend: str) -> None:
            def f(x: torch.Tensor) -> torch.Tensor:
                torch._dynamo.graph_break()
                return x + 1

            torch.compile(f, backend=backend, fullgraph=True)(randn(2))

        kind, _ = compile_util.assert_fails_as_stock(attempt)
        assert issubclass(kind, torch._dynamo.exc.Unsupported)

    def test_error_on_graph_break_within_a_region(self) -> None:
        def attempt(backend: str) -> None:
            @torch.compile(backend=backend)
            def f(x: torch.Tensor) -> torch.Tensor:
                torch._dynamo.graph_break()
                with torch._dynamo.error_on_graph_break(True):
                    x = x.sin()
                    torch._dynamo.graph_break()
                return x

            f(randn(2))

        kind, _ = compile_util.assert_fails_as_stock(attempt)
        assert issubclass(kind, torch._dynamo.exc.Unsupported)

    def test_disabled_function_stays_eager(self) -> None:
        compiling: list[bool] = []

        @torch.compiler.disable
        def eager_only(x: torch.Tensor) -> torch.Tensor:
            compiling.append(torch.compiler.is_compiling())
            return x * 3

        check(lambda x: eager_only(x + 1).sin(), lambda: (randn(3),), graphs={"inference": 2})
        assert compiling == [False, False]


class TestGradModes:
    @pytest.mark.parametrize(
        "mode", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__
    )
    def test_around_the_call(self, mode: Callable[[], Any]) -> None:
        """The same module: an inference graph within, a training pair without."""
        model = torch.nn.Linear(4, 4)
        compiled = torch.compile(model, backend=BACKEND)
        with mode():
            check(model, lambda: (torch.ones(2, 4),), compiled=compiled)
        check(model, lambda: (torch.ones(2, 4),), compiled=compiled, backward=True)

    def test_within_the_graph(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                scale = x.abs().max()
            y = x / scale
            with torch.set_grad_enabled(False):
                z = y + 1
            return y, z

        check(f, lambda: (randn(4, grad=True),), backward=True)


class TestAutocast:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_around_the_call(self, dtype: torch.dtype) -> None:
        """Matmuls in the low precision, weights and their gradients in float32."""
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
        with torch.autocast("cpu", dtype=dtype):
            compiled = check(model, lambda: (randn(4, 8),), backward=True, tolerance=5e-2)
            assert compiled(randn(4, 8)).dtype is dtype
        assert model[0].weight.grad.dtype is torch.float32
        check(model, lambda: (randn(4, 8),), compiled=compiled, graphs={"forward": 1})

    def test_within_the_graph(self) -> None:
        def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                low = x @ w
                with torch.autocast("cpu", enabled=False):
                    full = x @ w
            return low, full

        check(f, lambda: (randn(4, 8), randn(8, 2)))


class TestRandomness:
    def test_fallback_random_draws_what_eager_draws(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return F.dropout(x, 0.5) + torch.rand_like(x), torch.randint(0, 9, (5,))

        check(
            f,
            lambda: (torch.ones(64, requires_grad=True),),
            backward=True,
            options={"fallback_random": True},
        )

    def test_seed_reproduces_and_mask_is_shared_with_backward(self) -> None:
        """Without fallback_random: the seed decides, and dx is y wherever y is mask * scale."""
        compiled = torch.compile(lambda x: F.dropout(x, 0.25), backend=BACKEND)

        def run(seed: int) -> torch.Tensor:
            torch.manual_seed(seed)
            x = torch.ones(256, requires_grad=True)
            y = compiled(x)
            y.sum().backward()
            assert_same(x.grad, y.detach())
            return y.detach()

        first = run(1)
        assert torch.equal(run(1), first)
        assert not torch.equal(run(2), first)
        assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]

    def test_generator_object(self) -> None:
        generator = torch.Generator()

        def f(x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(4, generator=generator)

        def inputs() -> tuple[torch.Tensor]:
            generator.manual_seed(3)
            return (torch.ones(4),)

        # Dynamo leaves a call with an explicit generator to eager mode; the addition is compiled.
        check(f, inputs)
