"""Models that take a step apart: some sequences cannot share a forward with others."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.transformers_family.model import TransformersModel
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import ForwardInput, Kept
from enginectl.transfer import to_device


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of a step that run in one forward. token_ids, positions: [num_seqs, tokens of each]. plan: the
    step's, or None where the part is not the whole step. num_computed: [num_seqs], tokens before the part's.
    """

    token_ids: Tensor
    positions: Tensor
    batch: AttentionBatch
    plan: Any
    rows: NDArray[np.int32]

    @property
    def num_computed(self) -> NDArray[np.int32]:
        """Tokens of each sequence before those of the part."""
        return self.batch.seq_lens_host - np.diff(self.batch.query_start_host)


class PartedModel(TransformersModel):
    """One forward for each part of a step."""

    reads_rows = True

    def cut(self, batch: AttentionBatch) -> list[tuple[int, int]]:
        """Sequences [start, end) of each part; those of a part have equally many tokens."""
        return [(i, i + 1) for i in range(batch.num_seqs)]

    @abstractmethod
    def run(self, part: Part, keep: Tensor) -> Kept:
        """Run one part. keep: [num_kept] int64 into its tokens, sequence after sequence."""

    def forward(self, step: ForwardInput) -> Kept:
        """The parts one after another, and what they keep in the order of `step.keep`."""
        batch, rows = step.batch, step.rows
        assert batch is not None, "the engine tells models that read rows what they are"
        assert rows is not None, "the engine tells models that read rows what they are"
        spans = self.cut(batch)
        self.sites.switch(step.adapter_slots is not None)
        if len(spans) == 1:
            return self.run(part_of(step, batch, rows, spans[0], is_whole=True), step.keep)
        keep = step.keep.cpu().numpy() if step.keep_host is None else step.keep_host
        device = step.keep.device
        kept, order = [], []
        for span in spans:
            first, last = batch.query_start_host[list(span)].tolist()
            inside = np.flatnonzero((keep >= first) & (keep < last))
            part = part_of(step, batch, rows, span, is_whole=False)
            if step.begin_adapters is not None:
                self.sites.switch(step.begin_adapters(first, last))
            kept.append(self.run(part, to_device(keep[inside] - first, device)))
            order.append(inside)
        return in_order(kept, to_device(np.argsort(np.concatenate(order)), device))


def part_of(
    step: ForwardInput, batch: AttentionBatch, rows: NDArray[np.int32], span: tuple[int, int], *, is_whole: bool
) -> Part:
    """Sequences [start, end) of a step."""
    start, end = span
    first, last = batch.query_start_host[[start, end]].tolist()
    shape = (end - start, -1)
    return Part(
        step.token_ids[first:last].view(shape),
        step.positions[first:last].view(shape),
        batch if is_whole else batch.part(start, end),
        step.plan if is_whole else None,
        rows[start:end],
    )


def in_order(kept: list[Kept], at: Tensor) -> Kept:
    """Rows of several forwards as one. at: [num_kept], which of them, in turn, each row is."""
    hidden = [part.hidden for part in kept if part.hidden is not None]
    logits = [part.logits for part in kept if part.logits is not None]
    return Kept(torch.cat(hidden).index_select(0, at), torch.cat(logits).index_select(0, at))
