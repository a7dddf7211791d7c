"""Compiles as a trace in Chrome's format, and the extension's artifacts in tlparse."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import inductor_ext
from inductor_ext import exc
from inductor_ext.reports.compile_trace import write_trace

MODEL = """
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
with torch.no_grad():
    torch.compile(model, backend="inductor_ext")(torch.randn(4, 8))
"""


TLPARSE = Path(sys.executable).with_name("tlparse")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def check(path: Path) -> list[dict[str, Any]]:
    """Check the format of a trace; return its events."""
    trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert Counter(event["ph"] for event in events)["M"] == 1
    open_slices: list[str] = []
    for event in events:
        if event["ph"] == "B":
            open_slices.append(event["name"])
        elif event["ph"] == "E":
            assert open_slices.pop() == event["name"]
    assert not open_slices
    return events


def test_parts_and_records(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    logger = logging.getLogger("torch.__trace")
    handlers = list(logger.handlers)
    with torch.no_grad():
        inductor_ext.report(make_model(), torch.randn(4, 8), path=None, recompile=False, trace=path)
    assert logger.handlers == handlers
    events = check(path)
    slices = {event["name"] for event in events if event["ph"] == "B"}
    assert slices >= {
        "inductor_ext.plan_matmuls",
        "inductor_ext.plan_memory",
        "GraphLowering.run",
    }
    points = [event for event in events if event.get("cat") == "inductor_ext"]
    names = Counter(point["name"] for point in points)
    assert names == {"matmul": 2, "memory_plan": 1, "compile": 1}
    compiled = next(point["args"] for point in points if point["name"] == "compile")
    assert (compiled["kind"], compiled["cache"]) == ("inference", "off")
    assert "settings" not in compiled
    begin, end = (event["ts"] for event in events if event["name"] == "inductor_ext.plan_memory")
    (planned,) = (point["ts"] for point in points if point["name"] == "memory_plan")
    assert begin <= planned <= end


def test_a_package(tmp_path: Path) -> None:
    program = torch.export.export(make_model().eval(), (torch.randn(4, 8),))
    package, path = tmp_path / "model.pt2", tmp_path / "trace.json"
    # So that it is compiled, not copied.
    options = {"artifact_cache": False}
    with write_trace(path):
        inductor_ext.aoti_compile_and_package(
            program, package_path=package, inductor_configs=options
        )
    events = check(path)
    ours = [
        event["name"].removeprefix("inductor_ext.")
        for event in events
        if event["ph"] == "B" and event["name"].startswith("inductor_ext.")
    ]
    assert ours[:2] == ["compile_package", "compile_model"]
    assert ours.index("plan_memory") < ours.index("compile_units") < ours.index("write_package")


def test_an_error_keeps_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), write_trace(path):
        raise ZeroDivisionError
    assert [event["ph"] for event in check(path)] == ["M"]


def test_the_file_is_checked_before(tmp_path: Path) -> None:
    with (
        pytest.raises(exc.BadReportFileError, match="does not exist"),
        write_trace(tmp_path / "absent" / "trace.json"),
    ):
        raise AssertionError("it went on")
    with pytest.raises(exc.BadArgumentError, match="nothing but a path"):
        inductor_ext.report("model.pt2", path=None, trace=tmp_path / "trace.json")  # type: ignore[call-overload]


def test_a_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MODEL)
    command = ["report", "-o", "page.html", "--trace", "trace.json", "program.py"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "inductor_ext", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    names = {event["name"] for event in check(tmp_path / "trace.json")}
    assert names >= {"inductor_ext.plan_memory", "memory_plan"}


@pytest.mark.skipif(not TLPARSE.exists(), reason="there is no tlparse")
def test_tlparse_shows_the_artifacts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MODEL],
        env={**os.environ, "TORCH_TRACE": str(tmp_path / "trace")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "trace").iterdir()
    out = tmp_path / "out"
    subprocess.run([TLPARSE, log, "-o", out, "--no-browser"], check=True, capture_output=True)
    page = (out / "index.html").read_text()
    for name in ("matmul", "memory_plan", "compile"):
        assert f"inductor_ext_{name}_" in page
    (artifact,) = out.rglob("inductor_ext_memory_plan_*.json")
    assert json.loads(artifact.read_text())["event"] == "memory_plan"
    timeline = (out / "chromium_events.json").read_text()
    assert "inductor_ext.plan_memory" in timeline
