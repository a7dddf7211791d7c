"""Macros and constants that several kernels share: output tiles, operand loads, gates, split-K."""

from __future__ import annotations

from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.tensors import FP8, ceiling
from inductor_ext.templates.triton.config import (
    STATISTICS_STAGES,
    GemmConfig,
    statistics_depth,
    tiles_along_n,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "identity")
"""Activations of gates. The tanh form of gelu, 0.5 x (1 + tanh(u)) (Hendrycks and Gimpel 2016), is
x sigmoid(2 u), since tanh(u) = 2 sigmoid(2 u) - 1."""

MACROS = r"""
{#- act(x) * up, in the accumulators' precision. #}
{%- macro gate(x, up) -%}
{%- if ACTIVATION == "'silu'" -%}
{{x}} * tl.sigmoid({{x}}) * {{up}}
{%- elif ACTIVATION == "'gelu'" -%}
0.5 * {{x}} * (1.0 + tl.erf({{x}} * 0.7071067811865476)) * {{up}}
{%- elif ACTIVATION == "'gelu_tanh'" -%}
{{x}} * tl.sigmoid(1.5957691216057308 * {{x}} * (1.0 + 0.044715 * {{x}} * {{x}})) * {{up}}
{%- elif ACTIVATION == "'relu'" -%}
tl.maximum({{x}}, 0.0) * {{up}}
{%- elif ACTIVATION == "'sigmoid'" -%}
tl.sigmoid({{x}}) * {{up}}
{%- else -%}
{{x}} * {{up}}
{%- endif -%}
{%- endmacro %}
{#- The number of tiles along N, if N is known only at launch. #}
{%- macro tiles_along_n() %}
    {%- if TILES_N is not defined %}
    TILES_N = tl.cdiv({{size("B0", -1)}}, COLUMNS)
    {%- endif %}
{%- endmacro %}
{#- Add the biases of columns rn: those of gate and up, or that of the tile's weight. An epilogue of
    Inductor would load the row once per element, and convert the layout of all accumulators for
    that, in float32. #}
{%- macro add_biases(n, indent) %}
{%- if GATED %}
{%- for sums, name in (("acc", "BIAS0"), ("up", "BIAS1")) %}
{{indent}}at = {{name}} + rn * {{stride(name, 0)}}
{{indent}}{{sums}} += tl.load(at, mask=rn < {{size(name, 0)}}, other=0).to(tl.float32){{n}}
{%- endfor %}
{%- else %}
{{- own("BIAS", indent)}}
{{indent}}bias = tl.load(BIAS + rn, mask=rn < N, other=0)
{{indent}}acc += bias.to(tl.float32){{n}}
{%- endif %}
{%- endmacro %}
{#- Multiply the accumulators, in float32, by the scales of A (per row or one) and of the tile's
    weight (per column or one). #}
{%- macro rescale(m, n, indent) %}
{{- own("SCALE_B", indent)}}
{%- set rows = " + rm, mask=rm < M, other=0" if ROW_SCALES else "" %}
{{indent}}scale = tl.load(SCALE_A{{rows}})
{{indent}}acc = acc.to(tl.float32) * scale.to(tl.float32){{m if ROW_SCALES}}
{%- set columns = " + rn, mask=rn < N, other=0" if COLUMN_SCALES else "" %}
{{indent}}scale = tl.load(SCALE_B{{columns}})
{{indent}}acc *= scale.to(tl.float32){{n if COLUMN_SCALES}}
{%- endmacro %}
{#- Mean and reciprocal standard deviation of the rows rm over all of K, [BLOCK_M] each. Every
    position of a tile has its own mean and sum of squares (Welford 1962), from which those of the
    row follow (Chan, Golub and LeVeque 1983): nothing cancels, however far the mean is from 0. #}
{%- macro statistics() %}
    {%- set checks = [] if EVEN_M else ["(rm[:, None] < M)"] %}
    {%- if not EVEN_DEPTH %}{% set _ = checks.append("(rs[None, :] < K - k)") %}{% endif %}
    rs = tl.arange(0, DEPTH).to(INDEX_DTYPE)
    means = tl.zeros((BLOCK_M, DEPTH), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M, DEPTH), dtype=tl.float32)
    x_at = A + rm[:, None] * stride_am + rs[None, :] * stride_ak
    for k in tl.range(0, K, DEPTH, num_stages=DEPTH_STAGES):
        x = tl.load(x_at{{", mask=%s, other=0" % " & ".join(checks) if checks}}).to(tl.float32)
        away = x - means
        {%- if not EVEN_DEPTH %}
        away = tl.where(rs[None, :] < K - k, away, 0.0)
        {%- endif %}
        means += away * (1.0 / (k // DEPTH + 1))
        squares += away * (x - means)
        x_at += DEPTH * stride_ak
    counts = tl.cdiv(K - rs, DEPTH).to(tl.float32)[None, :]
    mean = tl.sum(means * counts, 1) / K
    away = means - mean[:, None]
    rstd = tl.rsqrt(tl.sum(squares + counts * away * away, 1) / K + EPSILON)
{%- endmacro %}
{%- set maxima = ["ROW_MAXIMA"] if ABSOLUTE is defined else [] %}
{#- Arguments that are read after the loop over K. #}
{%- set epilogue_args = ["SCALE_A"] if RESCALED else [] %}
{%- for name in (["SCALE_B"] if RESCALED else []) + (["BIAS"] if BIASED else []) %}
{%- for i in range(PARTS) %}{% set _ = epilogue_args.append(name ~ i) %}{% endfor %}
{%- endfor %}
{#- Row max or row amax of a tile: column `pid_n` of tiles writes row `pid_n` of an array with M
    columns. `final`, which the epilogue defines, is the tile as it is stored, in float32. The bits
    of non-negative floats have the order of the values, with NaN above infinity, as required, and
    an integer maximum is a single instruction; of negative floats all bits but the sign are
    inverted. #}
{%- macro row_maxima() -%}
{%- set flip = "(largest >> 31) & 0x7FFFFFFF" %}
largest = {{"tl.abs(final)" if ABSOLUTE else "final"}}.to(tl.int32, bitcast=True)
{%- if not ABSOLUTE %}
largest = tl.where(final == final, largest ^ ({{flip}}), 0x7FFFFFFF)
{%- endif %}
{%- set least = 0 if ABSOLUTE else "-0x80000000" %}
largest = tl.max(tl.where(mask, largest, {{least}}), {{0 if SWAP else 1}})
{%- if not ABSOLUTE %}
largest = largest ^ ({{flip}})
{%- endif %}
tl.store(ROW_MAXIMA + pid_n * M + rm, largest.to(tl.float32, bitcast=True), mask=rm < M)
{%- endmacro %}
{#- The weight B of column `pid_n` of tiles, its N and strides, its first column in the output, and
    the tile's columns rn within the weight, of which the first is `start_n`. #}
{%- macro columns() %}
    B = B0
    N = {{size("B0", -1)}}
    stride_bk = {{stride("B0", -2)}}
    stride_bn = {{stride("B0", -1)}}
    first = 0
    {%- if PARTS > 1 and not GATED %}
    tile = 0
    {%- set before = namespace(columns=size("B0", -1)) %}
    {%- for i in range(1, PARTS) %}
    if pid_n >= FIRST_TILE_{{i}}:
        B = B{{i}}
    tile = tl.where(pid_n >= FIRST_TILE_{{i}}, FIRST_TILE_{{i}}, tile)
    first = tl.where(pid_n >= FIRST_TILE_{{i}}, {{before.columns}}, first)
    N = tl.where(pid_n >= FIRST_TILE_{{i}}, {{size("B%d" % i, -1)}}, N)
    {%- set before.columns = before.columns ~ " + " ~ size("B%d" % i, -1) %}
    {%- for axis, name in ((-2, "stride_bk"), (-1, "stride_bn")) %}
    {%- if stride("B%d" % i, axis) != stride("B0", axis) %}
    {{name}} = tl.where(pid_n >= FIRST_TILE_{{i}}, {{stride("B%d" % i, axis)}}, {{name}})
    {%- endif %}
    {%- endfor %}
    {%- endfor %}
    start_n = (pid_n - tile) * COLUMNS
    {%- else %}
    start_n = pid_n * COLUMNS
    {%- endif %}
    rn = start_n + tl.arange(0, COLUMNS)
{%- endmacro %}
{#- Of the numbered arguments of a name, that of the tile's weight. #}
{%- macro own(name, indent="    ") %}
{{indent}}{{name}} = {{name}}0
    {%- for i in range(1, PARTS) %}
{{indent}}if pid_n >= FIRST_TILE_{{i}}:
{{indent}}    {{name}} = {{name}}{{i}}
    {%- endfor %}
{%- endmacro %}
{#- The same for names that are numbered only with several weights. A tile of gate and up reads
    both arguments. #}
{%- macro of_tile(name) %}
{%- if PARTS > 1 and not GATED %}{{own(name)}}{% endif %}
{%- endmacro %}
{#- Multiply the accumulators by per-tensor or per-column scales; gate and up have their own. #}
{%- macro scaled(n) %}
    {%- for sums, name in ((("acc", "S0"), ("up", "S1")) if GATED else (("acc", "S"),)) %}
    {%- if SCALES == "'tensor'" %}
    scale = tl.load({{name}}).to(tl.float32)
    {{sums}} = {{sums}} * scale
    {%- elif SCALES == "'column'" %}
    scale = tl.load({{name}} + rn{{"" if EVEN_N else ", mask=rn < N, other=0"}}).to(tl.float32)
    {{sums}} = {{sums}} * scale{{n}}
    {%- endif %}
    {%- endfor %}
{%- endmacro %}
{#- Write the accumulators `acc` of a split of tile `number`, and reduce the splits. #}
{%- macro add_splits(number) %}
    {%- set shape = ("COLUMNS", "BLOCK_M") if SWAP else ("BLOCK_M", "COLUMNS") %}
    number = {{number}}
    sums = WORKSPACE + number.to(tl.int64) * (SPLIT_K * BLOCK_M * COLUMNS)
    sums += tl.arange(0, {{shape[0]}})[:, None] * {{shape[1]}} + tl.arange(0, {{shape[1]}})[None, :]
    tl.store(sums + split * (BLOCK_M * COLUMNS), acc)
{{- add_up()}}
{%- endmacro %}
{#- The step after a split's CTA has written its accumulators: in the last CTA, `acc` becomes the
    sum of all splits. Opens the block that only that CTA runs. #}
{%- macro add_up() %}
    # All threads have written before one of them counts.
    tl.debug_barrier()
    before = tl.atomic_add(COUNTERS + number, 1, sem="acq_rel", scope="gpu")
    if before == SPLIT_K - 1:
        tl.store(COUNTERS + number, 0)
{{- sum_of("acc", "sums")}}
{%- endmacro %}
{#- The sum of all splits; the accumulators of the first one are at `first`. #}
{%- macro sum_of(target, first) %}
    {%- set shape = ("COLUMNS", "BLOCK_M") if SWAP else ("BLOCK_M", "COLUMNS") %}
        {{target}} = tl.zeros(({{shape | join(", ")}}), dtype=ACC_TYPE)
    {%- if SPLIT_K > AT_ONCE %}
        for start in tl.range(0, SPLIT_K // AT_ONCE * AT_ONCE, AT_ONCE, num_stages=1):
        {%- for i in range(AT_ONCE) %}
            part{{i}} = {{_part(first, "start + %d" % i)}}
        {%- endfor %}
        {%- for i in range(AT_ONCE) %}
            {{target}} += part{{i}}
        {%- endfor %}
    {%- endif %}
    {%- set rest = SPLIT_K if SPLIT_K <= AT_ONCE else SPLIT_K % AT_ONCE %}
    {%- for i in range(SPLIT_K - rest, SPLIT_K) %}
        part{{i}} = {{_part(first, i)}}
    {%- endfor %}
    {%- for i in range(SPLIT_K - rest, SPLIT_K) %}
        {{target}} += part{{i}}
    {%- endfor %}
{%- endmacro %}
{#- Load from L2 instead of L1, which is not coherent. #}
{%- macro _part(first, split) -%}
tl.load({{first}} + ({{split}}) * (BLOCK_M * COLUMNS), cache_modifier=".cg")
{%- endmacro %}
{#- The matrix or split of a CTA, and its tile; consecutive CTAs have tiles along N. #}
{%- macro place() %}
    pid = tl.program_id(0).to(INDEX_DTYPE)
    {%- if BATCHED or SPLIT_K > 1 %}
    matrix = tl.cdiv(M, BLOCK_M) * TILES_N
    {{"q" if BATCHED else "split"}} = pid // matrix
    pid = pid % matrix
    {%- endif %}
    pid_m = pid // TILES_N
    pid_n = pid % TILES_N
{%- endmacro %}
{#- From the accumulators `acc` (and `up`) of a tile, [BLOCK_M, COLUMNS], to its stores. #}
{%- macro finish() %}
    {{- scaled("[None, :]")}}
    {%- if BIASED %}{{add_biases("[None, :]", "    ")}}{% endif %}
    {%- if GATED %}
    acc = {{gate("acc", "up")}}
    {%- endif %}
    idx_m = {{"split * M + " if SPLIT_K > 1 and not ONE_LAUNCH}}rm[:, None]
    idx_n = (first + rn)[None, :]
    mask = (rm[:, None] < M) & (rn[None, :] < N)
    {%- if ONE_LAUNCH %}
{{add_splits("pid")}}
    {%- endif %}
    {{"    " if ONE_LAUNCH}}
    {{- store_output(("q", "idx_m", "idx_n") if BATCHED else ("idx_m", "idx_n"), "acc", "mask",
                   indent_width=8 if ONE_LAUNCH else 4,
                   val_shape=("BLOCK_M", "COLUMNS"))}}
    {%- if maxima %}
    {{"    " if ONE_LAUNCH}}{{row_maxima() | indent(8 if ONE_LAUNCH else 4)}}
    {%- endif %}
{%- endmacro %}
"""
"""Jinja macros for the beginning of a kernel's source.

`add_splits` is correct under the PTX memory model, and nothing waits for another CTA, which might
not have started:

- the writes of a split's threads precede the CTA's barrier, and the barrier precedes the CTA's
  atomic add to the counter, which releases these writes at GPU scope;
- atomic adds to one counter are ordered. The one that reads `SPLIT_K - 1` follows those of all
  other splits and acquires what they released: they form one release sequence, since the
  read-modify-writes in between do not end it;
- its result is passed to all threads of the CTA through shared memory and a barrier, so that their
  loads follow all those writes. They read from L2 (`.cg`), where the other SMs' writes are visible.

The splits are added in a fixed order, whichever CTA is last, so launches are bitwise reproducible.
The last CTA resets the counter to 0, and no other CTA of this launch reads it again; a later launch
starts its work after this one has ended (a dependent launch waits before it reads or writes
anything)."""

