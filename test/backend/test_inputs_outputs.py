"""Graphs' inputs and outputs: dtypes, layouts, containers, mutation, aliases, subclasses.

Values, gradients, changed state, aliasing and the number of compiled graphs are compared with
eager mode by `compile_util.check`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo

from test.support import compile_util
from test.support.compile_util import (
    BACKEND,
    INFERENCE,
    TRAINING,
    assert_same,
    check,
    compiled_graphs,
    randn,
)

pytestmark = pytest.mark.usefixtures("every_graph_compiles")

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


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
        """Empty tensors in and out: an empty sum is 0, an empty product is 1."""

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

    def test_python_scalars_specialize_then_become_symbolic(self) -> None:
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
        # torch's own repr reads the data, which does not exist while a graph is traced.
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
