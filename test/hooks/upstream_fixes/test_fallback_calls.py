"""Numbers that Python code passes to operators without a kernel of Inductor."""

from __future__ import annotations

import torch

INF, NAN = float("inf"), float("nan")


def test_infinite_complex_numbers() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * complex(1, INF), x + complex(-INF, -INF), x.fill_(complex(NAN, INF))

    x = torch.randn(3, dtype=torch.complex64)
    actual = torch.compile(program, backend="inductor_ext", fullgraph=True)(x.clone())
    torch.testing.assert_close(actual, program(x), equal_nan=True)
