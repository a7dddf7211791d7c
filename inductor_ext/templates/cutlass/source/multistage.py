"""Source of a kernel before sm_90: CUTLASS 2, multistage with cp.async."""

from __future__ import annotations

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.evt import CPP_TYPES, Rendered
from inductor_ext.templates.cutlass.source.common import (
    CALL,
    ENTRIES,
    HALVES,
    HOST,
    LAUNCH,
    LAYOUTS,
    PROLOGUE,
    fill,
)

_RUN = """\
typename Kernel::Arguments arguments(Call const& call) {
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  bool const batched = call.batch > 1;
  return {batched ? cutlass::gemm::GemmUniversalMode::kBatched
                  : cutlass::gemm::GemmUniversalMode::kGemm,
          {call.m, call.n, call.k},
          batched ? call.batch : 1,
          @ARGUMENTS@,
          a.data, b.data, nullptr, nullptr, a.batch, b.batch, 0, 0,
          a.stride, b.stride, int64_t(0), int64_t(0)};
}

int64_t workspace_size(Call const& call) {
  auto const given = arguments(call);
  dim3 const grid = typename Kernel::Params(given, call.sms, 1).get_grid_dims();
  bool const fits = grid.y <= 65535 && grid.z <= 65535;
  // K is never divided.
  return fits && Kernel::can_implement(given) == cutlass::Status::kSuccess ? 0 : -1;
}

int32_t run(Call const& call, void*, cudaStream_t stream) {
  static Loaded kernel("@NAME@");
  typename Kernel::Params parameters(arguments(call), call.sms, 1);
  return kernel.launch(parameters.get_grid_dims(), dim3(Kernel::kThreadCount, 1, 1),
                       dim3(1, 1, 1), sizeof(typename Kernel::SharedStorage), stream,
                       &parameters);
}
"""


def render_multistage(config: CutlassConfig, rendered: Rendered) -> str:
    """Return the source of a matmul or a batched matmul; `rendered` is its epilogue."""
    m, n, k = config.tile
    along_m, along_n = config.warps
    a, b, d = (LAYOUTS[layout] for layout in config.layouts)
    align_a, align_b, _ = config.alignments
    operator = "OpMultiplyAdd"
    if config.accumulator == "int32":
        operator = "OpMultiplyAddSaturate"
    elif config.a != config.b and config.arch < 89:
        operator = "OpMultiplyAddMixedInputUpcast"
    elif config.fast_accumulation:
        operator = "OpMultiplyAddFastAccum"
    arch = "Sm89" if config.arch == 89 else "Sm80"
    compute = "int32_t" if config.d == "int32" else "float"
    instruction = ", ".join(map(str, config.instruction))
    return f"""{HALVES}#include "cutlass/cutlass.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
{CALL}{PROLOGUE}
using Tile = cutlass::gemm::GemmShape<{m}, {n}, {k}>;
using Warp = cutlass::gemm::GemmShape<{m // along_m}, {n // along_n}, {k}>;
using Instruction = cutlass::gemm::GemmShape<{instruction}>;
using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<
    Tile, Warp, {CPP_TYPES[config.d]}, {rendered.access}, 1>;

{rendered.definitions}

struct Kernel
    : cutlass::gemm::kernel::DefaultGemmWithVisitor<
          {CPP_TYPES[config.a]}, {a}, cutlass::ComplexTransform::kNone, {align_a},
          {CPP_TYPES[config.b]}, {b}, cutlass::ComplexTransform::kNone, {align_b},
          {CPP_TYPES[config.d]}, {d}, {rendered.access},
          {CPP_TYPES[config.accumulator]}, {compute}, cutlass::arch::OpClassTensorOp,
          cutlass::arch::{arch}, Tile, Warp, Instruction, Fusion,
          cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, {config.stages},
          cutlass::arch::{operator}, 1>::GemmKernel {{}};

}}  // namespace @NAME@_code

#ifdef INDUCTOR_EXT_DEVICE

extern "C" __global__ void __launch_bounds__(@NAME@_code::Kernel::kThreadCount)
    @NAME@(__grid_constant__ @NAME@_code::Kernel::Params const parameters) {{
  extern __shared__ int memory[];
  using Memory = @NAME@_code::Kernel::SharedStorage;
  @NAME@_code::Kernel::invoke(parameters, *reinterpret_cast<Memory*>(memory));
}}
{HOST}{LAUNCH}
{fill(_RUN, ARGUMENTS=rendered.arguments)}{ENTRIES}"""
