"""Grouped GEMM: groups of different sizes in one launch, loaded by TMA.

The kernel of the template `grouped`, with the semantics of torch._grouped_mm. Offsets are the ends
of the groups along the dimension that they divide (`DIVIDED`):

- `m`: rows of a, [M, K]; each group has its own matrix b, [G, K, N];
- `n`: columns of b, [K, N]; each group has its own matrix a, [G, M, K];
- `k`: columns of a and rows of b; the outputs are a batch, [G, M, N].

The kernel is persistent: one CTA per SM loops over the tiles of all groups. If group sizes
determine the number of tiles, every CTA computes the prefix sums of all groups' tiles at once and
finds the group of a tile by comparing with them. A tile may load rows or columns of the next group,
but does not store them. If the groups divide K, such elements would be accumulated, so the last
step of a group is masked.

fp8 scales (`SCALED`), per row of a and per column of b, are applied to the accumulators.
"""

from __future__ import annotations

from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import FP8, next_power_of_two
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.kernels import common

SOURCE = (
    common.MACROS
    + common.TMA
    + r"""
{%- set cut = {"'m'": "BLOCK_M", "'n'": "COLUMNS"}.get(DIVIDED) %}
{#- Element g of a vector with one element for each group. #}
{%- macro pick(vector) -%}
tl.sum(tl.where(groups == g, {{vector}}, 0), 0)
{%- endmacro %}
{{def_kernel(*(["A", "B", "OFFSETS"] + (["SA", "SB"] if SCALED else [])))}}
    M = {{size("A", -2)}}
    N = {{size("B", -1)}}
    {{- along_k()}}
    {{- a_descriptor("A", "GROUPS")}}
    {{- b_descriptor("B", "GROUPS", 0)}}

    {%- if cut %}
    groups = tl.arange(0, GROUPS_POWER)
    ends = tl.load(OFFSETS + groups, mask=groups < GROUPS, other=0)
    begins = tl.load(OFFSETS + groups - 1, mask=(groups > 0) & (groups < GROUPS), other=0)
    others = {{"TILES_N" if DIVIDED == "'m'" else "tl.cdiv(M, BLOCK_M)"}}
    counts = tl.cdiv(tl.maximum(ends - begins, 0), {{cut}}) * others
    totals = tl.cumsum(counts, 0)
    tiles = tl.sum(counts, 0)
    {%- else %}
    tiles_m = tl.cdiv(M, BLOCK_M)
    matrix = tiles_m * TILES_N
    tiles = matrix * GROUPS
    {%- endif %}
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        {%- if cut %}
        g = tl.sum((totals <= tile).to(tl.int32), 0)
        begin = {{pick("begins")}}
        end = {{pick("ends")}}
        local = tile - {{pick("totals - counts")}}
        {%- if DIVIDED == "'m'" %}
        tiles_m = tl.cdiv(end - begin, BLOCK_M)
        tiles_n = TILES_N
        {%- else %}
        tiles_m = others
        tiles_n = tl.cdiv(end - begin, COLUMNS)
        {%- endif %}
        {%- else %}
        g = (tile // matrix).to(tl.int32)
        local = tile % matrix
        tiles_n = TILES_N
        begin = tl.load(OFFSETS + g - 1, mask=g > 0, other=0)
        end = tl.load(OFFSETS + g)
        {%- endif %}
        width = GROUP_M * tiles_n
        group = local // width
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        row = ((group * GROUP_M + (local % width) % group_rows) * BLOCK_M).to(tl.int32)
        column = ((local % width) // group_rows * COLUMNS).to(tl.int32)
        {%- if DIVIDED == "'m'" %}
        row += begin
        {%- elif DIVIDED == "'n'" %}
        column += begin
        {%- endif %}
        {%- set shape = ("COLUMNS", "BLOCK_M") if SWAP else ("BLOCK_M", "COLUMNS") %}
        acc = tl.zeros(({{shape | join(", ")}}), dtype=ACC_TYPE)
        {%- if cut %}
        for k in tl.range(0, K, BLOCK_K):
            a = {{fetch_a("g", "row", "k")}}
            b = {{fetch_b("b0_desc", "g", "column", "k")}}
            acc = {{multiply("a", "b", "acc")}}
        {%- else %}
        whole = begin + (tl.maximum(end - begin, 0) // BLOCK_K) * BLOCK_K
        for k in tl.range(begin, whole, BLOCK_K):
            a = {{fetch_a("g", "row", "k")}}
            b = {{fetch_b("b0_desc", "g", "column", "k")}}
            acc = {{multiply("a", "b", "acc")}}
        if whole < end:
            rk = whole + tl.arange(0, BLOCK_K)
            a = {{fetch_a("g", "row", "whole")}}
            b = {{fetch_b("b0_desc", "g", "column", "whole")}}
            a = tl.where((rk < end){{"[:, None]" if SWAP else "[None, :]"}}, a, 0.0).to(a.dtype)
            b = tl.where((rk < end){{"[None, :]" if SWAP else "[:, None]"}}, b, 0.0).to(b.dtype)
            acc = {{multiply("a", "b", "acc")}}
        {%- endif %}
        {%- set m = "[None, :]" if SWAP else "[:, None]" %}
        {%- set n = "[:, None]" if SWAP else "[None, :]" %}
        rm = row.to(INDEX_DTYPE) + tl.arange(0, BLOCK_M)
        rn = column.to(INDEX_DTYPE) + tl.arange(0, COLUMNS)
        idx_m = rm{{m}}
        idx_n = rn{{n}}
        rows = {{"end" if DIVIDED == "'m'" else "M"}}
        columns = {{"end" if DIVIDED == "'n'" else "N"}}
        mask = (idx_m < rows) & (idx_n < columns)
        {%- if SCALED %}
        {%- set a_group = "" if DIVIDED == "'m'" else "g * M + " %}
        {%- set b_group = "" if DIVIDED == "'n'" else "g * N + " %}
        sa = tl.load(SA + {{a_group}}rm, mask=rm < rows, other=0)
        sb = tl.load(SB + {{b_group}}rn, mask=rn < columns, other=0)
        acc = acc * sa{{m}} * sb{{n}}
        {%- endif %}
        {{store_output(("idx_m", "idx_n") if cut else ("g", "idx_m", "idx_n"), "acc", "mask",
                       indent_width=8, val_shape=shape)}}
"""
)


def constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the kernel's constants for a problem and a configuration."""
    return {
        **common.tile_constants(problem, config),
        **common.tma_constants(problem, config),
        "SPLIT_K": 1,
        "DIVIDED": repr(problem.divided),
        "GROUPS": problem.batch,
        "GROUPS_POWER": next_power_of_two(problem.batch),
        "SCALED": problem.a.dtype in FP8,
    }
