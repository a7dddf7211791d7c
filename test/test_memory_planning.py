"""Memory plans in compiled code: strategies, settings, budgets, caches, threads and memory pools.

Every compile is uncached, so that its code and its record can be inspected; the graphs are small.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor import ir
from torch._inductor.codegen import common
from torch._inductor.codegen import wrapper as wrapper_ir
from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import CppWrapperCpuArrayRef
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck

import inductor_ext
from inductor_ext import events
from inductor_ext.hooks import scope
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.memory import measured_workspace, wrapper_writer
from inductor_ext.memory.planner import placement_policy
from inductor_ext.memory.records import MemoryPlanRecord
from test.support import aot_util
from test.support.compile_util import OUT_VARIANT
from test.support.memory_compiles import check, compiled, matmuls, planning, squares

KIB = 1024


class TestDecision:
    @torch.no_grad()
    def test_never_above_the_lowest_peak_and_fewer_calls(self) -> None:
        with planning() as records:
            check(compiled(matmuls), matmuls, *squares(64))
        (record,) = records
        square = 64 * 64 * 4
        assert record.peak == record.lower_bound == 4 * square
        assert record.peak_before >= record.peak
        assert (record.strategy, record.calls_before, record.calls) == ("arenas", 5, 3)
        # An arena with all storages would leave no headroom for the output.
        assert [arena.bytes for arena in record.arenas] == [3 * square]

    @torch.no_grad()
    def test_a_kernels_own_allocation_counts_to_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inductor drops the line that frees it at the end; the peak has to include it."""
        monkeypatch.setattr(measured_workspace, "LIMITS", {})

        def filtered(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return torch.conv2d(x, weight).sum(1)

        generator = torch.Generator().manual_seed(1)
        inputs = [
            torch.randn(shape, generator=generator) for shape in ((1, 1, 34, 34), (4, 1, 3, 3))
        ]
        with planning() as records:
            check(compiled(filtered), filtered, *inputs)
        (record,) = records
        assert record.peak_before == record.peak == record.lower_bound == (4 + 1) * 32 * 32 * 4

    @torch.no_grad()
    def test_arenas_can_be_switched_off(self) -> None:
        with planning(memory_arenas="never") as records:
            check(compiled(matmuls), matmuls, *squares(64))
        (record,) = records
        assert (record.strategy, record.arenas) == ("reuse", ())
        assert record.peak == record.lower_bound

    @torch.no_grad()
    def test_no_pool_and_no_reuse(self) -> None:
        for patches in ({"memory_pool": "none"}, {"allow_buffer_reuse": False}):
            with planning(**patches) as records:
                check(compiled(matmuls), matmuls, *squares(64))
            (record,) = records
            assert record.arenas == ()
            assert record.peak == record.lower_bound
        assert (record.strategy, record.calls) == ("plain", 7)

    @pytest.mark.parametrize("pool", ["intermediates", "outputs", "combined"])
    @torch.no_grad()
    def test_memory_pool_says_what_may_share_an_arena(self, pool: str) -> None:
        def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a = x @ y
            b = a @ y
            return b @ a, (b.relu() @ y) @ y, a.sum(1)

        with planning(memory_planning=True, memory_pool=pool) as records:
            run = compiled(several)
            got = run(*squares(48, 2))
        expected = several(*squares(48, 2))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        (record,) = records
        kinds = [
            {storage.kind for storage in record.storages if storage.arena == index}
            for index in range(len(record.arenas))
        ]
        assert all(len(results) == 1 for results in kinds) or pool == "combined"
        placed = set().union(*kinds)
        assert placed == (
            {"intermediate"} if pool == "intermediates" else {"intermediate", "output"}
        )
        pointers = {value.untyped_storage().data_ptr() for value in got}
        assert len(pointers) == (3 if pool == "intermediates" else 1)

    @torch.no_grad()
    def test_outputs_do_not_keep_intermediates_alive(self) -> None:
        """Inductor's combined pool lives as long as one output in it."""

        def small_output(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return matmuls(x, y, y)[:4]

        with planning(memory_planning=True, memory_pool="combined"):
            output = compiled(small_output)(*squares(64, 2))
        assert output.untyped_storage().nbytes() <= 64 * 4

    def test_training(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU()))
        )
        x = torch.randn(32, 64)
        with planning(memory_planning=True, memory_debug=True) as records:
            compiled(model)(x).square().sum().backward()
        got = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for grad, parameter in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad, atol=1e-4, rtol=1e-4)
        assert [record.kind for record in records] == ["forward", "backward"]
        assert records[1].arenas, "stock ignores the setting in training"
        assert any(storage.kind == "input" for storage in records[1].storages)

    @torch.no_grad()
    def test_late_sizes_share_no_earlier_arena(self) -> None:
        def late(x: torch.Tensor) -> torch.Tensor:
            a = ((x @ x) @ x) @ x
            rows = (a[:, 0] * x[:, 0]).nonzero().shape[0]
            b = torch.ones(rows, 16) @ torch.full((16, 16), 2.0)
            c = b @ b.t()
            return ((c @ b) @ torch.ones(16, 4)).sum() * x

        x = torch.rand(24, 24).round()
        with (
            planning(memory_planning=True, memory_debug=True) as records,
            torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        ):
            run = compiled(late, fullgraph=True)
            for values in (x, 1 - x, torch.ones(24, 24), torch.zeros(24, 24)):
                torch.testing.assert_close(run(values), late(values), rtol=1e-4, atol=1e-3)
        (record,) = records
        sizes = [arena.size for arena in record.arenas]
        late_sizes = [size for size in sizes if re.search(r"u\d", size)]
        assert 0 < len(late_sizes) < len(sizes)

    @torch.no_grad()
    def test_worst_sizes_are_planned_at_run_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(wrapper_writer, "MIN_REPLAN_RATIO", 0.0)
        with planning(memory_arenas="always", memory_debug=True):
            run = compiled(matmuls, dynamic=True)
            _, (code,) = run_and_get_code(run, *squares(32))
        FileCheck().check("plan_pool0 = Replanner(starts=").check(
            "pool0_bytes, pool0_offsets = plan_pool0((4*"
        ).check("pool0_offsets[").run(code)
        for size in (1, 7, 32, 65, 7):
            check(run, matmuls, *squares(size))
        with planning(memory_arenas="always", memory_replan=False):
            _, (code,) = run_and_get_code(compiled(matmuls, dynamic=True), *squares(32))
        assert "Replanner" not in code


