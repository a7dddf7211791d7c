"""Writes a plan into the lines of a generated wrapper.

`write_plan` replaces the lines that allocate the members of an arena by lines of `arena_lines`, and
those of a storage that reuses another one's memory by Inductor's ReuseLine.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor.codegen import wrapper as wrapper_ir
from torch._inductor.codegen.common import WorkspaceArg
from torch._inductor.virtualized import V

from inductor_ext.hooks.wrapper_codegen import root_wrapper
from inductor_ext.memory.arena_lines import (
    ArenaEndLine,
    ArenaLine,
    ArenaVariable,
    MemberEndLine,
    MemberLine,
    MemberPlace,
)
from inductor_ext.memory.planner import arenas, placement_policy
from inductor_ext.memory.planner.arena_plan import Arena
from inductor_ext.memory.wrapper_reader import Storage, WrapperMemory
from inductor_ext.settings import Settings

MIN_REPLAN_RATIO = 1.05
"""Ratio of arena size to lower bound, at the worst of the sampled sizes, above which the arena is
planned again at run time."""


def write_plan(
    wrapper: Any,
    lines: Sequence[Any],
    memory: WrapperMemory,
    decision: placement_policy.Decision,
    settings: Settings,
) -> tuple[list[Any], list[ArenaVariable]]:
    """Return the lines with a plan applied, and the variables of its arenas.

    Args:
        wrapper: the wrapper of the lines.
        lines: the lines that `memory` was read from. They are not modified.
        memory: the storages of the lines.
        decision: the plan; its indices are those of the storages.
        settings: memory_debug adds checks and poisoning of arenas; memory_replan allows arenas that
            are planned at run time.
    """
    writer = _Writer(wrapper, lines, memory, decision, settings)
    return writer.result(), writer.variables


class _Writer:
    """See `write_plan`."""

    def __init__(
        self,
        wrapper: Any,
        lines: Sequence[Any],
        memory: WrapperMemory,
        decision: placement_policy.Decision,
        settings: Settings,
    ) -> None:
        self.wrapper = wrapper
        self.storages = memory.storages
        self.removed = memory.removed
        self.decision = decision
        self.debug = settings.memory_debug
        self.replan = settings.memory_replan
        self.replaced: dict[int, list[Any]] = {}
        """Step -> the lines that replace its line."""
        self.added: dict[int, list[Any]] = {}
        """Step -> the lines to add after it."""
        self.lines = self._copy_lines(lines)
        self.variables = [self._variable(index) for index in range(len(decision.arenas))]
        for variable, arena in zip(self.variables, decision.arenas, strict=True):
            self._write_arena(variable, arena)
        for later, earlier in decision.reused_from.items():
            self._write_reuse(self.storages[earlier], self.storages[later])

    def _copy_lines(self, originals: Sequence[Any]) -> list[Any]:
        """Return copies of the lines, with those of unneeded buffers replaced by null lines.

        Communication buffers reuse only each other's memory, as in Inductor.
        """
        lines = []
        states = [wrapper_ir.MemoryPlanningState()]
        for line in originals:
            if isinstance(line, wrapper_ir.EnterSubgraphLine):
                states.append(wrapper_ir.MemoryPlanningState())
            elif isinstance(line, wrapper_ir.ExitSubgraphLine):
                states.pop()
            elif isinstance(line, _REUSABLE_LINES):
                if line.node.get_name() in self.removed:
                    line = wrapper_ir.NullLine(self.wrapper)
                else:
                    line = copy.copy(line)
                    line = line.plan(states[-1]) if line.comm_buffer else line
            lines.append(line)
        return lines

    def result(self) -> list[Any]:
        """Return the lines with the decision applied."""
        lines = []
        for step, line in enumerate(self.lines):
            lines += self.replaced.get(step, [line])
            lines += self.added.get(step, [])
        while lines and isinstance(lines[-1], _ENDS):
            # The end of the function frees them.
            lines.pop()
        return lines

    def members(self, arena: Arena) -> list[tuple[Storage, MemberPlace]]:
        """Return the storages of an arena and their offsets, first allocated first."""
        pairs = [
            (self.storages[int(member.request.name)], MemberPlace(index, member.offset))
            for index, member in enumerate(arena.members)
        ]
        return sorted(pairs, key=lambda pair: pair[0].start)

    def _variable(self, index: int) -> ArenaVariable:
        arena = self.decision.arenas[index]
        dtypes = [storage.node.get_dtype() for storage, _ in self.members(arena)]
        ranked = sorted(set(dtypes), key=lambda dtype: (-dtypes.count(dtype), str(dtype)))
        device = self.storages[int(arena.members[0].request.name)].device
        name = _arena_name(self.wrapper)
        replan = None
        if self.replan and arena.worst_ratio > MIN_REPLAN_RATIO and not V.graph.cpp_wrapper:
            replan = arenas.make_replanner(arena)
        return ArenaVariable(name, device, arena.size, tuple(ranked), arena.definitions, replan)

    def _write_arena(self, variable: ArenaVariable, arena: Arena) -> None:
        members = self.members(arena)
        latest: dict[tuple[Any, torch.dtype], Storage] = {}
        for number, (storage, place) in enumerate(members):
            key = (place.offset, storage.node.get_dtype())
            # A plan made at run time may give them different offsets.
            earlier = latest.get(key) if variable.replan is None else None
            if earlier is not None and earlier.end <= storage.start and self._covers_start(earlier):
                self._write_reuse(earlier, storage)
            else:
                view = MemberLine(
                    self.wrapper, storage.node, variable, place, storage.bytes, self.debug
                )
                self.replaced[storage.start] = [view]
            latest[key] = storage
            if number == 0:
                first = ArenaLine(self.wrapper, variable, len(members))
                self.replaced[storage.start].insert(0, first)
            if self.debug and storage.freed_by is not None:
                end = MemberEndLine(self.wrapper, variable, place, storage.bytes)
                self.added.setdefault(storage.end, []).append(end)
        if all(storage.freed_by is not None for storage, _ in members):
            last = max(storage.end for storage, _ in members)
            self.added.setdefault(last, []).append(ArenaEndLine(self.wrapper, variable))

    def _covers_start(self, storage: Storage) -> bool:
        """Whether the variable that is dropped last covers the storage from its start."""
        return storage.is_reusable and not isinstance(storage.node, WorkspaceArg)

    def _write_reuse(self, earlier: Storage, later: Storage) -> None:
        free = self.lines[earlier.end]
        free.is_reused = True
        line = wrapper_ir.ReuseLine(self.wrapper, free.node, later.node)
        self.replaced[later.start] = [line]


_REUSABLE_LINES = (
    wrapper_ir.AllocateLine,
    wrapper_ir.FreeIfNotReusedLine,
    wrapper_ir.ReuseLine,
)

_ENDS = (wrapper_ir.FreeIfNotReusedLine, wrapper_ir.NullLine, ArenaEndLine)

_arena_counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _arena_name(wrapper: Any) -> str:
    root = root_wrapper(wrapper)
    count = _arena_counts.get(root, 0)
    _arena_counts[root] = count + 1
    return f"pool{count}"
