"""The format of results, every committed result, and the measurements of memory."""

from __future__ import annotations

import copy
import fnmatch
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import json
import mmap
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import measure, results

ROW = {
    "case": "gemm 64x64x64",
    "metric": "latency",
    "unit": "us",
    "better": "lower",
    "ours": 8.0,
    "stock": 10,
    "eager": 12345.678,
    "floor": None,
    "spread": 0.05,
    "note": "a note",
}
DOCUMENT: dict[str, Any] = {
    "suite": "gemm",
    "hardware": "nvidia-h100-80gb-hbm3",
    "versions": {"python": "3.11.7", "torch": "2.13.0", "inductor_ext": "0.1.0"},
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "date": "2026-01-31T12:00:00Z",
    "command": "python -m benchmarks.gemm.run --out=benchmarks/results a/b",
    "rows": [
        ROW,
        {**ROW, "metric": "bandwidth", "unit": "GB/s", "better": "higher", "note": None},
    ],
}


def make_document(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return document


COMMITTED = sorted(results.RESULTS.glob("*/*.json"))
README = results.CHECKOUT / "benchmarks" / "README.md"


@pytest.mark.parametrize(
    "path", COMMITTED, ids=[f"{path.parent.name}-{path.stem}" for path in COMMITTED]
)
def test_committed_results_are_valid_without_paths(path: Path) -> None:
    document = results.read(path)
    # `validate` checks the command; notes and cases are free text.
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|opt|usr|mnt)\b", path.read_text())
    assert document["suite"] in results.render_table(document)


def test_results_folder_has_only_results() -> None:
    files = {path for path in results.RESULTS.rglob("*") if path.is_file()}
    assert files == set(COMMITTED)


def test_valid_documents() -> None:
    results.validate(DOCUMENT)
    results.validate(make_document(lambda d: d.update(commit=None)))
    results.validate(make_document(lambda d: d.update(commit=d["commit"] + "-dirty")))


@pytest.mark.parametrize(
    ("change", "path", "why"),
    [
        (lambda d: d.pop("date"), "the document", "lacks 'date'"),
        (lambda d: d.update(host="h"), "the document", "'host'"),
        (lambda d: d.update(suite="My suite"), "suite", "'My suite'"),
        (lambda d: d.update(suite=3), "suite", "3 is not a string"),
        (lambda d: d.update(hardware=""), "hardware", "''"),
        (lambda d: d.update(date="2026-01-31"), "date", "'2026-01-31'"),
        (lambda d: d.update(date="2026-02-31T12:00:00Z"), "date", "day is out of range"),
        (lambda d: d.update(commit="0123456"), "commit", "'0123456'"),
        (lambda d: d.update(command=""), "command", "empty"),
        (lambda d: d.update(command="python /tmp/x.py"), "command", "absolute path"),
        (lambda d: d.update(command="python x.py --out=/tmp"), "command", "absolute path"),
        (lambda d: d.update(command="python ~/x.py"), "command", "absolute path"),
        (lambda d: d.update(command=r"python C:\x.py"), "command", "absolute path"),
        (lambda d: d["versions"].pop("torch"), "versions", "lacks 'torch'"),
        (lambda d: d["versions"].update(torch=2.13), "versions.torch", "2.13 is not a string"),
        (lambda d: d.update(versions=[]), "versions", "not an object"),
        (lambda d: d.update(rows={}), "rows", "not an array"),
        (lambda d: d.update(rows=[]), "rows", "empty"),
        (lambda d: d["rows"].append("row"), "rows[2]", "not an object"),
        (lambda d: d["rows"][1].pop("floor"), "rows[1]", "lacks 'floor'"),
        (lambda d: d["rows"][1].update(unit=""), "rows[1].unit", "empty"),
        (lambda d: d["rows"][1].update(better="faster"), "rows[1].better", "'lower' or 'higher'"),
        (lambda d: d["rows"][1].update(ours="8"), "rows[1].ours", "not a number"),
        (lambda d: d["rows"][1].update(ours=True), "rows[1].ours", "not a number"),
        (lambda d: d["rows"][1].update(ours=float("nan")), "rows[1].ours", "not a finite number"),
        (lambda d: d["rows"][1].update(ours=float("inf")), "rows[1].ours", "not a finite number"),
        (lambda d: d["rows"][1].update(spread=-0.1), "rows[1].spread", "negative"),
        (lambda d: d["rows"][1].update(note=3), "rows[1].note", "not a string"),
        (
            lambda d: d["rows"][1].update(ours=None, stock=None, eager=None),
            "rows[1]",
            "no variant",
        ),
        (lambda d: d["rows"][1].update(metric="latency"), "rows[1]", "rows[0] again"),
    ],
)
def test_error_names_the_invalid_field(
    change: Callable[[dict[str, Any]], object], path: str, why: str
) -> None:
    with pytest.raises(results.InvalidResultError) as caught:
        results.validate(make_document(change))
    assert caught.value.fields["path"] == path
    assert why in caught.value.fields["why"]


