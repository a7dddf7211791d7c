"""Checks of `memory_budget` in generated code, for graphs with dynamic shapes.

The compile checks the peak at the size hints. `add_checks` adds code that compares the peak at the
sizes of each call with the budget: at the beginning of the function for the sizes that its inputs
determine, and for sizes that depend on data after the line that reads them, before anything of that
size is allocated by the generated code. Memory whose size is not known yet is not counted by the
earlier checks. A function without symbolic sizes gets no code.

In Python a check looks the sizes up among those that were accepted before (`budget_runtime`). In
C++ it evaluates the peak; a package reports the error code `budget`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch._inductor import ir
from torch._inductor.virtualized import V

from inductor_ext import exc
from inductor_ext.hooks import context
from inductor_ext.hooks.wrapper_codegen import budget_exception, call_decorators, root_wrapper
from inductor_ext.memory.records import InputDimension
from inductor_ext.memory.symbolic_peak import DevicePeaks, SymbolicPeak, record_function_peaks


@dataclasses.dataclass(frozen=True)
class _Check:
    """A check of a function's peak, at a position in its code."""

    after: Any
    """The line that it follows; None for the beginning of the function."""
    symbols: tuple[sympy.Symbol, ...]
    """The symbols whose values it needs."""
    peaks: DevicePeaks


def add_checks(wrapper: Any, peak: SymbolicPeak, budget: int) -> str:
    """Add checks of the budget to `wrapper.lines`, and tell callers of the function its peak.

    Args:
        wrapper: a wrapper whose lines are planned.
        peak: the memory that the function uses.
        budget: bytes.

    Returns:
        Why memory remains unchecked; empty if none does.
    """
    known = _input_symbols(wrapper)
    record_function_peaks(wrapper, peak.peaks(known))
    checks = _list_checks(wrapper.lines, peak, known)
    if checks and V.graph.fx_wrapper:
        return "fx_wrapper is on and its sizes are dynamic"
    codes: dict[int | None, list[str]] = {}
    for check in checks:
        names = [_describe_symbol(wrapper, symbol) for symbol in check.symbols]
        write = _write_cpp if V.graph.cpp_wrapper else _write_python
        codes[None if check.after is None else id(check.after)] = write(
            wrapper, peak.name, check, names, budget
        )
    lines = codes.get(None, [])
    for line in wrapper.lines:
        lines += [line, *codes.get(id(line), ())]
    wrapper.lines = lines
    checked = {symbol for check in checks for symbol in check.symbols}
    used = {symbol for use in peak.uses for symbol in peak.find_symbols(use.bytes)}
    unknown = sorted(map(str, used - checked))
    return f"the code does not read the sizes {', '.join(unknown)}" if unknown else ""


def _list_checks(
    lines: Sequence[Any], peak: SymbolicPeak, known: set[sympy.Symbol]
) -> list[_Check]:
    """Return the checks: one for the inputs, and one per line that reads sizes."""
    checks = []
    scopes = [known]
    for after, new in [(None, known), *((line, _read_symbols(line)) for line in lines)]:
        name = type(after).__name__
        if name == "EnterSubgraphLine":
            scopes.append(set(scopes[-1]))
        elif name == "ExitSubgraphLine":
            scopes.pop()
        scopes[-1] |= new
        peaks = peak.peaks(scopes[-1], new) if new else None
        if peaks is not None and peaks.results:
            used: set[sympy.Symbol] = set()
            for device_peak in peaks.results.values():
                used |= _find_symbols(device_peak, peaks)
            checks.append(_Check(after, tuple(sorted(used, key=str)), peaks))
    return checks


def _find_symbols(symbol: sympy.Symbol, peaks: DevicePeaks) -> set[sympy.Symbol]:
    parts = peaks.definitions.get(symbol)
    if parts is None:
        return {symbol}
    inner = {free for part in parts for free in part.free_symbols}
    return set().union(*(_find_symbols(free, peaks) for free in inner))


def _input_symbols(wrapper: Any) -> set[sympy.Symbol]:
    """Return the symbols that the function's inputs determine."""
    symbols: set[sympy.Symbol] = set()
    for value in wrapper.get_graph_inputs().values():
        for expression in _expressions(value):
            symbols |= getattr(expression, "free_symbols", set())
    return symbols


def _expressions(value: Any) -> Iterable[Any]:
    if isinstance(value, sympy.Expr):
        return (value,)
    return (*value.get_size(), *value.get_stride()) if is_tensor(value) else ()


