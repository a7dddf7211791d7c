"""The peak of a planned function as an expression in its sizes.

It counts what the record of the plan counts (`plan_record`), with the sizes of the call in place of
the size hints: arenas, storages outside of them, the memory of called subgraphs and the known
workspace of kernels. At the hints both are equal.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import Max

from inductor_ext.hooks.wrapper_codegen import root_wrapper
from inductor_ext.memory.planner import live_sums, placement_policy
from inductor_ext.memory.planner_input import round_up_expression
from inductor_ext.memory.wrapper_reader import ALIGNMENT, Storage, WrapperMemory

Definitions = dict[sympy.Symbol, tuple[sympy.Expr, ...]]
"""Named expressions in the order of assignment; the value is the maximum of the expressions."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Memory that is in use in [start, end)."""

    device: str
    start: int
    end: int
    bytes: Any
    """As the allocator rounds them: int or sympy expression."""


@dataclasses.dataclass(frozen=True)
class DevicePeaks:
    """Peaks of a function, and the definitions that they use."""

    results: Mapping[str, sympy.Symbol]
    """By device. A device is left out if no size on it depends on a symbol."""
    definitions: Definitions


class SymbolicPeak:
    """The memory that one function uses, and when."""

    def __init__(self, name: str) -> None:
        self.name = name
        """The name of the function in the generated code, which begins the names of definitions."""
        self.uses: list[MemoryUse] = []
        self.definitions: Definitions = {}

    def find_symbols(self, expression: Any) -> set[sympy.Symbol]:
        """Return the symbols whose values an expression needs, those of definitions included."""
        symbols: set[sympy.Symbol] = set()
        pending = list(getattr(expression, "free_symbols", ()))
        while pending:
            symbol = pending.pop()
            if symbol in self.definitions:
                for part in self.definitions[symbol]:
                    pending += part.free_symbols
            else:
                symbols.add(symbol)
        return symbols

    def peaks(
        self, known: Collection[sympy.Symbol], new: Collection[sympy.Symbol] | None = None
    ) -> DevicePeaks:
        """Return the peaks of the devices on which a size depends on known symbols.

        Args:
            known: the symbols that have values. Memory whose size needs others is not counted.
            new: consider only the steps at which a size uses one of these; None for all steps.
        """
        symbols = {use: self.find_symbols(use.bytes) for use in self.uses}
        results: dict[str, sympy.Symbol] = {}
        definitions: Definitions = {}
        for device in dict.fromkeys(use.device for use in self.uses):
            uses = [u for u in self.uses if u.device == device and symbols[u] <= set(known)]
            fresh = {u.bytes for u in uses if symbols[u] & set(known if new is None else new)}
            sums = live_sums.find_largest_sums(map(_span, uses))
            if new is not None:
                sums = [terms for terms in sums if not fresh.isdisjoint(terms)]
            if fresh and sums:
                self._define_needed(definitions, {size for terms in sums for size in terms})
                results[device] = self._define_peak(definitions, device, sums)
        return DevicePeaks(results, definitions)

    def _define_needed(self, definitions: Definitions, sizes: Iterable[Any]) -> None:
        """Add the definitions that sizes use, in the order of assignment."""
        needed: set[sympy.Symbol] = set()
        pending = [symbol for size in sizes for symbol in getattr(size, "free_symbols", ())]
        while pending:
            symbol = pending.pop()
            if symbol in self.definitions and symbol not in needed:
                needed.add(symbol)
                pending += [s for part in self.definitions[symbol] for s in part.free_symbols]
        definitions.update(
            (symbol, parts) for symbol, parts in self.definitions.items() if symbol in needed
        )

    def _define_peak(
        self, definitions: Definitions, device: str, sums: Sequence[live_sums.Sum]
    ) -> sympy.Symbol:
        names: dict[Any, Any] = {}
        for size in dict.fromkeys(size for terms in sums for size in terms):
            names[size] = size
            if not isinstance(size, int) and not size.is_Symbol:
                names[size] = _symbol(f"{self.name}_size{len(definitions)}")
                definitions[names[size]] = (size,)
        peak = _symbol(f"{self.name}_{_identifier(device)}_bytes")
        definitions[peak] = tuple(
            sympy.Add(*(names[size] * count for size, count in terms.items())) for terms in sums
        )
        return peak


