"""Source of an sm_90 kernel for a matmul or a batched matmul."""

from __future__ import annotations

from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.epilogue import Epilogue
from inductor_ext.templates.cutlass.evt import CPP_TYPES, Rendered
from inductor_ext.templates.cutlass.source.common import (
    CALL,
    ENTRIES,
    HALVES,
    HOST,
    LAUNCH,
    PROLOGUE,
    element,
    fill,
)
from inductor_ext.templates.cutlass.source.mixed_input import (
    RUN_SCALED,
    SCALES,
    TRANSPOSE,
    TRANSPOSED,
    conversion,
)
from inductor_ext.templates.cutlass.source.sm90 import (
    DEVICE,
    RASTER_ORDER,
    START,
    STRIDES,
    collectives,
    includes,
)

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


def render_specialized(config: CutlassConfig, rendered: Rendered, epilogue: Epilogue) -> str:
    """Return the source of a kernel whose epilogue is `rendered`."""
    c_pointer, c_strides = "nullptr", "{}"
    if rendered.source is not None:
        operand = f"call.tensors[{3 + rendered.source}]"
        c_pointer = f"static_cast<{CPP_TYPES[config.c]} const*>({operand}.data)"
        c_strides = f"strides<typename Kernel::StrideC>({operand})"
    splits = "  given.scheduler.splits = call.splits;\n" if config.scheduler == "stream_k" else ""
    converter = "" if epilogue.packed is None else conversion(config, epilogue.packed)
    scales_struct = transpose = sizes = scales = scale_arguments = parameter = ""
    launches = _RUN_PLAIN
    if epilogue.scales is not None:
        scale_type, index = CPP_TYPES[config.b], str(3 + epilogue.scales)
        scales_struct, transpose, sizes, launches = (
            fill(text, TYPE=scale_type, INDEX=index, GROUP=str(config.group))
            for text in (SCALES, TRANSPOSE, TRANSPOSED, RUN_SCALED)
        )
        parameter = ", void* workspace"
        scale_arguments = (
            f",\n       transposed.to, {{_1{{}}, transposed.pitch, int64_t(0)}}, {config.group}"
        )
        scales = "  Scales const transposed = scales(call, workspace);\n"
    return f"""{HALVES}{includes(config)}{converter}{CALL}{PROLOGUE}{
        collectives(config, rendered, "Shape<int, int, int, int>")
    }{scales_struct}{DEVICE}{transpose}{HOST}{LAUNCH}{STRIDES}{sizes}
typename Kernel::Arguments arguments(Call const& call{parameter}) {{
  Operand const& a = call.tensors[0];
  Operand const& b = call.tensors[1];
  Operand const& d = call.tensors[2];
{scales}  typename Kernel::Arguments given{{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {{call.m, call.n, call.k, call.batch}},
      {{static_cast<{element(config.a)} const*>(a.data), strides<typename Kernel::StrideA>(a),
       static_cast<{CPP_TYPES[config.b]} const*>(b.data), strides<typename Kernel::StrideB>(b){
        scale_arguments
    }}},
      {{{rendered.arguments},
       {c_pointer}, {c_strides},
       static_cast<{CPP_TYPES[config.d]}*>(d.data), strides<typename Kernel::StrideD>(d)}}}};
  given.hw_info.sm_count = call.sms;
{RASTER_ORDER.strip(chr(10))}
{splits}  return given;
}}
{fill(launches, RUN=START)}{ENTRIES}"""
