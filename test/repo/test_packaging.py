"""The wheel and the sdist: their content, and that they work without the checkout.

Nothing is downloaded: the environment into which the wheel goes sees the torch at hand through a
path file, which names the folder of packages but does not run the hooks of editable installs.
"""

from __future__ import annotations

import email.message
import email.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import inductor_ext
from inductor_ext import _compat

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

_MADE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "*.pt2")


def _ignored(folder: str | Path, names: list[str]) -> set[str]:
    """Names in a folder of the checkout that are not sources."""
    made_by_builds = {"build", "dist"} if Path(folder) == ROOT else set()
    return _MADE(str(folder), names) | (made_by_builds & set(names))


needs_build_backend = pytest.mark.skipif(
    Version(metadata.version("setuptools")) < Version("77"),
    reason=f"building needs setuptools 77, this is {metadata.version('setuptools')}",
)


def run(*command: object, cwd: Path) -> str:
    """Run a command and return its output; on failure the test shows all of it."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=clean,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build a "wheel" or "sdist" of `source` by the PEP 517 hook, with the installed packages."""
    target.mkdir()
    hook = f"from setuptools import build_meta; build_meta.build_{kind}({str(target)!r})"
    run(sys.executable, "-c", hook, cwd=source)
    (built,) = target.iterdir()
    return built


