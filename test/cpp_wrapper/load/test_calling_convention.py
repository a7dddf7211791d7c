"""Arguments and results of a call: a wrong call raises an error that names the input.

Compiled models of Inductor run each of these wrong calls: with wrong results, beyond a tensor's
memory or, for sizes that vary, not at all.
"""

from __future__ import annotations

import collections
import copy
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor
import torch._inductor.package
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from test.fuzz import aot_inputs as aot_input_fuzz
from test.fuzz.aot_inputs import Call, strict_call
from test.support.loader_models import Nested, Pair, Point, X, nested_inputs


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Any]:
    return aot_input_fuzz.EXAMPLES["strict"].compile(tmp_path_factory.mktemp("calls"))


@pytest.fixture(scope="module")
def loaded(compiled: tuple[torch.nn.Module, Any]) -> Any:
    return compiled[1]


def changed(change: Callable[[list[Any], dict[str, Any]], object]) -> Call:
    args, kwargs = copy.deepcopy(strict_call())
    values = list(args)
    change(values, kwargs)
    return tuple(values), kwargs


def put(place: int, value: Any) -> Call:
    """The valid call with another positional argument."""
    return changed(lambda args, kwargs: args.__setitem__(place, value))


RIGHT: dict[str, Call] = {
    "the example": strict_call(),
    "another number of rows": put(1, torch.ones(8, 3)),
    "another number": put(3, 2),
    "all rows": put(3, 6),
    "other ids": put(2, {"ids": [torch.arange(7), torch.arange(15)]}),
    "the constant": changed(lambda args, kwargs: kwargs.update(k=3, mode="sum")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_valid_call_returns_the_result_of_eager(
    compiled: tuple[torch.nn.Module, Any], name: str
) -> None:
    model, loaded = compiled
    args, kwargs = RIGHT[name]
    # torch.export drops arguments that were left at their defaults.
    passed = {key: value for key, value in kwargs.items() if key == "gated"}
    torch.testing.assert_close(loaded(*args, **passed), model(*args, **kwargs))


WRONG: dict[str, tuple[Call, str]] = {
    "more rows than the static size": (
        put(0, torch.ones(16, 4)),
        "input 'fixed': dimension 0 is 16, but the model takes 8",
    ),
    "fewer rows than the static size": (
        put(0, torch.ones(1, 4)),
        "input 'fixed': dimension 0 is 1, but the model takes 8",
    ),
    "double": (
        put(0, torch.ones(8, 4, dtype=torch.float64)),
        "input 'fixed' has dtype float64, but the model takes float32",
    ),
    "bytes": (
        put(0, torch.ones(8, 4, dtype=torch.int8)),
        "input 'fixed' has dtype int8, but the model takes float32",
    ),
    "one dimension less": (
        put(0, torch.ones(32)),
        "input 'fixed' has shape (32,), of 1 dimension, but the model takes (8, 4), of 2",
    ),
    "transposed": (
        put(0, torch.ones(4, 8).t()),
        "input 'fixed' has strides (1, 8), but the model takes (4, 1)",
    ),
    "fake": (
        put(0, FakeTensorMode().from_tensor(torch.ones(8, 4))),
        "input 'fixed' is a tensor without memory",
    ),
    "no multiple": (
        put(1, torch.ones(7, 3)),
        "input 'rows': dimension 0 is 7, but it must be a multiple of 2",
    ),
    "a list": (put(0, [1.0] * 8), "input 'fixed' is of type list"),
    "sizes that do not belong together": (
        put(2, {"ids": [torch.arange(5), torch.arange(10)]}),
        (
            "input 'batch['ids'][1]': dimension 0 is 10, but it must be "
            "2*batch['ids'][0].size(0) + 1, which is 11"
        ),
    ),
    "out of range": (
        put(2, {"ids": [torch.arange(41), torch.arange(83)]}),
        "input 'batch['ids'][0]': dimension 0 is 41, but the model takes 2 to 40",
    ),
    "another structure": (put(2, {"ids": (torch.arange(5), torch.arange(11))}), "'batch['ids']'"),
    "more rows than there are": (
        put(3, 7),
        ("input 'n': the model requires n <= rows.size(0), but n is 7, rows.size(0) is 6"),
    ),
    "more than a number holds": (
        put(3, 1 << 63),
        "input 'n' is 9223372036854775808, which does not fit 64 bits",
    ),
    "a number that is a tensor": (put(3, torch.tensor(4)), "input 'n' is a tensor"),
    "a size that the compile has specialised": (
        changed(lambda args, kwargs: kwargs.update(gated=torch.ones(2, 16))),
        "input 'gated': dimension 1 is 16, but the model takes 10",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_call_is_rejected_by_input_name(loaded: Callable[..., Any], name: str) -> None:
    (args, kwargs), message = WRONG[name]
    with pytest.raises(exc.InputMismatchError) as raised:
        loaded(*args, **kwargs)
    assert message in str(raised.value)


def test_scalars_do_not_depend_on_the_default_device(loaded: Callable[..., Any]) -> None:
    args, kwargs = strict_call()
    expected = loaded(*args, **kwargs)
    with torch.device("meta"):
        torch.testing.assert_close(loaded(*args, **kwargs), expected)
    with FakeTensorMode(), pytest.raises(exc.InputMismatchError, match="'n' is a tensor without"):
        loaded(*args, **kwargs)


def test_tensors_wrapped_by_functorch_are_rejected(loaded: Callable[..., Any]) -> None:
    args, kwargs = strict_call()

    def call(fixed: torch.Tensor) -> Any:
        return loaded(fixed, *args[1:], **kwargs)

    with pytest.raises(exc.InputMismatchError, match="is a tensor without memory"):
        torch.func.functionalize(call)(args[0])
    with pytest.raises(exc.InputMismatchError, match="is a tensor without memory"):
        torch.func.vmap(call)(args[0].expand(2, 8, 4))


def test_the_artifact_itself_rejects_it(loaded: Any, capfd: pytest.CaptureFixture[str]) -> None:
    runner = torch._inductor.aoti_load_package(loaded.path)
    args, kwargs = strict_call()
    flat = [args[0], args[1], *args[2]["ids"], torch.tensor(4), kwargs["gated"]]
    results = runner.loader.run(flat)
    torch.testing.assert_close(results[0], args[0] * 3)
    for wrong, message in (
        ([torch.ones(16, 4), *flat[1:]], "'fixed': dimension 0 is 16, but the model takes 8"),
        (flat[1:], "takes 6 tensors"),
    ):
        # torch 2.11's runner has no message; the artifact writes it to stderr.
        with pytest.raises(RuntimeError) as raised:
            runner.loader.run(wrong)
        assert message in str(raised.value) + capfd.readouterr().err


def test_checks_can_be_disabled(tmp_path: pathlib.Path) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    program = torch.export.export(Double(), (torch.ones(8),))
    path = inductor_ext.aoti_compile_and_package(
        program,
        package_path=tmp_path / "unchecked.pt2",
        inductor_configs={"aot_check_inputs": False},
    )
    loaded = inductor_ext.load(path)
    assert loaded(torch.ones(16)).shape == (8,)


def test_random_calls_are_correct_or_rejected(compiled: tuple[torch.nn.Module, Any]) -> None:
    tally = aot_input_fuzz.run(*compiled, calls=500, seed=0)
    assert tally.failures == []
    assert tally.right > 100
    assert tally.wrong > 100


def test_random_strides_are_correct_or_rejected(tmp_path: pathlib.Path) -> None:
    compiled = aot_input_fuzz.EXAMPLES["strided"].compile(tmp_path)
    tally = aot_input_fuzz.run(*compiled, calls=500, seed=0)
    assert tally.failures == []
    assert tally.right > 100
    assert tally.wrong > 100


def test_nested_inputs_and_outputs_are_those_of_the_model(path: str, nested: Nested) -> None:
    model = inductor_ext.load(path, "nested")
    for rows in (3, 7):
        args, kwargs = nested_inputs(rows)
        ours, eager = model(*args, **kwargs), nested(*args, **kwargs)
        assert list(ours) == list(eager)
        assert type(ours["point"]) is Point
        flat, spec = pytree.tree_flatten(ours)
        expected, expected_spec = pytree.tree_flatten(eager)
        assert spec == expected_spec
        for one, other in zip(flat, expected, strict=True):
            assert type(one) is type(other)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_the_order_of_dict_keys_is_ignored(path: str, nested: Nested) -> None:
    model = inductor_ext.load(path, "nested")
    (batch, *args), kwargs = nested_inputs()
    eager = nested(batch, *args, **kwargs)
    backwards = dict(reversed(list(batch.items())))
    for reordered in (backwards, collections.OrderedDict(backwards)):
        ours = model(reordered, *args, **dict(reversed(list(kwargs.items()))))
        torch.testing.assert_close(ours["total"], eager["total"])
        torch.testing.assert_close(ours["rest"], eager["rest"])


def test_positional_arguments_may_be_passed_by_keyword(
    model: LoadedModel, path: str, nested: Nested
) -> None:
    assert torch.equal(model(x=X), model(X))
    args, kwargs = nested_inputs()
    expected = nested(*args, **kwargs)["total"]
    several = inductor_ext.load(path, "nested")
    names = list(inspect.signature(nested.forward).parameters)[: len(args)]
    for count in range(len(args)):
        named = dict(zip(names[count:], args[count:], strict=True))
        for passed in ({**kwargs, **named}, {**dict(reversed(named.items())), **kwargs}):
            torch.testing.assert_close(several(*args[:count], **passed)["total"], expected)
    with pytest.raises(exc.InputMismatchError, match=r"takes 5 positional .*\(batch, point"):
        several(args[0], pair=args[2], **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "takes 1 positional argument (x), but was called with 0"),
        ((X, X), {}, "takes 1 positional argument (x), but was called with 2"),
        ((), {"y": X}, "the model has no argument 'y': it takes x."),
        ((X,), {"x": X}, "takes no keyword arguments, but was called with x"),
        ((X,), {"y": X}, "the model has no argument 'y': it takes x."),
        ((3,), {}, "input 'x' is 3, but the model takes a tensor (float32, ["),
        ((None,), {}, "input 'x' is None"),
        (([X],), {}, "input 'x' is of type list"),
        ((X.numpy(),), {}, "input 'x' is of type ndarray"),
        ((X.double(),), {}, "float64"),
        ((X[:, :4],), {}, "dimension 1 is 4"),
        ((X[:1],), {}, "dimension 0 is 1"),
        ((X[0],), {}, "1"),
    ],
)
def test_a_wrong_call_names_the_input(
    model: LoadedModel, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(exc.InputMismatchError) as caught:
        model(*args, **kwargs)
    assert words in str(caught.value)
    assert torch.equal(model(X), model(X))


def _with(at: int | str, value: object) -> Callable[[list[Any], dict[str, Any]], None]:
    def change(args: list[Any], kwargs: dict[str, Any]) -> None:
        if isinstance(at, int):
            args[at] = value
        else:
            kwargs[at] = value

    return change


def _without_mask(args: list[Any], kwargs: dict[str, Any]) -> None:
    del args[0]["mask"]


def _deep(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[0]["ids"][1] = "four"


def _short(args: list[Any], kwargs: dict[str, Any]) -> None:
    args[0]["ids"].pop()


def _no_bias(args: list[Any], kwargs: dict[str, Any]) -> None:
    del kwargs["bias"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_with(3, 5), "input 'times' is 5, but the model was compiled for 3"),
        (_with(3, 3.0), "input 'times' is 3.0, but the model was compiled for 3"),
        (_with(3, True), "input 'times' is True"),
        (_with(3, torch.tensor(3)), "input 'times' is a tensor (int64, [])"),
        (_with(4, X), "input 'flag' is a tensor (float32, [4, 8]), but the model was compiled"),
        (_with("mode", "sub"), "input 'mode' is 'sub', but the model was compiled for 'add'"),
        (_with(0, [X]), "input 'batch' is of type list, but the model takes a dict with 'ids'"),
        (_with(1, (X, X)), "input 'point' is of type tuple, but the model takes a Point"),
        (_with(2, X), "input 'pair' is a tensor (float32, [4, 8]), but the model takes a Pair"),
        (_with(2, Pair(X, 3)), "input 'pair.right' is 3"),
        (_without_mask, "input 'batch' has the keys 'ids', but the model takes a dict with"),
        (_deep, "input 'batch['ids'][1]' is 'four', but the model takes a tensor (int64, [4])"),
        (_short, "input 'batch['ids']' is a list of 1, but the model takes a list of 2"),
        (_no_bias, "takes the keyword arguments bias, mode, but was called without bias"),
        (_with("more", 1), "the model has no argument 'more': it takes "),
    ],
)
def test_an_invalid_leaf_of_a_nested_call_is_named(
    path: str, change: Callable[[list[Any], dict[str, Any]], None], words: str
) -> None:
    args, kwargs = nested_inputs()
    changed_args = list(args)
    change(changed_args, kwargs)
    with pytest.raises(exc.InputMismatchError) as caught:
        inductor_ext.load(path, "nested")(*changed_args, **kwargs)
    assert words in str(caught.value)
