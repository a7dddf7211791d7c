"""The choice between the targets that a model was compiled for, on made-up machines."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from inductor_ext import exc
from inductor_ext.cpp_wrapper.build import cpu_isa
from inductor_ext.cpp_wrapper.package import manifest, variants
from inductor_ext.cpp_wrapper.package.machine import Machine, check_machine

FILE = manifest.File(bytes=100, sha256="a" * 64)
BASE = "data/aotinductor/model/a.wrapper.so"


def library(target: str) -> str:
    return f"{manifest.variant_folder(target, 'model')}/b.wrapper.so"


def package(device: str, needs: dict[str, tuple[str, ...]]) -> manifest.Manifest:
    """The manifest of a package whose targets need CPU features or have GPU code."""
    field = "cpu_features" if device == "cpu" else "cuda_architectures"
    (target, needed), *others = needs.items()
    model = manifest.Model(
        device=device,
        library=BASE,
        target=target,
        variants=tuple(
            manifest.Variant(target=name, library=library(name), **{field: value})  # type: ignore[arg-type]
            for name, value in others
        ),
        **{field: needed},  # type: ignore[arg-type]
    )
    return manifest.Manifest(
        models={"model": model},
        files=dict.fromkeys([BASE, *map(library, list(needs)[1:])], FILE),
        versions={"torch": "2.13.0", "cuda": "13.0"},
        platform={"system": "linux", "machine": "x86_64"},
    )


LEVELS = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
CPU = package("cpu", {level: tuple(sorted(cpu_isa.features_of(level))) for level in LEVELS})
CUDA = package(
    "cuda",
    {
        "sm_80": ("sm_80",),
        "sm_90": ("sm_90a",),
        "sm_100": ("sm_100", "sm_100a"),
        "ptx": ("compute_80",),
    },
)
MACHINE = Machine(
    torch="2.13.0",
    cuda="13.0",
    system="linux",
    machine="x86_64",
    cpu_features=cpu_isa.features_of("x86-64-v4") | {"amx-tile"},
    capability=(9, 0),
)


def chosen(content: manifest.Manifest, **changes: Any) -> str | None:
    machine = dataclasses.replace(MACHINE, **changes)
    return variants.choose(content, "model", machine, "net.pt2").models["model"].target


@pytest.mark.parametrize(
    ("features", "target"),
    [
        (MACHINE.cpu_features, "x86-64-v4"),
        (cpu_isa.features_of("x86-64-v4") - {"avx512vl"}, "x86-64-v3"),
        (cpu_isa.features_of("x86-64-v3") - {"fma"}, "x86-64-v2"),
        (None, "x86-64-v2"),
    ],
)
def test_a_cpu_gets_the_highest_level_that_it_supports(
    features: frozenset[str] | None, target: str
) -> None:
    assert chosen(CPU, cpu_features=features) == target


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90"),
        ((9, 1), "ptx"),  # sm_90a runs on 9.0 only
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 0), "ptx"),
    ],
)
def test_a_gpu_gets_machine_code_or_ptx(capability: tuple[int, int], target: str) -> None:
    assert chosen(CUDA, capability=capability) == target


def test_the_chosen_model_has_the_code_of_its_target_and_the_shared_rest() -> None:
    content = dataclasses.replace(
        CPU, models={"model": dataclasses.replace(CPU.models["model"], state={"a": "b"})}
    )
    machine = dataclasses.replace(MACHINE, cpu_features=cpu_isa.features_of("x86-64-v3"))
    model = variants.choose(content, "model", machine, "net.pt2").models["model"]
    assert model.library == library("x86-64-v3")
    assert set(model.cpu_features) == cpu_isa.features_of("x86-64-v3")
    assert model.state == {"a": "b"}


@pytest.mark.parametrize(
    ("content", "changes", "why"),
    [
        (
            CPU,
            {"cpu_features": cpu_isa.features_of("x86-64-v2") - {"ssse3"}},
            f"it was compiled for the targets {', '.join(LEVELS)}, and this CPU lacks ssse3",
        ),
        (
            CUDA,
            {"capability": (7, 5)},
            "it was compiled for the targets sm_80, sm_90, sm_100, ptx, and the device is sm_75",
        ),
    ],
)
def test_a_machine_that_no_target_fits(
    content: manifest.Manifest, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(exc.IncompatibleArtifactError) as error:
        chosen(content, **changes)
    assert error.value.fields["why"] == why


@pytest.mark.parametrize(
    ("content", "changes"),
    [(CPU, {"machine": "aarch64"}), (CUDA, {"capability": None}), (CUDA, {"cuda": None})],
)
def test_other_misfits_are_left_to_the_check(
    content: manifest.Manifest, changes: dict[str, Any]
) -> None:
    chosen(content, **changes)


def add_machine(content: manifest.Manifest, target: str, machine: str) -> manifest.Manifest:
    """Return the manifest with a further target, for another processor architecture."""
    model = content.models["model"]
    variant = manifest.Variant(
        target=target, library=library(target), machine=machine, cpu_features=("asimd",)
    )
    model = dataclasses.replace(model, variants=(*model.variants, variant))
    files = {**content.files, library(target): FILE}
    return dataclasses.replace(content, models={"model": model}, files=files)


MIXED = add_machine(CPU, "aarch64", "aarch64")


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({}, "x86-64-v4"),
        ({"machine": "aarch64", "cpu_features": frozenset({"asimd", "sve"})}, "aarch64"),
        ({"machine": "aarch64", "cpu_features": None}, "aarch64"),
        ({"machine": "riscv64", "cpu_features": None}, "x86-64-v2"),
    ],
)
def test_only_targets_for_the_architecture_are_chosen(changes: dict[str, Any], target: str) -> None:
    machine = dataclasses.replace(MACHINE, **changes)
    content = variants.choose(MIXED, "model", machine, "net.pt2")
    model = content.models["model"]
    assert model.target == target
    if target == "aarch64":
        assert content.platform == {"system": "linux", "machine": "aarch64"}
        check_machine(content, model, machine, "net.pt2")
    elif machine.machine == "riscv64":
        with pytest.raises(exc.IncompatibleArtifactError, match="for x86_64, and this is riscv64"):
            check_machine(content, model, machine, "net.pt2")


def test_the_error_names_the_targets_for_all_architectures() -> None:
    with pytest.raises(exc.IncompatibleArtifactError) as error:
        chosen(MIXED, machine="aarch64", cpu_features=frozenset())
    assert error.value.fields["why"] == (
        "it was compiled for the targets x86-64-v2, x86-64-v3, x86-64-v4, aarch64, and this CPU "
        "lacks asimd"
    )


@pytest.mark.parametrize("content", [CUDA, MIXED])
def test_the_manifest_is_read_as_written(content: manifest.Manifest) -> None:
    assert manifest.loads(manifest.dumps(content), "net.pt2") == content


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("target", "../x", "is not the name of a target"),
        ("target", "", "is not the name of a target"),
        ("target", "x86-64-v2", "in another folder"),
        ("target", 3, "expected a string"),
        ("library", None, "expected a string"),
        ("library", BASE, "in another folder"),
        ("library", library("x86-64-v3") + "x", "which is not listed"),
        ("cpu_features", "avx2", "expected a list"),
        ("kernels", [{}], "name"),
        ("cuda_architectures", {}, "expected a list"),
    ],
)
def test_a_damaged_variant_is_refused(field: str, value: object, why: str) -> None:
    content = json.loads(manifest.dumps(CPU))
    content["models"]["model"]["variants"][0][field] = value
    with pytest.raises(exc.BadPackageError, match="its manifest is damaged") as error:
        manifest.loads(json.dumps(content).encode(), "net.pt2")
    assert why in str(error.value)


@pytest.mark.parametrize(
    "changes", [{"target": None}, {"target": "x86-64-v3"}, {"library": None}, {"variants": 1}]
)
def test_a_damaged_list_of_variants_is_refused(changes: dict[str, Any]) -> None:
    content = json.loads(manifest.dumps(CPU))
    content["models"]["model"].update(changes)
    with pytest.raises(exc.BadPackageError, match="its manifest is damaged"):
        manifest.loads(json.dumps(content).encode(), "net.pt2")
