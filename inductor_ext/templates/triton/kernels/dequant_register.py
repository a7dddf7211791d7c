"""Skinny GEMMs with integer b, loaded from global memory straight into tensor core registers.

The kernel of the template `direct`. With 4-bit or 8-bit b, a loop that stages tiles in shared
memory is not limited by memory bandwidth: every step waits for the slowest warp, and bytes that are
used once go through shared memory twice. This kernel avoids shared memory in the loop, and its
warps do not wait for each other:

- a CTA has `BLOCK_M` rows and `COLUMNS` columns of one output. Its warps divide K; each has
  accumulators of its own in the batch dimension of a three-dimensional `tl.dot`, which are reduced
  once, at the end;
- a lane loads 16 bytes of a column of b at a time. The order of k within a dot does not matter as
  long as a and b agree, so these 16 bytes are the lane's fragments of four mma instructions (k is
  [4 lanes, 4 instructions, 4 adjacent elements] in memory and [instructions, lanes, adjacent
  elements] in the tile), and a is read in the same order. Triton chooses the layouts: the
  dimensions have the order (`AXES`) in which the layout of coalesced loads is the one that the dot
  needs, so that no element moves between threads;
- likewise the columns of a lane are adjacent (column g * n + i of lane g is at i * 8 + g), so that
  their scales are one load;
- b is the first operand of the tensor cores: 16 columns of b by 8 rows of a;
- the operands of the next step are loaded before the current step is multiplied, as 32-bit words:
  single bytes that are live across iterations would be unpacked and packed in every step;
- scales of groups along K multiply the float32 accumulators of a group, not b;
- rows and columns beyond the last one are loaded from the last one, and are not stored;
- fused weights (`PARTS`), gates (`GATED`) and split-K (`SPLIT_K`) work as in `tile`.
"""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.kernels import common, dequantize

MACROS = r"""
{%- set chunks = range(CHUNKS) %}
{%- set chunk = BLOCK_K // (WARPS * CHUNKS) %}
{%- set per_word = 8 if packed else 4 %}
{%- set parts_of_a = 4 if packed else 2 %}
{%- set grouped = SCALES == "'group'" %}
{#- Positions of dimensions: `index` places a range along one, `ordered` lists those of several. #}
{%- macro index(axis) -%}
[
{%- for name in AXES %}{{":" if name == axis else "None"}}, {% endfor -%}
]
{%- endmacro %}
{%- macro ordered(names) -%}
{%- for name in names %}{{AXES.index(name) if name in AXES else name}}{{", " if not loop.last}}
{%- endfor %}
{%- endmacro %}
{#- A tile [WARPS, `columns`, 64] of the first to the fourth of elements adjacent along K. #}
{%- macro b_tile(target, columns, first, second, third, fourth) %}
        {{target}} = tl.join(
            tl.join({{first}}, {{third}}), tl.join({{second}}, {{fourth}})
        ).permute({{ordered(("warp", "rest", "lane", 4, "lane_k", 5, 6))}})
        {{target}} = tl.reshape({{target}}, (WARPS, {{columns}}, 64))
{%- endmacro %}
{#- A tile [WARPS, 64, BLOCK_M] of the `parts_of_a` pieces that were loaded of a; if b is packed,
    one of the even columns of a and one of the odd ones. #}
{%- macro a_tile(target, even, odd, pieces) %}
{%- if packed %}
        {{target}} = tl.join(
            tl.join({{pieces[0]}}, {{pieces[2]}}), tl.join({{pieces[1]}}, {{pieces[3]}})
        ).permute({{ordered(("warp", 5, 6, "lane_k", 4, "rest", "lane"))}})
        {{target}} = tl.reshape({{target}}, (WARPS, 64, BLOCK_M))
        {{even}} = ({{target}} & 0xFFFF).to(tl.int16).to(A.dtype.element_ty, bitcast=True)
        {{odd}} = ({{target}} >> 16).to(tl.int16).to(A.dtype.element_ty, bitcast=True)
{%- else %}
        {{target}} = tl.join({{pieces | join(", ")}})
        {{target}} = {{target}}.permute({{ordered(("warp", 5, 4, "lane_k", "rest", "lane"))}})
        {{target}} = tl.reshape({{target}}, (WARPS, 4, 4, 4, BLOCK_M)).permute(0, 1, 3, 2, 4)
        {{target}} = tl.reshape({{target}}, (WARPS, 64, BLOCK_M))
{%- endif %}
{%- endmacro %}
{#- Add the accumulators of a group, times its columns' scales, the same for lanes along K. #}
{%- macro add_group(sums, part, scale, columns) %}
        scale = {{scale}}.permute({{ordered(("warp", "rest", "lane", "lane_k", "element"))}})
        scale = tl.reshape(scale, (WARPS, {{columns}}, 4))
        {{sums}} += {{part}} * tl.max(scale.to(tl.float32), 2)[:, :, None]
{%- endmacro %}
{#- Reduce over all warps, to [`columns`, BLOCK_M]. `tl.sum` along warps would write accumulators to
    shared memory with 8 or more threads per bank; if halves are split and added, Triton converts
    the layout once, without such conflicts. #}
{%- macro add_warps(sums, columns, indent) %}
{%- set left = namespace(warps=WARPS) %}
{%- for _ in range(4) if left.warps > 1 %}
{%- set left.warps = left.warps // 2 %}
{{indent}}{{sums}} = tl.reshape({{sums}}, (2, {{left.warps}}, {{columns}}, BLOCK_M))
{{indent}}low, high = tl.split({{sums}}.permute(1, 2, 3, 0))
{{indent}}{{sums}} = low + high
{%- endfor %}
{{indent}}{{sums}} = tl.reshape({{sums}}, ({{columns}}, BLOCK_M))
{%- endmacro %}
{#- Indices of a thread: its lane along K and along the other dimension, its warp, the 4 words of a
    load, and the rows of a that it loads. #}
{%- macro lanes() %}
    lane_k = tl.arange(0, 4){{index("lane_k")}}
    lane = tl.arange(0, 8){{index("lane")}}
    warp = tl.arange(0, WARPS){{index("warp")}}
    word = tl.arange(0, 4){{index("element")}}
    row = tl.arange(0, BLOCK_M // 8){{index("rest")}} * 8 + lane
    row = tl.minimum(pid_m * BLOCK_M + row, M - 1)
{%- endmacro %}
{#- Addresses of a lane's first elements of a, in the rows `row`. #}
{%- macro a_pointers() %}
    {%- if packed %}
    a_at = A.to(tl.pointer_type(tl.int32)) + row * (stride_am // 2) + along_k * 4 + word
    {%- else %}
    a_at = A + row * stride_am + along_k * 4 + tl.arange(0, 8){{index("element")}}
    {%- endif %}
{%- endmacro %}
{#- Load piece `j` of chunk `i` of these rows. #}
{%- macro a_piece(i, j) -%}
tl.load(a_at + {{i * 64 + j * (4 if packed else 8)}})
{%- endmacro %}
{#- Offsets of the scales of the columns `column`, 8 times `rest`, in the shape of words of b. #}
{%- macro scale_columns(like, rest) %}
    {%- set sizes = {"lane_k": 4, "lane": 8, "warp": "WARPS", "rest": rest, "element": 1} %}
    scale_columns = tl.broadcast_to(
        column * {{stride(like, 1)}},
        (
        {%- for name in AXES %}{{sizes[name]}}{{", " if not loop.last}}{% endfor -%}
        ),
    )
{%- endmacro %}
"""
"""Macros of kernels that load words of b, and of a, straight into registers."""

