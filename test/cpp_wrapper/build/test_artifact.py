"""How artifacts are built: what the shared object is, where weights lie, for which CPU, and why."""

from __future__ import annotations

import ctypes
import io
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor
from torch._inductor.utils import run_and_get_cpp_code

import inductor_ext
from inductor_ext import events, exc
from inductor_ext.cpp_wrapper.build import artifact, compiler, cpu_isa, cpu_target
from inductor_ext.cpp_wrapper.codegen import (
    extern_nodes,
    upstream_fixes,
    weights_layout,
)
from inductor_ext.hooks import activate
from inductor_ext.hooks.records import CompileRecord

LIBRARY_BYTES = 350_000
"""What a small model's shared object may have; stock's has 1.5 million."""

STANDARD_LIBRARY_BYTES = 450_000
"""What it has more where the compiler links the C++ library statically."""


class Tied(torch.nn.Module):
    """Parameters that share memory, a view into a buffer, an empty one, and a mutated counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.second = torch.nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.rand(40, 16))
        self.register_buffer("rows", self.table[3:7])
        self.register_buffer("empty", torch.empty(0, 16))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        hidden = torch.relu(self.first(x)) + self.table.sum(0)
        both = torch.cat([self.second(hidden), self.rows, self.empty])
        return both * self.calls[0]


class Built:
    """A package, with its library and sources taken out."""

    def __init__(
        self,
        folder: pathlib.Path,
        model: torch.nn.Module,
        *inputs: torch.Tensor,
        **options: Any,
    ) -> None:
        self.model, self.inputs = model, inputs
        self.path = str(folder / "m.pt2")
        with artifact.collecting() as artifacts:
            program = torch.export.export(model, inputs)
            _, self.code = run_and_get_cpp_code(
                inductor_ext.aoti_compile_and_package,
                program,
                package_path=self.path,
                inductor_configs={"artifact_cache": False, **options},
            )
        assert artifacts == []
        self.loaded = inductor_ext.load(self.path)
        with zipfile.ZipFile(self.path) as file:
            (name,) = [name for name in file.namelist() if name.endswith(".so")]
            self.library = folder / "model.so"
            self.library.write_bytes(file.read(name))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("tied"), Tied().eval(), torch.randn(3, 16))


OMITTED = {
    # Codegen of the minimal interface writes them into the model; `codegen.supported` refuses it.
    "AOTInductorModelRunMinimalArrayrefInterface": "aot_inductor.use_minimal_arrayref_interface",
    "AOTInductorModelRunMinimalArrayrefInterfaceV2": "aot_inductor.use_minimal_arrayref_interface",
    # From torch 2.14 on, for callers that look them up: no loader of torch does. They are hints
    # how weights are copied to a GPU, which the runtime does by one copy of the mapped file.
    "AOTInductorSetUsePinnedAsyncConstantsCopy": "performance only",
    "AOTInductorSetPinnedAsyncConstantsCopyStageBufferBytes": "performance only",
}
"""The functions of torch's interface that an artifact does not have, and why."""


def declared_functions() -> set[str]:
    """The functions of the installed torch's interface of an artifact."""
    header = "include/torch/csrc/inductor/aoti_runtime/interface.h"
    text = (pathlib.Path(torch.__file__).parent / header).read_text()
    return set(re.findall(r"AOTIRuntimeError\s+(AOTInductor\w+)\(", text))


class Entry(ctypes.Structure):
    """AOTInductorConstantMapEntry of torch's interface."""

    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


