"""CUDA source of a CUTLASS kernel, from its configuration and epilogue.

Sizes, strides, scalars, split count, swizzle and raster order are launch arguments. Dtypes,
layouts, alignments, tile, cluster, schedule and the epilogue's expression are compiled in.

A source has a device half and a host half, which `nvcc_build` compiles in parallel: the macro
INDUCTOR_EXT_DEVICE selects the device code; the host code embeds the compiled device code as the
bytes `inductor_ext_cubin`. The host half defines two C functions, the same for all kernels:

    int64_t inductor_ext_workspace_size(Call const* call);
    int32_t inductor_ext_run(Call const* call, void* workspace, cudaStream_t stream);

The first returns bytes, or -1 if the kernel cannot run the call (for example, because of an
alignment). The second launches, and returns 0 or an error: a `cutlass::Status` (see
`cutlassGetStatusString`), or 1000 plus a CUDA error code. `CALL_FIELDS` describes `Call`. Its
tensors are, in the kernel's order: a, b, the output (b, a, the output with swapped operands), the
epilogue's inputs, the epilogue's other outputs. For a grouped GEMM they are a, b, the output and
the end offsets of the groups (int32).

A 4-bit A passes through registers, as does any A that is narrower than B. CUTLASS's conversions
expect the low nibble first and have no zero point; the conversions here support both nibble orders
and a zero point. With group scales along K, TMA needs the scales as [groups, N], but models store
them as [N, groups]: a separate kernel transposes them into the workspace before each launch.

To save compile time the source includes as little as CUTLASS allows: no code for other
architectures, none of CUTLASS's launchers (device adapters) and no host utilities.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping
from dataclasses import dataclass

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue, NotExpressible, Packed
from inductor_ext.templates.cutlass.evt import CPP_TYPES, Rendered, render
from inductor_ext.templates.problem import DTYPE_BITS, INT4

__all__ = ["CALL_FIELDS", "FUNCTIONS", "RASTER", "TENSOR_FIELDS", "Source", "source"]

FUNCTIONS: Mapping[str, str] = types.MappingProxyType(
    {"workspace_size": "inductor_ext_workspace_size", "run": "inductor_ext_run"}
)
"""Names of the two C functions of a source."""

CALL_FIELDS = (
    ("int32_t", "m"),
    ("int32_t", "n"),
    ("int32_t", "k"),
    ("int32_t", "batch"),
    ("int32_t", "swizzle"),
    ("int32_t", "raster"),
    ("int32_t", "splits"),
    ("int32_t", "sms"),
    ("Operand const*", "tensors"),
    ("float const*", "scalars"),
)
"""C types and names of the fields of `Call`, in order. Sizes are in the kernel's order; `batch` is
the number of matrices or groups; `sms` is the number of SMs of the device, 0 to query it."""

TENSOR_FIELDS = (("void*", "data"), ("int64_t", "stride"), ("int64_t", "batch"))
"""C types and names of the fields of `Operand`: address, leading stride (between rows, or between
columns if column-major) and batch stride, in elements."""

RASTER: Mapping[str, int] = types.MappingProxyType({"heuristic": 0, "along_m": 1, "along_n": 2})
"""Values of `Call.raster` by name."""


@dataclass(frozen=True)
class Source:
    """The source of a kernel."""

    name: str
    """Kernel name, as shown by profilers: CUTLASS's name and 8 hex digits of a hash of architecture
    and source, which distinguishes epilogues."""
    text: str
    architecture: str
    """nvcc's architecture, such as "90a"."""


def source(config: CutlassConfig, epilogue: Epilogue) -> Source:
    """Return the source of a kernel.

    Args:
        config: its launch parameters are ignored.
        epilogue: of the kernel.

    Raises:
        epilogue.NotExpressible: the kernel does not support the epilogue.
    """
    config = config.compiled
    packed = epilogue.packed
    if (packed is None) == (config.a in INT4) or (epilogue.scales is None) != (
        config.group is None
    ):
        raise NotExpressible("what the numbers of b are is another kernel's")
    rendered = render(epilogue, config)
    if config.grouped:
        body = _grouped(config, rendered)
    elif config.arch == 90:
        body = _specialized(config, rendered, epilogue)
    else:
        body = _multistage(config, rendered)
    if config.flags:
        body = f"{FLAGS}{' '.join(config.flags)}\n{body}"
    digest = hashlib.sha256(f"{config.architecture}\0{body}".encode()).hexdigest()[:8]
    name = f"{config.name}_{digest}"
    text = body.replace(_NAME, name)
    return Source(name, text, config.architecture)


