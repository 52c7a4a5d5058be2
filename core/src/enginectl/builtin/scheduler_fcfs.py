"""The `fcfs` scheduler: first come, first served; preempted requests resume first."""

from __future__ import annotations

from collections.abc import Iterator

from enginectl.context import BuildContext
from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import Scheduler


class FcfsScheduler(Scheduler):
    """Two queues in arrival order: preempted requests, then those that never ran. The newest row gives way first."""

    def __init__(self) -> None:
        self._resumed: dict[int, Request] = {}
        self._fresh: dict[int, Request] = {}

    def add(self, request: Request, *, resumed: bool) -> None:
        """Queue by arrival; several preempted at once come newest first, so each goes to the front."""
        if resumed:
            self._resumed = {request.key: request, **self._resumed}
        else:
            self._fresh[request.key] = request

    def remove(self, request: Request) -> None:
        """Leave whichever queue holds it."""
        queue = self._resumed if request.key in self._resumed else self._fresh
        del queue[request.key]

    def __len__(self) -> int:
        """Waiting requests of both kinds."""
        return len(self._resumed) + len(self._fresh)

    def candidates(self, now: float) -> Iterator[Request]:
        """Preempted requests, then the others."""
        yield from list(self._resumed.values())
        yield from list(self._fresh.values())


def build(ctx: BuildContext) -> FcfsScheduler:
    """Provider factory."""
    return FcfsScheduler()