class TestCombinations:
    """With other features that affect memory."""

    @torch.no_grad()
    def test_freezing(self) -> None:
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
        )
        model.eval()
        x = torch.randn(16, 32)
        with planning(memory_arenas="always", memory_debug=True, freezing=True) as records:
            torch.testing.assert_close(compiled(model)(x), model(x), atol=1e-5, rtol=1e-4)
        assert [record.kind for record in records] == ["inference"]

    @pytest.mark.parametrize("on_stack", [True, False])
    def test_stack_allocation(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_stack: bool
    ) -> None:
        """Inductor disables it for a graph with external kernels; then there are arenas."""
        # Inductor reads the setting once per process, when it first needs a wrapper for the CPU.
        common.init_backend_registration()
        array_ref = dataclasses.replace(
            common.device_codegens["cpu"], cpp_wrapper_codegen=CppWrapperCpuArrayRef
        )
        monkeypatch.setitem(common.device_codegens, "cpu", array_ref)

        class Module(torch.nn.Module):
            def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
                if on_stack:
                    return ((x - x.mean(0)) * y.sum(1)).softmax(-1).sum(0) * z.sum()
                return matmuls(x, y, z)

        inputs = squares(8)
        program = torch.export.export(Module(), tuple(inputs))
        path = str(tmp_path / "m.pt2")
        with planning(memory_planning=True) as records:
            inductor_ext.aoti_compile_and_package(
                program,
                package_path=path,
                inductor_configs={"aot_inductor.allow_stack_allocation": True},
            )
        assert [bool(record.arenas) for record in records] == ([] if on_stack else [True])
        # Stack allocation uses Inductor's wrapper, whose packages crash at load on some machines.
        if not aot_util.crashes_at_load(path):
            check(torch._inductor.aoti_load_package(path), Module(), *inputs)

    @pytest.mark.usefixtures("repeated_warnings")
    @torch.no_grad()
    def test_tracing_of_allocations_says_that_there_are_no_arenas(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        track = {"test_configs.track_memory_lifecycle": "log"}
        with planning(memory_arenas="always", **track) as records, caplog.at_level("WARNING"):
            check(compiled(matmuls), matmuls, *squares(16))
        assert records == []
        assert "track_memory_lifecycle" in caplog.text

    @torch.no_grad()
    def test_conditions_and_loops_are_counted(self) -> None:
        def branches(flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            def left(x: torch.Tensor) -> torch.Tensor:
                return ((x @ x) @ x).sin()

            def right(x: torch.Tensor) -> torch.Tensor:
                return x.cos()

            y = x @ x
            return torch.cond(flag, left, right, (y,)) @ y

        x = squares(32, 1)[0]
        with planning() as records:
            run = compiled(branches)
            for flag in (torch.tensor(True), torch.tensor(False)):
                torch.testing.assert_close(run(flag, x), branches(flag, x), atol=1e-4, rtol=1e-4)
        graphs = {record.graph: record for record in records}
        square = 32 * 32 * 4
        assert graphs["true_graph_0"].peak == 2 * square
        # The operand, and the memory of the branch during its call.
        assert graphs["call"].peak == graphs["call"].lower_bound == 3 * square


class TestBudget:
    @torch.no_grad()
    def test_error_names_the_buffers_at_the_peak(self) -> None:
        with planning(memory_budget="32 KiB"), pytest.raises(Exception, match="budget") as caught:
            compiled(matmuls)(*squares(64))
        text = str(caught.value)
        assert "MemoryBudgetError" in text
        assert "peak of call on cpu is 64.00 KiB, above the budget of 32.00 KiB" in text
        assert "buf1" in text
        assert "activation checkpointing" in text

    @torch.no_grad()
    def test_a_sufficient_budget_is_accepted(self) -> None:
        with planning(memory_budget=64 * KIB) as records:
            check(compiled(matmuls), matmuls, *squares(64))
        assert records[0].peak == 64 * KIB


@pytest.mark.skipif(not hasattr(ir, "ExternKernelMultiOut"), reason="torch 2.11 ignores the tag")
@torch.no_grad()
def test_out_variants_of_custom_operators_may_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their workspace is unbounded, as that of the operators: no other memory stays allocated."""
    steps: set[frozenset[int]] = set()
    decide = placement_policy.decide

    def record_steps(*arguments: Any, **options: Any) -> placement_policy.Decision:
        steps.add(frozenset(options["unbounded_steps"]))
        return decide(*arguments, **options)

    monkeypatch.setattr(placement_policy, "decide", record_steps)
    names = {"one": ["out"], "two": ["a", "b"]}
    with torch.library._scoped_library("inductor_ext_rigid", "DEF") as library:
        for name, outs in names.items():
            returned = ["Tensor"] * len(outs)
            library.define(f"{name}(Tensor x) -> ({', '.join(returned)})")
            written = [f"Tensor({out}!)" for out in outs]
            library.define(
                f"{name}.out(Tensor x, *, "
                + ", ".join(f"{kind} {out}" for kind, out in zip(written, outs, strict=True))
                + f") -> ({', '.join(written)})",
                tags=(OUT_VARIANT,),
            )
        library.impl("one", torch.empty_like, "Meta")
        library.impl("two", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
        library.impl("one.out", lambda x, *, out: torch.sin(x, out=out), "CPU")
        library.impl(
            "two.out", lambda x, *, a, b: (torch.sin(x, out=a), torch.cos(x, out=b)), "CPU"
        )
        operators = torch.ops.inductor_ext_rigid

        def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            sine, cosine = operators.two.default(operators.one.default(x @ y) @ y)
            return (sine @ cosine) @ y

        x, y = squares(32, 2)
        sine = (x @ y).sin() @ y
        with planning():
            result = compiled(function)(x, y)
    torch.testing.assert_close(result, (sine.sin() @ sine.cos()) @ y)
    (unbounded,) = steps
    assert len(unbounded) == 2


def test_threads_do_not_share_the_planner() -> None:
    """One thread compiles with Inductor's pools while the other plans."""
    codes: dict[str, str] = {}

    def work(backend: str) -> None:
        with torch.no_grad():
            model = torch.compile(lambda *inputs: matmuls(*inputs), backend=backend)
            _, (codes[backend],) = run_and_get_code(model, *squares(32))

    with planning(memory_arenas="always"):
        threads = [threading.Thread(target=work, args=(b,)) for b in ("inductor", "inductor_ext")]
        for thread in threads:
            thread.start()
            thread.join()
    assert "pool0" in codes["inductor_ext"]
    assert "pool0" not in codes["inductor"]


@torch.no_grad()
def test_a_plan_survives_the_cache(tmp_path: Path) -> None:
    """Cached code with an arena returns the same results."""
    inputs = squares(32)
    with planning(memory_arenas="always", fx_graph_cache=True) as records:
        check(compiled(matmuls), matmuls, *inputs)
        torch._dynamo.reset()
        with events.capture(CompileRecord) as compiles:
            check(compiled(matmuls), matmuls, *inputs)
    assert len(records) <= 1
    assert [record.cache for record in compiles] == ["hit"]


HAS_POOLS = hasattr(wrapper_ir, "EnterCudaMemPoolContextLine")


@pytest.mark.skipif(not HAS_POOLS, reason="torch >= 2.14 compiles torch.cuda.use_mem_pool")
@pytest.mark.parametrize("arenas_", ["always", "never"])
def test_memory_is_not_shared_across_cuda_memory_pools(arenas_: str) -> None:
    """Lowered for a simulated GPU: buffers of a pool stay in it."""
    pytest.importorskip("triton")
    from test.support import fake_cuda

    def pool(index: int) -> Any:
        return torch.fx.traceback.annotate({"mempool": index, "mempool_device": 0})

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.fx.traceback.preserve_node_meta():
            x = x @ y @ y
            with pool(0):
                x = x @ y @ y @ y
            x = x @ y @ y
            with pool(1):
                x = x @ y @ y
            with pool(0):
                x = x @ y @ y
            return x @ y @ y + 1

    square = ((64, 64), torch.float32)
    settings = inductor_ext.config.snapshot({"memory_arenas": arenas_})
    with (
        scope.compile_scope(settings),
        events.capture(MemoryPlanRecord) as records,
    ):
        code = fake_cuda.lower(chain, square, square).code
    (record,) = records
    assert bool(record.arenas) == (arenas_ == "always")
    context, indent, results = None, 0, {}
    for line in code[code.index("def call(") :].splitlines():
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        if text and context is not None and depth <= indent:
            context = None
        if match := re.match(
            r"with torch.cuda.use_mem_pool\(get_external_object_by_index\((\d)", text
        ):
            context, indent = match[1], depth
        elif match := re.match(r"(\w+) = (?:empty_strided\w*|torch.empty\w*)\(", text):
            results[match[1]] = context
        elif match := re.match(
            r"(\w+) = (?:reinterpret_tensor\((?P<arena>\w+),|(?P<old>\w+); del \w+  # reuse)", text
        ):
            assert results[match["arena"] or match["old"]] == context, text
            results[match[1]] = context
    assert {"0", "1", None} <= set(results.values())
    assert "# reuse" in code