def test_document_must_be_an_object() -> None:
    with pytest.raises(results.InvalidResultError, match="the document"):
        results.validate([DOCUMENT])


def test_documents_are_read_as_written(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    path = results.write(folder, DOCUMENT)
    assert path == folder / "gemm" / "nvidia-h100-80gb-hbm3.json"
    assert results.read(path) == DOCUMENT
    assert list(folder.rglob("*.json")) == [path]


def test_failed_write_keeps_the_old_result(tmp_path: Path, monkeypatch: Any) -> None:
    path = results.write(tmp_path, DOCUMENT)
    before = path.read_bytes()
    with pytest.raises(results.InvalidResultError):
        results.write(tmp_path, make_document(lambda d: d["rows"][0].update(unit="")))
    newer = make_document(lambda d: d.update(date="2026-02-01T12:00:00Z"))
    write_text = Path.write_text

    def write_half(self: Path, text: str) -> int:
        write_text(self, text[: len(text) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="disk full"):
        results.write(tmp_path, newer)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["gemm/gpu.json", "e2e/nvidia-h100-80gb-hbm3.json"])
def test_reading_checks_syntax_folder_and_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir()
    file.write_text(json.dumps(DOCUMENT))
    with pytest.raises(results.InvalidResultError, match=r"gemm/nvidia-h100-80gb-hbm3\.json"):
        results.read(file)
    file.write_text("{")
    with pytest.raises(results.InvalidResultError, match=file.name):
        results.read(file)


def test_header_of_this_machine_is_valid() -> None:
    command = "python -m benchmarks.gemm.run"
    header = results.collect_header("gemm", command, packages=["pytest", "nil"])
    results.validate({**header, "rows": [ROW]})
    assert header["versions"]["torch"] == importlib.metadata.version("torch")
    assert header["versions"]["pytest"] == pytest.__version__
    assert "nil" not in header["versions"]


def test_header_rejects_invalid_commit_and_command() -> None:
    command = "python -m benchmarks.gemm.run"
    header = results.collect_header("gemm", command, commit="0123456789" * 4)
    assert header["commit"] == "0123456789" * 4
    with pytest.raises(results.InvalidResultError, match="'0123456' is no commit's full id"):
        results.collect_header("gemm", command, commit="0123456")
    with pytest.raises(results.InvalidResultError, match="absolute path"):
        results.collect_header("gemm", f"{command} --json-out /tmp")


def test_header_with_hardware_does_not_import_torch() -> None:
    program = """
import sys
from benchmarks.harness import results
header = results.collect_header("gemm", "python x.py", "some-gpu")
print(header["hardware"], "torch" in sys.modules, "torch" in header["versions"])
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=results.CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["some-gpu", "False", "True"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "model name\t: Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz",
            "intel-xeon-platinum-8480c",
        ),
        ("model name\t: AMD EPYC", "amd-epyc"),
    ],
)
def test_hardware_of_a_cpu(line: str, name: str, monkeypatch: Any) -> None:
    import torch

    monkeypatch.setattr(Path, "read_text", lambda self: f"processor\t: 0\n{line}\nflags\t: fpu\n")
    monkeypatch.setattr(results.os, "sched_getaffinity", lambda _: {0, 1, 5})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert results.name_hardware("cpu") == f"{name}-3-cores-avx2"


def test_hardware_of_a_gpu(monkeypatch: Any) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert results.name_hardware() == "nvidia-h100-80gb-hbm3"


def test_changed_code_makes_the_commit_dirty(tmp_path: Path, monkeypatch: Any) -> None:
    def read_commit() -> str | None:
        return results.collect_header("gemm", "python x.py", "some-gpu")["commit"]

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True)

    monkeypatch.setattr(results, "CHECKOUT", tmp_path)
    assert read_commit() is None
    (tmp_path / "code.py").write_text("a = 1\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "code")
    clean = read_commit()
    assert clean is not None
    assert re.fullmatch("[0-9a-f]{40}", clean)
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "x.json").write_text("{}")
    assert read_commit() == clean
    (tmp_path / "code.py").write_text("a = 2\n")
    assert read_commit() == f"{clean}-dirty"


def test_command_has_no_absolute_paths() -> None:
    inside = results.CHECKOUT / "examples" / "quickstart.py"
    outside = "/somewhere/out"
    line = results.format_command(
        [str(inside), "--json-out", outside, f"--cache={outside}", "--mode=x", "a b"]
    )
    assert line == "python examples/quickstart.py --json-out out --cache=out --mode=x 'a b'"
    results.validate(make_document(lambda d: d.update(command=line)))


@pytest.mark.parametrize("name", ["benchmarks.gemm.run", "benchmarks.gemm.run.__main__"])
def test_command_of_a_module(name: str, monkeypatch: Any) -> None:
    spec = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/gemm/run.py", "a", "/b/c"])
    assert results.format_command() == "python -m benchmarks.gemm.run a c"


TABLE = """\
gemm on nvidia-h100-80gb-hbm3
python 3.11.7, torch 2.13.0, inductor_ext 0.1.0

               unit  better   eager  stock  ours  ours/stock  spread
gemm 64x64x64
  latency [1]  us    lower   12,346     10     8       0.800    5.0%
  bandwidth    GB/s  higher  12,346     10     8       0.800    5.0%

[1] a note
"""


def test_rendered_table() -> None:
    assert results.render_table(DOCUMENT) == TABLE


def test_table_marks_differences_within_the_spread() -> None:
    def render_ratio(ours: float | None, stock: float | None, spread: float | None) -> str:
        values = {"ours": ours, "stock": stock, "spread": spread, "note": None}
        lines = results.render_table({**DOCUMENT, "rows": [{**ROW, **values}]}).splitlines()
        (head,) = (line for line in lines if "ours/stock" in line)
        (row,) = (line for line in lines if line.startswith("  latency"))
        start = head.index("ours/stock")
        return row[start : start + len("ours/stock")].strip()

    assert render_ratio(9.6, 10, 0.05) == "~0.960"
    assert render_ratio(9.4, 10, 0.05) == "0.940"
    assert render_ratio(9.6, 10, None) == "0.960"
    assert render_ratio(None, 10, 0.05) == ""
    assert render_ratio(9.6, None, 0.05) == ""
    assert render_ratio(9.6, 0, 0.05) == ""


def test_main_shows_and_validates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = results.write(tmp_path, DOCUMENT)
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert results.main(["show", str(good)]) == 0
    assert capsys.readouterr().out == TABLE + "\n"
    assert results.main(["validate", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}: valid\n"
    assert results.main(["validate", str(bad), str(good)]) == 1
    captured = capsys.readouterr()
    assert captured.out == f"{good}: valid\n"
    assert "the document" in captured.err
    assert str(bad) in captured.err
    assert results.main(["validate", str(tmp_path / "absent.json")]) == 1


def test_readme_documents_every_field() -> None:
    _, _, text = README.read_text().partition("## The format")
    documented = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    fields = {*results.Document.__annotations__, *results.Row.__annotations__}
    assert fields == documented


def readme_table() -> list[tuple[list[str], str, str]]:
    """The rows of the README's table of results: suites, command, and where they are used."""
    text = README.read_text()
    table = text[text.index("| suite | command |") : text.index("## The format")]
    rows = re.findall(r"^\| (`.+?) \| (.+) \| (.+?) \|$", table, re.MULTILINE)
    return [(re.findall(r"`(.+?)`", suites), command, pages) for suites, command, pages in rows]


def test_readme_lists_the_suite_of_every_result() -> None:
    patterns = [pattern for suites, _, _ in readme_table() for pattern in suites]
    folders = {path.parent.name for path in COMMITTED}
    unlisted = {
        folder for folder in folders if not any(fnmatch.fnmatch(folder, p) for p in patterns)
    }
    assert unlisted == set()
    assert {pattern for pattern in patterns if not fnmatch.filter(folders, pattern)} == set()


def test_commands_in_the_readme_are_modules() -> None:
    for _, command, _ in readme_table():
        for module in re.findall(r"python -m ([\w.]+)", command):
            assert importlib.util.find_spec(module) is not None, module


def test_pages_in_the_readme_name_their_results() -> None:
    for suites, _, cell in readme_table():
        for page in re.findall(r"[\w/]+\.md", cell):
            text = (results.CHECKOUT / page).read_text()
            for suite in suites:
                # As code, in a link to the result, or as the head of a printed table.
                name = re.escape(suite.removesuffix("*"))
                assert re.search(rf"(?:`|results/|\n){name}", text), (suite, page)


def test_summary_of_measurements() -> None:
    assert measure.summarize([3.0]) == (3.0, 0.0)
    # Quartiles of 1..5 are 2 and 4, so their distance is 2/3 of the median.
    assert measure.summarize([5.0, 1.0, 4.0, 2.0, 3.0]) == pytest.approx((3.0, 2 / 3))


@pytest.mark.parametrize(("names", "rounds"), [("abc", 6), ("abcd", 4), ("abcdef", 6)])
def test_every_variant_follows_every_other_one_equally_often(names: str, rounds: int) -> None:
    order: list[str] = []

    def make_measurement(name: str) -> Callable[[], float]:
        def call() -> float:
            order.append(name)
            return float(len(order))

        return call

    values = measure.alternate({name: make_measurement(name) for name in names}, rounds)
    for name in names:
        assert values[name] == [i + 1.0 for i, other in enumerate(order) if other == name]
    in_rounds = [order[i : i + len(names)] for i in range(0, len(order), len(names))]
    assert all(sorted(names) == sorted(one) for one in in_rounds)
    pairs = Counter(pair for one in in_rounds for pair in itertools.pairwise(one))
    assert pairs == dict.fromkeys(itertools.permutations(names, 2), rounds // len(names))


def test_find_peak() -> None:
    assert measure.find_peak([]) == 0
    assert measure.find_peak([5, 7, -5, 4, -11]) == 12
    # Memory from before the sequence may be freed.
    assert measure.find_peak([-5, 3]) == 0


def test_peak_allocated_in_eager_mode() -> None:
    import torch

    def call() -> torch.Tensor:
        first = torch.ones(1 << 20)
        second = torch.ones(1 << 20)
        del first
        third = torch.ones(1 << 19)
        return second[: 1 << 19].add_(third)

    # `first` and `second` have 4 MiB; `first` is freed before `third` is allocated.
    assert measure.measure_peak_allocated(call) == 8 << 20


def test_peak_allocated_by_compiled_code() -> None:
    import torch

    program = torch.compile(lambda a: a @ a @ a)
    argument = torch.ones(512, 512)
    program(argument)
    # The intermediate and the result: a matmul cannot overwrite its operand.
    assert measure.measure_peak_allocated(lambda: program(argument)) == 2 * argument.nbytes


def test_resident_memory_of_this_process() -> None:
    now, peak = measure.read_resident_memory()
    assert 0 < now <= peak
    # mmap: an allocator may reuse pages that are resident since earlier tests.
    with mmap.mmap(-1, 64 << 20) as block:
        block[:: 1 << 12] = b"x" * (len(block) >> 12)
        after, peak = measure.read_resident_memory()
        assert peak >= after >= now + len(block) - (4 << 20)
