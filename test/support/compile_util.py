"""One eager run and one compiled run, compared, for tests of torch.compile's features.

`check` runs a function both ways on inputs of equal value and compares all that a caller can see:
values, dtypes, strides, gradients, mutated inputs and module state, and which tensors share memory.
It also counts the graphs that the extension compiled, so that a test cannot pass on a graph that
silently ran in eager mode.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch._dynamo.utils import counters

from inductor_ext import _compat, events
from inductor_ext.backend import EagerFallbackRecord
from inductor_ext.hooks.records import CompileRecord

BACKEND = "inductor_ext"
BACKENDS = ("inductor", BACKEND)

INFERENCE = {"inference": 1}
TRAINING = {"forward": 1, "backward": 1}

TORCH = tuple(map(int, _compat.torch_version().split(".")[:2]))

OUT_VARIANT: Any = getattr(torch.Tag, "out", None) or getattr(torch.Tag, "out_variant", None)
"""The tag of a custom operator's out variant. Before torch 2.13 it is `out_variant`."""

_TOLERANCE = {
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
}
"""Relative and absolute tolerances. Reduced precision: Inductor rounds once where eager rounds
after each operator."""


@contextlib.contextmanager
def every_graph_compiles() -> Iterator[None]:
    """Every graph is compiled by itself, dynamo's counters start at zero, no trace is written.

    An AOTAutograd cache hit would bring forward and backward as one; the FX graph cache stays on.
    """
    counters.clear()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@contextlib.contextmanager
