"""Kernels over paged keys and values: attend, join the splits, write.

The store of a layer is two contiguous tensors [num_blocks, block_size, num_kv_heads, head_dim]; slot = block *
block_size + offset. Offsets into it are int64, everything else is small. What is not this sequence's and in sight is
never loaded: null blocks and slots nobody has written may hold NaN. Sums are fp32 whatever the store holds.

`do_not_specialize` names what changes from step to step: a kernel would be compiled anew, while requests wait, for a
table that starts elsewhere or has one column.
"""

# Kernel arguments have Triton's types, which are not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_cap_scores(scores, CAP: tl.constexpr):
    """cap * tanh(scores / cap); tanh by way of exp, whose overflow gives the right limit."""
    return CAP * (1.0 - 2.0 / (tl.exp(scores * (2.0 / CAP)) + 1.0))


@triton.jit
def locate_tile(tile, tiles, query_start, ONE_QUERY: tl.constexpr):
    """Where a tile's queries are: (row, first query in the row, the row's first token, the row's queries)."""
    if ONE_QUERY:
        return tile, 0, tile, 1
    else:
        row = tl.load(tiles + 2 * tile)
        first_query = tl.load(tiles + 2 * tile + 1)
        token = tl.load(query_start + row)
        return row, first_query, token, tl.load(query_start + row + 1) - token


