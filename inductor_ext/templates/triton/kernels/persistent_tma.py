"""Persistent GEMM with TMA loads: one CTA per SM loops over tiles.

The kernel of the templates `persistent_tma`, `persistent_tma_ws` and `bmm_persistent`, and of
`splitk` with TMA loads:

- a CTA visits tiles of all matrices with a stride of `tl.num_programs(0)`, in groups of `GROUP_M`
  rows of tiles. The loops over tiles and K can be flattened (`FLATTEN`), so that the first loads of
  a tile are in flight while the previous tile is stored, or separate warps can load
  (`WARP_SPECIALIZE`);
- descriptors are created on the device, one per operand, with the contiguous dimension last. TMA
  fills out-of-bounds elements with zeros, so loads need no masks. A batch is an additional
  dimension, unless all its matrices are the same one (stride 0);
- fused weights (`PARTS`) share one launch: a tile uses the descriptor of the weight that it belongs
  to;
- with stream-K (`STREAM_K`) the last rounds are shared: every CTA has equally many steps along K,
  from at most two tiles and a part of a third, and no tile is shared by more than two CTAs. Of
  those, the one that finishes first writes its accumulators to a workspace and increments a
  counter; the other one reads them, adds them to its own and runs the epilogue. The memory-order
  argument for `add_splits` in `common.MACROS` also applies here, and a sum of two values is the
  same in both orders;
- gate and up projection can be fused (`GATED`). If K is contiguous in both weights, one descriptor
  covers both, whatever their order in memory, and a tile of both is one operand of one matmul
  (`JOINED`);
- swapped operands (`SWAP`), row amax (`ABSOLUTE`) and split-K (`SPLIT_K`) work as in `tile`; with
  split-K a CTA has one work unit (`splitk`).

Sizes are known at compile time or at launch. Output addresses have the index type that Inductor
chooses; TMA coordinates have 32 bits.
"""

from __future__ import annotations

from typing import Any

from inductor_ext.templates.problem import GemmProblem
from inductor_ext.templates.triton.config import GemmConfig
from inductor_ext.templates.triton.kernels import common

REACH = 2**36
"""Upper limit of TMA descriptor strides in units of 16 bytes (exclusive); at least 1025, see
below."""

