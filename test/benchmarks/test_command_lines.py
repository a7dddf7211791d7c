"""Every benchmark prints its help on a machine without a GPU."""

from __future__ import annotations

import importlib

import pytest

MODULES = (
    "aot.run",
    "compile_time",
    "doc_tables",
    "gemm.cutlass_cold",
    "gemm.cutlass_kernels",
    "gemm.e2e",
    "gemm.reductions",
    "gemm.retune_tables",
    "gemm.run",
    "gemm.search_spaces",
    "gemm.speed_of_light",
    "gemm.summary",
    "harness.pytest_report",
    "harness.results",
    "memory.budget",
    "memory.fragmentation",
    "memory.gpu",
    "memory.peak",
    "memory.planner",
    "memory.reorder",
    "memory.steps",
    "memory.wrapper",
    "overhead",
)


@pytest.mark.parametrize("name", MODULES)
def test_benchmark_prints_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        module = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("needs Triton")
    with pytest.raises(SystemExit) as exit_info:
        module.main(["--help"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out.startswith("usage:")
