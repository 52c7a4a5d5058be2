"""The `fcfs` scheduler: first come, first served; preempted requests resume first."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from enginectl.builtin.scheduler_queue import Fifo, QueueScheduler
from enginectl.context import BuildContext
from enginectl.engine.request import Request


class FcfsScheduler(QueueScheduler):
    """Two queues in arrival order: preempted requests, then those that never ran. The newest row gives way first."""

    def __init__(self, *, skip_ahead: int = 16, skip_ahead_s: float = 5.0) -> None:
        super().__init__(skip_ahead=skip_ahead, skip_ahead_s=skip_ahead_s)
        self._resumed = Fifo()
        self._fresh = Fifo()

    def enqueue(self, request: Request, *, resumed: bool) -> None:
        """Queue by arrival; several preempted at once come newest first, so each goes to the front."""
        if resumed:
            self._resumed.push_front(request)
        else:
            self._fresh.append(request)

    def dequeue(self, request: Request, *, admitted: bool) -> None:
        """Leave whichever queue holds it."""
        (self._resumed if request in self._resumed else self._fresh).remove(request)

    def __len__(self) -> int:
        """Waiting requests of both kinds."""
        return len(self._resumed) + len(self._fresh)

    def order(self) -> Iterator[Request]:
        """Preempted requests, then the others."""
        yield from self._resumed
        yield from self._fresh


def build(ctx: BuildContext) -> FcfsScheduler:
    """Provider factory."""
    return FcfsScheduler(**msgspec.structs.asdict(ctx.options) if ctx.options is not None else {})
