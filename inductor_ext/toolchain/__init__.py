"""The toolchain of a compile: compilers, CUDA, Triton, CUTLASS, and which of them are installed."""
