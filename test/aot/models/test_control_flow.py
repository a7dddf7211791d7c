"""AOT artifacts with control flow inside: cond, while_loop and scan."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

import inductor_ext
from test.support import aot_util, compile_util
from test.support.aot_util import Bundle, Case, Cases

COND = Cases()
LOOPS = Cases()
SCANS = Cases()


def branching(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    predicates: int = 1,
    dynamic: tuple[Any, ...] | None = None,
    more: tuple[tuple[Any, ...], ...] = (),
) -> Case:
    """A case whose first arguments are predicates, called with all their values."""
    values = list(itertools.product([True, False], repeat=predicates))
    inputs = [
        (*(torch.tensor(value) for value in chosen), *rest)
        for rest in (args, *more)
        for chosen in values
    ]
    shapes = None if dynamic is None else ((None,) * predicates + dynamic)
    return Case(model, inputs[0], dynamic=shapes, calls=tuple(inputs[1:]))


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 6)


@COND
def cond() -> Case:
    return branching(
        lambda p, a, b: torch.cond(p, lambda x, y: x + y, lambda x, y: x - y, (a, b)), pair()
    )


@COND
def cond_with_code_around() -> Case:
    def function(p: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c, d = a * b + 3.0, a / b - 2.0
        chosen = torch.cond(p, lambda x, y: x @ y.t(), lambda x, y: (x - y) @ x.t(), (c, d))
        return chosen * chosen / 1.5

    return branching(function, pair())


@COND
def nested_cond() -> Case:
    def function(p: Any, q: Any, r: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        def true(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            def true_true(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return torch.cond(r, lambda x, y: x * y, lambda x, y: x + 2 * y, (x, y))

            return torch.cond(q, true_true, lambda x, y: (x - y) * 3, (x, y))

        def false(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cond(r, lambda x, y: x.sin() + y, lambda x, y: x.cos() - y, (x, y))

        return torch.cond(p, true, false, (a, b))

    return branching(function, pair(), predicates=3)


@COND
def one_cond_after_another() -> Case:
    def function(p: Any, q: Any, a: torch.Tensor) -> torch.Tensor:
        first = torch.cond(p, lambda x: x + 1, lambda x: x - 1, (a,))
        return torch.cond(q, lambda x: x * first.sum(), lambda x: x + first, (a,))

    return branching(function, (torch.randn(3, 4),), predicates=2)


@COND
def cond_with_parameters() -> Case:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer("scale", torch.rand(6))

        def forward(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(
                p, lambda x: self.one(x) * self.scale, lambda x: self.two(self.one(x)), (x,)
            )

    return branching(Layers(), (torch.randn(3, 6),))


@COND
def cond_of_modules() -> Case:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
            self.no = nn.Sequential(nn.Linear(6, 3), nn.Tanh())

        def forward(self, p: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(p, self.yes, self.no, (x,))

    return branching(Chosen(), (torch.randn(3, 6),))


@COND
def cond_with_tensors_from_outside() -> Case:
    def function(p: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        d, e = a * 2, b / 2
        return torch.cond(p, lambda x: x + d, lambda x: x - e, (c,))

    return branching(function, (*pair(), torch.randn(4, 6)))


@COND
def cond_with_several_results() -> Case:
    def function(p: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return torch.cond(
            p,
            lambda x, y, z: (x * y, z / 3, (y - x).sum(1)),
            lambda x, y, z: (y / x, z * 3, (x + y).mean(1)),
            (a, b, c),
        )

    return branching(function, (*pair(), torch.randn(3, 2)))


@COND
def cond_of_views() -> Case:
    def function(p: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        def true(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x + y)[1:], (x - y)[1:].t()

        def false(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (x - y)[1:], (x + y)[1:].t()

        return torch.cond(p, true, false, (a[:-1], b[:-1]))

    return branching(function, pair())


@COND
def cond_that_does_not_use_its_operand() -> Case:
    def function(p: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.cond(p, lambda x, y: x + 1, lambda x, y: y * 2, (a, b))

    return branching(function, pair())


@COND
def cond_of_dynamic_sizes() -> Case:
    def function(p: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        joined = torch.cat([a, b])

        def true(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x - 3, y * 3], 1)

        def false(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([x / 3, y - 3], 1)

        return torch.cond(p, true, false, (joined * 2, joined / 2))

    return branching(
        function,
        (torch.randn(2, 3), torch.randn(4, 3)),
        dynamic=({0: Dim("cond_a", min=2)}, {0: Dim("cond_b", min=2)}),
        more=((torch.randn(5, 3), torch.randn(3, 3)),),
    )


@COND
def cond_with_sizes_from_outside() -> Case:
    def function(p: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        rows, total = a.shape[0], a.shape[0] + b.shape[0]
        return torch.cond(p, lambda x: x * rows + total, lambda x: x - total, (a,))

    return branching(
        function,
        (torch.randn(2, 3), torch.randn(4, 3)),
        dynamic=({0: Dim("outside_a", min=2)}, {0: Dim("outside_b", min=2)}),
        more=((torch.randn(5, 3), torch.randn(3, 3)),),
    )


@COND
def cond_with_sizes_of_operands() -> Case:
    def function(p: Any, a: torch.Tensor) -> Any:
        def false(x: torch.Tensor) -> torch.Tensor:
            return (
                x.new_full(x.shape, x.shape[0]) + torch.arange(x.shape[0], device=x.device)[:, None]
            )

        return torch.cond(p, lambda x: x * x.shape[0] + x.numel(), false, (a,))

    return branching(
        function,
        (torch.randn(2, 3),),
        dynamic=({0: Dim("operand", min=2)},),
        more=((torch.randn(5, 3),),),
    )


@COND
def cond_whose_branches_differ_in_size() -> Case:
    def function(p: Any, a: torch.Tensor) -> Any:
        chosen = torch.cond(p, lambda x: x[:3] * 2, lambda x: x.repeat(2, 1), (a,))
        return chosen, chosen.sum(0)

    return branching(function, (torch.randn(5, 4),))


@COND
def cond_on_a_number() -> Case:
    """A predicate that is constant at compile time, and one that compares sizes."""

    def function(a: torch.Tensor) -> Any:
        constant_branch = torch.cond(True, lambda x: x + 1, lambda x: x - 1, (a,))
        return constant_branch, torch.cond(a.shape[0] > 4, lambda x: x * 2, lambda x: x * 3, (a,))

    return Case(
        function,
        (torch.randn(3, 4),),
        dynamic=({0: Dim("number", min=2)},),
        calls=((torch.randn(4, 4),), (torch.randn(5, 4),)),
    )


@COND
def cond_on_what_was_computed() -> Case:
    return Case(
        lambda x: torch.cond(x.sum() > 0, lambda x: x.exp(), lambda x: x.abs().sqrt(), (x,)),
        (torch.ones(3),),
        calls=((-torch.ones(3),),),
    )


HAS_SWITCH = importlib.util.find_spec("torch._higher_order_ops.switch") is not None


def switch(index: Any, branches: Any, operands: Any) -> Any:
    """`torch.switch`, which torch has from 2.14 on."""
    from torch._higher_order_ops.switch import switch as found

    return found(index, branches, operands)


def switched(x: torch.Tensor, index: Any) -> Any:
    return switch(
        index,
        (lambda x: (x + 1, x.sum()), lambda x: (x * 2, x.mean()), lambda x: (x @ x, x.amax())),
        (x,),
    )


if HAS_SWITCH:

    @COND
    def switch_of_three() -> Case:
        """Indices out of range select the nearest branch."""
        x = torch.randn(4, 4)
        return Case(
            lambda index, x: switched(x.cos(), index),
            (torch.tensor(1), x),
            calls=tuple((torch.tensor(index), x) for index in (0, 2, -3, 9)),
        )

    @COND
    def switch_on_a_size() -> Case:
        return Case(
            lambda x: switched(x.t() @ x, x.shape[0] - 2),
            (torch.randn(3, 4),),
            dynamic=({0: Dim("switch_rows", min=2)},),
            calls=tuple((torch.randn(rows, 4),) for rows in (2, 4, 5)),
        )

    @COND
    def switch_in_a_cond_in_a_switch() -> Case:
        def function(index: torch.Tensor, x: torch.Tensor) -> Any:
            def first(x: torch.Tensor) -> Any:
                inner = torch.where(x.sum() > 0, 1, 2)
                return torch.cond(
                    x.amax() > 1, lambda x: switched(x, inner)[0], lambda x: x - 5, (x,)
                )

            return switch(index, (first, lambda x: x.exp(), lambda x: x.abs()), (x,))

        calls = ((0, torch.ones(2, 2) * 3), (0, torch.ones(2, 2)), (2, -torch.ones(2, 2)))
        return Case(
            function,
            (torch.tensor(0), torch.tensor([[-9.0, 2.0], [1.0, 1.0]])),
            calls=tuple((torch.tensor(index), x) for index, x in calls),
        )


@pytest.fixture(scope="module")
def conds(device: str) -> Bundle:
    return COND.compile(device)


def test_conds_compile_together(conds: Bundle) -> None:
    conds.check_whole()


@pytest.mark.parametrize("name", COND)
def test_cond(conds: Bundle, name: str) -> None:
    conds.check(name)


def test_cond_on_an_unbacked_scalar(device: str) -> None:
    def function(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.cond(n.item() > 2, lambda x: x + 1, lambda x: x * 2, (x,))

    x = torch.randn(3, device=device)
    few, many = torch.tensor(1, device=device), torch.tensor(5, device=device)
    artifact = aot_util.compile_model(function, (x, few))
    artifact.check(x, few)
    artifact.check(x, many)


def no_alias(results: Any) -> Any:
    """New tensors: it is undefined whether a loop without iterations returns its operands."""
    return tuple(result + 0 for result in results)


@LOOPS
def loop() -> Case:
    def function(n: torch.Tensor, x: torch.Tensor) -> Any:
        return no_alias(while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, x * 2 + 1), (n, x)))

    x = torch.randn(3, 2)
    return Case(function, (torch.tensor(3), x), calls=((torch.tensor(0), x), (torch.tensor(1), x)))


@LOOPS
def loop_whose_operands_change_afterwards() -> Case:
    """No iteration: the outputs are the operands' values before their mutation."""

    def function(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        def body(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
            return n - 1, x * 2 + 1, y - 1

        part, sine = x[1:], y.sin()
        n, p, s = while_loop(lambda n, x, y: n > 0, body, (n, part, sine))
        x.add_(7)
        return n + 0, p, s, sine.cos() + s

    x, y = torch.randn(4, 2), torch.randn(5)
    return Case(
        function,
        (torch.tensor(2), x, y),
        calls=((torch.tensor(0), x.clone(), y), (torch.tensor(1), x.clone(), y)),
    )


@LOOPS
def loop_with_code_around() -> Case:
    def function(n: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        d, e = x * 2 + 1, x.sin()
        n, d, e = while_loop(
            lambda n, d, e: n < 5, lambda n, d, e: (n + 1, d + e, e * 0.5), (n, d, e)
        )
        return d.cos() * e + n

    return Case(
        function, (torch.tensor(1), torch.randn(3)), calls=((torch.tensor(9), torch.randn(3)),)
    )


@LOOPS
def nested_loop() -> Case:
    def function(i: torch.Tensor, j: torch.Tensor, x: torch.Tensor) -> Any:
        def body(i: torch.Tensor, j: torch.Tensor, x: torch.Tensor) -> Any:
            def inner(k: torch.Tensor, y: torch.Tensor) -> Any:
                return k - 1, y + 0.5 * i

            _, x = while_loop(lambda k, y: k > 0, inner, (j.clone(), x))
            return i - 1, j.clone(), x * 1.5

        return no_alias(while_loop(lambda i, j, x: i > 0, body, (i, j, x)))

    x = torch.randn(2, 2)
    return Case(
        function,
        (torch.tensor(2), torch.tensor(3), x),
        calls=((torch.tensor(3), torch.tensor(0), x), (torch.tensor(0), torch.tensor(2), x)),
    )


@LOOPS
def cond_in_a_loop() -> Case:
    def function(n: torch.Tensor, x: torch.Tensor) -> Any:
        def body(n: torch.Tensor, x: torch.Tensor) -> Any:
            return n - 1, torch.cond(x.sum() > 0, lambda x: x - 2, lambda x: x + 3, (x,))

        return while_loop(lambda n, x: n > 0, body, (n, x))

    return Case(function, (torch.tensor(5), torch.randn(3)))


if HAS_SWITCH:

    @LOOPS
    def switch_in_a_loop() -> Case:
        def function(n: torch.Tensor, x: torch.Tensor) -> Any:
            def body(n: torch.Tensor, x: torch.Tensor) -> Any:
                return n - 1, switch(
                    n % 3, (lambda x: x + 1, lambda x: x * 2, lambda x: x.sin()), (x,)
                )

            return while_loop(lambda n, x: n > 0, body, (n, x))

        return Case(
            function, (torch.tensor(5), torch.randn(3)), calls=((torch.tensor(1), torch.randn(3)),)
        )


@LOOPS
def loop_with_parameters() -> Case:
    class Iterated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("limit", torch.tensor(3))

        def forward(self, n: torch.Tensor, x: torch.Tensor) -> Any:
            def body(n: torch.Tensor, x: torch.Tensor) -> Any:
                return n + 1, self.linear(x).tanh()

            return while_loop(lambda n, x: n < self.limit, body, (n, x))

    return Case(
        Iterated(),
        (torch.tensor(0), torch.randn(2, 4)),
        calls=((torch.tensor(2), torch.randn(2, 4)),),
    )


@LOOPS
def loop_with_tensors_from_outside() -> Case:
    def function(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        limit, step = x.abs().sum() + 9, y.cos()
        n, x = while_loop(
            lambda n, x: x.abs().sum() < limit, lambda n, x: (n + 1, x + step + y.abs()), (n, x)
        )
        return x + n

    return Case(function, (torch.tensor(0), torch.randn(3), torch.randn(3)))


@LOOPS
def loop_over_a_tree() -> Case:
    def function(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        def body(n: Any, tree: Any) -> Any:
            (a, b), named = tree
            return n - 1, ([a + 1, b * 2], {"z": named["z"] + a.sum()})

        carried = (n, ([x, y], {"z": x * 0}))
        return while_loop(lambda n, tree: n > 0, body, carried)

    return Case(function, (torch.tensor(3), torch.randn(3), torch.randn(2)))


@LOOPS
def loop_with_sizes_from_outside() -> Case:
    def function(n: torch.Tensor, x: torch.Tensor) -> Any:
        rows = x.shape[0]
        twice = rows * 2
        return while_loop(lambda n, x: n < twice, lambda n, x: (n + rows, x * 0.5 + rows), (n, x))

    return Case(
        function,
        (torch.tensor(0), torch.randn(3, 2)),
        dynamic=(None, {0: Dim("loop_rows", min=2)}),
        calls=((torch.tensor(1), torch.randn(5, 2)),),
    )


@LOOPS
def convolution_in_a_loop() -> Case:
    class Iterated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, n: torch.Tensor, x: torch.Tensor) -> Any:
            return while_loop(lambda n, x: n > 0, lambda n, x: (n - 1, self.conv(x).relu()), (n, x))

    return Case(Iterated(), (torch.tensor(2), torch.randn(1, 3, 5, 5)))


@pytest.fixture(scope="module")
def loops(device: str) -> Bundle:
    return LOOPS.compile(device)


def test_loops_compile_together(loops: Bundle) -> None:
    loops.check_whole()


@pytest.mark.parametrize("name", LOOPS)
def test_loop(loops: Bundle, name: str) -> None:
    loops.check(name)


@pytest.mark.gpu
def test_loop_of_two_devices() -> None:
    """The counter is on the CPU, the data on the GPU."""

    def function(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        def body(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
            return n - 1, x * 2 + 1, y - 1

        return no_alias(while_loop(lambda n, x, y: n > 0, body, (n, x, y)))

    args = torch.tensor(3), torch.randn(4, device="cuda"), torch.randn(4)
    artifact = aot_util.compile_model(function, args)
    artifact.check(*args)
    artifact.check(torch.tensor(0), *args[1:])


@SCANS
def scanned() -> Case:
    def step(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return total + x, total * x

    return Case(
        lambda init, xs: scan(step, init, xs),
        (torch.zeros(3), torch.randn(5, 3)),
        calls=((torch.ones(3), torch.randn(5, 3)),),
    )


@SCANS
def scanned_backwards_along_another_dim() -> Case:
    def step(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return total * 0.5 + x, total - x

    return Case(
        lambda init, xs: scan(step, init, xs, dim=1, reverse=True),
        (torch.zeros(3), torch.randn(3, 4)),
    )


@SCANS
def scanned_with_parameters_over_a_tree() -> Case:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(7, 4)

        def forward(self, state: torch.Tensor, x: torch.Tensor, gain: torch.Tensor) -> Any:
            def step(carry: Any, item: Any) -> Any:
                new = self.cell(torch.cat([carry["state"], item[0]], -1)).tanh() * item[1]
                return {"state": new}, (new + 1, new.sum(-1))

            return scan(step, {"state": state}, (x, gain))

    return Case(Cell(), (torch.zeros(2, 4), torch.randn(5, 2, 3), torch.rand(5, 1, 1)))


@SCANS
def scanned_over_a_dynamic_length() -> Case:
    def step(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return total + x, total.sin() + x

    return Case(
        lambda init, xs: scan(step, init, xs),
        (torch.zeros(3), torch.randn(5, 3)),
        dynamic=(None, {0: Dim("steps", min=2, max=64)}),
        calls=((torch.zeros(3), torch.randn(2, 3)), (torch.zeros(3), torch.randn(17, 3))),
    )


@pytest.fixture(scope="module")
def scans(device: str) -> Bundle:
    return SCANS.compile(device)


scans_work = pytest.mark.skipif(
    compile_util.TORCH < (2, 13), reason="no scan under AOT: Inductor loses the body's inputs"
)


@scans_work
def test_scans_compile_together(scans: Bundle) -> None:
    scans.check_whole()


@scans_work
@pytest.mark.parametrize("name", SCANS)
def test_scan(scans: Bundle, name: str) -> None:
    scans.check(name)


def test_a_branch_that_returns_uninitialized_memory_warns(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """torch.export drops a Triton kernel whose only effect is the branch's result."""

    def function(p: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.cond(p, lambda x: torch.empty_like(x), lambda x: x + 1, (x,))

    x = torch.randn(3)
    program = aot_util.export(function, (torch.tensor(False), x))
    path = str(tmp_path / "branches.pt2")
    with caplog.at_level("WARNING", "inductor_ext"):
        inductor_ext.aoti_compile_and_package({"branches": program}, package_path=path)
    (message,) = [message for message in caplog.messages if "uninitialized" in message]
    assert "'branches', true_graph_0" in message
    assert "torch.library.triton_op" in message
    model = inductor_ext.load(path, "branches")
    torch.testing.assert_close(model(torch.tensor(False), x), x + 1)
