"""The cache key of a compiled model: a digest of everything that its content depends on.

It covers the exported program including the content of its weights, the settings, Inductor's
options, torch, the compilers, the machine, and the state of the process. Two processes that export
the same model get the same key. The key does not depend on addresses, object ids, hash seeds or the
order of dictionaries.

The key fails closed. Every value is serialized by a rule for its type. A value without a rule, or
one that cannot be identified (a pass without a uuid, a script object, a lowering from outside torch
and the extension), means that there is no key, and the reason is returned; such a program is
compiled each time.

Deliberately excluded: stack traces, which only affect comments in the generated code, and the
values of example tensors, because a compile sees only their shapes. Imports no parts of Inductor
that torch.export does not import.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from inductor_ext import _compat, numerics
from inductor_ext.hooks import lowering_table
from inductor_ext.lowerings.graph import post_grad_pass
from inductor_ext.settings import Settings
from inductor_ext.storage import artifact_store
from inductor_ext.toolchain import components

if TYPE_CHECKING:
    from torch.export import ExportedProgram

__all__ = ["Key", "ingredients", "key"]

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

_IRRELEVANT_OPTIONS = frozenset(
    {
        "autotune_local_cache",
        "autotune_remote_cache",
        "bundle_triton_into_fx_graph_cache",
        "compile_threads",
        "fx_graph_cache",
        "fx_graph_remote_cache",
        "worker_start_method",
    }
)
"""Inductor options that affect the speed of compilation but not the generated code."""

_RELEVANT_TRACE_OPTIONS = frozenset({"trace.provenance_tracking_level"})

_VARIABLE_PREFIXES = ("TORCH", "PYTORCH", "TRITON", "ATEN", "CUDA", "HALIDE", "HIP", "ROCM")

_VARIABLES = frozenset(
    {
        "CC",
        "COMPILER_PATH",
        "CONDA_PREFIX",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "CXX",
        "C_INCLUDE_PATH",
        "GCC_EXEC_PREFIX",
        "LD_LIBRARY_PATH",
        "LIBRARY_PATH",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OMP_PREFIX",
        "SDKROOT",
    }
)

_IRRELEVANT_VARIABLES = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_FX_GRAPH_CACHE",
        "TORCH_HOME",
        "TORCH_LOGS",
        "TORCH_LOGS_FORMAT",
        "TORCH_LOGS_OUT",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_TRACE",
        "TORCH_WARM_POOL",
        "TRITON_CACHE_DIR",
        # Inductor sets it for its subprocesses.
        "TRITON_LIBDEVICE_PATH",
    }
)


@dataclasses.dataclass(frozen=True)
class Key:
    """A cache key, or the reason why there is none."""

    digest: str | None
    """64 hexadecimal digits; None if there is no key."""
    why: str | None = None
    """Reason as a clause without a full stop; None if there is a key."""


class _UnkeyableError(Exception):
    """A dependency of the compiled model that cannot be identified; the text says which."""


def key(
    program: ExportedProgram,
    ours: Settings,
    patches: Mapping[str, Any],
    extra: Iterable[Any] = (),
) -> Key:
    """Compute the cache key of compiling a program in the current process.

    Args:
        program: the exported program.
        ours: settings of the extension for the compile.
        patches: options of Inductor for the compile, applied on top of the current config.
        extra: plain values that the result also depends on. Default: none.

    Returns:
        The key, or the reason why there is none. Keys are equal only if the compiled models are
        interchangeable.
    """
    try:
        found = ingredients(program, ours, patches, extra)
    except _UnkeyableError as error:
        return Key(None, str(error))
    return Key(hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest())


def ingredients(
    program: ExportedProgram,
    ours: Settings,
    patches: Mapping[str, Any],
    extra: Iterable[Any] = (),
) -> dict[str, Any]:
    """Return the input of the digest in `key`, by category, as nested tuples of plain values.

    To find out why two keys differ, compare their ingredients. Arguments: see `key`.

    Raises:
        _UnkeyableError: there is no key. An internal class; `key` converts it to a reason.
    """
    writer = _Writer()
    return {
        "program": _program(writer, program),
        "weights": _weights(writer, program),
        "symbols": [_symbols(env) for env in writer.shape_envs],
        "settings": (
            artifact_store.source_key(),
            ours.cache_key(),
            lowering_table.registry_key(own=False),
            post_grad_pass.cache_key(ours, program.graph_module),
        ),
        "options": _options(writer, patches),
        "foreign": _foreign_code(),
        "state": _process_state(writer),
        "environment": _environment(),
        "software": _software(),
        "hardware": _hardware(writer.devices),
        "extra": writer.write(tuple(extra)),
    }


# --- values -------------------------------------------------------------------------------------


class _Writer:
    """Serializer of values to nested tuples of plain values with a process-independent `repr`."""

    def __init__(self) -> None:
        self.shape_envs: list[Any] = []
        self.devices: set[tuple[str, int | None]] = set()
        self._storages: dict[int, tuple[int, str]] = {}
        self._graphs: dict[int, int] = {}

    def write(self, value: Any) -> Any:
        """Serialize a value.

        Raises:
            _UnkeyableError: there is no rule for its type.
        """
        import sympy  # type: ignore[import-untyped]
        import torch
        from torch.utils import _pytree

        if type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
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
        if isinstance(value, enum.Enum):
            return ("enum", _name(type(value)), value.name)
        if isinstance(value, _pytree.TreeSpec):
            return ("treespec", _tree_spec(value))
        if isinstance(value, torch._ops.OpOverload):
            return self._operator(value)
        if isinstance(value, torch._ops.OpOverloadPacket):
            return (
                "packet",
                str(value),
                *(self.write(getattr(value, n)) for n in value.overloads()),
            )
        if isinstance(value, torch._ops.HigherOrderOperator):
            return ("higher order", _trusted(type(value)), value.name())
        if isinstance(value, slice):
            return ("slice", *map(self.write, (value.start, value.stop, value.step)))
        if value is Ellipsis:
            return ("...",)
        if isinstance(value, range):
            return ("range", value.start, value.stop, value.step)
        if isinstance(value, Mapping):
            # Sort first: storages and graphs are numbered in the order of serialization.
            items = sorted(value.items(), key=lambda item: repr(self.write(item[0])))
            return ("dict", *((self.write(name), self.write(item)) for name, item in items))
        if isinstance(value, (set, frozenset)):
            return ("set", *sorted(map(self.write, value), key=repr))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ("namedtuple", _trusted(type(value)), *map(self.write, value))
        if isinstance(value, (list, tuple)):
            # isinstance, because torch.fx uses its own list subclasses.
            return ("list" if isinstance(value, list) else "tuple", *map(self.write, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [
                (f.name, self.write(getattr(value, f.name))) for f in dataclasses.fields(value)
            ]
            return ("dataclass", _trusted(type(value)), *fields)
        if isinstance(value, type) or inspect.isroutine(value):
            return ("name", _trusted(value))
        raise _UnkeyableError(f"{_describe(value)} cannot be told apart from others of its type")

    def _remember(self, shape_env: Any) -> None:
        if shape_env is not None and all(env is not shape_env for env in self.shape_envs):
            self.shape_envs.append(shape_env)

    def _operator(self, operator: Any) -> Any:
        import torch

        namespace = operator.namespace
        if namespace in _NAMESPACES:
            return ("operator", operator.name())
        # A composite operator is compiled as the operators it calls, which are unknown here.
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        if operator.has_kernel_for_dispatch_key(composite):
            raise _UnkeyableError(
                f"the operator {operator.name()} is made of others in foreign code"
            )
        tags = sorted(tag.name for tag in operator.tags)
        return ("operator", operator.name(), str(operator._schema), tags)

    # --- tensors ---

    def tensor(self, value: Any) -> Any:
        """Serialize a tensor: a fake tensor by its metadata, a real tensor with its content."""
        import torch
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            inner = [(name, self.write(getattr(value, name))) for name in names]
            outer = [self.write(item) for item in (value.size(), value.stride())]
            # The code of the class is compiled, too, so the class must be trusted.
            return ("subclass", _trusted(type(value)), self.write(context), outer, inner)
        self.devices.add((value.device.type, value.device.index))
        if value.layout is not torch.strided or value.is_quantized:
            raise _UnkeyableError(f"a tensor is {value.layout}{' quantized' * value.is_quantized}")
        known = (
            str(value.dtype),
            str(value.device),
            value.requires_grad,
            value.is_conj(),
            value.is_neg(),
            isinstance(value, torch.nn.Parameter),
            *(self.write(item) for item in (value.size(), value.stride(), value.storage_offset())),
        )
        if isinstance(value, FakeTensor):
            self._remember(value.fake_mode.shape_env)
            return ("fake", *known)
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise _UnkeyableError(f"a tensor is of the class {_name(type(value))}")
        if value.device.type == "meta":
            return ("meta", *known)
        return ("tensor", *known, *self._storage(value.untyped_storage()))

    def _storage(self, storage: Any) -> tuple[int, str]:
        """Return (number, digest) of a storage. Tensors that share a storage share its number."""
        import torch

        identity = storage._cdata
        if identity not in self._storages:
            held = storage
            if storage.device.type != "cpu":
                held = torch.UntypedStorage(storage.nbytes()).copy_(storage)
            content: Any = b""
            if held.nbytes():
                content = (ctypes.c_char * held.nbytes()).from_address(held.data_ptr())
            self._storages[identity] = (len(self._storages), artifact_store.digest(content))
        return self._storages[identity]

    # --- graphs ---

    def graph(self, module: Any) -> Any:
        """Serialize a graph module: its nodes, and the subgraphs and tensors that they reference.

        Raises:
            _UnkeyableError: a node calls or reads something that cannot be identified.
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
                    target = self.graph(target)
                elif isinstance(target, torch.Tensor):
                    target = self.tensor(target)
                else:
                    raise _UnkeyableError(f"the graph's {node.name} is {_describe(target)}")
                what = (node.target, target)
            elif node.op == "call_function":
                what = (self.write(node.target), _decomposition(node.target))
            else:
                what = (node.target, None)
            nodes.append((node.op, node.name, what, self._arguments(node), self._meta(node)))
        return ("graph", *nodes)

    def _arguments(self, node: Any) -> Any:
        kernel = node.kwargs.get("kernel_idx") if node.op == "call_function" else None
        if kernel is None:
            return self.write((node.args, node.kwargs))
        # A user-defined Triton kernel, referenced by indices into a process-local table.
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kwargs = dict(node.kwargs)
        source = _triton_kernel(self, kernel_side_table.get_kernel(kwargs.pop("kernel_idx")))
        constants = kernel_side_table.get_constant_args(kwargs.pop("constant_args_idx"))
        return (source, self.write((node.args, kwargs, constants)))

    def _meta(self, node: Any) -> Any:
        known = {
            name: self.write(node.meta[name])
            for name in ("val", "custom", "eager_input_vals")
            if name in node.meta
        }
        # Module paths and types enter the compiled output through reports.
        stack = node.meta.get("nn_module_stack") or {}
        modules = [
            (path, kind if isinstance(kind, str) else _name(kind)) for path, kind in stack.values()
        ]
        unbacked = node.meta.get("unbacked_bindings") or {}
        bindings = sorted((str(symbol), str(path)) for symbol, path in unbacked.items())
        return (sorted(known.items()), modules, bindings)