FLAGS = "// nvcc: "
"""Prefix of a source's first line if that lists further nvcc arguments."""

_NAME = "@NAME@"

_LAYOUTS = {"t": "cutlass::layout::RowMajor", "n": "cutlass::layout::ColumnMajor"}


def _fields(fields: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"  {kind} {name};" for kind, name in fields)


_CALL = f"""
struct Operand {{
{_fields(TENSOR_FIELDS)}
}};

struct Call {{
{_fields(CALL_FIELDS)}
}};
"""

_PROLOGUE = """
namespace @NAME@_code {

using namespace cute;

constexpr auto Round = cutlass::FloatRoundStyle::round_to_nearest;
"""

_LAUNCH = """
// A function of CUDA's driver, asked of its runtime, so that nothing has to be linked for it.
template <class Function>
void find(Function*& function, char const* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  function = reinterpret_cast<Function*>(found);
}

// A kernel of the device's half, loaded once in a process.
struct Loaded {
  decltype(cuLibraryLoadData)* load_library = nullptr;
  decltype(cuLibraryGetKernel)* get_kernel = nullptr;
  decltype(cuKernelSetAttribute)* set_attribute = nullptr;
  decltype(cuLaunchKernelEx)* launch_kernel = nullptr;
  CUkernel kernel = nullptr;
  CUresult result = CUDA_ERROR_NOT_FOUND;
  std::atomic<uint64_t> prepared{0};

  explicit Loaded(char const* name) {
    find(load_library, "cuLibraryLoadData");
    find(get_kernel, "cuLibraryGetKernel");
    find(set_attribute, "cuKernelSetAttribute");
    find(launch_kernel, "cuLaunchKernelEx");
    if (!load_library || !get_kernel || !set_attribute || !launch_kernel) {
      return;
    }
    CUlibrary library = nullptr;
    result = load_library(&library, inductor_ext_cubin, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (result == CUDA_SUCCESS) {
      result = get_kernel(&kernel, library, name);
    }
  }

  // Lets blocks have that much shared memory, which each device is told once.
  CUresult prepare(int device, int bytes) {
    uint64_t const bit = device < 64 ? uint64_t(1) << device : 0;
    if (bytes < 48 << 10 || (prepared.load() & bit) != 0) {
      return CUDA_SUCCESS;
    }
    CUresult const done = set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes,
                                        kernel, device);
    if (done == CUDA_SUCCESS) {
      prepared.fetch_or(bit);
    }
    return done;
  }

  int32_t launch(dim3 grid, dim3 block, dim3 cluster, int bytes, cudaStream_t stream,
                 void* parameters) {
    int device = 0;
    cudaError_t const error = cudaGetDevice(&device);
    if (error != cudaSuccess) {
      return 1000 + static_cast<int32_t>(error);
    }
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim.x = cluster.x;
    attribute.value.clusterDim.y = cluster.y;
    attribute.value.clusterDim.z = cluster.z;
    CUlaunchConfig config{};
    config.gridDimX = grid.x;
    config.gridDimY = grid.y;
    config.gridDimZ = grid.z;
    config.blockDimX = block.x;
    config.blockDimY = block.y;
    config.blockDimZ = block.z;
    config.sharedMemBytes = bytes;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = cluster.x * cluster.y * cluster.z > 1 ? 1 : 0;
    void* all[] = {parameters};
    auto const start = [&] {
      CUresult const ready = prepare(device, bytes);
      return ready == CUDA_SUCCESS
                 ? launch_kernel(&config, reinterpret_cast<CUfunction>(kernel), all, nullptr)
                 : ready;
    };
    CUresult done = result == CUDA_SUCCESS ? start() : result;
    if (done == CUDA_ERROR_INVALID_CONTEXT && cudaSetDevice(device) == cudaSuccess) {
      // This thread had used no device before.
      done = start();
    }
    return done == CUDA_SUCCESS ? 0 : 1000 + static_cast<int32_t>(done);
  }
};
"""

_HOST = """
#else

#include <atomic>
#include <cuda.h>

extern "C" __attribute__((visibility("hidden"))) unsigned char const inductor_ext_cubin[];

namespace @NAME@_code {
"""

