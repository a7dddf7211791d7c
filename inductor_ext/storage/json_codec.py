"""Dataclasses to JSON and back, with the type of every value checked.

Fields may be str, int, float, bool, None, `Literal`, `Any`, dataclasses, unions of these,
`tuple[T, ...]` and `Mapping[str, T]`; `Annotated[int, n]` is an integer of at least n.

In a union of dataclasses, the key `kind` selects a class by its class variable `KINDS`; without it,
the keys do. A class whose JSON form is not that of its fields has the class variable `JSON_FORM`,
the type of another value, and the methods `to_json_form` and `from_json_form`.

NaN and infinity, which JSON lacks, are written as `{"float": "nan"}`, except in `Any`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING
from typing import Annotated, Any, Literal

Size = Annotated[int, 0]
"""An integer that must not be negative."""

OPTIONAL = "optional"
"""Field metadata: the JSON form omits the field if it is None or an empty tuple."""

UNSTORED = "unstored"
"""Field metadata: the stored JSON form omits the field. It is read if JSON has it."""

EXTRA = "extra"
"""Field metadata: the field is a mapping of the keys that the class does not have."""

KEY = "key"
"""Field metadata: the field's key in the JSON form, if it is not the field's name."""

_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


class MismatchError(ValueError):
    """A JSON value that does not have the expected type.

    Attributes:
        where: path of the value, such as "models['m'].shape[0]"; empty for the whole document.
        value: the value.
        expected: the expected type in words.
    """

    def __init__(self, where: str, value: object, expected: str) -> None:
        text = repr(value)
        text = text if len(text) <= 60 else f"{text[:57]}..."
        super().__init__(f"{where or 'the value'} is {text}, expected {expected}")
        self.where = where
        self.value = value
        self.text = text
        self.expected = expected


def encode(value: Any, whole: bool = False, free: bool = False) -> Any:
    """Return the JSON form of a dataclass instance; `decode` is the inverse.

    Args:
        value: a dataclass instance or the value of a field.
        whole: whether to include `UNSTORED` fields, to pass the instance to another process.
        free: whether the value has the type `Any`, in which floats remain unchanged.
    """
    if hasattr(value, "JSON_FORM"):
        return encode(value.to_json_form(), whole)
    if dataclasses.is_dataclass(value):
        cls = typing.cast(type, type(value))
        kinds = getattr(cls, "KINDS", None)
        form = {} if kinds is None else {"kind": getattr(value, "kind", kinds[0])}
        optional, unstored = _fields_with(cls, OPTIONAL), _fields_with(cls, UNSTORED)
        keys = _keys(cls)
        for name, hint in _hints(cls).items():
            field = getattr(value, name)
            if (name in unstored and not whole) or (name in optional and field in (None, ())):
                continue
            form[keys[name]] = encode(field, whole, Any in typing.get_args(hint))
        for name in _fields_with(cls, EXTRA):
            form |= getattr(value, name)
        return form
    if isinstance(value, Mapping):
        return {key: encode(item, whole, free) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(element, whole, free) for element in value]
    if isinstance(value, float) and not free and not math.isfinite(value):
        return {"float": str(value)}
    return value


def as_dict(value: Any) -> Any:
    """Return what `dataclasses.asdict` returns, but with the `KEY` of a field that has one.

    Unlike in the form of `encode`, all fields are in it, and no class has a form of its own.
    """
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {
            field.metadata.get(KEY, field.name): as_dict(getattr(value, field.name))
            for field in fields
        }
    if isinstance(value, Mapping):
        return {key: as_dict(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(as_dict, value))
    return value


def decode(
    hint: Any,
    value: object,
    where: str = "",
    *,
    allow_unknown: bool = False,
    allow_missing: bool = False,
) -> Any:
    """Return a JSON value as the type `hint`.

    Args:
        hint: the type, usually a dataclass.
        value: the JSON value.
        where: name of the value in error messages.
        allow_unknown: whether to accept keys that a class does not have; they are dropped unless
            the class has an `EXTRA` field.
        allow_missing: whether fields with a default may be missing. Integers then also stand for
            floats.

    Raises:
        MismatchError: a key is missing or unknown, or a value has the wrong type.
    """
    return _Decoder(allow_unknown, allow_missing).decode(hint, value, where)


@dataclasses.dataclass(frozen=True)
class _Decoder:
    allow_unknown: bool
    allow_missing: bool

    def decode(self, hint: Any, value: Any, where: str) -> Any:
        # Not isinstance: a bool must not pass as an int.
        if hint is Any or type(value) is hint:
            return value
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._union(arguments, value, where)
        if origin is tuple:
            if not isinstance(value, (list, tuple)):
                raise MismatchError(where, value, "a list")
            inner = arguments[0]
            return tuple(self.decode(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
        if origin is Literal and value in arguments:
            return value
        if origin is Annotated:
            number = self.decode(arguments[0], value, where)
            if number < arguments[1]:
                raise MismatchError(where, value, f"{arguments[1]} or more")
            return number
        if hasattr(hint, "JSON_FORM"):
            return hint.from_json_form(self.decode(hint.JSON_FORM, value, where))
        if dataclasses.is_dataclass(hint):
            return self._record(typing.cast(type, hint), value, where)
        if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            inner = arguments[1]
            return {key: self.decode(inner, v, f"{where}[{key!r}]") for key, v in value.items()}
        if hint is float and _is_non_finite(value):
            return float(value["float"])
        if hint is float and self.allow_missing and type(value) is int:
            return value
        raise MismatchError(where, value, _words(hint))

    def _union(self, hints: tuple[Any, ...], value: Any, where: str) -> Any:
        hint = next((hint for hint in hints if self._is_of(hint, value)), None)
        if hint is None:
            others = [hint for hint in hints if hint is not type(None)]
            kinds = [kind for other in others for kind in getattr(other, "KINDS", ())]
            if kinds:
                raise MismatchError(where, value, f"an object whose kind is {_listed(kinds)}")
            if len(others) > 1 and not dataclasses.is_dataclass(others[0]):
                raise MismatchError(where, value, _listed(list(map(_words, hints))))
            hint = others[0]  # Its error message is the most precise one.
        return self.decode(hint, value, where)

    def _is_of(self, hint: Any, value: Any) -> bool:
        """Whether a value selects this type in a union; the fields are not checked."""
        hint = getattr(hint, "JSON_FORM", hint)
        if not dataclasses.is_dataclass(hint):
            kind = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
            return type(value) is kind or (kind is float and _is_non_finite(value))
        if not isinstance(value, Mapping):
            return False
        if hasattr(hint, "KINDS"):
            return value.get("kind") in hint.KINDS
        return not self._problem(typing.cast(type, hint), value)

    def _problem(self, cls: type, value: object) -> str | None:
        """Return what a value must be to have the keys of a class; None if it has them."""
        if not isinstance(value, Mapping):
            return "an object"
        keys = _keys(cls)
        for field in dataclasses.fields(cls):
            has_default = field.default is not MISSING or field.default_factory is not MISSING
            if not (
                keys.get(field.name) in value
                or any(kind in field.metadata for kind in (OPTIONAL, UNSTORED, EXTRA))
                or (self.allow_missing and has_default)
            ):
                return f"an object with {keys[field.name]!r}"
        known = {*keys.values(), *(["kind"] if hasattr(cls, "KINDS") else [])}
        unknown = () if self.allow_unknown else value.keys() - known
        return f"an object without {min(unknown)!r}" if unknown else None

    def _record(self, cls: type, value: Any, where: str) -> Any:
        expected = self._problem(cls, value)
        if expected:
            raise MismatchError(where, value, expected)
        hints, keys = _hints(cls), _keys(cls)
        fields = {
            name: self.decode(hints[name], value[key], f"{where}.{key}" if where else key)
            for name, key in keys.items()
            if key in value
        }
        for name in _fields_with(cls, EXTRA):
            fields[name] = {key: item for key, item in value.items() if key not in keys.values()}
        return cls(**fields)


def _is_non_finite(value: object) -> bool:
    return any(value == {"float": text} for text in ("nan", "inf", "-inf"))


def _words(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return _listed(list(map(str, typing.get_args(hint))))
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    return _NAMES.get(hint, "an object")


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields except `EXTRA` ones, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    extra = _fields_with(cls, EXTRA)
    names = (field.name for field in dataclasses.fields(cls))
    return {name: hints[name] for name in names if name not in extra}


@functools.cache
def _keys(cls: type) -> dict[str, str]:
    """Return the JSON keys of the fields except `EXTRA` ones, by name."""
    metadata = {field.name: field.metadata for field in dataclasses.fields(cls)}
    return {name: metadata[name].get(KEY, name) for name in _hints(cls)}


@functools.cache
def _fields_with(cls: type, kind: str) -> frozenset[str]:
    """Return the names of the fields whose metadata contains `kind`."""
    fields = dataclasses.fields(cls)
    return frozenset(field.name for field in fields if kind in field.metadata)
