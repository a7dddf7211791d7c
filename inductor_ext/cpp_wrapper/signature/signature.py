"""The call signature of a compiled model: its inputs, outputs and size constraints.

A `Signature` lists the inputs in flat order, under the argument names of the model, and the
outputs. Sizes and strides are integers or expressions over symbols (see `expression`); symbols have
ranges, and constraints are conditions on the symbols that must hold. The package's manifest stores
it as JSON, which loaders and `inspect` read; `input_checks` generates C++ from it.

Pure: imports only the standard library, so that loading a package stays cheap. JSON that is not a
valid signature raises `exc.BadSignatureError`, which names the place in the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from inductor_ext import exc
from inductor_ext.storage import json_codec
from inductor_ext.storage.json_codec import OPTIONAL, Size

Extent = Size | str
"""A size or a stride, in elements: an integer, or an expression over symbols."""

Constant = int | float | bool | str | None
"""A non-tensor value that torch.export has specialized the exported program on."""


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor argument of the generated code."""

    KINDS: ClassVar = ("tensor",)

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

    KINDS: ClassVar = ("constant",)

    name: str
    path: str
    value: Constant


@dataclass(frozen=True, slots=True)
class SymbolInput:
    """A dynamic scalar; the generated code takes it as a 0-dim CPU tensor."""

    KINDS: ClassVar = ("symbol",)

    name: str
    path: str
    type: Literal["int", "float", "bool"]
    symbol: str
    """The expression, usually a single symbol, that stands for it in the exported program."""


Input = TensorInput | ConstantInput | SymbolInput


@dataclass(frozen=True, slots=True)
class TensorOutput:
    """A tensor that the generated code returns."""

    KINDS: ClassVar = ("tensor",)

    path: str
    """Path in the model's result: empty for the whole result, `[1]['loss']` for a leaf."""
    dtype: str
    shape: tuple[Extent, ...]
    device: str


@dataclass(frozen=True, slots=True)
class SymbolOutput:
    """A scalar output that depends on the inputs."""

    KINDS: ClassVar = ("symbol",)

    path: str
    type: Literal["int", "float", "bool"]
    value: str
    """An expression; it may contain symbols whose values only the generated code knows."""


@dataclass(frozen=True, slots=True)
class ConstantOutput:
    """An output with the same value, possibly None, in every call."""

    KINDS: ClassVar = ("constant", "none")

    path: str
    value: Constant = field(default=None, metadata={OPTIONAL: True})

    @property
    def kind(self) -> str:
        """The `kind` in JSON."""
        return self.KINDS[self.value is None]


Output = TensorOutput | SymbolOutput | ConstantOutput


@dataclass(frozen=True, slots=True)
class Range:
    """The inclusive range of a symbol's values; None means unbounded."""

    min: int | None = None
    max: int | None = None


@dataclass(frozen=True, slots=True)
class ResultClass:
    """The class of a node of the result that is registered with pytree."""

    type: str
    """Name in the serialized pytree spec."""
    module: str
    name: str
    """Qualified name in its module."""
    keys: tuple[str, ...]
    """Names of its values, in the order of the spec; empty if unknown."""
    absent: tuple[str, ...] = ()
    """Names of its fields that are None and not in the spec."""
    is_tuple: bool = False
    """Whether it is a named tuple."""


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
    result_classes: tuple[ResultClass, ...] = field(default=(), metadata={OPTIONAL: True})
    """Classes registered with pytree in the result, by node in pre-order (see `result_classes`).
    Empty in packages of earlier versions."""

    @property
    def tensors(self) -> tuple[TensorInput | SymbolInput, ...]:
        """The inputs that the generated code takes, in order."""
        return tuple(inp for inp in self.inputs if not isinstance(inp, ConstantInput))

    def to_json(self) -> dict[str, Any]:
        """Return values that `json.dumps` can write with `allow_nan=False`."""
        value: dict[str, Any] = json_codec.encode(self)
        return value

    @classmethod
    def from_json(cls, value: object) -> Signature:
        """Parse the output of `to_json`; unknown keys are ignored.

        Raises:
            exc.BadSignatureError: a key is missing or a value has the wrong type.
        """
        try:
            signature: Signature = json_codec.decode(cls, value, "signature", allow_unknown=True)
        except json_codec.MismatchError as error:
            raise exc.BadSignatureError(
                where=error.where, actual=error.text, allowed=error.expected
            ) from None
        for index, inp in enumerate(signature.inputs):
            if isinstance(inp, TensorInput) and len(inp.shape) != len(inp.stride):
                raise exc.BadSignatureError(
                    where=f"signature.inputs[{index}]",
                    actual=f"{inp.shape} with strides {inp.stride}",
                    allowed="an input with as many strides as sizes",
                )
        return signature