def handles(tensors: Sequence[torch.Tensor]) -> list[int]:
    """AtenTensorHandles of tensors; whoever gets them has to delete them."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
    return [pointer(capsule, None) for capsule in capsules]


class ExternalConstants:
    """A model that is made by AOTInductorModelContainerCreateWithExternalConstants."""

    def __init__(self, library: pathlib.Path, constants: Mapping[str, torch.Tensor]) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.inductor_ext_last_error.restype = ctypes.c_char_p
        self.library.inductor_ext_quiet(1)
        entries = (Entry * len(constants))(
            *(
                Entry(name.encode(), handle)
                for name, handle in zip(constants, handles([*constants.values()]), strict=True)
            )
        )
        self.container = ctypes.c_void_p()
        self.code = self.library.AOTInductorModelContainerCreateWithExternalConstants(
            ctypes.byref(self.container),
            ctypes.c_size_t(1),
            b"cpu",
            None,
            entries,
            ctypes.c_size_t(len(constants)),
        )

    @property
    def error(self) -> str:
        return str(self.library.inductor_ext_last_error().decode())

    def loads_constants(self) -> bool:
        found = ctypes.c_bool()
        ask = self.library.AOTInductorModelContainerDidCallLoadConstants
        assert ask(self.container, ctypes.byref(found)) == 0
        return found.value

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the model; it has one result."""
        taken = (ctypes.c_void_p * len(inputs))(*handles(inputs))
        outputs = (ctypes.c_void_p * 1)()
        run = self.library.AOTInductorModelContainerRun
        sizes = [ctypes.c_size_t(size) for size in (len(inputs), 1)]
        assert run(self.container, taken, sizes[0], outputs, sizes[1], None, None) == 0
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p,) * 3
        (result,) = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(
            [capsule(outputs[0], None, None)]
        )
        return result

    def delete(self) -> None:
        assert self.library.AOTInductorModelContainerDelete(self.container) == 0


