"""What engines did before: batches that are formed once, and memory for the longest sequence kept for each request."""

from __future__ import annotations

from collections.abc import Iterator

from enginectl.builtin.scheduler_queue import Fifo
from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import Scheduler

STATIC = "static"
CONTIGUOUS = "contiguous"
BASELINES = (STATIC, CONTIGUOUS)


class StaticScheduler(Scheduler):
    """Static batching: requests are admitted only when nothing runs, in the order they came."""

    def __init__(self) -> None:
        self._queue = Fifo()
        self._num_running = 0
        self._offered = -1

    def add(self, request: Request, *, resumed: bool) -> None:
        """Last in the queue."""
        self._queue.append(request)

    def remove(self, request: Request) -> None:
        """It runs, or has left."""
        self._queue.remove(request)
        self._num_running += request.key == self._offered

    def __len__(self) -> int:
        """Waiting requests."""
        return len(self._queue)

    def candidates(self, now: float) -> Iterator[Request]:
        """Nobody while a batch runs."""
        if self._num_running:
            return
        for request in self._queue:
            self._offered = request.key
            yield request

    def finished(self, request: Request, now: float) -> None:
        """A row of the batch is over."""
        self._num_running -= 1
