"""The arithmetic of sampling on tensors, all rows at once.

Two ideas carry it.

*Whole weights.* `exp((logit - peak) / temperature)` is rounded to a multiple of a power of two, so that a row's weights
are whole numbers whose sum stays below 2**53. Sums of such numbers are exact in float64 whatever their order; hence a
row's token is bitwise the same for every batch size, blocking, device and number of threads, without a prescribed
order of summation. Weights below 2**-37 of the peak round to zero.

*Blocks.* A row is read as blocks of 64 logits. Block maxima and block sums are one fast pass; everything after that
(argmax, the largest logits, inverting the distribution) looks inside few blocks only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from enginectl.transfer import to_device

BLOCK = 64
_LIST_WIDTH = 64
"""How many of the largest values are looked at before the whole row is searched."""


def argmax(logits: Tensor) -> Tensor:
    """[n] int64: the lowest id among a row's largest finite logits. logits: [n, vocab_size], unchanged."""
    if logits.is_cuda:  # a full pass is cheaper there than asking whether one is needed
        return _finite(logits).argmax(-1)
    peak, token_ids = _peaks(logits)
    broken = ~torch.isfinite(peak)
    if broken.any():
        rows = broken.nonzero()[:, 0]
        token_ids[rows] = _finite(logits[rows]).argmax(-1)
    return token_ids


def _peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its lowest id, [n] each; a NaN gives a NaN."""
    vocab_size = logits.shape[-1]
    whole = vocab_size - vocab_size % BLOCK
    if whole == 0:
        token_ids = logits.argmax(-1)
        return logits.gather(1, token_ids[:, None])[:, 0], token_ids
    head = in_blocks(logits[:, :whole])
    block = head.amax(-1).argmax(-1)
    inside = head[torch.arange(len(logits)), block]  # [n, BLOCK]
    at = inside.argmax(-1)
    peak, token_ids = inside.gather(1, at[:, None])[:, 0], block * BLOCK + at
    if whole == vocab_size:
        return peak, token_ids
    rest, at = logits[:, whole:].max(-1)
    return torch.maximum(peak, rest), torch.where(rest > peak, at + whole, token_ids)


def in_blocks(x: Tensor) -> Tensor:
    """[n, width / BLOCK, BLOCK], a view."""
    return x.view(len(x), x.shape[-1] // BLOCK, BLOCK)


def whole_blocks(x: Tensor) -> Tensor:
    """The same logits with -inf up to a whole block; x itself if there is nothing to add."""
    missing = -x.shape[-1] % BLOCK
    return functional.pad(x, (0, missing), value=-torch.inf) if missing else x


def select_rows(logits: Tensor, rows: Tensor) -> Tensor:
    """A copy of some rows, padded with -inf to whole blocks, with broken rows made harmless: a row with NaN or +inf,
    or without a finite logit, becomes one that can only give the argmax of its finite logits.
    """
    x = whole_blocks(logits.index_select(0, rows))
    broken = ~torch.isfinite(x.amax(-1))
    if x.is_cuda:  # as above
        return torch.where(broken[:, None], _only_best(x), x)
    if broken.any():
        at = broken.nonzero()[:, 0]
        x[at] = _only_best(x[at])
    return x


def _only_best(x: Tensor) -> Tensor:
    """Logits that can only give the argmax of the finite ones."""
    return torch.full_like(x, -torch.inf).scatter_(1, _finite(x).argmax(-1, keepdim=True), 0.0)


def _finite(logits: Tensor) -> Tensor:
    return torch.where(torch.isfinite(logits), logits, -torch.inf)


def weight_bits(width: int) -> int:
    """The weight of a row's peak is 2 to this power: sums over `width` weights fit a float64 exactly."""
    return min(36, 53 - (width - 1).bit_length())


def to_weights(x: Tensor, temperature: Tensor | None) -> Tensor:
    """Whole weights, float32, in place of logits [n, width]. temperature: [n], None where all are 1."""
    x.sub_(x.amax(-1, keepdim=True))
    if temperature is not None:
        x.div_(temperature[:, None])
    return x.exp_().mul_(2.0 ** weight_bits(x.shape[-1])).round_()


def block_sums(weights: Tensor) -> Tensor:
    """[n, width / BLOCK] float64, exact."""
    return in_blocks(weights).sum(-1, dtype=torch.float64)


def pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """[n] int64: the first id, in token-id order, at which the running sum of weights passes uniform * total.

    weights: [n, width] whole. uniform: [n] float64 in (0, 1). A weight of zero is never picked: the running sum does
    not grow there, and the point looked for is below the total.
    """
    sums = block_sums(weights)
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    point = torch.minimum((uniform[:, None] * total).floor_(), total - 1)
    block = torch.searchsorted(ends, point, right=True)
    before = ends.gather(1, block) - sums.gather(1, block)
    inside = in_blocks(weights)[torch.arange(len(weights), device=weights.device), block[:, 0]]
    at = torch.searchsorted(inside.double().cumsum(-1) + before, point, right=True)
    return (block * BLOCK + at)[:, 0]


def at_least(x: Tensor, floor: Tensor, out: Tensor | None = None) -> Tensor:
    """1.0 where a value is not below its row's floor [n], else 0.0. In float32: a comparison into bytes, and masking
    by them, takes many times as long on a CPU as this and a multiplication.
    """
    return torch.ge(x, floor[:, None], out=torch.empty_like(x) if out is None else out)


def kth_largest(x: Tensor, k: NDArray[np.int64]) -> Tensor:
    """[n]: the k-th largest value of each row, -inf where k is more than the row is wide. k: [n] from 1, on the host."""
    values = largest(x, _LIST_WIDTH)
    width = values.shape[-1]
    answer = values.gather(1, to_device(np.minimum(k, width) - 1, x.device)[:, None])[:, 0]
    off = k > x.shape[-1]
    some = np.flatnonzero(~off & (k > width))
    if some.size:
        rows, wanted = to_device(some, x.device), to_device(k[some], x.device)
        answer[rows] = _bisect(x[rows], values[rows, -1], lambda keep: keep.sum(-1) >= wanted)
    return answer.masked_fill_(to_device(off, x.device), -torch.inf) if off.any() else answer


def nucleus(weights: Tensor, top_p: Tensor) -> Tensor:
    """[n]: the smallest weight of the nucleus, the shortest list of largest weights whose sum reaches top_p of the
    total; 0 where top_p is 1. weights: [n, width] whole. top_p: [n] float64.

    Waits for the device: 30 passes over every row would take longer.
    """
    wanted = top_p * block_sums(weights).sum(-1)
    values = largest(weights, _LIST_WIDTH)
    sums = values.cumsum(-1, dtype=torch.float64)
    last = (sums < wanted[:, None]).sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
    answer = values.gather(1, last)[:, 0]
    off = top_p >= 1.0
    rows = (~off & (sums[:, -1] < wanted)).nonzero()[:, 0]
    if len(rows):
        part, wanted = weights[rows], wanted[rows]

        def enough(keep: Tensor) -> Tensor:
            return block_sums(keep.mul_(part)).sum(-1) >= wanted

        answer[rows] = _bisect(part, values[rows, -1], enough)
    return answer.masked_fill_(off, 0.0)


def largest(x: Tensor, k: int) -> Tensor:
    """[n, k]: the k largest values of each row (all, if it is narrower), in descending order. x: whole blocks."""
    blocks = in_blocks(x)
    num_blocks = blocks.shape[1]
    if num_blocks > 2 * k:  # the k largest values lie in the k blocks with the largest maxima
        block = blocks.amax(-1).topk(k, dim=-1, sorted=False).indices
        block += torch.arange(len(x), device=x.device)[:, None] * num_blocks
        x = x.view(-1, BLOCK).index_select(0, block.flatten()).view(len(x), -1)
    return x.topk(min(k, x.shape[-1]), dim=-1).values


def _bisect(x: Tensor, upper: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """[n]: the largest value v of each row, at most `upper`, for which the values >= v are enough.

    enough(keep) -> [n] bool, from keep [n, width], 1.0 where a value counts, which it may overwrite; true where all
    count. Halves the range of floats by their bits, so that the answer is exact: about 30 passes, which take less time
    than sorting the rows.
    """
    low, high = _order(x.amin(-1)), _order(upper)
    keep = torch.empty_like(x)
    num_steps = 32 if x.is_cuda else int((high - low).max()).bit_length()  # asking a GPU is waiting for it
    for _ in range(num_steps):
        middle = high - (high - low) // 2
        is_enough = enough(at_least(x, _value(middle), out=keep))
        low = torch.where(is_enough, middle, low)
        high = torch.where(is_enough, high, middle - 1)
    return _value(low)


def _order(values: Tensor) -> Tensor:
    """int64 that are ordered as the float32 values are."""
    bits = values.view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _value(order: Tensor) -> Tensor:
    bits = order.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)