def _name(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', thing)}"


def _is_trusted(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "") or "").split(".")[0] in _TRUSTED


def _trusted(thing: Any) -> str:
    """Return the name of a class or function from a module in `_TRUSTED`.

    Raises:
        _UnkeyableError: it comes from another module, so its code may change under the same name.
    """
    module = getattr(thing, "__module__", None)
    if module is None and isinstance(getattr(thing, "__self__", None), type(sys)):
        return f"{thing.__self__.__name__}.{thing.__qualname__}"
    if not _is_trusted(thing) or "<" in getattr(thing, "__qualname__", "<"):
        raise _UnkeyableError(f"{_name(thing)} is code from outside torch, of unknown version")
    return _name(thing)


def _describe(value: Any) -> str:
    return f"a value of type {_name(type(value))}"


def _tree_spec(spec: Any) -> str:
    from torch.utils import _pytree

    try:
        text: str = _pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise _UnkeyableError(f"a pytree's structure cannot be written: {error}") from None
    return text


def _triton_kernel(writer: _Writer, kernel: Any) -> Any:
    """Serialize a user-defined Triton kernel by Triton's cache key, which covers its callees."""
    configs: list[Any] = []
    if hasattr(kernel, "configs"):
        hooks = [getattr(kernel, name, None) for name in ("early_config_prune", "perf_model")]
        hooks += [getattr(config, "pre_hook", None) for config in kernel.configs]
        if any(hook is not None and not _of_package(hook, "triton") for hook in hooks):
            raise _UnkeyableError("a Triton kernel's autotuning calls foreign code")
        configs = [writer.write(config.all_kwargs()) for config in kernel.configs]
        configs += [writer.write(getattr(kernel, "keys", None)), kernel.restore_value]
        configs += [kernel.reset_to_zero]
        kernel = kernel.fn
    if not hasattr(kernel, "cache_key"):
        raise _UnkeyableError(f"a Triton kernel is {_describe(kernel)}")
    try:
        return ("triton", kernel.cache_key, configs)
    except Exception as error:
        raise _UnkeyableError(f"a Triton kernel's source cannot be read: {error}") from None


