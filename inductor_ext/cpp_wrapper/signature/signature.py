"""The call signature of a compiled model: its inputs, outputs and size constraints.

A `Signature` lists the inputs in flat order, under the argument names of the model, and the
outputs. Sizes and strides are integers or expressions over symbols (see `expression`); symbols have
ranges, and constraints are conditions on the symbols that must hold. The package's manifest stores
it as JSON, which loaders and `inspect` read; `input_checks` generates C++ from it.

Pure: imports only the standard library, so that loading a package stays cheap. JSON that is not a
valid signature raises `exc.BadSignatureError`, which names the place in the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from inductor_ext import exc

__all__ = [
    "Constant",
    "ConstantInput",
    "ConstantOutput",
    "Extent",
    "Input",
    "Output",
    "Range",
    "Signature",
    "SymbolInput",
    "SymbolOutput",
    "TensorInput",
    "TensorOutput",
]

Extent = int | str
"""A size or a stride, in elements: an integer, or an expression over symbols."""

Constant = int | float | bool | str | None
"""A non-tensor value that torch.export has specialized the exported program on."""


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor argument of the generated code."""

    name: str
    """Name in the model's forward: `x`, or `batch['ids'][0]` for a leaf of an argument."""
    path: str
    """Path in a call: `args[0]`, `kwargs['batch']['ids'][0]`."""
    dtype: str
    """torch's name without the prefix: `float32`."""
    shape: tuple[Extent, ...]
    stride: tuple[Extent, ...]
    device: str
    """torch's name: `cpu` or `cuda:0`."""


@dataclass(frozen=True, slots=True)
class ConstantInput:
    """An argument that must equal the value that the model was exported with.

    Callers that have Python values compare it; the generated code does not take it.
    """

    name: str
    path: str
    value: Constant


@dataclass(frozen=True, slots=True)
class SymbolInput:
    """A dynamic scalar; the generated code takes it as a 0-dim CPU tensor."""

    name: str
    path: str
    type: Literal["int", "float", "bool"]
    symbol: str
    """The expression, usually a single symbol, that stands for it in the exported program."""


Input = TensorInput | ConstantInput | SymbolInput


@dataclass(frozen=True, slots=True)
class TensorOutput:
    """A tensor that the generated code returns."""

    path: str
    """Path in the model's result: empty for the whole result, `[1]['loss']` for a leaf."""
    dtype: str
    shape: tuple[Extent, ...]
    device: str


@dataclass(frozen=True, slots=True)
class SymbolOutput:
    """A scalar output that depends on the inputs."""

    path: str
    type: Literal["int", "float", "bool"]
    value: str
    """An expression; it may contain symbols whose values only the generated code knows."""


@dataclass(frozen=True, slots=True)
class ConstantOutput:
    """An output with the same value, possibly None, in every call."""

    path: str
    value: Constant


Output = TensorOutput | SymbolOutput | ConstantOutput


