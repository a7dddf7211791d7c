"""The order of kernels in compiled code: settings, memory saved, and what keeps its order."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._inductor import ir, memory, scheduler
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

import inductor_ext
from benchmarks.harness import measure
from inductor_ext.memory import known_ir, reorder_kernels, scheduler_graph
from test.support.compile_util import OUT_VARIANT

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
"""Matmuls: (index of A, index of the addend or None, N). Value 0 is the input. All four orders that
Inductor tries have four live values of 1024 columns at once; three are enough.
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
            matmul = (values[left], weight)
            values.append(
                multiply(*matmul) if added is None else torch.addmm(values[added], *matmul)
            )
        return [value for index, value in enumerate(values) if index not in used]

    return function, (torch.randn(ROWS, 8), weights)


@pytest.fixture
def reorderings(monkeypatch: pytest.MonkeyPatch) -> list[reorder_kernels.Reordering]:
    """The reordering of each graph that the extension compiles during the test."""
    from torch._inductor.virtualized import V

    results: list[reorder_kernels.Reordering] = []
    inductor = reorder_kernels.improve

    def improve(*args: Any) -> Any:
        order = inductor(*args)
        outcome = reorder_kernels.reordering(V.graph)
        assert outcome is not None
        assert reorder_kernels.peak_before_reorder(V.graph) == (
            outcome.peak_before if outcome.moved else None
        )
        results.append(dataclasses.replace(outcome, seconds=0.0))
        return order

    monkeypatch.setattr(reorder_kernels, "improve", improve)
    return results


def generated(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    backend: str = "inductor_ext",
    patches: dict[str, Any] | None = None,
    **overrides: Any,
) -> tuple[Any, str, int]:
    """Compile and call a function; return the result, the code, and the peak bytes of a call."""
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
        peak = measure.measure_peak_allocated(lambda: is_output.append(compiled(*inputs)))
    return result, "\n".join(codes), peak


AS_SCHEDULED = {"allow_buffer_reuse": False}
"""Every buffer is allocated when it is written and freed after its last use."""


def test_the_measured_peak_is_the_peak_of_the_search(
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


def test_both_settings_switch_reordering_off(
    reorderings: list[reorder_kernels.Reordering],
) -> None:
    function, inputs = branches()
    _, extension, _ = generated(function, inputs, patches=AS_SCHEDULED)
    (outcome,) = reorderings
    assert outcome.moved
    for switched_off in (
        {"memory_reorder": False, "patches": AS_SCHEDULED},
        {"patches": {**AS_SCHEDULED, "reorder_for_peak_memory": False}},
    ):
        generated(function, inputs, **switched_off)
        assert len(reorderings) == 1
    assert hasattr(memory.reorder_for_peak_memory, "__wrapped__")
    _, inductor, _ = generated(function, inputs, backend="inductor", patches=AS_SCHEDULED)
    assert len(reorderings) == 1
    assert inductor != extension


def test_inductor_in_another_thread_keeps_its_order(
    reorderings: list[reorder_kernels.Reordering], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread compiles while the extension reorders."""
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
        # Not by torch.compile, which would wait for dynamo's lock until the other compile ends.
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
    """Fallback random operators share one generator, so that they keep their relative order.

    Compared with Inductor's order, which differs from eager mode's in torch 2.11.
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
    """An operator may have side effects; Inductor calls its out variant."""
    calls: list[float] = []

    def matmul(x: Tensor, weight: Tensor, *, out: Tensor) -> Tensor:
        calls.append(weight[0, 0].item())
        return torch.mm(x, weight, out=out)

    arguments = "(Tensor x, Tensor weight"
    with torch.library._scoped_library("inductor_ext_order", "DEF") as library:
        library.define(f"product{arguments}) -> Tensor")
        library.define(
            f"product.out{arguments}, *, Tensor(a!) out) -> Tensor(a!)", tags=(OUT_VARIANT,)
        )
        library.impl("product", lambda x, w: x.new_empty(len(x), w.shape[1]), "Meta")
        library.impl("product.out", matmul, "CPU")

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
    inductor = scheduler_graph.SchedulerGraph.matches_estimate

    def matches_estimate(self: Any) -> bool:
        follows.append(inductor(self))
        return follows[-1]

    monkeypatch.setattr(scheduler_graph.SchedulerGraph, "matches_estimate", matches_estimate)
    # Only the schedule is checked, so that no kernel needs to be compiled.
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


@pytest.mark.usefixtures("repeated_warnings")
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
    monkeypatch.delitem(known_ir.SCHEDULER_NODES, "ExternKernelSchedulerNode")  # type: ignore[arg-type]
    _, code, _ = generated(function, inputs)
    assert _calls(code) == _calls(upstream)
    pools, unknown = reorderings
    assert (pools.moved, pools.why) == (False, "the graph uses CUDA memory pools")
    assert not unknown.moved
    assert "torch._inductor.scheduler.ExternKernelSchedulerNode" in unknown.why


def _ignore(instance: object, value: object) -> None:
    """A setter that ignores its value."""


def _calls(code: str) -> list[str]:
    """The calls of kernels, in order."""
    return re.findall(r"extern_kernels\.\w+\(.*\)", code)
