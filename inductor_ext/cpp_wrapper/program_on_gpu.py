"""A program that was exported on any device, as a program on a GPU that need not exist.

Inputs and constants become fake tensors on `cuda:0`. The values of the constants stay where they
are: `Artifact`s and the weights in a package are made of them (`context.constant_values`). The
exported program is not modified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from inductor_ext.cpp_wrapper import attention_on_gpu
from inductor_ext.cpp_wrapper.signature.signature import Signature, TensorInput, TensorOutput

DEVICE = "cuda:0"

_VALUE = "_inductor_ext_value"
"""Attribute of a fake constant: the tensor with its value."""


def move_signature(signature: Signature) -> Signature:
    """Return the signature of the program on the GPU."""

    def moved(leaf: Any) -> Any:
        is_tensor = isinstance(leaf, TensorInput | TensorOutput)
        return dataclasses.replace(leaf, device=DEVICE) if is_tensor else leaf

    return dataclasses.replace(
        signature,
        inputs=tuple(map(moved, signature.inputs)),
        outputs=tuple(map(moved, signature.outputs)),
    )


def move_module(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Move the module of an exported program to the GPU, in place.

    Args:
        module: the result of `ExportedProgram.module()`.
        args, kwargs: the example inputs.

    Returns:
        The example inputs on the GPU, and the values of the constants by fully qualified name.
    """
    import torch
    from torch.utils import _pytree

    mode = _find_mode(module)
    values = _move_constants(module, mode)
    for graph in _graph_modules(module):
        for node in graph.graph.nodes:
            _move_node(node)
        attention_on_gpu.use_flash_attention(graph)
    for node in module.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = _empty_like(node.meta["val"], mode)
    args, kwargs = _pytree.tree_map_only(
        torch.Tensor, lambda tensor: _empty_like(tensor, mode), (args, kwargs)
    )
    return args, kwargs, values


def _graph_modules(module: Any) -> Iterator[Any]:
    import torch

    for child in module.modules():
        if isinstance(child, torch.fx.GraphModule):
            yield child


def _find_mode(module: Any) -> Any:
    """Return the fake mode that the program was exported with."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    for node in module.graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    return FakeTensorMode(shape_env=ShapeEnv())


def _empty_like(tensor: Any, mode: Any) -> Any:
    import torch

    with mode:
        return torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=DEVICE
        )


def _move_constants(module: Any, mode: Any) -> dict[str, Any]:
    """Replace parameters, buffers and other constants by fake tensors, and return their values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorConverter

    # A converter of its own: that of the mode would return the program's fake tensors.
    converter = FakeTensorConverter()
    values: dict[str, Any] = {}
    fakes: dict[int, Any] = {}
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    names += [str(node.target) for node in module.graph.find_nodes(op="get_attr")]
    for name in dict.fromkeys(names):
        owner_name, _, attribute = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        value = getattr(owner, attribute)
        if not isinstance(value, torch.Tensor):
            continue
        values[name] = value.detach()
        if id(value) not in fakes:
            fakes[id(value)] = _fake(converter, mode, value)
        fake = fakes[id(value)]
        if attribute in owner._parameters:
            owner._parameters[attribute] = fake
        elif attribute in owner._buffers:
            owner._buffers[attribute] = fake
        else:
            setattr(owner, attribute, fake)
    return values


def _fake(converter: Any, mode: Any, value: Any) -> Any:
    import torch

    # Views of one storage become views of one fake storage.
    fake = converter.from_real_tensor(mode, value.detach())
    fake.fake_device = torch.device(DEVICE)
    result = torch.nn.Parameter(fake, False) if isinstance(value, torch.nn.Parameter) else fake
    setattr(result, _VALUE, value.detach())
    return result


def _move_node(node: Any) -> None:
    """Move the device that a call of an operator has as an argument."""
    import torch

    if node.op != "call_function":
        return
    if isinstance(node.kwargs.get("device"), (torch.device, str)):
        node.kwargs = {**node.kwargs, "device": torch.device(DEVICE)}
    if any(isinstance(arg, torch.device) for arg in node.args):
        node.args = tuple(
            torch.device(DEVICE) if isinstance(arg, torch.device) else arg for arg in node.args
        )


def find_value(constant: Any) -> Any:
    """Return the tensor with the value of a constant of a moved module; None for other tensors."""
    return getattr(constant, _VALUE, None)


def is_same_constant(one: Any, other: Any) -> bool:
    """Whether two constants of a moved module have the same memory.

    All fake tensors have the same address.
    """
    first, second = find_value(one), find_value(other)
    if first is None or second is None:
        return one is other
    return bool(
        first.size() == second.size()
        and first.stride() == second.stride()
        and first.dtype == second.dtype
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and first.storage_offset() == second.storage_offset()
    )
