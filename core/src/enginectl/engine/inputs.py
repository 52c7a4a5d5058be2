"""A packed step as the model takes it: token ids, positions and the attention batch, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from enginectl.engine.feedback import TokenFeedback
from enginectl.engine.rows import Packed, RunnerRows
from enginectl.engine.upload import Upload
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.executor import StepPlan


@dataclass(slots=True)
class StepInputs:
    """token_ids, positions: [num_tokens] int64. keep: [num_kept] int64. adapter_slots: [num_tokens] int32 or None.
    sampled_rows: [m] int64 rows that sample, or None where nobody asked for them.
    """

    token_ids: Tensor
    positions: Tensor
    keep: Tensor
    batch: AttentionBatch
    adapter_slots: Tensor | None
    sampled_rows: Tensor | None


def make_inputs(
    plan: StepPlan, packed: Packed, rows: RunnerRows, upload: Upload, feedback: TokenFeedback | None
) -> StepInputs:
    """Everything in one upload. feedback: where tokens come from that the host does not know yet."""
    max_len = int(packed.seq_lens.max())
    token_ids = rows.token_ids[packed.token_rows, packed.positions].astype(np.int64)
    arrays: list[NDArray[Any]] = [
        token_ids,
        packed.positions.astype(np.int64),
        packed.keep,
        rows.slots(packed),
        packed.starts,
        packed.seq_lens,
        rows.block_table[:, plan.rows, : -(-max_len // rows.block_size)],
    ]
    slots = adapter_slots(packed, rows)
    if slots is not None:
        arrays.append(slots)
    awaited = None
    if feedback is not None:
        awaited = feedback.awaits(packed.token_rows, packed.positions)
        token_ids[awaited] = -1
        arrays += [plan.rows[packed.sampled].astype(np.int64), packed.token_rows.astype(np.int64)]
    sent = upload.send(arrays)
    if awaited is not None and feedback is not None and awaited.any():
        sent[0] = feedback.fill(sent[0], sent[-1])
    return StepInputs(
        token_ids=sent[0],
        positions=sent[1],
        keep=sent[2],
        batch=_attention_batch(plan, packed, max_len, sent),
        adapter_slots=None if slots is None else sent[7],
        sampled_rows=None if feedback is None else sent[-2],
    )


def _attention_batch(plan: StepPlan, packed: Packed, max_len: int, sent: list[Tensor]) -> AttentionBatch:
    num_seqs = plan.rows.size
    num_decodes = num_seqs if packed.is_decode else int((plan.num_tokens == 1).sum())
    return AttentionBatch(
        num_seqs=num_seqs,
        num_tokens=packed.positions.size,
        num_decodes=num_decodes,
        max_query_len=1 if num_decodes == num_seqs else int(plan.num_tokens.max()),
        max_seq_len=max_len,
        slot_mapping=sent[3],
        query_start=sent[4],
        seq_lens=sent[5],
        block_tables=sent[6],
        query_start_host=packed.starts,
        seq_lens_host=packed.seq_lens,
    )


def adapter_slots(packed: Packed, rows: RunnerRows) -> NDArray[np.int32] | None:
    """Each token's adapter slot, or None if no token has an adapter."""
    if not rows.num_with_adapter:
        return None
    slots = rows.adapter_slots[packed.token_rows]
    return slots if (slots >= 0).any() else None
