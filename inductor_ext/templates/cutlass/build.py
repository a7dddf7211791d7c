"""Building CUTLASS kernels with nvcc, once for each source on a machine.

What is built lies in a store that processes share (`cache.Store`), by a key of the source, the
flags, nvcc and CUTLASS's release: a build that is killed leaves nothing that is found, and the
store removes what it left and keeps to its size. Two processes that want the same kernel build it
once. At most as many builds run at a time, in all processes together, as there are cores and
memory for. An error of nvcc is raised with the kernel's name and nvcc's words, and kept like a
kernel, so that it does not cost a minute again.

What takes the time is CUTLASS's templates. Seconds of CPU for a shared object, with nvcc 13.0 and
CUTLASS 4.2.0 [measured]:

- 22: capability 8.0, bfloat16, bias and gelu; 23 with 5 inputs, 2 scalars and 2 outputs; 13 to 19
  of other dtypes;
- 43 to 47: capability 9.0, grouped cooperative; pingpong of int8, tf32; with bias and gelu;
- 51: int8 weights times bfloat16, pingpong;
- 58: stream-K cooperative with 5 inputs, 2 scalars and 2 outputs.

The device's code alone (`cubin`) takes some 28 of 47. Of those 47, cicc has half, cudafe++ three
tenths, the host's compiler a sixth and ptxas a hundredth; parsing the headers, before anything is
made of them, is 4. So optimisation levels and fewer includes make little difference.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from inductor_ext import cache, exc, parts
from inductor_ext.templates.cutlass import headers
from inductor_ext.templates.cutlass.source import Source

__all__ = ["Kind", "Toolchain", "build", "build_all", "built", "is_built", "jobs"]

Kind = Literal["library", "cubin"]
"""A shared object with the two functions of a source, or the device's code alone."""

_FILES: dict[str, str] = {"library": "kernel.so", "cubin": "kernel.cubin"}
_FAILURE = "failure.txt"

_JOB_BYTES = 4 << 30
"""Memory that one build takes at most [measured: 3.8 GB]."""

_POLL = 0.05
"""Seconds between two looks for a free place to build."""


@dataclass(frozen=True)
class Toolchain:
    """What kernels are built with."""

    nvcc: str
    """The program's path."""
    version: str
    headers: headers.Headers

    @classmethod
    def find(cls, cutlass_dir: str | None = None) -> Toolchain:
        """That of this machine.

        Args:
            cutlass_dir: as of `headers.find`.

        Raises:
            exc.MissingToolchainError: there is no nvcc, no C++ compiler for it, or no CUTLASS.
        """
        nvcc = parts.probe("nvcc")
        nvcc.require()
        parts.probe("cxx").require()
        assert nvcc.path is not None
        return cls(nvcc.path, nvcc.version or "", headers.find(cutlass_dir))

    def flags(self, source: Source, kind: Kind) -> list[str]:
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
        if kind == "cubin":
            return [*found, "-cubin"]
        return [*found, "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden"]

    def key(self, source: Source, kind: Kind) -> str:
        """Hexadecimal; the same for what is built to the same."""
        told = [self.version, self.headers.release, *self.flags(source, kind), source.text]
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
def _slot(store: cache.Store, limit: int | None) -> Iterator[None]:
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
    source: Source, store: cache.Store, toolchain: Toolchain, kind: Kind = "library"
) -> bool:
    """Whether a kernel is in the store, or the error that there is instead."""
    with store.get(toolchain.key(source, kind)) as folder:
        return folder is not None


