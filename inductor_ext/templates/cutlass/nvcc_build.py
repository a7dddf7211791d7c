"""Build CUTLASS kernels with nvcc, once per source and machine.

Results are in a store that all processes share (`ArtifactStore`), keyed by source and flags.
A cached kernel needs no compiler, and is used whichever nvcc built it. Processes that request the
same kernel build it once, and `build_slots` limits the number of concurrent builds in all
processes. A killed build leaves no entry; the store cleans up after it and enforces its size limit.
A compile error is raised with the kernel's name and nvcc's message, and cached for that nvcc
version and CUTLASS release, so that it does not take the time again. The settings
`artifact_cache_dir` and `artifact_cache_size` determine the store of a compile (`runtime.store`).

The two halves of a source (`source`) are compiled in parallel, by one nvcc each, then linked to a
shared object and to a relocatable object for linking into other programs. Both contain the static
CUDA runtime. The device half takes longer, and is the wall time if there are cores for both;
docs/user/cutlass.md has measured times. Template instantiation in cicc's front end dominates it:
parsing the headers takes 4 s, optimization 3 s, ptxas less than 1 s. So optimization levels make
little difference.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inductor_ext import exc
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.templates.cutlass import find_headers
from inductor_ext.templates.cutlass.build_slots import build_slot
from inductor_ext.templates.cutlass.compiler_process import start_compiler
from inductor_ext.templates.cutlass.source import FLAGS, Source
from inductor_ext.toolchain import components

Kind = Literal["library", "cubin"]
"""`library`: a shared object with the two functions of a source; `cubin`: device code only."""

FILES: Mapping[str, str] = types.MappingProxyType({"library": "kernel.so", "cubin": "kernel.cubin"})
"""File name of each kind in a store entry."""

OBJECT = "kernel.o"
"""Relocatable object next to the shared object, for linking into other programs. It needs
libstdc++, libdl, librt and libpthread; its only global symbols are the two functions."""

DETAILS = "kernel.json"
"""Metadata file of an entry: name, architecture, nvcc and CUTLASS versions, build seconds."""

Half = Literal["device", "host"]

_FAILURE = "failure.txt"

_FORMAT = 1
"""Format version of store entries; part of their keys."""


@dataclass(frozen=True)
class Toolchain:
    """The programs and libraries that kernels are built with."""

    nvcc: str
    """Path of nvcc."""
    version: str
    headers: find_headers.Headers
    cxx: str
    """Path of the C++ compiler, which links."""
    runtime: pathlib.Path
    """Path of the static CUDA runtime, libcudart_static.a."""

    @classmethod
    def find(cls, cutlass_dir: str | None = None) -> Toolchain:
        """Return the toolchain of this machine.

        Args:
            cutlass_dir: see `find_headers.find`.

        Raises:
            exc.MissingToolchainError: there is no nvcc, no C++ compiler for it, or no CUTLASS.
        """
        nvcc, cxx = components.probe("nvcc"), components.probe("cxx")
        for component in (nvcc, cxx):
            component.require()
        assert nvcc.path is not None
        assert cxx.path is not None
        headers = find_headers.find(cutlass_dir)
        return cls(nvcc.path, nvcc.version or "", headers, cxx.path, _runtime(nvcc.path))

    def link(self, source: Source, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        """Link both halves to a relocatable object and a shared object.

        Args:
            source: of the kernel.
            folder: output folder.
            scratch: folder with the compiled halves, also for temporary files.

        Raises:
            exc.KernelBuildError: a linker command fails.
        """
        cubin, host = scratch / FILES["cubin"], scratch / "host.o"
        (scratch / "cubin.s").write_text(_EMBEDDED.format(file=cubin))
        symbol_flags = [
            f"--keep-global-symbol=inductor_ext_{name}" for name in ("workspace_size", "run")
        ]
        # Each kernel has its own CUDA runtime, so make the runtime's symbols local. Resolve COMDAT
        # section groups here: the linker would otherwise merge them with equally named groups of
        # other objects.
        relocatable = [self.cxx, "-r", "-nostdlib", "-Wl,--force-group-allocation"]
        objects = [host, scratch / "cubin.o", self.runtime]
        library = ["-shared", "-o", folder / FILES["library"], folder / OBJECT]
        for command in (
            [self.cxx, "-c", "-o", scratch / "cubin.o", scratch / "cubin.s"],
            [*relocatable, "-o", scratch / "whole.o", *objects],
            ["objcopy", *symbol_flags, scratch / "whole.o", folder / OBJECT],
            [self.cxx, *library, "-ldl", "-lrt", "-lpthread"],
        ):
            with start_compiler([*map(str, command)], scratch, "link.log") as process:
                if process.wait():
                    output = (scratch / "link.log").read_text("utf-8", "replace")
                    raise _error(source, f"the linker failed: {_last(output)}")


_EMBEDDED = """.section .rodata
.globl inductor_ext_cubin
.hidden inductor_ext_cubin
.balign 64
inductor_ext_cubin:
.incbin "{file}"
.section .note.GNU-stack,"",@progbits
"""


@functools.cache
def _runtime(nvcc: str) -> pathlib.Path:
    """Return the path of the static CUDA runtime, from the library folders that nvcc uses.

    Raises:
        exc.MissingToolchainError: it is not in any of them.
    """
    dryrun = subprocess.run(
        [nvcc, "--dryrun", "-shared", "-o", "x.so", "x.o"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    for folder in re.findall(r'"?-L([^"\s]+)', dryrun.stderr):
        file = pathlib.Path(folder, "libcudart_static.a")
        if file.is_file():
            return file
    raise exc.MissingToolchainError(
        part="the static CUDA runtime",
        why=f"libcudart_static.a is not in the library folders of {nvcc}",
        install="install the libraries of the CUDA toolkit that nvcc belongs to",
    )


def nvcc_flags(source: Source, half: Half) -> list[str]:
    """Return nvcc's arguments, without paths."""
    target = source.architecture
    flags = [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        f"-gencode=arch=compute_{target},code=sm_{target}",
        "--expt-relaxed-constexpr",
        # CUTLASS annotates defaulted functions, which nvcc warns about.
        "-diag-suppress=20012",
    ]
    first_line = source.text.partition("\n")[0]
    if first_line.startswith(FLAGS):
        flags += first_line.removeprefix(FLAGS).split()
    if half == "device":
        return [*flags, "-DINDUCTOR_EXT_DEVICE", "-cubin"]
    return [*flags, "-c", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def _halves(kind: Kind) -> tuple[Half, ...]:
    return ("device",) if kind == "cubin" else ("device", "host")


def key(source: Source, kind: Kind = "library") -> str:
    """Return the key of a kernel in the store: a hex digest of source, flags and machine type.

    The nvcc and CUTLASS versions are not part of it, so that a cached kernel is used with any other
    toolchain, or without one.
    """
    fields = [str(_FORMAT), platform.machine(), source.name, source.text]
    for half in _halves(kind):
        fields += nvcc_flags(source, half)
    return _digest(fields)


def _failure_key(source: Source, toolchain: Toolchain, kind: Kind) -> str:
    return _digest([key(source, kind), toolchain.version, toolchain.headers.release])


def _digest(fields: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(fields).encode()).hexdigest()


def is_built(
    source: Source,
    store: ArtifactStore,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
) -> bool:
    """Whether a kernel is in the store, or, with a toolchain, a cached build error of it."""
    with store.get(key(source, kind)) as folder:
        if folder is not None or toolchain is None:
            return folder is not None
    with store.get(_failure_key(source, toolchain, kind)) as folder:
        return folder is not None


@contextlib.contextmanager
def built(
    source: Source,
    store: ArtifactStore,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> Iterator[pathlib.Path]:
    """Yield the path of a kernel's file, built if it is not in the store.

    The store does not evict it before the context exits.

    Args:
        source: of the kernel.
        store: of built kernels.
        toolchain: by default this machine's; only needed to build.
        kind: of file.
        limit: maximum number of concurrent builds.

    Raises:
        exc.MissingToolchainError: see `Toolchain.find`.
        exc.KernelBuildError: nvcc rejects the source, or was killed.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(store.get(key(source, kind)))
        if folder is None:
            toolchain = toolchain or Toolchain.find()
            files = _make(source, store, toolchain, kind, limit)
            folder = stack.enter_context(store.get(key(source, kind)))
            if folder is None:
                # The store is not writable.
                folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
                for name, content in files.items():
                    (folder / name).write_bytes(content)
        yield folder / FILES[kind]


def build(
    source: Source,
    store: ArtifactStore,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> None:
    """Build a kernel into the store unless it is there; see `built` for arguments and errors."""
    with built(source, store, toolchain, kind, limit):
        pass


def build_all(
    sources: Sequence[Source],
    store: ArtifactStore,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> dict[str, exc.KernelBuildError]:
    """Build kernels into the store in parallel, unless they are there; see `built`.

    Returns:
        The errors of the kernels that failed to build, by name.

    Raises:
        exc.MissingToolchainError: see `Toolchain.find`; not if all kernels are in the store.
    """
    missing = [source for source in sources if not is_built(source, store, kind=kind)]
    if not missing:
        return {}
    tools = toolchain or Toolchain.find()

    def build_one(source: Source) -> tuple[str, exc.KernelBuildError] | None:
        try:
            build(source, store, tools, kind, limit)
        except exc.KernelBuildError as error:
            return source.name, error
        return None

    # These threads only wait for nvcc; `build_slot` limits the number of builds.
    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(missing), 64))) as pool:
        return dict(filter(None, pool.map(build_one, missing)))


def _make(
    source: Source,
    store: ArtifactStore,
    toolchain: Toolchain,
    kind: Kind,
    limit: int | None,
) -> dict[str, bytes]:
    """Build a kernel into the store and return its files by name.

    Returns no files if another process has built the kernel meanwhile.

    Raises:
        exc.KernelBuildError: see `built`.
    """
    failure_key = _failure_key(source, toolchain, kind)
    with store.lock(key(source, kind)):
        with store.get(failure_key) as folder:
            if folder is not None:
                raise _error(source, (folder / _FAILURE).read_text(encoding="utf-8"))
        if is_built(source, store, kind=kind):
            return {}
        with build_slot(store, limit), store.publish(key(source, kind)) as folder:
            start = time.monotonic()
            (folder / "kernel.cu").write_text(source.text, encoding="utf-8")
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                try:
                    run_build(source, toolchain, kind, folder, pathlib.Path(scratch))
                except _Refused as error:
                    failure = str(error)
                    with store.publish(failure_key) as failure_folder:
                        (failure_folder / _FAILURE).write_text(failure, encoding="utf-8")
                    raise _error(source, failure) from None
            details = {
                "name": source.name,
                "architecture": source.architecture,
                "nvcc": toolchain.version,
                "cutlass": toolchain.headers.release,
                "seconds": round(time.monotonic() - start, 1),
            }
            (folder / DETAILS).write_text(json.dumps(details), encoding="utf-8")
            return {file.name: file.read_bytes() for file in folder.iterdir()}


class _Refused(Exception):
    """nvcc rejected a source; the message is nvcc's errors."""


def run_build(
    source: Source, toolchain: Toolchain, kind: Kind, folder: pathlib.Path, scratch: pathlib.Path
) -> None:
    """Build a kernel into an entry's folder, which contains the source.

    Raises:
        _Refused: nvcc rejects the source.
        exc.KernelBuildError: nvcc was killed, or failed for a reason other than the source.
    """
    with contextlib.ExitStack() as stack:
        halves = {}
        for half in _halves(kind):
            command = [
                toolchain.nvcc,
                *nvcc_flags(source, half),
                f"-I{toolchain.headers.include}",
                "-o",
                str(scratch / (FILES["cubin"] if half == "device" else "host.o")),
                str(folder / "kernel.cu"),
            ]
            # Each nvcc has its own folder for temporary files, removed with `scratch`.
            half_scratch = scratch / half
            half_scratch.mkdir()
            halves[half] = stack.enter_context(start_compiler(command, half_scratch, "log"))
        for half, process in halves.items():
            if process.wait():
                output = (scratch / half / "log").read_text("utf-8", "replace")
                errors = [line for line in output.splitlines() if re.search(r"\berror\b", line)]
                if not errors or _KILLED.search(output):
                    # Out of memory or disk: not cached as an error, as a retry may succeed.
                    raise _error(
                        source, f"nvcc failed with exit code {process.returncode}: {_last(output)}"
                    )
                text = "\n".join(errors[:_SHOWN_ERRORS])
                raise _Refused(text.replace(f"{folder}{os.sep}", ""))
    if kind == "cubin":
        os.rename(scratch / FILES["cubin"], folder / FILES["cubin"])
    else:
        toolchain.link(source, folder, scratch)


def _last(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


_KILLED = re.compile(r"died due to signal|Killed|No space left|out of memory|cannot allocate", re.I)
_SHOWN_ERRORS = 5


def _error(source: Source, why: str) -> exc.KernelBuildError:
    return exc.KernelBuildError(kernel=source.name, why=why)
