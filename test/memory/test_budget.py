"""`memory_budget` at the sizes of each call: in Python, in C++ and in packages."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import ir
from torch._inductor.utils import run_and_get_code
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import Model
from inductor_ext.cpp_wrapper.load.native import ErrorCode
from inductor_ext.memory import budget_runtime
from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.records import MemoryPlanRecord
from test.support.loader_models import library_of
from test.support.memory_compiles import compiled, planning
from test.support.memory_graphs import GRAPHS

SIDE = 64
LARGE = "1 GiB"


def chain(x: Tensor, w: Tensor, calls: Tensor) -> Tensor:
    """Counts its calls in an input before anything else happens."""
    calls.add_(1)
    a = x @ w
    b = a.relu() @ w
    c = (b + a) @ w
    return (c @ w).softmax(-1) + a


def chain_inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, w = (torch.randn(n, SIDE, generator=generator) / 8 for n in (rows, SIDE))
    torch._dynamo.mark_dynamic(x, 0)
    return x, w, torch.zeros(SIDE)


def check(run: Callable[..., Any], rows: int) -> None:
    x, w, calls = chain_inputs(rows)
    expected = chain(x, w, calls.clone())
    torch.testing.assert_close(run(x, w, calls), expected, atol=1e-5, rtol=1e-5)
    assert calls[0] == 1


def check_refused(run: Callable[..., Any], rows: int, needed: int, budget: int) -> None:
    """A call is refused before it does anything, and says why."""
    x, w, calls = chain_inputs(rows)
    with pytest.raises(exc.MemoryBudgetCallError, match=f"= {rows}, needs {needed} bytes") as error:
        run(x, w, calls)
    assert isinstance(error.value, exc.MemoryBudgetError)
    fields = error.value.fields
    assert (fields["needed"], fields["budget"], fields["device"]) == (needed, budget, "cpu")
    assert ".size(0)) = " in fields["sizes"]
    assert not calls.any()


@contextlib.contextmanager
def budget_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, int]]]]:
    """Record the graph and the peaks by device of each check that evaluates the peak."""
    checks: list[tuple[str, dict[str, int]]] = []
    check_ = budget_runtime.BudgetCheck.__call__

    def record(self: budget_runtime.BudgetCheck, *sizes: int) -> None:
        peaks = zip(self.devices, self.peaks(*sizes), strict=True)
        checks.append((self.graph, dict(peaks)))
        check_(self, *sizes)

    with monkeypatch.context() as patch:
        patch.setattr(budget_runtime.BudgetCheck, "__call__", record)
        yield checks


def peaks_of(record: MemoryPlanRecord) -> dict[str, int]:
    """What the compile compares with the budget."""
    return {
        device: max(peak_report.allocated_bytes(record, device))
        for device in peak_report.devices(record)
    }


def peak_at(rows: int) -> int:
    """Three buffers of `chain`."""
    return 3 * rows * SIDE * 4


@pytest.mark.parametrize("cpp_wrapper", [False, True])
@torch.no_grad()
def test_each_call_is_checked(cpp_wrapper: bool) -> None:
    budget = peak_at(20)
    with planning(memory_budget=budget, cpp_wrapper=cpp_wrapper) as records:
        run = compiled(chain)
        check(run, 16)
        assert records[0].peak == peak_at(16)
        for _ in range(2):
            check(run, 20)
            check_refused(run, 21, peak_at(21), budget)
            check_refused(run, 4096, peak_at(4096), budget)
        check(run, 16)
    assert len(records) == 1


@torch.no_grad()
def test_graphs_of_the_cache_are_checked() -> None:
    budget = peak_at(20)
    with inductor_ext.config.patch(memory_budget=budget):
        check(compiled(chain), 16)
        torch._dynamo.reset()
        counters.clear()
        run = compiled(chain)
        check(run, 16)
        assert counters["inductor"]["fxgraph_cache_hit"] == 1
        check_refused(run, 21, peak_at(21), budget)


@torch.no_grad()
def test_static_shapes_have_no_code() -> None:
    with planning(memory_budget=LARGE):
        inputs = [value.clone() for value in chain_inputs(16)]  # without dynamic sizes
        _, (static,) = run_and_get_code(compiled(chain), *inputs)
    with planning():
        _, (unlimited,) = run_and_get_code(compiled(chain), *chain_inputs(16))
    assert "udget" not in static + unlimited


Z = torch.zeros(SIDE)


class Chain(torch.nn.Module):
    def forward(self, x: Tensor, w: Tensor, calls: Tensor) -> Tensor:
        return chain(x, w, calls)


def test_packages_are_checked(tmp_path: pathlib.Path) -> None:
    budget = peak_at(20)
    with torch.no_grad():
        x, w, calls = chain_inputs(16)
        program = torch.export.export(
            Chain(), (x.clone(), w, calls), dynamic_shapes=({0: Dim("n", min=2)}, None, None)
        )
    path = inductor_ext.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "chain.pt2"),
        inductor_configs={
            "memory_budget": budget,
            "aot_inductor.compile_wrapper_opt_level": "O0",
        },
    )
    model = inductor_ext.load(path)
    assert isinstance(model, Model)
    for _ in range(2):
        check(model, 20)
        check_refused(model, 21, peak_at(21), budget)
        assert library_of(model).last_error_code() is ErrorCode.BUDGET
        with pytest.raises(exc.MemoryBudgetCallError, match=r"\(x.size\(0\)\) = 4096"):
            model(*chain_inputs(4096))
    check(model, 16)
    stock = torch._inductor.aoti_load_package(path)
    check(stock, 20)
    with pytest.raises(RuntimeError):
        stock(*chain_inputs(21))


def test_forward_and_backward_are_checked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        return ((x @ w).sin() @ w).square().sum()

    def step(rows: int) -> None:
        x, w, _ = chain_inputs(rows)
        x.requires_grad_()
        run(x, w).backward()
        assert x.grad is not None
        expected = torch.autograd.grad(loss(x, w), x)[0]
        torch.testing.assert_close(x.grad, expected, atol=1e-4, rtol=1e-4)

    with planning(memory_budget=LARGE) as records, budget_checks(monkeypatch) as checks:
        run = compiled(loss)
        step(16)
    assert [record.kind for record in records] == ["forward", "backward"]
    assert [peaks for _, peaks in checks] == [peaks_of(record) for record in records]
    peaks = [peaks["cpu"] for _, peaks in checks]
    with planning(memory_budget=2 * max(peaks)):
        run = compiled(loss)
        step(16)
        with pytest.raises(exc.MemoryBudgetCallError):
            step(64)


@torch.no_grad()
def test_unbacked_sizes_are_checked_when_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(mask: Tensor, w: Tensor, calls: Tensor) -> Tensor:
        rows = mask.nonzero()[:, 0]
        calls.add_(1)
        a = w[rows % SIDE] @ w
        return (a @ w).sum(0)

    def scalar(count: Tensor, w: Tensor, calls: Tensor) -> Tensor:
        n = count.item()
        calls.add_(1)
        a = w[torch.arange(n) % SIDE] @ w  # type: ignore[arg-type]
        return (a @ w).sum(0)

    w = chain_inputs(SIDE)[1]
    masks = {n: torch.arange(1000) < n for n in (64, 900)}
    counts = {n: torch.tensor(n) for n in masks}
    flags = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    for function, sizes in ((ones, masks), (scalar, counts)):
        with (
            torch._dynamo.config.patch(flags),
            planning(memory_budget="100 KiB") as records,
            budget_checks(monkeypatch) as checks,
        ):
            run = compiled(function)
            calls = torch.zeros(SIDE)
            torch.testing.assert_close(
                run(sizes[64], w, calls), function(sizes[64], w, Z.clone()), atol=1e-5, rtol=1e-5
            )
            # The hint of an unbacked size is 64.
            assert max(peaks["cpu"] for _, peaks in checks) == peaks_of(records[0])["cpu"]
            with pytest.raises(exc.MemoryBudgetCallError, match=r"u\d+ = 900"):
                run(sizes[900], w, calls)
            assert calls[0] == 1


@torch.no_grad()
def test_branches_count_for_their_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def branch(y: Tensor) -> Tensor:
        return ((y.sin() @ y.t()) @ y).cos()

    def branches(flag: Tensor, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return torch.cond(flag, branch, torch.sin, (y,)) @ w + y

    for cpp_wrapper in (False, True):
        with (
            planning(memory_budget=380 * 1024, cpp_wrapper=cpp_wrapper) as records,
            budget_checks(monkeypatch) as checks,
        ):
            run = compiled(branches)
            for rows in (16, 32):
                x, w, _ = chain_inputs(rows)
                flag = torch.tensor(True)
                expected = branches(flag, x, w)
                torch.testing.assert_close(run(flag, x, w), expected, atol=1e-4, rtol=1e-4)
                if not cpp_wrapper and rows == 16:
                    peaks = {record.graph: peaks_of(record) for record in records}
                    assert dict(checks) == {graph: peaks[graph] for graph, _ in checks}
                    assert {graph for graph, _ in checks} >= {"call", "true_graph_0"}
            x, w, _ = chain_inputs(256)
            # The branch allocates 256 x 256 values, the caller alone 3 x 256 x 64.
            with pytest.raises(exc.MemoryBudgetCallError, match="function call, called"):
                run(torch.tensor(True), x, w)


@torch.no_grad()
def test_checks_count_what_the_compile_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(query: Tensor, key: Tensor) -> Tensor:
        # The kernel needs a workspace, whose size depends on both lengths.
        return torch.nn.functional.scaled_dot_product_attention(query.sin(), key, key)

    heads = [torch.randn(2, 3, length, 32) for length in (200, 40)]
    graph = GRAPHS["any_batch"]
    for function, inputs, arenas in (
        (attention, heads, "auto"),
        (graph.function, graph.make_inputs(), "always"),
    ):
        with (
            planning(memory_budget=LARGE, memory_arenas=arenas) as records,
            budget_checks(monkeypatch) as checks,
        ):
            compiled(function, dynamic=True)(*inputs)
        assert checks
        assert [peaks for _, peaks in checks] == [peaks_of(record) for record in records]


@torch.no_grad()
def test_partitions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.scheduler import Scheduler

    def should_partition(self: Any, node: Any, *rest: Any, **named: Any) -> Any:
        return "a kernel of ATen" if isinstance(node.node, ir.FallbackKernel) else None

    monkeypatch.setattr(Scheduler, "should_partition", should_partition)
    options = {"graph_partition": True, "custom_should_partition_ops": ["aten::sort"]}

    def sorted_twice(x: Tensor, w: Tensor) -> Tensor:
        a = (x @ w).relu() @ w
        return torch.ops.aten.sort(a, dim=1)[0] @ w + a

    with (
        planning(memory_budget=peak_at(64), **options) as records,
        budget_checks(monkeypatch) as checks,
    ):
        run = compiled(sorted_twice)
        x, w, _ = chain_inputs(16)
        torch.testing.assert_close(run(x, w), sorted_twice(x, w), atol=1e-4, rtol=1e-4)
        peaks = {record.graph: peaks_of(record) for record in records}
        assert dict(checks) == {graph: peaks[graph] for graph, _ in checks}
        assert {graph for graph, _ in checks} >= {"call", "partition_0"}
        with pytest.raises(exc.MemoryBudgetCallError, match="function call, called"):
            run(chain_inputs(1024)[0], w)


def test_the_error_is_read_from_texts() -> None:
    error = exc.MemoryBudgetCallError(
        graph="call", sizes="s0 (x.size(0)) = 4", needed=10, device="cuda:0", budget=5
    )
    text = f"Exception: {str(error).split(' Call it')[0]} raised at x.cpp:7"
    read = exc.MemoryBudgetCallError.from_message(text)
    assert read is not None
    assert read.fields == error.fields
    assert exc.MemoryBudgetCallError.from_message("out of memory") is None


def test_few_sizes_are_kept() -> None:
    check_ = budget_runtime.BudgetCheck("call", 9000, ("s0",), ("cpu",), lambda n: (n,))
    for size in range(6000):
        check_(size)
    assert len(check_.accepted) <= 4096
    with pytest.raises(exc.MemoryBudgetCallError):
        check_(9001)
    assert 9001 not in check_.accepted
