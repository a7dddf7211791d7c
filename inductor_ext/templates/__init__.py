"""GEMM templates and how one of them is chosen for a problem.

In the order of a choice: `device` holds what is known of GPUs, `problem` states a GEMM, `config`
lists the templates and what a configuration of one is, `constraints` says which configuration may
run which problem, `space` proposes configurations for a problem, and `ranking` predicts their
microseconds and keeps those worth measuring. All of these are pure: they import neither torch nor
Inductor, Triton or CUTLASS, and name dtypes as torch does (`"bfloat16"`).
"""
