"""Pointwise epilogues that a GEMM template applies itself, before it stores a tile.

Inductor's scheduler can fuse such operations as well, but a template that also reduces its output,
as for a row amax, needs the final values before the store. `make_epilogue` converts an FX graph to
the `epilogue_fn` that a template calls with its accumulators, using Inductor's own lowerings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def make_epilogue(graph: fx.Graph, inputs: Sequence[Any], layout: Any) -> Callable[[Any], Any]:
    """Return the function that maps a tile's accumulators to the tile that is stored.

    During code generation, that function also assigns the tile to the kernel variable `final`, in
    float32 but rounded to the layout's dtype. It uses the template's indices `idx_m` and `idx_n`.

    Args:
        graph: pointwise nodes of the layout's size, with their `dtype` as metadata. The first
            placeholder is the accumulator, the others are the inputs.
        inputs: IR nodes of the layout's size or broadcast to it.
        layout: of the output, [M, columns].
    """
    from torch._inductor.ir import FixedLayout, InputBuffer, TensorBox
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    accumulator, *others = graph.find_nodes(op="placeholder")
    boxes: dict[fx.Node, Any] = dict(zip(others, inputs, strict=True))
    for inp in inputs:
        for name in inp.get_read_names():
            # Code generation bakes the strides in, so the layout must not change afterwards.
            V.graph.get_buffer(name).freeze_layout()
    steps: list[tuple[str, Callable[..., Any]]] = []
    value = accumulator
    for node in graph.nodes:
        if node.op == "output":
            (value,) = node.all_input_nodes
            continue
        name = f"inductor_ext_{node.name}"
        if node.op == "call_function":
            args, kwargs = (
                fx.node.map_arg(item, boxes.__getitem__) for item in (node.args, node.kwargs)
            )
            steps.append((name, lowerings[node.target](*args, **kwargs).make_loader()))
        if node is accumulator or node.op == "call_function":
            # Later nodes read this value as a buffer that exists only by name; `_handler` resolves
            # the load.
            layout_of = FixedLayout(layout.device, node.meta["dtype"], layout.size)
            boxes[node] = TensorBox.create(InputBuffer(name=name, layout=layout_of))

    def compute(tile: Any) -> Any:
        import sympy  # type: ignore[import-untyped]
        from torch._inductor.virtualized import OpsValue

        index = [sympy.Symbol(name, integer=True) for name in ("idx_m", "idx_n")]
        values = {f"inductor_ext_{accumulator.name}": tile}
        with V.set_ops_handler(_handler(values)):
            for name, load in steps:
                loaded = load(index)
                values[name] = loaded.value if isinstance(loaded, OpsValue) else loaded
        final = values[f"inductor_ext_{value.name}"]
        if layout.dtype != torch.float32:
            final = V.ops.to_dtype(final, layout.dtype, use_compute_types=False)
            final = V.ops.to_dtype(final, torch.float32, src_dtype=layout.dtype)
        V.kernel.compute.writeline(f"final = {final}")
        return final

    return compute


def _handler(values: Mapping[str, Any]) -> Any:
    """Return the current ops handler, with loads of the buffers in `values` replaced."""
    from torch._inductor.ops_handler import WrapperHandler
    from torch._inductor.virtualized import V

    class Handler(WrapperHandler):
        def load(self, name: str, index: Any) -> Any:
            return values[name] if name in values else self._inner.load(name, index)

    return Handler(V.get_ops_handler())
