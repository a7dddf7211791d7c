"""Cases of the operator sweep: PyTorch's operator samples and their runs in eager mode.

A case is one entry of `op_db`, `hop_db` or `custom_op_db` with one dtype, one way to compile it and
one direction: its first few sample inputs, called in one function.

Determinism: every run starts from one seed, and so do the gradients with which a backward run
begins.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from test.fuzz import op_sweep_data as data
from test.fuzz.op_sweep_compare import Run, reason

SOURCES = ("op_db", "hop_db", "custom_op_db")
"""PyTorch's lists of operators with samples: ATen's, higher-order and custom operators."""

WAYS = ("compile", "cpp_wrapper", "package")
"""How a case is compiled: by torch.compile, the same with `cpp_wrapper`, or as an AOT package."""

DEFAULT_DTYPES = ("float32", "int64", "bool")

OTHER_DTYPES = ("float16", "bfloat16", "float64", "complex64", "int8", "uint8", "int32")

SAMPLES = 2

BATCH = 16
"""Cases compiled together: a C++ compile costs about the same for many small loops as for one."""

SEED = 1729


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One operator ("name" or "name.variant") with one dtype, one way and one direction."""

    operator: str
    dtype: str
    way: str = WAYS[0]
    backward: bool = False
    """Whether gradients are computed and compared as well. A package has none."""
    source: str = SOURCES[0]

    @property
    def group(self) -> str:
        """What the case shares with the cases that may be compiled together with it."""
        direction = "backward" if self.backward else "forward"
        return f"{self.source} {self.dtype} {self.way} {direction}"

    def __str__(self) -> str:
        return f"{self.operator}[{self.group}]"


@functools.cache
def operators(source: str = SOURCES[0]) -> dict[str, Any]:
    """The installed torch's OpInfo entries of one of `SOURCES` by full name, sorted."""
    if source == "op_db":
        from torch.testing._internal.common_methods_invocations import op_db as entries
    elif source == "hop_db":
        from torch.testing._internal.hop_db import hop_db as entries
    else:
        from torch.testing._internal.custom_op_db import custom_op_db as entries
    named = {".".join(filter(None, (op.name, op.variant_test_name))): op for op in entries}
    return dict(sorted(named.items()))


def supported(cases: Sequence[Case]) -> list[Case]:
    """The `cases` that the installed torch supports, in their order."""
    return [case for case in cases if _is_supported(case)]


def _is_supported(case: Case) -> bool:
    operator = operators(case.source).get(case.operator)
    dtype = getattr(torch, case.dtype)
    if operator is None or dtype not in operator.supported_dtypes("cpu"):
        return False
    if not case.backward:
        return True
    return (
        case.way != "package"
        and operator.supports_autograd
        and dtype in operator.supported_backward_dtypes("cpu")
    )


def sample_cases() -> list[Case]:
    """The fixed sample, whatever torch is installed."""
    return [Case(name, dtype) for name, dtypes in data.SAMPLE.items() for dtype in dtypes.split()]


def batches(cases: Sequence[Case], size: int = BATCH) -> list[list[Case]]:
    """Groups of cases that are compiled together, operators in order.

    Known failures are groups of one case: otherwise their group would be judged twice.
    """
    alone = {(failure.operator, failure.dtype) for failure in data.FAILURES}
    grouped: dict[str, list[Case]] = collections.defaultdict(list)
    groups = []
    for case in cases:
        if (case.operator, case.dtype) in alone:
            groups.append([case])
        else:
            grouped[case.group].append(case)
    for group in grouped.values():
        groups += [group[i : i + size] for i in range(0, len(group), size)]
    return groups


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an operator on one of its samples."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiable: Callable[[Any], Any]
    """Maps the result to the part of it whose gradients are defined."""


@dataclasses.dataclass
class Prepared:
    """A case with the calls that eager mode accepts, and their results in eager mode."""

    case: Case
    calls: list[Call]
    uses_random_numbers: bool
    expected: Run

    @functools.cached_property
    def exact(self) -> Run | None:
        """The run in double precision, None where there is none."""
        if self.uses_random_numbers:
            return None
        calls = [
            dataclasses.replace(call, args=to_double(call.args), kwargs=to_double(call.kwargs))
            for call in self.calls
        ]
        try:
            return run(make_program(calls), calls, backward=self.case.backward)
        except Exception:
            return None


Program = Callable[[list[Any]], list[Any]]
"""Maps the arguments of a list of calls, each as `(args, kwargs)`, to the results."""


