"""Calls for which an artifact was not compiled: an error that names the input, not wrong numbers.

Each of them is one that stock's artifacts run: with wrong numbers, beyond a tensor's memory or, for
numbers that vary, not at all.
"""

from __future__ import annotations

import copy
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.package
from torch.export import Dim

import inductor_ext
from inductor_ext import exc

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Strict(torch.nn.Module):
    """Takes one input of each kind."""

    def forward(
        self,
        fixed: torch.Tensor,
        rows: torch.Tensor,
        batch: dict[str, list[torch.Tensor]],
        n: int,
        *,
        gated: torch.Tensor,
        k: int = 3,
        mode: str = "sum",
    ) -> dict[str, Any]:
        first, second = batch["ids"]
        if rows.shape[0] % 2:
            raise ValueError("an odd number of rows")
        return {
            "fixed": fixed * k,
            "pairs": rows.view(rows.shape[0] // 2, 2, -1).sum(1),
            "ids": (first.sum() if mode == "sum" else first) + second,
            "first": rows[:n] * n,
            "gated": torch.nn.functional.glu(gated),
            "n": n + 1,
        }


def arguments() -> Arguments:
    """What the model is exported with."""
    generator = torch.Generator().manual_seed(0)
    random = functools.partial(torch.randn, generator=generator)
    ids = [torch.arange(5), torch.arange(11)]
    return (random(8, 4), random(6, 3), {"ids": ids}, 4), {"gated": random(2, 10)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    args, kwargs = arguments()
    ids = Dim("ids", min=2, max=40)
    shapes = {
        "fixed": None,
        "rows": {0: Dim.DYNAMIC},
        "batch": {"ids": [{0: ids}, {0: 2 * ids + 1}]},
        "n": Dim.DYNAMIC,
        "gated": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC},
    }
    program = torch.export.export(Strict(), args, kwargs, dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("calls") / "strict.pt2"
    return str(inductor_ext.aoti_compile_and_package(program, package_path=path))


@pytest.fixture(scope="module")
def loaded(package: str) -> Callable[..., Any]:
    return inductor_ext.load(package)


def changed(change: Callable[[list[Any], dict[str, Any]], object]) -> Arguments:
    args, kwargs = copy.deepcopy(arguments())
    values = list(args)
    change(values, kwargs)
    return tuple(values), kwargs


def put(place: int, value: Any) -> Arguments:
    """The right call with another positional argument."""
    return changed(lambda args, kwargs: args.__setitem__(place, value))


RIGHT: dict[str, Arguments] = {
    "the example": arguments(),
    "another number of rows": put(1, torch.ones(8, 3)),
    "another number": put(3, 2),
    "all rows": put(3, 6),
    "other ids": put(2, {"ids": [torch.arange(7), torch.arange(15)]}),
    "the constant": changed(lambda args, kwargs: kwargs.update(k=3, mode="sum")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_call_gives_eager_s_result(loaded: Callable[..., Any], name: str) -> None:
    args, kwargs = RIGHT[name]
    # export keeps those arguments out of the call that were left at their defaults.
    given = {key: value for key, value in kwargs.items() if key == "gated"}
    torch.testing.assert_close(loaded(*args, **given), Strict()(*args, **kwargs))


WRONG: dict[str, tuple[Arguments, str]] = {
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
    "no multiple": (
        put(1, torch.ones(7, 3)),
        "input 'rows': dimension 0 is 7, and it has to be a multiple of 2",
    ),
    "a list": (put(0, [1.0] * 8), "input 'fixed' is of type list"),
    "sizes that do not belong together": (
        put(2, {"ids": [torch.arange(5), torch.arange(10)]}),
        (
            "input 'batch['ids'][1]': dimension 0 is 10, and it has to be 2*batch['ids'][0].size(0) "
            "+ 1, which is 11"
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


def test_the_artifact_itself_refuses_it(package: str, capfd: pytest.CaptureFixture[str]) -> None:
    runner = torch._inductor.aoti_load_package(package)
    args, kwargs = arguments()
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
