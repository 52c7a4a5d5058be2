"""The loop under any workload: additions, aborts, timeouts, failures, preemptions, hits and evictions, at both depths.

The executor has no model; its tokens are a hash of what its pages hold, so that anything lost or doubled shows.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from enginectl.api_side import NoText
from enginectl.builtin.scheduler_fcfs import FcfsScheduler
from enginectl.engine.client import EngineInfo
from enginectl.engine.request import Request
from enginectl.engine.router import OutputRouter, Ticket
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.free_executor import FreeLoop, free_core, free_request, free_tokens
from enginectl.testing.toys import ConstantAdapters
from enginectl.types import FinishedRequest, FinishReason, GenerateRequest, SamplingParams

VOCAB, EOS = 64, 0
POISON, REFUSED = VOCAB + 1, VOCAB + 2  # in prompts only
MAX_LEN, BLOCK = 40, 4
COMMON = np.random.default_rng(1).integers(1, VOCAB, MAX_LEN).tolist()
ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclasses.dataclass
class Sent:
    """A request and what must come of it. may_fail: it is poisonous, refused, or has a deadline."""

    prompt: list[int]
    expected: list[int]
    adapter: str | None
    may_fail: bool
    aborted: bool = False


class LoopMachine(RuleBasedStateMachine):
    """One engine loop and everything that was asked of it."""

    loop: FreeLoop
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        depth=st.integers(0, 1),
        num_drafts=st.sampled_from([0, 0, 3]),
        has_index=st.booleans(),
        num_blocks=st.integers(MAX_LEN // BLOCK, 30),
        budget=st.sampled_from([5, 16, 64]),
        max_num_seqs=st.integers(1, 6),
        right=st.integers(0, 3),
    )
    def build(
        self, depth: int, num_drafts: int, has_index: bool, num_blocks: int, budget: int, max_num_seqs: int, right: int
    ) -> None:
        self.now = 0.0
        self.num_blocks = num_blocks
        self.index = DictPrefixIndex(BLOCK) if has_index else None
        self.adapters = ConstantAdapters(1, "")
        for name in ("a", "b", "c"):
            self.adapters.load(name, "1")
        self.loop = free_core(
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_LEN,
            block_size=BLOCK,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            vocab_size=VOCAB,
            num_drafts=num_drafts,
            right=right,
            poison=POISON,
            refused=REFUSED,
            overlap_depth=depth,
            index=self.index,
            adapters=self.adapters,
            clock=lambda: self.now,
        )
        self.sent: dict[int, Sent] = {}

    @rule(
        num_common=st.sampled_from([1, 3, 8, 12, 13, 16, 20, 24]),
        own=st.one_of(st.just([]), st.lists(st.integers(1, VOCAB - 1), max_size=8)),
        wrong=st.sampled_from([None] * 8 + [POISON, REFUSED]),
        share=st.integers(1, MAX_LEN),
        seed=st.sampled_from([0, 0, 1]),
        has_eos=st.booleans(),
        timeout_s=st.sampled_from([None] * 6 + [3.0, 40.0]),
        speculation=st.sampled_from(["auto", "auto", "off", 1]),
        adapter=st.sampled_from([None, None, None, "a", "b", "c"]),
        stop=st.sampled_from([(), (), (5, 9), tuple(range(1, 12))]),
    )
    def add(
        self,
        num_common: int,
        own: list[int],
        wrong: int | None,
        share: int,
        seed: int,
        has_eos: bool,
        timeout_s: float | None,
        speculation: str | int,
        adapter: str | None,
        stop: tuple[int, ...],
    ) -> None:
        prompt = [*COMMON[:num_common], *own, *([] if wrong is None else [wrong])]
        max_tokens = min(share, MAX_LEN - len(prompt))
        key = len(self.sent) + 1
        eos = (EOS,) if has_eos else ()
        expected = free_tokens(prompt, max_tokens, vocab_size=VOCAB, stop_ids=(*eos, *stop), seed=seed)
        self.sent[key] = Sent(prompt, expected, adapter, wrong is not None or timeout_s is not None)
        self.loop.core.add(
            free_request(
                key,
                prompt,
                max_tokens,
                eos_token_ids=eos,
                seed=seed,
                arrival_s=self.now,
                timeout_s=timeout_s,
                adapter=adapter,
                params=SamplingParams(speculation=speculation, stop_token_ids=stop),
            )
        )

    @rule(which=st.integers(0, 10_000))
    @precondition(lambda self: self.sent)
    def abort(self, which: int) -> None:
        key = which % len(self.sent) + 1
        if key not in self.loop.answers.finished:
            self.sent[key].aborted = True
        self.loop.core.abort([key, 10_000_000])

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule(seconds=st.floats(0.5, 30))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    @precondition(lambda self: self.index is not None)
    def reset_index(self) -> None:
        self.loop.core.drain()
        self.loop.core.pool.reset_index()
        assert self.index is not None
        assert self.index.num_known == 0
        assert self.loop.core.stats().num_blocks_idle == 0
        self.loop.core.pool.check()

    def step(self) -> None:
        core, before = self.loop.core, len(self.loop.answers.finished)
        had_work = core.has_work
        self.loop.step()
        self.now += 0.25
        assert core.made_progress or not had_work or len(self.loop.answers.finished) > before, "the loop stalls"
        stats = core.stats()
        assert stats.num_running <= len(core.table.requests)
        for key, tokens in self.loop.answers.tokens.items():
            assert tokens == self.sent[key].expected[: len(tokens)], f"request {key} got other tokens"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        core, answers = self.loop.core, self.loop.answers
        bound = 50 + 8 * sum(MAX_LEN for _ in self.sent)
        for _ in range(bound):
            if not core.has_work:
                break
            self.step()
        assert not core.has_work, f"not done after {bound} steps"
        assert answers.finished.keys() == self.sent.keys()
        for key, sent in self.sent.items():
            reason = answers.finished[key].reason
            if reason in ENDS:
                assert answers.tokens[key] == sent.expected
                stopped = len(sent.expected) < MAX_LEN and reason is FinishReason.STOP
                assert stopped or reason is FinishReason.LENGTH
            elif reason is FinishReason.ABORT:
                assert sent.aborted
            else:
                assert sent.may_fail, answers.finished[key].error
                self.happened[str(answers.finished[key].error)[:10]] += 1
        self.check_rest()
        self.loop.close()

    def check_rest(self) -> None:
        core = self.loop.core
        stats = core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_blocks_in_use) == (0, 0, 0)
        assert core.table.num_free_rows == len(core.table.requests)
        assert not core.table.in_flight.any()
        assert not core.table.is_closing.any()
        assert self.adapters.references == [0, 0]
        assert stats.num_preemptions <= 3 * len(self.sent)
        self.happened.update(
            steps=stats.num_steps,
            preemptions=stats.num_preemptions,
            hits=stats.prefix_hits,
            accepted=stats.num_accepted,
            rejected=stats.num_drafted - stats.num_accepted,
            raised=self.loop.executor.num_raised,
            aborts=sum(end.reason is FinishReason.ABORT for end in self.loop.answers.finished.values()),
            evictions=0 if self.index is None else self.index.num_forgotten,
        )
        if self.index is not None:
            assert self.index.num_sequences == 0
            assert self.index.num_known == stats.num_blocks_idle
            known = [(sent.adapter, sent.prompt + sent.expected) for sent in self.sent.values()]
            for block_key, tokens in self.index.contents():
                assert any(block_key.adapter == a and tokens == all_[: len(tokens)] for a, all_ in known), "a draft?"
            core.pool.reset_index()
        assert core.pool.allocator.num_free == self.num_blocks
        core.pool.check()


TestLoop = LoopMachine.TestCase
TestLoop.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLoop.__doc__ = "Laws 12, 13, 14, 14a, 15: see the machine."


def test_the_machine_did_what_it_claims() -> None:
    """Thousands of steps, and everything that can happen to a request; run after the machine."""
    seen = LoopMachine.happened
    if not seen:
        pytest.skip("the machine did not run")
    assert seen["steps"] > 3000
    wanted = {
        "preemptions",
        "hits",
        "accepted",
        "rejected",
        "raised",
        "aborts",
        "evictions",
        "timeout of",
        "RuntimeErr",
    }
    assert all(seen[name] > 10 for name in wanted), seen


# -- single rules ------------------------------------------------------------------------------------------------

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


def test_what_can_never_fit_is_refused() -> None:
    """Law 12: at admission, with the numbers."""
    loop = free_core(num_blocks=10, max_model_len=200)
    loop.core.add(free_request(1, [1] * 30, 11))
    loop.core.add(free_request(2, [1] * 30, 10))
    loop.run()
    end = loop.answers.finished[1]
    assert (end.reason, end.refused) == (FinishReason.ERROR, True)
    assert "41 tokens, 11 KV blocks; the pool has 10 (40 tokens)" in str(end.error)
    assert loop.answers.finished[2].reason is FinishReason.LENGTH


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


def live_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__qualname__ for thing in gc.get_objects())


def serve(router: OutputRouter, loop: FreeLoop, start: int, count: int) -> None:
    """Requests through the API side and the loop: some abort, some fail, two choices each."""
    open_tickets: list[Ticket] = []
    for number in range(start, start + count):
        prompt = [number % 60 + 1, 2, *([POISON] if number % 50 == 0 else [])]
        params = SamplingParams(max_tokens=3, n=2)
        ticket, specs = router.open(
            GenerateRequest(request_id=str(number), prompt_token_ids=prompt, params=params), lambda: None
        )
        for spec in specs:
            loop.core.add(spec)
        open_tickets.append(ticket)
        if number % 31 == 0:
            loop.core.abort(router.close(ticket))
        if len(open_tickets) == 32 or number == start + count - 1:
            while loop.core.has_work:
                for outputs in loop.core.step():
                    loop.core.abort(router.dispatch(outputs))
            assert all(ticket.is_done for ticket in open_tickets)
            open_tickets = []


def leaks(count: int) -> dict[str, int]:
    """How many more objects of each type live after `count` requests than after a tenth of them."""
    finished: Counter[str] = Counter()

    def on_finished(ticket: Ticket, error: str | None) -> None:
        account: FinishedRequest = ticket.finished(error)
        finished.update(reason.value for reason in account.reasons)

    info = EngineInfo(
        model="m", architecture="A", dtype="float32", device="cpu", max_model_len=16, vocab_size=VOCAB, eos_token_ids=(EOS,)
    )  # fmt: skip
    router = OutputRouter(NoText(), info, seed=1, on_finished=on_finished)
    index = DictPrefixIndex(BLOCK)
    loop = free_core(
        max_num_seqs=64, max_model_len=16, num_blocks=200, max_num_batched_tokens=256, poison=POISON, index=index
    )
    serve(router, loop, 0, count // 10)
    before = live_objects()
    serve(router, loop, count // 10, count - count // 10)
    after = live_objects()
    assert finished.total() == 2 * count
    assert {"abort", "error", "length"} <= set(finished)
    assert router.num_open == 0
    assert not router.tickets
    return {name: after[name] - before[name] for name in after if after[name] - before[name] > 20}


def test_live_objects_do_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    """Law 14, in short."""
    caplog.set_level(logging.ERROR, "enginectl.engine")  # pytest keeps log records, and they the exceptions
    assert leaks(2000) == {}


@pytest.mark.slow
def test_live_objects_do_not_grow_over_many_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Law 14: 100,000 requests."""
    caplog.set_level(logging.ERROR, "enginectl.engine")
    assert leaks(100_000) == {}
