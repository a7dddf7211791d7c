"""Start users of a store, kill them at random moments and print how many were killed.

    python child_cache.py FOLDER KILLS SEED

Prints the number of users that died by the kill and not by an error. They fetch, read, build,
damage nothing and collect; each checks what it reads.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from inductor_ext.storage.artifact_store import ArtifactStore

KEYS = tuple(f"{index:032x}" for index in range(6))

SIZES = {"small": 100, "nested/large": 300_000}

MAX_BYTES = 4 * (sum(SIZES.values()) + 1000)
"""Less than all keys need, so that entries are removed continuously."""


def content(key: str, name: str) -> bytes:
    """The content of a file of an entry."""
    return random.Random(key + name).randbytes(SIZES[name])


def check(folder: Path, key: str) -> None:
    """Raise unless a folder contains an entry's files."""
    for name in SIZES:
        assert (folder / name).read_bytes() == content(key, name), f"{name} of {key} is broken"


def use(store: ArtifactStore, key: str, outside: Path) -> None:
    """Take an entry, or build it, in one of the two ways."""
    with store.lock(key):
        with store.get(key) as entry:
            if entry is not None:
                check(entry, key)
                return
        with store.publish(key) as folder:
            for name in SIZES:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(content(key, name))
    if store.fetch(key, {name: outside / Path(name).name for name in SIZES}):
        for name in SIZES:
            assert (outside / Path(name).name).read_bytes() == content(key, name)


def live(folder: str, seed: int) -> None:
    """Use a store until killed."""
    choose = random.Random(seed)
    store = ArtifactStore(folder, MAX_BYTES)
    with tempfile.TemporaryDirectory() as outside:
        while True:
            use(store, choose.choice(KEYS), Path(outside))


def main(folder: str, kills: int, seed: int) -> None:
    choose = random.Random(seed)
    died = 0
    children: list[int] = []
    for index in range(kills):
        # Two at a time, so that a living process meets what a killed one left.
        while len(children) < 2:
            child = os.fork()
            if child == 0:
                try:
                    live(folder, seed + index)
                finally:
                    os._exit(1)
            children.append(child)
        time.sleep(choose.uniform(0, 0.02))
        victim = children.pop(0)
        os.kill(victim, signal.SIGKILL)
        died += os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) == -signal.SIGKILL
    # On a slow machine no process may have lived long enough to finish an entry.
    store = ArtifactStore(folder, MAX_BYTES)
    while not store.usage().entries and all(os.waitpid(c, os.WNOHANG)[0] == 0 for c in children):
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(died)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
