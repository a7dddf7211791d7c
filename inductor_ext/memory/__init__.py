"""Memory of generated code: reading wrapper lines, planning, arenas, the order of kernels."""
