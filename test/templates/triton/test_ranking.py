"""Ranking of Triton configurations, against measured kernels and cuBLAS."""

from __future__ import annotations

import json
import math
import pathlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gemm.fit_cost_model import Measurement, compute_error
from inductor_ext.templates.device import Device
from inductor_ext.templates.fused_ops import Dequant, Epilogue, Prologue, RowNorm
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.constraints import legal
from inductor_ext.templates.triton.cost_model import DEFAULT, predict
from inductor_ext.templates.triton.ranking import prologue_pays, rank
from inductor_ext.templates.triton.search_space import candidates
from inductor_ext.templates.triton.templates import TEMPLATES
from test.support import hash_seeds
from test.support.cost_model_cases import MEASURED, linear
from test.support.gemm_strategies import device, devices, examples, problems
from test.support.problem_examples import A100, H200


class TestRank:
    @given(problems(), devices(), st.integers(1, 8))
    @examples(60)
    def test_ranking_is_sorted_legal_and_unique(
        self, problem: GemmProblem, on: Device, limit: int
    ) -> None:
        results = rank(problem, on, limit)
        space = list(candidates(problem, on))
        assert len(results) <= limit
        assert bool(results) == bool(space)
        assert {config for config, _ in results} <= set(space)
        assert len({config for config, _ in results}) == len(results)
        totals = [prediction.total for _, prediction in results]
        assert totals == sorted(totals)
        for config, prediction in results:
            assert prediction == predict(problem, config, on)
        if results:
            best = min(
                predict(problem, config, on).total for config in space if not config.warp_specialize
            )
            # The best may take seconds to compile.
            assert best <= totals[0] <= totals[-1] <= 1.5 * best

    def test_short_k_starts_with_tiles_that_share_an_sm(self) -> None:
        """The fastest of 43 that were measured on an H100: 14.1 us, 17.7 without such tiles."""
        problem = linear(4096, 768, 768)
        (best, _), *_ = rank(problem, H200)
        assert (best.template, best.block_m, best.block_n, best.num_stages) == (
            "cp_async",
            64,
            128,
            3,
        )
        assert best.occupancy(problem, H200) == 3

    @pytest.mark.parametrize("sizes", [sizes for sizes, _, _ in MEASURED])
    def test_ranked_configurations_are_diverse(self, sizes: tuple[int, int, int]) -> None:
        ranked = rank(linear(*sizes), H200)
        results = [config for config, _ in ranked]
        assert len(results) == 6
        # One more if a second template has no other good configuration.
        assert max(Counter((c.block_m, c.block_n) for c in results).values()) <= 5
        worth = {
            config.template
            for config in candidates(linear(*sizes), H200)
            if predict(linear(*sizes), config, H200).total <= 1.4 * ranked[0][1].total
            and not config.warp_specialize
        }
        assert len({config.template for config in results}) >= min(2, len(worth))
        assert len({replace(config, num_stages=1) for config in results}) == 6

    def test_equivalent_candidates_are_kept_once(self) -> None:
        results = rank(linear(16, 4096, 14336), H200, limit=100)
        details = Counter(
            (c.template, c.swap_ab, c.block_m, c.block_n, f"{p.total:.3e}") for c, p in results
        )
        assert max(details.values()) == 1

    def test_warp_specialized_kernels_are_not_ranked(self) -> None:
        problem = linear(2048, 4096, 4096)
        assert "persistent_tma_ws" in {c.template for c in candidates(problem, H200)}
        results = rank(problem, H200, limit=1000)
        assert "persistent_tma_ws" not in {c.template for c, _ in results}

    @pytest.mark.parametrize(
        ("sizes", "kept"),
        [
            ((2048, 8192, 1024), False),
            ((2048, 10240, 1280), False),
            # Few iterations, and more than ptxas unrolls.
            ((2048, 8192, 512), True),
            ((2048, 8192, 4096), True),
            # Rows that TMA cannot load.
            ((2048, 8192, 1028), True),
        ],
    )
    def test_slow_compiles_are_replaced_by_tma(
        self, sizes: tuple[int, int, int], kept: bool
    ) -> None:
        results = [config for config, _ in rank(linear(*sizes), H200, limit=1000)]
        large = [c for c in results if (c.block_m, c.block_n, c.num_warps) == (128, 256, 8)]
        assert large
        assert any(not config.tma for config in large) == kept

    def test_slow_compiles_are_replaced_by_more_warps(self) -> None:
        """8 warps instead of 4 are predicted to be as fast, and compile in a fourth."""
        results = [config for config, _ in rank(linear(2048, 1024, 1024), H200, limit=1000)]
        threads = [c for c in results if (c.block_m, c.block_n) == (128, 128) and not c.tma]
        assert {config.num_warps for config in threads if config.split_k == 1} == {8}

    def test_the_number_per_template_is_limited(self) -> None:
        for problem in (linear(1, 4096, 4096), linear(8192, 8192, 8192)):
            results = rank(problem, H200, limit=6, per_template=1)
            assert max(Counter(config.template for config, _ in results).values()) == 1
            assert results[0] == rank(problem, H200)[0]

    def test_a_shorter_list_begins_like_a_longer_one(self) -> None:
        problem = linear(2048, 4096, 4096)
        assert rank(problem, H200, limit=1) == rank(problem, H200)[:1]

    def test_results_are_the_same_in_every_process(self) -> None:
        code = (
            "import json; from inductor_ext.templates.triton.ranking import rank; "
            "from test.support.cost_model_cases import linear; "
            "from test.support.problem_examples import H200; "
            "print(json.dumps([c.to_json() for c, _ in rank(linear(64, 4096, 4096), H200)]))"
        )
        expected = [config.to_json() for config, _ in rank(linear(64, 4096, 4096), H200)]
        for output in hash_seeds.outputs(code, ("0", "4242")):
            assert json.loads(output) == expected


