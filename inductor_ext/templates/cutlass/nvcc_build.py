"""Building CUTLASS kernels with nvcc, once for each source on a machine.

What is built lies in a store that processes share (`artifact_store.Store`), by a key of the source
and the flags: a build that is killed leaves nothing that is found, and the store removes what it
left and keeps to its size. No compiler is needed for what is there, whichever one built it. Two
processes that want the same kernel build it once. At most as many builds run at a time, in all
processes together, as there are cores and memory for. An error of nvcc is raised with the kernel's
name and nvcc's words, and kept for that nvcc and that release of CUTLASS, so that it does not cost
a minute again.

A source's two halves (`source`) are compiled side by side, by an nvcc each, and then linked to a
shared object and to an object that other programs can be linked with, both with CUDA's runtime in
them.

Seconds of CPU for the two halves, with nvcc 13.0 and CUTLASS 4.2.0 [measured on an AMD EPYC]; the
first is what one waits for if there are cores for both:

| kernel | device | host |
| --- | --- | --- |
| capability 8.0, bfloat16, addmm with a row of biases | 10 | 8 |
| capability 9.0, bfloat16, pingpong | 22 | 11 |
| capability 9.0, bfloat16, stream-K cooperative | 30 | 15 |
| capability 9.0, int8 weights times bfloat16 | 36 | 18 |

Most of the device's half is spent on instantiating templates, in cicc's front end: parsing the
headers is 4, optimisation 3, ptxas less than 1. So optimisation levels make little difference.
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
import signal
import subprocess
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from inductor_ext import exc
from inductor_ext.storage import artifact_store
from inductor_ext.templates.cutlass import find_headers
from inductor_ext.templates.cutlass.source import FLAGS, Source
from inductor_ext.toolchain import components

__all__ = [
    "DETAILS",
    "FILES",
    "OBJECT",
    "Kind",
    "Toolchain",
    "build",
    "build_all",
    "built",
    "end_compilers",
    "is_built",
    "jobs",
    "key",
]

Kind = Literal["library", "cubin"]
"""A shared object with the two functions of a source, or the device's code alone."""

FILES: Mapping[str, str] = types.MappingProxyType({"library": "kernel.so", "cubin": "kernel.cubin"})
"""Names in an entry of the store."""

OBJECT = "kernel.o"
"""Beside the shared object what it was linked of, for those who link it into something else: it
needs libstdc++, libdl, librt and libpthread, and its only global symbols are the two functions."""

DETAILS = "kernel.json"
"""Of an entry: name, architecture, releases of nvcc and CUTLASS, and the seconds that it took."""

Half = Literal["device", "host"]

_FAILURE = "failure.txt"

_FORMAT = 1
"""Of entries; part of their keys."""

_JOB_BYTES = 5 << 30
"""Memory that one build takes at most, with both halves at a time [measured: 3.8 and 1.2 GB]."""

_POLL = 0.05
"""Seconds between two looks for a free place to build."""


