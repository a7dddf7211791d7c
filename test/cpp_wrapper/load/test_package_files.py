"""The files of a package: where weights are located, and how files are verified."""

from __future__ import annotations

import io
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext import exc
from inductor_ext.cpp_wrapper.load import package_files
from inductor_ext.cpp_wrapper.load.model import LoadedModel
from inductor_ext.cpp_wrapper.package import zip_reader
from test.support.loader_models import Plain, changed, check, find_weights


def test_weights_are_mapped_from_the_package(path: str, model: LoadedModel) -> None:
    _, offset, _ = find_weights(path)
    mapped = [line.split() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()]
    offsets = [int(line[2], 16) for line in mapped if line[-1] == path]
    assert offset in offsets
    assert all(line[1][3] == "p" for line in mapped if line[-1] == path)


@pytest.fixture
def without_weights(path: str, tmp_path: pathlib.Path) -> tuple[str, str]:
    """A package without the weights of "model", and the file that has them."""
    weights_file = tmp_path / "shared.weights"

    def change(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        model = content["models"]["model"]
        name = model["weights"]
        model["outside"] = content["files"][name]
        model["weights"] = None
        weights_file.write_bytes(entries.pop(name))

    package = tmp_path / "small.pt2"
    package.write_bytes(changed(path, change).getvalue())
    return str(package), str(weights_file)


def test_weights_may_be_in_a_file_or_another_package(
    without_weights: tuple[str, str], path: str, plain: Plain
) -> None:
    package, weights_file = without_weights
    models = [
        inductor_ext.load(package, weights=weights)
        for weights in (weights_file, pathlib.Path(weights_file), path)
    ]
    for model in models:
        check(model, plain)
    assert "shared.weights" in pathlib.Path("/proc/self/maps").read_text()


# In a process of its own, which SIGBUS would end.
OVERWRITTEN = """
import sys
import torch
import inductor_ext
package, weights, overwritten, verify = sys.argv[1:]
model = inductor_ext.load(
    package, weights=weights or None, map_weights=False, verify=verify == "True"
)
with open(overwritten, "r+b") as file:
    file.truncate(0)
torch.save(model(torch.ones(4, 8)), sys.stdout.buffer)
"""


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["in the package", "in a file", "in another package"])
def test_copied_weights_survive_the_truncation_of_their_file(
    without_weights: tuple[str, str],
    path: str,
    plain: Plain,
    tmp_path: pathlib.Path,
    kind: str,
    verify: bool,
) -> None:
    package, weights = without_weights
    if kind != "in a file":
        overwritten = str(shutil.copy(path, tmp_path / "copy.pt2"))
        package, weights = (overwritten, "") if kind == "in the package" else (package, overwritten)
    run = subprocess.run(
        [sys.executable, "-c", OVERWRITTEN, package, weights, weights or package, str(verify)],
        capture_output=True,
        check=True,
    )
    expected = plain(torch.ones(4, 8))
    torch.testing.assert_close(torch.load(io.BytesIO(run.stdout)), expected)


def test_other_weights_are_refused(
    without_weights: tuple[str, str], path: str, stock_path: str, tmp_path: pathlib.Path
) -> None:
    package, weights_file = without_weights
    with pytest.raises(exc.ArtifactLoadError, match="its weights are in a separate file"):
        inductor_ext.load(package)
    data = bytearray(pathlib.Path(weights_file).read_bytes())
    data[3] ^= 1
    other = tmp_path / "other.weights"
    other.write_bytes(data)
    for weights in (other, tmp_path / "none.weights", stock_path):
        with pytest.raises(exc.ArtifactLoadError, match=re.escape(str(weights))):
            inductor_ext.load(package, weights=weights)
    assert inductor_ext.load(package, weights=other, verify=False) is not None
    other.write_bytes(data[:-1])
    with pytest.raises(exc.ArtifactLoadError, match="has other weights"):
        inductor_ext.load(package, weights=other, verify=False)
    with pytest.raises(exc.ArtifactLoadError, match="its weights are in the package"):
        inductor_ext.load(stock_path, weights=weights_file)


def flipped(path: str, ending: str) -> io.BytesIO:
    """The package with one bit of an entry's content changed, in the middle."""
    data = bytearray(pathlib.Path(path).read_bytes())
    with zip_reader.open_package(path) as package:
        (entry,) = [
            entry
            for name, entry in package.entries.items()
            if name.startswith("data/aotinductor/model/") and name.endswith(ending)
        ]
    data[entry.offset + entry.size // 2] ^= 1
    return io.BytesIO(data)


@pytest.mark.parametrize("ending", ["wrapper.so", ".weights", "wrapper_metadata.json"])
def test_a_flipped_bit_is_found(path: str, temporary: pathlib.Path, ending: str) -> None:
    with pytest.raises(exc.BadPackageError, match="is damaged: its content does not match"):
        inductor_ext.load(flipped(path, ending))
    assert list(temporary.iterdir()) == []


def test_large_weights_of_earlier_versions_are_verified_by_their_constants(
    path: str, plain: Plain, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_checksums(content: dict[str, Any], entries: dict[str, bytes]) -> None:
        for file in content["files"].values():
            file.pop("checksums", None)

    monkeypatch.setattr(package_files, "LARGE_WEIGHTS", 0)
    earlier = tmp_path / "earlier.pt2"
    earlier.write_bytes(changed(path, without_checksums).getvalue())
    check(inductor_ext.load(earlier), plain)
    damaged = tmp_path / "damaged.pt2"
    model, offset, _ = find_weights(earlier)
    for constant in model.constants:
        for at in (0, constant.bytes - 1):
            data = bytearray(earlier.read_bytes())
            data[offset + (constant.offset or 0) + at] ^= 1
            damaged.write_bytes(data)
            with pytest.raises(exc.BadPackageError, match="does not match the manifest"):
                inductor_ext.load(damaged)


def test_verification_can_be_disabled(path: str, plain: Plain, tmp_path: pathlib.Path) -> None:
    """Without verification weights are not read before they are used."""
    damaged = tmp_path / "damaged.pt2"
    damaged.write_bytes(flipped(path, ".weights").getvalue())
    with pytest.raises(exc.BadPackageError):
        inductor_ext.load(damaged)
    model = inductor_ext.load(damaged, verify=False)
    assert not all(
        torch.equal(tensor, model.constants()[name]) for name, tensor in plain.state_dict().items()
    )
