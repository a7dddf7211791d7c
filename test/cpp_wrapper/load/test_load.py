"""`inductor_ext.load`: what it accepts, what it refuses, and what remains afterwards."""

from __future__ import annotations

import gc
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch._inductor
from torch.export import Dim

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import manifest, zip_format, zip_reader, zip_writer
from test.fuzz import aot_packages, replaced_packages
from test.support.loader_models import Plain, X, changed, check


def test_it_loads_a_file_a_folder_and_a_buffer(
    path: str, plain: Plain, tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(path).extractall(folder)
    compressed = tmp_path / "compressed.pt2"
    with zipfile.ZipFile(path) as source_zip, zipfile.ZipFile(compressed, "w") as target_zip:
        for name in source_zip.namelist():
            target_zip.writestr(name, source_zip.read(name), zipfile.ZIP_DEFLATED)
    buffer = io.BytesIO(pathlib.Path(path).read_bytes())
    for source in (path, pathlib.Path(path), folder, folder / "net", buffer, compressed):
        check(inductor_ext.load(source), plain)
        assert list(temporary.iterdir()) == []


def test_a_model_outlives_its_package(path: str, plain: Plain, tmp_path: pathlib.Path) -> None:
    copied = tmp_path / "copy.pt2"
    shutil.copy(path, copied)
    model = inductor_ext.load(copied)
    copied.unlink()
    check(model, plain)


CHILD = """
import sys, torch
before = set(sys.modules)
import inductor_ext
model = inductor_ext.load(sys.argv[1])
print(model(torch.ones(3, 8)).shape)
found = ("torch._inductor", "torch._dynamo", "torch.export", "torch._export", "sympy", "triton")
print([name for name in set(sys.modules) - before if name.startswith(found)])
"""


@pytest.mark.parametrize("whose", ["ours", "stock's"])
def test_it_needs_neither_inductor_nor_a_compiler(
    whose: str, path: str, request: pytest.FixtureRequest
) -> None:
    code, package = CHILD, path
    if whose == "stock's":
        request.getfixturevalue("stock_loads")
        package = request.getfixturevalue("stock_path")
        code = CHILD.replace("torch.ones(3, 8)", "torch.ones(4, 8)")
    environment = {**os.environ, "PATH": "", "CXX": "/nonexistent"}
    run = subprocess.run(
        [sys.executable, "-c", code, package], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"


def test_libraries_are_unloaded_with_their_models(path: str) -> None:
    def libraries() -> int:
        return pathlib.Path("/proc/self/maps").read_text().count("wrapper.so")

    before = libraries()
    models = [inductor_ext.load(path) for _ in range(3)]
    assert libraries() > before
    del models
    assert libraries() == before


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (("platform", "machine"), "riscv64", "compiled for riscv64"),
        (("models", "model", "cpu_features"), ["avx9999"], "needs avx9999, which this CPU lacks"),
        (("models", "model", "device"), "cuda", "CUDA"),
        (("format",), 99, "has format 99"),
    ],
)
def test_incompatible_packages_are_rejected(
    path: str, key: tuple[str, ...], value: object, words: str
) -> None:
    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        for part in key[:-1]:
            content = content[part]
        content[key[-1]] = value

    if words == "CUDA" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(exc.IncompatibleArtifactError, match=words):
        inductor_ext.load(changed(path, change))


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ({}, None),
        ({"aoti_torch_none": "int aoti_torch_none()"}, ", which lacks aoti_torch_none. Compile"),
        ({"aoti_torch_clone": "int aoti_torch_clone(int)"}, "may declare aoti_torch_clone differ"),
        (None, ". Compile it again with torch"),
    ],
    ids=["same", "missing", "other", "unknown"],
)
def test_a_package_of_another_torch(
    path: str, plain: Plain, functions: dict[str, str] | None, words: str | None
) -> None:
    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        content["versions"]["torch"] = "2.0.1"
        if functions is None:
            del content["models"]["model"]["torch_functions"]
        else:
            content["models"]["model"]["torch_functions"].update(functions)

    if words is None:
        check(inductor_ext.load(changed(path, change)), plain)
        return
    with pytest.raises(exc.IncompatibleArtifactError) as error:
        inductor_ext.load(changed(path, change))
    assert "it was compiled for torch 2.0.1, and this is torch" in str(error.value)
    assert words in str(error.value)


