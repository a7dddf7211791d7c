"""The line of a wrapper that gives a kernel's result the predicted strides."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch._inductor.codegen.wrapper import WrapperLine
from torch._inductor.virtualized import V

_RUNTIME_IMPORT = "from inductor_ext.hooks.upstream_fixes.stride_runtime import match_strides"


@dataclasses.dataclass
class MatchStridesLine(WrapperLine):
    """A check of a buffer's strides, and a copy if they differ.

    In Python, torch's C++ function checks them, and only a copy costs a call of Python.
    """

    check: str
    copy: str
    """The statement in case the check fails; empty if it makes the copy itself."""

    @staticmethod
    def create(wrapper: Any, node: Any) -> MatchStridesLine:
        """Return the line for a node that has a fixed layout."""
        name = node.get_name()
        size = wrapper.codegen_shape_tuple(node.get_size())
        stride = wrapper.codegen_shape_tuple(node.get_stride())
        if V.graph.cpp_wrapper:
            return MatchStridesLine(wrapper.generate_match_strides(name, size, stride), "")
        wrapper.add_import_once(_RUNTIME_IMPORT)
        arguments = f"({name}, {size}, {stride}, {node.get_op_name()!r})"
        return MatchStridesLine(
            f"assert_size_stride{arguments}", f"{name} = match_strides{arguments}"
        )

    def codegen(self, code: Any) -> None:
        """Write the line."""
        if not self.copy:
            code.writeline(self.check)
            return
        code.writeline("try:")
        with code.indent():
            code.writeline(self.check)
        code.writeline("except AssertionError:")
        with code.indent():
            code.writeline(self.copy)
