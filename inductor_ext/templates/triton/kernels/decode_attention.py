"""Attention of a few queries per sequence to a long cache: kernels in the manner of flash decoding.

Unlike the other kernels these are Triton functions, not Jinja templates, and no operands of a
matmul: `lowerings.graph.decode_attention` calls them as user-defined Triton kernels, which Inductor
can put into wrappers and packages. Importing this module imports Triton.

`attend` splits each sequence of keys among CTAs ("Flash-Decoding for long-context inference", Dao
et al. 2023). A CTA computes all queries that read the same head of keys and values, so that grouped
queries (Ainslie et al. 2023) read the cache once. The softmax is computed online (Milakov and
Gimelshein 2018) in float32, in base 2. `combine` adds the shares. A query for which the bias
excludes all keys gets zeros, as in eager mode.
"""

# Triton functions have no types that a type checker knows.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def attend(
    query,
    key,
    value,
    bias,
    out,
    sums,
    stats,
    length,
    share,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    QUERY_B: tl.constexpr,
    QUERY_H: tl.constexpr,
    QUERY_M: tl.constexpr,
    KEY_B: tl.constexpr,
    KEY_H: tl.constexpr,
    KEY_N: tl.constexpr,
    VALUE_B: tl.constexpr,
    VALUE_H: tl.constexpr,
    VALUE_N: tl.constexpr,
    BIAS_B: tl.constexpr,
    BIAS_H: tl.constexpr,
    BIAS_M: tl.constexpr,
    BIAS_N: tl.constexpr,
    OUT_B: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_M: tl.constexpr,
):
    """Attend to the keys of one share: grid (batch * HEADS, SPLITS).

    With one split, `out` is written. Otherwise `sums`, [batch * HEADS, SPLITS, ROWS, BLOCK_V], gets
    sums of values and `stats`, [batch * HEADS, SPLITS, 2, ROWS], maxima and sums of weights.

    HEADS are those of keys and values. A row is a query of a query head: ROWS is the number of
    query heads that read a head of keys, times QUERIES. BIAS: 0 for none, 1 if it is the same for
    all rows, else 2. Names such as KEY_N are strides: B of the batch, H of heads, M of queries, N
    of keys; the stride of a head's elements is 1.
    """
    pair = tl.program_id(0)
    split = tl.program_id(1)
    batch = (pair // HEADS).to(tl.int64)
    head = pair % HEADS
    rm = tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    rv = tl.arange(0, BLOCK_V)
    query_head = head * (ROWS // QUERIES) + rm // QUERIES
    position = rm % QUERIES
    q = tl.load(
        query
        + batch * QUERY_B
        + (query_head * QUERY_H + position * QUERY_M)[:, None]
        + rk[None, :],
        mask=(rm[:, None] < ROWS) & (rk[None, :] < SIZE),
        other=0,
    )
    key += batch * KEY_B + head * KEY_H
    value += batch * VALUE_B + head * VALUE_H
    if BIAS == 1:
        bias += batch * BIAS_B
    if BIAS == 2:
        bias += batch * BIAS_B
        bias_row = query_head * BIAS_H + position * BIAS_M

    begin = split * share
    end = min(begin + share, length)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_N):
        n = start + rn
        k = tl.load(
            key + n[:, None] * KEY_N + rk[None, :],
            mask=(n[:, None] < end) & (rk[None, :] < SIZE),
            other=0,
        )
        v = tl.load(
            value + n[:, None] * VALUE_N + rv[None, :],
            mask=(n[:, None] < end) & (rv[None, :] < VALUE_SIZE),
            other=0,
        )
        # SCALE and the bias are multiplied by log2(e), because exp2 is the instruction.
        x = tl.dot(q, tl.trans(k)) * (SCALE * 1.4426950408889634)
        if BIAS == 1:
            added = tl.load(bias + n * BIAS_N, mask=n < end, other=0).to(tl.float32)
            x += added[None, :] * 1.4426950408889634
        if BIAS == 2:
            added = tl.load(
                bias + bias_row[:, None] + n[None, :] * BIAS_N,
                mask=(rm[:, None] < ROWS) & (n[None, :] < end),
                other=0,
            )
            x += added.to(tl.float32) * 1.4426950408889634
        x = tl.where(n[None, :] < end, x, float("-inf"))
        new = tl.maximum(largest, tl.max(x, 1))
        # Where all keys are excluded so far, -inf - -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(x - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        largest = new

    if SPLITS == 1:
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(
            out + batch * OUT_B + (query_head * OUT_H + position * OUT_M)[:, None] + rv[None, :],
            result.to(out.dtype.element_ty),
            mask=(rm[:, None] < ROWS) & (rv[None, :] < VALUE_SIZE),
        )
    else:
        at = (pair * SPLITS + split).to(tl.int64)
        tl.store(
            sums + at * ROWS * BLOCK_V + rm[:, None] * BLOCK_V + rv[None, :],
            acc,
            mask=rm[:, None] < ROWS,
        )
        tl.store(stats + at * 2 * ROWS + rm, largest, mask=rm < ROWS)
        tl.store(stats + at * 2 * ROWS + ROWS + rm, total, mask=rm < ROWS)


@triton.jit
def combine(
    sums,
    stats,
    out,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OUT_B: tl.constexpr,
    OUT_H: tl.constexpr,
    OUT_M: tl.constexpr,
):
    """Add the shares of a row: grid (batch * HEADS, ROWS); see `attend`."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    rs = tl.arange(0, BLOCK_SPLITS)
    rv = tl.arange(0, BLOCK_V)
    at = pair * SPLITS + rs
    there = rs < SPLITS
    largest = tl.load(stats + at * 2 * ROWS + row, mask=there, other=float("-inf"))
    totals = tl.load(stats + at * 2 * ROWS + ROWS + row, mask=there, other=0)
    top = tl.max(largest, 0)
    decay = tl.exp2(largest - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(totals * decay, 0)
    parts = tl.load(
        sums + (at[:, None] * ROWS + row) * BLOCK_V + rv[None, :], mask=there[:, None], other=0
    )
    result = tl.sum(parts * decay[:, None], 0) / tl.where(total == 0, 1.0, total)
    query_head = (pair % HEADS) * (ROWS // QUERIES) + row // QUERIES
    offset = (pair // HEADS) * OUT_B + query_head * OUT_H + (row % QUERIES) * OUT_M
    tl.store(out + offset + rv, result.to(out.dtype.element_ty), mask=rv < VALUE_SIZE)
