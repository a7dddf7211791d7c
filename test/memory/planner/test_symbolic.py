"""Orders, expressions, their evaluation, and planning at run time.

`PLANNER_EXAMPLES=100000 python -m pytest test/memory/planner/test_symbolic.py -k "left_out or
stacking"` is the long run.
"""

from __future__ import annotations

import itertools
import pickle
import random
import threading

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.memory.planner import interval as problem
from inductor_ext.memory.planner import solver
from inductor_ext.memory.planner.interval import Interval
from inductor_ext.memory.planner.symbolic import Replanner, runtime_replanner, stacking
from inductor_ext.memory.planner.symbolic.algebra import Algebra
from inductor_ext.memory.planner.symbolic.evaluator import Align, ExpressionEvaluator
from inductor_ext.memory.planner.symbolic.stacking import (
    Stacking,
    choose_stacking,
    scaled_samples,
    stack_in_order,
)
from test.support.planner_examples import examples

S, T, U = (sympy.Symbol(name, integer=True, positive=True) for name in "stu")
UNKNOWN = sympy.Symbol("i0", integer=True)

LIFETIMES = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair))),
    max_size=14,
)


def live_together(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])


def test_only_reduced_lower_neighbours_are_kept() -> None:
    # All three live at once: the topmost needs to know of the middle one alone.
    assert stack_in_order([(0, 3)] * 3, [2, 0, 1]).below == ((2,), (0,), ())
    # The first and the last never meet, so that both carry the one in the middle.
    assert stack_in_order([(0, 2), (0, 4), (2, 4)], [0, 2, 1]).below == ((), (2, 0), ())


@examples(100)
@given(LIFETIMES, st.randoms(use_true_random=False))
def test_a_stacking_orders_what_is_live_at_once_and_nothing_more(
    lifetimes: list[tuple[int, int]], generator: random.Random
) -> None:
    order = list(range(len(lifetimes)))
    generator.shuffle(order)
    found = stack_in_order(lifetimes, order)
    assert found.unordered(lifetimes) is None
    for index, lower in enumerate(found.below):
        assert all(live_together(lifetimes[index], lifetimes[other]) for other in lower)
        # Reduced: without any one of the neighbours the order is not complete.
        for missing in lower:
            fewer = list(found.below)
            fewer[index] = tuple(other for other in lower if other != missing)
            assert Stacking(found.order, tuple(fewer)).unordered(lifetimes) is not None
    sizes = [generator.randrange(100) for _ in lifetimes]
    offsets, peak = found.offsets(sizes, [1] * len(sizes))
    intervals = [Interval(*life, size) for life, size in zip(lifetimes, sizes, strict=True)]
    problem.verify(intervals, offsets, peak)


def test_reducing_a_large_order_does_not_visit_all_pairs() -> None:
    # Every pair is live at once, 2 million of them, and one neighbour each is enough.
    found = stack_in_order([(0, 1)] * 2000, range(2000))
    assert found.below == ((), *((index,) for index in range(1999)))


def test_samples_scale_all_symbols_together_and_each_alone() -> None:
    assert [tuple(sample.values()) for sample in scaled_samples({S: 100, T: 3})] == [
        (100, 3),
        (25, 1),
        (400, 12),
        (10, 1),
        (1600, 48),
        (25, 3),
        (400, 3),
        (100, 1),
        (100, 12),
    ]
    many = {sympy.Symbol(f"x{i}"): 64 for i in range(50)}
    assert len(scaled_samples(many)) == 17
    assert scaled_samples({}) == [{}]


def sizes_of(algebra: Algebra, *expressions: object) -> list[object]:
    return [algebra.size(expression, 64) for expression in expressions]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([64 * S, 128 * S], "128*s"),
        ([64 * S, 64 * S + 64], "64*s + 64"),
        ([64 * S, 64 * T], "Max(64*s, 64*t)"),
        ([64 * S, 64 * T, 64 * T * (S + 1)], "Max(64*s, 64*s*t + 64*t)"),
        ([64 * S + 64 * U, 128 * U], "64*u + Max(64*s, 64*u)"),
        ([4 * S, 8 * S], "Align(8*s, 64)"),
        ([4 * S, 4 * S + 100], "Align(4*s + 100, 64)"),
        ([100, 64 * S], "Max(128, 64*s)"),
        ([100, 200], "256"),
        ([64 * UNKNOWN, 128 * UNKNOWN], "128*i0"),
        ([64 * UNKNOWN, 64 * UNKNOWN + 64 * S], "64*i0 + 64*s"),
        ([64 * UNKNOWN + 64, 64 * UNKNOWN + 128], "Max(64*i0 + 64, 64*i0 + 128)"),
        ([64 * S - 64, 64 * S], "Max(64*s, 64*s - 64)"),
    ],
)
def test_a_maximum_loses_what_is_never_the_largest(values: list[object], text: str) -> None:
    algebra = Algebra(values)
    found = algebra.maximum([algebra.size(value, 64) for value in values])
    assert str(algebra.expression(found)) == text


