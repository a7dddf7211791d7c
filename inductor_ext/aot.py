"""Ahead-of-time compilation of exported programs into `.pt2` packages.

The front end is stock's, run inside an activation; what is ours is what surrounds it: options are
checked before the compile and not after, a missing compiler is said by name, the inputs' signature
is taken from the exported program, and the package appears at its path complete or not at all. It
is loaded by `inductor_ext.load` and by stock's loaders.
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
from inductor_ext.hooks.activate import activate, requested
from inductor_ext.settings import Settings
from inductor_ext.storage import artifact_store
from inductor_ext.toolchain import components, requirements

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from inductor_ext.cpp_wrapper.build.artifact import Artifact

__all__ = ["aoti_compile_and_package"]

_compiling = threading.RLock()
"""Inductor keeps kernels, and torch 2.11 its configuration, for the process: one compile at a time,
so that each gives what it gives alone."""


def aoti_compile_and_package(
    exported_program: ExportedProgram | Mapping[str, ExportedProgram],
    *,
    package_path: str | os.PathLike[str] | IO[bytes] | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
) -> str | IO[bytes]:
    """Compile an exported program, or several, and write them as a `.pt2` package.

    Takes what `torch._inductor.aoti_compile_and_package` takes, ours among `inductor_configs`, and
    never changes that mapping.

    Args:
        exported_program: made by `torch.export.export`, with its example inputs; or several of
            them by the names that they get in the package. One alone is named "model".
        package_path: where to write; a path that ends in .pt2, or a writable and seekable buffer.
            None chooses a path in Inductor's cache folder.
        inductor_configs: Inductor's options and ours by name.

    Returns:
        The package's path, or the buffer.

    Raises:
        exc.NotAnExportedProgramError, exc.BadPackagePathError, exc.BadWeightsFileError,
        exc.BadModelNameError, exc.UnknownOptionError, exc.BadOptionError,
        exc.UnsupportedTorchError, exc.UncheckableInputError, exc.MissingToolchainError: before
            anything is compiled or written. The second and third also where a path turns out
            later to be one that cannot be written, as with a disk that is full.
    """
    programs = _programs(exported_program)
    _check_path(package_path)
    ours, patches = options.split(None, inductor_configs)
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
    # An activation imports the compiler, which a package from the cache does not need.
    result = artifact_cache.compiled(programs, package_path, patches, settings, compile_)
    if isinstance(result, str):
        record = events.PackageRecord(
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
        # The name is a folder in the package.
        if not isinstance(name, str) or not name.replace("-", "_").replace(".", "_").isidentifier():
            raise exc.BadModelNameError(name=name)
    return programs


def _stock(
    programs: Mapping[str, ExportedProgram],
    package_path: str | os.PathLike[str] | IO[bytes] | None,
    patches: Mapping[str, Any],
) -> str | IO[bytes]:
    """What stock does: the extension is switched off."""
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
    """Compile one program; the files that a package of it holds."""
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
        # One of stock's passes folds single numbers, and the lowering writes short constants into
        # the code: also where the program changes them, reads them as numbers, for which it has to
        # have tensors, and where the code cannot hold them.
        keeping = {"always_keep_tensor_constants": True, "joint_graph_constant_folding": False}
        patches = {**patches, **keeping}
    if _folds(patches) and _changes_buffers(program):
        # Either takes buffers for constants, also those that a call changes.
        off = {"freezing": False, "aot_inductor.use_runtime_constant_folding": False}
        patches = {**patches, **off}
        events.warn_once(
            "state is not folded",
            f"{' and '.join(off)} are left out: a call of the program changes a buffer, and they "
            "would have it as it was exported in every call",
        )
    # Dumps a reproducer of what fails, if Inductor's settings ask for that.
    aot_inductor_minifier_wrapper(
        compile_module, program, inductor_configs={**patches, "aot_inductor.package": True}
    )
    return made


def _folds(patches: Mapping[str, Any]) -> bool:
    """Whether options ask for what is made of constants to be computed ahead of calls."""
    from torch._inductor import config

    options = {**config.get_config_copy(), **patches}
    return bool(options["freezing"] or options["aot_inductor.use_runtime_constant_folding"])


def _changes_buffers(program: ExportedProgram) -> bool:
    """Whether a call changes a buffer: a trace, for export says it of decomposed programs."""
    if not program.graph_signature.buffers and not program.constants:
        return False
    return bool(program.run_decompositions({}).graph_signature.buffers_to_mutate)


def _has_small_state(program: ExportedProgram) -> bool:
    """Whether the program may change a buffer of so few elements that it is taken for fixed, or
    reads a number of one.
    """
    import torch

    tensors = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    names = {*signature.buffers, *signature.lifted_tensor_constants}
    if not any(tensors[name].numel() <= 8 for name in names if name in tensors):
        return False
    # Which buffer an operator in place changes, through views and subgraphs, export does not say
    # before the program is decomposed.
    aten = torch.ops.aten
    return bool(signature.buffers_to_mutate) or any(
        getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        or node.target in (aten.item.default, aten._local_scalar_dense.default)
        for module in program.graph_module.modules()
        if hasattr(module, "graph")
        for node in module.graph.nodes
    )


def _has_few_numbers_of_float8(program: ExportedProgram) -> bool:
    """Whether there is a constant that would be written into code which cannot be made of it."""
    tensors = {**program.state_dict, **program.constants}.values()
    return any(
        value.numel() <= 8 and str(value.dtype).startswith("torch.float8")
        for value in tensors
        if hasattr(value, "numel")
    )


def _warn_of_unwritten_results(name: str, program: ExportedProgram) -> None:
    """Warn of a branch or a loop's body that returns memory which nothing in it writes.

    torch.export drops what only writes into its arguments there: a launch of a Triton kernel.
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
                        f"in model {name!r}, {path} returns the memory of {result.name} unwritten, "
                        "so its numbers mean nothing. If a Triton kernel writes it there, "
                        "torch.export has dropped the launch: make the kernel an operator "
                        "by torch.library.triton_op, and call that",
                    )