@dataclass(frozen=True)
class Toolchain:
    """What kernels are built with."""

    nvcc: str
    """The program's path."""
    version: str
    headers: find_headers.Headers
    cxx: str
    """The C++ compiler that links; a path."""
    runtime: pathlib.Path
    """CUDA's runtime as a static library."""

    @classmethod
    def find(cls, cutlass_dir: str | None = None) -> Toolchain:
        """That of this machine.

        Args:
            cutlass_dir: as of `headers.find`.

        Raises:
            exc.MissingToolchainError: there is no nvcc, no C++ compiler for it, or no CUTLASS.
        """
        nvcc, cxx = components.probe("nvcc"), components.probe("cxx")
        for part in (nvcc, cxx):
            part.require()
        assert nvcc.path is not None
        assert cxx.path is not None
        known = find_headers.find(cutlass_dir)
        return cls(nvcc.path, nvcc.version or "", known, cxx.path, _runtime(nvcc.path))

    def link(self, source: Source, folder: pathlib.Path, scratch: pathlib.Path) -> None:
        """Make an object and a shared object of both halves.

        Args:
            source: of the kernel.
            folder: where they go.
            scratch: where the halves are, and what is not needed afterwards.

        Raises:
            exc.KernelBuildError: a program fails.
        """
        cubin, host = scratch / FILES["cubin"], scratch / "host.o"
        (scratch / "cubin.s").write_text(_EMBEDDED.format(file=cubin))
        kept = [f"--keep-global-symbol=inductor_ext_{each}" for each in ("workspace_size", "run")]
        # Symbols of the runtime become local ones, as each kernel has its own. Groups of sections
        # would be taken for those of the same name in other objects.
        relocatable = [self.cxx, "-r", "-nostdlib", "-Wl,--force-group-allocation"]
        whole = [host, scratch / "cubin.o", self.runtime]
        library = ["-shared", "-o", folder / FILES["library"], folder / OBJECT]
        for command in (
            [self.cxx, "-c", "-o", scratch / "cubin.o", scratch / "cubin.s"],
            [*relocatable, "-o", scratch / "whole.o", *whole],
            ["objcopy", *kept, scratch / "whole.o", folder / OBJECT],
            [self.cxx, *library, "-ldl", "-lrt", "-lpthread"],
        ):
            with _process([*map(str, command)], scratch, "link.log") as process:
                if process.wait():
                    said = (scratch / "link.log").read_text("utf-8", "replace")
                    raise _error(source, f"it cannot be linked: {_last(said)}")


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
    """CUDA's static runtime, of which nvcc alone knows where it is.

    Raises:
        exc.MissingToolchainError: it is not there.
    """
    told = subprocess.run(
        [nvcc, "--dryrun", "-shared", "-o", "x.so", "x.o"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    for folder in re.findall(r'"?-L([^"\s]+)', told.stderr):
        file = pathlib.Path(folder, "libcudart_static.a")
        if file.is_file():
            return file
    raise exc.MissingToolchainError(
        part="CUDA's static runtime",
        why=f"{nvcc} names no folder that has libcudart_static.a",
        install="install the libraries of the CUDA toolkit that nvcc belongs to",
    )


def _flags(source: Source, half: Half) -> list[str]:
    """nvcc's arguments, but for the paths."""
    target = source.architecture
    found = [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        f"-gencode=arch=compute_{target},code=sm_{target}",
        "--expt-relaxed-constexpr",
        # CUTLASS has annotations on functions that need none.
        "-diag-suppress=20012",
    ]
    first = source.text.partition("\n")[0]
    if first.startswith(FLAGS):
        found += first.removeprefix(FLAGS).split()
    if half == "device":
        return [*found, "-DINDUCTOR_EXT_DEVICE", "-cubin"]
    return [*found, "-c", "-Xcompiler=-fPIC,-fvisibility=hidden"]


def _halves(kind: Kind) -> tuple[Half, ...]:
    return ("device",) if kind == "cubin" else ("device", "host")


def key(source: Source, kind: Kind = "library") -> str:
    """Of a kernel in a store: hexadecimal, and the same for all that do the same.

    Neither nvcc's release nor CUTLASS's is part of it: what either has built is used where there is
    another one, or none.
    """
    told = [str(_FORMAT), platform.machine(), source.name, source.text]
    for half in _halves(kind):
        told += _flags(source, half)
    return _digest(told)


def _failure_key(source: Source, toolchain: Toolchain, kind: Kind) -> str:
    return _digest([key(source, kind), toolchain.version, toolchain.headers.release])


def _digest(told: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(told).encode()).hexdigest()


def jobs(limit: int | None = None) -> int:
    """How many builds may run at a time: as many as there are cores and memory for, at least 1.

    Args:
        limit: at most so many.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _memory() // _JOB_BYTES, limit or cores))


def _memory() -> int:
    """Bytes of memory of the machine, or of the container that this is."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        text = pathlib.Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")
        return min(physical, int(text))
    return physical


def _free_bytes() -> int:
    """Bytes of memory that a new process can have."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _memory()


@contextlib.contextmanager
def _slot(store: artifact_store.Store, limit: int | None) -> Iterator[None]:
    """Wait for one of the places to build, which all processes with this store share.

    It ends with the process that holds it. Without a folder that can be written to, nobody waits.
    """
    import filelock

    folder = store.folder / "builds"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            yield
            return
        while True:
            for place in range(jobs(limit)):
                # One build runs in any case, others where nobody else has the memory.
                if place and _free_bytes() < _JOB_BYTES:
                    break
                lock = filelock.FileLock(folder / f"{place}.lock")
                with contextlib.suppress(filelock.Timeout, OSError):
                    stack.enter_context(lock.acquire(timeout=0))
                    yield
                    return
            time.sleep(_POLL)


def is_built(
    source: Source,
    store: artifact_store.Store,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
) -> bool:
    """Whether a kernel is in the store; with a toolchain, also whether its error is."""
    with store.get(key(source, kind)) as folder:
        if folder is not None or toolchain is None:
            return folder is not None
    with store.get(_failure_key(source, toolchain, kind)) as folder:
        return folder is not None


@contextlib.contextmanager
def built(
    source: Source,
    store: artifact_store.Store,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> Iterator[pathlib.Path]:
    """Yield the file of a kernel, built if it is not in the store. Nobody removes it meanwhile.

    Args:
        source: of the kernel.
        store: where what is built is kept.
        toolchain: by default that of this machine, which need not have one for what is there.
        kind: what is built.
        limit: builds at a time, at most.

    Raises:
        exc.MissingToolchainError: see `Toolchain.find`.
        exc.KernelBuildError: nvcc refuses the source, or was killed.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(store.get(key(source, kind)))
        if folder is None:
            toolchain = toolchain or Toolchain.find()
            made = _make(source, store, toolchain, kind, limit)
            folder = stack.enter_context(store.get(key(source, kind)))
            if folder is None:
                # A store that cannot be written to holds nothing.
                folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
                for name, content in made.items():
                    (folder / name).write_bytes(content)
        yield folder / FILES[kind]


def build(
    source: Source,
    store: artifact_store.Store,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> None:
    """Have a kernel in the store; as `built`, for those who do not need it now."""
    with built(source, store, toolchain, kind, limit):
        pass


def build_all(
    sources: Sequence[Source],
    store: artifact_store.Store,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> dict[str, exc.KernelBuildError]:
    """Have kernels in the store, built side by side.

    Returns:
        The errors of those that cannot be built, by name.

    Raises:
        exc.MissingToolchainError: see `Toolchain.find`; not where all are there.
    """
    missing = [each for each in sources if not is_built(each, store, kind=kind)]
    if not missing:
        return {}
    found = toolchain or Toolchain.find()

    def one(source: Source) -> tuple[str, exc.KernelBuildError] | None:
        try:
            build(source, store, found, kind, limit)
        except exc.KernelBuildError as error:
            return source.name, error
        return None

    # Threads only wait: `_slot` keeps the number of builds.
    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(missing), 64))) as pool:
        return dict(filter(None, pool.map(one, missing)))


