"""Ahead-of-time compilation of exported programs into `.pt2` packages.

Uses Inductor's AOT front end with the extension activated. The extension adds: options are
validated before the compile, a missing compiler is reported by name, the input signature is taken
from the exported program, and the package is written atomically (complete or not at all). Both
`inductor_ext.load` and torch's own loaders can load the package. Governed by the settings `aot_*`
and `artifact_cache*`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from inductor_ext import _compat, config, events, exc, options, progress
from inductor_ext import targets as named_targets
from inductor_ext.cpp_wrapper import program_on_gpu, program_workarounds
from inductor_ext.cpp_wrapper.cache import cache as artifact_cache
from inductor_ext.cpp_wrapper.package import output_path
from inductor_ext.cpp_wrapper.package.output_path import PackagePath
from inductor_ext.cpp_wrapper.records import PackageRecord
from inductor_ext.hooks import context
from inductor_ext.hooks.activate import activate, requested
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.settings import Settings
from inductor_ext.targets import Target
from inductor_ext.toolchain import components, requirements

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from inductor_ext.cpp_wrapper.build.artifact import Artifact
    from inductor_ext.cpp_wrapper.package.build_results import Build
    from inductor_ext.cpp_wrapper.signature.signature import Signature

_Names = Mapping[str, Mapping[str, str]]
"""Names of dynamic sizes by symbol, by model name."""

_compiling = threading.RLock()
"""Serializes compiles. Inductor keeps kernels, and torch 2.11 also its options, per process.
Concurrent compiles could affect each other's results."""


def aoti_compile_and_package(
    exported_program: ExportedProgram | Mapping[str, ExportedProgram],
    *,
    package_path: str | os.PathLike[str] | IO[bytes] | None = None,
    inductor_configs: Mapping[str, Any] | None = None,
    targets: Sequence[str] | None = None,
    cpu_targets: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
) -> str | IO[bytes]:
    """Compile one or several exported programs and write them as a `.pt2` package.

    Takes the arguments of `torch._inductor.aoti_compile_and_package`, targets, and names of dynamic
    sizes; `inductor_configs` may also contain settings of the extension. The mapping is never
    modified.

    Args:
        exported_program: a program returned by `torch.export.export`, including its example
            inputs; or a mapping from model name to program. A single program is named "model".
        package_path: a path that ends in .pt2, or a writable and seekable binary buffer. Default:
            None, which chooses a path in Inductor's cache folder.
        inductor_configs: options by name, see `inductor_ext.list_options`. Default: None.
        targets: GPUs to compile for ("sm_90", "H100"), and "ptx" for others, also for a program on
            the CPU. Default: None, this machine.
        cpu_targets: CPU levels to compile for ("x86-64-v3"). Default: None, this machine.
        dynamic_shapes: what was passed to `torch.export.export`, by model name if
            `exported_program` is a mapping. Only the names of its `Dim`s are used, in signatures
            and errors. Default: None, the names that the program has. A program that was saved and
            loaded has none.

    Returns:
        The path of the package, or the buffer.

    Raises:
        exc.NotAnExportedProgramError: before anything is compiled or written, and so are
            BadModelNameError, UnknownOptionError, BadOptionError, BadArgumentError,
            UnsupportedTorchError, UncheckableInputError, UnserializableClassError,
            MissingToolchainError, UnsupportedLevelError, UnknownTargetError and
            UnsupportedTargetError.
        exc.BadPackagePathError: likewise, and later if writing fails, for example because the disk
            is full; BadWeightsFileError likewise.
        exc.UnrecordableSelfTestError: before the compile, if `aot_self_test` is set.
        exc.SharedWeightsFileError: after the compile, if `aot_weights_file` is set for several
            programs.
        exc.TargetMismatchError: after the compile, if two targets cannot share a package.
    """
    programs = _check_programs(exported_program)
    selected = named_targets.parse(targets, cpu_targets)
    names = _read_dim_names(programs, dynamic_shapes, isinstance(exported_program, Mapping))
    output_path.check_package_path(package_path)
    # Options that are per process would also get into another compile's key of the artifact cache.
    with _compiling if _compat.options_are_per_process() else contextlib.nullcontext():
        return _compile_or_copy(programs, package_path, inductor_configs, selected, names)


