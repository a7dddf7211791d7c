"""`inspect`, `verify` and `diff`: their output and exit codes."""

from __future__ import annotations

import io
import json
import pathlib
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from inductor_ext import exc
from inductor_ext.cli import main
from inductor_ext.cpp_wrapper.package import manifest, zip_format, zip_reader, zip_writer
from test.support import altered_packages

STEM = "data/aotinductor/model/" + "c" + "a2" * 25 + "."
METADATA = {"AOTI_DEVICE_KEY": "cpu", "AOTI_CPU_ISA": "AVX2"}
ENTRIES = {
    f"{STEM}wrapper.so": b"library" * 100,
    f"{STEM}wrapper.weights": bytes(4096),
    f"{STEM}wrapper_metadata.json": json.dumps(METADATA).encode(),
}


def content() -> dict[str, Any]:
    """A manifest without a compiled model."""
    constants = [
        {
            "name": f"layer_{at}_weight",
            "fqn": f"layer.{at}.weight",
            "dtype": "float32",
            "shape": [4, 2 * at],
            "stride": [2 * at, 1],
            "bytes": 32 * at,
            "offset": 512 * at,
            "sha256": f"{at}" * 64,
        }
        for at in range(1, 5)
    ]
    signature = {
        "inputs": [
            {
                "kind": "tensor",
                "name": "batch['x']",
                "path": "args[0]['x']",
                "dtype": "float32",
                "shape": ["s0", 8],
                "stride": [8, 1],
                "device": "cpu",
            },
            {"kind": "constant", "name": "times", "path": "args[1]", "value": 3},
            {"kind": "symbol", "name": "k", "path": "args[2]", "type": "int", "symbol": "s1"},
        ],
        "symbols": {"s0": {"min": 2, "max": 64}, "s1": {"min": 0, "max": None}},
        "constraints": ["Eq(Mod(s0, 2), 0)"],
        "unchecked": [],
        "outputs": [
            {"kind": "tensor", "path": "", "dtype": "bfloat16", "shape": ["s0"], "device": "cpu"},
            {"kind": "none", "path": "[1]"},
        ],
        "in_spec": "",
        "out_spec": "",
    }
    return {
        "format": 1,
        "models": {
            "model": {
                "device": "cpu",
                "library": f"{STEM}wrapper.so",
                "weights": f"{STEM}wrapper.weights",
                "signature": signature,
                "constants": constants,
                "kernels": [{"name": "cpp_fused_add_0", "operators": ["aten.add", "aten.mul"]}],
                "cpu_features": ["popcnt"],
                "options": {"max_autotune": True},
                "memory": {"peak": 2048, "lower_bound": 1024, "allocator_calls": 4, "arenas": []},
            }
        },
        "versions": {"torch": "2.0.1", "cuda": None, "compiler": "g++ 12.2.0"},
        "platform": {"system": "linux", "machine": "x86_64"},
        "provenance": {"commit": "abc123"},
    }