ARGUMENTS = r"""
{%- set weights = [] %}
{%- for i in range(PARTS) %}{% set _ = weights.append("B%d" % i) %}{% endfor %}
{%- set extra = [] %}
{%- set zeros = ZEROS is defined and ZEROS %}
{%- for name in (["S"] if SCALES != "'none'" else []) + (["Z"] if zeros else []) %}
{%- for i in range(PARTS) %}{% set _ = extra.append("%s%d" % (name, i) if PARTS > 1 else name) %}
{%- endfor %}
{%- endfor %}
{%- if WEIGHTED %}{% set _ = extra.append("W") %}{% endif %}
{%- if SHIFTED %}{% set _ = extra.append("V") %}{% endif %}
{%- set _ = extra.extend(epilogue_args) %}
"""
"""Argument names of kernels without TMA loads: the fused weights in `weights`, other inputs in
`extra`."""

TMA = r"""
{%- set a_block = ("BLOCK_M", "BLOCK_K") if A_ROW else ("BLOCK_K", "BLOCK_M") %}
{%- set b_block = ("BLOCK_K", "COLUMNS") if B_ROW else ("COLUMNS", "BLOCK_K") %}
{#- K, if it is known only at launch. #}
{%- macro along_k() %}
    {%- if K is not defined %}
    K = tl.cast({{size("A", -1)}}, tl.int32)
    {%- endif %}
{%- endmacro %}
{#- Descriptors have the contiguous dimension last; matrices of a batch come first. #}
{%- macro descriptor(name, batch, shape, leading, block) -%}
tl.make_tensor_descriptor(
        {{name}},
        shape=[{{"%s, " % batch if batch}}{{shape[0]}}, {{shape[1]}}],
        strides=[{{"%s, " % stride(name, 0) if batch}}{{leading}}, 1],
        block_shape=[{{"1, " if batch}}{{block[0]}}, {{block[1]}}],
    )
{%- endmacro %}
{%- macro a_descriptor(name, batch) %}
    {%- set shape = ("M", "K") if A_ROW else ("K", "M") %}
    {%- set leading = A_LEADING or stride(name, -2 if A_ROW else -1) %}
    a_desc = {{descriptor(name, batch if A_BATCHED, shape, leading, a_block)}}
{%- endmacro %}
{%- macro b_descriptor(name, batch, i) %}
    {%- set columns = size(name, -1) %}
    {%- set shape = ("K", columns) if B_ROW else (columns, "K") %}
    {%- set leading = B_LEADING or stride(name, -2 if B_ROW else -1) %}
    b{{i}}_desc = {{descriptor(name, batch if B_BATCHED, shape, leading, b_block)}}
{%- endmacro %}
{#- Tiles in the orientation of the tensor cores: K along the rows of the first operand. #}
{%- macro fetch_a(q, row, k) -%}
a_desc.load([{{"%s, " % q if A_BATCHED}}{{"%s, %s" % ((row, k) if A_ROW else (k, row))}}])
{%- if A_BATCHED %}.reshape({{a_block | join(", ")}}){% endif %}{{".T" if A_ROW == SWAP}}
{%- endmacro %}
{%- macro fetch_b(name, q, column, k) -%}
{{name}}.load([{{"%s, " % q if B_BATCHED}}{{"%s, %s" % ((k, column) if B_ROW else (column, k))}}])
{%- if B_BATCHED %}.reshape({{b_block | join(", ")}}){% endif %}{{".T" if B_ROW == SWAP}}
{%- endmacro %}
{%- macro multiply(a, b, acc) -%}
{%- set operands = (b, a) if SWAP else (a, b) -%}
tl.dot({{operands | join(", ")}}, {{acc}}, out_dtype=ACC_TYPE, allow_tf32=ALLOW_TF32
{%- if IMPRECISE %}, max_num_imprecise_acc=IMPRECISE{% endif %})
{%- endmacro %}
"""
"""Macros of kernels that load by TMA; `q`, rows, columns and k are 32-bit."""


