"""Bugs of Inductor's memory planning, which the extension does not have.

If it is quick, a test also reproduces Inductor's bug; that part is skipped on a torch without it.
The extension must equal eager mode: values, strides, gradients, mutated inputs and shared memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch._inductor import ir
from torch._inductor.utils import run_and_get_code

import inductor_ext
from benchmarks.harness import measure
from benchmarks.memory import models as memory_models
from benchmarks.memory.peak import record_allocations
from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord
from test.support import compile_util
from test.support.compile_util import BACKEND, assert_same, check
from test.support.memory_graphs import GRAPHS, SIDE, Graph, matrix

POOLS = {"memory_planning": True, "memory_pool": "intermediates"}
NO_REUSE = {"allow_buffer_reuse": False}

MATRIX = SIDE * SIDE * 4
"""Bytes."""


@pytest.fixture(autouse=True)
def _compiles_alone() -> Iterator[None]:
    """Compile every graph; data-dependent sizes do not break graphs."""
    with (
        compile_util.every_graph_compiles(),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
    ):
        yield


def plans(records: list[events.Record]) -> list[MemoryPlanRecord]:
    """The memory plans among the records."""
    return [record for record in records if isinstance(record, MemoryPlanRecord)]


def compiled_peak(
    function: Callable[..., Any], inputs: tuple[Any, ...], backend: str, **options: Any
) -> int:
    """Peak bytes of a call of the compiled function."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, options=options, fullgraph=True)
    with torch.no_grad():
        compiled(*inputs)
        return measure.find_peak(record_allocations(lambda: compiled(*inputs)))


