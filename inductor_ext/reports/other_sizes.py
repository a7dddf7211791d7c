"""Memory plans at other sizes than those they were made for: `MemoryReport.at` (pure).

A compiled graph with dynamic sizes keeps its code at all sizes, and its plan gives the bytes as
expressions (`planner.resized_plan`). Graphs of fixed sizes do not run at other sizes; they are left
out. Sizes that the caller does not name keep their size hint, but a size that the code reads from
data has to be named, because nothing is known of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from inductor_ext import exc
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.memory.planner.resized_plan import resize_plan
from inductor_ext.memory.records import DynamicSize, MemoryPlanRecord

_MAKE_DYNAMIC = (
    "Compile it with dynamic sizes: torch._dynamo.mark_dynamic(x, 0) before the first call, or "
    "torch.compile(..., dynamic=True); for an exported program, dynamic_shapes="
)


@dataclasses.dataclass(frozen=True)
class BatchPeak:
    """The memory of a report's graphs at a batch size, in bytes."""

    batch: int
    peak: int
    """The maximum of the plans' peaks."""
    lower_bound: int
    """The lower bound of the plan with that peak."""
    graph: str
    """The generated function with that peak, and its kind."""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row, as `HEADS` describes them."""
        ratio = self.peak / self.lower_bound if self.lower_bound else 1.0
        sizes = (human_bytes(self.peak), human_bytes(self.lower_bound))
        return (str(self.batch), *sizes, f"{ratio:.3f}", self.graph)

    @classmethod
    def of(cls, batch: int, records: Sequence[MemoryPlanRecord]) -> BatchPeak:
        """Return the row of a batch size, given the plans at that size."""
        highest = max(records, key=lambda record: record.peak)
        name = f"{highest.graph} ({highest.kind})"
        return cls(batch, highest.peak, highest.lower_bound, name)


HEADS = ("batch", "peak", "lower bound", "ratio", "graph with the highest peak")


def resize_records(
    title: str,
    records: Sequence[MemoryPlanRecord],
    batch: int | None,
    sizes: Mapping[str, int],
) -> tuple[MemoryPlanRecord, ...]:
    """Return the plans of the graphs with dynamic sizes, at other sizes.

    Graphs without a plan, which keep Inductor's, are returned as they are.

    Args:
        title: title of the report, for errors.
        records: the plans.
        batch: the size of the first dimension of the inputs; None to keep it.
        sizes: other dynamic sizes, by the name of their symbol.

    Raises:
        exc.SizesNotKnownError: no size is dynamic, none or several are the batch, a symbol does not
            exist, a value is out of its range, or a plan is not known at other sizes.
    """
    dynamic = [record for record in records if record.dynamic is not None]
    if not dynamic:
        raise exc.SizesNotKnownError(
            title=title, why="no size of its graphs is dynamic", fix=f"{_MAKE_DYNAMIC}."
        )
    known = {size.name: size for record in dynamic for size in _sizes(record)}
    missing = sorted(set(sizes) - set(known))
    if missing:
        raise exc.SizesNotKnownError(
            title=title,
            why=f"it has no dynamic size {missing[0]!r}",
            fix=f"Its dynamic sizes are: {_list_sizes(known.values())}.",
        )
    batches = set() if batch is None else _find_batch_sizes(title, dynamic, sizes)
    resized = []
    for record in records:
        if record.reason:
            resized.append(record)
        if record.dynamic is None:
            continue
        values = {}
        for size in _sizes(record):
            if size.name in batches and batch is not None:
                values[size.name] = batch
            else:
                values[size.name] = sizes.get(size.name, size.hint)
            _check_value(title, size, values[size.name], named=size.name in {*batches, *sizes})
        resized.append(_resize(title, record, values))
    return tuple(resized)


def _sizes(record: MemoryPlanRecord) -> tuple[DynamicSize, ...]:
    return record.dynamic.sizes if record.dynamic is not None else ()


def _list_sizes(sizes: Iterable[DynamicSize]) -> str:
    return ", ".join(size.describe() for size in sizes)


def _find_batch_sizes(
    title: str, records: Sequence[MemoryPlanRecord], sizes: Mapping[str, int]
) -> set[str]:
    """Return the symbols that are the batch, at most one per graph.

    The batch is what the first dimensions of inputs are. The inputs of a backward are mostly saved
    tensors, so that they count only if the report has no other graph.
    """
    from_callers = [record for record in records if record.kind != "backward"] or records
    batches = {
        size.name
        for record in from_callers
        for size in _sizes(record)
        if any(place.dimension == 0 for place in size.inputs) and size.name not in sizes
    }
    if not batches:
        listed = _list_sizes({size.name: size for r in records for size in _sizes(r)}.values())
        raise exc.SizesNotKnownError(
            title=title,
            why="the first dimension of its inputs, the batch, is not dynamic",
            fix=f"{_MAKE_DYNAMIC}. Other dynamic sizes can be given by name: {listed or 'none'}.",
        )
    for record in records:
        candidates = [size for size in _sizes(record) if size.name in batches]
        if len(candidates) > 1:
            raise exc.SizesNotKnownError(
                title=title,
                why=f"the inputs of {record.graph} ({record.kind}) have several first dimensions: "
                f"{_list_sizes(candidates)}",
                fix="Give all but one of them by name (sizes=, on the command line --size).",
            )
    return batches


def _check_value(title: str, size: DynamicSize, value: int, *, named: bool) -> None:
    if size.is_data and not named:
        raise exc.SizesNotKnownError(
            title=title,
            why=f"the size {size.name} is read from data",
            fix="Give it by name (sizes=, on the command line --size).",
        )
    too_large = size.highest is not None and value > size.highest
    if named and (value < size.lowest or too_large):
        limit = "" if size.highest is None else f" and at most {size.highest}"
        raise exc.SizesNotKnownError(
            title=title,
            why=f"{size.describe()} = {value} is outside of its range, at least {size.lowest}"
            f"{limit}",
            fix="For such a size torch.compile compiles another graph. Pass a size in the range, "
            "or call the model at this size and report that graph.",
        )


def _resize(title: str, record: MemoryPlanRecord, values: Mapping[str, int]) -> MemoryPlanRecord:
    name = f"{record.graph} ({record.kind})"
    assert record.dynamic is not None
    if record.dynamic.unknown:
        raise exc.SizesNotKnownError(
            title=title,
            why=f"of {name}, {record.dynamic.unknown}",
            fix="Call the model at these sizes with a compile of fixed sizes (dynamic=False), and "
            "report that.",
        )
    try:
        return resize_plan(record, values)
    except ValueError as error:
        raise exc.SizesNotKnownError(
            title=title,
            why=f"of {name}, {error}",
            fix="Pass sizes that the model accepts.",
        ) from None
