"""The input that an index out of bounds comes from: the search in kernels, and the errors."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
import torch
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.codegen import index_inputs, input_names
from inductor_ext.cpp_wrapper.load.instance import ExtensionInstance
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from inductor_ext.cpp_wrapper.package import manifest, zip_reader
from inductor_ext.toolchain.probes import cuda
from test.support import compile_util

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
        (
            "auto tmp4 = int64_t(static_cast<std::make_unsigned_t<int64_t>>(in_ptr2[x0]) + 1L);",
            "mask",
        ),
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


TRITON = """
async_compile.triton('triton_0', '''
@triton_heuristics.pointwise(
    triton_meta={{'signature': {{'in_ptr0': '*i64', 'in_ptr1': '*fp32', 'in_ptr2': '*i32'}}}},
)
@triton.jit
def triton_0(in_ptr0, in_ptr1, in_ptr2, out_ptr0, ks0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex
    {body}
    tl.device_assert(((0 <= tmp4) & (tmp4 < 10)) | ~(xmask), "index out of bounds: 0 <= tmp4 < 10")
    tmp6 = tl.load(in_ptr1 + (tmp4), xmask)
''', device_str='cuda')
"""
LAUNCHER = """
template <typename in_ptr0_type_, typename in_ptr1_type_, typename kernels_type_>
static __attribute__((noinline)) void call_triton_0(
    const in_ptr0_type_& in_ptr0,
    const in_ptr1_type_& in_ptr1,
    const in_ptr2_type_& in_ptr2,
    const out_ptr0_type_& out_ptr0,
    int64_t ks0,
    int64_t xnumel,
    cudaStream_t stream_,
    kernels_type_& kernels_,
    const std::optional<std::string>& cubin_dir_ = std::nullopt
){ /* call of the kernel */ }
"""
LAUNCH = "call_triton_0({}, x, c, buf0, s0, 5L, stream, kernels, this->cubin_dir_);\n"
TRITON_MESSAGE = "index out of bounds: 0 <= tmp4 < 10"
TRITON_DIRECT = "tmp4 = tl.load(in_ptr0 + (x0), xmask, eviction_policy='evict_last')"
TRITON_WRAPPED = (
    "tmp0 = tl.load(in_ptr2 + (x0 // 4), xmask & tmp9, other=0.0)",
    "tmp1 = (tl.full([XBLOCK], 10, tl.int32)).to(tl.int32)",
    "tmp2 = tmp0 + tmp1",
    "tmp3 = tmp0 < 0",
    "tmp4 = tl.where(tmp3, tmp2, tmp0)",
)
TRITON_OTHERS = {
    "float input": ("tmp4 = tl.load(in_ptr1 + (x0), None).to(tl.int64)",),
    "two inputs": ("tmp4 = tl.load(in_ptr0 + (x0), None) + tl.load(in_ptr2 + (x0), None)",),
    "mask from another input": ("tmp9 = tl.load(in_ptr0 + (x0), None)", *TRITON_WRAPPED),
    "no definition of the mask": TRITON_WRAPPED,
    "loop index": ("tmp4 = x0",),
    "accumulator": ("tmp4 = _tmp3 + tl.load(in_ptr0 + (x0), None)",),
    "written pointer": ("tmp4 = tl.load(in_out_ptr0 + (x0), None)",),
    "unknown function": ("tmp4 = triton_helpers.maximum(tl.load(in_ptr0 + (x0), None), 1)",),
    "several lines": ("tmp4 = tl.where(x0 < 3, tl.load(in_ptr0 + (x0), None),", "    tmp0)"),
}


def find_triton(body: tuple[str, ...], wrapper: str) -> dict[str, dict[str, str]]:
    kernels = {"triton_0": TRITON.format(body="\n    ".join(body)), "triton_1": "no check"}
    return index_inputs.find_index_inputs_of_triton(kernels, LAUNCHER + wrapper, INPUTS)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ((TRITON_DIRECT,), "ids"),
        (("tmp9 = x0 < 3", *TRITON_WRAPPED), "mask"),
        (("tmp4 = tl.load(in_ptr2 + (x0), None)", TRITON_DIRECT), "ids"),
    ],
)
def test_an_index_of_a_triton_kernel_is_traced(body: tuple[str, ...], name: str) -> None:
    assert find_triton(body, LAUNCH.format("a")) == {"triton_0": {TRITON_MESSAGE: name}}


@pytest.mark.parametrize("body", TRITON_OTHERS.values(), ids=TRITON_OTHERS)
def test_other_indices_of_a_triton_kernel_have_no_input(body: tuple[str, ...]) -> None:
    assert find_triton(body, LAUNCH.format("a")) == {}


def test_every_launch_must_agree() -> None:
    launch = LAUNCH.format("a")
    assert find_triton((TRITON_DIRECT,), launch + launch) == {"triton_0": {TRITON_MESSAGE: "ids"}}
    for other in ("c", "buf1", "reinterpret_tensor_wrapper(a, 1, sizes, strides, 0L)"):
        assert find_triton((TRITON_DIRECT,), launch + LAUNCH.format(other)) == {}
    assert find_triton((TRITON_DIRECT,), "") == {}


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


ASSERTED = "CUDA driver error: device-side assert triggered"


def test_a_failed_assert_of_the_gpu_lists_the_inputs(model: LoadedModel) -> None:
    """A GPU is not needed: the text of CUDA's error is."""
    instance = model._instance
    assert isinstance(instance, ExtensionInstance)
    expected = f"{ASSERTED}: an index from input 'place' or 'text['ids']' may be out of bounds."
    assert str(instance.run_error(ASSERTED)) == expected
    assert str(instance.run_error("CUDA driver error: out of memory")) == (
        "CUDA driver error: out of memory."
    )
    instance._index_inputs = {}
    assert str(instance.run_error(ASSERTED)) == f"{ASSERTED}."


