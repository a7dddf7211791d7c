"""Mutations of packages: damage to the archive, other names, and forged manifests."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from inductor_ext.cpp_wrapper.package import manifest, zip_reader
from test.support.altered_packages import contents, manifest_of, seal

EVIL_NAME = "inductor_ext_fuzz_evil"
"""Name of files that no case may create."""

SANDBOX_DEPTH = 4
"""Folders between the sandbox and the folder for temporary files, so that `../` stays within it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A changed package."""

    kind: str
    data: bytes
    is_consistent: bool
    """Whether the package is unchanged, or all its checksums were corrected."""


def _flip(package: bytes, rng: random.Random) -> bytes:
    """Flipped bits, mostly in the archive's structure and the manifest."""
    data = bytearray(package)
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        places = [range(entry.offset - 60, entry.offset) for entry in opened.entries.values()]
        listed = opened.entries[manifest.PATH]
    places.append(range(listed.offset, listed.offset + listed.size))
    places.append(range(len(data) - 1500, len(data)))
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        place = rng.choice([range(len(data)), *places])
        at = max(0, min(len(data) - 1, rng.choice(place)))
        data[at] ^= 1 << rng.randrange(8)
    return bytes(data)


def _overwrite(package: bytes, rng: random.Random) -> bytes:
    data = bytearray(package)
    size = rng.choice((1, 2, 4, 8, 100, 4096))
    at = rng.randrange(len(data) - size)
    if rng.random() < 0.5:
        at = rng.randrange(len(data) - 1500, len(data) - min(size, 1400))
    filling = rng.choice((b"\0", b"\xff", b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"../../"))
    data[at : at + size] = (filling * size)[:size]
    return bytes(data)


def _truncate(package: bytes, rng: random.Random) -> bytes:
    return package[
        : rng.choice((rng.randrange(len(package)), len(package) - rng.randrange(1, 300)))
    ]


def _splice(package: bytes, rng: random.Random) -> bytes:
    """A range removed, inserted, or duplicated."""
    begin, end = sorted(rng.randrange(len(package)) for _ in range(2))
    end = min(end, begin + rng.choice((1, 16, 512, 1 << 16)))
    stretch = package[begin:end]
    at = rng.randrange(len(package))
    return rng.choice(
        (
            package[:begin] + package[end:],
            package[:at] + stretch + package[at:],
            package[:at] + stretch + package[at + len(stretch) :],
            package + stretch,
            stretch + package,
        )
    )


