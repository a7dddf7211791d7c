"""AOT packages and the artifact cache: a hit gives the same bytes without a compile."""

from __future__ import annotations

import io
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch.export import Dim, ExportedProgram

import inductor_ext
from inductor_ext import aot, config, events, settings
from inductor_ext.cpp_wrapper.cache import cache as artifact_cache
from inductor_ext.cpp_wrapper.cache import key
from inductor_ext.cpp_wrapper.records import ArtifactCacheRecord, PackageRecord
from inductor_ext.hooks.records import CompileRecord
from inductor_ext.storage.artifact_store import ArtifactStore

CHECKOUT = pathlib.Path(__file__).parents[3]


class Net(torch.nn.Module):
    """A linear layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def export(seed: int = 0, most: int | None = None) -> ExportedProgram:
    shapes = None if most is None else ({0: Dim("batch", min=2, max=most)},)
    return torch.export.export(Net(seed), (torch.ones(3, 8),), dynamic_shapes=shapes)


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export()


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty cache folder."""
    with config.patch(artifact_cache_dir=str(tmp_path / "artifacts")):
        yield tmp_path / "artifacts"


class Compiler:
    """Stand-in for the compiler: counts its calls, and writes different files for each."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock = threading.Lock()

    def __call__(self, target: Any) -> str | IO[bytes]:
        with self.lock:
            self.calls += 1
        content = b"package %d" % self.calls
        if isinstance(target, (str, os.PathLike)):
            pathlib.Path(target).write_bytes(content)
            return os.fspath(target)
        target.write(content)
        assert not isinstance(target, (str, type(None)))
        return target  # type: ignore[no-any-return]


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def no_extra(program: ExportedProgram) -> str:
    return ""


def compiled(
    programs: Any, target: Any, compiler: Callable[..., Any], **patches: Any
) -> tuple[str | IO[bytes], ArtifactCacheRecord]:
    """The result of a compile, and its records."""
    if isinstance(programs, ExportedProgram):
        programs = {"model": programs}
    with events.capture(ArtifactCacheRecord) as records:
        result = artifact_cache.compile_or_copy(
            programs, target, patches, config.snapshot(), compiler, no_extra
        )
    (record,) = records
    return result, record


def state(programs: Any, target: Any, compiler: Callable[..., Any], **patches: Any) -> str:
    return compiled(programs, target, compiler, **patches)[1].state


# --- with a real compile ---


UNCOMPILED = 7
"""Seed of a model that no other test compiles."""

SECOND = """
import json, sys
started = []
def listen(event, args):
    if event == "subprocess.Popen":
        started.append([*map(str, args[1])])
sys.addaudithook(listen)
from test.cpp_wrapper.cache import test_cache as here
from inductor_ext import events
import inductor_ext
program = here.export(here.UNCOMPILED)
started.clear()
with events.capture() as records:
    inductor_ext.aoti_compile_and_package(program, package_path=sys.argv[1])
