"""What is known of GEMMs: it is found again, is the same for all, and survives what may happen."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.autotune import distributed, results_folder
from inductor_ext.autotune import results_db as stores
from inductor_ext.autotune.decision import STOCK, Decision, Timing
from inductor_ext.autotune.results import (
    Environment,
    TuningResult,
    merge_results,
    read_table,
    write_table,
)
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.autotune.results_folder import ResultsFolder
from inductor_ext.settings import Settings
from inductor_ext.storage.paths import tuning_folder
from inductor_ext.templates import versions
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.versions import template_version
from test.support.children.tuning import CONFIG, H200, HERE, decision, entry, here, problem
from test.support.gemm_strategies import configs, device, examples, problems

CHECKOUT = Path(__file__).parents[2]
H100 = device("NVIDIA H100 80GB HBM3")
ON_H100 = dataclasses.replace(HERE, device=H100.name)
OLD_TRITON = dataclasses.replace(HERE, triton="3.6.0")
OLD_TEMPLATES = dataclasses.replace(HERE, templates="f" * 16)


@pytest.fixture
def store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[TuningDatabase]:
    """A store that has nothing to complain of."""
    (tmp_path / "tables").mkdir()
    yield TuningDatabase(tmp_path / "store", tables=tmp_path / "tables")
    assert caplog.messages == []


def found(
    store: TuningDatabase, index: int = 0, environment: Environment = HERE
) -> tuple[str, float | None] | None:
    """(origin, microseconds of what is chosen) of a problem."""
    known = store.lookup(problem(index), H200, lambda problem: environment)
    return known and (known.origin, known.decision.microseconds(known.decision.config))


def child(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "test.support.children.tuning", *map(str, arguments)]
    run = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def but(record: Any, **fields: Any) -> Any:
    return dataclasses.replace(record, **fields)


# --- entries and tables ---


@given(problems(), configs(), st.floats(1e-3, 1e9), st.integers(0, 2**32))
@examples(60)
def test_an_entry_makes_the_round_trip(
    problem: GemmProblem, config: GemmConfig, microseconds: float, measured: int
) -> None:
    timings = (Timing(None, 3.5), Timing(config, microseconds), Timing(config, None, "no"))
    made = TuningResult(problem, HERE, config, timings, measured, "2.13.0")
    assert TuningResult.from_json(json.loads(made.line)) == made
    assert made.decision("cache").microseconds(config) == microseconds


ENTRIES = st.builds(
    lambda index, us, triton, measured: entry(
        index, us, but(HERE, triton=triton), measured=measured
    ),
    st.integers(0, 2),
    st.sampled_from((80.0, 90.0)),
    st.sampled_from(("3.6.0", "3.7.1")),
    st.integers(1, 3),
)
TABLES = st.lists(ENTRIES, max_size=8)


@given(TABLES, TABLES, TABLES)
@examples(200)
def test_merging_is_a_union_in_which_the_newest_counts(
    a: list[TuningResult], b: list[TuningResult], c: list[TuningResult]
) -> None:
    whole = merge_results([*a, *b, *c])
    assert whole == merge_results([*c, *b, *a]) == merge_results([*merge_results([*a, *b]), *c])
    assert whole == merge_results([*a, *merge_results([*b, *c])]) == merge_results(whole)
    kept = {(case.problem, case.environment): case for case in whole}
    for case in (*a, *b, *c):
        assert kept[case.problem, case.environment].measured >= case.measured
    assert set(whole) <= {*a, *b, *c}


def test_a_store_merges_in_any_order_to_the_same(tmp_path: Path) -> None:
    choose = random.Random(0)
    added = [
        entry(index, us, but(HERE, triton=f"3.{triton}"), measured=measured)
        for index, us, triton, measured in itertools.product(
            range(2), (1.0, 2.0), range(20), (1, 2)
        )
    ]
    results = []
    for order in range(3):
        choose.shuffle(added)
        store = TuningDatabase(tmp_path / str(order))
        for some in (added[:50], added[50:60], added[60:]):
            store.add(some)
        results.append(store.entries("imported"))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) == 2 * 16
    assert {(result.measured, result.timings[1].microseconds) for result in results[0]} == {
        (2, 2.0)
    }


def test_a_table_has_an_entry_a_line(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    assert write_table(path, [entry(1), entry(0), entry(0, measured=3), entry(1)]) == 2
    assert read_table(path) == [entry(0), entry(1)]
    assert len(path.read_text().splitlines()) == 4
    assert write_table(path, []) == 0
    assert read_table(path) == []


GOOD = entry().to_json()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it is not a table"),
        ('{"format": 1, "entries": {}}', "it is not a table"),
        ('{"format": 2, "entries": []}', "it has format 2, and this version reads format 1"),
        ('{"format": 1, "entries": [1]}', "entry 1"),
        (json.dumps({"format": 1, "entries": [GOOD, {**GOOD, "x": 1}]}), "entry 2"),
        (json.dumps({"format": 1, "entries": [{**GOOD, "measured": -1}]}), "measured is -1"),
        (json.dumps({"format": 1, "entries": [{**GOOD, "timings": []}]}), "those that were meas"),
        (
            json.dumps({"format": 1, "entries": [GOOD]}).replace("90.0", "NaN"),
            "microseconds is nan",
        ),
        (json.dumps({"format": 1, "entries": [GOOD]}).replace("2048", "0"), "m is 0"),
    ],
)
def test_a_table_with_anything_wrong_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(exc.BadTuningFileError) as caught:
        read_table(tmp_path / "table.json")
    assert why in str(caught.value)
    assert len(str(caught.value)) < 600


@given(st.data())
@examples(150)
def test_json_of_any_other_shape_is_refused_and_nothing_worse(data: st.DataObject) -> None:
    """One value somewhere in an entry becomes another."""
    value = json.loads(json.dumps(GOOD))
    place: Any = value
    while True:
        key = data.draw(
            st.sampled_from(list(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    junk = (None, True, -1, 0, 10**30, 1.5, "", "x", [], [[]], {}, {"": 0})
    place[key] = data.draw(st.sampled_from(junk))
    try:
        read = TuningResult.from_json(value)
    except exc.BadGemmError:
        return
    assert json.loads(read.line) == value


def test_a_table_that_cannot_be_read_or_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(exc.BadTuningFileError, match="No such file"):
        read_table(tmp_path / "missing.json")
    with pytest.raises(exc.BadTuningFileError, match="cannot be written"):
        write_table(tmp_path / "missing" / "table.json", [])


def test_a_table_is_written_through_links_and_into_pipes(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "table.json")
    write_table(link, [entry()])
    assert link.is_symlink()
    assert read_table(tmp_path / "table.json") == [entry()]
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_table(pipe, [entry()])
        assert os.read(reader, 1 << 16) == link.read_bytes()
    finally:
        os.close(reader)


def test_changed_templates_have_been_decided_about() -> None:
    """A change of a template may need a new version, which only its author can say."""
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
def test_the_shipped_tables_are_of_these_templates(table: Path) -> None:
    shipped = json.loads(table.read_text())["entries"]
    current = [
        value["environment"]["templates"].split("+")[0]
        == template_version("triton", value["problem"]["operation"])
        for value in shipped
    ]
    assert sum(current) > 0.9 * len(shipped)


def test_a_version_is_that_of_the_operation() -> None:
    def version(operation: str) -> str:
        return Environment.of(H200, operation).templates

    assert version("mm") == version("bmm") == template_version("triton", "mm")
    assert len({version("mm"), version("mixed"), version("grouped")}) == 3
    for word in versions.VERSIONS.values():
        assert word
        assert "+" not in word


def test_this_environment_is_known() -> None:
    import torch

    here = Environment.of(H200, "mm")
    assert (here.device, here.capability, here.sms) == ("NVIDIA H200", (9, 0), 132)
    assert here.cuda == torch.version.cuda
    assert here.differences(here) == ()


# --- what is known ---


def test_what_was_measured_is_known_exactly(store: TuningDatabase) -> None:
    assert found(store) is None
    store.put({problem(): decision(80.0), problem(1): decision(config=None)}, H200, here)
    assert found(store) == ("measured", 80.0)
    assert found(store, 1) == ("measured", 100.0)
    assert found(store, 2) is None
    known = store.lookup(problem(), H200, here)
    assert known is not None
    assert known.exact
    assert known.decision == but(decision(80.0), origin="cache")


def test_results_under_other_matmul_flags_do_not_count(store: TuningDatabase) -> None:
    freed = but(problem(), math_flags="allow_fp16_accumulation")
    store.put({freed: decision(80.0)}, H200, here)
    assert found(store) is None
    store.put({problem(): decision(70.0)}, H200, here)
    assert found(store) == ("measured", 70.0)
    known = store.lookup(freed, H200, here)
    assert known is not None
    assert known.decision.microseconds(known.decision.config) == 80.0


def test_a_later_measurement_replaces_an_earlier_one(store: TuningDatabase) -> None:
    store.add([entry(microseconds=80.0, measured=2)])
    assert store.add([entry(microseconds=70.0, measured=1)]) == {"ignored": 1}
    assert store.add([entry(microseconds=60.0, measured=3)]) == {"updated": 1}
    assert store.add([entry(microseconds=50.0, environment=OLD_TRITON), entry(1)]) == {"new": 2}
    assert found(store) == ("imported", 60.0)


def test_what_nobody_measured_is_not_kept(store: TuningDatabase) -> None:
    store.put({problem(): STOCK}, H200, here)
    assert found(store) is None


@pytest.mark.parametrize(
    ("there", "differences"),
    [
        (OLD_TRITON, ("with Triton 3.6.0, here 3.7.1",)),
        (but(HERE, cuda="12.8"), ("with CUDA 12.8, here 13.0",)),
        (OLD_TEMPLATES, ("with different template versions",)),
        (ON_H100, ("measured on NVIDIA H100 80GB HBM3",)),
        (but(HERE, sms=66), ("measured on 66 SMs, here 132",)),
        (but(ON_H100, sms=114), None),
        (but(ON_H100, capability=(10, 0)), None),
    ],
)
def test_results_of_similar_devices_are_advice(
    store: TuningDatabase, there: Environment, differences: tuple[str, ...] | None
) -> None:
    store.add([entry(environment=there)])
    known = store.lookup(problem(), H200, here)
    assert (known and known.differences) == differences
    assert known is None or (not known.exact and known.decision.origin == "table")


def test_the_better_known_comes_first(store: TuningDatabase, tmp_path: Path) -> None:
    """Each of these is preferred to all before it."""
    steps = [
        ("imported", entry(microseconds=1.0, environment=ON_H100)),
        ("imported", entry(microseconds=2.0, environment=but(OLD_TRITON, templates="e"))),
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
            stores._shipped.cache_clear()
        else:
            store.files.merge(source, [step])  # type: ignore[arg-type]
        origin, microseconds = found(store) or ("", None)
        assert (origin.split(",")[0], microseconds) == (source, step.timings[1].microseconds)


def test_a_choice_that_is_not_legal_is_passed_over(store: TuningDatabase) -> None:
    large = but(CONFIG, num_stages=8)
    illegal = TuningResult(problem(), HERE, large, (Timing(large, 1.0),), 9, "2.13.0")
    store.add([illegal])
    assert found(store) is None
    store.add([entry(environment=OLD_TRITON)])
    assert found(store) == ("imported, with Triton 3.6.0, here 3.7.1", 90.0)


def test_without_a_folder_only_what_is_shipped_is_known(tmp_path: Path) -> None:
    store = TuningDatabase(None, tables=tmp_path)
    store.put({problem(): decision()}, H200, here)
    assert store.add([entry()]) == {}
    assert found(store) is None
    assert (store.generation(tuning=False), store.clear(), store.entries("measured")) == (
        "-",
        {},
        [],
    )
    write_table(tmp_path / "h200.json", [entry(1)])
    stores._shipped.cache_clear()
    assert found(store, 1) == ("shipped", 90.0)
    tuned = store.tune_missing(
        [problem(), problem(1)], H200, lambda batch: dict.fromkeys(batch, STOCK)
    )
    assert set(tuned.values()) == {STOCK}


def test_what_is_shipped_is_in_order() -> None:
    folder = CHECKOUT / "inductor_ext" / "autotune" / "tables"
    for path in folder.glob("*.json"):
        assert read_table(path) == merge_results(read_table(path))


def test_settings_say_where_and_whether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert stores.open_database(Settings()).folder == tmp_path / "inductor_ext" / "tuning"
    chosen = Settings(tuning_cache_dir=str(tmp_path), tuning_cache_entries=3, tuning_wait=7)
    store = stores.open_database(chosen)
    assert (store.folder, store.files.max_entries, store.wait) == (tmp_path, 3, 7)
    assert stores.open_database(Settings(tuning_cache=False)).folder is None
    with torch.compiler.config.patch(force_disable_caches=True):
        assert stores.open_database(chosen).folder is None


def test_the_generation_counts_changes(store: TuningDatabase) -> None:
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


def test_what_is_known_already_changes_no_generation(store: TuningDatabase) -> None:
    store.add([entry()])
    before = store.generation(tuning=True)
    assert store.add([entry()]) == {"ignored": 1}
    assert store.generation(tuning=True) == before


def test_the_next_import_repairs_a_killed_one(
    store: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [store.generation(tuning=True)]
    with monkeypatch.context() as killing:
        renew = ResultsFolder._renew
        killing.setattr(
            ResultsFolder, "_renew", lambda *given: renew(*given) if len(given) == 3 else None
        )
        store.add([entry()])
    seen.append(store.generation(tuning=True))
    for _ in range(2):
        assert store.add([entry()]) == {"ignored": 1}
        seen.append(store.generation(tuning=True))
    assert len(set(seen)) == 3
    assert seen[2] == seen[3]


def test_failed_writes_and_removals_are_reported(tmp_path: Path) -> None:
    store = TuningDatabase(tmp_path / "store", tables=tmp_path / "none")
    seen = [store.generation(tuning=True)]
    # Its file cannot be replaced.
    blocked = store.files.path_of("imported", problem(2))
    blocked.mkdir(parents=True)
    assert store.add([entry(index) for index in range(5)]) == {"new": 2}
    seen.append(store.generation(tuning=True))
    assert [item.problem for item in store.entries("imported")] == [problem(0), problem(1)]
    count = store.clear()
    assert count["left"] > 0
    assert count.total() == 3
    seen.append(store.generation(tuning=True))
    blocked.rmdir()
    assert store.clear() == {"removed": count["left"] - 1, "left": 0}
    assert len(set(seen)) == 3


def test_tuning_writes_results_into_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = (tmp_path / "a", tmp_path / "b", None, tuning_folder())
    keys = [TuningDatabase(place).generation(tuning=True) for place in places]
    assert len(set(keys)) == 4
    assert TuningDatabase(tmp_path / "a").generation(tuning=True) == keys[0]
    # Packed with Inductor's caches, graphs are found where these are unpacked.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert TuningDatabase(tuning_folder()).generation(tuning=True) == keys[3]


def test_the_oldest_go_first(tmp_path: Path) -> None:
    store = TuningDatabase(tmp_path, max_entries=20, tables=tmp_path / "none")
    for index in range(21):
        store.put({problem(index): decision()}, H200, here)
        path = store.files.path_of("measured", problem(index))
        os.utime(path, (index, index))
    known = [index for index in range(21) if found(store, index)]
    # The last one put finds one too many and leaves nine tenths.
    assert known == list(range(3, 21))


@pytest.mark.parametrize("most", [1, 5])
def test_what_was_added_last_stays(tmp_path: Path, most: int) -> None:
    store = TuningDatabase(tmp_path, max_entries=most, tables=tmp_path / "none")
    for index in range(3):
        store.put({problem(index): decision()}, H200, here)
        assert found(store, index)
    assert len(store.entries("measured")) == min(most, 3)
    assert store.add([entry(index) for index in range(8)]) == {"new": 8}
    assert len(store.entries("imported")) == 8
    store.add([entry(8)])
    assert len(store.entries("imported")) == max(1, most * 9 // 10)
    assert entry(8) in store.entries("imported")


# --- what may happen ---


def test_damage_is_as_good_as_nothing_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = TuningDatabase(tmp_path, tables=tmp_path / "none")
    store.put({problem(): decision()}, H200, here)
    path = store.files.path_of("measured", problem())
    data = path.read_bytes()
    choose = random.Random(0)
    damaged = [b"", data[:-1], data[:70], data + b" "]
    # What somebody else has written with the right sum.
    for text in (b"", b"5", b"{", b"[" * 100_000):
        damaged.append(results_folder._check(text) + b"\n" + text)
    for _ in range(30):
        place = choose.randrange(len(data))
        damaged.append(
            data[:place] + bytes([data[place] ^ 1 << choose.randrange(8)]) + data[place + 1 :]
        )
    for item in damaged:
        path.write_bytes(item)
        assert found(store) is None
    assert [message.split(" is damaged")[0] for message in caplog.messages] == [str(path)]
    store.put({problem(): decision()}, H200, here)
    assert found(store) == ("measured", 90.0)


def test_a_damaged_token_is_as_good_as_any(store: TuningDatabase) -> None:
    store.put({problem(): decision()}, H200, here)
    assert store.folder is not None
    (store.folder / "measured.token").write_bytes(b"\0\xff\xd8")
    damaged = store.generation(tuning=False)
    tuned = store.tune_missing([problem(1)], H200, lambda batch: {problem(1): decision()}, here)
    assert tuned == {problem(1): decision()}
    assert store.generation(tuning=False) != damaged


def test_a_folder_that_cannot_be_used_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = TuningDatabase(tmp_path / "file" / "store", tables=tmp_path / "none")
    tuned = store.tune_missing([problem()], H200, lambda batch: {problem(): decision()}, here)
    assert tuned == {problem(): decision()}
    assert found(store) is None
    assert len(caplog.messages) == 1
    assert "GEMMs are tuned again" in caplog.messages[0]


def test_a_damaged_table_that_is_shipped_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.json").write_text('{"format": 1, "entries": [{}]}')
    write_table(tmp_path / "good.json", [entry()])
    store = TuningDatabase(None, tables=tmp_path)
    assert found(store) == ("shipped", 90.0) == found(store)
    assert len(caplog.messages) == 1


def test_eight_processes_write_at_once(store: TuningDatabase) -> None:
    child("write", str(store.folder))
    assert len(store.entries("measured")) == 12 * 8


def test_a_killed_writer_leaves_nothing_broken(store: TuningDatabase) -> None:
    assert store.folder is not None
    assert child("kill", store.folder, "25", "0") == "25\n"
    assert all(found(store, index) for index in range(5))
    assert len(store.entries("measured")) > 5
    store.put({problem(5): decision()}, H200, here)
    assert [
        path.name for path in (store.folder / "measured").iterdir() if path.suffix != ".json"
    ] == []


def test_tokens_of_killed_writers_expire_after_a_day(store: TuningDatabase) -> None:
    assert store.folder is not None
    old, young = (store.folder / f".inductor_ext-{name}" for name in ("old", "young"))
    for item in (old, young):
        item.mkdir(parents=True)
        (item / "measured.token").write_text("")
    yesterday = time.time() - 2 * 86400
    os.utime(old, (yesterday, yesterday))
    store.put({problem(): decision()}, H200, here)
    assert (old.exists(), young.exists()) == (False, True)


def test_what_others_keep_in_the_folder_stays(store: TuningDatabase) -> None:
    assert store.folder is not None
    theirs = ("measured/thesis.json", "measured/raw/1.csv", "locks/key", "imported/photos/1.jpg")
    for their in theirs:
        path = store.folder / their
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        os.utime(path, (1, 1))
    store.files.max_entries = 1
    for index in range(2):
        store.put({problem(index): decision()}, H200, here)
        store.add([entry(index)])
        # Looked through at once.
        store.files._until_collected.clear()
    assert len(store.entries("measured")) == 1
    assert store.clear() == {"removed": 2, "left": 0}
    assert [their for their in theirs if not (store.folder / their).exists()] == []


# --- who tunes ---


def test_eight_processes_tune_each_problem_once_and_get_the_same(tmp_path: Path) -> None:
    child("tune_missing", tmp_path / "store")
    tuned = (tmp_path / "store.log").read_text().split()
    assert sorted(tuned) == sorted(str(problem(index).m) for index in range(6))
    results = [json.loads(line) for line in (tmp_path / "store.results").open()]
    assert len(results) == 8
    for m in map(str, map(int, tuned)):
        assert len({times[m] for times in results if m in times}) == 1


def test_a_claim_ends_with_its_owner(store: TuningDatabase) -> None:
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


def test_a_claim_takes_what_is_free_and_leaves_the_rest(store: TuningDatabase) -> None:
    with store.claim([problem(), problem(1)], H200, here) as mine:
        assert mine == [problem(), problem(1)]
        with store.claim([problem(1), problem(2)], H200, here) as others:
            assert others == [problem(2)]
        # Results of another Triton are another matter.
        with store.claim([problem()], H200, lambda _: OLD_TRITON) as elsewhere:
            assert elsewhere == [problem()]


def test_an_owner_without_progress_is_not_waited_for(tmp_path: Path) -> None:
    store = TuningDatabase(tmp_path, wait=0.1)
    with store.claim([problem()], H200, here), store.claim([problem()], H200, here) as late:
        assert late == [problem()]


def test_what_tuning_raises_sets_the_problem_free(store: TuningDatabase) -> None:
    def fail(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        raise KeyError

    with pytest.raises(KeyError):
        store.tune_missing([problem()], H200, fail, here)
    with store.claim([problem()], H200, here) as mine:
        assert mine == [problem()]


# --- ranks ---


def test_ranks_take_the_first_offer(tmp_path: Path) -> None:
    one, other = (json.loads(line) for line in child("agree", tmp_path / "c10d").splitlines())
    assert one == other
    assert set(one) <= {10.0, 11.0}


def test_ranks_decide_only_on_what_nobody_has_decided() -> None:
    import torch.distributed as dist

    shared = dist.HashStore()
    asked = []

    def decide(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        asked.append([item.m for item in batch])
        return {item: decision(float(len(asked))) for item in batch}

    first = distributed.share_decisions([problem(), problem(1)], decide, here, "", shared)
    again = distributed.share_decisions(
        [problem(1), problem(2), problem()], decide, here, "", shared
    )
    assert asked == [[2048, 2049], [2050]]
    assert [again[problem(index)].microseconds(CONFIG) for index in range(3)] == [1.0, 1.0, 2.0]
    assert first[problem()] == again[problem()] == decision(1.0)
    distributed.share_decisions([problem()], decide, here, "tuning", shared)
    distributed.share_decisions([problem()], decide, lambda _: OLD_TRITON, "", shared)
    assert asked[2:] == [[2048], [2048]]
    assert distributed.share_decisions([problem()], decide, here, "") == {problem(): decision(5.0)}


def test_a_store_that_does_not_answer_leaves_each_rank_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken:
        def check(self, *arguments: object) -> bool:
            raise RuntimeError("connection lost")

        compare_set = check

    broken: Any = Broken()

    def decide(batch: Sequence[GemmProblem]) -> dict[GemmProblem, Decision]:
        return dict.fromkeys(batch, decision())

    assert distributed.share_decisions([problem()], decide, here, "", broken) == {
        problem(): decision()
    }
    assert [message.split(":")[0] for message in caplog.messages] == [
        "ranks cannot agree on GEMM kernels, so every rank selects its own"
    ]