class Measured:
    """Kernels of one problem that were timed on an H200 with torch 2.11 and Triton 3.6.0.

    Operands in DRAM, medians; of the 28 to 118 that were timed, the fastest twelve and those that
    `rank` names. Those of 256 rows without a gate, and of 1024x1024x1024, were timed with loops
    whose addresses stay, others before.
    """

    FIELDS = (
        "template",
        "block_m",
        "block_n",
        "block_k",
        "stages",
        "warps",
        "group_m",
        "split_k",
    )
    DEFAULTS = GemmConfig("cp_async", 1, 1, 1, 1, 1).to_json()

    def __init__(self, record: dict[str, Any]) -> None:
        self.problem = GemmProblem.from_json(record["problem"])
        self.name = " ".join(
            str(item)
            for item in (
                self.problem.operation,
                f"{self.problem.m}x{self.problem.n}x{self.problem.k}",
                "gated" if self.problem.epilogue.gated else "",
                "normalized" if self.problem.prologue else "",
                f"parts={len(self.problem.parts)}" if self.problem.parts else "",
            )
            if item
        )
        self.microseconds: dict[GemmConfig, float] = {}
        for microseconds, *values in record["rows"]:
            fields = dict(zip(self.FIELDS, values, strict=False))
            fields.update(dict.fromkeys(values[len(self.FIELDS) :], True))
            config = GemmConfig.from_json(self.DEFAULTS | fields)
            if config.gathers(self.problem):
                # The same code for any number of stages.
                config = replace(config, num_stages=2)
                if not legal(self.problem, config, H200):
                    # A spilling kernel was the fastest here, and among the slowest elsewhere.
                    continue
            self.microseconds.setdefault(config, microseconds)

    def best_of(self, ranked: Iterable[GemmConfig]) -> float:
        """What was not timed is taken for slow. Of most problems none was timed that adds up sums
        in the launch or stores by TMA, which is taken to be as fast as without.
        """
        new = {"fused_split_k": False, "tma_store": False}
        known = self.microseconds
        return min(known.get(item, known.get(replace(item, **new), math.inf)) for item in ranked)


RECORDS = pathlib.Path(__file__).parents[2] / "data" / "gemm_h200.json"
TIMED = [
    timed
    for record in json.loads(RECORDS.read_text())
    # Copying kernels, which take a fifth of the time for 4096 odd rows, were not timed.
    if rank((timed := Measured(record)).problem, H200)[0][0].align_operands is None
]

