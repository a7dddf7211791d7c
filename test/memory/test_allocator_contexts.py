"""Memory that the allocator protects as a whole: of streams, pinned copies and custom operators."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import events
from inductor_ext.hooks import scope
from inductor_ext.memory import known_ir, reorder_kernels
from inductor_ext.memory.records import MemoryPlanRecord
from test.support import fake_cuda
from test.support.memory_compiles import check, compiled, planning, squares

SQUARE = ((64, 64), torch.float32)
HAS_STREAMS = importlib.util.find_spec("torch._inductor.stream_utils") is not None


def lower(
    function: Callable[..., Any],
    arenas: str,
    edit: Callable[[torch.fx.Graph], object] = lambda graph: None,
) -> tuple[list[str], MemoryPlanRecord]:
    """Return the lines of the generated function for a simulated GPU, and its memory plan."""
    pytest.importorskip("triton")
    settings = inductor_ext.config.snapshot({"memory_arenas": arenas})
    with scope.compile_scope(settings), events.capture(MemoryPlanRecord) as records:
        code = fake_cuda.lower(function, SQUARE, SQUARE, edit=edit).code
    (record,) = records
    body = code[code.index("def call(") :].partition("\n        return (")[0]
    return body.splitlines(), record


def find_sources(lines: list[str]) -> dict[str, str]:
    """Map a buffer to what its memory comes from: "own", or the buffer or arena of that memory."""
    own = re.compile(r"(\w+) = empty_strided\w*\(")
    shared = re.compile(r"(\w+) = (?:reinterpret_tensor\((\w+),|(\w+); del \w+  # reuse)")
    sources = {}
    for line in lines:
        if match := own.match(line.strip()):
            sources[match[1]] = "own"
        elif match := shared.match(line.strip()):
            sources[match[1]] = match[2] or match[3]
    return sources


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = x @ y
    b = a @ y
    c = b @ a
    return (c @ y) @ b


def insert(name: str, *arguments: Any) -> Callable[[torch.fx.Graph], None]:
    """Return an edit that calls an operator on streams after the second matmul.

    The argument "tensor" stands for the matmul's result.
    """
    # Importing the module registers the operators.
    import torch._dynamo.variables.streams

    operator = getattr(torch.ops.streams, name).default

    def change(graph: torch.fx.Graph) -> None:
        matmul = [node for node in graph.nodes if node.op == "call_function"][1]
        with graph.inserting_after(matmul):
            graph.call_function(
                operator, tuple(matmul if value == "tensor" else value for value in arguments)
            )

    return change


@pytest.mark.skipif(not HAS_STREAMS, reason="torch 2.11 cannot lower them")
@pytest.mark.parametrize("arenas", ["auto", "always"])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("record_stream", ("tensor", 1)), ("sync_dealloc", (0, 1, "tensor"))],
)
def test_a_tensor_protected_from_another_stream_shares_no_memory(
    name: str, arguments: tuple[Any, ...], arenas: str
) -> None:
    lines, _ = lower(chain, arenas, insert(name, *arguments))
    sources = find_sources(lines)
    (call,) = (line for line in lines if f"streams.{name}" in line)
    (operand,) = re.findall(r"buf\d+", call)
    assert sources[operand] == "own"
    assert operand not in sources.values()


@pytest.mark.parametrize("arenas", ["auto", "always"])
@pytest.mark.usefixtures("repeated_warnings")
def test_code_that_switches_streams_gets_inductors_plan(
    arenas: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        lines, record = lower(chain, arenas, insert("fork", 0, 1))
    assert record.strategy == "stock"
    assert record.reason == "its code switches to another stream (streams::fork)"
    assert "pool0" not in "".join(lines)
    assert ("streams::fork" in caplog.text) == (arenas == "always")


@pytest.mark.parametrize("name", ["fork", "join", "record_event", "wait_event"])
def test_operators_on_streams_are_found(name: str) -> None:
    insert(name)

    class Call:
        op_overload = getattr(torch.ops.streams, name).default

    class Matmul:
        op_overload = torch.ops.aten.mm.default

    operations = [object(), Matmul(), Call()]
    assert known_ir.find_stream_operator(operations, switch=False) == f"streams::{name}"
    switches = name in ("fork", "join")
    assert bool(known_ir.find_stream_operator(operations, switch=True)) == switches
    assert known_ir.find_stream_operator(operations[:2], switch=False) == ""
    assert [known_ir.is_custom(operation) for operation in operations] == [False, False, True]


def test_code_that_waits_for_events_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that moves across an event would run before or after what the event orders."""
    results: list[reorder_kernels.Reordering] = []
    improve = reorder_kernels._improve

    def record_result(*arguments: Any) -> Any:
        result = improve(*arguments)
        results.append(result[0])
        return result

    monkeypatch.setattr(reorder_kernels, "_improve", record_result)
    lower(chain, "auto")
    lower(chain, "auto", insert("record_event", 0, 1))
    plain, with_event = results
    assert plain.why != with_event.why == "the graph uses several streams"
    assert not with_event.moved


