"""Wherever Inductor (default) agrees with eager mode on an operator, so does inductor_ext.

The fixed sample of `op_sweep_data` is judged batch by batch; batches do not depend on each other.
The other tests show that the sweep detects failures: what its comparisons distinguish, and the
verdicts on a wrong lowering, a failing one and a dying process. `op_sweep_judge` has the method.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import results as results_format
from inductor_ext import lowerings
from test.fuzz import (
    op_sweep,
    op_sweep_cases,
    op_sweep_compare,
    op_sweep_judge,
    op_sweep_results,
    op_sweep_ways,
)
from test.fuzz.op_sweep_cases import Case
from test.fuzz.op_sweep_compare import Run
from test.fuzz.op_sweep_judge import OURS, STOCK, Judge, Result, Verdict
from test.fuzz.op_sweep_ways import Outcome, Status

MINIMUM_OPERATORS = 250


def _batch_id(batch: list[Case]) -> str:
    last = f"..{batch[-1].operator}" if len(batch) > 1 else ""
    return f"{batch[0].dtype}-{batch[0].operator}{last}"


@pytest.mark.slow  # several minutes in total
@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(batch, marks=pytest.mark.xdist_group(_batch_id(batch)))
        for batch in op_sweep_cases.batches(op_sweep_cases.sample_cases())
    ],
    ids=_batch_id,
)
def test_agrees_wherever_inductor_does(batch: list[Case]) -> None:
    present = op_sweep_cases.supported(batch)
    for case in sorted(set(batch) - set(present)):
        warnings.warn(f"absent from torch {torch.__version__}: {case}", stacklevel=1)
    results = Judge().judge(present)
    for result in op_sweep.unlisted_failures(results):
        warnings.warn(f"new failure of both: {result.case}: {result.why}", stacklevel=1)
    # All operators of the sample are compiled: one that eager mode rejects or Dynamo does not
    # capture would test nothing.
    allowed = {Verdict.AGREE, Verdict.ABOVE_STOCK, Verdict.BOTH_FAIL}
    assert [result for result in results if result.verdict not in allowed] == []


def test_sample_is_large_enough_on_this_torch() -> None:
    present = op_sweep_cases.supported(op_sweep_cases.sample_cases())
    floating = {case.operator for case in present if case.dtype == "float32"}
    others = {case.operator for case in present if case.dtype in ("int64", "bool")}
    assert len(floating) >= MINIMUM_OPERATORS
    # There is a second dtype if the installed torch supports one.
    entries = op_sweep_cases.operators()
    for name in floating - others:
        assert not {torch.int64, torch.bool} & entries[name].supported_dtypes("cpu"), name


def test_each_batch_has_one_dtype_and_no_case_is_lost() -> None:
    batches = op_sweep_cases.batches(op_sweep_cases.sample_cases())
    assert all(len({case.dtype for case in batch}) == 1 for batch in batches)
    cases = [case for batch in batches for case in batch]
    assert sorted(cases) == sorted(op_sweep_cases.sample_cases())
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
    assert why in op_sweep_compare.disagreement(expected, actual)


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
    assert op_sweep_compare.disagreement(expected, actual) == ""


@pytest.mark.parametrize(
    ("actual", "exact", "agrees"),
    [
        (ONE + 4e-4, ONE + 3e-4, True),  # nearer than eager mode
        (ONE - 2e-4, ONE + 3e-4, True),  # not much farther
        (ONE - 2e-3, ONE + 3e-4, False),
        (ONE + 1, ONE + 1, False),  # eager mode computes another function
        ((ONE + 4e-4).double(), ONE + 3e-4, False),
        (ONE + torch.tensor([0, float("nan")]), ONE + 3e-4, False),
    ],
)
def test_errors_are_compared_with_those_of_eager_mode(
    actual: torch.Tensor, exact: torch.Tensor, agrees: bool
) -> None:
    why = op_sweep_compare.disagreement(
        _run(ONE), _run(actual), run_exactly=lambda: _run(exact.double())
    )
    assert (why == "") is agrees


def test_double_precision_runs_the_same_calls() -> None:
    with op_sweep_ways.settings():
        prepared = op_sweep_cases.prepare(Case("mul", "bfloat16", backward=True))
    assert not isinstance(prepared, str)
    assert prepared.exact is not None
    for half, double in zip(prepared.expected.leaves(), prepared.exact.leaves(), strict=True):
        if isinstance(half, torch.Tensor):
            assert double.dtype is torch.float64
            torch.testing.assert_close(half.double(), double, rtol=1e-2, atol=1e-2)


def test_uninitialized_memory_is_compared_by_metadata_alone() -> None:
    assert op_sweep_compare.disagreement(_run(ONE), _run(ONE + 1), values=False) == ""
    assert "shape" in op_sweep_compare.disagreement(_run(ONE), _run(ONE[:1]), values=False)


def test_layouts_distinguish_strides_and_aliases() -> None:
    base = torch.zeros(2, 3)
    assert op_sweep_compare.layouts(_run(base.T, arguments=(ONE, base))) == [((1, 3), 1)]
    assert op_sweep_compare.layouts(_run(base.T.contiguous(), arguments=(ONE, base))) == [
        ((2, 1), None)
    ]
    # The stride of a dimension of size one is arbitrary.
    assert op_sweep_compare.layouts(_run(base[:1])) == [((0, 1), None)]


def test_copies_keep_strides_and_shared_memory() -> None:
    base = torch.arange(12.0).view(3, 4)
    original = [base, base[1:, ::2], base.expand(2, 3, 4), base.T]
    copies = op_sweep_cases.clone_arguments(original)
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
        (None, AGREES, Verdict.AGREE),
        (AGREES, AGREES, Verdict.AGREE),
        (AGREES, DISAGREES, Verdict.BELOW_STOCK),
        (AGREES, FAILS, Verdict.BELOW_STOCK),
        (AGREES, NOT_CAPTURED, Verdict.BELOW_STOCK),
        (AGREES, ELSEWHERE, Verdict.BELOW_STOCK),
        (ELSEWHERE, ELSEWHERE, Verdict.AGREE),
        (ELSEWHERE, AGREES, Verdict.AGREE),
        (DISAGREES, AGREES, Verdict.ABOVE_STOCK),
        (FAILS, AGREES, Verdict.ABOVE_STOCK),
        (DISAGREES, FAILS, Verdict.BOTH_FAIL),
        (FAILS, FAILS, Verdict.BOTH_FAIL),
        (NOT_CAPTURED, NOT_CAPTURED, Verdict.NOT_CAPTURED),
        (NOT_CAPTURED, AGREES, Verdict.AGREE),
        (NOT_CAPTURED, FAILS, Verdict.BELOW_STOCK),
    ],
)
def test_verdict(stock: Outcome | None, ours: Outcome, verdict: Verdict) -> None:
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

    results = Judge().judge([Case("cos", "float32"), Case("sin", "float32")])
    assert [result.verdict for result in results] == [Verdict.AGREE, Verdict.BELOW_STOCK]
    assert [result.stock for result in results] == [None, Status.AGREES]
    assert "not close" in results[1].why


@pytest.mark.usefixtures("sin_is_ours")
def test_failing_lowering_is_found() -> None:
    @lowerings.register_lowering(torch.ops.aten.sin.default)
    def sin(stock, x):
        raise ValueError("no sine today")

    (result,) = Judge().judge([Case("sin", "float32")])
    assert (result.verdict, result.stock) == (Verdict.BELOW_STOCK, Status.AGREES)
    assert "no sine today" in result.why


def test_failing_stock_is_found_only_if_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(backend: str, *args: Any, **kwargs: Any) -> list[Outcome]:
        if backend == STOCK:
            raise RuntimeError("not today")
        return [AGREES]

    monkeypatch.setattr(op_sweep_judge, "compiled_outcomes", fail)
    case = Case("sin", "float32")
    (result,) = Judge().judge([case])
    assert result == Result(case, Verdict.AGREE, "", None, Status.AGREES)
    (result,) = Judge(always_stock=True).judge([case])
    why = "RuntimeError: not today"
    assert result == Result(case, Verdict.ABOVE_STOCK, why, Status.FAILS, Status.AGREES)


def test_gradients_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("mul", "float32", backward=True)
    with op_sweep_ways.settings():
        prepared = op_sweep_cases.prepare(case)
        assert not isinstance(prepared, str)
        other = op_sweep_cases.run(
            lambda arguments: [(a * b).detach() + 0 * a for (a, b), _ in arguments],
            prepared.calls,
            backward=True,
        )
    left, right = prepared.expected, other
    torch.testing.assert_close(left.results, right.results)
    assert "not close" in op_sweep_compare.disagreement(left, right)


@pytest.mark.slow
def test_package_of_all_sources_agrees() -> None:
    cases = [
        Case("sin", "float32", "package"),
        Case("cond.simple", "float32", "package", source="hop_db"),
        Case("NumpyCubeCustomOp", "float32", "package", source="custom_op_db"),
    ]
    results = Judge().judge(cases)
    assert [result.verdict for result in results] == [Verdict.AGREE] * len(cases), results


def test_crash_is_repeated_until_both_backends_are_known() -> None:
    two = op_sweep.Task((Case("sin", "float32"), Case("tan", "float32")))
    assert op_sweep._divide(two, OURS, "died") == [op_sweep.Task((c,)) for c in two.cases]
    one = op_sweep.Task(two.cases[:1])
    (again,) = op_sweep._divide(one, OURS, "died")
    assert dict(again.known) == {OURS: Outcome(Status.FAILS, "died")}
    result = op_sweep._divide(again, STOCK, "died too")
    assert isinstance(result, Result)
    assert (result.verdict, result.why) == (Verdict.BOTH_FAIL, "died")


def _judge_or_die(task: op_sweep.Task, announce: Callable[[str], None]) -> list[Result]:
    announce(STOCK if task.known else OURS)
    if any(case.operator == "fatal" for case in task.cases):
        os._exit(3)
    return [Result(case, Verdict.AGREE, "", None, Status.AGREES) for case in task.cases]


@pytest.mark.slow
def test_death_of_a_worker_is_the_verdict_of_one_case(tmp_path: Path) -> None:
    cases = [Case("fatal", "float32"), Case("neg", "float32")]
    results: dict[Case, Result] = {}

    def on_results(judged: list[Result]) -> None:
        results.update((result.case, result) for result in judged)

    limits = op_sweep.Limits(jobs=1, memory_bytes=8 * 2**30, timeout_s=300)
    op_sweep.sweep(cases, _judge_or_die, limits, os.fspath(tmp_path / "log"), on_results)
    assert results[cases[1]].verdict is Verdict.AGREE
    assert results[cases[0]].why == "the process ended with exit code 3"
    # The stub ends the process again when Inductor (default) is asked.
    assert results[cases[0]].verdict is Verdict.BOTH_FAIL


# --- what is written ----------------------------------------------------------------------------

RESULTS = [
    Result(Case("add", "float32"), Verdict.AGREE, "", None, Status.AGREES),
    Result(Case("mul", "float32"), Verdict.ABOVE_STOCK, "boom", Status.FAILS, Status.AGREES),
    Result(Case("tan", "bool", "package"), Verdict.EAGER_FAILS, "no"),
    Result(Case("sin", "float32", backward=True), Verdict.AGREE, "", Status.AGREES, Status.AGREES),
]


def _open_journal(path: Path, samples: int = 3, **options: bool) -> op_sweep_results.Journal:
    return op_sweep_results.Journal(
        path, samples, **{"always_stock": False, "restart": False, **options}
    )


def test_journal_continues_after_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _open_journal(path).add(RESULTS)
    path.write_text(path.read_text()[:-10])
    reopened = _open_journal(path)
    assert list(reopened.results.values()) == RESULTS[:3]
    reopened.add(RESULTS[3:])
    assert list(_open_journal(path).results.values()) == RESULTS


@pytest.mark.parametrize(
    ("samples", "options"), [(4, {}), (3, {"restart": True}), (3, {"always_stock": True})]
)
def test_journal_of_another_sweep_is_not_used(
    tmp_path: Path, samples: int, options: dict[str, bool]
) -> None:
    path = tmp_path / "journal"
    _open_journal(path).add(RESULTS)
    assert _open_journal(path, samples, **options).results == {}


def test_rows_count_verdicts_and_name_every_exception() -> None:
    chosen = [*(result.case for result in RESULTS), Case("atan", "float32")]
    rows = {
        (r["case"], r["metric"]): r for r in op_sweep_results.make_rows(RESULTS, chosen, "1a2b")
    }
    counts = rows["op_db float32 compile forward", "agree"]
    assert counts["ours"] == 1
    assert counts["note"] == (
        "commit 1a2b; Inductor (default) ran on 1 of 2 cases; 1 more were not judged"
    )
    assert rows["op_db float32 compile forward", "above_stock"]["ours"] == 1
    assert rows["op_db float32 compile backward", "agree"]["ours"] == 1
    assert rows["op_db bool package forward", "agree"]["ours"] == 0
    exception = rows["mul[op_db float32 compile forward]", "agrees with eager"]
    assert (exception["ours"], exception["stock"], exception["eager"]) == (1, 0, 1)
    assert exception["note"] == "above_stock: boom"
    exception = rows["tan[op_db bool package forward]", "agrees with eager"]
    assert (exception["ours"], exception["eager"]) == (None, 0)
    assert ("add[op_db float32 compile forward]", "agrees with eager") not in rows


def test_results_of_other_groups_are_kept(tmp_path: Path) -> None:
    header = results_format.collect_header("op-sweep", "python -m test.fuzz.op_sweep --all")
    write = op_sweep_results.write
    write(tmp_path, header, op_sweep_results.make_rows(RESULTS))
    worse = Result(Case("tan", "bool", "package"), Verdict.BELOW_STOCK, "", Status.AGREES)
    path = write(tmp_path, header, op_sweep_results.make_rows([worse]))
    rows = {(row["case"], row["metric"]): row["ours"] for row in results_format.read(path)["rows"]}
    totals = {metric: count for (case, metric), count in rows.items() if case == "all"}
    assert totals == {
        "agree": 2,
        "above_stock": 1,
        "below_stock": 1,
        "both_fail": 0,
        "eager_fails": 0,
        "not_captured": 0,
    }
    assert rows["op_db bool package forward", "eager_fails"] == 0
    assert ("mul[op_db float32 compile forward]", "agrees with eager") in rows


def test_reasons_hold_no_paths_and_no_addresses() -> None:
    error = RuntimeError("in /some/where/kernel.cpp:12 at 0x7f0123456789\nsecond line")
    assert op_sweep_compare.reason(error) == "RuntimeError: in kernel.cpp:12 at 0x..."


def test_committed_result_is_nowhere_below_inductor() -> None:
    files = sorted(results_format.RESULTS.glob("op-sweep/*.json"))
    assert files, "run python -m test.fuzz.op_sweep --all"
    for file in files:
        rows = results_format.read(file)["rows"]
        counts = {row["metric"]: row["ours"] for row in rows if row["case"] == "all"}
        assert counts["below_stock"] == 0
        assert counts["agree"] > 1000
