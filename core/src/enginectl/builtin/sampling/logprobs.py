"""Log-probabilities of chosen tokens and of the best alternatives.

They are the model's own: taken from the raw logits, before logits processors and temperature, so that they do not
depend on how the request samples (as vLLM's default does). The caller hands over the logits it kept from before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.sampling import kernels
from enginectl.builtin.sampling.processor import on_device
from enginectl.types import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of zero and for what NaN logits give: JSON has neither."""

_CHUNK_ELEMENTS = 1 << 19


def token_logprobs(
    logits: Tensor, chosen: Sequence[int] | NDArray[np.int64], num_top: Sequence[int] | NDArray[np.int64]
) -> list[TokenLogprobs]:
    """One entry a row: the chosen token with its rank, and its num_top best tokens, best first, lower ids first.

    logits: fp32 [n, vocab_size], raw, unchanged. chosen: [n] token ids. num_top: [n], 0 for none. A rank is 1 plus the
    number of tokens that are more likely. A row's entry does not depend on the other rows.
    """
    chosen, num_top = np.asarray(chosen, dtype=np.int64), np.asarray(num_top, dtype=np.int64)
    num_top = np.minimum(num_top, logits.shape[-1])
    size = len(logits) if logits.is_cuda else max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    parts = [slice(i, i + size) for i in range(0, len(logits), size)]
    return [entry for part in parts for entry in _entries(logits[part], chosen[part], num_top[part])]


def _entries(logits: Tensor, chosen: NDArray[np.int64], num_top: NDArray[np.int64]) -> Iterator[TokenLogprobs]:
    picked = logits.gather(1, on_device(chosen[:, None], logits))
    rank = (logits > picked).sum(-1) + 1
    norm = _log_sums(logits).cpu().numpy()
    logprob = _logprobs(picked, norm)[:, 0].tolist()
    top_ids, top_values = _top(logits, int(num_top.max(initial=0)))
    top_logprob = _logprobs(top_values, norm).tolist()
    rows = zip(chosen.tolist(), logprob, rank.tolist(), num_top.tolist(), top_ids.tolist(), top_logprob, strict=True)
    for token_id, value, place, k, ids, values in rows:
        yield TokenLogprobs(token_id, value, place, tuple(ids[:k]), tuple(values[:k]))


def _log_sums(logits: Tensor) -> Tensor:
    """[n] float64: logarithm of the sum of exponentials, from exact sums, so that it is the same in every batch."""
    x = kernels.whole_blocks(logits.clone())
    peak = x.amax(-1).double()
    total = kernels.block_sums(kernels.to_weights(x, None)).sum(-1)
    return peak + (total * 2.0 ** -kernels.weight_bits(x.shape[-1])).log()


def _logprobs(values: Tensor, norm: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, k] log-probabilities, rounded to float32."""
    exact = (values.double().cpu().numpy() - norm[:, None]).astype(np.float32).astype(np.float64)
    return np.nan_to_num(exact, nan=MIN_LOGPROB, neginf=MIN_LOGPROB)


def _top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and values [n, k] of the largest logits, in descending order, equal ones by ascending id."""
    if k == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64), logits[:, :0]
    vocab_size = logits.shape[-1]
    values, ids = logits.topk(min(k + 1, vocab_size), dim=-1)
    if k < vocab_size:  # topk takes any of those that tie with the last: then look again
        cut = (values[:, k - 1] == values[:, k]).nonzero()[:, 0]
        if len(cut):
            ids[cut, :k] = logits[cut].sort(dim=-1, descending=True, stable=True).indices[:, :k]
        ids = ids[:, :k]
    ids = ids.sort(dim=-1).values
    values = logits.gather(1, ids)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order), values.gather(1, order)
