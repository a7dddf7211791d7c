"""Arguments with which CUTLASS kernels are launched."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from benchmarks.gemm.cutlass_launch import Kernel, call
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.source.common import CALL
from inductor_ext.toolchain import components


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """A library with the two functions, which returns a sum of its arguments."""
    compiler = components.probe("cxx")
    if not compiler.available:
        pytest.skip(f"no C++ compiler: {compiler.why}")
    folder = tmp_path_factory.mktemp("echo")
    text = f"""
    #include <cstdint>
    {CALL}
    extern "C" int64_t inductor_ext_workspace_size(Call const* c) {{
      Operand const* t = c->tensors;
      return c->m == 0 ? -1 : c->m + 100 * c->n + 10000 * c->k + 1000000 * c->batch
             + (t[0].stride + 1000 * t[1].stride + t[2].stride * 1000000ll) * 100000000ll;
    }}
    extern "C" int32_t inductor_ext_run(Call const* c, void* workspace, void* stream) {{
      float const x = static_cast<float*>(c->tensors[3].data)[1] * c->scalars[1];
      return 1000 * c->swizzle + 100 * c->raster + 10 * c->splits + c->sms + int(x)
             + 10000 * (workspace == stream) + 100000 * int(c->tensors[0].batch);
    }}
    """
    (folder / "echo.cpp").write_text(text)
    library = folder / "echo.so"
    flags = ["-std=c++17", "-shared", "-fPIC", "-o", library, folder / "echo.cpp"]
    subprocess.run([str(compiler.path), *flags], check=True)
    return Kernel(ctypes.CDLL(str(library)), "echo")


class TestLaunch:
    CONFIG = CutlassConfig(
        90,
        "warpspecialized_cooperative",
        (128, 128, 64),
        *("float32",) * 3,
        split_k=2,
        swizzle=4,
        raster="along_n",
    )

    @pytest.mark.parametrize("swap", [False, True])
    def test_kernels_get_sizes_and_strides(self, echo: Kernel, swap: bool) -> None:
        a, b, out = torch.zeros(3, 8)[:, :5], torch.zeros(7, 9).t()[:5], torch.zeros(3, 7)
        layouts = "tnn" if swap else "tnt"
        config = CutlassConfig(**{**vars(self.CONFIG), "swap_ab": swap, "layouts": layouts})
        m, n, k = (7, 3, 5) if swap else (3, 7, 5)
        first, second = (9, 8) if swap else (8, 9)
        expected = m + 100 * n + 10000 * k + 1000000
        expected += (first + 1000 * second + 7 * 1000000) * 100000000
        assert echo.workspace_size(call(config, a, b, out)) == expected

    def test_kernels_get_launch_parameters(self, echo: Kernel) -> None:
        bias = torch.tensor([1.0, 3.0])
        a, b, out = torch.zeros(2, 3, 4), torch.zeros(2, 4, 2), torch.zeros(2, 3, 2)
        arguments = call(self.CONFIG, a, b, out, [bias], scalars=(0.5, 2.0), sms=1)
        assert echo.run(arguments, 0, 0) == 4000 + 200 + 20 + 1 + 6 + 10000 + 100000 * 12
        shared = call(self.CONFIG, a[:1].expand(2, 3, 4), b, out, [bias], scalars=(0.5, 2.0))
        assert echo.run(shared, 1, 2) == 4000 + 200 + 20 + 6

    def test_one_row_has_a_stride_that_tma_takes(self, echo: Kernel) -> None:
        a = torch.zeros(5)[None].as_strided((1, 5), (1, 1))
        b = torch.zeros(5, 1).as_strided((5, 1), (1, 1))
        result = echo.workspace_size(call(self.CONFIG, a, b, torch.zeros(1, 1)))
        assert result is not None
        assert result // 100000000 == 16 + 1000 * 16 + 1000000

    def test_calls_that_cannot_run_have_no_workspace(self, echo: Kernel) -> None:
        empty = torch.zeros(0, 4)
        result = echo.workspace_size(call(self.CONFIG, empty, torch.zeros(4, 2), torch.zeros(0, 2)))
        assert result is None