FARTHER = {
    # Of elements loaded one by one, tiles of one size take from 1 to 5 milliseconds by what Triton
    # keeps in registers, of which the model knows nothing.
    "mm 1x28672x4096 gated normalized parts=2": 0.96,
}
"""Cases in which the best of six is not within 3 % of the best of all, with their ratio."""


class TestKernels:
    """The ranked kernels against the best measured kernel."""

    @pytest.mark.parametrize("timed", TIMED, ids=lambda timed: timed.name)
    def test_the_best_of_six_is_near_the_best_of_all(self, timed: Measured) -> None:
        result = timed.best_of(config for config, _ in rank(timed.problem, H200))
        best = min(timed.microseconds.values())
        assert best / result >= FARTHER.get(timed.name, 0.97)

    def test_the_best_of_six_is_near_the_best_on_average(self) -> None:
        shares = []
        for timed in TIMED:
            result = timed.best_of(config for config, _ in rank(timed.problem, H200))
            shares.append(min(timed.microseconds.values()) / result)
        assert sum(shares) / len(shares) >= 0.99

    def test_fast_kernels_are_in_the_search_space(self) -> None:
        for timed in TIMED:
            space = set(candidates(timed.problem, H200))
            assert set(timed.microseconds) <= space, timed.name

    def test_fast_kernels_are_predicted_well(self) -> None:
        """The error for the fastest twelve of each problem shows gross errors of a term."""
        known = [
            Measurement(timed.problem, config, H200, microseconds)
            for timed in TIMED
            for config, microseconds in list(timed.microseconds.items())[:12]
        ]
        assert math.sqrt(compute_error(known, DEFAULT)) < 0.15