def test_a_maximum_of_maxima_is_one() -> None:
    algebra = Algebra([64 * S, 64 * T, 64 * U])
    s, t, u = (algebra.size(64 * symbol, 64) for symbol in (S, T, U))
    inner = algebra.maximum([s, t])
    assert str(algebra.expression(algebra.maximum([inner, u]))) == "Max(64*s, 64*t, 64*u)"
    for again in ([inner, s], [t, s], [inner, inner]):
        assert algebra.expression(algebra.maximum(again)) is algebra.expression(inner)


def test_a_visible_multiple_is_not_rounded() -> None:
    algebra = Algebra([4 * S])
    rounded = algebra.size(4 * S, 64)
    assert str(algebra.expression(rounded)) == "Align(4*s, 64)"
    assert algebra.align(rounded, 64) is rounded
    assert algebra.align(rounded, 16) is rounded
    assert str(algebra.expression(algebra.align(rounded, 256))) == "Align(Align(4*s, 64), 256)"
    assert str(algebra.expression(algebra.size(4 * S * T + 256 * T, 64))) == (
        "256*t + Align(4*s*t, 64)"
    )


def test_rounding_adds_to_what_is_rounded_already() -> None:
    # One that need not be aligned lies on one that is, and an aligned one on both.
    algebra = Algebra([4 * S])
    offsets, size = algebra.stack(stack_in_order([(0, 1)] * 3, range(3)), [4 * S] * 3, [64, 1, 64])
    assert [str(offset) for offset in offsets] == ["0", "Align(4*s, 64)", "2*Align(4*s, 64)"]
    assert str(size) == "3*Align(4*s, 64)"


FACTORS = st.sampled_from([0, 0, 0, 0, 1, 3, 4, 64, 100, 256])
POLYNOMIALS = st.builds(
    lambda a, b, c, d, e: a * S + b * T + c * S * T + d * U + e, *([FACTORS] * 5)
)
NUMBERS = st.sampled_from([0, 1, 2, 17, 63, 64, 1009, 2**40 + 1])


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 8),
            st.integers(1, 6),
            POLYNOMIALS,
            st.sampled_from([1, 16, 64, 64, 64, 256]),
        ),
        max_size=16,
    ),
    st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_what_is_left_out_of_an_expression_never_matters(
    buffers: list[tuple[int, int, sympy.Expr, int]],
    points: list[tuple[int, int, int]],
    generator: random.Random,
) -> None:
    lifetimes = [(start, start + length) for start, length, _, _ in buffers]
    sizes = [size for _, _, size, _ in buffers]
    alignments = [alignment for _, _, _, alignment in buffers]
    order = list(range(len(buffers)))
    generator.shuffle(order)
    stack = stack_in_order(lifetimes, order)
    algebra = Algebra(sizes)
    offsets, height = algebra.stack(stack, sizes, alignments)
    program = ExpressionEvaluator([height, *offsets], algebra.definitions)
    for point in points:
        values = dict(zip((S, T, U), point, strict=True))
        rounded = map(problem.round_up, ExpressionEvaluator(sizes)(values), alignments)
        expected_offsets, expected_height = stack.offsets(list(rounded), alignments)
        assert program(values) == [expected_height, *expected_offsets]


def test_a_long_maximum_is_given_a_name() -> None:
    names = [sympy.Symbol(f"x{i}", integer=True, positive=True) for i in range(30)]
    algebra = Algebra([4 * name for name in names], prefix="arena3")
    top = algebra.maximum([algebra.size(4 * name, 64) for name in names])
    assert str(algebra.expression(top)) == "arena3_part0"
    ((symbol, part),) = algebra.definitions
    assert (str(symbol), symbol.is_integer, len(part.args)) == ("arena3_part0", True, 30)
    assert algebra.used_definitions([algebra.expression(top) + 1]) == [symbol]
    assert algebra.used_definitions([names[0]]) == []


class Half(sympy.Function):  # type: ignore[misc]
    """A function that sympy knows nothing of, like those that Inductor adds."""

    @classmethod
    def eval(cls, value: sympy.Expr) -> sympy.Expr | None:
        return value // 2 if value.is_Integer else None


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (S, 7),
        (sympy.Integer(5), 5),
        (5, 5),
        (4 * S * T + 1, 85),
        (S**2 / 7, 7),
        (S * (S + 1) / 2, 28),
        (sympy.floor(S / 2) * 8, 24),
        (sympy.ceiling(S / 2) * 8, 32),
        (sympy.Mod(S, 4), 3),
        (sympy.Max(S, T, 4), 7),
        (sympy.Min(S, T), 3),
        (Align(S * T, 64), 64),
        (Half(S), 3),
        (sympy.Piecewise((S, S < T), (T, True)), 3),
    ],
)
def test_a_program_computes_what_sympy_does(expression: sympy.Expr, value: int) -> None:
    assert ExpressionEvaluator([expression])({S: 7, T: 3}) == [value]


def test_a_program_evaluates_definitions_first() -> None:
    a, b = sympy.symbols("a b", integer=True)
    program = ExpressionEvaluator([a + b], [(a, 2 * S), (b, a * T)])
    assert set(program.symbols) == {S, T}
    assert program({S: 7, T: 3}) == [14 + 42]


