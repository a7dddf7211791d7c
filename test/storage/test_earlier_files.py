"""Files that an earlier version wrote, in test/data/earlier_files, are still used.

The version wrote tuning results in an environment with Triton 3.7.1 and CUDA 13.0 on an H200, an
artifact, a manifest, a signature and memory plans.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inductor_ext.autotune.results import Environment, TuningResult, raw_table
from inductor_ext.autotune.results_db import TABLES, TuningDatabase
from inductor_ext.cpp_wrapper.package import manifest
from inductor_ext.cpp_wrapper.signature.signature import Signature
from inductor_ext.memory import plan_store
from inductor_ext.storage.artifact_store import ArtifactStore
from inductor_ext.templates.device import KNOWN
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.versions import template_version

FILES = Path(__file__).parents[1] / "data" / "earlier_files"

(H200,) = (device for device in KNOWN if device.name == "NVIDIA H200")


def load(name: str) -> Any:
    return json.loads((FILES / name).read_bytes())


@pytest.fixture
def database(tmp_path: Path) -> TuningDatabase:
    shutil.copytree(FILES / "tuning", tmp_path / "tuning")
    return TuningDatabase(tmp_path / "tuning", tables=tmp_path)


def test_every_tuning_result_is_found(database: TuningDatabase) -> None:
    measured, imported = (database.entries(source) for source in ("measured", "imported"))
    assert (len(measured), len(imported)) == (9, 1)
    for source, results in (("measured", measured), ("imported", imported)):
        for result in results:
            decision = database.lookup(result.problem, H200, lambda _, r=result: r.environment)
            assert decision is not None
            assert (decision.entry, decision.source, decision.exact) == (result, source, True)


def test_results_apply_to_the_templates_of_today(database: TuningDatabase) -> None:
    for result in database.entries("measured"):

        def here(problem: GemmProblem, past: Environment = result.environment) -> Environment:
            return dataclasses.replace(
                past, templates=template_version("triton", problem.operation)
            )

        decision = database.lookup(result.problem, H200, here)
        assert decision is not None
        assert decision.decision.config == result.config


def test_a_tuning_result_is_written_as_before() -> None:
    for path in (FILES / "tuning").glob("*/*.json"):
        _, text = path.read_text().split("\n", 1)
        (value,) = json.loads(text)
        assert f"[{TuningResult.from_json(value).line}]\n" == text


def test_results_are_added_to_an_earlier_file(database: TuningDatabase) -> None:
    old = database.entries("measured")[0]
    later = dataclasses.replace(old.environment, triton="3.8.0")
    database.put({old.problem: old.decision("measured")}, H200, lambda problem: later)
    environments = {result.environment.triton for result in database.entries("measured")}
    assert environments == {"3.7.1", "3.8.0"}
    assert len(database.entries("measured")) == 10


@pytest.mark.parametrize("table", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_result_is_found(table: Path) -> None:
    results = [TuningResult.from_json(value) for value in raw_table(table)]
    database = TuningDatabase(None)
    device = next(device for device in KNOWN if device.name == results[0].environment.device)
    for result in results:
        decision = database.lookup(result.problem, device, lambda _, r=result: r.environment)
        assert decision is not None
        assert (decision.source, decision.exact) == ("shipped", True)
        assert decision.decision.config == result.config


def test_an_artifact_is_a_hit(tmp_path: Path) -> None:
    shutil.copytree(FILES / "artifacts", tmp_path / "artifacts")
    store = ArtifactStore(tmp_path / "artifacts", 1 << 20)
    key = "0123456789abcdef" * 2
    with store.get(key) as folder:
        assert folder is not None
        assert (folder / "sub" / "notes.txt").read_bytes() == b"content of a kernel\n"
    assert store.fetch(key, {"kernel.bin": tmp_path / "copy"})
    assert store.entry_keys() == [key]


def test_a_manifest_is_read_and_written_as_before() -> None:
    data = (FILES / "manifest.json").read_bytes()
    assert manifest.dumps(manifest.loads(data, "net.pt2")) == data


def test_a_signature_is_read_and_written_as_before() -> None:
    value = load("signature.json")
    assert Signature.from_json(value).to_json() == value


def test_memory_plans_are_read_and_only_fields_are_added() -> None:
    for value in load("memory_plans.json"):
        written = json.loads(json.dumps(plan_store.parse(value).as_json()))
        assert written == {**written, **value}
