"""What a model returns in place of classes that are not registered with pytree in this process.

The signature stores the names of their values (`signature.result_classes`). A named tuple is
replaced by one of the same fields, any other class by a `ResultRecord`. One warning per class says
which module to import to get the class itself.
"""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from inductor_ext import events
from inductor_ext.cpp_wrapper.signature.result_classes import is_class
from inductor_ext.cpp_wrapper.signature.signature import ResultClass
from inductor_ext.storage import json_codec

_TYPE_NAME = "inductor_ext.ResultRecord"


class ResultRecord(Mapping[str, Any]):
    """A read-only mapping with attribute access, in place of an object of a class.

    `record["logits"]` and `record.logits` return a value by name, and `record[0]` by position, as
    transformers' `ModelOutput` does. Iteration yields the names, as for every mapping. Fields that
    were None in the export are None as attributes, and not in the mapping. A name that is also a
    method of mappings, such as `values`, is only a key.
    """

    def __init__(self, cls: ResultClass, values: Sequence[Any]) -> None:
        self._class = cls
        self._values = dict(zip(cls.keys, values, strict=True))

    def __getitem__(self, key: str | int | slice) -> Any:
        if isinstance(key, str):
            return self._values[key]
        return tuple(self._values.values())[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        # While a copy is created, there is no `_values` yet.
        state = self.__dict__
        if name in state.get("_values", ()):
            return state["_values"][name]
        if "_class" in state and name in self._class.absent:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}<{self._class.module}.{self._class.name}>({values})"


def _flatten(record: ResultRecord) -> tuple[list[Any], ResultClass]:
    return list(record.values()), record._class


def _unflatten(values: Any, cls: ResultClass) -> Any:
    return _create_tuple_class(cls)(*values) if cls.is_tuple else ResultRecord(cls, list(values))


@functools.cache
def _create_tuple_class(cls: ResultClass) -> Any:
    return collections.namedtuple(cls.name.rpartition(".")[2], cls.keys)


pytree.register_pytree_node(
    ResultRecord,
    _flatten,
    _unflatten,
    serialized_type_name=_TYPE_NAME,
    to_dumpable_context=json_codec.encode,
    from_dumpable_context=lambda form: json_codec.decode(ResultClass, form),
    flatten_with_keys_fn=lambda record: (
        [(pytree.MappingKey(name), value) for name, value in record.items()],
        record._class,
    ),
)


def replace_unregistered(spec: str, classes: Sequence[ResultClass], path: str) -> str:
    """Return a serialized pytree spec in which classes that are not registered are replaced.

    A class that is not described, or whose values have no names, remains.

    Args:
        spec: as `pytree.treespec_dumps` returns it.
        classes: the result of `find_result_classes` for it.
        path: path of the package, for the warnings.
    """
    protocol, form = json.loads(spec)
    remaining = iter(classes)

    def replace(node: dict[str, Any]) -> dict[str, Any]:
        if node["type"] is None:
            return node
        cls = next(remaining, None) if is_class(node["type"]) else None
        children = [replace(child) for child in node["children_spec"]]
        if (
            cls is None
            or cls.type != node["type"]
            or len(cls.keys) != len(children)
            or _is_registered(protocol, node)
        ):
            return {**node, "children_spec": children}
        _warn(cls, path)
        context = json_codec.encode(cls)
        return {"type": _TYPE_NAME, "context": context, "children_spec": children}

    return json.dumps([protocol, replace(form)])


def _is_registered(protocol: int, node: Mapping[str, Any]) -> bool:
    try:
        pytree.treespec_loads(json.dumps([protocol, {**node, "children_spec": []}]))
    except NotImplementedError:
        return False
    return True


def _warn(cls: ResultClass, path: str) -> None:
    full_name = f"{cls.module}.{cls.name}"
    kind = "a named tuple of the same fields" if cls.is_tuple else "a mapping with attribute access"
    fix = f"Import {cls.module}" if cls.module != "__main__" else "Register the class"
    events.warn_once(
        f"result-class {full_name}",
        f"The package {path or 'in a buffer'} returns {full_name}, which is not registered with "
        f"pytree in this process, as {kind}. {fix} before loading the package to get the class",
    )
