"""The line of a wrapper that gives a kernel's result the predicted strides."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.virtualized import V

_RUNTIME_IMPORT = "from inductor_ext.hooks.upstream_fixes.stride_runtime import match_strides"


@dataclasses.dataclass
class MatchStridesLine(WrapperLine):
    """A check of a buffer's strides, and a copy if they differ."""

    name: str
    text: str

    @staticmethod
    def create(wrapper: Any, node: Any) -> MatchStridesLine:
        """Return the line for a node that has a fixed layout."""
        name = node.get_name()
        size = wrapper.codegen_shape_tuple(node.get_size())
        stride = wrapper.codegen_shape_tuple(node.get_stride())
        if V.graph.cpp_wrapper:
            text = wrapper.generate_match_strides(name, size, stride)
        else:
            wrapper.add_import_once(_RUNTIME_IMPORT)
            text = f"{name} = match_strides({name}, {size}, {stride}, {node.get_op_name()!r})"
        return MatchStridesLine(name, text)

    def codegen(self, code: Any) -> None:
        """Write the line."""
        code.writeline(self.text)
