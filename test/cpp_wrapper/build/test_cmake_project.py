"""Packages of sources (`aot_inductor.package_cpp_only`): their content, and builds from them.

torch's own loader and CMake have to build the same library from them as the extension does: it
checks its inputs, hides its symbols, finds its weights, and reports on any CPU whether it can run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.package
from torch import nn
from torch.export import Dim
from torch.utils import cpp_extension

import inductor_ext
from inductor_ext import exc, settings
from inductor_ext.cli import main
from inductor_ext.cpp_wrapper.build import cmake_project, compiler
from inductor_ext.cpp_wrapper.cache import key
from test.support import aot_util
from test.support.aot_util import DEVICES, Artifact

SOURCES = {"aot_inductor.package_cpp_only": True}


class TestAmalgamation:
    def test_a_header_stands_where_it_is_first_included(self) -> None:
        headers = {
            "a.h": '#pragma once\n#include "b.h"\n#include <vector>\nint a;\n',
            "b.h": "#pragma once\nint b;\n",
        }
        units = [
            '#include "b.h"\n#include "a.h"\nint x;\n',
            '  #  include "a.h" // again\nint y;\n',
        ]
        source = cmake_project.amalgamation(units, headers)
        assert source == "int b;\n#include <vector>\nint a;\nint x;\nint y;\n"

    def test_other_headers_stay_included(self) -> None:
        text = '#include <a.h>\n#include "other.h"\n// #include "a.h"\n'
        assert cmake_project.amalgamation([text], {"a.h": "int a;\n"}) == text

    def test_a_unit_without_a_newline_at_its_end(self) -> None:
        assert cmake_project.amalgamation(["int x;", "int y;"], {}) == "int x;\nint y;\n"

    def test_the_runtime(self) -> None:
        texts = {path.name: path.read_text() for path in compiler.RUNTIME.iterdir()}
        headers = {name: text for name, text in texts.items() if name.endswith(".h")}
        units = [text for name, text in texts.items() if name.endswith(".cpp")]
        source = cmake_project.amalgamation(units, headers)
        assert re.findall(r'^\s*#\s*include\s*"', source, re.M) == []
        assert "#pragma once" not in source
        assert source.count("class Container {") == source.count("struct ModelInfo {") == 1


PROJECT = cmake_project.Project(
    name="net",
    source="net.wrapper.cpp",
    standard="20",
    definitions=["ONE", 'TEXT="a b"'],
    compile_options=["-O3", "-fopenmp"],
    link_options=["-fopenmp"],
    libraries=["custom"],
    exports="exports.map",
    weights="net.bin",
    cuda=False,
)

KERNELS = [cmake_project.Kernel("add_0", "k1.ptx"), cmake_project.Kernel("add_1", "k2.ptx")]


class TestListing:
    def test_a_model_on_the_cpu(self) -> None:
        text = cmake_project.cmake(PROJECT)
        assert text.startswith("cmake_minimum_required(VERSION 3.18)\n\nproject(net LANGUAGES CXX)")
        assert "set(CMAKE_CXX_STANDARD 20)" in text
        assert '"-Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/exports.map"' in text
        assert r'"TEXT=\"a b\""' in text
        assert '"${TORCH_LIBRARIES}"\n    "custom")' in text
        assert "CUDA" not in text

    def test_the_weights_are_next_to_the_library(self) -> None:
        text = cmake_project.cmake(PROJECT)
        assert '"${CMAKE_CURRENT_SOURCE_DIR}/net.bin"' in text
        assert "$<TARGET_FILE_PREFIX:net>$<TARGET_FILE_BASE_NAME:net>.weights" in text

    def test_no_weights(self) -> None:
        text = cmake_project.cmake(dataclasses.replace(PROJECT, weights=None))
        assert "add_custom_command" not in text

    def test_kernels_that_are_compiled_with_it(self) -> None:
        options = ["arch=compute_90a,code=compute_90a", "arch=compute_90a,code=sm_90a"]
        project = dataclasses.replace(
            PROJECT, cuda=True, kernels=KERNELS, assembly="kernels.S", gencode_options=options
        )
        text = cmake_project.cmake(project)
        assert "project(net LANGUAGES CXX ASM)" in text
        assert "$<$<COMPILE_LANGUAGE:CXX>:-O3;-fopenmp>" in text
        assert "foreach(kernel k1 k2)" in text
        for option in options:
            assert f"\n            -gencode={option}\n" in text
        assert "CUDA::cudart_static" in text

    def test_the_assembly_that_embeds_kernels(self, tmp_path: pathlib.Path) -> None:
        for kernel, data in zip(KERNELS, (b"first", b"the second"), strict=True):
            (tmp_path / kernel.fatbin).write_bytes(data)
        (tmp_path / "kernels.S").write_text(cmake_project.kernels_assembly(KERNELS))
        command = ["g++", "-c", "-Wa,-I,.", "kernels.S", "-o", "kernels.o"]
        subprocess.run(command, check=True, cwd=tmp_path)
        process = subprocess.run(
            ["nm", "kernels.o"], check=True, cwd=tmp_path, capture_output=True, text=True
        )
        symbols = {line.split()[-1]: line.split()[:-1] for line in process.stdout.splitlines()}
        assert {name: int(symbols[name][0], 16) for name in symbols if "size" in name} == {
            "__add_0_size": len(b"first"),
            "__add_1_size": len(b"the second"),
        }
        assert {"__add_0_start", "__add_0_end", "__add_1_start", "__add_1_end"} <= symbols.keys()
        assert int(symbols["__add_1_start"][0], 16) % 16 == 0


# --- packages -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


class Layers(nn.Module):
    """A library matmul and a fused kernel, and constants with and without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 12)
        self.register_buffer("scale", torch.rand(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * self.scale


def layers(device: str, seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    return Layers().to(device), torch.randn(3, 4, device=device)


def compiled(device: str, **configs: Any) -> Artifact:
    """The package of sources of a model."""
    model, x = layers(device)
    named = {"aot_inductor__model_name_for_generated_files": "net", **configs}
    dynamic = ({0: Dim("rows", min=2, max=64)},)
    return aot_util.compile_model(
        model, (x,), None, dynamic, aot_inductor__package_cpp_only=True, **named
    )


@pytest.fixture(scope="module")
def artifact(device: str) -> Artifact:
    return compiled(device)


def runner_of(library: pathlib.Path, device: str) -> Any:
    if device == "cuda":
        folder = str(library.parent)
        return torch._C._aoti.AOTIModelContainerRunnerCuda(str(library), 1, "cuda", folder)
    return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)


def check(
    run: Callable[[torch.Tensor], Any],
    artifact: Artifact,
    device: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Assert that results are correct and that invalid inputs are rejected."""
    with torch.no_grad():
        for rows in (3, 7):
            x = torch.randn(rows, 4, device=device)
            torch.testing.assert_close(run(x), artifact.eager(x))
    for wrong, message in (
        (torch.randn(3, 5), "dimension 1 is 5, but the model takes 4"),
        (torch.randn(65, 4), "dimension 0 is 65, but the model takes 2 to 64"),
        (torch.randn(3, 4, dtype=torch.float64), "has dtype float64, but the model takes"),
    ):
        capfd.readouterr()
        with pytest.raises(RuntimeError):
            run(wrong.to(device))
        # torch's runners include the message from torch 2.13 on.
        assert message in capfd.readouterr().err


class TestPackage:
    def test_entries(self, artifact: Artifact) -> None:
        names = artifact.names()
        assert not [name for name in names if name.endswith((".so", ".o", ".weights"))]
        (source,) = [name for name in names if name.endswith(".cpp")]
        assert source == "data/aotinductor/model/net.wrapper.cpp"
        assert "extra/inductor_ext/model.h" in names
        stem = source.removesuffix(".cpp")
        assert {f"{stem}_compile_flags.json", f"{stem}_linker_flags.json"} <= set(names)

    def test_manifest(self, artifact: Artifact) -> None:
        (name,) = [name for name in artifact.names() if name.endswith("_serialized_weights.bin")]
        with zipfile.ZipFile(artifact.path) as file:
            (path,) = [path for path in file.namelist() if path.endswith("manifest.json")]
            model = json.loads(file.read(path))["models"]["model"]
        assert model["library"] is None
        assert model["weights"] == name
        constants = {item["fqn"]: item["shape"] for item in model["constants"]}
        assert constants == {"linear.weight": [12, 4], "linear.bias": [12], "scale": [12]}

    def test_the_source_depends_on_no_machine(self, artifact: Artifact) -> None:
        with zipfile.ZipFile(artifact.path) as file:
            (path,) = [path for path in file.namelist() if path.endswith("CMakeLists.txt")]
            text = artifact.sources() + file.read(path).decode()
        assert re.findall(r'^\s*#\s*include\s*"(.*)"', text, re.M) == []
        for folder in (tempfile.gettempdir(), sys.prefix, str(pathlib.Path.home())):
            assert f"{folder}/" not in text
        assert "#include <regex>" not in text

    def test_loading_it_names_the_remedy(self, artifact: Artifact) -> None:
        message = r"sources of model 'model', no shared library\. .*cmake -S SOURCES -B build"
        with pytest.raises(exc.SourcesOnlyError, match=message):
            inductor_ext.load(artifact.path)

    def test_looking_inside(self, artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.main(["verify", artifact.path]) == 0
        assert main.main(["diff", artifact.path, artifact.path]) == 0
        assert main.main(["inspect", artifact.path]) == 0
        out, _ = capsys.readouterr()
        assert "library      none: the package contains its sources" in out
        assert "linear.weight  float32  [12, 4]" in out

    def test_source_packages_have_their_own_cache_key(self, device: str) -> None:
        model, x = layers(device)
        program = torch.export.export(model, (x,))
        digests = {
            key.compute_key(program, settings.Settings(), patches) for patches in ({}, SOURCES)
        }
        assert len(digests) == 2

    def test_default_names_are_unique(self, device: str) -> None:
        model, x = layers(device)
        path = inductor_ext.aoti_compile_and_package(
            torch.export.export(model, (x,)), inductor_configs={**SOURCES, "artifact_cache": False}
        )
        with pytest.raises(exc.SourcesOnlyError):
            inductor_ext.load(path)
        with zipfile.ZipFile(path) as file:
            (listing,) = [name for name in file.namelist() if name.endswith("CMakeLists.txt")]
            assert "add_library(aoti_model SHARED" in file.read(listing).decode()

    @pytest.mark.parametrize("option", ["allow_stack_allocation", "use_minimal_arrayref_interface"])
    def test_options_that_only_inductor_supports(self, option: str, tmp_path: pathlib.Path) -> None:
        model, x = layers("cpu")
        path = inductor_ext.aoti_compile_and_package(
            torch.export.export(model, (x,)),
            package_path=str(tmp_path / "m.pt2"),
            inductor_configs={**SOURCES, f"aot_inductor.{option}": True},
        )
        assert isinstance(path, str)
        assert not [name for name in zipfile.ZipFile(path).namelist() if "inductor_ext" in name]

    def test_weights_outside_are_not_copied(self, device: str, tmp_path: pathlib.Path) -> None:
        weights = tmp_path / "net.weights"
        artifact = compiled(device, aot_weights_file=str(weights))
        assert not [name for name in artifact.names() if name.endswith(".bin")]
        with zipfile.ZipFile(artifact.path) as file:
            (listing,) = [name for name in file.namelist() if name.endswith("CMakeLists.txt")]
            assert ".weights" not in file.read(listing).decode()
        assert weights.stat().st_size == 4 * (48 + 16 + 12)

    def test_a_name_of_another_model(self, device: str) -> None:
        """Inductor's cache folder keeps the first file written under a name, kernels included."""
        outputs: list[list[bytes]] = []
        for rows in (5, 7):
            program = aot_util.export(nn.Softmax(-1), (torch.randn(rows, 300, device=device),))
            path = aot_util.compile_program(
                program,
                aot_inductor__package_cpp_only=True,
                aot_inductor__model_name_for_generated_files="net",
            )
            with zipfile.ZipFile(path) as file:
                names = [name for name in file.namelist() if name.endswith((".cpp", ".cubin"))]
                outputs.append([file.read(name) for name in sorted(names)])
        assert len(outputs[0]) == len(outputs[1]) == (1 if device == "cpu" else 2)
        for first, second in zip(*outputs, strict=True):
            assert first != second


# --- libraries ----------------------------------------------------------------------------------


def output(*command: Any) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def disassembled(library: pathlib.Path) -> dict[str, list[str]]:
    """Instructions by the demangled name of the function."""
    functions: dict[str, list[str]] = {}
    name = ""
    for line in output("objdump", "-d", "-C", "--no-show-raw-insn", library).splitlines():
        if match := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            name = match[1]
            functions[name] = []
        elif name and "\t" in line:
            functions[name].append(line.partition("\t")[2].strip())
    return functions


OLD_CPU = re.compile(
    r"AOTInductorModelContainerCreate(WithDevice)?|AOTInductorModelCreate(V2)?"
    r"|inductor_ext_missing_cpu_features|(.*::)?(missing_cpu_features|misfit|cpuid|saved_state)\(.*"
    r"|inductor_ext::\(anonymous namespace\)::(has|is)\(.*"
)
"""Functions that run before the CPU features are checked."""

NEWER = re.compile(
    r"v[a-z]|k[a-z]+[bwdq]\b|andn|bextr|bls|bzhi|lzcnt|tzcnt|popcnt|movbe|rorx|(sh[lr]|sar|mul)x"
)
"""Instructions that x86-64-v1 CPUs lack: AVX and later, masks, bit manipulation."""


def built_by_cmake(package: str, folder: pathlib.Path) -> pathlib.Path:
    """The library that CMake builds from a package's sources, which it does not modify."""
    zipfile.ZipFile(package).extractall(folder)
    (listing,) = folder.rglob("CMakeLists.txt")
    build = folder / "build"
    configure = [
        *("cmake", "-S", str(listing.parent), "-B", str(build)),
        f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    for command in (configure, ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (library,) = build.rglob("*.so")
    for cubin in listing.parent.glob("*.cubin"):
        shutil.copy(cubin, library.parent)
    return library


def toolkit_headers() -> bool:
    home = cpp_extension.CUDA_HOME
    return home is not None and os.path.exists(os.path.join(home, "include", "cuda_runtime.h"))


@pytest.fixture(scope="module")
def library(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return built_by_cmake(artifact.path, tmp_path_factory.mktemp("net"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.skipif(
    torch.version.cuda is not None and not toolkit_headers(),
    reason="torch's cmake files look for the CUDA toolkit that torch was built with",
)
class TestByCMake:
    def test_results_and_rejections(
        self,
        library: pathlib.Path,
        artifact: Artifact,
        device: str,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        assert library.name == "libnet.so"
        runner = runner_of(library, device)
        check(lambda x: runner.run([x])[0], artifact, device, capfd)

    def test_only_the_c_interface_is_visible(self, library: pathlib.Path) -> None:
        lines = output("nm", "-D", "--defined-only", library).splitlines()
        names = {line.split()[-1] for line in lines}
        assert all(name.startswith(("AOTInductor", "inductor_ext_")) for name in names)
        assert {"AOTInductorModelContainerRun", "inductor_ext_last_error"} <= names
        # Bound to libtorch's own copies, these crash Inductor's libraries at load.
        assert "basic_regex" not in output("strings", "-a", library)

    def test_the_stack_is_not_executable(self, library: pathlib.Path) -> None:
        (line,) = [
            line for line in output("readelf", "-lW", library).splitlines() if "STACK" in line
        ]
        assert line.split()[-2] == "RW"

    @pytest.mark.skipif(platform.machine() != "x86_64", reason="Arm has no such levels")
    def test_any_cpu_can_report_missing_features(self, library: pathlib.Path) -> None:
        functions = disassembled(library)
        early = {name: code for name, code in functions.items() if OLD_CPU.fullmatch(name)}
        assert len(early) >= 10
        assert [line for code in early.values() for line in code if NEWER.match(line)] == []
        calls = re.findall(
            r"call +[0-9a-f]+ <(.*?)(?:@plt)?>", "\n".join(map("\n".join, early.values()))
        )
        inside = [name for name in calls if name in functions and not OLD_CPU.fullmatch(name)]
        # If the CPU lacks nothing.
        assert {name.partition("(AOT")[0].rpartition("::")[2] for name in inside} <= {
            "create",
            "create_alone",
            "create_from_external",
            "create_from_pairs",
        }
        assert any(NEWER.match(line) for code in functions.values() for line in code)

    @pytest.mark.gpu
    @pytest.mark.parametrize("later", [False, True], ids=["machine code", "PTX"])
    def test_kernels_in_the_library(
        self, later: bool, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        artifact = compiled(
            "cuda",
            aot_inductor__embed_kernel_binary=True,
            aot_inductor__emit_multi_arch_kernel=later,
        )
        assert not [name for name in artifact.names() if name.endswith(".cubin")]
        library = built_by_cmake(artifact.path, tmp_path)
        runner = runner_of(library, "cuda")
        check(lambda x: runner.run([x])[0], artifact, "cuda", capfd)


@pytest.mark.slow
class TestByTheLoaderOfTorch:
    def test_results_and_rejections(
        self, artifact: Artifact, device: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        check(torch._inductor.aoti_load_package(artifact.path), artifact, device, capfd)

    def test_packaged_by_inductor(self, device: str, tmp_path: pathlib.Path) -> None:
        model, x = layers(device, seed=1)
        with inductor_ext.activate():
            module = aot_util.export(model, (x,)).module()
            options = {"aot_inductor.package": True, **SOURCES}
            files = torch._inductor.aot_compile(module, (x,), options=options)
            path = torch._inductor.package.package_aoti(str(tmp_path / "net.pt2"), files)
        loaded = torch._inductor.aoti_load_package(path)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), model(x))
        with pytest.raises(RuntimeError):
            loaded(torch.randn(3, 5, device=device))