def _numbers(package: bytes, rng: random.Random) -> bytes:
    """A field of the archive's directory or end, set to a critical value."""
    data = bytearray(package)
    central = list(_signatures(package, b"PK\x01\x02"))
    end = package.rindex(b"PK\x05\x06")
    at, fields = rng.choice(
        [
            *((item, ((8, "H"), (10, "H"), (16, "L"), (20, "L"), (24, "L"), (28, "H"), (30, "H"),
                      (32, "H"), (34, "H"), (38, "L"), (42, "L"))) for item in central),
            (end, ((4, "H"), (6, "H"), (8, "H"), (10, "H"), (12, "L"), (16, "L"), (20, "H"))),
        ]
    )  # fmt: skip
    offset, kind = rng.choice(fields)
    top = 0xFFFF if kind == "H" else 0xFFFFFFFF
    (old,) = struct.unpack_from(f"<{kind}", data, at + offset)
    new = rng.choice(
        (0, 1, top, top - 1, top // 2 + 1, old + 1, old - 1, old ^ 8, rng.randrange(top))
    )
    struct.pack_into(f"<{kind}", data, at + offset, new & top)
    return bytes(data)


def _signatures(package: bytes, signature: bytes) -> Iterator[int]:
    at = package.find(signature)
    while at >= 0:
        yield at
        at = package.find(signature, at + 1)


def _evil_names(name: str, others: Sequence[str], rng: random.Random) -> str:
    """Another name, which may lead out of the folder."""
    up = "../" * rng.randrange(1, SANDBOX_DEPTH + 4)
    return rng.choice(
        (
            f"{up}{EVIL_NAME}",
            f"data/aotinductor/model/{up}{EVIL_NAME}.so",
            f"/tmp/{EVIL_NAME}",
            f"data/constants/{up}{EVIL_NAME}",
            f"data\\aotinductor\\{EVIL_NAME}",
            f"C:/{EVIL_NAME}",
            f"data/aotinductor/model/./{EVIL_NAME}.json",
            f"data//{EVIL_NAME}",
            f"data/{EVIL_NAME}/",
            f"{EVIL_NAME}",
            f"data/{EVIL_NAME}\n",
            f"data/{EVIL_NAME}\0.so",
            "",
            ".",
            "..",
            "data/aotinductor/model/",
            "data/aotinductor/other/a.so",
            f"data/aotinductor/model/{'a' * 300}.json",
            "data/aotinductor/model/\udcff.json",
            name.upper(),
            name + ".x",
            name[:-1],
            rng.choice(others),
        )
    )


def _zip(entries: Sequence[tuple[str, bytes, int]], root: str) -> bytes:
    """An archive with arbitrary names; the third field is the file's mode."""
    parts, directory, at = [], [], 0
    for name, data, mode in entries:
        path = f"{root}{name}".encode("utf-8", "surrogateescape")
        crc32 = zlib.crc32(data)
        sizes = struct.pack("<3L2H", crc32, len(data), len(data), len(path), 0)
        local = struct.pack("<4s5H", b"PK\x03\x04", 20, 0, 0, 0, 33) + sizes + path
        parts += [local, data]
        directory.append(
            struct.pack("<4s6H", b"PK\x01\x02", 20 | 3 << 8, 20, 0, 0, 0, 33)
            + sizes
            + struct.pack("<3H2L", 0, 0, 0, mode << 16, at)
            + path
        )
        at += len(local) + len(data)
    central = b"".join(directory)
    count = len(entries)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(central), at, 0)
    return b"".join([*parts, central, end])


def _rename(package: bytes, rng: random.Random) -> bytes:
    """Entries renamed, duplicated, dropped, or as links, in an intact archive."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        files = [(name, opened.read(name), stat.S_IFREG | 0o644) for name in opened.entries]
        root = f"{opened.root}/"
    names = [name for name, _, _ in files]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(files))
        name, data, mode = files[at]
        what = rng.randrange(6)
        if what == 0 and len(files) > 1:
            del files[at]
        elif what == 1:
            files.insert(rng.randrange(len(files)), (_evil_names(name, names, rng), data, mode))
        elif what == 2:
            target = rng.choice((b"/etc/passwd", f"../../{EVIL_NAME}".encode(), b"data/x"))
            files[at] = (name, target, stat.S_IFLNK | 0o777)
        elif what == 3:
            other = rng.randrange(len(files))
            files[at], files[other] = (
                (name, files[other][1], mode),
                (files[other][0], data, files[other][2]),
            )
        else:
            files[at] = (_evil_names(name, names, rng), data, mode)
    if rng.random() < 0.1:
        root = rng.choice(("", "/", "../", f"../../{EVIL_NAME}/", "a/b/"))
    return _zip(files, root)


_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, 0.5, "", "x", [], {}, [[]], {"a": {}}),
    *("../x", "/etc/passwd", "data/constants/x", "cuda", "sm_90", "avx9999", "float64", "s0"),
    *("x86-64-v3", "data/inductor_ext/x86-64-v3/model/x.so"),
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(item, (*path, key))


def _alter(content: Any, rng: random.Random) -> Any:
    """JSON with one or more values changed, exchanged, removed or inserted."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not isinstance(content, (dict, list)):
            break
        paths = [path for path in _paths(content) if path]
        if not paths:
            break
        path = rng.choice(paths)
        inner = content
        for key in path[:-1]:
            inner = inner[key]
        value = inner[path[-1]]
        what = rng.randrange(5)
        if what == 0:
            del inner[path[-1]]
        elif what == 1:
            inner[path[-1]] = rng.choice(_VALUES)
        elif what == 2:
            other = rng.choice(paths)
            source = content
            for key in other:
                source = source[key] if _has(source, key) else None
            inner[path[-1]] = copy.deepcopy(source)
        elif what == 3 and isinstance(value, str):
            inner[path[-1]] = _flip_text(value, rng)
        elif what == 3 and isinstance(value, int):
            inner[path[-1]] = value + rng.choice((-1, 1, 64))
        elif isinstance(inner, list):
            inner.insert(path[-1], copy.deepcopy(value))
        else:
            inner[f"{path[-1]}_"] = value
    return content


def _has(value: Any, key: Any) -> bool:
    if isinstance(value, dict):
        return key in value
    return isinstance(value, list) and isinstance(key, int) and key < len(value)


def _flip_text(text: str, rng: random.Random) -> str:
    if not text:
        return "x"
    at = rng.randrange(len(text))
    return text[:at] + rng.choice('x0"\\/.[]{}\0é') + text[at + rng.randrange(2) :]


def _forge(package: bytes, rng: random.Random) -> bytes:
    """The manifest altered, and all checksums corrected."""
    return seal(contents(package), _alter(manifest_of(package), rng))


def _tamper(package: bytes, rng: random.Random) -> bytes:
    """The manifest altered, in an otherwise intact archive."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        files = {name: opened.read(name) for name in opened.entries}
    content = json.loads(files[manifest.PATH])
    files[manifest.PATH] = json.dumps(_alter(content, rng)).encode()
    if rng.random() < 0.2:
        files[manifest.PATH] = _flip_bytes(files[manifest.PATH], rng)
    return _zip([(name, data, stat.S_IFREG | 0o644) for name, data in files.items()], "net/")


def _flip_bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _contents(package: bytes, rng: random.Random) -> bytes:
    """Contents changed; the archive's checksums are correct and the manifest's are not."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        files = {name: opened.read(name) for name in opened.entries}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([name for name in files if files[name]])
        data = files[name]
        files[name] = rng.choice(
            (_flip_bytes(data, rng), data[: rng.randrange(len(data))], data + b"\0", b"")
        )
    return _zip([(name, data, stat.S_IFREG | 0o644) for name, data in files.items()], "net/")


def _side_files(package: bytes, rng: random.Random) -> bytes:
    """Files other than library and weights changed, and all checksums corrected."""
    files = contents(package)
    names = [name for name in files if not name.endswith((".so", ".weights"))]
    if names:
        name = rng.choice(names)
        files[name] = _flip_bytes(files[name], rng) if files[name] else b"x"
    if rng.random() < 0.3:
        files[f"data/aotinductor/model/{rng.choice(('b.so', 'x.json', 'y.weights'))}"] = b"{}"
    return seal(files, manifest_of(package))


_KINDS: tuple[tuple[int, Callable[[bytes, random.Random], bytes]], ...] = (
    (5, _flip),
    (2, _overwrite),
    (1, _truncate),
    (2, _splice),
    (3, _numbers),
    (4, _rename),
    (3, _forge),
    (2, _tamper),
    (2, _contents),
    (1, _side_files),
)
"""Mutations with their relative frequency."""


def mutate(package: bytes, seed: int, number: int) -> Case:
    """The case with a number: the same for the same package, seed and number."""
    rng = random.Random(f"{seed}:{number}")
    (chosen,) = rng.choices([kind for _, kind in _KINDS], [weight for weight, _ in _KINDS])
    data = chosen(package, rng)
    is_consistent = chosen in (_forge, _side_files) or data == package
    return Case(chosen.__name__.strip("_"), data, is_consistent)
