"""Custom operators that overwrite operands while they read others."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("inductor_ext_mutation_test", "DEF")


def _flip_into(src: torch.Tensor, dst: torch.Tensor) -> None:
    # Row by row, so that an operand that shares memory changes while it is read.
    for row in range(len(src)):
        dst[len(src) - 1 - row] = src[row]


def _flip_into_both(src: torch.Tensor, outs: list[torch.Tensor]) -> None:
    for out in outs:
        _flip_into(src, out)


def _increment(x: torch.Tensor) -> None:
    x.add_(1)


def _increment_all(xs: list[torch.Tensor]) -> None:
    for x in xs:
        x.add_(1)


for _name, _schema, _function in (
    ("flip_into", "(Tensor src, Tensor(a!) dst) -> ()", _flip_into),
    ("flip_into_both", "(Tensor src, Tensor(a!)[] outs) -> ()", _flip_into_both),
    ("increment", "(Tensor(a!) x) -> ()", _increment),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")

for _name, _tag in (
    ("increment_all", torch.Tag.needs_exact_strides),
    ("increment_all_contiguous", torch.Tag.needs_contiguous_strides),
):
    _LIBRARY.define(_name + "(Tensor(a!)[] xs) -> ()", tags=(_tag,))
    _LIBRARY.impl(_name, _increment_all, "CompositeExplicitAutograd")

flip_into = torch.ops.inductor_ext_mutation_test.flip_into.default
flip_into_both = torch.ops.inductor_ext_mutation_test.flip_into_both.default
increment = torch.ops.inductor_ext_mutation_test.increment.default
increment_all = torch.ops.inductor_ext_mutation_test.increment_all.default
"""Gets operands with the strides of eager mode."""

increment_all_contiguous = torch.ops.inductor_ext_mutation_test.increment_all_contiguous.default
"""Gets contiguous operands: others are copied, and the copies are copied back."""