def is_tensor(value: Any) -> bool:
    """Whether an input is a tensor, as opposed to a number, an object or a tuple."""
    if isinstance(value, ir.Buffer):
        return isinstance(value.layout, ir.Layout)
    return isinstance(value, ir.TensorBox)


def _read_symbols(line: Any) -> set[sympy.Symbol]:
    """Return the symbols that a line reads from data."""
    name = type(line).__name__
    if name == "DynamicScalarLine":
        return {line.node.sym}
    if name == "UnbackedSymbolDefsLine":
        return set(line.unbacked_bindings or ())
    return set()


def find_input_dimensions(wrapper: Any, symbol: sympy.Symbol) -> tuple[InputDimension, ...]:
    """Return the dimensions of the function's inputs whose size is a symbol."""
    signature = context.current().signature
    inputs = wrapper.get_graph_inputs()
    names = list(inputs)
    if signature is not None and len(signature.tensors) == len(names):
        names = [tensor.name for tensor in signature.tensors]
    return tuple(
        InputDimension(name, dimension)
        for name, value in zip(names, inputs.values(), strict=True)
        if is_tensor(value)
        for dimension, size in enumerate(value.get_size())
        if size == symbol
    )


def _describe_symbol(wrapper: Any, symbol: sympy.Symbol) -> str:
    """Return what a symbol is: a size of an input if possible."""
    first = next(iter(find_input_dimensions(wrapper, symbol)), None)
    name = context.current().dim_names.get(symbol.name, symbol.name)
    return name if first is None else f"{name} ({first.describe()})"


def _write_python(
    wrapper: Any, graph: str, check: _Check, names: Sequence[str], budget: int
) -> list[str]:
    """Write the function of the peaks into the header; return the lines of the check."""
    root = root_wrapper(wrapper)
    numbers = vars(root).setdefault("inductor_ext_budget_checks", [])
    name = f"budget_check{len(numbers)}"
    numbers.append(name)
    arguments = ", ".join(map(str, check.symbols))
    body = [
        f"    {symbol} = {_maximum([wrapper.codegen_python_sizevar(part) for part in parts])}"
        for symbol, parts in check.peaks.definitions.items()
    ]
    results = "".join(f"{symbol}, " for symbol in check.peaks.results.values())
    root.add_import_once("from inductor_ext.memory.budget_runtime import BudgetCheck")
    devices = tuple(check.peaks.results)
    for line in (
        f"def {name}_peaks({arguments}):",
        *body,
        f"    return ({results})",
        f"{name} = BudgetCheck({graph!r}, {budget}, {tuple(names)!r}, {devices!r}, {name}_peaks)",
    ):
        root.header.writeline(line)
    sizes = f"({arguments})" if len(check.symbols) > 1 else arguments
    return [f"if {sizes} not in {name}.accepted: {name}({arguments})"]


def _maximum(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"max({', '.join(parts)})"


def _write_cpp(
    wrapper: Any, graph: str, check: _Check, names: Sequence[str], budget: int
) -> list[str]:
    """Return the lines of the check: a block."""
    root = root_wrapper(wrapper)
    if not V.graph.aot_mode:
        decorator = "inductor_ext.memory.budget_runtime:raise_budget_errors"
        if decorator not in call_decorators(root):
            call_decorators(root).append(decorator)
    lines = ["{"]
    for symbol, parts in check.peaks.definitions.items():
        texts = [wrapper.codegen_sizevar(part) for part in parts]
        value = texts[0] if len(texts) == 1 else f"std::max<int64_t>({{{', '.join(texts)}}})"
        lines.append(f"int64_t {symbol} = {value};")
    for device, symbol in check.peaks.results.items():
        text = _cpp_message(graph, device, symbol, check.symbols, names, budget)
        lines.append(f"if ({symbol} > {budget}LL) throw {budget_exception(root)}({text});")
    return [*lines, "}"]


def _cpp_message(
    graph: str,
    device: str,
    peak: sympy.Symbol,
    symbols: Sequence[sympy.Symbol],
    names: Sequence[str],
    budget: int,
) -> str:
    """Return the C++ expression of the text of exc.MemoryBudgetCallError."""
    values = [f"{name} = \0{symbol}\0" for name, symbol in zip(names, symbols, strict=True)]
    text = exc.MemoryBudgetCallError.template.format(
        graph=graph, sizes=", ".join(values), needed=f"\0{peak}\0", device=device, budget=budget
    )
    parts = [
        f"std::to_string({part})" if index % 2 else json.dumps(part)
        for index, part in enumerate(text.split("\0"))
    ]
    return f"std::string({parts[0]}) + " + " + ".join(parts[1:])
