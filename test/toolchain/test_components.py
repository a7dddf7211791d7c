"""The components of the toolchain: their probes, the cache, and the features that need them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from inductor_ext import exc
from inductor_ext.toolchain import components
from test.support.fake_toolchain import write_script


class TestPart:
    def test_require_raises_with_reason_and_remedy(self, machine: Path) -> None:
        with pytest.raises(exc.MissingToolchainError) as raised:
            components.probe("cxx").require()
        assert raised.value.fields["part"] == "C++ compiler"
        assert raised.value.fields["why"] == "g++ is not found on PATH"
        assert "apt-get install g++" in raised.value.fields["install"]

    def test_require_accepts_an_available_component(self, machine: Path) -> None:
        write_script(machine / "bin" / "gcc", "echo gcc 1.2.3")
        assert components.probe("cc").require() is None

    def test_unknown_name(self) -> None:
        with pytest.raises(
            ValueError, match="unknown component 'gxx'; expected one of torch, cxx, "
        ):
            components.probe("gxx")

    def test_an_exception_of_a_probe_is_reported(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(program: str) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(shutil, "which", broken)
        part = components.probe("cc")
        assert not part.available
        assert "PermissionError" in (part.why or "")

    def test_exactly_one_of_available_and_why(self) -> None:
        for name, part in components.probe_all().items():
            assert part.name == name
            assert part.available == (part.why is None) == (part.install is None)
            assert "failed with" not in (part.why or ""), "a probe broke on this machine"

    def test_texts_are_sentence_fragments(self, machine: Path, site: Path) -> None:
        for part in components.probe_all().values():
            for text in filter(None, (part.why, part.install)):
                assert text == text.strip()
                assert not text.endswith(".")
                assert "\n" not in text


class TestCaching:
    @pytest.fixture
    def runs(self, machine: Path) -> Callable[[], int]:
        """How often the machine's g++ has run."""
        log = machine / "log"
        log.touch()
        write_script(machine / "bin" / "g++", f"echo run >> {log}; echo g++ 9.9")
        return lambda: len(log.read_text().splitlines())

    def test_probes_once(self, runs: Callable[[], int]) -> None:
        assert components.probe("cxx") is components.probe("cxx")
        assert runs() == 1

    def test_clear_forgets(self, runs: Callable[[], int]) -> None:
        components.probe("cxx")
        components.clear()
        components.probe("cxx")
        assert runs() == 2

    def test_results_are_cached_by_environment(
        self, runs: Callable[[], int], machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert components.probe("cxx").available
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("CXX", "nonsense")
            assert not components.probe("cxx").available
        assert components.probe("cxx").available
        assert runs() == 1


class TestFeatures:
    @pytest.fixture
    def lacking(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., dict[str, components.Feature]]:
        """The features of a machine that lacks the named components."""

        def look(*missing: str) -> dict[str, components.Feature]:
            def probe(name: str) -> components.Component:
                gone = name in missing
                why, install = (f"no {name}", f"install {name}") if gone else (None, None)
                return components.Component(name, name.upper(), not gone, why=why, install=install)

            monkeypatch.setattr(components, "probe", probe)
            return {feature.name: feature for feature in components.features()}

        return look

    def test_all_there(self, lacking: Callable[..., dict[str, components.Feature]]) -> None:
        for feature in lacking().values():
            assert feature.available
            assert (feature.missing, feature.why, feature.install) == ((), None, None)

    @pytest.mark.parametrize(
        ("part", "lost"),
        [
            (
                "torch",
                {
                    "cpu",
                    "cuda",
                    "triton-gemm",
                    "cutlass-gemm",
                    "aot-cpu",
                    "aot-cuda",
                    "aot-cuda-portable",
                    "aot-load",
                },
            ),
            ("cxx", {"cpu", "aot-cpu", "aot-cuda", "aot-cuda-portable", "cutlass-gemm"}),
            (
                "triton",
                {"cuda", "triton-gemm", "cutlass-gemm", "aot-cuda", "aot-cuda-portable"},
            ),
            ("cuda", {"cuda", "triton-gemm", "cutlass-gemm", "aot-cuda", "aot-cuda-portable"}),
            ("cc", {"cuda", "triton-gemm", "cutlass-gemm", "aot-cuda", "aot-cuda-portable"}),
            ("nvcc", {"cutlass-gemm", "aot-cuda-portable"}),
            ("cutlass", {"cutlass-gemm"}),
            ("cuda_headers", {"cutlass-gemm", "aot-cuda", "aot-cuda-portable"}),
        ],
    )
    def test_features_that_need_a_missing_component(
        self, lacking: Callable[..., dict[str, components.Feature]], part: str, lost: set[str]
    ) -> None:
        features = lacking(part)
        assert {name for name, feature in features.items() if not feature.available} == lost
        for name in lost:
            assert features[name].missing == (part,)
            assert features[name].why == f"{part.upper()}: no {part}"
            assert features[name].install == f"install {part}"

    def test_needs_are_components(self) -> None:
        for feature in components.features():
            assert set(feature.needs) <= set(components.names())
            assert len(set(feature.needs)) == len(feature.needs)

    def test_one_remedy_for_two_components_is_shown_once(self, machine: Path) -> None:
        (cpu,) = (feature for feature in components.features() if feature.name == "cpu")
        assert {"cxx", "openmp"} <= set(cpu.missing)
        assert (cpu.install or "").count("apt-get install g++") == 1


def test_probing_leaves_nothing_behind(tmp_path: Path) -> None:
    """In a separate process: no output, no file, no variable, no Inductor, no Triton."""
    folders = {name: tmp_path / name for name in ("HOME", "TMPDIR", "cwd")}
    for folder in folders.values():
        folder.mkdir()
    program = """
import json, os, sys
before = dict(os.environ)
from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes.cuda import cuda_devices
assert "torch" not in sys.modules
components.probe_all()
components.features()
cuda_devices()
loaded = [name for name in ("torch._inductor", "triton", "cutlass_library") if name in sys.modules]
changed = sorted(set(before.items()) ^ set(os.environ.items()))
context = sys.modules["torch"].cuda.is_initialized()
json.dump({"loaded": loaded, "changed": changed, "context": context}, sys.stdout)
"""
    environment = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    environment |= {"HOME": str(folders["HOME"]), "TMPDIR": str(folders["TMPDIR"])}
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd=folders["cwd"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"loaded": [], "changed": [], "context": False}
    names = {path.name for folder in folders.values() for path in folder.rglob("*")}
    assert names <= {".nv", "ComputeCache"}, "more than the CUDA driver makes wherever it starts"
