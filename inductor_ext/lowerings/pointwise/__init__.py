"""Lowerings of pointwise operations and reductions."""
