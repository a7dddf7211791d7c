"""Calls for which an artifact was not compiled: an error that names the input, not wrong numbers.

Each of them is one that stock's artifacts run: with wrong numbers, beyond a tensor's memory or, for
numbers that vary, not at all.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.package
from torch._subclasses import FakeTensorMode

import inductor_ext
from inductor_ext import exc
from test.fuzz import aot_inputs as aot_input_fuzz
from test.fuzz.aot_inputs import Call, strict_call


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
    """The right call with another positional argument."""
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
def test_a_right_call_gives_eager_s_result(
    compiled: tuple[torch.nn.Module, Any], name: str
) -> None:
    model, loaded = compiled
    args, kwargs = RIGHT[name]
    # export keeps those arguments out of the call that were left at their defaults.
    given = {key: value for key, value in kwargs.items() if key == "gated"}
    torch.testing.assert_close(loaded(*args, **given), model(*args, **kwargs))


WRONG: dict[str, tuple[Call, str]] = {
    "more rows than the static size": (
        put(0, torch.ones(16, 4)),
        "input 'fixed': dimension 0 is 16, and the artifact takes 8",
    ),
    "fewer rows than the static size": (
        put(0, torch.ones(1, 4)),
        "input 'fixed': dimension 0 is 1, and the artifact takes 8",
    ),
    "double": (
        put(0, torch.ones(8, 4, dtype=torch.float64)),
        "input 'fixed' has dtype float64, and the artifact takes float32",
    ),
    "bytes": (
        put(0, torch.ones(8, 4, dtype=torch.int8)),
        "input 'fixed' has dtype int8, and the artifact takes float32",
    ),
    "one dimension less": (
        put(0, torch.ones(32)),
        "input 'fixed' has shape (32,), of 1 dimension, and the artifact takes (8, 4), of 2",
    ),
    "transposed": (
        put(0, torch.ones(4, 8).t()),
        "input 'fixed' has strides (1, 8), and the compiled code needs (4, 1)",
    ),
    "fake": (
        put(0, FakeTensorMode().from_tensor(torch.ones(8, 4))),
        "input 'fixed' is a tensor that has no memory",
    ),
    "no multiple": (
        put(1, torch.ones(7, 3)),
        "input 'rows': dimension 0 is 7, and it has to be a multiple of 2",
    ),
    "a list": (put(0, [1.0] * 8), "input 'fixed' is of type list"),
    "sizes that do not belong together": (
        put(2, {"ids": [torch.arange(5), torch.arange(10)]}),
        (
            "input 'batch['ids'][1]': dimension 0 is 10, and it has to be "
            "2*batch['ids'][0].size(0) + 1, which is 11"
        ),
    ),
    "out of range": (
        put(2, {"ids": [torch.arange(41), torch.arange(83)]}),
        "input 'batch['ids'][0]': dimension 0 is 41, and the artifact takes 2 to 40",
    ),
    "another structure": (put(2, {"ids": (torch.arange(5), torch.arange(11))}), "'batch['ids']'"),
    "more rows than there are": (
        put(3, 7),
        (
            "input 'n': the artifact takes inputs with n <= rows.size(0), and n is 7, "
            "rows.size(0) is 6"
        ),
    ),
    "more than a number holds": (
        put(3, 1 << 63),
        "input 'n' is 9223372036854775808, which does not fit 64 bits",
    ),
    "a number that is a tensor": (put(3, torch.tensor(4)), "input 'n' is a tensor"),
    "a size that the compile has specialised": (
        changed(lambda args, kwargs: kwargs.update(gated=torch.ones(2, 16))),
        "input 'gated': dimension 1 is 16, and the artifact takes 10",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_by_the_input_s_name(loaded: Callable[..., Any], name: str) -> None:
    (args, kwargs), message = WRONG[name]
    with pytest.raises(exc.InputMismatchError) as raised:
        loaded(*args, **kwargs)
    assert message in str(raised.value)


def test_numbers_do_not_depend_on_the_default_device(loaded: Callable[..., Any]) -> None:
    args, kwargs = strict_call()
    expected = loaded(*args, **kwargs)
    with torch.device("meta"):
        torch.testing.assert_close(loaded(*args, **kwargs), expected)
    with FakeTensorMode(), pytest.raises(exc.InputMismatchError, match="'n' is a tensor that has"):
        loaded(*args, **kwargs)


def test_tensors_that_a_transformation_wraps_are_refused(loaded: Callable[..., Any]) -> None:
    args, kwargs = strict_call()

    def call(fixed: torch.Tensor) -> Any:
        return loaded(fixed, *args[1:], **kwargs)

    with pytest.raises(exc.InputMismatchError, match="is a tensor that has no"):
        torch.func.functionalize(call)(args[0])
    with pytest.raises(exc.InputMismatchError, match="is a tensor that has no"):
        torch.func.vmap(call)(args[0].expand(2, 8, 4))


def test_the_artifact_itself_refuses_it(loaded: Any, capfd: pytest.CaptureFixture[str]) -> None:
    runner = torch._inductor.aoti_load_package(loaded.path)
    args, kwargs = strict_call()
    flat = [args[0], args[1], *args[2]["ids"], torch.tensor(4), kwargs["gated"]]
    results = runner.loader.run(flat)
    torch.testing.assert_close(results[0], args[0] * 3)
    for wrong, message in (
        ([torch.ones(16, 4), *flat[1:]], "'fixed': dimension 0 is 16, and the artifact takes 8"),
        (flat[1:], "takes 6 tensors"),
    ):
        # torch 2.11's runner has no message of its own; the artifact writes it to stderr.
        with pytest.raises(RuntimeError) as raised:
            runner.loader.run(wrong)
        assert message in str(raised.value) + capfd.readouterr().err


def test_checks_can_be_left_out(tmp_path: pathlib.Path) -> None:
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


def test_random_calls_are_right_or_refused(compiled: tuple[torch.nn.Module, Any]) -> None:
    tally = aot_input_fuzz.run(*compiled, calls=500, seed=0)
    assert tally.failures == []
    assert tally.right > 100
    assert tally.wrong > 100


def test_random_calls_with_other_strides_are_right_or_refused(tmp_path: pathlib.Path) -> None:
    compiled = aot_input_fuzz.EXAMPLES["strided"].compile(tmp_path)
    tally = aot_input_fuzz.run(*compiled, calls=500, seed=0)
    assert tally.failures == []
    assert tally.right > 100
    assert tally.wrong > 100
