"""FX graph passes: describe matmuls, match fusable patterns around them, and plan their kernels."""
