"""For every test: the run's own cache folder, a reset dynamo, and no remaining activation."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

# Failed assertions of shared test code show their values, as those of tests do.
pytest.register_assert_rewrite("test.support")

# No test depends on how fast the machine is.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
_SMOKE = Path(__file__).with_name("smoke.txt")
_TORCH_CONFIGS = (
    "torch._dynamo.config",
    "torch._functorch.config",
    "torch._inductor.config",
    "torch.fx.experimental._config",
)
_made_cache = pytest.StashKey[str]()

# Inductor starts a process in each process that compiles C++, which checks that this CPU runs the
# compiled code.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Set when this file is imported, before conftest.py files of subfolders import torch, which sets
# the variable. The workers of pytest-xdist inherit it and so share the folder; a variable that the
# caller has set is kept.
_NEW_FOLDER: str | None = None
if _CACHE_VARIABLE not in os.environ:
    _NEW_FOLDER = os.environ[_CACHE_VARIABLE] = tempfile.mkdtemp(prefix="inductor_ext-test-")


def pytest_configure(config: pytest.Config) -> None:
    if _NEW_FOLDER is not None:
        config.stash[_made_cache] = _NEW_FOLDER
    elif not hasattr(config, "workerinput"):
        # Results of an earlier run must not keep the tests from compiling or
        # measuring.
        for name in ("artifacts", "tuning"):
            folder = os.path.join(os.environ[_CACHE_VARIABLE], "inductor_ext", name)
            shutil.rmtree(folder, ignore_errors=True)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    visible = os.environ.get(_DEVICES_VARIABLE)
    devices = visible.split(",") if visible is not None else _devices()
    if worker.isdigit() and len(devices) > 1:
        # Each worker has all GPUs in another order: most tests use only the first.
        first = int(worker) % len(devices)
        os.environ[_DEVICES_VARIABLE] = ",".join(devices[first:] + devices[:first])


def _devices() -> list[str]:
    """Indices of the NVIDIA GPUs, without initializing CUDA, which would read the variable."""
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(_made_cache, None)
    if folder is not None:
        del os.environ[_CACHE_VARIABLE]
        shutil.rmtree(folder, ignore_errors=True)


def smoke_entries() -> set[str]:
    """The lines of smoke.txt: files, classes and functions below the folder of `test/`."""
    text = _SMOKE.read_text(encoding="utf-8") if _SMOKE.is_file() else ""
    return {line for line in text.splitlines() if line and not line.startswith("#")}


def _names(item: pytest.Item) -> set[str]:
    """The names of a test that smoke.txt may list: its file, its class and the test itself."""
    file = item.path.relative_to(_SMOKE.parent.parent).as_posix()
    _, *parts = item.nodeid.split("[")[0].split("::")
    return {"::".join((file, *parts[:end])) for end in range(len(parts) + 1)}


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist reads the marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with slow tests begin first, so that no worker waits for one of them at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    smoke = smoke_entries()
    for item in items:
        if _names(item) & smoke:
            item.add_marker(pytest.mark.smoke)
    needs_gpu = {item for item in items if item.get_closest_marker("gpu")}
    has_gpu = False
    if needs_gpu:
        import torch

        has_gpu = torch.cuda.is_available()
        built = f"with CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        skip = pytest.mark.skip(reason=f"no CUDA device (torch {torch.__version__}, built {built})")
        for item in () if has_gpu else needs_gpu:
            item.add_marker(skip)
    for item in items:
        # With `--dist loadgroup` one worker runs a file, whose tests share what they compile,
        # unless the tests have their own mark. On a machine with a GPU, which has many cores, one
        # worker runs the tests that share a fixture, and any worker the others.
        file = item.nodeid.split("::")[0]
        group = _group(item, file) if has_gpu and item in needs_gpu else file
        if group and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item, file: str) -> str | None:
    """The file and the fixtures that a test shares with others; None if there are none.

    Parametrized fixtures, such as devices, do not count.
    """
    info = item._fixtureinfo
    params = item.callspec.params if hasattr(item, "callspec") else {}
    shared = [
        name
        for name in info.argnames
        if name not in params
        and name in info.name2fixturedefs
        # The last definition is the closest to the test.
        and info.name2fixturedefs[name][-1].scope in ("class", "module")
    ]
    return "::".join((file, *shared)) if shared else None


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """Start and end each test without compiled code in dynamo, without an activation, in the same
    working folder, and with the same settings of torch.
    """
    _reset_dynamo()
    settings = _torch_settings()
    folder = os.getcwd()
    with _untraced():
        yield
    left_in = os.getcwd()
    os.chdir(folder)
    assert left_in == folder, f"the test leaves another working folder behind: {left_in}"
    _reset_dynamo()
    _free_cached_memory()
    _restore(settings)
    if "inductor_ext.hooks.compile_again" in sys.modules:
        from inductor_ext import events
        from inductor_ext.hooks import compile_again

        assert compile_again.WARNING not in events._warned, "a kernel does not compile"
    if "inductor_ext.hooks.activate" in sys.modules:
        from inductor_ext.hooks import activate, context

        requested, current = activate.requested(), context.settings()
        activate.uninstall()
        assert requested is None, f"the test leaves an activation behind: {requested}"
        assert current is None, f"the test leaves a compile's scope behind: {current}"


def _torch_settings() -> dict[str, dict[str, object]]:
    """The values of the config modules of torch that are imported."""
    modules = {name: sys.modules.get(name) for name in _TORCH_CONFIGS}
    return {name: m.get_config_copy() for name, m in modules.items() if m is not None}


def _restore(settings: dict[str, dict[str, object]]) -> None:
    """Set what `_torch_settings` returned."""
    for name, after in _torch_settings().items():
        for key, value in settings.get(name, after).items():
            if after[key] != value:
                setattr(sys.modules[name], key, value)


def _free_cached_memory() -> None:
    """Release the allocator's cached GPU memory, because other workers share the GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _reset_dynamo() -> None:
    # A test that compiles nothing should not pay for importing dynamo.
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def kernels_together(request: pytest.FixtureRequest, isolated: None) -> Iterator[None]:
    """Compile the C++ kernels of a graph in one unit, which takes much less time.

    Graphs of tests on a GPU have few kernels in C++.
    """
    marks = {mark.name for mark in request.node.iter_markers()}
    if marks & {"gpu", "separate_kernels"} or "torch._inductor.async_compile" not in sys.modules:
        yield
        return
    from test.support import quick_compiler

    with quick_compiler.kernels_together():
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads of torch, whatever the machine has: kernels have parallel loops."""
    from test.support.compile_util import threads

    with threads(2):
        yield


@pytest.fixture
def repeated_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `events.warn_once` repeat warnings of earlier tests."""
    from inductor_ext import events

    monkeypatch.setattr(events, "_warned", set())


@pytest.fixture
def no_compiler(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    repeated_warnings: None,
) -> Iterator[None]:
    """A machine without any compiler on PATH, with no warnings given yet."""
    from torch._inductor import config as inductor_config

    from inductor_ext.toolchain import components

    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("no_compiler")))
    for variable in ("CXX", "CC"):
        monkeypatch.delenv(variable, raising=False)
    components.clear()
    # Inductor read CXX when it was imported.
    with inductor_config.patch({"cpp.cxx": (None, "g++")}):
        yield
    components.clear()


def _untraced() -> contextlib.AbstractContextManager[object]:
    """Keep pytest's log capture off torch's structured trace.

    pytest attaches it to every logger that does not propagate. If there is a handler, torch renders
    every payload, which takes time and fails for tensor subclasses whose repr reads data.
    """
    logging = sys.modules.get("torch._logging._internal")
    if logging is None:
        return contextlib.nullcontext()
    return mock.patch.multiple(logging.trace_log, propagate=True, handlers=[])
