"""The loop, ledger, allocator and index together, in whatever order things happen."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from enginectl.interfaces.kv import PrefixIndex
from enginectl.testing.free_executor import free_request
from enginectl.testing.prefix_index import check_at_rest, tokens
from enginectl.testing.prefix_loop import CachedLoop, cached_loop, chained_tokens
from enginectl.testing.stateful import drive
from enginectl.types import FinishReason
from enginectl_prefix_cache.hashing import ALGORITHMS, make_hasher
from enginectl_prefix_cache.index import HashPrefixIndex

WANTED = ("hits", "partial", "evictions", "preemptions", "resets", "reloads")

REQUESTS = st.tuples(
    st.integers(0, 2),
    st.integers(0, 24),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(1, 40),
    st.sampled_from([None, None, "blue", "red"]),
    st.sampled_from([None, None, "blue"]),
)
"""Which head, how much of it, tokens of its own, most output, adapter, salt."""


class CacheMachine(RuleBasedStateMachine):
    """Requests come, go and are aborted; the cache is reset and adapters are replaced at any time."""

    algorithm = "sha256"
    depth = 0
    num_drafts = 0
    happened: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.loop: CachedLoop = cached_loop(
            self.make_index, depth=self.depth, num_drafts=self.num_drafts, num_blocks=26, max_num_seqs=5
        )
        self.expected: dict[int, list[int]] = {}
        self.adapter_of: dict[int, str | None] = {}
        self.unpredictable: set[int] = set()
        self.num_added = 0

    def make_index(self, num_blocks: int, block_size: int) -> PrefixIndex:
        return HashPrefixIndex(num_blocks, block_size, make_hasher(self.algorithm))

    @rule(asked=st.lists(REQUESTS, min_size=1, max_size=5))
    def add(self, asked: list[tuple[int, int, list[int], int, str | None, str | None]]) -> None:
        for head, length, own, max_tokens, adapter, salt in asked:
            key, prompt = self.num_added, [*tokens(24, seed=head)[:length].tolist(), *own]
            self.num_added += 1
            self.adapter_of[key] = adapter
            version = None if adapter is None else f"{adapter}@{self.loop.adapters.versions[adapter]}"
            self.expected[key] = chained_tokens(prompt, max_tokens, version=version)
            self.loop.core.add(free_request(key, prompt, max_tokens, adapter=adapter, cache_salt=salt))

    @rule(count=st.integers(10, 60))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.loop.core.has_work:
                self.step()

    @rule(back=st.integers(0, 5))
    def abort(self, back: int) -> None:
        self.loop.core.abort([self.num_added - 1 - back])

    @rule()
    def reset(self) -> None:
        self.happened["resets"] += self.loop.core.reset_prefix_cache() > 0

    @rule(name=st.sampled_from(["blue", "red"]))
    def reload(self, name: str) -> None:
        """Rows that run across it have tokens of two versions; nobody may find their blocks."""
        self.unpredictable |= {
            key for key, adapter in self.adapter_of.items() if adapter == name and key not in self.loop.answers.finished
        }
        self.happened["reloads"] += 1
        self.loop.reload(name, str(int(self.loop.adapters.versions[name]) + 1))

    def step(self) -> None:
        """One step; the loop checks the ledger and every published block, then what is kept is bounded."""
        self.loop.step()
        self.happened["steps"] += 1
        core = self.loop.core
        index = self.loop.index.inner
        assert isinstance(index, HashPrefixIndex)
        assert core.stats().num_blocks_idle <= index.num_published == len(self.loop.index.said) <= 26
        assert index.num_sequences <= len(self.loop.index.live) <= len(core._requests) + len(core.table.requests)
        used = core.pool._references > 0
        assert not (used[list(core.pool.allocator._idle)]).any(), "an idle block is in use"

    def teardown(self) -> None:
        while self.loop.core.has_work:
            self.step()
        loop, done = self.loop, self.loop.answers.finished
        assert set(done) == set(self.expected), "every request ends"
        for key, expected in self.expected.items():
            got = loop.answers.tokens.get(key, [])
            if key in self.unpredictable:
                continue
            assert got == expected[: len(got)]
            assert done[key].reason is FinishReason.ABORT or got == expected
        stats = loop.core.stats()
        self.happened += Counter(
            hits=loop.index.num_hits,
            partial=loop.index.num_partial_hits,
            evictions=loop.index.num_evicted,
            preemptions=stats.num_preemptions,
            accepted=stats.num_accepted,
            rejected=stats.num_drafted - stats.num_accepted,
        )
        check_at_rest(loop)


def run_cache(algorithm: str, depth: int, num_drafts: int, num_steps: int) -> None:
    happened: Counter[str] = Counter()
    fields = {"algorithm": algorithm, "depth": depth, "num_drafts": num_drafts, "happened": happened}
    wanted = [*WANTED, *(["accepted", "rejected"] if num_drafts else [])]
    drive(type("Machine", (CacheMachine,), fields), happened, num_steps=num_steps, wanted=wanted)
    assert happened["steps"] >= num_steps


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_cache_keeps_its_laws(depth: int, num_drafts: int) -> None:
    """Laws 14, 17, 19 and 20: hits, evictions, preemptions, reloads and resets in any order, checked after every step."""
    run_cache("sha256", depth, num_drafts, 2_000)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("depth", [0, 1])
def test_the_cache_keeps_its_laws_over_many_steps(depth: int, algorithm: str) -> None:
    """Laws 14, 17, 18, 19 and 20: for 10,000 steps, with drafts, for each hash."""
    run_cache(algorithm, depth, 3, 10_000)