def _leave_out_constant_results(module: Any) -> None:
    """Let a module return None for results that are the same floats, bools and strings always.

    Inductor refuses them. Our loader knows their values from the signature; stock's gives None.
    """
    (output,) = module.graph.find_nodes(op="output")
    (results,) = output.args
    kept = tuple(None if isinstance(each, (float, bool, str)) else each for each in results)
    if kept != tuple(results):
        output.args = (kept,)
        module.recompile()


def _default_path(files: Mapping[str, list[Any]], artifacts: Mapping[str, Artifact]) -> str:
    """Beside the first model's library, or the source that it is to be made of.

    Its name is made of all that the package holds: the names of the files tell the code alone.
    """
    from inductor_ext.cpp_wrapper.build import artifact as build

    paths = [file for made in files.values() for file in made if isinstance(file, str)]
    (first, *_) = [path for path in paths if path.endswith((".so", ".cpp"))]
    content = [os.path.basename(path) for path in paths]
    for artifact in artifacts.values():
        content += build.digests(artifact.constants, artifact.plan)
    name = artifact_store.digest("\0".join(content).encode())
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
    # Inductor names the kernels' files after the kernels then, and keeps what it finds under a
    # name: in a folder that lives on, the kernels of the same model with other shapes.
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as folder:
        return _package_from(folder, programs, package_path, patches, settings)


def _only_sources(patches: Mapping[str, Any]) -> bool:
    """Whether the package is to hold sources, in a place of our choice until it is made."""
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
    """Compile and package, with the models' files below `folder`, or in Inductor's if it is None.

    `folder` may be gone afterwards.
    """
    from torch._inductor.runtime.runtime_utils import cache_dir

    from inductor_ext.cpp_wrapper.build import artifact as build
    from inductor_ext.cpp_wrapper.codegen import cpp_wrapper
    from inductor_ext.cpp_wrapper.package import write_package
    from inductor_ext.cpp_wrapper.signature import from_export

    signatures = {name: from_export.signature(program) for name, program in programs.items()}
    for name, program in programs.items():
        _warn_of_unwritten_results(name, program)
    files: dict[str, list[Any]] = {}
    artifacts: dict[str, Artifact] = {}
    plans: dict[str, events.MemoryPlanRecord] = {}
    with _compiling:
        for name, program in programs.items():
            with (
                build.collecting() as collected,
                cpp_wrapper.signature_given(signatures[name]),
                from_export.without_preferences(program),
                events.capture(events.MemoryPlanRecord, this_thread=True) as records,
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
        # Options that only stock's code generation serves.
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
    """As `artifact_store.publish`, but that what the system refuses is an error of ours."""
    try:
        with artifact_store.publish(path) as temporary:
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
    """Name of the folder in the package: the file's, as torch's writer has it."""
    if not isinstance(path, (str, os.PathLike)):
        return "archive"
    return os.path.basename(os.fspath(path)).removesuffix(".pt2") or "archive"


def _compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    # What Inductor asks compilers for is answered by gcc with how it was configured.
    return components.probe("cxx").version or os.path.basename(get_cpp_compiler())


def _device_types(program: ExportedProgram) -> set[str]:
    return requirements.device_types(node.meta.get("val") for node in program.graph.nodes)


def _check_path(path: str | os.PathLike[str] | IO[bytes] | None) -> None:
    if path is None:
        return
    if not isinstance(path, (str, os.PathLike)):
        if not (isinstance(path, (io.IOBase, IO)) and path.writable() and path.seekable()):
            raise exc.BadPackagePathError(path=path, why="it is no path and no writable buffer")
        return
    text = os.fspath(path)
    if not text.endswith(".pt2"):
        raise exc.BadPackagePathError(path=text, why="its name does not end in .pt2")
    if why := _unwritable(text):
        raise exc.BadPackagePathError(path=text, why=why)


def _unwritable(path: str) -> str | None:
    """Why a file cannot be put there, as far as that is seen before."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        return "a folder stands there"
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist"
    if not os.access(folder, os.W_OK):
        return f"the folder {folder} is not writable"
    return None
