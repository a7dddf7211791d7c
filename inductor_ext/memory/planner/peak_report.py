"""Reports what is live at the peak of a planned function, as a table (pure).

A plan takes memory from the allocator in two ways. An arena is live as a whole from the start of
its first member to the end of its last; a storage outside of arenas is live for its own live range.
The memory in use at a step is the sum of both. The peak is its maximum, computed per device because
devices do not share memory. At the peak the members rarely fill their arena, so the table has one
extra row per arena, "unused", to make the rows sum to the peak.

The table is part of the error that `memory_budget` raises and of `inductor_ext.memory_report`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from inductor_ext.memory.planner.interval import live_bytes
from inductor_ext.memory.records import MemoryPlanRecord, PlannedArena, PlannedStorage

_OPERATOR_WIDTH = 32
_MODULE_WIDTH = 40


@dataclasses.dataclass(frozen=True)
class PeakRow:
    """Memory in use at the peak: a storage, or the unused rest of an arena."""

    name: str
    bytes: int
    kind: str
    """The kind of the storage; "unused" for the rest of an arena."""
    device: str
    operator: str
    module: str
    start: int
    end: int


def human_bytes(count: int) -> str:
    """Format bytes with the largest binary unit that leaves at least 1: "1.50 MiB"."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def devices(record: MemoryPlanRecord) -> tuple[str, ...]:
    """Return the devices on which the plan uses memory, in the order of their first storage."""
    return tuple(dict.fromkeys(part.device for part in _parts(record)))


def steps(record: MemoryPlanRecord) -> int:
    """Return the length of the schedule, which covers every live range in it."""
    return max(record.steps, 1, *(part.end for part in _parts(record)))


def _parts(record: MemoryPlanRecord) -> tuple[PlannedStorage | PlannedArena, ...]:
    return record.storages + record.arenas


def storage_bytes(record: MemoryPlanRecord, device: str) -> list[int]:
    """Return the bytes of the storages that are live on `device` at each step."""
    storages = (storage for storage in record.storages if storage.device == device)
    return live_bytes(((s.start, s.end, s.bytes) for s in storages), steps(record))


def allocated_bytes(record: MemoryPlanRecord, device: str) -> list[int]:
    """Return the bytes allocated on `device` at each step: arenas, and storages outside of them."""
    parts = [part for part in _parts(record) if part.device == device]
    spans = (
        (part.start, part.end, part.bytes) for part in parts if getattr(part, "arena", None) is None
    )
    return live_bytes(spans, steps(record))


def peak_step(record: MemoryPlanRecord, device: str) -> int:
    """Return the first step at which the most memory is allocated on `device`."""
    profile = allocated_bytes(record, device)
    return profile.index(max(profile))


def peak_rows(record: MemoryPlanRecord, device: str) -> list[PeakRow]:
    """Return the memory in use on `device` at its peak, largest first. The rows sum to the peak."""
    step = peak_step(record, device)
    rows = [
        PeakRow(s.name, s.bytes, s.kind, s.device, s.operator, s.module, s.start, s.end)
        for s in record.storages
        if s.device == device and s.start <= step < s.end and s.bytes
    ]
    for index, arena in enumerate(record.arenas):
        if arena.device == device and arena.start <= step < arena.end:
            unused = arena.bytes - sum(s.bytes for s in _members(record.storages, index, step))
            if unused:
                rows.append(
                    PeakRow(arena.name, unused, "unused", device, "", "", arena.start, arena.end)
                )
    return sorted(rows, key=lambda row: (-row.bytes, row.start, row.name))


def _members(storages: Sequence[PlannedStorage], arena: int, step: int) -> Iterable[PlannedStorage]:
    return (s for s in storages if s.arena == arena and s.start <= step < s.end)


def peak_table(record: MemoryPlanRecord, top: int = 10) -> str:
    """Format the largest rows at each device's peak as text, one line per row.

    Args:
        record: the plan.
        top: how many rows to show per device; the rest is one row, "others".
    """
    tables = [_table(record, top, device) for device in devices(record)]
    return "\n\n".join(tables) or "No memory is allocated."


def peak_cells(
    record: MemoryPlanRecord, device: str, top: int
) -> tuple[str, list[tuple[str, ...]]]:
    """Return title and cells of the table of one device: header, rows, total."""
    rows = peak_rows(record, device)
    total = sum(row.bytes for row in rows)
    title = f"Live on {device} at the peak, step {peak_step(record, device)} of {steps(record)}:"
    cells: list[tuple[str, ...]] = [
        ("bytes", "share", "buffer", "kind", "operator", "module", "live")
    ]
    cells += [
        (
            human_bytes(row.bytes),
            _share(row.bytes, total),
            row.name,
            row.kind,
            _clip_end(row.operator, _OPERATOR_WIDTH),
            _clip_start(row.module, _MODULE_WIDTH),
            f"[{row.start}, {row.end})",
        )
        for row in rows[:top]
    ]
    if rows[top:]:
        rest = sum(row.bytes for row in rows[top:])
        count = len(rows) - top
        label = "1 other" if count == 1 else f"{count} others"
        cells.append((human_bytes(rest), _share(rest, total), label, "", "", "", ""))
    cells.append((human_bytes(total), _share(total, total), "in all", "", "", "", ""))
    return title, cells


def _table(record: MemoryPlanRecord, top: int, device: str) -> str:
    title, cells = peak_cells(record, device, top)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            text.rjust(width) if column < 2 else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    return "\n".join([title, *lines])


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else "-"


def _clip_end(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _clip_start(text: str, width: int) -> str:
    # The end of a module path distinguishes it from its siblings.
    return text if len(text) <= width else "..." + text[3 - width :]
