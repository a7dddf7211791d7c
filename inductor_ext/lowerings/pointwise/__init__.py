"""Lowerings of pointwise ops and reductions."""
