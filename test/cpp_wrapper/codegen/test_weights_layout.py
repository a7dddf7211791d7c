"""The layout of the weights file."""

from __future__ import annotations

import io

import torch
import torch._inductor

from inductor_ext.cpp_wrapper.codegen import weights_layout


class TestPlanOfWeights:
    def test_offsets(self) -> None:
        base = torch.arange(10, dtype=torch.int64)
        constants = {
            "a": torch.rand(3),
            "b": base[2:5],
            "c": torch.empty(0, 4),
            "d": base,
            "e": torch.rand(33, 2),
        }
        plan = weights_layout.plan(constants)
        assert plan.sizes == {"a": 12, "b": 80, "c": 0, "d": 80, "e": 264}
        assert plan.offsets == {"a": 0, "b": 64, "c": 0, "d": 64, "e": 192}
        assert plan.bytes == 192 + 264

    def test_written_bytes(self) -> None:
        constants = {
            "a": torch.rand(5),
            "b": torch.arange(3),
            "c": torch.rand(7).bfloat16(),
            "d": torch.empty(0),
        }
        plan = weights_layout.plan(constants)
        file = io.BytesIO()
        weights_layout.write(file, constants, plan)
        data = file.getvalue()
        assert len(data) == plan.bytes
        for name, tensor in constants.items():
            raw = data[plan.offsets[name] :][: plan.sizes[name]]
            assert raw == tensor.view(torch.uint8).numpy().tobytes()

    def test_no_constants(self) -> None:
        assert weights_layout.plan({}) == weights_layout.Plan({}, {}, 0)


def test_a_view_keeps_its_memory_alive() -> None:
    """Threads may still hash the last view after the generator of the parts has ended."""
    size = 48_000
    tensor = torch.full((size,), 7, dtype=torch.uint8)
    view = weights_layout.storage_bytes(tensor, size)
    del tensor
    others = [torch.full((size,), 9, dtype=torch.uint8) for _ in range(64)]
    assert bytes(view) == b"\7" * size
    assert len(others) == 64
