"""From ATen calls to Inductor IR: the extension's lowerings, one module per op family.

A lowering is a function whose first argument is Inductor's own lowering (`stock`), followed by the
call's arguments:

    @register_lowering(torch.ops.aten.mm.default)
    def mm(stock, mat1, mat2, *, layout=None):
        if not covered(mat1, mat2):
            return stock(mat1, mat2, layout=layout)
        ...

Lowerings run only in compiles of the extension. A lowering passes calls that it does not support to
`stock` unchanged. `graph/` finds the groups of FX nodes that one kernel can compute.
"""

from inductor_ext.hooks.lowering_table import register_lowering, registered, unregister_lowering

__all__ = ["register_lowering", "registered", "unregister_lowering"]