def _compile_or_copy(
    programs: Mapping[str, ExportedProgram],
    package_path: PackagePath | None,
    inductor_configs: Mapping[str, Any] | None,
    targets: Sequence[Target],
    names: _Names,
) -> str | IO[bytes]:
    """Compile checked programs into a package, or copy it from the cache."""
    extension_options, patches = options.split_options(None, inductor_configs)
    settings = config.snapshot({**(requested() or {}), **extension_options})
    output_path.check_weights_path(settings.aot_weights_file)
    named_targets.check(targets, _device_types(programs), patches, settings)
    if not settings.enabled:
        with activate(**extension_options):
            return _package_with_inductor(programs, package_path, patches)

    def compile_(path: PackagePath | None) -> str | IO[bytes]:
        text = "compiling a package"
        with (
            activate(**extension_options),
            progress.stage(text, shown=settings.progress),
            events.timed("compile_package"),
        ):
            if not targets:
                _require_toolchain(programs)
            return _package(programs, path, patches, settings, targets, names)

    def choices_key(program: ExportedProgram) -> Any:
        from inductor_ext.lowerings.graph import post_grad_pass

        if not targets:
            return names, post_grad_pass.cache_key(settings, program.graph_module)
        return names, named_targets.cache_key(targets, settings)

    start = time.perf_counter()
    # Activate only on a cache miss: activation imports the compiler, which a hit does not need.
    result = artifact_cache.compile_or_copy(
        programs, package_path, patches, settings, compile_, choices_key
    )
    if isinstance(result, str):
        seconds = round(time.perf_counter() - start, 3)
        record = PackageRecord(path=result, bytes=os.path.getsize(result), seconds=seconds)
        events.emit(record, event_log=settings.event_log)
    return result


def _read_dim_names(
    programs: Mapping[str, ExportedProgram], dynamic_shapes: Any, several: bool
) -> _Names:
    if dynamic_shapes is None:
        return {}
    from inductor_ext.cpp_wrapper.signature import given_shapes

    return given_shapes.read_names_by_model(programs, dynamic_shapes, several=several)


def _check_programs(argument: Any) -> dict[str, ExportedProgram]:
    from torch.export import ExportedProgram

    is_mapping = isinstance(argument, Mapping) and argument
    programs = dict(argument) if is_mapping else {"model": argument}
    for name, program in programs.items():
        if not isinstance(program, ExportedProgram):
            empty = isinstance(program, Mapping) and not program
            actual = "an empty mapping" if empty else type(program).__name__
            raise exc.NotAnExportedProgramError(actual=actual)
        # The name becomes a folder in the package.
        if not isinstance(name, str) or not name.replace("-", "_").replace(".", "_").isidentifier():
            raise exc.BadModelNameError(name=name)
    return programs


def _package_with_inductor(
    programs: Mapping[str, ExportedProgram],
    package_path: PackagePath | None,
    patches: Mapping[str, Any],
) -> str | IO[bytes]:
    """Compile and package with Inductor alone; used if the setting `enabled` is False."""
    import torch._inductor
    from torch._inductor.package import package_aoti

    if len(programs) == 1 and "model" in programs:
        result: str | IO[bytes] = torch._inductor.aoti_compile_and_package(
            programs["model"], package_path=package_path, inductor_configs=dict(patches)
        )
        return result
    files = {name: _compile(program, patches) for name, program in programs.items()}
    path = package_path if package_path is not None else output_path.choose_path(files, {})
    return package_aoti(path, files)  # type: ignore[return-value]


