"""Conformance of prefix indexes: `class TestMine(PrefixIndexConformance)` with its own `make_index` fixture."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from enginectl.interfaces.kv import BlockKey, FilledRows, PrefixIndex
from enginectl.testing.free_executor import free_request
from enginectl.testing.prefix_loop import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    CachedLoop,
    MakeIndex,
    MakeLoop,
    cached_loop,
    chained_tokens,
)

BASE = BlockKey()


def ids(*blocks: int) -> NDArray[np.int32]:
    """Block ids as an array."""
    return np.array(blocks, np.int32)


def tokens(num: int, seed: int = 0) -> NDArray[np.int32]:
    """Random tokens of a small vocabulary."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, num).astype(np.int32)


def found(index: PrefixIndex, prompt: NDArray[np.int32], key: BlockKey = BASE) -> list[int]:
    """Blocks that a sequence of its own finds."""
    match = index.match(-1, prompt, key)
    index.end(-1)
    assert match.num_tokens == len(match.blocks) * BLOCK_SIZE
    blocks: list[int] = match.blocks.tolist()
    return blocks


class PrefixIndexConformance:
    """What every prefix index must do. Laws 14, 17, 19 and 20 rest on it.

    make_index: the fixture to override, `make_index(num_blocks, block_size) -> PrefixIndex`. Checks that need a loop
    around it take `make_loop`, which comes from it.
    """

    @pytest.fixture
    def make_index(self) -> MakeIndex:
        raise NotImplementedError("override make_index in the subclass")

    @pytest.fixture
    def make_loop(self, make_index: MakeIndex) -> MakeLoop:
        return functools.partial(cached_loop, make_index)

    # -- the index alone -----------------------------------------------------------------------------------------

    def test_the_longest_run_of_whole_blocks_is_found(self, make_index: MakeIndex) -> None:
        index, prompt = make_index(16, BLOCK_SIZE), tokens(20)
        assert found(index, prompt) == []
        index.publish(1, prompt[:12], ids(5, 3, 9), 0, BASE)
        assert found(index, prompt) == [5, 3, 9]
        assert found(index, prompt[:11]) == [5, 3]
        assert found(index, prompt[:3]) == []
        index.publish(1, prompt, ids(5, 3, 9, 1, 2), 3, BASE)
        assert found(index, prompt) == [5, 3, 9, 1, 2]
        other = prompt.copy()
        other[9] += 1
        assert found(index, other) == [5, 3]

    def test_equal_tokens_after_different_prefixes_share_nothing(self, make_index: MakeIndex) -> None:
        """Law 17: the parent is part of a block's name."""
        index, tail = make_index(16, BLOCK_SIZE), tokens(4, seed=9)
        index.publish(1, np.concatenate((tokens(4, seed=1), tail)), ids(1, 2), 0, BASE)
        index.publish(2, tokens(4, seed=2), ids(3), 0, BASE)
        assert found(index, np.concatenate((tokens(4, seed=2), tail))) == [3]
        assert found(index, tail) == []

    def test_two_salts_share_nothing(self, make_index: MakeIndex) -> None:
        """Law 17: and neither shares with a request that has none."""
        keys = [BASE, *(BlockKey(salt=salt) for salt in ("a", "b", ""))]
        self.check_apart(make_index, keys)

    def test_two_adapters_share_nothing(self, make_index: MakeIndex) -> None:
        """Laws 17 and 20: nor do two versions of one."""
        keys = [BASE, BlockKey(adapter="a", adapter_version="1"), BlockKey(adapter="a", adapter_version="2")]
        self.check_apart(make_index, [*keys, BlockKey(adapter="b", adapter_version="1"), BlockKey(adapter="a1")])

    def test_a_salt_named_like_an_adapter_shares_nothing(self, make_index: MakeIndex) -> None:
        """Law 17: extras are tagged."""
        keys = [BlockKey(adapter="x"), BlockKey(salt="x"), BlockKey(adapter="x", salt="x")]
        keys += [BlockKey(adapter="x", adapter_version="y"), BlockKey(adapter="x", salt="y"), BlockKey(salt="xy")]
        self.check_apart(make_index, keys)

    def test_multimodal_items_separate_the_blocks_from_theirs_on(self, make_index: MakeIndex) -> None:
        """Law 17: placeholders look alike; what stands there does not."""
        index, prompt = make_index(32, BLOCK_SIZE), tokens(16)
        keys = [BlockKey(multimodal=items) for items in ((), ((6, "cat"),), ((6, "dog"),), ((7, "cat"),))]
        for i, key in enumerate(keys):
            index.publish(i, prompt, ids(*range(4 * i + 1, 4 * i + 5)), 0, key)
        assert [found(index, prompt, key) for key in keys] == [
            [1, 2, 3, 4],
            [1, 6, 7, 8],
            [1, 10, 11, 12],
            [1, 14, 15, 16],
        ]

    def test_known_contents_stay_private(self, make_index: MakeIndex) -> None:
        """And what comes after them follows the block that is known."""
        index, prompt = make_index(16, BLOCK_SIZE), tokens(16)
        index.publish(1, prompt[:8], ids(1, 2), 0, BASE)
        index.publish(2, prompt[:12], ids(3, 4, 5), 0, BASE)
        assert index.is_published(ids(1, 2, 3, 4, 5)).tolist() == [True, True, False, False, True]
        index.publish(2, prompt, ids(3, 4, 5, 6), 3, BASE)
        assert found(index, prompt) == [1, 2, 5, 6]

    def test_a_run_ends_at_a_forgotten_block(self, make_index: MakeIndex) -> None:
        index, prompt = make_index(16, BLOCK_SIZE), tokens(16)
        index.publish(1, prompt, ids(1, 2, 3, 4), 0, BASE)
        index.forget(ids(3))
        assert found(index, prompt) == [1, 2]
        assert index.is_published(ids(1, 2, 3)).tolist() == [True, True, False]
        index.end(1)
        index.forget(ids(4))
        index.publish(2, prompt, ids(1, 2, 4, 3), 2, BASE)
        assert found(index, prompt) == [1, 2, 4, 3]

    def test_a_block_that_is_used_again_means_its_new_contents(self, make_index: MakeIndex) -> None:
        index = make_index(16, BLOCK_SIZE)
        index.publish(1, tokens(8, seed=1), ids(1, 2), 0, BASE)
        index.end(1)
        index.forget(ids(2, 1))
        index.publish(2, tokens(8, seed=2), ids(2, 1), 0, BASE)
        assert found(index, tokens(8, seed=1)) == []
        assert found(index, tokens(8, seed=2)) == [2, 1]

    def test_a_sequence_goes_on_where_it_matched(self, make_index: MakeIndex) -> None:
        index, prompt = make_index(16, BLOCK_SIZE), tokens(20)
        index.publish(1, prompt[:8], ids(1, 2), 0, BASE)
        index.end(1)
        assert index.match(2, prompt, BASE).blocks.tolist() == [1, 2]
        index.publish(2, prompt[:12], ids(1, 2, 3), 2, BASE)
        index.publish(2, prompt, ids(1, 2, 3, 4, 5), 3, BASE)
        index.end(2)
        assert found(index, prompt) == [1, 2, 3, 4, 5]

    def test_rows_at_once_are_rows_one_after_another(self, make_index: MakeIndex) -> None:
        """Law 17: rows of a step, some with equal contents, several new blocks, or items where a block is filled later."""
        random = np.random.default_rng(0)
        table = np.stack([tokens(40, seed=row // 2) for row in range(8)])  # pairs that are equal, or nearly
        table[5, 30] += 1
        blocks = np.arange(1, 81, dtype=np.int32).reshape(8, 10)
        keys = [BASE, BASE, BASE, BlockKey(salt="s"), *[BlockKey(adapter="a", adapter_version="1")] * 2]
        keys += [BlockKey(multimodal=((6, "cat"),)), BlockKey(multimodal=((6, "dog"),))]
        one, other = make_index(81, BLOCK_SIZE), make_index(81, BLOCK_SIZE)
        done = np.zeros(8, np.int32)
        blocks[1, :2] = blocks[0, :2]  # a hit: both go on from the same block
        done[:2] = 2
        for index in (one, other):
            index.publish(100, table[0, : 2 * BLOCK_SIZE], blocks[0, :2], 0, BASE)
        while (done < 10).any():
            rows = np.flatnonzero((random.random(8) < 0.7) & (done < 10)).astype(np.int32)
            ends = np.minimum(done[rows] + random.choice([1, 1, 1, 3], rows.size), 10).astype(np.int32)
            names, some = 100 + rows.astype(np.int64), [keys[row] for row in rows.tolist()]
            filled = FilledRows(rows, done[rows], ends, names, some, table, blocks, BLOCK_SIZE)
            one.publish_rows(filled)
            PrefixIndex.publish_rows(other, filled)
            done[rows] = ends
            for row, key in enumerate(keys):
                assert len(found(one, table[row], key)) == len(found(other, table[row], key)) >= done[row]
        assert one.is_published(blocks.ravel()).sum() == other.is_published(blocks.ravel()).sum()

    def test_reset_forgets_all_or_one_adapter(self, make_index: MakeIndex) -> None:
        """Law 20."""
        index, prompt = make_index(32, BLOCK_SIZE), tokens(8)
        keys = [
            BASE,
            BlockKey(adapter="a", adapter_version="1"),
            BlockKey(adapter="a", salt="s"),
            BlockKey(adapter="b"),
        ]
        for i, key in enumerate(keys):
            index.publish(i, prompt, ids(2 * i + 1, 2 * i + 2), 0, key)
        assert sorted(index.reset("a").tolist()) == [3, 4, 5, 6]
        assert [len(found(index, prompt, key)) for key in keys] == [2, 0, 0, 2]
        assert sorted(index.reset().tolist()) == [1, 2, 7, 8]
        assert not index.is_published(np.arange(32, dtype=np.int32)).any()
        assert index.reset().size == 0

    def check_apart(self, make_index: MakeIndex, keys: Sequence[BlockKey]) -> None:
        """The same tokens under each key are blocks of their own."""
        index, prompt = make_index(2 * len(keys) + 1, BLOCK_SIZE), tokens(8)
        for i, key in enumerate(keys):
            assert found(index, prompt, key) == [], f"{key} finds another's blocks"
            index.publish(i, prompt, ids(2 * i + 1, 2 * i + 2), 0, key)
        assert [found(index, prompt, key) for key in keys] == [[2 * i + 1, 2 * i + 2] for i in range(len(keys))]

    # -- in the loop ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("num_drafts", [0, 3])
    def test_tokens_do_not_depend_on_the_cache(self, make_loop: MakeLoop, depth: int, num_drafts: int) -> None:
        """Laws 14, 17 and 19: hits, partial hits, evictions, preemptions, reloads and resets happen, and no token changes."""
        loop = make_loop(depth=depth, num_drafts=num_drafts, num_blocks=48, max_num_seqs=6)
        random = np.random.default_rng(depth + num_drafts)
        expected = {}
        for key in range(150):
            adapter = (None, None, None, "blue", "red")[random.integers(5)]
            version = None if adapter is None else f"{adapter}@{loop.adapters.versions[adapter]}"
            prompt = shared_prompt(random)
            length = int(random.integers(1, 50))
            expected[key] = chained_tokens(prompt, length, version=version)
            salt = (None, None, None, "blue", "s")[random.integers(5)]
            loop.core.add(free_request(key, prompt, length, adapter=adapter, cache_salt=salt))
            if key % 30 == 29:
                loop.run()
                loop.reload("blue", str(key))
            elif key % 50 == 45:
                loop.core.reset_prefix_cache()
            for _ in range(int(random.integers(0, 4))):
                loop.step()
        loop.run()
        assert loop.answers.tokens == expected
        check_at_rest(loop)
        stats, index = loop.core.stats(), loop.index
        happened = (index.num_hits, index.num_partial_hits, index.num_evicted, stats.num_preemptions, stats.prefix_hits)
        assert min(happened) > 0, f"the workload shows nothing: {happened}"
        assert not num_drafts or 0 < stats.num_accepted < stats.num_drafted

    def test_only_verified_blocks_are_published(self, make_loop: MakeLoop) -> None:
        """Law 17: drafts never."""
        loop = make_loop(num_drafts=3, num_blocks=80)
        for key in range(12):
            loop.core.add(free_request(key, tokens(9, seed=key).tolist(), 30))
        loop.run()
        assert 0 < loop.core.stats().num_accepted < loop.core.stats().num_drafted
        for key in range(12):
            assert loop.answers.tokens[key] == chained_tokens(tokens(9, seed=key).tolist(), 30)

    def test_a_block_in_use_is_never_evicted(self, make_loop: MakeLoop) -> None:
        """Laws 14 and 19: one of two sequences that share a prefix ends, and others want its blocks."""
        loop, prefix = make_loop(num_blocks=30), tokens(24).tolist()
        loop.core.add(free_request(0, prefix, 4))
        loop.run()
        loop.core.add(free_request(1, [*prefix, 1], 60))
        loop.core.add(free_request(2, [*prefix, 2], 2))
        for key in range(3, 20):
            loop.core.add(free_request(key, tokens(14, seed=key).tolist(), 6))
        loop.run()
        assert loop.index.num_evicted > 0
        assert loop.answers.tokens[1] == chained_tokens([*prefix, 1], 60)
        check_at_rest(loop)

    @pytest.mark.parametrize("depth", [0, 1])
    def test_a_reload_under_running_rows_publishes_nothing_of_theirs(self, make_loop: MakeLoop, depth: int) -> None:
        """Law 20: what a row holds across a reload comes from two versions."""
        loop, prompt = make_loop(max_num_batched_tokens=6, depth=depth), tokens(18).tolist()
        loop.core.add(free_request(0, prompt, 20, adapter="blue"))
        loop.step()
        loop.reload("blue", "2")
        loop.run()
        assert loop.core.stats().num_blocks_idle == 0
        loop.core.add(free_request(1, prompt, 20, adapter="blue"))
        loop.run()
        assert loop.answers.tokens[1] == chained_tokens(prompt, 20, version="blue@2")
        loop.close()

    def test_tails_go_before_heads(self, make_loop: MakeLoop) -> None:
        """Law 19: least recently used first, and of one sequence the last block first."""
        loop = make_loop(num_blocks=24)
        pool = loop.core.pool
        old, new = tokens(40, seed=1), tokens(40, seed=2)
        branch = np.concatenate((new[:32], (new[32:36] + 1) % VOCAB_SIZE))
        for key, prompt in enumerate((old, new, branch)):
            loop.core.add(free_request(key, prompt.tolist(), 1))
            loop.run()
        pool.take(3)
        assert (pool.allocator.num_free, pool.allocator.num_idle) == (0, 21)
        left = []
        for _ in range(21):
            pool.take(1)
            left.append(tuple(len(found(loop.index, prompt)) for prompt in (old, new, branch)))
        assert left == [
            *((10 - i, 10, 9) for i in range(1, 11)),
            *((0, 9, 9), (0, 8, 9), (0, 8, 8)),
            *((0, i, i) for i in range(7, -1, -1)),
        ]


def shared_prompt(random: np.random.Generator) -> list[int]:
    """A prompt that begins like others: a prefix of one of three long ones, and something of its own. Some have a tail
    that others have after another head.
    """
    head = tokens(32, seed=int(random.integers(3)))
    if random.random() < 0.2:
        return [*head[:8].tolist(), *tokens(16, seed=77).tolist()]
    own = random.integers(0, VOCAB_SIZE, int(random.integers(1, 10)))
    return [*head[: int(random.integers(0, 33))].tolist(), *own.tolist()]


def check_at_rest(loop: CachedLoop) -> None:
    """Law 14: nothing is in use, and after a reset nothing is left."""
    loop.core.pool.check()
    assert loop.core.stats().num_blocks_in_use == 0
    assert not loop.index.live, "a sequence that is gone was not ended"
    loop.core.reset_prefix_cache()
    assert loop.core.stats().num_blocks_idle == 0
    assert not loop.index.said
    loop.close()
