"""The C++ input checks of many signatures in one library, and an oracle for them."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Sequence

import pytest
import torch

import inductor_ext.cpp_wrapper
from inductor_ext.cpp_wrapper.codegen import input_checks
from inductor_ext.cpp_wrapper.signature import expression
from inductor_ext.cpp_wrapper.signature.signature import (
    Extent,
    Range,
    Signature,
    SymbolInput,
    TensorInput,
)

RUNTIME = pathlib.Path(inductor_ext.cpp_wrapper.__file__).parent / "runtime"

Verdict = Callable[..., str]
"""Takes a signature's number and tensors, None for a null handle; returns the error or ""."""

_ENTRY = """
extern "C" int check(int64_t which, AtenTensorHandle const* tensors, int64_t count,
                     int64_t repetitions, int32_t device, char* text, int64_t room) {
  try {
    for (int64_t i = 0; i < repetitions; ++i) {
      entries[which](tensors, count, device);
    }
  } catch (const std::runtime_error& error) {
    std::strncpy(text, error.what(), room);
    return 1;
  }
  return 0;
}
"""


class Library:
    """The checks of some signatures, compiled as in a model and called with tensors' handles."""

    def __init__(self, signatures: Sequence[Signature], folder: pathlib.Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        units = []
        for number, signature in enumerate(signatures):
            text = input_checks.render(signature)
            units.append(text.replace("namespace inductor_ext {", _namespace(number), 1) + "}\n")
        entries = ", ".join(f"inductor_ext::m{i}::check_inputs" for i in range(len(units)))
        source = folder / "checks_of_models.cpp"
        source.write_text(
            '#include "checks.h"\n#include <cstring>\n#include <stdexcept>\n'
            + "".join(units)
            + f"static void (*const entries[])(AtenTensorHandle const*, int64_t, int32_t) = {{"
            f"{entries}}};\n{_ENTRY}"
        )
        torch_folder = pathlib.Path(torch.__file__).parent
        output = folder / "checks.so"
        warnings = ["-Wall", "-Wextra", "-Werror"]
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        includes = ["-isystem", str(torch_folder / "include"), f"-I{RUNTIME}"]
        runtime = ("checks.cpp", "expression.cpp", "input_errors.cpp")
        sources = [str(source), *(str(RUNTIME / name) for name in runtime)]
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared"]
        command = [compiler, *flags, *warnings, *includes, *sources, "-o", str(output), *libraries]
        subprocess.run(command, check=True)
        self.entry = ctypes.CDLL(str(output)).check

    def __call__(
        self,
        number: int,
        tensors: Sequence[torch.Tensor | None],
        repetitions: int = 1,
        device_index: int = -1,
    ) -> str:
        """The error of the checks of signature `number`; empty if the call is valid."""
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(
            [tensor for tensor in tensors if tensor is not None]
        )
        remaining = iter([_pointer(capsule) for capsule in capsules])
        handles = [None if tensor is None else next(remaining) for tensor in tensors]
        array = (ctypes.c_void_p * max(1, len(handles)))(*handles)
        text = ctypes.create_string_buffer(4096)
        which, count, times = map(ctypes.c_int64, (number, len(handles), repetitions))
        room = ctypes.c_int64(len(text) - 1)
        try:
            wrong = self.entry(which, array, count, times, device_index, text, room)
        finally:
            # Frees the handles.
            torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
        return text.value.decode() if wrong else ""


def _namespace(number: int) -> str:
    return f"namespace inductor_ext::m{number} {{\nnamespace {{"


def _pointer(capsule: object) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address: int = get(capsule, None)
    return address


def tensor_input(
    name: str,
    shape: Sequence[Extent],
    stride: Sequence[Extent] | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> TensorInput:
    """A tensor input; contiguous by default."""
    if stride is None:
        stride = contiguous(shape)
    return TensorInput(name, f"args['{name}']", dtype, tuple(shape), tuple(stride), device)


def contiguous(shape: Sequence[Extent]) -> tuple[Extent, ...]:
    """Row-major strides; expressions if sizes are expressions."""
    strides: list[Extent] = []
    factors: list[Extent] = []
    for size in reversed(shape):
        if all(isinstance(factor, int) for factor in factors):
            product = 1
            for factor in factors:
                product *= int(factor)
            strides.append(product)
        else:
            text = "*".join(f"({factor})" for factor in factors)
            strides.append(expression.show(expression.parse(text)))
        factors.append(size)
    return tuple(reversed(strides))


def accepts(signature: Signature, tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether a call is valid, decided only from the signature's text.

    Expressions are evaluated by Python; a symbol that is not itself a size is solved by trying
    values.
    """
    inputs = signature.tensors
    if len(tensors) != len(inputs) or any(tensor is None for tensor in tensors):
        return False
    pairs = [
        (inp, tensor) for inp, tensor in zip(inputs, tensors, strict=True) if tensor is not None
    ]
    for item, tensor in pairs:
        rank = len(item.shape) if isinstance(item, TensorInput) else 0
        dtype = item.dtype if isinstance(item, TensorInput) else "int64"
        if tensor.layout != torch.strided or tensor.dtype != getattr(torch, dtype):
            return False
        if tensor.device.type != "cpu" or tensor.dim() != rank:
            return False
        if tensor.is_conj() or tensor.is_neg():
            return False
    values: dict[str, int] = {}
    compared: list[tuple[Extent, int]] = []
    for item, tensor in sorted(pairs, key=lambda pair: isinstance(pair[0], TensorInput)):
        if isinstance(item, SymbolInput):
            extents = [(item.symbol, int(tensor), True)]
        else:
            sizes, strides = tensor.shape, tensor.stride()
            used = [size != 1 and tensor.numel() != 0 for size in sizes]
            extents = [(size, actual, True) for size, actual in zip(item.shape, sizes, strict=True)]
            extents += zip(item.stride, strides, used, strict=True)
        for extent, actual, counts in extents:
            unknown = _unknown(extent, values)
            if len(unknown) == 1 and _is_linear(extent, unknown[0], values):
                (name,) = unknown
                solution = _search(extent, name, values, actual)
                if solution is None or not _within(signature.symbols.get(name), solution):
                    return False
                values[name] = solution
            elif counts:
                compared.append((extent, actual))
    try:
        return all(_value(extent, values) == actual for extent, actual in compared) and all(
            _value(constraint, values) for constraint in signature.constraints
        )
    except ZeroDivisionError:
        return False


_compiled = functools.lru_cache(None)(lambda text: compile(text, "extent", "eval"))
_FUNCTIONS = {"max": max, "min": min, "abs": abs}


def _value(extent: Extent, values: dict[str, int]) -> int:
    return extent if isinstance(extent, int) else int(eval(_compiled(extent), _FUNCTIONS, values))


def _unknown(extent: Extent, values: dict[str, int]) -> list[str]:
    if isinstance(extent, int):
        return []
    return [name for name in _compiled(extent).co_names if name not in {*values, *_FUNCTIONS}]


def _is_linear(extent: Extent, name: str, values: dict[str, int]) -> bool:
    """Whatever the other symbols are: a coefficient may be 0 in this call."""
    others = dict.fromkeys(values, 30)
    samples = [_value(extent, {**others, name: value}) for value in (-9, -2, -1, 0, 1, 2, 9, 30)]
    step = samples[4] - samples[3]
    return samples == [samples[3] + step * value for value in (-9, -2, -1, 0, 1, 2, 9, 30)]


def _search(extent: Extent, name: str, values: dict[str, int], actual: int) -> int | None:
    """The only value that fits, searched near a linear extrapolation of two others."""
    start, after = (_value(extent, {**values, name: value}) for value in (0, 1))
    if start == after:
        return None
    near = (actual - start) // (after - start)
    fitting = [
        value
        for value in range(near - 2, near + 3)
        if _value(extent, {**values, name: value}) == actual
    ]
    return fitting[0] if len(fitting) == 1 else None


def _within(limits: Range | None, value: int) -> bool:
    if limits is None:
        return True
    return (limits.min is None or value >= limits.min) and (
        limits.max is None or value <= limits.max
    )
