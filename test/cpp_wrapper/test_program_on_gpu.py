"""Programs that were exported on the CPU, as programs on a GPU that does not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inductor_ext import targets
from inductor_ext.cpp_wrapper import program_on_gpu
from inductor_ext.cpp_wrapper.signature import from_export
from inductor_ext.cpp_wrapper.signature.signature import TensorInput, TensorOutput
from inductor_ext.hooks import offline_gpu

pytest.importorskip("triton")


class Net(torch.nn.Module):
    """Tied weights, a view of a buffer, equal shapes, a scalar, a constant, a named device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.register_buffer("table", torch.rand(8, 4))
        self.register_buffer("rows", self.table[2:4])
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(self.second(self.first(x))) * self.scale + self.table.sum(0)
        x = torch.cat([x, self.rows]) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x + torch.arange(4, device="cpu")


@pytest.fixture(scope="module")
def program() -> Any:
    shapes = ({0: torch.export.Dim("batch", max=64)},)
    return torch.export.export(Net().eval(), (torch.randn(3, 4),), dynamic_shapes=shapes)


@pytest.fixture
def moved(program: Any) -> Any:
    with offline_gpu.report(targets.gpu_properties("H100")):
        module = program.module(check_guards=False)
        args, kwargs, values = program_on_gpu.move_module(module, *program.example_inputs)
    return module, args, kwargs, values


def test_everything_is_on_the_gpu(moved: Any) -> None:
    module, args, _, values = moved
    device = torch.device(program_on_gpu.DEVICE)
    assert args[0].device == device
    assert args[0].shape == (3, 4)
    tensors = [*module.parameters(), *module.buffers()]
    assert len(tensors) >= 7
    assert {tensor.device for tensor in tensors} == {device}
    for node in module.graph.nodes:
        devices = [item for item in (*node.args, *node.kwargs.values()) if _is_device(item)]
        assert all(item == device for item in devices), node
    (placeholder,) = module.graph.find_nodes(op="placeholder")
    assert placeholder.meta["val"].device == device
    assert isinstance(placeholder.meta["val"].shape[0], torch.SymInt)
    assert {value.device.type for value in values.values()} == {"cpu"}


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device)


def test_values_are_those_of_the_program(moved: Any, program: Any) -> None:
    values = moved[3]
    for name, tensor in program.state_dict.items():
        assert values[name].data_ptr() == tensor.data_ptr()
        assert torch.equal(values[name], tensor)


def test_constants_share_memory_as_their_values_do(moved: Any) -> None:
    module = moved[0]
    same = program_on_gpu.is_same_constant
    assert same(module.first.weight, module.tied.weight)
    assert not same(module.first.weight, module.second.weight)
    assert not same(module.first.bias, module.second.bias)
    assert not same(module.table, module.rows)
    assert module.rows.storage_offset() == 8
    assert not same(module.first.weight, torch.empty(4, 4))


def test_the_program_is_not_modified(moved: Any, program: Any) -> None:
    x = torch.randn(5, 4)
    assert torch.isfinite(program.module()(x)).all()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        assert not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def test_the_signature_is_on_the_gpu(program: Any) -> None:
    signature = from_export.derive_signature(program)
    moved = program_on_gpu.move_signature(signature)
    leaves = (*moved.inputs, *moved.outputs)
    assert [leaf.device for leaf in leaves if isinstance(leaf, TensorInput | TensorOutput)] == [
        program_on_gpu.DEVICE
    ] * 2
    assert moved.symbols == signature.symbols


class Attention(torch.nn.Module):
    """One call of attention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        attention = torch.nn.functional.scaled_dot_product_attention
        mask = q[0, 0, :, :1] > k[0, 0, :, 0] if self.options.get("mask") else None
        causal, scale = self.options.get("is_causal", False), self.options.get("scale")
        return attention(q, k, k, attn_mask=mask, is_causal=causal, scale=scale)


@pytest.mark.parametrize(
    ("options", "dtype", "shape", "keys", "is_flash"),
    [
        ({}, torch.float16, (2, 4, 16, 64), 16, True),
        ({"is_causal": True, "scale": 0.3}, torch.bfloat16, (2, 4, 16, 64), 16, True),
        ({}, torch.float16, (2, 4, 16, 64), 8, True),
        ({"is_causal": True}, torch.float16, (2, 4, 16, 64), 8, False),
        ({"mask": True}, torch.float16, (2, 4, 16, 64), 16, False),
        ({}, torch.float32, (2, 4, 16, 64), 16, False),
        ({}, torch.float16, (2, 4, 16, 60), 16, False),
        ({}, torch.float16, (2, 4, 16, 264), 16, False),
        ({}, torch.float16, (4, 16, 64), 16, False),
    ],
)
def test_attention_is_selected_as_on_a_gpu(
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    keys: int,
    is_flash: bool,
) -> None:
    q = torch.randn(shape, dtype=dtype)
    k = torch.randn(*shape[:-2], keys, shape[-1], dtype=dtype)
    sizes = {0: torch.export.Dim("batch", min=2, max=64)}
    program = torch.export.export(Attention(**options), (q, k), dynamic_shapes=(sizes, sizes))
    with offline_gpu.report(targets.gpu_properties("H100")):
        module = program.module(check_guards=False)
        program_on_gpu.move_module(module, *program.example_inputs)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    calls = list(module.graph.find_nodes(op="call_function", target=flash))
    assert len(calls) == is_flash
    for call in calls:
        assert call.args[3:] == (0.0, options.get("is_causal", False), False)
        assert call.kwargs["scale"] == options.get("scale")
        (result,) = call.users
        assert result.args[1] == 0
