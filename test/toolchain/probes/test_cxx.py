"""Probes of the C++ compiler, OpenMP and the C compiler."""

from __future__ import annotations

import shutil
import sys
import types
from pathlib import Path

import pytest

from inductor_ext.toolchain import components
from inductor_ext.toolchain.probes import common
from test.support.fake_toolchain import fake_import, write_script


class TestCxx:
    def test_default(self, machine: Path) -> None:
        path = write_script(
            machine / "bin" / "g++", "echo 'g++ (Maker 1-2) 14.2.0'; echo Copyright"
        )
        part = components.probe("cxx")
        assert (part.path, part.version) == (path, "g++ (Maker 1-2) 14.2.0")

    def test_cxx_names_another(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_script(machine / "bin" / "g++", "echo g++ 9.9")
        path = write_script(machine / "other" / "clang++", "echo clang 18")
        monkeypatch.setenv("CXX", path)
        assert components.probe("cxx").path == path

    @pytest.mark.parametrize(
        ("cxx", "why"),
        [
            ("nonsense", "CXX names 'nonsense', which is not found on PATH"),
            ("/no/such/g++", "CXX names '/no/such/g++', which is not found"),
            (
                "ccache g++",
                "CXX names 'ccache g++', which is taken as the name of one program, ",
            ),
            ("fails", "CXX names 'fails', which --version exits with 3: no licence"),
            ("unreadable", "CXX names 'unreadable', which cannot be started "),
        ],
    )
    def test_cxx_names_an_unusable_compiler(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch, cxx: str, why: str
    ) -> None:
        write_script(machine / "bin" / "ccache", "echo ccache 4")
        write_script(machine / "bin" / "g++", "echo g++ 9.9")
        write_script(machine / "bin" / "fails", "echo no licence >&2; exit 3")
        Path(write_script(machine / "bin" / "unreadable", "")).write_text(
            "#!/no/such/interpreter\n"
        )
        monkeypatch.setenv("CXX", cxx)
        assert (components.probe("cxx").why or "").startswith(why)

    def test_a_compiler_that_hangs(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(common, "TIMEOUT", 0.2)
        write_script(machine / "bin" / "g++", "exec /bin/sleep 20")
        assert "no output" in (components.probe("cxx").why or "")

    def test_a_loaded_inductor_config_is_used(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_script(machine / "elsewhere" / "g++", "echo g++ 9.9")
        monkeypatch.setenv("CXX", "nonsense")
        cpp = types.SimpleNamespace(cxx=(None, "also-nonsense", path))
        fake_import(monkeypatch, "torch._inductor.config", cpp=cpp)
        assert components.probe("cxx").path == path

    def test_a_half_imported_inductor_config(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_script(machine / "bin" / "g++", "echo g++ 9.9")
        fake_import(monkeypatch, "torch._inductor.config")
        assert components.probe("cxx").path == path

    @pytest.mark.skipif(sys.platform != "linux", reason="Inductor installs a compiler on Linux")
    def test_inductor_will_install_one(
        self, machine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        marker = machine / "conda-ran"
        monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
        assert "conda is not found" in (components.probe("cxx").why or "")
        monkeypatch.setenv("CONDA_EXE", write_script(machine / "conda", f"touch {marker}"))
        assert components.probe("cxx").available
        assert components.probe("openmp").available
        assert not marker.exists()

    @pytest.mark.parametrize("cxx", ["g++", "/no/such/g++", "ccache g++", "fails"])
    def test_agrees_with_inductor(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str
    ) -> None:
        from torch._inductor import config, cpp_builder
        from torch._inductor.exc import InvalidCxxCompiler

        for name, body in (("ccache", "echo 4"), ("g++", "echo g++ 9"), ("fails", "exit 3")):
            write_script(tmp_path / name, body)
        monkeypatch.setenv("PATH", str(tmp_path))
        with config.patch({"cpp.cxx": (None, cxx)}):
            cpp_builder.cpp_compiler_search.cache_clear()
            try:
                theirs: str | None = cpp_builder.get_cpp_compiler()
            except InvalidCxxCompiler:
                theirs = None
            finally:
                cpp_builder.cpp_compiler_search.cache_clear()
            assert components.probe("cxx").path == (theirs and shutil.which(theirs))


class TestOpenMP:
    def test_without_a_compiler(self, machine: Path) -> None:
        part = components.probe("openmp")
        assert part.why == "there is no C++ compiler (g++ is not found on PATH)"
        assert "apt-get install g++" in (part.install or "")

    @pytest.mark.skipif(sys.platform != "linux", reason="not checked on macOS")
    def test_a_compiler_that_cannot_link_it(self, machine: Path) -> None:
        body = (
            '[ "$1" = --version ] && { echo g++ 9.9; exit; }\n'
            "echo '<stdin>: In function f'; echo 'ld: error: cannot find -lgomp' >&2; exit 1"
        )
        path = write_script(machine / "bin" / "g++", body)
        part = components.probe("openmp")
        assert part.why == (
            f"{path} cannot build a shared library with OpenMP: ld: error: cannot find -lgomp"
        )
        assert "libgomp" in (part.install or "")

    @pytest.mark.skipif(not shutil.which("g++"), reason="no g++ here")
    def test_this_machine(self) -> None:
        assert components.probe("openmp").available


class TestC:
    def test_gcc_before_clang_as_triton_does(self, machine: Path) -> None:
        clang = write_script(machine / "bin" / "clang", "echo clang 18")
        assert components.probe("cc").path == clang
        components.clear()
        gcc = write_script(machine / "bin" / "gcc", "echo gcc 14")
        assert components.probe("cc").path == gcc

    def test_cc_disables_the_search(self, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_script(machine / "bin" / "gcc", "echo gcc 14")
        monkeypatch.setenv("CC", "nonsense")
        assert components.probe("cc").why == "CC names 'nonsense', which is not found on PATH"
