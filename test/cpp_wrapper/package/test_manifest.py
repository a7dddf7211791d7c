"""A package's manifest: its fields, rejected content, and where a model can run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from typing import Any

import pytest

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa
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
MACHINE = manifest.Machine(
    torch="2.13.1+cu130",
    cuda="13.2",
    system="linux",
    machine="x86_64",
    cpu_features=frozenset({"avx2", "fma", "avx512f"}),
    capability=(9, 0),
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
    with pytest.raises(exc.ModelNotFoundError, match="no model 'x'; it has model, other"):
        MANIFEST.model("x", "net.pt2")


def misfit(model: manifest.Model, **changes: Any) -> str | None:
    """Why a model does not fit a machine; None if it does."""
    machine = dataclasses.replace(MACHINE, **changes)
    try:
        manifest.check_machine(MANIFEST, model, machine, "net.pt2")
    except exc.IncompatibleArtifactError as error:
        return str(error.fields["why"])
    return None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"torch": "2.13.0"}, None),
        ({"torch": "2.12.1"}, "compiled for torch 2.13.0+cpu, and this is torch 2.12.1"),
        ({"torch": "3.13.0"}, "compiled for torch 2.13.0+cpu, and this is torch 3.13.0"),
        ({"system": "darwin"}, "compiled for linux, and this is darwin"),
        ({"machine": "aarch64"}, "compiled for x86_64, and this is aarch64"),
        ({"cpu_features": frozenset({"avx2"})}, "its code needs fma, which this CPU lacks"),
        ({"cpu_features": None}, None),
        ({"cuda": None, "capability": None}, None),
    ],
)
def test_a_cpu_model_fits_its_torch_and_cpu(changes: dict[str, Any], why: str | None) -> None:
    reason = misfit(MODEL, **changes)
    assert reason == why or (why is not None and why in (reason or ""))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"cuda": "12.8"}, "compiled for CUDA 13.0, and this torch has CUDA 12.8"),
        ({"cuda": None}, "this torch is built without it"),
        ({"capability": None}, "this machine has no CUDA device"),
        ({"capability": (7, 5)}, "compiled for sm_80, compute_80, and the device is sm_75"),
    ],
)
def test_a_cuda_model_fits_its_cuda_and_device(changes: dict[str, Any], why: str | None) -> None:
    reason = misfit(CUDA, **changes)
    assert reason == why or (why is not None and why in (reason or ""))


@pytest.mark.parametrize(
    ("compiled_with", "installed", "fits"),
    [
        ("2.13.0", "2.13.1+cpu", True),
        ("2.13.0+cpu", "2.14.1+cu130", False),
        ("2.14.1+cu130", "2.13.0+cpu", False),
        ("2.14.1", "2.15.0", False),
        ("2.1.0", "2.11.0", False),
        ("2.11.0a0+git1234", "2.11.0", True),
    ],
)
def test_another_torch_is_refused_by_name(compiled_with: str, installed: str, fits: bool) -> None:
    versions = {**MANIFEST.versions, "torch": compiled_with}
    content = dataclasses.replace(MANIFEST, versions=versions)
    machine = dataclasses.replace(MACHINE, torch=installed)
    if fits:
        manifest.check_machine(content, MODEL, machine, "net.pt2")
        return
    with pytest.raises(exc.IncompatibleArtifactError) as error:
        manifest.check_machine(content, MODEL, machine, "net.pt2")
    minor = ".".join(compiled_with.split(".")[:2])
    assert str(error.value) == (
        "The package net.pt2 cannot run in this environment: it was compiled for torch "
        f"{compiled_with}, and this is torch {installed}. Compile it again with torch {installed}, "
        f"or load it with torch {minor}."
    )


def test_all_misfits_are_reported_at_once() -> None:
    reason = misfit(MODEL, torch="2.11.0", cpu_features=frozenset())
    assert reason is not None
    assert "torch 2.11.0" in reason
    assert "avx2, fma" in reason


@pytest.mark.parametrize(
    ("architectures", "capability", "fits"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),
        (("sm_80",), (9, 0), False),
        (("sm_86",), (8, 0), False),
        (("compute_80",), (9, 0), True),
        (("compute_90",), (8, 9), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (9, 1), False),
        (("sm_100f",), (10, 3), True),
        (("sm_80", "sm_120"), (12, 0), True),
        ((), (5, 0), True),
    ],
)
def test_machine_code_is_for_one_generation_and_ptx_for_later(
    architectures: tuple[str, ...], capability: tuple[int, int], fits: bool
) -> None:
    model = dataclasses.replace(CUDA, cuda_architectures=architectures)
    assert (misfit(model, capability=capability) is None) == fits


# CPU features

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
flags\t\t: fpu cx16 pni ssse3 sse4_1 sse4_2 abm bmi1 avx avx2 avx512_bf16 avx512f amx_tile lahf_lm
bogomips\t: 4800.00

processor\t: 1
flags\t\t: fpu
"""


def test_names_are_those_of_the_compiler() -> None:
    assert cpu_isa.parse_cpuinfo(CPUINFO) == {
        *("fpu", "cmpxchg16b", "sse3", "ssse3", "sse4.1", "sse4.2", "lzcnt", "bmi", "avx"),
        *("avx2", "avx512bf16", "avx512f", "amx-tile", "lahf_lm", "osxsave"),
    }
    assert cpu_isa.parse_cpuinfo("Features\t: fp asimd sve2\n") == {"fp", "asimd", "sve2"}
    assert cpu_isa.parse_cpuinfo("model name: x\n") == frozenset()


def test_levels_include_lower_ones() -> None:
    names = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")
    levels = [cpu_isa.features_of(name) for name in names]
    for lower, higher in itertools.pairwise(levels):
        assert lower < higher
    with pytest.raises(ValueError, match="unknown level 'x86-64-v9'"):
        cpu_isa.features_of("x86-64-v9")


def test_this_machine_agrees_with_torch() -> None:
    import torch

    features = cpu_isa.machine_features()
    assert features is not None
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX"):
        level = "x86-64-v4" if capability == "AVX512" else "x86-64-v3"
        assert cpu_isa.missing(cpu_isa.features_of(level)) == []
    assert cpu_isa.missing(["avx9999", *sorted(features)[:3]]) == ["avx9999"]


@pytest.mark.parametrize("name", ["build.cpu_isa", "package.zip_reader", "package.manifest"])
def test_these_modules_need_no_torch(name: str) -> None:
    code = f"import sys, inductor_ext.cpp_wrapper.{name}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
