"""A loaded native model: the step in four calls a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from enginectl.builtin.native.config import Structure
from enginectl.builtin.native.rope import RopeTable
from enginectl.builtin.native.sites import StepSlots, adaptable, sites_of
from enginectl.interfaces.attention import AttentionBackend
from enginectl.interfaces.model import ForwardInput, Kept, LinearSite, Model, ModelSpec
from enginectl.interfaces.ops import Block, Head, LowRankBlock


class NativeModel(Model):
    """Embedding, blocks around attention, head.

    fused: linears that the checkpoint stores in one, by the names adapters know them by.
    """

    def __init__(
        self,
        spec: ModelSpec,
        structure: Structure,
        *,
        embedding: Tensor,
        blocks: list[Block],
        head: Head,
        ropes: list[RopeTable],
        fused: frozenset[str] = frozenset(),
    ) -> None:
        self.spec = spec
        self.blocks = blocks
        self._embedding = embedding
        # In the embedding's own dtype, as the architectures that scale by a root of the hidden size do.
        self._embedding_scale = torch.tensor(structure.embedding_scale, dtype=embedding.dtype).item()
        self._head = head
        self._ropes = ropes
        self._rope_of = structure.rope_of
        self._logits_scale = structure.logits_scale
        self._soft_cap = structure.soft_cap
        self._attention: AttentionBackend | None = None
        self._specs = structure.blocks
        self._fused = fused
        self._adapted: list[Block] = []
        self._slots = StepSlots()

    def use_attention(self, attention: AttentionBackend) -> None:
        """Call this backend in every layer from now on."""
        self._attention = attention

    def linear_sites(self) -> Sequence[LinearSite]:
        """Every linear but the head and what is in a mixture, where blocks have linears at all."""
        if not all(block.linears or isinstance(block, LowRankBlock) for block in self.blocks):
            return ()
        self._adapted = [adaptable(block, self._slots) for block in self.blocks]
        return sites_of(self._adapted, self._specs, self._fused)

    def forward(self, step: ForwardInput) -> Kept:
        """One packed forward. The last layer finishes only the rows that are kept, before the final norm, except in
        steps with adapters, whose slots count all rows.
        """
        attention, plan = self._attention, step.plan
        assert attention is not None, "the model was called before use_attention()"
        write_kv, attend = attention.write_kv, attention.attend
        hidden = self._embedding.index_select(0, step.token_ids)
        if self._embedding_scale != 1.0:
            hidden.mul_(self._embedding_scale)
        turns = [rope.at(step.positions) for rope in self._ropes]
        turn_of = [turns[rope] for rope in self._rope_of]
        blocks = self.blocks
        if step.adapter_slots is not None:
            assert self._adapted, "a step has adapters, and no backend is attached"
            blocks, self._slots.of_tokens = self._adapted, step.adapter_slots
        last = len(self.blocks) - 1
        for layer, block in enumerate(blocks[:last]):
            q, k, v = block.before(hidden, *turn_of[layer])
            write_kv(layer, k, v, plan)
            hidden = block.after(hidden, attend(layer, q, plan).flatten(1))
        q, k, v = blocks[last].before(hidden, *turn_of[last])
        write_kv(last, k, v, plan)
        if not step.keep.shape[0]:
            return Kept(hidden=hidden[:0])
        attended = attend(last, q, plan).flatten(1)
        if step.adapter_slots is not None:
            return Kept(hidden=blocks[last].after(hidden, attended).index_select(0, step.keep))
        attended = attended.index_select(0, step.keep)
        return Kept(hidden=blocks[last].after(hidden.index_select(0, step.keep), attended))

    def logits(self, kept: Kept, rows: Tensor | None = None) -> Tensor:
        """Final norm, output projection, scale and soft cap, for these rows only."""
        logits = self._head.logits(self._rows(kept, rows))
        if self._logits_scale != 1.0:
            logits.div_(self._logits_scale)
        if self._soft_cap is not None:
            logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def greedy(self, kept: Kept, rows: Tensor | None = None) -> Tensor | None:
        """What the head offers. A soft cap can make unequal logits equal, so that with one there is no short cut."""
        return None if self._soft_cap is not None else self._head.greedy(self._rows(kept, rows))

    @staticmethod
    def _rows(kept: Kept, rows: Tensor | None) -> Tensor:
        assert kept.hidden is not None, "these rows are not from this model's forward"
        return kept.hidden if rows is None else kept.hidden.index_select(0, rows)
