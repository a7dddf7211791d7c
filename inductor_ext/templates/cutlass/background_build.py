"""Building CUTLASS kernels while the process that wants them goes on.

`build_later` starts a process of its own, which lives on when this one ends and may be killed at
any moment: it then ends the compilers that it has started, and the store (`build`) holds nothing
half done. It runs with low priority. A kernel that any such process has taken on is left to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterable

from inductor_ext.storage import artifact_store
from inductor_ext.templates.cutlass import nvcc_build
from inductor_ext.templates.cutlass.find_headers import Headers
from inductor_ext.templates.cutlass.source import Source

__all__ = ["build_later"]

_NICE = 10

_started: list[subprocess.Popen[bytes]] = []
"""Those that were running when they were last looked at; a look is what lets the system forget
one that has ended."""


def build_later(
    sources: Iterable[Source],
    store: artifact_store.Store,
    toolchain: nvcc_build.Toolchain | None = None,
) -> list[Source]:
    """Have kernels built by a process in the background.

    Args:
        sources: of the kernels.
        store: where what is built is kept.
        toolchain: by default that of this machine.

    Returns:
        Those that are not in the store yet, nor the error that there is instead.

    Raises:
        exc.MissingToolchainError: see `build.Toolchain.find`; not where all are there.
    """
    missing = [
        each for each in dict.fromkeys(sources) if not nvcc_build.is_built(each, store, toolchain)
    ]
    if not missing:
        return []
    found = toolchain or nvcc_build.Toolchain.find()
    missing = [each for each in missing if not nvcc_build.is_built(each, store, found)]
    wanted = [each for each in missing if not _is_claimed(each, store)]
    if wanted:
        _start(wanted, store, found)
    return missing


def _start(
    sources: list[Source], store: artifact_store.Store, toolchain: nvcc_build.Toolchain
) -> None:
    request = {
        "sources": [dataclasses.asdict(each) for each in sources],
        "store": [str(store.folder), store.max_bytes],
        "toolchain": {
            **dataclasses.asdict(toolchain),
            "headers": [str(toolchain.headers.root), toolchain.headers.version],
            "runtime": str(toolchain.runtime),
        },
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(each or "." for each in sys.path)},
        # A Ctrl-C is not for it.
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(request).encode())
    _started[:] = [each for each in (*_started, process) if each.poll() is None]


def _claim(source: Source) -> str:
    """Whose lock says that somebody is going to build a kernel; it ends with his process."""
    return hashlib.sha256(f"to be built: {nvcc_build.key(source)}".encode()).hexdigest()


def _is_claimed(source: Source, store: artifact_store.Store) -> bool:
    """Whether a kernel is taken on, or can be by nobody, as nothing can be written to the store."""
    with store.try_lock(_claim(source)) as held:
        return not held


def _main() -> None:
    # By the time that it is killed, nobody is there to end compilers.
    signal.signal(signal.SIGTERM, lambda *_: nvcc_build.end_compilers())
    os.nice(_NICE)
    request = json.load(sys.stdin)
    told = request["toolchain"]
    root, version = told.pop("headers")
    toolchain = nvcc_build.Toolchain(
        **{
            **told,
            "headers": Headers(pathlib.Path(root), tuple(version)),
            "runtime": pathlib.Path(told["runtime"]),
        }
    )
    store = artifact_store.Store(*request["store"])
    with contextlib.ExitStack() as stack:
        mine = []
        for each in request["sources"]:
            source = Source(**each)
            if stack.enter_context(store.try_lock(_claim(source))):
                mine.append(source)
        nvcc_build.build_all(mine, store, toolchain)


if __name__ == "__main__":
    _main()
