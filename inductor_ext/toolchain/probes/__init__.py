"""Probes: how each component of the toolchain is looked for, one module per component."""
