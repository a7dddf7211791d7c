"""Ahead-of-time compilation of exported programs into `.pt2` packages.

Uses Inductor's AOT front end with the extension activated. The extension adds: options are
validated before the compile, a missing compiler is reported by name, the input signature is taken
from the exported program, and the package is written atomically (complete or not at all). Both
`inductor_ext.load` and torch's own loaders can load the package. Governed by the settings `aot_*`
and `artifact_cache*`.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from inductor_ext import config, events, exc, options
from inductor_ext.cpp_wrapper.cache import cache as artifact_cache
from inductor_ext.cpp_wrapper.records import PackageRecord
from inductor_ext.hooks.activate import activate, requested
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.settings import Settings
from inductor_ext.storage.atomic import atomic_write
from inductor_ext.storage.digest import hash_buffer
from inductor_ext.toolchain import components, requirements

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from inductor_ext.cpp_wrapper.build.artifact import Artifact

__all__ = ["aoti_compile_and_package"]

_compiling = threading.RLock()
"""Serializes compiles. Inductor keeps kernels, and torch 2.11 also keeps its configuration, per
process, so that concurrent compiles could affect each other's results."""


def aoti_compile_and_package(
    exported_program: ExportedProgram | Mapping[str, ExportedProgram],
    *,
    package_path: str | os.PathLike[str] | IO[bytes] | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
) -> str | IO[bytes]:
    """Compile one or several exported programs and write them as a `.pt2` package.

    Takes the same arguments as `torch._inductor.aoti_compile_and_package`; `inductor_configs` may
    also contain settings of the extension. The mapping is never modified.

    Args:
        exported_program: a program returned by `torch.export.export`, including its example
            inputs; or a mapping from model name in the package to program. The model name of a
            single program is "model".
        package_path: a path that ends in .pt2, or a writable and seekable binary buffer. Default:
            None, which chooses a path in Inductor's cache folder.
        inductor_configs: options of Inductor and settings of the extension by name (see
            `inductor_ext.list_options`). Default: None.

    Returns:
        The path of the package, or the buffer.

    Raises:
        exc.NotAnExportedProgramError, exc.BadPackagePathError, exc.BadWeightsFileError,
        exc.BadModelNameError, exc.UnknownOptionError, exc.BadOptionError,
        exc.UnsupportedTorchError, exc.UncheckableInputError, exc.MissingToolchainError: before
            anything is compiled or written. BadPackagePathError and BadWeightsFileError are also
            raised later if writing fails, for example because the disk is full.
        exc.UnsupportedLevelError: this machine cannot compile for the setting `aot_isa`. Raised
            before anything is compiled.
        exc.SharedWeightsFileError: the setting `aot_weights_file` was given for several programs.
            Raised after the compile.
    """
    programs = _programs(exported_program)
    _check_path(package_path)
    ours, patches = options.split_options(None, inductor_configs)
    settings = config.snapshot({**(requested() or {}), **ours})
    if settings.aot_weights_file is not None and (why := _unwritable(settings.aot_weights_file)):
        raise exc.BadWeightsFileError(path=settings.aot_weights_file, why=why)
    if not settings.enabled:
        with activate(**ours):
            return _stock(programs, package_path, patches)

    def compile_(path: str | os.PathLike[str] | IO[bytes] | None) -> str | IO[bytes]:
        with activate(**ours):
            devices = set().union(*map(_device_types, programs.values()))
            missing = requirements.missing("aot", devices)
            if missing is not None:
                missing.require()
            return _package(programs, path, patches, settings)

    start = time.perf_counter()
    # Activate only on a cache miss: activation imports the compiler, which a hit does not need.
    result = artifact_cache.compile_or_copy(programs, package_path, patches, settings, compile_)
    if isinstance(result, str):
        record = PackageRecord(
            path=result,
            bytes=os.path.getsize(result),
            seconds=round(time.perf_counter() - start, 3),
        )
        events.emit(record, event_log=settings.event_log)
    return result