@pytest.mark.skipif(not HAS_STREAMS, reason="torch >= 2.13 compiles torch.cuda.stream")
@pytest.mark.parametrize("arenas", ["auto", "always", "never"])
def test_memory_is_not_shared_across_streams(arenas: str) -> None:
    """Every access to shared memory is in the context of one stream."""

    def stream(index: int) -> Any:
        return torch.fx.traceback.annotate({"stream": index})

    def branches(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.preserve_node_meta():
            a = x @ y @ y
            with stream(5):
                b = x @ y @ y @ y
                b = b @ b @ y
            a = a @ y @ a
            with stream(6):
                c = a @ y @ y
                c = c @ c @ y
            return a + b + c

    lines, record = lower(branches, arenas)
    assert record.arenas or arenas != "always"
    assert not (record.arenas and arenas == "never")
    sources = find_sources(lines)
    context = ""
    accesses: dict[str, set[str]] = {}
    for line in lines:
        if match := re.match(r"\s+with (\w*stream\w*):", line):
            context = match[1]
        elif " = " in line or "out=" in line:
            for name in set(re.findall(r"\b(?:buf|pool)\d+\b", line)):
                accesses.setdefault(name, set()).add(context)
    streams = {context for contexts in accesses.values() for context in contexts}
    assert streams == {"default_stream", "stream1", "stream2"}
    members = {name: source for name, source in sources.items() if source.startswith("pool")}
    assert bool(members) == bool(record.arenas)
    for name, source in members.items():
        assert accesses[name] == accesses[source], (name, source)
        assert len(accesses[name]) == 1, name


def copy(value: torch.Tensor, device: str, *, non_blocking: bool) -> torch.Tensor:
    """`value.to`, which does not work for fake tensors without CUDA."""
    result: torch.Tensor = torch.ops.aten._to_copy.default(
        value, device=torch.device(device), non_blocking=non_blocking
    )
    return result


@pytest.mark.parametrize("arenas", ["never", "auto", "always"])
def test_pinned_memory_is_not_reused(arenas: str) -> None:
    """The copy to the GPU may still read it when the CPU goes on."""

    def stage(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = copy(x, "cpu", non_blocking=False)
        to_gpu = copy(h @ h, "cuda", non_blocking=True)
        other = (h @ h.t()) @ h
        from_gpu = copy(x @ y, "cpu", non_blocking=True)
        third = (from_gpu @ from_gpu) @ from_gpu
        return to_gpu @ y, other.sum(0), (third @ third).sum(0)

    lines, record = lower(stage, arenas)
    sources = find_sources(lines)
    text = "\n".join(lines)
    pinned = re.findall(r"(\w+) = empty_strided_cpu_pinned", text)
    assert len(pinned) == 2
    for name in pinned:
        assert sources[name] == "own"
        assert name not in sources.values()
    assert record.peak <= record.peak_before or arenas == "always"


@pytest.mark.parametrize("arenas", ["never", "auto"])
def test_kernels_do_not_write_in_place_of_pinned_memory(arenas: str) -> None:
    def stage(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = copy(x, "cpu", non_blocking=False)
        staged = h @ h
        to_gpu = copy(staged, "cuda", non_blocking=True)
        other = staged + 1
        return to_gpu @ y, other @ other

    lines, _ = lower(stage, arenas)
    (pinned,) = re.findall(r"(\w+) = empty_strided_cpu_pinned", "\n".join(lines))
    assert pinned not in find_sources(lines).values()
    # The kernel reads it after the copy to the GPU has been launched.
    (copied,) = (i for i, line in enumerate(lines) if f".copy_({pinned}, True)" in line)
    (read,) = (i for i, line in enumerate(lines) if re.search(rf"cpp_fused\w*\({pinned}, ", line))
    assert copied < read


@pytest.mark.parametrize("arenas", ["auto", "always"])
@torch.no_grad()
def test_a_custom_operator_may_keep_its_operands(arenas: str) -> None:
    """It keeps only its operands alive, and nothing overwrites them."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sin()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x @ y
        b = torch.ops.inductor_ext_keep.keep(a) @ y
        c = b @ a
        return ((c @ b) @ y) @ c

    with torch.library._scoped_library("inductor_ext_keep", "DEF") as library:
        library.define("keep(Tensor x) -> Tensor")
        library.impl("keep", torch.empty_like, "Meta")
        library.impl("keep", keep, "CPU")
        x, y = squares(32, 2)
        with planning(memory_arenas=arenas, memory_debug=True) as records:
            run = compiled(function, fullgraph=True)
            check(run, function, x, y)
        assert arenas == "auto" or records[0].arenas
    (operand,) = (value for value in kept if value.dtype == torch.float32)
    torch.testing.assert_close(operand, x @ y)
    assert operand.untyped_storage().nbytes() == 32 * 32 * 4


@torch.no_grad()
def test_operands_of_subgraphs_are_in_no_arena() -> None:
    """A branch may return its operand."""

    def function(flag: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = (x @ y) @ y
        b = torch.cond(flag, lambda a, y: a @ y, lambda a, y: a @ a, (a, y))
        return ((b @ a) @ y) @ b

    x, y = squares(32, 2)
    with planning(memory_arenas="always", memory_debug=True) as records:
        run = compiled(function)
        for flag in (torch.tensor(True), torch.tensor(False)):
            expected = function(flag, x.double(), y.double())
            torch.testing.assert_close(run(flag, x, y).double(), expected, atol=1e-4, rtol=1e-4)
    (record,) = (record for record in records if record.graph == "call")
    storages = [storage for storage in record.storages if storage.kind == "intermediate"]
    assert record.arenas
    assert [storage.arena for storage in storages].count(None) >= 1
