"""Facts for the page of a report: GEMMs as measured on a GPU, and names that need escaping."""

from __future__ import annotations

from inductor_ext.hooks.records import CompileRecord
from inductor_ext.reports.compile_facts import CompileFacts, KernelProfile, KernelTime, Phase
from inductor_ext.reports.gemm_report import Gemm, GemmReport, KernelFusion
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.records import MatmulCandidate, MatmulRecord
from inductor_ext.templates.triton.config import GemmConfig
from test.support.memory_plans import SMALL, WHOLE

CONFIG = GemmConfig("cp_async", 64, 64, 64, 3, 4)

MEASURED = Gemm(
    MatmulRecord(
        operator="aten.mm",
        operands=("bfloat16[16, 4096]", "bfloat16[4096, 1024]"),
        module="layers.0.key",
        problem=GemmProblem.contiguous("mm", 16, 1024, 4096),
        device="NVIDIA H200",
        roofline=2.0,
        chosen=CONFIG,
        origin="measured",
        reason="5.0 us, Inductor (default) 8.0 us",
        candidates=(
            MatmulCandidate(None, None, 8.0, None),
            MatmulCandidate(CONFIG, 4.0, 5.0, None),
        ),
        declined=("gated <up>: predicted to be slower",),
    ),
    ("layers.0.key", "layers.1.key"),
    fused=("relu",),
    separate=("softmax (it is a reduction)",),
)

UNCOVERED = Gemm(
    MatmulRecord(
        operator="aten.addmm",
        operands=("float32[512]", "float32[32, 256]"),
        module="",
        problem=None,
        device="cpu",
        roofline=None,
        chosen=None,
        origin="uncovered",
        reason="it runs on cpu",
        candidates=(),
    ),
    ("",),
)

GRAPH = CompileRecord("inference", 9, 3.5, "off", None, {})

FACTS = CompileFacts(
    title="<Model> & more",
    environment=(("device", "NVIDIA H200 (cuda:0)"), ("torch", "2.13.0")),
    gemms=GemmReport("<Model> & more", (MEASURED, UNCOVERED)),
    plans=(SMALL, *WHOLE.records[:1]),
    graphs=(GRAPH,),
    phases=(Phase("code generation", 3.0), Phase("dynamo", 1.0)),
    other_kernels=(KernelFusion(("mul", "sum"), ("sqrt (nodes numel/rnumel incompatibility)",)),),
    tuned=1,
    kernels=KernelProfile(
        "cuda",
        (
            *(KernelTime(f"triton_<fused>_{number}", 2, 40.0 - number) for number in range(22)),
            KernelTime("a_name_" * 30, 1, 1.0),
        ),
        outside=7.0,
    ),
    call_microseconds=1234.5,
    recompiled=(CompileRecord("inference", 9, 0.25, "hit", "key", {}),),
)
