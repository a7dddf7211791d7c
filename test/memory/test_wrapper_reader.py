"""Views, mutation and unusual buffers in planned graphs: results equal eager mode."""

from __future__ import annotations

import torch

from test.support.memory_compiles import compiled, planning, squares


class TestAliases:
    """Memory that is reachable by another name is not reused."""

    @torch.no_grad()
    def test_complex_views_and_outputs_that_are_views(self) -> None:
        def views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            a = x @ y
            spectrum = torch.view_as_complex((a @ y).view(-1, 16, 2).contiguous())
            b = (x @ x) @ y
            top = b[:3]
            c = (b.t() @ a) @ y
            return top, torch.view_as_real(spectrum * 2).sum(1), c.t(), c[1], top

        for arenas_ in ("auto", "always"):
            with planning(memory_arenas=arenas_, memory_debug=True):
                got = compiled(views)(*squares(32, 2))
            torch.testing.assert_close(got, views(*squares(32, 2)), atol=1e-4, rtol=1e-4)

    @torch.no_grad()
    def test_mutated_inputs_and_buffers(self) -> None:
        def mutate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            a = x @ y
            x.add_(a)
            b = a @ x
            b[2:5] = 1.0
            b.mul_(2)
            return (b @ a) @ x

        for arenas_ in ("auto", "always"):
            x, y = squares(32, 2)
            mine, theirs = x.clone(), x.clone()
            with planning(memory_arenas=arenas_, memory_debug=True):
                got = compiled(mutate)(mine, y)
            torch.testing.assert_close(got, mutate(theirs, y), atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(mine, theirs)

    @torch.no_grad()
    def test_empty_scalar_and_complex_buffers(self) -> None:
        def odd(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            empty = x[:0] @ y
            scalar = (x @ y).sum()
            wave = torch.fft.rfft(x @ y)
            return (empty @ y).sum(0), scalar * (y @ x), wave.abs() * scalar

        with planning(memory_arenas="always", memory_debug=True):
            got = compiled(odd)(*squares(32, 2))
        torch.testing.assert_close(got, odd(*squares(32, 2)), atol=1e-3, rtol=1e-3)