_ENTRIES = """
}  // namespace @NAME@_code

extern "C" __attribute__((visibility("default"))) int64_t inductor_ext_workspace_size(
    Call const* call) {
  return @NAME@_code::workspace_size(*call);
}

extern "C" __attribute__((visibility("default"))) int32_t inductor_ext_run(
    Call const* call, void* workspace, cudaStream_t stream) {
  return @NAME@_code::run(*call, workspace, stream);
}

#endif
#endif
"""

_HALVES = "#if defined(INDUCTOR_EXT_DEVICE) || !defined(__CUDA_ARCH__)\n"
"""Guard that excludes the rest from nvcc's device pass over the host half."""

_DEVICE_3X = """
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

_RUN_3X = """
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

_STRIDES = """
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


def _collectives(config: CutlassConfig, rendered: Rendered, problem: str) -> str:
    """Return the C++ types of an sm_90 kernel: tile, collective epilogue and mainloop, kernel."""
    grouped = "PtrArray" if config.grouped else ""
    pointer = "*" if config.grouped else ""
    schedule = {
        "warpspecialized": "TmaWarpSpecialized",
        "warpspecialized_pingpong": "TmaWarpSpecializedPingpong",
        "warpspecialized_cooperative": "TmaWarpSpecializedCooperative",
    }[config.mainloop]
    fast = "FP8FastAccum" if config.fast_accumulation else ""
    stored = schedule
    if not config.grouped:
        # Epilogue schedules of non-grouped kernels have no pingpong variant: one warpgroup stores,
        # or two cooperate.
        stored = schedule.removesuffix("Pingpong")
    scheduler = "StreamKScheduler" if config.scheduler == "stream_k" else "PersistentScheduler"
    if config.grouped:
        scheduler = "GroupScheduler"
    a, b, d = (_LAYOUTS[layout] for layout in config.layouts)
    align_a, align_b, align_d = config.alignments
    compute = "int32_t" if config.d == "int32" else "float"
    align_c = align_d if config.c == "void" else 128 // DTYPE_BITS[config.c]
    stages = (
        f"cutlass::gemm::collective::StageCount<{config.stages}>"
        if config.stages
        else "cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(\n"
        "        sizeof(typename CollectiveEpilogue::SharedStorage))>"
    )
    element_a = _element(config.a)
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
    cutlass::epilogue::{grouped}{stored}, Fusion>::CollectiveOp;

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


_RASTER = """
  using Order = cutlass::gemm::kernel::detail::RasterOrderOptions;
  given.scheduler.max_swizzle_size = call.swizzle;
  given.scheduler.raster_order = call.raster == 1   ? Order::AlongM
                                 : call.raster == 2 ? Order::AlongN
                                                    : Order::Heuristic;
"""


def _includes(config: CutlassConfig) -> str:
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


_CONVERSION = """
namespace cutlass {

// 8 numbers of 4 bits, in the order in which bytes have them. An integer below the exponent of 2^n,
// where the last bit of the mantissa counts 1, is the float 2^n + integer.
template <>
struct LayoutAwareConvertImpl<uint4b_t, @TYPE@, cute::Layout<cute::_8>, cute::Layout<cute::_8>> {
  template <class Bits, class Numbers>
  CUTLASS_DEVICE static void convert(cute::Tensor<Bits, cute::Layout<cute::_8>> const& bits,
                                     cute::Tensor<Numbers, cute::Layout<cute::_8>>& numbers) {
    uint32_t const eight = cute::recast<uint32_t>(bits)(0)@SIGNED@;
    uint32_t const lower = eight & 0x0f0f0f0f;
    uint32_t const upper = (eight >> 4) & 0x0f0f0f0f;
    uint32_t const fours[] = {__byte_perm(@FIRST@, @SECOND@, 0x5140),
                              __byte_perm(@FIRST@, @SECOND@, 0x7362)};
    auto&& pairs = cute::recast<Array<uint32_t, 4>>(numbers)(0);
    uint32_t const offset = @OFFSET@;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      pairs[i] = __byte_perm(fours[i / 2], @EXPONENT@, i % 2 ? 0x4342 : 0x4140);
      auto& pair = reinterpret_cast<@PAIR@&>(pairs[i]);
      pair = __hsub2(pair, reinterpret_cast<@PAIR@ const&>(offset));
    }
  }
};

}  // namespace cutlass
"""


def _conversion(config: CutlassConfig, packed: Packed) -> str:
    """Return the C++ specialization that converts 4-bit elements to B's dtype."""
    exponent, pair = {
        "bfloat16": ("43", "__nv_bfloat162"),
        "float16": ("64", "__half2"),
    }[config.b]
    signed = config.a == "int4"
    # Inverting the sign bit of a two's complement int4 adds 8.
    offset = f"{exponent}{packed.zero + (8 if signed else 0):02x}"
    halves = ("upper", "lower") if packed.high_first else ("lower", "upper")
    return _filled(
        _CONVERSION,
        TYPE=CPP_TYPES[config.b].removeprefix("cutlass::"),
        SIGNED=" ^ 0x88888888" if signed else "",
        FIRST=halves[0],
        SECOND=halves[1],
        OFFSET=f"0x{offset * 2}",
        EXPONENT=f"0x{exponent * 4}",
        PAIR=pair,
    )


