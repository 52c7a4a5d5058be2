"""Tokens that the device knows before the host does: the next step takes its input from here."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IntRows = NDArray[np.int32]


class TokenFeedback:
    """The last sampled token of each row, on the device, and at which positions the host still waits for it."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._awaited = np.full(max_rows, -1, np.int32)

    def put(self, rows: IntRows, positions: IntRows, token_ids: Tensor, rows_there: Tensor) -> None:
        """Rows sampled these tokens. rows_there: the rows as int64 on the device."""
        self._token_ids.index_copy_(0, rows_there, token_ids)
        self._awaited[rows] = positions

    def settle(self, rows: IntRows, positions: IntRows) -> None:
        """The host knows these tokens, or they will never be. Later ones of the same rows are still awaited."""
        known = rows[self._awaited[rows] == positions]
        self._awaited[known] = -1

    def forget(self, row: int) -> None:
        """The row is empty."""
        self._awaited[row] = -1

    def awaits(self, token_rows: IntRows, positions: IntRows) -> NDArray[np.bool_]:
        """[num_tokens] bool: tokens that only the device knows."""
        awaited: NDArray[np.bool_] = self._awaited[token_rows] == positions
        return awaited

    def fill(self, token_ids: Tensor, rows_there: Tensor) -> Tensor:
        """Token ids [num_tokens] with the negative ones replaced. rows_there: each token's row, int64."""
        return torch.where(token_ids < 0, self._token_ids[rows_there], token_ids)
