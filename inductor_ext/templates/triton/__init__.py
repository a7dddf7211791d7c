"""Triton GEMM templates: configurations, constraints, cost model, and Inductor's template class.

`kernels` holds the kernels; `inductor_template` alone imports Inductor.
"""