def names_in_wheel(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def source_files(folder: str) -> set[str]:
    """The files below a folder of the checkout, as paths relative to the checkout's root."""
    paths = set()
    for path, folders, files in os.walk(ROOT / folder):
        ignored = _ignored(path, folders + files)
        folders[:] = [name for name in folders if name not in ignored]
        paths |= {Path(path, name) for name in files if name not in ignored}
    return {path.relative_to(ROOT).as_posix() for path in paths}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist built from a copy of the checkout: a build writes into its source."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "source", ignore=_ignored)
    return build("sdist", folder / "source", folder / "dist")


@pytest.fixture(scope="module")
def unpacked_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(unpacked_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, as an installer builds it."""
    return build("wheel", unpacked_sdist, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def wheel_metadata(wheel: Path) -> email.message.Message:
    (name,) = (n for n in names_in_wheel(wheel) if n.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(name).decode()
    return email.parser.Parser().parsestr(text)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with only the wheel and a view of the installed packages."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check", wheel),
        cwd=folder,
    )
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(run(python, "-c", query, cwd=folder).strip())
    at_hand = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "at_hand.pth").write_text("\n".join(at_hand))
    return folder


@needs_build_backend
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = names_in_wheel(wheel)
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info == source_files("inductor_ext")
    assert "inductor_ext/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in info)


@needs_build_backend
def test_the_wheel_of_the_checkout_is_that_of_the_sdist(wheel: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "source", ignore=_ignored)
    direct = build("wheel", tmp_path / "source", tmp_path / "dist")
    assert direct.name == wheel.name
    assert names_in_wheel(direct) == names_in_wheel(wheel)


@needs_build_backend
def test_the_sdist_holds_what_tests_and_benchmarks_need(unpacked_sdist: Path) -> None:
    for folder in ("test", "benchmarks", "examples", "docs", "requirements", "scripts"):
        missing = {name for name in source_files(folder) if not (unpacked_sdist / name).is_file()}
        assert missing == set()
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "setup.py", "pyproject.toml"):
        assert (unpacked_sdist / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_changelog_begins_with_this_version() -> None:
    """Changes since then are under Unreleased."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    titles = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.MULTILINE)
    assert titles[0] == ("Unreleased", "")
    version, date = titles[1]
    assert version == inductor_ext.__version__
    assert date


@needs_build_backend
def test_metadata_has_version_license_and_torch_range(
    wheel_metadata: email.message.Message,
) -> None:
    assert wheel_metadata["Version"] == inductor_ext.__version__
    assert wheel_metadata["License-Expression"] == "BSD-3-Clause"
    assert set(wheel_metadata.get_all("Provides-Extra")) == {
        "completion",
        "cuda",
        "demo",
        "dev",
        "sign",
        "test",
    }
    required = {
        parsed.name: parsed
        for parsed in map(Requirement, wheel_metadata.get_all("Requires-Dist"))
        if parsed.marker is None
    }
    assert set(required) == {"torch", "sympy", "filelock"}
    lowest, highest = _compat.SUPPORTED
    major, minor = map(int, highest.split("."))
    accepted = required["torch"].specifier
    assert accepted.contains(f"{lowest}.0")
    assert accepted.contains(f"{highest}.9+cpu")
    assert not accepted.contains(f"{major}.{minor + 1}.0")
    assert not accepted.contains(f"{lowest}.0rc1", prereleases=True)


@needs_build_backend
def test_metadata_states_the_python_releases(wheel_metadata: email.message.Message) -> None:
    accepted = SpecifierSet(wheel_metadata["Requires-Python"])
    prefix = "Programming Language :: Python :: "
    classified = {
        item.removeprefix(prefix)
        for item in wheel_metadata.get_all("Classifier")
        if re.fullmatch(rf"{prefix}3\.\d+", item)
    }
    assert classified == {f"3.{minor}" for minor in range(30) if accepted.contains(f"3.{minor}.1")}
    (row,) = re.findall(r"^\| Python \| 3\.(\d+) to 3\.(\d+)", README.read_text(), re.MULTILINE)
    assert classified == {f"3.{minor}" for minor in range(int(row[0]), int(row[1]) + 1)}


@needs_build_backend
def test_the_cuda_extra_accepts_the_triton_of_each_torch(
    wheel_metadata: email.message.Message,
) -> None:
    """The requirements of torch's CUDA wheels, from 2.11 to 2.15."""
    required = map(Requirement, wheel_metadata.get_all("Requires-Dist"))
    (triton,) = (parsed.specifier for parsed in required if parsed.name == "triton")
    for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0"):
        assert triton.contains(version)
    assert not triton.contains("3.5.1")


def test_the_readme_states_the_supported_torch() -> None:
    lowest, highest = _compat.SUPPORTED
    assert f"| torch | {lowest} to {highest}; others are refused" in README.read_text()


@needs_build_backend
def test_every_extra_that_make_installs_is_pinned(wheel_metadata: email.message.Message) -> None:
    pins: dict[str, str] = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        for line in file.read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)
            assert match, f"{file.name}: {line!r} is not name==version"
            name = canonicalize_name(match[1])
            assert pins.setdefault(name, match[2]) == match[2], f"{name} has two pins"
    for parsed in map(Requirement, wheel_metadata.get_all("Requires-Dist")):
        if parsed.marker is None or any(
            parsed.marker.evaluate({"extra": extra})
            for extra in ("completion", "demo", "dev", "sign", "test")
        ):
            assert parsed.specifier.contains(pins[canonicalize_name(parsed.name)]), str(parsed)


@needs_build_backend
def test_the_installed_wheel_is_a_dynamo_backend(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(
        textwrap.dedent(
            """
            import importlib.metadata
            import json
            import sys

            import torch

            listed = "inductor_ext" in torch._dynamo.list_backends()
            imported_before = "inductor_ext" in sys.modules

            def f(x):
                return torch.softmax(x @ x.T, dim=-1).sum(0)

            x = torch.randn(8, 8)
            compiled = torch.compile(f, backend="inductor_ext", fullgraph=True)
            largest_error = (compiled(x) - f(x)).abs().max().item()

            import inductor_ext
            from inductor_ext.hooks.records import CompileRecord

            with inductor_ext.events.capture(CompileRecord) as records:
                torch.compile(lambda x: x.exp() + 1, backend="inductor_ext")(x)

            (entry,) = importlib.metadata.entry_points(
                group="torch_dynamo_backends", name="inductor_ext"
            )
            result = {
                "listed": listed,
                "imported_before": imported_before,
                "largest_error": largest_error,
                "kinds": [getattr(record, "kind", None) for record in records],
                "entry": entry.value,
                "package": inductor_ext.__file__,
                "version": importlib.metadata.version("inductor_ext"),
            }
            print(json.dumps(result))
            """
        )
    )
    python = installed / "bin" / "python"
    result = json.loads(run(python, script, cwd=tmp_path).splitlines()[-1])
    assert result["listed"]
    assert not result["imported_before"]
    assert result["largest_error"] < 1e-5
    assert result["kinds"] == ["inference"]
    assert result["entry"] == "inductor_ext.entry_point:inductor_ext"
    assert Path(result["package"]).is_relative_to(installed)
    assert result["version"] == inductor_ext.__version__


@needs_build_backend
def test_the_installed_wheel_brings_the_command(installed: Path, tmp_path: Path) -> None:
    printed = run(installed / "bin" / "inductor-ext", "--version", cwd=tmp_path)
    assert inductor_ext.__version__ in printed
