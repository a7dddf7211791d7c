"""Signatures as JSON: what is written, what comes back, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from inductor_ext import exc
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantInput,
    ConstantOutput,
    Range,
    Signature,
    SymbolInput,
    SymbolOutput,
    TensorInput,
    TensorOutput,
)

EXAMPLE = Signature(
    inputs=(
        TensorInput("x", "args[0]", "float32", ("s0", 10), ("10", 1), "cpu"),
        ConstantInput("n", "kwargs['n']", 3),
        ConstantInput("limit", "kwargs['limit']", -math.inf),
        SymbolInput("k", "args[1]", "int", "s1"),
    ),
    outputs=(
        TensorOutput("[0]", "float32", ("s0", 4), "cpu"),
        ConstantOutput("[1]", None),
        ConstantOutput("[2]", "text"),
        SymbolOutput("[3]", "int", "2*s0"),
    ),
    symbols={"s0": Range(2, 64), "s1": Range()},
    constraints=("s0 % 4 == 0",),
    unchecked=("Weird(s0)",),
    in_spec="in",
    out_spec="out",
)


def test_a_signature_survives_json() -> None:
    text = json.dumps(EXAMPLE.to_json(), allow_nan=False)
    assert Signature.from_json(json.loads(text)) == EXAMPLE


def test_the_json_is_what_tools_rely_on() -> None:
    written = EXAMPLE.to_json()
    assert written["inputs"][0] == {
        "kind": "tensor",
        "name": "x",
        "path": "args[0]",
        "dtype": "float32",
        "shape": ["s0", 10],
        "stride": ["10", 1],
        "device": "cpu",
    }
    assert [item["kind"] for item in written["inputs"]] == [
        "tensor",
        "constant",
        "constant",
        "symbol",
    ]
    assert [item["kind"] for item in written["outputs"]] == [
        "tensor",
        "none",
        "constant",
        "symbol",
    ]
    assert written["symbols"] == {
        "s0": {"min": 2, "max": 64},
        "s1": {"min": None, "max": None},
    }


@pytest.mark.parametrize("value", [1.5, -math.inf, math.nan, True, 7, "text", None])
def test_constants_keep_value_and_type(value: Any) -> None:
    signature = Signature((ConstantInput("c", "args[0]", value),), (ConstantOutput("", value),))
    text = json.dumps(signature.to_json(), allow_nan=False)
    back = Signature.from_json(json.loads(text))
    for inp in (*back.inputs, *back.outputs):
        assert isinstance(inp, (ConstantInput, ConstantOutput))
        assert type(inp.value) is type(value)
        assert repr(inp.value) == repr(value)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda s: [], "signature is []"),
        (lambda s: s.pop("inputs"), "expected an object with 'inputs'"),
        (lambda s: s.update(inputs="x"), "signature.inputs is 'x', expected a list"),
        (lambda s: s["inputs"][0].update(kind="tensors"), "signature.inputs[0] is {"),
        (lambda s: s["inputs"][0].update(dtype=3), "signature.inputs[0].dtype is 3"),
        (lambda s: s["inputs"][0].update(shape=[-1, 2]), "signature.inputs[0].shape[0] is -1"),
        (lambda s: s["inputs"][0].update(shape=[True, 2]), "signature.inputs[0].shape[0] is True"),
        (lambda s: s["inputs"][0].update(shape=[1]), "as many strides as sizes"),
        (lambda s: s["inputs"][1].update(value=[]), "signature.inputs[1].value is []"),
        (lambda s: s["inputs"][2].update(value={"float": "1"}), "inputs[2].value is {'float'"),
        (lambda s: s["inputs"][3].update(type="complex"), "signature.inputs[3].type is 'complex'"),
        (lambda s: s["outputs"][0].update(kind="x"), "signature.outputs[0] is {"),
        (lambda s: s["symbols"]["s0"].update(min="2"), "signature.symbols['s0'].min is '2'"),
        (lambda s: s.update(symbols=[]), "signature.symbols is []"),
        (lambda s: s.update(constraints=[3]), "signature.constraints[0] is 3"),
        (lambda s: s.update(in_spec=None), "signature.in_spec is None"),
    ],
)
def test_invalid_json_is_rejected_with_its_place(change: Callable[[Any], Any], where: str) -> None:
    written = copy.deepcopy(EXAMPLE.to_json())
    changed = change(written)
    with pytest.raises(exc.BadSignatureError) as raised:
        Signature.from_json([] if changed == [] else written)
    assert where in str(raised.value)
