"""The report of `doctor`, on fake machines and on this one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from inductor_ext import __version__, _compat
from inductor_ext.cli.doctor import render
from inductor_ext.reports import doctor
from inductor_ext.toolchain import components
from test.support.doctor_process import (
    CHECKOUT,
    SCHEMA,
    VARIABLES,
    assert_schema,
    doctor_process,
    flat,
)

PART_KEYS = {"title", "available", "version", "path", "detail", "why", "install"}

FEATURE_KEYS = {"title", "available", "needs", "missing", "compiles_for", "why", "install"}

DEVICE_KEYS = {"kind", "index", "name", "capability", "memory_bytes"}

CACHE_KEYS = {"name", "path", "exists", "writable", "executable", "size_bytes", "free_bytes"}

PROBLEM_KEYS = {"what", "why", "install"}

MISFIT_KEYS = {"hook", "target", "why"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    components.clear()
    yield
    components.clear()


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give this machine exactly the named components, besides torch; without names, all of them."""

    def give(*names: str, **details: dict[str, Any]) -> None:
        real = components.probe

        def probe(name: str) -> components.Component:
            title = real(name).title
            if name == "torch":
                return real(name)
            if names and name not in names:
                why, install = f"no {name} here", f"fetch-me-{name} --now"
                return components.Component(name, title, available=False, why=why, install=install)
            return components.Component(name, title, available=True, **details.get(name, {}))

        monkeypatch.setattr(components, "probe", probe)

    return give


class TestReport:
    def test_json_keeps_to_the_schema(self) -> None:
        report = json.loads(json.dumps(doctor.examine().as_json()))
        assert_schema(report, SCHEMA)
        assert report["schema"] == 1
        assert report["torch"]["supported"] == list(_compat.SUPPORTED)
        assert list(report["parts"]) == components.names()
        for entries, keys in (
            (report["parts"].values(), PART_KEYS),
            (report["features"].values(), FEATURE_KEYS),
            (report["devices"], DEVICE_KEYS),
            (report["caches"], CACHE_KEYS),
            (report["problems"], PROBLEM_KEYS),
        ):
            for entry in entries:
                assert entry.keys() == keys
        for text in (*report["versions"].values(), *report["environment"].values()):
            assert isinstance(text, str | None)

    def test_the_documented_schema_is_this_one(self) -> None:
        documented = re.findall(r"^    (\w+)  ", doctor.__doc__ or "", flags=re.MULTILINE)
        assert documented == list(SCHEMA)
        for keys in (
            PART_KEYS,
            FEATURE_KEYS,
            DEVICE_KEYS,
            CACHE_KEYS,
            PROBLEM_KEYS,
            MISFIT_KEYS,
        ):
            assert any(
                set(re.findall(r'"(\w+)"', braces)) == keys
                for braces in re.findall(r"\{([^}]*)\}", doctor.__doc__ or "")
            )

    def test_this_machine(self) -> None:
        import torch

        report = doctor.examine()
        assert report.torch["version"] == report.versions["torch"] == torch.__version__
        assert report.torch["cuda"] == torch.version.cuda
        assert report.python["executable"] == sys.executable
        assert report.versions["inductor_ext"] == __version__
        cpu = report.devices[0]
        assert (cpu.kind, cpu.capability) == ("cpu", torch.backends.cpu.get_cpu_capability())
        assert cpu.memory_bytes is None or cpu.memory_bytes > 1 << 28

    def test_what_is_missing_says_why_and_what_to_do(self, has: Callable[..., None]) -> None:
        has("cxx", "openmp", "python_headers")
        text = flat(render(doctor.examine()))
        for part in components.probe_all().values():
            if part.available:
                assert f"no {part.name} here" not in text
            else:
                assert (
                    f"{part.title} MISSING why: no {part.name} here "
                    f"to fix: fetch-me-{part.name} --now"
                ) in text
        assert "torch.compile on CPU yes" in text
        assert "torch.compile on CUDA no, missing: CUDA device, Triton, C compiler" in text
        assert text.endswith("The backend can compile here for: cpu.")

    def test_long_lines_are_wrapped(self, has: Callable[..., None]) -> None:
        has("cc")
        for line in render(doctor.examine()).splitlines():
            assert len(line) <= 100 or not re.search(r"\S\s+\S", line[60:]), line

    @pytest.mark.parametrize(
        ("parts", "compiles_for"),
        [
            ((), ("cpu", "cuda")),
            (("cxx", "openmp", "python_headers"), ("cpu",)),
            (("cuda", "triton", "cc", "python_headers"), ("cuda",)),
            (("cuda", "cc", "python_headers"), ()),
            (("nvcc", "cutlass"), ()),
        ],
    )
    def test_verdict(
        self, has: Callable[..., None], parts: tuple[str, ...], compiles_for: tuple[str, ...]
    ) -> None:
        has(*parts)
        report = doctor.examine()
        assert report.compiles_for == compiles_for
        assert report.ok == bool(compiles_for)
        assert bool(report.problems) == (not compiles_for)

    def test_no_device_to_compile_for(self, has: Callable[..., None]) -> None:
        has("nvcc")
        report = doctor.examine()
        assert [problem.what for problem in report.problems] == [
            "torch.compile on CPU is not possible",
            "torch.compile on CUDA is not possible",
        ]
        assert "fetch-me-cxx --now" in report.problems[0].install
        text = flat(render(report))
        assert "Problem: torch.compile on CPU is not possible. why: C++ compiler:" in text
        assert text.endswith("The backend cannot compile here.")


