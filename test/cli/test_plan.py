"""`inductor-ext plan`: its output and files, and arguments rejected before anything is written."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_ext import exc
from inductor_ext.cli import main
from inductor_ext.cli import plan as command
from inductor_ext.memory.planner import csv_io, solver
from inductor_ext.memory.planner.interval import Interval, Placement, lower_bound, verify

CHECKOUT = Path(__file__).parents[2]
EXAMPLE = CHECKOUT / "benchmarks" / "memory" / "instances" / "minimalloc-example.csv"

TABLE = "id,lower,upper,size\na,0,4,10\nb,2,6,20\nc,4,8,5\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "problem.csv"
    path.write_text(TABLE)
    return path


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def plan(*arguments: object) -> int:
    return main.main(["plan", *map(str, arguments)])


def test_json_has_its_six_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(EXAMPLE, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("cpu_seconds") >= 0
    assert report == {
        "buffers": 5,
        "lower_bound": 12,
        "peak": 12,
        "ratio": 1.0,
        "verified": True,
    }


def test_standard_input(table: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "inductor_ext", "plan", "-", "--json"],
        cwd=CHECKOUT,
        input=TABLE,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout)["peak"] == 30


def test_an_interrupt_ends_the_search(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def interrupted(intervals: list[Interval], *, iterations: int, seed: int) -> Placement:
        calls.append(iterations)
        if len(calls) > 1:
            raise KeyboardInterrupt
        offsets = (0, 10, 30)
        return Placement(offsets, 35, lower_bound(intervals), "found", iterations)

    monkeypatch.setattr(command, "solve", interrupted)
    assert plan(table, "--json") == 0
    assert json.loads(capsys.readouterr().out)["peak"] == 35
    assert len(calls) == 2


def test_text_output_agrees_with_json(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(table) == 0
    out = capsys.readouterr().out
    for words in ("buffers      3", "30 bytes", "1.0000 of the lower bound, verified"):
        assert words in out


def test_an_empty_problem_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("id,lower,upper,size\n")
    assert plan(path, "--json", "--output", tmp_path / "out.csv") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["buffers"], report["peak"], report["ratio"]) == (0, 0, 1.0)
    assert (tmp_path / "out.csv").read_text() == "id,lower,upper,size,offset\n"


def test_output_is_a_valid_plan(table: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.csv"
    assert plan(table, "--align", 64, "--output", target) == 0
    written = rows(target)
    assert list(written[0]) == ["id", "lower", "upper", "size", "offset"]
    assert [row["id"] for row in written] == ["a", "b", "c"]
    problem = [Interval(int(r["lower"]), int(r["upper"]), int(r["size"]), 64) for r in written]
    verify(problem, [int(row["offset"]) for row in written], 128)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_further_columns_any_order_and_quotes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "problem.csv"
    path.write_text('size,note, upper ,id,lower\n8,"x, ""y""",3,b0,0\n\n9,,4,b1,3\n')
    assert plan(path, "--output", path) == 0
    assert path.read_text() == (
        'size,note,upper,id,lower,offset\n8,"x, ""y""",3,b0,0,0\n9,,4,b1,3,0\n'
    )


