"""Matmuls in subgraphs: regions that are compiled once, and branches of a `cond`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_ext import config
from inductor_ext.autotune import tuner
from inductor_ext.autotune.decision import Decision, Timing
from inductor_ext.hooks import scope

pytest.importorskip("triton")

from inductor_ext.lowerings.graph import post_grad_pass
from inductor_ext.templates.triton.config import GemmConfig
from test.support import fake_cuda, kernel_interpreter
from test.support.matmul_lowering import lower

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")

Tensor = torch.Tensor
HALF = torch.float16
TILE = GemmConfig("splitk", 16, 16, 32, 2, 2)
SIZE = (64, 64)


def parts(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return x @ q, x @ k, x @ v


def gate(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return torch.relu(x @ q) * (x @ k), x @ v


def plain(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return x @ q - x, x @ v


def region(function: Callable[..., Any], *inputs: Tensor) -> Any:
    if inputs[0].dtype is torch.float64:
        return function(*inputs)
    return torch.ops.higher_order.invoke_subgraph(function, function.__name__, *inputs)


def branch(predicate: Tensor, first: Any, second: Any, *inputs: Tensor) -> Any:
    if inputs[0].dtype is torch.float64:
        return (first if predicate else second)(*inputs)
    return torch.ops.higher_order.cond(predicate, first, second, inputs)


def regions(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A region's result is the next region's input, and is returned."""
    first = region(parts, x, q, k, v)
    return (*region(parts, first[1], q, k, v), *first)


def branches(predicate: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Branches with different kernels, whose input is replaced by a pass of Inductor."""
    y = x @ q + v.mean(0)
    outputs: tuple[Tensor, ...] = branch(predicate, gate, plain, y, q, k, v)
    return outputs


def one_row(predicate: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Parts of a single row are contiguous without a copy."""
    outputs: tuple[Tensor, ...] = branch(predicate, parts, other_parts, x, q, k, v)
    return outputs


def other_parts(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return x @ q, x @ k - 1, (x @ v).sin()


CASES: dict[str, tuple[Callable[..., Any], int, bool | None]] = {
    "regions": (regions, 40, None),
    "first branch": (branches, 40, True),
    "second branch": (branches, 40, False),
    "one row": (one_row, 1, True),
}
"""A function, rows of its input, and a predicate."""


def values(rows: int, predicate: bool | None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(rows, 64, generator=generator).half() / 8]
    outputs += [torch.randn(SIZE, generator=generator).half() / 8 for _ in range(3)]
    return outputs if predicate is None else [torch.tensor(predicate), *outputs]


@pytest.fixture(scope="module")
def results() -> dict[str, list[Tensor]]:
    jobs = {}
    for name, (function, rows, predicate) in CASES.items():
        arguments = values(rows, predicate)
        inputs = [(tuple(tensor.shape), tensor.dtype) for tensor in arguments]
        lowered, problems = lower(lambda _: TILE, function, *inputs, triton__max_tiles=1)
        assert any(item.parts for item in problems)
        jobs[name] = lowered.code, arguments
    return kernel_interpreter.interpret_modules(jobs)


@pytest.mark.parametrize("name", CASES)
def test_results_of_subgraphs_are_read_in_place(
    name: str, results: dict[str, list[Tensor]]
) -> None:
    function, rows, predicate = CASES[name]
    inputs = values(rows, predicate)
    wide = [item.double() if item.is_floating_point() else item for item in inputs]
    for result, exact in zip(results[name], function(*wide), strict=True):
        assert (result.double() - exact).abs().max() < 4e-3 * exact.abs().max()


def region_options(**patches: Any) -> Any:
    """Options of a `nested_compile_region`, which Inductor patches in from torch 2.14 on."""
    module = importlib.import_module("torch._higher_order_ops.invoke_subgraph")
    options = getattr(module, "NestedCompileRegionOptions", None)
    if "inductor_config_patches" not in getattr(options, "__dataclass_fields__", {}):
        pytest.skip("Inductor has no options per region")
    assert options is not None
    return options(inductor_config_patches={k.replace("__", "."): v for k, v in patches.items()})


def with_options(function: Callable[..., Any], options: Any, *inputs: Tensor) -> Any:
    """A call of `nested_compile_region(function, options=options)`, as it is traced."""
    graph = make_fx(lambda *args: (function(*args),))(*inputs)
    graph.meta["nested_region_config"] = options
    return torch.ops.higher_order.invoke_subgraph(graph, f"region_{id(options)}", *inputs)[0]


def half_of(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
    return shape, HALF


class TestOptionsOfRegions:
    """Matmuls of a region are tuned under its own options, which may differ from the caller's."""

    OUTER, INNER = (8, 64, 64), (8, 96, 64)

    def tuned(
        self, tmp_path: Path, patches: dict[str, Any], **options: Any
    ) -> tuple[set[tuple[int, int, int]], str]:
        """M, N, K of the tuned problems, and the code, of a graph with a region."""
        region_of = region_options(**patches)

        def function(x: Tensor, v: Tensor, w: Tensor) -> Any:
            return with_options(torch.mm, region_of, x @ v, w)

        requests: set[tuple[int, int, int]] = set()

        def tune(problems: Any, *_: Any, **__: Any) -> Any:
            requests.update((problem.m, problem.n, problem.k) for problem in problems)
            timings = Timing(None, 100.0), Timing(TILE, 50.0)
            return dict.fromkeys(problems, Decision(TILE, "measured", timings))

        settings = config.snapshot({"tuning_cache_dir": str(tmp_path)})
        with scope.compile_scope(settings), mock.patch.object(tuner, "tune", tune):
            inputs = half_of(8, 64), half_of(64, 64), half_of(64, 96)
            lowered = fake_cuda.lower(function, *inputs, **options)
        return requests, lowered.code

    def test_a_region_is_tuned_if_it_asks_for_it(self, tmp_path: Path) -> None:
        problems, code = self.tuned(tmp_path, {"max_autotune": True})
        assert problems == {self.INNER}
        assert code.count("extern_kernels.mm(") == code.count("tl.dot(") == 1

    def test_a_region_is_not_tuned_if_only_the_graph_around_it_is(self, tmp_path: Path) -> None:
        problems, code = self.tuned(tmp_path, {"max_autotune": False}, max_autotune=True)
        assert problems == {self.OUTER}
        assert code.count("extern_kernels.mm(") == code.count("tl.dot(") == 1

    @pytest.mark.parametrize(
        "patches", [{"max_autotune_gemm_backends": "ATEN"}, {"use_post_grad_passes": False}]
    )
    def test_other_options_of_a_region_apply(self, patches: dict[str, Any], tmp_path: Path) -> None:
        problems, _ = self.tuned(tmp_path, patches, max_autotune=True)
        assert problems == {self.OUTER}

    def test_without_options_a_region_is_as_the_graph_around_it(self, tmp_path: Path) -> None:
        problems, _ = self.tuned(tmp_path, {}, max_autotune=True)
        assert problems == {self.OUTER, self.INNER}

    def test_options_are_restored(self, tmp_path: Path) -> None:
        self.tuned(tmp_path, {"max_autotune": True})
        assert not inductor_config.max_autotune

    def test_the_cache_key_has_results_for_regions(self, tmp_path: Path) -> None:
        options = region_options(max_autotune=True)
        graph = make_fx(lambda x, w: with_options(torch.mm, options, x, w), tracing_mode="fake")(
            torch.empty(SIZE), torch.empty(SIZE)
        )
        settings = config.snapshot({"tuning_cache_dir": str(tmp_path)})
        with fake_cuda.device():
            plain = post_grad_pass.cache_key(settings)
            whole = post_grad_pass.cache_key(settings, graph)
            with inductor_config.patch(max_autotune=True):
                tuned = post_grad_pass.cache_key(settings)
                assert post_grad_pass.cache_key(settings, graph) == tuned
        assert plain != tuned
        assert whole == f"{plain}-{tuned}"
