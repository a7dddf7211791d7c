"""How many kernels are built at a time, over all processes that share a store of kernels."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Iterator

from inductor_ext.storage.artifact_store import ArtifactStore

_JOB_BYTES = 5 << 30
"""Upper bound of one build's memory, with both halves in parallel [measured: 3.8 and 1.2 GB]."""

_POLL = 0.05
"""Seconds between two attempts to acquire a build slot."""


def jobs(limit: int | None = None) -> int:
    """Return the maximum number of concurrent builds, from cores and memory; at least 1.

    Args:
        limit: upper bound; None for no other than cores and memory.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, total_bytes() // _JOB_BYTES, limit or cores))


def total_bytes() -> int:
    """Return the bytes of memory of the machine, or the limit of the container (cgroup)."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        text = pathlib.Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")
        return min(physical, int(text))
    return physical


def available_bytes() -> int:
    """Return the bytes of memory that are available to a new process."""
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_bytes()


@contextlib.contextmanager
def build_slot(store: ArtifactStore, limit: int | None) -> Iterator[None]:
    """Hold a build slot; wait for one of those that all processes with this store share.

    A slot is a file lock, so it is released when its process dies. Slots are not enforced if the
    store's folder is not writable.
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
            for slot in range(jobs(limit)):
                # The first slot is unconditional; others need enough available memory.
                if slot and available_bytes() < _JOB_BYTES:
                    break
                lock = filelock.FileLock(folder / f"{slot}.lock")
                with contextlib.suppress(filelock.Timeout, OSError):
                    stack.enter_context(lock.acquire(timeout=0))
                    yield
                    return
            time.sleep(_POLL)
