"""Error codes of compiled libraries."""

from __future__ import annotations

import ctypes
import pathlib
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import compiler
from inductor_ext.cpp_wrapper.load.model import Model
from inductor_ext.cpp_wrapper.load.native import ErrorCode, NativeLibrary, WeightsRequest
from inductor_ext.cpp_wrapper.package import manifest, zip_reader
from test.support.loader_models import Plain, X, changed, check, library_of, nested_inputs


@pytest.fixture
def native(path: str, tmp_path: pathlib.Path) -> Iterator[NativeLibrary]:
    """The library of "model", which has a file of weights beside it."""
    library = _write_library(path, tmp_path / "native.so")
    native = NativeLibrary(library)
    native.prepare(WeightsRequest(), False)
    assert native.last_error_code() is ErrorCode.NONE
    yield native
    native.close()


def _write_library(path: str, target: pathlib.Path) -> str:
    with zip_reader.open_package(path) as package:
        content, _ = manifest.read(package) or pytest.fail("no manifest")
        model = content.models["model"]
        package.extract(str(model.library), target)
        package.extract(str(model.weights), target.with_suffix(".weights"))
    return str(target)


def _create(native: NativeLibrary, device: bytes = b"cpu") -> int:
    # PyDLL: the library releases the GIL itself.
    library = ctypes.PyDLL(None, handle=native._library._handle)
    create = library.AOTInductorModelContainerCreateWithDevice
    container = ctypes.c_void_p()
    return int(create(ctypes.byref(container), ctypes.c_size_t(1), device, None))


def test_python_and_cpp_have_the_same_error_codes() -> None:
    text = (compiler.RUNTIME / "error.h").read_text()
    codes = {name.upper(): int(value) for name, value in re.findall(r"(\w+) = (\d+),", text)}
    assert {code.name: code.value for code in ErrorCode if code is not ErrorCode.UNKNOWN} == codes


def test_a_failed_creation_has_the_code_of_its_reason(native: NativeLibrary) -> None:
    assert _create(native, b"tpu") == 1
    assert native.last_error_code() is ErrorCode.FAILURE
    native.prepare(WeightsRequest(("/nowhere/model.weights", 0, 8)), False)
    assert _create(native) == 1
    assert native.last_error_code() is ErrorCode.WEIGHTS
    assert _create(native) == 0
    assert (native.last_error_code(), native.last_error()) == (ErrorCode.NONE, "")


def test_a_cpu_that_lacks_features_has_its_own_code(path: str, tmp_path: pathlib.Path) -> None:
    library = pathlib.Path(_write_library(path, tmp_path / "other.so"))
    with zip_reader.open_package(path) as package:
        content, _ = manifest.read(package) or pytest.fail("no manifest")
    features = ",".join(content.models["model"].cpu_features).encode()
    if not features:
        pytest.skip("the model needs no CPU features")
    data = library.read_bytes()
    assert data.count(features + b"\0") == 1
    library.write_bytes(data.replace(features, b"x" * len(features)))
    native = NativeLibrary(str(library))
    native.prepare(WeightsRequest(), False)
    assert _create(native) == 1
    assert native.last_error_code() is ErrorCode.CPU
    native.close()


def test_calls_and_updates_have_the_code_of_their_reason(path: str) -> None:
    model = inductor_ext.load(path)
    assert isinstance(model, Model)
    with pytest.raises(exc.InputMismatchError, match="float64"):
        model(X.double())
    assert library_of(model).last_error_code() is ErrorCode.INPUT
    model(X)
    assert library_of(model).last_error_code() is ErrorCode.NONE
    with pytest.raises(exc.ConstantMismatchError, match="no new value"):
        model.update_constants({"scale": torch.ones(16)}, partial=False)
    assert library_of(model).last_error_code() is ErrorCode.CONSTANT
    nested = inductor_ext.load(path, "nested")
    assert isinstance(nested, Model)
    args, kwargs = nested_inputs()
    args[0]["ids"][0] = torch.tensor([1, 2, 1000])
    with pytest.raises(exc.ArtifactRunError, match="out of bounds") as caught:
        nested(*args, **kwargs)
    assert library_of(nested).last_error_code() is ErrorCode.FAILURE
    # One sentence for the caller; where it happened is apart from it.
    message = str(caught.value)
    assert "\n" not in message
    assert ".cpp" not in message
    expected = "An index from input 'batch['ids'][0]' is out of bounds for a dimension of size 10."
    assert message == expected
    assert re.match(r"Exception raised from \w+ at .*\.cpp:\d+", caught.value.details)
    assert pickle.loads(pickle.dumps(caught.value)).details == caught.value.details
    args[0]["ids"][0] = torch.tensor([1, 2, 3])
    nested(*args, **kwargs)
    assert library_of(nested).last_error_details() == ""


def test_libraries_without_error_codes_use_error_texts(path: str, plain: Plain) -> None:
    def rename(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        for name in [name for name in entries if name.endswith(".so")]:
            for old in (b"inductor_ext_last_error_code", b"inductor_ext_last_error_details"):
                assert old in entries[name]
                entries[name] = entries[name].replace(old, old[:-1] + b"_")

    package = changed(path, rename)
    model = inductor_ext.load(package)
    assert isinstance(model, Model)
    check(model, plain)
    with pytest.raises(exc.InputMismatchError, match="float64"):
        model(X.double())
    assert library_of(model).last_error_code() is ErrorCode.INPUT
    with pytest.raises(exc.ConstantMismatchError, match="no new value"):
        model.update_constants({"scale": torch.ones(16)}, partial=False)
    assert library_of(model).last_error_code() is ErrorCode.UNKNOWN
    args, kwargs = nested_inputs()
    args[0]["ids"][0] = torch.tensor([1, 2, 1000])
    with pytest.raises(exc.ArtifactRunError, match="out of bounds") as caught:
        inductor_ext.load(package, "nested")(*args, **kwargs)
    assert not isinstance(caught.value, exc.InputMismatchError)
