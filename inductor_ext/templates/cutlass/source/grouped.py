"""Source of an sm_90 kernel for a grouped matmul.

A setup kernel computes the sizes and addresses of the groups from their end offsets on the device,
so that the host does not synchronize.
"""

from __future__ import annotations

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.evt import CPP_TYPES, Rendered
from inductor_ext.templates.cutlass.source.common import (
    CALL,
    ENTRIES,
    HALVES,
    HOST,
    LAUNCH,
    PROLOGUE,
    fill,
)
from inductor_ext.templates.cutlass.source.sm90 import (
    DEVICE,
    RASTER_ORDER,
    START,
    STRIDES,
    collectives,
    includes,
)

_DECLARATIONS = """\
using Problem = Shape<int, int, int>;
using StrideA = typename Kernel::InternalStrideA;
using StrideB = typename Kernel::InternalStrideB;
using StrideD = typename Kernel::InternalStrideD;

struct Groups {
  Problem* problems;
  @A@ const** a;
  @B@ const** b;
  @D@** d;
  StrideA* a_strides;
  StrideB* b_strides;
  StrideD* d_strides;
};

struct Setup {
  Groups groups;
  int count;
  int n;
  int k;
  int const* ends;
  @A@ const* a;
  int64_t a_stride;
  @B@ const* b;
  int64_t b_batch;
  @D@* d;
  int64_t d_stride;
  StrideA a_strides;
  StrideB b_strides;
  StrideD d_strides;
};
"""

_SETUP = """
extern "C" __global__ void @NAME@_groups(__grid_constant__ @NAME@_code::Setup const given) {
  int const group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= given.count) {
    return;
  }
  int const begin = group == 0 ? 0 : given.ends[group - 1];
  @NAME@_code::Groups const& groups = given.groups;
  groups.problems[group] = {given.ends[group] - begin, given.n, given.k};
  groups.a[group] = given.a + begin * given.a_stride;
  groups.b[group] = given.b + group * given.b_batch;
  groups.d[group] = given.d + begin * given.d_stride;
  groups.a_strides[group] = given.a_strides;
  groups.b_strides[group] = given.b_strides;
  groups.d_strides[group] = given.d_strides;
}
"""

_RUN = """\
// One array after the other, each from a multiple of 16 bytes on.
template <class T>
T* take(char*& next, int count) {
  T* taken = reinterpret_cast<T*>(next);
  next += (sizeof(T) * count + 15) / 16 * 16;
  return taken;
}

Groups groups_in(char*& next, int count) {
  return {take<Problem>(next, count),  take<@A@ const*>(next, count),
          take<@B@ const*>(next, count), take<@D@*>(next, count),
          take<StrideA>(next, count),  take<StrideB>(next, count),
          take<StrideD>(next, count)};
}

int64_t groups_size(int count) {
  char* next = nullptr;
  groups_in(next, count);
  return (next - static_cast<char*>(nullptr) + 255) / 256 * 256;
}

typename Kernel::Arguments arguments(Call const& call, Groups const& groups) {
  typename Kernel::Arguments given{
      cutlass::gemm::GemmUniversalMode::kGrouped,
      {call.batch, groups.problems, nullptr},
      {groups.a, groups.a_strides, groups.b, groups.b_strides},
      {@ARGUMENTS@, nullptr, nullptr, groups.d, groups.d_strides}};
  given.hw_info.sm_count = call.sms;
@RASTER_ORDER@
  return given;
}

int64_t workspace_size(Call const& call) {
  auto const given = arguments(call, Groups{});
  if (!Kernel::can_implement(given)) {
    return -1;
  }
  return groups_size(call.batch) + static_cast<int64_t>(Kernel::get_workspace_size(given));
}
@START@
int32_t run(Call const& call, void* workspace, cudaStream_t stream) {
  static Loaded kernel("@NAME@_groups");
  char* next = static_cast<char*>(workspace);
  Groups const groups = groups_in(next, call.batch);
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  Operand const& d = call.tensors[2];
  Setup setup{groups, call.batch, call.n, call.k, static_cast<int const*>(call.tensors[3].data),
              static_cast<@A@ const*>(a.data), a.stride,
              static_cast<@B@ const*>(b.data), b.batch,
              static_cast<@D@*>(d.data), d.stride,
              strides<StrideA>(a), strides<StrideB>(b), strides<StrideD>(d)};
  dim3 const one(1, 1, 1);
  int32_t const error =
      kernel.launch(dim3((call.batch + 63) / 64, 1, 1), dim3(64, 1, 1), one, 0, stream, &setup);
  char* const rest = static_cast<char*>(workspace) + groups_size(call.batch);
  return error != 0 ? error : start(arguments(call, groups), rest, stream);
}
"""


def render_grouped(config: CutlassConfig, rendered: Rendered) -> str:
    """Return the source of a grouped matmul; `rendered` is its epilogue."""
    problem = "cutlass::gemm::GroupProblemShape<Shape<int, int, int>>"
    text = f"""{HALVES}{includes(config)}#include "cutlass/gemm/group_array_problem_shape.hpp"
{CALL}{PROLOGUE}{collectives(config, rendered, problem)}
{_DECLARATIONS}{DEVICE}{_SETUP}{HOST}{LAUNCH}{STRIDES}
{_RUN}{ENTRIES}"""
    return fill(
        text,
        A=CPP_TYPES[config.a],
        B=CPP_TYPES[config.b],
        D=CPP_TYPES[config.d],
        ARGUMENTS=rendered.arguments,
        RASTER_ORDER=RASTER_ORDER.strip("\n"),
        START=START,
    )