@contextlib.contextmanager
def built(
    source: Source,
    store: cache.Store,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> Iterator[pathlib.Path]:
    """Yield the file of a kernel, built if it is not in the store. Nobody removes it meanwhile.

    Args:
        source: of the kernel.
        store: where what is built is kept.
        toolchain: by default that of this machine.
        kind: what is built.
        limit: builds at a time, at most.

    Raises:
        exc.MissingToolchainError: see `Toolchain.find`.
        exc.KernelBuildError: nvcc refuses the source, or was killed.
    """
    toolchain = toolchain or Toolchain.find()
    key = toolchain.key(source, kind)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(store.get(key))
        if folder is None:
            made = _make(source, store, toolchain, kind, limit)
            folder = stack.enter_context(store.get(key))
            if folder is None:
                # A store that cannot be written to holds nothing.
                folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
                for name, content in made.items():
                    (folder / name).write_bytes(content)
        failure = folder / _FAILURE
        if failure.exists():
            raise _error(source, failure.read_text(encoding="utf-8"))
        yield folder / _FILES[kind]


def build(
    source: Source,
    store: cache.Store,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> None:
    """Have a kernel in the store; as `built`, for those who do not need it now."""
    with built(source, store, toolchain, kind, limit):
        pass


def build_all(
    sources: Sequence[Source],
    store: cache.Store,
    toolchain: Toolchain | None = None,
    kind: Kind = "library",
    limit: int | None = None,
) -> dict[str, exc.KernelBuildError]:
    """Have kernels in the store, built side by side.

    Returns:
        The errors of those that cannot be built, by name.

    Raises:
        exc.MissingToolchainError: see `Toolchain.find`.
    """
    found = toolchain or Toolchain.find()

    def one(source: Source) -> tuple[str, exc.KernelBuildError] | None:
        try:
            build(source, store, found, kind, limit)
        except exc.KernelBuildError as error:
            return source.name, error
        return None

    # Threads only wait: `_slot` keeps the number of builds.
    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(sources), 64))) as pool:
        return dict(filter(None, pool.map(one, sources)))


def _make(
    source: Source, store: cache.Store, toolchain: Toolchain, kind: Kind, limit: int | None
) -> dict[str, bytes]:
    """Build into the store, unless another process just has; the files."""
    key = toolchain.key(source, kind)
    with store.lock(key):
        with store.get(key) as folder:
            if folder is not None:
                return {}
        with _slot(store, limit), store.publish(key) as folder:
            (folder / "kernel.cu").write_text(source.text, encoding="utf-8")
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                failure = _run_nvcc(source, toolchain, kind, folder, scratch)
            if failure is not None:
                (folder / _FAILURE).write_text(failure, encoding="utf-8")
            return {file.name: file.read_bytes() for file in folder.iterdir()}


def _run_nvcc(
    source: Source, toolchain: Toolchain, kind: Kind, folder: pathlib.Path, scratch: str
) -> str | None:
    """What nvcc says against the source; None if it builds it.

    Raises:
        exc.KernelBuildError: it was killed, or failed for a reason that is not the source's.
    """
    command = [
        toolchain.nvcc,
        *toolchain.flags(source, kind),
        f"-I{toolchain.headers.include}",
        "-o",
        str(folder / _FILES[kind]),
        str(folder / "kernel.cu"),
    ]
    # nvcc's own files go where nobody has to look for them if it is killed. It starts programs,
    # which a session of its own lets us end with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": scratch, "LC_ALL": "C"},
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode == 0:
        return None
    complaints = [line for line in output.splitlines() if re.search(r"\berror\b", line)]
    if not complaints or _KILLED.search(output):
        # Out of memory or disk: another time it may work.
        (folder / _FILES[kind]).unlink(missing_ok=True)
        last = output.strip().splitlines()[-1:] or ["it says nothing"]
        raise _error(source, f"nvcc exits with {process.returncode}: {last[0]}")
    return "\n".join(line.replace(f"{folder}{os.sep}", "") for line in complaints[:_COMPLAINTS])


_KILLED = re.compile(r"died due to signal|Killed|No space left|out of memory|cannot allocate", re.I)
_COMPLAINTS = 5


def _error(source: Source, why: str) -> exc.KernelBuildError:
    return exc.KernelBuildError(kernel=source.name, why=why)