OPTIONS: dict[str, dict[str, object]] = {
    "auto": {},
    "arenas": {"memory_arenas": "always", "memory_debug": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_equals_eager(graph: Graph, options: dict[str, object]) -> None:
    """With the debug setting freed memory is poisoned, so that a late read shows."""
    with events.capture() as records, torch.set_grad_enabled(graph.backward):
        check(
            graph.function,
            graph.make_inputs,
            backward=graph.backward,
            dynamic=graph.dynamic,
            fullgraph=True,
            options=options,
        )
    for record in plans(records):
        assert record.lower_bound <= record.peak
        if not options:
            assert record.peak <= record.peak_before


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_compile_for_every_batch(options: dict[str, object]) -> None:
    function = GRAPHS["any_batch"].function
    compiled = torch.compile(
        function, backend=BACKEND, dynamic=True, fullgraph=True, options=options
    )
    _, w = GRAPHS["any_batch"].make_inputs()
    with torch.no_grad(), compile_util.compiled_graphs() as kinds:
        for count in (4, 7, 24, 33, 64):
            x = matrix(count, seed=count)
            assert_same(compiled(x, w), function(x, w))
        assert kinds.total() == 0
    assert dict(kinds) == {"inference": 1}
    with torch.no_grad():
        # Half of these sizes is 0 or 1, which have separate graphs.
        for count in (1, 2, 3):
            x = matrix(count, seed=count)
            assert_same(compiled(x, w), function(x, w))


def padded(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The padded zeros use the padding of the first buffer's rows."""
    a = x.sin() * 2
    b = torch.nn.functional.pad(a, (0, 17, 0, 0))
    c = b @ w
    return c @ w.t(), (c.cos() @ c.t()).relu()


def test_padding_within_a_buffer_is_part_of_it() -> None:
    """A buffer needs its allocated size, which is larger than the size of its layout."""
    rows, stride = 40, 2016

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return matrix(rows, stride - 17, seed=1), matrix(stride, 40, seed=2)

    options = {"disable_padding_cpu": False, "inplace_padding": True, "memory_arenas": "always"}
    before = compile_util.counters["inductor"]["inplace_padding"]
    with events.capture() as records, torch.no_grad():
        check(padded, inputs, options=options)
    assert compile_util.counters["inductor"]["inplace_padding"] == before + 1
    (record,) = plans(records)
    assert rows * stride * 4 in [storage.bytes for storage in record.storages]


def _llama() -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = memory_models.Llama(64, 4, 2, 3, 100).eval()
        return module, (torch.randint(100, (2, 64)),)


PEAKS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    name: lambda graph=GRAPHS[name]: (graph.function, graph.make_inputs())  # type: ignore[misc]
    for name in ("between_branches", "across_loop", "unbacked")
}
PEAKS["llama"] = _llama


@pytest.mark.parametrize("make", PEAKS.values(), ids=PEAKS)
def test_the_peak_is_that_of_the_schedule(make: Callable[[], Any]) -> None:
    """Inductor's reuse keeps memory across kernels that it does not count."""
    function, inputs = make()
    inductor_peak = compiled_peak(function, inputs, "inductor", **NO_REUSE)
    assert compiled_peak(function, inputs, BACKEND) <= inductor_peak
    if compiled_peak(function, inputs, "inductor") <= inductor_peak:
        pytest.skip("Inductor's reuse does not raise the peak on this torch")


def test_the_peak_is_that_of_the_schedule_for_other_batches() -> None:
    """The plan of the first batch is valid for the others."""
    graph = GRAPHS["any_batch"]
    peaks: dict[str, list[int]] = {}
    for backend, options in (("inductor", NO_REUSE), (BACKEND, {})):
        torch._dynamo.reset()
        compiled = torch.compile(graph.function, backend=backend, dynamic=True, options=options)
        _, w = graph.make_inputs()
        with torch.no_grad():
            compiled(*graph.make_inputs())
            for rows in (3, 12, 64, 384):
                call = functools.partial(compiled, matrix(rows, seed=rows), w)
                changes = record_allocations(call)
                peaks.setdefault(backend, []).append(measure.find_peak(changes))
    for extension_peak, inductor_peak in zip(peaks[BACKEND], peaks["inductor"], strict=True):
        assert extension_peak <= 1.05 * inductor_peak


def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A chain of matmuls with a small result."""
    for _ in range(6):
        x = (x @ w).tanh() + x
    return x[0] * 2


def test_output_keeps_no_more_than_itself() -> None:
    """With memory_pool=combined Inductor's output is a view of the memory of all intermediates."""
    options = {"memory_planning": True, "memory_pool": "combined"}
    inputs = matrix(seed=1), matrix(seed=2)
    held = {}
    for backend in compile_util.BACKENDS:
        torch._dynamo.reset()
        compiled = torch.compile(dense, backend=backend, options=options)
        with torch.no_grad():
            assert_same(compiled(*inputs), dense(*inputs))
            kept: list[torch.Tensor] = []
            call = functools.partial(lambda f, out: out.append(f(*inputs)), compiled, kept)
            held[backend] = sum(record_allocations(call))
    assert held[BACKEND] == SIDE * 4
    if held["inductor"] <= SIDE * 4:
        pytest.skip("Inductor's output owns its memory on this torch")


def test_training_has_arenas() -> None:
    """Inductor ignores memory_planning if there is a backward."""
    graph = GRAPHS["saved_for_backward"]

    def run(function: Callable[..., Any]) -> None:
        function(*graph.make_inputs()).backward()

    inductor = torch.compile(graph.function, options=POOLS)
    _, code = run_and_get_code(run, inductor)
    assert len(code) == 2
    assert not any("alloc_from_pool(" in text for text in code)
    torch._dynamo.reset()
    with events.capture() as records:
        check(graph.function, graph.make_inputs, backward=True, options=POOLS)
    arenas = {record.kind: len(record.arenas) for record in plans(records)}
    assert arenas.keys() == {"forward", "backward"}
    assert all(arenas.values())


SCOPES = ("between_branches", "across_loop")


@pytest.mark.parametrize("name", SCOPES)
def test_arenas_of_subgraphs_in_cpp(name: str) -> None:
    """Inductor's C++ resets a pool of another scope, which does not compile."""
    graph = GRAPHS[name]
    with torch.no_grad():
        check(
            graph.function,
            graph.make_inputs,
            options={**POOLS, "cpp_wrapper": True},
        )


@pytest.mark.parametrize("name", SCOPES)
def test_inductor_does_not_compile_pools_of_subgraphs_in_cpp(name: str) -> None:
    graph = GRAPHS[name]
    compiled = torch.compile(graph.function, options={**POOLS, "cpp_wrapper": True})
    with torch.no_grad():
        try:
            compiled(*graph.make_inputs())
        except Exception as error:
            message = str(error)
        else:
            pytest.skip("Inductor compiles it on this torch")
    assert "C++ compile error" in message


class Both(torch.nn.Module):
    """A branch, then a loop."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(GRAPHS[name].function(x, w) for name in SCOPES)  # type: ignore[return-value]


@pytest.mark.slow
def test_arenas_of_subgraphs_in_a_package(tmp_path: Any) -> None:
    inputs = GRAPHS["between_branches"].make_inputs()
    program = torch.export.export(Both(), inputs)
    with events.capture() as records:
        path = inductor_ext.aoti_compile_and_package(
            program,
            package_path=str(tmp_path / "both.pt2"),
            inductor_configs={**POOLS, "aot_inductor.compile_wrapper_opt_level": "O0"},
        )
    assert any(record.arenas for record in plans(records))
    runner = torch._inductor.aoti_load_package(path)
    assert_same(tuple(runner(*inputs)), Both()(*inputs))


PARTITIONS = {"graph_partition": True, "custom_should_partition_ops": ["aten::sort"]}


@pytest.fixture
def _cut_at_kernels_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU graphs are not partitioned, so that the rule for a GPU is replaced."""
    from torch._inductor.scheduler import Scheduler

    def should_partition(self: Any, node: Any, *rest: Any, **named: Any) -> Any:
        return "a kernel of ATen" if isinstance(node.node, ir.FallbackKernel) else None

    monkeypatch.setattr(Scheduler, "should_partition", should_partition)


@pytest.mark.usefixtures("_cut_at_kernels_of_aten")
@pytest.mark.parametrize("pools", [{}, POOLS], ids=["auto", "pools"])
def test_arenas_of_partitions(pools: dict[str, object]) -> None:
    graph = GRAPHS["partitioned"]
    options = {**pools, **PARTITIONS}
    with events.capture() as records, torch.no_grad():
        check(graph.function, graph.make_inputs, options=options)
    names = [record.graph for record in plans(records)]
    assert [name for name in names if name.startswith("partition")] == [
        "partition_0",
        "partition_1",
        "partition_2",
    ]


@pytest.mark.usefixtures("_cut_at_kernels_of_aten")
def test_inductor_mixes_up_pools_of_partitions() -> None:
    graph = GRAPHS["partitioned"]
    compiled = torch.compile(graph.function, options={**POOLS, **PARTITIONS})
    expected = graph.function(*graph.make_inputs())
    with torch.no_grad():
        try:
            result = compiled(*graph.make_inputs())
        except UnboundLocalError:
            return
    if torch.allclose(result, expected, atol=1e-3):
        pytest.skip("Inductor computes correct values on this torch")
    assert float((result - expected).abs().max()) > 0.01


def test_inductor_recycles_an_output_that_is_a_view() -> None:
    """The imaginary part of a complex intermediate is overwritten before it is returned."""
    graph = GRAPHS["complex_numbers"]
    compiled = torch.compile(graph.function, options=POOLS)
    with torch.no_grad():
        results = compiled(*graph.make_inputs())
        expected = graph.function(*graph.make_inputs())
    if torch.allclose(results[2], expected[2], atol=1e-3):
        pytest.skip("Inductor computes correct values on this torch")
    assert torch.allclose(results[0], expected[0], atol=1e-3)
