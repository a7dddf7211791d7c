"""Kernel selection for GEMMs: stored tuning results, benchmarking, and the decision.

Everything in this package works on `GemmProblem`s and never on a graph. A problem that occurs in
one model is therefore the same problem in any other model, in the tables shipped with the package,
and on the command line.
"""
