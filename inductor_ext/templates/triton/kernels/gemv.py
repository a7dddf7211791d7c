"""Skinny GEMMs without tensor cores: bound by reading b once, with wide loads.

The kernel of the template `gemv`:

- a CTA computes `BLOCK_M` rows (up to 8, usually all of them) and `COLUMNS` columns of one matrix.
  Its threads are laid out over tiles of `COLUMNS` x `BLOCK_K` according to the memory layout of b,
  and each multiplies its elements of b by those of every row of a. Accumulators stay in registers,
  in float32, and are reduced over K among the threads once, at the end;
- fused weights (`PARTS`), gates (`GATED`), norms of a (`NORMALIZE`, `STANDARDIZE`), quantized b
  (`DEQUANTIZE`), split-K (`SPLIT_K`), row amax and batches work as in `tile`; a normalized row is
  not rounded before it is multiplied.
"""

from __future__ import annotations

from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.kernels import common

SOURCE = (
    common.MACROS
    + common.ARGUMENTS
    + r"""
{%- set rows = range(BLOCK_M) %}
{{def_kernel(*(["A"] + weights + extra + maxima))}}
    M = {{size("A", -2)}}
    K = {{size("A", -1)}}
    {{- tiles_along_n()}}
    stride_am = {{stride("A", -2)}}
    stride_ak = {{stride("A", -1)}}
{{place()}}
{{columns()}}
    {%- if SCALES != "'none'" %}{{of_tile("S")}}{% endif %}
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rk = tl.arange(0, BLOCK_K).to(INDEX_DTYPE)

    {%- if SPLIT_K > 1 %}
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = split * share
    end = min(begin + share, K)
    {%- else %}
    begin = 0
    end = K
    {%- endif %}
    {%- if BATCHED %}
    A = A + q * {{stride("A", 0)}}
    B = B + q * {{stride("B0", 0)}}
    {%- endif %}

    {%- set b_masks = [] if EVEN_N else ["(rn[:, None] < N)"] %}
    {%- if not EVEN_K %}
    {%- set _ = b_masks.append("(rk[None, :] < end - k)") %}
    {%- endif %}
    {%- set b_mask = ", mask=%s, other=0" % " & ".join(b_masks) if b_masks else "" %}
    {%- set k_mask = "" if EVEN_K else ", mask=rk < end - k, other=0" %}
    {%- set once = ', eviction_policy="evict_first"' if B_ONCE else "" %}

    b_at = B + (begin + rk)[None, :] * stride_bk + rn[:, None] * stride_bn
    {%- if GATED %}
    c_at = B1 + (begin + rk)[None, :] * {{stride("B1", -2)}} + rn[:, None] * {{stride("B1", -1)}}
    {%- endif %}
    {%- if WEIGHTED %}
    w_at = W + begin + rk
    {%- endif %}
    {%- if SHIFTED %}
    v_at = V + begin + rk
    {%- endif %}
    a_at = A + pid_m * BLOCK_M * stride_am + (begin + rk) * stride_ak
    {%- for i in rows %}
    acc{{i}} = tl.zeros((COLUMNS, BLOCK_K), dtype=tl.float32)
    {%- if GATED %}
    up{{i}} = tl.zeros((COLUMNS, BLOCK_K), dtype=tl.float32)
    {%- endif %}
    {%- if NORMALIZE %}
    squares{{i}} = tl.zeros((BLOCK_K,), dtype=tl.float32)
    {%- endif %}
    {%- endfor %}
    {%- if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    {%- endif %}
    {%- if STANDARDIZE %}{{statistics()}}
    {%- for i in rows %}
    {%- for name in ("mean", "rstd") %}
    {{name}}{{i}} = tl.sum(tl.where(tl.arange(0, BLOCK_M) == {{i}}, {{name}}, 0.0), 0)
    {%- endfor %}
    {%- endfor %}
    {%- endif %}
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        b = tl.load(b_at{{b_mask}}{{once}}).to(tl.float32)
        {%- if GATED %}
        c = tl.load(c_at{{b_mask}}{{once}}).to(tl.float32)
        {%- endif %}
        {%- if WEIGHTED %}
        weight = tl.load(w_at{{k_mask}}).to(tl.float32)
        w_at += BLOCK_K
        {%- endif %}
        {%- if SHIFTED %}
        shift = tl.load(v_at{{k_mask}}).to(tl.float32)
        v_at += BLOCK_K
        {%- endif %}
        {%- for i in rows %}
        {%- if EVEN_M %}
        a{{i}} = tl.load(a_at + {{i}} * stride_am{{k_mask}}).to(tl.float32)
        {%- else %}
        a{{i}} = tl.load(
            a_at + {{i}} * stride_am,
            mask=(pid_m * BLOCK_M + {{i}} < M) & (rk < end - k),
            other=0,
        ).to(tl.float32)
        {%- endif %}
        {%- if NORMALIZE %}
        squares{{i}} += a{{i}} * a{{i}}
        {%- endif %}
        {%- if STANDARDIZE %}
        a{{i}} = (a{{i}} - mean{{i}}) * rstd{{i}}
        {%- endif %}
        {%- if WEIGHTED %}
        a{{i}} = a{{i}} * weight
        {%- endif %}
        {%- if SHIFTED %}
        a{{i}} = a{{i}} + shift
        {%- endif %}
        acc{{i}} += b * a{{i}}[None, :]
        {%- if GATED %}
        up{{i}} += c * a{{i}}[None, :]
        {%- endif %}
        {%- endfor %}
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk
        {%- if GATED %}
        c_at += BLOCK_K * {{stride("B1", -2)}}
        {%- endif %}

    {#- Reduce the accumulators of every row along K; the results are the rows of one tile. #}
    {%- macro total(name, i) -%}
    tl.sum({{name}}{{i}}, 1){{" * norm%d" % i if NORMALIZE}}
    {%- endmacro %}
    {%- macro tile(name) -%}
    {%- if BLOCK_M == 1 %}
    {{name}} = {{total(name, 0)}}[None, :]
    {%- else %}
    {{name}} = tl.zeros((BLOCK_M, COLUMNS), dtype=tl.float32)
    row = tl.arange(0, BLOCK_M)[:, None]
    {%- for i in rows %}
    {{name}} = tl.where(row == {{i}}, ({{total(name, i)}})[None, :], {{name}})
    {%- endfor %}
    {%- endif %}
    {%- endmacro %}
    {%- if NORMALIZE %}
    {%- for i in rows %}
    norm{{i}} = tl.rsqrt(tl.sum(squares{{i}}, 0) / K + EPSILON)
    {%- endfor %}
    {%- endif %}
{{tile("acc")}}
    {%- if GATED %}
{{tile("up")}}
    {%- endif %}
    {{- finish()}}
"""
)


def constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the kernel's constants for a problem and a configuration."""
    return {
        **common.tile_constants(problem, config),
        **common.load_constants(problem, config),
        "STAGES": config.num_stages,
    }
