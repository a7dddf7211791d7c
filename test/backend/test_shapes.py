"""Dynamic, static and unbacked shapes."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from torch.nn import functional as F

from test.support import compile_util
from test.support.compile_util import check, randn

pytestmark = pytest.mark.usefixtures("every_graph_compiles")


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

    def test_second_size_makes_the_dimension_dynamic(self) -> None:
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

    def test_mark_dynamic_on_a_specialized_size_fails_as_inductor(self) -> None:
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