def _compile(program: ExportedProgram, patches: Mapping[str, Any]) -> list[Any]:
    """Compile one program and return the files that go into its package."""
    import torch._inductor
    from torch._inductor.debug import aot_inductor_minifier_wrapper

    from inductor_ext.hooks import features

    # One of them is needed before the scope of the compile: the program becomes a module.
    features.install_hooks()
    output: list[Any] = []

    def compile_module(module: Any, args: Any, kwargs: Any = None, **rest: Any) -> str:
        program_workarounds.remove_constant_results(module)
        kwargs, values = kwargs or {}, None
        if context.current().target_gpu is not None:
            args, kwargs, values = program_on_gpu.move_module(module, args, kwargs)
        with context.enter(constant_values=values):
            files = torch._inductor.aot_compile(
                module, args, kwargs, options={**rest["inductor_configs"]}
            )
        assert isinstance(files, list)
        output[:] = files
        return ""

    patches = program_workarounds.adjust_options(program, patches)
    # Dumps a reproducer if the compile fails and Inductor's config requests one.
    aot_inductor_minifier_wrapper(
        compile_module, program, inductor_configs={**patches, "aot_inductor.package": True}
    )
    return output


def _package(
    programs: Mapping[str, ExportedProgram],
    package_path: PackagePath | None,
    patches: Mapping[str, Any],
    settings: Settings,
    targets: Sequence[Target],
    names: _Names,
) -> str | IO[bytes]:
    from inductor_ext.cpp_wrapper.build import cpu_target

    if targets:
        return _package_from(None, programs, package_path, patches, settings, names, targets)
    patches = {**cpu_target.inductor_options(settings.aot_isa), **patches}
    if not _has_only_sources(patches):
        return _package_from(None, programs, package_path, patches, settings, names)
    # In this mode, Inductor names kernel files after the kernels and reuses an existing file of
    # that name. In a persistent folder it would reuse kernels of the same model with other shapes.
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as folder:
        return _package_from(folder, programs, package_path, patches, settings, names)


def _has_only_sources(patches: Mapping[str, Any]) -> bool:
    """Whether the package holds sources only and the user has not chosen an output path."""
    from torch._inductor import config

    options = {**config.get_config_copy(), **patches}
    return bool(
        options["aot_inductor.package_cpp_only"] and not options["aot_inductor.output_path"]
    )


def _package_from(
    folder: str | None,
    programs: Mapping[str, ExportedProgram],
    package_path: PackagePath | None,
    patches: Mapping[str, Any],
    settings: Settings,
    names: _Names,
    targets: Sequence[Target] = (),
) -> str | IO[bytes]:
    """Compile and package, with the models' files in `folder`, or in Inductor's folder if None.

    The package does not refer to `folder`; the caller may delete it afterwards.
    """
    from inductor_ext.cpp_wrapper.package.write_package import write_package
    from inductor_ext.cpp_wrapper.signature import from_export

    with _compiling:
        self_tests = _record_self_tests(programs) if settings.aot_self_test else None
        signatures = {
            name: from_export.derive_signature(program) for name, program in programs.items()
        }
        if targets and targets[0].gpu is not None:
            signatures = {
                name: program_on_gpu.move_signature(signature)
                for name, signature in signatures.items()
            }
        for name, program in programs.items():
            program_workarounds.warn_of_unwritten_results(name, program)
        builds: list[Build] = []
        files: dict[str, list[Any]] = {}
        for target in targets or (None,):
            with _target_scope(target, patches, settings) as (options, values):
                build, files = _build(folder, programs, signatures, names, options, values, target)
                builds.append(build)
    artifacts = builds[0].artifacts
    path = _default_path(files, artifacts, folder) if package_path is None else package_path
    if len(artifacts) < len(files):
        # Some options are only supported by Inductor's own code generation.
        return _write_default_package(path, files)
    with (
        progress.stage("writing the package"),
        events.timed("write_package"),
        output_path.open_for_writing(path) as file,
    ):
        write_package(
            file,
            output_path.root_folder(path),
            builds,
            programs=programs,
            compiler=_describe_compiler(),
            weights_file=settings.aot_weights_file,
            self_tests=self_tests,
            find_checksums=functools.partial(_find_checksums, settings),
        )
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else path


@contextlib.contextmanager
def _target_scope(
    target: Target | None, patches: Mapping[str, Any], settings: Settings
) -> Iterator[tuple[Mapping[str, Any], Settings]]:
    """Compile for a target; yields Inductor's options and the settings."""
    if target is None:
        yield patches, settings
        return
    values = dataclasses.replace(settings, **target.settings())
    with activate(**target.settings()), target.scope():
        yield {**patches, **target.options(patches)}, values


