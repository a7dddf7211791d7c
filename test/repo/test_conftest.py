"""The rules of conftest.py, tested by running pytest on a small suite with a copy of it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CACHE_SUITE = """
import os


def test_cache_folder():
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert os.path.isdir(folder)
    print("cache folder:", folder)
    print("devices:", os.environ["CUDA_VISIBLE_DEVICES"])
"""

ACTIVATION_SUITE = """
import pytest

import inductor_ext
from inductor_ext.hooks import activate


def test_that_installs_and_forgets():
    inductor_ext.install()


def test_after_it():
    assert activate.requested() is None


@pytest.mark.gpu
def test_on_a_device():
    raise NotImplementedError
"""

FOLDER_SUITE = """
import os

START = os.getcwd()


def test_that_changes_the_folder():
    os.chdir("/")


def test_after_it():
    assert os.getcwd() == START
"""

GPU_SUITE = """
import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["cuda"])
def device(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(device):
    return device


@pytest.mark.parametrize("size", [1, 2])
def test_of_what_is_compiled(compiled, size):
    pass


def test_by_itself(device, tmp_path):
    pass


@pytest.mark.xdist_group("own")
def test_of_a_group(compiled):
    pass
"""

GPU_PLUGIN = """
import pytest
import torch

torch.cuda.is_available = lambda: True


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    for item in session.items:
        print("group:", item.name, *(mark.args[0] for mark in item.iter_markers("xdist_group")))
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "test" / "conftest.py", tmp_path)
    (tmp_path / "test_cache.py").write_text(CACHE_SUITE)
    (tmp_path / "test_activation.py").write_text(ACTIVATION_SUITE)
    (tmp_path / "test_folder.py").write_text(FOLDER_SUITE)
    (tmp_path / "test_gpu.py").write_text(GPU_SUITE)
    (tmp_path / "gpu_plugin.py").write_text(GPU_PLUGIN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    xdist_group\n")
    return tmp_path


def run_pytest(suite: Path, *arguments: str, **environment: str) -> str:
    """The output of pytest, run without GPU, xdist worker and cache folder in the environment."""
    outside = ("TORCHINDUCTOR_CACHE_DIR", "PYTEST_XDIST_WORKER")
    inherited = {key: value for key, value in os.environ.items() if key not in outside}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-s", *arguments],
        cwd=suite,
        # The copy of conftest.py imports from test/support.
        env={**inherited, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return process.stdout + process.stderr


def test_a_leaked_activation_fails_its_test(suite: Path) -> None:
    printed = run_pytest(suite, "test_activation.py")
    assert "the test leaves an activation behind: {}" in printed
    assert re.search(r"ERROR .*test_that_installs_and_forgets", printed)
    assert re.search(r"SKIPPED .*no CUDA device \(torch [\d.]+", printed)
    assert re.search(r"2 passed, 1 skipped,.* 1 error", printed)


def test_a_changed_working_folder_fails_its_test(suite: Path) -> None:
    printed = run_pytest(suite, "test_folder.py")
    assert "the test leaves another working folder behind: /" in printed
    assert re.search(r"ERROR .*test_that_changes_the_folder", printed)
    assert re.search(r"2 passed,.* 1 error|2 passed, 1 error", printed)


def test_each_run_has_a_cache_folder_of_its_own_and_removes_it(suite: Path) -> None:
    folders = []
    for _ in range(2):
        match = re.search("cache folder: (.+)", run_pytest(suite, "test_cache.py"))
        assert match
        folders.append(match[1])
    assert folders[0] != folders[1]
    assert not any(os.path.exists(folder) for folder in folders)


def test_a_cache_folder_of_the_environment_is_kept(suite: Path, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    printed = run_pytest(suite, "test_cache.py", TORCHINDUCTOR_CACHE_DIR=str(folder))
    assert f"cache folder: {folder}\n" in printed
    assert folder.is_dir()


def test_tests_on_a_gpu_are_grouped_by_what_they_share(suite: Path) -> None:
    arguments = "-p", "gpu_plugin", "--collect-only", "test_gpu.py", "test_cache.py"
    printed = run_pytest(suite, *arguments, PYTHONPATH=str(suite))
    assert re.findall("group: (.+)", printed) == [
        "test_of_what_is_compiled[cuda-1] test_gpu.py::compiled",
        "test_of_what_is_compiled[cuda-2] test_gpu.py::compiled",
        "test_by_itself[cuda]",
        "test_of_a_group[cuda] own",
        "test_cache_folder test_cache.py",
    ]


def test_smoke_entries_mark_tests(suite: Path) -> None:
    """A line marks a file, a class or a function with all its parameters, and no longer names."""
    (suite / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    xdist_group\n    smoke\n")
    (suite / "test").mkdir()
    shutil.move(suite / "conftest.py", suite / "test")
    (suite / "test" / "test_a.py").write_text("def test_1(): pass\ndef test_2(): pass\n")
    (suite / "test" / "test_b.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', ['a::b', 'c'])\n"
        "def test_1(x): pass\n"
        "def test_10(): pass\n"
        "class TestC:\n"
        "    def test_1(self): pass\n"
        "class TestD:\n"
        "    def test_1(self): pass\n"
    )
    (suite / "test" / "smoke.txt").write_text(
        "# a comment\n\ntest/test_a.py\ntest/test_b.py::test_1\ntest/test_b.py::TestC\n"
    )
    printed = run_pytest(suite, "-m", "smoke", "--collect-only", "-q", "test")
    assert [line for line in printed.splitlines() if "::" in line] == [
        "test/test_a.py::test_1",
        "test/test_a.py::test_2",
        "test/test_b.py::test_1[a::b]",
        "test/test_b.py::test_1[c]",
        "test/test_b.py::TestC::test_1",
    ]


def test_the_smoke_list_names_enough_existing_tests() -> None:
    entries = (ROOT / "test" / "smoke.txt").read_text().splitlines()
    entries = [line for line in entries if line and not line.startswith("#")]
    assert len(set(entries)) == len(entries)
    functions = 0
    for entry in entries:
        file, *names = entry.split("::")
        scope: ast.AST = ast.parse((ROOT / file).read_text())
        for name in names:
            scope = next(
                node
                for node in getattr(scope, "body", ())
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name
            )
        tests = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        ]
        assert tests, entry
        functions += len(tests)
    assert functions >= 150


def test_make_smoke_runs_the_files_of_the_list() -> None:
    listed = {
        line.split("::")[0]
        for line in (ROOT / "test" / "smoke.txt").read_text().splitlines()
        if line.startswith("test")
    }
    # As if the environment existed, whatever its pins.
    command = ["make", "-n", "-o", "smoke-venv/.ready-none", "smoke", "VENV=smoke-venv"]
    printed = subprocess.run(
        [*command, "TORCH=none"],
        cwd=ROOT,
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MAKE", "TEST_ARGS"))
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (line,) = (line for line in printed.splitlines() if "pytest" in line)
    assert "-m smoke " in line
    assert set(re.findall(r" (test/\S+\.py)", line)) == listed


def test_one_worker_runs_a_file(request: pytest.FixtureRequest) -> None:
    """Otherwise each worker would compile what the tests of a file share."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("not run with --dist loadgroup")
    assert request.node.nodeid.endswith("@test/repo/test_conftest.py")


def test_each_worker_prefers_another_gpu(suite: Path) -> None:
    for worker, order in ((None, "4,7,5"), ("gw0", "4,7,5"), ("gw1", "7,5,4"), ("gw5", "5,4,7")):
        of = {} if worker is None else {"PYTEST_XDIST_WORKER": worker}
        printed = run_pytest(suite, "test_cache.py", CUDA_VISIBLE_DEVICES="4,7,5", **of)
        assert f"devices: {order}\n" in printed