class TestExternalConstants:
    @pytest.mark.parametrize("folding", [False, True])
    def test_the_model_uses_the_tensors_that_it_gets(
        self, folding: bool, tmp_path: pathlib.Path
    ) -> None:
        torch.manual_seed(0)
        linear, x = torch.nn.Linear(16, 12), torch.randn(3, 16)

        class Scaled(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = linear

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.nn.functional.linear(x, self.linear.weight.exp(), self.linear.bias)

        options = {"aot_inductor.use_runtime_constant_folding": folding}
        built = Built(tmp_path, Scaled(), x, **options)
        (model,) = built.loaded.manifest.models.values()
        other = {
            "linear.weight": torch.randn_like(linear.weight),
            "linear.bias": torch.randn_like(linear.bias),
        }
        names = {constant.fqn: constant.name for constant in model.constants}
        external = ExternalConstants(
            built.library, {names[fqn]: tensor for fqn, tensor in other.items()}
        )
        assert (external.code, external.error) == (0, "")
        assert not external.loads_constants()
        expected = torch.nn.functional.linear(x, other["linear.weight"].exp(), other["linear.bias"])
        torch.testing.assert_close(external(x), expected)
        # Not copied: what the caller writes to a tensor, the model sees. What is folded is folded.
        other["linear.bias"].zero_()
        expected = torch.nn.functional.linear(x, other["linear.weight"].exp())
        torch.testing.assert_close(external(x), expected)
        external.delete()
        # The others have their own.
        torch.testing.assert_close(built.loaded(x), built.model(x))

    def test_all_constants_have_to_be_there(self, tied: Built) -> None:
        external = ExternalConstants(tied.library, {})
        assert external.code != 0
        assert "is not among the constants that the model was created with" in external.error

    def test_a_model_with_weights_of_its_own_says_so(self, tied: Built) -> None:
        found, container = ctypes.c_bool(), ctypes.c_void_p(tied.loaded._container)
        library = tied.loaded._library._library
        ask = library.AOTInductorModelContainerDidCallLoadConstants
        assert ask(container, ctypes.byref(found)) == 0
        assert found.value


def elf(*arguments: str) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


class TestSharedObject:
    def test_only_the_c_interface_is_visible(self, tied: Built) -> None:
        lines = elf("nm", "-D", "--defined-only", str(tied.library)).splitlines()
        names = {line.split()[-1] for line in lines}
        assert all(name.startswith(("AOTInductor", "inductor_ext_")) for name in names)
        assert {"AOTInductorModelContainerRun", "inductor_ext_last_error"} <= names

    def test_it_has_every_function_that_torch_declares(self, tied: Built) -> None:
        """What is missing there, the loader of the installed torch warns of at each load."""
        lines = elf("nm", "-D", "--defined-only", str(tied.library)).splitlines()
        missing = declared_functions() - {line.split()[-1] for line in lines}
        assert missing == declared_functions() & OMITTED.keys()

    def test_the_stack_is_not_executable(self, tied: Built) -> None:
        (line,) = [
            line
            for line in elf("readelf", "-lW", str(tied.library)).splitlines()
            if "STACK" in line
        ]
        assert line.split()[-2] == "RW"

    def test_it_is_small_and_has_no_line_tables(self, tied: Built) -> None:
        shared = "libstdc++" in elf("readelf", "-d", str(tied.library))
        limit = LIBRARY_BYTES + (0 if shared else STANDARD_LIBRARY_BYTES)
        assert tied.library.stat().st_size < limit
        assert ".debug" not in elf("readelf", "-SW", str(tied.library))

    def test_nothing_heavy_of_the_standard_library_is_in_it(self, tied: Built) -> None:
        # Bound against libtorch's own copies, these crashed stock's artifacts at load.
        assert "basic_regex" not in elf("strings", "-a", str(tied.library))
        assert "regex" not in tied.code
        assert "AOTInductorModelContainerCreate" not in tied.code

    def test_a_machine_without_the_features_is_told(self, tied: Built) -> None:
        library = ctypes.CDLL(str(tied.library))
        library.inductor_ext_missing_cpu_features.restype = ctypes.c_char_p
        assert library.inductor_ext_missing_cpu_features() == b""


class TestConstants:
    def test_results_and_state(self, tied: Built) -> None:
        eager = Tied().eval()
        eager.load_state_dict(tied.model.state_dict())
        eager.calls.zero_()
        loaded = inductor_ext.load(tied.path)
        for _ in range(2):
            x = torch.randn(3, 16)
            torch.testing.assert_close(loaded(x), eager(x))

    def test_tied_weights_are_stored_once(self, tied: Built) -> None:
        (model,) = tied.loaded.manifest.models.values()
        stored = {c.fqn: c.bytes for c in model.constants}
        assert len({"first.weight", "second.weight"} & stored.keys()) == 1
        size = tied.loaded.manifest.files[model.weights].bytes
        assert sum(stored.values()) <= size < sum(stored.values()) + 64 * len(stored)

    def test_processes_do_not_see_each_others_changes(self, tied: Built) -> None:
        first, second = inductor_ext.load(tied.path), inductor_ext.load(tied.path)
        x = torch.randn(3, 16)
        before = second(x)
        for _ in range(3):
            first(x)
        torch.testing.assert_close(second(x), before * 2)


class TestWeightsOutside:
    def test_packages_share_one_file(self, tmp_path: pathlib.Path) -> None:
        model = torch.nn.Linear(40, 30).eval()
        file = tmp_path / "linear.weights"
        inputs = [torch.randn(3, 40), torch.randn(7, 40)]
        times = set()
        for index, x in enumerate(inputs):
            path = str(tmp_path / f"{index}.pt2")
            inductor_ext.aoti_compile_and_package(
                torch.export.export(model, (x,)),
                package_path=path,
                inductor_configs={"aot_weights_file": str(file)},
            )
            times.add(file.stat().st_mtime_ns)
            with zipfile.ZipFile(path) as package:
                assert not [name for name in package.namelist() if name.endswith(".weights")]
            loaded = inductor_ext.load(path, weights=file)
            torch.testing.assert_close(loaded(x), model(x))
        assert len(times) == 1, "the second compile has written the same weights again"

    def test_not_given(self, tmp_path: pathlib.Path) -> None:
        path, file = str(tmp_path / "m.pt2"), tmp_path / "m.weights"
        inductor_ext.aoti_compile_and_package(
            torch.export.export(torch.nn.Linear(40, 30).eval(), (torch.randn(3, 40),)),
            package_path=path,
            inductor_configs={"aot_weights_file": str(file)},
        )
        with pytest.raises(exc.ArtifactLoadError, match="in a separate file"):
            inductor_ext.load(path)
        file.write_bytes(file.read_bytes()[::-1])
        with pytest.raises(exc.InductorExtError, match="weights"):
            inductor_ext.load(path, weights=file)

    def test_several_models(self, tmp_path: pathlib.Path) -> None:
        program = torch.export.export(torch.nn.Linear(4, 3).eval(), (torch.randn(3, 4),))
        with pytest.raises(exc.SharedWeightsFileError, match="a, b"):
            inductor_ext.aoti_compile_and_package(
                {"a": program, "b": program},
                package_path=tmp_path / "m.pt2",
                inductor_configs={"aot_weights_file": str(tmp_path / "w")},
            )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["absent/w", "."])
    def test_where_no_file_can_be(self, tmp_path: pathlib.Path, name: str) -> None:
        program = torch.export.export(torch.nn.Linear(4, 3).eval(), (torch.randn(3, 4),))
        with (
            events.capture(CompileRecord) as compiles,
            pytest.raises(exc.BadWeightsFileError, match=r"does not exist|it is a folder"),
        ):
            inductor_ext.aoti_compile_and_package(
                program,
                package_path=tmp_path / "m.pt2",
                inductor_configs={"aot_weights_file": str(tmp_path / name)},
            )
        assert not compiles
        assert list(tmp_path.iterdir()) == []


