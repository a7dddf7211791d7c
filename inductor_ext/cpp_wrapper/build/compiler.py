"""Compile and link the C++ of a model: flags, the precompiled runtime, precompiled headers.

Flags come from Inductor (`torch._inductor.cpp_builder`), so that its config and the user's compiler
apply. The extension replaces the CPU target (see `cpu_target`), omits line tables unless requested
(`aot_debug_info`), and hides every symbol but the C interface. The runtime and the headers are the
same for all models: they are compiled once per compiler, torch and set of flags, and kept in the
artifact cache (settings `artifact_cache*`). If nothing can be cached they are compiled each time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from inductor_ext import _compat, settings
from inductor_ext.cpp_wrapper.build import cmake_project, cpu_target, cross_compile
from inductor_ext.cpp_wrapper.build.commands import run, run_all
from inductor_ext.cpp_wrapper.cache import cache
from inductor_ext.hooks import context
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.toolchain.probes.cuda import CUDA_DRIVER

RUNTIME = pathlib.Path(__file__).parent.parent / "runtime"
"""The C++ sources that are the same for all models."""

_CUDA_INCLUDE = pathlib.Path(__file__).parent / "cuda_include"
"""Headers that those of CUDA include and its Python packages lack."""

_DROPPED_FLAGS = frozenset(
    {"-g1", "-gline-tables-only", "-march=native", "-mcpu=native", "-Wall", "-pedantic"}
)

_DROPPED_DEFINITIONS = frozenset({"TORCH_INDUCTOR_PRECOMPILE_HEADERS"})
"""It makes torch's headers include much of ATen, for a precompiled header that is not used here."""

_HIDING = ("-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffunction-sections")

_EXPORTS = RUNTIME / "exports.map"

_LINKING = ("-Wl,-z,noexecstack", "-Wl,--gc-sections", "-Wl,--build-id=sha1")

_TORCH_LIBRARIES = frozenset({"c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda"})

_FORMAT = "1"
"""Format version of the cached runtime and headers; increment it when their build changes."""

Purpose = Literal["wrapper", "kernel"]


@dataclasses.dataclass(frozen=True)
class Unit:
    """A translation unit."""

    source: str
    object: str
    purpose: Purpose
    whole: str | None = None
    """The source of which this is a part."""


@dataclasses.dataclass(frozen=True)
class PrebuiltRuntime:
    """The cached runtime and headers; the paths are valid only inside
    `Compiler.prebuilt_runtime`."""

    objects: tuple[str, ...]
    headers: dict[Purpose, str]
    """The header that the units of each purpose begin with, precompiled if possible."""