def _build(
    folder: str | None,
    programs: Mapping[str, ExportedProgram],
    signatures: Mapping[str, Signature],
    names: _Names,
    patches: Mapping[str, Any],
    settings: Settings,
    target: Target | None,
) -> tuple[Build, dict[str, list[Any]]]:
    """Compile programs for one target, see `_package_from`.

    Returns:
        The compiled models, and their files by model name. If Inductor's own code generation has
        compiled a model, the result has only its files.

    Raises:
        exc.UnsupportedTargetError: that was needed, and there is a target.
    """
    from inductor_ext.cpp_wrapper.build import artifact as build
    from inductor_ext.cpp_wrapper.codegen import cpp_wrapper
    from inductor_ext.cpp_wrapper.package.build_results import Build
    from inductor_ext.cpp_wrapper.signature.guard_filter import ignore_performance_guards

    files: dict[str, list[Any]] = {}
    artifacts: dict[str, Artifact] = {}
    memory: dict[str, dict[str, Any]] = {}
    for name, program in programs.items():
        target_text = f" for {target.name}" if target is not None else ""
        with (
            progress.stage(f"model {name!r}{target_text}"),
            events.timed("compile_model"),
            build.collecting() as collected,
            cpp_wrapper.check_against(signatures[name], names.get(name)),
            ignore_performance_guards(program),
            events.capture(MemoryPlanRecord, this_thread=True) as records,
        ):
            where = {"aot_inductor.output_path": os.path.join(folder, name)} if folder else {}
            files[name] = _compile(program, {**patches, **where})
        if collected:
            artifacts[name] = collected[-1]
        elif target is not None:
            why = "an option requests a form of package that only Inductor (default) writes"
            fix = "Unset it; docs/user/aot_packages.md lists these options."
            raise exc.UnsupportedTargetError(target=target.name, why=why, fix=fix)
        if records:
            memory[name] = records[-1].summary()
    return (
        Build(
            target=target.name if target is not None else None,
            artifacts=artifacts,
            options={**patches, **settings.non_default(only_of_code=True)},
            memory=memory,
        ),
        files,
    )


def _find_checksums(settings: Settings, artifact: Artifact) -> str:
    from inductor_ext.cpp_wrapper.build import checksum_library
    from inductor_ext.cpp_wrapper.codegen import weights_layout
    from inductor_ext.cpp_wrapper.package import checksums

    with checksum_library.native_function(settings) as function:
        return checksums.compute(weights_layout.parts(artifact.constants, artifact.plan), function)


def _default_path(
    files: Mapping[str, list[Any]], artifacts: Mapping[str, Artifact], folder: str | None
) -> str:
    """Return a path in Inductor's cache folder; arguments as in `_package_from`."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    path = output_path.choose_path(files, artifacts)
    return path if folder is None else os.path.join(cache_dir(), os.path.basename(path))


@events.timed("record_self_tests")
def _record_self_tests(
    programs: Mapping[str, ExportedProgram],
) -> dict[str, tuple[dict[str, Any], bytes]]:
    from inductor_ext.cpp_wrapper.package import self_test

    return {name: self_test.record(name, program) for name, program in programs.items()}


def _write_default_package(path: PackagePath, files: Any) -> str | IO[bytes]:
    from torch._inductor.package import package_aoti

    if not isinstance(path, (str, os.PathLike)):
        package_aoti(path, files)
        return path
    with output_path.publish_package(path) as temporary:
        package_aoti(temporary, files)
    return os.fspath(path)


def _describe_compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    # Inductor's own compiler query makes gcc print its build configuration, not its version.
    return components.probe("cxx").version or os.path.basename(get_cpp_compiler())


def _device_types(programs: Mapping[str, ExportedProgram]) -> set[str]:
    nodes = [node for program in programs.values() for node in program.graph.nodes]
    return requirements.device_types(node.meta.get("val") for node in nodes)


def _require_toolchain(programs: Mapping[str, ExportedProgram]) -> None:
    missing = requirements.find_missing("aot", _device_types(programs))
    if missing is not None:
        missing.require()