kinds = [type(record).__name__ for record in records]
print(json.dumps([kinds, started, "torch._inductor.compile_fx" in sys.modules]))
"""


def test_a_repeated_compile_runs_no_compiler(tmp_path: pathlib.Path) -> None:
    """Neither in this process nor in a new one, which does not even import Inductor's compiler.

    Uses the cache folder of all tests, in which the runtime is compiled already.
    """
    path = tmp_path / "net.pt2"
    with events.capture(ArtifactCacheRecord, CompileRecord) as records:
        inductor_ext.aoti_compile_and_package(export(UNCOMPILED), package_path=path)
    first, compile_ = records
    assert (first.state, compile_.kind) == ("miss", "aot")
    content = path.read_bytes()

    path.unlink()
    with (
        events.capture() as records,
        mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process")),
    ):
        inductor_ext.aoti_compile_and_package(export(UNCOMPILED), package_path=path)
    hit, package = records
    assert (hit.state, hit.key) == ("hit", first.key)
    assert isinstance(package, PackageRecord)
    assert path.read_bytes() == content
    x = torch.rand(3, 8)
    torch.testing.assert_close(inductor_ext.load(path)(x), Net(UNCOMPILED)(x))

    # The first of two new processes compiles if earlier tests have changed the configuration of
    # this process.
    packages = []
    for _ in range(2):
        path.unlink()
        run = subprocess.run(
            [sys.executable, "-c", SECOND, str(path)],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            check=True,
        )
        packages.append(path.read_bytes())
    kinds, started, inductor = json.loads(run.stdout)
    assert kinds == ["ArtifactCacheRecord", "PackageRecord"]
    assert [command for command in started if command[1:] != ["--version"]] == []
    assert not inductor
    assert packages[0] == packages[1]


def test_without_a_compiler_no_other_package_is_returned(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, no_compiler: None
) -> None:
    with pytest.raises(inductor_ext.exc.MissingToolchainError):
        inductor_ext.aoti_compile_and_package(program, package_path=tmp_path / "net.pt2")
    assert not (tmp_path / "net.pt2").exists()


# --- hits and misses ---


def test_any_difference_misses(
    program: ExportedProgram,
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    compiler: Compiler,
) -> None:
    path = tmp_path / "net.pt2"
    dynamic = export(most=16)
    calls: list[Callable[[], str]] = [
        lambda: state(program, path, compiler),
        lambda: state(export(seed=1), path, compiler),
        lambda: state(program, path, compiler, max_autotune=True),
        lambda: state(dynamic, path, compiler),
        lambda: state(export(most=32), path, compiler),
        lambda: state({"other": program}, path, compiler),
        lambda: state({"model": program, "other": dynamic}, path, compiler),
        lambda: state({"other": dynamic, "model": program}, path, compiler),
        lambda: state(program, tmp_path / "other.pt2", compiler),
    ]
    assert [call() for call in calls] == ["miss"] * len(calls)
    assert [call() for call in calls] == ["hit"] * len(calls)
    assert compiler.calls == len(calls)
    with config.patch(memory_arenas="never"):
        assert state(program, path, compiler) == "miss"


class NotedLock:
    """A lock that calls a function when a thread wants it."""

    def __init__(self, wanted: Callable[[], object]) -> None:
        self.wanted = wanted
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        self.wanted()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_options_of_another_thread_are_not_in_the_key(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch whose options are per process, a compile waits for the one that has set them."""
    programs = [export(seed=seed) for seed in (1, 2)]
    path = tmp_path / "net.pt2"
    seconds_turn = threading.Event()

    def proceed() -> None:
        """The second compile has come as far as it can, or has computed its key."""
        if threading.current_thread() is second:
            seconds_turn.set()

    def compute_key(*args: Any) -> str:
        result = compute(*args)
        proceed()
        return result

    def package(_: Any, target: Any, patches: dict[str, Any], *rest: Any) -> str:
        with aot._compiling, inductor_config.patch(patches):
            if patches:
                second.start()
                assert seconds_turn.wait(timeout=300)
        pathlib.Path(target).write_bytes(b"package")
        return os.fspath(target)

    compute = key.compute_key
    monkeypatch.setattr(key, "compute_key", compute_key)
    monkeypatch.setattr(aot, "_compiling", NotedLock(proceed))
    monkeypatch.setattr(aot, "_package", package)

    def compile_second() -> None:
        inductor_ext.aoti_compile_and_package(programs[1], package_path=path)

    second = threading.Thread(target=compile_second)
    options = {"max_autotune": True}
    inductor_ext.aoti_compile_and_package(programs[0], package_path=path, inductor_configs=options)
    second.join()
    # Options that this thread has set are not those of a new one.
    third = threading.Thread(target=compile_second)
    with events.capture(ArtifactCacheRecord) as records:
        third.start()
        third.join()
    assert [record.state for record in records] == ["hit"]