class Compiler:
    """Inductor's C++ compiler with the flags for one model."""

    def __init__(self, device_type: str, values: settings.Settings) -> None:
        """Read Inductor's flags under its current config."""
        from torch._inductor import config
        from torch._inductor.cpp_builder import CppTorchDeviceOptions
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        self.device_type = device_type
        self.settings = values
        self.target = cpu_target.current(values.aot_isa)
        common: dict[str, Any] = {
            "vec_isa": pick_vec_isa(),
            "device_type": device_type,
            "aot_mode": True,
        }
        self._options: dict[str, Any] = {
            "wrapper": CppTorchDeviceOptions(**common, compile_only=True, min_optimize=True),
            "kernel": CppTorchDeviceOptions(**common, compile_only=True),
            "link": CppTorchDeviceOptions(**common),
        }
        self.program = shlex.split(self._options["wrapper"].get_compiler())
        self.machine = cpu_target.machine_of(context.current().cpu_level)
        self.torch_folder = _compat.torch_folder()
        if cross_compile.is_needed(self.machine):
            assert values.aot_cross_torch is not None  # `targets.check` requires it
            self.torch_folder = pathlib.Path(values.aot_cross_torch)
        self.headers = self.torch_folder / "include"
        debug = config.aot_inductor.debug_compile or config.aot_inductor.debug_symbols
        self.keeps_debug_info = bool(debug or values.aot_debug_info)

    # --- commands ---------------------------------------------------------------------------------

    def compile_flags(self, purpose: Purpose) -> list[str]:
        """Return the flags that compile a unit to an object."""
        folders = [str(RUNTIME), *self._folders(self._options[purpose].get_include_dirs())]
        return [
            *(f"-D{name}" for name in self._definitions(purpose)),
            *self._code_flags(purpose),
            *(f"-I{folder}" for folder in folders),
            *(("-idirafter", str(_CUDA_INCLUDE)) if context.current().target_gpu else ()),
            # The paths in messages of errors would otherwise differ between machines, and tell
            # where a package was built.
            _shorten(str(self.torch_folder), "torch"),
            _shorten(str(RUNTIME), "inductor_ext"),
        ]

    def _folders(self, folders: Sequence[str]) -> list[str]:
        if self.torch_folder != _compat.torch_folder():
            return cross_compile.move_folders(folders, self.torch_folder)
        return [folder for folder in folders if folder]

    def _definitions(self, purpose: Purpose) -> list[str]:
        names = (name.strip() for name in self._options[purpose].get_definitions())
        return [name for name in names if name not in _DROPPED_DEFINITIONS]

    def _code_flags(self, purpose: Purpose) -> list[str]:
        """Return the flags for code generation, which are valid on every machine."""
        options = self._options[purpose]
        flags = [flag for flag in _with_dashes(options.get_cflags()) if flag not in _DROPPED_FLAGS]
        if self.settings.aot_debug_info:
            flags.append("-g1")
        passthrough = _split(options.get_passthrough_args())
        flags += [flag for flag in passthrough if flag not in self.target.flags]
        return [*flags, *self.target.flags, *_HIDING]

    def link_command(self, objects: Sequence[str], output: str) -> list[str]:
        """Return the command that links a shared object."""
        options = self._options["link"]
        flags = [flag for flag in _with_dashes(options.get_cflags()) if flag not in _DROPPED_FLAGS]
        return [
            *self.program,
            *objects,
            *flags,
            *(() if self.keeps_debug_info else ("-Wl,--strip-all",)),
            f"-Wl,--version-script={_EXPORTS}",
            *_LINKING,
            "-o",
            output,
            *_with_dashes(options.get_ldflags()),
            *(f"-l{library}" for library in options.get_libraries()),
            *(f"-L{folder}" for folder in self._folders(options.get_libraries_dirs())),
            *(flag for flag in _split(options.get_passthrough_args()) if not flag.startswith("-m")),
        ]

    def identity(self, purpose: Purpose) -> str:
        """Return a hex digest of everything but the source that an object depends on."""
        return self._identify(self.compile_flags(purpose), self._versions())

    def _identify(self, flags: Sequence[str], versions: Sequence[str]) -> str:
        return _digest([*self.program, *versions, str(self.torch_folder), *flags])

    def library_identity(self) -> str:
        """Return a hex digest of everything but the sources that a library's content depends on.

        It does not depend on the paths of this machine, unlike `identity`.
        """
        paths = ("-L", "-Wl,--version-script=")
        linking = [flag for flag in self.link_command([], "") if not flag.startswith(paths)]
        return _digest(
            [
                *self._versions(),
                *self._definitions("kernel"),
                *self._code_flags("kernel"),
                *linking[len(self.program) :],
            ]
        )

    def _versions(self) -> list[str]:
        """Return the versions of the compiler and of torch, and the CPU as far as it matters."""
        return [
            *self._tool_versions(),
            *self.target.features,
            *(_cpu_model() if any("native" in flag for flag in self.target.flags) else ()),
        ]

    def _tool_versions(self) -> list[str]:
        import torch
        from torch._inductor.cpp_builder import get_compiler_version_info

        return [
            get_compiler_version_info(self.program[-1]),
            torch.__version__,
            torch.version.git_version or "",
        ]

    # --- builds outside this process --------------------------------------------------------------

    def project(self, name: str, source: str, weights: str | None) -> cmake_project.Project:
        """Return the CMake project for a model and the runtime in one source file.

        Args:
            name: name of the library.
            source, weights: file names, as in `cmake_project.Project`.
        """
        flags = self._code_flags("kernel")
        (standard,) = [flag for flag in flags if flag.startswith("-std=")]
        # Linked by other means: by -fopenmp, by CMake's torch package, or from the GPU driver.
        linked = _TORCH_LIBRARIES | {"cuda", "gomp", "omp"}
        libraries = self._options["link"].get_libraries()
        return cmake_project.Project(
            name=name,
            source=source,
            standard=standard.removeprefix("-std=").lstrip("gnuc+"),
            definitions=[*self._definitions("kernel"), *_interface_definitions()],
            compile_options=[flag for flag in flags if flag != standard],
            link_options=[*(flag for flag in flags if flag == "-fopenmp"), *_LINKING],
            libraries=[library for library in libraries if library not in linked],
            exports=_EXPORTS.name,
            weights=weights,
            cuda=self.device_type == "cuda",
        )

    def loader_options(self) -> dict[str, dict[str, Any]]:
        """Return torch's own loader's "compile" and "linker" options for the same source.

        In the format of `BuildOptionsBase.save_flags_to_json`, with this machine's paths. The
        loader compiles in a directory that only it knows, so there is no version script.
        """
        compiling, linking = self._options["kernel"], self._options["link"]
        flags = [flag for flag in _with_dashes(linking.get_cflags()) if flag not in _DROPPED_FLAGS]
        return {
            "compile": self._describe_options(
                compiling,
                definitions=[*self._definitions("kernel"), *_interface_definitions()],
                include_dirs=compiling.get_include_dirs(),
                passthrough_args=self._code_flags("kernel"),
            ),
            "linker": self._describe_options(
                linking,
                ldflags=linking.get_ldflags(),
                libraries_dirs=linking.get_libraries_dirs(),
                libraries=linking.get_libraries(),
                passthrough_args=[*flags, *_LINKING, "-Wl,-Bsymbolic"],
            ),
        }

    def _describe_options(self, options: Any, **values: list[str]) -> dict[str, Any]:
        lists = (
            *("definitions", "include_dirs", "cflags", "ldflags"),
            *("libraries_dirs", "libraries", "passthrough_args"),
        )
        return {
            "compiler": options.get_compiler(),
            **{name: [item for item in values.get(name, ()) if item] for name in lists},
            "aot_mode": options.get_aot_mode(),
            "use_relative_path": options.get_use_relative_path(),
            "compile_only": options.get_compile_only(),
        }

    # --- compilation ------------------------------------------------------------------------------

    def compile(self, units: Sequence[Unit], runtime: PrebuiltRuntime) -> None:
        """Compile units in parallel.

        Raises:
            torch._inductor.exc.CppCompileError: a unit does not compile; contains the compiler's
                output.
        """
        # The parts of a source name its lines by the whole one's path. The last match counts: the
        # parts may be in a folder in the whole one's.
        sources = [path for unit in units for path in (unit.whole, unit.source) if path]
        folders = dict.fromkeys(map(os.path.dirname, sources))
        commands = []
        for unit in units:
            header = runtime.headers.get(unit.purpose)
            commands.append(
                [
                    *self.program,
                    *self.compile_flags(unit.purpose),
                    *(_shorten(folder, ".") for folder in folders),
                    *(("-include", header) if header else ()),
                    "-c",
                    unit.source,
                    "-o",
                    unit.object,
                ]
            )
        run_all(commands)

    def link(self, objects: Sequence[str], output: str) -> None:
        """Link objects into a shared object.

        Raises:
            torch._inductor.exc.CppCompileError: linking failed; contains the linker's output.
        """
        command = self.link_command(objects, output)
        if context.current().target_gpu is not None:
            # It must precede the libraries of the command.
            stub = self._write_driver_stub(objects, os.path.dirname(output))
            command.insert(len(self.program), f"-L{stub}")
        run(command)
        if self.settings.aot_debug_info:
            # In a separate file, which debuggers find by the debuglink in the shared object.
            debug = f"{output}.debug"
            run(["objcopy", "--only-keep-debug", output, debug])
            run(["objcopy", "--strip-all", f"--add-gnu-debuglink={debug}", output])

    def _write_driver_stub(self, objects: Sequence[str], folder: str) -> str:
        """Write a library that stands for CUDA's driver, which this machine may lack, to link with.

        It defines the functions of the driver that the objects call. Returns its folder.
        """
        listed = subprocess.run(
            ["nm", "--undefined-only", "--format=posix", *objects],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        names = sorted(set(re.findall(r"^(cu[A-Z]\w*) U", listed, re.MULTILINE)))
        stub = os.path.join(folder, "driver")
        os.makedirs(stub, exist_ok=True)
        source = os.path.join(stub, "driver.cpp")
        with open(source, "w") as file:
            file.writelines(f'extern "C" void {name}() {{}}\n' for name in names)
        library = os.path.join(stub, "libcuda.so")
        run(
            [*self.program, "-shared", "-fPIC", f"-Wl,-soname,{CUDA_DRIVER}", source, "-o", library]
        )
        return stub

    @contextlib.contextmanager
    def prebuilt_runtime(self) -> Iterator[PrebuiltRuntime]:
        """Provide the runtime and headers shared by all models, from the cache or compiled now."""
        with contextlib.ExitStack() as stack:
            library = stack.enter_context(self._cached("runtime", self._build_runtime))
            objects = tuple(sorted(str(path) for path in library.glob("*.o")))
            headers: dict[Purpose, str] = {}
            if self._precompiles():
                for purpose in ("wrapper", "kernel"):
                    folder = stack.enter_context(
                        self._cached(purpose, lambda path, p=purpose: self._build_header(path, p))
                    )
                    headers[purpose] = str(folder / "prefix.h")
            yield PrebuiltRuntime(objects, headers)

    def _precompiles(self) -> bool:
        from torch._inductor import config
        from torch._inductor.cpp_builder import is_gcc

        return bool(
            config.aot_inductor.precompile_headers and self.settings.artifact_cache and is_gcc()
        )

    @contextlib.contextmanager
    def _cached(self, kind: str, build: Any) -> Iterator[pathlib.Path]:
        """Yield a directory that `build` has filled, in this process or an earlier one."""
        purpose: Purpose = "kernel" if kind == "kernel" else "wrapper"
        sources = "" if kind == "kernel" else _runtime_key()
        identity = (
            # The same for all CPU levels.
            self._identify(self._runtime_flags(), self._tool_versions())
            if kind == "runtime"
            else self.identity(purpose)
        )
        parts = (kind, _FORMAT, sources, self.device_type, identity)
        store = cache.open_store(self.settings) if self.settings.artifact_cache else None
        with build_cached(parts, build, store) as folder:
            yield folder

    def _runtime_flags(self) -> list[str]:
        # The CPU feature check must run on every CPU, so no flags for newer ones.
        flags = [
            flag
            for flag in self.compile_flags("wrapper")
            if not flag.startswith(("-m", "-O", "-DCPU_CAPABILITY"))
        ]
        return [*flags, "-O2", *(f"-D{name}" for name in _interface_definitions())]

    def _build_runtime(self, folder: pathlib.Path) -> None:
        flags = self._runtime_flags()
        commands = [
            [*self.program, *flags, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
            for source in sorted(RUNTIME.glob("*.cpp"))
        ]
        run_all(commands)

    def _build_header(self, folder: pathlib.Path, purpose: Purpose) -> None:
        header = folder / "prefix.h"
        internal = "torch/csrc/inductor/cpp_wrapper/device_internal"
        included = {
            "wrapper": ['"model.h"', '"checks.h"', f"<{internal}/{self.device_type}.h>"],
            "kernel": ["<torch/csrc/inductor/cpp_prefix.h>"],
        }[purpose]
        header.write_text("".join(f"#include {name}\n" for name in included))
        flags = self.compile_flags(purpose)
        command = [*self.program, *flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
        run(command)


@contextlib.contextmanager
def build_cached(
    parts: Sequence[str],
    build: Callable[[pathlib.Path], None],
    store: ArtifactStore | None,
) -> Iterator[pathlib.Path]:
    """Yield a folder that `build` has filled, now or earlier.

    Args:
        parts: everything that the content of the folder depends on.
        build: fills an empty folder.
        store: where the folder is kept; None for a temporary folder.
    """
    if store is not None:
        key = _digest(parts)
        with store.get(key) as folder:
            if folder is not None:
                yield folder
                return
        with store.lock(key):
            with store.get(key) as folder:
                exists = folder is not None
            if not exists:
                with store.publish(key) as target_folder:
                    build(target_folder)
        with store.get(key) as folder:
            if folder is not None:
                yield folder
                return
    with tempfile.TemporaryDirectory(prefix="inductor_ext-") as temporary:
        build(pathlib.Path(temporary))
        yield pathlib.Path(temporary)


def _shorten(folder: str, name: str) -> str:
    """Return the flag that shows a folder's path as `name` in the values of `__FILE__`."""
    return f"-fmacro-prefix-map={folder}={name}"


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def _runtime_key() -> str:
    digest = hashlib.sha256()
    for path in sorted(RUNTIME.iterdir()):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _with_dashes(flags: Sequence[str]) -> list[str]:
    return [f"-{flag}" for flag in flags if flag]


def _split(arguments: Sequence[str]) -> list[str]:
    return [part for argument in arguments for part in shlex.split(argument)]


def _interface_definitions() -> list[str]:
    """Return the macros that tell interface.cpp about this torch's interface."""
    text = (
        _compat.torch_folder() / "include/torch/csrc/inductor/aoti_runtime/interface.h"
    ).read_text()
    return ["INDUCTOR_EXT_CONSTANT_PAIRS"] if "AOTInductorConstantMapEntry" in text else []


def _cpu_model() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read(2000).splitlines()
    except OSError:
        return []
    return [line for line in lines if line.startswith(("cpu family", "model", "CPU part"))]
