"""Graphs are compiled without the extension's kernels if one of these does not compile."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, symbolic_trace

from inductor_ext import events
from inductor_ext.hooks import compile_again, context, scope
from inductor_ext.lowerings.records import AttentionRecord
from inductor_ext.settings import Settings

RECORD = AttentionRecord("layers.0", ("a kernel for 1 queries",))


EARLIER = AttentionRecord("layers.1", ("a record from before the compile",))


class OutOfResources(Exception):
    """Like the exception of Triton."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight)


def _graph(device: str = "cuda") -> GraphModule:
    gm = symbolic_trace(Model())
    (placeholder,) = gm.graph.find_nodes(op="placeholder")
    with FakeTensorMode():
        placeholder.meta["val"] = torch.empty(3, 3, device=device)
    return gm


class Compile:
    """Changes the graph, reports a kernel, and fails if extension kernels are on."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.records: list[events.Record] = [EARLIER]
        self.graphs: list[GraphModule] = []

    def __call__(self, gm: GraphModule) -> str:
        self.graphs.append(gm)
        settings = context.settings()
        assert settings is not None
        if settings.gemm_templates:
            self.records.append(RECORD)
            (relu,) = [node for node in gm.graph.nodes if node.target is torch.relu]
            relu.replace_all_uses_with(relu.args[0])
            gm.graph.erase_node(relu)
            raise RuntimeError("the compile failed") from self.error
        return "compiled"

    def run(self, gm: GraphModule, settings: Settings) -> str:
        with scope.compile_scope(settings):
            result: str = compile_again.compile_graph(gm, self, settings, self.records)
            return result


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfResources("out of resource: shared memory"), "OutOfResources: out of resource"),
        # From Inductor's `CachingAutotuner._make_launchers`.
        (
            RuntimeError("No valid triton configs. OutOfMemoryError: Required: 300000"),
            "OutOfMemoryError: Required: 300000",
        ),
    ],
    ids=["compiler", "launcher"],
)
def test_a_graph_is_compiled_again_as_it_was(
    error: Exception, reason: str, repeated_warnings: None, caplog: pytest.LogCaptureFixture
) -> None:
    gm = _graph()
    code, weight = gm.code, gm.weight
    compile_ = Compile(error)
    with caplog.at_level(logging.WARNING):
        assert compile_.run(gm, Settings()) == "compiled"
    first, second = compile_.graphs
    assert first is gm
    assert second.code == code
    assert second.weight is weight
    assert compile_.records == [EARLIER]
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("device", "settings", "error"),
    [
        ("cuda", Settings(), ValueError()),
        ("cpu", Settings(), OutOfResources()),
        ("cuda", Settings(fallback_to_inductor=False), OutOfResources()),
    ],
    ids=["another error", "CPU", "the setting is off"],
)
def test_other_errors_are_raised(device: str, settings: Settings, error: Exception) -> None:
    compile_ = Compile(error)
    with pytest.raises(RuntimeError, match="the compile failed"):
        compile_.run(_graph(device), settings)
    assert len(compile_.graphs) == 1


def test_failures_of_other_kernels_are_raised() -> None:
    compile_ = Compile(OutOfResources())
    with (
        mock.patch.object(compile_again, "_is_kernel", return_value=False),
        pytest.raises(RuntimeError, match="the compile failed"),
    ):
        compile_.run(_graph(), Settings())


def _branch(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[1:] += torch.cond(x.sum() > 0, torch.sin, torch.cos, (x[:-1],))
    return x


@pytest.mark.parametrize("function", [Model(), _branch], ids=["training", "branches"])
def test_compiled_functions(function: Any, repeated_warnings: None) -> None:
    """Every graph fails after all passes, when its kernels are loaded."""
    stock, failed = GraphLowering.compile_to_module, []

    def fail(graph: GraphLowering) -> Any:
        settings = context.settings()
        assert settings is not None
        result = stock(graph)
        if settings.gemm_templates:
            failed.append(graph)
            events.emit(RECORD)
            raise OutOfResources("shared memory")
        return result

    with (
        mock.patch.object(GraphLowering, "compile_to_module", fail),
        mock.patch.object(compile_again, "_may_use_kernels", return_value=True),
    ):
        compiled = torch.compile(function, backend="inductor_ext", fullgraph=True, dynamic=True)
        for size in (5, 3):
            x = torch.randn(size, 3, requires_grad=isinstance(function, Model))
            result, expected = compiled(x), function(x)
            torch.testing.assert_close(result, expected)
            if x.requires_grad:
                pairs = [torch.autograd.grad(y.square().sum(), x)[0] for y in (result, expected)]
                torch.testing.assert_close(*pairs)
    assert len(failed) == (2 if isinstance(function, Model) else 1)


@pytest.mark.gpu
def test_a_kernel_with_too_much_shared_memory(repeated_warnings: None) -> None:
    from inductor_ext.autotune import decide
    from inductor_ext.templates.triton import constraints
    from inductor_ext.templates.triton.config import GemmConfig

    config = GemmConfig("cp_async", 256, 256, 256, num_stages=2, num_warps=8)
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in "ab")

    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a @ b)

    with (
        mock.patch.object(constraints, "_checks", return_value=()),
        decide.force_config(lambda problem: config),
    ):
        result: Any = torch.compile(model, backend="inductor_ext")(a, b)
    torch.testing.assert_close(result, model(a, b))
    assert compile_again.WARNING in events._warned