def _make(
    source: Source, store: artifact_store.Store, toolchain: Toolchain, kind: Kind, limit: int | None
) -> dict[str, bytes]:
    """Build into the store, unless another process just has; the files.

    Raises:
        exc.KernelBuildError: see `built`.
    """
    failed = _failure_key(source, toolchain, kind)
    with store.lock(key(source, kind)):
        with store.get(failed) as folder:
            if folder is not None:
                raise _error(source, (folder / _FAILURE).read_text(encoding="utf-8"))
        if is_built(source, store, kind=kind):
            return {}
        with _slot(store, limit), store.publish(key(source, kind)) as folder:
            begun = time.monotonic()
            (folder / "kernel.cu").write_text(source.text, encoding="utf-8")
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                try:
                    _build(source, toolchain, kind, folder, pathlib.Path(scratch))
                except _Refused as refused:
                    failure = str(refused)
                    with store.publish(failed) as kept:
                        (kept / _FAILURE).write_text(failure, encoding="utf-8")
                    raise _error(source, failure) from None
            details = {
                "name": source.name,
                "architecture": source.architecture,
                "nvcc": toolchain.version,
                "cutlass": toolchain.headers.release,
                "seconds": round(time.monotonic() - begun, 1),
            }
            (folder / DETAILS).write_text(json.dumps(details), encoding="utf-8")
            return {file.name: file.read_bytes() for file in folder.iterdir()}


class _Refused(Exception):
    """What nvcc says against a source."""


def _build(
    source: Source, toolchain: Toolchain, kind: Kind, folder: pathlib.Path, scratch: pathlib.Path
) -> None:
    """Fill an entry, in which the source is already.

    Raises:
        _Refused: nvcc refuses the source.
        exc.KernelBuildError: it was killed, or failed for a reason that is not the source's.
    """
    with contextlib.ExitStack() as stack:
        halves = {}
        for half in _halves(kind):
            command = [
                toolchain.nvcc,
                *_flags(source, half),
                f"-I{toolchain.headers.include}",
                "-o",
                str(scratch / (FILES["cubin"] if half == "device" else "host.o")),
                str(folder / "kernel.cu"),
            ]
            # Each has its own folder for nvcc's files, and is gone with it.
            place = scratch / half
            place.mkdir()
            halves[half] = stack.enter_context(_process(command, place, "log"))
        for half, process in halves.items():
            if process.wait():
                said = (scratch / half / "log").read_text("utf-8", "replace")
                complaints = [line for line in said.splitlines() if re.search(r"\berror\b", line)]
                if not complaints or _KILLED.search(said):
                    # Out of memory or disk: another time it may work.
                    raise _error(source, f"nvcc exits with {process.returncode}: {_last(said)}")
                text = "\n".join(complaints[:_COMPLAINTS])
                raise _Refused(text.replace(f"{folder}{os.sep}", ""))
    if kind == "cubin":
        os.rename(scratch / FILES["cubin"], folder / FILES["cubin"])
    else:
        toolchain.link(source, folder, scratch)


def _last(said: str) -> str:
    return (said.strip().splitlines() or ["it says nothing"])[-1]


@contextlib.contextmanager
def _process(
    command: Sequence[str], scratch: pathlib.Path, log: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A program with all that it starts, which is ended when this is left.

    Args:
        command: the program and its arguments.
        scratch: for its temporary files.
        log: the file in there for what it says.
    """
    # Who ends all of them waits until one that has begun is known.
    with open(scratch / log, "wb") as output, _starting:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"},
            # nvcc starts programs, which a session of its own lets us end with it.
            start_new_session=True,
        )
        _running.add(process.pid)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process.pid)
            process.wait()
        _running.discard(process.pid)


_running: set[int] = set()
"""Groups of processes that this one has started."""

_starting = threading.RLock()
"""Held from before one is started until it is among them."""


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_compilers() -> NoReturn:
    """End this process at once, with the compilers that any of its threads has started."""
    _starting.acquire()
    for group in tuple(_running):
        _kill(group)
    os._exit(1)


_KILLED = re.compile(r"died due to signal|Killed|No space left|out of memory|cannot allocate", re.I)
_COMPLAINTS = 5


def _error(source: Source, why: str) -> exc.KernelBuildError:
    return exc.KernelBuildError(kernel=source.name, why=why)
