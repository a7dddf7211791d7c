"""Guards of queries that only choose the faster of two variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

from inductor_ext.cpp_wrapper.signature import conditions, from_export, guard_filter
from inductor_ext.cpp_wrapper.signature.signature import Range
from test.support.exported_programs import export


def asker(file: str) -> Callable[[Any], bool]:
    """A query about a size, as from a file of torch."""
    scope: dict[str, Any] = {}
    exec(compile("def ask(size): return bool(size < 16)", file, "exec"), scope)
    ask: Callable[[Any], bool] = scope["ask"]
    return ask


def test_performance_guards_restrict_no_size() -> None:
    program = export(lambda x: x + 1, torch.zeros(4), shapes=({0: Dim.DYNAMIC},))
    signature = from_export.derive_signature(program)
    (size,) = next(iter(program.graph.find_nodes(op="placeholder"))).meta["val"].shape
    environment = size.node.shape_env
    limits = dict(environment.var_to_range)
    with guard_filter.ignore_performance_guards(program):
        assert asker("/python/torch/_subclasses/fake_impls.py")(size)
        assert asker("/python/torch/_inductor/codegen/cpp.py")(size)
        assert environment.guards == []
        assert dict(environment.var_to_range) == limits
        assert conditions.add_guards(signature, environment) == signature
        assert asker("/python/torch/_inductor/lowering.py")(size)
    assert "evaluate_expr" not in vars(environment)
    (symbol,) = signature.symbols
    assert conditions.add_guards(signature, environment).symbols == {symbol: Range(2, 15)}


def test_sizes_that_differ_are_no_guard_of_a_view() -> None:
    """Torch asks whether dimensions can be merged: `2 * ((size + 1) // 2) == size`. The code of a
    view is correct if they are not, and may rely on it if they are.
    """
    program = export(lambda x: x + 1, torch.zeros(5), shapes=({0: Dim.DYNAMIC},))
    (size,) = next(iter(program.graph.find_nodes(op="placeholder"))).meta["val"].shape
    environment = size.node.shape_env
    source = "def ask(size, other): return bool(size == other)"
    scope: dict[str, Any] = {}
    exec(compile(source, "/python/torch/_subclasses/fake_impls.py", "exec"), scope)
    with guard_filter.ignore_performance_guards(program):
        assert not scope["ask"](2 * ((size + 1) // 2), size)
        assert environment.guards == []
        assert scope["ask"](2 * ((size + 1) // 2), size + 1)
        assert len(environment.guards) == 1
