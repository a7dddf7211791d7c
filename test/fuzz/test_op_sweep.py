"""Wherever Inductor (default) agrees with eager mode on an operator, so does inductor_ext.

The fixed sample of `op_sweep_data` is judged batch by batch; batches do not depend on each other.
The other tests show that the sweep detects failures: what its comparisons distinguish, and the
verdicts on a wrong lowering, a failing one and a dying process. `op_sweep_judge` has the method.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.harness import results as results_format
from inductor_ext import lowerings
from test.fuzz import op_sweep, op_sweep_judge
from test.fuzz.op_sweep_judge import Case, Outcome, Result, Run, Status, Verdict

MINIMUM_OPERATORS = 250


def _batch_id(batch: list[Case]) -> str:
    last = f"..{batch[-1].operator}" if len(batch) > 1 else ""
    return f"{batch[0].dtype}-{batch[0].operator}{last}"


@pytest.mark.slow  # several minutes in total
@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, marks=pytest.mark.xdist_group(_batch_id(batch)))
        for batch in op_sweep_judge.batches(op_sweep_judge.sample_cases())
    ],
    ids=_batch_id,
)
def test_agrees_wherever_inductor_does(batch: list[Case]) -> None:
    present = op_sweep_judge.supported(batch)
    for case in sorted(set(batch) - set(present)):
        warnings.warn(f"absent from torch {torch.__version__}: {case}", stacklevel=1)
    results = op_sweep_judge.judge(present)
    for result in op_sweep.unlisted_stock_failures(results):
        warnings.warn(f"new failure of Inductor: {result.case}: {result.why}", stacklevel=1)
    # All operators of the sample are compiled: one that eager mode rejects or Dynamo does not
    # capture would test nothing.
    allowed = {Verdict.AGREE, Verdict.STOCK_DISAGREES, Verdict.STOCK_FAILS}
    assert [result for result in results if result.verdict not in allowed] == []


def test_sample_is_large_enough_on_this_torch() -> None:
    present = op_sweep_judge.supported(op_sweep_judge.sample_cases())
    floating = {case.operator for case in present if case.dtype == "float32"}
    others = {case.operator for case in present if case.dtype in ("int64", "bool")}
    assert len(floating) >= MINIMUM_OPERATORS
    # There is a second dtype if the installed torch supports one.
    entries = op_sweep_judge.operators()
    for name in floating - others:
        assert not {torch.int64, torch.bool} & entries[name].supported_dtypes("cpu"), name


def test_each_batch_has_one_dtype_and_no_case_is_lost() -> None:
    batches = op_sweep_judge.batches(op_sweep_judge.sample_cases())
    assert all(len({case.dtype for case in batch}) == 1 for batch in batches)
    cases = [case for batch in batches for case in batch]
    assert sorted(cases) == sorted(op_sweep_judge.sample_cases())
    assert len(set(cases)) == len(cases)


# --- what a comparison distinguishes ------------------------------------------------------------


def _run(*results: object, arguments: tuple[object, ...] = ()) -> Run:
    return Run(list(arguments), list(results))


ONE = torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    ("expected", "actual", "why"),
    [
        (_run(ONE), _run(ONE + 1e-3), "not close"),
        (_run(ONE), _run(ONE.double()), "dtype"),
        (_run(ONE), _run(ONE[:1]), "shape"),
        (_run(ONE), _run(ONE.to_sparse()), "layout"),
        (_run(ONE.sum()), _run(3.0), "float instead of Tensor"),
        (_run(3), _run(4), "not equal"),
        (_run(None), _run(3), "int instead of NoneType"),
        (_run("same"), _run("other"), "other instead of same"),
        (_run((ONE,)), _run([ONE]), "nested differently"),
        (_run(ONE, ONE), _run(ONE), "nested differently"),
        (_run(arguments=(ONE,)), _run(arguments=(ONE + 1,)), "not close"),
        (_run(torch.tensor([1])), _run(torch.tensor([2])), "not equal"),
        (_run(torch.tensor([float("nan")])), _run(torch.tensor([0.0])), "not close"),
    ],
)
def test_disagreement_names_the_difference(expected: Run, actual: Run, why: str) -> None:
    assert why in op_sweep_judge.disagreement(expected, actual)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (_run(ONE), _run(ONE + 1e-6)),
        (_run(torch.tensor([float("nan")])), _run(torch.tensor([float("nan")]))),
        (_run(float("nan")), _run(float("nan"))),
        (_run(None, "text"), _run(None, "text")),
    ],
)
def test_agreement(expected: Run, actual: Run) -> None:
    assert op_sweep_judge.disagreement(expected, actual) == ""


def test_uninitialized_memory_is_compared_by_metadata_alone() -> None:
    assert op_sweep_judge.disagreement(_run(ONE), _run(ONE + 1), values=False) == ""
    assert "shape" in op_sweep_judge.disagreement(_run(ONE), _run(ONE[:1]), values=False)


def test_layouts_distinguish_strides_and_aliases() -> None:
    base = torch.zeros(2, 3)
    assert op_sweep_judge.layouts(_run(base.T, arguments=(ONE, base))) == [((1, 3), 1)]
    assert op_sweep_judge.layouts(_run(base.T.contiguous(), arguments=(ONE, base))) == [
        ((2, 1), None)
    ]
    # The stride of a dimension of size one is arbitrary.
    assert op_sweep_judge.layouts(_run(base[:1])) == [((0, 1), None)]


def test_copies_keep_strides_and_shared_memory() -> None:
    base = torch.arange(12.0).view(3, 4)
    original = [base, base[1:, ::2], base.expand(2, 3, 4), base.T]
    copies = op_sweep_judge.clone_arguments(original)
    for left, right in zip(original, copies, strict=True):
        torch.testing.assert_close(left, right, check_stride=True)
    copies[0].zero_()
    assert all(not copy.any() for copy in copies)
    assert base.sum() == 66


AGREES = Outcome(Status.AGREES)
ELSEWHERE = Outcome(Status.AGREES, other_layout=frozenset({0}))
DISAGREES = Outcome(Status.DISAGREES, "values")
FAILS = Outcome(Status.FAILS, "raised")
NOT_CAPTURED = Outcome(Status.NOT_CAPTURED)


@pytest.mark.parametrize(
    ("stock", "ours", "verdict"),
    [
        (AGREES, AGREES, Verdict.AGREE),
        (AGREES, DISAGREES, Verdict.OURS_DISAGREES),
        (AGREES, FAILS, Verdict.OURS_FAILS),
        (AGREES, NOT_CAPTURED, Verdict.OURS_FAILS),
        (AGREES, ELSEWHERE, Verdict.OURS_DISAGREES),
        (ELSEWHERE, ELSEWHERE, Verdict.AGREE),
        (ELSEWHERE, AGREES, Verdict.AGREE),
        (DISAGREES, AGREES, Verdict.STOCK_DISAGREES),
        (DISAGREES, FAILS, Verdict.STOCK_DISAGREES),
        (FAILS, FAILS, Verdict.STOCK_FAILS),
        (NOT_CAPTURED, NOT_CAPTURED, Verdict.NOT_CAPTURED),
        (NOT_CAPTURED, FAILS, Verdict.OURS_FAILS),
    ],
)
def test_verdict(stock: Outcome, ours: Outcome, verdict: Verdict) -> None:
    assert op_sweep_judge.verdict_of(stock, ours)[0] is verdict


# --- what the sweep notices ---------------------------------------------------------------------


@pytest.fixture
def sin_is_ours() -> Iterator[None]:
    """Free the registration of a lowering for sin afterwards."""
    yield
    lowerings.unregister_lowering(torch.ops.aten.sin.default)


@pytest.mark.usefixtures("sin_is_ours")
def test_wrong_lowering_is_found_and_pinned_on_its_operator() -> None:
    @lowerings.register_lowering(torch.ops.aten.sin.default)
    def sin(stock, x):
        from torch._inductor.lowering import lowerings as table

        return table[torch.ops.aten.cos.default](x)

    results = op_sweep_judge.judge([Case("cos", "float32"), Case("sin", "float32")])
    assert [result.verdict for result in results] == [Verdict.AGREE, Verdict.OURS_DISAGREES]
    assert "not close" in results[1].why


@pytest.mark.usefixtures("sin_is_ours")
def test_failing_lowering_is_found() -> None:
    @lowerings.register_lowering(torch.ops.aten.sin.default)
    def sin(stock, x):
        raise ValueError("no sine today")

    (result,) = op_sweep_judge.judge([Case("sin", "float32")])
    assert (result.verdict, result.stock) == (Verdict.OURS_FAILS, Status.AGREES)
    assert "no sine today" in result.why


@pytest.mark.slow
def test_death_of_a_worker_is_the_verdict_of_one_case(tmp_path: Path) -> None:
    # A case that the parent would have filtered out makes the worker raise and end.
    cases = [Case("no such operator", "float32"), Case("neg", "float32")]
    results: dict[Case, Result] = {}

    def on_results(judged: list[Result]) -> None:
        results.update((result.case, result) for result in judged)

    limits = op_sweep.Limits(jobs=1, samples=1, memory_bytes=8 * 2**30, timeout_s=300)
    op_sweep.sweep(cases, limits, os.fspath(tmp_path / "log"), on_results)
    assert results[cases[0]].verdict is Verdict.EAGER_FAILS
    assert results[cases[0]].why == "the process ended with exit code 1"
    assert results[cases[1]].verdict is Verdict.AGREE


# --- what is written ----------------------------------------------------------------------------

RESULTS = [
    Result(Case("add", "float32"), Verdict.AGREE, "", Status.AGREES, Status.AGREES),
    Result(Case("mul", "float32"), Verdict.STOCK_FAILS, "boom", Status.FAILS, Status.AGREES),
    Result(Case("tan", "bool"), Verdict.EAGER_FAILS, "no"),
]


def test_journal_continues_after_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    op_sweep.Journal(path, 3, restart=False).add(RESULTS)
    path.write_text(path.read_text()[:-10])
    reopened = op_sweep.Journal(path, 3, restart=False)
    assert list(reopened.results.values()) == RESULTS[:2]
    reopened.add(RESULTS[2:])
    assert list(op_sweep.Journal(path, 3, restart=False).results.values()) == RESULTS


@pytest.mark.parametrize(("samples", "restart"), [(4, False), (3, True)])
def test_journal_of_another_sweep_is_not_used(tmp_path: Path, samples: int, restart: bool) -> None:
    path = tmp_path / "journal"
    op_sweep.Journal(path, 3, restart=False).add(RESULTS)
    assert op_sweep.Journal(path, samples, restart=restart).results == {}


def test_rows_count_verdicts_and_name_every_exception() -> None:
    rows = {(row["case"], row["metric"]): row for row in op_sweep.rows(RESULTS)}
    assert rows["all", "agree"]["ours"] == 1
    assert rows["all", "stock_fails"]["ours"] == 1
    assert rows["all", "ours_fails"]["ours"] == 0
    counts = rows["float32", "agrees with eager"]
    assert (counts["ours"], counts["stock"], counts["eager"]) == (2, 1, 2)
    assert rows["mul[float32]", "agrees with eager"]["note"] == "stock_fails: boom"
    assert rows["tan[bool]", "agrees with eager"]["ours"] is None
    assert rows["tan[bool]", "agrees with eager"]["eager"] == 0
    assert ("add[float32]", "agrees with eager") not in rows


def test_rows_follow_the_schema() -> None:
    header = results_format.collect_header("op-sweep", "python -m test.fuzz.op_sweep --all")
    results_format.validate({**header, "rows": op_sweep.rows(RESULTS)})


def test_reasons_hold_no_paths_and_no_addresses() -> None:
    error = RuntimeError("in /some/where/kernel.cpp:12 at 0x7f0123456789\nsecond line")
    assert op_sweep_judge.reason(error) == "RuntimeError: in kernel.cpp:12 at 0x..."


def test_committed_result_has_no_failure_of_the_extension() -> None:
    files = sorted(results_format.RESULTS.glob("op-sweep/*.json"))
    assert files, "run python -m test.fuzz.op_sweep --all"
    for file in files:
        rows = results_format.read(file)["rows"]
        counts = {row["metric"]: row["ours"] for row in rows if row["case"] == "all"}
        assert counts["ours_disagrees"] == counts["ours_fails"] == 0
        assert counts["agree"] > 1000
