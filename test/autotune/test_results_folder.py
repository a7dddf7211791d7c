"""The folder of tuning results: concurrent and killed writers, damaged files, and eviction."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import time
from pathlib import Path

import pytest

from inductor_ext.autotune import results_folder
from inductor_ext.autotune.results_db import TuningDatabase
from inductor_ext.autotune.results_folder import ResultsFolder
from inductor_ext.storage.paths import tuning_folder
from test.support.children.tuning import H200, HERE, decision, entry, here, problem
from test.support.tuning_results import lookup_result, run_child


def test_the_order_of_imports_does_not_matter(tmp_path: Path) -> None:
    choose = random.Random(0)
    added = [
        entry(index, us, dataclasses.replace(HERE, triton=f"3.{triton}"), measured=measured)
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


def test_the_next_import_repairs_an_interrupted_one(
    store: TuningDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [store.generation(tuning=True)]
    with monkeypatch.context() as killing:
        renew = ResultsFolder.renew_token
        killing.setattr(
            ResultsFolder,
            "renew_token",
            lambda *inputs: renew(*inputs) if len(inputs) == 3 else None,
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
    # This file cannot be replaced.
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
    # The key does not depend on the path, so that packed caches can be unpacked elsewhere.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert TuningDatabase(tuning_folder()).generation(tuning=True) == keys[3]


def test_the_oldest_results_are_evicted_first(tmp_path: Path) -> None:
    store = TuningDatabase(tmp_path, max_entries=20, tables=tmp_path / "none")
    for index in range(21):
        store.put({problem(index): decision()}, H200, here)
        path = store.files.path_of("measured", problem(index))
        os.utime(path, (index, index))
    known = [index for index in range(21) if lookup_result(store, index)]
    # The last result exceeds the limit, and nine tenths are kept.
    assert known == list(range(3, 21))


@pytest.mark.parametrize("most", [1, 5])
def test_the_newest_results_are_not_evicted(tmp_path: Path, most: int) -> None:
    store = TuningDatabase(tmp_path, max_entries=most, tables=tmp_path / "none")
    for index in range(3):
        store.put({problem(index): decision()}, H200, here)
        assert lookup_result(store, index)
    assert len(store.entries("measured")) == min(most, 3)
    assert store.add([entry(index) for index in range(8)]) == {"new": 8}
    assert len(store.entries("imported")) == 8
    store.add([entry(8)])
    assert len(store.entries("imported")) == max(1, most * 9 // 10)
    assert entry(8) in store.entries("imported")


def test_damaged_files_are_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = TuningDatabase(tmp_path, tables=tmp_path / "none")
    store.put({problem(): decision()}, H200, here)
    path = store.files.path_of("measured", problem())
    data = path.read_bytes()
    choose = random.Random(0)
    damaged = [b"", data[:-1], data[:70], data + b" "]
    # Content with a valid checksum, written by something else.
    for text in (b"", b"5", b"{", b"[" * 100_000):
        damaged.append(results_folder.checksum(text) + b"\n" + text)
    for _ in range(30):
        place = choose.randrange(len(data))
        damaged.append(
            data[:place] + bytes([data[place] ^ 1 << choose.randrange(8)]) + data[place + 1 :]
        )
    for item in damaged:
        path.write_bytes(item)
        assert lookup_result(store) is None
    assert [message.split(" is damaged")[0] for message in caplog.messages] == [str(path)]
    store.put({problem(): decision()}, H200, here)
    assert lookup_result(store) == ("measured", 90.0)


def test_a_damaged_token_is_replaced(store: TuningDatabase) -> None:
    store.put({problem(): decision()}, H200, here)
    assert store.folder is not None
    (store.folder / "measured.token").write_bytes(b"\0\xff\xd8")
    damaged = store.generation(tuning=False)
    tuned = store.tune_missing([problem(1)], H200, lambda batch: {problem(1): decision()}, here)
    assert tuned == {problem(1): decision()}
    assert store.generation(tuning=False) != damaged


def test_unusable_folders_warn_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = TuningDatabase(tmp_path / "file" / "store", tables=tmp_path / "none")
    tuned = store.tune_missing([problem()], H200, lambda batch: {problem(): decision()}, here)
    assert tuned == {problem(): decision()}
    assert lookup_result(store) is None
    assert len(caplog.messages) == 1
    assert "GEMMs are tuned again" in caplog.messages[0]


def test_eight_processes_write_at_once(store: TuningDatabase) -> None:
    run_child("write", str(store.folder))
    assert len(store.entries("measured")) == 12 * 8


def test_killed_writers_leave_no_damage(store: TuningDatabase) -> None:
    assert store.folder is not None
    assert run_child("kill", store.folder, "25", "0") == "25\n"
    assert all(lookup_result(store, index) for index in range(5))
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


def test_other_files_in_the_folder_are_kept(store: TuningDatabase) -> None:
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
        # Evict at once.
        store.files._until_collected.clear()
    assert len(store.entries("measured")) == 1
    assert store.clear() == {"removed": 2, "left": 0}
    assert [their for their in theirs if not (store.folder / their).exists()] == []
