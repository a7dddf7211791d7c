"""Linking of CUTLASS kernels into AOT models."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks.gemm.cutlass_launch import Kernel, call
from inductor_ext.cpp_wrapper.build.compiler import RUNTIME
from inductor_ext.templates.cutlass import aot_link
from inductor_ext.templates.cutlass.launch import CUDA_ERRORS
from inductor_ext.templates.cutlass.source import source
from test.support.cutlass_sources import CLASSES
from test.support.scripted_nvcc import real_store

_MODEL = """
#include <cstdint>
extern "C" int64_t @_workspace_size(void const*);
extern "C" int32_t @_run(void const*, void*, void*);
extern "C" int64_t inductor_ext_workspace_size(void const* call) { return @_workspace_size(call); }
extern "C" int32_t inductor_ext_run(void const* call, void* workspace, void* stream) {
  return @_run(call, workspace, stream);
}
"""


@pytest.mark.slow
def test_a_model_is_linked_with_a_real_one(tmp_path: Path) -> None:
    """The library needs no CUDA libraries to load."""
    config, epilogue = CLASSES["old_addmm_row"]
    output = source(config, epilogue)
    code, kernel, model = (tmp_path / name for name in ("model.cpp", "kernel.o", "model.so"))
    aot_link.link(output, real_store(), str(kernel))
    code.write_text(_MODEL.replace("@", aot_link.symbol(output)))
    exports = f"-Wl,--version-script={RUNTIME / 'exports.map'}"
    command = ["g++", "-shared", "-fPIC", exports, "-o", *map(str, (model, code, kernel))]
    subprocess.run(command, check=True)
    needed = subprocess.run(["ldd", model], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in needed
    result = Kernel(ctypes.CDLL(str(model)), output.name)
    a, b, out = (torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(3))
    arguments = call(config, a, b.t(), out, [out[:1]], scalars=(1, 1), sms=1)
    assert result.workspace_size(arguments) == 0
    if not torch.cuda.is_available():
        # It runs until the first CUDA call.
        assert result.run(arguments, 0, 0) > CUDA_ERRORS