class TestTorchVersion:
    @pytest.fixture
    def unsupported(self, has: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
        has()
        monkeypatch.setattr(_compat, "SUPPORTED", ("3.0", "3.1"))

    @pytest.mark.usefixtures("unsupported")
    def test_unsupported(self) -> None:
        report = doctor.examine()
        (problem,) = report.problems
        assert problem.what == f"torch {report.torch['version']} is not supported"
        assert problem.why.endswith("for torch 3.0 to 3.1")
        assert "INDUCTOR_EXT_ALLOW_UNSUPPORTED_TORCH=1" in problem.install
        assert (report.ok, report.compiles_for) == (False, ())
        assert "NOT supported; the supported range is 3.0 to 3.1" in flat(render(report))

    @pytest.mark.usefixtures("unsupported")
    def test_unsupported_and_allowed(self) -> None:
        from inductor_ext import config

        with config.patch(allow_unsupported_torch=True):
            report = doctor.examine()
        assert (report.ok, report.torch["in_range"]) == (True, False)

    def test_no_torch_at_all(self, tmp_path: Path) -> None:
        # -S excludes site-packages, and with them torch and everything else that is installed.
        program = (
            f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); "
            "from inductor_ext.cli.main import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
        )
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = [
            subprocess.run(
                [sys.executable, "-S", "-c", program, *arguments],
                cwd=tmp_path,
                env=variables,
                capture_output=True,
                text=True,
                check=False,
            )
            for arguments in (["--json"], [])
        ]
        assert [process.returncode for process in done] == [1, 1]
        assert [process.stderr for process in done] == ["", ""]
        report = json.loads(done[0].stdout)
        assert report["torch"]["version"] is None
        assert not report["features"]["aot-load"]["available"]
        assert 'pip install "torch>=2.11,<2.16"' in report["parts"]["torch"]["install"]
        text = flat(done[1].stdout)
        assert "torch not installed" in text
        assert "why: it is not installed for this Python" in text


class TestSettings:
    def test_shows_settings_that_are_not_default(self) -> None:
        from inductor_ext import config

        with config.patch(fallback_to_eager=False, enabled=False):
            report = doctor.examine()
        assert report.settings == {"enabled": False, "fallback_to_eager": False}
        assert any("enabled=False" in remark for remark in report.remarks)
        assert "fallback_to_eager False" in flat(render(report))

    def test_an_invalid_environment_variable(self) -> None:
        done = doctor_process("doctor", "--json", environment={"INDUCTOR_EXT_ENABLED": "perhaps"})
        assert (done.returncode, done.stderr) == (1, "")
        report = json.loads(done.stdout)
        (problem,) = report["problems"]
        assert problem["what"] == "the settings cannot be read"
        assert "INDUCTOR_EXT_ENABLED='perhaps'" in problem["why"]
        assert report["environment"]["INDUCTOR_EXT_ENABLED"] == "perhaps"

    def test_only_relevant_variables_are_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TORCH_LOGS", "TORCHINDUCTOR_MAX_AUTOTUNE", "CXX", "API_TOKEN"):
            monkeypatch.setenv(name, f"<{name}>")
        shown = doctor.examine().environment
        assert shown["TORCH_LOGS"] == "<TORCH_LOGS>"
        assert shown["TORCHINDUCTOR_MAX_AUTOTUNE"] == "<TORCHINDUCTOR_MAX_AUTOTUNE>"
        assert shown["CXX"] == "<CXX>"
        assert "API_TOKEN" not in shown

    def test_torch_compile_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
        remarks = doctor.examine().remarks
        assert (
            "TORCH_COMPILE_DISABLE=1 disables torch.compile: models run in eager mode." in remarks
        )