def _programs(given: Any) -> dict[str, ExportedProgram]:
    from torch.export import ExportedProgram

    programs = dict(given) if isinstance(given, Mapping) and given else {"model": given}
    for name, program in programs.items():
        if not isinstance(program, ExportedProgram):
            raise exc.NotAnExportedProgramError(found=type(program).__name__)
        # The name becomes a folder in the package.
        if not isinstance(name, str) or not name.replace("-", "_").replace(".", "_").isidentifier():
            raise exc.BadModelNameError(name=name)
    return programs


def _stock(
    programs: Mapping[str, ExportedProgram],
    package_path: str | os.PathLike[str] | IO[bytes] | None,
    patches: Mapping[str, Any],
) -> str | IO[bytes]:
    """Compile and package with Inductor alone; used if the setting `enabled` is False."""
    import torch._inductor
    from torch._inductor.package import package_aoti

    if len(programs) == 1 and "model" in programs:
        made: str | IO[bytes] = torch._inductor.aoti_compile_and_package(
            programs["model"], package_path=package_path, inductor_configs=dict(patches)
        )
        return made
    files = {name: _files(program, patches) for name, program in programs.items()}
    path = package_path if package_path is not None else _default_path(files, {})
    return package_aoti(path, files)  # type: ignore[return-value]


def _files(program: ExportedProgram, patches: Mapping[str, Any]) -> list[Any]:
    """Compile one program and return the files that go into its package."""
    import torch._inductor
    from torch._inductor.debug import aot_inductor_minifier_wrapper

    made: list[Any] = []

    def compile_module(module: Any, args: Any, kwargs: Any = None, **rest: Any) -> str:
        _leave_out_constant_results(module)
        files = torch._inductor.aot_compile(
            module, args, kwargs or {}, options={**rest["inductor_configs"]}
        )
        assert isinstance(files, list)
        made[:] = files
        return ""

    if _has_small_state(program) or _has_few_numbers_of_float8(program):
        # An Inductor pass folds one-element constants, and the lowering inlines short constants
        # into the code. Both are wrong if the program mutates such a tensor, reads it as a scalar
        # (which needs a tensor), or if its dtype has no literals in the generated code.
        keeping = {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False}
        patches = {**patches, **keeping}
    if _folds(patches) and _changes_buffers(program):
        # Both options treat buffers as constants, including buffers that a call mutates.
        off = {"freezing": False, "aot_inductor.use_runtime_constant_folding": False}
        patches = {**patches, **off}
        events.warn_once(
            "state is not folded",
            f"{' and '.join(off)} are ignored: the program mutates a buffer, and these options "
            "would reset it to its exported value in every call",
        )
    # Dumps a reproducer if the compile fails and Inductor's config requests one.
    aot_inductor_minifier_wrapper(
        compile_module, program, inductor_configs={**patches, "aot_inductor.package": True}
    )
    return made


def _folds(patches: Mapping[str, Any]) -> bool:
    """Whether the options enable constant folding (freezing or runtime constant folding)."""
    from torch._inductor import config

    options = {**config.get_config_copy(), **patches}
    return bool(options["freezing"] or options["aot_inductor.use_runtime_constant_folding"])


def _changes_buffers(program: ExportedProgram) -> bool:
    """Whether a call mutates a buffer.

    Decomposes the program (a trace), because export reports mutations of decomposed programs only.
    """
    if not program.graph_signature.buffers and not program.constants:
        return False
    return bool(program.run_decompositions({}).graph_signature.buffers_to_mutate)


def _has_small_state(program: ExportedProgram) -> bool:
    """Whether the program may mutate a buffer that is small enough (up to 8 elements) for Inductor
    to inline as a constant, or reads a scalar from one.
    """
    import torch

    tensors = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    names = {*signature.buffers, *signature.lifted_tensor_constants}
    if not any(tensors[name].numel() <= 8 for name in names if name in tensors):
        return False
    # Before decomposition, export does not report which buffer an in-place operator mutates
    # (through views and subgraphs). Therefore any mutating operator counts.
    aten = torch.ops.aten
    return bool(signature.buffers_to_mutate) or any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        or node.target in (aten.item.default, aten._local_scalar_dense.default)
        for module in program.graph_module.modules()
        if hasattr(module, "graph")
        for node in module.graph.nodes
    )


