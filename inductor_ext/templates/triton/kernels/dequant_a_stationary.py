"""Skinny GEMMs with integer b, in which each warp keeps its part of a in registers.

The kernel of the template `stationary`. With a small M, `direct` is limited by loads of a: its
fragments pass through L1 once for every 16 columns, which is two or four times the bytes of b, in
pieces that L1 reads at a half or a quarter of its rate. This kernel loads a once and keeps it:

- a CTA has `WIDTH` columns, up to 16 rows and a part of K, which its warps divide. A warp keeps a's
  fragments for its part in registers and loops along N, 16 columns at a time; with gate and up
  projection, first over the columns of one and then over those of the other;
- words of b for the next 16 columns are in flight while the current ones are multiplied. Each load
  overwrites a register as soon as it has been used: there are no moves, since a move would wait for
  its load;
- the accumulators of the warps are reduced after each 16 columns;
- the accumulators of each part of K are written to a workspace. The last CTA of `WIDTH` columns
  reduces all parts, applies scales and gate, and stores.

The layout of b's words in tiles, and the order of K there, are as in `direct`.
"""

from __future__ import annotations

from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import next_power_of_two
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.kernels import common, dequant_register, dequantize
from inductor_ext.templates.triton.templates import STRIP

SOURCE = (
    common.MACROS
    + common.ARGUMENTS
    + dequantize.MACROS
    + dequant_register.MACROS
    + r"""
{%- set like = "S0" if PARTS > 1 else "S" %}
{#- Load chunk `i` of the words of b of the 16 columns at `b_at`, and their scales. #}
{%- macro fetch(indent, i) %}
{{indent}}b{{i}} = tl.load(b_at + {{i * 16}}, eviction_policy="evict_first")
{%- if grouped %}
{{indent}}s{{i}} = tl.load(
{{indent}}    scales_at + (begin + {{i * chunk}}) // GROUP * {{stride(like, 0)}} + scale_columns
{{indent}})
{%- endif %}
{%- endmacro %}
{#- Addresses of the 16 columns `strip`; those of gate precede those of up. #}
{%- macro go_to(strip) %}
    strip_at = {{strip}}
    from_b = B
    stride_at = stride_bn
    {%- if grouped %}
    scales_at = {{"S0" if GATED else "S"}}
    {%- endif %}
    {%- if GATED %}
    if strip_at >= STRIPS:
        strip_at -= STRIPS
        from_b = B1
        stride_at = {{stride("B1", -1)}}
        {%- if grouped %}
        scales_at = S1
        {%- endif %}
    {%- endif %}
    column = tl.minimum(first_column + strip_at * STRIP, N - 1)
    b_at = from_b.to(tl.pointer_type(tl.int32)) + column * (stride_at // 4) + along_k + word
    {%- if grouped %}{{scale_columns(like, "STRIP // 8")}}{% endif %}
{%- endmacro %}
{{def_kernel(*(["A"] + weights + extra))}}
    M = {{size("A", -2)}}
    K = {{size("A", -1)}}
    stride_am = {{stride("A", -2)}}
{{place()}}
{{columns()}}
    {%- if SCALES != "'none'" %}{{of_tile("S")}}{% endif %}
    {%- set matmuls = 2 if GATED else 1 %}
    STRIPS: tl.constexpr = WIDTH // STRIP
    begin_n = (pid_n{{" - tile" if PARTS > 1 and not GATED}}) * WIDTH
    # Beyond the last column of the CTA, and beyond N, nothing is stored.
    rn = tl.arange(0, COLUMNS)
    rn = tl.where(rn < WIDTH, begin_n + rn, N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)

{{- lanes()}}
    first_column = begin_n + lane * (STRIP // 8) + tl.arange(0, STRIP // 8){{index("rest")}}
    begin = (split * WARPS + warp) * {{CHUNKS * chunk}}
    along_k = begin // {{per_word}} + lane_k * 4
    {{- a_pointers()}}
    number = pid
    sums = WORKSPACE + number.to(tl.int64) * (SPLIT_K * BLOCK_M * SUMS)
    order = tl.arange(0, STRIP)
    order = order % 8 * (STRIP // 8) + order // 8
    to = sums + split * (BLOCK_M * COLUMNS)
    to += order[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    sums += tl.arange(0, COLUMNS)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    {%- if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    {%- endif %}
    {{- go_to(0)}}
    {%- for i in chunks %}{{fetch("    ", i)}}{% endfor %}
    {%- for i in chunks %}
    {%- set pieces = [] %}
    {%- for j in range(parts_of_a) %}
    a_{{j}} = {{a_piece(i, j)}}
    {%- set _ = pieces.append("a_%d" % j) %}
    {%- endfor %}
    {{- a_tile("a%d" % i, "even%d" % i, "odd%d" % i, pieces) | replace("\n        ", "\n    ")}}
    {%- endfor %}
    for strip in tl.range(0, {{matmuls}} * STRIPS, num_stages=1):
        acc = tl.zeros((WARPS, STRIP, BLOCK_M), dtype=tl.float32)
        # The last step loads itself again.
        {{- go_to("tl.minimum(strip + 1, %d * STRIPS - 1)" % matmuls) | indent(4)}}
        {%- for i in chunks %}
        {{- words("b%d" % i)}}
        {%- if grouped %}
        scales = s{{i}}
        {%- endif %}
        {{- fetch("        ", i)}}
        {%- set into = "part" if grouped else "acc" %}
        {%- set before = "" if grouped else ", acc" %}
        {%- if packed %}
        {{- b_tile("b_even", "STRIP", "even_0", "even_1", "even_2", "even_3")}}
        {{into}} = tl.dot(b_even, even{{i}}{{before}})
        {{- b_tile("b_odd", "STRIP", "odd_0", "odd_1", "odd_2", "odd_3")}}
        {{into}} = tl.dot(b_odd, odd{{i}}, {{into}})
        {%- else %}
        {{- b_tile("b_all", "STRIP", "all_0", "all_1", "all_2", "all_3")}}
        {{into}} = tl.dot(b_all, a{{i}}{{before}})
        {%- endif %}
        {%- if grouped %}
        # Lanes along K have the same scales.
        {{- add_group("acc", "part", "scales", "STRIP")}}
        {%- endif %}
        {%- endfor %}
{{- add_warps("acc", "STRIP", "        ")}}
        {%- if GATED %}
        {#- The workspace holds the accumulators of gate, of all parts of K, before those of up. #}
        to_up = tl.where(strip < STRIPS, 0, SPLIT_K * BLOCK_M * COLUMNS)
        tl.store(to + strip % STRIPS * (STRIP * BLOCK_M) + to_up, acc)
        {%- else %}
        tl.store(to, acc)
        to += STRIP * BLOCK_M
        {%- endif %}

{{- add_up()}}
    {%- if GATED %}{{sum_of("up", "sums + SPLIT_K * BLOCK_M * COLUMNS")}}{% endif %}
    {{- scaled("[:, None]") | indent(4)}}
    {%- if GATED %}
        acc = {{gate("acc", "up")}}
    {%- endif %}
        idx_m = rm[None, :]
        idx_n = (first + rn)[:, None]
        mask = (rm[None, :] < M) & (rn[:, None] < N)
        {{store_output(("idx_m", "idx_n"), "acc", "mask", indent_width=8,
                       val_shape=("COLUMNS", "BLOCK_M"))}}
"""
)


def constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the kernel's constants for a problem and a configuration."""
    matmuls = 2 if problem.epilogue.gated else 1
    columns = next_power_of_two(config.block_n // matmuls)
    return {
        **dequant_register.constants(problem, config),
        "STRIP": STRIP,
        "WIDTH": config.block_n // matmuls,
        "COLUMNS": columns,
        # Columns of accumulators that a split of K writes for each row.
        "SUMS": columns * matmuls,
        # Accumulators in the workspace have contiguous rows.
        "SWAP": True,
        "EVEN_N": False,
    }
