"""Verification: the target is sampled at every draft position, and a draft is accepted while it equals the sample.

Lossless for every draft and every sampler whose token is a function of (row, position): what comes out is what plain
decoding would have given, token for token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntRows = NDArray[np.int32]


def verify(sampled: IntRows, widths: IntRows, drafts: IntRows) -> tuple[IntRows, IntRows]:
    """Keep each row's samples up to and including the first that differs from its draft.

    sampled: [sum(widths)] tokens, row after row. widths: [n], drafts + 1. drafts: [n, max(widths) - 1], padding
    ignored. Returns (tokens [n, max(widths)], num_new [n]); tokens beyond num_new are meaningless.
    """
    n, width = widths.size, int(widths.max())
    column = np.arange(width, dtype=np.int32)
    valid = column < widths[:, None]
    tokens = np.zeros((n, width), np.int32)
    tokens[valid] = sampled
    agrees = (tokens[:, :-1] == drafts) & valid[:, 1:]
    accepted = np.cumprod(agrees, axis=1).sum(axis=1).astype(np.int32)
    return tokens, accepted + 1


def usable_drafts(drafts: IntRows, counts: IntRows, vocab_size: int) -> IntRows:
    """How many drafts of each row count: those before the first that is no token at all. drafts: [n, width]."""
    counts = np.clip(counts, 0, drafts.shape[1]).astype(np.int32)
    strange = (drafts < 0) | (drafts >= vocab_size)
    if strange.any():
        first = np.where(strange.any(axis=1), strange.argmax(axis=1), drafts.shape[1])
        counts = np.minimum(counts, first).astype(np.int32)
    return counts
