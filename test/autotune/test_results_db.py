"""Lookup of tuning results, and which process tunes a problem."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from inductor_ext.autotune import results_db as stores
from inductor_ext.autotune.decision import STOCK, Decision, Timing
from inductor_ext.autotune.results import Environment, TuningResult, write_table
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.settings import Settings
from inductor_ext.templates import versions
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.versions import template_version
from test.support.children.tuning import CONFIG, H200, HERE, decision, entry, here, problem
from test.support.tuning_results import OLD_TEMPLATES, OLD_TRITON, ON_H100, lookup_result, run_child


def test_changed_templates_have_been_decided_about() -> None:
    """A changed template may need a new version, which its author must decide."""
    folder = Path(versions.__file__).parent
    sources = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for family in ("triton", "cutlass")
        for path in sorted((folder / family).rglob("*.py"))
    }
    recorded = {"versions": dict(versions.VERSIONS), "sources": sources}
    file = Path(__file__).parents[1] / "data" / "template_sources.json"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        file.write_text(json.dumps(recorded, indent=1) + "\n")
    assert json.loads(file.read_text()) == recorded, (
        "If kernels made from these sources may have another speed, or other results, change their "
        "version in templates/versions.py. Then run this test with EXPECTTEST_ACCEPT=1."
    )


@pytest.mark.parametrize("table", sorted(stores.TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_have_current_template_versions(table: Path) -> None:
    shipped = json.loads(table.read_text())["entries"]
    current = [
        value["environment"]["templates"].split("+")[0]
        == template_version("triton", value["problem"]["operation"])
        for value in shipped
    ]
    assert sum(current) > 0.9 * len(shipped)


def test_operations_with_own_kernels_have_own_versions() -> None:
    def version(operation: str) -> str:
        return Environment.of(H200, operation).templates

    assert version("mm") == version("bmm") == template_version("triton", "mm")
    assert len({version("mm"), version("mixed"), version("grouped")}) == 3
    for word in versions.VERSIONS.values():
        assert word
        assert "+" not in word


def test_lookup_returns_measured_results(store: TuningDatabase) -> None:
    assert lookup_result(store) is None
    store.put({problem(): decision(80.0), problem(1): decision(config=None)}, H200, here)
    assert lookup_result(store) == ("measured", 80.0)
    assert lookup_result(store, 1) == ("measured", 100.0)
    assert lookup_result(store, 2) is None
    known = store.lookup(problem(), H200, here)
    assert known is not None
    assert known.exact
    assert known.decision == dataclasses.replace(decision(80.0), origin="cache")


def test_results_under_other_matmul_flags_are_ignored(store: TuningDatabase) -> None:
    freed = dataclasses.replace(problem(), math_flags="allow_fp16_accumulation")
    store.put({freed: decision(80.0)}, H200, here)
    assert lookup_result(store) is None
    store.put({problem(): decision(70.0)}, H200, here)
    assert lookup_result(store) == ("measured", 70.0)
    known = store.lookup(freed, H200, here)
    assert known is not None
    assert known.decision.microseconds(known.decision.config) == 80.0


def test_newer_measurements_replace_older_ones(store: TuningDatabase) -> None:
    store.add([entry(microseconds=80.0, measured=2)])
    assert store.add([entry(microseconds=70.0, measured=1)]) == {"ignored": 1}
    assert store.add([entry(microseconds=60.0, measured=3)]) == {"updated": 1}
    assert store.add([entry(microseconds=50.0, environment=OLD_TRITON), entry(1)]) == {"new": 2}
    assert lookup_result(store) == ("imported", 60.0)


def test_unmeasured_decisions_are_not_stored(store: TuningDatabase) -> None:
    store.put({problem(): STOCK}, H200, here)
    assert lookup_result(store) is None


@pytest.mark.parametrize(
    ("there", "differences"),
    [
        (OLD_TRITON, ("with Triton 3.6.0, here 3.7.1",)),
        (dataclasses.replace(HERE, cuda="12.8"), ("with CUDA 12.8, here 13.0",)),
        (OLD_TEMPLATES, ("with different template versions",)),
        (ON_H100, ("measured on NVIDIA H100 80GB HBM3",)),
        (dataclasses.replace(HERE, sms=66), ("measured on 66 SMs, here 132",)),
        (dataclasses.replace(ON_H100, sms=114), None),
        (dataclasses.replace(ON_H100, capability=(10, 0)), None),
    ],
)
def test_results_of_similar_devices_are_not_exact(
    store: TuningDatabase, there: Environment, differences: tuple[str, ...] | None
) -> None:
    store.add([entry(environment=there)])
    known = store.lookup(problem(), H200, here)
    assert (known and known.differences) == differences
    assert known is None or (not known.exact and known.decision.origin == "table")


def test_lookup_prefers_the_most_similar_environment(store: TuningDatabase, tmp_path: Path) -> None:
    """Each result is preferred to all results before it."""
    steps = [
        ("imported", entry(microseconds=1.0, environment=ON_H100)),
        (
            "imported",
            entry(microseconds=2.0, environment=dataclasses.replace(OLD_TRITON, templates="e")),
        ),
        ("imported", entry(microseconds=3.0, environment=OLD_TRITON, measured=5)),
        ("imported", entry(microseconds=4.0, environment=OLD_TEMPLATES, measured=6)),
        ("measured", entry(microseconds=5.0, environment=OLD_TRITON, measured=4)),
        ("shipped", entry(microseconds=6.0)),
        ("imported", entry(microseconds=7.0)),
        ("measured", entry(microseconds=8.0)),
    ]
    for source, step in steps:
        if source == "shipped":
            write_table(tmp_path / "tables" / "h200.json", [step])
            stores.read_shipped_tables.cache_clear()
        else:
            store.files.merge(source, [step])  # type: ignore[arg-type]
        origin, microseconds = lookup_result(store) or ("", None)
        assert (origin.split(",")[0], microseconds) == (source, step.timings[1].microseconds)


def test_illegal_configurations_are_skipped(store: TuningDatabase) -> None:
    large = dataclasses.replace(CONFIG, num_stages=8)
    illegal = TuningResult(problem(), HERE, large, (Timing(large, 1.0),), 9, "2.13.0")
    store.add([illegal])
    assert lookup_result(store) is None
    store.add([entry(environment=OLD_TRITON)])
    assert lookup_result(store) == ("imported, with Triton 3.6.0, here 3.7.1", 90.0)


def test_without_a_folder_only_shipped_results_exist(tmp_path: Path) -> None:
    store = TuningDatabase(None, tables=tmp_path)
    store.put({problem(): decision()}, H200, here)
    assert store.add([entry()]) == {}
    assert lookup_result(store) is None
    assert (store.generation(tuning=False), store.clear(), store.entries("measured")) == (
        "-",
        {},
        [],
    )
    write_table(tmp_path / "h200.json", [entry(1)])
    stores.read_shipped_tables.cache_clear()
    assert lookup_result(store, 1) == ("shipped", 90.0)
    tuned = store.tune_missing(
        [problem(), problem(1)], H200, lambda batch: dict.fromkeys(batch, STOCK)
    )
    assert set(tuned.values()) == {STOCK}


def test_settings_select_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert stores.open_database(Settings()).folder == tmp_path / "inductor_ext" / "tuning"
    chosen = Settings(tuning_cache_dir=str(tmp_path), tuning_cache_entries=3, tuning_wait=7)
    store = stores.open_database(chosen)
    assert (store.folder, store.files.max_entries, store.wait) == (tmp_path, 3, 7)
    assert stores.open_database(Settings(tuning_cache=False)).folder is None
    with torch.compiler.config.patch(force_disable_caches=True):
        assert stores.open_database(chosen).folder is None


def test_changes_give_a_new_generation(store: TuningDatabase) -> None:
    def generations() -> tuple[str, str]:
        return store.generation(tuning=False), store.generation(tuning=True)

    seen = [generations()]
    store.put({problem(): decision()}, H200, here)
    seen.append(generations())
    assert seen[1][0] != seen[0][0]
    assert seen[1][1] == seen[0][1]
    for change in (lambda: store.add([entry()]), store.clear):
        change()
        seen.append(generations())
    assert len({first for first, _ in seen}) == 4
    assert len({second for _, second in seen}) == 3
    store.lookup(problem(), H200, here)
    assert generations() == seen[-1]


def test_known_results_keep_the_generation(store: TuningDatabase) -> None:
    store.add([entry()])
    before = store.generation(tuning=True)
    assert store.add([entry()]) == {"ignored": 1}
    assert store.generation(tuning=True) == before


def test_damaged_shipped_tables_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "bad.json").write_text('{"format": 1, "entries": [{}]}')
    write_table(tmp_path / "good.json", [entry()])
    store = TuningDatabase(None, tables=tmp_path)
    assert lookup_result(store) == ("shipped", 90.0) == lookup_result(store)
    assert len(caplog.messages) == 1


def test_eight_processes_tune_each_problem_once(tmp_path: Path) -> None:
    run_child("tune_missing", tmp_path / "store")
    tuned = (tmp_path / "store.log").read_text().split()
    assert sorted(tuned) == sorted(str(problem(index).m) for index in range(6))
    results = [json.loads(line) for line in (tmp_path / "store.results").open()]
    assert len(results) == 8
    for m in map(str, map(int, tuned)):
        assert len({times[m] for times in results if m in times}) == 1


def test_a_claim_ends_with_its_process(store: TuningDatabase) -> None:
    reading, writing = os.pipe()
    owner = os.fork()
    if owner == 0:
        with store.claim([problem(), problem(1)], H200, here):
            store.put({problem(1): decision(70.0)}, H200, here)
            os.write(writing, b"x")
            threading.Event().wait()
    os.read(reading, 1)
    timer = threading.Timer(0.1, os.kill, (owner, 9))
    timer.start()
    with store.claim([problem(), problem(1)], H200, here) as mine:
        assert not timer.is_alive()
        assert mine == [problem()]
    os.waitpid(owner, 0)


def test_a_claim_takes_unclaimed_problems_only(store: TuningDatabase) -> None:
    with store.claim([problem(), problem(1)], H200, here) as mine:
        assert mine == [problem(), problem(1)]
        with store.claim([problem(1), problem(2)], H200, here) as others:
            assert others == [problem(2)]
        # Another Triton has its own results.
        with store.claim([problem()], H200, lambda _: OLD_TRITON) as elsewhere:
            assert elsewhere == [problem()]


def test_waiting_ends_without_progress_of_the_owner(tmp_path: Path) -> None:
    store = TuningDatabase(tmp_path, wait=0.1)
    with store.claim([problem()], H200, here), store.claim([problem()], H200, here) as late:
        assert late == [problem()]


def test_exceptions_while_tuning_release_the_claim(store: TuningDatabase) -> None:
    def fail(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        raise KeyError

    with pytest.raises(KeyError):
        store.tune_missing([problem()], H200, fail, here)
    with store.claim([problem()], H200, here) as mine:
        assert mine == [problem()]