SOURCE = (
    common.MACROS
    + common.TMA
    + r"""
{#- The position of a tile: matrix q or split, row and column of tiles. #}
{%- macro place(tile) %}
        {%- if BATCHED or SPLIT_K > 1 %}
        {{"q" if BATCHED else "split"}} = {{tile}} // matrix
        local = {{tile}} % matrix
        {%- else %}
        local = {{tile}}
        {%- endif %}
        group = local // width
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        pid_m = group * GROUP_M + (local % width) % group_rows
        pid_n = (local % width) // group_rows
{%- endmacro %}
{#- Of two CTAs that share a tile, the one that finishes first writes its accumulators for the other
    one. Opens the block that runs with complete accumulators. #}
{%- macro exchange() %}
        {%- set shape = ("COLUMNS", "BLOCK_M") if SWAP else ("BLOCK_M", "COLUMNS") %}
        {%- set lines = "tl.arange(0, %s)[:, None] * %s" % (shape[0], shape[1]) %}
        done = last_k - first_k == STEPS * BLOCK_K
        if not done:
            # Numbered by the CTA that has the first steps. Each of the two has its own slot.
            cut = begin - tl.where(first_k > 0, 1, 0)
            slot = 2 * cut + tl.where(first_k > 0, 1, 0)
            sums = WORKSPACE + {{lines}} + tl.arange(0, {{shape[1]}})[None, :]
            before = 0
            if first_k == 0:
                # This tile is the last one of this CTA and the first one of the other CTA, which
                # has therefore finished as a rule.
                before = tl.atomic_add(COUNTERS + cut, 0, sem="acquire", scope="gpu")
            if before == 0:
                tl.store(sums + slot.to(tl.int64) * (BLOCK_M * COLUMNS), acc)
                # All threads have written before one of them counts.
                tl.debug_barrier()
                before = tl.atomic_add(COUNTERS + cut, 1, sem="acq_rel", scope="gpu")
            done = before == 1
            if done:
                tl.store(COUNTERS + cut, 0)
                acc += tl.load(
                    sums + (slot ^ 1).to(tl.int64) * (BLOCK_M * COLUMNS), cache_modifier=".cg"
                )
        if done:
{%- endmacro %}
{%- set weights = [] %}
{%- for i in range(PARTS) %}{% set _ = weights.append("B%d" % i) %}{% endfor %}
{{def_kernel(*(["A"] + weights + epilogue_args + maxima))}}
    M = {{size("A", -2)}}
    {{- tiles_along_n()}}
    {{- along_k()}}
    {%- if SHARE is not defined and SPLIT_K > 1 %}
    SHARE = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    {%- endif %}
    {{- a_descriptor("A", size("A", 0))}}
    {%- if JOINED %}
    # Distance between the two weights in units of 16 bytes. A tile of both is one load, unless the
    # distance exceeds the largest stride. Then all of the lower weight is multiplied before the
    # upper one, each next to zeros: the third dimension has one element, and a tile begins at it or
    # one before. The distance is then 1024 times the first stride plus the second one.
    apart = (B1.to(tl.int64) - B0.to(tl.int64)) // 16
    flipped = apart < 0
    lower_factor = B0
    if flipped:
        lower_factor = B1
    apart = tl.abs(apart)
    far = apart >= REACH
    UNIT: tl.constexpr = 128 // B0.dtype.element_ty.primitive_bitwidth
    b_desc = tl.make_tensor_descriptor(
        lower_factor,
        shape=[1025, 2, tl.where(far, 1, 2), {{size("B0", -1)}}, K],
        strides=[
            tl.maximum((apart - 1) // 1024, 1) * UNIT,
            ((apart - 1) % 1024 + 1) * UNIT,
            tl.where(far, 1, apart) * UNIT,
            {{B_LEADING or stride("B0", -1)}},
            1,
        ],
        block_shape=[1, 1, 2, COLUMNS, BLOCK_K],
    )
    ALONG_K = tl.cdiv(K, BLOCK_K) * BLOCK_K
    {%- else %}
    {%- for name in weights %}
    {{- b_descriptor(name, size(name, 0), loop.index0)}}
    {%- endfor %}
    {%- endif %}

    tiles_m = tl.cdiv(M, BLOCK_M)
    width = GROUP_M * TILES_N
    matrix = tiles_m * TILES_N
    tiles = matrix{{" * " ~ size("A", 0) if BATCHED else " * SPLIT_K" if SPLIT_K > 1}}
    begin = tl.program_id(0).to(INDEX_DTYPE)
    {%- if STREAM_K %}
    # Whole tiles in all rounds before the last whole one; then this CTA's share of the steps of all
    # other tiles. It is at least one tile, so that no tile is shared by more than two CTAs.
    STEPS = tl.cdiv(K, BLOCK_K)
    ctas = tl.num_programs(0)
    rounds = tl.maximum(tiles // ctas - 1, 0)
    steps = (tiles - rounds * ctas) * STEPS
    share = tl.maximum(tl.cdiv(steps, ctas), STEPS)
    first_step = min(begin * share, steps)
    last_step = min(first_step + share, steps)
    first_shared = first_step // STEPS
    pieces = tl.cdiv(last_step, STEPS) - first_shared
    {%- endif %}
    {%- if FLATTEN %}
    # Index of the tile that is stored: all else that it needs is computed again, and not live while
    # the next tile is loaded.
    stored = begin - tl.num_programs(0)
    {%- endif %}
    {%- if PDL %}
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    {%- endif %}
    {%- if STREAM_K %}
    for piece in tl.range(0, rounds + pieces):
        shared = piece >= rounds
        # Steps of the CTA's share from the first one of this tile on.
        past = (first_shared + piece - rounds) * STEPS
        tile = tl.where(shared, rounds * ctas + past // STEPS, piece * ctas + begin)
        first_k = tl.where(shared, tl.maximum(first_step - past, 0), 0) * BLOCK_K
        last_k = tl.where(shared, min(last_step - past, STEPS), STEPS) * BLOCK_K
    {%- else %}
    for tile in tl.range(
        begin, tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE
    ):
    {%- endif %}
        {{- place("tile")}}
        row = (pid_m * BLOCK_M).to(tl.int32)
        {%- if PARTS > 1 and not GATED %}
        b_desc = b0_desc
        first_tile = 0
        {%- for i in range(1, PARTS) %}
        if pid_n >= FIRST_TILE_{{i}}:
            b_desc = b{{i}}_desc
        first_tile = tl.where(pid_n >= FIRST_TILE_{{i}}, FIRST_TILE_{{i}}, first_tile)
        {%- endfor %}
        column = ((pid_n - first_tile) * COLUMNS).to(tl.int32)
        {%- else %}
        column = (pid_n * COLUMNS).to(tl.int32)
        {%- endif %}
        {%- if BATCHED %}
        q = q.to(tl.int32)
        {%- endif %}
        {%- set columns = "2 * COLUMNS" if JOINED else "COLUMNS" %}
        {%- set shape = "(COLUMNS, BLOCK_M)" if SWAP else "(BLOCK_M, %s)" % columns %}
        acc = tl.zeros({{shape}}, dtype=ACC_TYPE)
        {%- if GATED and not JOINED %}
        up = tl.zeros({{shape}}, dtype=ACC_TYPE)
        {%- endif %}
        {%- if SPLIT_K > 1 %}
        first_k = (split * SHARE).to(tl.int32)
        for k in tl.range(first_k, min(first_k + SHARE, K), BLOCK_K):
        {%- elif STREAM_K %}
        for k in tl.range(first_k.to(tl.int32), last_k.to(tl.int32), BLOCK_K):
        {%- elif JOINED %}
        for past in tl.range(0, tl.where(far, 2 * ALONG_K, ALONG_K), BLOCK_K):
            second = (past >= ALONG_K).to(tl.int32)
            k = past - second * ALONG_K
        {%- else %}
        for k in tl.range(0, K, BLOCK_K):
        {%- endif %}
            a = {{fetch_a("q", "row", "k")}}
            {%- if JOINED %}
            b = b_desc.load([second * 1024, second, -second, column, k])
            b = b.reshape(2 * COLUMNS, BLOCK_K).T
            {%- else %}
            b = {{fetch_b("b_desc" if PARTS > 1 and not GATED else "b0_desc", "q", "column", "k")}}
            {%- endif %}
            acc = {{multiply("a", "b", "acc")}}
            {%- if GATED and not JOINED %}
            c = {{fetch_b("b1_desc", "q", "column", "k")}}
            up = {{multiply("a", "c", "up")}}
            {%- endif %}
        {%- if FLATTEN %}
        stored += tl.num_programs(0)
        {{- place("stored")}}
        {%- endif %}
        {%- set m = "[None, :]" if SWAP else "[:, None]" %}
        {%- set n = "[:, None]" if SWAP else "[None, :]" %}
        {%- if JOINED %}
        pair = tl.permute(tl.reshape(acc, (BLOCK_M, 2, COLUMNS)), (0, 2, 1))
        lower, upper = tl.split(pair)
        acc = tl.where(flipped, upper, lower)
        up = tl.where(flipped, lower, upper)
        {%- endif %}
        rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        {%- if PARTS > 1 and not GATED %}
        first_tile = 0
        first = 0
        N = {{size("B0", -1)}}
        {%- set before = namespace(columns=size("B0", -1)) %}
        {%- for i in range(1, PARTS) %}
        first_tile = tl.where(pid_n >= FIRST_TILE_{{i}}, FIRST_TILE_{{i}}, first_tile)
        first = tl.where(pid_n >= FIRST_TILE_{{i}}, {{before.columns}}, first)
        N = tl.where(pid_n >= FIRST_TILE_{{i}}, {{size("B%d" % i, -1)}}, N)
        {%- set before.columns = before.columns ~ " + " ~ size("B%d" % i, -1) %}
        {%- endfor %}
        rn = (pid_n - first_tile) * COLUMNS + tl.arange(0, COLUMNS)
        idx_n = (first + rn){{n}}
        {%- else %}
        N = {{size("B0", -1)}}
        rn = pid_n * COLUMNS + tl.arange(0, COLUMNS)
        idx_n = rn{{n}}
        {%- endif %}
        {%- if GATED %}
        {%- if BIASED %}{{add_biases(n, "        ")}}{% endif %}
        acc = {{gate("acc", "up")}}
        {%- endif %}
        {%- if RESCALED %}{{rescale(m, n, "        ")}}{% endif %}
        {%- if BIASED and not GATED %}{{add_biases(n, "        ")}}{% endif %}
        idx_m = {{"split * M + " if SPLIT_K > 1 and not ONE_LAUNCH}}rm{{m}}
        mask = (rm{{m}} < M) & (rn{{n}} < N)
        {%- if ONE_LAUNCH %}
    {{- add_splits("local") | indent(4)}}
        {%- elif STREAM_K %}
    {{- exchange()}}
        {%- endif %}
        {%- set inner = ONE_LAUNCH or STREAM_K %}
        {{"    " if inner}}
        {{- store_output(("q", "idx_m", "idx_n") if BATCHED else ("idx_m", "idx_n"), "acc", "mask",
                       indent_width=12 if inner else 8,
                       val_shape=("COLUMNS", "BLOCK_M") if SWAP else ("BLOCK_M", "COLUMNS"))}}
        {%- if maxima %}
        {{"    " if inner}}{{row_maxima() | indent(12 if inner else 8)}}
        {%- endif %}
"""
)


def constants(problem: GemmProblem, config: GemmConfig) -> dict[str, Any]:
    """Return the kernel's constants for a problem and a configuration."""
    return {
        **common.tile_constants(problem, config),
        **common.tma_constants(problem, config),
        "JOINED": config.joins(problem),
        "REACH": REACH,
        "FLATTEN": config.flatten,
        "WARP_SPECIALIZE": config.warp_specialize,
        **common.split_constants(config),
        # Elements along K per split, a multiple of BLOCK_K.
        "SHARE": config.block_k * config.k_steps(problem),
        "PDL": config.pdl,
        "STREAM_K": config.stream_k,
        "TMA_STORE": config.tma_store,
    }
