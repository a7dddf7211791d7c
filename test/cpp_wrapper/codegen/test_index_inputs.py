"""The input that an index out of bounds comes from: the search in kernels, and the errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import index_inputs
from inductor_ext.cpp_wrapper.load.model import LoadedModel

KERNEL = """
extern "C"  void  kernel_0(const int64_t* in_ptr0,
                       const float* in_ptr1,
                       const int32_t* in_ptr2,
                       float* out_ptr0)
{{
    for(int64_t x0=0L; x0<5L; x0+=1L)
    {{
        {body}
        AOTI_TORCH_CHECK((0 <= tmp4) & (tmp4 < 10L), "index out of bounds: 0 <= tmp4 < 10L");
    }}
}}
"""
CALL = (
    "kernel_0((const int64_t*)({}.data_ptr()), (const float*)(x.data_ptr()), "
    "(const int32_t*)(c.data_ptr()), (float*)(buf0.data_ptr()));"
)
DECLARATION = 'extern "C" void kernel_0(const int64_t*, const float*, const int32_t*, float*);\n'
MESSAGE = "index out of bounds: 0 <= tmp4 < 10L"
INPUTS = {"a": "ids", "x": "x", "c": "mask"}

DIRECT = "auto tmp0 = in_ptr0[static_cast<int64_t>(x0)]; auto tmp4 = tmp0;"
OTHERS = {
    "float input": "auto tmp4 = c10::convert<int64_t>(in_ptr1[static_cast<int64_t>(x0)]);",
    "two inputs": "auto tmp0 = in_ptr0[x0]; auto tmp1 = in_ptr2[x0]; auto tmp4 = tmp0 + tmp1;",
    "address from another input": "auto tmp0 = in_ptr0[x0]; auto tmp4 = in_ptr2[tmp0];",
    "loop index": "auto tmp0 = x0; auto tmp4 = static_cast<int64_t>(tmp0);",
    "accumulator": "auto tmp4 = tmp_acc0 + in_ptr0[x0];",
    "written pointer": "auto tmp4 = in_out_ptr0[x0] + in_ptr0[x0];",
    "unknown function": "auto tmp4 = lookup(in_ptr0[x0]);",
    "no definition": "auto tmp3 = in_ptr0[x0];",
}


def find(body: str, wrapper: str) -> dict[str, dict[str, str]]:
    return index_inputs.find_index_inputs(KERNEL.format(body=body), DECLARATION + wrapper, INPUTS)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (DIRECT, "ids"),
        ("auto tmp1 = in_ptr2[x0]; auto tmp2 = 7L; auto tmp4 = int64_t(tmp1 + tmp2);", "mask"),
        ("auto tmp4 = in_ptr2[x0]; auto tmp0 = in_ptr0[x0]; auto tmp4 = tmp0;", "ids"),
        ("auto tmp9 = in_ptr2[x0]; auto tmp4 = [&] { auto tmp1 = in_ptr0[x0]; }();", "ids"),
    ],
)
def test_an_index_from_one_input_is_traced(body: str, name: str) -> None:
    assert find(body, CALL.format("a")) == {"kernel_0": {MESSAGE: name}}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_other_indices_have_no_input(body: str) -> None:
    assert find(body, CALL.format("a")) == {}


def test_there_may_be_no_kernel_or_several() -> None:
    assert index_inputs.find_index_inputs("", "", INPUTS) == {}
    first, second = (KERNEL.format(body=DIRECT.replace("x0", name)) for name in ("x0", "x1"))
    code = first + second.replace("kernel_0", "kernel_1")
    calls = CALL.format("a") + CALL.format("c").replace("kernel_0", "kernel_1")
    found = index_inputs.find_index_inputs(code, calls, INPUTS)
    assert found == {"kernel_0": {MESSAGE: "ids"}, "kernel_1": {MESSAGE: "mask"}}


def test_every_call_and_every_check_must_agree() -> None:
    call = CALL.format("a")
    assert find(DIRECT, call + call) == {"kernel_0": {MESSAGE: "ids"}}
    assert find(DIRECT, call + CALL.format("c")) == {}
    assert find(DIRECT, CALL.format("buf1")) == {}
    assert find(DIRECT, CALL.format("reinterpret_tensor_wrapper(a, 1, 2)")) == {}
    assert find(DIRECT, "") == {}
    check = f'CHECK("{MESSAGE}"); '
    other = "auto tmp4 = in_ptr2[x0];"
    assert find(f"{DIRECT} {check} {DIRECT}", call) == {"kernel_0": {MESSAGE: "ids"}}
    assert find(f"{DIRECT} {check} {other}", call) == {}


class Lookups(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(10, 16)
        self.places = torch.nn.Embedding(11, 16)

    def forward(self, text: Any, place: Any, row: Any, column: Any, weight: Any, spot: Any) -> Any:
        looked_up = self.words(text["ids"]) + self.places(place + 1)
        summed = weight[row + column]
        spot.add_(1)
        return looked_up, summed, weight.flatten()[spot], weight[:, 0][(weight[0] * 30).long()]


def arguments() -> dict[str, Any]:
    ids = torch.arange(4)
    number = {name: torch.arange(3) for name in ("row", "column", "spot")}
    return {"text": {"ids": ids}, "place": ids.clone(), "weight": torch.zeros(13, 12), **number}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    length = {0: Dim("length", max=4000)}
    shapes = dict.fromkeys(arguments()) | {"text": {"ids": length}, "place": length}
    program = torch.export.export(Lookups(), (), arguments(), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("indices") / "model.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    return inductor_ext.load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ids", "An index from input 'text['ids']' is out of bounds for a dimension of size 10."),
        ("place", "An index from input 'place' is out of bounds for a dimension of size 11."),
        ("row", "An index is out of bounds for a dimension of size 13."),
        ("column", "An index is out of bounds for a dimension of size 13."),
        ("spot", "An index is out of bounds for a dimension of size 156."),
        ("weight", "An index is out of bounds for a dimension of size 13."),
    ],
)
@pytest.mark.parametrize("length", [4, 3000])
def test_errors_name_the_input(model: LoadedModel, name: str, message: str, length: int) -> None:
    """The long one is computed in parallel loops."""
    values = arguments()
    values["text"]["ids"] = torch.arange(length) % 10
    values["place"] = torch.arange(length) % 10
    model(**values)
    values["spot"] = arguments()["spot"]
    wrong = values["text"] if name == "ids" else values
    wrong[name] = wrong[name].clone()
    wrong[name].flatten()[0] = 1000
    with pytest.raises(exc.ArtifactRunError) as caught:
        model(**values)
    assert str(caught.value) == message


def test_the_manifest_has_the_inputs(model: LoadedModel) -> None:
    assert model.manifest is not None
    kernels = model.manifest.models["model"].kernels
    names = {name for kernel in kernels for name in (kernel.index_inputs or {}).values()}
    assert names == {"text['ids']", "place"}
