"""One step's results as a message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from enginectl.engine.outputs import OutputBuilder
from enginectl.types import EngineStats, KeyedLogprobs, TokenLogprobs


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0, 1, (), ())


def test_log_probabilities_belong_to_rows_that_are_there_and_to_tokens_that_count() -> None:
    """Law 10: of rows 5, 2 and 7, two asked; drafts behind a stop are cut, and row 3 ended before its step came back."""
    table: Any = SimpleNamespace(keys=np.arange(100, 108), requests=[None] * 8)
    rows, counts = np.array([5, 2, 7], np.int32), np.array([1, 2, 3], np.int32)
    found = {7: [entry(1), entry(2), entry(3)], 3: [entry(4)], 2: [entry(5), entry(6), entry(7)]}
    builder = OutputBuilder(table)
    builder.add_tokens(rows, counts, np.arange(6, dtype=np.int32), found)
    (message,) = builder.take(EngineStats)
    assert message.logprobs == (
        KeyedLogprobs(102, (entry(5), entry(6))),
        KeyedLogprobs(107, (entry(1), entry(2), entry(3))),
    )
    builder.add_tokens(rows, None, np.arange(3, dtype=np.int32), {5: [entry(9)]})
    (message,) = builder.take(EngineStats)
    assert message.logprobs == (KeyedLogprobs(105, (entry(9),)),)
