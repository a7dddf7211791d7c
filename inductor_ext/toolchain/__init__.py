"""What a compile needs from outside: compilers, CUDA, Triton, CUTLASS, and which of it is there."""
