"""Arenas: which requests share one, and that every plan is valid for every size.

`PLANNER_EXAMPLES=100000 python -m pytest test/memory/planner/test_arenas.py -k any_size` is the
long run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.memory.planner import arenas as module
from inductor_ext.memory.planner import interval, solver
from inductor_ext.memory.planner.arena_plan import Arena, Member, Request, verify_arenas
from inductor_ext.memory.planner.arenas import make_replanner
from inductor_ext.memory.planner.symbolic.evaluator import ExpressionEvaluator
from test.support import hash_seeds
from test.support.planner_examples import examples
from test.support.planner_expressions import plan_arenas


def symbols(names: str) -> tuple[sympy.Symbol, ...]:
    return tuple(sympy.Symbol(name, integer=True, positive=True) for name in names.split())


S, B, T, U = symbols("s b t u")
HINTS = {S: 100, B: 4, T: 128, U: 37}


def hint(expression: sympy.Expr) -> int:
    return HINTS[expression]


def chain(widths: Sequence[int]) -> list[Request]:
    """A chain of matmuls: each result is used only by the next one."""
    return [Request(f"b{i}", i, i + 2, 4 * S * width) for i, width in enumerate(widths)]


def ragged(count: int) -> list[Request]:
    """A chain with skips whose widths have no common factor with any alignment."""
    return [
        Request(f"b{i}", i, i + 2 + 7 * (i % 3 == 0), 4 * S * (37 * i * i % 501 + 1))
        for i in range(count)
    ]


def attention(layers: int, width: int = 256, heads: int = 4) -> list[Request]:
    """Transformer layers that hold their scores, with terms of t and of t squared."""
    row = 4 * B * T * width
    scores = 4 * B * heads * T * T
    requests = []
    for layer in range(layers):
        lives = {
            "norm": (0, 4, row),
            "q": (1, 5, row),
            "k": (2, 5, row),
            "v": (3, 7, row),
            "scores": (4, 6, scores),
            "sums": (5, 6, 4 * B * heads * T),
            "weights": (5, 7, scores),
            "mixed": (6, 8, row),
            "residual": (7, 12, row),
            "up": (8, 10, 4 * row),
            "gelu": (9, 11, 4 * row),
            "down": (10, 12, row),
            "out": (11, 20, row),
        }
        requests += [
            Request(f"{name}{layer}", 12 * layer + start, 12 * layer + end, size)
            for name, (start, end, size) in lives.items()
        ]
    return requests


def numbers(arena: Arena, values: Mapping[sympy.Symbol, int]) -> tuple[int, list[int], list[int]]:
    """The arena's size, the members' offsets and their sizes, in bytes."""
    size, *offsets = ExpressionEvaluator(
        [arena.size, *(member.offset for member in arena.members)], arena.definitions
    )(values)
    return size, offsets, ExpressionEvaluator([m.request.size for m in arena.members])(values)


def ratio(arena: Arena, values: Mapping[sympy.Symbol, int]) -> float:
    size, _, sizes = numbers(arena, values)
    intervals = [m.request.interval(s) for m, s in zip(arena.members, sizes, strict=True)]
    return size / interval.lower_bound(intervals)


def printed(arena: Arena) -> list[str]:
    return [str(arena.size), *(str(member.offset) for member in arena.members)]


def test_a_chain_of_matmuls_is_one_arena_of_one_term() -> None:
    (arena,) = plan_arenas(chain([128, 256, 64, 512]), hint=hint)
    assert printed(arena) == ["2304*s", "1024*s", "0", "2048*s", "0"]
    assert (arena.start, arena.end) == (0, 5)
    assert (arena.peak_hint, arena.lower_bound) == (230400, 230400)
    assert arena.worst_ratio == 1.0
    assert arena.definitions == ()
    assert not arena.is_static


def test_sizes_are_rounded_unless_they_are_multiples() -> None:
    requests = [Request("a", 0, 2, 4 * S), Request("b", 1, 3, 4 * T), Request("c", 2, 4, 10)]
    (arena,) = plan_arenas(requests, hint=hint)
    assert printed(arena) == [
        "Align(4*t, 64) + Max(64, Align(4*s, 64))",
        "Align(4*t, 64)",
        "0",
        "Align(4*t, 64)",
    ]


def test_equal_offsets_are_one_expression() -> None:
    requests = [Request("a", 0, 9, 4 * S)] + [Request(f"b{i}", i, i + 1, 64 * T) for i in range(4)]
    (arena,) = plan_arenas(requests, hint=hint)
    offsets = [member.offset for member in arena.members[1:]]
    assert all(offset is offsets[0] for offset in offsets)


def test_the_callers_functions_build_the_expressions() -> None:
    class Largest(sympy.Function):
        @classmethod
        def eval(cls, *values: sympy.Expr) -> sympy.Expr | None:
            return max(values) if all(value.is_Integer for value in values) else None

    requests = [Request("a", 0, 2, 4 * S), Request("b", 1, 3, 4 * T), Request("c", 2, 4, 4 * U)]
    (arena,) = plan_arenas(
        requests,
        hint=hint,
        make_max=lambda values: Largest(*values),
        make_align=lambda value, alignment: alignment * sympy.ceiling(value / alignment),
    )
    assert "Largest(" in str(arena.size)
    assert "64*ceiling(" in str(arena.size)


def test_an_arena_ends_where_nothing_is_live() -> None:
    requests = [Request("a", 0, 2, 64 * S), Request("b", 2, 3, 64 * S), Request("c", 1, 2, 64 * T)]
    first, second = plan_arenas(requests, hint=hint)
    assert [(a.start, a.end, str(a.size)) for a in (first, second)] == [
        (0, 2, "64*s + 64*t"),
        (2, 3, "64*s"),
    ]


def test_only_requests_of_one_key_share_an_arena() -> None:
    requests = [
        Request("a", 0, 3, 64 * S, key=("cuda", 0)),
        Request("b", 1, 2, 64 * S, key="cpu"),
        Request("c", 2, 4, 64, key=("cuda", 0)),
    ]
    cuda, cpu = plan_arenas(requests, hint=hint)
    assert (cuda.key, [m.request.name for m in cuda.members]) == (("cuda", 0), ["a", "c"])
    assert (cpu.key, [m.request.name for m in cpu.members]) == ("cpu", ["b"])


def test_integers_are_left_to_the_solver() -> None:
    requests = [Request(f"b{i}", i, i + 2 + i % 5, 100 * (i * i % 17 + 1)) for i in range(30)]
    (arena,) = plan_arenas(requests, hint=hint)
    placement = solver.solve([request.interval(request.constant or 0) for request in requests])
    assert tuple(member.offset for member in arena.members) == placement.offsets
    assert (arena.size, arena.lower_bound) == (placement.peak, placement.lower_bound)
    assert arena.is_static


def test_sizes_without_symbols_are_integers() -> None:
    (arena,) = plan_arenas([Request("a", 0, 2, sympy.Integer(100))], hint=hint)
    assert (arena.size, arena.is_static) == (128, True)


def test_constant_and_symbolic_sizes_share_an_arena() -> None:
    requests = [
        Request("weights", 0, 9, 1000),
        Request("a", 1, 3, 64 * S),
        Request("b", 2, 4, 4096),
        Request("nothing", 2, 4, 0),
        Request("c", 3, 5, 64 * S),
    ]
    (arena,) = plan_arenas(requests, hint=hint)
    assert arena.worst_ratio == 1.0
    assert str(arena.size) == "64*s + 5120"
    assert arena.members[3].offset == 0


def test_an_empty_live_range_is_live_at_its_write() -> None:
    requests = [Request("a", 0, 3, 64), Request("dead", 1, 1, 256), Request("b", 1, 3, 64)]
    (arena,) = plan_arenas(requests, hint=hint)
    assert arena.size == 64 + 256 + 64


def test_no_arena_is_older_than_the_symbols_of_its_size() -> None:
    requests = [
        Request("a", 0, 9, 64 * S),
        Request("late", 3, 6, 64 * U, known_from=2),
        Request("also late", 4, 9, 64 * U + 64, known_from=3),
        Request("later", 5, 8, 64 * T, known_from=4),
    ]
    arenas = plan_arenas(requests, hint=hint)
    assert [(a.start, [m.request.name for m in a.members]) for a in arenas] == [
        (0, ["a"]),
        (3, ["late", "also late"]),
        (5, ["later"]),
    ]


def test_buffers_live_across_a_symbol_go_where_cheapest() -> None:
    # "early" is freed before the late request. Together with "b" it would stay allocated.
    requests = [
        Request("early", 0, 3, 6400 * S),
        Request("b", 2, 9, 64 * S),
        Request("late", 2, 6, 64 * U, known_from=2),
    ]
    arenas = plan_arenas(requests, hint=hint)
    assert [(a.start, a.end, [m.request.name for m in a.members]) for a in arenas] == [
        (0, 3, ["early"]),
        (2, 9, ["b", "late"]),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"size": -1}, "size"),
        ({"end": -1}, "end"),
        ({"alignment": 48}, "alignment"),
        ({"size": 4 * S, "known_from": 1}, "known_from"),
        ({"size": 4 * S - 1000}, "size at the hint"),
        ({"size": S / 3}, "size at the hint"),
    ],
)
def test_invalid_requests_are_named(fields: dict[str, object], field: str) -> None:
    good = {"name": "buf7", "start": 0, "end": 2, "size": 8}
    with pytest.raises(exc.BadIntervalError, match="buf7") as raised:
        plan_arenas([Request(**{**good, **fields})], hint=hint)  # type: ignore[arg-type]
    assert raised.value.fields["field"] == field


@pytest.mark.parametrize(
    "requests",
    [chain([37 * i * i % 501 + 1 for i in range(40)]), ragged(40), attention(1), attention(6)],
    ids=["chain", "ragged", "attention", "attention of 6 layers"],
)
def test_real_graphs_stay_near_the_bound_for_other_sizes(
    requests: list[Request],
) -> None:
    arenas = plan_arenas(requests, hint=hint)
    worst = max(
        ratio(arena, {symbol: max(1, int(value * scale)) for symbol, value in HINTS.items()})
        for arena in arenas
        for scale in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16)
    )
    assert worst <= 1.05
    assert all(arena.peak_hint == arena.lower_bound for arena in arenas)


def test_expressions_do_not_grow_with_the_depth_of_the_stack() -> None:
    # No two sizes are comparable, so that no argument of a maximum can be dropped.
    names = symbols(" ".join(f"x{i}" for i in range(60)))
    requests = [Request(f"b{i}", i, i + 4, 4 * name) for i, name in enumerate(names)]
    (arena,) = plan_arenas(requests, hint=lambda symbol: 10 + int(str(symbol)[1:]))
    texts = [*printed(arena), *(str(part) for _, part in arena.definitions)]
    assert arena.definitions
    assert max(map(len, texts)) < 2000
    known = set(names)
    for symbol, part in arena.definitions:
        assert part.free_symbols <= known
        known.add(symbol)


SIZES = st.one_of(
    st.integers(0, 4096),
    st.builds(
        lambda factor, names, rest: factor * sympy.Mul(*names) + rest,
        st.sampled_from([1, 3, 4, 64, 100, 4096]),
        st.lists(st.sampled_from([S, T, U]), min_size=1, max_size=3),
        st.sampled_from([0, 0, 1, 64, 4 * S, 100 * T * U]),
    ),
    st.builds(
        lambda symbol, by: 4 * sympy.floor((symbol + 1) / by) * (symbol + 3),
        st.sampled_from([S, T]),
        st.integers(2, 5),
    ),
)


@st.composite
def requests_of(draw: Callable[..., object]) -> list[Request]:
    """Requests of every kind, some with sizes that become known late."""
    requests = []
    for index in range(draw(st.integers(0, 12))):  # type: ignore[call-overload]
        start = draw(st.integers(0, 12))
        size = draw(SIZES)
        requests.append(
            Request(
                f"b{index}",
                start,  # type: ignore[arg-type]
                start + draw(st.integers(0, 8)),  # type: ignore[operator]
                size,  # type: ignore[arg-type]
                alignment=draw(st.sampled_from([1, 16, 64, 64, 256])),  # type: ignore[arg-type]
                key=draw(st.sampled_from(["cpu", "cpu", ("cuda", 1)])),  # type: ignore[arg-type]
                known_from=draw(st.sampled_from([None, None, max(0, start - 2), start])),  # type: ignore[arg-type, operator]
            )
        )
    return requests


VALUES = st.sampled_from([0, 1, 2, 3, 7, 63, 64, 65, 1009, 2**20 + 1, 2**31])


@examples(60)
@given(
    requests_of(),
    st.lists(st.fixed_dictionaries({S: VALUES, T: VALUES, U: VALUES}), min_size=1, max_size=4),
)
def test_a_plan_holds_for_any_size(
    requests: list[Request], samples: list[dict[sympy.Symbol, int]]
) -> None:
    arenas = plan_arenas(requests, hint=hint)
    assert sorted(m.request.name for a in arenas for m in a.members) == sorted(
        request.name for request in requests
    )
    for arena, values in itertools.product(arenas, samples):
        size, offsets, sizes = numbers(arena, values)
        for (a, at, bytes_a), (b, place, bytes_b) in itertools.combinations(
            zip(arena.members, offsets, sizes, strict=True), 2
        ):
            together = max(a.request.start, b.request.start) < min(a.request.end, b.request.end)
            if together and bytes_a and bytes_b:
                assert at + bytes_a <= place or place + bytes_b <= at
        for member, offset, bytes_ in zip(arena.members, offsets, sizes, strict=True):
            request = member.request
            assert 0 <= offset <= offset + bytes_ <= size
            assert offset % request.alignment == 0
            assert request.key == arena.key
            assert arena.start <= request.start <= request.end <= arena.end
            assert not request.is_unknown_at(arena.start)
    for arena in arenas:
        assert arena.peak_hint == numbers(arena, HINTS)[0]
        assert arena.lower_bound <= arena.peak_hint
        assert arena.peak_hint <= arena.lower_bound * arena.worst_ratio


@examples(20)
@given(requests_of())
def test_planning_is_deterministic(requests: list[Request]) -> None:
    assert plan_arenas(requests, hint=hint) == plan_arenas(requests, hint=hint)


def test_a_plan_does_not_depend_on_the_hash_seed() -> None:
    code = """
