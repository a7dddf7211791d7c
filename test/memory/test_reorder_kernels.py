"""The order of kernels: the search against exact optima, the switch, what it saves in a call."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import ir, memory, scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

import inductor_ext
from benchmarks.harness import measure
from inductor_ext import events, exc
from inductor_ext.memory import known_ir, reorder_kernels, scheduler_graph
from inductor_ext.memory.planner.kernel_order import (
    EFFORT,
    Buffer,
    OrderProblem,
    find_order,
    profile,
)
from test.support.compile_util import OUT_VARIANT

CHECKOUT = Path(__file__).parents[2]


# --- the search ---------------------------------------------------------------------------------


def random_problem(rng: random.Random, steps: int, *, batches: bool = False) -> OrderProblem:
    """Steps 0, 1, ... are in a right order."""
    buffers: list[Buffer] = []
    for _ in range(rng.randint(0, 2) if steps < 20 else steps // 10):
        readers = rng.sample(range(steps), rng.randint(1, min(2, steps)))
        buffers.append(Buffer(rng.randint(0, 20), None, tuple(sorted(readers)), rng.random() < 0.1))
    for step in range(steps):
        reach = min(steps - 1, step + rng.choice([3, 8, steps]))
        count = min(reach - step, rng.choice([0, 1, 1, 1, 2, 2, 3]))
        readers = rng.sample(range(step + 1, reach + 1), count)
        sources = [i for i, b in enumerate(buffers) if step in b.consumers and not b.is_output]
        in_place_candidates: tuple[int, ...] = ()
        size = rng.randint(0, 20)
        if sources and rng.random() < 0.4:
            size = buffers[rng.choice(sources)].size
            in_place_candidates = tuple(i for i in sources if buffers[i].size == size)
        is_output = rng.random() < (0.05 if readers else 0.7)
        buffers.append(Buffer(size, step, tuple(sorted(readers)), is_output, in_place_candidates))
    edges = tuple(
        (early, late)
        for late in range(steps)
        for early in range(late)
        if rng.random() < 0.3 / steps
    )
    batched = frozenset(step for step in range(steps) if batches and rng.random() < 0.6)
    return OrderProblem(steps, tuple(buffers), edges, batched, batches and rng.random() < 0.7)


def simulate(problem: OrderProblem, order: Sequence[int]) -> list[int]:
    """Loads by playing the order through, one buffer at a time."""
    place = {step: index for index, step in enumerate(order)}
    death: dict[int, int] = {}  # position whose step is the last to find it in memory
    for index, buffer in enumerate(problem.buffers):
        users = [place[step] for step in buffer.consumers]
        if buffer.producer is not None:
            users.append(place[buffer.producer])
        death[index] = len(order) if buffer.is_output else max(users)
    inherited: dict[int, int] = {}
    for index, buffer in enumerate(problem.buffers):
        for source in buffer.in_place_candidates:
            if buffer.producer is None or death[source] != place[buffer.producer]:
                continue
            if source not in inherited.values():
                inherited[index] = source
                break
    loads = []
    for position, _ in enumerate(order):
        load = 0
        for index, buffer in enumerate(problem.buffers):
            birth = -1 if buffer.producer is None else place[buffer.producer]
            freed = death[index]
            if problem.batch_frees_late and freed < len(order) and order[freed] in problem.batched:
                while freed + 1 < len(order) and order[freed + 1] in problem.batched:
                    freed += 1
            if index in inherited.values():
                freed = death[index] - 1  # from then on it counts as its heir
            load += buffer.size * (birth <= position <= freed)
        loads.append(load)
    return loads


def optimum(problem: OrderProblem) -> int:
    """The lowest peak of all orders, by trying them; for problems without late frees."""
    needs = [0] * problem.steps
    for buffer in problem.buffers:
        if buffer.producer is not None:
            for step in buffer.consumers:
                needs[step] |= 1 << buffer.producer
    for early, late in problem.edges:
        needs[late] |= 1 << early
    lowest = sum(buffer.size for buffer in problem.buffers) + 1

    def extend(done: int, order: list[int]) -> None:
        nonlocal lowest
        if len(order) == problem.steps:
            lowest = min(lowest, max(simulate(problem, order)))
            return
        for step in range(problem.steps):
            if not done >> step & 1 and not needs[step] & ~done:
                extend(done | 1 << step, [*order, step])

    extend(0, [])
    return lowest


def batches(problem: OrderProblem, order: Sequence[int]) -> int:
    kinds = [step in problem.batched for step in order]
    return sum(now and not before for before, now in zip([False, *kinds], kinds, strict=False))


seeds = st.integers(0, 2**32)


@settings(max_examples=80, deadline=None)
@given(seeds, st.integers(1, 40), st.booleans())
def test_an_order_is_right_and_never_worse(seed: int, steps: int, batched: bool) -> None:
    problem = random_problem(random.Random(seed), steps, batches=batched)
    found = find_order(problem, range(steps))
    assert sorted(found.order) == list(range(steps))
    place = {step: index for index, step in enumerate(found.order)}
    assert all(place[early] < place[late] for early, late in problem.edges)
    for buffer in problem.buffers:
        if buffer.producer is not None:
            assert all(place[buffer.producer] < place[reader] for reader in buffer.consumers)
    assert found.lower_bound <= found.peak <= found.peak_before
    assert found.peak == max(simulate(problem, found.order))
    assert found.peak_before == max(simulate(problem, range(steps)))
    assert batches(problem, found.order) <= batches(problem, range(steps))
    costs = profile(problem, found.order)
    assert list(costs.loads) == simulate(problem, found.order)
    assert costs.batches == batches(problem, found.order)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 6))
def test_no_order_is_below_the_lower_bound(seed: int, steps: int) -> None:
    problem = random_problem(random.Random(seed), steps)
    found = find_order(problem, range(steps))
    assert found.lower_bound <= optimum(problem) <= found.peak


def test_small_problems_are_solved_to_the_optimum() -> None:
    """All of these 120; of the orders that they start from, less than two thirds are optimal."""
    problems = [random_problem(random.Random(seed), 7) for seed in range(120)]
    optima = [optimum(problem) for problem in problems]
    found = [find_order(problem, range(7)) for problem in problems]
    assert [item.peak for item in found] == optima
    started_well = sum(item.peak_before == best for item, best in zip(found, optima, strict=True))
    assert started_well < 80


def ladder(rungs: int) -> OrderProblem:
    """Each rung makes a large buffer from the input and a small one from that.

    Making all large ones first, as the given order does, needs `rungs` of them at once.
    """
    large = [Buffer(100, step, (rungs + step,)) for step in range(rungs)]
    small = [Buffer(1, rungs + step, (), is_output=True) for step in range(rungs)]
    return OrderProblem(2 * rungs, (*large, *small))


@pytest.mark.parametrize("rungs", [2, 10, 100, 300])
def test_a_ladder_is_climbed_rung_by_rung(rungs: int) -> None:
    found = find_order(ladder(rungs), range(2 * rungs))
    assert found.peak_before == 100 * rungs + 1
    assert found.peak == 100 + rungs


def test_effort_bounds_the_search() -> None:
    problem = random_problem(random.Random(1), 400)
    found = find_order(problem, range(400))
    assert found.lower_bound < found.peak < found.peak_before
    # What is begun when the effort ends is ended.
    assert found.operations < 1.1 * EFFORT * problem.steps
    assert find_order(problem, range(400), effort=0).order == tuple(range(400))


def test_the_same_problem_has_the_same_order_in_every_process() -> None:
    problem = random_problem(random.Random(5), 60, batches=True)
    code = (
        "from inductor_ext.memory.planner.kernel_order import Buffer, OrderProblem, find_order\n"
        f"print(find_order({problem!r}, range(60)).order)"
    )
    orders = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=CHECKOUT,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        ).stdout
        for seed in ("0", "1")
    }
    assert orders == {f"{find_order(problem, range(60)).order}\n"}


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ([1, 0], "step 1 needs step 0, which follows it"),
        ([0], "it has 1 of 2 steps"),
        ([0, 0], "step 0 is unknown or occurs twice"),
        ([0, 2], "step 2 is unknown or occurs twice"),
    ],
)
def test_a_wrong_order_is_refused(order: list[int], complaint: str) -> None:
    problem = OrderProblem(2, (Buffer(1, 0, (1,)),))
    for use in (profile, find_order):
        with pytest.raises(exc.OrderError, match=complaint):
            use(problem, order)


def test_a_cycle_is_refused() -> None:
    problem = OrderProblem(2, (Buffer(1, 0, (1,)),), edges=((1, 0),))
    with pytest.raises(exc.OrderError):
        find_order(problem, [0, 1])


def test_an_empty_graph_has_an_order() -> None:
    found = find_order(OrderProblem(0, ()), [])
    assert (found.order, found.peak, found.lower_bound) == ((), 0, 0)


# --- the adapter --------------------------------------------------------------------------------

BRANCHES = (
    (0, None, 1024),
    (1, None, 64),
    (0, None, 1024),
    (1, 2, 64),
    (1, 1, 1024),
    (5, None, 1024),
    (6, None, 8),
    (7, 1, 1024),
)
"""Matrix products: (index of the left factor, of what is added or None, columns). Value 0 is the
input. All four orders that stock tries hold four values of 1024 columns at once; three are enough.
"""

ROWS = 64


def branches(
    multiply: Callable[..., Any] = torch.mm,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    columns = [8, *(width for _, _, width in BRANCHES)]
    weights = [torch.randn(columns[left], width) for left, _, width in BRANCHES]
    used = {index for left, added, _ in BRANCHES for index in (left, added)}

    def function(x: Any, weights: list[Any]) -> list[Any]:
        values = [x]
        for (left, added, _), weight in zip(BRANCHES, weights, strict=True):
            product = (values[left], weight)
            values.append(
                multiply(*product) if added is None else torch.addmm(values[added], *product)
            )
        return [value for index, value in enumerate(values) if index not in used]

    return function, (torch.randn(ROWS, 8), weights)


@pytest.fixture
def reorderings(monkeypatch: pytest.MonkeyPatch) -> list[reorder_kernels.Reordering]:
    """What has become of the order of each graph that the extension compiles meanwhile."""
    from torch._inductor.virtualized import V

    found: list[reorder_kernels.Reordering] = []
    stock = reorder_kernels.improve

    def improve(*args: Any) -> Any:
        order = stock(*args)
        outcome = reorder_kernels.reordering(V.graph)
        assert outcome is not None
        assert reorder_kernels.peak_before_reorder(V.graph) == (
            outcome.peak_before if outcome.moved else None
        )
        found.append(dataclasses.replace(outcome, seconds=0.0))
        return order

    monkeypatch.setattr(reorder_kernels, "improve", improve)
    return found


def generated(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    backend: str = "inductor_ext",
    patches: dict[str, Any] | None = None,
    **overrides: Any,
) -> tuple[Any, str, int]:
    """Compile anew and call: the result, the code, and the bytes that a call holds at most."""
    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True, **(patches or {})):
        if backend == "inductor":
            compiled = torch.compile(function, backend=backend)
            result, codes = run_and_get_code(compiled, *inputs)
        else:
            with inductor_ext.activate(memory_arenas="never", **overrides):
                compiled = torch.compile(function, backend=backend)
                result, codes = run_and_get_code(compiled, *inputs)
        is_output: list[Any] = []
        peak = measure.peak_allocated(lambda: is_output.append(compiled(*inputs)))
    return result, "\n".join(codes), peak


AS_SCHEDULED = {"allow_buffer_reuse": False}
"""Every buffer is allocated when it is made and freed after its last use."""


def test_the_measured_peak_falls_to_what_the_search_says(
    reorderings: list[reorder_kernels.Reordering],
) -> None:
    function, inputs = branches()
    result, _, peak = generated(function, inputs, patches=AS_SCHEDULED)
    (outcome,) = reorderings
    assert outcome.moved
    assert outcome.why == ""
    stock_result, _, stock_peak = generated(
        function, inputs, patches=AS_SCHEDULED, memory_reorder=False
    )
    torch.testing.assert_close(result, stock_result, rtol=0, atol=0)
    assert (stock_peak, peak) == (outcome.peak_before, outcome.peak)
    assert peak == outcome.lower_bound == 3 * ROWS * 1024 * 4
    assert stock_peak == 4 * ROWS * 1024 * 4


def test_reordering_has_a_setting_in_both(
    reorderings: list[reorder_kernels.Reordering],
) -> None:
    function, inputs = branches()
    _, ours, _ = generated(function, inputs, patches=AS_SCHEDULED)
    (outcome,) = reorderings
    assert outcome.moved
    for switched_off in (
        {"memory_reorder": False, "patches": AS_SCHEDULED},
        {"patches": {**AS_SCHEDULED, "reorder_for_peak_memory": False}},
    ):
        generated(function, inputs, **switched_off)
        assert len(reorderings) == 1
    assert hasattr(memory.reorder_for_peak_memory, "__wrapped__")
    _, stock, _ = generated(function, inputs, backend="inductor", patches=AS_SCHEDULED)
    assert len(reorderings) == 1
    assert stock != ours


def test_inductor_in_another_thread_keeps_its_order(
    reorderings: list[reorder_kernels.Reordering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens while ours is choosing its order."""
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    function, inputs = branches()
    graph = make_fx(lambda x, *weights: tuple(function(x, list(weights))))(inputs[0], *inputs[1])
    chosen: list[Any] = []
    note = reorder_kernels.improve

    def compile_by_stock() -> None:
        with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
            compile_fx(graph, [inputs[0], *inputs[1]])
        chosen.append(len(reorderings))

    def improve(*args: Any) -> Any:
        # Not through torch.compile: dynamo's lock would make it wait for the end of ours.
        thread = threading.Thread(target=compile_by_stock)
        thread.start()
        thread.join()
        return note(*args)

    monkeypatch.setattr(reorder_kernels, "improve", improve)
    generated(function, inputs)
    assert chosen == [0]
    assert len(reorderings) == 1


def test_random_numbers_are_drawn_in_inductors_order(
    reorderings: list[reorder_kernels.Reordering],
) -> None:
    """Fallback random operators share one generator: each keeps its turn.

    Compared with stock's order and not with eager mode, whose order stock of torch 2.11 changes.
    """
    function, inputs = branches()

    def noisy(x: Any, weights: list[Any]) -> Any:
        weights = [torch.randn(weight.shape) for weight in weights]
        return function(x, weights)

    results = []
    for reorder in (True, False):
        torch._dynamo.reset()
        patches = {"force_disable_caches": True, "fallback_random": True}
        with (
            torch.no_grad(),
            inductor_config.patch(patches),
            inductor_ext.activate(memory_reorder=reorder),
        ):
            compiled = torch.compile(noisy, backend="inductor_ext")
            torch.manual_seed(3)
            results.append(compiled(*inputs))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    (outcome,) = reorderings
    assert outcome.moved


@pytest.mark.skipif(not hasattr(ir, "ExternKernelMultiOut"), reason="torch 2.11 ignores the tag")
def test_custom_operators_with_out_variants_keep_their_order() -> None:
    """What an operator does beside its outputs, nobody knows; Inductor calls its out variant."""
    calls: list[float] = []

    def product(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
        calls.append(weight[0, 0].item())
        return torch.mm(x, weight, out=out)

    arguments = "(Tensor x, Tensor weight"
    with torch.library._scoped_library("inductor_ext_order", "DEF") as library:
        library.define(f"product{arguments}) -> Tensor")
        library.define(
            f"product.out{arguments}, *, Tensor(a!) out) -> Tensor(a!)", tags=(OUT_VARIANT,)
        )
        library.impl("product", lambda x, w: x.new_empty(len(x), w.shape[1]), "Meta")
        library.impl("product.out", product, "CPU")

        function, inputs = branches(torch.ops.inductor_ext_order.product)
        orders = []
        for reorder in (True, False):
            calls.clear()
            generated(function, inputs, memory_reorder=reorder)
            orders.append([*calls])
    # Two calls each.
    assert len(orders[0]) == 2 * sum(added is None for _, added, _ in BRANCHES)
    assert orders[0] == orders[1]


def test_inductors_estimate_is_reproduced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels with several outputs, concatenations, changed inputs, unused outputs."""
    follows: list[bool] = []
    stock = scheduler_graph.SchedulerGraph.matches_estimate

    def matches_estimate(self: Any) -> bool:
        follows.append(stock(self))
        return follows[-1]

    monkeypatch.setattr(scheduler_graph.SchedulerGraph, "matches_estimate", matches_estimate)
    # Only the schedule is looked at, so that no kernel needs to be compiled.
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_args: lambda *_tensors: None)

    def function(x: Any, state: Any) -> Any:
        values, indices = torch.sort(x)
        halves = torch.mm(x, x).split(8, dim=1)
        state.add_(values.sum())
        q, r = torch.linalg.qr(x)
        whole = torch.cat([halves[1] * 2, q[:, :8], torch.mm(x, r)[:, :8]], dim=1)
        return whole @ whole.t(), indices.sum(), state * 2

    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        torch.compile(function, backend="inductor_ext")(torch.randn(16, 16), torch.zeros(4))
    assert follows == [True]


def test_pools_and_unknown_classes_keep_inductors_order(
    reorderings: list[reorder_kernels.Reordering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel allocates from the pool in whose context it is called."""
    function, inputs = branches()
    _, upstream, _ = generated(function, inputs, memory_reorder=False)
    with monkeypatch.context() as patch:
        # An attribute of the scheduler from torch 2.14 on.
        patch.setattr(
            scheduler.Scheduler, "_mempool_nodes", property(lambda _: True, _ignore), False
        )
        generated(function, inputs)
    monkeypatch.setattr(events, "_warned", set())
    monkeypatch.delitem(known_ir.SCHEDULER_NODES, "ExternKernelSchedulerNode")  # type: ignore[arg-type]
    _, code, _ = generated(function, inputs)
    assert _calls(code) == _calls(upstream)
    pools, unknown = reorderings
    assert (pools.moved, pools.why) == (False, "the graph uses CUDA memory pools")
    assert not unknown.moved
    assert "torch._inductor.scheduler.ExternKernelSchedulerNode" in unknown.why


def _ignore(instance: object, value: object) -> None:
    """A setter for what does not change."""


def _calls(code: str) -> list[str]:
    """The calls of kernels, in their order."""
    return re.findall(r"extern_kernels\.\w+\(.*\)", code)
