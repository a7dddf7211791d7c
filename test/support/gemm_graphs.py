"""FX graphs with matmuls as Inductor lowers them: traced on fake CUDA tensors, without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from inductor_ext.lowerings.graph.fusion import Fusion
from inductor_ext.lowerings.operands import FusedOperands
from test.support import fake_cuda

__all__ = ["call_operands", "lowered_graph", "operand_count", "tensor"]


def call_operands(fusion: Fusion, values: Sequence[torch.Tensor] = ()) -> FusedOperands[Any]:
    """The arguments of a fusion's call: two if the fusion splits one tensor into halves."""
    operands = fusion.operands
    if fusion.halves:
        names = ("weights", "scales", "zero_points", "gate_biases")
        twice = {name: getattr(operands, name) * 2 for name in names}
        operands = dataclasses.replace(operands, **twice)
    return operands.unflatten(values or operands.flatten())


def operand_count(fusion: Fusion) -> int:
    """How many operands the kernel of a fusion reads besides what its epilogue applies."""
    return len(call_operands(fusion).kernel_operands)


def tensor(
    *shape: int, dtype: torch.dtype = torch.bfloat16, strides: Sequence[int] | None = None
) -> torch.Tensor:
    """An input's sizes, dtype and strides: a tensor on the meta device."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, tuple(strides), dtype=dtype, device="meta")


def lowered_graph(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    dynamic: Sequence[tuple[int, int]] = (),
    **configs: Any,
) -> fx.Graph:
    """The graph of a function after Inductor's post-grad passes.

    Args:
        function: a function of tensors, with one or several results.
        inputs: see `tensor`.
        dynamic: (input, dimension) pairs whose sizes are symbols, equal sizes the same symbol.
        configs: Inductor's options, with `__` for the dot in a name.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
    )

    def results(*arguments: torch.Tensor) -> tuple[Any, ...]:
        result = function(*arguments)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def argument(index: int, item: torch.Tensor) -> torch.Tensor:
        axes = [
            DimDynamic.DUCK if (index, axis) in dynamic else DimDynamic.STATIC
            for axis in range(item.dim())
        ]
        sized = mode.from_tensor(item, symbolic_context=StatelessSymbolicContext(axes))
        return torch.empty_strided(sized.shape, sized.stride(), dtype=item.dtype, device="cuda")

    mode = FakeTensorMode(shape_env=ShapeEnv())
    options = {name.replace("__", "."): value for name, value in configs.items()}
    with fake_cuda.device(), config.patch(options), mode, enable_python_dispatcher():
        arguments = [argument(index, inp) for index, inp in enumerate(inputs)]
        decomposed = make_fx(results, decomposition_table=select_decomp_table())(*arguments)
        # Decompositions write only into tensors that they have created.
        module = make_fx(torch.func.functionalize(decomposed))(*arguments)
        # Sizes are inputs of dynamo's graphs, and not read from intermediate values.
        nodes: dict[Any, fx.Node] = {}
        sizes = module.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
        for node in sizes:
            node.replace_all_uses_with(nodes.setdefault(node.meta["val"].node.expr, node))
        module.graph = fx_graph_cse(module.graph)
        module.graph.eliminate_dead_code()
        with V.set_fake_mode(mode):
            view_to_reshape(module)
            post_grad_passes(module, is_inference=True)
        module.recompile()
    return module.graph
