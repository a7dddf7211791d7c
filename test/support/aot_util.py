"""Compiles models to packages and compares them with eager mode, for tests of AOT capabilities.

`Artifact.check` calls eager model and artifact on clones of the same inputs and compares all that a
caller can see: structure, values, dtypes, strides, devices, mutated inputs, and which tensors share
memory. State is compared by its use: the eager model is a copy made before the compile, so a buffer
that a model mutates has to change equally on both sides from call to call.

A `Bundle` is many small models in one artifact, since most of a compile's time does not depend on
the model. Each case is checked by name. Where the bundle does not compile or run, each case is
compiled alone when it is needed, so that only the tests of missing capabilities fail, and
`check_whole`.

Every capability is a function of the device: `DEVICES` are the parameters of a fixture `device`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pathlib
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch._inductor.package
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import inductor_ext
from test.support import compile_util

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
"""The devices that a capability is tested on."""

TOLERANCE = {
    torch.float8_e4m3fn: 0.125,
    torch.float8_e5m2: 0.25,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
    torch.float32: 2e-5,
    torch.complex64: 2e-5,
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
}
"""Relative and absolute tolerance by the eager result's dtype; exact for all others."""

_numbers = itertools.count()


class Function(torch.nn.Module):
    """A plain function as a model, with the function's argument names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def as_module(model: Callable[..., Any]) -> torch.nn.Module:
    """The model itself, or a module that wraps a function."""
    return model if isinstance(model, torch.nn.Module) else Function(model)


def sharing(tree: object) -> list[tuple[int, int, int]]:
    """Pairs of tensors among the leaves that share memory, and their distance in bytes."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [
        (i, j, right.data_ptr() - left.data_ptr())
        for j, right in enumerate(tensors)
        for i, left in enumerate(tensors[:j])
        if left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr() != 0
    ]


def assert_same(actual: object, expected: object, *, tolerance: float | None = None) -> None:
    """Assert equal structure and equal leaves; for tensors dtype, shape, stride and device as well.

    Args:
        actual: the result of the artifact.
        expected: the result of eager mode.
        tolerance: relative and absolute, instead of that of each dtype.
    """
    assert compile_util.structure(actual) == compile_util.structure(expected)
    pairs = zip(compile_util.leaves(actual), compile_util.leaves(expected), strict=True)
    for ours, eager in pairs:
        if not isinstance(eager, torch.Tensor):
            assert ours == eager
            continue
        limit = TOLERANCE.get(eager.dtype, 0) if tolerance is None else tolerance
        assert ours.dtype == eager.dtype
        if eager.dtype.is_floating_point and eager.dtype.itemsize == 1:
            # Not every operator that a comparison needs supports float8.
            assert (ours.stride(), ours.device) == (eager.stride(), eager.device)
            ours, eager = ours.float(), eager.float()
        torch.testing.assert_close(
            ours,
            eager,
            rtol=limit,
            atol=limit,
            equal_nan=True,
            # The stride of a dimension of size one means nothing.
            check_stride=eager.numel() > 1 and 1 not in eager.shape,
        )


def clone(tree: Any) -> Any:
    """A deep copy that preserves shared memory, strides and offsets of tensors."""
    with torch.no_grad():
        return copy.deepcopy(tree)


def call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """Call with clones of the inputs; return the outputs, and the inputs after the call."""
    inputs = clone((args, dict(kwargs or {})))
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = function(*inputs[0], **inputs[1])
    # An artifact does not record which of its results are parameters.
    return pytree.tree_map_only(torch.nn.Parameter, torch.Tensor.detach, outputs), inputs


def load(path: Any, model_name: str = "model", **options: Any) -> Any:
    """Load a model of a package by `inductor_ext.load`, or by torch's loader."""
    ours = getattr(inductor_ext, "load", None)
    if ours is not None:
        return ours(path, model_name, **options)
    return torch._inductor.package.load_package(path, model_name, **options)


_LOAD = (
    "import sys, torch; torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], 'model', False, 1, -1)"
)


def crashes_at_load(path: str) -> bool:
    """Whether loading the package crashes a new process. Packages of Inductor do on some machines:
    a std::regex in their library is bound to libtorch's functions of the same names."""
    return subprocess.run([sys.executable, "-c", _LOAD, path], capture_output=True).returncode < 0


