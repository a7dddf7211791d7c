"""The cache key of a compiled model: a digest of everything that its content depends on.

It covers the exported program including the content of its weights, the settings, Inductor's
options, torch, the compilers, the machine, and the state of the process. Two processes that export
the same model get the same key (see `fingerprint`).

The key fails closed. A value that no rule can serialize or identify (a pass without a uuid, a
script object, a lowering from outside torch and the extension) means that there is no key, for a
reason that `UnkeyableError` states; such a program is compiled each time.

Deliberately excluded: stack traces, which only affect comments in the generated code, and the
values of example tensors, because a compile sees only their shapes. Imports no parts of Inductor
that torch.export does not import.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from inductor_ext import _compat, numerics
from inductor_ext.cpp_wrapper.cache.fingerprint import (
    Serializer,
    UnkeyableError,
    describe_type,
    is_known_code,
    qualified_name,
    serialize_tree_spec,
    trusted_name,
)
from inductor_ext.hooks import lowering_table
from inductor_ext.settings import Settings
from inductor_ext.storage import digest
from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes.common import package_version

if TYPE_CHECKING:
    from torch.export import ExportedProgram

IRRELEVANT_OPTIONS = frozenset(
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


def compute_key(
    program: ExportedProgram,
    settings: Settings,
    patches: Mapping[str, Any],
    extra: Iterable[Any] = (),
) -> str:
    """Compute the cache key of compiling a program in the current process: 64 hexadecimal digits.

    Keys are equal only if the compiled models are interchangeable.

    Args:
        program: the exported program.
        settings: settings of the extension for the compile.
        patches: options of Inductor for the compile, applied on top of the current config.
        extra: plain values that the result also depends on. Default: none.

    Raises:
        UnkeyableError: there is no key; the text says why, as a clause without a full stop.
    """
    parts = ingredients(program, settings, patches, extra)
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def ingredients(
    program: ExportedProgram,
    settings: Settings,
    patches: Mapping[str, Any],
    extra: Iterable[Any] = (),
) -> dict[str, Any]:
    """Return what `compute_key` digests, by category, as nested tuples of plain values.

    To find out why two keys differ, compare their ingredients. Arguments: see `compute_key`.

    Raises:
        UnkeyableError: see `compute_key`.
    """
    serializer = Serializer()
    return {
        "program": _serialize_program(serializer, program),
        "weights": _serialize_weights(serializer, program),
        "symbols": [_serialize_symbols(env) for env in serializer.shape_envs],
        "settings": (
            digest.source_key(),
            settings.cache_key(),
            lowering_table.registry_key(own=False),
        ),
        "options": _serialize_options(serializer, patches),
        "foreign": _list_foreign_code(),
        "state": _read_process_state(serializer),
        "environment": _read_environment(),
        "software": _describe_software(),
        "hardware": _describe_hardware(serializer.devices),
        "extra": serializer.serialize(tuple(extra)),
    }


def _serialize_program(serializer: Serializer, program: Any) -> Any:
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
        shape = serializer.serialize_tensor(example) if isinstance(example, FakeTensor) else None
        shapes.append(shape or _serialize_example(serializer, example))
    return (
        serializer.serialize_graph(program.graph_module),
        serializer.serialize(program.graph_signature),
        serializer.serialize((program.call_spec.in_spec, program.call_spec.out_spec, names)),
        serializer.serialize((guards, ranges)),
        (shapes, serialize_tree_spec(structure)),
        [trusted_name(verifier) for verifier in program.verifiers],
    )


def _serialize_example(serializer: Serializer, value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return serializer.serialize(value)
    serializer.devices.add((value.device.type, value.device.index))
    layout = (
        (value.size(), value.stride(), value.storage_offset())
        if value.layout is torch.strided
        else ()
    )
    return (
        qualified_name(type(value)),
        str(value.dtype),
        str(value.device),
        str(value.layout),
        serializer.serialize(layout),
    )


def _serialize_weights(serializer: Serializer, program: Any) -> Any:
    """Serialize parameters, buffers and constants: their content and which of them share memory."""
    return serializer.serialize((dict(program.state_dict), dict(program.constants)))


def _serialize_symbols(env: Any) -> Any:
    """Serialize the shape environment: ranges, size hints, guards and asserts of the symbols."""

    def table(name: str) -> list[tuple[str, str]]:
        items = (getattr(env, name, None) or {}).items()
        return sorted((str(symbol), str(value)) for symbol, value in items)

    asserts = {
        str(symbol): [(str(condition.expr), str(condition.msg)) for condition in entries]
        for symbol, entries in env.deferred_runtime_asserts.items()
    }
    return (
        table("var_to_range"),
        table("replacements"),
        # Names of sizes, which signatures show.
        table("source_name_to_debug_name"),
        # The size hints, which determine the tuning of kernels.
        sorted((str(symbol), str(value)) for symbol, value in _compat.symbol_hints(env).items()),
        [table(name) for name in ("unbacked_var_to_val", "var_to_hint_override")],
        [str(guard.expr) for guard in env.guards],
        sorted(asserts.items()),
        sorted(map(str, getattr(env, "divisible", ()))),
        sorted(map(str, getattr(env, "size_like", ()))),
    )


def _serialize_options(serializer: Serializer, patches: Mapping[str, Any]) -> Any:
    import torch._functorch.config
    import torch._inductor.config
    import torch.compiler.config
    import torch.fx.experimental._config

    options = []
    modules = (torch._inductor.config, torch._functorch.config, torch.fx.experimental._config)
    for index, module in enumerate(modules):
        values: dict[str, Any] = module.get_config_copy()
        entries = module._config
        if index == 0:
            values |= patches
        for name, value in sorted(values.items()):
            hidden = name.startswith("trace.") and name not in _RELEVANT_TRACE_OPTIONS
            if index == 0 and (hidden or name in IRRELEVANT_OPTIONS):
                continue
            if name.endswith("cutlass_dir") and value == entries[name].default:
                # For XPU, the default is a folder relative to the working directory.
                continue
            if name == "aot_inductor.metadata" and value:
                # Inductor adds its own entries to the user's and leaves them for later compiles.
                value = {k: v for k, v in value.items() if not k.startswith("AOTI_")}
            options.append(
                (index, name, _serialize_option(serializer, name, value, entries[name].default))
            )
    # The other options of torch.compiler.config concern caches or torch.compile only.
    for name in ("cache_key_tag", "compile_on_one_rank"):
        options.append((len(modules), name, getattr(torch.compiler.config, name, None)))
    return options


def _serialize_option(serializer: Serializer, name: str, value: Any, default: Any) -> Any:
    if isinstance(value, type) and hasattr(value, "uuid"):
        value = value()
    if callable(getattr(value, "uuid", None)):
        identity = value.uuid()
        if identity is None:
            raise UnkeyableError(f"the option {name} is a pass whose uuid is None")
        return ("uuid", qualified_name(type(value)), serializer.serialize(identity))
    if isinstance(value, (list, tuple)):
        return [_serialize_option(serializer, name, item, None) for item in value]
    try:
        return serializer.serialize(value)
    except UnkeyableError:
        if value is not None and value is default:
            return ("default",)
        raise UnkeyableError(
            f"the option {name} is {describe_type(value)} without a uuid"
        ) from None


def _list_foreign_code() -> Any:
    """Return keys of third-party code registered with Inductor. Skips modules not yet imported.

    Raises:
        UnkeyableError: there is third-party code without a uuid.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    for operator, function in dict(getattr(lowering, "lowerings", {})).items():
        if not is_known_code(function):
            raise UnkeyableError(f"{operator} has a lowering from {qualified_name(function)}")
    decomposition = sys.modules.get("torch._inductor.decomposition")
    for operator, function in dict(getattr(decomposition, "decompositions", {})).items():
        if not is_known_code(function):
            raise UnkeyableError(f"{operator} has a decomposition from {qualified_name(function)}")
    common = sys.modules.get("torch._inductor.codegen.common")
    for device, backend in dict(getattr(common, "device_codegens", {})).items():
        if not all(is_known_code(value) for value in vars(backend).values() if callable(value)):
            raise UnkeyableError(f"the device {device} has a backend from outside torch")
    passes = []
    for device, custom in dict(getattr(common, "custom_backend_passes", {})).items():
        if custom is not None:
            identity = custom.uuid() if hasattr(custom, "uuid") else None
            if identity is None:
                raise UnkeyableError(f"the device {device} has a pass without a uuid")
            passes.append((device, repr(identity)))
    return passes


