"""The conformance kit of KV allocators: subclass `AllocatorConformance` and override `make_allocator`.

Its reference keeps three lists; the kit is tested by mutants of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from enginectl.errors import PoolError
from enginectl.interfaces.kv import BlockIds, KVAllocator

MakeAllocator = Callable[[int], KVAllocator]
"""`make(num_blocks)`, the null block included."""

_NONE = np.zeros(0, np.int32)


def block_ids(*ids: int) -> BlockIds:
    """Ids as an array."""
    return np.array(ids, np.int32)


class ReferenceAllocator(KVAllocator):
    """Three lists, searched from the front. Slow, obviously right."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.idle: list[int] = []
        self.out: list[int] = []

    @property
    def num_free(self) -> int:
        """Length of the list."""
        return len(self.free)

    @property
    def num_idle(self) -> int:
        """Length of the list."""
        return len(self.idle)

    def take(self, count: int) -> tuple[BlockIds, BlockIds]:
        """From the free list, then from the idle list."""
        if count > len(self.free) + len(self.idle):
            raise PoolError(f"{count} blocks wanted")
        ids = self.free[:count]
        evicted = self.idle[: count - len(ids)]
        self.free, self.idle = self.free[len(ids) :], self.idle[len(evicted) :]
        self.out += ids + evicted
        return block_ids(*ids, *evicted), block_ids(*evicted)

    def put_free(self, ids: BlockIds) -> None:
        """Out to free."""
        self.free += self._leave(self.out, ids)

    def put_idle(self, ids: BlockIds) -> None:
        """Out to idle."""
        self.idle += self._leave(self.out, ids)

    def revive(self, ids: BlockIds) -> None:
        """Idle to out."""
        self.out += self._leave(self.idle, ids)

    def forget(self, ids: BlockIds) -> None:
        """Idle to free."""
        self.free += self._leave(self.idle, ids)

    @staticmethod
    def _leave(blocks: list[int], ids: BlockIds) -> list[int]:
        leaving: list[int] = ids.tolist()
        if len(set(leaving)) != len(leaving) or not set(leaving) <= set(blocks):
            raise PoolError(f"{leaving} are not all in {blocks}")
        for block in leaving:
            blocks.remove(block)
        return leaving


class _Books:
    """Where every block must be, as the caller knows it."""

    def __init__(self, num_blocks: int) -> None:
        self.allocator_size = num_blocks - 1
        self.out: list[int] = []
        self.idle: list[int] = []

    def check(self, allocator: KVAllocator) -> None:
        """Counts agree, and no block is missing."""
        free = self.allocator_size - len(self.out) - len(self.idle)
        assert (allocator.num_free, allocator.num_idle) == (free, len(self.idle)), "free + idle + out = pool"


