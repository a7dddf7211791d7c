"""The buffers that are live at the peak of a memory plan, as rows and as a table."""

from __future__ import annotations

import textwrap

import pytest

from inductor_ext import exc
from inductor_ext.memory.planner import peak_report
from test.support.memory_plans import SMALL, plan, random_plan, storage

TABLE = """\
Live on cpu at the peak, step 2 of 6:
    bytes    share  buffer   kind          operator   module           live
 4.00 KiB   57.1 %  buf0     intermediate  addmm      encoder.layer.0  [0, 3)
 1.00 KiB   14.3 %  arena_0  unused                                    [0, 5)
 1.00 KiB   14.3 %  buf1     intermediate  mul        encoder.layer.1  [1, 4)
 1.00 KiB   14.3 %  buf2     output        amax, sub                   [2, 6)
 7.00 KiB  100.0 %  in all"""


class TestPeak:
    def test_table(self) -> None:
        expected = textwrap.dedent("\n".join(line[1:] for line in TABLE.splitlines()[1:]))
        title, *rows = peak_report.peak_table(SMALL).splitlines()
        assert title == TABLE.splitlines()[0]
        assert "\n".join(rows) == expected

    def test_table_cut_short_still_sums_to_the_peak(self) -> None:
        assert peak_report.peak_table(SMALL, 2).splitlines()[-2:] == [
            "2.00 KiB   28.6 %  2 others",
            "7.00 KiB  100.0 %  in all",
        ]

    @pytest.mark.parametrize("seed", range(20))
    def test_rows_sum_to_the_peak(self, seed: int) -> None:
        record = random_plan(40, 10, seed)
        rows = peak_report.peak_rows(record, "cpu")
        assert sum(row.bytes for row in rows) == record.peak
        step = peak_report.peak_step(record, "cpu")
        assert all(row.start <= step < row.end for row in rows)
        assert [row.bytes for row in rows] == sorted((r.bytes for r in rows), reverse=True)

    def test_each_device_has_its_own_peak(self) -> None:
        record = plan(
            (
                storage("a", 100, 0, 1, device="cuda:0"),
                storage("b", 70, 1, 2),
                storage("c", 60, 1, 2, device="cuda:0"),
            )
        )
        assert record.peak == 170
        assert peak_report.peak_step(record, "cuda:0") == 0
        assert peak_report.peak_step(record, "cpu") == 1
        assert [row.name for row in peak_report.peak_rows(record, "cuda:0")] == ["a"]
        tables = peak_report.peak_table(record).split("\n\n")
        assert [table.split()[2] for table in tables] == ["cuda:0", "cpu"]

    def test_long_texts_are_shortened(self) -> None:
        record = plan((storage("a", 1, 0, 1, operator="x" * 50, module="m." * 50 + "last"),))
        (row,) = peak_report.peak_table(record).splitlines()[2:-1]
        assert row.split()[-4:-2] == ["x" * 29 + "...", "..." + ("m." * 50 + "last")[-37:]]

    def test_an_empty_plan(self) -> None:
        assert peak_report.peak_table(plan(())) == "No memory is allocated."
        assert peak_report.allocated_bytes(plan(()), "cpu") == [0]

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536 * 1024, "1.50 MiB"),
            (5 << 40, "5.00 TiB"),
        ],
    )
    def test_human_bytes(self, count: int, text: str) -> None:
        assert peak_report.human_bytes(count) == text

    def test_budget_error_names_the_buffers(self) -> None:
        error = exc.MemoryBudgetError(
            graph="call (inference)",
            device="cpu",
            peak="7.00 KiB",
            budget="1.00 KiB",
            tried="",
            table=peak_report.peak_table(SMALL),
        )
        first, *rest = str(error).splitlines()
        assert first.startswith(
            "The planned memory peak of call (inference) on cpu is 7.00 KiB, above the budget of "
            "1.00 KiB. Raise memory_budget"
        )
        assert rest == peak_report.peak_table(SMALL).splitlines()
