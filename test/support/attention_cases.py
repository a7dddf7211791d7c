"""Cases of attention with few queries, their float64 reference, and a run of the kernels alone.

    python -m test.support.attention_cases

runs all cases in Triton's interpreter, with `TRITON_INTERPRET=1`, and names those that are wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from inductor_ext.templates.triton import decode_attention as rules
from inductor_ext.templates.triton.decode_attention import DecodeAttention, DecodeConfig


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem with a bias, and how many CTAs share a head."""

    problem: DecodeAttention
    splits: int = 1
    bias: str = "none"
    """"none", "keys" (the same for all rows), "rows", or "heads"."""
    excluded: bool = False
    """Whether the bias excludes all keys for the first row, and many for the others."""
    dtype: torch.dtype = torch.float16


CASES = {
    "one head": Case(DecodeAttention(1, 1, 1, 1, 64, 16, 16)),
    "odd length": Case(DecodeAttention(2, 3, 4, 1, 77, 32, 32), 2, "keys"),
    "empty split": Case(DecodeAttention(1, 2, 2, 1, 65, 32, 32), 3, "keys"),
    "odd sizes": Case(DecodeAttention(1, 2, 3, 1, 70, 24, 40), 2),
    "several queries": Case(DecodeAttention(2, 2, 3, 5, 66, 32, 32), 2, "rows"),
    "bias by head": Case(DecodeAttention(1, 2, 2, 2, 64, 32, 32), 1, "heads"),
    "excluded keys": Case(DecodeAttention(2, 2, 2, 1, 130, 32, 32), 4, "keys", excluded=True),
    "excluded rows": Case(DecodeAttention(1, 2, 2, 2, 64, 32, 32), 1, "rows", excluded=True),
    "wide head": Case(DecodeAttention(1, 1, 2, 1, 64, 256, 256), 2),
    "float32": Case(DecodeAttention(1, 2, 2, 1, 100, 32, 32), 2, "keys", dtype=torch.float32),
}


def make_inputs(case: Case, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and a bias, with gaps between heads; the bias may be broadcast."""
    p = case.problem
    generator = torch.Generator().manual_seed(len(str(case)))

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator).to(device=device, dtype=case.dtype)
        wide = torch.full((*shape[:2], shape[2] + 1, shape[3] + 8), torch.nan).to(values)
        part = wide[:, :, : shape[2], : shape[3]]
        return part.copy_(values)

    query = draw(p.batch, p.heads * p.group, p.queries, p.size)
    key = draw(p.batch, p.heads, p.length, p.size)
    value = draw(p.batch, p.heads, p.length, p.value_size)
    if case.bias == "none":
        return query, key, value
    rows = p.queries if case.bias != "keys" else 1
    bias = draw(p.batch, p.heads * p.group if case.bias == "heads" else 1, rows, p.length)
    if case.excluded:
        bias[..., : p.length // 2] = -torch.inf
        bias[0, :, 0] = -torch.inf
    return query, key, value, bias


def compute(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The result in float64; zeros where all keys are excluded."""
    group = query.shape[1] // key.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ k.mT * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias.double()
    return scores.softmax(-1).nan_to_num(0) @ v


def run_kernels(case: Case, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The result of the kernels, without a compiler around them."""
    from inductor_ext.lowerings.graph.decode_attention import constants_of
    from inductor_ext.templates.triton.kernels import decode_attention

    problem = case.problem
    config = DecodeConfig(case.splits, 32, 4, 1)
    query, key, value, *bias = inputs
    out = query.new_empty((*query.shape[:3], problem.value_size))
    attend, combine = constants_of(
        problem,
        config,
        problem.size**-0.5,
        query=query,
        key=key,
        value=value,
        out=out,
        bias=bias[0] if bias else None,
    )
    pairs = problem.batch * problem.heads
    sizes = (pairs, config.splits, problem.rows), (pairs, config.splits, 2, problem.rows)
    block_v = rules.round_up(problem.value_size)
    sums = torch.full((*sizes[0], block_v), torch.nan, device=query.device)
    stats = torch.full(sizes[1], torch.nan, device=query.device)
    arguments: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias[0] if bias else None,
        "out": out,
        "sums": sums,
        "stats": stats,
    }
    decode_attention.attend[(pairs, config.splits)](**{**arguments, **attend})
    if config.splits > 1:
        parts = {name: arguments[name] for name in ("sums", "stats", "out")}
        decode_attention.combine[(pairs, problem.rows)](**parts, **combine)
    return out


def find_error(case: Case, device: str = "cpu") -> float:
    """The largest error of a case, relative to the largest value."""
    inputs = make_inputs(case, device)
    expected = compute(*inputs)
    return float((run_kernels(case, inputs).double() - expected).abs().max() / expected.abs().max())


def main() -> int:
    """Run all cases; the exit code is 1 if one is wrong."""
    from test.support import triton_interpreter

    triton_interpreter.accept_numpy()
    errors = {name: find_error(case) for name, case in CASES.items()}
    limits = {torch.float16: 2e-3, torch.float32: 1e-5}
    wrong = {name: e for name, e in errors.items() if not e < limits[CASES[name].dtype]}
    print(errors)
    print(f"wrong: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
