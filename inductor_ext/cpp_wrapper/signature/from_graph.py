"""Derive a signature from Inductor's graph alone, for compiles without an exported program.

`torch._inductor.aot_compile` receives a graph without its origin. Its inputs have the graph's own
names, and the guards are those of the shape environment. Symbol ranges come from the
`range_constraints` that torch.export leaves on the module (see `use_exported_ranges`), otherwise
from the shape environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]

from inductor_ext.cpp_wrapper.signature import expression, from_export
from inductor_ext.cpp_wrapper.signature.conditions import add_guards
from inductor_ext.cpp_wrapper.signature.dim_names import read_dim_names
from inductor_ext.cpp_wrapper.signature.guard_filter import (
    find_shape_environment,
    ignore_performance_guards,
)
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantOutput,
    Extent,
    Output,
    Signature,
    SymbolInput,
    SymbolOutput,
    TensorInput,
    TensorOutput,
)
from inductor_ext.cpp_wrapper.signature.symbolic import to_node
from inductor_ext.hooks import context


@contextlib.contextmanager
def use_exported_ranges(module: Any) -> Iterator[None]:
    """Use what torch.export recorded about a module's symbols: their ranges and their names.

    Performance-only guards are kept out of its compile.

    The shape environment's range of a symbol starts at 2 where the user's starts at 0, and a guard
    about which variant is faster narrows it further.
    """
    ranges = dict(getattr(module, "range_constraints", None) or {})
    environment = find_shape_environment(
        node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")
    )
    names = read_dim_names(environment) if environment is not None else {}
    names |= context.current().given_names
    with (
        context.enter(symbol_ranges=ranges, dim_names=names),
        ignore_performance_guards(module),
    ):
        yield


def derive_signature(graph: Any) -> Signature:
    """Return the call signature of a graph's generated code; `graph` is a GraphLowering.

    Raises:
        exc.UncheckableInputError: see `from_export.derive_signature`.
    """
    from torch._inductor import config

    inputs = tuple(
        _describe_input(name, index, value)
        for index, (name, value) in enumerate(graph.graph_inputs.items())
    )
    exported_ranges = context.current().symbol_ranges or {}
    ranges = {**graph.sizevars.shape_env.var_to_range, **exported_ranges}
    limits = {str(symbol): range_ for symbol, range_ in ranges.items()}
    signature = Signature(
        inputs=inputs,
        outputs=tuple(
            _describe_output(index, value) for index, value in enumerate(graph.graph_outputs)
        ),
        symbols={
            name: from_export.to_range(limits.get(name))
            for name, _ in from_export.find_symbols(inputs)
        },
        in_spec=config.aot_inductor.serialized_in_spec,
        out_spec=config.aot_inductor.serialized_out_spec,
    )
    return add_guards(signature, graph.sizevars.shape_env)


def _to_extent(value: Any) -> Extent:
    if isinstance(value, int) or value.is_number:
        return int(value)
    node = to_node(value)
    return node if isinstance(node, int) else expression.show(node)


def _describe_input(name: str, index: int, value: Any) -> TensorInput | SymbolInput:
    path = f"args[{index}]"
    if isinstance(value, sympy.Expr):
        kind: Literal["int", "float"] = "int" if value.is_integer else "float"
        return SymbolInput(name, path, kind, str(_to_extent(value)))
    return TensorInput(
        name=name,
        path=path,
        dtype=str(value.get_dtype()).removeprefix("torch."),
        shape=tuple(map(_to_extent, value.get_size())),
        stride=tuple(map(_to_extent, value.get_stride())),
        device=str(value.get_device()),
    )


def _describe_output(index: int, value: Any) -> Output:
    path = f"[{index}]"
    if isinstance(value, sympy.Expr):
        return SymbolOutput(path, "int" if value.is_integer else "float", str(value))
    get_size = getattr(value, "maybe_get_size", None)
    size = get_size() if get_size is not None else None
    if size is None:
        return ConstantOutput(path, None)
    try:
        shape = tuple(map(_to_extent, size))
    except ValueError:
        # Only the generated code knows the size; keep Inductor's own spelling.
        shape = tuple(map(str, size))
    return TensorOutput(
        path,
        str(value.get_dtype()).removeprefix("torch."),
        shape,
        str(value.get_device()),
    )
