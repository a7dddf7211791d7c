"""The arguments of operators that generated C++ calls by name, as Inductor passes them.

`complete` returns a value for each argument of an operator's schema, in order and of its type.
`executor_takes` and `is_boxable` say by which of two ways a call can pass them: torch's proxy
executor, which reads most arguments from JSON, or a call of the dispatcher with boxed values. The
kinds of types have the names of `c10::TypeKind`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

SCALAR_TENSORS = {
    "bool": "bool",
    "uint8": "uint8_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float32": "float",
    "float64": "double",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
"""C++ types of numbers of which torch's C interface creates tensors, by dtype."""

_INTEGERS = ("IntType", "SymIntType")
_FLOATS = ("FloatType", "SymFloatType")
_BOOLEANS = ("BoolType", "SymBoolType")
_ENUMERATIONS = ("ScalarTypeType", "LayoutType", "MemoryFormatType")


@dataclasses.dataclass(frozen=True)
class ScalarTensor:
    """A number that is passed as a tensor of no dimensions."""

    value: Any
    dtype: Any
    """The torch.dtype."""

    @property
    def dtype_name(self) -> str:
        """The dtype's name, such as "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_function(self) -> bool:
        """Whether torch's C interface creates such a tensor."""
        return self.dtype_name in SCALAR_TENSORS


def kind(type_: Any) -> str:
    """Return the kind of a schema type, such as "NumberType"."""
    return str(type_.kind())


def element(type_: Any) -> Any:
    """Return the type of an optional value or of a list's elements."""
    return type_.getElementType()


