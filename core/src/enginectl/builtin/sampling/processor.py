"""The base of the built-in logits processors, and how they read and write single logits."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from enginectl.builtin.sampling.rows import RowUsers
from enginectl.interfaces.sampler import LogitsProcessor, SampleBatch
from enginectl.transfer import to_device


class RowProcessor(LogitsProcessor):
    """Keeps who uses it and cuts the batch down to those. Tokens are read from the batch, never remembered:
    drafts, preemption and resumption need no rollback.
    """

    def __init__(self, max_rows: int) -> None:
        self._users = RowUsers(max_rows)

    def remove_row(self, row: int) -> None:
        self._users.set(row, False)

    def is_active(self, rows: NDArray[np.int32]) -> bool:
        return self._users.any_of(rows)

    def needs_logits(self, rows: NDArray[np.int32]) -> NDArray[np.bool_]:
        return self._users.uses[rows]

    def apply(self, logits: Tensor, batch: SampleBatch) -> None:
        index = np.flatnonzero(self._users.uses[batch.rows])
        if len(index):
            self.apply_to(logits, index, batch.take(index))

    @abstractmethod
    def apply_to(self, logits: Tensor, index: NDArray[np.intp], batch: SampleBatch) -> None:
        """Change logits[index[i]] by row i of the batch; every row of it uses the processor."""


class Entries:
    """Single logits, addressed by (logits row, token id). An address that comes twice must be given one value."""

    def __init__(self, logits: Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        assert logits.stride(-1) == 1, "the logits of a row must lie side by side"
        # One flat view and one index: several times as fast on a CPU as indexing by two.
        length = (len(logits) - 1) * logits.stride(0) + logits.shape[-1]
        self._flat = logits.as_strided((length,), (1,))
        self._at = on_device(rows * logits.stride(0) + token_ids, logits)

    def get(self) -> Tensor:
        """Their values, a copy."""
        return self._flat.index_select(0, self._at)

    def put(self, values: Tensor) -> None:
        """Overwrite them."""
        self._flat.scatter_(0, self._at, values)

    def fill(self, value: float) -> None:
        """Set all of them to one value."""
        self._flat.scatter_(0, self._at, value)


def on_device(array: NDArray[np.generic], like: Tensor) -> Tensor:
    """A host array as a tensor beside `like`."""
    return to_device(array, like.device)
