"""Options of the C++ wrapper for graphs that are compiled by the first backward pass."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering


def test_options_are_set_for_backward_graphs() -> None:
    """On a GPU, the kernels of a graph are recorded only if `store_cubin` is set."""
    stock = GraphLowering.codegen_with_cpp_wrapper
    seen = []

    def codegen(graph: GraphLowering) -> Any:
        seen.append((graph.is_backward, config.triton.store_cubin))
        return stock(graph)

    function = torch.compile(
        lambda x: x.sin().sum(), backend="inductor_ext", options={"cpp_wrapper": True}
    )
    x = torch.randn(7, requires_grad=True)
    with mock.patch.object(GraphLowering, "codegen_with_cpp_wrapper", codegen):
        loss = function(x)
        assert seen == [(False, True)]
        # The options of torch.compile are no longer in effect.
        assert not config.cpp_wrapper
        loss.backward()
    assert seen == [(False, True), (True, True)]
    torch.testing.assert_close(x.grad, x.detach().cos())