class TestMeasured:
    """Predictions against times of cuBLAS, which no template must reach or can be far below."""

    @pytest.mark.parametrize(("sizes", "cublas", "floor"), MEASURED)
    def test_the_best_prediction_is_near_cublas(
        self, sizes: tuple[int, int, int], cublas: float, floor: float
    ) -> None:
        best = rank(linear(*sizes), H200)[0][1].total
        assert floor <= best <= 1.6 * cublas
        # The model is closer than that. One row by 4096 x 4096 takes extension kernels 12.7
        # microseconds, two thirds of cuBLAS's time.
        assert 0.67 * cublas <= best <= 1.15 * cublas

    @pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
    @pytest.mark.parametrize(
        ("n", "k"), [(4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (1280, 8192)]
    )
    @pytest.mark.parametrize("on", [H200, A100], ids=lambda entry: entry.name)
    def test_decoding_takes_split_k_or_gemv(self, m: int, n: int, k: int, on: Device) -> None:
        assert rank(linear(m, n, k), on)[0][0].template in ("splitk", "gemv")

    def test_one_row_lets_gemv_be_measured(self) -> None:
        assert "gemv" in {config.template for config, _ in rank(linear(1, 4096, 4096), H200)}

    @pytest.mark.parametrize(
        "sizes",
        [(8192, 8192, 8192), (4096, 14336, 4096), (4096, 4096, 14336), (2048, 4096, 4096)],
    )
    def test_large_matmuls_use_persistent_tma_with_large_tiles(
        self, sizes: tuple[int, int, int]
    ) -> None:
        config, _ = rank(linear(*sizes), H200)[0]
        assert TEMPLATES[config.template].tma == "always"
        assert config.block_m >= 128
        assert config.block_n >= 128

    def test_a_long_k_beside_few_tiles_is_split(self) -> None:
        config, _ = rank(linear(256, 256, 65536), H200)[0]
        assert config.template == "splitk"
        assert config.split_k >= 16

    def test_a_wave_tail_takes_tiles_that_leave_less_of_one(self) -> None:
        def idle(config: GemmConfig, problem: GemmProblem) -> float:
            """Fraction of the SMs' time without a tile."""
            waves = config.units(problem) / H200.sms
            return 1 - waves / math.ceil(waves)

        problem = linear(2176, 4096, 4096)
        before, _ = rank(linear(2048, 4096, 4096), H200)[0]
        # 117 microseconds; 122 with stream-K on large tiles, where no SM is idle.
        best, _ = rank(problem, H200)[0]
        assert best.block_m * best.block_n < before.block_m * before.block_n
        assert idle(best, problem) < idle(before, problem) - 0.05

    @pytest.mark.parametrize(
        ("problem", "stock", "floor"),
        [
            # Inductor's max-autotune on an H200, and the sustained roofline.
            (GemmProblem.contiguous("mixed", 1, 14336, 4096, b_dtype="int8"), 84, 13.8),
            (GemmProblem.contiguous("mixed", 16, 14336, 4096, b_dtype="int8"), 84, 13.9),
            (GemmProblem.contiguous("mixed", 2048, 14336, 4096, b_dtype="int8"), 412, 300),
            (
                linear(16, 28672, 4096, parts=(14336,) * 2, epilogue=Epilogue((), 8, gated=True)),
                72,
                55,
            ),
            (
                linear(2048, 28672, 4096, parts=(14336,) * 2, epilogue=Epilogue((), 8, gated=True)),
                722,
                601,
            ),
            (linear(16, 6144, 4096, parts=(4096, 1024, 1024)), 37.2, 11.8),
            (linear(2048, 6144, 4096, parts=(4096, 1024, 1024)), 149, 128),
            (linear(16, 4096, 4096, prologue=Prologue(RowNorm("rms", 1))), 21.5, 7.9),
            (GemmProblem.contiguous("bmm", 512, 512, 64, batch=64, layouts="rr"), 16.6, 9.9),
            (GemmProblem.contiguous("bmm", 2048, 128, 2048, batch=32, layouts="rr"), 87, 71),
            (GemmProblem.contiguous("scaled", 4096, 4096, 4096, "float8_e4m3fn"), 101, 85),
        ],
    )
    def test_fused_and_mixed_times_are_below_inductors(
        self, problem: GemmProblem, stock: float, floor: float
    ) -> None:
        assert floor <= rank(problem, H200)[0][1].total <= 1.15 * stock


PROLOGUES = {
    "rms": Prologue(RowNorm("rms", 1)),
    "layer": Prologue(RowNorm("layer", 2)),
    "int8": Prologue(dequant=Dequant("column")),
    "uint4": Prologue(dequant=Dequant("group", 128)),
    "rms int8": Prologue(RowNorm("rms", 1), Dequant("column")),
}


@pytest.mark.parametrize("on", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "pays"),
    [
        # Relative to Inductor, on an H100: 0.75, 0.80, 0.80 and 0.98 with biases, 1.16, 1.27,
        # 1.68, 1.88, 2.12.
        ("rms", 1, 4096, 4096, True),
        ("rms", 16, 4096, 4096, True),
        ("layer", 1, 4096, 4096, True),
        ("layer", 16, 4096, 4096, False),
        ("rms", 64, 4096, 4096, False),
        ("rms", 128, 6144, 4096, False),
        ("rms", 2048, 4096, 4096, False),
        ("layer", 2048, 4096, 4096, False),
        ("layer", 12608, 2304, 768, False),
        # 0.23, 0.18, 1.35, 1.36, 1.39, 1.39.
        ("int8", 16, 14336, 4096, True),
        ("uint4", 16, 14336, 4096, True),
        ("int8", 1024, 14336, 4096, False),
        ("uint4", 1024, 14336, 4096, False),
        ("int8", 2048, 14336, 4096, False),
        ("uint4", 2048, 14336, 4096, False),
        # Relative to separate kernels of matmul and norm: 0.96 and 1.51.
        ("rms int8", 1, 6144, 4096, True),
        ("rms int8", 16, 6144, 4096, False),
    ],
)
def test_prologues_are_tried_where_rows_are_few(
    kind: str, m: int, n: int, k: int, pays: bool, on: str
) -> None:
    prologue = PROLOGUES[kind]
    of: dict[str, Any] = {"prologue": prologue}
    if prologue.dequant:
        of["b_dtype"] = kind.split()[-1]
    if kind == "rms int8":
        of["parts"] = (4096, 1024, 1024)
    problem = GemmProblem.contiguous("mixed" if prologue.dequant else "mm", m, n, k, **of)
    assert prologue_pays(problem, device(on)) == pays


@given(problems(), devices())
@examples(60)
def test_problems_without_prologue_are_always_tried(problem: GemmProblem, on: Device) -> None:
    result = prologue_pays(problem, on)
    assert result or problem.prologue is not None
