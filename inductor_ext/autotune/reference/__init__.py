"""The reference program of a GEMM problem: PyTorch code as in a model, with matching inputs.

A problem can be compiled, verified and timed with it anywhere, without the model that it came from.
`program(problem)` returns a program with the operator that Inductor meets in a graph and, around
it, the prologue and the epilogue as plain torch ops. `inputs.py` says which inputs it takes.

Whatever a problem does not specify is chosen here and does not affect the cost. Row and matrix
inputs of the epilogue are added, column and scalar inputs multiplied. If weights are dequantized
without scales, the first row input is their scale and multiplies, too. The remaining pointwise ops
are activations (gelu, erf, silu, sigmoid) as far as the count allows, then cheap ops. For a problem
with a tree (`Epilogue.tree`) the program computes the tree. Values that are stored as integers are
scaled to the integer range first, so that errors are visible; values that are stored as bools are
compared with 0.

Needs torch but not Inductor.
"""

from inductor_ext.autotune.reference.inputs import Input
from inductor_ext.autotune.reference.operators import ACTIVATIONS, precision, select
from inductor_ext.autotune.reference.stored_values import FILLING, rounds, unpack_int4
from inductor_ext.autotune.reference.torch_program import Program, program

__all__ = [
    "ACTIVATIONS",
    "FILLING",
    "Input",
    "Program",
    "precision",
    "program",
    "rounds",
    "select",
    "unpack_int4",
]
