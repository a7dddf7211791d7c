"""C++ text of sm_90 kernels: CUTLASS 3 collectives, warp-specialized with TMA loads."""

from __future__ import annotations

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.evt import CPP_TYPES, Rendered
from inductor_ext.templates.cutlass.source.common import LAYOUTS, element
from inductor_ext.templates.tensors import DTYPE_BITS

DEVICE = """
}  // namespace @NAME@_code

#ifdef INDUCTOR_EXT_DEVICE

extern "C" __global__ void __launch_bounds__(@NAME@_code::Kernel::MaxThreadsPerBlock,
                                             @NAME@_code::Kernel::MinBlocksPerMultiprocessor)
    @NAME@(__grid_constant__ @NAME@_code::Kernel::Params const parameters) {
  extern __shared__ char memory[];
  @NAME@_code::Kernel kernel;
  kernel(parameters, memory);
}
"""

START = """
int32_t start(typename Kernel::Arguments const& given, void* workspace, cudaStream_t stream) {
  static Loaded kernel("@NAME@");
  cutlass::Status const status = Kernel::initialize_workspace(given, workspace, stream);
  if (status != cutlass::Status::kSuccess) {
    cudaError_t const error = cudaGetLastError();
    return error == cudaSuccess ? static_cast<int32_t>(status) : 1000 + static_cast<int32_t>(error);
  }
  auto parameters = Kernel::to_underlying_arguments(given, workspace);
  dim3 const cluster(size<0>(Cluster{}), size<1>(Cluster{}), size<2>(Cluster{}));
  return kernel.launch(Kernel::get_grid_shape(parameters), Kernel::get_block_shape(), cluster,
                       Kernel::SharedStorageSize, stream, &parameters);
}
"""


def _shape(sizes: tuple[int, ...]) -> str:
    return f"Shape<{', '.join(f'_{size}' if size in _NAMED else f'Int<{size}>' for size in sizes)}>"


_NAMED = frozenset({1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256})
"""Numbers for which CuTe defines a named type, such as `_64`."""

STRIDES = """
template <class Strides>
Strides strides(Operand const& tensor) {
  Strides found{};
  if constexpr (is_static_v<decltype(get<0>(found))>) {
    get<1>(found) = tensor.stride;
  } else {
    get<0>(found) = tensor.stride;
  }
  if constexpr (!is_static_v<decltype(get<2>(found))>) {
    get<2>(found) = tensor.batch;
  }
  return found;
}
"""


def collectives(config: CutlassConfig, rendered: Rendered, problem: str) -> str:
    """Return the C++ types of an sm_90 kernel: tile, collective epilogue and mainloop, kernel."""
    grouped = "PtrArray" if config.grouped else ""
    pointer = "*" if config.grouped else ""
    schedule = {
        "warpspecialized": "TmaWarpSpecialized",
        "warpspecialized_pingpong": "TmaWarpSpecializedPingpong",
        "warpspecialized_cooperative": "TmaWarpSpecializedCooperative",
    }[config.mainloop]
    fast = "FP8FastAccum" if config.fast_accumulation else ""
    epilogue_schedule = schedule
    if not config.grouped:
        # Epilogue schedules of non-grouped kernels have no pingpong variant: one warpgroup stores,
        # or two cooperate.
        epilogue_schedule = schedule.removesuffix("Pingpong")
    scheduler = "StreamKScheduler" if config.scheduler == "stream_k" else "PersistentScheduler"
    if config.grouped:
        scheduler = "GroupScheduler"
    a, b, d = (LAYOUTS[layout] for layout in config.layouts)
    align_a, align_b, align_d = config.alignments
    compute = "int32_t" if config.d == "int32" else "float"
    align_c = align_d if config.c == "void" else 128 // DTYPE_BITS[config.c]
    stages = (
        f"cutlass::gemm::collective::StageCount<{config.stages}>"
        if config.stages
        else "cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(\n"
        "        sizeof(typename CollectiveEpilogue::SharedStorage))>"
    )
    element_a = element(config.a)
    if config.group is not None:
        element_a = f"cute::tuple<{element_a}, {CPP_TYPES[config.b]}>"
    return f"""
using Tile = {_shape(config.tile)};
using Cluster = {_shape(config.cluster)};

{rendered.definitions}

using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, {CPP_TYPES[config.accumulator]}, {compute},
    {CPP_TYPES[config.c]}, {d}{pointer}, {align_c},
    {CPP_TYPES[config.d]}, {d}{pointer}, {align_d},
    cutlass::epilogue::{grouped}{epilogue_schedule}, Fusion>::CollectiveOp;

using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    {element_a}, {a}{pointer}, {align_a},
    {CPP_TYPES[config.b]}, {b}{pointer}, {align_b},
    {CPP_TYPES[config.accumulator]}, Tile, Cluster,
    {stages},
    cutlass::gemm::Kernel{grouped}{schedule}{fast}>::CollectiveOp;

struct Kernel
    : cutlass::gemm::kernel::GemmUniversal<
          {problem}, CollectiveMainloop, CollectiveEpilogue, cutlass::gemm::{scheduler}> {{}};
"""


RASTER_ORDER = """
  using Order = cutlass::gemm::kernel::detail::RasterOrderOptions;
  given.scheduler.max_swizzle_size = call.swizzle;
  given.scheduler.raster_order = call.raster == 1   ? Order::AlongM
                                 : call.raster == 2 ? Order::AlongN
                                                    : Order::Heuristic;
"""


def includes(config: CutlassConfig) -> str:
    """Return the includes of the sm_90 collectives only; CUTLASS's builder includes all of them."""
    array = "array_" if config.grouped else ""
    files = [
        "cutlass.h",
        "epilogue/collective/collective_builder.hpp",
        "gemm/collective/collective_mma_decl.hpp",
        f"gemm/collective/sm90_mma_{array}tma_gmma_ss_warpspecialized.hpp",
        f"gemm/collective/sm90_mma_{array}tma_gmma_ss_warpspecialized_fp8.hpp",
    ]
    if not config.grouped:
        files += [
            "gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized.hpp",
            "gemm/collective/sm90_mma_tma_gmma_rs_warpspecialized_mixed_input.hpp",
        ]
    files.append("gemm/collective/builders/sm90_gmma_builder.inl")
    if config.mainloop == "warpspecialized":
        # Only this header has all that this kernel needs.
        files.append("gemm/kernel/gemm_universal.hpp")
    else:
        files.append("gemm/kernel/gemm_universal_decl.h")
        files.append(f"gemm/kernel/sm90_gemm_{array}tma_{config.mainloop}.hpp")
    return "".join(f'#include "cutlass/{file}"\n' for file in files)
