"""Memory reports: of plans written by hand, of compiled models and exported programs."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.memory.planner import peak_report
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.reports import memory_report
from inductor_ext.reports.memory_report import MemoryReport
from test.support.memory_plans import REPORT, SMALL, WHOLE

CHECKOUT = pathlib.Path(__file__).parents[2]


class TestReport:
    def test_values_are_those_of_the_highest_peak(self) -> None:
        assert (REPORT.peak, REPORT.lower_bound, REPORT.ratio) == (8192, 8192, 1.0)
        assert [row.name for row in REPORT.largest()] == ["big"]
        only = MemoryReport("m", (SMALL,))
        assert (only.peak, only.lower_bound) == (7168, 6144)
        assert only.ratio == pytest.approx(7 / 6)
        assert [row.name for row in only.largest(2)] == ["buf0", "arena_0"]

    def test_text(self) -> None:
        text = str(REPORT)
        assert text.startswith(
            "Memory of a model\n\n1. call (inference): peak 9.00 KiB -> 7.00 KiB, lower bound "
            "6.00 KiB, ratio 1.167, 1 arena, allocator calls 4 -> 2\n\n"
            + peak_report.peak_table(SMALL)
            + "\n\n2. partition_0 (backward): peak 8.00 KiB -> "
        )
        assert text.endswith(
            "Measured, relative to the memory in use before the call:\n"
            "  call (inference) on cpu: predicted 7.00 KiB, measured 7.00 KiB, deviation +0.0 %"
        )

    def test_the_documented_example_is_this_one(self) -> None:
        text = (CHECKOUT / "docs" / "user" / "memory_report.md").read_text()
        assert f"1. {memory_report.headline(SMALL)}\n\n{peak_report.peak_table(SMALL)}\n" in text

    def test_reordering_is_reported(self) -> None:
        record = dataclasses.replace(SMALL, peak_reordered_from=10240)
        assert "6.00 KiB (10.00 KiB in Inductor's kernel order)" in memory_report.headline(record)

    @pytest.mark.parametrize("report", [REPORT, WHOLE])
    def test_json_round_trip(self, tmp_path: pathlib.Path, report: MemoryReport) -> None:
        path = tmp_path / "report.json"
        path.write_text(report.to_json())
        assert memory_report.read(str(path)) == report

    def test_text_of_state_step_and_batches(self) -> None:
        text = str(WHOLE)
        assert text[text.index("\nOutside") :] == (
            """
Outside of the plans:
parameters  buffers  gradients  gradients now  optimizer state  device
  4.00 KiB    512 B   4.00 KiB       1.00 KiB         8.00 KiB  cpu
       0 B     64 B        0 B            0 B        not known  cuda:0

The step, relative to the memory in use before it:
  compiled on cpu: peak 6.00 KiB, in 1. inference
    1. inference: begins at 0 B, planned peak 7.00 KiB, measured 6.00 KiB
  eager on cpu: peak 8.00 KiB, in eager mode

