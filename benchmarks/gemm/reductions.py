"""Norms and softmax on a GPU: eager mode, Inductor in several configurations, and the extension.

The metrics and the method are those of the GEMM benchmark (`benchmarks.gemm.run`): an ordinary
call, and a CUDA graph, with inputs in DRAM. The lower bound is the time to read the inputs and
write the outputs.

    python -m benchmarks.gemm.reductions --json-out benchmarks/results
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gemm import run as gemm
from benchmarks.gemm.cases import Program
from benchmarks.harness import results, resumable
from inductor_ext.templates.device import Device

__all__ = ["CASES", "Case", "compute_lower_bound", "main"]


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _residual_norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    z = x + y
    return z, F.rms_norm(z, z.shape[-1:], weight)


KINDS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
    "LayerNorm": (_layer_norm, 1, 2),
    "RMSNorm": (_rms_norm, 1, 1),
    "softmax": (_softmax, 1, 0),
    "residual + RMSNorm": (_residual_norm, 2, 1),
}
"""A function, the number of its matrix inputs, and the number of its vector inputs (one row
each)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of bfloat16 matrices."""

    kind: str
    """A key of `KINDS`."""
    rows: int
    columns: int

    @property
    def name(self) -> str:
        """The case's name, unique in `CASES`."""
        return f"{self.kind} {self.rows}x{self.columns}"

    def program(self, device: str | torch.device, seed: int = 0) -> Program:
        """Return the function, with random inputs."""
        generator = torch.Generator(device).manual_seed(seed)
        function, matrices, vectors = KINDS[self.kind]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

        inputs = (
            *(normal(self.rows, self.columns) for _ in range(matrices)),
            *(normal(self.columns) for _ in range(vectors)),
        )

        def reference() -> tuple[Tensor, ...]:
            outputs = function(*(inp.double() for inp in inputs))
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return Program(function, inputs, reference, {})

    def compute_lower_bound(self, bandwidth: float) -> float:
        """Return the microseconds to move the inputs and outputs at a bandwidth in bytes/s."""
        _, matrices, vectors = KINDS[self.kind]
        # As many matrices are written as are read.
        elements = 2 * matrices * self.rows * self.columns + vectors * self.columns
        return 2 * elements / bandwidth * 1e6


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        *(
            Case(kind, rows, columns)
            for kind in ("LayerNorm", "RMSNorm", "softmax")
            for rows, columns in (
                (16, 4096),
                (2048, 1024),
                (2048, 3072),
                (2048, 4096),
                (2048, 8192),
                (8192, 4096),
                (2048, 16384),
            )
        ),
        Case("residual + RMSNorm", 2048, 4096),
        Case("residual + RMSNorm", 2048, 8192),
    )
}
"""By name."""


def compute_lower_bound(case: Case, device: str) -> float | None:
    """Like `gemm.compute_lower_bound`."""
    if device == "cpu":
        return None
    return case.compute_lower_bound(
        Device.from_torch(torch.cuda.get_device_properties(0)).bandwidth
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code is 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, help="measurements per variant; by default, as fit")
    resumable.add_arguments(parser)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    header = results.collect_header("reductions", results.format_command(), commit=options.commit)
    ledger = resumable.Ledger(header, options.json_out, options.resume)
    names = ["eager", "stock", "stock-max", "ours"]
    runner = gemm.CaseRunner(names, options.rounds, False, bound=compute_lower_bound)
    todo = [CASES[name] for name in options.case if name not in ledger.cases]
    count, failed = ledger.add_all(map(runner, resumable.take_within(todo, options.budget_seconds)))
    print(f"{count} of {len(todo)} measured in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
