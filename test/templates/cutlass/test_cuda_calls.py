"""CUTLASS kernels on a GPU as compiled code calls them: from Python and C++, in CUDA graphs, from
packages and from Inductor's cache, each against float64.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code

import inductor_ext
from inductor_ext.autotune import cutlass_options, decide
from inductor_ext.templates.cutlass.config import CutlassConfig
from inductor_ext.templates.problem import GemmProblem
from inductor_ext.toolchain import components
from test.support import gpu_util
from test.support.gpu_util import device

pytestmark = pytest.mark.gpu

INNER, HIDDEN, OUT = 256, 512, 384
ROWS = 1024

ERROR = 1.6e-2
"""Relative error of a whole result in bfloat16 against float64."""

OPTIONS: dict[str, Any] = {
    "max_autotune_gemm_backends": "ATEN,CUTLASS",
    "cutlass.cutlass_epilogue_fusion_enabled": True,
}


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """Compile every graph, with CUTLASS kernels for all problems with trees."""
    for part in (components.probe("nvcc"), components.probe("cutlass")):
        if not part.available:
            pytest.skip(f"no {part.title}: {part.why}")
    if device().capability != (9, 0):
        pytest.skip("kernels that divide K evenly among multiprocessors are of capability 9.0")
    torch.manual_seed(0)
    with gpu_util.compiling(), decide.force_config(rule):
        yield


def rule(problem: GemmProblem) -> CutlassConfig | None:
    """One kernel for all M; matmuls with OUT columns get a split-K kernel."""
    if problem.epilogue.tree is None:
        return None
    many = dataclasses.replace(problem, m=2048)
    splits = problem.operation == "grouped" or problem.n == OUT
    return next(
        (
            dataclasses.replace(config, swizzle=1, raster="heuristic")
            for config, _ in cutlass_options.Options(limit=100).rank(many, device())
            if config.has_workspace == splits and not config.swap_ab
        ),
        None,
    )


def layer(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two outputs, and a scalar that comes from a size."""
    result = torch.relu(torch.nn.functional.linear(x, w, b)) / x.shape[0] ** 0.5
    return result + r, result * 2


