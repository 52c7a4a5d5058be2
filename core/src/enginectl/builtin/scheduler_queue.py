"""What core's scheduling policies share: bounded skip-ahead with ageing, and preempted requests first.

A policy says in which order requests wait. When the blocks of one do not fit yet, others may be admitted before it, so
that it does not keep the pool half empty; only so many and only for so long, so that they do not starve it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import RunningRows, Scheduler, StepBudget, first_come, in_order

_LOOK_AHEAD = 4
"""How many requests may be refused blocks in one step before it stops trying: each attempt costs a prefix match."""

_BATCH = 64


@dataclass(slots=True)
class _Refusal:
    since_s: float
    num_passes: int = 0


class QueueScheduler(Scheduler):
    """Subclasses say where a request waits (`enqueue`, `dequeue`) and in which order they are tried (`order`)."""

    def __init__(self, *, skip_ahead: int = 16, skip_ahead_s: float = 5.0) -> None:
        self._skip_ahead = skip_ahead
        self._skip_ahead_s = skip_ahead_s
        self._refusals: dict[int, _Refusal] = {}
        self._passed: list[int] = []
        self._offered = -1

    @abstractmethod
    def enqueue(self, request: Request, *, resumed: bool) -> None:
        """It waits."""

    @abstractmethod
    def dequeue(self, request: Request, *, admitted: bool) -> None:
        """It waits no longer. Raises KeyError if it did not."""

    @abstractmethod
    def order(self) -> Iterator[Request]:
        """Who is tried, in turn; tolerates that the request yielded last is dequeued."""

    def add(self, request: Request, *, resumed: bool) -> None:
        """Queue it."""
        self.enqueue(request, resumed=resumed)

    def remove(self, request: Request) -> None:
        """It leaves; if it was being offered it was admitted, and has passed those that were refused before it."""
        admitted = request.key == self._offered
        self.dequeue(request, admitted=admitted)
        self._refusals.pop(request.key, None)
        if admitted:
            self._offered = -1
            for key in self._passed:
                if key in self._refusals:
                    self._refusals[key].num_passes += 1

    def candidates(self, now: float) -> Iterator[Request]:
        """In the policy's order."""
        self._passed = []
        for request in self.order():
            self._offered = request.key
            yield request

    def refused(self, request: Request, reason: str, now: float) -> bool:
        """Whether others may pass it: never one that was preempted and waits for blocks, else within bounds.

        A grammar is ready in a moment whoever passes; only blocks and adapter slots can be taken away for ever.
        """
        self._offered = -1
        if reason == "grammar":
            return True
        if reason == "blocks" and request.num_preemptions:
            return False
        refusal = self._refusals.setdefault(request.key, _Refusal(now))
        if now - refusal.since_s >= self._skip_ahead_s:
            return False
        if reason != "blocks":
            return True
        if refusal.num_passes >= self._skip_ahead or len(self._passed) + 1 >= _LOOK_AHEAD:
            return False
        self._passed.append(request.key)
        return True

    def was_refused(self, request: Request) -> bool:
        """Whether it waits for blocks or an adapter slot, as far as is known."""
        return request.key in self._refusals or request.num_preemptions > 0

    def victims(self, running: RunningRows, now: float) -> NDArray[np.intp]:
        """The latest arrival gives way first, so that one that has resumed is not the first to give way again."""
        return worst_first(running.arrival_s)


class Fifo:
    """Requests in the order they came, each removable in O(1)."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        """How many wait."""
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        """Whether it waits here."""
        return request.key in self._requests

    def append(self, request: Request) -> None:
        """Last."""
        self._requests[request.key] = request

    def push_front(self, request: Request) -> None:
        """First: several preempted at once come newest first."""
        self._requests = {request.key: request, **self._requests}

    def remove(self, request: Request) -> None:
        """Raises KeyError if it is not here."""
        del self._requests[request.key]

    def at(self, place: int) -> Request | None:
        """The request at a place, or None behind the last."""
        return next(islice(self._requests.values(), place, None), None)

    def __iter__(self) -> Iterator[Request]:
        """First to last; the one yielded last may be removed meanwhile. A step that tries few copies few."""
        place = 0
        while batch := list(islice(self._requests.values(), place, place + _BATCH)):
            for request in batch:
                yield request
                place += request.key in self._requests


def worst_first(*keys: NDArray[np.generic]) -> NDArray[np.intp]:
    """Indices by the first key, then the next, then admission; the largest of each comes first."""
    order: NDArray[np.intp] = np.lexsort((np.arange(keys[0].size), *reversed(keys)))[::-1]
    return order


def by_rank(running: RunningRows, rank: NDArray[np.generic], budget: StepBudget) -> NDArray[np.int32]:
    """Tokens for everybody if they last; else first for those that decode, then by rank, lowest first."""
    counts = first_come(running.num_pending, budget)
    if (counts == np.minimum(running.num_pending, budget.max_chunk)).all():
        return counts
    return in_order(running.num_pending, np.lexsort((rank, running.num_pending > budget.max_decode)), budget)
