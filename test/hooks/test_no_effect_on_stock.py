"""Activations across processes: cache keys, cache hits, and Inductor (default) without any change.

Each scenario of switch_probe runs once in its own process and cache folder; the tests check what
the processes report.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from inductor_ext import _compat
from inductor_ext.hooks import offline_gpu, registry
from inductor_ext.hooks.hook_table import HOOKS
from inductor_ext.storage import paths


class Scenarios:
    """Runs scenarios on demand, each once for the whole module."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = {}

    def __call__(self, scenario: str, *, cache: str | None = None) -> Any:
        if scenario not in self.results:
            folder = self.folder / (cache or scenario)
            environment = {
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(folder),
                # Skips the check of the CPU by the C++ compiler, 10 s in a new cache folder.
                "TORCHINDUCTOR_VEC_ISA_OK": "1",
                # Shares the runtime of AOT artifacts, which takes most of the time of a small one.
                "INDUCTOR_EXT_ARTIFACT_CACHE_DIR": str(paths.artifact_folder()),
            }
            done = subprocess.run(
                [sys.executable, "-m", "test.support.children.switch_probe", scenario, str(folder)],
                env=environment,
                capture_output=True,
                text=True,
                cwd=pathlib.Path(__file__).parents[2],
            )
            assert done.returncode == 0, done.stderr
            self.results[scenario] = json.loads(done.stdout)
        return self.results[scenario]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    return Scenarios(tmp_path_factory.mktemp("switch"))


def test_inductor_afterwards_is_as_if_never_imported(
    scenarios: Scenarios,
) -> None:
    alone, after = scenarios("stock_alone"), scenarios("stock_after_ours")
    assert not alone["imported"]
    assert alone["stock"]["counters"]["fx_miss"] == 2
    assert len(alone["stock"]["code"]) == 2
    assert after["stock"] == alone["stock"]


def test_the_disabled_extension_changes_nothing(scenarios: Scenarios) -> None:
    inductor = scenarios("stock_alone")["stock"]
    disabled = scenarios("stock_after_ours")["disabled"]
    assert disabled["autograd"] == inductor["autograd"]
    # It hits Inductor's cache entries of that process: the same keys, the same code.
    assert disabled["counters"]["autograd_hit"] == 1
    assert disabled["code"] == inductor["code"]


def test_keys_differ_by_backend_settings_and_sources(scenarios: Scenarios) -> None:
    after = scenarios("stock_after_ours")
    variants = [after[name] for name in ("stock", "ours", "other_setting", "changed_source")]
    for variant in variants:
        assert (len(variant["autograd"]), len(variant["fx"])) == (1, 2)
        assert variant["counters"]["fx_miss"] == 2
    keys = [key for variant in variants for key in (*variant["autograd"], *variant["fx"])]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("entry", ["activated", "installed"])
def test_inductor_entry_points_share_the_cache_of_the_backend(
    scenarios: Scenarios, entry: str
) -> None:
    after = scenarios("stock_after_ours")
    assert after[entry]["autograd"] == after["ours"]["autograd"]
    assert after[entry]["counters"]["autograd_hit"] == 1


def test_a_second_process_hits_both_caches(scenarios: Scenarios) -> None:
    first = scenarios("stock_after_ours")["ours"]
    again = scenarios("again", cache="stock_after_ours")
    assert again["autograd"]["autograd"] == first["autograd"]
    assert again["autograd"]["counters"]["autograd_hit"] == 1
    assert again["fx"]["fx"] == first["fx"]
    assert again["fx"]["counters"]["fx_hit"] == 2
    assert again["fx"]["counters"]["fx_miss"] == 0


def test_importing_changes_nothing_in_torch(scenarios: Scenarios) -> None:
    changes = scenarios("import_only")
    assert changes == {
        "attributes": [],
        "lowerings": [],
        "config": True,
        "thread": True,
        "modules": True,
        "environment": [],
    }


def test_every_replacement_is_declared(scenarios: Scenarios) -> None:
    """Compiles change torch's modules and classes only as the hook table declares."""
    seen = scenarios("replacements")
    declared = {target for hook in HOOKS if hook.kind == "replaced" for target in hook.targets}
    assert set(seen["replaced"]) <= declared
    # Every hook is installed, under one of its names; those of `offline_gpu` only for named GPUs.
    assert not any(hook.targets[0] in seen["replaced"] for hook in offline_gpu.HOOKS)
    version = _compat.torch_version()
    for hook in HOOKS:
        if (
            hook.kind == "replaced"
            and hook.name != "lowerings"
            and hook.owner != "hooks.offline_gpu"
            and registry.is_applicable(hook, version)
        ):
            assert set(hook.targets) & set(seen["replaced"]), hook.name
    assert "aten.mm.default" in seen["lowerings"]
