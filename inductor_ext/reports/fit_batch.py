"""The largest batch with which a model fits into a memory budget: `inductor_ext.fit_batch`.

The model is compiled with a dynamic batch size, forward and backward, but not run: the code that
checks `memory_budget` at the sizes of a call (`memory.budget`) gives the planned peak of every
graph as a function of the batch size. Weights and inputs are added to it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from inductor_ext import exc
from inductor_ext.memory import budget_runtime
from inductor_ext.memory.planner.peak_report import human_bytes
from inductor_ext.settings import parse_bytes

if TYPE_CHECKING:
    import torch

_LARGEST = 1 << 30
"""Larger batches are not considered."""

_COMPILES = 2
"""Maximum number of compiles: at the batch of the example, and at the one that it suggests."""

_Checks = list[budget_runtime.BudgetCheck]

_budgets = itertools.count(1 << 60)
"""Budgets that nothing exceeds, each used once: the same code would not be loaded again."""


@dataclasses.dataclass(frozen=True)
class BatchFit:
    """The largest batch that fits, and what it needs in bytes."""

    batch: int
    device: str
    budget: int
    weights: int
    """Parameters and buffers of the model on the device."""
    inputs: int
    planned: int
    """The highest planned peak of forward and backward. It contains what the forward saves, the
    gradients and the outputs."""
    reserved: int
    next_needed: int
    """What one more sample in the batch would need in all."""

    @property
    def needed(self) -> int:
        """What the batch needs in all."""
        return self.weights + self.inputs + self.planned + self.reserved

    def __str__(self) -> str:
        parts = {"weights": self.weights, "inputs": self.inputs, "graphs": self.planned}
        if self.reserved:
            parts["reserved"] = self.reserved
        listed = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items())
        return (
            f"A batch of {self.batch} needs {human_bytes(self.needed)} of "
            f"{human_bytes(self.budget)} on {self.device} ({listed}); a batch of "
            f"{self.batch + 1} needs {human_bytes(self.next_needed)}."
        )


def fit_batch(
    model: Callable[..., Any],
    example: Sequence[Any] | Mapping[str, Any],
    budget: int | str | None = None,
    *,
    reserved: int | str = 0,
) -> BatchFit:
    """Find the largest batch with which a model fits into a memory budget.

    The model is compiled, but not run. Forward and backward have to fit; under `torch.no_grad()`
    the forward alone. The workspace of kernels of libraries is not known and not counted.

    Args:
        model: a module or function that torch.compile compiles to one graph. For a training step,
            a function that returns the loss.
        example: positional arguments, or keyword arguments by name. The first dimension of every
            tensor is the batch, of 2 or more.
        budget: bytes, or a string such as "8GiB", for weights, inputs and what the graphs allocate.
            Default: what is free on the GPU, and what the weights occupy.
        reserved: bytes for everything else, such as the state of the optimizer (with AdamW, twice
            the bytes of the parameters).

    Raises:
        exc.BadArgumentError: the example has no batch, or a budget is needed.
        exc.BatchNotDynamicError: the memory at other batch sizes is not known.
        exc.NoBatchFitsError: not even a batch of one fits.
    """
    target = getattr(model, "_orig_mod", model)
    positional, named = ((), example) if isinstance(example, Mapping) else (example, {})
    values = [*positional, *named.values()]
    tensors = _find_tensors(values)
    device = tensors[0].device
    weights = _count_weights(target, device)
    limit = _read_budget(budget, device, weights)
    kept = _parse("reserved", reserved) if reserved else 0
    input_row = sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)
    split = len(positional)

    def compile_for(batch: int) -> _Checks:
        arguments = [_resize(value, batch) for value in values]
        return _compile(target, arguments[:split], dict(zip(named, arguments[split:], strict=True)))

    def count_needed(checks: _Checks, batch: int) -> int:
        return weights + kept + batch * input_row + _plan(checks, batch, device)

    found, checks = _search(compile_for, count_needed, len(tensors[0]), limit)
    if found == 0:
        needed = human_bytes(count_needed(checks, 1))
        raise exc.NoBatchFitsError(needed=needed, budget=human_bytes(limit), device=device)
    return BatchFit(
        batch=found,
        device=str(device),
        budget=limit,
        weights=weights,
        inputs=found * input_row,
        planned=_plan(checks, found, device),
        reserved=kept,
        next_needed=count_needed(checks, found + 1),
    )


def _search(
    compile_for: Callable[[int], _Checks],
    count_needed: Callable[[_Checks, int], int],
    batch: int,
    limit: int,
) -> tuple[int, _Checks]:
    """Return the largest batch that fits, 0 if there is none, and the checks that say so.

    A plan is made for the sizes of the first call, and may need more at others: the model is
    compiled again for the batch that the first compile suggests.
    """
    for _ in range(_COMPILES):
        checks = compile_for(batch)
        found = _find_largest(functools.partial(count_needed, checks), limit)
        if found < 2 or found == batch:
            break
        batch = found
    return found, checks


def _find_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments, which must have one batch."""
    import torch

    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) != 1 or min(sizes) < 2:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        actual = f"tensors of the shapes {shapes}" if tensors else "no tensors"
        allowed = "tensors whose first dimension is the same batch, of 2 or more"
        raise exc.BadArgumentError(name="example", actual=f"({actual})", allowed=allowed)
    return tensors


