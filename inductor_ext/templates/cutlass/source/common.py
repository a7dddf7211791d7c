"""C++ text that the sources of all kernels have: the call, its launch and the entry points.

The device half of a source is compiled with INDUCTOR_EXT_DEVICE defined. `NAME` stands for the
kernel's name until the whole source is known, as the name contains its hash.
"""

from __future__ import annotations

from inductor_ext.templates.cutlass.evt import CPP_TYPES
from inductor_ext.templates.cutlass.source.interface import CALL_FIELDS, TENSOR_FIELDS
from inductor_ext.templates.tensors import INT4

NAME = "@NAME@"

LAYOUTS = {"t": "cutlass::layout::RowMajor", "n": "cutlass::layout::ColumnMajor"}


def _struct_fields(fields: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"  {kind} {name};" for kind, name in fields)


CALL = f"""
struct Operand {{
{_struct_fields(TENSOR_FIELDS)}
}};

struct Call {{
{_struct_fields(CALL_FIELDS)}
}};
"""

PROLOGUE = """
namespace @NAME@_code {

using namespace cute;

constexpr auto Round = cutlass::FloatRoundStyle::round_to_nearest;
"""

LAUNCH = """
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

HOST = """
#else

#include <atomic>
#include <cuda.h>

extern "C" __attribute__((visibility("hidden"))) unsigned char const inductor_ext_cubin[];

namespace @NAME@_code {
"""

ENTRIES = """
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

HALVES = "#if defined(INDUCTOR_EXT_DEVICE) || !defined(__CUDA_ARCH__)\n"
"""Guard that excludes the rest from nvcc's device pass over the host half."""


def fill(text: str, **values: str) -> str:
    """Replace each `@NAME@` in a text by the value of that name."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def element(dtype: str) -> str:
    """Return CUTLASS's element type of an operand; `conversion` handles the sign of int4."""
    return "cutlass::uint4b_t" if dtype in INT4 else CPP_TYPES[dtype]
