"""Checks of values against type annotations, and the words for them in error messages."""

from __future__ import annotations

import collections.abc
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any


def suggest_name(name: str, candidates: Iterable[str], display: Callable[[str], str] = str) -> str:
    """Return a "Did you mean" sentence with the closest candidate, or an empty string.

    Args:
        name: the unknown name.
        candidates: the valid names.
        display: converts the closest candidate to the text to show. Default: no change.
    """
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {display(matches[0])!r}?" if matches else ""


def has_type(value: object, annotation: Any) -> bool:
    """Whether `value` matches a type annotation.

    Supports classes, None, unions, Literal and the element types of list, tuple, set and dict.
    Annotations that cannot be checked (a protocol, a type variable, a forward reference) accept any
    value. An int matches float; a bool matches int, as in Python; only a bool matches bool.
    """
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if annotation is Any or isinstance(annotation, (str, typing.TypeVar)):
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is float:
        return isinstance(value, (float, int)) and not isinstance(value, bool)
    if origin in (typing.Union, types.UnionType):
        return any(has_type(value, arg) for arg in args)
    if origin is typing.Literal:
        return any(value == arg and type(value) is type(arg) for arg in args)
    if origin is typing.Annotated:
        return has_type(value, args[0])
    if origin is collections.abc.Callable or annotation is collections.abc.Callable:
        return callable(value)
    if origin in (list, set, frozenset, collections.abc.Sequence):
        return isinstance(value, origin) and all(has_type(item, args[0]) for item in value)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return isinstance(value, tuple) and all(has_type(item, args[0]) for item in value)
        return (
            isinstance(value, tuple) and len(value) == len(args) and all(map(has_type, value, args))
        )
    if origin is dict:
        return isinstance(value, dict) and all(
            has_type(key, args[0]) and has_type(item, args[1]) for key, item in value.items()
        )
    if isinstance(origin, type):
        return isinstance(value, origin)
    if isinstance(annotation, type):
        try:
            return isinstance(value, annotation)
        except TypeError:  # a protocol that cannot be checked at run time
            return True
    return True


_WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    type(None): "None",
}


def describe_values(annotation: Any) -> str:
    """Return the values that match a type annotation in words, such as "a number or None"."""
    if typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        words = [describe_values(argument) for argument in typing.get_args(annotation)]
    elif typing.get_origin(annotation) is typing.Literal:
        words = list(map(repr, typing.get_args(annotation)))
    elif annotation in _WORDS:
        return _WORDS[annotation]
    else:
        return describe_type(annotation)
    *first, last = dict.fromkeys(words)
    return f"{', '.join(first)} or {last}" if first else last


def describe_type(annotation: Any) -> str:
    """Return a type annotation as a user would write it."""
    if annotation is type(None):
        return "None"
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
