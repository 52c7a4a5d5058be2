"""One forward of the draft model over its own layers' pages."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from enginectl.context import LoadedModel
from enginectl.interfaces.attention import AttentionBatch
from enginectl.interfaces.model import ForwardInput, Kept
from enginectl.interfaces.speculator import DraftStore
from enginectl.transfer import to_device

IntRows = NDArray[np.int32]


class DraftForward:
    """Runs tokens [start, start + count) of each row."""

    def __init__(self, loaded: LoadedModel, store: DraftStore, device: str) -> None:
        self._model = loaded.model
        self._attention = loaded.attention
        self._store = store
        self._device = torch.device(device)
        self._attention.bind(store.kv)

    def run(self, rows: IntRows, start: IntRows, count: IntRows, keep: NDArray[np.bool_], token_ids: IntRows) -> Kept:
        """What the model keeps for the last token of the rows in keep, in the order of rows.

        Rows with a single token come first. token_ids: the runner's matrix.
        """
        starts = np.zeros(rows.size + 1, np.int32)
        np.cumsum(count, out=starts[1:])
        token_rows = np.repeat(rows, count)
        positions = np.arange(token_rows.size, dtype=np.int32) + np.repeat(start - starts[:-1], count)
        return self._model.forward(
            ForwardInput(
                token_ids=self._tensor(token_ids[token_rows, positions].astype(np.int64)),
                positions=self._tensor(positions.astype(np.int64)),
                keep=self._tensor((starts[1:][keep] - 1).astype(np.int64)),
                plan=self._attention.prepare(self._batch(rows, start + count, count, starts, token_rows, positions)),
            )
        )

    def _batch(
        self,
        rows: IntRows,
        seq_lens: IntRows,
        count: IntRows,
        starts: IntRows,
        token_rows: IntRows,
        positions: IntRows,
    ) -> AttentionBatch:
        table, size = self._store.block_table, self._store.block_size
        max_len = int(seq_lens.max())
        block, offset = np.divmod(positions, size)
        slots = table[:, token_rows, block].astype(np.int64) * size + offset
        return AttentionBatch(
            num_seqs=rows.size,
            num_tokens=positions.size,
            num_decodes=int((count == 1).sum()),
            max_query_len=int(count.max()),
            max_seq_len=max_len,
            query_start=self._tensor(starts),
            seq_lens=self._tensor(seq_lens),
            block_tables=self._tensor(table[:, rows, : -(-max_len // size)]),
            slot_mapping=self._tensor(slots),
            query_start_host=starts,
            seq_lens_host=seq_lens,
        )

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)
