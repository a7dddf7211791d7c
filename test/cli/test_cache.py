"""`inductor-ext cache`: its report on the artifact cache, and what it removes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_ext import exc
from inductor_ext.cli import cache as artifacts
from inductor_ext.cli import main
from inductor_ext.storage.artifact_store import ArtifactStore, Usage
from inductor_ext.storage.paths import artifact_folder

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    """The store that the command reads."""
    monkeypatch.setenv("INDUCTOR_EXT_ARTIFACT_CACHE_DIR", str(tmp_path / "artifacts"))
    monkeypatch.setenv("INDUCTOR_EXT_ARTIFACT_CACHE_SIZE", "2 MiB")
    return ArtifactStore(tmp_path / "artifacts", 2**21)


def fill(store: ArtifactStore, entries: int) -> None:
    for index in range(entries):
        with store.publish(f"{index:032x}") as folder:
            (folder / "file").write_bytes(bytes(2**18))


def report(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main.main(["cache", *arguments, "--json"]) == 0
    fields: dict[str, object] = json.loads(capsys.readouterr().out)
    return fields


def test_info_reports_folder_and_size(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(store, 2)
    held = store.usage()
    assert report(capsys=capsys) == {
        "path": str(store.folder),
        "enabled": True,
        "max_bytes": 2**21,
        "entries": 2,
        "bytes": held.bytes,
    }
    assert main.main(["cache", "show"]) == 0
    assert "2 artifacts, 0.5 MiB, of at most 2.0 MiB" in capsys.readouterr().out


def test_info_creates_no_folder(store: ArtifactStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(capsys=capsys)["entries"] == 0
    assert report("clear", capsys=capsys)["removed_entries"] == 0
    assert not store.folder.exists()


def test_clear_keeps_entries_in_use(
    store: ArtifactStore, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(store, 3)
    with store.get(f"{0:032x}"):
        cleared = report("clear", capsys=capsys)
        assert (cleared["removed_entries"], cleared["entries"]) == (2, 1)
    assert main.main(["cache", "clear"]) == 0
    assert "removed      1 artifact, 0.3 MiB" in capsys.readouterr().out
    assert store.usage() == Usage(0, 0)


def test_info_reports_a_disabled_cache(
    store: ArtifactStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INDUCTOR_EXT_ARTIFACT_CACHE", "0")
    assert report(capsys=capsys)["enabled"] is False
    assert main.main(["cache"]) == 0
    assert "disabled by  INDUCTOR_EXT_ARTIFACT_CACHE" in capsys.readouterr().out


def test_an_unreadable_size_is_an_error(
    store: ArtifactStore,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INDUCTOR_EXT_ARTIFACT_CACHE_SIZE", "much")
    with pytest.raises(exc.BadEnvironmentError):
        artifacts.run(artifacts.argparse.Namespace(action="show", json=False))
    assert main.main(["cache"]) == 2
    assert "INDUCTOR_EXT_ARTIFACT_CACHE_SIZE='much'" in capsys.readouterr().err


@pytest.mark.parametrize("variable", [None, "inductor_cache"])
def test_the_folder_is_in_inductors_cache_folder(
    variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime import cache_dir_utils

    if variable is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        inductor = cache_dir_utils.default_cache_dir()
    else:
        inductor = str(tmp_path / variable)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", inductor)
    assert artifact_folder() == Path(inductor) / "inductor_ext" / "artifacts"
    assert artifact_folder(str(tmp_path)) == tmp_path


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from inductor_ext.cli.main import main; main(['cache']); "
        "assert 'torch' not in sys.modules, "
        "sorted(name for name in sys.modules if name.startswith('torch'))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
