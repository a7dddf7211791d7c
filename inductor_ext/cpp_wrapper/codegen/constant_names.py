"""Names of a model's constants in its generated C++.

torch names the variable of a constant like the parameter or buffer, which may be a C++ keyword
(`long`), a macro, or the name of another variable (`buf0`, `stream`). Here the variable has a
prefix that no other name in the generated code begins with. Tables and manifest contain torch's
name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_PREFIX = "attr_"
_UNCHANGED = ("_FOLDED_CONST_", "_frozen_param", "_tensor_constant")
"""Names that torch gives, and looks for."""


def allocate(graph: Any, name: str | None, data: Any, stock: Callable[[Any, str, Any], str]) -> str:
    """Add a constant to a graph, and return the name of its variable.

    Args:
        graph: the GraphLowering of an AOT compile, not of a subgraph.
        name: the constant's name in the exported program; None if it has none.
        data: its value.
        stock: torch's function.
    """
    original = f"constant{len(graph.constants)}" if name is None else name
    if _is_copy(graph, original):
        original = public_name(original)
    if original.startswith(_UNCHANGED):
        return stock(graph, original, data)
    count = len(graph.constants)
    # torch gives a name that begins with a digit the same prefix.
    digit = "constant_" if original[:1].isdigit() else ""
    variable = stock(graph, f"{_PREFIX}{digit}{original}", data)
    if len(graph.constants) == count:  # a constant with the same memory
        return variable
    fqns = graph.dynamo_flat_name_to_original_fqn
    graph.allocated_constant_name[variable] = original
    for table in (graph.named_parameters, graph.named_buffers):
        # torch derives the kind of a constant from its name.
        if original in table:
            table[variable] = data
    if public_name(variable) in fqns:
        graph.dynamo_flat_name_to_original_fqn = {**fqns, variable: fqns[public_name(variable)]}
    return variable


def _is_copy(graph: Any, name: str) -> bool:
    """Whether the constant is a copy on another device, which has the name of a variable."""
    match = re.fullmatch(r"(\w+)_[a-z]+\d+", name)
    return match is not None and match[1].startswith(_PREFIX) and match[1] in graph.constants


def public_name(variable: str) -> str:
    """Return torch's name of a constant."""
    return variable.removeprefix(_PREFIX)
