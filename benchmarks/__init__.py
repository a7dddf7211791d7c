"""Benchmarks of inductor_ext against Inductor. README.md describes how results are stored."""
