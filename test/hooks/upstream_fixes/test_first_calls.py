"""The first call of a compiled function computes what the later calls compute."""

from __future__ import annotations

import torch


@torch.library.custom_op("inductor_ext_first_calls::energy", mutates_args=())
def energy(x: torch.Tensor) -> torch.Tensor:
    return (x.conj() * x).real + x.conj().imag * 2


@energy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gram = x.mH @ x
    lu, pivots = torch.linalg.lu_factor(gram)
    return (
        torch.linalg.pinv(x),
        torch.linalg.pinv(gram, hermitian=True) @ y.mT,
        torch.linalg.lu_solve(lu, pivots, x.mH, adjoint=True),
        torch.cholesky_solve(x.mH, torch.linalg.cholesky(gram)),
        torch.linalg.matrix_exp(gram * 0.1),
        energy(x),
        energy(x.conj()),
    )


def test_operators_see_conjugate_views_in_the_first_call() -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(4, 3, dtype=torch.complex64) for _ in range(2))
    expected = program(x, y)
    compiled = torch.compile(program, backend="inductor_ext", fullgraph=True)
    for call in range(2):
        for index, (value, reference) in enumerate(zip(compiled(x, y), expected, strict=True)):
            text = f"call {call}, result {index}"
            torch.testing.assert_close(
                value, reference, rtol=1e-4, atol=1e-4, msg=lambda m, text=text: f"{text}: {m}"
            )


def test_the_check_of_custom_operators_remains() -> None:
    """A custom operator that returns its operand is reported in the first call, as by Inductor."""

    @torch.library.custom_op("inductor_ext_first_calls::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    same.register_fake(lambda x: torch.empty_like(x))
    reports = []
    for backend in ("inductor", "inductor_ext"):
        compiled = torch.compile(lambda x: same(x) + 1, backend=backend, fullgraph=True)
        with (
            torch._functorch.config.patch(error_on_custom_op_aliasing=True),
            torch.no_grad(),
        ):
            try:
                compiled(torch.randn(3))
            except RuntimeError as error:
                reports.append(str(error))
    assert len(reports) == 2, reports
    assert reports[0] == reports[1]
