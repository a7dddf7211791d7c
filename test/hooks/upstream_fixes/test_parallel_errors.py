"""Errors in parallel C++ loops: they are raised, and do not end the process."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import inductor_ext
from inductor_ext import exc
from inductor_ext.hooks.upstream_fixes.parallel_errors import catch_errors

pytestmark = pytest.mark.usefixtures("two_threads")

_ROWS = 50_000


class Lookups(torch.nn.Module):
    """Reads and writes of rows, in loops of several forms."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        if self.kind == "elements":
            return x[index] * 2
        if self.kind == "reduction of all":
            return x[index].sum()
        if self.kind == "reductions of rows":
            return x[index].softmax(-1)
        return x.index_put((index,), x.new_ones(()))


def _inputs() -> tuple[Tensor, Tensor]:
    index = torch.arange(_ROWS) % 100
    return torch.arange(800.0).reshape(100, 8) / 800, index


def _call_out_of_bounds(call: Callable[[Tensor, Tensor], Tensor], kind: str) -> None:
    x, index = _inputs()
    torch.testing.assert_close(call(x, index), Lookups(kind)(x, index))
    index[_ROWS // 3 :: 100] = 100
    call(x, index)


@pytest.mark.parametrize("kind", ["elements", "reduction of all", "reductions of rows", "writes"])
def test_an_index_out_of_bounds_is_an_error(kind: str) -> None:
    with pytest.raises(RuntimeError, match="index out of bounds"):
        _call_out_of_bounds(torch.compile(Lookups(kind), backend="inductor_ext"), kind)


def test_an_index_out_of_bounds_is_an_error_of_a_package(tmp_path: Path) -> None:
    exported = torch.export.export(Lookups("elements"), _inputs())
    path = inductor_ext.aoti_compile_and_package(exported, package_path=tmp_path / "model.pt2")
    with pytest.raises(exc.ArtifactRunError, match="out of bounds for a dimension of size 100"):
        _call_out_of_bounds(inductor_ext.load(path), "elements")


_TRY = "try {"
_CATCH = (
    "} catch (...) { if (!parallel_failed_1.test_and_set()) "
    "parallel_error_1 = std::current_exception(); }"
)
_DECLARE = (
    "std::exception_ptr parallel_error_1; std::atomic_flag parallel_failed_1 = ATOMIC_FLAG_INIT;"
)
_THROW = "if (parallel_error_1) std::rethrow_exception(parallel_error_1);"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            """
            #pragma omp parallel num_threads(2)
            {
            int tid = omp_get_thread_num();
            {
            #pragma omp for collapse(2)
            for(x0)
            {
            for(x1)
            {
            TORCH_CHECK(x1 < 3, "} is {{ in a string");
            if (x1) { f(); }
            }
            }
            }
            #pragma omp for
            for(x0)
            {
            g();
            }
            #pragma omp single
            {
            AOTI_TORCH_CHECK(false, "");
            }
            }
            """,
            f"""
            {_DECLARE}
            #pragma omp parallel num_threads(2)
            {{
            int tid = omp_get_thread_num();
            {{
            #pragma omp for collapse(2)
            for(x0)
            {{
            for(x1)
            {{
            {_TRY}
            TORCH_CHECK(x1 < 3, "}} is {{{{ in a string");
            if (x1) {{ f(); }}
            {_CATCH}
            }}
            }}
            }}
            #pragma omp for
            for(x0)
            {{
            g();
            }}
            #pragma omp single
            {{
            {_TRY}
            AOTI_TORCH_CHECK(false, "");
            {_CATCH}
            }}
            }}
            {_THROW}
            """,
            id="several loops of a region",
        ),
        pytest.param(
            """
            # pragma omp parallel for num_threads(2)
            for (x0) {
            TORCH_CHECK(false, "");
            }
            h();
            """,
            f"""
            {_DECLARE}
            # pragma omp parallel for num_threads(2)
            for (x0) {{
            {_TRY}
            TORCH_CHECK(false, "");
            {_CATCH}
            }}
            {_THROW}
            h();
            """,
            id="a region that is a loop",
        ),
        pytest.param(
            """
            TORCH_CHECK(false, "");
            #pragma omp parallel
            {
            g();
            }
            """,
            None,
            id="a check outside",
        ),
    ],
)
def test_loops_with_checks_catch_errors(source: str, expected: str | None) -> None:
    def lines(text: str) -> list[str]:
        return re.sub(r"\n +", "\n", text).strip().split("\n")

    result = catch_errors("\n".join(lines(source)))
    assert result.split("\n") == lines(source if expected is None else expected)
