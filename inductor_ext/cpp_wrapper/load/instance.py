"""A compiled model of one package in memory, which `LoadedModel.reload` replaces as a whole.

A call of a loaded model takes its instance once, and uses nothing else. It therefore ends with the
model that it began with. An instance is destroyed when the loaded model has another one and the
last call that uses it has ended.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.calling_convention import Convention
from inductor_ext.cpp_wrapper.load.constants import ConstantRules
from inductor_ext.cpp_wrapper.load.cuda_graphs import CudaGraphs
from inductor_ext.cpp_wrapper.load.native import ErrorCode, NativeLibrary
from inductor_ext.cpp_wrapper.package import manifest
from inductor_ext.cpp_wrapper.signature.signature import (
    ConstantInput,
    ConstantOutput,
    Input,
    Output,
    Signature,
    TensorInput,
    TensorOutput,
)

_Args = tuple[Any, ...]
_Kwargs = Mapping[str, Any]


class Instance:
    """What all models have: how they are called."""

    signature: Signature | None = None
    content: manifest.Manifest | None = None
    """The manifest of the package."""

    def __init__(self, path: str, run: Callable[[Any], Any], convention: Convention) -> None:
        """
        Args:
            path: path of the package; empty for a buffer.
            run: calls the compiled model with a sequence of tensors; returns a list of tensors.
            convention: how arguments become these tensors.
        """
        self.path = path
        self.run = run
        self.convention = convention
        self.plain = convention.plain
        self.restore = convention.restore

    def translate(self, error: Exception, args: _Args, kwargs: _Kwargs) -> None:
        """Raise a more specific error in place of `error`, which `run` raised, if there is one."""

    def find_difference(self, other: Instance) -> str | None:
        """Return how calls of another model differ from those of this one; None if they do not.

        Ranges of sizes may differ.
        """
        specs = zip(self.convention.specs, other.convention.specs, strict=True)
        for what, (one, another) in zip(("arguments", "results"), specs, strict=True):
            if one != another:
                return f"its {what} have another structure"
        if self.signature is None or other.signature is None:
            return None
        values = zip(_describe(self.signature), _describe(other.signature), strict=True)
        for (name, one), (new_name, another) in values:
            if name != new_name:
                return f"its {new_name} is called {name} in the loaded model"
            if one != another:
                return f"its {name} is {another}, and the loaded model's is {one}"
        return None


def _describe(signature: Signature) -> Iterator[tuple[str, str]]:
    """Yield the name of each input and result, and what callers know of it apart from sizes."""
    for inp in signature.inputs:
        device = f" on {inp.device}" if isinstance(inp, TensorInput) else ""
        yield f"input '{inp.name}'", f"{_describe_value(inp)}{device}"
    for output in signature.outputs:
        yield f"result '{output.path}'" if output.path else "result", _describe_value(output)


def _describe_value(value: Input | Output) -> str:
    if isinstance(value, TensorInput | TensorOutput):
        return f"a {value.dtype} tensor of {len(value.shape)} dimensions"
    if isinstance(value, ConstantInput | ConstantOutput):
        return f"always {value.value!r}"
    return f"a scalar of type {value.type}"


class ExtensionInstance(Instance):
    """A model of a package compiled by the extension."""

    signature: Signature
    content: manifest.Manifest

    def __init__(
        self,
        *,
        path: str,
        name: str,
        content: manifest.Manifest,
        signature: Signature,
        convention: Convention,
        runner: Any,
        library: NativeLibrary,
        metadata: Mapping[str, str],
        rules: ConstantRules,
        device: torch.device,
    ) -> None:
        super().__init__(path, runner.run, convention)
        self.run_compiled = runner.run
        self.graphs: CudaGraphs | None = None
        self.device = device
        self.content = content
        self.signature = signature
        self.runner = runner
        self.library = library
        self.container = library.last_container()
        self.metadata = metadata
        described = content.models[name]
        self.mutated_buffers = described.mutated_buffers
        self.mutates_inputs = described.mutates_inputs
        self._index_inputs = {
            kernel.name: kernel.index_inputs for kernel in described.kernels if kernel.index_inputs
        }
        self.rules = rules
        # Runs before the runner is destroyed. The runner's own handle keeps the library loaded
        # until then.
        weakref.finalize(self, library.close).atexit = False

    def use_graphs(self, graphs: CudaGraphs) -> None:
        """Run calls with the inputs of a captured graph by launching it."""
        self.graphs = graphs
        self.run = graphs

    def changing_constants(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which the active set of constants is changed."""
        return contextlib.nullcontext() if self.graphs is None else self.graphs.replacing()

    def translate(self, error: Exception, args: _Args, kwargs: _Kwargs) -> None:
        if isinstance(error, TypeError):
            self.convention.flatten(args, kwargs)
            return
        why = self.library.last_error()
        if why:
            code = self.library.last_error_code()
            translated: exc.InductorExtError | None = None
            if code is ErrorCode.INPUT:
                translated = exc.InputMismatchError(why=why)
            elif code is ErrorCode.BUDGET:
                translated = exc.MemoryBudgetCallError.from_message(why)
            raise (translated or self.run_error(why)) from None

    def run_error(self, why: str) -> exc.ArtifactRunError:
        """Return the error for a failure that the library describes by `why`."""
        details = self.library.last_error_details()
        raised = re.match(r"Exception raised from (\w+) at ", details)
        inputs = self._index_inputs.get(raised[1], {}) if raised else {}
        why = _describe_index_error(why, inputs.get(why))
        checked = {name for names in self._index_inputs.values() for name in names.values()}
        return exc.ArtifactRunError(why=_describe_assert(why, checked), details=details)


def _describe_index_error(why: str, source: str | None) -> str:
    """Replace the expression of a failed check of an index by the size that it must be below.

    Args:
        why: the text of the error.
        source: the input that the index comes from; None if that is not known.
    """
    match = re.fullmatch(r"index out of bounds: 0 <= \w+ < (\d+)L*", why)
    if match is None:
        return why
    index = "An index" if source is None else f"An index from input '{source}'"
    return f"{index} is out of bounds for a dimension of size {match[1]}"


def _describe_assert(why: str, checked: Collection[str]) -> str:
    """Add the inputs that a failed assert of a GPU kernel may be about.

    CUDA does not say which assert failed, nor in which kernel of the process.

    Args:
        why: the text of the error.
        checked: the inputs whose elements the model checks as indices.
    """
    if "device-side assert triggered" not in why or not checked:
        return why
    names = " or ".join(f"'{name}'" for name in sorted(checked))
    return f"{why}: an index from input {names} may be out of bounds"


class InductorInstance(Instance):
    """A model of a package compiled by Inductor (default), loaded by torch's own loader.

    Errors are torch's.
    """

    def __init__(self, path: str, loader: Any) -> None:
        in_spec, out_spec = loader.get_call_spec()
        super().__init__(path, loader.run, Convention(in_spec, out_spec, None, path))
        self.loader = loader
