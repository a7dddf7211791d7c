"""Conditions that are added to a signature."""

from __future__ import annotations

import dataclasses

import sympy
import torch
from torch.export import Dim
from torch.utils._sympy import functions

from inductor_ext.cpp_wrapper.signature import conditions, from_export
from inductor_ext.cpp_wrapper.signature.signature import Range, Signature
from test.support.checks_library import tensor_input
from test.support.exported_programs import export


def test_later_guards_are_added_once() -> None:
    program = export(lambda x: x + 1, torch.zeros(4), shapes=({0: Dim.DYNAMIC},))
    signature = from_export.derive_signature(program)
    (size,) = next(iter(program.graph.find_nodes(op="placeholder"))).meta["val"].shape
    environment = size.node.shape_env
    assert bool(size < 1000)
    assert bool(size > -1)
    later = conditions.add_guards(signature, environment)
    (symbol,) = signature.symbols
    assert later == dataclasses.replace(signature, symbols={symbol: Range(2, 999)})
    assert conditions.add_guards(later, environment) == later


def test_a_condition_that_cannot_be_expressed_is_recorded() -> None:
    symbol = sympy.Symbol("s0", integer=True)
    signature = Signature((tensor_input("x", ("s0",)),), (), {"s0": Range(2)})
    condition = sympy.Gt(functions.FloatTrueDiv(symbol, 3), 2)
    extended = conditions.add_conditions(signature, [condition])
    assert extended.constraints == ()
    assert len(extended.unchecked) == 1
    assert "s0" in extended.unchecked[0]
