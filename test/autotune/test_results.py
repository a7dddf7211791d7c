"""Tuning results and tables: JSON, merging, and invalid files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.autotune.decision import Timing
from inductor_ext.autotune.results import (
    Environment,
    TuningResult,
    merge_results,
    read_table,
    write_table,
)
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from test.support.children.tuning import H200, HERE, entry
from test.support.gemm_strategies import configs, examples, problems
from test.support.tuning_results import CHECKOUT


@given(problems(), configs(), st.floats(1e-3, 1e9), st.integers(0, 2**32))
@examples(60)
def test_results_round_trip_through_json(
    problem: GemmProblem, config: GemmConfig, microseconds: float, measured: int
) -> None:
    timings = (Timing(None, 3.5), Timing(config, microseconds), Timing(config, None, "no"))
    result = TuningResult(problem, HERE, config, timings, measured, "2.13.0")
    assert TuningResult.from_json(json.loads(result.line)) == result
    assert result.decision("cache").microseconds(config) == microseconds


ENTRIES = st.builds(
    lambda index, us, triton, measured: entry(
        index, us, dataclasses.replace(HERE, triton=triton), measured=measured
    ),
    st.integers(0, 2),
    st.sampled_from((80.0, 90.0)),
    st.sampled_from(("3.6.0", "3.7.1")),
    st.integers(1, 3),
)
TABLES = st.lists(ENTRIES, max_size=8)


@given(TABLES, TABLES, TABLES)
@examples(200)
def test_merging_keeps_the_newest_of_each_problem(
    a: list[TuningResult], b: list[TuningResult], c: list[TuningResult]
) -> None:
    whole = merge_results([*a, *b, *c])
    assert whole == merge_results([*c, *b, *a]) == merge_results([*merge_results([*a, *b]), *c])
    assert whole == merge_results([*a, *merge_results([*b, *c])]) == merge_results(whole)
    kept = {(case.problem, case.environment): case for case in whole}
    for case in (*a, *b, *c):
        assert kept[case.problem, case.environment].measured >= case.measured
    assert set(whole) <= {*a, *b, *c}


def test_a_table_has_one_result_per_line(tmp_path: Path) -> None:
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
def test_invalid_tables_are_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(exc.BadTuningFileError) as caught:
        read_table(tmp_path / "table.json")
    assert why in str(caught.value)
    assert len(str(caught.value)) < 600


@given(st.data())
@examples(150)
def test_other_json_is_refused_or_read_unchanged(data: st.DataObject) -> None:
    """Replace one value of a result at random."""
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


def test_unreadable_and_unwritable_tables_are_errors(tmp_path: Path) -> None:
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


def test_the_current_environment_is_complete() -> None:
    import torch

    here = Environment.of(H200, "mm")
    assert (here.device, here.capability, here.sms) == ("NVIDIA H200", (9, 0), 132)
    assert here.cuda == torch.version.cuda
    assert here.differences(here) == ()


def test_shipped_tables_are_sorted() -> None:
    folder = CHECKOUT / "inductor_ext" / "autotune" / "tables"
    for path in folder.glob("*.json"):
        assert read_table(path) == merge_results(read_table(path))
