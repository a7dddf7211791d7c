"""Loaded models: calls from threads, metadata, and errors while running."""

from __future__ import annotations

import concurrent.futures
import copy
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from test.support.loader_models import Plain, check, nested_inputs


def test_a_runtime_failure_is_not_an_input_mismatch(
    path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = inductor_ext.load(path, "nested")
    args, kwargs = nested_inputs()
    args[0]["ids"][0] = torch.tensor([1, 2, 1000])
    with pytest.raises(exc.ArtifactRunError, match="out of bounds") as caught:
        model(*args, **kwargs)
    assert not isinstance(caught.value, exc.InputMismatchError)
    assert capfd.readouterr().err == ""
    good_args, good_kwargs = nested_inputs()
    assert model(*good_args, **good_kwargs)["rows"] == 3


def test_threads_share_a_model(path: str, plain: Plain) -> None:
    model = inductor_ext.load(path, num_runners=2)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x = torch.randn(2 + seed, 8, generator=generator)
            torch.testing.assert_close(model(x), plain(x))
            with pytest.raises(exc.InputMismatchError, match=f"is {8 + seed}"):
                model(torch.ones(2, 8 + seed))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))


CALLBACK = """
import concurrent.futures, sys, threading
import torch
import inductor_ext

entered, go_on = threading.Event(), threading.Event()

@torch.library.custom_op("test_aot_loader::wait", mutates_args=())
def wait(x: torch.Tensor) -> torch.Tensor:
    entered.set()
    go_on.wait()
    return x + 1

@wait.register_fake
def _(x):
    return torch.empty_like(x)

class Waits(torch.nn.Module):
    def forward(self, x):
        return wait(x) * 2

x = torch.ones(4)
program = torch.export.export(Waits(), (x,))
inductor_ext.aoti_compile_and_package(program, package_path=sys.argv[1])
for runners in (1, 2):
    model = inductor_ext.load(sys.argv[1], num_runners=runners)
    entered.clear(), go_on.clear()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(model, x)
        entered.wait()
        others = [pool.submit(model, x + at) for at in (1, 2)]
        go_on.set()
        for at, each in enumerate([first, *others]):
            assert torch.equal(each.result(), (x + at + 1) * 2)
"""


def test_a_model_may_call_python_while_threads_wait(
    tmp_path: pathlib.Path,
) -> None:
    """Waiting for a runner while holding the GIL would deadlock."""
    run = subprocess.run(
        [sys.executable, "-c", CALLBACK, str(tmp_path / "waits.pt2")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_single_threaded_results_are_the_same(path: str, plain: Plain) -> None:
    check(inductor_ext.load(path, run_single_threaded=True), plain)


def test_gradients_are_not_recorded(model: LoadedModel) -> None:
    assert not model(torch.ones(3, 8, requires_grad=True)).requires_grad


def test_signature_and_manifest(path: str, model: LoadedModel) -> None:
    assert model.signature is not None
    assert [inp.name for inp in model.signature.inputs] == ["x"]
    assert model.manifest is not None
    assert set(model.manifest.models) == {"model", "nested"}
    assert model.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"
    assert repr(model) == f"<Model 'model' of {path}>"
    with pytest.raises(exc.ModelNotFoundError, match="no model 'other'; it has 'model', 'nested'"):
        inductor_ext.load(path, "other")


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_is_neither_copied_nor_pickled(
    model: LoadedModel, duplicate: Callable[[object], object]
) -> None:
    """A copy would share the weights, so that an update changes both."""
    holder = torch.nn.Linear(2, 2)
    holder.compiled = model  # type: ignore[assignment]
    for item in (model, {"net": [model]}, holder):
        if duplicate is copy.copy and item is not model:
            assert duplicate(holder).compiled is model  # type: ignore[attr-defined]
            continue
        with pytest.raises(TypeError, match="cannot be copied or pickled") as caught:
            duplicate(item)
        assert isinstance(caught.value, exc.UncopyableModelError)
