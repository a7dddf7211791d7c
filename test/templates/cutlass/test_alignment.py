"""Alignment of operands: how wide a CUTLASS kernel accesses them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from inductor_ext import exc
from inductor_ext.templates.cutlass.alignment import alignment, of_layout
from inductor_ext.templates.tensors import DTYPE_BITS, Operand
from test.support.gemm_strategies import examples


@dataclasses.dataclass
class Layout:
    """The fields of an Inductor layout that `of_layout` reads."""

    dtype: torch.dtype
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any = 0


ROWS, HIDDEN = sympy.symbols("s0 s1", integer=True, positive=True)


class TestAlignment:
    @pytest.mark.parametrize(
        ("dtype", "sizes", "strides", "offset", "expected"),
        [
            # Contiguous and transposed.
            ("bfloat16", (10, 32), (32, 1), 0, 8),
            ("bfloat16", (32, 10), (1, 32), 0, 8),
            ("bfloat16", (10, 28), (28, 1), 0, 4),
            ("bfloat16", (10, 33), (33, 1), 0, 1),
            # Padding of rows does not increase the alignment.
            ("bfloat16", (10, 33), (40, 1), 0, 1),
            ("bfloat16", (10, 32), (33, 1), 0, 1),
            # In a batch.
            ("bfloat16", (4, 10, 32), (320, 32, 1), 0, 8),
            ("bfloat16", (4, 32, 10), (320, 1, 32), 0, 8),
            ("bfloat16", (4, 10, 32), (322, 32, 1), 0, 2),
            ("bfloat16", (1, 10, 32), (322, 32, 1), 0, 8),
            ("bfloat16", (4, 10, 32), (0, 32, 1), 0, 8),
            # With a storage offset.
            ("bfloat16", (10, 32), (32, 1), 4, 4),
            ("bfloat16", (10, 32), (32, 1), 3, 1),
            # By dtype: 16 bytes at most.
            ("float32", (10, 32), (32, 1), 0, 4),
            ("float32", (10, 6), (6, 1), 0, 2),
            ("float8_e4m3fn", (10, 32), (32, 1), 0, 16),
            ("int8", (10, 24), (24, 1), 0, 8),
            ("int4", (10, 32), (32, 1), 0, 32),
            # Nothing contiguous.
            ("bfloat16", (10, 32), (64, 2), 0, 1),
            ("bfloat16", (), (), 0, 1),
        ],
    )
    def test_alignment_follows_sizes_strides_and_offset(
        self,
        dtype: str,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        expected: int,
    ) -> None:
        assert alignment(dtype, sizes, strides, offset) == expected

    def test_alignment_includes_the_storage_address(self) -> None:
        assert alignment("bfloat16", (10, 32), (32, 1), base=4) == 2
        with pytest.raises(exc.BadGemmError, match="float3"):
            alignment("float3", (10, 32), (32, 1))

    @given(
        dtype=st.sampled_from(sorted(DTYPE_BITS)),
        rows=st.integers(2, 64),
        columns=st.integers(2, 64),
        pad=st.integers(0, 16),
        offset=st.integers(0, 32),
    )
    @examples(60)
    def test_alignment_of_operands_divides_rows(
        self, dtype: str, rows: int, columns: int, pad: int, offset: int
    ) -> None:
        strides = (columns + pad, 1)
        operand = Operand.of(dtype, (rows, columns), strides, offset=offset)
        result = alignment(dtype, (rows, columns), strides, offset)
        assert result == math.gcd(operand.alignment, columns)

    @pytest.mark.parametrize(
        ("layout", "expected"),
        [
            (Layout(torch.bfloat16, (10, 32), (32, 1)), 8),
            (Layout(torch.bfloat16, (sympy.Integer(10), 32), (sympy.Integer(32), 1), 2), 2),
            # Any number of rows; rows of any length; rows of four times any length.
            (Layout(torch.bfloat16, (ROWS, 32), (32, 1)), 8),
            (Layout(torch.bfloat16, (ROWS, HIDDEN), (HIDDEN, 1)), 1),
            (Layout(torch.bfloat16, (ROWS, 4 * HIDDEN), (4 * HIDDEN, 1)), 4),
            (Layout(torch.bfloat16, (ROWS, 8 * HIDDEN), (8 * HIDDEN, 1), 4 * ROWS), 4),
            (Layout(torch.bfloat16, (ROWS, 8 * HIDDEN + 16), (8 * HIDDEN + 16, 1)), 8),
            (Layout(torch.bfloat16, (ROWS, HIDDEN // 2 * 8), (HIDDEN // 2 * 8, 1)), 8),
            (Layout(torch.bfloat16, (ROWS, HIDDEN, 32), (32 * HIDDEN, 32, 1)), 8),
        ],
    )
    def test_alignment_of_layouts_is_valid_for_all_sizes(
        self, layout: Layout, expected: int
    ) -> None:
        assert of_layout(layout) == expected

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_alignment_equals_inductors(self, dtype: torch.dtype) -> None:
        from torch._inductor.codegen.cutlass.utils import get_max_alignment
        from torch._inductor.ir import FixedLayout

        for sizes, strides, offset in (
            ((10, 32), (32, 1), 0),
            ((32, 10), (1, 32), 0),
            ((4, 10, 32), (322, 32, 1), 0),
            ((4, 10, 32), (320, 32, 1), 4),
            ((10, 28), (36, 1), 0),
            ((10, 32), (64, 2), 0),
        ):
            layout = FixedLayout(torch.device("cpu"), dtype, list(sizes), list(strides), offset)
            assert of_layout(layout) == get_max_alignment(layout)
