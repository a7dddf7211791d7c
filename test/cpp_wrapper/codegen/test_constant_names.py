"""Constants of packages: any name of a parameter, buffer, input or output, and short constants."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from inductor_ext.cpp_wrapper.codegen import constant_names
from test.support import aot_util

NAMES = (
    *("long", "class", "new", "int", "auto", "this", "bool", "and", "co_await", "None", "lambda"),
    *("inputs_info_", "buf0", "buf1", "stream", "kernels", "kernels_", "constants_", "inputs"),
    *("input_handles", "output_handles", "arg0_1", "proxy_executor", "cpp_fused_add_sin_0"),
    *(
        "NULL",
        "EOF",
        "INFINITY",
        "assert",
        "linux",
        "errno",
        "std",
        "torch",
        "at",
        "c10",
        "int64_t",
    ),
    *("AtenTensorHandle", "model_info", "inductor_ext", "s0", "u0", "var_0", "true", "nullptr"),
    *("naïve", 'quo"te', "a b", "0", "constant_0", "constant0", "attr_x", "attr_attr_x", "x"),
    *("a_b", "a_b_0", "a_class", "_Exit", "__FILE__", "é", "ü"),
)


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.nn.Parameter(torch.randn(4, 6))
        self.register_parameter("class", torch.nn.Parameter(torch.randn(4, 6)))


class Model(torch.nn.Module):
    """Parameters, buffers, inputs and outputs with awkward names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Inner()
        for index, name in enumerate(NAMES):
            if index % 2:
                self.register_buffer(name, torch.randn(4, 6))
            else:
                self.register_parameter(name, torch.nn.Parameter(torch.randn(4, 6)))

    def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        x = values["long"] + values["class"] * values["x y"]
        for index, name in enumerate(NAMES):
            x = x.sin() + (self._buffers if index % 2 else self._parameters)[name]
        x = x * self.a.b + self.a._parameters["class"]
        return {"long": x, "class": x.sum(0), "x y": x.sum(1)}


@pytest.mark.parametrize("folding", [False, True])
def test_any_name(folding: bool) -> None:
    model = Model().eval()
    args = ({name: torch.randn(4, 6) for name in ("long", "class", "x y")},)
    options = {"aot_inductor.use_runtime_constant_folding": folding}
    artifact = aot_util.compile_model(model, args, **options)
    artifact.check(*args)
    loaded = artifact.loaded
    state = {name: value + 1 for name, value in model.state_dict().items()}
    folded = {name for name in loaded.get_constant_fqns() if name.startswith("_FOLDED")}
    assert set(loaded.get_constant_fqns()) - folded == set(state)
    loaded.load_constants(state, check_full_update=True)
    expected = copy.deepcopy(model)
    expected.load_state_dict(state)
    aot_util.assert_same(aot_util.call(loaded, args), aot_util.call(expected, args))


def test_public_names_are_those_of_torch() -> None:
    assert constant_names.public_name("attr_fc_weight") == "fc_weight"
    assert constant_names.public_name("_frozen_param0") == "_frozen_param0"


class Short(torch.nn.Module):
    """Parameters and buffers that Inductor would inline."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 6))
        self.bias = torch.nn.Parameter(torch.randn(6))
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.one = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.tensor(3))
        self.register_buffer("index", torch.tensor([2, 0, 1]))
        self.register_buffer("zeros", torch.zeros(1, 1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        y = (x @ self.weight + self.bias) * self.scale * self.one + self.shift
        return y[:, self.index] + self.zeros, y + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


def test_short_constants_are_updated() -> None:
    model = Short().eval()
    args = (torch.randn(4, 6),)
    artifact = aot_util.compile_model(model, args)
    artifact.check(*args)
    loaded = artifact.loaded
    new = Short().eval()
    with torch.no_grad():
        for value in (new.scale, new.one, new.shift, new.zeros):
            value += 2
    new.index.copy_(torch.tensor([1, 5, 3]))
    values = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    assert set(loaded.get_constant_fqns()) >= set(values)
    for name, value in values.items():
        loaded.update_constants({name: value})
    aot_util.assert_same(aot_util.call(loaded, args), aot_util.call(new, args))
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    loaded.load_constants(values, check_full_update=True)
    aot_util.assert_same(aot_util.call(loaded, args), aot_util.call(model, args))
