"""Both sets of constants: what an update of the inactive one starts from, and what a swap does."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import exc
from test.support import aot_util
from test.support.aot_util import Artifact
from test.support.constant_histories import Folded, History, PythonSubject, RunnerSubject, State

X = torch.linspace(-1, 1, 8).reshape(2, 4)
ONE, TWO, THREE = (torch.full((16,), value) for value in (1.0, 2.0, 3.0))


@pytest.fixture(scope="module")
def state() -> Artifact:
    torch.manual_seed(0)
    return aot_util.compile_model(State(), (X,), always_keep_tensor_constants=True)


@pytest.fixture(scope="module")
def folded() -> Artifact:
    torch.manual_seed(0)
    return aot_util.compile_model(
        Folded(),
        (X,),
        aot_inductor__use_runtime_constant_folding=True,
        always_keep_tensor_constants=True,
    )


@pytest.mark.parametrize("way", ["python", "runner"])
@pytest.mark.parametrize(
    ("name", "manageable", "exchangeable"),
    [("state", ["a", "b", "c"], ("b", "c")), ("folded", ["kept"], ("bias", "kept"))],
)
def test_histories(
    way: str,
    name: str,
    manageable: Sequence[str],
    exchangeable: tuple[str, str],
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
) -> None:
    artifact = request.getfixturevalue(name)
    for seed in range(25):
        subject = (
            PythonSubject(artifact)
            if way == "python"
            else RunnerSubject(artifact, tmp_path / str(seed))
        )
        History(
            subject,
            artifact.eager,
            X,
            manageable=manageable,
            exchangeable=exchangeable,
            seed=seed,
        ).run(10)


@pytest.fixture
def model(state: Artifact) -> Any:
    return inductor_ext.load(state.path)


def values(model: Any, *names: str, inactive: bool = False) -> list[float]:
    """The first element of constants."""
    constants = model.constants(inactive=inactive)
    return [constants[name].flatten()[0].item() for name in names]


def test_partial_swaps_add_up(model: Any) -> None:
    for update in ({"b": ONE}, {"c": TWO}):
        model.update_constants(update, inactive=True)
        model.fold_constants(inactive=True)
        model.swap_constants()
    assert values(model, "b", "c") == [1, 2]


def test_updates_of_a_pending_set_add_up_and_are_discarded_by_free(model: Any) -> None:
    (before,) = values(model, "b")
    model.update_constants({"b": ONE}, inactive=True)
    model.update_constants({"c": TWO}, inactive=True)
    model.update_constants({}, inactive=True)
    assert values(model, "b", "c", inactive=True) == [1, 2]
    model.free_inactive_constants()
    assert model.constants(inactive=True) == {}
    model.update_constants({"c": THREE}, inactive=True)
    model.swap_constants()
    assert values(model, "b", "c") == [before, 3]


def test_a_second_swap_restores_the_previous_values(model: Any) -> None:
    (before,) = values(model, "b")
    model.swap_constants()
    assert values(model, "b") == [before]
    model.update_constants({"b": ONE}, inactive=True)
    model.swap_constants()
    model.swap_constants()
    assert values(model, "b") == [before]
    model.swap_constants()
    assert values(model, "b") == [1]


def test_a_pending_set_has_the_active_values_of_its_first_update(model: Any) -> None:
    (before,) = values(model, "b")
    model(X)
    model.update_constants({"c": ONE}, inactive=True)
    model.update_constants({"b": TWO})
    model(X)
    model.update_constants({"c": THREE}, inactive=True)
    assert values(model, "b", "calls") == [2, 2]
    model.swap_constants()
    assert values(model, "b", "c", "calls") == [before, 3, 1]


def test_a_mutated_user_managed_buffer_is_that_of_both_sets(model: Any) -> None:
    calls = torch.zeros(16)
    model.load_constants({"calls": calls}, check_full_update=False, user_managed=True)
    model.update_constants({"c": ONE}, inactive=True)
    model(X)
    model.swap_constants()
    model(X)
    assert calls.tolist() == [2] * 16
    model.update_constants({"calls": THREE})
    model(X)
    assert values(model, "calls") == [4]
    assert calls.tolist() == [2] * 16


def test_a_failed_update_leaves_a_previous_set_as_it_is(model: Any) -> None:
    (before,) = values(model, "b")
    model.update_constants({"b": ONE}, inactive=True)
    model.swap_constants()
    no_memory = torch.empty(16)
    no_memory.untyped_storage().resize_(0)
    for wrong in (torch.ones(3), ONE.double(), ONE.to_sparse(), no_memory):
        with pytest.raises(exc.ConstantMismatchError):
            model.update_constants({"c": TWO, "b": wrong}, inactive=True)

    def update(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(exc.ConstantMismatchError, match="has no memory"):
            model.update_constants({"c": TWO, "b": x}, inactive=True)
        return x

    torch.vmap(update)(torch.ones(2, 16))
    model.swap_constants()
    assert values(model, "b") == [before]


def test_new_values_may_be_the_models_own_tensors(model: Any) -> None:
    one, other = values(model, "b", "c")
    live = model.constants()
    model.update_constants({"b": live["c"], "c": live["b"]})
    assert values(model, "b", "c") == [other, one]
    model.update_constants({"b": ONE}, inactive=True)
    model.swap_constants()
    previous = model.constants(inactive=True)
    model.update_constants({"c": previous["b"], "b": previous["c"]}, inactive=True)
    model.swap_constants()
    assert values(model, "b", "c") == [one, other]