class AllocatorConformance:
    """The checks. is_lru: idle blocks are evicted in the order in which they became idle, over all calls."""

    is_lru = True

    @pytest.fixture
    def make_allocator(self) -> MakeAllocator:
        """How to make one."""
        raise NotImplementedError("override the `make_allocator` fixture")

    def test_every_block_is_handed_out_once(self, make_allocator: MakeAllocator) -> None:
        """All but the null block, in arrays of int32; nothing is evicted while blocks are free."""
        allocator = make_allocator(9)
        assert (allocator.num_free, allocator.num_idle) == (8, 0)
        found: list[int] = []
        for count in (1, 3, 0, 4):
            ids, evicted = allocator.take(count)
            assert ids.dtype == np.int32
            assert (ids.size, evicted.size) == (count, 0)
            found += ids.tolist()
        assert sorted(found) == list(range(1, 9))
        assert allocator.num_free == 0

    def test_exhaustion_raises_and_changes_nothing(self, make_allocator: MakeAllocator) -> None:
        """Free and idle blocks count as available together, and one more is too many."""
        allocator = make_allocator(7)
        ids, _ = allocator.take(4)
        allocator.put_idle(ids[:2])
        with pytest.raises(PoolError):
            allocator.take(5)
        assert (allocator.num_free, allocator.num_idle) == (2, 2)
        taken, evicted = allocator.take(4)
        assert sorted((*taken.tolist(), *ids[2:].tolist())) == list(range(1, 7))
        assert sorted(evicted.tolist()) == sorted(ids[:2].tolist())

    def test_free_blocks_go_before_idle_ones(self, make_allocator: MakeAllocator) -> None:
        """Worthless contents are overwritten first."""
        allocator = make_allocator(7)
        ids, _ = allocator.take(6)
        allocator.put_idle(ids[:3])
        allocator.put_free(ids[3:])
        taken, evicted = allocator.take(4)
        assert set(ids[3:].tolist()) < set(taken.tolist())
        assert evicted.size == 1
        assert evicted[0] in taken

    def test_idle_blocks_are_evicted_in_the_order_given(self, make_allocator: MakeAllocator) -> None:
        """Tails before heads, as `put_idle` was told; blocks that were idle before go first if it is LRU."""
        allocator = make_allocator(9)
        ids, _ = allocator.take(8)
        first, second = ids[[5, 2, 7]], ids[[0, 6]]
        allocator.put_idle(first)
        if self.is_lru:
            allocator.put_idle(second)
        evicted = [int(allocator.take(1)[1][0]) for _ in range(3)]
        assert evicted == first.tolist()
        if self.is_lru:
            _, rest = allocator.take(2)
            assert rest.tolist() == second.tolist()

    def test_a_revived_block_is_not_evicted(self, make_allocator: MakeAllocator) -> None:
        """It is in use; idle again, it is the newest."""
        allocator = make_allocator(4)
        ids, _ = allocator.take(3)
        allocator.put_idle(ids)
        allocator.revive(ids[:1])
        assert allocator.num_idle == 2
        allocator.put_idle(ids[:1])
        _, evicted = allocator.take(3)
        assert sorted(evicted.tolist()) == sorted(ids.tolist())
        if self.is_lru:
            assert evicted.tolist() == [*ids[1:].tolist(), ids[0]]

    def test_forgotten_blocks_are_free(self, make_allocator: MakeAllocator) -> None:
        """A reset: they are handed out again, and are not evictions."""
        allocator = make_allocator(6)
        ids, _ = allocator.take(5)
        allocator.put_idle(ids)
        allocator.forget(ids[1:4])
        assert (allocator.num_free, allocator.num_idle) == (3, 2)
        taken, evicted = allocator.take(3)
        assert sorted(taken.tolist()) == sorted(ids[1:4].tolist())
        assert evicted.size == 0

    @pytest.mark.parametrize("method", ["put_free", "put_idle", "revive", "forget"])
    @pytest.mark.parametrize("wrong", ["free", "other", "null", "twice"])
    def test_a_block_in_the_wrong_state_raises_and_changes_nothing(
        self, make_allocator: MakeAllocator, method: str, wrong: str
    ) -> None:
        """Double frees, the null block, one block named twice, also among others that are right."""
        allocator = make_allocator(9)
        ids, _ = allocator.take(6)
        allocator.put_idle(ids[4:])
        out, idle = ids[:4], ids[4:]
        (free,) = set(range(1, 9)) - set(ids.tolist()) - {int(allocator.take(1)[0][0])}
        right, other = (out, idle) if method.startswith("put") else (idle, out)
        bad = {"free": block_ids(free), "other": other[:1], "null": block_ids(0), "twice": right[:1]}[wrong]
        before = (allocator.num_free, allocator.num_idle)
        with pytest.raises(PoolError):
            getattr(allocator, method)(np.concatenate((right[:1], bad)))
        assert (allocator.num_free, allocator.num_idle) == before
        getattr(allocator, method)(right[:1])  # it is where it was

    def test_empty_calls_change_nothing(self, make_allocator: MakeAllocator) -> None:
        """Core calls with empty arrays where there is nothing to do."""
        allocator = make_allocator(4)
        for method in (allocator.put_free, allocator.put_idle, allocator.revive, allocator.forget):
            method(_NONE)
        assert allocator.take(0)[0].size == 0
        assert (allocator.num_free, allocator.num_idle) == (3, 0)

    @pytest.mark.parametrize("seed", range(3))
    def test_no_block_is_lost_or_doubled(self, make_allocator: MakeAllocator, seed: int) -> None:
        """Law 14: free + idle + out = pool over thousands of calls, and evictions are idle blocks."""
        random = np.random.default_rng(seed)
        allocator, books = make_allocator(24), _Books(24)
        for _ in range(1500):
            self._act(random, allocator, books)
            books.check(allocator)

    def _act(self, random: np.random.Generator, allocator: KVAllocator, books: _Books) -> None:
        action = int(random.integers(5))
        if action <= 1:
            available = books.allocator_size - len(books.out)
            ids, evicted = allocator.take(int(random.integers(0, available + 1)) if available else 0)
            assert set(evicted.tolist()) <= set(books.idle) & set(ids.tolist()), "what is evicted was idle"
            if self.is_lru:
                assert evicted.tolist() == books.idle[: evicted.size], "the longest idle goes first"
            assert not set(ids.tolist()) & set(books.out), "a block in use was handed out"
            books.idle = [block for block in books.idle if block not in evicted]
            assert not set(ids.tolist()) & set(books.idle), "an idle block was handed out without a word"
            books.out += ids.tolist()
        elif action == 2:
            allocator.put_free(_some(random, books.out))
        elif action == 3:
            ids = _some(random, books.out)
            allocator.put_idle(ids)
            books.idle += ids.tolist()
        elif random.integers(2):
            ids = _some(random, books.idle)
            allocator.revive(ids)
            books.out += ids.tolist()
        else:
            allocator.forget(_some(random, books.idle))


def _some(random: np.random.Generator, blocks: list[int]) -> BlockIds:
    """Take some out of the list, in any order."""
    count = int(random.integers(0, len(blocks) + 1))
    chosen: Sequence[int] = random.permutation(blocks)[:count].tolist() if blocks else []
    for block in chosen:
        blocks.remove(block)
    return block_ids(*chosen)
