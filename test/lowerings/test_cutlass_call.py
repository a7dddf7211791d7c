"""Calls of CUTLASS kernels in generated code: Python, C++ compiled with it, and packages.

All code except that for GPUs is run, with plain C++ kernels instead of CUTLASS kernels.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

import inductor_ext
from inductor_ext import exc
from inductor_ext.autotune import cutlass_kernels, cutlass_options, decide
from inductor_ext.hooks import scope
from inductor_ext.memory import extern_memory
from inductor_ext.templates.cutlass import aot_link, runtime
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.cutlass.nvcc_build import Toolchain
from inductor_ext.templates.cutlass.source import FUNCTIONS
from inductor_ext.templates.problem import GemmProblem
from test.support.cutlass_calls import (
    CONFIG,
    WITH_WORKSPACE,
    as_call,
    expected,
    linear,
    plain_kernels,
    plain_source,
)

ROWS, INNER, COLUMNS = 9, 24, 24


@pytest.fixture(scope="module", autouse=True)
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Plain C++ kernels; the names of the kernels that are built."""
    # The decision of `as_call` is not part of any cache key.
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        plain_kernels(tmp_path_factory.mktemp("kernels")) as names,
    ):
        yield names


def inputs(rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    shapes = (rows, INNER), (COLUMNS, INNER), (COLUMNS,), (rows - 1, COLUMNS)
    return tuple(torch.randn(shape) for shape in shapes)


def model(
    x: torch.Tensor, w: torch.Tensor, row: torch.Tensor, more: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Two calls, the first one of a view, with the number of rows as a divisor."""
    first, second = linear(x[1:], w, row, more, x.shape[0])
    third, fourth = linear(first, w, row, second, 3)
    return torch.relu(third), fourth


def reference(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of `model`."""
    x, w, row, more = tensors
    first, second = expected(x[1:], w, row, more, x.shape[0])
    third, fourth = expected(first, w, row, second, 3)
    return torch.relu(third), fourth


def check(results: Any, *tensors: torch.Tensor) -> None:
    for one, other in zip(results, reference(*tensors), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="inductor_ext", **options)


def launches(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines() if re.match(r"\s+cutlass_kernel_\d", line)]


class TestPython:
    def test_known_sizes(self) -> None:
        with as_call(CONFIG, WITH_WORKSPACE):
            result, (code,) = run_and_get_code(compiled(model, dynamic=False), *inputs())
        check(result, *inputs())
        first, second = launches(code)
        # Sizes, swizzle, order, splits, multiprocessors; a view is its buffer and an offset.
        assert first.startswith(
            "cutlass_kernel_0(0, 0, (8, 24, 24, 1, 2, 2, 1, 0), arg0_1.data_ptr() + 96, 24, 0, "
        )
        assert first.endswith(", 0.11111111111111110)")
        # The wrapper allocates workspace of a known size like a buffer.
        assert second.startswith("cutlass_kernel_1(0, workspace_0.data_ptr(), (8, ")
        assert re.search(r"workspace_0 = empty_strided_cpu\(\(32, ?\), ", code)
        assert "del workspace_0" in code

    def test_sizes_of_a_call(self) -> None:
        with as_call(WITH_WORKSPACE, CONFIG):
            function = compiled(model, dynamic=True)
            result, (code,) = run_and_get_code(function, *inputs())
            check(result, *inputs())
            with mock.patch.object(torch._dynamo.config, "error_on_recompile", True):
                check(function(*inputs(31)), *inputs(31))
        first, _ = launches(code)
        assert re.match(r"cutlass_kernel_0\.with_workspace\(0, 'cpu', \(\(-1\) \+ s\d+, s", first)
        # To the memory planner, it is a kernel with an unbounded workspace.
        assert extern_memory.may_allocate(first)

    @pytest.mark.parametrize("used", [0, 1])
    def test_an_output_that_nobody_reads(self, used: int) -> None:
        x, w, row, more = inputs()
        with as_call():
            function = compiled(lambda *values: linear(*values)[used] + 1)
            result = function(x[1:], w, row, more, 2)
        torch.testing.assert_close(
            result.double(), expected(x[1:], w, row, more, 2)[used] + 1, rtol=1e-5, atol=1e-5
        )

    def test_a_batch(self) -> None:
        x, w = torch.randn(3, 5, 8), torch.randn(3, 6, 8)
        row, more = torch.randn(3, 1, 6), torch.randn(5, 6).expand(3, 5, 6)
        with as_call():
            results = compiled(linear)(x, w, row, more, 2)
        for one, other in zip(results, expected(x, w, row, more, 2), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)

    def test_calls_that_the_kernel_refuses_are_errors(self) -> None:
        x, w, row, more = torch.ones(2, 13), torch.ones(4, 13), torch.ones(4), torch.ones(2, 4)
        with as_call(), pytest.raises(exc.KernelLaunchError, match="CUDA error 13"):
            compiled(linear)(x, w, row, more, 1)

    def test_code_from_the_cache_gets_its_kernel_again(
        self, own_store: Path, builds: list[str]
    ) -> None:
        """As in a new process, with and without stored kernels."""
        from torch._dynamo.utils import counters
        from torch._inductor.codecache import PyCodeCache

        # `as_call` is not in the key, so that the test needs a unique constant.
        number = time.time_ns() % (1 << 40)

        def fresh() -> None:
            PyCodeCache.cache_clear()
            function = compiled(lambda x, *others: linear(x[1:], *others, 1)[0] + number)
            with mock.patch.dict(runtime.libraries, clear=True):
                assert function(*inputs()).shape == (ROWS - 1, COLUMNS)
                assert len(runtime.libraries) == 1

        with (
            torch._inductor.config.patch(fx_graph_cache=True),
            torch._functorch.config.patch(enable_autograd_cache=False),
            as_call(),
        ):
            fresh()
            counters.clear()
            before = len(builds)
            fresh()
            assert len(builds) == before
            shutil.rmtree(own_store)
            fresh()
            assert len(builds) == before + 1
        assert counters["inductor"]["fxgraph_cache_hit"] == 2


def arguments() -> dict[str, Any]:
    """The arguments of `runtime.load` for the kernel of CONFIG."""
    return {**dataclasses.asdict(plain_source(CONFIG)), "operands": 6, "scalars": 1}


@pytest.fixture
def own_store(tmp_path: Path) -> Iterator[Path]:
    """An empty store."""
    folder = tmp_path / "store"
    with inductor_ext.config.patch(artifact_cache_dir=str(folder)):
        yield folder


class TestRuntime:
    def test_kernels_that_are_not_stored_are_built(
        self, own_store: Path, builds: list[str]
    ) -> None:
        before = len(builds)
        for _ in range(2):
            with mock.patch.dict(runtime.libraries, clear=True):
                runtime.load(**arguments())
        assert len(builds) == before + 1

    def test_without_nvcc_only_stored_kernels_load(self, own_store: Path) -> None:
        description = arguments()
        missing = exc.MissingToolchainError(part="nvcc", why="it is on no path", install="get it")
        libraries = mock.patch.dict(runtime.libraries, clear=True)
        gone = mock.patch.object(Toolchain, "find", side_effect=missing)
        with (
            libraries,
            gone,
            pytest.raises(exc.MissingKernelError, match=r"nvcc.*it is on no path") as caught,
        ):
            runtime.load(**description)
        assert caught.value.fields["kernel"] == description["name"]
        assert caught.value.fields["folder"] == own_store / "kernels"
        with libraries:
            runtime.load(**description)
        with libraries, gone:
            assert runtime.load(**description).name == description["name"]

    def test_threads_launch_concurrently(self) -> None:
        launcher = runtime.load(**arguments())
        w, row, more = torch.randn(8, 4), torch.zeros(8), torch.zeros(6, 8)

        def run(number: int) -> None:
            x, out, other = torch.full((6, 4), float(number)), torch.empty(6, 8), torch.empty(6, 8)
            head = (6, 8, 4, 1, 1, 0, 1, 0)
            for _ in range(200):
                pairs = ((x, 4), (w, 4), (out, 8), (row, 0), (more, 8), (other, 8))
                rest = [item for one, stride in pairs for item in (one.data_ptr(), stride, 0)]
                launcher(0, 0, head, *rest, 1.0)
                assert torch.equal(out, other)
                torch.testing.assert_close(out, x @ w.t())

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(run, range(4)))


HALF = torch.bfloat16


def product(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The function that `gpu_code` compiles, with dynamic rows."""
    return torch.relu(torch.nn.functional.linear(x, w, b)) / x.shape[0]


def gpu_code(ahead: bool | None, *, splits: bool, rows: int | str = "rows") -> str:
    """The code that is generated for a GPU: Python, or C++ for AOT or JIT."""
    pytest.importorskip("triton")
    from test.support import fake_cuda
    from test.support.gemm_strategies import device

    def rule(problem: GemmProblem) -> CutlassConfig | None:
        if problem.epilogue.tree is None:
            return None
        ranked = cutlass_options.Options(limit=100).rank(problem, device("NVIDIA H200"))
        wanted = (config for config, _ in ranked if config.has_workspace == splits)
        return dataclasses.replace(next(wanted), swizzle=1, raster="heuristic")

    inputs = ((rows, 256), HALF), ((384, 256), HALF), ((384,), HALF)
    options: dict[str, Any] = {
        "max_autotune_gemm_backends": "ATEN,CUTLASS",
        "cutlass__cutlass_epilogue_fusion_enabled": True,
    }
    with (
        decide.force_config(rule),
        mock.patch.object(cutlass_kernels, "prepare", return_value={}),
        mock.patch.object(cutlass_kernels, "can_build", return_value=True),
    ):
        if ahead is not None:
            return fake_cuda.lower_cpp(product, *inputs, ahead=ahead, **options)
        with scope.compile_scope(inductor_ext.config.snapshot({})):
            return fake_cuda.lower(product, *inputs, **options).code


@pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")
class TestGpuCode:
    def test_python_launches_on_the_current_stream(self) -> None:
        (launch,) = launches(gpu_code(None, splits=False, rows=512))
        x, w, b = (f"arg{index}_1.data_ptr()" for index in range(3))
        assert launch == (
            "cutlass_kernel_0(get_raw_stream(0), 0, (512, 384, 256, 1, 1, 0, 1, 132), "
            f"{x}, 256, 0, {w}, 256, 0, buf0.data_ptr(), 384, 0, {b}, 0, 0, 512.00000000000000)"
        )

    def test_python_allocates_the_workspace_of_the_kernel(self) -> None:
        code = gpu_code(None, splits=True, rows=512)
        (launch,) = launches(code)
        assert "workspace_0 = empty_strided_cuda((2048, ), (1, ), torch.uint8)" in code
        assert launch.startswith("cutlass_kernel_0(get_raw_stream(0), workspace_0.data_ptr(), (")
        # With dynamic rows, every kernel has a branch, which queries the workspace.
        results = launches(gpu_code(None, splits=True))
        asking = re.compile(r"cutlass_kernel_\d\.with_workspace\(get_raw_stream\(0\), 'cuda:0', \(")
        assert results
        assert all(asking.match(item) for item in results)

    def test_python_for_any_rank_takes_the_current_device(self) -> None:
        options = torch.compiler.config
        if not hasattr(options, "compile_on_one_rank"):
            pytest.skip("no torch.compiler.config.compile_on_one_rank")
        with options.patch(compile_on_one_rank=True):
            results = launches(gpu_code(None, splits=True))
        current = r"get_raw_stream\(torch\.cuda\.current_device\(\)\), 'cuda', \("
        asking = re.compile(r"cutlass_kernel_\d\.with_workspace\(" + current)
        assert results
        assert all(asking.match(item) for item in results)

    def test_cpp_takes_stream_and_device_from_where_it_runs(self) -> None:
        results = {
            (ahead, splits): [
                line
                for line in gpu_code(ahead, splits=splits, rows=512).splitlines()
                if line.strip().startswith("inductor_ext_cutlass::launch")
            ]
            for ahead in (False, True)
            for splits in (False, True)
        }
        begin = "{static_cast<float>(512."
        ends = {key: line.strip().split(begin)[1] for key, (line,) in results.items()}
        zeros = "0" * 14
        assert ends == {
            (False, False): f"{zeros})}}, inductor_ext_cutlass::current_stream(0), nullptr);",
            (False, True): (
                f"{zeros})}}, inductor_ext_cutlass::current_stream(0), workspace_0.data_ptr());"
            ),
            # It may run on another GPU.
            (True, False): f"{zeros})}}, stream, nullptr);",
            (True, True): (
                f"{zeros})}}, stream, aoti_torch_device_type_cuda(), this->device_idx_);"
            ),
        }
        sizes = "static_cast<int32_t>(512L), static_cast<int32_t>(384L), static_cast<int32_t>(256L)"
        for (ahead, _), (line,) in results.items():
            assert f"{{{sizes}, " in line
            assert f"static_cast<int32_t>({0 if ahead else 132}L)}}, {{{{arg0_1.data_ptr()," in line


@pytest.mark.parametrize(
    "view", [lambda x: x[:, 1:9], lambda x: x[:, :16:2], lambda x: x[:, :10].clone()[:, :8]]
)
def test_operands_of_another_layout_are_refused(view: Any) -> None:
    x, w, row, more = inputs()
    w = w[:, :8].contiguous()
    aligned = dataclasses.replace(CONFIG, alignments=(8, 8, 8))
    with as_call(aligned), pytest.raises(Exception, match="divisible by 8 elements"):
        compiled(lambda x, *others: linear(view(x[1:]), *others, 1))(x, w, row, more)


def test_cpp_wrapper_shares_kernels_loaded_by_python() -> None:
    with as_call(CONFIG, WITH_WORKSPACE):
        function = compiled(model, dynamic=True, options={"cpp_wrapper": True})
        result, (code,) = run_and_get_code(function, *inputs())
    check(result, *inputs())
    check(function(*inputs(31)), *inputs(31))
    assert code.index("cutlass_runtime.load(") < code.index("cpp_wrapper_src =")
    assert "inductor_ext_cutlass::launch(cutlass_kernel_0, {" in code
    assert "inductor_ext_cutlass::launch_with_workspace(cutlass_kernel_1, {" in code


class Model(torch.nn.Module):
    """A model with a part that is computed when constants are loaded."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in zip(("x", "w", "row", "more"), inputs(5), strict=True):
            self.register_buffer(name, value)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert isinstance(self.x, torch.Tensor)
        folded = linear(self.x[1:], self.w, self.row, self.more, 2)[0]
        return (*model(*tensors), folded + tensors[2])


def test_a_package_carries_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels that define the same names; Inductor's loader has no store and no nvcc."""
    rows = torch.export.Dim("rows", min=3, max=100)
    shapes = {"tensors": ({0: rows}, None, None, {0: rows - 1})}
    module = Model()
    program = torch.export.export(module, inputs(), dynamic_shapes=shapes)
    path = str(tmp_path / "model.pt2")
    # The decision of `as_call` is in no key, and parts of the model may be cached.
    uncached = inductor_config.patch(fx_graph_cache=False)
    options = {"aot_inductor.use_runtime_constant_folding": True}
    with as_call(CONFIG, WITH_WORKSPACE), uncached:
        inductor_ext.aoti_compile_and_package(program, package_path=path, inductor_configs=options)
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        inductor_ext.config.patch(artifact_cache_dir=str(tmp_path / "none")),
        mock.patch.object(Toolchain, "find", side_effect=AssertionError),
        mock.patch.dict(runtime.libraries, clear=True),
    ):
        loaded = torch._inductor.aoti_load_package(path)
        for count in (ROWS, 31):
            *results, folded = loaded(*inputs(count))
            check(results, *inputs(count))
            torch.testing.assert_close(folded, module(*inputs(count))[-1])


def test_objects_of_kernels_have_their_own_symbols(tmp_path: Path) -> None:
    output = tmp_path / "kernel.o"
    aot_link.link(plain_source(CONFIG), runtime.store(), str(output))
    symbols = subprocess.run(["nm", "-g", "--defined-only", output], capture_output=True, text=True)
    names = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert names == {f"{aot_link.symbol(plain_source(CONFIG))}_{short}" for short in FUNCTIONS}