def _filled(text: str, **values: str) -> str:
    """Replace each `@NAME@` in a text by the value of that name."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def _element(dtype: str) -> str:
    """Return CUTLASS's element type of an operand; `_conversion` handles the sign of int4."""
    return "cutlass::uint4b_t" if dtype in INT4 else CPP_TYPES[dtype]


_SCALES = """
struct Scales {
  @TYPE@ const* from;
  @TYPE@* to;
  int columns;
  int groups;
  int64_t stride;
  int64_t pitch;
};
"""
"""Parameters of the transpose of scales from [columns, groups] to [groups, columns]: `stride` is
between columns of the source, `pitch` between groups of the result."""

_TRANSPOSE = """
extern "C" __global__ void @NAME@_scales(__grid_constant__ @NAME@_code::Scales const given) {
  __shared__ @TYPE@ tile[32][33];
  int const column = 32 * blockIdx.x;
  int const group = 32 * blockIdx.y;
  for (int i = threadIdx.y; i < 32; i += blockDim.y) {
    if (column + i < given.columns && group + threadIdx.x < given.groups) {
      tile[i][threadIdx.x] = given.from[(column + i) * given.stride + group + threadIdx.x];
    }
  }
  __syncthreads();
  for (int i = threadIdx.y; i < 32; i += blockDim.y) {
    if (group + i < given.groups && column + threadIdx.x < given.columns) {
      given.to[(group + i) * given.pitch + column + threadIdx.x] = tile[threadIdx.x][i];
    }
  }
}
"""

_TRANSPOSED = """
// Scales as the kernel reads them, at the workspace's start.
Scales scales(Call const& call, void* workspace) {
  Operand const& given = call.tensors[@INDEX@];
  int const groups = (call.k + @GROUP@ - 1) / @GROUP@;
  // TMA takes strides of 16 bytes.
  int64_t const pitch = (int64_t(call.m) + 7) / 8 * 8;
  return {static_cast<@TYPE@ const*>(given.data), static_cast<@TYPE@*>(workspace), call.m, groups,
          given.stride, pitch};
}

int64_t scales_size(Call const& call) {
  Scales const transposed = scales(call, nullptr);
  int64_t const bytes = transposed.groups * transposed.pitch * sizeof(@TYPE@);
  return (bytes + 255) / 256 * 256;
}
"""

_RUN_SCALED = """
int64_t workspace_size(Call const& call) {
  // Any address that is not null: whether there are scales is asked for by that.
  auto const given = arguments(call, const_cast<Call*>(&call));
  if (!Kernel::can_implement(given)) {
    return -1;
  }
  return scales_size(call) + static_cast<int64_t>(Kernel::get_workspace_size(given));
}
@RUN@
int32_t run(Call const& call, void* workspace, cudaStream_t stream) {
  static Loaded kernel("@NAME@_scales");
  Scales transposed = scales(call, workspace);
  dim3 const one(1, 1, 1);
  dim3 const grid((transposed.columns + 31) / 32, (transposed.groups + 31) / 32, 1);
  int32_t const error = kernel.launch(grid, dim3(32, 8, 1), one, 0, stream, &transposed);
  char* const rest = static_cast<char*>(workspace) + scales_size(call);
  return error != 0 ? error : start(arguments(call, workspace), rest, stream);
}
"""

_RUN_PLAIN = """
int64_t workspace_size(Call const& call) {
  auto const given = arguments(call);
  if (!Kernel::can_implement(given)) {
    return -1;
  }
  return static_cast<int64_t>(Kernel::get_workspace_size(given));
}
@RUN@
int32_t run(Call const& call, void* workspace, cudaStream_t stream) {
  return start(arguments(call), workspace, stream);
}
"""


