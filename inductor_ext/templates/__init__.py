"""GEMM templates and the selection of a kernel configuration for a GEMM problem.

`device` describes GPUs, `problem` describes a GEMM with its tensors (`tensors`) and its prologue
and epilogue (`fused_ops`), `kernels` joins the configurations of both kernel families, `format`
prints problems and configurations, and `versions` holds the kernel versions that tuning results are
keyed by. `triton` and `cutlass` hold one kernel family each: its configurations, the constraints on
them, their search space and a cost model that predicts microseconds. Apart from code that builds,
launches or adapts kernels these modules are pure: they import neither torch nor Inductor, Triton or
CUTLASS, and name dtypes as torch does (`"bfloat16"`).
"""
