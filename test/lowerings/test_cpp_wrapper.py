"""Matmuls launched from C++: the scratch memory of kernels that load by TMA."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from inductor_ext import _compat
from inductor_ext.autotune import decide
from inductor_ext.templates.triton.config import GemmConfig

pytest.importorskip("triton")

from test.support import fake_cuda

TMA = GemmConfig("persistent_tma", 64, 64, 64, 2, 4, tma=True)
SCRATCH = 256
"""Bytes of the descriptors of a CTA: two, of 128 bytes each."""


def lower(*, ahead: bool, config: GemmConfig = TMA) -> str:
    """The C++ code of a matmul with dynamic rows, for AOT or JIT."""
    with decide.force_config(lambda _: config):
        return fake_cuda.lower_cpp(
            lambda x, w: torch.relu(x @ w.t()),
            (("rows", 64), torch.bfloat16),
            ((64, 64), torch.bfloat16),
            ahead=ahead,
            scratch=SCRATCH,
        )


def launcher(code: str) -> str:
    """The function that launches the only kernel."""
    start = code.index("template <typename arg_A_type_")
    return code[start : code.index("\n}\n", start) + 3]


@pytest.mark.parametrize("ahead", [False, True])
def test_every_cta_of_the_grid_has_scratch(ahead: bool) -> None:
    code = lower(ahead=ahead)
    text = launcher(code)
    (size,) = (line for line in text.splitlines() if "_size[] = " in line)
    assert f"({SCRATCH}) * grid_0 * grid_1 * grid_2" in size
    assert "aoti_torch_empty_strided(1, global_scratch" in text
    # As many CTAs as tiles, up to the number of SMs, which is known at the call.
    (call,) = (line for line in code.splitlines() if " call_triton" in line and "void" not in line)
    assert "std::min(static_cast<int64_t>(132L), " in call


@pytest.mark.parametrize("ahead", [False, True])
def test_counters_are_zeroed_for_each_launch(ahead: bool) -> None:
    split = GemmConfig("splitk", 16, 32, 32, 2, 2, split_k=2, fused_split_k=True)
    code = lower(ahead=ahead, config=split)
    zeroed, launched, freed = (
        code.index(name)
        for name in ("aoti_torch_zero_(semaphores_", "call_triton_tem_fused_0(arg", ".reset")
    )
    assert zeroed < launched < freed
    assert "semaphores.counters" not in code.partition("call_triton_tem_fused_0(arg")[2]


_PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
using CUdeviceptr = unsigned long long;
using CUfunction = void*;
using cudaStream_t = void*;
using AtenTensorHandle = int64_t*;
constexpr int cached_torch_dtype_uint8 = 0, cached_torch_device_type_cuda = 1;
static int64_t held = 0, kernel = 0;
int aoti_torch_empty_strided(
    int64_t, const int64_t* size, const int64_t*, int, int, int, AtenTensorHandle* out) {
    held = *size;
    *out = &held;
    return 0;
}
#define AOTI_TORCH_ERROR_CODE_CHECK(call) if (call) return
struct RAIIAtenTensorHandle {
    explicit RAIIAtenTensorHandle(AtenTensorHandle handle) : handle(handle) {}
    ~RAIIAtenTensorHandle() { *handle = 0; }
    void* data_ptr() const { return handle; }
    AtenTensorHandle handle;
};
struct Tensor {
    void* data_ptr() const { return nullptr; }
};
template <typename... T>
CUfunction loadKernel(T...) { return &kernel; }
void launchKernel(
    CUfunction, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void** arguments, cudaStream_t) {
    auto scratch = **reinterpret_cast<int64_t***>(arguments + 4)[0];
    std::printf("%lld ", static_cast<long long>(scratch));
}
static CUfunction NAME = nullptr;
LAUNCHER
int main() {
    for (int64_t grid : {1, 132, 3000000, 0}) {
        call_NAME(Tensor(), Tensor(), Tensor(), 64, grid, 7, 1, 0, nullptr);
    }
    std::printf("%lld\\n", static_cast<long long>(held));
}
"""


def test_the_launcher_allocates_for_its_grid(tmp_path: Path) -> None:
    text = launcher(lower(ahead=False))
    name = text.partition("void call_")[2].partition("(")[0]
    source, program = tmp_path / "launch.cpp", tmp_path / "launch"
    source.write_text(_PROGRAM.replace("LAUNCHER", text).replace("NAME", name))
    subprocess.run(["g++", "-std=c++17", source, "-o", program], check=True)
    details = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    # Beyond 32 bits as well; none for a grid without CTAs; and given back in the end.
    assert [int(part) for part in details.split()] == [
        *(SCRATCH * grid * 7 for grid in (1, 132, 3_000_000)),
        0,
    ]


@pytest.fixture
def one_cta() -> Iterator[None]:
    """torch 2.11's scratch, whichever torch it is: that of one CTA."""
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    inductor = CUDADeviceOpOverrides.cpp_scratch

    def cpp_scratch(self: Any, idx: int, workspace: Any, prefix: str | None = None) -> Any:
        lines, name = inductor(self, idx, workspace, prefix)
        for index, line in enumerate(lines):
            if "_size[] = " in line:
                lines[index] = f"int64_t {name}_size[] = {{{workspace.size}}};"
        return lines, name

    _compat.scratch_covers_grid.cache_clear()
    with mock.patch.object(CUDADeviceOpOverrides, "cpp_scratch", cpp_scratch):
        yield
    _compat.scratch_covers_grid.cache_clear()


def test_scratch_for_one_cta_is_fixed_in_the_generator(one_cta: None) -> None:
    assert not _compat.scratch_covers_grid()
    assert f"int64_t({SCRATCH}) * grid_0 * grid_1 * grid_2" in launcher(lower(ahead=False))
