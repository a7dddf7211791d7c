"""What graphs may hold: dtypes, layouts, containers, mutation, aliases, shapes, control flow, ops.

Values, gradients, changed state, aliasing and the number of compiled graphs are held against eager
mode by `compile_util.check`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn import functional as F

from test.support import compile_util
from test.support.compile_util import (
    BACKEND,
    INFERENCE,
    TRAINING,
    assert_same,
    check,
    compiled_graphs,
)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@pytest.fixture(autouse=True)
def _every_graph_compiles() -> Iterator[None]:
    with compile_util.every_graph_compiles():
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


class TestDtypes:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_floating_point_with_gradients(self, dtype: torch.dtype) -> None:
        def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (x @ w).tanh() + x.sum(dim=-1, keepdim=True)

        check(
            f,
            lambda: (randn(4, 8, dtype=dtype, grad=True), randn(8, 3, dtype=dtype)),
            backward=True,
        )

    def test_integers(self) -> None:
        """One graph: each integer dtype wraps around, divides and shifts as in eager mode."""

        def f(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [
                out for x in xs for out in (x * x + 1, x // 3, x % 5, x << 1, x.sum(), x.argmax())
            ]

        check(f, lambda: ([torch.arange(-20, 20).to(dtype) for dtype in INTEGERS],))

    def test_bool_and_bitwise(self) -> None:
        def f(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return a & b, a | ~b, a ^ b, a.any(), b.all(dim=0), a.sum(), torch.where(a, b, a)

        check(f, lambda: (torch.arange(12).view(3, 4) % 2 == 0, torch.arange(12).view(3, 4) > 5))

    def test_complex_with_gradients(self) -> None:
        def f(z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return z * z.conj() + x, torch.view_as_real(z * 2), z.abs(), torch.complex(x, x)

        check(
            f,
            lambda: (randn(6, dtype=torch.complex64, grad=True), randn(6, grad=True)),
            backward=True,
        )

    def test_mixed_dtypes_promote(self) -> None:
        def f(i: torch.Tensor, h: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return i + h, h * d, i / 2, i.to(torch.float64) - d, d.to(torch.int32), h > d

        check(
            f, lambda: (torch.arange(5), randn(5, dtype=torch.bfloat16), randn(5, dtype=FLOATS[0]))
        )


class TestLayouts:
    def test_channels_last_is_kept(self) -> None:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        model = model.to(memory_format=torch.channels_last)

        def inputs() -> tuple[torch.Tensor]:
            x = randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
            return (x.requires_grad_(),)

        compiled = check(model, inputs, backward=True)
        assert compiled(*inputs()).is_contiguous(memory_format=torch.channels_last)

    def test_inputs_of_every_stride(self) -> None:
        """Transposed, stepped, expanded, flipped, overlapping and offset inputs in one graph."""

        def inputs() -> tuple[torch.Tensor, ...]:
            base = randn(8, 8)
            return (
                base.t(),
                base[::2, 1::2],
                randn(1, 4).expand(4, 4),
                base.flip(0)[2:],
                randn(10).unfold(0, 4, 2),
                base[3],
            )

        check(lambda *xs: [torch.relu(x) * 2 for x in xs], inputs)

    def test_zero_dimensional(self) -> None:
        def f(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 2 + n, x.expand(3), torch.stack([x, x.sin()]), n.unsqueeze(0)

        check(f, lambda: (torch.tensor(1.5, requires_grad=True), torch.tensor(3)), backward=True)

    def test_zero_size(self) -> None:
        """Empty tensors in and out: sums are 0, a product over no element is 1."""

        def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x @ w, x.sum(), x.prod(), x.sum(dim=0), torch.cat([x, x]), w.t() @ x.t(), x + 1

        compiled = check(f, lambda: (randn(0, 4, grad=True), randn(4, 2, grad=True)), backward=True)
        assert compiled(torch.empty(0, 4), torch.empty(4, 2))[2].item() == 1


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    scale: float
    extra: dict[str, Any]


class TestCallingConvention:
    def test_nested_containers(self) -> None:
        """Tuples, dicts, dataclasses and named tuples come and go with type and order of keys."""

        def f(pair: Pair, batch: Batch, rest: dict[str, Any]) -> dict[str, Any]:
            swapped = Pair(pair.second + 1, pair.first * batch.scale)
            return {
                "z": swapped,
                "a": Batch(batch.tokens * 2, batch.scale + 1, {"k": (rest["x"][0].sin(), None)}),
                "n": [len(rest["x"]), "text", rest["flag"]],
            }

        check(
            f,
            lambda: (
                Pair(randn(3), randn(3)),
                Batch(torch.arange(3), 2.0, {"unused": randn(1)}),
                {"x": (randn(2), randn(2)), "flag": True},
            ),
        )

    def test_keyword_and_variadic_arguments(self) -> None:
        @torch.compile(backend=BACKEND)
        def f(x: torch.Tensor, *xs: torch.Tensor, scale: float = 2.0, **named: Any) -> torch.Tensor:
            return sum(xs, x) * scale + named.get("bias", 0)

        x = randn(4)
        with compiled_graphs() as kinds:
            assert_same(f(x, x, x, bias=x), x * 6 + x)
            assert_same(f(x), x * 2)
        assert kinds == {"inference": 2}

    def test_python_scalars_specialise_then_turn_symbolic(self) -> None:
        """A first int is a constant; a second value makes it a symbol; a third is no recompile."""

        def f(x: torch.Tensor, n: int, flag: bool) -> tuple[torch.Tensor, int]:
            return (x * n if flag else x + n), n * 2

        compiled = check(f, lambda: (randn(5), 3, True))
        check(f, lambda: (randn(5), 4, True), compiled=compiled)
        check(f, lambda: (randn(5), 11, True), compiled=compiled, graphs={})
        check(f, lambda: (randn(5), 11, False), compiled=compiled)

    def test_float_arguments(self) -> None:
        compiled = check(lambda x, a: x * a, lambda: (randn(5), 0.5))
        check(lambda x, a: x * a, lambda: (randn(5), 1.25), compiled=compiled)
        check(lambda x, a: x * a, lambda: (randn(5), -7.5), compiled=compiled, graphs={})

    def test_sizes_as_outputs(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, int, tuple[int, ...]]:
            return x.new_ones(x.shape[0] * 2), x.numel() + 1, tuple(x.shape)

        compiled = check(f, lambda: (randn(5, 3),), dynamic=True)
        check(f, lambda: (randn(9, 7),), compiled=compiled, graphs={})

    def test_graph_without_tensor_work_is_not_compiled(self) -> None:
        check(lambda x, n: (n + 1, x), lambda: (randn(2), 5), graphs={})


class Counting(torch.nn.Module):
    """Buffers that change with each call, one of them through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.history[1:3].copy_(x[:2])
        return x * self.calls + self.history.sum()


