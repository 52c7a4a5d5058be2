"""The `fair` scheduler: tenants share the engine by tokens, so that one tenant's flood does not starve another.

Each tenant has a counter of the service it got: its prompts' tokens when they are admitted, its output tokens, weighted,
as they are made. Whoever has the lowest counter is served next. A tenant that comes back is lifted to a little below the
level of those that wait: who asks for less than its share is served at once, and nobody saves up more than that claim.
Source: Sheng et al. 2024, "Fairness in Serving Large Language Models" (virtual token counters).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginectl.builtin.scheduler_queue import Fifo, QueueScheduler, by_rank, worst_first
from enginectl.context import BuildContext
from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import RunningRows, StepBudget, first_come

_Ranked = tuple[float, float, int, str, int, Request]

_KEPT = 4096
"""Counters of tenants with nothing waiting that are kept at least."""


class FairScheduler(QueueScheduler):
    """A queue a tenant; the least served tenant goes first, and rows of the most served one give way first.

    Preempted requests resume before all others, whoever they belong to: their prompts have been paid for.
    """

    def __init__(
        self, *, skip_ahead: int = 16, skip_ahead_s: float = 5.0, output_weight: float = 2.0, burst: float = 4096.0
    ) -> None:
        super().__init__(skip_ahead=skip_ahead, skip_ahead_s=skip_ahead_s)
        self._output_weight = output_weight
        self._burst = burst
        self._resumed = Fifo()
        self._queues: dict[str, Fifo] = {}
        self._num_fresh = 0
        self._service: dict[str, float] = {}
        self._last = ""
        """Who was admitted last; its counter is the level when nobody waits."""
        self._work = np.zeros(16)
        """Output tokens by tenant index since they were last put on the counters."""
        self._granted: NDArray[np.float64] = np.zeros(0)
        """What the grant at `_granted_at` noted: core asks anew in the same step when blocks ran out."""
        self._granted_at = -1.0
        self._names: Sequence[str] = ()
        self._keep = _KEPT

    # -- queues --------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request, *, resumed: bool) -> None:
        """Behind its tenant's others."""
        if resumed:
            self._resumed.push_front(request)
            return
        tenant = request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            self._settle()
            self._service[tenant] = max(self._service.get(tenant, 0.0), self._level() - self._burst)
            queue = self._queues[tenant] = Fifo()
            self._prune()
        queue.append(request)
        self._num_fresh += 1

    def dequeue(self, request: Request, *, admitted: bool) -> None:
        """If it was admitted its tenant pays for the prompt."""
        if request in self._resumed:
            self._resumed.remove(request)
            return
        tenant = request.tenant
        queue = self._queues[tenant]
        queue.remove(request)
        self._num_fresh -= 1
        if not len(queue):
            del self._queues[tenant]
        if admitted:
            self._service[tenant] += request.num_waiting_tokens
            self._last = tenant

    def __len__(self) -> int:
        """Waiting requests of all tenants."""
        return len(self._resumed) + self._num_fresh

    def order(self) -> Iterator[Request]:
        """Preempted requests, then each time the first of the least served tenant.

        A tenant whose request is refused ranks as if it had been admitted, until the next round.
        """
        self._settle()  # while indices mean the tenants that they were noted for: who is admitted may take one over
        yield from self._resumed
        heap = [self._ranked(self._service[tenant], tenant, queue, 0) for tenant, queue in self._queues.items()]
        heapify(heap)
        while heap:
            rank, *_, tenant, place, request = heap[0]
            queue = self._queues[tenant]
            yield request
            place += request in queue
            if queue.at(place) is None:
                heappop(heap)
            else:
                heapreplace(heap, self._ranked(rank + request.num_waiting_tokens, tenant, queue, place))

    @staticmethod
    def _ranked(rank: float, tenant: str, queue: Fifo, place: int) -> _Ranked:
        """A tenant's next request: by its counter, and among equals by arrival."""
        request = queue.at(place)
        assert request is not None, "only places that are taken are ranked"
        return rank, request.arrival_s, request.key, tenant, place, request

    # -- accounts ------------------------------------------------------------------------------------------------

    def grant(self, running: RunningRows, budget: StepBudget, now: float) -> NDArray[np.int32]:
        """Rows that decode first, then prompts of the least served tenants. Output tokens are noted.

        Of several answers at one time the last counts: core asked again, with a row less or without drafts.
        """
        if now == self._granted_at:
            self._take_back()
        counts = first_come(running.num_pending, budget)
        if (counts > budget.max_decode).any() or (counts < running.num_pending).any():
            counts = self._share(running, budget)
        decodes = np.where(running.num_pending <= budget.max_decode, counts, 0)
        work = np.bincount(running.tenant, weights=decodes).astype(np.float64, copy=False)
        if work.size > self._work.size:
            self._work = np.concatenate((self._work, np.zeros(2 * work.size - self._work.size)))
        self._work[: work.size] += work
        self._names = running.tenants
        self._granted, self._granted_at = work, now
        return counts

    def _take_back(self) -> None:
        """The step will not do what was granted. Indices of tenants are the same until rows are admitted."""
        self._work[: self._granted.size] -= self._granted
        self._granted = self._granted[:0]

    def _share(self, running: RunningRows, budget: StepBudget) -> NDArray[np.int32]:
        """Somebody reads: prompts go by their tenants' counters, and leave room for a less served one that waits."""
        self._settle()
        reads = running.num_pending > budget.max_decode
        unread = np.bincount(running.tenant, weights=np.where(reads, running.num_pending, 0))
        service = self._service_of(running) - unread[running.tenant]  # what is paid for, and not had yet
        if self._num_fresh and budget.num_free_rows:
            tenant = min(self._queues, key=self._service.__getitem__)
            request = next(iter(self._queues[tenant]))
            if (service[reads] > self._service[tenant]).any() and not self.was_refused(request):
                budget = _less(budget, request.num_waiting_tokens)
        return by_rank(running, service, budget)

    def victims(self, running: RunningRows, now: float) -> NDArray[np.intp]:
        """Rows of the most served tenant, newest first; what was granted to them was for nothing."""
        self._take_back()
        self._settle()
        return worst_first(self._service_of(running), running.arrival_s)

    def finished(self, request: Request, now: float) -> None:
        """Its tenant's index may be given to another now: put what was noted on the counters."""
        self._settle()

    def service(self, tenant: str) -> float:
        """Weighted tokens on a tenant's counter."""
        self._settle()
        return self._service.get(tenant, 0.0)

    def _service_of(self, running: RunningRows) -> NDArray[np.float64]:
        known = np.array([self._service.get(name, 0.0) for name in running.tenants])
        rows: NDArray[np.float64] = known[running.tenant]
        return rows

    def _settle(self) -> None:
        """Put the output tokens on the counters."""
        for index in np.nonzero(self._work)[0].tolist():
            name = self._names[index]
            paid = self._work[index] * self._output_weight
            self._service[name] = self._service.get(name, self._level() - self._burst) + float(paid)
        self._work[:] = 0.0

    def _level(self) -> float:
        """The lowest counter among tenants that wait; if none does, that of the tenant admitted last."""
        if self._queues:
            return min(self._service[tenant] for tenant in self._queues)
        return self._service.get(self._last, 0.0)

    def _prune(self) -> None:
        """Drop counters that say nothing (below what a tenant is lifted to), and the lowest of the others if they are many."""
        if len(self._service) <= self._keep:
            return
        level = self._level() - self._burst
        above = sorted((service, name) for name, service in self._service.items() if service > level)
        kept = {*(name for _, name in above[-_KEPT // 2 :]), *self._queues, self._last}
        self._service = {name: service for name, service in self._service.items() if name in kept}
        self._keep = len(self._service) + _KEPT


def _less(budget: StepBudget, num_tokens: int) -> StepBudget:
    """What is left to rows that read when so many tokens are kept for a request that waits."""
    left = None if budget.max_prefill is None else max(0, budget.max_prefill - num_tokens)
    return replace(budget, num_tokens=max(0, budget.num_tokens - num_tokens), max_prefill=left)


def build(ctx: BuildContext) -> FairScheduler:
    """Provider factory."""
    return FairScheduler(**msgspec.structs.asdict(ctx.options) if ctx.options is not None else {})
