"""CUDA sources of CUTLASS kernels.

One source serves every problem of its class: sizes, strides, scalars, the number of splits, swizzle
and the order of tiles are arguments of a launch. Class and kernel are what is compiled: dtypes,
layouts, alignments, tile, cluster, schedule and the epilogue's expression.

A source defines two functions in C, which are the same for all kernels:

    int64_t inductor_ext_workspace_size(Call const* call);
    int32_t inductor_ext_run(Call const* call, void* workspace, cudaStream_t stream);

The first gives bytes, or -1 where the kernel cannot run the call (an alignment, say). The second
launches, and gives 0 or an error: what `cutlassGetStatusString` names, or 1000 and CUDA's own code.
`Call` is described by `CALL_FIELDS`. Its tensors are a, b and the output, in the kernel's order (b,
a and the output where operands are exchanged), then the epilogue's inputs, then its other outputs;
of a grouped product, a, b, the output and the ends of the groups (int32).

Includes are few, and nothing of CUTLASS's utilities for hosts is among them: parsing what is not
needed is most of a compile.
"""

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping
from dataclasses import dataclass

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import CPP_TYPES, Epilogue, Rendered, render
from inductor_ext.templates.problem import DTYPE_BITS

__all__ = ["CALL_FIELDS", "RASTER", "Source", "source"]

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
"""Types and names of a call's fields, in order. Sizes are as the kernel sees them; `batch` counts
matrices or groups; `sms` are those of the device, 0 for asking it."""

TENSOR_FIELDS = (("void*", "data"), ("int64_t", "stride"), ("int64_t", "batch"))
"""Of a tensor: its address, elements from row to row (or column to column), and from matrix to
matrix."""

RASTER: Mapping[str, int] = types.MappingProxyType({"heuristic": 0, "along_m": 1, "along_n": 2})
"""A call's `raster` by name."""


@dataclass(frozen=True)
class Source:
    """A kernel's source."""

    name: str
    """The kernel's, in CUTLASS's scheme, and 8 digits that tell its epilogue and architecture from
    others."""
    text: str
    architecture: str
    """nvcc's, as in "90a"."""


def source(config: CutlassConfig, epilogue: Epilogue) -> Source:
    """The source of a kernel.

    Args:
        config: what only a launch decides makes no difference.
        epilogue: what is stored.

    Raises:
        epilogue.NotExpressible: the kernel cannot have that epilogue.
    """
    config = config.compiled
    rendered = render(epilogue, config)
    if config.grouped:
        body = _grouped(config, rendered)
    elif config.arch == 90:
        body = _specialized(config, rendered)
    else:
        body = _multistage(config, rendered)
    digest = hashlib.sha256(f"{config.architecture}\0{body}".encode()).hexdigest()[:8]
    name = f"{config.name}_{digest}"
    text = body.replace(_NAME, name)
    return Source(name, text, config.architecture)


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
namespace {
namespace @NAME@ {

using namespace cute;

constexpr auto Round = cutlass::FloatRoundStyle::round_to_nearest;
"""

_ENTRIES = """
}  // namespace @NAME@
}  // namespace

extern "C" __attribute__((visibility("default"))) int64_t inductor_ext_workspace_size(
    Call const* call) {
  return @NAME@::workspace_size(*call);
}

extern "C" __attribute__((visibility("default"))) int32_t inductor_ext_run(
    Call const* call, void* workspace, cudaStream_t stream) {
  return @NAME@::run(*call, workspace, stream);
}
"""

_WORKSPACE = """
int64_t workspace_size(Call const& call) {
  auto const given = arguments(call);
  if (Gemm::can_implement(given) != cutlass::Status::kSuccess) {
    return -1;
  }
  return static_cast<int64_t>(Gemm::get_workspace_size(given));
}
"""

_STATUS = """
int32_t status_of(cutlass::Status status) {
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? static_cast<int32_t>(status) : 1000 + static_cast<int32_t>(error);
}
"""

_RUN = """
int32_t run(Call const& call, void* workspace, cudaStream_t stream) {
  Gemm gemm;
  auto const given = arguments(call);
  cutlass::Status status = gemm.initialize(given, workspace, stream);
  if (status == cutlass::Status::kSuccess) {
    status = gemm.run(stream);
  }
  return status_of(status);
}
"""


def _shape(sizes: tuple[int, ...]) -> str:
    return f"Shape<{', '.join(f'_{size}' if size in _NAMED else f'Int<{size}>' for size in sizes)}>"


_NAMED = frozenset({1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256})
"""Numbers that CuTe has a type by name of."""

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
    """Tile, epilogue, main loop and kernel of capability 9.0, by CUTLASS's builders."""
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
        # Those of plain kernels are named for who stores: one group of warps, or two together.
        stored = schedule.removesuffix("Pingpong")
    scheduler = "StreamKScheduler" if config.scheduler == "stream_k" else "PersistentScheduler"
    if config.grouped:
        scheduler = "GroupScheduler"
    a, b, d = (_LAYOUTS[each] for each in config.layouts)
    align_a, align_b, align_d = config.alignments
    compute = "int32_t" if config.d == "int32" else "float"
    align_c = align_d if config.c == "void" else 128 // DTYPE_BITS[config.c]
    stages = (
        f"cutlass::gemm::collective::StageCount<{config.stages}>"
        if config.stages
        else "cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(\n"
        "        sizeof(typename CollectiveEpilogue::SharedStorage))>"
    )
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
    {CPP_TYPES[config.a]}, {a}{pointer}, {align_a},
    {CPP_TYPES[config.b]}, {b}{pointer}, {align_b},
    {CPP_TYPES[config.accumulator]}, Tile, Cluster,
    {stages},
    cutlass::gemm::Kernel{grouped}{schedule}{fast}>::CollectiveOp;

