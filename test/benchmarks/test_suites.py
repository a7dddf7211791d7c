"""`python -m benchmarks`: the suites, comparisons with committed results, the summary."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as command_line
from benchmarks.harness import compare, results
from benchmarks.harness.suites import SUITES

README = results.CHECKOUT / "benchmarks" / "README.md"


def document(*rows: results.Row, suite: str = "gemm", hardware: str = "cpu") -> results.Document:
    return {
        "suite": suite,
        "hardware": hardware,
        "versions": {"python": "3.11", "torch": "2.13.0", "inductor_ext": "0.1.0"},
        "commit": "0" * 40,
        "date": "2026-11-29T12:00:00Z",
        "command": "python -m benchmarks.gemm.run",
        "rows": list(rows),
    }


def row(ours: float | None, stock: float | None = None, **fields: object) -> results.Row:
    return results.make_row("model", "latency", "ms", ours=ours, stock=stock, **fields)  # type: ignore[arg-type]


class TestSuites:
    def test_each_is_a_module_and_in_the_readme(self) -> None:
        table = set(re.findall(r"^\| `([\w-]+)`", README.read_text(), flags=re.MULTILINE))
        assert set(SUITES) <= table
        for suite in SUITES.values():
            assert importlib.util.find_spec(suite.module) is not None, suite

    def test_commands_are_those_of_the_readme(self) -> None:
        text = README.read_text()
        for suite in SUITES.values():
            program = suite.module.replace(".", "/") + ".py"
            assert f"python -m {suite.module}" in text or f"python {program}" in text, suite

    def test_a_command_ends_with_the_folder(self) -> None:
        command = SUITES["graphs"].command("out", "--count", "3")
        assert " ".join(command) == ("-m test.fuzz.graphs --count 5000 --count 3 --json-out out")


class TestComparison:
    @pytest.mark.parametrize(
        ("before", "after", "found"),
        [
            # Both became slower: the ratio is the same.
            (row(10.0, 20.0, spread=0.01), row(20.0, 40.0, spread=0.01), []),
            (row(10.0, 20.0, spread=0.01), row(10.3, 20.0, spread=0.01), [(0.5, 0.515, True)]),
            (row(10.0, 20.0, spread=0.02), row(10.3, 20.0, spread=0.02), []),
            (row(10.0, 20.0, spread=0.01), row(9.0, 20.0, spread=0.01), [(0.5, 0.45, False)]),
            # One of them has no value of Inductor.
            (row(10.0, spread=0.01), row(11.0, 20.0, spread=0.01), [(10.0, 11.0, True)]),
            # Measured once: two times may differ by a tenth.
            (row(10.0), row(10.9), []),
            (row(10.0), row(11.1), [(10.0, 11.1, True)]),
            (row(10.0), row(None, 3.0), [(10.0, None, True)]),
            (row(None, 3.0), row(10.0), []),
            (row(0.0), row(0.0), []),
            (row(0.0), row(1.0), [(0.0, 1.0, True)]),
        ],
    )
    def test_changes(
        self, before: results.Row, after: results.Row, found: list[tuple[float, float | None, bool]]
    ) -> None:
        changes = compare.find_changes(document(before), document(after))
        assert [(c.before, c.after, c.worse) for c in changes] == [
            (pytest.approx(old), new if new is None else pytest.approx(new), worse)
            for old, new, worse in found
        ]

    def test_more_can_be_better(self) -> None:
        rows = [results.make_row("a", "passed", "tests", better="higher", ours=n) for n in (9, 8)]
        (change,) = compare.find_changes(document(rows[0]), document(rows[1]))
        assert change.worse
        assert not compare.find_changes(document(rows[1]), document(rows[0]))[0].worse

    def test_only_rows_of_both(self) -> None:
        other = results.make_row("other", "latency", "ms", ours=3.0)
        assert compare.find_changes(document(row(1.0), other), document(row(1.0))) == []

    @pytest.mark.parametrize("field", ["suite", "hardware"])
    def test_other_runs_are_refused(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"different {field}: .* and other"):
            compare.find_changes(document(row(1.0)), document(row(1.0), **{field: "other"}))

    def test_text_has_regressions_first(self) -> None:
        slow = results.make_row("b", "peak", "MiB", ours=3.0)
        changes = compare.find_changes(
            document(row(10.0, 20.0), slow),
            document(row(5.0, 20.0), results.make_row("b", "peak", "MiB", ours=4.0)),
        )
        assert compare.render_changes(changes).splitlines() == [
            "worse   b, peak: 3 -> 4 MiB (tolerance 0.2%)",
            "better  model, latency: 0.5 -> 0.25 of Inductor (tolerance 10.0%)",
        ]


class TestCommandLine:
    def test_list(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command_line.main(["list"]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SUITES)

    @pytest.mark.parametrize(
        ("committed", "code", "said"),
        [
            (row(1.0), 0, "1 rows compared with 000000000000, 0 worse, 0 better, 0 not measured"),
            (row(0.5), 1, "model, latency: 0.5 -> 1 ms"),
            (row(2.0), 0, "0 worse, 1 better"),
            (None, 2, "there is no committed result of this suite and hardware"),
        ],
    )
    def test_check(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        committed: results.Row | None,
        code: int,
        said: str,
    ) -> None:
        if committed is not None:
            results.write(tmp_path / "committed", document(committed))
        path = results.write(tmp_path / "new", document(row(1.0)))
        assert command_line.check_file(path, tmp_path / "committed") == code
        printed = capsys.readouterr()
        assert said in printed.out + printed.err

    def test_every_committed_result_equals_itself(self) -> None:
        for path in sorted(results.RESULTS.glob("*/*.json"))[::6]:
            assert command_line.check_file(path) == 0

    def test_summary(self) -> None:
        rows = [
            results.make_row(f"model {index}", "time", "ms", ours=ours, stock=4.0)
            for index, ours in enumerate((1.0, 4.0))
        ]
        assert command_line.summarize(document(*rows)).splitlines() == [
            "gemm on cpu, 2026-11-29",
            "  time (lower is better): 0.500 of Inductor in 2 cases, 0.250 to 1.000",
        ]

    def test_report_of_a_suite(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command_line.main(["report", "planner"]) == 0
        assert capsys.readouterr().out.startswith("planner on ")
        assert command_line.main(["report", "planer"]) == 2
        assert "no results of planer" in capsys.readouterr().err

    def test_run_passes_arguments_and_checks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands = []

        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            results.write(command[-1], document(row(1.0), suite="planner"))
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(subprocess, "run", run)
        folder = str(tmp_path / "out")
        assert command_line.main(["run", "planner", "--json-out", folder, "--large"]) == 0
        assert commands == [
            [sys.executable, "-m", "benchmarks.memory.planner", "--large", "--json-out", folder]
        ]
        # No result of this hardware is committed.
        assert command_line.main(["run", "planner", "--json-out", folder, "--check"]) == 2
        # Nothing was written.
        monkeypatch.setattr(
            subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0)
        )
        assert command_line.main(["run", "planner", "--json-out", folder, "--check"]) == 2

    def test_unknown_suites_and_arguments_are_refused(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit, match="2"):
            command_line.main(["run", "gem"])
        assert "invalid choice: 'gem'" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="2"):
            command_line.main(["list", "--long"])
        assert "unrecognized arguments: --long" in capsys.readouterr().err