def _specialized(config: CutlassConfig, rendered: Rendered, epilogue: Epilogue) -> str:
    c_pointer, c_strides = "nullptr", "{}"
    if rendered.source is not None:
        operand = f"call.tensors[{3 + rendered.source}]"
        c_pointer = f"static_cast<{CPP_TYPES[config.c]} const*>({operand}.data)"
        c_strides = f"strides<typename Kernel::StrideC>({operand})"
    splits = "  given.scheduler.splits = call.splits;\n" if config.scheduler == "stream_k" else ""
    conversion = "" if epilogue.packed is None else _conversion(config, epilogue.packed)
    declared = transpose = sizes = scales = scaled = parameter = ""
    launches = _RUN_PLAIN
    if epilogue.scales is not None:
        element, index = CPP_TYPES[config.b], str(3 + epilogue.scales)
        declared, transpose, sizes, launches = (
            _filled(text, TYPE=element, INDEX=index, GROUP=str(config.group))
            for text in (_SCALES, _TRANSPOSE, _TRANSPOSED, _RUN_SCALED)
        )
        parameter = ", void* workspace"
        scaled = (
            f",\n       transposed.to, {{_1{{}}, transposed.pitch, int64_t(0)}}, {config.group}"
        )
        scales = "  Scales const transposed = scales(call, workspace);\n"
    return f"""{_HALVES}{_includes(config)}{conversion}{_CALL}{_PROLOGUE}{
        _collectives(config, rendered, "Shape<int, int, int, int>")
    }{declared}{_DEVICE_3X}{transpose}{_HOST}{_LAUNCH}{_STRIDES}{sizes}
typename Kernel::Arguments arguments(Call const& call{parameter}) {{
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  Operand const& d = call.tensors[2];
{scales}  typename Kernel::Arguments given{{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {{call.m, call.n, call.k, call.batch}},
      {{static_cast<{_element(config.a)} const*>(a.data), strides<typename Kernel::StrideA>(a),
       static_cast<{CPP_TYPES[config.b]} const*>(b.data), strides<typename Kernel::StrideB>(b){
        scaled
    }}},
      {{{rendered.arguments},
       {c_pointer}, {c_strides},
       static_cast<{CPP_TYPES[config.d]}*>(d.data), strides<typename Kernel::StrideD>(d)}}}};
  given.hw_info.sm_count = call.sms;
{_RASTER.strip(chr(10))}
{splits}  return given;
}}
{_filled(launches, RUN=_RUN_3X)}{_ENTRIES}"""


