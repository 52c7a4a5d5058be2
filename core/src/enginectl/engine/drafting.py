"""The speculator's side of a step: which rows it drafts for, and its proposals in the token matrix."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.rows import Packed, RunnerRows
from enginectl.engine.verify import usable_drafts
from enginectl.interfaces.executor import NewRow, StepPlan, StepResult
from enginectl.interfaces.model import Kept
from enginectl.interfaces.speculator import DraftBatch, Speculator
from enginectl.transfer import to_device

log = logging.getLogger("enginectl.runner")

IntRows = NDArray[np.int32]


class Drafter:
    """Drafts are a bonus: a speculator that fails costs speed, never an answer."""

    def __init__(self, speculator: Speculator, rows: RunnerRows, vocab_size: int) -> None:
        self._speculator = speculator
        self._rows = rows
        self._vocab_size = vocab_size
        self._serves = np.zeros(len(rows.prompt_lens), np.bool_)
        self._num_failed = 0
        self.bind = speculator.bind
        self.kv_layers = speculator.kv_layers

    def add_row(self, new: NewRow) -> None:
        """A row whose speculator refuses it goes without drafts."""
        try:
            self._speculator.add_row(new.row, new.token_ids, new.params)
            self._serves[new.row] = True
        except Exception:
            log.exception("%s refused a row; it goes without drafts", type(self._speculator).__name__)

    def remove_row(self, row: int) -> None:
        """The row is empty."""
        if not self._serves[row]:
            return
        self._serves[row] = False
        try:
            self._speculator.remove_row(row)
        except Exception:
            log.exception("%s failed to remove a row", type(self._speculator).__name__)

    def propose(self, plan: StepPlan, packed: Packed, kept: Kept, result: StepResult) -> IntRows:
        """Ask the speculator; drafts go into the token matrix behind the verified tokens. Returns how many, [m]."""
        rows = result.rows
        if not plan.has_drafts or not plan.draft_limits.any():
            return np.zeros(rows.size, np.int32)
        limit = np.where(self._serves[rows], plan.draft_limits[packed.sampled], np.int32(0))
        if not limit.any():
            return np.zeros(rows.size, np.int32)
        num_tokens = packed.seq_lens[packed.sampled] - (packed.widths - 1) + result.num_new
        hidden = None
        if self._speculator.reads_hidden:
            assert kept.hidden is not None, "compose checks that the model offers hidden rows"
            first = np.cumsum(packed.widths) - packed.widths
            last = (first + result.num_new - 1).astype(np.int64)
            hidden = kept.hidden.index_select(0, to_device(last, kept.hidden.device))
        try:
            batch = DraftBatch(rows, num_tokens, limit, self._rows.token_ids, hidden)
            drafts, counts = self._speculator.propose(batch)
            counts = usable_drafts(drafts, np.minimum(counts, limit), self._vocab_size)
        except Exception:
            self._note_failure()
            return np.zeros(rows.size, np.int32)
        which, at = np.nonzero(np.arange(drafts.shape[1]) < counts[:, None])
        self._rows.token_ids[rows[which], num_tokens[which] + at] = drafts[which, at]
        return counts

    def _note_failure(self) -> None:
        self._num_failed += 1
        if self._num_failed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
            name, count = type(self._speculator).__name__, self._num_failed
            log.exception("%s failed to propose (%d times so far); the step goes without drafts", name, count)
