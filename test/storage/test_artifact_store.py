"""The artifact store: entries are intact after crashes, on full disks and after damage."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inductor_ext.storage.artifact_store import ArtifactStore, Usage
from inductor_ext.storage.digest import hash_buffer
from test.support.children import cache as child_cache

CHECKOUT = Path(__file__).parents[2]

KEYS = tuple(f"{index:032x}" for index in range(10))
KEY = KEYS[0]

LARGE = 100 * 2**20


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, warnings: list[str]) -> Iterator[ArtifactStore]:
    """A store without warnings, unless the test reads them."""
    yield ArtifactStore(tmp_path / "store", LARGE, lambda key, message: warnings.append(message))
    assert warnings == []


def put(store: ArtifactStore, key: str, content: bytes = b"content", name: str = "file") -> None:
    with store.publish(key) as folder:
        (folder / name).write_bytes(content)


def content(store: ArtifactStore, key: str, name: str = "file") -> bytes | None:
    with store.get(key) as folder:
        return None if folder is None else (folder / name).read_bytes()


def building(store: ArtifactStore) -> list[str]:
    """Temporary folders: being built, or left behind."""
    folder = store.folder / "building"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def file_of(store: ArtifactStore, key: str = KEY, name: str = "file") -> Path:
    return store.folder / "entries" / key / name


# --- entries ---


def test_a_published_entry_is_found(store: ArtifactStore) -> None:
    assert content(store, KEY) is None
    put(store, KEY, b"one")
    put(store, KEYS[1], b"two")
    assert (content(store, KEY), content(store, KEYS[1])) == (b"one", b"two")
    assert content(store, KEYS[2]) is None
    assert store.usage().entries == 2
    assert building(store) == []


def test_another_store_on_the_same_folder_finds_it(store: ArtifactStore) -> None:
    put(store, KEY)
    assert content(ArtifactStore(store.folder, LARGE), KEY) == b"content"


def test_an_entry_is_a_folder_of_files(store: ArtifactStore, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    store.put(KEY, {"a": tmp_path / "a", "sub/b": tmp_path / "b"})
    with store.get(KEY) as folder:
        assert folder is not None
        assert (folder / "sub" / "b").read_text() == "b"
    assert store.fetch(KEY, {"sub/b": tmp_path / "out"})
    assert (tmp_path / "out").read_text() == "b"
    assert not store.fetch(KEY, {"sub/b": tmp_path / "x", "c": tmp_path / "y"})
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 9 * 2**20 + 5])
def test_files_of_any_size_are_copied_in_and_out(
    store: ArtifactStore, tmp_path: Path, size: int
) -> None:
    data = os.urandom(size)
    (tmp_path / "in").write_bytes(data)
    store.put(KEY, {"file": tmp_path / "in"})
    assert content(store, KEY) == data
    assert store.fetch(KEY, {"file": tmp_path / "out"})
    assert (tmp_path / "out").read_bytes() == data


def test_a_copy_can_be_written_without_harm_to_the_entry(
    store: ArtifactStore, tmp_path: Path
) -> None:
    put(store, KEY)
    assert store.fetch(KEY, {"file": tmp_path / "out"})
    with open(tmp_path / "out", "r+b") as file:
        file.write(b"!")
    assert content(store, KEY) == b"content"


def test_an_exception_inside_publishes_nothing(store: ArtifactStore) -> None:
    with contextlib.suppress(KeyError), store.publish(KEY) as folder:
        (folder / "file").write_text("half")
        raise KeyError
    assert content(store, KEY) is None
    assert building(store) == []


def test_the_first_publication_stays(store: ArtifactStore) -> None:
    with store.publish(KEY) as folder:
        put(store, KEY, b"faster")
        (folder / "file").write_bytes(b"slower")
    assert content(store, KEY) == b"faster"
    assert building(store) == []


@pytest.mark.parametrize("key", ["", "abc", "../" + KEY, KEY.upper() + "A" * 16, KEY + "/x"])
def test_a_key_is_hexadecimal(store: ArtifactStore, key: str) -> None:
    with pytest.raises(ValueError, match="hexadecimal"):
        store.get(key).__enter__()
    with pytest.raises(ValueError, match="hexadecimal"):
        put(store, key)
    assert not store.folder.exists()


def test_the_folder_is_the_users_alone(store: ArtifactStore) -> None:
    put(store, KEY)
    assert store.folder.stat().st_mode & 0o777 == 0o700


# --- digests ---


def test_a_digest_does_not_depend_on_the_number_of_threads() -> None:
    data = os.urandom(7 * 2**20 + 3)
    blocks = [data[start : start + 2**20] for start in range(0, len(data), 2**20)]
    hashes = [hashlib.sha256(block).digest() for block in blocks]
    expected = hashlib.sha256(len(data).to_bytes(8, "little") + b"".join(hashes)).hexdigest()
    assert hash_buffer(data) == expected
    assert hash_buffer(b"") == hashlib.sha256(bytes(8)).hexdigest()


# --- damage ---


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": lambda path: flip(path, 3),
    "truncated": lambda path: os.truncate(path, 3),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "missing": lambda path: path.unlink(),
    "a link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "a fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "with another file": lambda path: path.with_name("more").write_text(""),
    "record flipped": lambda path: flip(path.with_name(".entry"), 90),
    "record's check flipped": lambda path: flip(path.with_name(".entry"), 5),
    "record truncated": lambda path: os.truncate(path.with_name(".entry"), 30),
    "record empty": lambda path: os.truncate(path.with_name(".entry"), 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("way", ["get", "fetch"])
def test_a_damaged_entry_is_removed_and_rebuilt(
    store: ArtifactStore, tmp_path: Path, damage: str, way: str
) -> None:
    put(store, KEY)
    DAMAGES[damage](file_of(store))
    if way == "get":
        assert content(store, KEY) is None
    else:
        assert not store.fetch(KEY, {"file": tmp_path / "out"})
        assert not (tmp_path / "out").exists()
    assert store.usage().entries == 0
    put(store, KEY, b"again")
    assert content(store, KEY) == b"again"


def test_an_entry_under_another_key_is_ignored(store: ArtifactStore) -> None:
    put(store, KEY)
    os.rename(file_of(store).parent, file_of(store, KEYS[1]).parent)
    assert content(store, KEYS[1]) is None


def test_links_are_not_followed(store: ArtifactStore, tmp_path: Path) -> None:
    """Links are followed neither when reading nor when removing."""
    other = ArtifactStore(tmp_path / "other", LARGE)
    put(other, KEY)
    put(store, KEYS[1])
    file_of(store).parent.symlink_to(file_of(other).parent)
    (store.folder / "building" / "link").symlink_to(other.folder)
    assert content(store, KEY) is None
    store.clear()
    assert not file_of(store).parent.is_symlink()
    assert building(store) == []
    assert content(other, KEY) == b"content"


# --- size ---


def test_least_recently_used_entries_are_removed(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, 4_000)
    for index, key in enumerate(KEYS[:3]):
        put(store, key, bytes(1000))
        os.utime(file_of(store, key, ".entry"), (index, index))
    assert content(store, KEYS[0]) is not None
    put(store, KEYS[3], bytes(1000))
    remaining = [key for key in KEYS if file_of(store, key).exists()]
    assert remaining == [KEYS[0], KEYS[2], KEYS[3]]
    assert store.usage().bytes <= store.max_bytes


def test_entries_in_use_are_kept(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path, LARGE)
    put(store, KEY)
    put(store, KEYS[1])
    with store.get(KEY) as folder:
        assert folder is not None
        assert ArtifactStore(tmp_path, LARGE).clear().entries == 1
        assert (folder / "file").read_bytes() == b"content"
    assert store.clear().entries == 1
    assert store.usage() == Usage(0, 0)


def test_entries_being_built_are_kept(store: ArtifactStore) -> None:
    with store.publish(KEY) as folder:
        (folder / "file").write_bytes(b"content")
        store.clear()
        put(store, KEYS[1])
    assert content(store, KEY) == b"content"


def test_too_large_entries_evict_nothing(tmp_path: Path, warnings: list[str]) -> None:
    store = ArtifactStore(tmp_path, 2_000, lambda key, message: warnings.append(message))
    put(store, KEY, bytes(1000))
    put(store, KEYS[1], bytes(3000))
    assert content(store, KEY) is not None
    assert content(store, KEYS[1]) is None
    assert "artifact_cache_size is only 2000 bytes" in warnings[0]


# --- degrading ---


def degraded(store: ArtifactStore, outside: Path) -> None:
    """Call all functions of a store; none may fail or find an entry."""
    (outside / "file").write_text("x")
    with store.lock(KEY):
        assert content(store, KEY) is None
        assert not store.fetch(KEY, {"file": outside / "out"})
        put(store, KEY)
        store.put(KEY, {"file": outside / "file"})
    assert content(store, KEY) is None
    assert store.usage() == store.clear() == Usage(0, 0)


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/nowhere"])
def test_a_missing_folder_disables_the_store(
    tmp_path: Path, warnings: list[str], folder: str
) -> None:
    (tmp_path / "file").write_text("")
    keys = []

    def warn(key: str, message: str) -> None:
        keys.append(key)
        warnings.append(message)

    degraded(ArtifactStore(tmp_path / folder, LARGE, warn), tmp_path)
    assert len(set(keys)) == 1, "more than one warning with events.warn_once"
    assert "artifacts are built without it" in warnings[0]


def test_a_folder_that_cannot_be_written_is_read(
    store: ArtifactStore, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a read-only file system; permissions alone do not keep root out."""
    put(store, KEY)
    opened = os.open

    def read_only(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(store.folder) in str(path):
            raise OSError(30, "Read-only file system")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    assert content(store, KEY) == b"content"
    assert warnings == []
    put(store, KEYS[1])
    assert content(store, KEYS[1]) is None
    assert "Read-only file system" in warnings[0]
    warnings.clear()


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files above a size cannot be written, with an error like that of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_disables_the_store(
    store: ArtifactStore, warnings: list[str], tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(bytes(2**20))
    with file_size_limit(2**19):
        store.put(KEY, {"file": tmp_path / "large"})
    assert len(warnings) == 1
    warnings.clear()
    assert content(store, KEY) is None
    assert building(store) == []
    store.put(KEY, {"file": tmp_path / "large"})
    with file_size_limit(2**19):
        assert not store.fetch(KEY, {"file": tmp_path / "out"})
    assert len(warnings) == 1
    warnings.clear()
    assert not (tmp_path / "out").exists()
    assert store.fetch(KEY, {"file": tmp_path / "out"}), "a full disk elsewhere costs no entry"


# --- processes and threads ---


def test_one_builds_and_the_others_wait(store: ArtifactStore) -> None:
    built: list[int] = []
    contents: list[bytes | None] = []

    def build(index: int) -> None:
        with store.lock(KEY):
            if content(store, KEY) is None:
                built.append(index)
                time.sleep(0.05)
                put(store, KEY)
        contents.append(content(store, KEY))

    threads = [threading.Thread(target=build, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert contents == [b"content"] * 8


WAITER = """
import sys
from inductor_ext.storage.artifact_store import ArtifactStore
with ArtifactStore(sys.argv[1], 1000).lock(sys.argv[2]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_lock_ends_with_its_process(store: ArtifactStore) -> None:
    command = [sys.executable, "-c", WAITER, str(store.folder), KEY]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=CHECKOUT, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        locked = threading.Event()

        def take() -> None:
            with store.lock(KEY):
                locked.set()

        thread = threading.Thread(target=take)
        thread.start()
        assert not locked.wait(0.2)
        child.kill()
        thread.join()
        assert locked.is_set()


def test_a_lock_can_be_tried(store: ArtifactStore) -> None:
    with store.lock(KEY, wait=False) as held, store.lock(KEY, wait=False) as again:
        assert (held, again) == (True, False)
    with store.lock(KEY), store.lock(KEY, wait=False) as held:
        assert not held
    with store.lock(KEY, wait=False) as held:
        assert held


@pytest.mark.parametrize("seed", [1, 2])
def test_processes_killed_at_any_moment_break_nothing(store: ArtifactStore, seed: int) -> None:
    kills = 200
    script = str(Path(child_cache.__file__))
    run = subprocess.run(
        [sys.executable, script, str(store.folder), str(kills), str(seed)],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr == ""
    assert int(run.stdout) == kills
    for key in child_cache.KEYS:
        with store.get(key) as entry:
            if entry is not None:
                child_cache.check(entry, key)
    store.collect(child_cache.MAX_BYTES)
    assert building(store) == []
    assert store.usage().bytes <= child_cache.MAX_BYTES
    assert store.usage().entries > 0
    assert {path.name for path in (store.folder / "entries").iterdir()} <= {*child_cache.KEYS}
    for key in child_cache.KEYS:
        put(store, key, b"free", "small")
        assert content(store, key, "small") in (b"free", child_cache.content(key, "small"))