At other batch sizes:
batch      peak  lower bound  ratio  graph with the highest peak
    4  7.00 KiB     6.00 KiB  1.167  call (inference)
    8       0 B          0 B  1.000  call (aot)"""
        )

    def test_nothing_planned(self) -> None:
        report = MemoryReport("nothing", ())
        assert (report.peak, report.lower_bound, report.ratio, report.largest()) == (0, 0, 1.0, [])
        assert str(report) == "Memory of nothing\n\nNo memory is allocated."
        assert "No memory is allocated" in report.to_html()


class TestCompiled:
    """Reports of real compiles."""

    def test_training_here_and_from_the_cache_in_another_process(
        self, tmp_path: pathlib.Path
    ) -> None:
        import torch

        from test.support.children.memory_report import Model

        eager = Model()
        compiled = torch.compile(eager, backend="inductor_ext")
        with pytest.raises(exc.NothingCompiledError, match="Model by inductor_ext"):
            memory_report.memory_report(compiled)
        x = torch.randn(32, 64)
        loss = compiled(x)
        assert [record.kind for record in memory_report.memory_report(compiled).records] == [
            "forward"
        ]
        loss.backward()
        report = memory_report.memory_report(compiled)
        assert report == memory_report.memory_report(eager)
        assert report.title == "Model"
        assert [record.kind for record in report.records] == ["forward", "backward"]
        assert all(record.cache_key is not None for record in report.records)
        rows = peak_report.peak_rows(report.records[0], "cpu")
        assert 32 * 256 * 4 in [row.bytes for row in rows]
        assert any(row.module.endswith("up") for row in rows)

        # Settings of other tests in this process may be part of its keys: a separate process fills
        # a cache for the next one.
        filled = self.in_another_process(tmp_path)
        assert filled["caches"] == ["miss", "miss"]
        cached = self.in_another_process(tmp_path)
        assert (cached["events"], cached["caches"]) == (["compile"], ["hit"])
        assert cached["report"] == filled["report"]
        assert cached["error"].startswith("A graph of Model was loaded from a cache entry (key f")
        assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in cached["error"]

        measured = report.measure(lambda: compiled(x).backward()).measured
        assert [item.kind for item in measured] == ["forward", "backward"]
        for item in measured:
            assert item.predicted > 32 * 256 * 4
            assert abs(item.deviation) <= 1
        with pytest.raises(exc.NothingMeasuredError):
            report.measure(torch.sin, x)
        torch._dynamo.reset()
        with pytest.raises(exc.NothingCompiledError):
            memory_report.memory_report(compiled)

    def in_another_process(self, folder: pathlib.Path) -> Any:
        done = subprocess.run(
            [
                sys.executable,
                "-Wignore",
                "-m",
                "test.support.children.memory_report",
                str(folder / "elsewhere"),
            ],
            cwd=CHECKOUT,
            # Other tests use their folder meanwhile.
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_graph_breaks_and_instances_that_share_code(self) -> None:
        import torch
        import torch._functorch.config as autograd_config

        class Broken(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = torch.sinh(x) + 1
                torch._dynamo.graph_break()
                return torch.cosh(y) * 2

        first, second = (torch.compile(Broken(), backend="inductor_ext") for _ in range(2))
        x = torch.randn(64)
        first(x)
        report = memory_report.memory_report(first)
        assert len(report.records) == 2
        with events.capture() as records:
            second(x)
        assert records == []
        assert memory_report.memory_report(second) == report

        torch._dynamo.reset()
        with events.capture() as records, autograd_config.patch(enable_autograd_cache=False):
            first(x)
        assert [record.cache for record in records] == ["hit", "hit"]
        assert memory_report.memory_report(first) == report

    def test_functions_that_are_not_inlined(self) -> None:
        import torch

        def inner(x: torch.Tensor) -> torch.Tensor:
            y = torch.sinh(x) + 1
            torch._dynamo.graph_break()
            return torch.cosh(y) * 2

        def outer(x: torch.Tensor) -> torch.Tensor:
            return inner(torch.tanh(x)) - 3

        with inductor_ext.activate():
            compiled = torch.compile(outer, dynamic=False)
            compiled(torch.randn(64))
        names = [
            record.storages[0].operator for record in memory_report.memory_report(compiled).records
        ]
        assert names == ["tanh", "add, sinh", "cosh, mul", "sub"]
        inside = [
            record.storages[0].operator for record in memory_report.memory_report(inner).records
        ]
        assert inside == names[1:3]

    def test_a_function_outside_of_the_caches(self) -> None:
        import torch

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x @ x, -1) @ x

        compiled = torch.compile(function, backend="inductor_ext")
        x = torch.randn(64, 64)
        with torch.compiler.config.patch(force_disable_caches=True):
            compiled(x)
        report = memory_report.memory_report(compiled)
        (record,) = report.records
        assert record.cache_key is None
        (measured,) = report.measure(compiled, x).measured
        assert abs(measured.deviation) <= 1
        assert measured.measured >= 2 * 64 * 64 * 4

    def test_an_exported_program(self, tmp_path: pathlib.Path) -> None:
        import torch

        from test.support.children.memory_report import Model

        program = torch.export.export(Model(), (torch.randn(32, 64),))
        path = tmp_path / "program.pt2"
        torch.export.save(program, path)
        with events.capture(MemoryPlanRecord, CompileRecord) as records:
            report = memory_report.read(str(path))
        assert [type(record) for record in records] == [
            MemoryPlanRecord,
            CompileRecord,
        ]
        (record,) = report.records
        assert (record.kind, record.graph) == ("aot", "call")
        assert {row.module for row in report.largest()} >= {"up"}
        assert [entry.name for entry in tmp_path.iterdir()] == ["program.pt2"]

    @pytest.mark.parametrize("target", [3, int, None])
    def test_other_targets_have_no_report(self, target: Any) -> None:
        with pytest.raises(exc.NotReportableError, match=type(target).__name__):
            memory_report.memory_report(target)

    def test_options_are_for_exported_programs(self) -> None:
        with pytest.raises(exc.NotReportableError, match="with options: it has been compiled"):
            memory_report.memory_report(lambda: 0, options={"memory_arenas": "never"})

    @pytest.mark.gpu
    @pytest.mark.parametrize("cached", [True, False])
    def test_training_on_a_gpu(self, cached: bool) -> None:
        import torch

        from test.support.children.memory_report import Model

        compiled = torch.compile(Model().cuda(), backend="inductor_ext")
        x = torch.randn(4096, 64, device="cuda")
        with torch.compiler.config.patch(force_disable_caches=not cached):
            compiled(x).backward()
        report = memory_report.memory_report(compiled)
        assert {device for r in report.records for device in peak_report.devices(r)} == {"cuda:0"}
        report = report.measure(lambda: compiled(x).backward())
        assert [item.kind for item in report.measured] == ["forward", "backward"]
        for item in report.measured:
            assert item.predicted > 4096 * 256 * 4
            assert abs(item.deviation) <= 1, str(report)
