"""Build CUTLASS kernels in a background process.

`build_later` starts a low-priority process, which outlives this one. It may be killed at any time:
on SIGTERM it kills its compilers, and the store (`nvcc_build`) never contains a partial entry. A
kernel that one background process has claimed is not built by another.
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

from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.templates.cutlass import compiler_process, nvcc_build
from inductor_ext.templates.cutlass.find_headers import Headers
from inductor_ext.templates.cutlass.source import Source
from inductor_ext.toolchain import background_process

_NICE = 10

started_processes: list[subprocess.Popen[bytes]] = []
"""Background processes that were running at the last poll. Polling reaps those that have ended."""


def build_later(
    sources: Iterable[Source],
    store: ArtifactStore,
    toolchain: nvcc_build.Toolchain | None = None,
) -> list[Source]:
    """Build kernels in a background process.

    Args:
        sources: of the kernels.
        store: of built kernels.
        toolchain: by default this machine's.

    Returns:
        The kernels of which the store has neither a build nor a cached build error yet.

    Raises:
        exc.MissingToolchainError: see `nvcc_build.Toolchain.find`; not if all kernels are in the
            store.
    """
    missing = [
        source
        for source in dict.fromkeys(sources)
        if not nvcc_build.is_built(source, store, toolchain)
    ]
    if not missing:
        return []
    tools = toolchain or nvcc_build.Toolchain.find()
    missing = [source for source in missing if not nvcc_build.is_built(source, store, tools)]
    unclaimed = [source for source in missing if not is_claimed(source, store)]
    if unclaimed:
        _start(unclaimed, store, tools)
    return missing


def _start(sources: list[Source], store: ArtifactStore, toolchain: nvcc_build.Toolchain) -> None:
    request = {
        "sources": [dataclasses.asdict(source) for source in sources],
        "store": [str(store.folder), store.max_bytes],
        "toolchain": {
            **dataclasses.asdict(toolchain),
            "headers": [str(toolchain.headers.root), toolchain.headers.version],
            "runtime": str(toolchain.runtime),
        },
    }
    process = background_process.start(started_processes, __name__, stdin=subprocess.PIPE)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(request).encode())


def _claim(source: Source) -> str:
    """Return the key whose lock claims a kernel; the lock is released when its process ends."""
    return hashlib.sha256(f"to be built: {nvcc_build.key(source)}".encode()).hexdigest()


def is_claimed(source: Source, store: ArtifactStore) -> bool:
    """Whether a kernel is claimed, or cannot be claimed because the store is not writable."""
    with store.lock(_claim(source), wait=False) as acquired:
        return not acquired


def _main() -> None:
    # The parent may be gone by the time this process is killed, so it kills its compilers itself.
    signal.signal(signal.SIGTERM, lambda *_: compiler_process.end_compilers())
    os.nice(_NICE)
    request = json.load(sys.stdin)
    toolchain_fields = request["toolchain"]
    root, version = toolchain_fields.pop("headers")
    toolchain = nvcc_build.Toolchain(
        **{
            **toolchain_fields,
            "headers": Headers(pathlib.Path(root), tuple(version)),
            "runtime": pathlib.Path(toolchain_fields["runtime"]),
        }
    )
    store = ArtifactStore(*request["store"])
    with contextlib.ExitStack() as stack:
        sources = []
        for fields in request["sources"]:
            source = Source(**fields)
            if stack.enter_context(store.lock(_claim(source), wait=False)):
                sources.append(source)
        nvcc_build.build_all(sources, store, toolchain)


if __name__ == "__main__":
    _main()
