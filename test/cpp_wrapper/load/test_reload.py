"""`reload` of a loaded model: another package takes its place while calls continue."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import pathlib
import shutil
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import exc
from test.support.loader_models import Plain, X, check

_ENTERED, _LEAVE = threading.Event(), threading.Event()
"""Whether a call of `wait` has begun, and whether it may end."""


@torch.library.custom_op("reload_test::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x`, once another thread allows it."""
    _ENTERED.set()
    assert _LEAVE.wait(60)
    return x.clone()


@wait.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Waiting(torch.nn.Module):
    """Waits in the middle of a call, and then uses a weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((64,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return wait(x) * self.weight


def compile_package(
    module: torch.nn.Module, x: torch.Tensor, path: pathlib.Path, **options: Any
) -> str:
    rows = torch.export.Dim("rows", min=1, max=64)
    program = torch.export.export(module.eval(), (x,), dynamic_shapes=({0: rows},))
    return inductor_ext.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=options
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plain, str]:
    """The model of the fixture `plain` with other weights, and its package."""
    torch.manual_seed(7)
    module = Plain()
    path = tmp_path_factory.mktemp("other") / "other.pt2"
    return module, compile_package(module, X, path)


def test_calls_use_the_new_package(plain: Plain, path: str, other: tuple[Plain, str]) -> None:
    model = inductor_ext.load(path)
    check(model, plain)
    model.update_constants({"scale": torch.zeros(16)})
    old = weakref.ref(model._instance)
    module, new = other
    assert model.reload(new) is None
    check(model, module)
    assert model.path == new
    assert model.manifest is not None
    assert model.signature is not None
    gc.collect()
    assert old() is None
    # Constants have the values of the package, and can be updated.
    model.reload(path)
    check(model, plain)
    model.load_state_dict(module.state_dict())
    check(model, module)


def test_without_a_path_the_file_is_read_again(
    plain: Plain, path: str, other: tuple[Plain, str], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "model.pt2"
    shutil.copy(path, file)
    model = inductor_ext.load(file)
    shutil.copy(other[1], tmp_path / "new.pt2")
    os.replace(tmp_path / "new.pt2", file)
    check(model, plain)
    model.reload()
    check(model, other[0])


def test_a_call_ends_with_the_model_that_it_began_with(tmp_path: pathlib.Path) -> None:
    x = torch.randn(3, 64)
    paths = [compile_package(Waiting(v), x, tmp_path / f"{v}.pt2") for v in (2.0, 3.0)]
    model = inductor_ext.load(paths[0])
    old = weakref.ref(model._instance)
    results: list[torch.Tensor] = []
    _ENTERED.clear()
    _LEAVE.clear()
    thread = threading.Thread(target=lambda: results.append(model(x)))
    thread.start()
    try:
        assert _ENTERED.wait(60)
        model.reload(paths[1])
        assert old() is not None
    finally:
        _LEAVE.set()
        thread.join()
    assert torch.equal(results[0], x * 2)
    assert torch.equal(model(x), x * 3)
    gc.collect()
    assert old() is None


def test_tensors_of_constants_keep_the_old_model(
    plain: Plain, path: str, other: tuple[Plain, str]
) -> None:
    model = inductor_ext.load(path)
    constants = model.constants()
    model.reload(other[1])
    gc.collect()
    assert torch.equal(constants["scale"], plain.scale)
    assert torch.equal(model.constants()["scale"], other[0].scale)


@contextlib.contextmanager
def calling(model: Any, answers: list[torch.Tensor], threads: int) -> Iterator[list[str]]:
    """Call the model in threads; collect what is wrong, and the number of calls as text."""
    wrong: list[str] = []
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            try:
                result = model(X)
                if not any(torch.allclose(result, answer) for answer in answers):
                    wrong.append("another result")
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    pool = [threading.Thread(target=call) for _ in range(threads)]
    for thread in pool:
        thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        for thread in pool:
            thread.join()


def test_no_call_fails_while_packages_change(
    plain: Plain, path: str, other: tuple[Plain, str]
) -> None:
    module, new = other
    model = inductor_ext.load(path, num_runners=2)
    with torch.no_grad():
        answers = [plain(X), module(X)]
    with calling(model, answers, threads=4) as wrong:
        for number in range(20):
            model.reload((new, path)[number % 2])
            model.update_constants(dict(plain.state_dict()), inactive=True)
            model.swap_constants()
    assert wrong == []
    check(model, plain)


class Wider(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x


class Single(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Renamed(torch.nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y + 1


class Whole(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("module", "x", "why"),
    [
        (Wider(), X, "its results have another structure"),
        (
            Single(),
            X.double(),
            (
                "its input 'x' is a float64 tensor of 2 dimensions on cpu, "
                "and the loaded model's is a float32 tensor of 2 dimensions on cpu"
            ),
        ),
        (Renamed(), X, "its input 'y' is called input 'x' in the loaded model"),
        (
            Whole(),
            X,
            (
                "its result is a float32 tensor of 0 dimensions, "
                "and the loaded model's is a float32 tensor of 2 dimensions"
            ),
        ),
    ],
    ids=["structure", "dtype", "name", "dimensions"],
)
def test_another_interface_is_refused(
    plain: Plain,
    path: str,
    tmp_path: pathlib.Path,
    module: torch.nn.Module,
    x: torch.Tensor,
    why: str,
) -> None:
    new = compile_package(module, x, tmp_path / "new.pt2")
    model = inductor_ext.load(path)
    with pytest.raises(exc.IncompatibleReloadError) as error:
        model.reload(new)
    assert error.value.fields["why"] == why
    assert model.path == path
    check(model, plain)


@pytest.mark.usefixtures("stock_loads")
def test_packages_of_inductor(
    plain: Plain, path: str, stock_path: str, tmp_path: pathlib.Path
) -> None:
    model = inductor_ext.load(stock_path)
    copy = tmp_path / "copy.pt2"
    shutil.copy(stock_path, copy)
    model.reload(copy)
    assert model.path == str(copy)
    check(model, plain, (4,))
    with pytest.raises(exc.IncompatibleReloadError, match=r"one of the two packages was compiled"):
        model.reload(path)
    check(model, plain, (4,))


def test_a_package_that_cannot_be_loaded_changes_nothing(
    plain: Plain, path: str, tmp_path: pathlib.Path
) -> None:
    model = inductor_ext.load(path)
    (tmp_path / "damaged.pt2").write_bytes(pathlib.Path(path).read_bytes()[:-1000])
    for new in (tmp_path / "damaged.pt2", tmp_path / "none.pt2"):
        with pytest.raises((exc.BadPackageError, exc.PackageNotFoundError)):
            model.reload(new)
        check(model, plain)


def test_a_buffer_has_no_path(plain: Plain, path: str, other: tuple[Plain, str]) -> None:
    data = pathlib.Path(path).read_bytes()
    model = inductor_ext.load(io.BytesIO(data))
    with pytest.raises(exc.BadArgumentError, match="path"):
        model.reload()
    model.reload(io.BytesIO(pathlib.Path(other[1]).read_bytes()))
    check(model, other[0])
    model.reload(path)
    model.reload()
    check(model, plain)


def test_the_arguments_of_the_first_load_are_kept(
    plain: Plain, tmp_path: pathlib.Path, other: tuple[Plain, str]
) -> None:
    module = other[0]
    old = compile_package(plain, X, tmp_path / "old.pt2", aot_weights_file=str(tmp_path / "first"))
    new = compile_package(
        module, X, tmp_path / "new.pt2", aot_weights_file=str(tmp_path / "second")
    )
    model = inductor_ext.load(old, weights=tmp_path / "first")
    with pytest.raises(exc.ArtifactLoadError, match="has other weights"):
        model.reload(new)
    model.reload(new, weights=tmp_path / "second")
    check(model, module)
    model.reload(old)
    check(model, plain)
