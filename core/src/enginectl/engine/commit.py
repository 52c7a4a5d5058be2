"""Committing a step: new tokens enter the books, stops are found, full blocks become known.

Plain decode steps take one token a row; verified drafts take several, cut at the first stop.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.batch import RowTable
from enginectl.engine.counters import Counters
from enginectl.engine.outputs import OutputBuilder
from enginectl.interfaces.executor import StepPlan, StepResult
from enginectl.interfaces.kv import FilledRows, PrefixIndex

IntRows = NDArray[np.int32]
Ended = tuple[IntRows, IntRows, NDArray[np.bool_]]
"""Rows that ended, the last token of each, and whether it is one that stops them."""


class Committer:
    """Writes results into the row table and the output message."""

    def __init__(
        self,
        *,
        table: RowTable,
        outputs: OutputBuilder,
        counters: Counters,
        index: PrefixIndex | None,
        block_size: int,
        clock: Callable[[], float],
    ) -> None:
        self.table = table
        self.outputs = outputs
        self.counters = counters
        self.index = index
        self._block_size = block_size
        self._clock = clock

    def commit(self, result: StepResult, sampled: IntRows, base: IntRows, plan: StepPlan) -> Ended | None:
        """Write the new tokens into the books. Returns the rows that ended, their last tokens, and which hit a stop."""
        t = self.table
        if result.prompt_logprobs:
            first = dict(zip(plan.rows.tolist(), plan.num_computed.tolist(), strict=True))
            self.outputs.add_prompt_logprobs(result.prompt_logprobs, first)
        if not sampled.size:
            return None
        assert result.rows is sampled or np.array_equal(result.rows, sampled), "results come in plan order"
        if t.num_closing:
            alive = ~t.is_closing[sampled]
            if not alive.all():
                result, sampled, base = result.select(alive), sampled[alive], base[alive]
        if result.token_ids.shape[1] == 1:
            return self._commit_one(result, sampled, base, has_drafts=plan.has_drafts)
        return self._commit_many(result, sampled, base, plan)

    def publish(self, plan: StepPlan) -> None:
        """Blocks that became full and verified enter the prefix index. Looks at rows that filled one, only."""
        t, index, rows = self.table, self.index, plan.rows
        assert index is not None, "called with an index only"
        verified = plan.num_computed + plan.num_tokens
        if plan.has_drafts:  # those that were rejected are not
            verified = np.minimum(verified, t.num_tokens[rows] - 1 - (t.in_flight[rows] > 0))
        full = verified // self._block_size
        filled = (full > t.num_published[rows]).nonzero()[0]
        if not filled.size:
            return
        rows, full = rows[filled], full[filled]
        keys = [t.request(row).block_key for row in rows.tolist()]
        starts, blocks = t.num_published[rows], t.block_table[0]
        index.publish_rows(FilledRows(rows, starts, full, t.keys[rows], keys, t.token_ids, blocks, self._block_size))
        t.num_published[rows] = full

    def _commit_one(self, result: StepResult, rows: IntRows, base: IntRows, *, has_drafts: bool) -> Ended | None:
        """One new token a row: the plain decode step."""
        t, tokens = self.table, result.token_ids[:, 0]
        t.token_ids[rows, base] = tokens
        if rows is t.order:
            columns = t.columns()
            stop_ids, last, keys = columns.stop_ids, columns.last, columns.keys
        else:
            stop_ids, last, keys = t.stop_ids[rows], t.max_tokens[rows] - 1, None
        stopped = (stop_ids == tokens[:, None]).any(1)
        ended = stopped | (base >= last)
        self.counters.generation_tokens += rows.size
        self.outputs.add_tokens(rows, None, tokens, result.logprobs, keys)
        if has_drafts:
            t.num_drafts[rows] = result.num_drafts
            t.holds_drafts = True
        self._note_first_tokens(rows)
        return (rows[ended], tokens[ended], stopped[ended]) if ended.any() else None

    def _commit_many(self, result: StepResult, rows: IntRows, base: IntRows, plan: StepPlan) -> Ended | None:
        """Accepted drafts and the token after them, cut at the first stop."""
        t, tokens, num_new = self.table, result.token_ids, result.num_new
        width = tokens.shape[1]
        column = np.arange(width, dtype=np.int32)
        valid = column < num_new[:, None]
        drafted = np.zeros(len(t.requests), np.int32)
        drafted[plan.rows] = plan.num_drafts
        rejected = drafted[rows] - (num_new - 1)
        self.counters.drafted += int(drafted[rows].sum())
        self.counters.accepted += int((num_new - 1).sum())
        self.counters.drafted_at[: width - 1] += (column[:-1] < drafted[rows][:, None]).sum(0)
        self.counters.accepted_at[: width - 1] += (column[1:] < num_new[:, None]).sum(0)
        is_stop = (t.stop_ids[rows][:, None, :] == tokens[:, :, None]).any(2) & valid
        at_limit = (base[:, None] + column + 1 >= t.max_tokens[rows][:, None]) & valid
        end = is_stop | at_limit
        ended = end.any(1)
        num_kept = np.where(ended, end.argmax(1) + 1, num_new).astype(np.int32)
        kept = column < num_kept[:, None]
        which, at = np.nonzero(kept)
        t.token_ids[rows[which], base[which] + at] = tokens[kept]
        t.num_tokens[rows] += num_kept - 1
        t.num_computed[rows] -= rejected + (num_new - num_kept)
        t.num_drafts[rows] = result.num_drafts
        t.holds_drafts = True
        self.counters.generation_tokens += int(num_kept.sum())
        if not ended.any():
            num_kept = num_new
        self.outputs.add_tokens(rows, num_kept, tokens[kept], result.logprobs)
        self._note_first_tokens(rows)
        if not ended.any():
            return None
        index, last = np.nonzero(ended)[0], num_kept[ended] - 1
        return rows[ended], tokens[index, last], is_stop[index, last]

    def _note_first_tokens(self, rows: IntRows) -> None:
        t = self.table
        if t.num_awaiting:
            now = self._clock()
            for row in t.got_first(rows).tolist():
                t.request(row).first_token_s = now
