"""Memory reports at other sizes: `MemoryReport.at`, `compare_batches` and `memory --batch`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import inductor_ext
from inductor_ext import exc
from inductor_ext.cli import main
from inductor_ext.memory.records import (
    DynamicPlan,
    DynamicSize,
    InputDimension,
    MemoryPlanRecord,
    PlannedSpan,
)
from inductor_ext.reports import memory_report
from inductor_ext.reports.memory_report import MemoryReport
from test.support.memory_plans import SMALL, plan, storage


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.norm(self.up(x))))  # type: ignore[no-any-return]


def size(name: str, *places: tuple[str, int], **fields: Any) -> DynamicSize:
    inputs = tuple(InputDimension(*place) for place in places)
    return DynamicSize(name, **{"hint": 4, "lowest": 2, "highest": None, **fields}, inputs=inputs)


def dynamic(*sizes: DynamicSize, text: str = "64*s0", **fields: Any) -> MemoryPlanRecord:
    """A plan of one storage of `text` bytes."""
    span = PlannedSpan("cpu", 0, 1, text)
    described = DynamicPlan(sizes, (), (text,), ("",), (), (span,), (span,))
    return plan((storage("b", 256, 0, 1),), dynamic=described, **fields)


class TestCompiled:
    def test_a_batch_equals_a_report_compiled_for_it(self) -> None:
        def compile_at(batch: int) -> MemoryReport:
            torch._dynamo.reset()
            compiled = torch.compile(Model(), backend="inductor_ext")
            x = torch.randn(batch, 32)
            torch._dynamo.mark_dynamic(x, 0)
            # A graph from a cache has the sizes of the compile that filled it.
            with torch.compiler.config.patch(force_disable_caches=True):
                compiled(x).sum().backward()
            return inductor_ext.memory_report(compiled)

        report, expected = compile_at(6), compile_at(50)
        resized = report.at(batch=50)
        assert resized.title == "Model at batch 50"
        assert resized.state == report.state
        assert [(r.kind, r.peak, r.peak_before, r.lower_bound) for r in resized.records] == [
            (r.kind, r.peak, r.peak_before, r.lower_bound) for r in expected.records
        ]
        assert resized.largest(3)[0].bytes == expected.largest(3)[0].bytes
        table = report.compare_batches(6, 50).batches
        assert [row.peak for row in table] == [report.peak, expected.peak]
        assert [row.lower_bound for row in table] == [report.lower_bound, expected.lower_bound]

    def test_graphs_of_fixed_sizes_are_left_out(self) -> None:
        compiled = torch.compile(Model(), backend="inductor_ext")
        with torch.no_grad():
            compiled(torch.randn(6, 32))
            compiled(torch.randn(9, 32))
            y = torch.randn(40, 32)
            compiled(y)
            report = inductor_ext.memory_report(compiled)
            assert len(report.records) == 2
            resized = report.at(40)
            assert resized.title == "Model at batch 40 (1 graph of fixed sizes left out)"
            (measured,) = resized.measure(compiled, y).measured
        assert measured.predicted == resized.peak
        assert measured.measured == pytest.approx(resized.peak, rel=0.01)

    def test_the_command(self, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
        shapes = ({0: torch.export.Dim("batch", min=2, max=128)},)

        def export(batch: int) -> str:
            path = str(tmp_path / f"{batch}.pt2")
            model, arguments = Model(), (torch.randn(batch, 32),)
            torch.export.save(torch.export.export(model, arguments, dynamic_shapes=shapes), path)
            return path

        small, large = export(8), export(64)
        html = tmp_path / "page.html"
        assert main.main(["memory", small, "--batch", "8", "64", "--html", str(html)]) == 0
        printed = capsys.readouterr().out
        expected = memory_report.read(large)
        rows = [line.split() for line in printed.splitlines()[-2:]]
        assert [row[0] for row in rows] == ["8", "64"]
        assert " ".join(rows[1][1:3]) == memory_report.human_bytes(expected.peak)
        assert " ".join(rows[1][3:5]) == memory_report.human_bytes(expected.lower_bound)
        assert "<h2>Other batch sizes</h2>" in html.read_text()
        (symbol,) = memory_report.read(small).at(8).records[0].dynamic.sizes  # type: ignore[union-attr]
        assert main.main(["memory", small, "--size", f"{symbol.name}=64"]) == 0
        assert expected.table().splitlines()[2] in capsys.readouterr().out
        assert main.main(["memory", small, "--batch", "200"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "(x.size(0)) = 200 is outside of its range, at least 2 and at most 128" in (
            captured.err
        )
        fixed = torch.export.export(Model(), (torch.randn(8, 32),))
        torch.export.save(fixed, tmp_path / "fixed.pt2")
        assert main.main(["memory", str(tmp_path / "fixed.pt2"), "--batch", "16"]) == 2
        error = capsys.readouterr().err
        assert "no size of its graphs is dynamic. Compile it with dynamic sizes: " in error
        assert "for an exported program, dynamic_shapes=." in error


class TestWritten:
    """Plans written by hand."""

    def test_the_batch_is_the_first_dimension(self) -> None:
        forward = dynamic(
            size("s0", ("x", 0), ("y", 0)),
            size("s1", ("x", 1), hint=8),
            text="64*s0*s1",
            kind="forward",
        )
        # In a backward a saved tensor may begin with another size.
        backward = dynamic(
            size("s0"), size("s1", ("saved", 0), hint=8), text="128*s0*s1", kind="backward"
        )
        report = MemoryReport("m", (forward, backward))
        assert [record.peak for record in report.at(5).records] == [64 * 40, 128 * 40]
        assert report.at(5).peak == 128 * 40
        assert report.at(sizes={"s1": 3}).peak == 128 * 4 * 3
        assert report.at(5, sizes={"s1": 3}).title == "m at batch 5, s1 = 3"
        assert report.at(5, sizes={"s1": 3}).peak == 128 * 15
        assert report.at().peak == 128 * 32
        assert report.at(9).at(5) == dataclasses.replace(
            report.at(5), title="m at batch 9 at batch 5"
        )

    def test_graphs_without_a_plan_stay(self) -> None:
        unplanned = plan((), reason="it has an operation that is not known")
        report = MemoryReport("m", (unplanned, dynamic(size("s0", ("x", 0))))).at(3)
        assert (report.title, report.records[0], report.peak) == ("m at batch 3", unplanned, 192)

    @pytest.mark.parametrize(
        ("records", "batch", "sizes", "why"),
        [
            ((SMALL,), 3, {}, "no size of its graphs is dynamic"),
            ((dynamic(size("s0", ("x", 0))),), None, {"s7": 3}, r"no dynamic size 's7'.*s0 \(x.si"),
            ((dynamic(size("s0", ("x", 1))),), 3, {}, r"the batch, is not dynamic.*s0 \(x.size\(1"),
            (
                (dynamic(size("s0", ("x", 0)), size("s1", ("y", 0))),),
                3,
                {},
                r"several first dimensions: s0 \(x.size\(0\)\), s1 \(y.size\(0\)\).*--size",
            ),
            (
                (dynamic(size("s0", ("x", 0))),),
                1,
                {},
                r"s0 \(x.size\(0\)\) = 1 is outside.*least 2",
            ),
            (
                (dynamic(size("s0", ("x", 0), highest=8)),),
                None,
                {"s0": 9},
                r"= 9 is outside of its range, at least 2 and at most 8\.",
            ),
            (
                (dynamic(size("s0", ("x", 0)), size("u0", is_data=True)),),
                3,
                {},
                "the size u0 is read from data",
            ),
            ((dynamic(size("s0", ("x", 0)), text="64*s3"),), 3, {}, "of call .*'s3' has no value"),
        ],
    )
    def test_errors(
        self,
        records: tuple[MemoryPlanRecord, ...],
        batch: int | None,
        sizes: Mapping[str, int],
        why: str,
    ) -> None:
        with pytest.raises(exc.SizesNotKnownError, match=why):
            MemoryReport("m", records).at(batch, sizes=sizes)

    def test_a_plan_that_is_not_known_says_why(self) -> None:
        record = dynamic(size("s0", ("x", 0)))
        assert record.dynamic is not None
        unknown = dataclasses.replace(record.dynamic, unknown="it calls a subgraph")
        report = MemoryReport("m", (dataclasses.replace(record, dynamic=unknown),))
        with pytest.raises(exc.SizesNotKnownError, match=r"of call .*, it calls a subgraph"):
            report.at(3)

    @pytest.mark.parametrize("batch", [-1, 2.5, True, "4"])
    def test_batches_are_integers(self, batch: Any) -> None:
        with pytest.raises(exc.BadArgumentError, match=r"batch=.*an integer of at least 0"):
            MemoryReport("m", (dynamic(size("s0", ("x", 0))),)).at(batch)

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--batch", "0"], "argument --batch: '0' is not an integer of at least 1"),
            (["--size", "s0"], "'s0' is not of the form SYMBOL=N, such as s77=128"),
            (["--size", "s0=x"], "'x' is not an integer of at least 0"),
        ],
    )
    def test_arguments_of_the_command(
        self, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main.main(["memory", "file", *arguments])
        assert complaint in capsys.readouterr().err
