"""Collects what a step made known into one message: arrays for the tokens, structs only for what ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.batch import RowTable
from enginectl.engine.request import Request
from enginectl.types import EngineStats, Finished, FinishReason, KeyedLogprobs, StepOutputs, TokenLogprobs

_IntRows = NDArray[np.int32]


class OutputBuilder:
    """Filled by the loop, emptied once per step."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._keys = self._counts = self._tokens = b""
        self._sealed: list[StepOutputs] = []
        self._finished: list[Finished] = []
        self._logprobs: list[KeyedLogprobs] = []
        self._prompt_logprobs: list[KeyedLogprobs] = []

    @property
    def is_pending(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._sealed or self._keys or self._finished or self._prompt_logprobs)

    def add_tokens(
        self,
        rows: _IntRows,
        counts: _IntRows | None,
        token_ids: _IntRows,
        logprobs: Mapping[int, list[TokenLogprobs]],
        keys: bytes | None = None,
    ) -> None:
        """Tokens of these rows, row after row; counts None means one each. keys: of the rows, where known."""
        assert not self._keys, "one step's tokens a message"
        self._keys = self._table.keys[rows].tobytes() if keys is None else keys
        self._counts = b"" if counts is None else counts.tobytes()
        self._tokens = token_ids.tobytes()
        if logprobs:
            self._add_logprobs(rows, counts, logprobs)

    def _add_logprobs(
        self, rows: _IntRows, counts: _IntRows | None, logprobs: Mapping[int, list[TokenLogprobs]]
    ) -> None:
        """Looks at rows that asked, only; some of them may have ended meanwhile."""
        asked = np.zeros(len(self._table.requests), np.bool_)
        asked[list(logprobs)] = True
        for i in np.flatnonzero(asked[rows]).tolist():
            row = int(rows[i])
            kept = logprobs[row][: 1 if counts is None else int(counts[i])]
            self._logprobs.append(KeyedLogprobs(int(self._table.keys[row]), tuple(kept)))

    def add_prompt_logprobs(self, entries: Mapping[int, list[TokenLogprobs]], first: Mapping[int, int]) -> None:
        """Entries of prompt positions computed in this step, by row. first: where each row's step began.

        A prompt that was preempted while it was read is read again from its start: what was sent is not sent twice.
        """
        for row, values in entries.items():
            request = self._table.requests[row]
            if request is None:
                continue  # its step failed
            fresh = values[max(request.num_prompt_logprobs - first[row], 0) :]
            if fresh:
                request.num_prompt_logprobs += len(fresh)
                self._prompt_logprobs.append(KeyedLogprobs(request.key, tuple(fresh)))

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        refused: bool = False,
    ) -> None:
        """A choice ended. refused: it was wrong and never ran."""
        self._finished.append(
            Finished(
                request.key, reason, stop_token_id, error, request.num_cached_tokens, request.timings(now), refused
            )
        )

    def seal(self) -> None:
        """Another step's results follow: close the message, so that a choice is in each message at most once."""
        if self._keys or self._finished or self._prompt_logprobs:
            self._sealed.append(self._message(None))

    def take(self, stats: Callable[[], EngineStats]) -> list[StepOutputs]:
        """Everything since the last call: one message a step, mostly one or none."""
        if self._keys or self._finished or self._prompt_logprobs:
            self._sealed.append(self._message(stats()))
        messages, self._sealed = self._sealed, []
        return messages

    def _message(self, stats: EngineStats | None) -> StepOutputs:
        outputs = StepOutputs(
            self._keys,
            self._counts,
            self._tokens,
            tuple(self._finished),
            tuple(self._logprobs),
            tuple(self._prompt_logprobs),
            stats,
        )
        self._keys = self._counts = self._tokens = b""
        self._finished, self._logprobs, self._prompt_logprobs = [], [], []
        return outputs
