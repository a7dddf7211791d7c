"""The .pt2 archive: writing, compatibility with other readers, and rejected archives."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pathlib
import pickle
import re
import stat
import struct
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterable
from unittest import mock

import pytest

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import zip_format, zip_reader, zip_writer

SHARED = "data/aotinductor/model/a.wrapper.so"
WEIGHTS = "data/aotinductor/model/a.wrapper.weights"
CONTENT = {SHARED: b"\x7fELF" + bytes(range(256)) * 9, WEIGHTS: os.urandom(200_000)}
PAD = zip_format.PAGE


def written(
    entries: Iterable[tuple[str, zip_writer.Source, bool]], root: str = "net"
) -> tuple[bytes, dict[str, zip_format.Entry]]:
    file = io.BytesIO()
    writer = zip_writer.Writer(file, root)
    for name, source, aligned in entries:
        writer.add(name, source, aligned=aligned)
    writer.finish()
    return file.getvalue(), writer.entries


@pytest.fixture(scope="module")
def package() -> bytes:
    """An archive with one aligned entry."""
    return written((name, data, name == WEIGHTS) for name, data in CONTENT.items())[0]


def refused(data: bytes) -> str:
    """The reason why an archive is rejected, at the latest when all of it is verified."""
    with (
        pytest.raises(exc.BadPackageError) as caught,
        zip_reader.open_package(io.BytesIO(data)) as it,
    ):
        it.verify({name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()})
    return str(caught.value.fields["why"])


# Writing


@pytest.mark.parametrize("before", [0, 1, 100, PAD - 200, PAD - 150, PAD - 91, PAD - 90, PAD - 60])
def test_aligned_entries_begin_at_a_page(before: int) -> None:
    entries = [("extra/a", b"x" * before, False), (WEIGHTS, b"w" * 100, True)]
    for length in range(
        6
    ):  # the last bytes before a page, where the header of an extra field does not fit
        data, places = written([*entries, ("extra/" + "b" * (length + 1), b"b", True)])
        assert places[WEIGHTS].offset % PAD == 0
        for entry in places.values():
            assert entry.offset % 64 == 0
        with zip_reader.open_package(io.BytesIO(data)) as opened:
            assert {n: e.offset for n, e in opened.entries.items()} == {
                n: e.offset for n, e in places.items()
            }
            assert opened.read(WEIGHTS) == b"w" * 100


def test_every_distance_to_a_page_is_padded() -> None:
    """Also one to three bytes, and more than an extra field can have."""
    for before in range(PAD - 120, PAD - 20):
        _, places = written([("extra/a", b"x" * before, False), ("extra/b", b"", True)])
        assert places["extra/b"].offset % PAD == 0


def test_equal_entries_give_equal_bytes_and_identity() -> None:
    entries = [(name, data, True) for name, data in CONTENT.items()]
    first, places = written(entries)
    assert written(entries)[0] == first
    _, others = written([(name, data + b"!", True) for name, data in CONTENT.items()])
    identity = ".data/serialization_id"
    assert places[identity].sha256 != others[identity].sha256
    with zip_reader.open_package(io.BytesIO(first)) as opened:
        text = opened.read(identity).decode()
    assert len(text) == 40
    assert text.isdecimal()
    assert text == zip_format.serialization_id(
        {name: places[name].sha256 or "" for name in CONTENT}
    )


def test_all_kinds_of_sources_are_the_same_content(tmp_path: pathlib.Path) -> None:
    data = os.urandom(3 << 20)
    (tmp_path / "whole").write_bytes(data)
    sources: list[zip_writer.Source] = [
        data,
        bytearray(data),
        memoryview(data).cast("d"),
        tmp_path / "whole",
        str(tmp_path / "whole"),
        zip_writer.Chunks(
            len(data), (data[at : at + 70_001] for at in range(0, len(data), 70_001))
        ),
    ]
    assert len({written([("extra/x", source, True)])[0] for source in sources}) == 1


def test_checksums_are_those_of_the_content() -> None:
    _, places = written((name, data, False) for name, data in CONTENT.items())
    for name, data in CONTENT.items():
        entry = places[name]
        assert (entry.size, entry.crc32) == (len(data), zlib.crc32(data))
        assert entry.sha256 == hashlib.sha256(data).hexdigest()


def test_large_entries_stream(tmp_path: pathlib.Path) -> None:
    """Written by the second thread, in constant memory."""
    size, part = 48 << 20, os.urandom(1 << 20)
    tracemalloc.start()
    with open(tmp_path / "a.pt2", "wb") as file:
        writer = zip_writer.Writer(file, "a")
        entry = writer.add(
            WEIGHTS, zip_writer.Chunks(size, (part for _ in range(48))), aligned=True
        )
        writer.finish()
    with zip_reader.open_package(tmp_path / "a.pt2") as opened:
        opened.verify({WEIGHTS: entry.sha256 or ""})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert entry.sha256 == hashlib.sha256(part * 48).hexdigest()
    assert peak < 12 << 20


class Sparse(io.RawIOBase):
    """A sparse file: it stores only the written ranges."""

    def __init__(self) -> None:
        self.pieces: dict[int, bytes] = {}
        self.at = self.end = 0

    def write(self, data: zip_format.Buffer) -> int:  # type: ignore[override]
        if len(data) < 1 << 20:
            self.pieces[self.at] = bytes(data)
        self.at += len(data)
        self.end = max(self.end, self.at)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.end)[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        data = bytearray(size if size >= 0 else self.end - self.at)
        size = len(data)
        for begin, piece in self.pieces.items():
            low, high = max(begin, self.at), min(begin + len(piece), self.at + size)
            if low < high:
                data[low - self.at : high - self.at] = piece[low - begin : high - begin]
        return bytes(data)


def test_more_than_four_gigabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """zip64 sizes and offsets, without computing checksums of so much data."""

    class NoSums(zip_format.Checksums):
        def update(self, data: zip_format.Buffer) -> None:
            self.size += len(data)

    for module in (zip_reader, zip_writer):
        monkeypatch.setattr(module, "Checksums", NoSums)
    file, part, count = Sparse(), bytes(64 << 20), 65
    writer = zip_writer.Writer(file, "big")  # type: ignore[arg-type]
    writer.add(WEIGHTS, zip_writer.Chunks(count * len(part), (part for _ in range(count))))
    writer.add("extra/after", b"tail", aligned=True)
    writer.finish()
    with zip_reader.open_package(file) as opened:  # type: ignore[arg-type]
        assert opened.entries[WEIGHTS].size == count * (64 << 20) > 1 << 32
        assert opened.entries["extra/after"].offset == writer.entries["extra/after"].offset
        assert opened.read("extra/after") == b"tail"
    assert zipfile.ZipFile(file).getinfo("big/extra/after").header_offset > 1 << 32  # type: ignore[type-var]


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "data/../../evil",
        "/etc/passwd",
        "C:/evil",
        "data\\..\\evil",
        "data/a\0b",
        "data/a\nb",
        "data//a",
        "data/./a",
        "data/",
        "",
        "evil",
        "etc/passwd",
        "data/" + "a" * 256,
    ],
)
def test_names_cannot_lead_out_of_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="the name"):
        written([(name, b"", False)])
    if name and "\0" not in name:  # zipfile truncates names at a NUL
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            info = zipfile.ZipInfo("net/x")
            info.filename = f"net/{name}"
            archive.writestr(info, b"")
        assert refused(file.getvalue()).startswith("the name ")


def test_misuse_of_the_writer_is_rejected() -> None:
    with pytest.raises(ValueError, match="there is an entry 'extra/a' already"):
        written([("extra/a", b"", False), ("extra/a", b"", False)])
    with pytest.raises(ValueError, match="gave 3 bytes and not 4"):
        written([("extra/a", zip_writer.Chunks(4, [b"abc"]), False)])
    for root in ("", "..", "a/b", "a\\b"):
        with pytest.raises(ValueError, match="root folder"):
            written([], root)


# Reading by others


def test_zipfile_reads_it(package: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(package)) as opened:
        assert opened.testzip() is None
        assert {n: opened.read(f"net/{n}") for n in CONTENT} == CONTENT
        assert opened.read("net/archive_format") == b"pt2"
        assert opened.read("net/byteorder").decode() == sys.byteorder
        for info in opened.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert stat.S_ISREG(info.external_attr >> 16)


def test_torch_reads_it(package: bytes, tmp_path: pathlib.Path) -> None:
    import torch

    path = tmp_path / "net.pt2"
    path.write_bytes(package)
    for source in (str(path), io.BytesIO(package)):
        reader = torch._C.PyTorchFileReader(source)
        assert set(reader.get_all_records()) == {*CONTENT, *zip_format.BOOKKEEPING}
        assert {n: reader.get_record(n) for n in CONTENT} == CONTENT
    assert reader.serialization_id().isdecimal()


# Reading


def test_a_written_package_is_read(package: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(package)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
    for source in (path, str(path), io.BytesIO(package)):
        with zip_reader.open_package(source) as opened:
            assert opened.root == "net"
            assert opened.entries.keys() == {*CONTENT, *zip_format.BOOKKEEPING}
            opened.verify(digests)
            assert {name: opened.read(name) for name in CONTENT} == CONTENT
            place = opened.locate(WEIGHTS)
            if source is path:
                assert place is not None
                name, offset, size = place
                assert (name, offset % PAD) == (str(path), 0)
                assert path.read_bytes()[offset : offset + size] == CONTENT[WEIGHTS]
            elif not isinstance(source, str):
                assert place is None


def test_an_unpacked_folder_is_read(package: bytes, tmp_path: pathlib.Path) -> None:
    """Both the folder of the unpacked archive and the root folder itself."""
    zipfile.ZipFile(io.BytesIO(package)).extractall(tmp_path)
    (tmp_path / "net" / "notes.txt").write_text("beside the package's own")
    for folder in (tmp_path, tmp_path / "net"):
        with zip_reader.open_package(folder) as opened:
            assert opened.entries.keys() == {*CONTENT, *zip_format.BOOKKEEPING}
            opened.verify({SHARED: hashlib.sha256(CONTENT[SHARED]).hexdigest()})
            place = tmp_path / "net" / WEIGHTS
            assert opened.locate(WEIGHTS) == (str(place), 0, place.stat().st_size)
    place.write_bytes(b"other")
    with (
        zip_reader.open_package(tmp_path) as opened,
        pytest.raises(exc.BadPackageError, match="256"),
    ):
        opened.verify({WEIGHTS: hashlib.sha256(CONTENT[WEIGHTS]).hexdigest()})
    place.unlink()
    place.symlink_to("/etc/hostname")
    with pytest.raises(exc.BadPackageError, match="is a link or a device"):
        zip_reader.open_package(tmp_path)


def test_a_compressed_archive_is_read(package: bytes) -> None:
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in opened.entries:
                archive.writestr(f"net/{name}", opened.read(name))
    with zip_reader.open_package(file) as opened:
        opened.verify({name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()})
        assert {name: opened.read(name) for name in CONTENT} == CONTENT
        assert opened.locate(SHARED) is None


def test_extraction_is_private_and_checked(package: bytes, tmp_path: pathlib.Path) -> None:
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        target = tmp_path / "a.so"
        opened.extract(SHARED, target, hashlib.sha256(CONTENT[SHARED]).hexdigest())
        assert target.read_bytes() == CONTENT[SHARED]
        assert stat.S_IMODE(target.stat().st_mode) == 0o600
        with pytest.raises(FileExistsError):
            opened.extract(SHARED, target)
        with pytest.raises(exc.BadPackageError, match="SHA-256"):
            opened.extract(SHARED, tmp_path / "b.so", "0" * 64)
        with pytest.raises(exc.BadPackageError, match="no entry 'extra/none'"):
            opened.extract("extra/none", tmp_path / "c")
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(OSError):
            opened.extract(SHARED, tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.so", "link"]


# Damage


def test_every_truncation_is_refused(package: bytes) -> None:
    for size in [0, 1, 21, 22, 100, *range(len(package) - 400, len(package)), len(package) // 2]:
        assert refused(package[:size])


def test_every_flipped_byte_of_content_is_found(package: bytes) -> None:
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        places = [(e.offset, e.size) for e in opened.entries.values()]
    for offset, size in places:
        for at in {offset, offset + size // 2, offset + size - 1}:
            data = bytearray(package)
            data[at] ^= 4
            assert "is damaged" in refused(bytes(data))


def test_a_flipped_byte_anywhere_is_found_or_harmless(package: bytes) -> None:
    """In names, sizes, offsets and checksums; the rest are dates, versions and padding."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        content = [range(e.offset, e.offset + e.size) for e in opened.entries.values()]
    meaning = [at for at in range(len(package)) if not any(at in item for item in content)]
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
    for at in meaning[:200] + meaning[200:-1400:997] + meaning[-1400:]:
        data = bytearray(package)
        data[at] ^= 1 << at % 8
        try:
            with zip_reader.open_package(io.BytesIO(data)) as opened:
                opened.verify(digests)
                assert {name: opened.read(name) for name in CONTENT} == CONTENT
        except exc.BadPackageError:
            continue


def rewritten(change: Callable[[zipfile.ZipFile], None]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in CONTENT.items():
            archive.writestr(f"net/{name}", data)
        change(archive)
    return file.getvalue()


def duplicate(archive: zipfile.ZipFile) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(f"net/{SHARED}", b"other")


def link(archive: zipfile.ZipFile) -> None:
    info = zipfile.ZipInfo("net/data/link")
    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    archive.writestr(info, "/etc/passwd")


def overlap(archive: zipfile.ZipFile) -> None:
    archive.writestr("net/extra/x", b"")
    info = archive.getinfo("net/extra/x")
    twin = archive.getinfo(f"net/{SHARED}")
    info.header_offset = twin.header_offset


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (duplicate, f"two entries {SHARED!r}"),
        (link, "data/link is a link"),
        (overlap, "header of extra/x is damaged"),
        (lambda archive: archive.writestr("other/data/x", b""), "several root"),
        (lambda archive: archive.writestr("x", b""), "is not below a root folder"),
        (lambda archive: archive.writestr("net/data/empty/", b""), "names a folder"),
        (lambda archive: archive.writestr("net/bin/x", b""), "outside the folders"),
        (
            lambda archive: archive.writestr("net/data/x", b"x" * 99, zipfile.ZIP_BZIP2),
            "method 12",
        ),
    ],
)
def test_unsafe_archives_are_refused(change: Callable[[zipfile.ZipFile], None], why: str) -> None:
    assert why in refused(rewritten(change))


