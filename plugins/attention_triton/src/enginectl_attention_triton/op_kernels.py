"""Kernels of the op set: RMSNorm with its residual, gated activations, RoPE with norms and the KV write, argmax."""

# Kernel arguments have Triton's types, which are not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMSNorm of one row, in fp32. With ADD: residual += SCALE * x first, in place, and the sum is what is normed."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < SIZE
    h = tl.load(x + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_stride + at
        h = h * SCALE + tl.load(place, mask=mask, other=0.0).to(tl.float32)
        rounded = h.to(residual.dtype.element_ty)
        tl.store(place, rounded, mask=mask)
        h = rounded.to(tl.float32)
    w = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if PLUS_ONE:
        w += 1.0
    y = h * tl.rsqrt(tl.sum(h * h, 0) / SIZE + eps) * w
    tl.store(out + row * SIZE + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gated_kernel(
    gate_up,
    out,
    row_stride,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """act(gate) * up, rows [gate, up] of 2 * SIZE. Grid [rows, pieces of BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < SIZE
    gate = tl.load(gate_up + row * row_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + at, mask=mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    else:
        # gelu by tanh: x / 2 * (1 + tanh(y)) = x * sigmoid(2 y)
        y = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * y))
    tl.store(out + row * SIZE + at, (gate * up).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots", "num_rows"])  # they change from step to step
def rope_kernel(
    q,
    k,
    v,
    cos,
    sin,
    q_weight,
    k_weight,
    keys,
    values,
    slots,
    num_rows,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Norm (optional) and turn the heads of q and k, in fp32; rows are (token, head of q or k).

    q changes in place. k changes in place too or, with WRITE, goes to its slot in the store, and v with it; tokens with
    a negative slot are then skipped. cos, sin: [num_tokens, ROTARY_DIM]; pairs are (i, i + ROTARY_DIM / 2).
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = (row // (NUM_HEADS + NUM_KV_HEADS)).to(tl.int64)
    head = row % (NUM_HEADS + NUM_KV_HEADS)
    kv_head = head - NUM_HEADS
    is_q = (row < num_rows) & (head < NUM_HEADS)
    is_k = (row < num_rows) & (head >= NUM_HEADS)
    from_q = q + token * q_stride_token + head * q_stride_head
    from_k = k + token * k_stride_token + kv_head * k_stride_head
    i = tl.arange(0, BLOCK_HALF)
    rest = ROTARY_DIM + tl.arange(0, BLOCK_REST)
    turned = (i < HALF)[None, :]
    kept = (rest < HEAD_DIM)[None, :]
    low = load_heads(from_q, from_k, i, is_q, is_k, turned)
    high = load_heads(from_q, from_k, HALF + i, is_q, is_k, turned)
    tail = load_heads(from_q, from_k, rest, is_q, is_k, kept)
    if NORM:
        square = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(tail * tail, 1)
        factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
        low *= factor * norm_weights(q_weight, k_weight, i, is_q, turned, PLUS_ONE)
        high *= factor * norm_weights(q_weight, k_weight, HALF + i, is_q, turned, PLUS_ONE)
        tail *= factor * norm_weights(q_weight, k_weight, rest, is_q, kept, PLUS_ONE)
    angles = token[:, None] * ROTARY_DIM + i[None, :]
    known = (row < num_rows)[:, None] & turned
    cos_low = tl.load(cos + angles, mask=known, other=0.0)
    sin_low = tl.load(sin + angles, mask=known, other=0.0)
    cos_high = tl.load(cos + angles + HALF, mask=known, other=0.0)
    sin_high = tl.load(sin + angles + HALF, mask=known, other=0.0)
    new_low = low * cos_low - high * sin_low
    new_high = high * cos_high + low * sin_high
    if WRITE:
        slot = tl.load(slots + token, mask=row < num_rows, other=-1).to(tl.int64)
        is_k = is_k & (slot >= 0)
        place = slot * NUM_KV_HEADS + kv_head
        to_k = keys + place * HEAD_DIM
        dv = tl.arange(0, BLOCK_DV)
        mask = is_k[:, None] & (dv < V_HEAD_DIM)[None, :]
        from_v = v + token * v_stride_token + kv_head * v_stride_head
        x = tl.load(from_v[:, None] + dv[None, :], mask=mask, other=0.0)
        tl.store(values + place[:, None] * V_HEAD_DIM + dv[None, :], x.to(values.dtype.element_ty), mask=mask)
    else:
        to_k = from_k
    store_heads(from_q, to_k, i, new_low, is_q, is_k, turned)
    store_heads(from_q, to_k, HALF + i, new_high, is_q, is_k, turned)
    if NORM or WRITE:
        store_heads(from_q, to_k, rest, tail, is_q, is_k, kept)


@triton.jit
def load_heads(from_q, from_k, at, is_q, is_k, columns):
    """Columns `at` of rows that lie in q or in k, as fp32. No row is in both; what is in neither is 0."""
    x = tl.load(from_q[:, None] + at[None, :], mask=is_q[:, None] & columns, other=0.0).to(tl.float32)
    y = tl.load(from_k[:, None] + at[None, :], mask=is_k[:, None] & columns, other=0.0).to(tl.float32)
    return x + y


@triton.jit
def store_heads(to_q, to_k, at, x, is_q, is_k, columns):
    """The opposite of `load_heads`."""
    tl.store(to_q[:, None] + at[None, :], x.to(to_q.dtype.element_ty), mask=is_q[:, None] & columns)
    tl.store(to_k[:, None] + at[None, :], x.to(to_k.dtype.element_ty), mask=is_k[:, None] & columns)


@triton.jit
def norm_weights(q_weight, k_weight, at, is_q, columns, PLUS_ONE: tl.constexpr):
    """Each row's norm weight for columns `at`."""
    for_q = tl.load(q_weight + at[None, :], mask=columns, other=0.0).to(tl.float32)
    for_k = tl.load(k_weight + at[None, :], mask=columns, other=0.0).to(tl.float32)
    w = tl.where(is_q[:, None], for_q, for_k)
    if PLUS_ONE:
        w += 1.0
    return w


@triton.jit
def argmax_pieces_kernel(
    logits,
    best,
    best_id,
    row_stride,
    num_pieces,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest logit of a piece of a row and the lowest id that has it. Grid [rows, pieces]. NaN counts as -inf."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    peak = tl.max(x, 0)
    place = row * num_pieces + piece
    tl.store(best + place, peak)
    tl.store(best_id + place, tl.min(tl.where((x == peak) & (at < SIZE), at, SIZE), 0))


@triton.jit
def argmax_join_kernel(
    best,
    best_id,
    out,
    num_pieces,
    BLOCK: tl.constexpr,
):
    """The same over a row's pieces. Grid [rows]."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK)
    mask = piece < num_pieces
    x = tl.load(best + row * num_pieces + piece, mask=mask, other=float("-inf"))
    ids = tl.load(best_id + row * num_pieces + piece, mask=mask, other=2147483647)
    tl.store(out + row, tl.min(tl.where(x == tl.max(x, 0), ids, 2147483647), 0).to(tl.int64))
