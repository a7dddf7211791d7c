"""The memory of a model outside of its graphs: parameters, buffers, gradients, optimizer state.

Bytes are those of the storages, per device. A storage that several tensors share counts once, where
it occurs first in this order. Memory plans do not contain parameters, buffers and optimizer state.
The gradients that a backward computes are outputs in its plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext.memory.planner.peak_report import human_bytes

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

NOT_KNOWN = "not known"


@dataclasses.dataclass(frozen=True)
class ModelState:
    """The bytes that the tensors of a model and of its optimizer occupy on one device."""

    device: str
    parameters: int
    buffers: int
    gradients: int
    """One gradient for every parameter that requires one, in the dtype that the gradient has, or
    will have if it does not exist now."""
    gradients_now: int
    """The gradients that exist now."""
    optimizer: int | None = None
    """The tensors in the optimizer's state; None if there is no optimizer or it has no state."""

    @property
    def total(self) -> int:
        """The sum, without what is not known."""
        return self.parameters + self.buffers + self.gradients + (self.optimizer or 0)

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table row, as `HEADS` describes them."""
        optimizer = NOT_KNOWN if self.optimizer is None else human_bytes(self.optimizer)
        sizes = (self.parameters, self.buffers, self.gradients, self.gradients_now)
        return (*map(human_bytes, sizes), optimizer, self.device)


HEADS = ("parameters", "buffers", "gradients", "gradients now", "optimizer state", "device")


def read_state(
    modules: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer | None
) -> tuple[ModelState, ...]:
    """Return the state of modules and of an optimizer, one element per device.

    Args:
        modules: the modules; parameters of the optimizer that are in none of them count as well.
        optimizer: the optimizer. Before its first step it has no state.
    """
    parameters = [p for module in modules for p in module.parameters()]
    if optimizer is not None:
        parameters += [p for group in optimizer.param_groups for p in group["params"]]
    unique = list({id(parameter): parameter for parameter in parameters}.values())
    buffers = [buffer for module in modules for buffer in module.buffers()]
    state = None if optimizer is None or not optimizer.state else optimizer.state
    return _count(unique, buffers, unique, state)


def read_program_state(program: ExportedProgram) -> tuple[ModelState, ...]:
    """Return the parameters, buffers and constants of an exported program, per device."""
    import torch

    parameters = list(program.parameters())
    constants = [v for v in program.constants.values() if isinstance(v, torch.Tensor)]
    return _count(parameters, [*program.buffers(), *constants], (), None)


def _count(
    parameters: Sequence[Any],
    buffers: Sequence[Any],
    trained: Sequence[Any],
    optimizer_state: Any | None,
) -> tuple[ModelState, ...]:
    seen: set[Any] = set()
    parameter_bytes = _sum_storages(parameters, seen)
    buffer_bytes = _sum_storages(buffers, seen)
    gradients = [p.grad for p in trained if p.grad is not None]
    now_bytes = _sum_storages(gradients, seen)
    missing_bytes = _sum_missing_gradients(trained)
    optimizer_bytes = _sum_storages(_list_tensors(optimizer_state), seen)
    columns = (parameter_bytes, buffer_bytes, now_bytes, missing_bytes, optimizer_bytes)
    devices = dict.fromkeys(device for column in columns for device in column)
    return tuple(
        ModelState(
            device=device,
            parameters=parameter_bytes.get(device, 0),
            buffers=buffer_bytes.get(device, 0),
            gradients=now_bytes.get(device, 0) + missing_bytes.get(device, 0),
            gradients_now=now_bytes.get(device, 0),
            optimizer=None if optimizer_state is None else optimizer_bytes.get(device, 0),
        )
        for device in devices
    )


def _sum_missing_gradients(parameters: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of the gradients that do not exist yet, by device."""
    sizes: dict[str, int] = {}
    for parameter in parameters:
        if not parameter.requires_grad or parameter.grad is not None:
            continue
        # Tensors of torch 2.11 and later can declare another dtype for their gradient.
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        for part in _flatten(parameter):
            itemsize = dtype.itemsize if part.dtype == parameter.dtype else part.dtype.itemsize
            device = str(part.device)
            sizes[device] = sizes.get(device, 0) + part.numel() * itemsize
    return sizes


def _sum_storages(tensors: Iterable[Any], seen: set[Any]) -> dict[str, int]:
    """Return the bytes of the storages that are not in `seen`, by device, and add them to it."""
    import torch

    sizes: dict[str, int] = {}
    for tensor in tensors:
        for part in _flatten(tensor):
            if part.layout == torch.strided:
                storage = part.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
            else:
                # A layout whose memory torch does not show, such as that of mkldnn.
                key, size = id(part), part.numel() * part.element_size()
            if key not in seen:
                seen.add(key)
                device = str(part.device)
                sizes[device] = sizes.get(device, 0) + size
    return sizes


def _flatten(tensor: Any) -> Iterator[Any]:
    """Yield the strided tensors that a tensor consists of: shards, values and indices."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _flatten(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def _list_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in nested containers."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _list_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _list_tensors(item)