class TestPlanOfWeights:
    def test_offsets(self) -> None:
        base = torch.arange(10, dtype=torch.int64)
        constants = {
            "a": torch.rand(3),
            "b": base[2:5],
            "c": torch.empty(0, 4),
            "d": base,
            "e": torch.rand(33, 2),
        }
        plan = weights_layout.plan(constants)
        assert plan.sizes == {"a": 12, "b": 80, "c": 0, "d": 80, "e": 264}
        assert plan.offsets == {"a": 0, "b": 64, "c": 0, "d": 64, "e": 192}
        assert plan.bytes == 192 + 264

    def test_written_bytes(self) -> None:
        constants = {"a": torch.rand(5), "b": torch.arange(3), "c": torch.rand(7).bfloat16()}
        plan = weights_layout.plan(constants)
        file = io.BytesIO()
        weights_layout.write(file, constants, plan)
        data = file.getvalue()
        assert len(data) == plan.bytes
        for name, tensor in constants.items():
            raw = bytearray(data[plan.offsets[name] :][: plan.sizes[name]])
            assert torch.frombuffer(raw, dtype=tensor.dtype).equal(tensor)

    def test_no_constants(self) -> None:
        assert weights_layout.plan({}) == weights_layout.Plan({}, {}, 0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are those of x86-64")
class TestTarget:
    @pytest.mark.parametrize(
        ("flags", "level", "beyond"),
        [
            ("", "x86-64-v2", set()),
            ("-mavx2 -mfma -mf16c", "x86-64-v3", set()),
            ("-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma", "x86-64-v4", set()),
            ("-mavx512f -mfma -mavx512vnni -mavx512vl", "x86-64-v4", {"avx512vnni"}),
            ("-mavx512f -mamx-tile -mamx-int8", "x86-64-v4", {"amx-tile", "amx-int8"}),
        ],
    )
    def test_flags(self, flags: str, level: str, beyond: set[str]) -> None:
        found = cpu_target.of(flags, "x86_64", frozenset())
        assert found.flags[0] == f"-march={level}"
        assert "-march=native" not in found.flags
        assert set(found.features) == cpu_isa.features_of(level) | beyond

    def test_every_feature_is_known_to_the_artifact(self) -> None:
        source = (compiler.RUNTIME / "cpu_features.cpp").read_text()
        names = {
            name for level in ("x86-64-v2", "x86-64-v4") for name in cpu_isa.features_of(level)
        }
        for name in {*names, *cpu_target._BEYOND}:
            assert f'{{"{name}", ' in source, name

    def test_a_level_that_this_machine_lacks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_isa, "machine_features", lambda: frozenset({"sse3"}))
        with pytest.raises(exc.UnsupportedLevelError, match=r"lacks .*avx2"):
            cpu_target.inductor_options("x86-64-v3")

    def test_a_lower_level(self, tmp_path: pathlib.Path) -> None:
        model, x = torch.nn.Softmax(-1), torch.randn(5, 33)
        path = str(tmp_path / "m.pt2")
        inductor_ext.aoti_compile_and_package(
            torch.export.export(model, (x,)),
            package_path=path,
            inductor_configs={"aot_isa": "x86-64-v3"},
        )
        loaded = inductor_ext.load(path)
        torch.testing.assert_close(loaded(x), model(x))
        (entry,) = loaded.manifest.models.values()
        assert set(entry.cpu_features) == cpu_isa.features_of("x86-64-v3")


