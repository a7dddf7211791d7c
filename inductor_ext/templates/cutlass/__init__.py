"""GEMMs as CUTLASS kernels: own sources on CUTLASS's headers, built by nvcc.

`headers` finds CUTLASS on this machine. `alignment` says how wide a tensor can be accessed.
`config` is what a kernel is compiled for, with its name in CUTLASS's scheme; `constraints` says
which kernel may run which problem, and `ranking` which are worth building. `epilogue` renders what
is done to accumulators, `source` a kernel's whole source, `build` has nvcc build it once for all
processes of a machine, and `launch` calls it.

All of it is pure: neither torch nor Inductor is imported, and of the nvidia-cutlass package only
the headers are used, none of its Python modules.
"""