@dataclasses.dataclass
class Artifact:
    """A compiled model, its package and its eager model."""

    eager: Callable[..., Any]
    program: ExportedProgram
    path: str
    tolerance: float | None = None

    def __post_init__(self) -> None:
        self._loaded: Any = None
        self._lock = threading.Lock()

    @property
    def loaded(self) -> Any:
        """The loaded model, the same one at each use."""
        with self._lock:
            if self._loaded is None:
                self._loaded = load(self.path)
        return self._loaded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.loaded(*args, **kwargs)

    def observe(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Call both on clones of the inputs; return the observable results, artifact first."""
        actual, expected = (call(f, args, kwargs) for f in (self.loaded, self.eager))
        return actual, expected

    def check(self, *args: Any, **kwargs: Any) -> Any:
        """Assert that the artifact does what the eager model does; return its outputs."""
        actual, expected = self.observe(*args, **kwargs)
        assert_same(actual, expected, tolerance=self.tolerance)
        assert sharing(actual) == sharing(expected)
        return actual[0]

    def unpack(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Unpack the package into a folder; return the path of its only `.so`."""
        with zipfile.ZipFile(self.path) as archive:
            archive.extractall(folder)
        (library,) = pathlib.Path(folder).rglob("*.so")
        return library

    def sources(self) -> str:
        """The text of all C++ sources in the package."""
        with zipfile.ZipFile(self.path) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".cpp"))
            return "\n".join(archive.read(name).decode() for name in names)

    def names(self) -> list[str]:
        """The names of the files in the package, without its root folder."""
        with zipfile.ZipFile(self.path) as archive:
            return [name.partition("/")[2] for name in archive.namelist()]

    def runner(self, folder: str | pathlib.Path, *, runners: int = 1) -> Any:
        """Torch's binding of the C interface, which takes and returns flat lists of tensors."""
        library = str(self.unpack(folder))
        devices = {tensor.device.type for tensor in self._tensors()}
        if "cuda" in devices:
            return torch._C._aoti.AOTIModelContainerRunnerCuda(
                library, runners, "cuda", str(pathlib.Path(library).parent)
            )
        return torch._C._aoti.AOTIModelContainerRunnerCpu(library, runners)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for node in self.program.graph.nodes:
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, torch.Tensor):
                    yield value


def export(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    **options: Any,
) -> ExportedProgram:
    """`torch.export.export` without grad mode, on clones of the inputs."""
    args, kwargs = clone((args, dict(kwargs or {})))
    with torch.no_grad():
        return torch.export.export(
            as_module(model), args, kwargs, dynamic_shapes=dynamic_shapes, **options
        )


def package_path() -> str:
    """A path for a package in a folder of its own, which is removed when the process ends."""
    return f"{_folder().name}/model_{next(_numbers)}.pt2"


_made: list[tempfile.TemporaryDirectory[str]] = []


def _folder() -> tempfile.TemporaryDirectory[str]:
    if not _made:
        _made.append(tempfile.TemporaryDirectory(prefix="inductor_ext-aot-"))
    return _made[0]


def compile_program(program: ExportedProgram, **configs: Any) -> str:
    """Compile an exported program; return the package's path.

    Args:
        program: what to compile.
        configs: options of Inductor and the extension, with `__` for the dot in a name.
    """
    options = {name.replace("__", "."): value for name, value in configs.items()}
    result = inductor_ext.aoti_compile_and_package(
        program, package_path=package_path(), inductor_configs=options
    )
    assert isinstance(result, str)
    return result


def compile_model(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    *,
    tolerance: float | None = None,
    **configs: Any,
) -> Artifact:
    """Export a model with these inputs and compile it.

    Args:
        model: a module or a function.
        args: example inputs; neither they nor the model are changed.
        kwargs: example keyword arguments.
        dynamic_shapes: as for `torch.export.export`.
        tolerance: relative and absolute, instead of that of each dtype.
        configs: options of Inductor and the extension, with `__` for the dot in a name.
    """
    model = as_module(model)
    eager = clone(model)
    program = export(model, args, kwargs, dynamic_shapes)
    return Artifact(eager, program, compile_program(program, **configs), tolerance)


