"""The names of dynamic sizes in the `dynamic_shapes` that are passed to a compile.

A program that was saved and loaded has no names of `torch.export.Dim`. The caller passes the
`dynamic_shapes` of the export again. Each `Dim` is compared with the size of the program at the
same place, and gives its name to the symbol there. Ranges are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from inductor_ext import exc
from inductor_ext.cpp_wrapper.signature import dim_names

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_ARGUMENT = "dynamic_shapes"


def read_names_by_model(
    programs: Mapping[str, ExportedProgram], dynamic_shapes: Any, *, several: bool
) -> dict[str, dict[str, str]]:
    """Return the names by symbol, by model name.

    Args:
        programs: the programs by model name.
        dynamic_shapes: that of the only program, or a mapping from model name to that of a program,
            which may omit models. None gives no names.
        several: whether it is a mapping from model names.

    Raises:
        exc.BadArgumentError: see `read_names`; or a name is not that of a model.
    """
    if dynamic_shapes is None:
        return {}
    if not several:
        return {name: read_names(program, dynamic_shapes) for name, program in programs.items()}
    if not isinstance(dynamic_shapes, Mapping) or not dynamic_shapes.keys() <= programs.keys():
        models = ", ".join(map(repr, programs))
        raise _error(dynamic_shapes, f"a dict from names of models, which are {models}")
    return {
        name: read_names(programs[name], shapes)
        for name, shapes in dynamic_shapes.items()
        if shapes is not None
    }


def read_names(program: ExportedProgram, dynamic_shapes: Any) -> dict[str, str]:
    """Return the names of the sizes of a program by symbol.

    Args:
        program: an exported program.
        dynamic_shapes: names of dimensions, in the form of the argument of `torch.export.export`.

    Raises:
        exc.BadArgumentError: the structure is not that of the program's inputs, a named size is not
            dynamic or is another expression in the program, or names contradict each other.
    """
    values = _list_values(program)
    names: dict[str, str] = {}
    for place, index, shape in _list_leaves(program, dynamic_shapes):
        for where, dimension, dim in _list_dims(place, shape, values[index]):
            size = values[index].shape[dimension]
            if isinstance(size, int):
                expected = f"no Dim at {where}, because the size is {size} in the program"
                raise _error(dim, expected)
            pair = dim_names.match_name(size.node.expr, dim.__name__)
            if pair is None:
                if dim_names.is_usable(dim.__name__):
                    raise _error(dim, f"the size of the program, {size}, at {where}")
                continue
            symbol, name = pair
            if names.setdefault(symbol, name) != name:
                expected = f"the same name as for an equal size, {names[symbol]!r}, at {where}"
                raise _error(dim, expected)
    _check_distinct(names)
    return names


def _check_distinct(names: Mapping[str, str]) -> None:
    symbols: dict[str, str] = {}
    for symbol, name in names.items():
        if symbols.setdefault(name, symbol) != symbol:
            expected = f"one size of the name {name!r}, but {symbols[name]} and {symbol} may differ"
            raise _error(name, expected)


def _error(actual: Any, allowed: str) -> exc.BadArgumentError:
    return exc.BadArgumentError(name=_ARGUMENT, actual=repr(actual), allowed=allowed)


def _list_values(program: ExportedProgram) -> list[Any]:
    """Return the fake tensors, numbers and constants of the inputs of a call, in order."""
    placeholders = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    specs = program.graph_signature.input_specs
    users = [spec.arg for spec in specs if spec.kind.name == "USER_INPUT"]
    return [placeholders[argument.name].meta.get("val") for argument in users]


def _list_leaves(program: ExportedProgram, dynamic_shapes: Any) -> list[tuple[str, int, Any]]:
    """Return the place in `dynamic_shapes`, the index of the input, and the entry there."""
    from torch._dynamo.exc import UserError
    from torch.export import dynamic_shapes as export

    inputs: Any = _combine_inputs(program)
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = _expand_variadic(dict(dynamic_shapes), inputs)
        if dynamic_shapes.keys() != inputs.keys():
            raise _error(dynamic_shapes, f"a dict from the names of the inputs, {list(inputs)}")
    elif isinstance(dynamic_shapes, (tuple, list)):
        inputs = type(dynamic_shapes)(inputs.values())
    else:
        raise _error(dynamic_shapes, "a dict, tuple or list, as for torch.export.export")
    leaves: list[tuple[str, int, Any]] = []

    def add(path: Any, index: int, shape: Any) -> None:
        leaves.append((f"{_ARGUMENT}{pytree.keystr(path)}", index, shape))

    try:
        # A user's class is flattened, as by torch.export.
        export._tree_map_with_path(add, inputs, dynamic_shapes, tree_name="inputs")
    except (UserError, ValueError) as error:
        why = str(error).split("`dynamic_shapes`: ", 1)[-1].partition("\n")[0].rstrip(".")
        raise _error(dynamic_shapes, f"the structure of the inputs: {why}") from None
    return leaves


def _combine_inputs(program: ExportedProgram) -> dict[str, Any]:
    """Return the arguments of a call by name, with the indices of the inputs in place of values."""
    spec = program.call_spec.in_spec
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    signature = program.module_call_graph[0].signature
    names = list(getattr(signature, "forward_arg_names", None) or [])
    names += [f"args_{index}" for index in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _expand_variadic(shapes: dict[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of `*args` and `**kwargs` under the names that their elements have."""
    expanded: dict[str, Any] = {}
    for name, value in shapes.items():
        if name not in inputs and isinstance(value, Mapping) and value.keys() <= inputs.keys():
            expanded.update(value)
        elif name not in inputs and isinstance(value, (tuple, list)):
            expanded.update({f"{name}_{index}": item for index, item in enumerate(value)})
        else:
            expanded[name] = value
    return expanded


def _list_dims(place: str, shape: Any, value: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield the place, the dimension and the `Dim` of each named size of an input."""
    from torch.export import Dim

    if not isinstance(value, torch.Tensor):
        if isinstance(shape, (Dim, dict)):
            raise _error(shape, f"no named size at {place}, where the input is not a tensor")
        return
    if shape is None:
        return
    if not isinstance(shape, (dict, tuple, list)):
        raise _error(shape, f"a dict, tuple or list of dimensions at {place}")
    if not isinstance(shape, dict) and len(shape) != value.ndim:
        raise _error(shape, f"{value.ndim} dimensions at {place}")
    items = shape.items() if isinstance(shape, dict) else enumerate(shape)
    for dimension, dim in items:
        if not isinstance(dimension, int) or not 0 <= dimension < value.ndim:
            raise _error(shape, f"dimensions from 0 to {value.ndim - 1} at {place}")
        if isinstance(dim, Dim):
            yield f"{place}[{dimension}]", dimension, dim