def model(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    r1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    r2: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    first, second = layer(x, w1, b1, r1)
    return (second, *layer(first, w2, b2, r2))


def inputs(rows: int = ROWS, *, dynamic: bool = False) -> tuple[torch.Tensor, ...]:
    """Inputs of the model with so many rows, marked dynamic if `dynamic`."""
    shapes = (
        *((rows, INNER), (HIDDEN, INNER), (HIDDEN,), (rows, HIDDEN)),
        *((OUT, HIDDEN), (OUT,), (rows, OUT)),
    )
    results = tuple(torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    for tensor in results:
        if dynamic and tensor.shape[0] == rows:
            torch._dynamo.mark_dynamic(tensor, 0)
    return results


def check(results: Any, values: tuple[torch.Tensor, ...]) -> None:
    expected = model(*(item.double() for item in values))
    for one, other in zip(results, expected, strict=True):
        difference = torch.linalg.vector_norm(one.double() - other)
        assert (difference / torch.linalg.vector_norm(other)).item() < ERROR


def compiled(**options: Any) -> Any:
    torch._dynamo.reset()
    rest = {name.replace("__", "."): value for name, value in options.items()}
    return torch.compile(model, backend="inductor_ext", dynamic=None, options={**OPTIONS, **rest})


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_results_match_float64(dynamic: bool, cpp: bool) -> None:
    function = compiled(cpp_wrapper=cpp)
    values = inputs(dynamic=dynamic)
    result, (code,) = run_and_get_code(function, *values)
    check(result, values)
    assert code.count("cutlass_runtime.load(") == 2
    asks = "launch_with_workspace(" if cpp else ".with_workspace("
    # The wrapper allocates workspace of static sizes.
    assert (asks in code.partition("inductor_entry_impl")[2 if cpp else 0]) == dynamic
    for rows in (100, 3000) if dynamic else ():
        values = inputs(rows)
        check(function(*values), values)


@pytest.mark.parametrize("planned", [False, True])
def test_memory_that_is_planned(planned: bool) -> None:
    function = compiled(memory_planning=planned)
    for _ in range(2):
        values = inputs()
        check(function(*values), values)


@pytest.mark.parametrize("cpp", [False, True], ids=["python", "cpp"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_cuda_graphs_of_torch(dynamic: bool, cpp: bool) -> None:
    function = compiled(triton__cudagraphs=True, cpp_wrapper=cpp)
    counters.clear()
    for rows in (ROWS, 704) if dynamic else (ROWS,):
        for _ in range(4):
            values = inputs(rows, dynamic=dynamic)
            torch.compiler.cudagraph_mark_step_begin()
            check([tensor.clone() for tensor in function(*values)], values)
    # Inductor has no CUDA graphs for its C++ wrapper.
    assert counters["inductor"]["cudagraph_skips"] == 0 or cpp


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_graph_that_is_captured_can_be_replayed(dynamic: bool) -> None:
    function = compiled()
    static = inputs(dynamic=dynamic)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        check(function(*static), static)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*static)
    for _ in range(3):
        for place, value in zip(static, inputs(), strict=True):
            place.copy_(value)
        # Later allocations must not overlap the graph's workspaces.
        noise = [torch.full((1 << 24,), 255, device="cuda", dtype=torch.uint8)]
        graph.replay()
        check(result, static)
        del noise


def test_streams_side_by_side() -> None:
    function = compiled()
    arguments = [inputs() for _ in range(4)]
    function(*arguments[0])
    streams = [torch.cuda.Stream() for _ in arguments]
    torch.cuda.synchronize()
    values = []
    for _ in range(5):
        for stream, item in zip(streams, arguments, strict=True):
            with torch.cuda.stream(stream):
                values.append((function(*item), item))
    torch.cuda.synchronize()
    for results, item in values:
        check(results, item)


def test_groups() -> None:
    ends = torch.tensor([100, 100, 333, 1024], device="cuda", dtype=torch.int32)
    x = torch.randn(ROWS, INNER, device="cuda").bfloat16()
    w = torch.randn(4, OUT, INNER, device="cuda").bfloat16()

    def function(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, w.mT, ends)

    torch._dynamo.reset()
    run = torch.compile(function, backend="inductor_ext", options=OPTIONS)
    result, (code,) = run_and_get_code(run, x, w, ends)
    assert "cutlass_runtime.load(" in code
    spans = zip((0, *ends.tolist()), ends.tolist(), strict=False)
    exact = torch.cat([x[i:j].double() @ w[g].double().t() for g, (i, j) in enumerate(spans)])
    difference = torch.linalg.vector_norm(result.double() - exact)
    assert (difference / torch.linalg.vector_norm(exact)).item() < ERROR


class Model(torch.nn.Module):
    """A model with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        _, *weights = inputs(2)
        for name, place in (("w1", 0), ("b1", 1), ("w2", 3), ("b2", 4)):
            self.register_buffer(name, weights[place])

    def forward(
        self, x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return model(x, self.w1, self.b1, r1, self.w2, self.b2, r2)  # type: ignore[arg-type]


_LOAD = """
import os, shutil, sys
assert shutil.which("nvcc") is None
assert not any(name.startswith("TORCHINDUCTOR_CUTLASS") for name in os.environ)
import torch
package, given, out = sys.argv[1:]
run = torch._inductor.aoti_load_package(package)
results = [run(*(each.cuda() for each in tensors)) for tensors in torch.load(given)]
assert "inductor_ext" not in sys.modules
torch.save([[each.cpu() for each in result] for result in results], out)
"""


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_package_needs_neither_nvcc_nor_cutlass(dynamic: bool, tmp_path: Path) -> None:
    module = Model()
    values = []
    for count in (ROWS, 100, 3000) if dynamic else (ROWS,):
        x, _, _, r1, _, _, r2 = inputs(count)
        values.append((x, r1, r2))
    rows = torch.export.Dim("rows", min=2, max=4096)
    shapes = ({0: rows}, {0: rows}, {0: rows}) if dynamic else None
    program = torch.export.export(module, values[0], dynamic_shapes=shapes)
    package = str(tmp_path / "model.pt2")
    with inductor_ext.activate(artifact_cache=False):
        torch._inductor.aoti_compile_and_package(
            program, package_path=package, inductor_configs=OPTIONS
        )

    def right(results: Any) -> None:
        for result, (x, r1, r2) in zip(results, values, strict=True):
            tensors = (x, module.w1, module.b1, r1, module.w2, module.b2, r2)
            check([item.cuda() for item in result], tensors)  # type: ignore[arg-type]

    own = inductor_ext.load(package)
    right([own(*item) for item in values])
    torch.save([[tensor.cpu() for tensor in tensors] for tensors in values], tmp_path / "given.pt")
    hidden = ("CUDA_HOME", "CUDA_PATH", "TORCHINDUCTOR_CUTLASS_DIR")
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    # Only Python's own folder.
    (tmp_path / "bin").mkdir()
    environment |= {"PATH": str(tmp_path / "bin"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "new")}
    files = (str(tmp_path / name) for name in ("given.pt", "out.pt"))
    command = [sys.executable, "-c", _LOAD, package, *files]
    subprocess.run(command, check=True, env=environment)
    right(torch.load(tmp_path / "out.pt"))


_AGAIN = """
import json, sys
import torch
import torch._functorch.config
torch._functorch.config.enable_autograd_cache = False
from torch._dynamo.utils import counters
from inductor_ext.templates.cutlass import nvcc_build as build
from test.templates.cutlass import test_cuda_calls as own
from inductor_ext.autotune import decide
builds = []
stock = build.run_build
build.run_build = lambda *arguments: (builds.append(1), stock(*arguments))
torch.manual_seed(0)
given = own.inputs()
with decide.force_config(own.rule):
    found = own.compiled(cpp_wrapper=sys.argv[1] == "cpp")(*given)
own.check(found, given)
hits = counters["inductor"]["fxgraph_cache_hit"]
print(json.dumps({"hits": hits, "builds": len(builds)}))
"""


def test_another_process_gets_code_and_kernels_from_the_cache() -> None:
    def run(way: str) -> tuple[int, int]:
        command = [sys.executable, "-c", _AGAIN, way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        details = json.loads(done.stdout.splitlines()[-1])
        return details["hits"], details["builds"]

    with fresh_cache():
        # The code is in the cache, and the kernels are in the store.
        assert [run("python"), run("python")] == [(0, 2), (1, 0)]
        assert [run("cpp"), run("cpp")] == [(0, 0), (1, 0)]
