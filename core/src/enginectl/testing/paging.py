"""Block tables and attention batches by hand, for checks that run a backend or a model without the engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from enginectl.interfaces.attention import AttentionBatch


class Pages:
    """Sequences and their blocks. Blocks are handed out in a shuffled order, never reused, never block 0."""

    def __init__(self, *, block_size: int, num_blocks: int, num_groups: int = 1, device: str = "cpu") -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_groups = num_groups
        self.device = device
        random = np.random.default_rng(3)
        self._unused = [list(1 + random.permutation(num_blocks - 1)) for _ in range(num_groups)]
        self._blocks: dict[int, list[list[int]]] = {}
        self._num_tokens: dict[int, int] = {}

    def num_tokens(self, sequence: int) -> int:
        """Tokens of a sequence that are in the store."""
        return self._num_tokens.get(sequence, 0)

    def slots_in_use(self, group: int) -> list[int]:
        """Slots that hold a token."""
        return [
            slot
            for sequence, count in self._num_tokens.items()
            for slot in self._slots(sequence, group, np.arange(count)).tolist()
        ]

    def advance(self, work: Sequence[tuple[int, int]], windows: Sequence[int | None] = ()) -> AttentionBatch:
        """Give each (sequence, number of tokens) its blocks and describe the step. Single tokens come first.

        windows: by group; blocks that no query of the step can see any more are shown as null.
        """
        counts = np.array([count for _, count in work], dtype=np.int32)
        num_decodes = int(np.argmin(counts == 1)) if (counts != 1).any() else len(counts)
        assert not (counts[num_decodes:] == 1).any(), "single tokens come first"
        before = np.array([self.num_tokens(sequence) for sequence, _ in work], dtype=np.int32)
        for sequence, count in work:
            self._grow(sequence, count)
        slots = [
            np.concatenate(
                [self._slots(s, g, start + np.arange(n)) for (s, n), start in zip(work, before, strict=True)]
            )
            for g in range(self.num_groups)
        ]
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        seq_lens = (before + counts).astype(np.int32)
        return AttentionBatch(
            num_seqs=len(work),
            num_tokens=int(counts.sum()),
            num_decodes=num_decodes,
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            query_start=torch.from_numpy(query_start).to(self.device),
            seq_lens=torch.from_numpy(seq_lens).to(self.device),
            block_tables=torch.from_numpy(self._tables(work, before, windows)).to(self.device),
            slot_mapping=torch.from_numpy(np.stack(slots).astype(np.int64)).to(self.device),
            query_start_host=query_start,
            seq_lens_host=seq_lens,
        )

    def _grow(self, sequence: int, count: int) -> None:
        total = self._num_tokens[sequence] = self.num_tokens(sequence) + count
        for group, blocks in enumerate(self._blocks.setdefault(sequence, [[] for _ in range(self.num_groups)])):
            while len(blocks) * self.block_size < total:
                blocks.append(int(self._unused[group].pop()))

    def _slots(self, sequence: int, group: int, positions: NDArray[np.int_]) -> NDArray[np.int_]:
        blocks = np.array(self._blocks[sequence][group])
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def _tables(
        self, work: Sequence[tuple[int, int]], before: NDArray[np.int32], windows: Sequence[int | None]
    ) -> NDArray[np.int32]:
        width = max(len(self._blocks[sequence][0]) for sequence, _ in work)
        tables = np.zeros((self.num_groups, len(work), width), dtype=np.int32)
        for group in range(self.num_groups):
            window = windows[group] if windows else None
            for row, (sequence, _) in enumerate(work):
                blocks = self._blocks[sequence][group]
                tables[group, row, : len(blocks)] = blocks
                if window is not None:
                    gone = max(0, int(before[row]) - window + 1) // self.block_size
                    tables[group, row, :gone] = 0
        return tables