def test_what_the_caller_adds_to_the_key_misses(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    """For example the tuning results that determined the kernels."""
    with events.capture(ArtifactCacheRecord) as records:
        for tuned in ("before", "after", "after"):
            artifact_cache.compile_or_copy(
                {"model": program},
                tmp_path / "model.pt2",
                {},
                config.snapshot(),
                compiler,
                lambda _, tuned=tuned: tuned,
            )
    assert [record.state for record in records] == ["miss", "miss", "hit"]


def test_paths_buffers_and_no_path_get_the_package(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    path = tmp_path / "net.pt2"
    for expected in ("miss", "hit"):
        path.unlink(missing_ok=True)
        result, record = compiled(program, path, compiler)
        assert (record.state, result, path.read_bytes()) == (expected, str(path), b"package 1")
    for expected in ("miss", "hit"):
        buffer = io.BytesIO()
        result, record = compiled(program, buffer, compiler)
        assert (record.state, result, buffer.getvalue()) == (expected, buffer, b"package 2")
    # It has the key of a buffer: neither has a name.
    result, record = compiled(program, None, compiler)
    assert isinstance(result, str)
    assert (record.state, pathlib.Path(result).read_bytes()) == ("hit", b"package 2")
    assert result.endswith(".pt2")
    assert result.startswith(os.path.abspath(os.environ["TORCHINDUCTOR_CACHE_DIR"]))


def test_a_damaged_entry_is_compiled_again(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    path = tmp_path / "net.pt2"
    state(program, path, compiler)
    (entry,) = (folder / "entries").iterdir()
    (entry / "model.pt2").write_bytes(b"package 0")
    assert state(program, path, compiler) == "miss"
    assert path.read_bytes() == b"package 2"
    assert state(program, path, compiler) == "hit"


def test_a_compile_that_fails_leaves_nothing(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    def fail(target: Any) -> Any:
        raise KeyError("compile")

    for target in (tmp_path / "net.pt2", io.BytesIO(), None):
        with pytest.raises(KeyError):
            compiled(program, target, fail)
    assert ArtifactStore(folder, 1).usage().entries == 0
    assert state(program, tmp_path / "net.pt2", compiler) == "miss"


def test_one_of_several_processes_compiles(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    states: list[str] = []
    settings_ = config.snapshot()

    def slow(target: Any) -> Any:
        time.sleep(0.1)
        return compiler(target)

    def work(index: int) -> None:
        path = tmp_path / str(index) / "net.pt2"
        path.parent.mkdir()
        artifact_cache.compile_or_copy({"model": program}, path, {}, settings_, slow, no_extra)
        states.append(path.read_text())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == ["package 1"] * 5


# --- without the cache ---


def test_the_setting_switches_it_off(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    path = tmp_path / "net.pt2"
    state(program, path, compiler)
    for changes in ({"artifact_cache": False}, {"aot_debug_info": True}):
        with config.patch(changes):
            assert state(program, path, compiler) == "off"
    with torch.compiler.config.patch(force_disable_caches=True):
        assert state(program, path, compiler) == "off"
    with inductor_config.patch("trace.enabled", True):
        assert state(program, path, compiler) == "off"
    _, record = compiled(program, path, compiler, **{"aot_inductor.output_path": "net.so"})
    assert record.why == "aot_inductor.output_path writes files outside the package"
    assert compiler.calls == 6


def test_programs_without_key_are_compiled_each_time(
    program: ExportedProgram, folder: pathlib.Path, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    path = tmp_path / "net.pt2"
    for _ in range(2):
        _, record = compiled(program, path, compiler, post_grad_custom_post_pass=lambda graph: None)
        assert record.state == "bypass"
        assert "post_grad_custom_post_pass" in str(record.why)
    with mock.patch.object(key, "ingredients", side_effect=AttributeError("moved")):
        _, record = compiled(program, path, compiler)
    assert record.why == "the key cannot be computed: AttributeError: moved"
    assert compiler.calls == 3
    assert not folder.exists()


def test_an_unusable_folder_warns_once(
    program: ExportedProgram, tmp_path: pathlib.Path, compiler: Compiler
) -> None:
    (tmp_path / "file").touch()
    warned: dict[str, str] = {}
    with (
        config.patch(artifact_cache_dir=str(tmp_path / "file")),
        mock.patch.object(events, "warn_once", side_effect=warned.setdefault),
    ):
        for _ in range(2):
            assert state(program, tmp_path / "net.pt2", compiler) == "miss"
    assert compiler.calls == 2
    (message,) = warned.values()
    assert "artifacts are built without it" in message


def test_the_settings_configure_the_store(tmp_path: pathlib.Path) -> None:
    ours = settings.Settings(artifact_cache_dir=str(tmp_path), artifact_cache_size="3 MiB")
    store = artifact_cache.open_store(ours)
    assert (store.folder, store.max_bytes) == (tmp_path, 3 * 2**20)
    inductor = os.path.abspath(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert str(artifact_cache.open_store(settings.Settings()).folder).startswith(inductor)