def _has_few_numbers_of_float8(program: ExportedProgram) -> bool:
    """Whether a float8 constant is small enough (up to 8 elements) for Inductor to inline.

    Inductor cannot print float8 literals.
    """
    tensors = {**program.state_dict, **program.constants}.values()
    return any(
        value.numel() <= 8 and str(value.dtype).startswith("torch.float8")
        for value in tensors
        if hasattr(value, "numel")
    )


def _warn_of_unwritten_results(name: str, program: ExportedProgram) -> None:
    """Warn if a branch or loop body returns a newly allocated tensor that nothing in it writes.

    In such subgraphs, torch.export drops operators that only write into their arguments: launches
    of user-defined Triton kernels.
    """
    for path, module in program.graph_module.named_modules():
        if not path or not hasattr(module, "graph"):
            continue
        for output in module.graph.find_nodes(op="output"):
            for result in output.all_input_nodes:
                fresh = str(result.target).startswith(("aten.empty", "aten.new_empty"))
                if fresh and len(result.users) == 1:
                    events.warn_once(
                        f"unwritten:{name}:{path}",
                        f"in model {name!r}, {path} returns {result.name} uninitialized. If a "
                        "Triton kernel should write it, torch.export has dropped the launch: "
                        "define an operator that launches the kernel with "
                        "torch.library.triton_op, and call that operator",
                    )


def _leave_out_constant_results(module: Any) -> None:
    """Replace constant float, bool and string results of a module by None.

    Inductor rejects them. `inductor_ext.load` restores the values from the signature; torch's own
    loader returns None for them.
    """
    (output,) = module.graph.find_nodes(op="output")
    (results,) = output.args
    kept = tuple(None if isinstance(result, (float, bool, str)) else result for result in results)
    if kept != tuple(results):
        output.args = (kept,)
        module.recompile()


def _default_path(files: Mapping[str, list[Any]], artifacts: Mapping[str, Artifact]) -> str:
    """Return a package path in the folder of the first model's library or C++ source.

    The file name is a digest over the whole package content. The names of the files alone depend
    on the code only, not on the weights.
    """
    from inductor_ext.cpp_wrapper.build import artifact as build

    paths = [file for made in files.values() for file in made if isinstance(file, str)]
    (first, *_) = [path for path in paths if path.endswith((".so", ".cpp"))]
    content = [os.path.basename(path) for path in paths]
    for artifact in artifacts.values():
        content += build.digests(artifact.constants, artifact.plan)
    name = hash_buffer("\0".join(content).encode())
    return os.path.join(os.path.dirname(first), f"{name}.pt2")


def _package(
    programs: Mapping[str, ExportedProgram],
    package_path: str | os.PathLike[str] | IO[bytes] | None,
    patches: Mapping[str, Any],
    settings: Settings,
) -> str | IO[bytes]:
    from inductor_ext.cpp_wrapper.build import cpu_target

    patches = {**cpu_target.inductor_options(settings.aot_isa), **patches}
    if not _only_sources(patches):
        return _package_from(None, programs, package_path, patches, settings)
    # In this mode, Inductor names kernel files after the kernels and reuses an existing file of
    # that name. In a persistent folder it would reuse kernels of the same model with other shapes.
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as folder:
        return _package_from(folder, programs, package_path, patches, settings)


def _only_sources(patches: Mapping[str, Any]) -> bool:
    """Whether the package holds sources only and the user has not chosen an output path."""
    from torch._inductor import config

    options = {**config.get_config_copy(), **patches}
    return bool(
        options["aot_inductor.package_cpp_only"] and not options["aot_inductor.output_path"]
    )


