"""The loop under any workload: additions, aborts, timeouts, failures, preemptions, hits and evictions, at both depths.

The executor has no model; its tokens are a hash of what its pages hold, so that anything lost or doubled shows.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from enginectl.engine.core_loop import EngineCore
from enginectl.testing.dict_index import DictPrefixIndex
from enginectl.testing.free_executor import FreeLoop, free_core, free_request, free_tokens
from enginectl.testing.stateful import drive
from enginectl.testing.toys import ConstantAdapters
from enginectl.types import FinishReason, SamplingParams

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


def check_books(core: EngineCore) -> None:
    """Ledger, batch and queue agree: each block has a reference for each row that holds it, and no other; each request
    runs, waits, or is on its way out; each row is free or taken.
    """
    t = core.table
    taken = [row for row, request in enumerate(t.requests) if request is not None]
    held = np.concatenate([np.zeros(0, np.int32), *[t.blocks(row) for row in taken]])
    assert (np.bincount(held, minlength=core.pool.num_blocks) == core.pool._references).all()
    assert sorted([*t._free, *taken]) == list(range(len(t.requests)))
    assert set(t.order.tolist()) == {row for row in taken if not t.is_closing[row]}
    assert set(np.nonzero(t.in_flight)[0].tolist()) <= set(taken)
    assert len(core._requests) == len(core.scheduler) + t.order.size


class LoopMachine(RuleBasedStateMachine):
    """One engine loop and everything that was asked of it."""

    loop: FreeLoop
    depth = 0
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        num_drafts=st.sampled_from([0, 0, 3]),
        has_index=st.booleans(),
        num_blocks=st.integers(MAX_LEN // BLOCK, 30),
        budget=st.sampled_from([5, 16, 64]),
        max_num_seqs=st.integers(1, 6),
        right=st.integers(0, 3),
    )
    def build(
        self, num_drafts: int, has_index: bool, num_blocks: int, budget: int, max_num_seqs: int, right: int
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
            overlap_depth=self.depth,
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
        check_books(self.loop.core)

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
        check_books(core)
        self.happened["steps"] += had_work
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


WANTED = ("preemptions", "hits", "accepted", "rejected", "raised", "aborts", "evictions", "timeout of", "RuntimeErr")


def run_loop(depth: int, num_steps: int) -> None:
    happened: Counter[str] = Counter()
    machine = type("Machine", (LoopMachine,), {"depth": depth, "happened": happened})
    drive(machine, happened, num_steps=num_steps, wanted=WANTED)
    assert happened["steps"] >= num_steps


@pytest.mark.parametrize("depth", [0, 1])
def test_the_loop_keeps_its_laws(depth: int) -> None:
    """Laws 12, 13, 14, 14a and 15: the ledger is checked after every step, the tokens too. See the machine."""
    run_loop(depth, 1_500)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_the_loop_keeps_its_laws_over_many_steps(depth: int) -> None:
    """Laws 12, 13, 14, 14a and 15: for 10,000 steps."""
    run_loop(depth, 10_000)
