"""C++ text for 4-bit weights: their conversion and the transpose of their group scales."""

from __future__ import annotations

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Packed
from inductor_ext.templates.cutlass.evt import CPP_TYPES
from inductor_ext.templates.cutlass.source.common import fill

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


def conversion(config: CutlassConfig, packed: Packed) -> str:
    """Return the C++ specialization that converts 4-bit elements to B's dtype."""
    exponent, pair = {
        "bfloat16": ("43", "__nv_bfloat162"),
        "float16": ("64", "__half2"),
    }[config.b]
    signed = config.a == "int4"
    # Inverting the sign bit of a two's complement int4 adds 8.
    offset = f"{exponent}{packed.zero + (8 if signed else 0):02x}"
    halves = ("upper", "lower") if packed.high_first else ("lower", "upper")
    return fill(
        _CONVERSION,
        TYPE=CPP_TYPES[config.b].removeprefix("cutlass::"),
        SIGNED=" ^ 0x88888888" if signed else "",
        FIRST=halves[0],
        SECOND=halves[1],
        OFFSET=f"0x{offset * 2}",
        EXPONENT=f"0x{exponent * 4}",
        PAIR=pair,
    )


SCALES = """
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

TRANSPOSE = """
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

TRANSPOSED = """
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

RUN_SCALED = """
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
