"""CUDA graphs of a loaded model: one per set of input sizes, captured while it is loaded.

A graph launches all kernels of a call at once, without the time that the CPU needs for each. Calls
whose inputs have the sizes, strides and dtypes of a captured one copy their inputs into the memory
of the capture, launch the graph, and return copies of its results. Other calls run as without
graphs.

A graph contains the addresses of the constants. Whatever changes the active set of constants does
so within `CudaGraphs.replacing`, which captures the graphs again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.warm_up import preserved_state

if TYPE_CHECKING:
    from inductor_ext.cpp_wrapper.load.instance import ExtensionInstance

_Key: TypeAlias = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    """The memory that the graph reads."""
    results: list[torch.Tensor]
    """The memory that the graph writes."""


class CudaGraphs:
    """The graphs of one instance. A call is `instance.run`, faster where there is a graph."""

    def __init__(
        self, instance: ExtensionInstance, examples: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Capture a graph for each example.

        Args:
            instance: the model.
            examples: the tensors that `instance.run` takes.

        Raises:
            exc.CudaGraphError: the model, or the call of an example, cannot be captured.
        """
        _check(instance, examples)
        self._instance = weakref.ref(instance)  # a cycle would delay the end of its memory
        self._run = instance.run_compiled
        self._device = instance.device
        self._lock = threading.RLock()
        self._graphs: dict[_Key, _Graph] = {}
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()
            self._done = torch.cuda.Event()
        self._examples = [_copy(tensors) for tensors in examples]
        try:
            self._capture(instance)
        except RuntimeError as error:
            raise exc.CudaGraphError(why=_first_line(error)) from error

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the model. Arguments and results are those of `instance.run`."""
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return self._run(tensors)
        key = _key(tensors)
        if key not in self._graphs:
            return self._run(tensors)
        # All launches use the same memory: each waits until the results before it are copied.
        with self._lock, torch.cuda.device(self._device), torch.no_grad():
            graph = self._graphs.get(key)
            if graph is None:  # replaced meanwhile
                return self._run(tensors)
            stream = torch.cuda.current_stream()
            stream.wait_event(self._done)
            if graph.inputs:
                torch._foreach_copy_(graph.inputs, list(tensors))
            graph.graph.replay()
            results = _copy(graph.results)
            self._done.record(stream)
            return results

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        """Hold back calls of graphs while constants change; then capture the graphs again."""
        with self._lock:
            self._done.synchronize()
            try:
                yield
            finally:
                self._graphs.clear()
                instance = self._instance()
                assert instance is not None
                try:
                    self._capture(instance)
                except RuntimeError as error:
                    self._graphs.clear()
                    warnings.warn(
                        "The CUDA graphs could not be captured again after constants changed: "
                        f"{_first_line(error)}. The model runs without them.",
                        RuntimeWarning,
                        stacklevel=4,
                    )

    def _capture(self, instance: ExtensionInstance) -> None:
        with (
            torch.cuda.device(self._device),
            torch.no_grad(),
            preserved_state(instance),
            _usable_generator(self._device),
        ):
            for inputs in self._examples:
                self._graphs[_key(inputs)] = self._capture_one(inputs)
        self._done.record(torch.cuda.current_stream(self._device))

    def _capture_one(self, inputs: list[torch.Tensor]) -> _Graph:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # Loads kernels and creates workspaces, which is not possible within a capture.
            self._run(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            results = self._run(inputs)
        torch.cuda.current_stream().wait_stream(self._stream)
        return _Graph(graph, inputs, results)


@contextlib.contextmanager
def _usable_generator(device: torch.device) -> Iterator[None]:
    """Replace the state of the random number generator if a capture fails within.

    torch leaves the state marked as being captured, so that all further random numbers would fail.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    state = generator.clone_state()
    try:
        yield
    except RuntimeError:
        generator.graphsafe_set_state(state)
        raise


def _check(instance: ExtensionInstance, examples: Sequence[Sequence[torch.Tensor]]) -> None:
    if instance.device.type != "cuda":
        raise exc.CudaGraphError(why="it runs on the CPU")
    if instance.mutates_inputs is None:
        raise exc.CudaGraphError(why="an earlier version compiled it; compile it again")
    if instance.mutates_inputs:
        raise exc.CudaGraphError(why="it changes its inputs, of which a graph has copies")
    for tensors in examples:
        for inp, tensor in zip(instance.signature.tensors, tensors, strict=True):
            if tensor.device != instance.device:
                why = f"input '{inp.name}' is on {tensor.device}, where a graph does not read it"
                raise exc.CudaGraphError(why=why)
            if _overlaps(tensor):
                raise exc.CudaGraphError(why=f"elements of input '{inp.name}' share memory")


def _key(tensors: Sequence[torch.Tensor]) -> _Key:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _copy(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies with the same strides, except of tensors whose elements share memory."""
    copies = [
        torch.empty_like(tensor)
        if _overlaps(tensor)
        else torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        for tensor in tensors
    ]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return copies


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
