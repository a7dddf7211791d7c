"""Derive a signature from Inductor's graph alone, for compiles without an exported program.

`torch._inductor.aot_compile` receives a graph without its origin. Its inputs have the graph's own
names, and the guards are those of the shape environment. Symbol ranges come from the
`range_constraints` that `torch.export` has left on the module (see `module_given`), otherwise from
the shape environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import sympy  # type: ignore[import-untyped]

from inductor_ext.cpp_wrapper.signature import expression, from_export
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantOutput,
    Extent,
    Output,
    Range,
    Signature,
    SymbolInput,
    SymbolOutput,
    TensorInput,
    TensorOutput,
)
from inductor_ext.hooks import context

__all__ = ["module_given", "signature"]


@contextlib.contextmanager
def module_given(module: Any) -> Iterator[None]:
    """Use a module's exported symbol ranges, and keep performance-only guards out of its compile.

    The shape environment's range of a symbol starts at 2 where the user's starts at 0, and a guard
    about which variant is faster narrows it further.
    """
    ranges = dict(getattr(module, "range_constraints", None) or {})
    with context.enter(symbol_ranges=ranges), from_export.without_preferences(module):
        yield


def signature(graph: Any) -> Signature:
    """Return the call signature of a graph's generated code; `graph` is a GraphLowering.

    Raises:
        exc.UncheckableInputError: see `from_export.signature`.
    """
    from torch._inductor import config

    inputs = tuple(
        _input(name, index, value) for index, (name, value) in enumerate(graph.graph_inputs.items())
    )
    symbols: dict[str, Range] = {}
    known = {str(symbol): limits for symbol, limits in _ranges(graph)}
    for inp in inputs:
        extents: tuple[Extent, ...] = (
            (*inp.shape, *inp.stride) if isinstance(inp, TensorInput) else (inp.symbol,)
        )
        for extent in extents:
            if isinstance(extent, str):
                for name in expression.symbols(expression.parse(extent)):
                    symbols[name] = from_export.range_of(known.get(name))
    found = Signature(
        inputs=inputs,
        outputs=tuple(_output(index, value) for index, value in enumerate(graph.graph_outputs)),
        symbols=symbols,
        in_spec=config.aot_inductor.serialized_in_spec,
        out_spec=config.aot_inductor.serialized_out_spec,
    )
    return from_export.with_guards(found, graph.sizevars.shape_env)


def _ranges(graph: Any) -> Any:
    exported_ranges = context.current().symbol_ranges or {}
    return {**graph.sizevars.shape_env.var_to_range, **exported_ranges}.items()


def _extent(value: Any) -> Extent:
    if isinstance(value, int) or value.is_number:
        return int(value)
    node = from_export.node_of(value)
    return node if isinstance(node, int) else expression.show(node)


def _input(name: str, index: int, value: Any) -> TensorInput | SymbolInput:
    path = f"args[{index}]"
    if isinstance(value, sympy.Expr):
        kind: Literal["int", "float"] = "int" if value.is_integer else "float"
        return SymbolInput(name, path, kind, str(_extent(value)))
    return TensorInput(
        name=name,
        path=path,
        dtype=str(value.get_dtype()).removeprefix("torch."),
        shape=tuple(map(_extent, value.get_size())),
        stride=tuple(map(_extent, value.get_stride())),
        device=str(value.get_device()),
    )


def _output(index: int, value: Any) -> Output:
    path = f"[{index}]"
    if isinstance(value, sympy.Expr):
        return SymbolOutput(path, "int" if value.is_integer else "float", str(value))
    get_size = getattr(value, "maybe_get_size", None)
    size = get_size() if get_size is not None else None
    if size is None:
        return ConstantOutput(path, None)
    try:
        shape = tuple(map(_extent, size))
    except ValueError:
        # Only the generated code knows the size; keep Inductor's own spelling.
        shape = tuple(map(str, size))
    return TensorOutput(
        path,
        str(value.get_dtype()).removeprefix("torch."),
        shape,
        str(value.get_device()),
    )
