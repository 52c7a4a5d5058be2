"""Prompt lookup: what followed the last tokens when they came before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from enginectl.context import BuildContext
from enginectl.errors import ConfigError
from enginectl.interfaces.speculator import DraftBatch, Speculator
from enginectl.types import SamplingParams
from enginectl_spec_ngram.config import NgramConfig
from enginectl_spec_ngram.index import NgramIndex, Words

IntRows = NDArray[np.int32]

_HEADROOM = 1024
"""Tokens of output a row's table is made for when the request does not say how many it wants."""


class NgramSpeculator(Speculator):
    """Looks the last tokens of a row up among its own tokens, longest run first, latest occurrence.

    A match that reaches the end of the row is taken as periodic: its continuation repeats. A row is indexed when it is
    asked for drafts again and again, so that a row without drafts costs nothing.
    """

    def __init__(self, config: NgramConfig, *, max_num_seqs: int, max_model_len: int) -> None:
        self.max_drafts = config.num_speculative_tokens
        self._max_model_len = max_model_len
        self._index = NgramIndex(max_num_seqs, max_model_len, config.prompt_lookup_min, config.prompt_lookup_max)
        self._ahead = np.arange(self.max_drafts)
        self._back = np.arange(config.prompt_lookup_max)

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """Make a table of the right size; nothing is entered yet."""
        expected = len(token_ids) + (_HEADROOM if params.max_tokens is None else params.max_tokens)
        self._index.open_row(row, min(expected, self._max_model_len))

    def remove_row(self, row: int) -> None:
        """Forget the row's n-grams."""
        self._index.close_row(row)

    def propose(self, batch: DraftBatch) -> tuple[IntRows, IntRows]:
        """As many tokens as wanted where there is a match, none elsewhere."""
        drafts = np.zeros((batch.rows.size, self.max_drafts), np.int32)
        counts = np.zeros(batch.rows.size, np.int32)
        wanted = np.flatnonzero(batch.limit > 0)
        if not wanted.size:
            return drafts, counts
        rows, num_tokens = batch.rows[wanted], batch.num_tokens[wanted]
        start, length = self._index.find(rows, num_tokens, batch.token_ids)
        hit = np.flatnonzero(start)
        if not hit.size:
            return drafts, counts
        if hit.size < rows.size:
            rows, num_tokens, start, length, wanted = rows[hit], num_tokens[hit], start[hit], length[hit], wanted[hit]
        end = num_tokens.astype(np.int64)
        same = self._is_match(rows, start, end, length, batch.token_ids)
        period = end - start
        at = start[:, None] + self._ahead % period[:, None]
        drafts[wanted] = batch.token_ids[rows[:, None], at]
        counts[wanted] = np.where(same, np.minimum(batch.limit[wanted], self.max_drafts), 0)
        return drafts, counts

    def _is_match(
        self, rows: IntRows, start: Words, end: Words, length: IntRows, token_ids: IntRows
    ) -> NDArray[np.bool_]:
        """[n]: whether the tokens before `start` are the row's last ones; hashes alone could be wrong."""
        before = token_ids[rows[:, None], np.maximum(start[:, None] - 1 - self._back, 0)]
        last = token_ids[rows[:, None], np.maximum(end[:, None] - 1 - self._back, 0)]
        result: NDArray[np.bool_] = ((before == last) | (self._back >= length[:, None])).all(1)
        return result


def build(ctx: BuildContext) -> NgramSpeculator:
    """The factory: needs the options and the longest sequence. Raises ConfigError if drafts are longer than that."""
    assert isinstance(ctx.options, NgramConfig), "the provider declares this section"
    assert ctx.model_spec is not None, "the model is known"
    max_model_len = ctx.engine.max_model_len or ctx.model_spec.max_model_len
    if ctx.options.num_speculative_tokens >= max_model_len:
        raise ConfigError(
            f"ngram: num_speculative_tokens is {ctx.options.num_speculative_tokens}, and sequences have at most "
            f"{max_model_len} tokens; lower it"
        )
    return NgramSpeculator(ctx.options, max_num_seqs=ctx.engine.max_num_seqs, max_model_len=max_model_len)
