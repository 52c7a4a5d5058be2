"""The runner's side of the persistent batch: tokens, block tables and per-row settings, as arrays over rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginectl.interfaces.executor import NewRow, StepPlan

IntRows = NDArray[np.int32]


@dataclass(slots=True)
class Packed:
    """A plan as token arrays. token_rows, positions: [num_tokens]. starts: [n + 1] int32. seq_lens: [n] int32.

    sampled: indices [m] into the plan's rows that sample; widths: [m] logits rows of each (drafts + 1);
    keep: [k] packed token indices whose logits are wanted, sampled rows first; prompt_keep: how many of the last of
    them are for prompt log-probabilities, by row in prompt_rows. is_decode: see `StepPlan`.
    """

    token_rows: IntRows
    positions: IntRows
    starts: IntRows
    seq_lens: IntRows
    sampled: NDArray[np.intp]
    widths: IntRows
    keep: NDArray[np.int64]
    prompt_rows: list[tuple[int, int, int]]
    is_decode: bool = False


class RunnerRows:
    """`max_num_seqs` rows. token_ids: [rows, max_model_len + 1 + max_drafts] int32, drafts included."""

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, *, num_groups: int = 1, max_drafts: int = 0
    ) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1 + max_drafts), np.int32)
        self.block_table = np.zeros((num_groups, max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.prompt_lens = np.zeros(max_num_seqs, np.int32)
        self.adapter_slots = np.full(max_num_seqs, -1, np.int32)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.num_with_adapter = 0
        self.num_with_logprobs = 0
        self.num_with_prompt_logprobs = 0
        # A plain decode step's arrays are the beginnings of these.
        self._upto = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._index = np.arange(max_num_seqs, dtype=np.int64)
        self._ones = np.ones(max_num_seqs, np.int32)

    def add(self, new: NewRow) -> None:
        """A request takes a row."""
        row, n = new.row, len(new.token_ids)
        self.token_ids[row, :n] = new.token_ids
        self.prompt_lens[row] = new.prompt_len
        self.num_blocks[row] = 0
        self.adapter_slots[row] = new.adapter_slot
        self.num_logprobs[row] = -1 if new.params.logprobs is None else new.params.logprobs
        prompt_logprobs = new.params.prompt_logprobs
        wants_prompt = prompt_logprobs is not None and n == new.prompt_len  # a resumed request has sent them
        self.num_prompt_logprobs[row] = prompt_logprobs if prompt_logprobs is not None and wants_prompt else -1
        self._count()

    def set_blocks(self, rows: IntRows, columns: IntRows, ids: IntRows) -> None:
        """Rows got blocks: ids [groups, m] at these columns, ascending in each row."""
        self.block_table[:, rows, columns] = ids
        self.num_blocks[rows] = columns + 1

    def remove(self, row: int) -> None:
        """The row is empty."""
        self.adapter_slots[row] = self.num_logprobs[row] = self.num_prompt_logprobs[row] = -1
        self._count()

    def _count(self) -> None:
        self.num_with_adapter = int((self.adapter_slots >= 0).sum())
        self.num_with_logprobs = int((self.num_logprobs >= 0).sum())
        self.num_with_prompt_logprobs = int((self.num_prompt_logprobs >= 0).sum())

    def pack(self, plan: StepPlan) -> Packed:
        """The plan's tokens, packed row after row."""
        rows, counts, computed = plan.rows, plan.num_tokens, plan.num_computed
        n = rows.size
        if plan.is_decode and not self.num_with_prompt_logprobs:
            upto = self._upto[: n + 1]
            index, ones = self._index[:n], self._ones[:n]
            return Packed(rows, computed, upto, computed + 1, index, ones, index, [], is_decode=True)
        starts = np.zeros(n + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        total = int(starts[-1])
        if total == n:
            token_rows, positions = rows, computed
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(total, dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
        if plan.samples.all():
            sampled, ends, widths = np.arange(n), starts[1:], plan.num_drafts + 1
        else:
            sampled = np.nonzero(plan.samples)[0]
            ends, widths = starts[1:][sampled], plan.num_drafts[sampled] + 1
        keep = (ends - 1).astype(np.int64)
        num_kept = int(widths.sum())
        if num_kept != sampled.size:
            first = np.cumsum(widths) - widths
            keep = np.arange(num_kept, dtype=np.int64) + np.repeat(ends - widths - first, widths)
        prompt_rows: list[tuple[int, int, int]] = []
        if self.num_with_prompt_logprobs:
            keep, prompt_rows = self._keep_prompts(plan, starts, keep)
        return Packed(token_rows, positions, starts, computed + counts, sampled, widths, keep, prompt_rows)

    def _keep_prompts(
        self, plan: StepPlan, starts: IntRows, keep: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
        """Rows that want prompt log-probabilities keep every prompt token but the last: (row, first position, n)."""
        found: list[tuple[int, int, int]] = []
        more = [keep]
        for i, row in enumerate(plan.rows.tolist()):
            if self.num_prompt_logprobs[row] < 0:
                continue
            first = int(plan.num_computed[i])
            count = min(int(plan.num_tokens[i]), int(self.prompt_lens[row]) - 1 - first)
            if count > 0:
                found.append((row, first, count))
                more.append(np.arange(starts[i], starts[i] + count, dtype=np.int64))
        return np.concatenate(more), found

    def slots(self, packed: Packed) -> NDArray[np.int64]:
        """Slot of each packed token in each group, [groups, num_tokens] int64."""
        block, offset = np.divmod(packed.positions, self.block_size)
        return self.block_table[:, packed.token_rows, block].astype(np.int64) * self.block_size + offset
