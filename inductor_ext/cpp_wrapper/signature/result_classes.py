"""The classes in the result of an exported program that are registered with pytree.

A process that loads the package may not have them, such as transformers' `ModelOutput` classes. The
signature therefore stores where each is defined and the names of its values, from which
`load.result_record` builds a replacement. Names are taken from an instance and only stored if it
returns the values under these names.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from inductor_ext.cpp_wrapper.signature.signature import ResultClass


def find_result_classes(spec: Any) -> tuple[ResultClass, ...]:
    """Return the classes of the nodes of a pytree spec that `is_class` selects, in pre-order."""
    if spec is None:
        return ()
    _, form = json.loads(pytree.treespec_dumps(spec))
    return tuple(_walk(spec, form))


def is_class(type_name: str) -> bool:
    """Whether a node is not of a container class of Python, by its name in a serialized spec."""
    builtin = type_name.startswith(("builtins.", "collections."))
    return not builtin or type_name == "collections.namedtuple"


def _walk(spec: Any, form: Mapping[str, Any]) -> Iterator[ResultClass]:
    if spec.is_leaf():
        return
    if is_class(form["type"]):
        yield _describe(spec, form["type"])
    for child, child_form in zip(spec.children(), form["children_spec"], strict=True):
        yield from _walk(child, child_form)


def _describe(spec: Any, type_name: str) -> ResultClass:
    values = [torch.empty(0) for _ in spec.children()]
    try:
        instance = pytree.SUPPORTED_NODES[spec.type].unflatten_fn(values, spec.context)
        keys, absent = _find_keys(instance, values)
    except Exception:
        # User classes may validate their contents. Without names there is no replacement.
        instance, keys, absent = None, (), ()
    cls = spec.type if instance is None else type(instance)
    is_tuple = isinstance(instance, tuple) and hasattr(instance, "_fields")
    return ResultClass(type_name, cls.__module__, cls.__qualname__, keys, absent, is_tuple)


def _find_keys(instance: Any, values: list[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the name of each value in an instance, and the names of the fields that are None."""
    fields = [field.name for field in dataclasses.fields(instance)] if _is_data(instance) else []
    fields += getattr(instance, "_fields", ())
    attributes = {**vars(instance)} if hasattr(instance, "__dict__") else {}
    attributes |= {name: getattr(instance, name) for name in fields}
    items = dict(instance) if isinstance(instance, Mapping) else {}
    names = {
        id(value): name
        for name, value in (*attributes.items(), *items.items())
        if isinstance(name, str) and not name.startswith("_")
    }
    keys = tuple(names[id(value)] for value in values)
    absent = (name for name in fields if name not in keys and attributes[name] is None)
    return keys, tuple(absent)


def _is_data(instance: Any) -> bool:
    return dataclasses.is_dataclass(instance) and not isinstance(instance, type)
