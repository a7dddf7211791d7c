"""Constants of a loaded model: reading, updating and swapping them, and refused values."""

from __future__ import annotations

import copy
import gc
import pathlib
import re
from typing import Any

import pytest
import torch
import torch._inductor
from torch._subclasses import FakeTensorMode

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from test.support.loader_models import Plain, X, check


def test_constants_are_those_of_the_model(model: LoadedModel, plain: Plain) -> None:
    state = plain.state_dict()
    assert sorted(model.get_constant_fqns()) == sorted(state)
    live = model.constants()
    assert sorted(live) == sorted(state)
    for name, tensor in state.items():
        assert torch.equal(live[name], tensor)


def test_constants_outlive_the_model_and_are_its_memory(path: str, plain: Plain) -> None:
    model = inductor_ext.load(path)
    row = model.constants()["linear.weight"][3]
    before = model(X)
    row.zero_()
    assert not torch.equal(model(X), before)
    del model
    gc.collect()
    assert torch.equal(row, torch.zeros(8))
    row = inductor_ext.load(path).constants()["linear.weight"].t()[3]
    gc.collect()
    assert torch.equal(row, plain.linear.weight.t()[3])


def test_constants_are_updated_swapped_and_freed(path: str, plain: Plain) -> None:
    model, other = inductor_ext.load(path), copy.deepcopy(plain)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.mul_(2).add_(1)
    model.update_constants(other.state_dict(), inactive=True, partial=False)
    check(model, plain)
    model.fold_constants(inactive=True)
    model.swap_constants()
    check(model, other)
    model.swap_constants()
    check(model, plain)
    model.free_inactive_constants()
    check(model, plain)
    model.update_constants({"scale": other.scale})
    mixed = copy.deepcopy(plain)
    mixed.scale.copy_(other.scale)
    check(model, mixed)
    model.load_constants(other.state_dict(), check_full_update=True)
    check(model, other)


def test_an_update_does_not_reach_other_models_or_the_file(path: str, plain: Plain) -> None:
    before = pathlib.Path(path).read_bytes()
    one, other = inductor_ext.load(path), inductor_ext.load(path)
    one.update_constants({"scale": torch.zeros(16)})
    assert torch.equal(one(X), torch.zeros(4, 16))
    check(other, plain)
    assert pathlib.Path(path).read_bytes() == before


def test_user_managed_constants_are_used_in_place(model: LoadedModel) -> None:
    scale = torch.ones(16)
    model.load_constants({"scale": scale}, check_full_update=False, user_managed=True)
    first = model(X)
    scale.mul_(2)
    torch.testing.assert_close(model(X), first * 2)
    del scale  # the model keeps it
    torch.testing.assert_close(model(X), first * 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"bias": torch.ones(16)}, "it has no constant 'bias'"),
        ({"scale": torch.ones(15)}, "'scale'"),
        ({"scale": torch.ones(16, dtype=torch.float64)}, "float64"),
        ({"scale": 3}, "'scale' is of type int"),
        ({"scale": torch.ones(16).to_sparse()}, "'scale' has another layout"),
        ({"scale": FakeTensorMode().from_tensor(torch.ones(16))}, "'scale' is a fake tensor"),
    ],
)
def test_a_wrong_constant_is_named_and_nothing_changes(
    model: LoadedModel, plain: Plain, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(exc.ConstantMismatchError, match=re.escape(words)):
        model.update_constants({"linear.weight": torch.zeros(16, 8), **values})
    check(model, plain)


def test_user_managed_constants_are_what_their_memory_holds(model: LoadedModel) -> None:
    x = torch.randn(3, 8)
    scale = torch.full((16,), 2.0)
    model.load_constants({"scale": scale}, check_full_update=False, user_managed=True)
    expected = model(x)
    negative = torch._neg_view(torch.ones(16))
    with pytest.raises(exc.ConstantMismatchError, match="resolve_neg"):
        model.load_constants({"scale": negative}, check_full_update=False, user_managed=True)
    with pytest.raises(exc.ConstantMismatchError, match="another layout"):
        model.update_constants({"scale": torch.ones(16).to_sparse()})
    assert model.constants()["scale"].data_ptr() == scale.data_ptr()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    model.update_constants({"scale": negative})
    assert model.constants()["scale"].tolist() == [-1] * 16


def test_a_full_update_needs_all(model: LoadedModel, plain: Plain) -> None:
    with pytest.raises(exc.ConstantMismatchError):
        model.update_constants({"scale": torch.ones(16)}, partial=False)
    check(model, plain)
