"""Calls of CUTLASS kernels: an operator that is lowered to one, and kernels of plain C++.

`linear` is lowered by `lowerings.cutlass_call.add_launch` with the configuration of `as_call`.
Inside `plain_kernels` each kernel is the C++ of `KERNEL`, which has the same two functions
and runs on the CPU, when it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import subprocess
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.functions import IntTrueDiv

from inductor_ext.lowerings import cutlass_call as lowering
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import (
    ACCUMULATOR,
    Epilogue,
    Tensor,
    apply,
    parameter,
    read,
)
from inductor_ext.templates.cutlass.find_headers import Headers
from inductor_ext.templates.cutlass.nvcc_build import Toolchain
from inductor_ext.templates.cutlass.source import Source

__all__ = [
    "CONFIG",
    "EPILOGUE",
    "KERNEL",
    "WITH_WORKSPACE",
    "as_call",
    "expected",
    "linear",
    "plain_kernels",
    "plain_source",
]

F32 = "float32"

CONFIG = CutlassConfig(
    90,
    "warpspecialized_pingpong",
    (64, 64, 32),
    *(F32,) * 3,
    alignments=(1, 1, 1),
    tf32=True,
    swizzle=2,
    raster="along_n",
)
"""Configuration of `linear`; `plain_kernels` uses only whether it splits K."""

EPILOGUE = Epilogue(
    (
        (F32, apply("add", apply("mul", ACCUMULATOR, parameter(0)), read(0))),
        (F32, apply("add", ACCUMULATOR, read(1))),
    ),
    (Tensor(F32, "row"), Tensor(F32, "matrix")),
)
"""Two outputs: the matmul times a scalar, plus a row; the matmul plus a matrix."""

WITH_WORKSPACE = dataclasses.replace(
    CONFIG, mainloop="warpspecialized_cooperative", tile=(128, 64, 32), scheduler="stream_k"
)

_library = torch.library.Library("inductor_ext_cutlass_test", "DEF")
_library.define(
    "linear(Tensor x, Tensor w, Tensor row, Tensor more, SymInt by) -> (Tensor, Tensor)"
)


def _linear(
    x: torch.Tensor, w: torch.Tensor, row: torch.Tensor, more: torch.Tensor, by: int
) -> tuple[torch.Tensor, torch.Tensor]:
    product = x @ w.mT
    return product / by + row, product + more


def _meta(
    x: torch.Tensor, w: torch.Tensor, row: torch.Tensor, more: torch.Tensor, by: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], w.shape[-2])
    return x.new_empty(shape), x.new_empty(shape)


for _key, _function in (("CompositeExplicitAutograd", _linear), ("Meta", _meta)):
    _library.impl("linear", _function, _key)
linear = torch.ops.inductor_ext_cutlass_test.linear.default
"""(x @ w.mT / by + row, x @ w.mT + more); x is [M, K] or [batch, M, K]."""

_configs: ContextVar[Iterator[CutlassConfig]] = ContextVar("configs")


def _lower(x: Any, w: Any, row: Any, more: Any, by: Any) -> Any:
    from torch._inductor.ir import FixedLayout
    from torch._inductor.lowering import lowerings

    config = next(_configs.get())
    size = [*x.get_size()[:-1], w.get_size()[-2]]
    layout = FixedLayout(x.get_device_or_error(), torch.float32, size)
    wt = lowerings[torch.ops.aten.permute.default](w, [*range(len(w.get_size()) - 2), -1, -2])
    scalar = IntTrueDiv(sympy.Integer(1), sympy.sympify(by))
    return lowering.add_launch(config, EPILOGUE, x, wt, [row, more], [layout] * 2, scalars=[scalar])


@contextlib.contextmanager
def as_call(*configs: CutlassConfig) -> Iterator[None]:
    """Inside, `linear` is lowered to the call of a kernel: of these, in order, or of `CONFIG`."""
    from torch._inductor.lowering import lowerings

    token = _configs.set(itertools.cycle(configs or (CONFIG,)))
    # Other lowerings that are registered meanwhile stay.
    lowerings[linear] = _lower
    try:
        yield
    finally:
        del lowerings[linear]
        _configs.reset(token)


KERNEL = r"""
#include <cstdint>
struct Operand { char* data; int64_t stride, batch; };
struct Call {
  int32_t m, n, k, batch, swizzle, raster, splits, sms;
  Operand const* tensors;
  float const* scalars;
};
namespace {
float& at(Operand const& x, int64_t q, int64_t i, int64_t j) {
  return reinterpret_cast<float*>(x.data)[q * x.batch + i * x.stride + j];
}
}
#define VISIBLE extern "C" __attribute__((visibility("default")))
VISIBLE int64_t inductor_ext_workspace_size(Call const* call) {
  return WORKSPACE;
}
VISIBLE int32_t inductor_ext_run(Call const* call, void* workspace, void* stream) {
  if (stream != nullptr || call->k == 13) {
    return call->k == 13 ? 1013 : 7;
  }
  Operand const* t = call->tensors;
  for (int q = 0; q < call->batch; ++q) {
    for (int i = 0; i < call->m; ++i) {
      for (int j = 0; j < call->n; ++j) {
        float plain = 0;
        float& sum = WORKSPACE ? static_cast<float*>(workspace)[i] : plain;
        sum = 0;
        for (int k = 0; k < call->k; ++k) {
          sum += at(t[0], q, i, k) * at(t[1], q, j, k);
        }
        at(t[2], q, i, j) = sum * call->scalars[0] + at(t[3], q, 0, j);
        at(t[5], q, i, j) = sum + at(t[4], q, i, j);
      }
    }
  }
  return 0;
}
"""


def plain_source(config: CutlassConfig, epilogue: Epilogue = EPILOGUE) -> Source:
    """Replaces the source of CUTLASS kernels."""
    text = KERNEL.replace("WORKSPACE", "4 * call->m" if config.has_workspace else "0")
    text += f"// {config.name}\n"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return Source(f"{config.name}_{digest}", text, "90a")


@contextlib.contextmanager
def plain_kernels(folder: Path) -> Iterator[list[str]]:
    """Inside, `KERNEL` is built instead; yields the names of built kernels, one per build.

    Args:
        folder: the folder of the build.
    """
    names: list[str] = []
    toolchain = Toolchain("nvcc", "13.0", Headers(folder, (4, 2, 0)), "g++", folder / "none.a")

    def make(source: Source, toolchain: Toolchain, kind: str, target: Path, scratch: Path) -> None:
        names.append(source.name)
        path = str(target / nvcc_build.OBJECT)
        compiling = ["g++", "-O1", "-fPIC", "-fvisibility=hidden", "-x", "c++", "-c"]
        subprocess.run([*compiling, "-o", path, str(target / "kernel.cu")], check=True)
        linked = str(target / nvcc_build.FILES["library"])
        subprocess.run(["g++", "-shared", "-o", linked, path], check=True)

    with (
        mock.patch.object(lowering, "source", plain_source),
        mock.patch.object(nvcc_build, "run_build", make),
        mock.patch.object(Toolchain, "find", return_value=toolchain),
    ):
        yield names


def expected(*arguments: Any) -> Sequence[torch.Tensor]:
    """The result of `linear`, in float64."""
    x, w, row, more, by = arguments
    return _linear(x.double(), w.double(), row.double(), more.double(), by)
