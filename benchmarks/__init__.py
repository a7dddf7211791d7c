"""Measurements of inductor_ext against stock Inductor; README.md says how they are kept."""
