"""The engine's side of the persistent batch: which request holds which row, how far it is, and its blocks.

Rows are fixed places in arrays, so a pure decode step is a handful of vectorised operations. The runner keeps its own
arrays (`engine/rows.py`) and learns of changes through the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.request import Request, stop_ids
from enginectl.interfaces.scheduler import RunningRows

ALL_PUBLISHED = int(np.iinfo(np.int32).max)
"""Blocks that a row seems to have published, so that it publishes no others."""


@dataclass(slots=True)
class Columns:
    """What is fixed of the rows that run. keys: int64, as bytes. last: [n] int32 index of the last token each may get.
    running: what the scheduler sees, its counts to be set.
    """

    keys: bytes
    stop_ids: NDArray[np.int32]
    last: NDArray[np.int32]
    running: RunningRows


class RowTable:
    """`max_num_seqs` rows of at most `max_model_len` tokens; block table [groups, rows, max_blocks]."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        n = max_num_seqs
        max_blocks = -(-max_model_len // block_size)
        self.requests: list[Request | None] = [None] * n
        self.token_ids = np.zeros((n, max_model_len + 1), np.int32)
        self.block_table = np.zeros((num_groups, n, max_blocks), np.int32)
        self.keys = np.zeros(n, np.int64)
        self.num_tokens = np.zeros(n, np.int32)
        self.num_computed = np.zeros(n, np.int32)
        self.num_drafts = np.zeros(n, np.int32)
        self.num_blocks = np.zeros(n, np.int32)
        self.num_published = np.zeros(n, np.int32)
        self.max_tokens = np.zeros(n, np.int32)
        self.stop_ids = np.full((n, 4), -1, np.int32)
        self.in_flight = np.zeros(n, np.int32)
        self.is_closing = np.zeros(n, np.bool_)
        self.awaits_first = np.zeros(n, np.bool_)
        self.draft_limit = np.zeros(n, np.int32)
        self.priority = np.zeros(n, np.int32)
        self.arrival_s = np.zeros(n, np.float64)
        self.tenant = np.zeros(n, np.int32)
        self.order = np.zeros(0, np.int32)
        """Rows that run, in admission order. A new array whenever it changes."""
        self.num_closing = 0
        self.holds_drafts = False
        """Whether `num_drafts` may be other than zero anywhere."""
        self.num_awaiting = 0
        """Rows in `awaits_first`."""
        self._free = list(range(n - 1, -1, -1))
        self._tenants: dict[str, int] = {}
        self._tenant_names: list[str] = []
        self._tenant_rows: list[int] = []
        self._free_tenants: list[int] = []
        self._columns: Columns | None = None

    @property
    def num_free_rows(self) -> int:
        """Rows nobody holds."""
        return len(self._free)

    def add(self, request: Request) -> int:
        """Give the request a row; its blocks come after. Returns the row."""
        row = self._free.pop()
        n = len(request.token_ids)
        request.row = row
        self.requests[row] = request
        self.keys[row] = request.key
        self.token_ids[row, :n] = request.token_ids
        self.num_tokens[row] = n
        self.num_computed[row] = self.num_drafts[row] = self.num_blocks[row] = self.num_published[row] = 0
        self.max_tokens[row] = request.max_total_tokens
        self._set_stops(row, stop_ids(request.spec))
        self.in_flight[row] = 0
        self.awaits_first[row] = request.first_token_s == 0.0
        self.num_awaiting += int(self.awaits_first[row])
        self.priority[row] = request.priority
        self.arrival_s[row] = request.arrival_s
        self.tenant[row] = self._enter(request.tenant)
        self.order = np.append(self.order, np.int32(row))
        self._columns = None
        return row

    def close(self, row: int) -> None:
        """The row runs no longer; it stays taken until its steps in flight have come back."""
        self.is_closing[row] = True
        self.num_closing += 1
        self.num_published[row] = ALL_PUBLISHED
        self.num_drafts[row] = 0
        self.order = self.order[self.order != row]
        self._columns = None

    def free(self, row: int) -> None:
        """Nobody holds the row any more; it was closed."""
        request = self.request(row)
        assert self.in_flight[row] == 0, f"row {row} has steps in flight"
        self.is_closing[row] = False
        self.num_closing -= 1
        self.got_first(np.array([row], np.int32))
        request.row = -1
        self.requests[row] = None
        self.num_blocks[row] = 0
        self._free.append(row)
        self._leave(int(self.tenant[row]))

    def request(self, row: int) -> Request:
        """Who holds this row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def blocks(self, row: int) -> NDArray[np.int32]:
        """The row's blocks of group 0, head first."""
        return self.block_table[0, row, : self.num_blocks[row]]

    def got_first(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of these rows that awaited their first token; they do no more."""
        first: NDArray[np.int32] = rows[self.awaits_first[rows]]
        self.awaits_first[first] = False
        self.num_awaiting -= first.size
        return first

    def columns(self) -> Columns:
        """Of the rows that run, what never changes in their lives; gathered when rows come and go."""
        found, rows = self._columns, self.order
        if found is None:
            nothing = np.zeros(0, np.int32)
            running = RunningRows(
                rows,
                nothing,
                nothing,
                self.priority[rows],
                self.arrival_s[rows],
                self.tenant[rows],
                self._tenant_names,
            )
            keys = self.keys[rows].tobytes()
            found = self._columns = Columns(keys, self.stop_ids[rows], self.max_tokens[rows] - 1, running)
        return found

    def _enter(self, name: str) -> int:
        """The tenant's index, for one more row."""
        index = self._tenants.get(name)
        if index is None:
            if self._free_tenants:
                index = self._free_tenants.pop()
                self._tenant_names[index] = name
            else:
                index = len(self._tenant_names)
                self._tenant_names.append(name)
                self._tenant_rows.append(0)
            self._tenants[name] = index
        self._tenant_rows[index] += 1
        return index

    def _leave(self, index: int) -> None:
        self._tenant_rows[index] -= 1
        if self._tenant_rows[index] == 0:
            del self._tenants[self._tenant_names[index]]
            self._free_tenants.append(index)

    def _set_stops(self, row: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            wider = np.full((len(self.requests), max(len(ids), 2 * width)), -1, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids
