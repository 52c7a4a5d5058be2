"""Repetition, frequency and presence penalties."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.sampling import validation
from enginectl.builtin.sampling.processor import Entries, RowProcessor, on_device
from enginectl.interfaces.sampler import SampleBatch
from enginectl.types import SamplingParams

_NONE = np.iinfo(np.int32).max


class Penalties(RowProcessor):
    """First repetition (prompt and output), then frequency and presence (output only)."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows)
        self._repetition = np.ones(max_rows, dtype=np.float32)
        self._frequency = np.zeros(max_rows, dtype=np.float32)
        self._presence = np.zeros(max_rows, dtype=np.float32)

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        validation.check_penalties(params)

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._users.set(row, penalties != (1.0, 0.0, 0.0))

    def apply_to(self, logits: Tensor, index: NDArray[np.intp], batch: SampleBatch) -> None:
        rows = batch.rows
        prompt_lens = batch.prompt_lens[rows]
        first = np.where(self._repetition[rows] != 1.0, 0, prompt_lens)
        which, token_ids, num_output = count_tokens(batch, first, prompt_lens)
        entries = Entries(logits, index[which], token_ids)
        before = entries.get()

        rows = rows[which]
        factor = on_device(self._repetition[rows], logits)
        subtract = self._frequency[rows] * num_output + self._presence[rows] * (num_output > 0)
        repeated = torch.where(before > 0, before / factor, before * factor)
        entries.put(repeated - on_device(subtract.astype(np.float32), logits))


def count_tokens(
    batch: SampleBatch, first: NDArray[np.int32], prompt_lens: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The distinct tokens of each history from column `first` on, and how often each is in the output.

    Returns (which, token_ids, num_output), parallel [m]; `which` indexes the batch. One sort over all rows: an entry
    is the token id with a low bit that says "output", so that equal ids are neighbours and the bits can be summed.
    """
    lengths = np.maximum(batch.positions - first, 0)
    columns = first[:, None] + np.arange(lengths.max(initial=0))
    inside = columns < batch.positions[:, None]
    history = batch.token_ids[batch.rows[:, None], np.minimum(columns, batch.token_ids.shape[1] - 1)]
    entries = np.where(inside, history * 2 + (columns >= prompt_lens[:, None]), _NONE)
    entries.sort(axis=1)

    token_ids = entries >> 1
    is_entry = entries != _NONE
    is_first = is_entry.copy()
    is_first[:, 1:] &= token_ids[:, 1:] != token_ids[:, :-1]
    starts = np.flatnonzero(is_first)
    is_output = ((entries & 1) * is_entry).ravel()
    before = np.cumsum(is_output, dtype=np.int64) - is_output  # output entries ahead of each entry
    num_output = np.diff(before[starts], append=is_output.sum())
    return starts // max(entries.shape[1], 1), token_ids.ravel()[starts].astype(np.int64), num_output