@pytest.mark.parametrize(
    ("expression", "values"), [(S / 2, {S: 7}), (S / T, {S: 7, T: 0}), (S, {}), (1 / S, {S: 0})]
)
def test_a_program_says_where_there_is_no_integer(
    expression: sympy.Expr, values: dict[sympy.Symbol, int]
) -> None:
    with pytest.raises(ValueError, match="no integer value"):
        ExpressionEvaluator([expression])(values)


def test_the_order_is_chosen_by_the_worst_sample() -> None:
    # At the hint all orders of these are as good; at the other sample only some are.
    generator = random.Random(5)
    lifetimes = [(i, i + generator.choice([2, 3, 5])) for i in range(24)]
    columns = [[64] * 24, [generator.choice([64, 128, 640, 6400]) for _ in range(24)]]
    choice = choose_stacking(lifetimes, columns, [64] * 24)
    assert choice.worst_ratio == 1.0
    assert choice.lower_bounds == tuple(
        problem.lower_bound(
            [Interval(*life, size) for life, size in zip(lifetimes, column, strict=True)]
        )
        for column in columns
    )
    for column, peak in zip(columns, choice.peaks, strict=True):
        offsets, height = choice.stacking.offsets(column, [64] * 24)
        intervals = [
            Interval(*life, size, 64) for life, size in zip(lifetimes, column, strict=True)
        ]
        problem.verify(intervals, offsets, height)
        assert height == peak


def test_a_joint_search_beats_the_best_of_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = random.Random(2)
    lifetimes = [(i, i + generator.choice([2, 3, 5, 20])) for i in range(40)]
    columns = [[generator.choice([1, 3, 17, 100]) * 64 for _ in range(40)] for _ in range(4)]
    found = choose_stacking(lifetimes, columns, [64] * 40)
    monkeypatch.setattr(stacking, "_MAX_FIT_WORK", 0)
    without = choose_stacking(lifetimes, columns, [64] * 40)
    assert found.worst_ratio < without.worst_ratio


def test_buffers_that_are_empty_at_the_hint_have_a_place() -> None:
    choice = choose_stacking([(0, 2)] * 3, [[0, 0, 0], [64, 128, 64]], [64] * 3)
    assert choice.stacking.unordered([(0, 2)] * 3) is None
    assert choice.peaks == (0, 256)


@pytest.fixture
def replanner() -> Replanner:
    return Replanner(starts=(0, 1, 2), ends=(2, 3, 4), alignments=(64, 64, 16), which=(0, 1, 0))


def test_a_replanner_plans_each_tuple_of_sizes_once(
    replanner: Replanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replanner((64, 1000))
    assert first == (1088, (1024, 0, 1024))
    assert replanner((640, 64))[0] == 704
    monkeypatch.setattr(solver, "solve", None)
    assert replanner((64, 1000)) is first


def test_a_replanner_is_rebuilt_from_its_repr(replanner: Replanner) -> None:
    for copy in (eval(repr(replanner)), pickle.loads(pickle.dumps(replanner))):
        assert copy == replanner
        assert copy((64, 1000)) == replanner((64, 1000))


def test_a_replanner_needs_no_more_than_a_known_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_above_the_other(intervals: list[Interval], **_: object) -> problem.Placement:
        offsets = [0, *itertools.accumulate(interval.rounded_size for interval in intervals)]
        bound = problem.lower_bound(intervals)
        return problem.Placement(tuple(offsets[:-1]), offsets[-1], bound, "stacked", 0)

    monkeypatch.setattr(solver, "solve", one_above_the_other)
    fields = {"starts": (0, 1, 2), "ends": (2, 3, 4), "alignments": (64,) * 3, "which": (0, 1, 0)}
    assert Replanner(**fields)((64, 128)) == (256, (0, 64, 192))
    assert Replanner(**fields, order=(1, 0, 2))((64, 128)) == (192, (128, 0, 128))


def test_a_replanner_forgets_the_oldest(replanner: Replanner) -> None:
    for size in range(runtime_replanner._MAX_CACHED + 10):
        replanner((size, 0))
    assert replanner.plan.cache_info().currsize == runtime_replanner._MAX_CACHED  # type: ignore[attr-defined]


def test_a_replanner_refuses_a_negative_size(replanner: Replanner) -> None:
    with pytest.raises(exc.BadIntervalError):
        replanner((64, -1))


def test_threads_share_a_replanner(replanner: Replanner) -> None:
    sizes = [(64 * a, 64 * b) for a, b in itertools.product(range(1, 8), repeat=2)]
    expected = [Replanner(**vars_of(replanner))(pair) for pair in sizes]
    results: list[list[object]] = []

    def work() -> None:
        results.append([replanner(pair) for pair in sizes])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def vars_of(replanner: Replanner) -> dict[str, tuple[int, ...]]:
    names = ("starts", "ends", "alignments", "which")
    return {name: getattr(replanner, name) for name in names}