def _grouped(config: CutlassConfig, rendered: Rendered) -> str:
    """Return the source of a grouped GEMM.

    A setup kernel computes the groups' sizes and addresses from their end offsets on the device, so
    that the host does not synchronize.
    """
    a, b, d = (CPP_TYPES[item] for item in (config.a, config.b, config.d))
    problem = "cutlass::gemm::GroupProblemShape<Shape<int, int, int>>"
    return f"""{_HALVES}{_includes(config)}#include "cutlass/gemm/group_array_problem_shape.hpp"
{_CALL}{_PROLOGUE}{_collectives(config, rendered, problem)}
using Problem = Shape<int, int, int>;
using StrideA = typename Kernel::InternalStrideA;
using StrideB = typename Kernel::InternalStrideB;
using StrideD = typename Kernel::InternalStrideD;

struct Groups {{
  Problem* problems;
  {a} const** a;
  {b} const** b;
  {d}** d;
  StrideA* a_strides;
  StrideB* b_strides;
  StrideD* d_strides;
}};

struct Setup {{
  Groups groups;
  int count;
  int n;
  int k;
  int const* ends;
  {a} const* a;
  int64_t a_stride;
  {b} const* b;
  int64_t b_batch;
  {d}* d;
  int64_t d_stride;
  StrideA a_strides;
  StrideB b_strides;
  StrideD d_strides;
}};
{_DEVICE_3X}
extern "C" __global__ void @NAME@_groups(__grid_constant__ @NAME@_code::Setup const given) {{
  int const group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= given.count) {{
    return;
  }}
  int const begin = group == 0 ? 0 : given.ends[group - 1];
  @NAME@_code::Groups const& groups = given.groups;
  groups.problems[group] = {{given.ends[group] - begin, given.n, given.k}};
  groups.a[group] = given.a + begin * given.a_stride;
  groups.b[group] = given.b + group * given.b_batch;
  groups.d[group] = given.d + begin * given.d_stride;
  groups.a_strides[group] = given.a_strides;
  groups.b_strides[group] = given.b_strides;
  groups.d_strides[group] = given.d_strides;
}}
{_HOST}{_LAUNCH}{_STRIDES}
// One array after the other, each from a multiple of 16 bytes on.
template <class T>
T* take(char*& next, int count) {{
  T* taken = reinterpret_cast<T*>(next);
  next += (sizeof(T) * count + 15) / 16 * 16;
  return taken;
}}

Groups groups_in(char*& next, int count) {{
  return {{take<Problem>(next, count),  take<{a} const*>(next, count),
          take<{b} const*>(next, count), take<{d}*>(next, count),
          take<StrideA>(next, count),  take<StrideB>(next, count),
          take<StrideD>(next, count)}};
}}

int64_t groups_size(int count) {{
  char* next = nullptr;
  groups_in(next, count);
  return (next - static_cast<char*>(nullptr) + 255) / 256 * 256;
}}

typename Kernel::Arguments arguments(Call const& call, Groups const& groups) {{
  typename Kernel::Arguments given{{
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {{call.batch, groups.problems, nullptr}},
      {{groups.a, groups.a_strides, groups.b, groups.b_strides}},
      {{{rendered.arguments}, nullptr, nullptr, groups.d, groups.d_strides}}}};
  given.hw_info.sm_count = call.sms;
{_RASTER.strip(chr(10))}
  return given;
}}

int64_t workspace_size(Call const& call) {{
  auto const given = arguments(call, Groups{{}});
  if (!Kernel::can_implement(given)) {{
    return -1;
  }}
  return groups_size(call.batch) + static_cast<int64_t>(Kernel::get_workspace_size(given));
}}
{_RUN_3X}
int32_t run(Call const& call, void* workspace, cudaStream_t stream) {{
  static Loaded kernel("@NAME@_groups");
  char* next = static_cast<char*>(workspace);
  Groups const groups = groups_in(next, call.batch);
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  Operand const& d = call.tensors[2];
  Setup setup{{groups, call.batch, call.n, call.k, static_cast<int const*>(call.tensors[3].data),
              static_cast<{a} const*>(a.data), a.stride,
              static_cast<{b} const*>(b.data), b.batch,
              static_cast<{d}*>(d.data), d.stride,
              strides<StrideA>(a), strides<StrideB>(b), strides<StrideD>(d)}};
  dim3 const one(1, 1, 1);
  int32_t const error =
      kernel.launch(dim3((call.batch + 63) / 64, 1, 1), dim3(64, 1, 1), one, 0, stream, &setup);
  char* const rest = static_cast<char*>(workspace) + groups_size(call.batch);
  return error != 0 ? error : start(arguments(call, groups), rest, stream);
}}
{_ENTRIES}"""


def _multistage(config: CutlassConfig, rendered: Rendered) -> str:
    m, n, k = config.tile
    along_m, along_n = config.warps
    a, b, d = (_LAYOUTS[layout] for layout in config.layouts)
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
    return f"""{_HALVES}#include "cutlass/cutlass.h"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
{_CALL}{_PROLOGUE}
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
{_HOST}{_LAUNCH}
typename Kernel::Arguments arguments(Call const& call) {{
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  bool const batched = call.batch > 1;
  return {{batched ? cutlass::gemm::GemmUniversalMode::kBatched
                  : cutlass::gemm::GemmUniversalMode::kGemm,
          {{call.m, call.n, call.k}},
          batched ? call.batch : 1,
          {rendered.arguments},
          a.data, b.data, nullptr, nullptr, a.batch, b.batch, 0, 0,
          a.stride, b.stride, int64_t(0), int64_t(0)}};
}}

int64_t workspace_size(Call const& call) {{
  auto const given = arguments(call);
  dim3 const grid = typename Kernel::Params(given, call.sms, 1).get_grid_dims();
  bool const fits = grid.y <= 65535 && grid.z <= 65535;
  // K is never divided.
  return fits && Kernel::can_implement(given) == cutlass::Status::kSuccess ? 0 : -1;
}}

int32_t run(Call const& call, void*, cudaStream_t stream) {{
  static Loaded kernel("@NAME@");
  typename Kernel::Params parameters(arguments(call), call.sms, 1);
  return kernel.launch(parameters.get_grid_dims(), dim3(Kernel::kThreadCount, 1, 1),
                       dim3(1, 1, 1), sizeof(typename Kernel::SharedStorage), stream,
                       &parameters);
}}
{_ENTRIES}"""
