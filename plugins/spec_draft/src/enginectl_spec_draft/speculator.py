"""Drafts from a smaller model that follows the target token by token.

Its layers are extra KV layers under the target's block ids, with their own computed length per row: how far the draft
model has read the row. It reads what the target wrote when drafts are wanted, in chunks of the token budget, so that a
prompt found in the prefix cache, a resumed row or a row that had no drafts for a while is caught up with and needs no
special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from enginectl.context import BuildContext, LoadedModel
from enginectl.interfaces.model import Kept, LayerSpec
from enginectl.interfaces.sampler import SampleBatch
from enginectl.interfaces.scheduler import StepBudget, first_come
from enginectl.interfaces.speculator import DraftBatch, DraftStore, Speculator
from enginectl.types import SamplingParams
from enginectl_spec_draft.checks import check_draft, check_tokenizers
from enginectl_spec_draft.config import DraftConfig
from enginectl_spec_draft.forward import DraftForward

IntRows = NDArray[np.int32]


class DraftSpeculator(Speculator):
    """Proposes what the draft model would go on with. max_chunk: tokens it catches up with in a step, over all rows."""

    def __init__(
        self, loaded: LoadedModel, config: DraftConfig, *, max_num_seqs: int, max_chunk: int, device: str
    ) -> None:
        self.max_drafts = config.num_speculative_tokens
        self._loaded = loaded
        self._coupled = config.coupled
        self._budget = StepBudget(max_chunk, max_chunk)
        self._device = device
        self._num_computed = np.zeros(max_num_seqs, np.int32)
        self._num_fed = np.zeros(max_num_seqs, np.int32)
        self._drafts = np.zeros((max_num_seqs, self.max_drafts), np.int32)
        self._column = np.arange(self.max_drafts, dtype=np.int32)
        self._store: DraftStore | None = None
        self._forward: DraftForward | None = None

    def kv_layers(self) -> Sequence[LayerSpec]:
        """The draft model's."""
        return self._loaded.model.spec.layers

    def bind(self, store: DraftStore) -> None:
        """The pages of these layers."""
        self._store = store
        self._forward = DraftForward(self._loaded, store, self._device)

    def add_row(self, row: int, token_ids: IntRows, params: SamplingParams) -> None:
        """Nothing of it has been read."""
        self._num_computed[row] = self._num_fed[row] = 0

    def remove_row(self, row: int) -> None:
        """Nothing is held but pages, which belong to the row's blocks."""
        self._num_computed[row] = self._num_fed[row] = 0

    def propose(self, batch: DraftBatch) -> tuple[IntRows, IntRows]:
        """Read what is new, then go on token by token where a row has been read to its end."""
        drafts = np.zeros((batch.rows.size, self.max_drafts), np.int32)
        counts = np.zeros(batch.rows.size, np.int32)
        wanted = np.flatnonzero(batch.limit > 0)
        rows, num_tokens = batch.rows[wanted], batch.num_tokens[wanted]
        assert self._store is not None, "bound before the first row"
        num_slots = self._store.num_blocks[rows] * self._store.block_size
        computed = self._read_so_far(rows, num_tokens, batch.token_ids)
        pending = np.maximum(np.minimum(num_tokens, num_slots) - computed, 0)
        granted = first_come(pending, self._budget)
        self._num_computed[rows] = computed + granted
        index = np.flatnonzero(granted > 0)
        if not index.size:
            return drafts, counts
        index = index[np.argsort(granted[index] > 1, kind="stable")]
        rows, num_tokens, granted, wanted = rows[index], num_tokens[index], granted[index], wanted[index]
        done = self._num_computed[rows] == num_tokens
        start = self._num_computed[rows] - granted
        assert self._forward is not None, "bound before the first row"
        kept = self._forward.run(rows, start, granted, done, batch.token_ids)
        if not done.any():
            return drafts, counts
        rows, num_tokens, wanted = rows[done], num_tokens[done], wanted[done]
        # The last draft is not read, so one more fits than there are slots behind the row.
        room = self._store.num_blocks[rows] * self._store.block_size - num_tokens + 1
        length = np.minimum(np.minimum(batch.limit[wanted], self.max_drafts), room).astype(np.int32)
        self._draft(kept, rows, num_tokens, length, batch.token_ids)
        drafts[wanted], counts[wanted] = self._drafts[rows], length
        return drafts, counts

    def _read_so_far(self, rows: IntRows, num_tokens: IntRows, token_ids: IntRows) -> IntRows:
        """Tokens of each row in its pages, [n]: drafts that were read count as far as they turned out right."""
        base = self._num_computed[rows]
        at = np.minimum(base[:, None] + self._column, token_ids.shape[1] - 1)
        right = (token_ids[rows[:, None], at] == self._drafts[rows]) & (self._column < self._num_fed[rows][:, None])
        self._num_fed[rows] = 0
        length: IntRows = np.minimum(base + np.cumprod(right, axis=1).sum(1), num_tokens - 1).astype(np.int32)
        return length

    def _draft(self, kept: Kept, rows: IntRows, num_tokens: IntRows, length: IntRows, token_ids: IntRows) -> None:
        """Go on from the row's last token; drafts are written behind it, as the target's sampler expects them."""
        assert self._forward is not None, "bound before the first row"
        self._num_fed[rows] = length - 1
        alive = np.arange(rows.size)
        for i in range(int(length.max())):
            if i:
                alive = alive[length[alive] > i]
                some, last = rows[alive], num_tokens[alive] + (i - 1)
                ones = np.ones(some.size, np.int32)
                kept = self._forward.run(some, last, ones, np.ones(some.size, np.bool_), token_ids)
            position = num_tokens[alive] + i
            chosen = self._choose(kept, rows[alive], position, token_ids)
            self._drafts[rows[alive], i] = chosen
            token_ids[rows[alive], position] = chosen

    def _choose(self, kept: Kept, rows: IntRows, positions: IntRows, token_ids: IntRows) -> IntRows:
        """As the target will: the same processors, and the same noise unless only the likeliest token is wanted."""
        store, model = self._store, self._loaded.model
        assert store is not None, "bound before the first row"
        active = [part for part in store.processors if part.is_active(rows)]
        is_sampled = self._coupled and not store.sampler.greedy_rows(rows).all()
        chosen = None if active or is_sampled else model.greedy(kept)
        if chosen is None:
            batch = SampleBatch(rows, positions, token_ids, store.prompt_lens)
            logits = model.logits(kept)
            for part in active:
                part.apply(logits, batch)
            chosen = store.sampler.sample(logits, batch) if is_sampled else logits.argmax(-1)
        result: IntRows = chosen.cpu().numpy().astype(np.int32)
        return result


def build(ctx: BuildContext) -> DraftSpeculator:
    """The factory: loads the draft model and checks that it fits. Raises ConfigError if it does not."""
    options = ctx.options
    assert isinstance(options, DraftConfig), "the provider declares this section"
    assert ctx.load_model is not None, "given to speculators"
    assert ctx.model_spec is not None, "the target is loaded"
    assert ctx.checkpoint is not None, "the target is loaded"
    assert ctx.engine.max_num_batched_tokens is not None, "resolved"
    loaded = ctx.load_model(options.model)
    name = repr(Path(options.model).name)
    max_model_len = ctx.engine.max_model_len or ctx.model_spec.max_model_len
    check_draft(name, loaded.model.spec, ctx.model_spec, max_model_len, options.num_speculative_tokens)
    check_tokenizers(name, loaded.checkpoint, ctx.checkpoint)
    return DraftSpeculator(
        loaded,
        options,
        max_num_seqs=ctx.engine.max_num_seqs,
        max_chunk=ctx.engine.max_num_batched_tokens,
        device=ctx.device,
    )
