"""Where a compiled model can run: its torch, CPU and GPU."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import pytest

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa
from inductor_ext.cpp_wrapper.package import manifest
from inductor_ext.cpp_wrapper.package.machine import Machine, check_machine

STEM = "data/aotinductor/model/a.wrapper"
MODEL = manifest.Model(device="cpu", library=f"{STEM}.so", cpu_features=("avx2", "fma"))
CUDA = dataclasses.replace(MODEL, device="cuda", cuda_architectures=("sm_80", "compute_80"))
FILE = manifest.File(bytes=100, sha256="a" * 64)
MANIFEST = manifest.Manifest(
    models={"model": MODEL, "other": CUDA},
    files={f"{STEM}.so": FILE},
    versions={"torch": "2.13.0+cpu", "cuda": "13.0", "triton": None},
    platform={"system": "linux", "machine": "x86_64"},
)
MACHINE = Machine(
    torch="2.13.1+cu130",
    cuda="13.2",
    system="linux",
    machine="x86_64",
    cpu_features=frozenset({"avx2", "fma", "avx512f"}),
    capability=(9, 0),
)


def misfit(model: manifest.Model, **changes: Any) -> str | None:
    """Why a model does not fit a machine; None if it does."""
    machine = dataclasses.replace(MACHINE, **changes)
    try:
        check_machine(MANIFEST, model, machine, "net.pt2")
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
        check_machine(content, MODEL, machine, "net.pt2")
        return
    with pytest.raises(exc.IncompatibleArtifactError) as error:
        check_machine(content, MODEL, machine, "net.pt2")
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


# Other releases of torch

FUNCTIONS = {"aoti_torch_clone": "int aoti_torch_clone(Tensor self, Tensor* ret)"}
HEADER = "AOTI_TORCH_EXPORT int aoti_torch_clone(Tensor self, Tensor* ret);"


def headers(folder: pathlib.Path, text: str) -> pathlib.Path:
    """An include folder of torch in which one header has this text."""
    path = folder / "torch/csrc/inductor/aoti_torch/c/shim.h"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return folder


@pytest.mark.parametrize("torch", ["2.12.1", "2.14.1+cu130", "3.0.0"])
def test_a_torch_with_the_same_functions_fits(tmp_path: pathlib.Path, torch: str) -> None:
    model = dataclasses.replace(MODEL, torch_functions=FUNCTIONS)
    include = headers(tmp_path, HEADER)
    assert misfit(model, torch=torch, torch_headers=include) is None
    cuda = dataclasses.replace(CUDA, torch_functions=FUNCTIONS)
    assert misfit(cuda, torch=torch, torch_headers=include) is None
    reason = misfit(cuda, torch=torch, torch_headers=include, cuda="12.8")
    assert reason == "it was compiled for CUDA 13.0, and this torch has CUDA 12.8"


@pytest.mark.parametrize(
    ("functions", "text", "why"),
    [
        (FUNCTIONS, "", ", which lacks aoti_torch_clone"),
        (
            {f"aoti_torch_{name}": f"int aoti_torch_{name}()" for name in "abcde"},
            "int aoti_torch_c();",
            ", which lacks aoti_torch_a, aoti_torch_b, aoti_torch_d and 1 more functions",
        ),
        (
            FUNCTIONS,
            "int aoti_torch_clone(Tensor self, int64_t format, Tensor* ret);",
            ", which may declare aoti_torch_clone differently",
        ),
        ({"aoti_torch_clone": ""}, HEADER, ", which may declare aoti_torch_clone differently"),
        (None, HEADER, ""),
    ],
)
def test_a_torch_with_other_functions_is_refused_by_name(
    tmp_path: pathlib.Path, functions: dict[str, str] | None, text: str, why: str
) -> None:
    model = dataclasses.replace(MODEL, torch_functions=functions)
    reason = misfit(model, torch="2.14.1", torch_headers=headers(tmp_path, text))
    assert reason == f"it was compiled for torch 2.13.0+cpu, and this is torch 2.14.1{why}"


def test_a_torch_without_headers_cannot_be_compared(tmp_path: pathlib.Path) -> None:
    model = dataclasses.replace(MODEL, torch_functions=FUNCTIONS)
    for include in (None, tmp_path / "include"):
        reason = misfit(model, torch="2.14.1", torch_headers=include)
        assert reason is not None
        assert reason.endswith(
            ", whose headers are not installed, so that its functions cannot be compared"
        )


PACKED = manifest.Constant(
    name="w", fqn="w", dtype="float32", shape=(4, 2), stride=(), bytes=32, offset=0, sha256=None
)


@pytest.mark.parametrize(
    ("name", "constants", "why"),
    [
        (f"{STEM}.json", (), "it calls operators by name"),
        ("data/constants/custom_obj_0", (), "it contains pickled objects"),
        (f"{STEM}.weights", (PACKED,), "its weights are packed by oneDNN"),
    ],
)
def test_formats_of_torch_bind_a_model_to_a_release(
    tmp_path: pathlib.Path, name: str, constants: tuple[manifest.Constant, ...], why: str
) -> None:
    content = dataclasses.replace(MANIFEST, files={**MANIFEST.files, name: FILE})
    model = dataclasses.replace(MODEL, torch_functions=FUNCTIONS, constants=constants)
    machine = dataclasses.replace(MACHINE, torch="2.14.1", torch_headers=headers(tmp_path, HEADER))
    with pytest.raises(exc.IncompatibleArtifactError) as error:
        check_machine(content, model, machine, "net.pt2")
    assert error.value.fields["why"] == (
        f"it was compiled for torch 2.13.0+cpu, and this is torch 2.14.1; {why}, in a form that "
        "may differ"
    )
    check_machine(content, model, dataclasses.replace(machine, torch="2.13.1"), "net.pt2")


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