@pytest.fixture
def package(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "net.pt2"
    path.write_bytes(altered_packages.seal(ENTRIES, content()))
    return str(path)


@pytest.fixture
def stock(tmp_path: pathlib.Path) -> str:
    """A package as torch writes it: without a manifest."""
    path = tmp_path / "stock.pt2"
    path.write_bytes(altered_packages.write(ENTRIES, "stock"))
    return str(path)


def other(tmp_path: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A package whose manifest differs."""
    changed = content()
    change(changed)
    path = tmp_path / "other.pt2"
    path.write_bytes(altered_packages.seal(ENTRIES, changed))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and what was printed, errors included."""
    code = main.main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def words(line: str) -> list[str]:
    return line.split()


# inspect


def test_inspect_describes_the_signature(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "inspect", package)
    assert code == 0
    lines = [words(line) for line in out.splitlines()]
    for line in (
        "batch['x'] float32 [s0, 8] strides [8, 1] cpu",
        "times always 3",
        "k int s1",
        "2 <= s0 <= 64",
        "0 <= s1",
        "Eq(Mod(s0, 2), 0)",
        "result bfloat16 [s0] cpu",
        "[1] always None",
    ):
        assert words(line) in lines


def test_inspect_lists_the_files_of_a_package(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = run(capsys, "inspect", package, "--top", "2")
    lines = [words(line) for line in out.splitlines()]
    for line in (
        "compiled by torch 2.0.1, g++ 12.2.0",
        "compiled for linux x86_64",
        "commit abc123",
        "CPU needs popcnt",
        "constants 4, 320 B, mapped",
        "layer.4.weight float32 [4, 8] 128 B 444444444444",
        "layer.3.weight float32 [4, 6] 96 B 333333333333",
        "and 2 smaller ones",
        "cpp_fused_add_0 cpu aten.add, aten.mul",
        "memory peak 2.00 KiB, lower bound 1.00 KiB, allocator calls 4, 0 arenas",
        "options max_autotune=True",
        "files 9",
    ):
        assert words(line) in lines
    assert "layer.1.weight" not in out
    assert "runs here    no: it was compiled for torch 2.0.1, and this is torch" in out


def test_inspect_prints_json(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "inspect", package, "--json")
    report = json.loads(out)
    assert code == 0
    assert (
        report["manifest"]["models"]["model"]["signature"]
        == (content()["models"]["model"]["signature"])
    )
    assert report["bytes"] == pathlib.Path(package).stat().st_size
    assert report["fits"] == {"model": False}
    assert "torch 2.0.1" in report["misfits"]["model"]
    assert report["metadata"] == {"model": METADATA}
    places = {entry["name"]: entry["offset"] for entry in report["entries"]}
    assert places.keys() == {*ENTRIES, manifest.PATH, *zip_format.BOOKKEEPING}
    assert places[f"{STEM}wrapper.weights"] % zip_format.PAGE == 0


def test_inspect_describes_inductors_packages(
    stock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, "inspect", stock)
    assert code == 0
    assert "compiled by Inductor (default): no manifest" in out
    assert words("AOTI_CPU_ISA AVX2") in [words(line) for line in out.splitlines()]
    _, printed = run(capsys, "inspect", stock, "--json")
    assert json.loads(printed)["manifest"] is None


def test_inspect_reads_an_unpacked_folder(
    package: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zipfile.ZipFile(package).extractall(tmp_path / "unpacked")
    code, out = run(capsys, "inspect", str(tmp_path / "unpacked"))
    assert code == 0
    assert "batch['x']" in out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_unreadable_packages_exit_with_2(
    command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pt2"
    assert f"There is no package at {path}" in run(capsys, command, str(path))[1]
    path.write_bytes(b"nothing of the kind" * 10)
    code, out = run(capsys, command, str(path))
    assert code == 2
    assert out.startswith(f"inductor-ext: {path} is not a package: it is not a zip file.")


def test_inspect_rejects_an_invalid_signature(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(changed: dict[str, Any]) -> None:
        changed["models"]["model"]["signature"]["inputs"] = [[1]]

    code, out = run(capsys, "inspect", other(tmp_path, change))
    assert code == 2
    assert "the signature of its model 'model' is damaged" in out


def test_inspect_and_verify_import_no_torch(package: str) -> None:
    for command in ("inspect", "verify"):
        code = (
            "import sys; from inductor_ext.cli.main import main; "
            f"assert main([{command!r}, sys.argv[1]]) == 0; assert 'torch' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code, package], check=True, capture_output=True)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_inspect_says_why_a_damaged_model_does_not_run(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fit(changed: dict[str, Any]) -> None:
        changed["versions"]["torch"] = torch.__version__
        changed["models"]["model"]["cpu_features"] = []
        changed["platform"] = {}

    path = other(tmp_path, fit)
    assert "runs here    yes" in run(capsys, "inspect", path)[1]
    data = bytearray(pathlib.Path(path).read_bytes())
    with zip_reader.open_package(path) as opened:
        entry = opened.entries[name]
    data[entry.offset + entry.size // 2] ^= 1
    pathlib.Path(path).write_bytes(data)
    code, out = run(capsys, "inspect", path)
    assert code == 0
    assert f"runs here    no: {name} is damaged" in out
    report = json.loads(run(capsys, "inspect", path, "--json")[1])
    assert report["fits"] == {"model": False}


def test_inspect_finds_another_manifest_and_a_missing_library(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = other(tmp_path, lambda changed: changed["models"]["model"].update(library=None))
    assert "but no library" in run(capsys, "inspect", path)[1]
    changed = json.dumps(altered_packages.manifest_of(pathlib.Path(path).read_bytes()))
    file = io.BytesIO()
    writer = zip_writer.Writer(file, "net")
    with zip_reader.open_package(path) as opened:
        for name in opened.entries:
            is_manifest = name == manifest.PATH
            data = changed.replace("abc123", "abc124").encode()
            writer.add(name, data if is_manifest else opened.read(name))
    writer.finish()
    pathlib.Path(path).write_bytes(file.getvalue())
    _, out = run(capsys, "inspect", path)
    assert "its manifest is not the one that it was written with" in out


# verify


def test_verify_reads_every_file(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "verify", package)
    assert code == 0
    assert out.startswith(f"{package}: 9 files, ")
    assert out.rstrip().endswith("intact (checked by SHA-256)")


def test_verify_prints_json(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "verify", "--json", package)
    report = json.loads(out)
    assert code == 0
    assert report["package"] == package
    assert report["intact"] is True
    assert report["checked_by"] == "SHA-256"
    assert report["models"] == ["model"]
    assert report["signed_by"] is None
    assert report["bytes"] > report["files"] > 3


def test_verify_reports_missing_digests_of_inductor(
    stock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, "verify", stock)
    assert code == 0
    assert "intact (checked by CRC-32; compiled by Inductor (default)" in out


def test_an_exported_program_is_not_a_package(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "exported.pt2"
    with open(path, "wb") as file:
        writer = zip_writer.Writer(file, "exported")
        writer.add("models/model.json", b"{}")
        writer.finish()
    assert run(capsys, "inspect", str(path))[1].splitlines()[0].endswith("no compiled model in it")
    code, out = run(capsys, "verify", str(path))
    assert code == 0
    assert out.rstrip().endswith("intact (checked by CRC-32; no compiled model)")


def test_verify_finds_every_damaged_file(
    package: str, stock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (package, stock):
        intact = pathlib.Path(path).read_bytes()
        with zip_reader.open_package(io.BytesIO(intact)) as opened:
            entries = list(opened.entries.values())
        for entry in entries:
            data = bytearray(intact)
            data[entry.offset + entry.size // 2] ^= 1
            pathlib.Path(path).write_bytes(data)
            code, out = run(capsys, "verify", path)
            assert code == 2
            assert "is damaged" in out or "not the one that it was written with" in out


def archives() -> dict[str, bytes]:
    """Packages of the extension, of torch's writer, and of Python's zipfile."""
    stock, compressed = io.BytesIO(), io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stock)
    for name, data in ENTRIES.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    with zipfile.ZipFile(compressed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in ENTRIES.items():
            archive.writestr(f"net/{name}", data)
    return {
        "own": altered_packages.seal(ENTRIES, content()),
        "torch": stock.getvalue(),
        "zipfile": compressed.getvalue(),
    }


def is_intact(data: bytes) -> bool:
    try:
        with zip_reader.open_package(io.BytesIO(data)) as opened:
            manifest.verify(opened)
    except exc.BadPackageError:
        return False
    return True


@pytest.mark.parametrize("writer", ["own", "torch", "zipfile"])
def test_every_byte_between_entries_counts(writer: str) -> None:
    """Headers, dates, padding, the central directory and the end."""
    intact = archives()[writer]
    assert is_intact(intact)
    with zip_reader.open_package(io.BytesIO(intact)) as opened:
        spans = [
            range(entry.offset, entry.offset + entry.packed_size)
            for entry in opened.entries.values()
        ]
    places = [at for at in range(len(intact)) if not any(at in span for span in spans)]
    if len(places) > 3000:  # most of them are padding of the weights
        places = places[:400] + places[400:-1800:97] + places[-1800:]
    data = bytearray(intact)
    for at in places:
        data[at] ^= 1 << at % 8
        assert not is_intact(bytes(data)), at
        data[at] = intact[at]
    for more in (b"\0", b"PK", intact[:100]):
        assert not is_intact(intact + more)
        assert not is_intact(more + intact)


def test_data_after_a_compressed_entry_counts() -> None:
    packed = zlib.compress(b"library", wbits=-15) + b"more"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"net/{STEM}wrapper.so", packed)
        (info,) = archive.infolist()
        info.compress_type, info.file_size = zipfile.ZIP_DEFLATED, len(b"library")
        info.CRC = zlib.crc32(b"library")
    data = bytearray(file.getvalue())
    # The local header was written before: the method, and CRC-32 and size as in the directory.
    data[8:10] = struct.pack("<H", zipfile.ZIP_DEFLATED)
    data[14:26] = struct.pack("<3L", info.CRC, len(packed), info.file_size)
    with (
        zip_reader.open_package(io.BytesIO(data)) as opened,
        pytest.raises(exc.BadPackageError, match="followed by other data"),
    ):
        opened.verify({})


@pytest.mark.parametrize("name", ["extra/x", "models/m.json", "data/more", ".data/x"])
def test_verify_finds_files_that_the_manifest_does_not_list(name: str) -> None:
    package = archives()["own"]
    file = io.BytesIO()
    writer = zip_writer.Writer(file, "net")
    with zip_reader.open_package(io.BytesIO(package)) as opened:
        for entry in opened.entries:
            writer.add(entry, opened.read(entry), aligned=entry.endswith(".weights"))
    assert file.getvalue() == package[: len(file.getvalue())]
    writer.add(name, b"x")
    writer.finish()
    assert not is_intact(file.getvalue())


def test_verify_checks_the_bookkeeping_files() -> None:
    package = archives()["own"]
    for changed in zip_format.BOOKKEEPING:
        file = io.BytesIO()
        writer = zip_writer.Writer(file, "net")
        with zip_reader.open_package(io.BytesIO(package)) as opened:
            for entry in opened.entries:
                data = opened.read(entry)
                writer.add(
                    entry,
                    data[:-1] + b"?" if entry == changed else data,
                    aligned=entry.endswith(".weights"),
                )
        writer.finish()
        assert not is_intact(file.getvalue())


def test_verify_refuses_a_package_that_another_program_rewrote(
    package: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        for name in zipfile.ZipFile(package).namelist():
            archive.writestr(name, zipfile.ZipFile(package).read(name))
    code, out = run(capsys, "verify", str(tmp_path / "other.pt2"))
    assert code == 2
    assert "it was changed after it was written: " in out


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_missing_manifest_is_found(
    command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "net.pt2"
    with open(path, "wb") as file:
        writer = zip_writer.Writer(file, "net")
        for name, data in {**ENTRIES, "extra/inductor_ext/model.h": b"//"}.items():
            writer.add(name, data)
        writer.finish()
    code, out = run(capsys, command, str(path))
    assert code == 2
    assert "written by inductor_ext, but its manifest is missing" in out


def test_verify_finds_unlisted_files(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(package, "a") as opened:
        opened.writestr("net/data/aotinductor/model/more.so", b"x")
    code, out = run(capsys, "verify", package)
    assert code == 2
    assert "more.so' that its manifest does not list" in out


# diff


def test_equal_packages_do_not_differ(
    package: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "diff", package, other(tmp_path, lambda changed: None)) == (0, "")


def test_hashes_in_names_are_not_differences(
    package: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    renamed = {name.replace("a2", "b3"): data for name, data in ENTRIES.items()}
    changed = json.loads(json.dumps(content()).replace("a2" * 25, "b3" * 25))
    path = tmp_path / "renamed.pt2"
    path.write_bytes(altered_packages.seal(renamed, changed))
    assert run(capsys, "diff", package, str(path)) == (0, "")


def test_differences_have_a_path(
    package: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(changed: dict[str, Any]) -> None:
        changed["versions"]["torch"] = "2.13.0"
        model = changed["models"]["model"]
        model["constants"][1]["sha256"] = "f" * 64
        model["signature"]["inputs"][0]["shape"] = ["s0", 16]
        del model["constants"][0], model["options"]["max_autotune"]
        model["kernels"].append({"name": "cpp_fused_1"})

    path = other(tmp_path, change)
    code, out = run(capsys, "diff", package, path)
    assert code == 1
    lines = out.splitlines()
    before, after = "2" * 64, "f" * 64
    for line in (
        "  versions.torch: '2.0.1' -> '2.13.0'",
        f"  models.model.constants['layer.2.weight'].sha256: '{before}' -> '{after}'",
        "  models.model.signature.inputs[\"batch['x']\"].shape: ['s0', 8] -> ['s0', 16]",
        "- models.model.options.max_autotune: True",
    ):
        assert line in lines
    assert sum("layer.1.weight" in line for line in lines) == 1
    assert [line[0] for line in lines if "cpp_fused_1" in line] == ["+"]
    assert len(lines) == 6
    code, out = run(capsys, "diff", package, path, "--json")
    assert code == 1
    assert {"place": "versions.torch", "before": "2.0.1", "after": "2.13.0"} in json.loads(out)


def test_packages_without_manifest_are_compared_by_files(
    package: str, stock: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = run(capsys, "diff", stock, package)
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()] == [f"+ files['{manifest.PATH}']"]