class TestMismatches:
    def test_triton(self, has: Callable[..., None]) -> None:
        has(triton={"version": "3.5.1", "detail": "this torch requires 3.6.0"})
        expected = "Triton 3.5.1 is installed, but this torch requires 3.6.0."
        assert expected in doctor.examine().remarks

    @pytest.mark.parametrize(("nvcc", "remarks"), [("12.6.85", 1), ("13.1.20", 0)])
    def test_nvcc(self, has: Callable[..., None], nvcc: str, remarks: int) -> None:
        has(nvcc={"version": nvcc}, cuda={"version": "13.0"})
        messages = [remark for remark in doctor.examine().remarks if "nvcc" in remark]
        assert len(messages) == remarks


class TestCaches:
    def test_a_missing_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "not" / "yet"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        inductor, triton = doctor.examine().caches
        assert (inductor.path, triton.path) == (str(folder), str(folder / "triton"))
        assert (inductor.exists, inductor.writable, inductor.size_bytes) == (False, True, 0)
        assert inductor.free_bytes > 0
        assert list(tmp_path.iterdir()) == []

    def test_size_ignores_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = tmp_path / "cache"
        (cache / "ab").mkdir(parents=True)
        (cache / "one").write_bytes(b"x" * 1000)
        (cache / "ab" / "two").write_bytes(b"x" * 500)
        (cache / "link").symlink_to(cache / "one")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        report = doctor.examine()
        assert report.caches[0].size_bytes == 1500
        assert f"{cache} (1.46 KiB, writable" in flat(render(report))

    def test_an_unwritable_cache_folder(
        self, has: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has()
        (tmp_path / "file").touch()
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
        report = doctor.examine()
        (problem,) = report.problems
        assert problem.why == "it cannot be written to"
        assert problem.install == "set TORCHINDUCTOR_CACHE_DIR to another folder"
        assert not report.ok

    def test_a_noexec_file_system(
        self, has: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        has()
        real = os.statvfs

        def noexec(path: str) -> Any:
            status = real(path)
            fields = {name: getattr(status, name) for name in ("f_bavail", "f_frsize", "f_flag")}
            fields["f_flag"] |= os.ST_NOEXEC
            return types.SimpleNamespace(**fields)

        monkeypatch.setattr(os, "statvfs", noexec)
        report = doctor.examine()
        assert {problem.install for problem in report.problems} == {
            "set TORCHINDUCTOR_CACHE_DIR to another folder",
            "set TRITON_CACHE_DIR to another folder",
        }
        assert "mounted noexec" in flat(render(report))

    def test_the_default_cache_is_that_of_inductor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        assert doctor.examine().caches[0].path == default_cache_dir()

    def test_a_user_without_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        def nameless() -> str:
            raise KeyError("getpwuid(): uid not found: 1234")

        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setattr("getpass.getuser", nameless)
        report = doctor.examine()
        try:
            expected = default_cache_dir()
        except KeyError:  # torch before 2.13
            (problem,) = report.problems
            assert "uid not found: 1234" in problem.why
            assert problem.install == "set TORCHINDUCTOR_CACHE_DIR to a writable folder"
        else:
            assert report.caches[0].path == expected

    def test_little_space(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.statvfs

        def almost_full(path: str) -> Any:
            status = real(path)
            fields = {name: getattr(status, name) for name in ("f_frsize", "f_flag")}
            return types.SimpleNamespace(f_bavail=(512 << 20) // status.f_frsize, **fields)

        monkeypatch.setattr(os, "statvfs", almost_full)
        assert any(re.match(r"Only 512.00 MiB are free", r) for r in doctor.examine().remarks)


class TestRegistration:
    @pytest.fixture
    def entries(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """Replace the installed entry points for backend="inductor_ext"."""

        def replace(*values: str) -> None:
            group, name = "torch_dynamo_backends", "inductor_ext"
            entry_points = metadata.EntryPoints(
                metadata.EntryPoint(name, value, group) for value in values
            )
            monkeypatch.setattr(
                metadata, "entry_points", lambda **want: entry_points.select(**want)
            )

        return replace

    def test_dynamo_finds_the_installed_package(self) -> None:
        backend = doctor.examine().backend
        assert backend == {"registered": True, "target": "inductor_ext.entry_point:inductor_ext"}

    def test_missing(self, has: Callable[..., None], entries: Callable[..., None]) -> None:
        has()
        entries()
        report = doctor.examine()
        assert report.backend == {"registered": False, "target": None}
        (problem,) = report.problems
        assert "no installed distribution registers this backend name" in problem.why
        assert not report.ok

    def test_registered_by_another_package(
        self, has: Callable[..., None], entries: Callable[..., None]
    ) -> None:
        has()
        entries("other_package.backend:compile")
        (problem,) = doctor.examine().problems
        assert problem.why == "the name is registered by other_package.backend:compile"
