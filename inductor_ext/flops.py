"""FLOPs of the operators of an FX graph, by the formulas of `torch.utils.flop_counter`.

torch is imported when a function is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx


def count_flops(node: fx.Node) -> int:
    """Return the FLOPs of a matmul, a convolution or attention on a GPU; 0 for other nodes.

    With dynamic shapes, at the sizes of the first call. Sizes that are not known before the run
    count as 0.
    """
    from torch.utils.flop_counter import flop_registry

    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or count is None:
        return 0
    try:
        args, kwargs = _read_values((node.args, node.kwargs))
        return int(count(*args, **kwargs, out_val=_at_hints(node.meta["val"])))
    except Exception:
        # A formula may not accept every argument that its operator does.
        return 0


def _read_values(arguments: Any) -> Any:
    from torch import fx

    return fx.node.map_arg(arguments, lambda node: _at_hints(node.meta["val"]))


def _at_hints(value: Any) -> Any:
    """Return a value at the hints of its sizes: formulas compare sizes, which would add guards."""
    import torch

    if isinstance(value, torch.Tensor):
        return torch.empty([_at_hints(size) for size in value.shape], device="meta")
    if isinstance(value, (list, tuple)):
        return [_at_hints(element) for element in value]
    return value.node.hint if isinstance(value, torch.SymInt) else value
