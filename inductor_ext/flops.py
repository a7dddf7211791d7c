"""FLOPs of the operators of an FX graph, by the formulas of `torch.utils.flop_counter`.

torch is imported when a function is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx


def count_flops(node: fx.Node) -> int:
    """Return the FLOPs of a matmul, a convolution or attention; 0 for other nodes.

    With dynamic shapes, at the sizes of the first call.
    """
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or count is None:
        return 0
    args, kwargs = _read_values((node.args, node.kwargs))
    flops = count(*args, **kwargs, out_val=node.meta.get("val"))
    hint = flops.node.hint if hasattr(flops, "node") else flops
    return int(hint or 0)


def _read_values(arguments: Any) -> Any:
    from torch import fx

    return fx.node.map_arg(arguments, lambda node: node.meta.get("val"))