@dataclasses.dataclass
class Case:
    """One small model of a bundle.

    Attributes:
        model: a module or a function, of positional arguments.
        args: example inputs.
        dynamic: the dynamic shapes of `args`, a tuple of the same length.
        calls: further inputs to be called with.
        tolerance: relative and absolute, instead of that of each dtype.
        aliases: whether to compare which tensors share memory.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    dynamic: tuple[Any, ...] | None = None
    calls: tuple[tuple[Any, ...], ...] = ()
    tolerance: float | None = None
    aliases: bool = True

    def __post_init__(self) -> None:
        self.model = as_module(self.model)


class Cases(dict[str, Callable[[], Case]]):
    """The functions that create a bundle's cases, by name; used as a decorator."""

    def __call__(self, make: Callable[[], Case]) -> Callable[[], Case]:
        assert make.__name__ not in self, f"two cases are called {make.__name__}"
        self[make.__name__] = make
        return make

    def compile(self, device: str, **configs: Any) -> Bundle:
        """Create the cases on `device` and compile them as one model."""
        torch.manual_seed(0)
        with torch.device(device):
            cases = {name: make() for name, make in self.items()}
        return Bundle(cases, **configs)


class _Bundled(torch.nn.Module):
    def __init__(self, cases: Mapping[str, Case]) -> None:
        super().__init__()
        # A prefix, because ModuleDict rejects names of its attributes.
        self.models = torch.nn.ModuleDict({f"{name}_": c.model for name, c in cases.items()})

    def forward(self, inputs: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {name: self.models[f"{name}_"](*args) for name, args in inputs.items()}


class Bundle:
    """Many small models in one artifact; see the module's docstring."""

    def __init__(self, cases: Mapping[str, Case], **configs: Any) -> None:
        self.cases = cases
        self._configs = configs
        self._examples = {name: case.args for name, case in cases.items()}
        self._alone: dict[str, Artifact] = {}
        self._eager = {name: clone(case.model) for name, case in cases.items()}
        # Each call of the artifact changes the state of all stateful cases.
        self._stateful = {name for name, case in cases.items() if [*case.model.buffers()]}
        self.error: Exception | None = None
        shapes = {name: case.dynamic or (None,) * len(case.args) for name, case in cases.items()}
        try:
            program = export(_Bundled(cases), (self._examples,), None, (shapes,))
            self._loaded = load(compile_program(program, **configs))
            self._seen = self._observe(self._examples, set(cases))
        except Exception as error:
            self.error = error

    def check_whole(self) -> None:
        """Raise what the compile or the first call of the whole bundle raised."""
        if self.error is not None:
            raise self.error

    def check(self, name: str) -> None:
        """Assert that outputs and mutated inputs of all the case's calls equal eager mode's."""
        case = self.cases[name]
        if self.error is not None:
            artifact = self._compiled_alone(name)
            for args in (case.args, *case.calls):
                self._compare(name, artifact.observe(*args))
            return
        self._compare(name, self._seen[name])
        for args in case.calls:
            inputs = {**self._examples, name: args}
            self._compare(name, self._observe(inputs, {name} | self._stateful)[name])

    def _observe(self, inputs: Mapping[str, Any], names: set[str]) -> dict[str, tuple[Any, Any]]:
        """The observable results of a call of the artifact, and of the eager models by name."""
        outputs, changed = call(self._loaded, (inputs,))
        return {
            name: ((outputs[name], (changed[0][0][name], {})), call(model, inputs[name]))
            for name, model in self._eager.items()
            if name in names
        }

    def _compare(self, name: str, seen: tuple[Any, Any]) -> None:
        actual, expected = seen
        assert_same(actual, expected, tolerance=self.cases[name].tolerance)
        assert not self.cases[name].aliases or sharing(actual) == sharing(expected)

    def _compiled_alone(self, name: str) -> Artifact:
        if name not in self._alone:
            case = self.cases[name]
            self._alone[name] = compile_model(
                self._eager[name], case.args, None, case.dynamic, **self._configs
            )
        return self._alone[name]
