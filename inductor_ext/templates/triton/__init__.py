"""Triton GEMM templates: configurations, constraints, cost model, and Inductor's template class.

`kernels` holds the kernel sources. Only `inductor_template`, `template_kernel` and
`launcher_prebuild` import Inductor.
"""