def _read_process_state(serializer: Serializer) -> Any:
    """Return the state of this process and thread that affects tracing or lowering."""
    import torch
    from torch.utils import _python_dispatch

    if _python_dispatch._get_current_dispatch_mode_stack():
        raise UnkeyableError("a torch dispatch mode is active")
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
        # `allow_tf32` raises an error if these differ.
        (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),  # type: ignore[attr-defined]
        mkldnn.is_available(),
        torch._C._get_mkldnn_enabled(),
        torch.get_num_threads(),
    )
    return serializer.serialize(
        (torch.get_default_dtype(), torch.get_default_device(), autocast, flags)
    )


def _read_environment() -> list[tuple[str, str]]:
    return sorted(
        (name, value)
        for name, value in os.environ.items()
        if (name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES))
        and name not in _IRRELEVANT_VARIABLES
    )


def _describe_software() -> Any:
    import torch

    distributions = [
        (name, version)
        for name in ("torch", "triton", "sympy", "nvidia-cutlass")
        if (version := package_version(name)) is not None
    ]
    compiler = components.probe("cxx")
    return (
        sys.version,
        platform.libc_ver(),
        distributions,
        (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip),
        identify_torch_files(),
        (compiler.version, compiler.path, _file_identity(compiler.path)),
    )


@functools.cache
def identify_torch_files() -> str:
    """Return a digest over names, sizes and mtimes of torch's files that generate or enter code.

    The version would suffice except for a torch under development. mtimes are used because reading
    the files takes 0.8 s.
    """
    root = _compat.torch_folder()
    folders = ["_inductor", "_functorch", "_decomp", "_refs", "_prims", "_export", "export", "fx"]
    folders += ["_higher_order_ops", "include/torch/csrc/inductor", "include/torch/headeronly"]
    files = []
    for folder in folders:
        for parent, _, names in os.walk(root / folder):
            for name in names:
                if not name.endswith(".pyc"):
                    path = os.path.join(parent, name)
                    files.append((os.path.relpath(path, root), *_file_identity(path)))
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()


def _file_identity(path: str | None) -> tuple[int, ...]:
    """Return (size, mtime in ns) of a file, to detect changes; empty if there is no such file."""
    if path is None:
        return ()
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_size, status.st_mtime_ns


def _describe_hardware(devices: Iterable[tuple[str, int | None]]) -> Any:
    import torch

    parts: list[Any] = [platform.machine(), torch.backends.cpu.get_cpu_capability(), identify_cpu()]
    cuda = sorted((index or 0) for kind, index in devices if kind == "cuda")
    if cuda and torch.cuda.is_available():
        names = ("name", "major", "minor", "multi_processor_count", "total_memory")
        for index in dict.fromkeys(cuda):
            properties = torch.cuda.get_device_properties(index)
            parts.append((index, *(getattr(properties, name) for name in names)))
        parts.append(torch.cuda.current_device())
    return parts


@functools.cache
def identify_cpu() -> tuple[str, ...]:
    """Return the model and the features of the CPU from /proc/cpuinfo."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return (platform.processor(),)
    first = text.split("\n\n", 1)[0]
    fields = ("vendor_id", "model name", "flags", "features", "cpu part")
    lines = (line.partition(":") for line in first.splitlines())
    return tuple(
        " ".join(sorted(value.split())) if name.strip().lower() in ("flags", "features") else value
        for name, _, value in lines
        if name.strip().lower() in fields
    )