def test_a_header_that_contradicts_the_directory_is_refused(package: bytes) -> None:
    """Readers differ in which of the two they use."""
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        first = opened.entries[SHARED]
    header = package.index(b"PK\x03\x04")
    assert header < first.offset
    for field, at in {"method": 8, "checksum": 14, "packed": 18, "size": 22, "name": 31}.items():
        data = bytearray(package)
        data[header + at] ^= 8
        assert "the header of" in refused(bytes(data)), field


def test_an_archive_within_an_archives_end_is_refused(package: bytes) -> None:
    """A comment may contain another end of directory, which other readers may find first."""
    assert "it was truncated" in refused(package[:-2] + struct.pack("<H", 3) + b"abc")
    assert "end" in refused(package + package[-22:])


def test_a_zip_bomb_is_not_inflated() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/extra/bomb", bytes(64 << 20))
    data = bytearray(file.getvalue())
    for signature, at in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        struct.pack_into("<L", data, data.index(signature) + at, 1000)
    with zip_reader.open_package(io.BytesIO(data)) as opened:
        tracemalloc.start()
        with pytest.raises(exc.BadPackageError, match="more than the recorded 1000 bytes"):
            opened.read("extra/bomb")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
        with pytest.raises(exc.BadPackageError, match="too large for this kind of file"):
            opened.read("extra/bomb", limit=999)


