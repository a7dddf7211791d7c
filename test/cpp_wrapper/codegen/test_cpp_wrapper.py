"""Which compiles get the extension's wrapper, and what it adds to Inductor's code generation."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from inductor_ext import config, events
from inductor_ext.cpp_wrapper.codegen import cpp_wrapper

GRAPH = SimpleNamespace(
    aot_mode=True,
    cpp_wrapper=True,
    device_type="cpu",
    device_types={"cpu"},
    const_module=None,
    is_const_graph=False,
)


writes_two = pytest.mark.skipif(
    not hasattr(GraphLowering, "_run_jit_variant_for_autotune"),
    reason="this torch never writes a program twice",
)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, repeated_warnings: None) -> Any:
    """The warnings given so far."""
    caplog.set_level(logging.WARNING, logger=events.log.name)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "option",
    [
        {"aot_inductor.dynamic_linkage": False},
        {"aot_inductor.package_cpp_only": True, "aot_inductor.package": False},
        {"aot_inductor.allow_stack_allocation": True},
        {"aot_inductor.use_minimal_arrayref_interface": True},
        {"aot_inductor.cross_target_platform": "windows"},
        {"aot_inductor.enable_lto": True},
    ],
)
def test_options_that_change_the_wrapper_use_inductor(option: dict[str, Any]) -> None:
    with V.set_graph_handler(GRAPH):
        assert cpp_wrapper.supported()
        with inductor_config.patch(option):
            assert not cpp_wrapper.supported()


@writes_two
def test_a_program_generated_twice_uses_inductor(warned: Any) -> None:
    """The program that runs during the compile has no model around it."""
    graph = SimpleNamespace(**{**vars(GRAPH), "is_dual_wrapper_mode": True})
    settings = config.snapshot({})
    with V.set_graph_handler(graph):
        for _ in range(2):
            generator = cpp_wrapper.generator(CppWrapperCpu, settings)
            assert not issubclass(getattr(generator, "cls", generator), cpp_wrapper.AotWrapper)
    (message,) = warned()
    assert (
        "triton.autotune_at_compile_time=False: the package is compiled by Inductor (default)"
        in message
    )


@writes_two
def test_runs_during_the_compile_do_not_include_the_model(warned: Any) -> None:
    pytest.importorskip("triton")
    from test.support import fake_cuda

    programs: list[str] = []

    def run(_: Any, wrapper_code: Any, *__: Any) -> None:
        programs.append(getattr(wrapper_code, "value", wrapper_code))
        raise fake_cuda.Stop

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1

    with (
        mock.patch.object(GraphLowering, "_run_jit_variant_for_autotune", run),
        pytest.raises(RuntimeError, match="The JIT code failed to run"),
    ):
        fake_cuda.lower_cpp(
            function, ((8,), torch.float32), ahead=True, triton__autotune_at_compile_time=False
        )
    (program,) = programs
    assert "model.h" not in program
    assert len(warned()) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_operators_of_the_folding_graph_are_listed_once(shared: bool) -> None:
    """The graphs share one list of operators (torch 2.15) or have one each."""
    first, second = {"op": "first"}, {"op": "first"}
    folding = cpp_wrapper._wrapper_class(CppWrapperCpu, (cpp_wrapper.AotWrapper,)).__new__(
        cpp_wrapper._wrapper_class(CppWrapperCpu, (cpp_wrapper.AotWrapper,))
    )
    # Two calls of one operator are equal but are two entries.
    folding.operators = (first, second)
    graph = SimpleNamespace(const_module=SimpleNamespace(wrapper_code=folding))
    nodes: list[Any] = [first, second] if shared else []
    constructor = cpp_wrapper._Constructor(SimpleNamespace, config.snapshot({}))
    with V.set_graph_handler(graph), V.set_extern_kernel_nodes(nodes):
        constructor.create()
        constructor.create()
        assert [id(node) for node in V.extern_kernel_nodes] == [id(first), id(second)]
