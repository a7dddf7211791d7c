"""The names of a model's inputs, by the variables that hold them in the generated C++.

Inputs that the model writes to have none: an error must not say that a value comes from the caller.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from inductor_ext.cpp_wrapper.signature.signature import Signature

_TENSOR = re.compile(
    r"(?:(?:wrap_with_raii_handle_if_needed|reinterpret_tensor_wrapper)\()*(\w+)(?=[,)]|$)"
)
"""The C++ of a tensor or of a view of it, in which torch's codegen names the tensor first."""


def find_names(graph: Any, signature: Signature) -> dict[str, str]:
    """Return the names of the inputs by variable; `graph` is a GraphLowering."""
    tensors = signature.tensors
    return {
        variable: tensor.name
        for variable, tensor in zip(graph.graph_inputs, tensors, strict=True)
        if variable not in graph.mutated_inputs
    }


def find_input(expression: str, names: Mapping[str, str]) -> str | None:
    """Return the input that the tensor of a C++ expression is, or is a view of; else None.

    Args:
        expression: C++ that torch's codegen has generated for a tensor.
        names: the result of `find_names`.
    """
    tensor = _TENSOR.match(expression)
    return names.get(tensor[1]) if tensor is not None else None


def describe_tensor(name: str | None) -> str:
    """Return what describes a tensor in the text of a call, see `runtime/operator_errors.h`.

    Args:
        name: the input that it is, or is a view of; None if that is not known.
    """
    return "\1" if name is None else f"\1 from input '{name}'"