def _resize(value: Any, batch: int) -> Any:
    """Return a tensor with another first dimension, which is dynamic; or another value."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    row = value.detach()[:1]
    resized = row.repeat(batch, *[1] * (row.dim() - 1))
    if row.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        resized = resized.contiguous(memory_format=torch.channels_last)
    torch._dynamo.mark_dynamic(resized, 0)
    return resized.requires_grad_(value.requires_grad)


def _count_weights(target: Any, device: torch.device) -> int:
    """Return the bytes of a module's parameters and buffers on a device, shared ones once."""
    import torch

    if not isinstance(target, torch.nn.Module):
        return 0
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*target.parameters(), *target.buffers())
        if tensor.device == device
    }
    return sum(storages.values())


def _read_budget(budget: int | str | None, device: torch.device, weights: int) -> int:
    import torch

    if budget is not None:
        return _parse("budget", budget)
    if device.type != "cuda":
        raise exc.BadArgumentError(
            name="budget",
            actual=None,
            allowed=f"bytes, because it is not known how much memory is free on {device}",
        )
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused + weights


def _parse(name: str, value: int | str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise exc.BadArgumentError(name=name, actual=repr(value), allowed=error) from None


def _compile(
    target: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]
) -> _Checks:
    """Compile a model and return the checks in the code of its graphs."""
    import torch
    from torch._functorch import config as functorch_config

    def call(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    # A code object of its own: dynamo would find what an earlier call has compiled.
    call.__code__ = call.__code__.replace()
    options: dict[str, Any] = {
        "memory_budget": next(_budgets),
        "fx_graph_cache": False,
        "cpp_wrapper": False,
    }
    run = torch.compile(call, backend="inductor_ext", fullgraph=True, options=options)
    with (
        functorch_config.patch(enable_autograd_cache=False),
        budget_runtime.collect_checks() as checks,
    ):
        try:
            run(*positional, **named)
        except budget_runtime.NotCalled:
            return checks
        except Exception as error:
            raise exc.BatchNotDynamicError(why=_describe(error)) from error
    raise exc.BatchNotDynamicError(why="no size that is planned depends on it")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.')}"


def _plan(checks: _Checks, batch: int, device: torch.device) -> int:
    """Return the highest peak of the graphs on a device; all of their symbols are the batch."""
    peaks = (
        peak
        for check in checks
        for name, peak in zip(check.devices, check.peaks(*[batch] * len(check.sizes)), strict=True)
        if name == str(device)
    )
    return max(peaks, default=0)


def _find_largest(count_needed: Callable[[int], int], limit: int) -> int:
    """Return the largest batch that needs at most a limit; 0 if there is none."""
    if count_needed(1) > limit:
        return 0
    low = 1
    while low < _LARGEST and count_needed(2 * low) <= limit:
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count_needed(middle) <= limit else (low, middle)
    return low
