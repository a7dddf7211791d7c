"""One output tile per CTA: loads by threads, a pipelined loop over K, tensor cores.

The kernel of the templates `splitk`, `cp_async` and `mixed`:

- each CTA computes one tile of `BLOCK_M` rows and `COLUMNS` columns of one matrix. CTAs visit the
  output in groups of `GROUP_M` rows of tiles, which share their reads of b in L2;
- fused weights (`PARTS`) share one launch: a tile belongs to one of them, and their outputs are
  adjacent along N;
- gate and up projection can be fused (`GATED`): a tile computes the same columns of both and stores
  act(gate) * up, each with or without a bias (`BIASED`);
- RMSNorm of a can be fused (`NORMALIZE`, Zhang and Sennrich 2019): the norm of a row scales the
  row's whole output, so squares are accumulated next to the matmul (by tensor cores: they are the
  diagonal of a @ a^T), and the accumulators are scaled once; only the norm's weight is multiplied
  into a first;
- LayerNorm of a can be fused (`STANDARDIZE`, Ba et al. 2016): a first pass over the rows computes
  mean and deviation. The second pass reads the rows from L2, normalizes them in float32, with
  weight and bias, and rounds them once, as a separate kernel would. Subtracting mean(x) * (w @ B)
  from (x * w) @ B instead would need no first pass; but if a mean is large relative to the
  deviation, what is left of the difference is rounding errors of operands with 8 or 11 bits of
  precision;
- b can be dequantized (`DEQUANTIZE`, see `dequantize`): scales of groups along K are applied to b,
  tensor and column scales to the accumulators. Each fused weight has its own scales and zero
  points;
- K can be split among `SPLIT_K` CTAs, which write float32 accumulators: either stacked along M in
  the output, to be reduced by another kernel, or to a workspace, where the CTA that finishes last
  reduces them and runs the epilogue (`ONE_LAUNCH`). Both have a deterministic order;
- a programmatic dependent launch (`PDL`) starts while the previous kernel is running. It allows the
  next kernel to start only after the previous one has ended: Inductor's own dependent launches
  (`triton.enable_pdl`) read the output of any kernel but the last one without waiting. Doing work
  before the wait does not pay either: on an H200, prefetching the first 256 bytes to 8 KiB of each
  column of b into L2 made a chain of GEMMs 1 to 40 % slower;
- tiles can compute the row amax (`ABSOLUTE`), from which the row amax of the whole output follows
  without reading the output again: float8 quantization needs it;
- operands can be swapped (`SWAP`), so that columns are the long side of the tensor cores' tile.
"""

from __future__ import annotations

from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import FP8
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.kernels import common, dequantize

SOURCE = (
    common.MACROS
    + common.ARGUMENTS
    + dequantize.MACROS
    + r"""
{#- The two elements, adjacent along K, of each word of a, as which a is read if b is packed. #}
{%- macro halves(word, even, odd, name) %}
        {{even}} = ({{word}} & 0xFFFF).to(tl.int16).to({{name}}.dtype.element_ty, bitcast=True)
        {{odd}} = ({{word}} >> 16).to(tl.int16).to({{name}}.dtype.element_ty, bitcast=True)
{%- endmacro %}
{{def_kernel(*(["A"] + weights + extra + maxima))}}
    M = {{size("A", -2)}}
    K = {{size("A", -1)}}
    {{- tiles_along_n()}}
    stride_am = {{stride("A", -2)}}
    stride_ak = {{stride("A", -1)}}

    pid = tl.program_id(0).to(INDEX_DTYPE)
    {%- if BATCHED or SPLIT_K > 1 %}
    matrix = tl.cdiv(M, BLOCK_M) * TILES_N
    {{"q" if BATCHED else "split"}} = pid // matrix
    pid = pid % matrix
    {%- endif %}
    width = GROUP_M * TILES_N
    group = pid // width
    group_rows = min(tl.cdiv(M, BLOCK_M) - group * GROUP_M, GROUP_M)
    pid_m = group * GROUP_M + (pid % width) % group_rows
    pid_n = (pid % width) // group_rows
{{columns()}}
    {%- set half = " // 2" if packed else "" %}
    {%- if SCALES != "'none'" %}{{of_tile("S")}}{% endif %}
    {%- if ZEROS %}{{of_tile("Z")}}{% endif %}
    start_m = pid_m * BLOCK_M
    rm = start_m + tl.arange(0, BLOCK_M)
    rk = tl.arange(0, BLOCK_K{{half}}).to(INDEX_DTYPE)

    {%- if SPLIT_K > 1 %}
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = split * share
    end = min(begin + share, K)
    {%- else %}
    begin = 0
    end = K
    {%- endif %}

    {#- Indices of a tile: along its own axis and along K. #}
    {%- set m = "[None, :]" if SWAP else "[:, None]" %}
    {%- set n = "[:, None]" if SWAP else "[None, :]" %}
    {%- set a_k = "[:, None]" if SWAP else "[None, :]" %}
    {%- set b_k = "[None, :]" if SWAP else "[:, None]" %}
    {%- set shape = "(COLUMNS, BLOCK_M)" if SWAP else "(BLOCK_M, COLUMNS)" %}

    {%- set a_masks = [] if EVEN_M else ["(rm%s < M)" % m] %}
    {%- set b_masks = [] if EVEN_N else ["(rn%s < N)" % n] %}
    {%- if not EVEN_K %}
    {%- set rest = "end - k" if not packed else "(end - k) // 2" %}
    {%- set _ = a_masks.append("(rk%s < %s)" % (a_k, rest)) %}
    {%- set _ = b_masks.append("(rk%s < %s)" % (b_k, rest)) %}
    {%- endif %}
    {%- set a_mask = ", mask=%s, other=%s" % (" & ".join(a_masks), ZERO) if a_masks else "" %}
    {%- set b_mask = ", mask=%s, other=%s" % (" & ".join(b_masks), ZERO) if b_masks else "" %}
    {%- set once = ', eviction_policy="evict_first"' if B_ONCE else "" %}

    {%- if BATCHED %}
    A = A + q * {{stride("A", 0)}}
    B = B + q * {{stride("B0", 0)}}
    {%- endif %}
    {#- Only scalars advance along K, offsets within a tile are constant: advancing addresses would
        take two registers, and instructions, for each load of a thread. #}
    tile_m = tl.arange(0, BLOCK_M).to(INDEX_DTYPE)
    tile_n = tl.arange(0, COLUMNS).to(INDEX_DTYPE)
    {%- if packed %}
    a_from = A.to(tl.pointer_type(tl.int32)) + start_m * (stride_am // 2) + begin // 2
    a_at = tile_m{{m}} * (stride_am // 2) + rk{{a_k}}
    {%- else %}
    a_from = A + start_m * stride_am + begin * stride_ak
    a_at = tile_m{{m}} * stride_am + rk{{a_k}} * stride_ak
    {%- endif %}
    b_from = B + start_n * stride_bn + begin{{half}} * stride_bk
    b_at = rk{{b_k}} * stride_bk + tile_n{{n}} * stride_bn
    acc = tl.zeros({{shape}}, dtype=ACC_TYPE)
    {%- if GATED %}
    c_from = B1 + start_n * {{stride("B1", -1)}} + begin{{half}} * {{stride("B1", -2)}}
    c_at = rk{{b_k}} * {{stride("B1", -2)}} + tile_n{{n}} * {{stride("B1", -1)}}
    up = tl.zeros({{shape}}, dtype=ACC_TYPE)
    {%- endif %}
    {%- if WEIGHTED and packed %}
    w_at = W.to(tl.pointer_type(tl.int32)) + begin // 2 + rk
    {%- elif WEIGHTED %}
    w_at = W + begin + rk
    {%- endif %}
    {%- if SHIFTED %}
    v_at = V + begin + rk
    {%- endif %}
    {%- if NORMALIZE %}
    squares = tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float32)
    {%- endif %}
    {%- if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    {%- endif %}
    {%- if STANDARDIZE %}{{statistics()}}{% endif %}
    {%- set k_mask = "" if EVEN_K else ", mask=rk < end - k, other=0" %}
    for k in tl.range(begin, end, BLOCK_K):
        a = tl.load(a_from + a_at{{a_mask}})
        b = tl.load(b_from + b_at{{b_mask}}{{once}})
        {%- if GATED %}
        c = tl.load(c_from + c_at{{b_mask}}{{once}})
        {%- endif %}
        {%- if NORMALIZE and packed %}{{halves("a", "even", "odd", "A")}}{% endif %}
        {%- if NORMALIZE %}
        {%- for rows in (("even", "odd") if packed else ("a",)) %}
        {%- set transposed = "tl.trans(%s), %s" if SWAP else "%s, tl.trans(%s)" %}
        squares = tl.dot({{transposed % (rows, rows)}}, squares, allow_tf32=ALLOW_TF32)
        {%- endfor %}
        {%- endif %}
        {%- if WEIGHTED and packed %}
        weight = tl.load(w_at{{"" if EVEN_K else ", mask=rk < (end - k) // 2, other=0"}})
        {{- halves("weight", "weight_even", "weight_odd", "W")}}
        even = even * weight_even{{a_k}}.to(A.dtype.element_ty)
        odd = odd * weight_odd{{a_k}}.to(A.dtype.element_ty)
        w_at += BLOCK_K // 2
        {%- elif STANDARDIZE %}
        a = (a.to(tl.float32) - mean{{m}}) * rstd{{m}}
        {%- if WEIGHTED %}
        a *= tl.load(w_at{{k_mask}}).to(tl.float32){{a_k}}
        w_at += BLOCK_K
        {%- endif %}
        {%- if SHIFTED %}
        a += tl.load(v_at{{k_mask}}).to(tl.float32){{a_k}}
        v_at += BLOCK_K
        {%- endif %}
        a = a.to(B.dtype.element_ty)
        {%- elif WEIGHTED %}
        weight = tl.load(w_at{{k_mask}})
        a = a * weight{{a_k}}.to(A.dtype.element_ty)
        w_at += BLOCK_K
        {%- endif %}
        {%- if DEQUANTIZE != "''" %}
        {%- for tile, i in ((("b", "0"), ("c", "1")) if GATED else (("b", ""),)) %}
        {#- `like`: suffix of the arguments whose strides all scales and zero points have. #}
        {%- set like = "0" if PARTS > 1 else "" %}
        {%- if SCALES == "'group'" %}
        {{- shared("scale", "S" ~ i, "S" ~ like, SCALE_WORDS)}}
        {%- endif %}
        {%- if ZEROS %}{{shared("zero", "Z" ~ i, "Z" ~ like, ZERO_WORDS)}}{% endif %}
        {{- convert(tile)}}
        {%- endfor %}
        {%- endif %}
        {%- set imprecise = ", max_num_imprecise_acc=IMPRECISE" if IMPRECISE else "" %}
        {%- set options = "out_dtype=ACC_TYPE, allow_tf32=ALLOW_TF32" ~ imprecise %}
        {%- if packed and not NORMALIZE %}{{halves("a", "even", "odd", "A")}}{% endif %}
        {%- if packed %}
        acc = tl.dot(even, b_even, acc, {{options}})
        acc = tl.dot(odd, b_odd, acc, {{options}})
        {%- elif SWAP %}
        acc = tl.dot(b, a, acc, {{options}})
        {%- else %}
        acc = tl.dot(a, b, acc, {{options}})
        {%- endif %}
        {%- if GATED %}
        {%- if packed %}
        up = tl.dot(even, c_even, up, {{options}})
        up = tl.dot(odd, c_odd, up, {{options}})
        {%- elif SWAP %}
        up = tl.dot(c, a, up, {{options}})
        {%- else %}
        up = tl.dot(a, c, up, {{options}})
        {%- endif %}
        c_from += BLOCK_K{{half}} * {{stride("B1", -2)}}
        {%- endif %}
        a_from += BLOCK_K{{half}} * {{"1" if packed else "stride_ak"}}
        b_from += BLOCK_K{{half}} * stride_bk

    {%- if NORMALIZE %}
    diagonal = tl.arange(0, BLOCK_M)[:, None] == tl.arange(0, BLOCK_M)[None, :]
    norm = tl.rsqrt(tl.sum(tl.where(diagonal, squares, 0.0), 1) / K + EPSILON){{m}}
    acc = acc * norm
    {%- if GATED %}
    up = up * norm
    {%- endif %}
    {%- endif %}
    {{- scaled(n)}}
    {%- if RESCALED %}{{rescale(m, n, "    ")}}{% endif %}
    {%- if BIASED %}{{add_biases(n, "    ")}}{% endif %}
    {%- if GATED %}
    acc = {{gate("acc", "up")}}
    {%- endif %}
    idx_m = {{"split * M + " if SPLIT_K > 1 and not ONE_LAUNCH}}rm{{m}}
    idx_n = (first + rn){{n}}
    mask = (rm{{m}} < M) & (rn{{n}} < N)
    {%- if ONE_LAUNCH %}
{{add_splits("pid")}}
    {%- endif %}
    {{"    " if ONE_LAUNCH}}
    {{- store_output(("q", "idx_m", "idx_n") if BATCHED else ("idx_m", "idx_n"), "acc", "mask",
                   indent_width=8 if ONE_LAUNCH else 4,
                   val_shape=("COLUMNS", "BLOCK_M") if SWAP else ("BLOCK_M", "COLUMNS"))}}
    {%- if maxima %}
    {{"    " if ONE_LAUNCH}}{{row_maxima() | indent(8 if ONE_LAUNCH else 4)}}
    {%- endif %}
"""
)


def constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the kernel's constants for a problem and a configuration."""
    return {
        **common.tile_constants(problem, config),
        **common.load_constants(problem, config),
        **dequantize.constants(problem),
        "THREADS": config.threads,
        # Triton does not convert an integer to fp8.
        "ZERO": 0.0 if FP8 & {problem.a.dtype, problem.b.dtype} else 0,
        "IMPRECISE": common.accumulation_interval(problem, config),
    }