def tile_constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the constants that divide an output into tiles, including fused weights and gates.

    Tiles of fused weights are numbered consecutively along N, and no tile crosses a border between
    two weights.
    """
    gated = problem.epilogue.gated
    parts = problem.parts or (problem.n,)
    columns = config.block_n // 2 if gated else config.block_n
    tiles = [ceiling(part, columns) for part in parts]
    constants: dict[str, Any] = {
        "BLOCK_M": config.block_m,
        "BLOCK_K": config.block_k,
        "COLUMNS": columns,
        "GROUP_M": config.group_m,
        "SWAP": config.swap_ab,
        "PARTS": len(parts),
        "TILES_N": tiles[0] if gated else tiles_along_n(problem, config.block_n),
        "GATED": gated,
        "BIASED": gated and problem.operation == "addmm",
        "RESCALED": False,
        "ACC_TYPE": "tl.int32" if problem.accumulator == "int32" else "tl.float32",
        "ALLOW_TF32": problem.tf32,
    }
    for index in range(1, len(parts)):
        constants[f"FIRST_TILE_{index}"] = sum(tiles[:index])
    return constants


def load_constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the constants of a kernel whose threads load and may change operands in the prologue.

    `EVEN_N` is for a static N; `inductor_template` sets the constants of sizes that may be
    symbolic.
    """
    columns = config.block_n // 2 if problem.epilogue.gated else config.block_n
    norm, dequant = problem.norm, problem.dequant
    return {
        **split_constants(config),
        "PDL": config.pdl,
        "EVEN_N": all(part % columns == 0 for part in problem.parts or (problem.n,)),
        "NORMALIZE": norm is not None and norm.kind == "rms",
        "STANDARDIZE": norm is not None and norm.kind == "layer",
        "DEPTH": statistics_depth(problem, config),
        "DEPTH_STAGES": STATISTICS_STAGES,
        "WEIGHTED": norm is not None and norm.vectors > 0,
        "SHIFTED": norm is not None and norm.vectors > 1,
        "SCALES": repr(dequant.scales if dequant is not None else "none"),
        "B_ONCE": problem.rows <= config.block_m,
    }


