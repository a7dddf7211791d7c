"""A package's manifest: its fields and rejected content."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from inductor_ext import exc
from inductor_ext.cpp_wrapper.package import manifest

LIBRARY = "data/aotinductor/model/a.wrapper.so"
WEIGHTS = "data/aotinductor/model/a.wrapper.weights"

MODEL = manifest.Model(
    device="cpu",
    library=LIBRARY,
    weights=WEIGHTS,
    signature={"inputs": [], "free": {"form": [1, 2.5, None, True]}},
    constants=(
        manifest.Constant(
            name="linear_weight",
            fqn="linear.weight",
            dtype="float32",
            shape=(4, 2),
            stride=(2, 1),
            bytes=32,
            offset=64,
            sha256="1" * 64,
        ),
        manifest.Constant(
            name="folded_0",
            fqn="",
            dtype="bfloat16",
            shape=(),
            stride=(),
            bytes=2,
            offset=None,
            sha256=None,
            device="cuda:0",
            folded=True,
        ),
    ),
    kernels=(manifest.Kernel(name="cpp_fused_0", operators=("aten.relu", "aten.add")),),
    cpu_features=("avx2", "fma"),
    options={"max_autotune": True},
    memory={"peak": 128},
)
CUDA = dataclasses.replace(MODEL, device="cuda", cuda_architectures=("sm_80", "compute_80"))
MANIFEST = manifest.Manifest(
    models={"model": MODEL, "other": CUDA},
    files={
        LIBRARY: manifest.File(bytes=100, sha256="a" * 64),
        WEIGHTS: manifest.File(bytes=96, sha256="b" * 64),
    },
    versions={"torch": "2.13.0+cpu", "cuda": "13.0", "triton": None},
    platform={"system": "linux", "machine": "x86_64"},
    provenance={"model": "BERT"},
)


def content() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(manifest.dumps(MANIFEST))
    return loaded


def loads(value: object) -> manifest.Manifest:
    return manifest.loads(json.dumps(value).encode(), "net.pt2")


def test_a_manifest_is_written_and_read_back() -> None:
    data = manifest.dumps(MANIFEST)
    read = manifest.loads(data, "net.pt2")
    assert read == MANIFEST
    assert manifest.dumps(read) == data
    assert read.digests() == {LIBRARY: "a" * 64, WEIGHTS: "b" * 64}


def test_a_model_without_a_library() -> None:
    model = dataclasses.replace(MODEL, library=None)
    sources = dataclasses.replace(MANIFEST, models={"model": model})
    assert manifest.loads(manifest.dumps(sources), "net.pt2") == sources


def test_it_is_json_of_plain_names() -> None:
    assert content()["models"]["model"]["constants"][0] == {
        "name": "linear_weight",
        "fqn": "linear.weight",
        "dtype": "float32",
        "shape": [4, 2],
        "stride": [2, 1],
        "bytes": 32,
        "offset": 64,
        "sha256": "1" * 64,
        "device": "cpu",
        "folded": False,
    }


def test_fields_of_later_versions_are_kept() -> None:
    later = content()
    later["signed_by"] = ["x"]
    later["models"]["model"]["streams"] = 2
    later["models"]["model"]["constants"][0]["quantised"] = {"scale": 0.5}
    later["files"][LIBRARY]["blake3"] = "0"
    read = loads(later)
    assert read.more == {"signed_by": ["x"]}
    assert read.models["model"].constants[0].more == {"quantised": {"scale": 0.5}}
    assert json.loads(manifest.dumps(read)) == later


def test_missing_fields_have_defaults() -> None:
    read = loads(
        {
            "models": {"m": {"device": "cpu", "library": "x.so"}},
            "files": {"x.so": {"bytes": 0, "sha256": "0" * 64}},
            "versions": {},
        }
    )
    assert read.format == manifest.FORMAT
    assert read.models["m"] == manifest.Model(device="cpu", library="x.so")


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        (("models",), [], "models is [], expected an object"),
        (("models", "model"), 3, "models['model'] is 3, expected an object"),
        (("models", "model", "device"), None, "models['model'].device is None"),
        (("models", "model", "constants", 0, "bytes"), -1, "is -1, expected 0 or more"),
        (("models", "model", "constants", 0, "bytes"), True, "is True, expected an integer"),
        (("models", "model", "constants", 0, "shape"), [4, "2"], ".shape[1] is '2'"),
        (("models", "model", "constants", 0, "stride"), [1], "different lengths"),
        (("models", "model", "constants", 0, "offset"), 65, "beyond the end of the weights"),
        (("models", "model", "constants", 0, "sha256"), "xyz", "is not a SHA-256 digest"),
        (("models", "model", "constants"), {}, "constants is {}, expected a list"),
        (("models", "model", "library"), "x.so", "needs the file 'x.so', which is not listed"),
        (("models", "model", "cpu_features"), "avx2", "cpu_features is 'avx2', expected a list"),
        (("files", LIBRARY, "sha256"), "A" * 64, "is not a SHA-256 digest"),
        (("files", LIBRARY, "checksums"), "0", ".checksums are not those of"),
        (("versions", "torch"), 2.13, "versions['torch'] is 2.13"),
        (("format",), "1", "format is '1'"),
    ],
)
def test_a_wrong_field_is_named(place: tuple[Any, ...], value: object, why: str) -> None:
    changed = inner = content()
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(exc.BadPackageError) as caught:
        loads(changed)
    assert why in str(caught.value)
    assert "net.pt2" in str(caught.value)


@pytest.mark.parametrize("place", [("models",), ("models", "model", "device"), ("files",)])
def test_a_missing_field_is_named(place: tuple[str, ...]) -> None:
    changed = inner = content()
    for key in place[:-1]:
        inner = inner[key]
    del inner[place[-1]]
    with pytest.raises(exc.BadPackageError, match=f"an object with '{place[-1]}'"):
        loads(changed)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[]", b"null", b'{"format": NaN}', b"[" * 100_000]
)
def test_other_content_is_rejected(data: bytes) -> None:
    with pytest.raises(exc.BadPackageError, match="its manifest is damaged"):
        manifest.loads(data, "net.pt2")


def test_a_later_format_is_refused_before_its_fields_are_read() -> None:
    with pytest.raises(exc.IncompatibleArtifactError, match="has format 2, and this"):
        loads({"format": 2, "all": "different"})


def test_values_that_json_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError):
        manifest.dumps(dataclasses.replace(MANIFEST, provenance={"loss": float("nan")}))


def test_a_model_is_found_by_name() -> None:
    assert MANIFEST.model("other", "net.pt2") is CUDA
    with pytest.raises(exc.ModelNotFoundError, match="no model 'x'; it has 'model', 'other'"):
        MANIFEST.model("x", "net.pt2")


@pytest.mark.parametrize(
    "name", ["build.cpu_isa", "package.zip_reader", "package.machine", "package.manifest"]
)
def test_these_modules_need_no_torch(name: str) -> None:
    code = f"import sys, inductor_ext.cpp_wrapper.{name}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
