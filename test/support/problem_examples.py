"""Problems and configurations that several tests of templates use."""

from __future__ import annotations

import json
from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from test.support.gemm_strategies import device

H200 = device("NVIDIA H200")
A100 = device("NVIDIA A100-SXM4-80GB")
L4 = device("NVIDIA L4")
LINEAR = GemmProblem.contiguous("mm", 4096, 14336, 4096)
DECODE = GemmProblem.contiguous("mm", 1, 4096, 4096)
INT8 = GemmProblem.contiguous("mixed", 16, 14336, 4096, b_dtype="int8")
INT4 = GemmProblem.contiguous("mixed", 16, 14336, 4096, b_dtype="int4")
TILE = GemmConfig("persistent_tma", 128, 256, 64, 3, 8, tma=True, flatten=True)
STATIONARY = GemmConfig("stationary", 16, 112, 2048, 1, 8, split_k=2, fused_split_k=True)


def read_again(record: Any) -> Any:
    return type(record).from_json(json.loads(json.dumps(record.to_json())))


ODD = GemmProblem.contiguous("mm", 4096, 4096, 4095)
HUGE = GemmProblem.contiguous("mm", 1 << 20, 4096, 4096)