struct Kernel
    : cutlass::gemm::kernel::GemmUniversal<
          {problem}, CollectiveMainloop, CollectiveEpilogue, cutlass::gemm::{scheduler}> {{}};

using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
"""


_RASTER = """
  using Order = cutlass::gemm::kernel::detail::RasterOrderOptions;
  given.scheduler.max_swizzle_size = call.swizzle;
  given.scheduler.raster_order = call.raster == 1   ? Order::AlongM
                                 : call.raster == 2 ? Order::AlongN
                                                    : Order::Heuristic;
"""

_INCLUDES_3X = """#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
"""


def _specialized(config: CutlassConfig, rendered: Rendered) -> str:
    c_pointer, c_strides = "nullptr", "{}"
    if rendered.source is not None:
        operand = f"call.tensors[{3 + rendered.source}]"
        c_pointer = f"static_cast<{CPP_TYPES[config.c]} const*>({operand}.data)"
        c_strides = f"strides<typename Kernel::StrideC>({operand})"
    splits = "  given.scheduler.splits = call.splits;\n" if config.scheduler == "stream_k" else ""
    return f"""{_INCLUDES_3X}{_CALL}{_PROLOGUE}{
        _collectives(config, rendered, "Shape<int, int, int, int>")
    }{_STRIDES}
typename Gemm::Arguments arguments(Call const& call) {{
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  Operand const& d = call.tensors[2];
  typename Gemm::Arguments given{{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {{call.m, call.n, call.k, call.batch}},
      {{static_cast<{CPP_TYPES[config.a]} const*>(a.data), strides<typename Kernel::StrideA>(a),
       static_cast<{CPP_TYPES[config.b]} const*>(b.data), strides<typename Kernel::StrideB>(b)}},
      {{{rendered.arguments},
       {c_pointer}, {c_strides},
       static_cast<{CPP_TYPES[config.d]}*>(d.data), strides<typename Kernel::StrideD>(d)}}}};
  given.hw_info.sm_count = call.sms;
{_RASTER.strip(chr(10))}
{splits}  return given;
}}
{_WORKSPACE}{_STATUS}{_RUN}{_ENTRIES}"""


def _grouped(config: CutlassConfig, rendered: Rendered) -> str:
    """Sizes and addresses of groups are made on the device, of the ends of groups that are there:
    the host waits for nothing.
    """
    a, b, d = (CPP_TYPES[each] for each in (config.a, config.b, config.d))
    problem = "cutlass::gemm::GroupProblemShape<Shape<int, int, int>>"
    return f"""{_INCLUDES_3X}#include "cutlass/gemm/group_array_problem_shape.hpp"
{_CALL}{_PROLOGUE}{_collectives(config, rendered, problem)}{_STRIDES}
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

__global__ void set_up(Groups groups, int count, int n, int k, int const* ends,
                       {a} const* a, int64_t a_stride, {b} const* b, int64_t b_batch,
                       {d}* d, int64_t d_stride, StrideA a_strides, StrideB b_strides,
                       StrideD d_strides) {{
  int const group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= count) {{
    return;
  }}
  int const begin = group == 0 ? 0 : ends[group - 1];
  groups.problems[group] = {{ends[group] - begin, n, k}};
  groups.a[group] = a + begin * a_stride;
  groups.b[group] = b + group * b_batch;
  groups.d[group] = d + begin * d_stride;
  groups.a_strides[group] = a_strides;
  groups.b_strides[group] = b_strides;
  groups.d_strides[group] = d_strides;
}}

typename Gemm::Arguments arguments(Call const& call, Groups const& groups) {{
  typename Gemm::Arguments given{{
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
  if (Gemm::can_implement(given) != cutlass::Status::kSuccess) {{
    return -1;
  }}
  return groups_size(call.batch) + static_cast<int64_t>(Gemm::get_workspace_size(given));
}}
{_STATUS}
int32_t run(Call const& call, void* workspace, cudaStream_t stream) {{
  char* next = static_cast<char*>(workspace);
  Groups const groups = groups_in(next, call.batch);
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  Operand const& d = call.tensors[2];
  set_up<<<(call.batch + 63) / 64, 64, 0, stream>>>(
      groups, call.batch, call.n, call.k, static_cast<int const*>(call.tensors[3].data),
      static_cast<{a} const*>(a.data), a.stride, static_cast<{b} const*>(b.data), b.batch,
      static_cast<{d}*>(d.data), d.stride, strides<StrideA>(a), strides<StrideB>(b),
      strides<StrideD>(d));
  Gemm gemm;
  char* const rest = static_cast<char*>(workspace) + groups_size(call.batch);
  cutlass::Status status = gemm.initialize(arguments(call, groups), rest, stream);
  if (status == cutlass::Status::kSuccess) {{
    status = gemm.run(stream);
  }}
  return status_of(status);
}}
{_ENTRIES}"""


def _multistage(config: CutlassConfig, rendered: Rendered) -> str:
    m, n, k = config.tile
    along_m, along_n = config.warps
    a, b, d = (_LAYOUTS[each] for each in config.layouts)
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
    return f"""#include "cutlass/cutlass.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
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

using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments arguments(Call const& call) {{
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
{_WORKSPACE}{_STATUS}{_RUN}{_ENTRIES}"""
