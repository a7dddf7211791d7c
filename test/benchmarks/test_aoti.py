"""The benchmark of AOT packages: what it counts, and its rows."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from benchmarks.aot import child as aoti_child
from benchmarks.aot import models as aoti_models
from benchmarks.aot import run as aoti
from benchmarks.harness import results


def spin(seconds: float) -> str:
    return f"import time\nwhile time.process_time() < {seconds}: pass"


def test_cpu_seconds_include_finished_and_running_children() -> None:
    before = aoti_child.read_cpu_seconds()
    subprocess.run([sys.executable, "-c", spin(0.3)], check=True)
    ended = aoti_child.read_cpu_seconds()
    assert 0.3 <= ended - before < 1
    code = spin(0.3) + "\nprint('spun', flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as living:
        assert living.stdout is not None
        assert living.stdout.readline() == b"spun\n"
        assert 0.25 <= aoti_child.read_cpu_seconds() - ended < 1
        living.communicate(b"\n")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("-O3 /c/ab/cab.wrapper.cpp -c -o x.o", "wrapper"),
        ("-include /c/ab/prefix.h -c /c/ab/cab.wrapper.cpp -o wrapper.o", "wrapper"),
        ("-O3 /c/ab/cab.kernel.cpp -c -o x.o", "kernels"),
        ("-x c++-header /c/ab/cab.h -o cab.h.gch", "fixed part"),
        ("/s/inductor_ext/cpp_wrapper/runtime/interface.cpp -c", "fixed part"),
        ("a.o b.o -shared -o c.so", "linking"),
        ("--version", "probing and the rest"),
        ("/c/ab/cabcdef.cpp -shared -o y.so", "probing and the rest"),
    ],
)
def test_compiler_calls_are_classified(command: str, part: str) -> None:
    assert part in aoti.PURPOSES
    assert aoti.classify_command(command.split()) == part


def test_compiler_wrapper_logs_seconds_and_compiles(tmp_path: Path) -> None:
    workspace = aoti.Workspace(tmp_path)
    source = tmp_path / "wrapper.cpp"
    source.write_text("int main() { return 3; }")
    run = subprocess.run(
        ["g++", str(source), "-o", str(tmp_path / "program")], env=workspace.environment
    )
    assert run.returncode == 0
    assert subprocess.run([str(tmp_path / "program")]).returncode == 3
    source.write_text("no program")
    run = subprocess.run(["g++", str(source)], env=workspace.environment, capture_output=True)
    assert run.returncode != 0
    assert b"error" in run.stderr
    lines = [path.read_text().split() for path in workspace.log.iterdir()]
    assert len(lines) == 2
    for user, system, *command in lines:
        assert float(user) + float(system) > 0
        assert aoti.classify_command(command) == "wrapper"


def test_rows_have_medians_and_units() -> None:
    samples: aoti.Samples = defaultdict(lambda: defaultdict(list))
    samples["compile, cold"] |= {"ours": [1.0, 3.0, 2.0], "stock": [9.0, 9.0, 9.0]}
    samples["compile, cold, C++ of kernels"] |= {"ours": [0.0], "stock": [0.0]}
    samples["compile, memory"] |= {"ours": [4.0 * aoti.MIB], "stock": [8.0 * aoti.MIB]}
    samples["call from Python"] |= {"ours": [4e-6], "stock": [4e-5], "eager": [2e-5]}
    rows = list(aoti.make_rows("mlp", samples, 2.0 * aoti.MIB))
    assert [(row["metric"], row["unit"], row["ours"], row["stock"]) for row in rows] == [
        ("compile, cold", "s", 2.0, 9.0),
        ("compile, memory", "MiB", 4.0, 8.0),
        ("call from Python", "us", pytest.approx(4), pytest.approx(40)),
    ]
    assert rows[1]["floor"] == 2
    assert rows[2]["eager"] == pytest.approx(20)
    header = results.collect_header("aoti", "python -m benchmarks.aot.run", "some-hardware")
    results.validate({**header, "rows": rows})


def test_measured_models_exist() -> None:
    assert {*aoti.MODELS, aoti.WARM_UP_MODEL} <= aoti_models.MODELS.keys()
    for name in ("pointwise", "eight inputs", "mlp"):
        module, inputs = aoti_models.MODELS[name].make()
        other_module, other_inputs = aoti_models.MODELS[name].make()
        assert torch.equal(module(*inputs), other_module(*other_inputs))


@pytest.mark.parametrize("kind", aoti_child.DAMAGES)
def test_damage_changes_the_package(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.pt2"
    code = b"\x7fELF" + os.urandom(30_000)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/aotinductor/model/x.so", code)
        archive.writestr("model/version", "1")
    size = path.stat().st_size
    aoti_child.damage(str(path), kind)
    if kind == "a truncated file":
        assert path.stat().st_size == size * 2 // 3
        return
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        if kind == "an entry outside":
            assert any("../" in name for name in archive.namelist())
            return
        start = data.index(code[:100])
        damaged = data[start : start + len(code)]
        assert sum(left != right for left, right in zip(damaged, code, strict=True)) == 1
        assert path.stat().st_size == size


def test_code_bytes_exclude_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/x.so", bytes(1000))
    assert aoti_child.count_code_bytes(str(path), 600) == 400
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/x.weights", bytes(600))
    assert aoti_child.count_code_bytes(str(path), 600) == 1000
