"""Concatenations that are overwritten keep their operands."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from test.fuzz import graph_programs  # noqa: F401  (registers the custom operators)

Tensor = torch.Tensor

ROWS = torch.tensor([0, 1])


def _overwrite(x: Tensor, z: Tensor) -> list[Tensor]:
    """Overwrite concatenations whose operands are read later, one of them as the new value of x."""
    flip_into = torch.ops.inductor_ext_fuzz.flip_into
    x.mul_(2)
    first = torch.cat([x, z + 1])
    flip_into(z, first[:8])
    y, product = x * 3, x @ z
    second, third = torch.cat([y, z]), torch.stack([product, y.sin()])
    second = second.index_add(0, ROWS, z[:2])
    flip_into(z.clone(), third[0])
    values = torch.fft.fft(x).real.contiguous()
    fourth = torch.cat([values.view(-1), z[0]])
    flip_into(z[:1].view(-1), fourth[:8])
    results = [first, second, third, fourth, functional.layer_norm(y, (8,))]
    return [*results, product + 1, values.sin()]


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_operands_that_are_read_later_are_not_overwritten(cpp_wrapper: bool) -> None:
    options = {"cpp_wrapper": cpp_wrapper}
    compiled = torch.compile(_overwrite, backend="inductor_ext", fullgraph=True, options=options)
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randn(8, 8, generator=generator) for _ in range(2))
    inputs, others = (x.clone(), z.clone()), (x.clone(), z.clone())
    torch.testing.assert_close(compiled(*inputs), _overwrite(*others))
    torch.testing.assert_close(inputs, others)


def test_operands_of_other_concatenations_are_computed_in_place() -> None:
    from torch._inductor.utils import run_and_get_code

    def model(x: Tensor) -> Tensor:
        y = x @ x
        return torch.cat([y, y.sin() @ x]) + 1 + y.sum()

    _, (code,) = run_and_get_code(torch.compile(model, backend="inductor_ext"), torch.randn(8, 8))
    assert code.count("# alias") == 2
