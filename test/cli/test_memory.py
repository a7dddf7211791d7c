"""The command `inductor-ext memory`."""

from __future__ import annotations

import json
import pathlib

import pytest

from inductor_ext import events
from inductor_ext.cli import main
from inductor_ext.cpp_wrapper.records import PackageRecord
from inductor_ext.reports.memory_report import MemoryReport
from test.support.memory_plans import REPORT, drawings


class TestCommand:
    @pytest.fixture
    def log(self, tmp_path: pathlib.Path) -> str:
        path = str(tmp_path / "events.jsonl")
        events.emit(PackageRecord(path="a.pt2", bytes=3, seconds=0.5), event_log=path)
        for record in REPORT.records:
            events.emit(record, event_log=path)
        return path

    def test_an_event_log(self, log: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["memory", log]) == 0
        printed = capsys.readouterr().out
        expected = MemoryReport(log, REPORT.records).table()
        assert printed == expected + "\n"

    def test_json_and_html(
        self, log: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "out.html"
        assert main.main(["memory", log, "--json", "--html", str(out)]) == 0
        printed = capsys.readouterr().out
        assert json.loads(printed)["records"][0]["storages"][1]["module"] == "encoder.layer.1"
        assert len(drawings(out.read_text())[1]) == 2
        again = tmp_path / "report.json"
        again.write_text(printed)
        assert main.main(["memory", str(again), "--top", "1"]) == 0
        assert "3 others" in capsys.readouterr().out

    @pytest.mark.parametrize("graph", ["2", "partition_0", "backward"])
    def test_one_graph(self, log: str, graph: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["memory", log, "--graph", graph]) == 0
        printed = capsys.readouterr().out
        assert "1. partition_0 (backward)" in printed
        assert "call (inference)" not in printed

    def test_an_unknown_graph(self, log: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["memory", log, "--graph", "3"]) == 2
        assert (
            "it has no graph '3'. Its graphs are: 1. call (inference), 2. partition_0 (backward)."
            in capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("", "it contains no memory plan. Compile with the setting event_log"),
            ('{"event": "package"}\n', "it contains no memory plan"),
            ('{"event": "package"}\n{"event":', "line 2: it is not a JSON object"),
            ("3\n", "line 1: it is not an event"),
            ('\n{"event": "memory_plan"}\n', "expected an object with 'graph'"),
            ("{}", "it is not a report of schema 1"),
            (
                '{"schema": 1, "records": [{}]}',
                "records[0]: the value is {}, expected an object with 'graph'",
            ),
            ('{"schema": 1, "records": [], "measured": [{}]}', "measured: "),
        ],
    )
    def test_unreadable_files_are_named_before_writing(
        self,
        tmp_path: pathlib.Path,
        capsys: pytest.CaptureFixture[str],
        text: str,
        complaint: str,
    ) -> None:
        path = tmp_path / "file"
        path.write_text(text)
        assert main.main(["memory", str(path), "--html", str(tmp_path / "out.html")]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert str(path) in captured.err
        assert complaint in captured.err
        assert [entry.name for entry in tmp_path.iterdir()] == ["file"]

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["absent"], "absent: No such file or directory. Pass the path"),
            (["events.jsonl", "--html", "."], ".: cannot be written: it is a folder."),
            (["events.jsonl", "--html", "no/out.html"], "no/out.html: cannot be written: the "),
            (["binary"], "binary: it is not text in UTF-8."),
            (["archive"], "archive: torch.export.load fails with "),
        ],
    )
    @pytest.mark.usefixtures("log")
    def test_missing_files_are_named(
        self,
        tmp_path: pathlib.Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        complaint: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        (tmp_path / "archive").write_bytes(b"PK and no more")
        assert main.main(["memory", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert complaint in captured.err