def test_a_manifest_of_another_package_is_refused(path: str) -> None:
    """Its checksums are correct, but its signature is not."""

    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        models = content["models"]
        models["model"]["signature"] = models["nested"]["signature"]

    with pytest.raises(exc.BadPackageError, match="differs from its manifest"):
        inductor_ext.load(changed(path, change))


def test_a_manifest_without_its_seal_is_refused(path: str, tmp_path: pathlib.Path) -> None:
    copied = tmp_path / "altered.pt2"
    with zipfile.ZipFile(path) as source_zip, zipfile.ZipFile(copied, "w") as target_zip:
        for name in source_zip.namelist():
            data = source_zip.read(name)
            if name.endswith(manifest.PATH):
                content = json.loads(data)
                content["models"]["model"]["signature"]["symbols"] = {}
                data = json.dumps(content).encode()
            target_zip.writestr(name, data)
    with pytest.raises(exc.BadPackageError, match="not the one that it was written with"):
        inductor_ext.load(copied)


def test_sources_without_manifest_are_not_loaded_by_inductor(
    path: str, tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    copied = tmp_path / "bare.pt2"
    with zipfile.ZipFile(path) as source_zip, zipfile.ZipFile(copied, "w") as target_zip:
        for name in source_zip.namelist():
            if not name.endswith(manifest.PATH):
                target_zip.writestr(name, source_zip.read(name))
    with pytest.raises(exc.BadPackageError, match="its manifest is missing"):
        inductor_ext.load(copied)
    assert list(temporary.iterdir()) == []


def test_libraries_that_cannot_be_loaded_are_reported(
    path: str, temporary: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        entries[content["models"]["model"]["library"]] = b"no library"

    with pytest.raises(exc.ArtifactLoadError, match="too short"):
        inductor_ext.load(changed(path, change))
    assert list(temporary.iterdir()) == []


def test_wrong_arguments_are_refused(path: str) -> None:
    for number in (0, -1, True, "2"):
        with pytest.raises(exc.BadOptionError, match="num_runners"):
            inductor_ext.load(path, num_runners=number)  # type: ignore[arg-type]
    with pytest.raises(exc.PackageNotFoundError, match="There is no package at"):
        inductor_ext.load(path + ".none")
    for wrong in (None, 3):
        with pytest.raises(exc.BadArgumentError, match="expected a path, or a readable buffer"):
            inductor_ext.load(wrong)  # type: ignore[arg-type]


def test_other_files_are_distinguished_from_damaged_ones(tmp_path: pathlib.Path) -> None:
    with pytest.raises(exc.BadPackageError, match="has no file of a package in it"):
        inductor_ext.load(tmp_path)
    exported = tmp_path / "exported.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), exported)
    with pytest.raises(exc.NoModelError, match=r"exported\.pt2 contains no compiled model"):
        inductor_ext.load(exported)


def test_classes_that_are_not_registered_are_named(path: str) -> None:
    code = "import sys, inductor_ext; inductor_ext.load(sys.argv[1], 'nested')"
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "UnknownNodeError" in run.stderr
    assert "test.support.loader_models.Point" in run.stderr


def test_inductor_loads_packages_of_the_extension(path: str, plain: Plain) -> None:
    check(torch._inductor.aoti_load_package(path), plain)
    stock = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    check(lambda x: stock.run([x])[0], plain)


@pytest.mark.usefixtures("stock_loads")
def test_inductor_loads_its_own_files_from_a_rewritten_zip(
    stock_path: str, plain: Plain, tmp_path: pathlib.Path
) -> None:
    target = tmp_path / "rewritten.pt2"
    with zip_reader.open_package(stock_path) as package, open(target, "wb") as file:
        writer = zip_writer.Writer(file, "rewritten")
        for name, entry in package.entries.items():
            if name not in zip_format.BOOKKEEPING:
                parts = zip_writer.Chunks(entry.size, package.read_chunks(name))
                writer.add(name, parts, aligned=name.endswith(".so"))
        writer.finish()
    check(torch._inductor.aoti_load_package(str(target)), plain, (4,))
    stock = torch._C._aoti.AOTIModelPackageLoader(str(target), "model", False, 1, -1)
    check(lambda x: stock.run([x])[0], plain, (4,))


@pytest.mark.usefixtures("stock_loads")
def test_it_loads_inductors_packages(
    stock_path: str, plain: Plain, tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    folder = tmp_path / "unpacked"
    zipfile.ZipFile(stock_path).extractall(folder)
    buffer = io.BytesIO(pathlib.Path(stock_path).read_bytes())
    for source in (stock_path, folder, buffer):
        model = inductor_ext.load(source)
        check(model, plain, (4,))
        assert list(temporary.iterdir()) == []
    assert model.signature is None
    assert model.manifest is None
    assert model.get_metadata()["AOTI_DEVICE_KEY"] == "cpu"
    with pytest.raises(exc.InputMismatchError, match="called with 2"):
        model(X, X)
    with pytest.raises(exc.UnsupportedArtifactError, match="Swapping constants is not supported"):
        model.swap_constants()
    other = {"linear.weight": torch.zeros(16, 8), "linear.bias": torch.ones(16)}
    model.update_constants(other)
    torch.testing.assert_close(model(X), plain.scale.expand(4, 16))
    with pytest.raises(exc.ConstantMismatchError):
        model.update_constants({"none": torch.ones(1)})
    with pytest.raises(exc.ModelNotFoundError, match="no model 'other'; it has 'model'"):
        inductor_ext.load(stock_path, "other")


def test_damage_to_inductors_packages_is_found(stock_path: str, tmp_path: pathlib.Path) -> None:
    damaged = tmp_path / "damaged.pt2"
    data = bytearray(pathlib.Path(stock_path).read_bytes())
    with zip_reader.open_package(stock_path) as package:
        (library,) = [entry for name, entry in package.entries.items() if name.endswith(".so")]
    data[library.offset + library.size // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(exc.BadPackageError, match="does not match its CRC-32"):
        inductor_ext.load(damaged)


def test_unsafe_names_never_reach_inductors_loader(stock_path: str, tmp_path: pathlib.Path) -> None:
    """Inductor's loader would write such entries outside of its folder."""
    evil = tmp_path / "evil.pt2"
    with zipfile.ZipFile(stock_path) as source_zip, zipfile.ZipFile(evil, "w") as target_zip:
        for name in source_zip.namelist():
            target_zip.writestr(name, source_zip.read(name))
        target_zip.writestr("net/data/aotinductor/model/../../../../evil.txt", b"evil")
    with pytest.raises(exc.BadPackageError, match="has an empty part, or"):
        inductor_ext.load(evil)


@pytest.mark.gpu
def test_a_gpu_model_keeps_its_kernels_until_deleted(
    tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    plain = Plain().eval().cuda()
    rows = {0: Dim("rows", min=2, max=64)}
    x = torch.randn(4, 8, device="cuda")
    program = torch.export.export(plain, (x,), dynamic_shapes=(rows,))
    target = tmp_path / "gpu.pt2"
    inductor_ext.aoti_compile_and_package(program, package_path=target)
    for index in (-1, 0):
        model = inductor_ext.load(target, device_index=index)
        assert len(list(temporary.iterdir())) == 1
        for count in (2, 5, 64):
            x = torch.randn(count, 8, device="cuda")
            torch.testing.assert_close(model(x), plain(x))
        with pytest.raises(exc.InputMismatchError, match="cpu"):
            model(x.cpu())
        assert all(constant.is_cuda for constant in model.constants().values())
        model.update_constants({"scale": torch.zeros(16)})
        assert not model(x).any()
        del model
        gc.collect()
        assert list(temporary.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, aot_packages.TARGETS])
def test_packages_that_are_replaced_meanwhile(
    targets: Sequence[str] | None, tmp_path: pathlib.Path
) -> None:
    """See `test.fuzz.replaced_packages`, whose command line runs more cases."""
    replaced_packages.make_packages(tmp_path, targets)
    outcomes = list(replaced_packages.run_cases(tmp_path, 0, range(120)))
    assert [outcome for outcome in outcomes if not replaced_packages.is_good(outcome[2])] == []
    assert {outcome.split(":")[0] for _, _, outcome in outcomes} == {"right", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, aot_packages.TARGETS])
def test_damaged_packages_are_rejected_or_correct(
    targets: Sequence[str] | None, tmp_path: pathlib.Path
) -> None:
    """See `test.fuzz.aot_packages`, whose command line runs more cases."""
    pytest.importorskip("cryptography")
    package = str(tmp_path / "net.pt2")
    aot_packages.make_package(package, targets)
    outcomes = list(aot_packages.run_cases(package, 0, range(600)))
    assert [outcome for outcome in outcomes if not aot_packages.is_good(outcome[2])] == []
    kinds = {(kind, outcome.split(":")[0]) for _, kind, outcome in outcomes}
    assert {
        ("flip", "refused"),
        ("flip", "right"),
        ("rename", "refused"),
        ("forge", "right"),
    } <= kinds