def test_a_plan_can_be_planned_again(table: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.csv", tmp_path / "second.csv"
    assert plan(table, "--output", first) == 0
    assert plan(first, "--output", second) == 0
    assert second.read_text() == first.read_text()


def test_a_byte_order_mark_and_windows_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "problem.csv"
    path.write_bytes(b"\xef\xbb\xbf" + TABLE.replace("\n", "\r\n").encode())
    problem = csv_io.read(path)
    assert [(i.name, i.start, i.end, i.size) for i in problem.intervals] == [
        ("a", 0, 4, 10),
        ("b", 2, 6, 20),
        ("c", 4, 8, 5),
    ]


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """The solver's arguments; with less than 5,000 iterations it returns the worst plan."""
    seen: list[dict[str, int]] = []

    def recorded(problem: tuple[Interval, ...], **options: int) -> Placement:
        seen.append(options)
        size = sum(interval.size for interval in problem)
        offsets = tuple(sum(i.size for i in problem[:k]) for k in range(len(problem)))
        if options["iterations"] < 5000:
            return Placement(offsets, size, lower_bound(problem), "stack", 0)
        return solver.solve(problem, **options)

    monkeypatch.setattr(command, "solve", recorded)
    return seen


def test_default_budget_grows_far_from_the_bound(
    table: Path, budgets: list[dict[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(table, "--json") == 0
    default = solver.DEFAULT_ITERATIONS
    assert [budget["iterations"] for budget in budgets] == [default, 8 * default, 64 * default]
    assert json.loads(capsys.readouterr().out)["ratio"] == 1.0


def test_seed_and_iterations_are_passed_on(table: Path, budgets: list[dict[str, int]]) -> None:
    assert plan(table, "--iterations", 7, "--seed", 3) == 0
    assert budgets == [{"iterations": 7, "seed": 3}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["is empty", "'id,lower,upper,size'"]),
        ("id,lower,size\n", ["line 1", "lacks the column 'upper'"]),
        ("id,lower,upper,size,size\n", ["line 1", "more than one column 'size'"]),
        ("id,lower,upper,size,offset,offset\n", ["line 1", "more than one column 'offset'"]),
        (TABLE + "d,1,2\n", ["line 5", "3 fields where the header has 4"]),
        (TABLE + "d,1,2,many\n", ["line 5", "column 'size'", "'many' is not an integer"]),
        (TABLE + "d,1.5,2,1\n", ["line 5", "column 'lower'", "'1.5' is not an integer"]),
        (TABLE + "d,1,,1\n", ["line 5", "column 'upper'", "'' is not an integer"]),
        (TABLE + "d,1,1_0,1\n", ["line 5", "column 'upper'", "'1_0' is not an integer"]),
        (TABLE + "d,1,2," + "9" * 5000 + "\n", ["line 5", "column 'size'", "999... "]),
        (
            TABLE + "d,7,5,1\n",
            ["line 5", "column 'upper'", "upper is 5, less than lower, which is 7"],
        ),
        (TABLE + "d,1,2,-3\n", ["line 5", "column 'size'", "-3 is negative"]),
        (TABLE + "b,1,2,3\n", ["line 5", "column 'id'", "'b' is already used in line 3"]),
        (TABLE + 'd,1,2,"3\n', ["line 5", "is not CSV"]),
    ],
)
def test_errors_in_a_file_are_named(
    content: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, target = tmp_path / "problem.csv", tmp_path / "plan.csv"
    path.write_text(content)
    assert plan(path, "--output", target) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    for word in [str(path), *words]:
        assert word.replace("999... ", "999...'") in captured.err
    assert not target.exists()
    with pytest.raises(exc.BadProblemFileError):
        csv_io.read(path)


def test_a_file_that_is_not_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "problem.csv"
    path.write_bytes(b"\xff\xfe\x00binary")
    assert plan(path) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing.csv", ""])
def test_a_file_that_cannot_be_read_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path / name) == 2
    err = capsys.readouterr().err
    assert str(tmp_path / name) in err
    assert "cannot be read (" in err


@pytest.mark.parametrize(
    ("target", "why"), [(".", "it is a folder"), ("none/plan.csv", "its folder does not exist")]
)
def test_an_unwritable_output_is_refused_before_planning(
    target: str,
    why: str,
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "solve", None)
    assert plan(table, "--output", tmp_path / target) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert why in captured.err


def test_a_failed_write_leaves_the_file_as_it_was(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "plan.csv"
    target.write_text("before")
    problem = csv_io.read(table)

    class Full:
        def __init__(self, *_: object, **__: object) -> None: ...

        def writerow(self, row: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv_io.csv, "writer", Full)
    with pytest.raises(exc.BadProblemFileError, match="No space left on device"):
        csv_io.write(target, problem, [0, 0, 0])
    assert target.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.csv", "problem.csv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--align", "48"], "48 is not a power of two"),
        (["--align", "0"], "0 is not a power of two"),
        (["--iterations=-1"], "'-1' is not an integer"),
        (["--seed", "x"], "'x' is not an integer"),
    ],
)
def test_wrong_options_are_usage_errors(
    arguments: list[str], words: str, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan(table, *arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_as_a_user_starts_it_without_torch(table: Path) -> None:
    code = (
        "import sys; from inductor_ext.cli.main import main; code = main(sys.argv[1:]); "
        "loaded = {'torch', 'sympy', 'numpy'} & set(sys.modules); print(loaded); sys.exit(code)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "plan", str(table)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines()[-1] == "set()"
