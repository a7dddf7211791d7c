"""Stores the memory plans of compiled graphs as JSON files, by cache key.

A plan is made once, when its graph is compiled. It is queried later, often in a process that loaded
the graph from a cache and planned nothing. So the plans of a graph are written next to Inductor's
cache entry: under the same key, in Inductor's cache folder. If a file cannot be written, the
extension warns once; the compile does not fail.
"""

from __future__ import annotations

import collections
import json
import os
import threading

from inductor_ext import events
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.storage import json_codec
from inductor_ext.storage.atomic import atomic_write

_MAX_CACHED = 512
"""Maximum number of graphs whose plans are in memory; other plans are read from their files."""

_lock = threading.Lock()
_plans: collections.OrderedDict[str, tuple[MemoryPlanRecord, ...]] = collections.OrderedDict()


def store(key: str, records: tuple[MemoryPlanRecord, ...]) -> None:
    """Keep the plans of a graph in memory and in a file, under its key in the FX graph cache."""
    _remember(key, records)
    _write(key, records)


def _path(key: str) -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return os.path.join(cache_dir(), "inductor_ext", "memory_plans", key[:3], f"{key}.json")


def _remember(key: str, records: tuple[MemoryPlanRecord, ...]) -> None:
    with _lock:
        _plans[key] = records
        _plans.move_to_end(key)
        while len(_plans) > _MAX_CACHED:
            _plans.popitem(last=False)


def _write(key: str, records: tuple[MemoryPlanRecord, ...]) -> None:
    path = _path(key)
    text = json.dumps([record.as_json() for record in records])
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with (
            atomic_write(path) as temporary,
            open(temporary, "w", encoding="utf-8") as file,
        ):
            file.write(text)
    except OSError as error:
        folder = os.path.dirname(os.path.dirname(path))
        events.warn_once(
            f"memory_plans:{folder}",
            f"memory plans cannot be stored in {folder} ({error}); memory_report will not work for "
            f"graphs that other processes load from the cache",
        )


def load(key: str) -> tuple[MemoryPlanRecord, ...] | None:
    """Return the plans stored under a key of the FX graph cache; None if none can be read."""
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key]
    try:
        with open(_path(key), encoding="utf-8") as file:
            records = tuple(parse(entry) for entry in json.load(file))
    except (OSError, ValueError):
        return None
    _remember(key, records)
    return records


def parse(entry: object) -> MemoryPlanRecord:
    """Build a record from the JSON object that `as_json` returned.

    Raises:
        ValueError: a field is missing or has the wrong type; the text names it.
    """
    record: MemoryPlanRecord = json_codec.decode(
        # Records of other releases may have other fields.
        MemoryPlanRecord,
        entry,
        allow_unknown=True,
        allow_missing=True,
    )
    for index, storage in enumerate(record.storages):
        where = f"storages[{index}]"
        if storage.arena is not None and not 0 <= storage.arena < len(record.arenas):
            raise ValueError(
                f"{where}.arena is {storage.arena}, and there are {len(record.arenas)}"
            )
        if (storage.arena is None) != (storage.offset is None):
            raise ValueError(f"{where} has one of arena and offset without the other")
    for name in ("storages", "arenas"):
        for index, part in enumerate(getattr(record, name)):
            if not 0 <= part.start <= part.end or part.bytes < 0:
                raise ValueError(f"{name}[{index}] has a negative size or lifetime")
    return record
