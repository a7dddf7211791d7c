"""Triton GEMM templates: configurations, constraints, cost model, and Inductor's template class.

`kernels` holds the kernel sources. Only `inductor_template` and `launcher_prebuild` import
Inductor.
"""
