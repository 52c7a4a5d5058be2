"""The conformance kit of schedulers: subclass `SchedulerConformance` and override `make_scheduler`.

Some checks call the policy, others run a whole loop over an executor without a model. The kit is tested by mutants of
its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from enginectl.engine.request import Request
from enginectl.interfaces.scheduler import RunningRows, Scheduler, StepBudget
from enginectl.testing.free_executor import free_core, free_request, free_tokens
from enginectl.types import FinishReason

MakeScheduler = Callable[[], Scheduler]


def waiting(key: int, *, length: int = 4, arrival_s: float | None = None, tenant: str = "") -> Request:
    """A request that waits; keys arrive in their order unless told otherwise."""
    arrival = float(key) if arrival_s is None else arrival_s
    return Request(free_request(key, [1] * length, 4, arrival_s=arrival, tenant=tenant))


def running(num_pending: list[int]) -> RunningRows:
    """Rows in admission order, each with so many tokens to compute."""
    n = len(num_pending)
    pending = np.array(num_pending, np.int32)
    return RunningRows(
        rows=np.arange(n, dtype=np.int32)[::-1].copy(),
        num_pending=pending,
        num_tokens=pending + 10,
        priority=np.zeros(n, np.int32),
        arrival_s=np.arange(n, dtype=np.float64),
        tenant=np.zeros(n, np.int32),
        tenants=("",),
    )


class ReferenceScheduler(Scheduler):
    """One list, sorted whenever it is asked: those that ran first, then by arrival."""

    def __init__(self) -> None:
        self.waiting: list[tuple[bool, Request]] = []

    def add(self, request: Request, *, resumed: bool) -> None:
        """Append."""
        self.waiting.append((resumed, request))

    def remove(self, request: Request) -> None:
        """Search. Raises KeyError if it is not there."""
        for i, (_, other) in enumerate(self.waiting):
            if other is request:
                del self.waiting[i]
                return
        raise KeyError(request.key)

    def __len__(self) -> int:
        """Length of the list."""
        return len(self.waiting)

    def candidates(self, now: float) -> Iterator[Request]:
        """A sorted copy."""
        for _, request in sorted(self.waiting, key=lambda item: (not item[0], item[1].arrival_s, item[1].key)):
            yield request


class SchedulerConformance:
    """The checks."""

    @pytest.fixture
    def make_scheduler(self) -> MakeScheduler:
        """How to make one."""
        raise NotImplementedError("override the `make_scheduler` fixture")

    # -- the queue -----------------------------------------------------------------------------------------------

    def test_every_waiting_request_is_a_candidate_once(self, make_scheduler: MakeScheduler) -> None:
        """Whatever the order; none is lost or doubled, and looking changes nothing."""
        scheduler = make_scheduler()
        requests = [waiting(key, length=key % 7 + 1) for key in range(20)]
        for i, request in enumerate(requests):
            scheduler.add(request, resumed=i % 5 == 0)
        for _ in range(2):
            assert sorted(r.key for r in scheduler.candidates(50.0)) == list(range(20))
        for request in requests[::2]:
            scheduler.remove(request)
        assert len(scheduler) == 10
        assert sorted(r.key for r in scheduler.candidates(50.0)) == list(range(1, 20, 2))

    def test_the_candidate_that_was_yielded_may_be_removed(self, make_scheduler: MakeScheduler) -> None:
        """Core admits while it iterates; the others still come."""
        scheduler = make_scheduler()
        for key in range(9):
            scheduler.add(waiting(key), resumed=key >= 6)
        seen = []
        for request in scheduler.candidates(50.0):
            seen.append(request.key)
            if request.key % 3:
                scheduler.remove(request)
        assert sorted(seen) == list(range(9))
        assert len(scheduler) == 3

    def test_removing_what_does_not_wait_raises(self, make_scheduler: MakeScheduler) -> None:
        """KeyError, and nothing has changed."""
        scheduler = make_scheduler()
        scheduler.add(waiting(1), resumed=False)
        with pytest.raises(KeyError):
            scheduler.remove(waiting(2))
        assert len(scheduler) == 1

    def test_preempted_requests_come_before_those_that_never_ran(self, make_scheduler: MakeScheduler) -> None:
        """Law 15, among equals: same priority, same tenant."""
        scheduler = make_scheduler()
        for key in range(6):
            scheduler.add(waiting(key), resumed=False)
        for key in (8, 7):  # preempted in one step, newest first
            scheduler.add(waiting(key, arrival_s=-1.0 + key / 100), resumed=True)
        assert {r.key for _, r in zip(range(2), scheduler.candidates(50.0), strict=False)} == {7, 8}

    def test_the_order_is_a_function_of_what_was_added(self, make_scheduler: MakeScheduler) -> None:
        """Every rank of a parallel executor schedules for itself: no clock, no order of a set."""
        one, other = make_scheduler(), make_scheduler()
        for scheduler in (one, other):
            for key in range(30):
                request = waiting(key, length=key % 11 + 1, tenant=f"t{key % 3}")
                scheduler.add(request, resumed=key % 7 == 0)
        assert [r.key for r in one.candidates(50.0)] == [r.key for r in other.candidates(50.0)]

    # -- the arrays ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("budget", [1, 7, 40, 1000])
    @pytest.mark.parametrize("max_chunk", [1, 16, 1000])
    def test_grants_keep_to_the_budget(self, make_scheduler: MakeScheduler, budget: int, max_chunk: int) -> None:
        """int32, none below 0, none above what is pending or a chunk, and together no more than the budget."""
        random = np.random.default_rng(budget)
        scheduler = make_scheduler()
        for _ in range(20):
            rows = running(random.integers(0, 60, random.integers(1, 12)).tolist())
            before = rows.num_pending.copy()
            granted = scheduler.grant(rows, StepBudget(budget, max_chunk), 1.0)
            assert granted.dtype == np.int32
            assert granted.shape == rows.rows.shape
            assert (granted >= 0).all()
            assert (granted <= np.minimum(rows.num_pending, max_chunk)).all()
            assert granted.sum() <= budget
            assert granted.sum() > 0 or not before.any(), "somebody advances"
            assert (rows.num_pending == before).all(), "the arrays are read only"

    def test_grants_use_the_whole_budget(self, make_scheduler: MakeScheduler) -> None:
        """When everything fits, everything is granted."""
        granted = make_scheduler().grant(running([1, 1, 9, 1, 30]), StepBudget(42, 30), 1.0)
        assert granted.tolist() == [1, 1, 9, 1, 30]

    def test_victims_name_every_row_once(self, make_scheduler: MakeScheduler) -> None:
        """Indices, worst first."""
        rows = running([1, 5, 1, 1])
        assert sorted(make_scheduler().victims(rows, 1.0).tolist()) == [0, 1, 2, 3]

    # -- a whole loop --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("depth", [0, 1])
    def test_everybody_gets_everything(self, make_scheduler: MakeScheduler, depth: int) -> None:
        """A pool so small that rows are preempted: all requests end, with the right tokens, and nothing is held."""
        loop = free_core(
            scheduler=make_scheduler(), num_blocks=16, max_model_len=60, max_num_batched_tokens=12, overlap_depth=depth
        )
        random = np.random.default_rng(0)
        asked = {
            key: (random.integers(1, 60, random.integers(1, 20)).tolist(), int(random.integers(1, 30)))
            for key in range(40)
        }
        for key, (prompt, max_tokens) in asked.items():
            loop.core.add(free_request(key, prompt, max_tokens, arrival_s=float(key), tenant=f"t{key % 3}"))
        loop.run(max_steps=4000)
        assert loop.core.stats().num_preemptions > 0
        for key, (prompt, max_tokens) in asked.items():
            assert loop.answers.tokens[key] == free_tokens(prompt, max_tokens, vocab_size=64)
        assert loop.core.stats().num_blocks_in_use == 0
        loop.close()

    @pytest.mark.parametrize("depth", [0, 1])
    def test_small_requests_do_not_starve_a_big_one(self, make_scheduler: MakeScheduler, depth: int) -> None:
        """Law 12: they keep coming, and it needs the whole pool."""
        loop = free_core(scheduler=make_scheduler(), num_blocks=16, max_model_len=64, overlap_depth=depth)
        loop.core.add(free_request(0, [2] * 6, 5, arrival_s=0.0))
        loop.core.add(free_request(1, [3] * 50, 14, arrival_s=0.0))
        for key in range(2, 600):
            loop.core.add(free_request(key, [key % 60 + 1] * 6, 3 + key % 4, arrival_s=float(key)))
            if key % 2:
                loop.step()
            if 1 in loop.answers.finished:
                break
        assert loop.answers.finished[1].reason is FinishReason.LENGTH
        loop.close()

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_big_request_does_not_block_small_ones(self, make_scheduler: MakeScheduler, depth: int) -> None:
        """Law 12: requests that need half the pool each, and small ones behind them."""
        loop = free_core(scheduler=make_scheduler(), num_blocks=16, max_model_len=64, overlap_depth=depth)
        for key in range(6):
            loop.core.add(free_request(key, [3] * 28, 20, arrival_s=0.0))
        for key in range(10, 14):
            loop.core.add(free_request(key, [4] * 3, 2, arrival_s=1.0))
        loop.run(max_steps=400)
        assert len(loop.answers.finished) == 10
        loop.close()