@dataclass(frozen=True, slots=True)
class Range:
    """The inclusive range of a symbol's values; None means unbounded."""

    min: int | None = None
    max: int | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs in flat order, and the constraints on their sizes."""

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    symbols: Mapping[str, Range] = field(default_factory=dict)
    """The symbols that sizes, strides and scalars of the inputs depend on, with their ranges."""
    constraints: tuple[str, ...] = ()
    """Conditions on the symbols."""
    unchecked: tuple[str, ...] = ()
    """Conditions that torch.export states but a call of the compiled model cannot check."""
    in_spec: str = ""
    """Pytree spec of `(args, kwargs)`, as torch.utils._pytree.treespec_dumps writes it."""
    out_spec: str = ""
    """Pytree spec of the result, in the same format."""

    @property
    def tensors(self) -> tuple[TensorInput | SymbolInput, ...]:
        """The inputs that the generated code takes, in order."""
        return tuple(inp for inp in self.inputs if not isinstance(inp, ConstantInput))

    def to_json(self) -> dict[str, Any]:
        """Return values that `json.dumps` can write with `allow_nan=False`."""
        return {
            "inputs": [_write(inp) for inp in self.inputs],
            "symbols": {
                name: {"min": limits.min, "max": limits.max}
                for name, limits in self.symbols.items()
            },
            "constraints": list(self.constraints),
            "unchecked": list(self.unchecked),
            "outputs": [_write(output) for output in self.outputs],
            "in_spec": self.in_spec,
            "out_spec": self.out_spec,
        }

    @classmethod
    def from_json(cls, value: object) -> Signature:
        """Parse the output of `to_json`; unknown keys are ignored.

        Raises:
            exc.BadSignatureError: a key is missing or a value has the wrong type.
        """
        top = _Reader(value, "signature")
        symbols = top.reader("symbols")
        return cls(
            inputs=tuple(_read_input(reader) for reader in top.readers("inputs")),
            outputs=tuple(_read_output(reader) for reader in top.readers("outputs")),
            symbols={
                name: Range(limits.limit("min"), limits.limit("max"))
                for name in symbols.mapping()
                for limits in [symbols.reader(name)]
            },
            constraints=top.texts("constraints"),
            unchecked=top.texts("unchecked"),
            in_spec=top.text("in_spec"),
            out_spec=top.text("out_spec"),
        )


_KINDS: dict[type[Input | Output], str] = {
    TensorInput: "tensor",
    TensorOutput: "tensor",
    ConstantInput: "constant",
    ConstantOutput: "constant",
    SymbolInput: "symbol",
    SymbolOutput: "symbol",
}


def _write(input_: Input | Output) -> dict[str, Any]:
    if isinstance(input_, ConstantOutput) and input_.value is None:
        return {"kind": "none", "path": input_.path}
    written: dict[str, Any] = {"kind": _KINDS[type(input_)]}
    for name in input_.__slots__:
        value = getattr(input_, name)
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, float) and not math.isfinite(value):
            value = {"float": str(value)}
        written[name] = value
    return written


class _Reader:
    """A JSON value with its path, which error messages name."""

    def __init__(self, value: object, where: str) -> None:
        self.value = value
        self.where = where

    def bad(self, allowed: str) -> exc.BadSignatureError:
        found = repr(self.value)
        if len(found) > 60:
            found = f"{found[:57]}..."
        return exc.BadSignatureError(where=self.where, found=found, allowed=allowed)

    def mapping(self) -> Mapping[str, object]:
        if not isinstance(self.value, Mapping):
            raise self.bad("an object")
        return self.value

    def reader(self, key: str) -> _Reader:
        inside = self.mapping()
        if key not in inside:
            raise self.bad(f"an object with {key!r}")
        return _Reader(inside[key], f"{self.where}.{key}")

    def readers(self, key: str) -> list[_Reader]:
        inner = self.reader(key)
        if not isinstance(inner.value, Sequence) or isinstance(inner.value, str):
            raise inner.bad("a list")
        return [_Reader(item, f"{inner.where}[{i}]") for i, item in enumerate(inner.value)]

    def own_text(self) -> str:
        if not isinstance(self.value, str):
            raise self.bad("a text")
        return self.value

    def text(self, key: str) -> str:
        return self.reader(key).own_text()

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(reader.own_text() for reader in self.readers(key))

    def limit(self, key: str) -> int | None:
        inner = self.reader(key)
        if inner.value is None or _whole(inner.value):
            return inner.value
        raise inner.bad("a whole number or null")

    def extents(self, key: str) -> tuple[Extent, ...]:
        found: list[Extent] = []
        for reader in self.readers(key):
            if isinstance(reader.value, str) or (_whole(reader.value) and reader.value >= 0):
                found.append(reader.value)
            else:
                raise reader.bad("a whole number from 0 or an expression")
        return tuple(found)

    def constant(self, key: str) -> Constant:
        inner = self.reader(key)
        if isinstance(inner.value, Mapping):
            text = inner.text("float")
            if text not in ("nan", "inf", "-inf"):
                raise inner.bad("nan, inf or -inf")
            return float(text)
        if inner.value is not None and not isinstance(inner.value, (int, float, str)):
            raise inner.bad("a number, a text, true, false or null")
        return inner.value

    def number_type(self) -> Literal["int", "float", "bool"]:
        match self.reader("type").value:
            case "int" | "float" | "bool" as name:
                return name
        raise self.reader("type").bad("int, float or bool")


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _read_input(reader: _Reader) -> Input:
    kind, name, path = reader.text("kind"), reader.text("name"), reader.text("path")
    if kind == "tensor":
        shape, stride = reader.extents("shape"), reader.extents("stride")
        if len(shape) != len(stride):
            raise reader.bad("an input with as many strides as sizes")
        return TensorInput(name, path, reader.text("dtype"), shape, stride, reader.text("device"))
    if kind == "constant":
        return ConstantInput(name, path, reader.constant("value"))
    if kind == "symbol":
        return SymbolInput(name, path, reader.number_type(), reader.text("symbol"))
    raise reader.bad("an input whose kind is tensor, constant or symbol")


def _read_output(reader: _Reader) -> Output:
    kind, path = reader.text("kind"), reader.text("path")
    if kind == "tensor":
        shape = reader.extents("shape")
        return TensorOutput(path, reader.text("dtype"), shape, reader.text("device"))
    if kind == "symbol":
        return SymbolOutput(path, reader.number_type(), reader.text("value"))
    if kind == "constant":
        return ConstantOutput(path, reader.constant("value"))
    if kind == "none":
        return ConstantOutput(path, None)
    raise reader.bad("an output whose kind is tensor, symbol, constant or none")
