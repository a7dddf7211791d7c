"""Matmuls with measured times of cuBLAS, and random cases of the cost model."""

from __future__ import annotations

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from inductor_ext.templates.device import Device
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.search_space import candidates
from test.support.gemm_strategies import devices, problems

MEASURED = [
    # Sizes, cuBLAS on an H200 in bfloat16 with the layouts of nn.Linear, roofline; microseconds.
    ((1, 4096, 4096), 18.7, 7.9),
    ((16, 14336, 4096), 40.7, 27.8),
    ((64, 4096, 14336), 44.6, 28.2),
    ((128, 8192, 8192), 45.6, 32),
    ((2048, 4096, 4096), 94, 86),
    ((4096, 14336, 4096), 688, 601),
    ((4096, 4096, 14336), 669, 601),
    ((8192, 8192, 8192), 1594, 1374),
    ((1000, 1000, 1000), 10.8, 2.5),
    ((4096, 4095, 4096), 205, 172),
    ((256, 256, 65536), 31.0, 16),
]

Case = tuple[GemmProblem, GemmConfig, Device]


def linear(m: int, n: int, k: int, **rest: Any) -> GemmProblem:
    return GemmProblem.contiguous("mm", m, n, k, **rest)


@st.composite
def cases(draw: st.DrawFn, **options: Any) -> Case:
    """A problem, one of its candidates and a device."""
    problem = draw(problems(**options))
    on = draw(devices())
    result = list(candidates(problem, on))
    assume(result)
    return problem, draw(st.sampled_from(result)), on