def test_a_missing_file_is_not_found(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "x.pt2")
    with pytest.raises(FileNotFoundError) as caught:
        zip_reader.open_package(path)
    error = caught.value
    assert isinstance(error, exc.PackageNotFoundError)
    assert (error.errno, error.filename) == (errno.ENOENT, path)
    assert str(error).startswith(f"There is no package at {path}. Pass the path of a .pt2 file")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.filename) == (type(error), str(error), path)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("text", "it is not a zip file"),
        ("short", "it is not a zip file"),
        ("empty", "it is not a zip file"),
        ("folder", "the folder has no file of a package in it"),
    ],
)
def test_other_files_are_no_packages(kind: str, why: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.pt2"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes({"text": b"no zip file, but as long " * 9, "short": b"no"}.get(kind, b""))
    with pytest.raises(exc.NotAPackageError, match=re.escape(f"{path} is not a package: {why}.")):
        zip_reader.open_package(path)


def test_truncated_packages_are_damaged(package: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.pt2"
    for content in (package[: len(package) // 2], package + b"other"):
        path.write_bytes(content)
        with pytest.raises(exc.BadPackageError, match="damaged or unsafe: it was truncated") as e:
            zip_reader.open_package(path)
        assert not isinstance(e.value, exc.NotAPackageError)


def test_files_that_may_not_be_read(package: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.pt2"
    path.write_bytes(package)
    with (
        mock.patch("os.open", side_effect=PermissionError(errno.EACCES, "no")),
        pytest.raises(exc.UnreadablePackageError, match=r"Cannot read the package .*: Permission"),
    ):
        zip_reader.open_package(path)


def test_entries_of_an_opened_package_have_no_digest(package: bytes) -> None:
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        assert all(entry.sha256 is None for entry in opened.entries.values())
