"""Broken schedulers, each of which the kit must notice in the test named for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import RunningRows, StepBudget
from enginectl.testing.scheduler import ReferenceScheduler


class ForgetsWhoRan(ReferenceScheduler):
    """Preempted requests queue behind everybody."""

    def candidates(self, now: float) -> Iterator[Request]:
        """In the order of the calls."""
        yield from [request for _, request in self.waiting]


class PassesTheBig(ReferenceScheduler):
    """Whoever waits for blocks is passed, for ever."""

    def refused(self, request: Request, reason: str, now: float) -> bool:
        """Always the next one."""
        return True


class GrantsTooMuch(ReferenceScheduler):
    """Looks at each row's chunk alone."""

    def grant(self, running: RunningRows, budget: StepBudget, now: float) -> NDArray[np.int32]:
        """As if every row had the budget to itself."""
        return np.minimum(running.num_pending, min(budget.max_chunk, budget.num_tokens))


class SkipsAfterRemoval(ReferenceScheduler):
    """Iterates over the list that core shortens."""

    def candidates(self, now: float) -> Iterator[Request]:
        """No copy."""
        for _, request in self.waiting:
            yield request
