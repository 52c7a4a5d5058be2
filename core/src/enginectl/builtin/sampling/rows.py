"""What processors keep by row: which rows use them, and lists of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = tuple[NDArray[Any], ...]


class RowUsers:
    """The rows that use a processor, and how many they are, so that the common answer "none" costs nothing."""

    def __init__(self, max_rows: int) -> None:
        self.uses = np.zeros(max_rows, dtype=np.bool_)
        self.num_users = 0

    def set(self, row: int, uses: bool) -> None:
        """Note whether the row uses the processor."""
        self.num_users += int(uses) - int(self.uses[row])
        self.uses[row] = uses

    def any_of(self, rows: NDArray[np.int32]) -> bool:
        """Whether one of these rows uses the processor."""
        return self.num_users > 0 and bool(self.uses[rows].any())


class RaggedRows:
    """Lists by row, all expanded at once: each row holds parallel columns of its own length.

    A column is [length] or [length, width]; narrower ones are padded at the right with -1 when they are packed.
    Packing happens on the first read after a change, so a step without admissions copies nothing.
    """

    def __init__(self, max_rows: int) -> None:
        self._lists: dict[int, Columns] = {}
        self._starts = np.zeros(max_rows, dtype=np.int64)
        self._lengths = np.zeros(max_rows, dtype=np.int64)
        self._packed: Columns | None = None

    def set(self, row: int, *columns: NDArray[Any]) -> None:
        """Give the row its columns, in place of earlier ones."""
        self._lists[row] = columns
        self._packed = None

    def clear(self, row: int) -> None:
        """Empty the row's lists."""
        if self._lists.pop(row, None) is not None:
            self._lengths[row] = 0
            self._packed = None

    def expand(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], Columns]:
        """Every entry of every given row: (i, columns), where i indexes `rows`; entries of rows[0] come first."""
        columns = self._packed if self._packed is not None else self._pack()
        lengths = self._lengths[rows]
        which = np.repeat(np.arange(len(rows)), lengths)
        ends = np.cumsum(lengths)
        entries = np.arange(len(which)) + np.repeat(self._starts[rows] - (ends - lengths), lengths)
        return which, tuple(column[entries] for column in columns)

    def _pack(self) -> Columns:
        start = 0
        for row, columns in self._lists.items():
            self._starts[row] = start
            self._lengths[row] = len(columns[0])
            start += len(columns[0])
        self._packed = tuple(_stack(list(column)) for column in zip(*self._lists.values(), strict=True))
        return self._packed


def _stack(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    if arrays[0].ndim == 2:
        width = max(array.shape[1] for array in arrays)
        arrays = [np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=-1) for array in arrays]
    return np.concatenate(arrays)
