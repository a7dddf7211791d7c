"""Which constants of an exported program Inductor's `freezing` has computed others from.

With `freezing`, Inductor computes what depends on constants only at compile time: a weight becomes
its transpose under the name `_frozen_param0`, and short results become literals of the code. An
update of the weight would not reach them. The `Recorder` follows each folded value back to the
constants that it was computed from, and `frozen_uses` says where the value of a constant went.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor

from inductor_ext.hooks import context


class Recorder:
    """Collects the folded constants of one compile and where they come from."""

    def __init__(self, model: torch.fx.GraphModule) -> None:
        """
        Args:
            model: the exported module, whose constants are `get_attr` nodes.
        """
        self.constants: dict[str, torch.Tensor] = {}
        """The constants that the program reads, by fully qualified name."""
        for node in model.graph.find_nodes(op="get_attr"):
            value = _find_tensor(model, str(node.target))
            if value is not None and node.users:
                self.constants[str(node.target)] = value
        self.origins: dict[str, frozenset[str]] = {}
        """For every folded constant, the constants of the program that it was computed from."""

    def add(self, name: str, sources: frozenset[str]) -> None:
        """Record that the constant `name` replaces a value computed from the `sources`."""
        self.origins[name] = frozenset(
            origin for source in sources for origin in self.origins.get(source, {source})
        )


def _find_tensor(module: Any, path: str) -> torch.Tensor | None:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, torch.Tensor) else None


def find_sources(node: torch.fx.Node) -> frozenset[str]:
    """Return the constants of a graph that a node is computed from."""
    sources, visited, pending = set(), set(), [node]
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if node.op == "get_attr":
            sources.add(str(node.target))
        pending += node.all_input_nodes
    return frozenset(sources)


def frozen_uses(fqns: Mapping[str, str], values: Iterable[torch.Tensor]) -> list[tuple[str, str]]:
    """Return pairs of a constant of the program and where freezing put its value.

    That is the name of a constant in the generated code, or empty for the code itself. Constants
    that the model reads unchanged are not returned, unless others were computed from them as well.

    Args:
        fqns: fully qualified names of the model's constants by their names in the generated code.
        values: the constants of the model.
    """
    from torch._inductor import config

    recorder = context.current().folding
    if recorder is None or not config.freezing:
        return []
    names = {fqn: name for name, fqn in fqns.items()}
    uses = {
        (origin, names.get(folded, ""))
        for folded, origins in recorder.origins.items()
        for origin in origins & recorder.constants.keys()
    }
    known = {origin for origin, _ in uses} | names.keys()
    present = [find_memory(value) for value in values]
    uses |= {
        (fqn, "")
        for fqn, value in recorder.constants.items()
        if fqn not in known and find_memory(value) not in present  # tied weights have one name
    }
    return sorted(uses)


def find_memory(value: torch.Tensor) -> object:
    """Return what two tensors on the same memory have in common."""
    if value.is_mkldnn or isinstance(value, FakeTensor) or value.is_meta:
        return id(value)
    try:
        address = value.data_ptr()
    except (RuntimeError, NotImplementedError):  # such as a subclass that consists of others
        return id(value)
    stride = value.stride() if value.layout == torch.strided else ()
    return address, value.shape, stride, value.dtype