def complete(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the value of every argument of an operator, in the order of its schema.

    Omitted arguments get their defaults. Numbers get the argument's type, as in eager mode: an
    integer becomes a float for `float`, a number becomes a list for `int[2]` and a `ScalarTensor`
    for `Tensor`.

    Args:
        op: the OpOverload.
        args, kwargs: the arguments of the call, tensors as nodes of Inductor's IR.
    """
    values = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in kwargs:
            value = kwargs[argument.name]
        elif index < len(args) and not argument.kwarg_only:
            value = args[index]
        else:
            value = argument.default_value
        values.append(_convert(value, argument.real_type, argument.N))
    tensors = list(_tensors(values))
    return [_with_dtype(value, op, tensors) for value in values]


def _convert(value: Any, type_: Any, length: int | None = None) -> Any:
    name = kind(type_)
    if value is None:
        return None
    if name == "OptionalType":
        return _convert(value, element(type_), length)
    if name == "ListType":
        items = value if isinstance(value, (list, tuple)) else [value] * (length or 1)
        return [_convert(item, element(type_)) for item in items]
    value = _as_number(value)
    if name == "TensorType" and is_number(value):
        return ScalarTensor(value, None)
    if name in _FLOATS and isinstance(value, int):
        return float(value)
    if name in _INTEGERS and isinstance(value, bool):
        return int(value)
    return value


def _as_number(value: Any) -> Any:
    """Return the Python number for an expression or symbolic number that is constant."""
    import sympy  # type: ignore[import-untyped]

    expression = expression_of(value)
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Float):
        return float(expression)
    return value


def is_number(value: Any) -> bool:
    """Whether a value is a Python number, a symbolic one, or an expression."""
    import sympy
    import torch

    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool, sympy.Basic)
    return isinstance(value, (bool, int, float, complex, *symbolic))


def number_class(value: Any) -> type:
    """Return bool, int, float or complex: what a number is when the code runs.

    Inductor wraps all expressions in SymInt, also those of floats.
    """
    import sympy
    import torch
    from torch.utils._sympy import functions
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    expression = expression_of(value)
    if not isinstance(expression, sympy.Basic):
        return type(expression)
    if expression.is_Boolean or expression.is_Relational or isinstance(value, torch.SymBool):
        return bool
    if expression.is_integer or isinstance(value, torch.SymFloat):
        return int if expression.is_integer else float
    divisions = (functions.IntTrueDiv, functions.FloatTrueDiv, functions.ToFloat)
    kinds = (SymT.FLOAT, SymT.UNBACKED_FLOAT)
    has_float = expression.has(*divisions) or any(
        symbol_is_type(symbol, kinds) for symbol in expression.free_symbols
    )
    return float if has_float or expression.is_integer is False else int


def expression_of(value: Any) -> Any:
    """Return the sympy expression of a symbolic number; other values unchanged."""
    return getattr(getattr(value, "node", None), "expr", value)


def is_constant(value: Any) -> bool:
    """Whether a number is known when the code is generated."""
    return isinstance(value, (bool, int, float, complex))


def _tensors(values: Iterable[Any]) -> Iterable[Any]:
    """Yield the IR nodes of tensors."""
    for value in values:
        if isinstance(value, list):
            yield from _tensors(value)
        elif hasattr(value, "codegen_reference") and hasattr(value, "get_size"):
            yield value


def _with_dtype(value: Any, op: Any, tensors: Sequence[Any]) -> Any:
    """Give a `ScalarTensor` its dtype.

    In eager mode its dtype counts less in type promotion than that of any tensor argument of the
    same category. Generated code cannot mark a tensor so; its dtype is chosen to give the same
    result. Custom operators get the dtype that eager mode gives them.
    """
    import torch

    if isinstance(value, list):
        return [_with_dtype(item, op, tensors) for item in value]
    if not isinstance(value, ScalarTensor):
        return value
    class_ = number_class(value.value)
    dtype = {
        bool: torch.bool,
        int: torch.int64,
        float: torch.float64,
        complex: torch.complex128,
    }[class_]
    if op.namespace == "aten":
        examples = [
            torch.empty((1,) * min(1, len(tensor.get_size())), dtype=tensor.get_dtype())
            for tensor in tensors
            if tensor.get_dtype() is not torch.bool
        ]
        number, scalar = class_(1), torch.ones((), dtype=dtype)
        expected = [torch.result_type(example, number) for example in examples]
        if expected != [torch.result_type(example, scalar) for example in examples]:
            dtype = expected[0]
            for other in expected[1:]:
                dtype = torch.promote_types(dtype, other)
    return ScalarTensor(value.value, dtype)


# --- the two ways of a call -----------------------------------------------------------------------


def executor_takes(value: Any, type_: Any, device_type: str) -> bool:
    """Whether torch's proxy executor can pass a value.

    It reads all but tensors and integers from JSON, which has no infinite or complex numbers; it
    passes an empty list of tensors or integers as None, and the model's device for any device.

    Args:
        value: a value of `complete`.
        type_: type of the argument.
        device_type: that of the model.
    """
    name = kind(type_)
    if name == "OptionalType":
        return value is None or executor_takes(value, element(type_), device_type)
    if name == "ListType":
        return isinstance(value, list) and _executor_takes_list(value, element(type_), device_type)
    if name == "TensorType":
        if isinstance(value, ScalarTensor):
            return value.has_function
        return hasattr(value, "codegen_reference")
    if name in _ENUMERATIONS:
        return value is not None and not isinstance(value, int)
    if name == "DeviceObjType":
        return getattr(value, "type", None) == device_type
    if name == "StringType":
        return isinstance(value, str)
    if not is_number(value):
        return False
    if name == "NumberType":
        return number_class(value) is int or _is_in_json(value)
    if name in _INTEGERS:
        return number_class(value) is int
    return name in (*_FLOATS, *_BOOLEANS) and _is_in_json(value)


def _executor_takes_list(values: list[Any], type_: Any, device_type: str) -> bool:
    name = kind(type_)
    if not values:
        return name in ("FloatType", "BoolType", "StringType")
    if name == "OptionalType" and kind(element(type_)) != "TensorType":
        return False
    if name == "NumberType" and len({number_class(value) for value in values}) > 1:
        return False
    return name not in ("ListType", *_ENUMERATIONS) and all(
        executor_takes(value, type_, device_type) for value in values
    )


def _is_in_json(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value))


def is_boxable(value: Any, type_: Any) -> bool:
    """Whether generated code can pass a value in a call of the dispatcher."""
    name = kind(type_)
    if name == "OptionalType":
        return value is None or is_boxable(value, element(type_))
    if name == "ListType":
        return isinstance(value, list) and all(is_boxable(v, element(type_)) for v in value)
    if name == "TensorType":
        return isinstance(value, ScalarTensor) or hasattr(value, "codegen_reference")
    if name in _ENUMERATIONS:
        return value is not None
    if name == "DeviceObjType":
        return hasattr(value, "type")
    if name == "StringType":
        return isinstance(value, str)
    numbers = ("NumberType", *_INTEGERS, *_FLOATS, *_BOOLEANS)
    return name in numbers and is_number(value)


def returns_tensors(op: Any) -> bool:
    """Whether generated code can take an operator's results: tensors, or lists of them."""
    for result in op._schema.returns:
        type_ = result.real_type
        if kind(type_) in ("OptionalType", "ListType"):
            type_ = element(type_)
        if kind(type_) not in ("TensorType", "IntType", "NoneType"):
            return False
    return True


def loses_type_in_shim(op: Any, values: Sequence[Any]) -> bool:
    """Whether torch's C shim would pass an argument as a number of another type.

    The shim takes a Scalar as double. An integer among integer tensors would change the result's
    dtype, or lose digits. A number in place of a tensor would have a dtype of its own.
    """
    dtypes = [tensor.get_dtype() for tensor in _tensors(values)]
    exact = not dtypes or any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes)
    for value, argument in zip(values, op._schema.arguments, strict=True):
        type_ = argument.real_type
        if kind(type_) == "OptionalType":
            type_ = element(type_)
        if isinstance(value, ScalarTensor):
            return True
        if kind(type_) == "NumberType" and value is not None:
            class_ = number_class(value)
            if class_ is complex or (exact and class_ is not float):
                return True
    return False
