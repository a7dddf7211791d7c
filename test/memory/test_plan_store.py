"""Memory plans by cache key: stored, read again, and the checks of what is read."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from inductor_ext.cpp_wrapper.records import PackageRecord
from inductor_ext.memory import compiled_callables, plan_store
from test.support.memory_plans import SMALL, forget_plans


class TestParse:
    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"peak": "many"}, "peak is 'many', expected an integer"),
            ({"peak": True}, "peak is True, expected an integer"),
            ({"arenas": None}, "arenas is None, expected a list"),
            ({"storages": [{}]}, "storages[0] is {}, expected an object with 'name'"),
            ({"storages": [3]}, "storages[0] is 3, expected an object"),
            ({"arenas": []}, "storages[0].arena is 0, and there are 0"),
        ],
    )
    def test_bad_records_are_named(self, change: dict[str, Any], why: str) -> None:
        entry = json.loads(json.dumps(SMALL.as_json()))
        assert plan_store.parse(entry) == SMALL
        with pytest.raises(ValueError) as error:
            plan_store.parse({**entry, **change})
        assert str(error.value) == why

    def test_a_negative_lifetime_is_named(self) -> None:
        entry = json.loads(json.dumps(SMALL.as_json()))
        entry["storages"][2]["end"] = 1
        with pytest.raises(ValueError, match=r"storages\[2\] has a negative size or lifetime"):
            plan_store.parse(entry)


class TestStore:
    def test_plans_are_kept_by_key_and_read_again(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
    ) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        compiled_callables.begin_compile().add("fkey", [SMALL, PackageRecord("a", 1, 0.1)])
        expected = (dataclasses.replace(SMALL, cache_key="fkey"),)
        assert plan_store.load("fkey") == expected
        forget_plans()
        assert plan_store.load("fkey") == expected
        forget_plans()
        (path,) = tmp_path.rglob("fkey.json")
        path.write_text("[{}]")
        assert plan_store.load("fkey") is None
        assert plan_store.load("absent") is None

    def test_an_unwritable_folder_warns(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: pathlib.Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "inductor_ext").write_text("a file where the folder should be")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        for key in ("fa", "fb"):
            compiled_callables.begin_compile().add(key, [SMALL])
        (message,) = caplog.messages
        assert message.startswith("memory plans cannot be stored in ")
        assert plan_store.load("fb") == (dataclasses.replace(SMALL, cache_key="fb"),)
