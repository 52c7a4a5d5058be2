"""Logits processors that add a bias or forbid tokens: logit_bias, bad_words, min_tokens, allowed_token_ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.sampling import validation
from enginectl.builtin.sampling.processor import Entries, RowProcessor, on_device
from enginectl.builtin.sampling.rows import RaggedRows
from enginectl.interfaces.sampler import SampleBatch
from enginectl.types import SamplingParams

MASKED = -float("inf")


class ListProcessor(RowProcessor):
    """A processor whose parameter is a list a row."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows)
        self._lists = RaggedRows(max_rows)

    def remove_row(self, row: int) -> None:
        super().remove_row(row)
        self._lists.clear(row)

    def set_list(self, row: int, *columns: NDArray[np.generic]) -> None:
        """The row's list; an empty one means that it does not use the processor."""
        self.remove_row(row)
        if len(columns[0]):
            self._lists.set(row, *columns)
            self._users.set(row, True)


class LogitBias(ListProcessor):
    """Adds a number to the logits of listed tokens."""

    reads_tokens = False

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        validation.check_logit_bias(params, vocab_size)

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        bias = params.logit_bias or {}
        self.set_list(row, _ids(bias.keys()), np.fromiter(bias.values(), np.float32, len(bias)))

    def apply_to(self, logits: Tensor, index: NDArray[np.intp], batch: SampleBatch) -> None:
        which, (token_ids, bias) = self._lists.expand(batch.rows)
        entries = Entries(logits, index[which], token_ids)
        entries.put(entries.get() + on_device(bias, logits))


class BadWords(ListProcessor):
    """Forbids the last token of a sequence wherever the history ends with the rest of it."""

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        validation.check_bad_words(params, vocab_size)

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        words = params.bad_word_ids
        width = max((len(word) - 1 for word in words), default=0)
        # What must come before, the nearest token first; -1 stands for "anything".
        before = np.full((len(words), width), -1, dtype=np.int32)
        for i, word in enumerate(words):
            before[i, : len(word) - 1] = word[-2::-1]
        self.set_list(row, _ids(word[-1] for word in words), before)

    def apply_to(self, logits: Tensor, index: NDArray[np.intp], batch: SampleBatch) -> None:
        which, (last, before) = self._lists.expand(batch.rows)
        columns = batch.positions[which, None] - 1 - np.arange(before.shape[1])
        history = batch.token_ids[batch.rows[which, None], np.maximum(columns, 0)]
        completes = ((before == -1) | ((columns >= 0) & (history == before))).all(axis=1)
        Entries(logits, index[which[completes]], last[completes]).fill(MASKED)


class MinTokens(ListProcessor):
    """Forbids EOS (unless the request ignores it) and the stop tokens until min_tokens output tokens are there."""

    reads_tokens = False

    def __init__(self, max_rows: int, eos_token_ids: Iterable[int]) -> None:
        super().__init__(max_rows)
        self._eos_token_ids = tuple(eos_token_ids)
        self._min_tokens = np.zeros(max_rows, dtype=np.int32)

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        validation.check_min_tokens(params, vocab_size, self._eos_token_ids)

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        ends = validation.end_token_ids(params, self._eos_token_ids) if params.min_tokens > 0 else ()
        self.set_list(row, _ids(ends))
        self._min_tokens[row] = params.min_tokens

    def apply_to(self, logits: Tensor, index: NDArray[np.intp], batch: SampleBatch) -> None:
        num_output = batch.positions - batch.prompt_lens[batch.rows]
        early = num_output < self._min_tokens[batch.rows]
        if early.any():
            which, (token_ids,) = self._lists.expand(batch.rows[early])
            Entries(logits, index[early][which], token_ids).fill(MASKED)


class AllowedTokens(ListProcessor):
    """Forbids every token that is not listed."""

    reads_tokens = False

    def validate(self, params: SamplingParams, vocab_size: int) -> None:
        validation.check_allowed_token_ids(params, vocab_size)

    def add_row(self, row: int, params: SamplingParams, seed: int, choice: int, prompt_len: int) -> None:
        self.set_list(row, _ids(params.allowed_token_ids or ()))

    def apply_to(self, logits: Tensor, index: NDArray[np.intp], batch: SampleBatch) -> None:
        which, (token_ids,) = self._lists.expand(batch.rows)
        entries = Entries(logits, index[which], token_ids)
        kept = entries.get()
        logits.index_fill_(0, on_device(index, logits), MASKED)
        entries.put(kept)


def _ids(values: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)
