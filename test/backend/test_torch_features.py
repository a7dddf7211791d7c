"""Features of newer torch releases beside `torch.compile`.

Each feature works with the extension, or is compiled by Inductor (default) with a warning.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import inductor_ext
from inductor_ext import _compat, config, events, exc
from inductor_ext.autotune import decide
from inductor_ext.hooks import scope
from inductor_ext.memory.records import MemoryPlanRecord
from inductor_ext.templates.triton.config import GemmConfig
from test.support.compile_util import INFERENCE, compiled_graphs
from test.support.memory_plans import forget_plans

Tensor = torch.Tensor
HALF = torch.bfloat16


@contextlib.contextmanager
def on_one_rank() -> Iterator[None]:
    """Compile code that any rank can run; skip if this torch has no such option."""
    options = torch.compiler.config
    if not hasattr(options, "compile_on_one_rank"):
        pytest.skip("no torch.compiler.config.compile_on_one_rank")
    with options.patch(compile_on_one_rank=True):
        yield


def lines_with_index(code: str) -> list[str]:
    """Lines of generated Python that contain the device index of the compiling rank."""
    baked = re.compile(r"cuda:\d|index=\d|_DeviceGuard\(\d|set_device\(\d|stream\(\d|counters_\d")
    return [line for line in code.splitlines() if baked.search(line)]


SPLIT = GemmConfig("splitk", 16, 32, 64, 2, 2, split_k=2, fused_split_k=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")
class TestOnOneRank:
    """Generated code determines the device when it runs, as Inductor's does."""

    CASES = (
        (GemmConfig("splitk", 16, 32, 64, 2, 2), {}),
        (SPLIT, {}),
        (GemmConfig("persistent_tma", 128, 64, 64, 3, 4, tma=True, tma_store=True), {}),
        (None, {"memory_arenas": "always"}),
    )

    def code(self, chosen: GemmConfig | None, settings: dict[str, Any]) -> str:
        pytest.importorskip("triton")
        from test.support import fake_cuda

        def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            return torch.relu((x @ w).sum(0) + v).cumsum(0)

        inputs = [((256, 256), HALF), ((256, 64), HALF), ((64,), HALF)]
        with (
            scope.compile_scope(config.snapshot(settings)),
            decide.force_config(lambda _: chosen),
        ):
            return fake_cuda.lower(function, *inputs).code

    @pytest.mark.parametrize(
        ("chosen", "settings"), CASES, ids=["tile", "one launch", "tma", "arenas"]
    )
    def test_code_has_no_device_index(
        self, chosen: GemmConfig | None, settings: dict[str, Any]
    ) -> None:
        with on_one_rank():
            code = self.code(chosen, settings)
        assert lines_with_index(code) == []
        assert ("tl.dot(" in code) == (chosen is not None)
        assert "# arena of " in code or not settings

    def test_code_of_one_device_has_its_index(self) -> None:
        code = self.code(SPLIT, {})
        assert "counters_0.take(" in code
        assert "DeviceProperties(type='cuda', index=0" in code

    def test_the_option_is_read_where_torch_has_it(self) -> None:
        assert not _compat.compiles_on_one_rank()
        with on_one_rank():
            assert _compat.compiles_on_one_rank()


@pytest.mark.skipif(
    not hasattr(torch.compiler, "precompile"), reason="no torch.compiler.precompile"
)
class TestPrecompile:
    """It returns the source of a module, which has to run without this package."""

    WARNING = "torch.compiler.precompile is compiled by Inductor (default)"

    def source(self) -> tuple[str, bytes | None]:
        torch.manual_seed(0)
        net, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        with torch.no_grad():
            result: tuple[str, bytes | None] = torch.compiler.precompile(
                lambda net, x: torch.erf(net(x)).cumsum(0) + 1, net, x
            )
        return result

    @pytest.mark.usefixtures("repeated_warnings")
    @pytest.mark.parametrize("by", ["activate", "install"])
    def test_under_an_activation_it_is_inductors(self, by: str, caplog: Any) -> None:
        stock, _ = self.source()
        assert self.WARNING not in caplog.text
        settings: dict[str, Any] = {"memory_arenas": "always"}
        with contextlib.ExitStack() as stack, events.capture() as records:
            if by == "install":
                inductor_ext.install(**settings)
                stack.callback(inductor_ext.uninstall)
            else:
                stack.enter_context(inductor_ext.activate(**settings))
            ours, _ = self.source()
            self.source()
        assert ours == stock
        assert "inductor_ext" not in ours
        assert records == []
        assert caplog.text.count(self.WARNING) == 1

    def test_its_source_computes_what_eager_mode_does(self) -> None:
        with inductor_ext.activate():
            code, cache = self.source()
        loaded = torch.compiler.precompile.load(code, cache)
        net, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
        with torch.no_grad():
            torch.testing.assert_close(loaded(net, x), torch.erf(net(x)).cumsum(0) + 1)

    def test_a_compile_beside_it_uses_the_extension(self) -> None:
        with inductor_ext.activate(), compiled_graphs() as kinds:
            self.source()
            torch.compile(torch.sin)(torch.ones(3))
        assert kinds == INFERENCE