def _of_package(thing: Any, package: str) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == package


# --- the program --------------------------------------------------------------------------------


def _program(writer: _Writer, program: Any) -> Any:
    # torch.export's guards are compiled into the input checks.
    guards = getattr(program, "_guards_code", None)
    ranges = {
        str(symbol): (str(values.lower), str(values.upper))
        for symbol, values in program.range_constraints.items()
    }
    signature = program.module_call_graph[0].signature
    names = getattr(signature, "forward_arg_names", None) if signature is not None else None
    # Values matter only for example inputs that are not tensors.
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _pytree

    examples, structure = _pytree.tree_flatten(program.example_inputs)
    shapes = []
    for example in examples:
        written = writer.tensor(example) if isinstance(example, FakeTensor) else None
        shapes.append(written or _example(writer, example))
    return (
        writer.graph(program.graph_module),
        writer.write(program.graph_signature),
        writer.write((program.call_spec.in_spec, program.call_spec.out_spec, names)),
        writer.write((guards, ranges)),
        (shapes, _tree_spec(structure)),
        [_trusted(verifier) for verifier in program.verifiers],
    )


def _example(writer: _Writer, value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return writer.write(value)
    writer.devices.add((value.device.type, value.device.index))
    layout = (
        (value.size(), value.stride(), value.storage_offset())
        if value.layout is torch.strided
        else ()
    )
    return (
        _name(type(value)),
        str(value.dtype),
        str(value.device),
        str(value.layout),
        writer.write(layout),
    )


def _weights(writer: _Writer, program: Any) -> Any:
    """Serialize parameters, buffers and constants: their content and which of them share memory."""
    return writer.write((dict(program.state_dict), dict(program.constants)))


def _symbols(env: Any) -> Any:
    """Serialize the shape environment: ranges, size hints, guards and asserts of the symbols."""

    def table(name: str) -> list[tuple[str, str]]:
        items = (getattr(env, name, None) or {}).items()
        return sorted((str(symbol), str(value)) for symbol, value in items)

    asserts = {
        str(symbol): [(str(item.expr), str(item.msg)) for item in found]
        for symbol, found in env.deferred_runtime_asserts.items()
    }
    return (
        table("var_to_range"),
        table("replacements"),
        # The size hints, which determine the tuning of kernels.
        sorted((str(symbol), str(value)) for symbol, value in _compat.symbol_hints(env).items()),
        [table(name) for name in ("unbacked_var_to_val", "var_to_hint_override")],
        [str(guard.expr) for guard in env.guards],
        sorted(asserts.items()),
        sorted(map(str, getattr(env, "divisible", ()))),
        sorted(map(str, getattr(env, "size_like", ()))),
    )


# --- what compiles it ---------------------------------------------------------------------------


def _options(writer: _Writer, patches: Mapping[str, Any]) -> Any:
    import torch._functorch.config
    import torch._inductor.config
    import torch.compiler.config
    import torch.fx.experimental._config

    found = []
    modules = (torch._inductor.config, torch._functorch.config, torch.fx.experimental._config)
    for index, module in enumerate(modules):
        values: dict[str, Any] = module.get_config_copy()
        entries = module._config
        if index == 0:
            values |= patches
        for name, value in sorted(values.items()):
            hidden = name.startswith("trace.") and name not in _RELEVANT_TRACE_OPTIONS
            if index == 0 and (hidden or name in _IRRELEVANT_OPTIONS):
                continue
            if name.endswith("cutlass_dir") and value == entries[name].default:
                # For XPU, the default is a folder relative to the working directory.
                continue
            if name == "aot_inductor.metadata" and value:
                # Inductor adds its own entries to the user's and leaves them for later compiles.
                value = {k: v for k, v in value.items() if not k.startswith("AOTI_")}
            found.append((index, name, _option(writer, name, value, entries[name].default)))
    # The other options of torch.compiler.config concern caches or torch.compile only.
    for name in ("cache_key_tag", "compile_on_one_rank"):
        found.append((len(modules), name, getattr(torch.compiler.config, name, None)))
    return found


def _option(writer: _Writer, name: str, value: Any, default: Any) -> Any:
    if isinstance(value, type) and hasattr(value, "uuid"):
        value = value()
    if callable(getattr(value, "uuid", None)):
        identity = value.uuid()
        if identity is None:
            raise _UnkeyableError(f"the option {name} is a pass whose uuid is None")
        return ("uuid", _name(type(value)), writer.write(identity))
    if isinstance(value, (list, tuple)):
        return [_option(writer, name, item, None) for item in value]
    try:
        return writer.write(value)
    except _UnkeyableError:
        if value is not None and value is default:
            return ("default",)
        raise _UnkeyableError(f"the option {name} is {_describe(value)} without a uuid") from None


def _foreign_code() -> Any:
    """Return keys of third-party code registered with Inductor. Skips modules not yet imported.

    Raises:
        _UnkeyableError: there is third-party code without a uuid.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    for operator, function in dict(getattr(lowering, "lowerings", {})).items():
        if not _is_known(function):
            raise _UnkeyableError(f"{operator} has a lowering from {_name(function)}")
    decomposition = sys.modules.get("torch._inductor.decomposition")
    for operator, function in dict(getattr(decomposition, "decompositions", {})).items():
        if not _is_known(function):
            raise _UnkeyableError(f"{operator} has a decomposition from {_name(function)}")
    common = sys.modules.get("torch._inductor.codegen.common")
    for device, backend in dict(getattr(common, "device_codegens", {})).items():
        if not all(_is_known(value) for value in vars(backend).values() if callable(value)):
            raise _UnkeyableError(f"the device {device} has a backend from elsewhere")
    found = []
    for device, custom in dict(getattr(common, "custom_backend_passes", {})).items():
        if custom is not None:
            identity = custom.uuid() if hasattr(custom, "uuid") else None
            if identity is None:
                raise _UnkeyableError(f"the device {device} has a pass without a uuid")
            found.append((device, repr(identity)))
    return found


def _is_known(function: Any) -> bool:
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        inner = getattr(function, "__wrapped__", None)
        function = function.func if inner is None else inner
    return _is_trusted(function) or _of_package(function, "inductor_ext")


def _decomposition(target: Any) -> str | None:
    """Return the name of an operator's decomposition in torch's `decomposition_table`, or None."""
    from torch._decomp import decomposition_table

    function = decomposition_table.get(target)
    if function is None:
        return None
    if not _is_known(function):
        raise _UnkeyableError(f"{target} has a decomposition from {_name(function)}")
    return _name(function)


def _process_state(writer: _Writer) -> Any:
    """Return the state of this process and thread that affects tracing or lowering."""
    import torch
    from torch.utils import _python_dispatch

    if _python_dispatch._get_current_dispatch_mode_stack():
        raise _UnkeyableError("a torch dispatch mode is active")
    autocast = [
        (device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)))
        for device in ("cpu", "cuda")
    ]
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    flags = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        cuda.matmul.fp32_precision,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        numerics.matmul_flags(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        mkldnn.is_available(),
        torch._C._get_mkldnn_enabled(),
        torch.get_num_threads(),
    )
    return writer.write((torch.get_default_dtype(), torch.get_default_device(), autocast, flags))


def _environment() -> list[tuple[str, str]]:
    return sorted(
        (name, value)
        for name, value in os.environ.items()
        if (name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES))
        and name not in _IRRELEVANT_VARIABLES
    )


def _software() -> Any:
    import torch

    distributions = []
    for name in ("torch", "triton", "sympy", "nvidia-cutlass"):
        try:
            distributions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    compilers = [(part.name, part.version, part.path) for part in map(components.probe, ("cxx",))]
    return (
        sys.version,
        platform.libc_ver(),
        distributions,
        (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip),
        _torch_files(),
        [(*compiler, _identity(compiler[2])) for compiler in compilers],
    )


@functools.cache
def _torch_files() -> str:
    """Return a digest over names, sizes and mtimes of torch's files that generate or enter code.

    The version would suffice except for a torch under development. mtimes are used because reading
    the files takes 0.8 s.
    """
    import torch

    root = pathlib.Path(torch.__file__).parent
    folders = ["_inductor", "_functorch", "_decomp", "_refs", "_prims", "_export", "export", "fx"]
    folders += ["_higher_order_ops", "include/torch/csrc/inductor", "include/torch/headeronly"]
    found = []
    for folder in folders:
        for parent, _, names in os.walk(root / folder):
            for name in names:
                if not name.endswith(".pyc"):
                    path = os.path.join(parent, name)
                    found.append((os.path.relpath(path, root), *_identity(path)))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def _identity(path: str | None) -> tuple[int, ...]:
    """Return (size, mtime in ns) of a file, to detect changes; empty if there is no such file."""
    if path is None:
        return ()
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns


def _hardware(devices: Iterable[tuple[str, int | None]]) -> Any:
    import torch

    found: list[Any] = [platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu()]
    cuda = sorted((index or 0) for kind, index in devices if kind == "cuda")
    if cuda and torch.cuda.is_available():
        names = ("name", "major", "minor", "multi_processor_count", "total_memory")
        for index in dict.fromkeys(cuda):
            properties = torch.cuda.get_device_properties(index)
            found.append((index, *(getattr(properties, name) for name in names)))
        found.append(torch.cuda.current_device())
    return found


@functools.cache
def _cpu() -> tuple[str, ...]:
    """Return the model and the features of the CPU from /proc/cpuinfo."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return (platform.processor(),)
    first = text.split("\n\n", 1)[0]
    wanted = ("vendor_id", "model name", "flags", "features", "cpu part")
    lines = (line.partition(":") for line in first.splitlines())
    return tuple(
        " ".join(sorted(value.split())) if name.strip().lower() in ("flags", "features") else value
        for name, _, value in lines
        if name.strip().lower() in wanted
    )