SOURCE = (
    common.MACROS
    + common.ARGUMENTS
    + dequantize.MACROS
    + MACROS
    + r"""
{#- Names of the words of a weight, its scales, their argument, and the accumulators. `like`: the
    argument whose strides all scales have. #}
{%- set like = "S0" if PARTS > 1 else "S" %}
{%- set matmuls = [("b", "s", "S0", "acc"), ("c", "t", "S1", "up")] if GATED
    else [("b", "s", "S", "acc")] %}
{#- Load step `k` of a warp: words of b, scales of its columns, and rows of a. #}
{%- macro fetch(indent, k) %}
{%- for i in chunks %}
{%- for b, s, S, _ in matmuls %}
{{indent}}{{b}}{{i}} = tl.load({{b}}_at + {{i * 16}}, eviction_policy="evict_first")
{%- if grouped %}
{{indent}}{{s}}{{i}} = tl.load(
{{indent}}    {{S}} + (begin + {{k}} + {{i * chunk}}) // GROUP * {{stride(like, 0)}} + scale_columns
{{indent}})
{%- endif %}
{%- endfor %}
{%- for j in range(parts_of_a) %}
{{indent}}a{{i}}_{{j}} = {{a_piece(i, j)}}
{%- endfor %}
{%- endfor %}
{%- endmacro %}
{#- Reduce over all warps, to [BLOCK_M, COLUMNS] with the columns in order. #}
{%- macro folded(sums) %}
{{- add_warps(sums, "COLUMNS", "    ")}}
    {{sums}} = tl.reshape({{sums}}, (COLUMNS // 8, 8, BLOCK_M)).permute(2, 1, 0)
    {{sums}} = tl.reshape({{sums}}, (BLOCK_M, COLUMNS))
{%- endmacro %}
{{def_kernel(*(["A"] + weights + extra))}}
    M = {{size("A", -2)}}
    K = {{size("A", -1)}}
    {{- tiles_along_n()}}
    stride_am = {{stride("A", -2)}}
{{place()}}
{{columns()}}
    {%- if SCALES != "'none'" %}{{of_tile("S")}}{% endif %}
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)

{{- lanes()}}
    column = tl.arange(0, COLUMNS // 8){{index("rest")}} + lane * (COLUMNS // 8)
    column += (pid_n{{" - tile" if PARTS > 1 and not GATED}}) * COLUMNS
    {%- if not EVEN_N %}
    column = tl.minimum(column, N - 1)
    {%- endif %}
    share = K // (SPLIT_K * WARPS)
    begin = ({{"split * WARPS + " if SPLIT_K > 1}}warp) * share
    along_k = ({{"split * WARPS + " if SPLIT_K > 1}}warp) * (share // {{per_word}}) + lane_k * 4
    b_at = B.to(tl.pointer_type(tl.int32)) + column * (stride_bn // 4) + along_k + word
    {%- if GATED %}
    c_at = B1.to(tl.pointer_type(tl.int32)) + column * ({{stride("B1", -1)}} // 4) + along_k + word
    {%- endif %}
    {%- if grouped %}{{scale_columns(like, "COLUMNS // 8")}}{% endif %}
    {{- a_pointers()}}
    {%- for _, _, _, sums in matmuls %}
    {{sums}} = tl.zeros((WARPS, COLUMNS, BLOCK_M), dtype=tl.float32)
    {%- endfor %}
    {%- if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    {%- endif %}
    {{- fetch("    ", 0)}}
    for k in tl.range(0, share, {{CHUNKS * chunk}}, num_stages=1):
        {%- for i in chunks %}
        {%- for b, s, _, _ in matmuls %}
        {{b}}{{i}}_now = {{b}}{{i}}
        {%- if grouped %}
        {{s}}{{i}}_now = {{s}}{{i}}
        {%- endif %}
        {%- endfor %}
        {%- for j in range(parts_of_a) %}
        a{{i}}_{{j}}_now = a{{i}}_{{j}}
        {%- endfor %}
        {%- endfor %}
        # The last step loads itself again.
        ahead = tl.where(k + {{CHUNKS * chunk}} < share, {{CHUNKS * chunk}}, 0)
        {%- for b, _, _, _ in matmuls %}
        {{b}}_at += ahead // {{per_word}}
        {%- endfor %}
        a_at += ahead{{" // 2" if packed}}
        {{- fetch("        ", "k + ahead")}}
        {%- for i in chunks %}
        {%- set pieces = [] %}
        {%- for j in range(parts_of_a) %}
        {%- set _ = pieces.append("a%d_%d_now" % (i, j)) %}
        {%- endfor %}
        {{- a_tile("a", "even", "odd", pieces)}}
        {%- for b, s, _, sums in matmuls %}
        {{- words(b ~ i ~ "_now")}}
        {%- set into = "part" if grouped else sums %}
        {%- set before = "" if grouped else ", " ~ sums %}
        {%- if packed %}
        {{- b_tile("b_even", "COLUMNS", "even_0", "even_1", "even_2", "even_3")}}
        {{into}} = tl.dot(b_even, even{{before}})
        {{- b_tile("b_odd", "COLUMNS", "odd_0", "odd_1", "odd_2", "odd_3")}}
        {{into}} = tl.dot(b_odd, odd, {{into}})
        {%- else %}
        {{- b_tile("b_all", "COLUMNS", "all_0", "all_1", "all_2", "all_3")}}
        {{into}} = tl.dot(b_all, a{{before}})
        {%- endif %}
        {%- if grouped %}
        # Lanes along K have the same scales.
        {{- add_group(sums, "part", s ~ i ~ "_now", "COLUMNS")}}
        {%- endif %}
        {%- endfor %}
        {%- endfor %}

    {%- for _, _, _, sums in matmuls %}{{folded(sums)}}{% endfor %}
    {{- finish()}}
"""
)


@functools.cache
def _axes() -> tuple[str, ...]:
    """Return the dimensions of a warp's loads, in the order of a layout of coalesced loads.

    Triton distributes threads along the contiguous dimension first, then along the others: from the
    first one on up to version 3.6, from the last one on since 3.7.
    """
    axes = ("lane_k", "lane", "warp", "rest")
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "3.7"
    newer = tuple(int(part) for part in version.split(".")[:2]) >= (3, 7)
    return (*(reversed(axes) if newer else axes), "element")


def constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the kernel's constants for a problem and a configuration."""
    return {
        **common.tile_constants(problem, config),
        **common.load_constants(problem, config),
        **dequantize.constants(problem),
        "AXES": _axes(),
        "WARPS": config.num_warps,
        "CHUNKS": config.chunks(problem),
    }
