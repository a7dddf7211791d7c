"""Which kernel a GEMM gets: what is known of it, what is measured of it, and the decision.

Everything here works on `GemmProblem`s and never on a graph: a problem met in one model is the same
in any other, in the tables that the package ships, and on the command line.
"""