@pytest.mark.skipif(
    torch.version.cuda is None or cuda.find_home() is None,
    reason="needs a CUDA build of torch and CUDA's headers, but no GPU",
)
def test_a_package_for_a_gpu_has_the_inputs(tmp_path: pathlib.Path) -> None:
    program = torch.export.export(Lookups(), (), arguments())
    path = tmp_path / "model.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=path, targets=["sm_90"])
    with zip_reader.open_package(str(path)) as package:
        content, _ = manifest.read(package) or pytest.fail("no manifest")
    found = [kernel.index_inputs or {} for kernel in content.models["model"].kernels]
    assert {name for names in found for name in names.values()} == {"text['ids']", "place"}
    assert all(
        re.fullmatch(r"index out of bounds: 0 <= tmp\d+ < 1[01]", message)
        for names in found
        for message in names
    )


class Operators(torch.nn.Module):
    """Operators of torch that check their indices themselves, on a CPU."""

    def forward(self, x: Any, bags: Any, offsets: Any, row: Any, spot: Any, own: Any) -> Any:
        bag = torch.nn.functional.embedding_bag(bags, x, offsets)
        scattered = (x + 1).scatter_reduce(0, row, x, "amax")
        put = x.long().index_put((spot[1:],), x[:2].long(), accumulate=True)
        own.add_(1)
        return bag, scattered, put, (x + 2).scatter_reduce(0, own, x, "amax")


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    program = torch.export.export(Operators(), (), operator_arguments())
    path = tmp_path_factory.mktemp("operators") / "model.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=path)
    return inductor_ext.load(path)


def operator_arguments() -> dict[str, Any]:
    indices = {name: torch.zeros(5, 4, dtype=torch.int64) for name in ("row", "own")}
    offsets = torch.tensor([0, 2])
    return {
        "x": torch.ones(5, 4),
        "bags": torch.arange(4),
        "offsets": offsets,
        "spot": torch.arange(3),
        **indices,
    }


@pytest.mark.parametrize(
    ("name", "call", "reason"),
    [
        (
            "bags",
            (
                "_embedding_bag_forward_only(float32[5, 4] from input 'x', "
                "int64[4] from input 'bags', int64[2] from input 'offsets', 0, 1, 0, None, 0, -1)"
            ),
            "index_size",
        ),
        (
            "row",
            (
                "scatter_reduce_(float32[5, 4], 0, int64[5, 4] from input 'row', "
                "float32[5, 4] from input 'x')"
            ),
            "index 1000 is out of bounds for dimension 0 with size 5",
        ),
        pytest.param(
            "spot",
            "index_put_(int64[5, 4], int64[2] from input 'spot', int64[2, 4], 1)",
            "index 1000 is out of bounds for dimension 0 with size 5",
            marks=pytest.mark.skipif(compile_util.TORCH >= (2, 14), reason="it is a kernel"),
        ),
        # The model has written to this input.
        (
            "own",
            "scatter_reduce_(float32[5, 4], 0, int64[5, 4], float32[5, 4] from input 'x')",
            "index 1001 is out of bounds for dimension 0 with size 5",
        ),
    ],
)
def test_errors_of_operators_name_their_inputs(
    operators: LoadedModel, name: str, call: str, reason: str
) -> None:
    values = operator_arguments()
    operators(**values)
    values = operator_arguments()
    values[name].flatten()[-1] = 1000
    with pytest.raises(exc.ArtifactRunError) as caught:
        operators(**values)
    message = str(caught.value)
    assert message.startswith(f"The operator aten::{call} failed: ")
    if compile_util.TORCH >= (2, 13):
        assert reason in message


def test_only_tensors_and_views_are_inputs() -> None:
    names = {"a": "ids"}
    views = ["a", "reinterpret_tensor_wrapper(a, 1, sizes, strides, 0L)"]
    for view in (*views, f"wrap_with_raii_handle_if_needed({views[1]})"):
        assert input_names.find_input(view, names) == "ids"
    for other in ("a1", "buf0", "a.get()", "a(1)", "copy(a)", "RAIIAtenTensorHandle(a)", ""):
        assert input_names.find_input(other, names) is None
