"""What the loop promises, one rule at a time, over an executor without a model. At both overlap depths."""

from __future__ import annotations

import numpy as np
import pytest

from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.engine.request import Request
from enginectl.testing.free_executor import free_core, free_request
from enginectl.testing.toys import ConstantAdapters
from enginectl.types import FinishReason

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_an_abort_frees_everything_within_one_step(depth: int, num_drafts: int) -> None:
    """Law 13: blocks and adapter slot, whether it runs, waits, or is being read."""
    adapters = ConstantAdapters(1, "")
    adapters.load("a", "1")
    loop = free_core(overlap_depth=depth, num_drafts=num_drafts, max_num_batched_tokens=8, adapters=adapters)
    for key in range(12):
        loop.core.add(free_request(key, [1, 2, 3] * (key + 1), 60, adapter="a"))
    for _ in range(7):
        loop.step()
    assert loop.core.stats().num_running > 1
    assert loop.core.stats().num_waiting > 1
    loop.core.abort(range(12))
    loop.step()
    assert loop.core.stats().num_blocks_in_use == 0
    assert adapters.references == [0, 0]
    assert not loop.core.has_work
    assert {end.reason for end in loop.answers.finished.values()} == {FinishReason.ABORT}
    loop.close()


class WatchfulScheduler(FcfsScheduler):
    """Notes who is admitted while somebody who was preempted waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_resumed = 0
        self.overtaken = 0

    def remove(self, request: Request) -> None:
        super().remove(request)
        self.num_resumed += request.num_preemptions > 0
        if request.num_preemptions == 0:
            self.overtaken += any(other.num_preemptions for other in self.candidates(0.0))


@DEPTHS
def test_preempted_requests_resume_first_and_do_not_thrash(depth: int) -> None:
    """Law 15."""
    scheduler = WatchfulScheduler()
    loop = free_core(
        num_blocks=24, max_model_len=60, max_num_batched_tokens=32, scheduler=scheduler, overlap_depth=depth
    )
    random = np.random.default_rng(0)
    total = 0
    for key in range(60):
        prompt = random.integers(1, 60, random.integers(1, 20)).tolist()
        max_tokens = int(random.integers(1, 40))
        total += len(prompt) + max_tokens
        loop.core.add(free_request(key, prompt, max_tokens))
    loop.run()
    assert scheduler.num_resumed == loop.core.stats().num_preemptions > 5
    assert scheduler.overtaken == 0
    assert loop.core.stats().num_preemptions < 60
    loop.close()


@DEPTHS
def test_a_big_request_and_small_ones_do_not_starve_each_other(depth: int) -> None:
    """Law 12: small requests keep coming; one that needs the whole pool runs, and so do they."""
    loop = free_core(num_blocks=16, max_model_len=64, overlap_depth=depth)
    big = free_request(0, [3] * 50, 14)
    for key in range(1, 200):
        if key == 20:
            loop.core.add(big)
        loop.core.add(free_request(key, [key % 60 + 1] * 6, 5))
        loop.step()
    loop.run()
    order = list(loop.answers.finished)
    assert 10 < order.index(0) < 100
    assert all(end.reason is FinishReason.LENGTH for end in loop.answers.finished.values())
    loop.close()


@DEPTHS
def test_what_can_never_fit_is_refused(depth: int) -> None:
    """Law 12: at admission, with the numbers."""
    loop = free_core(num_blocks=10, max_model_len=200, overlap_depth=depth)
    loop.core.add(free_request(1, [1] * 30, 11))
    loop.core.add(free_request(2, [1] * 30, 10))
    loop.run()
    end = loop.answers.finished[1]
    assert (end.reason, end.refused) == (FinishReason.ERROR, True)
    assert "41 tokens, 11 KV blocks; the pool has 10 (40 tokens)" in str(end.error)
    assert loop.answers.finished[2].reason is FinishReason.LENGTH
    loop.close()


@DEPTHS
def test_a_deadline_ends_a_request_wherever_it_is(depth: int) -> None:
    """Waiting, running or in flight; the others go on."""
    now = 0.0
    loop = free_core(overlap_depth=depth, max_num_seqs=2, clock=lambda: now)
    for key in range(4):
        loop.core.add(free_request(key, [key + 1], 20, timeout_s=5.0 if key % 2 else None))
    for _ in range(3):
        loop.step()
    now = 6.0
    loop.run()
    for key in range(4):
        end = loop.answers.finished[key]
        assert end.reason is (FinishReason.ERROR if key % 2 else FinishReason.LENGTH)
        assert not key % 2 or "timeout of 5.0 s exceeded" in str(end.error)
    loop.close()
