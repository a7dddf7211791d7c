"""Known and unknown classes of Inductor's IR in memory plans and kernel orders."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.codegen import wrapper as wrapper_ir
from torch._inductor.utils import run_and_get_code, run_and_get_cpp_code
from torch._inductor.virtualized import V

import inductor_ext
from inductor_ext import events, memory_planning
from inductor_ext.memory import known_ir, plan_store, wrapper_reader
from inductor_ext.memory.known_ir import LineUse
from inductor_ext.memory.records import MemoryPlanRecord

_CLASSES = """
import contextlib, importlib, json, pkgutil, sys
import torch._inductor.codegen, torch._inductor.kernel
from torch._inductor import ir, scheduler
from torch._inductor.codegen import common, wrapper
import inductor_ext.lowerings.cutlass_call, inductor_ext.memory.out_variants
import inductor_ext.memory.arena_lines, inductor_ext.hooks.upstream_fixes.stride_lines

for package in (torch._inductor, torch._inductor.codegen, torch._inductor.kernel):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        # Some need a library that is not there, and some are programs.
        if not any(word in module.name for word in ("test", "__main__", "worker", "benchmark")):
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(module.name)

def below(cls):
    return {cls}.union(*map(below, cls.__subclasses__()))

deferred = common.DeferredLine.__mro__[1]
found = {
    "lines": below(wrapper.WrapperLine) | below(deferred) | {wrapper.LineContext},
    "operations": below(ir.Operation),
    "nodes": below(scheduler.BaseSchedulerNode),
}
json.dump(
    {
        kind: sorted((cls.__module__.split(".")[0], cls.__name__) for cls in classes)
        for kind, classes in found.items()
    },
    sys.stdout,
)
"""


@functools.cache
def installed() -> dict[str, set[tuple[str, str]]]:
    """Package and name of the classes of the installed torch and of the extension, by kind."""
    # In another process, because importing some modules changes torch.
    done = subprocess.run(
        [sys.executable, "-c", _CLASSES], capture_output=True, text=True, check=True
    )
    results = json.loads(done.stdout.splitlines()[-1])
    return {kind: set(map(tuple, classes)) for kind, classes in results.items()}


class TestTables:
    @pytest.mark.parametrize(
        ("kind", "theirs", "own"),
        [
            ("lines", known_ir.LINES, known_ir.OWN_LINES),
            ("operations", known_ir.OPERATIONS, known_ir.OWN_OPERATIONS),
            ("nodes", known_ir.SCHEDULER_NODES, {}),
        ],
    )
    def test_every_class_of_the_installed_torch_has_an_entry(
        self, kind: str, theirs: Any, own: Any
    ) -> None:
        classes = installed()[kind]
        assert len(classes) > 8
        tables = {"torch": theirs, "inductor_ext": own}
        assert {cls for cls in classes if cls[1] not in tables[cls[0]]} == set()
        assert {name for package, name in classes if package == "inductor_ext"} == set(own)

    def test_lines_that_are_read_have_a_reader(self) -> None:
        lines = {**known_ir.LINES, **known_ir.OWN_LINES}
        read = {name for name, line in lines.items() if line.use is LineUse.READ}
        assert read == set(wrapper_reader.READERS)

    def test_a_subclass_is_another_class(self) -> None:
        def subclass(base: Any) -> Any:
            return type(base.__name__, (base,), {"__module__": "somebody"})

        line = subclass(wrapper_ir.CommentLine)
        assert known_ir.find_unplannable_line([line.__new__(line)], cpp=False) == (line, "")
        kernel = subclass(ir.ExternKernelOut)
        operations = [ir.ExternKernelOut.__new__(ir.ExternKernelOut), kernel.__new__(kernel)]
        assert known_ir.find_unplannable_operation(operations[:1]) is None
        assert known_ir.find_unplannable_operation(operations) is kernel
        assert known_ir.may_keep_memory(operations[1])
        assert known_ir.has_order_dependence(operations[1])

    @pytest.mark.parametrize("cpp", [True, False])
    def test_profiled_blocks_are_refused_in_cpp(self, cpp: bool) -> None:
        """Of torch 2.15: names that are declared inside a C++ block end with it."""
        line = stand_in("EnterKernelProfileScopeLine")
        results = known_ir.find_unplannable_line(["text", line], cpp=cpp)
        assert (results is not None) == cpp
        assert results is None or results[0] is type(line)


def stand_in(name: str) -> Any:
    """A line of a class from another torch."""

    class StandIn(wrapper_ir.WrapperLine):
        def codegen(self, code: Any) -> None:
            mark = "//" if V.graph.cpp_wrapper else "#"
            code.writeline(f"{mark} {name}")

    StandIn.__name__ = StandIn.__qualname__ = name
    StandIn.__module__ = wrapper_ir.__name__
    return StandIn()


def matmuls(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a = x @ y
    b = a @ y
    c = b.relu() @ a
    return ((c @ b) @ c).sum(0)


def squares() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(32, 32), torch.randn(32, 32) / 6


@pytest.fixture
def before_planning(
    monkeypatch: pytest.MonkeyPatch, repeated_warnings: None
) -> list[Callable[[Any], None]]:
    """Changes to apply to a wrapper whose lines are final."""
    changes: list[Callable[[Any], None]] = []
    plan = memory_planning.plan_wrapper

    def plan_wrapper(inductor: Any, wrapper: Any, *args: Any) -> None:
        for change in changes:
            change(wrapper)
        plan(inductor, wrapper, *args)

    monkeypatch.setattr(memory_planning, "plan_wrapper", plan_wrapper)
    return changes


@contextlib.contextmanager
def compiling(**settings: Any) -> Iterator[list[MemoryPlanRecord]]:
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        inductor_ext.config.patch(settings),
        inductor_config.patch(fx_graph_cache=False),
        events.capture(MemoryPlanRecord) as records,
    ):
        yield records


def call_code(backend: str) -> str:
    """The generated function of a backend for `matmuls`, after checking its result."""
    torch._dynamo.reset()
    x, y = squares()
    result, (code,) = run_and_get_code(torch.compile(matmuls, backend=backend), x, y)
    torch.testing.assert_close(result, matmuls(x, y), rtol=1e-4, atol=1e-4)
    body = code[code.index("def call(") : code.index("def benchmark_compiled_module")]
    # Names of kernels contain a hash that differs between compiles.
    return re.sub(r"cpp_fused_\w+", "kernel", body)


class TestUnknown:
    def test_an_unknown_line_gives_the_graph_inductors_plan(
        self, before_planning: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        before_planning.append(lambda wrapper: wrapper.lines.insert(2, stand_in("NewLine")))
        with (
            compiling(memory_arenas="always", memory_budget="1KiB") as records,
            caplog.at_level("WARNING", "inductor_ext"),
        ):
            extension = call_code("inductor_ext")
            assert "# NewLine" in extension
            upstream = call_code("inductor")
            call_code("inductor_ext")
        without_mark = re.sub(r"\n *# NewLine", "", extension)
        assert without_mark == upstream
        (plan, _) = records
        assert (plan.strategy, plan.arenas, plan.storages) == ("stock", (), ())
        assert "torch._inductor.codegen.wrapper.NewLine" in plan.reason
        assert plan.reason in plan.describe()
        assert plan_store.parse(json.loads(json.dumps(plan.as_json()))) == plan
        ours_only = [record for record in caplog.records if record.name == "inductor_ext"]
        unknown, budget = (item.getMessage() for item in ours_only)
        assert "memory plan of a graph falls back to Inductor" in unknown
        assert "NewLine" in unknown
        assert "memory_budget is not checked" in budget
        assert "NewLine" in budget

    def test_an_unknown_operation_gives_inductors_plan(
        self, monkeypatch: pytest.MonkeyPatch, before_planning: list[Any]
    ) -> None:
        monkeypatch.delitem(known_ir.OPERATIONS, "ExternKernelOut")  # type: ignore[arg-type]
        with compiling(memory_arenas="always") as records:
            assert call_code("inductor_ext") == call_code("inductor")
        (plan,) = records
        assert plan.strategy == "stock"
        assert "torch._inductor.ir.ExternKernelOut" in plan.reason

    def test_known_classes_are_planned(self, before_planning: list[Any]) -> None:
        with compiling(memory_arenas="always") as records:
            assert "pool0" in call_code("inductor_ext")
        (plan,) = records
        assert (plan.strategy, plan.reason) == ("arenas", "")

    def test_a_block_of_the_profiler_in_cpp(self, before_planning: list[Any]) -> None:
        line = stand_in("EnterKernelProfileScopeLine")
        before_planning.append(lambda wrapper: wrapper.lines.insert(2, line))
        x, y = squares()
        with (
            compiling(memory_arenas="always") as records,
            inductor_config.patch(cpp_wrapper=True),
        ):
            run = torch.compile(matmuls, backend="inductor_ext")
            result, code = run_and_get_cpp_code(run, x, y)
        torch.testing.assert_close(result, matmuls(x, y), rtol=1e-4, atol=1e-4)
        assert "// EnterKernelProfileScopeLine" in code
        assert "pool0" not in code
        assert [plan.strategy for plan in records] == ["stock"]
        assert "a C++ block" in records[0].reason


def test_an_older_log_has_no_reason() -> None:
    with compiling() as records:
        call_code("inductor_ext")
    entry = json.loads(json.dumps(records[0].as_json()))
    del entry["reason"]
    assert plan_store.parse(entry) == records[0]


@pytest.mark.parametrize("freed_by", ["FreeIfNotReusedLine", "FreeLine"])
def test_buffers_that_are_never_reused_have_own_memory(
    before_planning: list[Any], freed_by: str
) -> None:
    """Of torch 2.15: the inputs of effectful operators."""

    def change(wrapper: Any) -> None:
        V.graph.never_reuse_but_free_buffers = {"buf0", "buf1"}
        for step, line in enumerate(wrapper.lines):
            if type(line) is wrapper_ir.FreeIfNotReusedLine and freed_by == "FreeLine":
                wrapper.lines[step] = wrapper_ir.FreeLine(wrapper, line.node)

    before_planning.append(change)
    with compiling(memory_arenas="always") as records:
        code = call_code("inductor_ext")
    (plan,) = records
    rows = {row.name: row for row in plan.storages}
    assert rows["buf0"].arena is rows["buf1"].arena is None
    assert any(row.arena is not None for row in plan.storages)
    for name in ("buf0", "buf1"):
        assert rows[name].end < plan.steps
        assert f"del {name}\n" in code
        assert f"= {name}; del {name}" not in code