def compiled_graphs() -> Iterator[Counter[str]]:
    """Yield a Counter that holds, after the block, the extension's compiled graphs by kind.

    A graph that runs in eager mode is counted by the description of its record.
    """
    kinds: Counter[str] = Counter()
    with events.capture() as records:
        yield kinds
    kinds.update(record.kind for record in records if isinstance(record, CompileRecord))
    kinds.update(r.describe() for r in records if isinstance(r, EagerFallbackRecord))


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Give torch's operators, and kernels that are compiled, this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def leaves(tree: object) -> list[Any]:
    """All leaves of nested containers, dataclasses included, in a fixed order."""
    if isinstance(tree, Mapping):
        return [leaf for key in tree for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for item in tree for leaf in leaves(item)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = dataclasses.fields(tree)
        return [leaf for field in fields for leaf in leaves(getattr(tree, field.name))]
    return [tree]


def tensors(tree: object) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def structure(tree: object) -> object:
    """The containers' types and keys, without the leaves' values."""
    if isinstance(tree, Mapping):
        return type(tree), [(key, structure(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return type(tree), [structure(item) for item in tree]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return type(tree), [structure(vars(tree)[field.name]) for field in dataclasses.fields(tree)]
    return type(tree)


def aliasing(tree: object) -> list[tuple[object, ...]]:
    """Which tensors are one object, share memory (and how far apart they start), are view and base.

    A base that the caller does not hold does not count: whether an output is a view of an
    freed intermediate is up to the compiler.
    """
    values = tensors(tree)
    relations: list[tuple[object, ...]] = []
    for i, right in enumerate(values):
        for j, left in enumerate(values[:i]):
            if left.untyped_storage()._cdata == right.untyped_storage()._cdata:
                distance = right.storage_offset() - left.storage_offset()
                bases = right._base is left, left._base is right
                relations.append((j, i, left is right, distance, bases))
    return relations


def assert_same(actual: object, expected: object, *, tolerance: float | None = None) -> None:
    """Assert equal structure, and equal leaves within the dtype's tolerance.

    For tensors dtype, shape, stride, device, class and requires_grad count as well.
    """
    assert structure(actual) == structure(expected)
    for ours, eager in zip(leaves(actual), leaves(expected), strict=True):
        if not isinstance(eager, torch.Tensor):
            assert ours == eager
            continue
        assert (ours.requires_grad, ours.is_inference()) == (
            eager.requires_grad,
            eager.is_inference(),
        )
        limit = _TOLERANCE.get(eager.dtype, 0) if tolerance is None else tolerance
        torch.testing.assert_close(
            ours.detach(),
            eager.detach(),
            rtol=limit,
            atol=limit,
            equal_nan=True,
            # The stride of a dimension of size one means nothing.
            check_stride=eager.numel() > 1 and 1 not in eager.shape,
        )


@dataclasses.dataclass
class Observed:
    """All that a caller can see of a call."""

    outputs: Any
    inputs: Any
    state: dict[str, torch.Tensor]
    gradients: list[torch.Tensor | None]


def observe(
    function: Callable[..., Any], inputs: tuple[Any, ...], module: Any = None, *, backward: bool
) -> Observed:
    """Call `function`; with `backward`, go on to the gradients of everything that has one.

    The outputs' gradients are fixed but not constant, so that the paths of two outputs differ.
    """
    torch.manual_seed(1)
    outputs = function(*inputs)
    parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    gradients: list[torch.Tensor | None] = []
    if backward:
        differentiable = [out for out in tensors(outputs) if out.requires_grad]
        seeds = [
            torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).reshape(out.shape).to(out)
            for out in differentiable
        ]
        torch.autograd.backward(differentiable, seeds)
        differentiated = [tensor for tensor in [*tensors(inputs), *parameters] if tensor.is_leaf]
        gradients = [tensor.grad for tensor in differentiated]
    state = dict(module.named_buffers()) if isinstance(module, torch.nn.Module) else {}
    return Observed(outputs, inputs, state, gradients)


def check(
    function: Callable[..., Any],
    make_inputs: Callable[[], tuple[Any, ...]] = tuple,
    *,
    graphs: Mapping[str, int] | None = None,
    backward: bool = False,
    aliases: bool = True,
    tolerance: float | None = None,
    compiled: Callable[..., Any] | None = None,
    backend: Any = BACKEND,
    **compile_options: Any,
) -> Callable[..., Any]:
    """Assert that the compiled `function` does what the function does, and return it.

    Args:
        function: a function or a module; a module is copied for the eager run.
        make_inputs: creates the positional arguments for each run, with equal values.
        graphs: how many graphs of which kind the extension must compile. By default one graph, or
            with `backward` one forward and one backward.
        backward: whether to compare gradients, of all leaf inputs and parameters.
        aliases: whether to compare which tensors share memory.
        tolerance: relative and absolute, instead of that of each dtype.
        compiled: the compiled function, where it exists already.
        backend: for torch.compile.
        compile_options: for torch.compile.
    """
    eager = copy.deepcopy(function) if isinstance(function, torch.nn.Module) else function
    torch.manual_seed(0)
    expected = observe(eager, make_inputs(), eager, backward=backward)
    if compiled is None:
        compiled = torch.compile(function, backend=backend, **compile_options)
    torch.manual_seed(0)
    inputs = make_inputs()
    with compiled_graphs() as kinds:
        actual = observe(compiled, inputs, function, backward=backward)
    if aliases:
        assert aliasing((actual.outputs, actual.inputs)) == aliasing(
            (expected.outputs, expected.inputs)
        )
    assert_same(vars(actual), vars(expected), tolerance=tolerance)
    if graphs is None:
        graphs = TRAINING if backward else INFERENCE
    assert dict(kinds) == graphs
    return compiled


def failure(backend: str, attempt: Callable[[str], object]) -> tuple[type[BaseException], str]:
    """The class and first line of the error that `attempt(backend)` raises."""
    torch._dynamo.reset()
    try:
        attempt(backend)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return type(error), lines[0].replace(BACKEND, "inductor") if lines else ""
    raise AssertionError(f"no error with backend={backend!r}")


def assert_fails_as_stock(attempt: Callable[[str], object]) -> tuple[type[BaseException], str]:
    """Assert that `attempt` raises the same error with both backends; return it."""
    stock, ours = (failure(backend, attempt) for backend in BACKENDS)
    assert ours == stock
    return ours


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)
