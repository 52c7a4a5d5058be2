"""The sampling kernel: temperature, top-k, top-p, min-p and the draw, one program a row, without a word to the host.

It computes what core's sampler `torch` does. Weights are whole numbers, `exp((logit - peak) / temperature)` rounded to a
multiple of a power of two, so that sums in int64 are exact in any order. Thresholds are found by their bits, four at a
sweep: each sweep counts (or weighs) what is not below sixteen candidates. Sums of a sweep stay apart until its end:
adding up the threads takes barriers, and a sweep over a large vocabulary has more than a hundred turns.
"""

# Kernel arguments have Triton's types, which are not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def sample_kernel(
    logits,
    row_params,
    out,
    row_stride,
    num_rows,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid [rows]. row_params: [5, num_rows] fp64 temperature (0 is greedy), top_k (0 is off), top_p, min_p as a weight, and
    the row's uniform. A row with NaN or +inf, or without a finite logit, gives the argmax of its finite logits.
    """
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * row_stride
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
        fine = (value == value) & (value < float("inf"))
        broken = tl.where(fine, broken, 1)
        value = tl.where(fine, value, float("-inf"))
        best = tl.where(value > high, at, best)
        high = tl.maximum(high, value)
    peak = tl.max(high, 0)

    # Parameters are loaded where they are used, so that none is kept over the sweeps before.
    row_params += row
    token = tl.min(tl.where(high == peak, best, SIZE), 0).to(tl.int64)
    temperature = tl.load(row_params).to(tl.float32)
    if (temperature > 0.0) & (tl.max(broken, 0) == 0) & (peak > float("-inf")):
        lowest = tl.full((), 0, tl.uint32)
        top_k = tl.load(row_params + num_rows).to(tl.int32)
        if (top_k > 0) & (top_k < SIZE):
            lowest = kth_key(x, top_k, SIZE, BLOCK)
        floor = tl.full((), 0.0, tl.float32)
        top_p = tl.load(row_params + 2 * num_rows)
        if top_p < 1.0:
            total = total_weight(x, peak, temperature, lowest, 0.0, SIZE, BITS, BLOCK)
            wanted = top_p * total.to(tl.float64)
            floor = nucleus(x, peak, temperature, lowest, wanted, SIZE, BITS, BLOCK)
        floor = tl.maximum(floor, tl.load(row_params + 3 * num_rows).to(tl.float32))
        total = total_weight(x, peak, temperature, lowest, floor, SIZE, BITS, BLOCK)
        uniform = tl.load(row_params + 4 * num_rows)
        point = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
        token = draw(x, peak, temperature, lowest, floor, point, SIZE, BITS, BLOCK)
    tl.store(out + row, token)


@triton.jit
def order_key(value):
    """uint32 that are ordered as the fp32 values are; both zeros are one."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def load_weights(x, at, peak, temperature, lowest, floor, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Whole weights, fp32, of the logits that are not below `lowest`; 0 where they are below `floor`."""
    value = tl.load(x + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
    weight = tl.exp(tl.div_rn(value - peak, temperature)) * (2.0**BITS)
    # Adding and taking away 2**23 rounds to whole numbers, halves to even; larger ones are whole.
    weight = tl.where(weight < 8388608.0, (weight + 8388608.0) - 8388608.0, weight)
    keep = (order_key(value) >= lowest) & (weight >= floor) & (at < SIZE)
    return tl.where(keep, weight, 0.0)


@triton.jit
def kth_key(x, k, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The key of the k-th largest logit: the largest key that k logits are not below."""
    digits = tl.arange(0, 16)
    found = tl.full((), 0, tl.uint32)
    for step in range(8):
        shift = 28 - 4 * step
        candidates = found + (digits << shift).to(tl.uint32, bitcast=True)
        counts = tl.zeros([BLOCK, 16], tl.int32)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < SIZE, other=float("-inf")).to(tl.float32)
            reaches = (order_key(value)[:, None] >= candidates[None, :]) & (at < SIZE)[:, None]
            counts += reaches.to(tl.int32)
        digit = tl.max(tl.where(tl.sum(counts, 0) >= k, digits, 0), 0)
        found += (digit << shift).to(tl.uint32, bitcast=True)
    return found


@triton.jit
def nucleus(x, peak, temperature, lowest, wanted, SIZE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest weight of the nucleus: the largest weight such that those not below it reach `wanted` together."""
    digits = tl.arange(0, 16)
    found = tl.full((), 0, tl.int32)
    for step in range(8):
        shift = 28 - 4 * step
        # Weights are below 2**37, whose bits fit 31: higher digits of the first four reach nothing.
        candidates = found + (tl.where((step == 0) & (digits > 7), 7, digits) << shift)
        sums = tl.zeros([BLOCK, 16], tl.int64)
        for start in range(0, SIZE, BLOCK):
            at = start + tl.arange(0, BLOCK)
            weight = load_weights(x, at, peak, temperature, lowest, 0.0, SIZE, BITS)
            reaches = weight.to(tl.int32, bitcast=True)[:, None] >= candidates[None, :]
            sums += tl.where(reaches, weight.to(tl.int64)[:, None], 0)
        digit = tl.max(tl.where(tl.sum(sums, 0).to(tl.float64) >= wanted, digits, 0), 0)
        found += digit << shift
    return found.to(tl.float32, bitcast=True)


@triton.jit
def total_weight(x, peak, temperature, lowest, floor, SIZE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum, exact."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sums += load_weights(x, at, peak, temperature, lowest, floor, SIZE, BITS).to(tl.int64)
    return tl.sum(sums, 0)


@triton.jit
def draw(x, peak, temperature, lowest, floor, point, SIZE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The first id, in token-id order, at which the running sum of weights passes `point`."""
    before = tl.full((), 0, tl.int64)
    token = tl.full((), SIZE - 1, tl.int64)
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        weight = load_weights(x, at, peak, temperature, lowest, floor, SIZE, BITS).to(tl.int64)
        ends = before + tl.cumsum(weight, 0)
        token = tl.minimum(token, tl.min(tl.where(ends > point, at, SIZE - 1), 0).to(tl.int64))
        before += tl.sum(weight, 0)
    return token