def _span(use: MemoryUse) -> tuple[int, int, Any, int]:
    # Constant sizes are counted in bytes, which makes more sums comparable.
    constant = isinstance(use.bytes, int)
    return use.start, use.end, 1 if constant else use.bytes, use.bytes if constant else 1


def _symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True, nonnegative=True)


def _identifier(device: str) -> str:
    return "".join(char if char.isalnum() else "_" for char in device)


def read_peak(
    wrapper: Any,
    memory: WrapperMemory,
    decision: placement_policy.Decision | None,
    *,
    inputs: bool,
) -> SymbolicPeak:
    """Return the memory that a planned function uses.

    Args:
        wrapper: its wrapper.
        memory: its storages, as in the lines of the plan that is used.
        decision: the plan; None if it is Inductor's.
        inputs: whether inputs count that the function frees.
    """
    peak = SymbolicPeak(wrapper.launcher_fn_name)
    placed: set[int] = set()
    until: dict[int, int] = {}
    if decision is not None:
        for arena in decision.arenas:
            indices = [int(member.request.name) for member in arena.members]
            placed.update(indices)
            renamed = {symbol: _symbol(f"{peak.name}_{symbol}") for symbol, _ in arena.definitions}
            for symbol, value in arena.definitions:
                peak.definitions[renamed[symbol]] = (value.xreplace(renamed),)
            size = _plain(sympy.sympify(arena.size).xreplace(renamed))
            device = str(memory.storages[indices[0]].device)
            peak.uses.append(MemoryUse(device, arena.start, arena.end, size))
        until = {old: memory.storages[new].start for new, old in decision.reused_from.items()}
    for index, storage in enumerate([*memory.storages, *(memory.inputs if inputs else ())]):
        if index not in placed:
            end = until.get(index, storage.end)
            use = MemoryUse(str(storage.device), storage.start, end, round_bytes(storage))
            peak.uses.append(use)
    for step, device, size in memory.scratch:
        peak.uses.append(MemoryUse(device, step, step + 1, _plain(size)))
    for (start, end, hints), name in zip(memory.calls, memory.callees, strict=True):
        callee = _function_peaks.get(root_wrapper(wrapper), {}).get(name)
        peak.definitions.update(callee.definitions if callee else {})
        for device, hint in hints.items():
            size = callee.results.get(device, hint) if callee else hint
            peak.uses.append(MemoryUse(device, start, end, size))
    return peak


def _plain(size: Any) -> Any:
    return int(size) if sympy.sympify(size).is_Integer else size


def round_bytes(storage: Storage) -> Any:
    """Return the bytes of a storage as the allocator rounds them: int or sympy expression."""
    alignment = ALIGNMENT.get(storage.device.type, 1)
    if isinstance(storage.bytes, int):
        return storage.hint
    size = storage.bytes
    if not size.is_nonnegative:
        size = Max(0, size)
    return size if alignment == 1 else round_up_expression(size, alignment)


_function_peaks: weakref.WeakKeyDictionary[Any, dict[str, DevicePeaks]] = (
    weakref.WeakKeyDictionary()
)
"""Per root wrapper: the peaks of the functions generated so far, by name."""


def record_function_peaks(wrapper: Any, peaks: DevicePeaks) -> None:
    """Store the peaks of a function at the sizes that its callers pass, for these callers."""
    _function_peaks.setdefault(root_wrapper(wrapper), {})[wrapper.launcher_fn_name] = peaks