def split_constants(config: GemmConfig) -> dict[str, Any]:
    """Return the constants that split K among CTAs."""
    registers = ceiling(config.block_m * config.block_n, config.threads)
    return {
        "SPLIT_K": config.split_k,
        "ONE_LAUNCH": config.fused_split_k,
        # Number of splits whose accumulators the reducing CTA loads at once.
        "AT_ONCE": max(1, min(config.split_k, _REGISTERS // registers)),
    }


_REGISTERS = 128
"""Registers per thread for these loads, half of all: those of the accumulators are free by then."""


def accumulation_interval(problem: GemmProblem, config: GemmConfig) -> int:
    """Return after how many elements along K fp8 partial sums, which tensor cores keep in less
    precision than float32, are added in float32; 0 for Triton's default, which is never where it
    matters.
    """
    precise = problem.a.dtype in FP8 and not problem.fast_accumulation
    return config.block_k if precise else 0


def tma_constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the constants of a kernel that loads by TMA.

    The tensor's stride of a dimension of size 1 is arbitrary, but TMA requires a multiple of 16
    bytes; `B_LEADING` then replaces it by the stride of `problem.b`.
    """
    return {
        "K": problem.k,
        "A_ROW": problem.a.layout == "row",
        "B_ROW": problem.b.layout == "row",
        "B_LEADING": problem.b.leading if min(problem.n, problem.k) == 1 else 0,
        "IMPRECISE": accumulation_interval(problem, config),
    }