import sympy
from inductor_ext.memory.planner.arena_plan import Request
from test.support.planner_expressions import plan_arenas
names = sympy.symbols("s t u", integer=True, positive=True)
sizes = [4 * names[i % 3] * (37 * i * i % 501 + 1) for i in range(30)]
requests = [Request(f"b{i}", i, i + 2 + 7 * (i % 3 == 0), size) for i, size in enumerate(sizes)]
print(plan_arenas(requests, hint={name: 100 for name in names}.__getitem__))
"""
    (output,) = set(hash_seeds.outputs(code, ("1", "2")))
    assert "Max(" in output


def broken(arena: Arena, index: int, **fields: object) -> Arena:
    """The arena with one member changed."""
    members = list(arena.members)
    members[index] = dataclasses.replace(members[index], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(arena, members=tuple(members))


def test_the_verifier_finds_every_error() -> None:
    (arena,) = plan_arenas(chain([128, 256, 64]), hint=hint)
    samples = [{S: 7}, {S: 100}]
    verify_arenas([arena], samples)
    request = arena.members[1].request

    def change(**fields: object) -> Request:
        return dataclasses.replace(request, **fields)  # type: ignore[arg-type]

    wrong = {
        "overlap": dataclasses.replace(
            broken(arena, 1, offset=arena.members[0].offset), size=4096 * S
        ),
        "too large": dataclasses.replace(arena, size=64 * S),
        "no multiple of its alignment": broken(arena, 1, offset=S),
        "is live in": dataclasses.replace(arena, end=2),
        "has the key": broken(arena, 1, request=change(key="cuda")),
        "known from step 1": broken(arena, 1, request=change(known_from=1)),
        "neither is stacked": dataclasses.replace(arena, below=((), (), ())),
        "order has a cycle": dataclasses.replace(arena, below=((1,), (0,), (1,))),
        "has no stacking order": dataclasses.replace(arena, below=()),
        "is not a size symbol": dataclasses.replace(arena, size=64 * T * S),
        "no integer value": dataclasses.replace(arena, size=4096 * S + S / 3),
    }
    for why, plan in wrong.items():
        with pytest.raises(exc.PlanError, match=why):
            verify_arenas([plan], samples)
    with pytest.raises(exc.PlanError, match="has no value"):
        verify_arenas([arena], [{T: 1}])


def test_a_member_must_rest_on_what_is_below_at_every_sample() -> None:
    # They do not overlap at the sample, but not in the stacking order of the arena.
    requests = [Request("a", 0, 2, 64 * S), Request("b", 0, 2, 64 * T)]
    arena = Arena(
        key=None,
        start=0,
        end=2,
        size=64 * S + 64 * T,
        members=(Member(requests[0], 64 * T), Member(requests[1], 0)),
        lower_bound=1,
        peak_hint=1,
        below=((), (0,)),
    )
    with pytest.raises(exc.PlanError, match="'b' is not above 'a'"):
        verify_arenas([arena], [HINTS])
    verify_arenas([dataclasses.replace(arena, below=((1,), ()))], [HINTS])


def test_every_plan_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def upside_down(*arguments: object, **fields: object) -> Arena:
        arena = make(*arguments, **fields)  # type: ignore[arg-type]
        return broken(arena, 0, offset=arena.members[1].offset)

    make = module.make_arena
    monkeypatch.setattr(module, "make_arena", upside_down)
    with pytest.raises(exc.PlanError):
        plan_arenas(chain([64, 128]), hint=hint)


def test_an_arena_can_be_planned_again_for_other_sizes() -> None:
    (arena,) = plan_arenas(attention(1), hint=hint)
    plan, sizes = make_replanner(arena)
    values = {B: 3, T: 1000}
    size, offsets = plan.plan(tuple(ExpressionEvaluator(sizes)(values)))
    again, _, member_sizes = numbers(arena, values)
    intervals = [m.request.interval(s) for m, s in zip(arena.members, member_sizes, strict=True)]
    interval.verify(intervals, offsets, size)
    assert len(sizes) < len(arena.members)
    assert size <= again
    assert eval(repr(plan), {"Replanner": type(plan)}) == plan
