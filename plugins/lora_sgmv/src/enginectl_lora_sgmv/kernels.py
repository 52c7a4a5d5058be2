"""Segmented products in Triton: shrink (rows to ranks) and expand (ranks added to the output).

Tokens are ordered by slot; a tile holds tokens of one slot. Every tile finds its slot from the segments' starts, so that
the launch needs nothing from the device. `num_tokens` changes from step to step: a kernel is not compiled anew for it.
"""

# Kernel arguments have Triton's types, which are not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_tile(starts, tile, NUM_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(slot, first, end) of a tile in the ordered tokens; first == end beyond the last tile."""
    slot, first, last, seen = 0, 0, 0, 0
    begin = tl.load(starts)
    for s in range(NUM_SLOTS):
        end = tl.load(starts + s + 1)
        tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
        is_here = (tile >= seen) & (tile < seen + tiles)
        slot = tl.where(is_here, s, slot)
        first = tl.where(is_here, begin + (tile - seen) * BLOCK_M, first)
        last = tl.where(is_here, end, last)
        seen += tiles
        begin = end
    return slot, first, last


@triton.jit(do_not_specialize=["num_tokens"])
def shrink_kernel(
    rows,
    down,
    ranked,
    tokens,
    starts,
    num_tokens,
    row_stride,
    IN_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """ranked[split, i, :] = down[slot] @ rows[tokens[i]] over a part of the inputs, fp32.

    down: [NUM_SLOTS, WIDTH, IN_SIZE]. ranked: [NUM_SPLITS, num_tokens, WIDTH]. Grid [tiles, WIDTH / BLOCK_N, splits].
    """
    slot, first, last = find_tile(starts, tl.program_id(0), NUM_SLOTS, BLOCK_M)
    if first < last:
        at = first + tl.arange(0, BLOCK_M)
        is_row = at < last
        token = tl.load(tokens + at, mask=is_row, other=0)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = column < WIDTH
        k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
        row_at = rows + token.to(tl.int64)[:, None] * row_stride
        down_at = down + slot.to(tl.int64) * (WIDTH * IN_SIZE) + column[None, :] * IN_SIZE
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for _ in range(0, IN_SIZE, BLOCK_K * NUM_SPLITS):
            is_k = k < IN_SIZE
            x = tl.load(row_at + k[None, :], mask=is_row[:, None] & is_k[None, :], other=0.0)
            w = tl.load(down_at + k[:, None], mask=is_column[None, :] & is_k[:, None], other=0.0)
            total += tl.dot(x, w, input_precision="ieee")
            k += BLOCK_K * NUM_SPLITS
        place = tl.program_id(2).to(tl.int64) * num_tokens + at
        out_at = ranked + place[:, None] * WIDTH
        tl.store(out_at + column[None, :], total, mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def expand_kernel(
    ranked,
    up,
    out,
    tokens,
    starts,
    bounds,
    num_tokens,
    out_stride,
    OUT_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[tokens[i], columns of a part] += up[slot] @ sum over splits of ranked[:, i, ranks of the part].

    up: [NUM_SLOTS, OUT_SIZE, RANK]. bounds: where each part's columns begin, and the end. Grid [tiles, columns of the
    widest part / BLOCK_N, parts].
    """
    part = tl.program_id(2)
    column = tl.load(bounds + part) + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    end = tl.load(bounds + part + 1)
    slot, first, last = find_tile(starts, tl.program_id(0), NUM_SLOTS, BLOCK_M)
    if (first < last) & (tl.load(bounds + part) + tl.program_id(1) * BLOCK_N < end):
        at = first + tl.arange(0, BLOCK_M)
        is_row = at < last
        is_column = column < end
        r = tl.arange(0, BLOCK_R)
        ranked_at = ranked + at.to(tl.int64)[:, None] * WIDTH + part * RANK
        split_stride = num_tokens * WIDTH
        up_at = up + slot.to(tl.int64) * (OUT_SIZE * RANK) + column[None, :] * RANK
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for _ in range(0, RANK, BLOCK_R):
            is_rank = r < RANK
            h = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for split in range(NUM_SPLITS):
                mask = is_row[:, None] & is_rank[None, :]
                h += tl.load(ranked_at + split * split_stride + r[None, :], mask=mask, other=0.0)
            w = tl.load(up_at + r[:, None], mask=is_column[None, :] & is_rank[:, None], other=0.0)
            total += tl.dot(h.to(w.dtype), w, input_precision="ieee")
            r += BLOCK_R
        token = tl.load(tokens + at, mask=is_row, other=0)
        out_at = out + token.to(tl.int64)[:, None] * out_stride + column[None, :]
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(out_at, mask=mask, other=0.0)
        tl.store(out_at, (before.to(tl.float32) + total).to(out.dtype.element_ty), mask=mask)