@triton.jit(do_not_specialize=["block_table", "query_start", "seq_lens", "tiles", "table_stride"])
def attend_kernel(
    q,
    keys,
    values,
    out,
    partial,
    partial_lse,
    sinks,
    block_table,
    query_start,
    seq_lens,
    tiles,
    q_stride_token,
    q_stride_head,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    QUERIES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One tile of queries of one row, for one KV head and one split of its keys. Grid [tiles, kv heads, splits].

    A tile's rows are (query, head of the group), QUERIES * HEADS_PER_KV of them used. The result goes to `out` or, with
    IS_SPLIT, each split's mean and log2 of its weight go to `partial` for `join_kernel`.
    Source: Dao et al. 2022 (online softmax), Dao et al. 2023 "Flash-Decoding" (splits).
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row, first_query, token, num_queries = locate_tile(tile, tiles, query_start, ONE_QUERY)
    seq_len = tl.load(seq_lens + row)
    before = seq_len - num_queries

    m = tl.arange(0, BLOCK_M)
    if QUERIES == 1:  # no division, and rows that differ in their head only
        in_tile = tl.zeros([BLOCK_M], tl.int32)
        head = kv_head * HEADS_PER_KV + m
    else:
        in_tile = m // HEADS_PER_KV
        head = kv_head * HEADS_PER_KV + m % HEADS_PER_KV
    query = first_query + in_tile
    used = (m < QUERIES * HEADS_PER_KV) & (query < num_queries)
    position = before + query
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_rows = q + (token + query).to(tl.int64) * q_stride_token + head * q_stride_head
    q_tile = tl.load(q_rows[:, None] + d[None, :], mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0)

    # Keys in sight of any query of the tile: [lowest, stop).
    stop = before + tl.minimum(first_query + QUERIES, num_queries)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(lowest, before + first_query - WINDOW + 1)
    if CHUNK > 0:
        lowest = tl.maximum(lowest, (before + first_query) // CHUNK * CHUNK)
    begin = lowest // BLOCK_N
    end = tl.cdiv(stop, BLOCK_N)
    if IS_SPLIT:
        size = tl.cdiv(end - begin, tl.num_programs(2))
        begin += split * size
        end = tl.minimum(begin + size, end)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 (known at compile time; the other is not)
        if split == 0:  # a sink is a key without a value: it starts the denominator
            peak = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = block_table + row.to(tl.int64) * table_stride
    for key_tile in range(begin, end):
        key = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        stored = (key >= lowest) & (key < stop)
        block = tl.load(table + key // BLOCK_SIZE, mask=stored, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        k = tl.load(
            keys + (slot * NUM_KV_HEADS + kv_head)[None, :] * HEAD_DIM + d[:, None],
            mask=stored[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            values + (slot * NUM_KV_HEADS + kv_head)[:, None] * V_HEAD_DIM + dv[None, :],
            mask=stored[:, None] & (dv < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(q_tile, k, input_precision="ieee") * SCALE
        if SOFT_CAP > 0:
            scores = soft_cap_scores(scores, SOFT_CAP)
        in_sight = stored[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            in_sight = in_sight & (key[None, :] > position[:, None] - WINDOW)
        if CHUNK > 0:
            in_sight = in_sight & (key[None, :] >= (position // CHUNK * CHUNK)[:, None])
        scores = tl.where(in_sight, scores * LOG2_E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # A query that has seen no key yet has no peak; subtracting 0 keeps its weights 0 instead of NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = higher

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    store = used[:, None] & (dv < V_HEAD_DIM)[None, :]
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    if IS_SPLIT:
        place = ((tile * QUERIES + in_tile).to(tl.int64) * NUM_HEADS + head) * tl.num_programs(2) + split
        tl.store(partial_lse + place, peak + tl.log2(total), mask=used)
        tl.store(partial + place[:, None] * V_HEAD_DIM + dv[None, :], acc, mask=store)
    else:
        place = (token + query).to(tl.int64) * NUM_HEADS + head
        tl.store(out + place[:, None] * V_HEAD_DIM + dv[None, :], acc.to(out.dtype.element_ty), mask=store)


@triton.jit(do_not_specialize=["query_start", "tiles"])
def join_kernel(
    partial,
    partial_lse,
    out,
    query_start,
    tiles,
    NUM_HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The mean of a query's splits by their weights. Grid [tiles * QUERIES, heads]; a split without keys weighs 0."""
    tile = tl.program_id(0) // QUERIES
    _, first_query, token, num_queries = locate_tile(tile, tiles, query_start, ONE_QUERY)
    query = first_query + tl.program_id(0) % QUERIES
    head = tl.program_id(1)
    if query < num_queries:
        split = tl.arange(0, NUM_SPLITS)
        dv = tl.arange(0, BLOCK_DV)
        place = (tl.program_id(0).to(tl.int64) * NUM_HEADS + head) * NUM_SPLITS + split
        lse = tl.load(partial_lse + place)
        peak = tl.max(lse, 0)
        weights = tl.exp2(lse - tl.where(peak == float("-inf"), 0.0, peak))
        means = tl.load(
            partial + place[:, None] * V_HEAD_DIM + dv[None, :],
            mask=(weights > 0)[:, None] & (dv < V_HEAD_DIM)[None, :],
            other=0.0,
        )
        total = tl.sum(weights, 0)
        mean = tl.sum(means * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
        place = (token + query).to(tl.int64) * NUM_HEADS + head
        tl.store(out + place * V_HEAD_DIM + dv, mean.to(out.dtype.element_ty), mask=dv < V_HEAD_DIM)


@triton.jit(do_not_specialize=["slots", "num_rows"])
def write_kernel(
    k,
    v,
    keys,
    values,
    slots,
    num_rows,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Copy keys and values to their slots; a negative slot is skipped. Rows are (token, head): num_rows in all."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // NUM_KV_HEADS).to(tl.int64)
    head = row % NUM_KV_HEADS
    slot = tl.load(slots + token, mask=row < num_rows, other=-1).to(tl.int64)
    used = slot >= 0
    place = slot * NUM_KV_HEADS + head
    d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (d < HEAD_DIM)[None, :]
    source = k + token * k_stride_token + head * k_stride_head
    x = tl.load(source[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(keys + place[:, None] * HEAD_DIM + d[None, :], x.to(keys.dtype.element_ty), mask=mask)
    dv = tl.arange(0, BLOCK_DV)
    mask = used[:, None] & (dv < V_HEAD_DIM)[None, :]
    source = v + token * v_stride_token + head * v_stride_head
    x = tl.load(source[:, None] + dv[None, :], mask=mask, other=0.0)
    tl.store(values + place[:, None] * V_HEAD_DIM + dv[None, :], x.to(values.dtype.element_ty), mask=mask)
