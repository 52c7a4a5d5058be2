"""A speculator that searches, slow and obvious, and broken ones that must fail the conformance kit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from enginectl.interfaces.speculator import DraftBatch, Speculator
from enginectl.types import SamplingParams

Drafts = tuple[NDArray[np.int32], NDArray[np.int32]]


class SearchSpeculator(Speculator):
    """Proposes what followed the last token when it came before."""

    max_drafts = 3

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.known: dict[int, NDArray[np.int32]] = {}

    def add_row(self, row: int, token_ids: NDArray[np.int32], params: SamplingParams) -> None:
        """Know it."""
        self.known[row] = token_ids.copy()

    def remove_row(self, row: int) -> None:
        """Forget it."""
        del self.known[row]

    def propose(self, batch: DraftBatch) -> Drafts:
        """Row by row."""
        drafts = np.zeros((batch.rows.size, self.max_drafts), np.int32)
        counts = np.zeros(batch.rows.size, np.int32)
        for i, row in enumerate(batch.rows.tolist()):
            found = self.search(row, batch.token_ids[row, : batch.num_tokens[i]])[: batch.limit[i]]
            drafts[i, : found.size], counts[i] = found, found.size
        return drafts, counts

    def search(self, row: int, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """At most max_drafts tokens."""
        places = np.flatnonzero(token_ids[:-1] == token_ids[-1])
        return token_ids[places[-1] + 1 :][: self.max_drafts] if places.size else token_ids[:0]


class IgnoresLimits(SearchSpeculator):
    """Broken: proposes as many as it has. Must fail `test_limits_are_honoured`."""

    def propose(self, batch: DraftBatch) -> Drafts:
        """Without looking at the limit."""
        limit = np.full_like(batch.limit, self.max_drafts)
        return super().propose(DraftBatch(batch.rows, batch.num_tokens, limit, batch.token_ids))


class RemembersRows(SearchSpeculator):
    """Broken: what the row held before still counts. Must fail `test_a_row_that_is_taken_again_starts_afresh`."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(max_num_seqs, max_model_len)
        self.old: dict[int, NDArray[np.int32]] = {}

    def remove_row(self, row: int) -> None:
        """Keep its tokens."""
        self.old[row] = self.known[row]
        super().remove_row(row)

    def search(self, row: int, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Old tokens first."""
        return super().search(row, np.concatenate((self.old.get(row, token_ids[:0]), token_ids)))


class WritesHistory(SearchSpeculator):
    """Broken: uses the row's own tokens as scratch. Must fail `test_verified_tokens_are_left_alone`."""

    def propose(self, batch: DraftBatch) -> Drafts:
        """Clear the first token."""
        batch.token_ids[batch.rows, 0] = 0
        return super().propose(batch)


class DrawsLots(SearchSpeculator):
    """Broken: proposes at random. Must fail `test_proposals_are_a_function_of_the_rows`."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        super().__init__(max_num_seqs, max_model_len)
        self.random = np.random.default_rng()

    def search(self, row: int, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Some tokens of the row."""
        return self.random.choice(token_ids, self.max_drafts)