def make_program(calls: Sequence[Call]) -> Program:
    """A function that makes all calls."""
    targets = [call.operator for call in calls]

    def program(arguments: list[Any]) -> list[Any]:
        results = []
        for target, (args, kwargs) in zip(targets, arguments, strict=True):
            results.append(target(*args, **kwargs))
        return results

    return program


def clone_arguments(arguments: Any) -> Any:
    """A copy of nested arguments that keeps strides, offsets and which tensors share memory.

    Tensors that require gradients are leaves of the copy.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return _copy(tensor.detach(), storages).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copy, arguments)


def _copy(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
    if not plain or tensor.is_nested or tensor.is_quantized:
        return tensor.clone()
    storage = tensor.untyped_storage()
    copied = storages.setdefault(storage.data_ptr() or id(tensor), storage.clone())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        copied, tensor.storage_offset(), tensor.shape, tensor.stride()
    )


_DOUBLE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def to_double(arguments: Any) -> Any:
    """Nested arguments in double precision; dtypes among them as well."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.dtype):
            return _DOUBLE.get(leaf, leaf)
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _DOUBLE:
            double = leaf.detach().to(_DOUBLE[leaf.dtype])
            return double.requires_grad_(leaf.requires_grad)
        return leaf

    return pytree.tree_map(convert, arguments)


def run(program: Program, calls: Sequence[Call], *, backward: bool) -> Run:
    """Run a program on copies of the calls' arguments.

    Raises:
        ValueError: `backward`, and there is nothing to differentiate.
        Exception: an operator's error.
    """
    arguments = clone_arguments([(call.args, call.kwargs) for call in calls])
    torch.manual_seed(SEED)
    with torch.set_grad_enabled(backward):
        results = program(arguments)
        gradients = _gradients(calls, arguments, results) if backward else [()] * len(calls)
    return Run(arguments, results, gradients)


def _gradients(
    calls: Sequence[Call], arguments: list[Any], results: list[Any]
) -> list[tuple[torch.Tensor | None, ...]]:
    """For each call the gradients of the arguments that require one."""
    outputs: list[torch.Tensor] = []
    cotangents: list[torch.Tensor] = []
    for call, result in zip(calls, results, strict=True):
        # Every call has a generator of its own, so that it does not depend on the other calls.
        generator = torch.Generator().manual_seed(SEED)
        for tensor in _tensors(call.differentiable(result)):
            if tensor.requires_grad and tensor.layout is torch.strided:
                outputs.append(tensor)
                cotangents.append(_draw_cotangent(tensor, generator))
    inputs = [[t for t in _tensors(argument) if t.requires_grad] for argument in arguments]
    flat = [tensor for tensors in inputs for tensor in tensors]
    if not outputs or not flat:
        raise ValueError("nothing to differentiate")
    found = iter(torch.autograd.grad(outputs, flat, cotangents, allow_unused=True))
    return [tuple(itertools.islice(found, len(tensors))) for tensors in inputs]


def _draw_cotangent(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A gradient of a result, of values that every dtype has."""
    parts = torch.randint(-8, 9, (2, *tensor.shape), generator=generator) / 4
    values = torch.complex(*parts) if tensor.is_complex() else parts[0]
    return values.to(tensor.dtype)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def prepare(case: Case, samples: int = SAMPLES) -> Prepared | str:
    """Run the case in eager mode, leaving out the samples that eager mode refuses.

    Returns the reason if none is left.
    """
    operator = operators(case.source)[case.operator]
    torch.manual_seed(SEED)
    calls = []
    why = "no samples"
    try:
        dtype = getattr(torch, case.dtype)
        inputs = operator.sample_inputs("cpu", dtype, requires_grad=case.backward)
        chosen = list(itertools.islice(inputs, samples))
        # A generator that ends while torch.export traces would be traced.
        del inputs
        for sample in chosen:
            args = (sample.input, *sample.args)
            call = Call(operator.op, args, dict(sample.kwargs), sample.output_process_fn_grad)
            try:
                run(make_program([call]), [call], backward=case.backward)
            except Exception as error:
                why = reason(error)
            else:
                calls.append(call)
    except Exception as error:
        why = reason(error)
    if not calls:
        return why
    torch.manual_seed(SEED)
    seeded = torch.get_rng_state()
    expected = run(make_program(calls), calls, backward=case.backward)
    return Prepared(case, calls, not torch.equal(seeded, torch.get_rng_state()), expected)
