"""The `priority` scheduler: lower numbers first; among equals preempted requests, then the earliest arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginectl.builtin.scheduler_queue import QueueScheduler, by_rank, worst_first
from enginectl.context import BuildContext
from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import RunningRows, StepBudget

_Place = tuple[int, bool, float, int]


class PriorityScheduler(QueueScheduler):
    """One queue sorted by (priority, never ran, arrival). The row of worst priority, then the newest, gives way.

    Low priorities may wait for ever while higher ones keep coming: that is what was asked for.
    """

    def __init__(self, *, skip_ahead: int = 16, skip_ahead_s: float = 5.0) -> None:
        super().__init__(skip_ahead=skip_ahead, skip_ahead_s=skip_ahead_s)
        self._queue: list[_Place] = []
        self._waiting: dict[int, tuple[_Place, Request]] = {}

    def enqueue(self, request: Request, *, resumed: bool) -> None:
        """At its place."""
        place = (request.priority, not resumed, request.arrival_s, request.key)
        insort(self._queue, place)
        self._waiting[request.key] = place, request

    def dequeue(self, request: Request, *, admitted: bool) -> None:
        """From its place."""
        place, _ = self._waiting.pop(request.key)
        del self._queue[bisect_left(self._queue, place)]

    def __len__(self) -> int:
        """Waiting requests."""
        return len(self._queue)

    def order(self) -> Iterator[Request]:
        """Best place first."""
        index = 0
        while index < len(self._queue):
            place = self._queue[index]
            yield self._waiting[place[3]][1]
            if index < len(self._queue) and self._queue[index] is place:
                index += 1

    def grant(self, running: RunningRows, budget: StepBudget, now: float) -> NDArray[np.int32]:
        """Rows that decode first, then prompts by priority."""
        return by_rank(running, running.priority, budget)

    def victims(self, running: RunningRows, now: float) -> NDArray[np.intp]:
        """Worst priority, then newest."""
        return worst_first(running.priority, running.arrival_s)


def build(ctx: BuildContext) -> PriorityScheduler:
    """Provider factory."""
    return PriorityScheduler(**msgspec.structs.asdict(ctx.options) if ctx.options is not None else {})