def _package_from(
    folder: str | None,
    programs: Mapping[str, ExportedProgram],
    package_path: str | os.PathLike[str] | IO[bytes] | None,
    patches: Mapping[str, Any],
    settings: Settings,
) -> str | IO[bytes]:
    """Compile and package, with the models' files in `folder`, or in Inductor's folder if None.

    The package does not refer to `folder`; the caller may delete it afterwards.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    from inductor_ext.cpp_wrapper.build import artifact as build
    from inductor_ext.cpp_wrapper.codegen import cpp_wrapper
    from inductor_ext.cpp_wrapper.package import write_package
    from inductor_ext.cpp_wrapper.signature import from_export
    from inductor_ext.cpp_wrapper.signature.guard_filter import ignore_performance_guards

    signatures = {name: from_export.derive_signature(program) for name, program in programs.items()}
    for name, program in programs.items():
        _warn_of_unwritten_results(name, program)
    files: dict[str, list[Any]] = {}
    artifacts: dict[str, Artifact] = {}
    plans: dict[str, MemoryPlanRecord] = {}
    with _compiling:
        for name, program in programs.items():
            with (
                build.collecting() as collected,
                cpp_wrapper.signature_given(signatures[name]),
                ignore_performance_guards(program),
                events.capture(MemoryPlanRecord, this_thread=True) as records,
            ):
                own = {"aot_inductor.output_path": os.path.join(folder, name)} if folder else {}
                files[name] = _files(program, {**patches, **own})
            if collected:
                artifacts[name] = collected[-1]
            if records:
                plans[name] = records[-1]
    path = package_path
    if path is None:
        path = _default_path(files, artifacts)
        if folder is not None:
            path = os.path.join(cache_dir(), os.path.basename(path))
    if len(artifacts) < len(files):
        # Some options are only supported by Inductor's own code generation.
        return _write_stock(path, files)
    with _opened(path) as file:
        write_package.write(
            file,
            _root(path),
            artifacts,
            options={**patches, **settings.non_default()},
            plans=plans,
            compiler=_compiler(),
            weights_file=settings.aot_weights_file,
        )
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else path


def _write_stock(path: str | os.PathLike[str] | IO[bytes], files: Any) -> str | IO[bytes]:
    from torch._inductor.package import package_aoti

    if not isinstance(path, (str, os.PathLike)):
        package_aoti(path, files)
        return path
    with _published(path) as temporary:
        package_aoti(temporary, files)
    return os.fspath(path)


@contextlib.contextmanager
def _published(path: str | os.PathLike[str]) -> Iterator[str]:
    """Like `atomic_write`, but raise `exc.BadPackagePathError` instead of OSError."""
    try:
        with atomic_write(path) as temporary:
            yield temporary
    except OSError as error:
        why = error.strerror or str(error)
        raise exc.BadPackagePathError(path=os.fspath(path), why=why) from error


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    if not isinstance(path, (str, os.PathLike)):
        yield path
        return
    with _published(path) as temporary, open(temporary, "wb") as file:
        yield file


def _root(path: str | os.PathLike[str] | IO[bytes]) -> str:
    """Return the package's root folder: the file name without .pt2, as torch's writer uses."""
    if not isinstance(path, (str, os.PathLike)):
        return "archive"
    return os.path.basename(os.fspath(path)).removesuffix(".pt2") or "archive"


def _compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    # Inductor's own compiler query makes gcc print its build configuration, not its version.
    return components.probe("cxx").version or os.path.basename(get_cpp_compiler())


def _device_types(program: ExportedProgram) -> set[str]:
    return requirements.device_types(node.meta.get("val") for node in program.graph.nodes)


def _check_path(path: str | os.PathLike[str] | IO[bytes] | None) -> None:
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        if not (isinstance(path, (io.IOBase, IO)) and path.writable() and path.seekable()):
            raise exc.BadPackagePathError(
                path=path, why="it is neither a path nor a writable, seekable buffer"
            )
        return
    text = os.fspath(path)
    if not text.endswith(".pt2"):
        raise exc.BadPackagePathError(path=text, why="its name does not end in .pt2")
    if why := _unwritable(text):
        raise exc.BadPackagePathError(path=text, why=why)


def _unwritable(path: str) -> str | None:
    """Return why a file cannot be written to `path`, as far as can be checked in advance."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        return "it is a folder"
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist"
    if not os.access(folder, os.W_OK):
        return f"the folder {folder} is not writable"
    return None
