"""CUTLASS GEMM kernels: the extension's own sources on CUTLASS's headers, built with nvcc.

- `config`: what a kernel is compiled for, and its name in CUTLASS's scheme
- `constraints`: which kernel may run which problem; `alignment`: vector width of a tensor
- `cost_model`: which kernels are worth building
- `evt`: epilogues as CUTLASS visitor trees; `source`: the whole CUDA source of a kernel
- `find_headers`: finds CUTLASS; `nvcc_build`: builds a source once per machine;
  `background_build`: the same in a background process
- `launch`: arguments of a launch; `runtime`: launches from generated code;
  `aot_link`: links kernels into AOT-compiled models

Only `runtime` and `Epilogue.evaluate` import torch, and nothing here imports Inductor. Of the
nvidia-cutlass package only the headers are used, none of its Python modules.
"""
