"""Flattening of call arguments to a model's input tensors, and unflattening of its results.

A `Convention` is built once, when a model is loaded, from its `signature.Signature`: for every node
of the arguments' pytree, a function that flattens exactly that node. Arguments whose structure,
number, constant values or types differ from the export raise `exc.InputMismatchError`, with the
name that the input has in the model. The compiled code checks dtypes, sizes and strides of tensors.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from inductor_ext import exc
from inductor_ext.cpp_wrapper.load.result_record import replace_unregistered
from inductor_ext.cpp_wrapper.signature import signature as signatures

_Flatten = Callable[[Any, list[torch.Tensor]], None]
_Restore = Callable[[Sequence[Any]], Any]

_DICTS = frozenset({dict, OrderedDict, defaultdict})
_SCALARS = {"int": int, "float": float, "bool": bool}
SCALAR_DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
"""The dtype of the tensor that the compiled model takes for a scalar, by the scalar's type."""


class Convention:
    """The calling convention of one model."""

    specs: tuple[str, str]
    """The structures of the arguments and of the results, serialized."""
    plain: int
    """Number of inputs if all are positional tensors, else -1. Such calls need no flattening."""
    flatten: Callable[[tuple[Any, ...], Mapping[str, Any]], list[torch.Tensor]]
    """Convert (args, kwargs) to the list of input tensors of the compiled code. Raises
    `exc.InputMismatchError`."""
    restore: _Restore
    """Convert the results of the compiled code to what the exported model returns."""

    def __init__(
        self,
        in_spec: str,
        out_spec: str,
        signature: signatures.Signature | None,
        path: str = "",
    ) -> None:
        """Build the functions for all nodes.

        Args:
            in_spec: structure of `(args, kwargs)`, serialized by `pytree.treespec_dumps`.
            out_spec: structure of the return value, serialized in the same way.
            signature: the inputs and outputs in the order of the pytree leaves. None for a package
                of Inductor (default), which has no signature; inputs that are not tensors are
                then dropped.
            path: path of the package, for error messages. Default: "".

        Raises:
            exc.BadPackageError: a structure cannot be read or contradicts the signature.
            exc.UnknownNodeError: a structure has a class that is not registered with pytree in this
                process, and for which there is no replacement (`result_record`).
        """
        self.specs = in_spec, out_spec
        classes = signature.result_classes if signature is not None else ()
        inputs, outputs = _load_spec(in_spec, path), _load_spec(out_spec, path, classes)
        arguments = inputs.children() if not inputs.is_leaf() else []
        if (
            inputs.type is not tuple
            or [argument.type for argument in arguments] != [tuple, dict]
            or (signature is not None and inputs.num_leaves != len(signature.inputs))
            or (signature is not None and outputs.num_leaves != len(signature.outputs))
        ):
            why = "its signature does not fit the structure of its arguments or results"
            raise exc.BadPackageError(path=path, why=why)
        leaves = _Leaves(signature.inputs if signature is not None else None)
        names, positional = _build_positional(arguments[0], leaves)
        named = _build_named(arguments[1], leaves)
        keywords = frozenset(arguments[1].context)

        def flatten(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
            unknown = [key for key in kwargs if key not in keywords and key not in names]
            if unknown:
                takes = ", ".join([*names, *arguments[1].context]) or "no arguments"
                _raise_mismatch(f"the model has no argument {unknown[0]!r}: it takes {takes}")
            if kwargs and len(args) < len(names):
                args, kwargs = _bind(args, kwargs, names, keywords)
            tensors: list[torch.Tensor] = []
            positional(args, tensors)
            named(kwargs, tensors)
            return tensors

        self.flatten = flatten
        self.restore = _build_restore(outputs, signature.outputs if signature is not None else None)
        only_tensors = signature is not None and all(
            isinstance(inp, signatures.TensorInput) for inp in signature.inputs
        )
        flat = all(child.is_leaf() for child in arguments[0].children())
        whole = arguments[0].num_children == inputs.num_leaves
        bare = only_tensors and flat and whole and not arguments[1].context
        self.plain = inputs.num_leaves if bare else -1


def _load_spec(
    spec: str, path: str, classes: Sequence[signatures.ResultClass] = ()
) -> pytree.TreeSpec:
    try:
        try:
            loaded: pytree.TreeSpec = pytree.treespec_loads(spec)
        except NotImplementedError:
            loaded = pytree.treespec_loads(replace_unregistered(spec, classes, path))
    except NotImplementedError as error:
        raise exc.UnknownNodeError(path=path, why=str(error).rstrip(".")) from None
    except Exception as error:
        why = f"the structure of its arguments cannot be read ({error})"
        raise exc.BadPackageError(path=path, why=why) from None
    return loaded


def _raise_mismatch(why: str) -> NoReturn:
    raise exc.InputMismatchError(why=why)


def _show(value: object) -> str:
    """Return a short description of a value for error messages."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return f"{value!r:.60}"
    if isinstance(value, torch.Tensor):
        return f"a tensor ({str(value.dtype).removeprefix('torch.')}, {list(value.shape)})"
    return f"of type {type(value).__qualname__}"


class _Leaves:
    """An iterator over the signature's inputs, in the order of the pytree leaves."""

    def __init__(self, inputs: Sequence[signatures.Input] | None) -> None:
        self._inputs = inputs
        self._next = 0

    def peek(self) -> signatures.Input | None:
        if self._inputs is None or self._next >= len(self._inputs):
            return None
        return self._inputs[self._next]

    def take(self) -> signatures.Input | None:
        leaf = self.peek()
        self._next += 1
        return leaf


def _name_node(spec: pytree.TreeSpec, leaves: _Leaves, path: str) -> str:
    """Return the name of a node: the name of its first leaf without the path from node to leaf."""
    first = leaves.peek()
    if first is None or spec.num_leaves == 0 or not first.path.startswith(path):
        return path
    below = first.path[len(path) :]
    return first.name.removesuffix(below) if below else first.name


def _bind(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    keywords: Container[str],
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Move arguments that were passed by keyword, and exported by position, to their position.

    Args:
        args, kwargs: of the call.
        names: of the positional arguments, which may be empty.
        keywords: names of the keyword arguments that the model was exported with.

    Returns:
        The arguments in the form of the export; unchanged if they do not fit it.
    """
    missing = names[len(args) :]
    if any(name in keywords or name not in kwargs for name in missing):
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in missing}
    return (*args, *(kwargs[name] for name in missing)), rest


def _build_positional(spec: pytree.TreeSpec, leaves: _Leaves) -> tuple[tuple[str, ...], _Flatten]:
    """Return the names of the positional arguments, and the function that flattens them."""
    names, parts = [], []
    for index, child in enumerate(spec.children()):
        names.append(_name_node(child, leaves, f"args[{index}]"))
        parts.append(_build_node(child, leaves, f"args[{index}]"))
    count = len(parts)

    def flatten(args: Any, into: list[torch.Tensor]) -> None:
        if len(args) != count:
            listing = f" ({', '.join(names)})" if names else ""
            plural = "" if count == 1 else "s"
            _raise_mismatch(
                f"the model takes {count} positional argument{plural}{listing}, but was called "
                f"with {len(args)}"
            )
        for part, value in zip(parts, args, strict=True):
            part(value, into)

    return tuple(names), flatten


def _build_named(spec: pytree.TreeSpec, leaves: _Leaves) -> _Flatten:
    parts = {
        key: _build_node(child, leaves, f"kwargs[{key!r}]")
        for key, child in zip(spec.context, spec.children(), strict=True)
    }

    def flatten(kwargs: Any, into: list[torch.Tensor]) -> None:
        if kwargs.keys() != parts.keys():
            takes = f"the keyword arguments {', '.join(parts)}" if parts else "no keyword arguments"
            _raise_mismatch(f"the model takes {takes}{_describe_difference(kwargs, parts)}")
        for key, part in parts.items():
            part(kwargs[key], into)

    return flatten


def _describe_difference(actual: Mapping[Any, Any], expected: Mapping[Any, Any]) -> str:
    missing = [str(key) for key in expected if key not in actual]
    extra = [str(key) for key in actual if key not in expected]
    without = f" without {', '.join(missing)}" if missing else ""
    with_ = f" with {', '.join(extra)}" if extra else ""
    return f", but was called{without}{' and' if missing and extra else ''}{with_}"


def _build_node(spec: pytree.TreeSpec, leaves: _Leaves, path: str) -> _Flatten:
    if spec.is_leaf():
        return _build_leaf(leaves.take())
    name = _name_node(spec, leaves, path)
    if spec.type in (tuple, list):
        return _build_sequence(spec, leaves, path, name)
    if spec.type in _DICTS:
        return _build_dict(spec, leaves, path, name)
    return _build_registered(spec, leaves, path, name)


def _build_sequence(spec: pytree.TreeSpec, leaves: _Leaves, path: str, name: str) -> _Flatten:
    parts = [
        _build_node(child, leaves, f"{path}[{index}]")
        for index, child in enumerate(spec.children())
    ]
    kind, count = spec.type, len(parts)

    def flatten(value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not kind or len(value) != count:
            actual = f"a {kind.__name__} of {len(value)}" if type(value) is kind else _show(value)
            _raise_mismatch(
                f"input '{name}' is {actual}, but the model takes a {kind.__name__} of {count}"
            )
        for part, item in zip(parts, value, strict=True):
            part(item, into)

    return flatten


def _build_dict(spec: pytree.TreeSpec, leaves: _Leaves, path: str, name: str) -> _Flatten:
    keys = spec.context[1] if spec.type is defaultdict else spec.context
    parts = {
        key: _build_node(child, leaves, f"{path}[{key!r}]")
        for key, child in zip(keys, spec.children(), strict=True)
    }

    def flatten(value: Any, into: list[torch.Tensor]) -> None:
        # Access by key: the insertion order of the caller's dict is irrelevant.
        if type(value) not in _DICTS or value.keys() != parts.keys():
            keys = ", ".join(repr(key) for key in parts)
            same = type(value) in _DICTS
            actual = f"has the keys {', '.join(map(repr, value))}" if same else f"is {_show(value)}"
            _raise_mismatch(f"input '{name}' {actual}, but the model takes a dict with {keys}")
        for key, part in parts.items():
            part(value[key], into)

    return flatten


def _build_registered(spec: pytree.TreeSpec, leaves: _Leaves, path: str, name: str) -> _Flatten:
    """Build the function for a class registered with pytree: namedtuple, dataclass, user class."""
    kind, context = spec.type, spec.context
    parts = [
        _build_node(child, leaves, _child_path(leaves, path, f"[{index}]"))
        for index, child in enumerate(spec.children())
    ]

    def flatten(value: Any, into: list[torch.Tensor]) -> None:
        # pytree has a single entry for all namedtuples; the context is the class.
        node_type = pytree._get_node_type(value)
        children: Sequence[Any] = ()
        fits = node_type is kind
        if fits:
            children, own = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
            children = list(children)
            fits = own == context and len(children) == len(parts)
        if not fits:
            cls_name = getattr(context, "__name__", None) or kind.__name__
            _raise_mismatch(
                f"input '{name}' is {_show(value)}, but the model takes a {cls_name} of the "
                "form that it was exported with"
            )
        for part, item in zip(parts, children, strict=True):
            part(item, into)

    return flatten


def _child_path(leaves: _Leaves, path: str, fallback: str) -> str:
    """Return the path of a child of a registered class; pytree may name it by field, not index."""
    first = leaves.peek()
    if first is None or not first.path.startswith(path):
        return path + fallback
    rest = first.path[len(path) :]
    if rest.startswith("."):
        end = min((index for mark in ".[" if (index := rest.find(mark, 1)) > 0), default=len(rest))
        return path + rest[:end]
    return path + fallback


def _build_leaf(inp: signatures.Input | None) -> _Flatten:
    if inp is None:
        return _flatten_any
    if isinstance(inp, signatures.TensorInput):
        return _build_tensor(inp)
    if isinstance(inp, signatures.SymbolInput):
        return _build_scalar(inp)
    return _build_constant(inp)


def _flatten_any(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)


def _build_tensor(inp: signatures.TensorInput) -> _Flatten:
    def flatten(value: Any, into: list[torch.Tensor]) -> None:
        if not isinstance(value, torch.Tensor):
            shape = ", ".join(map(str, inp.shape))
            _raise_mismatch(
                f"input '{inp.name}' is {_show(value)}, but the model takes a tensor "
                f"({inp.dtype}, [{shape}])"
            )
        into.append(value)

    return flatten


def _build_scalar(inp: signatures.SymbolInput) -> _Flatten:
    kind, dtype = _SCALARS[inp.type], SCALAR_DTYPES[inp.type]

    def flatten(value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not kind:
            article = "an" if inp.type == "int" else "a"
            _raise_mismatch(
                f"input '{inp.name}' is {_show(value)}, but the model takes {article} {inp.type}"
            )
        try:
            # Explicit device: torch.set_default_device may have changed the default.
            into.append(torch.tensor(value, dtype=dtype, device="cpu"))
        except (OverflowError, RuntimeError, ValueError):
            _raise_mismatch(f"input '{inp.name}' is {_show(value)}, which does not fit 64 bits")

    return flatten


def _build_constant(inp: signatures.ConstantInput) -> _Flatten:
    expected, kind = inp.value, type(inp.value)
    shown = repr(expected)

    def flatten(value: Any, into: list[torch.Tensor]) -> None:
        # Compare by repr: nan is not equal to itself, and -0.0 is equal to 0.0.
        if value is expected or (type(value) is kind and repr(value) == shown):
            return
        _raise_mismatch(
            f"input '{inp.name}' is {_show(value)}, but the model was compiled for {shown}"
        )

    return flatten


def _build_restore(spec: pytree.TreeSpec, outputs: Sequence[signatures.Output] | None) -> _Restore:
    count = spec.num_leaves
    convert: list[tuple[int, Callable[[Any], Any]]] = []
    for index, output in enumerate(outputs or ()):
        if isinstance(output, signatures.ConstantOutput):
            convert.append((index, _return_constant(output.value)))
        elif isinstance(output, signatures.SymbolOutput):
            convert.append((index, _read_scalar(_SCALARS[output.type])))
    if not convert:
        if spec.is_leaf():
            return operator.itemgetter(0)
        if all(child.is_leaf() for child in spec.children()) and spec.type in (tuple, list):
            return tuple if spec.type is tuple else list
    tensors = [
        index
        for index, output in enumerate(outputs or ())
        if isinstance(output, signatures.TensorOutput)
    ]

    build = _build_unflatten(spec, iter(range(count)))

    def restore(results: Sequence[Any]) -> Any:
        values = list(results)
        if len(values) != count:
            # The compiled code may omit results that are not tensors.
            results_by_index = dict(zip(tensors, values, strict=True))
            values = [results_by_index.get(index) for index in range(count)]
        for index, make in convert:
            values[index] = make(values[index])
        return build(values)

    return restore


def _build_unflatten(spec: pytree.TreeSpec, places: Iterator[int]) -> _Restore:
    """Build a function from the flat results to one node.

    Args:
        spec: the node.
        places: indices into the flat results, consumed in the order of the leaves.
    """
    if spec.is_leaf():
        return operator.itemgetter(next(places))
    parts = [_build_unflatten(child, places) for child in spec.children()]
    if spec.type is tuple:
        return lambda values: tuple([part(values) for part in parts])
    if spec.type is list:
        return lambda values: [part(values) for part in parts]
    if spec.type is dict:
        items = list(zip(spec.context, parts, strict=True))
        return lambda values: {key: part(values) for key, part in items}
    unflatten, context = pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context
    return lambda values: unflatten([part(values) for part in parts], context)


def _return_constant(value: signatures.Constant) -> Callable[[Any], Any]:
    return lambda _: value


def _read_scalar(kind: type) -> Callable[[Any], Any]:
    return lambda tensor: kind(tensor.item())