class TestMutation:
    def test_inputs(self) -> None:
        """In place, through a view, by index, by `out=`, and the input as an output."""

        def f(
            a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            a.mul_(2)
            b.view(-1)[1:3].add_(1)
            c[c > 0] = -1
            torch.add(a, 1, out=d)
            return a, b.t()

        check(f, lambda: (randn(4), randn(2, 2), randn(4), randn(4)))

    def test_two_inputs_that_share_memory(self) -> None:
        def inputs() -> tuple[torch.Tensor, torch.Tensor]:
            base = randn(6)
            return base[:4], base[2:]

        def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.add_(1)
            return b * 2

        check(f, inputs)

    def test_metadata(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            x.t_()
            return x.sum(dim=0)

        check(f, lambda: (randn(2, 3),))

    def test_buffers(self) -> None:
        module = Counting()
        check(module, lambda: (randn(3, 3),))
        assert module.calls.item() == 1

    def test_batch_norm_statistics(self) -> None:
        check(torch.nn.BatchNorm1d(3), lambda: (randn(5, 3, grad=True),), backward=True)

    def test_input_of_a_differentiated_graph(self) -> None:
        def f(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            state.mul_(0.5).add_(x.detach())
            return (x * state).sin()

        check(f, lambda: (randn(4, grad=True), randn(4)), backward=True)

    def test_attributes_globals_and_lists(self) -> None:
        """Side effects on Python objects happen once, after the graph."""
        log: list[torch.Tensor] = []
        holder = Counting()

        @torch.compile(backend=BACKEND)
        def f(x: torch.Tensor) -> torch.Tensor:
            log.append(x + 1)
            holder.last = x * 3
            return x.sin()

        x = randn(3)
        with compiled_graphs() as kinds:
            assert_same(f(x), x.sin())
        assert_same((log, holder.last), ([x + 1], x * 3))
        assert kinds == INFERENCE


class TestAliases:
    def test_of_inputs(self) -> None:
        """An input itself, views of it, the same output twice."""

        def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return x, x[1:], x.t(), y, y

        compiled = check(f, lambda: (randn(4, 4),))
        x = randn(4, 4)
        same, row, transposed, y, y_again = compiled(x)
        assert same is x
        assert y is y_again
        assert row._base is transposed._base is x
        row.zero_()
        assert x[1:].count_nonzero() == 0

    def test_of_intermediates(self) -> None:
        """Two views of one intermediate share memory, and with gradients they share a base."""

        def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x.sin()
            return y.view(-1), y.t(), y[0]

        check(f, lambda: (randn(3, 4),))
        torch._dynamo.reset()
        check(f, lambda: (randn(3, 4, grad=True),), backward=True)

    def test_multi_output_views(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (*x.chunk(2), *x.unbind(1))

        check(f, lambda: (randn(4, 3),))

    def test_detached(self) -> None:
        def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = x * 2
            return y, y.detach(), x.detach()

        check(f, lambda: (randn(4, grad=True),), backward=True)


class TestDynamicShapes:
    def test_dynamic_true_compiles_once(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            return F.softmax(x @ x.t(), dim=-1).sum(dim=0)

        compiled = check(f, lambda: (randn(5, 3, grad=True),), backward=True, dynamic=True)
        check(f, lambda: (randn(9, 4, grad=True),), backward=True, compiled=compiled, graphs={})

    def test_dynamic_false_compiles_each_size(self) -> None:
        compiled = check(torch.sin, lambda: (randn(5),), dynamic=False)
        for size in (6, 7):
            check(torch.sin, lambda size=size: (randn(size),), compiled=compiled)

    def test_second_size_turns_the_dimension_dynamic(self) -> None:
        compiled = check(torch.cos, lambda: (randn(5, 2),))
        check(torch.cos, lambda: (randn(6, 2),), compiled=compiled)
        check(torch.cos, lambda: (randn(77, 2),), compiled=compiled, graphs={})
        check(torch.cos, lambda: (randn(77, 3),), compiled=compiled)

    def test_mark_dynamic(self) -> None:
        def marked(size: int) -> tuple[torch.Tensor]:
            x = randn(size, 3)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
            return (x,)

        compiled = check(torch.tan, lambda: marked(4))
        check(torch.tan, lambda: marked(33), compiled=compiled, graphs={})

    def test_mark_dynamic_on_a_specialised_size_fails_as_inductor(self) -> None:
        def attempt(backend: str) -> None:
            x = randn(4)
            torch._dynamo.mark_dynamic(x, 0)
            torch.compile(lambda x: x * 2 if x.shape[0] == 4 else x, backend=backend)(x)

        kind, message = compile_util.assert_fails_as_stock(attempt)
        assert issubclass(kind, torch.fx.experimental.symbolic_shapes.ConstraintViolationError)
        assert "Constraints violated" in message

    def test_mark_static(self) -> None:
        def marked(size: int) -> tuple[torch.Tensor]:
            x = randn(size)
            torch._dynamo.mark_static(x, 0)
            return (x,)

        compiled = check(torch.exp, lambda: marked(4), dynamic=True)
        check(torch.exp, lambda: marked(5), compiled=compiled)

    def test_unbacked_size(self) -> None:
        """One graph for however many elements are found, none included."""

        def f(x: torch.Tensor) -> torch.Tensor:
            return x.nonzero().to(torch.float32) * 2

        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            compiled = check(f, lambda: (torch.tensor([0.0, 1, 2, 0]),), fullgraph=True)
            for values in ([0.0, 0, 0, 0], [1.0, 1, 1, 1]):
                check(f, lambda v=values: (torch.tensor(v),), compiled=compiled, graphs={})

    def test_unbacked_item(self) -> None:
        def f(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            size = n.item()
            torch._check(size >= 0)
            torch._check(size <= x.shape[0])
            return x.new_full((size,), 2.0) * size

        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            compiled = check(f, lambda: (torch.tensor(3), randn(8)), fullgraph=True)
            check(f, lambda: (torch.tensor(7), randn(8)), compiled=compiled, graphs={})
            with pytest.raises(RuntimeError):
                compiled(torch.tensor(9), randn(8))

    def test_item_breaks_the_graph_by_default(self) -> None:
        def f(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (x * 2)[: (n + 1).item()].sin()

        check(f, lambda: (torch.tensor(3), randn(8)), graphs={"inference": 2})
        assert sum(counters["graph_break"].values()) == 1


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
        """Products in the low precision, weights and their gradients in float32."""
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
        """Stock runs the compiled function's original under an outer transform; so do we."""

        def f(x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * 2).sum()

        x = randn(3, 2) if transform is torch.vmap else randn(3)
        assert_same(transform(torch.compile(f, backend=BACKEND))(x), transform(f)(x))


class Labelled(torch.Tensor):
    """A wrapper subclass: a tensor and a label that travels through every operator."""

    value: torch.Tensor
    label: str

    @staticmethod
    def __new__(cls, value: torch.Tensor, label: str) -> Labelled:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            dtype=value.dtype,
            device=value.device,
            requires_grad=value.requires_grad,
        )

    def __init__(self, value: torch.Tensor, label: str) -> None:
        self.value, self.label = value, label

    def __repr__(self) -> str:  # type: ignore[override]
        # torch's own looks at the data, of which there is none while a graph is traced.
        return f"Labelled({self.label!r}, {tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["value"], self.label

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], label: str, size: Any, stride: Any
    ) -> Labelled:
        return Labelled(inner["value"], label)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        wrapped = [leaf for leaf in compile_util.leaves(args) if isinstance(leaf, Labelled)]
        unwrap = functools.partial(torch.utils._pytree.tree_map_only, Labelled, lambda t: t.value)
        out = func(*unwrap(args), **unwrap(kwargs or {}))
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: Labelled(t, wrapped[0].label), out
        )


def test_tensor_subclass() -> None:
    """Class, label, values and gradients survive; a new label is a recompile."""

    def run(f: Callable[..., Any], label: str) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(2)
        x = Labelled(randn(3, 3), label).requires_grad_()
        y = f(x)
        y.sum().backward()
        assert (type(y), y.label) == (Labelled, label)
        assert (type(x.grad), x.grad.label) == (Labelled, label)
        return y.value.detach(), x.grad.value

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).sin() + 1

    compiled = torch.compile(f, backend=BACKEND, fullgraph=True)
    for label, graphs in (("a", TRAINING), ("a", {}), ("b", TRAINING)):
        with compiled_graphs() as kinds:
            actual = run(compiled, label)
        assert_same(actual, run(f, label))
        assert kinds == graphs
