"""The compiled artifact: its shared object, its weights, and the files that it consists of."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor

import inductor_ext
from inductor_ext.cpp_wrapper.build import artifact, compiler
from inductor_ext.hooks import activate
from inductor_ext.storage.paths import artifact_folder
from test.support.built_models import Built, Tied, elf

CHECKOUT = pathlib.Path(__file__).parents[3]

LIBRARY_BYTES = 350_000
"""Maximum bytes of a small model's shared object; Inductor's has 1.5 million."""

STANDARD_LIBRARY_BYTES = 450_000
"""Its additional size if the compiler links the C++ library statically."""


class TestSharedObject:
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

    def test_no_regex_of_the_standard_library_is_in_it(self, tied: Built) -> None:
        # Bound to libtorch's own copies, these crash Inductor's artifacts at load.
        assert "basic_regex" not in elf("strings", "-a", str(tied.library))
        assert "regex" not in tied.code
        assert "AOTInductorModelContainerCreate" not in tied.code

    def test_no_path_of_this_machine_is_in_it(self, tied: Built) -> None:
        """Errors name source files by the path from the package of torch, or by their name only."""
        text = elf("strings", "-a", str(tied.library))
        assert "torch/include/torch/csrc/inductor" in text
        assert "./" in text
        cache = os.environ["TORCHINDUCTOR_CACHE_DIR"]
        for folder in (sys.prefix, tempfile.gettempdir(), str(compiler.RUNTIME), cache):
            assert folder not in text


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


class TestOtherWaysToCompile:
    def test_a_shared_object_carries_its_weights(self, tmp_path: pathlib.Path) -> None:
        model, x = torch.nn.Linear(300, 70).eval(), torch.randn(4, 300)
        path = str(tmp_path / "model.so")
        program = torch.export.export(model, (x,))
        with activate.activate():
            output = torch._inductor.aot_compile(
                program.module(check_guards=False),
                (x,),
                options={"aot_inductor.output_path": path},
            )
        assert output == path
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
        torch.testing.assert_close(runner.run([x])[0], model(x))
        moved = shutil.copy(path, tmp_path / "elsewhere.so")
        os.remove(path)
        again = torch._C._aoti.AOTIModelContainerRunnerCpu(str(moved), 1)
        torch.testing.assert_close(again.run([x])[0], model(x))

    @pytest.mark.parametrize("size", [4, 40])
    def test_files_survive_the_compile_of_another_model(
        self, size: int, tmp_path: pathlib.Path
    ) -> None:
        """The same code with other values: few are inlined, many are in the weights file."""
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
        for number, (model, artifact_files) in enumerate(zip(models, files, strict=True)):
            path = str(tmp_path / f"{number}.pt2")
            package_aoti(path, artifact_files)
            torch.testing.assert_close(inductor_ext.load(path)(x), model(x))

    def test_line_tables_are_in_a_separate_file(self, tmp_path: pathlib.Path) -> None:
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

    def test_metadata_of_the_process_is_unchanged(self, tmp_path: pathlib.Path) -> None:
        from torch._inductor import config

        before = dict(config.aot_inductor.metadata)
        inductor_ext.aoti_compile_and_package(
            torch.export.export(torch.nn.Tanh(), (torch.randn(3),)),
            package_path=tmp_path / "m.pt2",
        )
        assert config.aot_inductor.metadata == before


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
    # An update, which needs all runners, is not starved.
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


WHOLE = compiler.Unit("/model.wrapper.cpp", "/wrapper.o", "wrapper")

PARTS = [dataclasses.replace(WHOLE, source=f"/{number}.cpp") for number in range(3)]


def test_processes_build_the_same_bytes(tmp_path: pathlib.Path) -> None:
    """In other cache folders and with other hash seeds."""
    packages = []
    for seed in ("1", "2"):
        # The runtime and the headers, which all models share, need not be compiled twice.
        environment = {
            "INDUCTOR_EXT_ARTIFACT_CACHE_DIR": str(artifact_folder()),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / seed),
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(CHECKOUT),
        }
        path = tmp_path / seed / "model.pt2"
        path.parent.mkdir()
        subprocess.run(
            [sys.executable, str(CHECKOUT / "test/support/children/reproducible_package.py"), path],
            env={**os.environ, **environment},
            check=True,
            capture_output=True,
        )
        packages.append(path.read_bytes())
    assert packages[0] == packages[1]


class TestBuilding:
    def build(self, broken: set[str]) -> Any:
        """A build function that fails for these sources."""
        from torch._inductor.exc import CppCompileError

        def build(units: list[compiler.Unit]) -> None:
            build.calls.append([unit.source for unit in units])
            for unit in units:
                if unit.source in broken:
                    raise CppCompileError(["g++"], f"{unit.source} is wrong")

        build.calls = []
        return build

    @pytest.mark.usefixtures("repeated_warnings")
    def test_parts_that_do_not_compile_are_compiled_whole(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        build = self.build({"/1.cpp"})
        with caplog.at_level(logging.WARNING, "inductor_ext"):
            artifact.build_split(build, WHOLE, PARTS)
        assert build.calls == [["/0.cpp", "/1.cpp", "/2.cpp"], ["/model.wrapper.cpp"]]
        assert "/1.cpp is wrong" in caplog.text
        assert "aot_unit_size=0" in caplog.text

    def test_an_error_of_the_program_is_raised(self) -> None:
        from torch._inductor.exc import CppCompileError

        for parts in (PARTS, [WHOLE]):
            build = self.build({"/model.wrapper.cpp", "/1.cpp"})
            with pytest.raises(CppCompileError, match=r"model\.wrapper\.cpp is wrong"):
                artifact.build_split(build, WHOLE, parts)
