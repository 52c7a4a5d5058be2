"""Totals of an engine, shared by the parts of its loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. drafted_at, accepted_at: drafts by their position behind the verified tokens."""

    drafted_at: NDArray[np.int64]
    accepted_at: NDArray[np.int64]
    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