@pytest.mark.usefixtures("repeated_warnings")
def test_a_region_with_a_compiler_of_its_own_is_inductors(caplog: Any) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._higher_order_ops.invoke_subgraph import get_invoke_subgraph_compile_options
    from torch.fx.passes import regional_inductor_invoke_subgraph as passes

    compiler = passes.regional_inductor_invoke_subgraph
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)

    def run() -> list[Any]:
        torch._dynamo.reset()
        x = torch.randn(4, 4)
        region = torch.compiler.nested_compile_region(
            lambda x: x.sin(), options=get_invoke_subgraph_compile_options()
        )
        with (
            events.capture() as records,
            torch.no_grad(),
            torch.fx.traceback.preserve_node_meta(),
        ):
            compiled = torch.compile(lambda x: region(x) + 1, backend=backend, fullgraph=True)
            torch.testing.assert_close(compiled(x), x.sin() + 1)
        return records

    warning = "a nested_compile_region with a compiler of its own is compiled by Inductor (default)"
    with torch._dynamo.config.patch(enable_invoke_subgraph_regional_compile=True):
        assert run() == []
        assert warning not in caplog.text
        with inductor_ext.activate():
            assert run() == []
            assert run() == []
    assert caplog.text.count(warning) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="lowered on a stand-in for a GPU")
@pytest.mark.parametrize("chosen", [None, GemmConfig("splitk", 16, 32, 64, 2, 2)])
def test_combo_kernels_beside_matmuls_and_arenas(chosen: GemmConfig | None) -> None:
    """Combo kernels are one step of the memory plan, and matmuls are not combined."""
    pytest.importorskip("triton")
    from test.support import fake_cuda

    def function(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        first, second = torch.sin(x).sum(-1), torch.cos(v).sum(-1)
        return ((x @ w) * first.unsqueeze(1)).cumsum(0), second.cumsum(0)

    inputs = [((256, 256), HALF), ((256, 64), HALF), ((512, 64), HALF)]
    values = config.snapshot({"memory_arenas": "always"})
    with (
        events.capture(MemoryPlanRecord) as records,
        scope.compile_scope(values),
        decide.force_config(lambda _: chosen),
    ):
        code = fake_cuda.lower(function, *inputs, combo_kernels=True).code
    assert "combo_grid_meta" in code
    assert ("tl.dot(" in code) == (chosen is not None)
    (record,) = records
    assert record.arenas
    # Two buffers of one arena that are live at the same time do not overlap.
    placed = [storage for storage in record.storages if storage.arena is not None]
    for one, other in itertools.combinations(placed, 2):
        if one.arena == other.arena and one.start < other.end and other.start < one.end:
            assert one.offset is not None
            assert other.offset is not None
            assert one.offset + one.bytes <= other.offset or (
                other.offset + other.bytes <= one.offset
            )


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="no torch.compile(isolate_recompiles=...)",
)
def test_isolated_recompiles() -> None:
    """Modules with one code object do not share a recompile limit; the extension compiles all."""

    def compiled(size: int) -> Any:
        net = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU())
        return torch.compile(net, backend="inductor_ext", isolate_recompiles=True)

    with (
        torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True),
        torch.no_grad(),
        compiled_graphs() as kinds,
    ):
        for size in (3, 4, 5):
            net, x = compiled(size), torch.randn(2, size)
            torch.testing.assert_close(net(x), net._orig_mod(x))
    assert kinds == {"inference": 3}


def test_a_mega_cache_without_memory_plans_is_reported_as_such() -> None:
    """`save_cache_artifacts` packs Inductor's entries, but not memory plans."""
    from torch._inductor.utils import fresh_cache
    from torch.compiler._cache import CacheArtifactManager

    def function(x: Tensor) -> Tensor:
        return (x.cumsum(0).sin().cumsum(0) * 3).cumsum(0)

    def run() -> Any:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="inductor_ext")
        x = torch.randn(64, 64)
        with torch._functorch.config.patch(enable_autograd_cache=True), torch.no_grad():
            torch.testing.assert_close(compiled(x), function(x), atol=1e-3, rtol=1e-3)
        return compiled

    with fresh_cache(), CacheArtifactManager.with_fresh_cache():
        assert inductor_ext.memory_report(run()).records
        packed = torch.compiler.save_cache_artifacts()
    assert packed is not None
    # As in another process.
    forget_plans()
    with fresh_cache():
        torch.compiler.load_cache_artifacts(packed[0])
        with compiled_graphs() as kinds:
            compiled = run()
        assert kinds == {"whole": 1}
        with pytest.raises(exc.PlanNotFoundError) as caught:
            inductor_ext.memory_report(compiled)
    assert "cache" in str(caught.value)
