"""Plans with dynamic sizes as expressions: at other sizes they are the plans made for these."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from inductor_ext.memory import plan_store
from inductor_ext.memory.planner.resized_plan import resize_plan
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.reports import memory_measure
from test.support.memory_compiles import compiled, planning


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def plan_training(batch: int, **settings: Any) -> list[MemoryPlanRecord]:
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(batch, 5, 16)
    torch._dynamo.mark_dynamic(x, 0)
    with planning(**settings) as records:
        compiled(lambda x: model(x).square().mean())(x).backward()
    return records


def only_size(record: MemoryPlanRecord) -> str:
    assert record.dynamic is not None
    (size,) = record.dynamic.sizes
    return size.name


@pytest.mark.parametrize("arenas", ["auto", "always"])
def test_a_plan_at_another_batch_is_the_plan_made_for_it(arenas: str) -> None:
    small, large = (plan_training(batch, memory_arenas=arenas) for batch in (6, 40))
    assert [record.kind for record in small] == ["forward", "backward"]
    for record, expected in zip(small, large, strict=True):
        resized = resize_plan(record, {only_size(record): 40})
        for name in ("peak", "peak_before", "lower_bound"):
            assert getattr(resized, name) == getattr(expected, name), name
        assert sum(s.bytes for s in resized.storages) == sum(s.bytes for s in expected.storages)
        if arenas != "auto":
            assert sum(a.bytes for a in resized.arenas) == sum(a.bytes for a in expected.arenas)
        assert resized.peak > 5 * record.peak
        # Back at the size hint it is the record.
        again = resize_plan(resized, {only_size(record): 6})
        assert dataclasses.replace(again, peak_reordered_from=record.peak_reordered_from) == record
        assert plan_store.parse(record.as_json()) == record


def test_a_call_at_another_batch_needs_what_the_plan_says() -> None:
    model = Block()
    run = compiled(model)
    x = torch.randn(6, 5, 16)
    torch._dynamo.mark_dynamic(x, 0)
    with planning() as records, torch.no_grad():
        run(x)
        (record,) = records
        y = torch.randn(29, 5, 16)
        run(y)
        resized = resize_plan(record, {only_size(record): 29})
        (measured,) = memory_measure.measure([resized], lambda: run(y))
    assert len(records) == 1
    assert measured.measured == pytest.approx(resized.peak, rel=0.01)
    assert measured.predicted == resized.peak


@pytest.mark.gpu
def test_a_call_at_another_batch_on_a_gpu() -> None:
    # Without attention: a plan does not know the workspaces of its kernels on a GPU.
    model = nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 32), nn.Softmax(-1)
    ).cuda()
    run = compiled(lambda x: model(x).square().mean())
    x = torch.randn(64, 5, 16, device="cuda")
    torch._dynamo.mark_dynamic(x, 0)
    with planning() as records:
        run(x).backward()
        y = torch.randn(4099, 5, 16, device="cuda")
        run(y).backward()
        resized = [resize_plan(record, {only_size(record): 4099}) for record in records]
        measured = memory_measure.measure(resized, lambda: run(y).backward())
    assert [item.kind for item in measured] == ["forward", "backward"]
    forward, backward = measured
    assert forward.predicted > 4099 * 5 * 16 * 4
    assert abs(forward.deviation) <= 1
    # It needs only memory of saved tensors that are freed during the call.
    assert abs(backward.measured - backward.predicted) <= forward.predicted / 100


def test_static_plans_have_no_expressions() -> None:
    with planning() as records:
        compiled(lambda x: (x @ x).sin() @ x)(torch.randn(16, 16))
    assert [record.dynamic for record in records] == [None]


def test_sizes_are_described() -> None:
    class Pair(nn.Module):
        def forward(self, tokens: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return (tokens.sin() @ other).cos() @ other.mT

    batch = torch.export.Dim("batch", min=2, max=64)
    length = torch.export.Dim("length", min=3)
    shapes = {"tokens": {0: batch, 1: length}, "other": {0: batch}}
    arguments = (torch.randn(4, 8, 16), torch.randn(4, 16, 16))
    program = torch.export.export(Pair(), arguments, dynamic_shapes=shapes)
    import inductor_ext

    (record,) = inductor_ext.memory_report(program).records
    assert record.dynamic is not None
    assert record.dynamic.unknown == ""
    sizes = {size.hint: size for size in record.dynamic.sizes}
    assert (sizes[4].lowest, sizes[4].highest, sizes[8].highest) == (2, 64, None)
    places = [(place.input, place.dimension) for place in sizes[4].inputs]
    assert places == [("tokens", 0), ("other", 0)]
    assert sizes[8].describe() == f"{sizes[8].name} (tokens.size(1))"
    assert not sizes[8].is_data


def test_sizes_that_are_read_from_data() -> None:
    def select(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x).float().sin() + 1

    with planning() as records, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(select)
        run(torch.randn(1 << 18))
    (record,) = records
    assert record.dynamic is not None
    (size,) = record.dynamic.sizes
    assert size.is_data
    assert size.describe() == f"{size.name} (read from data)"
    count = 100_000
    x = torch.cat([torch.ones(count), torch.zeros((1 << 18) - count)])
    resized = resize_plan(record, {size.name: count})
    (measured,) = memory_measure.measure([resized], lambda: run(x))
    assert measured.predicted == resized.peak
    assert resized.peak >= 4 * count
    # torch 2.11 does not say in the wrapper that nonzero allocates its result.
    if any(storage.kind == "extern" for storage in record.storages):
        assert resized.peak >= (4 + 8) * count
        assert abs(measured.deviation) < 1


def test_subgraphs_are_not_known_at_other_sizes() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: (x @ x.sum(0)).sin(), lambda x: (x @ x.sum(0)).cos(), (x,)
        )

    x = torch.randn(8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with planning() as records:
        compiled(branch)(x)
    (record,) = [record for record in records if record.graph == "call"]
    assert record.dynamic is not None
    assert "it calls a subgraph" in record.dynamic.unknown
    with pytest.raises(ValueError, match="not known at other sizes"):
        resize_plan(record, {size.name: size.hint for size in record.dynamic.sizes})


def test_expressions_without_a_value_name_themselves() -> None:
    (record, _) = plan_training(6)
    with pytest.raises(ValueError, match=f"{only_size(record)}.* has no value"):
        resize_plan(record, {})
    with pytest.raises(ValueError, match=r"is -\d+, which is not a size"):
        resize_plan(record, {only_size(record): -9})