FEATURES = """
#include "cpu_features.h"
#include <cstdio>
int main(int, char** argv) {
  char text[1024];
  inductor_ext::missing_cpu_features(argv[1], text, sizeof(text));
  std::puts(text);
}
"""


def test_the_artifact_and_the_kernel_agree_on_this_cpu(tmp_path: pathlib.Path) -> None:
    (tmp_path / "main.cpp").write_text(FEATURES)
    sources = [str(tmp_path / "main.cpp"), str(compiler.RUNTIME / "cpu_features.cpp")]
    program = str(tmp_path / "main")
    command = ["g++", "-std=c++20", f"-I{compiler.RUNTIME}", *sources, "-o", program]
    subprocess.run(command, check=True)
    asked = sorted({*cpu_isa.features_of("x86-64-v4"), *cpu_target._BEYOND})
    missing = elf(program, ",".join([*asked, "no-such-thing"])).strip().split(",")
    assert missing == [*cpu_isa.missing(asked), "no-such-thing"]


class TestOtherWaysToCompile:
    def test_a_shared_object_carries_its_weights(self, tmp_path: pathlib.Path) -> None:
        model, x = torch.nn.Linear(300, 70).eval(), torch.randn(4, 300)
        path = str(tmp_path / "model.so")
        program = torch.export.export(model, (x,))
        with activate.activate():
            made = torch._inductor.aot_compile(
                program.module(check_guards=False),
                (x,),
                options={"aot_inductor.output_path": path},
            )
        assert made == path
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
        torch.testing.assert_close(runner.run([x])[0], model(x))
        moved = shutil.copy(path, tmp_path / "elsewhere.so")
        os.remove(path)
        again = torch._C._aoti.AOTIModelContainerRunnerCpu(str(moved), 1)
        torch.testing.assert_close(again.run([x])[0], model(x))

    @pytest.mark.parametrize("size", [4, 40])
    def test_files_of_one_model_outlast_the_compile_of_another(
        self, size: int, tmp_path: pathlib.Path
    ) -> None:
        """Code alike and values not: few are in the kernels' code, many in the weights' file."""
        from torch._inductor.package import package_aoti

        x = torch.randn(3, size)
        models = [torch.nn.LayerNorm(size).eval() for _ in range(2)]
        files = []
        for model in models:
            torch.nn.init.normal_(model.weight)
            module = torch.export.export(model, (x,)).module(check_guards=False)
            with activate.activate():
                options = {"aot_inductor.package": True}
                files.append(torch._inductor.aot_compile(module, (x,), options=options))
        for number, (model, made) in enumerate(zip(models, files, strict=True)):
            path = str(tmp_path / f"{number}.pt2")
            package_aoti(path, made)
            torch.testing.assert_close(inductor_ext.load(path)(x), model(x))

    def test_models_of_the_same_code_have_their_own_weights(self, tmp_path: pathlib.Path) -> None:
        x = torch.randn(3, 20)
        models = {name: torch.nn.Linear(20, 20).eval() for name in ("a", "b")}
        path = str(tmp_path / "m.pt2")
        programs = {name: torch.export.export(model, (x,)) for name, model in models.items()}
        inductor_ext.aoti_compile_and_package(programs, package_path=path)
        for name, model in models.items():
            torch.testing.assert_close(inductor_ext.load(path, name)(x), model(x))

    def test_line_tables_apart(self, tmp_path: pathlib.Path) -> None:
        model, x = torch.nn.ReLU(), torch.randn(9)
        path = str(tmp_path / "model.so")
        with activate.activate(aot_debug_info=True):
            torch._inductor.aot_compile(
                torch.export.export(model, (x,)).module(check_guards=False),
                (x,),
                options={"aot_inductor.output_path": path},
            )
        sections = elf("readelf", "-SW", path)
        assert ".gnu_debuglink" in sections
        assert ".debug_line" not in sections
        assert ".debug_line" in elf("readelf", "-SW", f"{path}.debug")

    def test_metadata_of_the_process_is_left_alone(self, tmp_path: pathlib.Path) -> None:
        from torch._inductor import config

        before = dict(config.aot_inductor.metadata)
        inductor_ext.aoti_compile_and_package(
            torch.export.export(torch.nn.Tanh(), (torch.randn(3),)),
            package_path=tmp_path / "m.pt2",
        )
        assert config.aot_inductor.metadata == before

    def test_several_models_in_one_package(self, tmp_path: pathlib.Path) -> None:
        x = torch.randn(6)
        models = {"up": torch.nn.Softplus(), "down.v2": torch.nn.LogSigmoid()}
        path = str(tmp_path / "two.pt2")
        inductor_ext.aoti_compile_and_package(
            {name: torch.export.export(model, (x,)) for name, model in models.items()},
            package_path=path,
        )
        for name, model in models.items():
            torch.testing.assert_close(inductor_ext.load(path, name)(x), model(x))
            stock = torch._C._aoti.AOTIModelPackageLoader(path, name, False, 1, -1)
            torch.testing.assert_close(stock.run([x])[0], model(x))

    @pytest.mark.parametrize("name", ["", "../up", "a b", 3])
    def test_a_models_name_that_is_none(self, name: Any, tmp_path: pathlib.Path) -> None:
        program = torch.export.export(torch.nn.ReLU(), (torch.randn(2),))
        with pytest.raises(exc.BadModelNameError):
            inductor_ext.aoti_compile_and_package({name: program}, package_path=tmp_path / "m.pt2")
        assert list(tmp_path.iterdir()) == []


