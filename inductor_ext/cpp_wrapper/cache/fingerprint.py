"""Fingerprints of values: serialization to nested tuples that are equal in every process.

The result depends neither on addresses, object ids and hash seeds nor on the order of dictionaries.
Every value is serialized by a rule for its type; one without a rule, or one that cannot be
identified, raises `UnkeyableError`. Tensors and Triton kernels are serialized with their content.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from inductor_ext.storage.digest import hash_buffer

_PLAIN = (type(None), bool, int, float, complex, str, bytes)

_TRUSTED = ("torch", "operator", "_operator", "math", "builtins", "sympy")
"""Top-level modules whose functions and classes are identified by name; the key contains their
versions."""

_NAMESPACES = frozenset(
    {
        "_c10d_functional",
        "_quantized",
        "aten",
        "c10d",
        "debugprims",
        "fsdp",
        "inductor",
        "mkl",
        "mkldnn",
        "onednn",
        "prim",
        "prims",
        "profiler",
        "quantized",
        "quantized_decomposed",
        "rngprims",
        "symm_mem",
    }
)
"""Namespaces of torch's own operators."""


class UnkeyableError(Exception):
    """A dependency of the compiled model that cannot be identified; the text says which."""


class Serializer:
    """Serializer of values to nested tuples of plain values with a process-independent `repr`."""

    shape_envs: list[Any]
    """Shape environments of the values serialized so far."""
    devices: set[tuple[str, int | None]]
    """(type, index) of the devices of the values serialized so far."""

    def __init__(self) -> None:
        self.shape_envs = []
        self.devices = set()
        self._storages: dict[int, tuple[int, str]] = {}
        self._graphs: dict[int, int] = {}

    def serialize(self, value: Any) -> Any:
        """Serialize a value.

        Raises:
            UnkeyableError: there is no rule for its type.
        """
        if type(value) in _PLAIN:
            return value
        for rule in (self._serialize_torch, self._serialize_container, _serialize_code):
            result = rule(value)
            if result is not None:
                return result
        raise UnkeyableError(f"{describe_type(value)} cannot be identified")

    def _serialize_torch(self, value: Any) -> Any:
        """Serialize an object of torch or sympy; None if it is of another type."""
        import sympy  # type: ignore[import-untyped]
        import torch
        from torch.utils import _pytree

        if isinstance(value, torch.Tensor):
            return self.serialize_tensor(value)
        if isinstance(value, torch.fx.Node):
            return ("node", value.name)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self._remember(value.node.shape_env)
            return ("symbolic", str(value.node.expr))
        if isinstance(value, sympy.Basic):
            return ("sympy", type(value).__name__, str(value))
        if isinstance(value, torch.device):
            self.devices.add((value.type, value.index))
            return ("torch", str(value))
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return ("torch", str(value))
        if isinstance(value, _pytree.TreeSpec):
            return ("treespec", serialize_tree_spec(value))
        if isinstance(value, torch._ops.OpOverload):
            return self._serialize_operator(value)
        if isinstance(value, torch._ops.OpOverloadPacket):
            overloads = (self.serialize(getattr(value, name)) for name in value.overloads())
            return ("packet", str(value), *overloads)
        if isinstance(value, torch._ops.HigherOrderOperator):
            return ("higher order", trusted_name(type(value)), value.name())
        return None

    def _serialize_container(self, value: Any) -> Any:
        """Serialize a container, a range or an enum; None if it is of another type."""
        if isinstance(value, enum.Enum):
            return ("enum", qualified_name(type(value)), value.name)
        if isinstance(value, slice):
            return ("slice", *map(self.serialize, (value.start, value.stop, value.step)))
        if value is Ellipsis:
            return ("...",)
        if isinstance(value, range):
            return ("range", value.start, value.stop, value.step)
        if isinstance(value, Mapping):
            # Sort first: storages and graphs are numbered in the order of serialization.
            items = sorted(value.items(), key=lambda item: repr(self.serialize(item[0])))
            return ("dict", *((self.serialize(key), self.serialize(item)) for key, item in items))
        if isinstance(value, (set, frozenset)):
            return ("set", *sorted(map(self.serialize, value), key=repr))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ("namedtuple", trusted_name(type(value)), *map(self.serialize, value))
        if isinstance(value, (list, tuple)):
            # isinstance, because torch.fx uses its own list subclasses.
            kind = "list" if isinstance(value, list) else "tuple"
            return (kind, *map(self.serialize, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            fields = [(name, self.serialize(getattr(value, name))) for name in names]
            return ("dataclass", trusted_name(type(value)), *fields)
        return None

    def _remember(self, shape_env: Any) -> None:
        if shape_env is not None and all(env is not shape_env for env in self.shape_envs):
            self.shape_envs.append(shape_env)

    def _serialize_operator(self, operator: Any) -> Any:
        import torch

        namespace = operator.namespace
        if namespace in _NAMESPACES:
            return ("operator", operator.name())
        # A composite operator is compiled as the operators it calls, which are unknown here.
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if operator.has_kernel_for_dispatch_key(composite):
            why = f"the operator {operator.name()} is decomposed by code from outside torch"
            raise UnkeyableError(why)
        tags = sorted(tag.name for tag in operator.tags)
        return ("operator", operator.name(), str(operator._schema), tags)

    def serialize_tensor(self, value: Any) -> Any:
        """Serialize a tensor: a fake tensor by its metadata, a real tensor with its content."""
        import torch
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            inner = [(name, self.serialize(getattr(value, name))) for name in names]
            outer = [self.serialize(item) for item in (value.size(), value.stride())]
            # The code of the class is compiled, too, so the class must be trusted.
            return ("subclass", trusted_name(type(value)), self.serialize(context), outer, inner)
        self.devices.add((value.device.type, value.device.index))
        if value.layout is not torch.strided or value.is_quantized:
            raise UnkeyableError(f"a tensor is {value.layout}{' quantized' * value.is_quantized}")
        metadata = (
            str(value.dtype),
            str(value.device),
            value.requires_grad,
            value.is_conj(),
            value.is_neg(),
            isinstance(value, torch.nn.Parameter),
            self.serialize(value.size()),
            self.serialize(value.stride()),
            self.serialize(value.storage_offset()),
        )
        if isinstance(value, FakeTensor):
            self._remember(value.fake_mode.shape_env)
            return ("fake", *metadata)
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise UnkeyableError(f"a tensor is of the class {qualified_name(type(value))}")
        if value.device.type == "meta":
            return ("meta", *metadata)
        return ("tensor", *metadata, *self._serialize_storage(value.untyped_storage()))

    def _serialize_storage(self, storage: Any) -> tuple[int, str]:
        """Return (number, digest) of a storage. Tensors that share a storage share its number."""
        import torch

        identity = storage._cdata
        if identity not in self._storages:
            on_cpu = storage
            if storage.device.type != "cpu":
                on_cpu = torch.UntypedStorage(storage.nbytes()).copy_(storage)
            content: Any = b""
            if on_cpu.nbytes():
                content = (ctypes.c_char * on_cpu.nbytes()).from_address(on_cpu.data_ptr())
            self._storages[identity] = (len(self._storages), hash_buffer(content))
        return self._storages[identity]

    def serialize_graph(self, module: Any) -> Any:
        """Serialize a graph module: its nodes, and the subgraphs and tensors that they reference.

        Raises:
            UnkeyableError: a node calls or reads something that cannot be identified.
        """
        import torch

        if id(module) in self._graphs:
            return ("graph again", self._graphs[id(module)])
        self._graphs[id(module)] = len(self._graphs)
        nodes = []
        for node in module.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                target = functools.reduce(getattr, node.target.split("."), module)
                if isinstance(target, torch.fx.GraphModule):
                    target = self.serialize_graph(target)
                elif isinstance(target, torch.Tensor):
                    target = self.serialize_tensor(target)
                else:
                    raise UnkeyableError(f"the graph's {node.name} is {describe_type(target)}")
                callee = (node.target, target)
            elif node.op == "call_function":
                callee = (self.serialize(node.target), _decomposition_name(node.target))
            else:
                callee = (node.target, None)
            details = (self._serialize_arguments(node), self._serialize_meta(node))
            nodes.append((node.op, node.name, callee, *details))
        return ("graph", *nodes)

    def _serialize_arguments(self, node: Any) -> Any:
        kernel = node.kwargs.get("kernel_idx") if node.op == "call_function" else None
        if kernel is None:
            return self.serialize((node.args, node.kwargs))
        # A user-defined Triton kernel, referenced by indices into a process-local table.
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kwargs = dict(node.kwargs)
        kernel = kernel_side_table.get_kernel(kwargs.pop("kernel_idx"))
        source = _serialize_triton_kernel(self, kernel)
        constants = kernel_side_table.get_constant_args(kwargs.pop("constant_args_idx"))
        return (source, self.serialize((node.args, kwargs, constants)))

    def _serialize_meta(self, node: Any) -> Any:
        values = {
            name: self.serialize(node.meta[name])
            for name in ("val", "custom", "eager_input_vals")
            if name in node.meta
        }
        # Module paths and types enter the compiled output through reports.
        stack = node.meta.get("nn_module_stack") or {}
        modules = [
            (path, kind if isinstance(kind, str) else qualified_name(kind))
            for path, kind in stack.values()
        ]
        unbacked = node.meta.get("unbacked_bindings") or {}
        bindings = sorted((str(symbol), str(path)) for symbol, path in unbacked.items())
        return (sorted(values.items()), modules, bindings)


def _serialize_code(value: Any) -> Any:
    """Serialize a class or function by its name; None if it is of another type."""
    if isinstance(value, type) or inspect.isroutine(value):
        return ("name", trusted_name(value))
    return None


def qualified_name(obj: Any) -> str:
    """Return module and name of a class or function."""
    return f"{getattr(obj, '__module__', None)}.{getattr(obj, '__qualname__', obj)}"


def _is_trusted(obj: Any) -> bool:
    return str(getattr(obj, "__module__", "") or "").split(".")[0] in _TRUSTED


def trusted_name(obj: Any) -> str:
    """Return the name of a class or function from a module in `_TRUSTED`.

    Raises:
        UnkeyableError: it comes from another module, so its code may change under the same name.
    """
    module = getattr(obj, "__module__", None)
    if module is None and isinstance(getattr(obj, "__self__", None), type(sys)):
        return f"{obj.__self__.__name__}.{obj.__qualname__}"
    if not _is_trusted(obj) or "<" in getattr(obj, "__qualname__", "<"):
        name = qualified_name(obj)
        raise UnkeyableError(f"{name} is code from outside torch, of unknown version")
    return qualified_name(obj)


def describe_type(value: Any) -> str:
    """Return a description of a value for reasons."""
    return f"a value of type {qualified_name(type(value))}"


def serialize_tree_spec(spec: Any) -> str:
    """Return a pytree's structure as text.

    Raises:
        UnkeyableError: it has a class that cannot be serialized.
    """
    from torch.utils import _pytree

    try:
        text: str = _pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UnkeyableError(f"a pytree's structure cannot be written: {error}") from None
    return text


def _serialize_triton_kernel(serializer: Serializer, kernel: Any) -> Any:
    """Serialize a user-defined Triton kernel by Triton's cache key, which covers its callees."""
    configs: list[Any] = []
    if hasattr(kernel, "configs"):
        hooks = [getattr(kernel, name, None) for name in ("early_config_prune", "perf_model")]
        hooks += [getattr(config, "pre_hook", None) for config in kernel.configs]
        if any(hook is not None and not _is_from_package(hook, "triton") for hook in hooks):
            raise UnkeyableError("a Triton kernel's autotuning calls code from outside torch")
        configs = [serializer.serialize(config.all_kwargs()) for config in kernel.configs]
        configs += [serializer.serialize(getattr(kernel, "keys", None)), kernel.restore_value]
        configs += [kernel.reset_to_zero]
        kernel = kernel.fn
    if not hasattr(kernel, "cache_key"):
        raise UnkeyableError(f"a Triton kernel is {describe_type(kernel)}")
    try:
        return ("triton", kernel.cache_key, configs)
    except Exception as error:
        raise UnkeyableError(f"a Triton kernel's source cannot be read: {error}") from None


def _is_from_package(obj: Any, package: str) -> bool:
    return str(getattr(obj, "__module__", "")).split(".")[0] == package


def is_known_code(function: Any) -> bool:
    """Whether a function, without its wrappers, is from torch or the extension."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        inner = getattr(function, "__wrapped__", None)
        function = function.func if inner is None else inner
    return _is_trusted(function) or _is_from_package(function, "inductor_ext")


def _decomposition_name(target: Any) -> str | None:
    """Return the name of an operator's decomposition in torch's `decomposition_table`, or None."""
    from torch._decomp import decomposition_table

    function = decomposition_table.get(target)
    if function is None:
        return None
    if not is_known_code(function):
        raise UnkeyableError(f"{target} has a decomposition from {qualified_name(function)}")
    return qualified_name(function)