def test_enumeration_values_for_executors_without_conversion() -> None:
    from torch._export.serde import schema

    nodes = {
        "inputs": [
            {"name": "dtype", "arg": {"as_scalar_type": int(schema.ScalarType.DOUBLE)}},
            {"name": "other", "arg": {"as_scalar_type": int(schema.ScalarType.BFLOAT16)}},
            {"name": "layout", "arg": {"as_layout": int(schema.Layout.Strided)}},
            {"name": "format", "arg": {"as_memory_format": int(schema.MemoryFormat.ChannelsLast)}},
            {"name": "number", "arg": {"as_int": 8}},
        ]
    }
    found = [next(iter(item["arg"].values())) for item in extern_nodes.renumber(nodes)["inputs"]]
    # c10's Double, BFloat16, Strided and ChannelsLast.
    assert found == [7, 15, 0, 2, 8]


@pytest.mark.parametrize("takes_dtype", [False, True])
def test_a_torch_that_numbers_dtypes_otherwise_is_refused(
    takes_dtype: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the artifact itself, for torch's loaders do not ask which torch it was made for."""

    def convert(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return x.to(dtype).sin() if dtype is not None else x.sin()

    with torch.library._scoped_library("test_aot_build", "DEF") as library:
        library.define("convert(Tensor x, ScalarType? dtype=None) -> Tensor")
        library.impl("convert", convert, "CPU")
        torch.library.register_fake("test_aot_build::convert", convert, lib=library)

        class Converted(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                arguments = (torch.float64,) if takes_dtype else ()
                return torch.ops.test_aot_build.convert(x + 1, *arguments) * 2

        other = not extern_nodes.takes_export_numbers()
        monkeypatch.setattr(extern_nodes, "takes_export_numbers", lambda: other)
        x, path = torch.randn(3), str(tmp_path / "m.pt2")
        program = torch.export.export(Converted(), (x,))
        options = {"artifact_cache": False}
        inductor_ext.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
        if not takes_dtype:
            torch.testing.assert_close(inductor_ext.load(path)(x), Converted()(x))
            return
        with pytest.raises(exc.ArtifactLoadError) as error:
            inductor_ext.load(path)
        found = ".".join(torch.__version__.split(".")[:2])
        assert f"compiled with torch {torch.__version__}, and this is torch {found}" in str(
            error.value
        )


def test_threads_share_runners(tied: Built) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).eval()
    buffer = io.BytesIO()
    inputs = [torch.randn(8, 64) for _ in range(6)]
    inductor_ext.aoti_compile_and_package(
        torch.export.export(model, (inputs[0],)), package_path=buffer
    )
    loaded = inductor_ext.load(buffer, num_runners=2)
    rounds, errors = 200, []

    def work(index: int) -> None:
        try:
            expected = model(inputs[index])
            for _ in range(rounds):
                torch.testing.assert_close(loaded(inputs[index]), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    # Whoever wants all runners for himself gets his turn as well.
    for _ in range(20):
        loaded.update_constants({"0.bias": model[0].bias.detach().clone()})
    for thread in threads:
        thread.join()
    assert errors == []


LOADS: dict[str, Callable[[str], str]] = {
    "ours": lambda path: f"import inductor_ext; run = inductor_ext.load({path!r})",
    "stock": lambda path: (
        f"l = torch._C._aoti.AOTIModelPackageLoader({path!r}, 'model', False, 1, -1)\n"
        "run = lambda x: l.run([x])[0]"
    ),
}


@pytest.mark.parametrize("loader", LOADS)
def test_a_fresh_process_loads_it_without_a_compiler(
    tied: Built, loader: str, tmp_path: pathlib.Path
) -> None:
    code = f"""
import sys, torch
{LOADS[loader](tied.path)}
print(run(torch.ones(3, 16)).sum().item())
print([name for name in sys.modules if name.startswith("torch._inductor")])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    value, modules = done.stdout.splitlines()
    expected = inductor_ext.load(tied.path)(torch.ones(3, 16)).sum().item()
    assert float(value) == pytest.approx(expected, rel=1e-4)
    assert modules == "[]"


def test_launchers_of_triton_kernels_take_floats_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch declares a float of the graph as int64_t: 0.5 would be 0."""
    from torch._inductor.codecache import CudaKernelParamCache
    from torch._inductor.utils import IndentedBuffer

    class Stock:
        kernel_name = "triton_add"

        def generate(self, wrapper: Any) -> None:
            with wrapper.prefix.indent():
                wrapper.prefix.writelines(["int64_t n,", "int64_t zuf0,", "float scale,"])

    signature = {"x": "*fp32", "n": "i64", "zuf0": "fp64", "scale": "fp32"}
    kernels = {"triton_add": {"triton_meta": {"signature": signature}}}
    monkeypatch.setattr(CudaKernelParamCache, "cache", kernels)
    wrapper = SimpleNamespace(prefix=IndentedBuffer())
    wrapper.prefix.writeline("float scale,")
    upstream_fixes.generate_launcher(Stock(), wrapper)
    lines = [line.strip() for line in wrapper.prefix._lines]
    assert lines == ["float scale,", "int64_t n,", "double zuf0,", "double scale,"]


def test_packages_without_a_path_stay_apart() -> None:
    """Two models of the same code, of which the files have the same names."""
    x = torch.randn(3, 16)
    models = [torch.nn.Linear(16, 16).eval() for _ in range(2)]
    paths = [
        inductor_ext.aoti_compile_and_package(torch.export.export(model, (x,))) for model in models
    ]
    assert paths[0] != paths[1]
    for path, model in zip(paths, models, strict=True):
        torch.testing.assert_close(inductor_ext.load(path)(x), model(x))
